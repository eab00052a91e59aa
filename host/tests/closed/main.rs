//! What the router core consumes is produced by the programs that are deployed: `kvferry router`
//! and `kvferry serve` as processes, with the test as clients, as the network between two of them,
//! or as an instance that misbehaves.

mod cut;
mod fits;
mod fleet;
mod ghost;
mod handover;
mod inputs;
mod played;
#[path = "../serve/process.rs"]
mod process;
mod registered;
mod seen;
mod slow;
