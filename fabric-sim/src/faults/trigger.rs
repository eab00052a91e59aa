//! What happens when a fault fires, and faults that last.

use super::action::{FaultAction, FaultSubject, ROUTER};
use super::{FaultDeadline, FaultScheduler};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::Opportunity;
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::{PartitionDirection, RaceOrder};

/// A fault that lasts.
#[derive(Clone, Debug)]
pub(super) struct FaultWindow {
    undo: Vec<FaultUndo>,
    /// It is never ended.
    pub(super) for_good: bool,
    pub(super) pair: (Option<u16>, Option<u16>),
}

#[derive(Clone, Debug)]
enum FaultUndo {
    Act(FaultAction),
    Appear(u16, u16),
    Lag(u16, u16, Nanos),
}

/// An instance starts anew when the fault is over.
fn undo_by_restart(instance: u16) -> Vec<FaultUndo> {
    let back_after = Some(Nanos::from_ms(1));
    vec![FaultUndo::Act(FaultAction::Crash { instance, back_after, becomes: None })]
}

impl FaultScheduler {
    /// A fault fires: it does what it does, or waits for something to hit.
    pub(super) fn fire(&mut self, now: Nanos, index: usize, spot: Option<&FaultSubject>) {
        let kind = self.plans[index].kind();
        match kind {
            FaultKind::Partition
            | FaultKind::OneWayPermanent
            | FaultKind::HalfOpen
            | FaultKind::QueueFull
            | FaultKind::SlowLink => self.open_window(now, index, spot),
            FaultKind::QpError => self.kill(now, index, spot),
            FaultKind::Abort | FaultKind::BothAbort => {
                let client = spot.and_then(|spot| spot.client);
                let (after, both) = (self.plans[index].delay(), kind == FaultKind::BothAbort);
                self.act(FaultAction::Abort { client, after, both });
                self.hit(now, index, spot.map(|spot| spot.from), spot.and_then(|spot| spot.to));
            }
            FaultKind::RouterRestart => {
                let lasts = self.plans[index].draw("lasts", self.plans[index].fault.lasts);
                let back_after = lasts.unwrap_or(Nanos::from_ms(100));
                self.act(FaultAction::CrashRouter { back_after });
                self.hit(now, index, Some(ROUTER), None);
                self.last = self.last.max(now + back_after);
            }
            FaultKind::StaleRegistration => {
                let sender = spot.map(|spot| spot.from).filter(|from| *from != ROUTER);
                for instance in self.plans[index].target.or(sender) {
                    let lasts = self.plans[index].fault.lasts;
                    let after = self.plans[index].draw("lasts", lasts).unwrap_or(Nanos::ZERO);
                    self.act(FaultAction::StaleRegistration { instance, after });
                    self.hit(now, index, Some(instance), None);
                }
            }
            _ if kind.schema().opportunity == Opportunity::Step => {
                self.hit_instances(now, index, spot)
            }
            _ => {
                debug_assert!(Self::waits(&self.plans[index]));
                self.plans[index].arm();
            }
        }
    }

    /// All queue pairs between two instances go to error.
    fn kill(&mut self, now: Nanos, index: usize, spot: Option<&FaultSubject>) {
        let plan = &self.plans[index];
        let pair = match spot.and_then(|spot| Some((spot.from, spot.to?))) {
            Some((a, b)) if plan.from.has(a) && plan.to.has(b) && a != ROUTER && b != ROUTER => {
                Some((a, b))
            }
            _ => self.pairs(index, spot).first().copied(),
        };
        let Some((a, b)) = pair else { return self.plans[index].arm() };
        self.act(FaultAction::KillSessions { a, b });
        self.hit(now, index, Some(a), Some(b));
    }

    /// Something happens to an instance.
    fn hit_instances(&mut self, now: Nanos, index: usize, spot: Option<&FaultSubject>) {
        let here = spot.map(|spot| spot.from).filter(|from| *from != ROUTER);
        let default = here.or_else(|| self.any_instance(index, None, 0));
        for instance in self.plans[index].target.or(default) {
            self.hit_instance(now, index, instance);
        }
    }

    fn hit_instance(&mut self, now: Nanos, index: usize, instance: u16) {
        let plan = &self.plans[index];
        let kind = plan.kind();
        let lasts = plan.draw("lasts", plan.fault.lasts);
        match kind {
            FaultKind::Crash => {
                self.act(FaultAction::Crash { instance, back_after: None, becomes: None });
            }
            FaultKind::Restart
            | FaultKind::RankCrash
            | FaultKind::RestartOtherGeometry
            | FaultKind::ClockBack => {
                let becomes = plan.fault.becomes.clone();
                let back_after = Some(lasts.unwrap_or(Nanos::from_ms(100)));
                if kind == FaultKind::ClockBack {
                    self.act(FaultAction::ClockBack { instance });
                }
                self.act(FaultAction::Crash { instance, back_after, becomes });
                self.last = self.last.max(now + lasts.unwrap_or(Nanos::ZERO));
            }
            FaultKind::Drain => {
                self.act(FaultAction::Drain { instance });
                self.last_for(now, undo_by_restart(instance), (Some(instance), None), lasts);
            }
            FaultKind::RoleSwitch => self.switch_role(now, index, instance, lasts),
            FaultKind::LegCut => {
                let noticed = plan.delay();
                self.act(FaultAction::CutLeg { instance, noticed });
            }
            FaultKind::Preempt => self.act(FaultAction::Preempt { instance }),
            FaultKind::Pause => {
                let undo = self.switch(|paused| FaultAction::Pause { instance, paused });
                self.last_for(now, undo, (Some(instance), None), lasts);
            }
            FaultKind::PortDown => {
                let rank = plan.fault.rank;
                let undo = self.switch(|down| FaultAction::Port { instance, rank, down });
                self.last_for(now, undo, (Some(instance), None), lasts);
            }
            FaultKind::RankLag => {
                let (rank, by) = (plan.fault.rank.unwrap_or(0), plan.delay());
                self.lags.push((instance, rank, by));
                let undo = vec![FaultUndo::Lag(instance, rank, by)];
                self.last_for(now, undo, (Some(instance), None), lasts);
            }
            _ => {}
        }
        self.hit(now, index, Some(instance), None);
    }

    fn switch_role(&mut self, now: Nanos, index: usize, instance: u16, lasts: Option<Nanos>) {
        let plan = &self.plans[index];
        let registers = match plan.fault.first {
            RaceOrder::Early => true,
            RaceOrder::Late => false,
            RaceOrder::Either => plan.coin(),
        };
        self.act(FaultAction::SwitchRole { instance, registers });
        if registers {
            let undo = vec![FaultUndo::Act(FaultAction::EndSwitch { instance })];
            return self.last_for(now, undo, (Some(instance), None), lasts);
        }
        self.act(FaultAction::Crash { instance, back_after: lasts, becomes: None });
        self.last = self.last.max(now + lasts.unwrap_or(Nanos::ZERO));
    }

    /// Switches something on; how it is switched off.
    fn switch(&mut self, action: impl Fn(bool) -> FaultAction) -> Vec<FaultUndo> {
        self.act(action(true));
        vec![FaultUndo::Act(action(false))]
    }

    /// An instance lives, and can move nothing.
    pub(super) fn disable_transfers(&mut self, now: Nanos, index: usize, instance: u16) {
        let plan = &self.plans[index];
        let lasts = plan.draw("lasts", plan.fault.lasts);
        self.last_for(now, undo_by_restart(instance), (Some(instance), None), lasts);
        self.hit(now, index, Some(instance), None);
    }

    /// Ordered pairs that a fault of links concerns.
    fn pairs(&self, index: usize, spot: Option<&FaultSubject>) -> Vec<(u16, u16)> {
        let plan = &self.plans[index];
        let cuts = plan.kind() == FaultKind::Partition;
        let node = plan.fault.direction == PartitionDirection::Node;
        if cuts && (node || plan.target.0.is_some()) {
            let everyone = (0..self.roles.len() as u16).chain([ROUTER]);
            let mut pairs = Vec::new();
            for one in plan.target.or(spot.map(|spot| spot.from)) {
                let others = everyone.clone().filter(|other| *other != one);
                pairs.extend(others.flat_map(|other| [(one, other), (other, one)]));
            }
            return pairs;
        }
        let default = |instance: Option<u16>, role, salt| {
            instance.or_else(|| self.any_instance(index, Some(role), salt))
        };
        let from = plan.from.or(default(spot.map(|spot| spot.from), Role::Prefill, 1));
        let to = plan.to.or(default(spot.and_then(|spot| spot.to), Role::Decode, 2));
        let both = cuts && plan.fault.direction == PartitionDirection::Symmetric;
        let mut pairs = Vec::new();
        for (from, to) in from.iter().flat_map(|from| to.iter().map(move |to| (*from, *to))) {
            if from != to {
                pairs.push((from, to));
                pairs.extend(both.then_some((to, from)));
            }
        }
        pairs
    }

    /// A fault of links or queues begins.
    pub(super) fn open_window(&mut self, now: Nanos, index: usize, spot: Option<&FaultSubject>) {
        let plan = &self.plans[index];
        let (kind, factor) = (plan.kind(), plan.fault.factor);
        let lasts = plan.draw("lasts", plan.fault.lasts);
        if kind == FaultKind::QueueFull {
            let default = spot.map(|spot| spot.from).filter(|from| *from != ROUTER);
            let default = default.or_else(|| self.any_instance(index, None, 0));
            for instance in self.plans[index].from.or(default) {
                let undo = self.switch(|full| FaultAction::QueueFull { instance, full });
                self.last_for(now, undo, (Some(instance), None), lasts);
                self.hit(now, index, Some(instance), None);
            }
            return;
        }
        for (from, to) in self.pairs(index, spot) {
            let mut undo = match kind {
                FaultKind::SlowLink => self.switch(|slow| FaultAction::LinkRate {
                    from,
                    to,
                    divided_by: if slow { factor } else { 1 },
                }),
                FaultKind::Partition => self.switch(|cut| FaultAction::Cut { from, to, cut }),
                _ => Vec::new(),
            };
            if kind != FaultKind::SlowLink {
                *self.vanish.entry((from, to)).or_default() += 1;
                undo.push(FaultUndo::Appear(from, to));
            }
            let lasts = lasts.filter(|_| kind != FaultKind::OneWayPermanent);
            self.last_for(now, undo, (Some(from), Some(to)), lasts);
            self.hit(now, index, Some(from), Some(to));
        }
    }

    fn last_for(
        &mut self,
        now: Nanos,
        undo: Vec<FaultUndo>,
        pair: (Option<u16>, Option<u16>),
        lasts: Option<Nanos>,
    ) {
        self.serial += 1;
        let serial = self.serial;
        let for_good = lasts.is_none();
        self.windows.insert(serial, FaultWindow { undo, for_good, pair });
        if let Some(lasts) = lasts {
            self.schedule(now + lasts, FaultDeadline::End(serial));
        }
    }

    pub(super) fn close_window(&mut self, now: Nanos, serial: u64) {
        let Some(window) = self.windows.remove(&serial) else { return };
        self.last = self.last.max(now);
        for undo in window.undo {
            match undo {
                FaultUndo::Act(action) => {
                    if !self.is_still_on(&action) {
                        self.act(action);
                    }
                }
                FaultUndo::Appear(from, to) => {
                    if let Some(count) = self.vanish.get_mut(&(from, to)) {
                        *count -= 1;
                        if *count == 0 {
                            self.vanish.remove(&(from, to));
                        }
                    }
                }
                FaultUndo::Lag(instance, rank, by) => {
                    let found = self.lags.iter().position(|lag| *lag == (instance, rank, by));
                    found.map(|at| self.lags.swap_remove(at));
                }
            }
        }
    }

    /// True if another window of the same kind holds the same thing.
    fn is_still_on(&self, end: &FaultAction) -> bool {
        let same = |undo: &FaultUndo| matches!(undo, FaultUndo::Act(action) if action == end);
        self.windows.values().any(|window| window.undo.iter().any(same))
    }

    /// True if frames of this pair vanish now.
    pub(super) fn vanishes(&self, spot: &FaultSubject) -> bool {
        spot.to.is_some_and(|to| self.vanish.contains_key(&(spot.from, to)))
    }

    /// What lasts: an instance, or an ordered pair; without the router.
    pub fn lasting(&self) -> impl Iterator<Item = (u16, Option<u16>)> + '_ {
        self.windows.values().filter_map(|window| match window.pair {
            (Some(ROUTER), to) => Some((to?, None)),
            (Some(from), to) => Some((from, to.filter(|to| *to != ROUTER))),
            (None, _) => None,
        })
    }
}
