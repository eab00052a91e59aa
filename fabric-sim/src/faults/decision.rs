//! What faults do to single operations, frames and legs, and which fault wins when several hit the
//! same one.

use super::FaultScheduler;
use super::action::{FaultAction, FaultSubject, LegDecision, ROUTER};
use super::plan::{FaultPlan, TriggerCondition};
use crate::dma::{BytesDecision, CompletionDecision, OpDecision};
use crate::net::FrameDecision;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{FabricError, Landed};
use kvferry_scenarios::lists::{FaultKind, MessageName, TriggerEvent};
use kvferry_scenarios::run::RaceOrder;

/// How bad the end of an operation's bytes is; the worst wins.
const fn rank(bytes: &BytesDecision) -> u8 {
    match bytes {
        BytesDecision::Whole => 0,
        BytesDecision::Overtaken { .. } => 1,
        BytesDecision::Fails { landed: Landed::All, .. } => 2,
        BytesDecision::Fails { landed: Landed::None, .. } => 3,
        BytesDecision::Fails { landed: Landed::Unknown, .. } => 4,
        BytesDecision::Missing => 5,
    }
}

/// Adds what one more fault does to an operation. Delays add up; the worse decision about the bytes
/// and of the completion wins; between equals the first fault of the file.
fn combine(fate: &mut OpDecision, more: OpDecision) {
    fate.delay = fate.delay + more.delay;
    fate.ack_delay = fate.ack_delay + more.ack_delay;
    fate.not_before = fate.not_before.max(more.not_before);
    fate.kill_session |= more.kill_session;
    if rank(&more.bytes) > rank(&fate.bytes) {
        fate.bytes = more.bytes;
    }
    fate.ack = fate.ack.max(more.ack);
}

/// Adds what one more fault does to a frame. Loss wins over all; delays add up; the latest copy
/// wins, and the first damage and the first foreign frame of the file.
fn combine_frame(fate: &mut FrameDecision, more: FrameDecision) {
    fate.drop |= more.drop;
    fate.reorder |= more.reorder;
    fate.delay = fate.delay + more.delay;
    fate.duplicate = fate.duplicate.max(more.duplicate);
    fate.damage = fate.damage.or(more.damage);
    fate.foreign = fate.foreign.or(more.foreign);
}

fn fails(cause: FabricError, late: Option<Nanos>) -> BytesDecision {
    BytesDecision::Fails { cause, landed: Landed::Unknown, late }
}

/// The cause of operations that fail by injection alone.
fn injected() -> FabricError {
    FabricError::Backend("injected failure".into())
}

/// What an operation fault does to the operation that it hits.
fn op_effect(plan: &FaultPlan) -> OpDecision {
    let delay = plan.delay();
    let late = plan.coin().then_some(delay);
    let none = OpDecision::default();
    match plan.kind() {
        FaultKind::QpError => {
            OpDecision { bytes: fails(FabricError::QueuePair, late), kill_session: true, ..none }
        }
        FaultKind::AckLost => OpDecision { ack: CompletionDecision::Lost, ..none },
        FaultKind::CompletionLost => OpDecision { ack: CompletionDecision::Never, ..none },
        FaultKind::CompletionReorder => OpDecision { ack_delay: delay, ..none },
        FaultKind::NotifyOvertakes | FaultKind::DoneOutOfOrder => {
            OpDecision { bytes: BytesDecision::Overtaken { by: delay }, ..none }
        }
        FaultKind::Partial if plan.coin() => OpDecision { delay, ..none },
        FaultKind::Partial => OpDecision { delay, bytes: fails(injected(), None), ..none },
        FaultKind::LateLanding => {
            OpDecision { bytes: fails(FabricError::AckTimeout, Some(delay)), ..none }
        }
        FaultKind::NoCopy => OpDecision { bytes: BytesDecision::Missing, ..none },
        FaultKind::SiblingFailure => OpDecision { bytes: fails(injected(), late), ..none },
        _ => none,
    }
}

impl FaultScheduler {
    /// What becomes of an operation that was accepted; also counts it as `op.posted`, so the world
    /// does not tell that event. `Spot::nth` counts the operations of the rank.
    pub fn decide_op(&mut self, now: Nanos, spot: &FaultSubject) -> OpDecision {
        self.on_event(now, TriggerEvent::OpPosted, spot);
        let mut fate = OpDecision::default();
        for index in 0..self.of_ops.len() {
            let index = self.of_ops[index];
            if self.plans[index].kind() == FaultKind::DoneOutOfOrder && !self.starts_early(index) {
                continue;
            }
            let race = spot.lease.filter(|end| *end > now);
            if self.plans[index].kind() == FaultKind::ExpiryRace && race.is_none() {
                continue;
            }
            if !self.hits(index, spot) {
                continue;
            }
            let effect = match self.plans[index].kind() {
                FaultKind::QueueFull | FaultKind::SlowLink => {
                    self.open_window(now, index, Some(spot));
                    continue;
                }
                FaultKind::ExpiryRace => {
                    let not_before = race.unwrap_or(now);
                    self.race(index, spot, not_before);
                    OpDecision { not_before, ..OpDecision::default() }
                }
                _ => op_effect(&self.plans[index]),
            };
            if effect.kill_session
                && let Some(to) = spot.to
            {
                self.act(FaultAction::KillSessions { a: spot.from, b: to });
            }
            combine(&mut fate, effect);
            self.hit(now, index, Some(spot.from), spot.to);
        }
        fate
    }

    /// True if the report of completion comes before the bytes, not after them.
    fn starts_early(&self, index: usize) -> bool {
        match self.plans[index].fault.first {
            RaceOrder::Early => true,
            RaceOrder::Late => false,
            RaceOrder::Either => self.plans[index].coin(),
        }
    }

    /// A read will be reported in the instant in which its lease ends, and the lease is not
    /// renewed.
    fn race(&mut self, index: usize, spot: &FaultSubject, at: Nanos) {
        let done_first = !self.starts_early(index);
        self.act(FaultAction::Race { instance: spot.from, at, done_first });
        if let Some(to) = spot.to {
            self.raced.insert((spot.from, to), at);
        }
    }

    /// True if the memory of `spot.rank` of `spot.from` cannot be registered. `Spot::nth` counts
    /// the incarnations of the instance.
    pub fn register_fails(&mut self, now: Nanos, spot: &FaultSubject) -> bool {
        let mut fails = false;
        for at in 0..self.of_memory.len() {
            let index = self.of_memory[at];
            let rank = self.plans[index].fault.rank.is_none_or(|rank| rank == spot.rank);
            if rank && self.hits(index, spot) {
                self.disable_transfers(now, index, spot.from);
                fails = true;
            }
        }
        fails
    }

    /// True if a fault hits an operation or frame: it waited for one, or draws it.
    fn hits(&mut self, index: usize, spot: &FaultSubject) -> bool {
        let plan = &mut self.plans[index];
        plan.concerns(spot) && (plan.disarm() || self.chances(index, spot))
    }

    /// What becomes of a control frame that is sent; also counts it as `frame.sent`, so the world
    /// does not tell that event. `Spot::nth` counts the frames of the sender.
    pub fn decide_frame(&mut self, now: Nanos, spot: &FaultSubject) -> FrameDecision {
        self.on_event(now, TriggerEvent::FrameSent, spot);
        let drop = self.vanishes(spot) || self.is_raced(now, spot);
        let mut fate = FrameDecision { drop, ..FrameDecision::default() };
        for index in 0..self.of_frames.len() {
            let index = self.of_frames[index];
            let kind = self.plans[index].kind();
            if kind == FaultKind::StaleRegistration && spot.message != Some(MessageName::Register) {
                continue;
            }
            if kind == FaultKind::DoneOutOfOrder
                && (spot.message != Some(MessageName::Delivered) || self.starts_early(index))
            {
                continue;
            }
            if !self.hits(index, spot) {
                continue;
            }
            let delay = self.plans[index].delay();
            let none = FrameDecision::default();
            let effect = match kind {
                FaultKind::Loss => FrameDecision { drop: true, ..none },
                FaultKind::Damage => FrameDecision { damage: Some(self.bits(index, spot)), ..none },
                FaultKind::Foreign => {
                    FrameDecision { foreign: Some(self.bits(index, spot)), ..none }
                }
                FaultKind::Duplicate => FrameDecision { duplicate: Some(delay), ..none },
                FaultKind::FrameReorder => FrameDecision { delay, reorder: true, ..none },
                FaultKind::Delay | FaultKind::DoneOutOfOrder => FrameDecision { delay, ..none },
                FaultKind::StaleRegistration => {
                    self.fire(now, index, Some(spot));
                    continue;
                }
                _ => {
                    self.open_window(now, index, Some(spot));
                    fate.drop |= self.vanishes(spot);
                    continue;
                }
            };
            combine_frame(&mut fate, effect);
            self.hit(now, index, Some(spot.from), spot.to);
        }
        fate
    }

    /// Uniform bits that draw what bytes come, for this frame.
    fn bits(&self, index: usize, spot: &FaultSubject) -> u64 {
        self.plans[index].key("bytes", spot).get()
    }

    /// True for a renewal of a lease that a read races with: it is lost, or there would be no race.
    fn is_raced(&self, now: Nanos, spot: &FaultSubject) -> bool {
        let renew = spot.message == Some(MessageName::Renew);
        let end = spot.to.and_then(|to| self.raced.get(&(spot.from, to)));
        renew && end.is_some_and(|end| now < *end)
    }

    /// What becomes of a leg that the router sends to `spot.to`; also counts it as
    /// `leg.dispatched`, so the world does not tell that event.
    pub fn decide_leg(&mut self, now: Nanos, decode: bool, spot: &FaultSubject) -> LegDecision {
        debug_assert_eq!(spot.from, ROUTER);
        self.on_event(now, TriggerEvent::LegDispatched, spot);
        let mut fate = LegDecision::default();
        for index in 0..self.of_legs.len() {
            let index = self.of_legs[index];
            let kind = self.plans[index].kind();
            if (kind == FaultKind::DecodeLegLost && !decode) || !self.hits(index, spot) {
                continue;
            }
            let delay = self.plans[index].delay();
            match kind {
                FaultKind::DecodeLegLost => fate.lost = true,
                FaultKind::DispatchedTwice => fate.twice = fate.twice.max(Some(delay)),
                _ => fate.delay = fate.delay + delay,
            }
            self.hit(now, index, Some(spot.from), spot.to);
        }
        fate
    }

    /// How much later the worker of a rank finishes what it does in a step.
    pub fn lag(&self, instance: u16, rank: u16) -> Nanos {
        let mine = self.lags.iter().filter(|lag| (lag.0, lag.1) == (instance, rank));
        mine.fold(Nanos::ZERO, |sum, lag| sum + lag.2)
    }

    /// True if a fault waits for the next thing of its kind by itself.
    pub(super) fn waits(plan: &FaultPlan) -> bool {
        matches!(plan.when, TriggerCondition::At(_) | TriggerCondition::On(_))
    }
}
