//! Moves bytes: one per TP rank, told what by its prefill or decode core.

use crate::core::command::{DataCommand, DataRefusal};
use crate::core::ids::StepId;
use crate::core::message::{Job, Report};
use crate::fabric::DataEvent;
use serde::{Deserialize, Serialize};

/// What can happen to a transfer actor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransferInput {
    /// A job of the core.
    Job(Job),
    /// The engine's worker computed layers `..layers` of a step (`save_kv_layer`,
    /// `wait_for_save`); the model's layer count ends the step. Steps come in order, a step may be
    /// skipped, and a later step means that the earlier ones are complete.
    Layers {
        /// The step.
        step: StepId,
        /// Layers complete.
        layers: u16,
    },
    /// The data plane reports.
    Data(DataEvent),
    /// The data plane did not take a call.
    Refused(DataRefusal),
    /// A deadline may be due.
    Tick,
}

/// What a transfer actor wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransferEffect {
    /// Call the data plane.
    Data(DataCommand),
    /// Tell the core.
    Report(Report),
}
