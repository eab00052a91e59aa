//! I15: messages are delivered once and in order, and only what was delivered is acknowledged.

use super::{CheckContext, Invariant};
use crate::observation::{InstanceMachine, Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::channel::COPIES;
use kvferry_engine::core::dialect::native::{ConnectionHeader, Frame};
use std::collections::{BTreeMap, BTreeSet};

/// What of one direction of a connection has arrived.
#[derive(Debug, Default)]
struct ArrivedMessages {
    /// All messages before this number.
    next: u64,
    early: BTreeSet<u64>,
    /// The receiver said that it has all before this number.
    acknowledged: u64,
}

/// Two counts of one receiver, of all its connections.
#[derive(Clone, Copy, Debug, Default)]
struct DeliveryCounts {
    /// Messages before which all arrived, so that it is their turn.
    due: u64,
    acknowledged: u64,
}

/// A model of what may be delivered when. A core tells how many messages it has handed on: never
/// more than those whose turn has come, so none twice and none early, and never less than it
/// acknowledged. A connection that did not come about delivers nothing. A message may be given up
/// when [`COPIES`] of it were damaged; it counts as delivered.
#[derive(Debug, Default)]
pub(super) struct InOrderDelivery {
    /// Frames that nobody can read.
    damaged: BTreeMap<SimProcessId, u32>,
    arrived: BTreeMap<(SimProcessId, EnvelopeKey), ArrivedMessages>,
    counts: BTreeMap<SimProcessId, DeliveryCounts>,
}

/// An [`ConnectionHeader`] as a key.
type EnvelopeKey = (u64, u64, u64);

fn key(envelope: &ConnectionHeader) -> EnvelopeKey {
    (envelope.from.0, envelope.to.0, envelope.session)
}

impl InOrderDelivery {
    fn arrived(&mut self, to: SimProcessId, frame: &Frame) {
        let Frame::Data { envelope, seq, .. } = frame else { return };
        let arrived = self.arrived.entry((to, key(envelope))).or_default();
        let before = arrived.next;
        if *seq >= before {
            arrived.early.insert(*seq);
        }
        while arrived.early.remove(&arrived.next) {
            arrived.next += 1;
        }
        self.counts.entry(to).or_default().due += arrived.next - before;
    }

    /// An acknowledgement is sent; what it claims and did not arrive.
    fn acknowledges(
        &mut self,
        from: SimProcessId,
        envelope: &ConnectionHeader,
        next: u64,
    ) -> Option<u64> {
        let inbound = (envelope.to.0, envelope.from.0, envelope.session);
        let arrived = self.arrived.entry((from, inbound)).or_default();
        if next > arrived.next {
            if self.damaged.get(&from).is_none_or(|count| *count < COPIES) {
                return Some(arrived.next);
            }
            self.counts.entry(from).or_default().due += next - arrived.next;
            arrived.next = next;
            arrived.early = arrived.early.split_off(&next);
        }
        let more = next.saturating_sub(arrived.acknowledged);
        arrived.acknowledged += more;
        self.counts.entry(from).or_default().acknowledged += more;
        None
    }
}

impl Invariant for InOrderDelivery {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[FrameSent, FrameArrived, Stray, Gauges, Crashed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::FrameArrived { to, frame, .. }
            | Observation::Stray { to, frame: Some(frame) } => self.arrived(*to, frame),
            Observation::Stray { to, frame: None } => {
                *self.damaged.entry(*to).or_default() += 1;
            }
            Observation::FrameSent { from, frame: Frame::Ack { envelope, next }, .. } => {
                if let Some(arrived) = self.acknowledges(*from, envelope, *next) {
                    let name = now.name(from.instance);
                    now.report(|| {
                        format!("{name} acknowledges {next} messages, but {arrived} arrived")
                    });
                }
            }
            Observation::Gauges { who, part: InstanceMachine::Core, gauges, .. }
                if *who != SimProcessId::ROUTER =>
            {
                let DeliveryCounts { due, acknowledged } =
                    self.counts.get(who).copied().unwrap_or_default();
                let delivered = gauges.delivered;
                // The count wraps; differences of these do not.
                let above = delivered.wrapping_sub(acknowledged as u32);
                let room = (due - acknowledged) as u32;
                if above > room {
                    let name = now.name(who.instance);
                    now.report_once(who, || {
                        format!(
                            "{name} delivered {delivered} messages, but the turn of {due} has come \
                             and {acknowledged} are acknowledged"
                        )
                    });
                }
            }
            Observation::Crashed { who } => {
                self.arrived.retain(|(to, _), _| to != who);
                self.counts.remove(who);
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, InvariantBench, InvariantId, P0, tag};
    use kvferry_engine::core::dialect::native::VERSION;
    use kvferry_engine::core::ids::Incarnation;
    use kvferry_engine::core::machine::Gauges;
    use kvferry_engine::core::message::Message;

    fn envelope() -> ConnectionHeader {
        ConnectionHeader { version: VERSION, from: Incarnation(1), to: Incarnation(2), session: 1 }
    }

    fn arrive(bench: &mut InvariantBench, numbers: &[u64]) {
        for seq in numbers {
            let message = Message::Cancel { tag: tag("r") };
            let frame = &Frame::Data { envelope: envelope(), seq: *seq, message };
            bench.see(Observation::FrameArrived { from: D0, to: P0, frame });
        }
    }

    fn acknowledge(bench: &mut InvariantBench, next: u64) {
        let ConnectionHeader { version, from, to, session } = envelope();
        let envelope = ConnectionHeader { version, from: to, to: from, session };
        bench.see(Observation::FrameSent {
            from: P0,
            to: D0,
            frame: &Frame::Ack { envelope, next },
        });
    }

    fn delivered(bench: &mut InvariantBench, delivered: u32) {
        let gauges = Gauges { delivered, ..Gauges::default() };
        let (part, limits) = (InstanceMachine::Core, Gauges::default());
        bench.see(Observation::Gauges { who: P0, part, gauges, limits });
    }

    #[test]
    fn what_came_early_or_twice_is_not_delivered() {
        let mut bench = InvariantBench::new(InvariantId::InOrder);
        arrive(&mut bench, &[0, 0, 2]);
        delivered(&mut bench, 1);
        bench.holds();
        delivered(&mut bench, 2);
        bench.fails("p0 delivered 2 messages, but the turn of 1 has come");
        let mut bench = InvariantBench::new(InvariantId::InOrder);
        arrive(&mut bench, &[0, 2, 1]);
        delivered(&mut bench, 3);
        bench.holds();
    }

    #[test]
    fn what_is_acknowledged_was_delivered() {
        let mut bench = InvariantBench::new(InvariantId::InOrder);
        arrive(&mut bench, &[0, 1]);
        acknowledge(&mut bench, 2);
        delivered(&mut bench, 2);
        bench.holds();
        delivered(&mut bench, 1);
        bench.fails("and 2 are acknowledged");
        let mut bench = InvariantBench::new(InvariantId::InOrder);
        acknowledge(&mut bench, 1);
        bench.fails("p0 acknowledges 1 messages, but 0 arrived");
    }

    #[test]
    fn what_could_never_be_read_is_given_up() {
        for (damaged, given_up) in [(COPIES - 1, false), (COPIES, true)] {
            let mut bench = InvariantBench::new(InvariantId::InOrder);
            (0..damaged).for_each(|_| bench.see(Observation::Stray { to: P0, frame: None }));
            arrive(&mut bench, &[1, 2]);
            acknowledge(&mut bench, 3);
            match given_up {
                true => delivered(&mut bench, 3),
                false => bench.fails("p0 acknowledges 3 messages, but 0 arrived"),
            }
            if given_up {
                bench.holds();
            }
        }
    }
}
