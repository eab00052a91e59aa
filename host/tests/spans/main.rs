//! Spans: `kvferry router` and `kvferry serve` as processes, with the test as the collector.

#[path = "../router/backend.rs"]
#[allow(dead_code, reason = "the tests of the router use the rest")]
mod backend;
mod closed;
mod collector;
#[path = "../closed/fleet.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod fleet;
mod misbehaves;
#[path = "../serve/process.rs"]
#[allow(dead_code, reason = "other test programs use the rest")]
mod process;
#[path = "../router/rig.rs"]
#[allow(dead_code, reason = "the tests of the router use the rest")]
mod rig;
mod router;
