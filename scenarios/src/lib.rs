//! Scenario language, presets, trace workloads and the stand-in serving engine.
//!
//! A scenario file is drawn into a [`Run`], in which every value is literal. All randomness is
//! keyed, see [`decide`].

mod bundled;
pub mod cost;
pub mod decide;
mod doc;
pub mod engine;
mod error;
pub mod fault_injector;
pub mod geometry;
pub mod lists;
mod parse;
pub mod preset;
pub mod run;
pub mod settings;
pub mod trace;
mod value;

pub use bundled::{BUNDLED, bundled};
pub use error::ScenarioError;
pub use lists::{FaultKind, InvariantId, MessageName, TriggerEvent};
pub use parse::{FaultFile, FaultSchema, Opportunity, Scenario, load, load_with_trace, parse};
pub use run::Run;
