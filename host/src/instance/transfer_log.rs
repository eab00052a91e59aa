//! Follows the transfers of an engine by what its shell passes on. Knows no clock; times are handed
//! in. Of a transfer that ended there is a span, if a tracer was given.

use super::record::{SpokenDialect, TransferOutcome, TransferRecord};
use super::transfer_spans::TransferSpans;
use crate::spans::SpanTracer;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{EngineId, FlowId, RequestId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, FlowState, Mode, PrefillAnswer, PrefillHook, Role, TransferJob,
    TransferReport,
};
use kvferry_engine::core::time::Nanos;
use opentelemetry::trace::SpanContext;
use std::collections::{BTreeMap, VecDeque};

/// Ended transfers that a host keeps.
pub(crate) const KEPT: usize = 4096;

/// A flow of this engine's ranks.
#[derive(Debug)]
struct FlowProgress {
    begun: Nanos,
    /// When the last rank that ended it did.
    moved: Nanos,
    /// Ranks that have not ended it.
    left: u16,
    bytes: u64,
    request: RequestId,
}

/// The transfers of an engine: those under way, and the last that ended.
#[derive(Debug)]
pub(crate) struct TransferLog {
    role: Role,
    mode: Mode,
    ranks: u16,
    open: BTreeMap<RequestId, TransferRecord>,
    flows: BTreeMap<FlowId, FlowProgress>,
    ended: VecDeque<TransferRecord>,
    kept: usize,
    spans: Option<TransferSpans>,
}

fn count(blocks: &[BlockList]) -> u32 {
    blocks.iter().map(|list| list.ids.len() as u32).sum()
}

fn failed(failure: &Failure) -> TransferOutcome {
    TransferOutcome::Failed { cause: failure.kind().into(), why: failure.to_string() }
}

impl TransferLog {
    /// Of an engine with `ranks` TP ranks; `kept` of those that ended are kept.
    pub(crate) fn new(role: Role, mode: Mode, ranks: u16, kept: usize) -> TransferLog {
        let (open, flows, ended) = (BTreeMap::new(), BTreeMap::new(), VecDeque::new());
        TransferLog { role, mode, ranks, open, flows, ended, kept, spans: None }
    }

    /// Has a span made of each transfer.
    pub(crate) fn with_spans(mut self, tracer: SpanTracer) -> TransferLog {
        self.spans = Some(TransferSpans::new(tracer, self.role, self.mode));
        self
    }

    /// Sends the spans that wait, for a bounded time.
    pub(crate) fn finish(&self) {
        if let Some(spans) = &self.spans {
            spans.tracer.finish();
        }
    }

    /// The span of the next request to arrive is below the one that `parent` gives.
    pub(crate) fn set_parent(&mut self, parent: impl FnOnce() -> Option<SpanContext>) {
        if let Some(spans) = &mut self.spans {
            spans.next = parent();
        }
    }

    /// True if this engine's ranks move the bytes.
    fn moves(&self) -> bool {
        (self.role == Role::Prefill) == (self.mode == Mode::Push)
    }

    fn record(&self, now: Nanos, request: &RequestId, tokens: u32) -> TransferRecord {
        TransferRecord {
            request: request.clone(),
            transfer: None,
            peer: None,
            arrived: now,
            begun: None,
            moved: None,
            finished: None,
            ended: None,
            tokens,
            computed: 0,
            blocks: 0,
            bytes: self.moves().then_some(0),
            dialect: None,
            parent: None,
        }
    }

    /// That of [`TransferLog::set_parent`].
    fn parent(&mut self) -> Option<SpanContext> {
        self.spans.as_mut().and_then(|spans| spans.next.take())
    }

    fn arrived(
        &mut self,
        now: Nanos,
        request: &RequestId,
        (key, peer): (&TransferKey, Option<&EngineId>),
        tokens: u32,
    ) {
        let (transfer, peer) = (Some(key.clone()), peer.cloned());
        let parent = self.parent();
        let record = TransferRecord { transfer, peer, parent, ..self.record(now, request, tokens) };
        // The core refuses a second one of this name, and the first one goes on.
        self.open.entry(request.clone()).or_insert(record);
    }

    /// A request whose parameters cannot be used: it begins and ends.
    pub(crate) fn unusable(
        &mut self,
        now: Nanos,
        request: &RequestId,
        tokens: u32,
        why: &str,
    ) -> &TransferRecord {
        let outcome = TransferOutcome::Failed { cause: "unusable-params".into(), why: why.into() };
        let parent = self.parent();
        self.keep(TransferRecord {
            ended: Some((now, outcome)),
            parent,
            ..self.record(now, request, tokens)
        })
    }

    /// A prefill engine told its core something.
    pub(crate) fn prefill(&mut self, now: Nanos, hook: &PrefillHook) {
        match hook {
            PrefillHook::Arrived { request, leg, tokens, .. } => {
                self.arrived(now, request, (&leg.key, None), *tokens);
            }
            PrefillHook::Scheduled { chunks, .. } => {
                for chunk in chunks {
                    if let Some(record) = self.open.get_mut(&chunk.request) {
                        record.blocks += count(&chunk.blocks);
                    }
                }
            }
            PrefillHook::Finished { request, .. } => {
                if let Some(record) = self.open.get_mut(request) {
                    record.finished = Some(now);
                }
            }
            PrefillHook::Preempted { request } => {
                if let Some(record) = self.open.get_mut(request) {
                    record.blocks = 0;
                }
            }
        }
    }

    /// A decode engine told its core something. A request that ended before it had blocks gets no
    /// answer; it is given back.
    pub(crate) fn decode(&mut self, now: Nanos, hook: &DecodeHook) -> Option<&TransferRecord> {
        match hook {
            DecodeHook::Arrived { request, leg, tokens, .. } => {
                self.arrived(now, request, (&leg.key, Some(&leg.prefill)), *tokens);
                if let Some(record) = self.open.get_mut(request) {
                    record.dialect = Some(SpokenDialect::Native);
                }
                None
            }
            DecodeHook::Allocated { request, computed, blocks } => {
                let moves = self.moves();
                let record = self.open.get_mut(request)?;
                (record.computed, record.blocks) = (*computed, count(blocks));
                if !moves && *computed < record.tokens {
                    record.begun = Some(now);
                }
                None
            }
            DecodeHook::Finished { request, .. } => {
                let is_waiting = |record: &TransferRecord| record.blocks == 0;
                match self.open.get(request).is_some_and(is_waiting) {
                    true => self.end(now, request, Some(&Failure::Cancelled)),
                    false => None,
                }
            }
        }
    }

    /// The core has its ranks do something.
    pub(crate) fn job(&mut self, now: Nanos, job: &TransferJob) {
        let (id, request, peer) = match job {
            TransferJob::Write { flow, request, reader, .. } => (*flow, request, reader),
            TransferJob::Read { flow, request, .. } => (*flow, request, &None),
            _ => return,
        };
        let Some(record) = self.open.get_mut(request) else { return };
        record.begun = Some(record.begun.map_or(now, |begun| begun.min(now)));
        record.peer = peer.clone().or(record.peer.take());
        let (request, left) = (record.request.clone(), self.ranks);
        self.flows.insert(id, FlowProgress { begun: now, moved: now, left, bytes: 0, request });
    }

    pub(crate) fn report(&mut self, now: Nanos, report: &TransferReport) {
        let TransferReport::Flow { flow: id, state } = report else { return };
        let Some(flow) = self.flows.get_mut(id) else { return };
        match state {
            FlowState::Moving | FlowState::Failing(_) | FlowState::Digested(_) => return,
            FlowState::Done { bytes } => flow.bytes += bytes,
            FlowState::Failed(_) => {}
        }
        flow.moved = now;
        flow.left = flow.left.saturating_sub(1);
        if flow.left == 0 {
            self.flow_ended(*id);
        }
    }

    /// Adds a flow to its request, once all ranks have ended it.
    fn flow_ended(&mut self, id: FlowId) {
        let Some(FlowProgress { request, begun, moved, bytes, .. }) = self.flows.remove(&id) else {
            return;
        };
        // Its request may have ended, and another one of this name may be here.
        let record = self.open.get_mut(&request);
        if let Some(record) = record.filter(|record| begun >= record.arrived) {
            record.moved = record.moved.max(Some(moved));
            record.bytes = Some(record.bytes.unwrap_or(0) + bytes);
        }
    }

    /// A prefill core answered its engine; the transfer that this ends.
    pub(crate) fn prefill_answer(
        &mut self,
        now: Nanos,
        answer: &PrefillAnswer,
    ) -> Option<&TransferRecord> {
        match answer {
            PrefillAnswer::SourceFree { request, failure } => {
                self.end(now, request, failure.as_ref())
            }
            // Who wanted it had left before it came: as if it had not.
            PrefillAnswer::Rejected { request, failure: Failure::Cancelled } => {
                self.open.remove(request);
                None
            }
            PrefillAnswer::Rejected { request, failure } => self.end(now, request, Some(failure)),
            PrefillAnswer::PreemptionSafe { .. } => None,
        }
    }

    /// A decode core answered its engine; the transfer that this ends.
    pub(crate) fn decode_answer(
        &mut self,
        now: Nanos,
        answer: &DecodeAnswer,
    ) -> Option<&TransferRecord> {
        match answer {
            DecodeAnswer::Allocate { .. } => None,
            DecodeAnswer::Loaded { request } => self.end(now, request, None),
            DecodeAnswer::LoadFailed { request, failure }
            | DecodeAnswer::Rejected { request, failure } => self.end(now, request, Some(failure)),
        }
    }

    /// The prefill of a decode's request does not speak the native dialect.
    pub(crate) fn speaks_moriio(&mut self, request: &RequestId) {
        if let Some(record) = self.open.get_mut(request) {
            record.dialect = Some(SpokenDialect::Moriio);
        }
    }

    fn end(
        &mut self,
        now: Nanos,
        request: &RequestId,
        failure: Option<&Failure>,
    ) -> Option<&TransferRecord> {
        let mut record = self.open.remove(request)?;
        // Nobody sees a read of this engine's blocks begin.
        let is_read = self.role == Role::Prefill && self.mode == Mode::Pull;
        let outcome = match failure {
            Some(failure) => failed(failure),
            None if record.begun.is_none() && !is_read => TransferOutcome::Local,
            None => TransferOutcome::Done,
        };
        if !self.moves() && record.begun.is_some() {
            record.moved = Some(now);
        }
        record.ended = Some((now, outcome));
        Some(self.keep(record))
    }

    fn keep(&mut self, record: TransferRecord) -> &TransferRecord {
        if let Some(spans) = &self.spans {
            spans.ended(&record);
        }
        if self.ended.len() >= self.kept {
            self.ended.pop_front();
        }
        self.ended.push_back(record);
        self.ended.back().expect("it was added")
    }

    pub(crate) fn open(&self) -> usize {
        self.open.len()
    }

    /// All that are kept, by their arrival.
    pub(crate) fn list(&self) -> Vec<TransferRecord> {
        let mut list: Vec<_> = self.ended.iter().chain(self.open.values()).cloned().collect();
        list.sort_by_key(|record| record.arrived);
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::core::ids::{ConnectionId, SourceId, StepId};
    use kvferry_engine::core::message::{Chunk, DecodeLeg, FinishReason, PrefillLeg};
    use kvferry_engine::core::prompt_hash::PromptHash;
    use kvferry_engine::fabric::Endpoint;
    use proptest::prelude::*;
    use std::sync::Arc;

    const SIDES: [(Role, Mode); 4] = [
        (Role::Prefill, Mode::Push),
        (Role::Prefill, Mode::Pull),
        (Role::Decode, Mode::Push),
        (Role::Decode, Mode::Pull),
    ];

    fn id(n: u8) -> RequestId {
        format!("r{n}").into()
    }

    fn key(n: u8) -> TransferKey {
        TransferKey { id: format!("tx{n}").into(), prompt: 0 }
    }

    fn blocks() -> Vec<BlockList> {
        vec![BlockList::new(vec![1, 2, 3])]
    }

    fn arrive(records: &mut TransferLog, now: Nanos, n: u8) {
        let (request, key, tokens) = (id(n), key(n), 40);
        let prompt_hash = PromptHash::default();
        let mode = records.mode;
        if records.role == Role::Prefill {
            let leg = PrefillLeg::new(key, mode);
            return records
                .prefill(now, &PrefillHook::Arrived { request, leg, tokens, prompt_hash });
        }
        let (prefill, control) = ("p".into(), Endpoint::tcp("h", 1));
        let leg = DecodeLeg::new(key, mode, prefill, control);
        let hook = DecodeHook::Arrived { request, leg, tokens, prompt_hash };
        assert_eq!(records.decode(now, &hook), None);
    }

    fn allocate(records: &mut TransferLog, now: Nanos, n: u8, computed: u32) {
        let hook = DecodeHook::Allocated { request: id(n), computed, blocks: blocks() };
        assert_eq!(records.decode(now, &hook), None);
    }

    fn job(mode: Mode, flow: u64, n: u8) -> TransferJob {
        let (flow, peer, from, tokens) = (FlowId(flow), ConnectionId(0), 0, 40);
        let (request, local) = (id(n), Arc::new(blocks()));
        match mode {
            Mode::Push => {
                let (source, reader, blocks) = (SourceId(1), Some("other".into()), local);
                TransferJob::Write {
                    flow,
                    request,
                    reader,
                    source,
                    peer,
                    from,
                    tokens,
                    blocks,
                    verify: None,
                }
            }
            Mode::Pull => TransferJob::Read {
                flow,
                request,
                peer,
                from,
                tokens,
                remote: local.clone(),
                local,
            },
        }
    }

    fn done(flow: u64, bytes: u64) -> TransferReport {
        TransferReport::Flow { flow: FlowId(flow), state: FlowState::Done { bytes } }
    }

    fn answer(
        records: &mut TransferLog,
        now: Nanos,
        n: u8,
        failure: Option<Failure>,
    ) -> Option<TransferRecord> {
        let request = id(n);
        let ended = match (records.role, failure) {
            (Role::Prefill, failure) => {
                records.prefill_answer(now, &PrefillAnswer::SourceFree { request, failure })
            }
            (_, None) => records.decode_answer(now, &DecodeAnswer::Loaded { request }),
            (_, Some(failure)) => {
                records.decode_answer(now, &DecodeAnswer::LoadFailed { request, failure })
            }
        };
        ended.cloned()
    }

    #[test]
    fn bytes_and_times_of_all_ranks_are_added_up() {
        for (role, mode) in [SIDES[0], SIDES[3]] {
            let mut records = TransferLog::new(role, mode, 2, 8);
            arrive(&mut records, Nanos(10), 1);
            records.job(Nanos(30), &job(mode, 7, 1));
            records.report(Nanos(40), &done(7, 100));
            records.report(
                Nanos(45),
                &TransferReport::Flow { flow: FlowId(7), state: FlowState::Moving },
            );
            records.report(Nanos(50), &done(7, 11));
            let record = answer(&mut records, Nanos(60), 1, None).expect("it ends");
            assert_eq!(record.queued(), Some(Nanos(20)), "{role} {mode}");
            assert_eq!(record.duration(), Some(Nanos(20)));
            assert_eq!(
                (record.bytes, record.ended),
                (Some(111), Some((Nanos(60), TransferOutcome::Done)))
            );
            let peer = if role == Role::Prefill { "other" } else { "p" };
            assert_eq!(record.peer, Some(peer.into()));
            assert_eq!((records.open(), records.flows.len()), (0, 0));
        }
    }

    #[test]
    fn a_decode_that_is_written_to_waits_from_when_its_blocks_are_told() {
        let mut records = TransferLog::new(Role::Decode, Mode::Push, 1, 8);
        arrive(&mut records, Nanos(5), 1);
        allocate(&mut records, Nanos(9), 1, 8);
        let record = answer(&mut records, Nanos(20), 1, None).expect("it ends");
        assert_eq!((record.queued(), record.duration()), (Some(Nanos(4)), Some(Nanos(11))));
        assert_eq!((record.bytes, record.blocks, record.computed), (None, 3, 8));
        assert_eq!(record.peer, Some("p".into()));
    }

    #[test]
    fn what_needs_no_transfer_has_no_times_of_one() {
        for (role, mode) in SIDES {
            let mut records = TransferLog::new(role, mode, 1, 8);
            arrive(&mut records, Nanos(5), 1);
            if role == Role::Decode {
                allocate(&mut records, Nanos(6), 1, 40);
            }
            let record = answer(&mut records, Nanos(9), 1, None).expect("it ends");
            let is_read = (role, mode) == SIDES[1];
            let outcome = if is_read { TransferOutcome::Done } else { TransferOutcome::Local };
            assert_eq!(record.ended, Some((Nanos(9), outcome)), "{role} {mode}");
            assert_eq!((record.queued(), record.duration()), (None, None));
        }
    }

    #[test]
    fn failures_keep_their_cause_and_count_no_duration() {
        let mut records = TransferLog::new(Role::Decode, Mode::Push, 1, 8);
        arrive(&mut records, Nanos(5), 1);
        allocate(&mut records, Nanos(6), 1, 0);
        let record = answer(&mut records, Nanos(9), 1, Some(Failure::PeerSilent)).expect("it ends");
        let Some((_, TransferOutcome::Failed { cause, why })) = &record.ended else {
            panic!("{record:?}")
        };
        assert_eq!((&**cause, &**why), ("peer-silent", "peer does not answer"));
        assert_eq!((record.queued(), record.duration()), (Some(Nanos(1)), None));
        let unread = records.unusable(Nanos(10), &id(2), 3, "no key");
        assert_eq!(unread.ended.as_ref().map(|(_, outcome)| outcome.name()), Some("failed"));
        // Nothing answers a request that ended before it had blocks.
        arrive(&mut records, Nanos(11), 3);
        let finished = DecodeHook::Finished { request: id(3), reason: FinishReason::Aborted };
        assert!(records.decode(Nanos(12), &finished).is_some());
        assert_eq!(records.list().len(), 3);
    }

    /// Anything that a gateway may pass on, in any order.
    fn step(
        records: &mut TransferLog,
        now: Nanos,
        (what, n, flow): (u8, u8, u64),
    ) -> Option<TransferRecord> {
        let (request, reason) = (id(n), FinishReason::Length);
        match (what, records.role) {
            (0 | 1, _) => arrive(records, now, n),
            (2, Role::Prefill) => {
                let chunk = Chunk { request, from: 0, to: 40, blocks: blocks() };
                let (step, chunks) = (StepId(1), vec![chunk]);
                records.prefill(now, &PrefillHook::Scheduled { step, chunks });
            }
            (2, Role::Decode) => allocate(records, now, n, 0),
            (3, Role::Prefill) => records.prefill(now, &PrefillHook::Finished { request, reason }),
            (3, Role::Decode) => {
                let hook = DecodeHook::Finished { request, reason };
                return records.decode(now, &hook).cloned();
            }
            (4..=6, _) => records.job(now, &job(records.mode, flow, n)),
            (7 | 8, _) => records.report(now, &done(flow, 5)),
            (9, _) => return answer(records, now, n, None),
            _ => return answer(records, now, n, Some(Failure::Stalled)),
        }
        None
    }

    #[test]
    fn a_flow_that_outlives_its_request_is_not_of_the_next_one_of_this_name() {
        let mut records = TransferLog::new(Role::Decode, Mode::Pull, 2, 8);
        arrive(&mut records, Nanos(1), 3);
        records.job(Nanos(2), &job(Mode::Pull, 4, 3));
        records.report(Nanos(3), &done(4, 10));
        let loaded = DecodeAnswer::Loaded { request: id(3) };
        assert!(records.decode_answer(Nanos(4), &loaded).is_some());
        arrive(&mut records, Nanos(5), 3);
        records.report(Nanos(6), &done(4, 10));
        let second = records.decode_answer(Nanos(7), &loaded).expect("it ends");
        assert_eq!((second.moved, second.bytes), (None, Some(0)));
    }

    proptest! {
        #[test]
        fn each_that_arrived_ends_once_and_in_order(
            side in 0..4_usize,
            steps in prop::collection::vec((0..11_u8, 0..6_u8, 0..6_u64), 0..200),
        ) {
            let (role, mode) = SIDES[side];
            let mut records = TransferLog::new(role, mode, 2, 8);
            let mut under_way = std::collections::BTreeSet::new();
            for (now, step_of) in (1..).zip(steps) {
                let ended = step(&mut records, Nanos(now), step_of);
                if step_of.0 <= 1 {
                    under_way.insert(id(step_of.1));
                }
                if let Some(record) = ended {
                    prop_assert!(under_way.remove(&record.request), "{record:?}");
                    let (end, outcome) = record.ended.clone().expect("it has ended");
                    let begun = record.begun.unwrap_or(record.arrived);
                    let moved = record.moved.unwrap_or(begun);
                    prop_assert!(record.arrived <= begun, "{record:?}");
                    prop_assert!(begun <= moved && moved <= end, "{record:?}");
                    prop_assert!(record.duration().is_none() || outcome == TransferOutcome::Done);
                }
                prop_assert_eq!(records.open(), under_way.len());
                prop_assert!(records.ended.len() <= 8);
                prop_assert_eq!(records.list().len(), records.open() + records.ended.len());
            }
        }
    }
}
