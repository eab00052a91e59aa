//! I10: attempts take only the listed transitions, progress never goes back, and acknowledgements
//! are sets of ranks.

use super::{CheckContext, Invariant};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::{Attempt, FlowId, Incarnation, RankSet, TransferKey};
use kvferry_engine::core::message::{FlowState, Message, TransferJob, TransferReport};
use std::collections::BTreeMap;

/// What prefill and decode have said about the newest attempt of a transfer. The table:
///
/// | message | sender | allowed |
/// |---|---|---|
/// | `Ask`, `Pull` | decode | first message of an attempt, which is larger than any before |
/// | `Begun` | prefill | after `Ask` or `Pull`, once, before a `Grant` or an `Ended` |
/// | `Announce` | decode | once, first message of an attempt or after `Ask` |
/// | `Renew` | decode | after `Pull`; its count grows |
/// | `Grant`, `Renewed` | prefill | after `Pull`, before a quiet `Ended` |
/// | `Delivered` | prefill | after `Announce`, before a quiet `Ended`, with at least one rank |
/// | `Ended` | prefill | after a message of decode; after a quiet one only quiet ones |
/// | `Cancel` | decode | after `Announce` |
/// | `Release` | decode | always |
#[derive(Clone, Copy, Debug, Default)]
struct ReceiverHistory {
    attempt: Attempt,
    asked: bool,
    begun: bool,
    announced: bool,
    pulled: bool,
    granted: bool,
    spoken: bool,
    renewals: u32,
    quiet: bool,
}

/// An instance in the incarnation that a connection is with. Where a frame arrives may be another
/// incarnation by then.
type ConnectionEnd = (u16, Incarnation);

/// One direction of a connection.
type ConnectionDirection = (ConnectionEnd, ConnectionEnd);

/// Follows what cores send for the first time (not retransmissions), and the flows of actors.
#[derive(Debug, Default)]
pub(super) struct LegalTransitions {
    /// Next number of each connection.
    next: BTreeMap<(ConnectionDirection, u64), u64>,
    /// By decode, prefill, key and sibling.
    receivers: BTreeMap<(ConnectionDirection, TransferKey, u32), ReceiverHistory>,
    /// Ranks that have not ended a flow.
    flows: BTreeMap<(SimProcessId, FlowId), RankSet>,
}

impl LegalTransitions {
    /// True the first time that a frame is sent.
    fn is_new(&mut self, way: ConnectionDirection, session: u64, seq: u64) -> bool {
        let next = self.next.entry((way, session)).or_insert(0);
        let new = seq >= *next;
        *next = (*next).max(seq + 1);
        new
    }

    /// Takes a transition; says what is wrong with it.
    fn step(&mut self, way: ConnectionDirection, message: &Message) -> Option<&'static str> {
        let tag = message.tag()?;
        let back = (way.1, way.0);
        let decode = !matches!(
            message,
            Message::Grant { .. }
                | Message::Renewed { .. }
                | Message::Begun { .. }
                | Message::Delivered { .. }
                | Message::Ended { .. }
        );
        let key = (if decode { way } else { back }, tag.key.clone(), tag.sibling);
        let sink = self.receivers.entry(key).or_default();
        let newer = tag.attempt > sink.attempt;
        if newer && decode {
            *sink = ReceiverHistory { attempt: tag.attempt, ..ReceiverHistory::default() };
        }
        let current = tag.attempt == sink.attempt;
        let wrong = match message {
            Message::Ask { .. } | Message::Announce { .. } | Message::Pull { .. } => {
                let ReceiverHistory { asked, announced, pulled, .. } = *sink;
                sink.asked |= matches!(message, Message::Ask { .. });
                sink.announced |= matches!(message, Message::Announce { .. });
                sink.pulled |= matches!(message, Message::Pull { .. });
                let first = !announced && !pulled && (!asked || sink.announced);
                (!(newer || current && first)).then_some("an attempt begun twice, or an old one")
            }
            _ if !current => None,
            Message::Renew { count, .. } => {
                let grows = sink.pulled && *count > sink.renewals;
                sink.renewals = *count;
                (!grows).then_some("a renewal without a pull, or out of order")
            }
            Message::Cancel { .. } => {
                (!sink.announced).then_some("a cancel of what was not announced")
            }
            Message::Release { .. } | Message::Payload { .. } => None,
            Message::Begun { .. } => {
                let again = std::mem::replace(&mut sink.begun, true);
                let asked = sink.asked || sink.pulled && !sink.granted;
                (!asked || again || sink.quiet)
                    .then_some("a beginning that nobody asked about, twice, or after the end")
            }
            Message::Grant { .. } | Message::Renewed { .. } => {
                sink.granted = true;
                (!sink.pulled || sink.quiet).then_some("a lease without a pull, or after the end")
            }
            Message::Delivered { ranks, .. } => (!sink.announced || sink.quiet || ranks.is_empty())
                .then_some("a delivery without an announcement, after the end, or of no rank"),
            Message::Ended { quiet, .. } => {
                let wrong = !sink.spoken || (sink.quiet && !*quiet);
                sink.quiet |= *quiet;
                wrong.then_some("an end that nobody asked about, or not quiet after a quiet one")
            }
        };
        sink.spoken |= decode;
        wrong
    }

    fn flow(
        &mut self,
        who: SimProcessId,
        rank: u16,
        report: &TransferReport,
    ) -> Option<&'static str> {
        let TransferReport::Flow { flow, state } = report else { return None };
        let key = (who, *flow);
        let last = matches!(state, FlowState::Done { .. } | FlowState::Failed(_));
        let Some(left) = self.flows.get_mut(&key).filter(|left| left.contains(rank)) else {
            return Some("news of a flow that has ended on this rank");
        };
        if last {
            left.0 &= !RankSet::only(rank).0;
            if left.is_empty() {
                self.flows.remove(&key);
            }
        }
        None
    }
}

impl Invariant for LegalTransitions {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[FrameSent, Job, Report, Crashed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        let (who, wrong) = match seen {
            Observation::FrameSent { from, to, frame: Frame::Data { envelope, seq, message } } => {
                let way = ((from.instance, envelope.from), (to.instance, envelope.to));
                // What is said to a peer that is gone has no consequence.
                if !now.state.is_current(*to) || !self.is_new(way, envelope.session, *seq) {
                    return;
                }
                (*from, self.step(way, message))
            }
            Observation::Job {
                who,
                job:
                    TransferJob::Write { flow, .. }
                    | TransferJob::Read { flow, .. }
                    | TransferJob::Digest { flow, .. },
            } => {
                let tp = now.state.place(who.instance).map_or(0, |place| place.tp);
                let before = self.flows.insert((*who, *flow), RankSet::first(tp));
                (*who, before.map(|_| "a flow begun twice"))
            }
            Observation::Report { from, report } => {
                (from.who, self.flow(from.who, from.rank, report))
            }
            Observation::Crashed { who } => {
                self.flows.retain(|key, _| key.0 != *who);
                return;
            }
            _ => return,
        };
        if let Some(wrong) = wrong {
            now.report(|| format!("{} sent {wrong}: {seen:?}", now.name(who.instance)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{D0, HASH, InvariantBench, InvariantId, P0, rank, tag};
    use kvferry_engine::core::error::Failure;
    use kvferry_engine::core::message::AttemptTag;
    use std::sync::Arc;

    fn bench() -> InvariantBench {
        InvariantBench::new(InvariantId::Legal)
    }

    fn delivered(ranks: u64) -> Message {
        Message::Delivered { tag: tag("r"), ranks: RankSet(ranks), tokens: 32, digest: None }
    }

    fn ended(quiet: bool) -> Message {
        Message::Ended { tag: tag("r"), failure: Failure::Cancelled, quiet }
    }

    #[test]
    fn a_push_that_is_cancelled_is_legal() {
        let mut bench = bench();
        bench.announced(D0, P0, "r");
        bench.send(P0, D0, delivered(1));
        bench.send(D0, P0, Message::Cancel { tag: tag("r") });
        bench.send(P0, D0, ended(false));
        bench.send(P0, D0, ended(true));
        bench.send(P0, D0, ended(true));
        bench.holds();
        bench.send(P0, D0, ended(false));
        bench.fails("not quiet after a quiet one");
    }

    #[test]
    fn nothing_is_delivered_after_the_end() {
        let mut bench = bench();
        bench.announced(D0, P0, "r");
        bench.send(P0, D0, ended(true));
        bench.send(P0, D0, delivered(1));
        bench.fails("after the end");
    }

    #[test]
    fn an_attempt_begins_once_and_a_later_one_may_follow() {
        let mut bench = bench();
        bench.announced(D0, P0, "r");
        let again = AttemptTag { attempt: Attempt(2), ..tag("r") };
        bench.pull(again, 32);
        bench.holds();
        bench.announced(D0, P0, "r");
        bench.fails("begun twice, or an old one");
    }

    #[test]
    fn a_prompt_that_was_asked_for_begins_once() {
        let mut bench = bench();
        bench.send(D0, P0, Message::Ask { tag: tag("r"), tokens: 32, prompt_hash: HASH });
        bench.send(P0, D0, Message::Begun { tag: tag("r") });
        bench.announced(D0, P0, "r");
        bench.holds();
        bench.send(P0, D0, Message::Begun { tag: tag("r") });
        bench.fails("a beginning that nobody asked about, twice");
        let mut bench = self::bench();
        bench.announced(D0, P0, "r");
        bench.send(D0, P0, Message::Ask { tag: tag("r"), tokens: 32, prompt_hash: HASH });
        bench.fails("begun twice");
    }

    #[test]
    fn a_lease_needs_a_pull() {
        let mut bench = bench();
        bench.announced(D0, P0, "r");
        let lease = kvferry_engine::core::time::Nanos(1);
        bench.send(P0, D0, Message::Renewed { tag: tag("r"), count: 1, lease });
        bench.fails("a lease without a pull");
    }

    #[test]
    fn what_is_said_to_the_incarnation_before_belongs_to_what_was_said_to_it() {
        let mut bench = bench();
        bench.pull(tag("r"), 32);
        bench.crash(P0);
        let next = SimProcessId { incarnation: 1, ..P0 };
        bench.start(next);
        bench.send(D0, next, Message::Renew { tag: tag("r"), count: 1 });
        bench.holds();
        bench.send(D0, next, Message::Renew { tag: tag("other"), count: 1 });
        bench.fails("a renewal without a pull");
    }

    #[test]
    fn a_flow_ends_once_per_rank() {
        let mut bench = bench();
        let blocks = Arc::new(Vec::new());
        let (flow, peer) = (FlowId(3), kvferry_engine::core::ids::ConnectionId(0));
        let (request, remote, local) = ("r".into(), blocks.clone(), blocks);
        let job = &TransferJob::Read { flow, request, peer, from: 0, tokens: 1, remote, local };
        bench.see(Observation::Job { who: D0, job });
        let report = &TransferReport::Flow { flow, state: FlowState::Moving };
        bench.see(Observation::Report { from: rank(D0), report });
        let report = &TransferReport::Flow { flow, state: FlowState::Done { bytes: 1 } };
        bench.see(Observation::Report { from: rank(D0), report });
        bench.holds();
        bench.see(Observation::Report { from: rank(D0), report });
        bench.fails("has ended on this rank");
    }
}
