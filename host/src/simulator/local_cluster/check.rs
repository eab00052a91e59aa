//! What is checked of a run on processes: the digests, the counts, and that nothing is left.

use super::child::LocalCluster;
use super::client::{ClusterClient, RequestOutcome};
use crate::serve::kv_content::{expected, prompt, prompt_ids};
use crate::simulator::outcome::RunOutcome;
use kvferry_scenarios::run::{CountBounds, Expect, ExpectedOperations, ExpectedRequests};
use kvferry_scenarios::{InvariantId, Run};
use kvferry_sim::world::RunVerdict;
use std::time::{Duration, Instant};

/// Invariants that are seen from outside: wrong bytes, leaks, outcomes, ends.
const CHECKED: [InvariantId; 4] = [
    InvariantId::NoForeignBytes,
    InvariantId::NoLeak,
    InvariantId::OneOutcome,
    InvariantId::EveryRequestEnds,
];

pub(super) struct RunChecks<'a> {
    run: &'a Run,
}

impl<'a> RunChecks<'a> {
    pub(super) fn new(run: &'a Run) -> RunChecks<'a> {
        RunChecks { run }
    }

    /// Compares the digests of a request with those of its prompts.
    pub(super) fn request(&mut self, index: usize, end: RequestOutcome) -> RequestOutcome {
        let RequestOutcome::Finished { digests } = end else { return end };
        let request = &self.run.requests[index];
        let geometry =
            kvferry_scenarios::geometry::geometry(&self.run.model, &self.run.instances[0]);
        let row = (self.run.model.head_bytes as usize / 2, self.run.model.element as usize);
        let samples = request.samples.max(1) as usize;
        if digests.len() != request.prompts.len() * samples {
            let (got, want) = (digests.len(), request.prompts.len() * samples);
            return RequestOutcome::Wrong(format!(
                "I5-one-outcome: request {index} has {got} samples in place of {want}"
            ));
        }
        for (at, content) in request.prompts.iter().enumerate() {
            let content = prompt(&prompt_ids(content, self.run.prefix_tokens));
            let want = expected(&geometry, row, &content, content.tokens);
            let got = &digests[at * samples..(at + 1) * samples];
            if let Some(got) = got.iter().find(|got| **got != want) {
                return RequestOutcome::Wrong(format!(
                    "I1-no-foreign-bytes: prompt {at} of request {index} was answered from KV \
                     {got}, its own is {want}"
                ));
            }
        }
        RequestOutcome::Finished { digests }
    }

    /// Waits until no living instance holds blocks or has legs.
    pub(super) async fn wait_quiescent(
        &self,
        fleet: &LocalCluster,
        client: &ClusterClient,
        outcome: &mut RunOutcome,
        within: Duration,
    ) {
        let begun = Instant::now();
        loop {
            let mut left = Vec::new();
            for process in fleet.instances.iter().filter(|process| process.alive) {
                let Ok(http) = process.ready("http") else { continue };
                match client.metrics(http).await {
                    None => left.push(format!("{} does not answer", process.name)),
                    Some(metrics) => {
                        let legs = metrics.sum("kvferry_legs_open");
                        let held = metrics.sum("kvferry_blocks_held");
                        let faults = metrics.sum("kvferry_faults_total");
                        if faults > 0 {
                            let text = format!("{} broke {faults} promises", process.name);
                            return outcome.violate(RunVerdict::Correctness, text);
                        }
                        if legs + held > 0 {
                            left.push(format!("{}: {legs} legs, {held} blocks", process.name));
                        }
                    }
                }
            }
            if left.is_empty() {
                return;
            }
            if begun.elapsed() > within {
                let text = format!("I3-no-leak: after {within:?} {}", left.join("; "));
                return outcome.violate(RunVerdict::Correctness, text);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Compares the counts, and names what was not checked.
    pub(super) fn expectations(&self, outcome: &mut RunOutcome) {
        let ExpectedRequests { finished, failed, unknown, recomputed } = self.run.expect.requests;
        let counts = [
            ("finished", finished, outcome.finished),
            ("failed", failed, outcome.failed),
            ("unknown", unknown, outcome.unknown),
            ("recomputed", recomputed, outcome.recomputed),
        ];
        for (name, bounds, count) in counts {
            let Some(bounds) = bounds else { continue };
            // What only a fault brings about does not come without it.
            let may_be_fewer = name != "finished" && !outcome.skipped.is_empty();
            let bounds = CountBounds { min: if may_be_fewer { 0 } else { bounds.min }, ..bounds };
            if bounds.contains(count) {
                continue;
            }
            let text = format!("expected otherwise: {count} requests {name}, not {bounds}");
            outcome.violate(RunVerdict::Correctness, text);
        }
        let Expect { operations, first_tokens, .. } = &self.run.expect;
        if *operations != ExpectedOperations::default() || !first_tokens.is_empty() {
            let text = "expected operations and first tokens: not seen from outside";
            outcome.skipped.push(text.into());
        }
        let unseen = self.run.expect.hold.iter().filter(|id| !CHECKED.contains(id));
        let unseen: Vec<&str> = unseen.map(|id| id.name()).collect();
        if !unseen.is_empty() {
            let text = format!("not seen from outside: {}", unseen.join(", "));
            outcome.skipped.push(text);
        }
    }
}
