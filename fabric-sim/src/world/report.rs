//! What a run came to.

use super::Simulation;
use super::fresh::{MachineAtRest, PairProbe};
use super::inputs::InputPlace;
use super::process::SimProcess;
use super::sight::Sight;
use super::trace::Recording;
use crate::faults::{ChanceHit, CoveragePhase};
use crate::invariants::Violation;
use crate::memory::ContentMismatch;
use crate::observation::ReceiverOutcome;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{RequestId, TransferKey};
use kvferry_engine::core::message::{DecodeAnswer, DecodeHook, FinishReason, PrefillHook};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{Completion, DataEvent};
use kvferry_scenarios::lists::{FaultKind, InvariantId};
use kvferry_scenarios::run::{CountBounds, Expect, FirstTokenDeadline};
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

/// Things by their cause, and how often.
pub type CauseCounts = BTreeMap<String, u64>;

/// How a run ended, as exit codes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunVerdict {
    #[default]
    Held = 0,
    /// The input cannot be used.
    Invalid = 2,
    /// Something did not come to its end.
    Liveness = 3,
    Correctness = 4,
    /// A second run of the seed gave another trace.
    NotDeterministic = 5,
    /// A panic or a failed assertion.
    Panic = 6,
}

impl RunVerdict {
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// One word for it, the same as when serialised.
    pub const fn name(self) -> &'static str {
        match self {
            RunVerdict::Held => "held",
            RunVerdict::Invalid => "invalid",
            RunVerdict::Liveness => "liveness",
            RunVerdict::Correctness => "correctness",
            RunVerdict::NotDeterministic => "not-deterministic",
            RunVerdict::Panic => "panic",
        }
    }
}

impl fmt::Display for RunVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Percentiles of a span of time, by the nearest rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Percentiles {
    pub count: u64,
    /// Half are at most this long.
    pub p50: Nanos,
    /// 90 percent are.
    pub p90: Nanos,
    /// 99 percent are.
    pub p99: Nanos,
    pub max: Nanos,
}

impl Percentiles {
    fn of(mut spans: Vec<Nanos>) -> Percentiles {
        spans.sort_unstable();
        let rank = |percent: usize| {
            let rank = (spans.len() * percent).div_ceil(100);
            spans.get(rank.saturating_sub(1)).copied().unwrap_or_default()
        };
        let (p50, p90, p99, max) = (rank(50), rank(90), rank(99), rank(100));
        Percentiles { count: spans.len() as u64, p50, p90, p99, max }
    }
}

/// A direction of a port that was full for some time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SaturatedLink {
    /// Instance, rank, direction, and `near` for a port within a node.
    pub link: String,
    /// For how long it was used above 80 %, as averaged over tenths of a second.
    pub full: Nanos,
    /// That in a million of the virtual time of the run.
    pub full_ppm: u64,
}

/// A link that was used above 80 % for this long counts as full.
pub const FULL: Nanos = Nanos::from_secs(1);

/// Operations of all data planes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct OperationTotals {
    pub posted: u64,
    /// Answered `Busy`.
    pub refused: u64,
    pub failed: u64,
}

/// Receivers of streams by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReceiverTotals {
    /// With every chunk, and told that there are no more.
    pub finished: u64,
    /// Told that something does not come.
    pub failed: u64,
    /// Gone away, or their host was; those without an end are among them.
    pub gone: u64,
}

/// What a run came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RunReport {
    /// Name of the scenario.
    pub scenario: String,
    /// Seed of the run.
    pub seed: u64,
    pub verdict: RunVerdict,
    /// Expectations of the scenario that were not met.
    pub unmet: Vec<String>,
    /// Instances that were healed for the liveness phase and stayed connected; empty if there was
    /// none.
    pub core: Vec<String>,
    pub finished: u64,
    /// Requests answered with an error.
    pub failed: u64,
    /// Requests whose caller is gone, or that had no end.
    pub unknown: u64,
    /// Of the finished, those with a prompt that decode computed.
    pub recomputed: u64,
    /// Receivers of streams by how they ended.
    pub receivers: ReceiverTotals,
    /// Why prompts were recomputed.
    pub recompute_causes: CauseCounts,
    pub failure_causes: CauseCounts,
    /// Broken promises, the first few.
    #[serde(skip)]
    pub violations: Vec<Violation>,
    pub violation_count: u64,
    /// What was under way at the end, if the run did not come to rest.
    pub left: Option<String>,
    /// How often each kind of fault hit, by phase of the transfers concerned; those that drawing
    /// has worked into the run count once.
    #[serde(skip)]
    pub faults: BTreeMap<(FaultKind, CoveragePhase), u64>,
    /// How often each table of faults hit that the run has, by line and kind.
    #[serde(skip)]
    pub fault_tables: BTreeMap<(u32, FaultKind), u64>,
    /// Hits of faults with `chance`, the first few.
    #[serde(skip)]
    pub chance_hits: Vec<ChanceHit>,
    /// Hash of the trace; the seed is part of it.
    pub trace_hash: u64,
    /// Hash of the effects that leave machines and their times, if asked for: control frames, calls on
    /// data planes, answers, what the router sends. Equal before and after a change of inner types.
    pub outputs_hash: Option<u64>,
    /// Entries taken from the event queue.
    pub events: u64,
    /// Virtual time of the run.
    pub sim_time: Nanos,
    /// From the arrival of a request to its first token.
    pub ttft: Percentiles,
    /// From when a prompt is computed and its destination allocated, whichever is later, to when
    /// decode has it: the part of a transfer that nothing hides.
    pub transfer: Percentiles,
    /// Bytes that ports were given to send.
    pub bytes: u64,
    /// Bytes sent by the busiest port, in a million of what it could have sent in the time.
    pub link_use_ppm: u64,
    /// Directions of ports that were used above 80 % for some time, by that time.
    pub full_links: Vec<SaturatedLink>,
    /// Operations of all data planes, while the workload lasted.
    pub operations: OperationTotals,
    /// Most blocks of an instance's group owned or shared by requests.
    pub blocks_held_peak: u32,
    /// Most blocks of an instance's group kept because a transfer may still touch them.
    pub blocks_quarantined_peak: u32,
    /// Requests after the faults that one pair each served over the fast path.
    #[serde(skip)]
    pub pairs: Vec<PairProbe>,
    /// What the machines of instances held at the end.
    #[serde(skip)]
    pub rest: Vec<MachineAtRest>,
    /// Requests of the simulator's own that took the fast path.
    #[serde(skip)]
    pub probes_fast: u64,
    /// Inputs of the safety phase, if they were to be listed.
    #[serde(skip)]
    pub inputs: Vec<InputPlace>,
    /// The recording, if one was asked for.
    #[serde(skip)]
    pub recording: Option<Recording>,
}

/// What is counted while a run goes on.
#[derive(Debug, Default)]
pub(super) struct RunStats {
    /// Reused when a data plane is polled.
    pub(super) events: Vec<DataEvent>,
    ttft: Vec<Nanos>,
    transfer: Vec<Nanos>,
    recomputed: CauseCounts,
    failed: CauseCounts,
    operations: OperationTotals,
    held: u32,
    quarantined: u32,
    wrong: Option<String>,
    /// Transfers of the requests of each instance.
    keys: BTreeMap<(u16, RequestId), TransferKey>,
    /// Nothing more is counted of requests and transfers.
    closed: bool,
    /// Operations that were posted, those of probes included.
    all_posted: u64,
    computed: BTreeMap<TransferKey, Nanos>,
    allocated: BTreeMap<(u16, RequestId), Nanos>,
}

fn count(causes: &mut CauseCounts, cause: &str) {
    match causes.get_mut(cause) {
        Some(count) => *count += 1,
        None => {
            causes.insert(cause.to_string(), 1);
        }
    }
}

impl RunStats {
    /// The workload is done; probes are no part of the report.
    pub(super) fn close(&mut self) {
        self.closed = true;
    }

    pub(super) fn posted(&mut self) {
        self.all_posted += 1;
        self.operations.posted += u64::from(!self.closed);
    }

    pub(super) fn refused(&mut self) {
        self.operations.refused += u64::from(!self.closed);
    }

    pub(super) fn all_posted(&self) -> u64 {
        self.all_posted
    }

    pub(super) fn completed(&mut self, outcome: &Completion) {
        let failed = *outcome != Completion::Done && !self.closed;
        self.operations.failed += u64::from(failed);
    }

    pub(super) fn ttft(&mut self, span: Nanos) {
        self.ttft.push(span);
    }

    pub(super) fn recomputed(&mut self, failure: &Failure) {
        if !self.closed {
            count(&mut self.recomputed, failure.kind());
        }
    }

    pub(super) fn failed(&mut self, cause: &str) {
        if !self.closed {
            count(&mut self.failed, cause);
        }
    }

    pub(super) fn compared(&mut self, wrong: Option<&ContentMismatch>) {
        if self.wrong.is_none() {
            self.wrong = wrong.map(ContentMismatch::to_string);
        }
    }

    pub(super) fn pools(&mut self, groups: usize, process: Option<&SimProcess>) {
        let Some(engine) = process.and_then(|process| process.engine.as_ref()) else { return };
        for group in 0..groups {
            let pool = engine.pool(group);
            self.held = self.held.max(pool.held);
            self.quarantined = self.quarantined.max(pool.quarantined);
        }
    }

    pub(super) fn prefill_hook(&mut self, now: Nanos, instance: u16, hook: &PrefillHook) {
        match hook {
            PrefillHook::Arrived { request, leg, .. } => {
                self.keys.insert((instance, request.clone()), leg.key.clone());
            }
            PrefillHook::Finished { request, reason } => {
                let key = self.keys.remove(&(instance, request.clone()));
                let well = matches!(reason, FinishReason::Length | FinishReason::Stop);
                if let Some(key) = key.filter(|_| well) {
                    self.computed.insert(key, now);
                }
            }
            _ => {}
        }
    }

    pub(super) fn decode_hook(&mut self, now: Nanos, instance: u16, hook: &DecodeHook) {
        match hook {
            DecodeHook::Arrived { request, leg, .. } => {
                self.keys.insert((instance, request.clone()), leg.key.clone());
            }
            DecodeHook::Allocated { request, .. } => {
                self.allocated.insert((instance, request.clone()), now);
            }
            DecodeHook::Finished { request, .. } => {
                if let Some(key) = self.keys.remove(&(instance, request.clone())) {
                    self.computed.remove(&key);
                }
                self.allocated.remove(&(instance, request.clone()));
            }
        }
    }

    pub(super) fn answered(&mut self, now: Nanos, instance: u16, answer: &DecodeAnswer) {
        let DecodeAnswer::Loaded { request } = answer else { return };
        let place = (instance, request.clone());
        let Some(allocated) = self.allocated.remove(&place) else { return };
        let computed = self.keys.get(&place).and_then(|key| self.computed.get(key));
        let from = computed.map_or(allocated, |computed| allocated.max(*computed));
        if !self.closed {
            self.transfer.push(now - from);
        }
    }
}

impl Simulation {
    pub(super) fn report(&mut self, [finished, failed, unknown]: [u64; 3]) -> RunReport {
        let stats = std::mem::take(&mut self.stats);
        let open = self.clients.open as u64;
        let (mut violations, mut count) = self.observer.violations();
        let now = self.now;
        let mut add = |id, text| {
            count += 1;
            violations.push(Violation { id, at: now, text });
        };
        // Without the invariants, what cannot be overlooked still counts.
        if !self.options.check {
            if let Some(text) = stats.wrong {
                add(InvariantId::NoForeignBytes, text);
            }
            if open > 0 {
                add(InvariantId::EveryRequestEnds, format!("{open} requests had no end"));
            } else if !self.quiescence.quiescent {
                add(InvariantId::NoLeak, self.outstanding_work());
            }
        }
        let recomputed = stats.recomputed.values().sum();
        let mut unmet = unmet(&self.run.expect, [finished, failed, unknown + open, recomputed]);
        unmet.extend(self.unmet_load(&stats.operations));
        unmet.extend(self.unmet_receivers());
        if let Some(within) = self.run.expect.within
            && self.quiescence.served() > within
        {
            unmet.push(format!(
                "the last request ended at {}, not by {within}",
                self.quiescence.served()
            ));
        }
        let (bytes, link_use_ppm) = self.traffic();
        self.record_end(&violations, &unmet);
        RunReport {
            scenario: self.run.name.clone(),
            seed: self.run.seed,
            verdict: verdict(&violations, &unmet),
            unmet,
            core: std::mem::take(&mut self.quiescence.core),
            finished,
            failed,
            unknown: unknown + open,
            recomputed,
            receivers: self.receivers(),
            recompute_causes: stats.recomputed,
            failure_causes: stats.failed,
            violations,
            violation_count: count,
            left: (!self.quiescence.quiescent).then(|| self.outstanding_work()),
            fault_tables: self.observer.faults.by_table(),
            chance_hits: self.observer.faults.chance_hits().to_vec(),
            faults: self.coverage(),
            trace_hash: self.tracer.hash(),
            outputs_hash: self.tracer.outputs_hash(),
            events: self.queue.popped(),
            sim_time: self.now,
            ttft: Percentiles::of(stats.ttft),
            transfer: Percentiles::of(stats.transfer),
            bytes,
            link_use_ppm,
            full_links: self.full_links(),
            operations: stats.operations,
            blocks_held_peak: stats.held,
            blocks_quarantined_peak: stats.quarantined,
            pairs: std::mem::take(&mut self.pairs),
            rest: self.machines_at_rest(),
            probes_fast: self.clients.probes_fast,
            inputs: self.inputs.take(),
            recording: self.tracer.take_recording(),
        }
    }

    /// The last sights of the recording: what was broken, and the verdict.
    fn record_end(&mut self, violations: &[Violation], unmet: &[String]) {
        let left = (!self.quiescence.quiescent).then(|| self.outstanding_work());
        let Some(sights) = &mut self.observer.sights else { return };
        for Violation { id, at, text } in violations {
            sights.add(*at, Sight::Violation { id: id.name().into(), text: text.clone() });
        }
        let verdict = verdict(violations, unmet).name().into();
        sights.add(self.now, Sight::Ended { verdict, unmet: unmet.to_vec(), left });
        self.keep_sights();
    }

    fn receivers(&self) -> ReceiverTotals {
        let all: usize = self.run.streams.iter().map(|stream| stream.receivers.len()).sum();
        let finished = self.stages.ended(|end| *end == ReceiverOutcome::Finished);
        let failed = self.stages.ended(|end| matches!(end, ReceiverOutcome::Missing(_)));
        ReceiverTotals { finished, failed, gone: all as u64 - finished - failed }
    }

    fn unmet_receivers(&self) -> Vec<String> {
        let (bounds, had) = (&self.run.expect.receivers, self.receivers());
        let wanted = [
            ("finished", bounds.finished, had.finished),
            ("failed", bounds.failed, had.failed),
            ("gone", bounds.gone, had.gone),
        ];
        outside("receivers", wanted)
    }

    /// What the scenario expects of operations and first tokens and did not get.
    fn unmet_load(&self, operations: &OperationTotals) -> Vec<String> {
        let expect = &self.run.expect;
        let wanted = [
            ("posted", expect.operations.posted, operations.posted),
            ("refused", expect.operations.refused, operations.refused),
            ("failed", expect.operations.failed, operations.failed),
        ];
        let late = |first: &FirstTokenDeadline| {
            let FirstTokenDeadline { request, within } = *first;
            match self.clients.first_token_after(&self.run, request) {
                Some(span) if span <= within => None,
                Some(span) => Some(format!(
                    "first token of request {request} after {span}, not within {within}"
                )),
                None => Some(format!("request {request} had no first token")),
            }
        };
        let operations = outside("operations", wanted).into_iter();
        operations.chain(expect.first_tokens.iter().filter_map(late)).collect()
    }

    /// Directions of ports that were full, the longest first.
    fn full_links(&self) -> Vec<SaturatedLink> {
        let mut links = Vec::new();
        for instance in &self.instances {
            for (rank, (far, near)) in instance.ports.iter().enumerate() {
                for (port, place) in [(*far, ""), (*near, " near")] {
                    let (out, into) = self.dma.nic_full(port);
                    for (direction, full) in [("out", out), ("in", into)] {
                        let part = u128::from(full.0) * 1_000_000;
                        let full_ppm = part.checked_div(self.now.0.into()).unwrap_or(0) as u64;
                        let link = || format!("{}.{rank} {direction}{place}", instance.spec.name);
                        links.extend((full > Nanos::ZERO).then(|| SaturatedLink {
                            link: link(),
                            full,
                            full_ppm,
                        }));
                    }
                }
            }
        }
        links.sort_by_key(|link| Reverse(link.full));
        links
    }

    fn coverage(&self) -> BTreeMap<(FaultKind, CoveragePhase), u64> {
        let mut coverage = self.observer.faults.coverage().clone();
        for kind in &self.run.shaped {
            coverage.insert((*kind, CoveragePhase::Idle), 1);
        }
        coverage
    }

    /// Bytes sent, and the use of the busiest port in a million.
    fn traffic(&self) -> (u64, u64) {
        let ports = self.instances.iter().flat_map(|instance| &instance.ports);
        let mut total = 0;
        let mut busiest = 0;
        for port in ports.flat_map(|(nic, near)| [*nic, *near]) {
            let (out, _) = self.dma.nic_bytes(port);
            total += out;
            let could = u128::from(self.dma.nic_rate(port)) * u128::from(self.now.0);
            let used = u128::from(out) * 1_000_000_000 * 1_000_000;
            busiest = busiest.max(used.checked_div(could).unwrap_or(0));
        }
        (total, busiest as u64)
    }
}

pub(super) fn verdict(violations: &[Violation], unmet: &[String]) -> RunVerdict {
    let lives = |violation: &Violation| violation.id.id().starts_with('L');
    if violations.iter().any(|violation| !lives(violation)) {
        RunVerdict::Correctness
    } else if !violations.is_empty() {
        RunVerdict::Liveness
    } else if !unmet.is_empty() {
        RunVerdict::Correctness
    } else {
        RunVerdict::Held
    }
}

fn unmet(expect: &Expect, counts: [u64; 4]) -> Vec<String> {
    let bounds = &expect.requests;
    let wanted: [(&str, Option<CountBounds>); 4] = [
        ("finished", bounds.finished),
        ("failed", bounds.failed),
        ("unknown", bounds.unknown),
        ("recomputed", bounds.recomputed),
    ];
    let with_count = |((name, bounds), count)| (name, bounds, count);
    outside("requests", wanted.into_iter().zip(counts).map(with_count))
}

/// Which counts of something are not within their bounds.
fn outside<'a>(
    what: &str,
    counts: impl IntoIterator<Item = (&'a str, Option<CountBounds>, u64)>,
) -> Vec<String> {
    let unmet = |(name, bounds, count): (&str, Option<CountBounds>, u64)| {
        let bounds = bounds.filter(|bounds| !bounds.contains(count))?;
        Some(format!("{count} {what} {name}, not {bounds}"))
    };
    counts.into_iter().filter_map(unmet).collect()
}
