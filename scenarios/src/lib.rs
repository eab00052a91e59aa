//! Scenario language, presets, trace workloads and the stand-in serving engine.
//!
//! A scenario file is drawn into a [`Run`], in which every value is literal. All randomness is
//! keyed, see [`decide`].
//!
//! ```
//! let text = "about = 'one prompt'\nseed = 1\n[workload]\nmode = 'push'\nrequests = 1\n";
//! let scenario = kvferry_scenarios::parse("one.toml", text, ".".as_ref(), None)?;
//! // The same seed is the same run.
//! assert_eq!(scenario.draw(3)?, scenario.draw(3)?);
//! let typo = text.replace("requests", "request");
//! let error = kvferry_scenarios::parse("one.toml", &typo, ".".as_ref(), None).unwrap_err();
//! assert!(error.to_string().contains("one.toml:5"), "{error}");
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

mod bundled;
pub mod cost;
pub mod engine;
pub mod geometry;
pub mod lists;
mod parse;
pub mod preset;
pub mod products;
pub mod run;
pub mod trace;
mod written;

pub use kvferry_faults::{FaultSchema, Opportunity, ScenarioError, decide};
use kvferry_faults::{doc, value};

pub use bundled::{BUNDLED, bundled};
pub use lists::{FaultKind, InvariantId, MessageName, TriggerEvent};
pub use parse::{
    Scenario, drawn, drawn_text, explicit, explicit_requests, load, load_with_trace, parse,
};
pub use run::Run;
pub use written::written;
