//! `[engine]` and `[expect]`.

use crate::ScenarioError;
use crate::cost::StepCost;
use crate::decide::DecisionKey;
use crate::doc::{FromKey, TomlField, TomlSection};
use crate::run::{
    AllocationOrder, CountBounds, EngineSettings, Expect, LivenessMode, LoadFailurePolicy,
    MemoryFidelity,
};
use crate::value::Femtoseconds;
use kvferry_engine::core::Nanos;
use kvferry_faults::{named_values, settings};

named_values! {
    LoadFailurePolicy: "recompute" = LoadFailurePolicy::Recompute, "fail" = LoadFailurePolicy::Fail;
    AllocationOrder: "fifo" = AllocationOrder::Fifo, "lifo" = AllocationOrder::Lifo;
    LivenessMode: "heal" = LivenessMode::Heal, "core" = LivenessMode::Core;
    MemoryFidelity: "bytes" = MemoryFidelity::Bytes, "cells" = MemoryFidelity::Cells;
}

/// What `[engine]` sets.
pub(super) struct EngineDraw {
    pub(super) settings: EngineSettings,
    /// Of a step of one instance.
    pub(super) cost: StepCost,
}

settings! {
    pub(super) struct EngineSpec sets EngineDraw {
        chunk: u32, in (1, 1 << 24) => settings.chunk;
        max_running: u32, in (1, 1 << 20) => settings.max_running;
        max_waiting: u32, in (1, 1 << 20) => settings.max_waiting;
        load_failure: LoadFailurePolicy => settings.load_failure;
        allocator: AllocationOrder => settings.allocator;
        early_percent: u32, in (0, 100) => settings.early_percent;
        step: Nanos => cost.step;
        weights: Nanos => cost.weights;
        token: Femtoseconds => cost.token_fs;
        pair: Femtoseconds => cost.pair_fs;
        context: Femtoseconds => cost.context_fs;
    }
}

impl EngineSpec {
    /// The settings of the engines, and the cost of a step of the one that it is `cost` for but
    /// for what the file sets.
    pub(super) fn draw_for(&self, seed: u64, cost: StepCost) -> EngineDraw {
        let base = EngineDraw { settings: EngineSettings::default(), cost };
        self.draw(&DecisionKey::new(seed, "engine"), base)
    }
}

/// Exit codes that a run can have.
const EXITS: &[u8] = &[0, 3, 4, 5, 6];

impl Expect {
    pub(crate) fn check(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        if EXITS.contains(&self.exit) {
            return Ok(());
        }
        let what = format!("`{}` is {}", section.path("exit"), self.exit);
        let remedy =
            "give 0 (held), 3 (liveness), 4 (correctness), 5 (not deterministic) or 6 (panic)";
        Err(section.error_at(section.line_of("exit"), what, remedy))
    }
}

/// A count or a range of counts. Nothing is drawn: any count inside is right.
impl FromKey for CountBounds {
    fn from_field(field: &TomlField<'_>) -> Result<CountBounds, ScenarioError> {
        match field.draw::<u64>()?.single() {
            Some((min, max)) => Ok(CountBounds { min: *min, max: *max }),
            None => {
                let what = format!("`{}` is a choice", field.path);
                Err(field.error(what, "give a count or a range of counts"))
            }
        }
    }
}
