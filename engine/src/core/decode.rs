//! The decode side of transfers: one per engine core.

use crate::core::command::ControlCommand;
use crate::core::message::{DecodeAnswer, DecodeHook, Job, Report};
use crate::fabric::ControlEvent;
use serde::{Deserialize, Serialize};

/// What can happen to a decode core.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DecodeInput {
    /// The engine tells.
    Hook(DecodeHook),
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

/// What a decode core wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DecodeEffect {
    /// Call the control plane.
    Control(ControlCommand),
    /// Give a job to the transfer actors of all ranks.
    Job(Job),
    /// Tell the engine.
    Answer(DecodeAnswer),
}
