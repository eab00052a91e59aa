//! Scenario language, presets, trace workloads and the stand-in serving engine.
//!
//! A scenario file is drawn into a [`Run`], in which every value is literal. All randomness is
//! keyed, see [`decide`].

mod bundled;
pub mod cost;
pub mod engine;
pub mod geometry;
pub mod lists;
mod parse;
pub mod preset;
pub mod run;
pub mod trace;

pub use kvferry_faults::{FaultSchema, Opportunity, ScenarioError, decide};
use kvferry_faults::{doc, value};

pub use bundled::{BUNDLED, bundled};
pub use lists::{FaultKind, InvariantId, MessageName, TriggerEvent};
pub use parse::{Scenario, load, load_with_trace, parse};
pub use run::Run;
