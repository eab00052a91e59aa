//! What faults do to single operations, frames and legs, and which fault wins when several hit the
//! same one.

use super::Faults;
use super::action::{Action, LegFate, ROUTER, Spot};
use super::plan::{Plan, When};
use crate::dma::{Ack, Bytes, OpFate};
use crate::net::FrameFate;
use engine::core::time::Nanos;
use engine::fabric::{Cause, Landed};
use scenarios::lists::{Event, FaultKind, MessageName};
use scenarios::run::Order;

/// How bad the end of an operation's bytes is; the worst wins.
const fn rank(bytes: &Bytes) -> u8 {
    match bytes {
        Bytes::Whole => 0,
        Bytes::Overtaken { .. } => 1,
        Bytes::Fails { landed: Landed::All, .. } => 2,
        Bytes::Fails { landed: Landed::None, .. } => 3,
        Bytes::Fails { landed: Landed::Unknown, .. } => 4,
        Bytes::Missing => 5,
    }
}

const fn ack_rank(ack: &Ack) -> u8 {
    match ack {
        Ack::Given => 0,
        Ack::Lost => 1,
        Ack::Never => 2,
    }
}

/// Adds what one more fault does to an operation. Delays add up; the worse fate of the bytes and
/// of the completion wins; between equals the first fault of the file.
fn combine(fate: &mut OpFate, more: OpFate) {
    fate.delay = fate.delay + more.delay;
    fate.ack_delay = fate.ack_delay + more.ack_delay;
    fate.not_before = fate.not_before.max(more.not_before);
    fate.kill_session |= more.kill_session;
    if rank(&more.bytes) > rank(&fate.bytes) {
        fate.bytes = more.bytes;
    }
    if ack_rank(&more.ack) > ack_rank(&fate.ack) {
        fate.ack = more.ack;
    }
}

/// Adds what one more fault does to a frame. Loss wins over all; delays add up; the latest copy
/// wins, and the first damage and the first foreign frame of the file.
fn combine_frame(fate: &mut FrameFate, more: FrameFate) {
    fate.drop |= more.drop;
    fate.reorder |= more.reorder;
    fate.delay = fate.delay + more.delay;
    fate.duplicate = fate.duplicate.max(more.duplicate);
    fate.damage = fate.damage.or(more.damage);
    fate.foreign = fate.foreign.or(more.foreign);
}

fn fails(cause: Cause, late: Option<Nanos>) -> Bytes {
    Bytes::Fails { cause, landed: Landed::Unknown, late }
}

/// The cause of operations that fail by injection alone.
fn injected() -> Cause {
    Cause::Backend("injected failure".into())
}

/// What an operation fault does to the operation that it hits.
fn op_effect(plan: &Plan) -> OpFate {
    let delay = plan.delay();
    let late = plan.coin().then_some(delay);
    let none = OpFate::default();
    match plan.kind() {
        FaultKind::QpError => {
            OpFate { bytes: fails(Cause::QueuePair, late), kill_session: true, ..none }
        }
        FaultKind::AckLost => OpFate { ack: Ack::Lost, ..none },
        FaultKind::CompletionLost => OpFate { ack: Ack::Never, ..none },
        FaultKind::CompletionReorder => OpFate { ack_delay: delay, ..none },
        FaultKind::NotifyOvertakes | FaultKind::DoneOutOfOrder => {
            OpFate { bytes: Bytes::Overtaken { by: delay }, ..none }
        }
        FaultKind::Partial if plan.coin() => OpFate { delay, ..none },
        FaultKind::Partial => OpFate { delay, bytes: fails(injected(), None), ..none },
        FaultKind::LateLanding => OpFate { bytes: fails(Cause::AckTimeout, Some(delay)), ..none },
        FaultKind::NoCopy => OpFate { bytes: Bytes::Missing, ..none },
        FaultKind::SiblingFailure => OpFate { bytes: fails(injected(), late), ..none },
        _ => none,
    }
}

impl Faults {
    /// What becomes of an operation that was accepted; also counts it as `op.posted`, so the world
    /// does not tell that event. `Spot::nth` counts the operations of the rank.
    pub fn op_fate(&mut self, now: Nanos, spot: &Spot) -> OpFate {
        self.on_event(now, Event::OpPosted, spot);
        let mut fate = OpFate::default();
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
                    OpFate { not_before, ..OpFate::default() }
                }
                _ => op_effect(&self.plans[index]),
            };
            if effect.kill_session
                && let Some(to) = spot.to
            {
                self.act(Action::KillSessions { a: spot.from, b: to });
            }
            combine(&mut fate, effect);
            self.hit(now, index, Some(spot.from), spot.to);
        }
        fate
    }

    /// True if the report of completion comes before the bytes, not after them.
    fn starts_early(&self, index: usize) -> bool {
        match self.plans[index].fault.first {
            Order::Early => true,
            Order::Late => false,
            Order::Either => self.plans[index].coin(),
        }
    }

    /// A read will be reported in the instant in which its lease ends, and the lease is not renewed.
    fn race(&mut self, index: usize, spot: &Spot, at: Nanos) {
        let done_first = !self.starts_early(index);
        self.act(Action::Race { instance: spot.from, at, done_first });
        if let Some(to) = spot.to {
            self.raced.insert((spot.from, to), at);
        }
    }

    /// True if the memory of `spot.rank` of `spot.from` cannot be registered. `Spot::nth` counts the
    /// lives of the instance.
    pub fn register_fails(&mut self, now: Nanos, spot: &Spot) -> bool {
        let mut fails = false;
        for at in 0..self.of_memory.len() {
            let index = self.of_memory[at];
            let rank = self.plans[index].fault.rank.is_none_or(|rank| rank == spot.rank);
            if rank && self.hits(index, spot) {
                self.lame(now, index, spot.from);
                fails = true;
            }
        }
        fails
    }

    /// True if a fault hits an operation or frame: it waited for one, or draws it.
    fn hits(&mut self, index: usize, spot: &Spot) -> bool {
        let plan = &mut self.plans[index];
        plan.concerns(spot) && (plan.disarm() || plan.chances(spot))
    }

    /// What becomes of a control frame that is sent; also counts it as `frame.sent`, so the world
    /// does not tell that event. `Spot::nth` counts the frames of the sender.
    pub fn frame_fate(&mut self, now: Nanos, spot: &Spot) -> FrameFate {
        self.on_event(now, Event::FrameSent, spot);
        let drop = self.vanishes(spot) || self.is_raced(now, spot);
        let mut fate = FrameFate { drop, ..FrameFate::default() };
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
            let none = FrameFate::default();
            let effect = match kind {
                FaultKind::Loss => FrameFate { drop: true, ..none },
                FaultKind::Damage => FrameFate { damage: Some(self.bits(index, spot)), ..none },
                FaultKind::Foreign => FrameFate { foreign: Some(self.bits(index, spot)), ..none },
                FaultKind::Duplicate => FrameFate { duplicate: Some(delay), ..none },
                FaultKind::FrameReorder => FrameFate { delay, reorder: true, ..none },
                FaultKind::Delay | FaultKind::DoneOutOfOrder => FrameFate { delay, ..none },
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
    fn bits(&self, index: usize, spot: &Spot) -> u64 {
        self.plans[index].key("bytes", spot).get()
    }

    /// True for a renewal of a lease that a read races with: it is lost, or there would be no race.
    fn is_raced(&self, now: Nanos, spot: &Spot) -> bool {
        let renew = spot.message == Some(MessageName::Renew);
        let end = spot.to.and_then(|to| self.raced.get(&(spot.from, to)));
        renew && end.is_some_and(|end| now < *end)
    }

    /// What becomes of a leg that the router sends to `spot.to`; also counts it as
    /// `leg.dispatched`, so the world does not tell that event.
    pub fn leg_fate(&mut self, now: Nanos, decode: bool, spot: &Spot) -> LegFate {
        debug_assert_eq!(spot.from, ROUTER);
        self.on_event(now, Event::LegDispatched, spot);
        let mut fate = LegFate::default();
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
    pub(super) fn waits(plan: &Plan) -> bool {
        matches!(plan.when, When::At(_) | When::On(_))
    }
}
