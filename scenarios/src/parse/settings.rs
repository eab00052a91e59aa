//! `[engine]` and `[expect]`.

use super::topology::or;
use crate::cost::StepCost;
use crate::decide::DecisionKey;
use crate::doc::TomlSection;
use crate::error::ScenarioError;
use crate::lists::InvariantId;
use crate::run::{
    AllocationOrder, CountBounds, EngineSettings, Expect, ExpectedOperations, ExpectedRequests,
    FirstTokenDeadline, LivenessMode, LoadFailurePolicy, MemoryFidelity,
};
use crate::value::{Distribution, Femtoseconds, named_values};
use kvferry_engine::core::Nanos;

named_values! {
    LoadFailurePolicy: "recompute" = LoadFailurePolicy::Recompute, "fail" = LoadFailurePolicy::Fail;
    AllocationOrder: "fifo" = AllocationOrder::Fifo, "lifo" = AllocationOrder::Lifo;
    LivenessMode: "heal" = LivenessMode::Heal, "core" = LivenessMode::Core;
    MemoryFidelity: "bytes" = MemoryFidelity::Bytes, "cells" = MemoryFidelity::Cells;
}

#[derive(Debug)]
pub(super) struct EngineSpec {
    chunk: Distribution<u32>,
    max_running: Distribution<u32>,
    max_waiting: Distribution<u32>,
    load_failure: Distribution<LoadFailurePolicy>,
    allocator: Distribution<AllocationOrder>,
    step: Option<Distribution<Nanos>>,
    weights: Option<Distribution<Nanos>>,
    token: Option<Distribution<Femtoseconds>>,
    pair: Option<Distribution<Femtoseconds>>,
    context: Option<Distribution<Femtoseconds>>,
}

impl EngineSpec {
    pub(super) fn read(section: &TomlSection<'_>) -> Result<EngineSpec, ScenarioError> {
        let spec = EngineSpec {
            chunk: section.limited_or("chunk", 2048, (1, 1 << 24))?,
            max_running: section.limited_or("max_running", 256, (1, 1 << 20))?,
            max_waiting: section.limited_or("max_waiting", 1 << 16, (1, 1 << 20))?,
            load_failure: section.draw_or("load_failure", LoadFailurePolicy::Recompute)?,
            allocator: section.draw_or("allocator", AllocationOrder::Fifo)?,
            step: section.draw("step")?,
            weights: section.draw("weights")?,
            token: section.draw("token")?,
            pair: section.draw("pair")?,
            context: section.draw("context")?,
        };
        section.finish()?;
        Ok(spec)
    }

    pub(super) fn draw(&self, seed: u64) -> EngineSettings {
        let key = DecisionKey::new(seed, "engine");
        EngineSettings {
            chunk: self.chunk.draw(&key.part("chunk")),
            max_running: self.max_running.draw(&key.part("max_running")),
            max_waiting: self.max_waiting.draw(&key.part("max_waiting")),
            load_failure: self.load_failure.draw(&key.part("load_failure")),
            allocator: self.allocator.draw(&key.part("allocator")),
        }
    }

    /// Replaces the parts of a cost that the file sets.
    pub(super) fn cost(&self, seed: u64, cost: StepCost) -> StepCost {
        let key = DecisionKey::new(seed, "engine");
        StepCost {
            step: or(&self.step, cost.step, &key.part("step")),
            weights: or(&self.weights, cost.weights, &key.part("weights")),
            token_fs: or(&self.token, Femtoseconds(cost.token_fs), &key.part("token")).0,
            pair_fs: or(&self.pair, Femtoseconds(cost.pair_fs), &key.part("pair")).0,
            context_fs: or(&self.context, Femtoseconds(cost.context_fs), &key.part("context")).0,
        }
    }
}

/// Exit codes that a run can have.
const EXITS: &[u64] = &[0, 3, 4, 5, 6];

pub(super) fn expect(section: &TomlSection<'_>) -> Result<Expect, ScenarioError> {
    let names: Vec<&str> = InvariantId::ALL.iter().map(|id| id.name()).collect();
    let hold = match section.get("hold") {
        Some(field) => field.entries(&names, InvariantId::from_name)?,
        None => InvariantId::ALL.to_vec(),
    };
    let exit = section.literal::<u64>("exit")?.unwrap_or(0);
    if !EXITS.contains(&exit) {
        let what = format!("`{}` is {exit}", section.path("exit"));
        let remedy =
            "give 0 (held), 3 (liveness), 4 (correctness), 5 (not deterministic) or 6 (panic)";
        return Err(section.doc.file.error(section.line_of("exit"), what, remedy));
    }
    let requests = section.section("requests")?;
    let counts = ExpectedRequests {
        finished: bounds(&requests, "finished")?,
        failed: bounds(&requests, "failed")?,
        unknown: bounds(&requests, "unknown")?,
        recomputed: bounds(&requests, "recomputed")?,
    };
    requests.finish()?;
    let operations = operations(section)?;
    let first_tokens = section.sections("first_tokens")?;
    let first_tokens = first_tokens.iter().map(first_token).collect::<Result<_, _>>()?;
    let within = section.literal("within")?;
    section.finish()?;
    Ok(Expect { within, hold, requests: counts, operations, first_tokens, exit: exit as u8 })
}

fn operations(section: &TomlSection<'_>) -> Result<ExpectedOperations, ScenarioError> {
    let section = section.section("operations")?;
    let counts = ExpectedOperations {
        posted: bounds(&section, "posted")?,
        refused: bounds(&section, "refused")?,
        failed: bounds(&section, "failed")?,
    };
    section.finish()?;
    Ok(counts)
}

fn first_token(section: &TomlSection<'_>) -> Result<FirstTokenDeadline, ScenarioError> {
    let (request, within) = (section.literal("request")?, section.literal("within")?);
    section.finish()?;
    match (request, within) {
        (Some(request), Some(within)) => Ok(FirstTokenDeadline { request, within }),
        _ => {
            let what = "a first token without `request` or `within`";
            Err(section.error(what, "give the number of the request, from 0, and a duration"))
        }
    }
}

/// A count or a range of counts. Nothing is drawn: any count inside is right.
fn bounds(
    section: &TomlSection<'_>,
    key: &'static str,
) -> Result<Option<CountBounds>, ScenarioError> {
    let Some(draw) = section.draw::<u64>(key)? else { return Ok(None) };
    match draw.single() {
        Some((min, max)) => Ok(Some(CountBounds { min: *min, max: *max })),
        None => {
            let what = format!("`{}` is a choice", section.path(key));
            Err(section.doc.file.error(draw.line, what, "give a count or a range of counts"))
        }
    }
}
