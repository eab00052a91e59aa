//! I18: without a fault no operation is refused for want of room and no message is repeated, and a
//! machine wakes up for something.

use super::{CheckContext, Invariant};
use crate::observation::{InstanceMachine, Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::dialect::native::{ConnectionHeader, Frame};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Refused;
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::Run;
use std::collections::BTreeMap;

/// Work in vain that is allowed however little was of use.
const FREE: u64 = 8;

/// Of work of use, the share that may be done in vain on top.
const SHARE: u64 = 20;

/// Of what a machine hears, the share that may leave a deadline behind that is of no use any more.
const HEARD: u64 = 4;

/// The same of a payload core: what was put is dropped at the end of its time, which nobody hears of.
const PUT: u64 = 2;

/// How long after the end of a fault that fills its queue a plane may still refuse operations.
const AFTER: Nanos = Nanos(1_000_000_000);

/// Deadlines follow progress: those of silence and of quiet are looked at, and set anew. Several
/// peers have one each.
const WAKE: Nanos = Nanos(250_000_000);

/// What was done, and what of it in vain.
#[derive(Clone, Copy, Debug, Default)]
struct WorkTally {
    useful: u64,
    vain: u64,
}

/// An operation that a plane refused for want of room was planned for nothing: a rank knows what
/// its plane takes. Only where a fault fills a queue it cannot know. Messages are repeated for want
/// of an acknowledgement, which always comes in time as long as there was no fault.
#[derive(Debug, Default)]
pub(super) struct BoundedWork {
    /// The longest time that a fault fills a queue.
    longest: Nanos,
    /// Until when instances whose queue a fault fills may be refused operations.
    filled: BTreeMap<u16, Nanos>,
    messages: BTreeMap<SimProcessId, WorkTally>,
    /// Number of the next new message of each direction of a connection.
    next: BTreeMap<(u64, u64, u64), u64>,
    faulted: bool,
    /// Times that a deadline of a machine was due for nothing.
    woken: BTreeMap<(SimProcessId, InstanceMachine), u64>,
}

impl BoundedWork {
    pub(super) fn new(run: &Run) -> BoundedWork {
        let fills = run.faults.iter().filter(|fault| fault.kind == FaultKind::QueueFull);
        let lasts = fills.map(|fault| fault.lasts.map_or(Nanos::MAX, |lasts| lasts.max));
        BoundedWork { longest: lasts.max().unwrap_or_default(), ..BoundedWork::default() }
    }

    /// True if no fault fills the queue of an instance, or did until just now.
    fn takes_all(&self, now: Nanos, instance: u16) -> bool {
        self.filled.get(&instance).is_none_or(|until| *until < now)
    }

    /// A fault fills the queue of an instance.
    fn fill(&mut self, now: Nanos, instance: u16) {
        let until = Nanos(now.0.saturating_add(self.longest.0).saturating_add(AFTER.0));
        let longest = self.filled.entry(instance).or_default();
        *longest = until.max(*longest);
    }

    fn sent(
        &mut self,
        from: SimProcessId,
        envelope: &ConnectionHeader,
        seq: u64,
    ) -> Option<WorkTally> {
        let key = (envelope.from.0, envelope.to.0, envelope.session);
        let next = self.next.entry(key).or_default();
        let work = self.messages.entry(from).or_default();
        if seq >= *next {
            *next = seq + 1;
            work.useful += 1;
            return None;
        }
        work.vain += 1;
        (work.vain > FREE + work.useful / SHARE).then_some(*work)
    }
}

impl Invariant for BoundedWork {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Refused, FrameSent, Woken, Faulted, Settled]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Refused { from, why: Refused::Busy, op }
                if self.takes_all(now.at, from.who.instance) =>
            {
                let rank = now.rank(*from);
                now.report_once(from, || {
                    format!(
                        "{rank} has no room for operation {op}, though no fault fills its queue"
                    )
                });
            }
            Observation::FrameSent { from, frame: Frame::Data { envelope, seq, .. }, .. }
                if !self.faulted =>
            {
                if let Some(WorkTally { useful, vain }) = self.sent(*from, envelope, *seq) {
                    let name = now.name(from.instance);
                    now.report_once(("messages", from), || {
                        format!("{name} repeated {vain} messages beside {useful} without a fault")
                    });
                }
            }
            Observation::Woken { who, part, heard } => {
                let vain = self.woken.entry((*who, *part)).or_default();
                *vain += 1;
                let share = if *part == InstanceMachine::Payload { PUT } else { HEARD };
                let allowed = FREE + heard / share + now.at.0 / WAKE.0;
                if *vain > allowed {
                    let (vain, name) = (*vain, now.name(who.instance));
                    now.report_once((who, part), || {
                        format!(
                            "{part} of {name} woke up {vain} times for nothing beside {heard} \
                             inputs"
                        )
                    });
                }
            }
            Observation::Faulted { kind, from, .. } => {
                self.faulted = true;
                if *kind == FaultKind::QueueFull {
                    from.iter().for_each(|instance| self.fill(now.at, *instance));
                }
            }
            // What lasts outside of the core stays.
            Observation::Settled { broken, .. } => {
                for (instance, _) in *broken {
                    if !self.takes_all(now.at, *instance) {
                        self.filled.insert(*instance, Nanos::MAX);
                    }
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0, P1, rank, tag};
    use kvferry_engine::core::dialect::native::VERSION;
    use kvferry_engine::core::ids::Incarnation;
    use kvferry_engine::core::message::Message;
    use kvferry_engine::fabric::OpId;

    fn busy(bench: &mut InvariantBench, who: SimProcessId) {
        (0..10).for_each(|op| {
            let (op, why) = (OpId(1_000 + op), &Refused::Busy);
            bench.see(Observation::Refused { from: rank(who), op, why });
        });
    }

    #[test]
    fn an_operation_is_refused_only_while_a_fault_fills_the_queue() {
        let mut bench = InvariantBench::new(InvariantId::BoundedWork);
        let (kind, from) = (FaultKind::QueueFull, Some(P0.instance));
        bench.see(Observation::Faulted { kind, from, to: None });
        busy(&mut bench, P0);
        bench.now = bench.now + AFTER - Nanos(20);
        busy(&mut bench, P0);
        bench.holds();
        bench.now = bench.now + Nanos(20);
        busy(&mut bench, P0);
        bench.fails("p0 rank 0 has no room for operation 1000, though no fault fills its queue");
        let mut bench = InvariantBench::new(InvariantId::BoundedWork);
        bench.see(Observation::Faulted { kind, from, to: None });
        bench.see(Observation::Settled { core: &[], frozen: &[], broken: &[(P0.instance, None)] });
        bench.now = bench.now + AFTER.scale(100, 1);
        busy(&mut bench, P0);
        bench.holds();
        busy(&mut bench, P1);
        bench.fails("p1 rank 0 has no room");
    }

    #[test]
    fn few_deadlines_are_due_for_nothing() {
        let mut bench = InvariantBench::new(InvariantId::BoundedWork);
        let part = InstanceMachine::Payload;
        (1..=48).for_each(|_| bench.see(Observation::Woken { who: D0, part, heard: 80 }));
        let woken =
            |heard| Observation::Woken { who: D0, part: InstanceMachine::Transfer(0), heard };
        (1..=28).for_each(|_| bench.see(woken(80)));
        bench.holds();
        bench.see(woken(80));
        bench.fails("transfer actor 0 of d0 woke up 29 times for nothing beside 80 inputs");
        // More is allowed then, but this machine was named.
        bench.see(woken(84));
        bench.fails("transfer actor 0 of d0 woke up 29 times for nothing beside 80 inputs");
    }

    #[test]
    fn without_a_fault_no_message_is_repeated() {
        for faulted in [false, true] {
            let mut bench = InvariantBench::new(InvariantId::BoundedWork);
            if faulted {
                let kind = FaultKind::Loss;
                bench.see(Observation::Faulted { kind, from: Some(0), to: None });
            }
            for _ in 0..10 {
                let (from, to) = (Incarnation(1), Incarnation(2));
                let envelope = ConnectionHeader { version: VERSION, from, to, session: 1 };
                let message = Message::Begun { tag: tag("r") };
                let frame = &Frame::Data { envelope, seq: 0, message };
                bench.see(Observation::FrameSent { from: P0, to: D0, frame });
            }
            bench.judges(faulted, "p0 repeated 9 messages beside 1");
        }
    }
}
