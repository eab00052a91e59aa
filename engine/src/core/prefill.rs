//! The prefill side of transfers: one per engine core.

use crate::core::command::ControlCommand;
use crate::core::message::{Job, PrefillAnswer, PrefillHook, Report};
use crate::fabric::ControlEvent;
use serde::{Deserialize, Serialize};

/// What can happen to a prefill core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PrefillInput {
    /// The engine tells.
    Hook(PrefillHook),
    /// The control plane reports.
    Control(ControlEvent),
    /// The transfer actor of a rank reports.
    Report {
        /// Its TP rank.
        rank: u16,
        /// What it says.
        report: Report,
    },
    /// Register as draining from now on.
    Drain,
    /// A deadline may be due.
    Tick,
}

/// What a prefill core wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PrefillEffect {
    /// Call the control plane.
    Control(ControlCommand),
    /// Give a job to the transfer actors of all ranks.
    Job(Job),
    /// Tell the engine.
    Answer(PrefillAnswer),
}
