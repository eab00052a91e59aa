//! Scenario language, presets, trace workloads and the stand-in serving engine.
//!
//! A scenario file is drawn into a [`Run`], in which every value is literal. All randomness is
//! keyed, see [`decide`].

pub mod cost;
pub mod decide;
pub mod engine;
mod error;
pub mod geometry;
pub mod lists;
pub mod run;

pub use error::ScenarioError;
pub use lists::{Event, FaultKind, InvariantId, MessageName};
pub use run::Run;
