//! What came out of one run.

use kvferry_engine::core::Nanos;
use kvferry_scenarios::FaultKind;
use kvferry_sim::faults::{ChanceHit, CoveragePhase};
use kvferry_sim::world::{
    FULL, OperationTotals, Percentiles, ReceiverTotals, RunReport, RunVerdict, SaturatedLink,
};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The result of one run, as it is printed in JSON.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct RunOutcome {
    /// Name of the scenario.
    pub(crate) scenario: String,
    /// Seed of the run.
    pub(crate) seed: u64,
    /// How the run went.
    pub(crate) verdict: RunVerdict,
    /// How that compares to what the scenario expects: held if it is just that.
    #[serde(skip)]
    pub(crate) exit: RunVerdict,
    /// RunVerdict code of this scenario.
    #[serde(rename = "exit")]
    pub(crate) code: u8,
    /// Instances that were healed for the liveness phase and stayed connected.
    pub(crate) core: Vec<String>,
    /// Client requests; those finished, failed and unknown together.
    pub(crate) requests: u64,
    pub(crate) finished: u64,
    /// Requests answered with an error.
    pub(crate) failed: u64,
    /// Requests whose caller went away, or without an answer when the run was over.
    pub(crate) unknown: u64,
    /// Of the finished: those of which decode computed a prompt.
    pub(crate) recomputed: u64,
    /// Receivers of streams by how they ended.
    pub(crate) receivers: ReceiverTotals,
    /// Failed requests by cause.
    pub(crate) failed_causes: BTreeMap<String, u64>,
    /// Recomputed requests by cause.
    pub(crate) recomputed_causes: BTreeMap<String, u64>,
    /// Violations of invariants, the first few, and expectations that were not met.
    pub(crate) violations: Vec<String>,
    /// Number of all of them.
    pub(crate) violation_count: u64,
    /// What was under way at the end, if the run did not come to rest.
    pub(crate) left: Option<String>,
    /// Hash over all inputs and effects, in hexadecimal.
    pub(crate) trace_hash: String,
    /// Hash over the effects that leave machines, in hexadecimal; equal where only inner types differ.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) outputs_hash: Option<String>,
    /// Entries taken from the simulator's queue.
    pub(crate) events: u64,
    pub(crate) sim_seconds: f64,
    /// Time of the first run on this machine.
    pub(crate) wall_seconds: f64,
    /// Arrival to first token, in seconds.
    pub(crate) ttft: Option<LatencyPercentiles>,
    /// Start to end of a KV transfer, in seconds.
    pub(crate) transfer: Option<LatencyPercentiles>,
    /// Payload bytes: those that simulated ports were given to send, or those that the operations
    /// of processes moved.
    pub(crate) bytes_moved: u64,
    /// What the busiest link carried of what it could have carried, from 0 to 1.
    pub(crate) link_utilisation: f64,
    /// Directions of ports that were used above 80 % for some time, the longest first.
    pub(crate) full_links: Vec<SaturatedLink>,
    /// Operations of the data planes; only the simulator counts them.
    pub(crate) operations: OperationTotals,
    /// Most KV blocks of a pool that requests held at a time.
    pub(crate) peak_blocks: u64,
    /// Most KV blocks of a pool in quarantine at a time.
    pub(crate) peak_quarantined: u64,
    /// Faults of the world's shape that the seed has.
    #[serde(skip)]
    pub(crate) shaped: Vec<FaultKind>,
    /// How often each table of faults hit that the seed has, by line and kind.
    #[serde(skip)]
    pub(crate) tables: BTreeMap<(u32, FaultKind), u64>,
    /// Hits of faults with `chance`, the first few.
    #[serde(skip)]
    pub(crate) chance_hits: Vec<ChanceHit>,
    /// How often faults hit, by kind.
    pub(crate) faults: BTreeMap<&'static str, u64>,
    /// The same by phase of the transfers concerned.
    #[serde(skip)]
    pub(crate) coverage: BTreeMap<(FaultKind, CoveragePhase), u64>,
    /// Faults that the seed has and that never hit, with the lines of their tables.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) never_hit: Vec<String>,
    /// Everything held but what the scenario expects of counts and times.
    #[serde(skip)]
    pub(crate) unmet: bool,
    /// Faults and invariants that this fabric cannot inject or check, and why.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) skipped: Vec<String>,
    /// Folder with the logs of the processes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) logs: Option<PathBuf>,
    /// The command that runs it again.
    pub(crate) repeat: String,
}

fn seconds(nanos: Nanos) -> f64 {
    nanos.0 as f64 / 1e9
}

/// Percentiles in seconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct LatencyPercentiles {
    pub(crate) p50: f64,
    /// Nine of ten are at most this.
    pub(crate) p90: f64,
    /// Ninety-nine of a hundred are at most this.
    pub(crate) p99: f64,
}

impl LatencyPercentiles {
    /// None if there is nothing to spread.
    fn of(spans: &Percentiles) -> Option<LatencyPercentiles> {
        let [p50, p90, p99] = [spans.p50, spans.p90, spans.p99].map(seconds);
        (spans.count > 0).then_some(LatencyPercentiles { p50, p90, p99 })
    }
}

/// What never hit of these tables.
pub(crate) fn never_hit(tables: &BTreeMap<(u32, FaultKind), u64>) -> Vec<String> {
    let never = tables.iter().filter(|(_, hits)| **hits == 0);
    never.map(|((line, kind), _)| format!("{kind} of line {line}")).collect()
}

impl RunOutcome {
    /// A run that came to a verdict with nothing else known of it.
    pub(crate) fn empty(run: &kvferry_scenarios::Run, repeat: String) -> RunOutcome {
        let requests = run.requests.len() as u64;
        RunOutcome {
            scenario: run.name.clone(),
            seed: run.seed,
            requests,
            unknown: requests,
            shaped: run.shaped.clone(),
            tables: run.faults.iter().map(|fault| ((fault.line, fault.kind), 0)).collect(),
            repeat,
            ..RunOutcome::default()
        }
    }

    /// Takes over what the simulator says.
    pub(crate) fn fill(&mut self, report: RunReport) {
        let told = report.violations.iter().map(|violation| {
            let (id, at) = (violation.id.name(), seconds(violation.at));
            format!("{id} at {at:.6} s: {}", violation.text)
        });
        self.unmet = self.violations.is_empty() && report.violations.is_empty();
        let unmet = report.unmet.iter().map(|unmet| format!("expected otherwise: {unmet}"));
        self.violations.extend(told.chain(unmet));
        self.violation_count += report.violation_count + report.unmet.len() as u64;
        self.left = report.left;
        for ((kind, _), hits) in &report.faults {
            *self.faults.entry(kind.name()).or_default() += hits;
        }
        self.tables = report.fault_tables;
        self.chance_hits = report.chance_hits;
        self.never_hit = never_hit(&self.tables);
        self.coverage = report.faults;
        self.verdict = self.verdict.max(report.verdict);
        self.core = report.core;
        self.finished = report.finished;
        self.failed = report.failed;
        self.unknown = report.unknown;
        self.recomputed = report.recomputed;
        self.receivers = report.receivers;
        self.failed_causes = report.failure_causes;
        self.recomputed_causes = report.recompute_causes;
        self.trace_hash = format!("{:016x}", report.trace_hash);
        self.outputs_hash = report.outputs_hash.map(|hash| format!("{hash:016x}"));
        self.events = report.events;
        self.sim_seconds = seconds(report.sim_time);
        self.ttft = LatencyPercentiles::of(&report.ttft);
        self.transfer = LatencyPercentiles::of(&report.transfer);
        self.bytes_moved = report.bytes;
        self.link_utilisation = report.link_use_ppm as f64 / 1e6;
        self.full_links = report.full_links;
        self.operations = report.operations;
        self.peak_blocks = report.blocks_held_peak.into();
        self.peak_quarantined = report.blocks_quarantined_peak.into();
    }

    /// True if some link was used above 80 % for a second or more.
    pub(crate) fn has_full_link(&self) -> bool {
        self.full_links.first().is_some_and(|link| link.full >= FULL)
    }

    /// Something is wrong; the worst verdict stays.
    pub(crate) fn violate(&mut self, verdict: RunVerdict, text: String) {
        self.verdict = self.verdict.max(verdict);
        self.violation_count += 1;
        self.violations.push(text);
    }

    /// Compares the verdict with the exit code that the scenario expects.
    pub(crate) fn judge(&mut self, expected: u8) {
        self.exit = match self.verdict {
            verdict if verdict.code() == expected => RunVerdict::Held,
            RunVerdict::Held => {
                self.violation_count += 1;
                self.violations.push(format!("everything held, but exit {expected} is expected"));
                RunVerdict::Correctness
            }
            verdict => verdict,
        };
        self.code = self.exit.code();
    }

    /// One line of JSON.
    pub(crate) fn json(&self) -> String {
        serde_json::to_string(self).expect("an outcome is plain data")
    }
}
