//! Deterministic simulator of everything around the protocol: time, memory, data network and
//! control network.
//!
//! [`queue`] orders what happens, [`memory`] holds the KV, [`dma`] moves it and [`net`] carries
//! control frames; both have a half that a process owns (a plane, [`dma::SimDataPlane`] and
//! [`net::SimControlPlane`]) and a half that the world owns ([`dma::Dma`] and
//! [`net::ControlNetwork`]). The halves talk in values, so that they can live in one loop or on
//! both sides of a mailbox.
//!
//! ```text
//!  scenario file + seed --> Run --> world::Simulation -- step --> machines of kvferry-engine
//!                                     |  queue, clients, faults  <-- effects --
//!                                     |  dma, net, memory
//!                                     v
//!                                   invariants, trace hash --> RunReport
//! ```
//!
//! ```
//! use kvferry_scenarios::parse;
//! use kvferry_sim::world::{RunVerdict, SimOptions, run};
//!
//! let text = "about = 'one prompt'\nseed = 1\n[workload]\nmode = 'push'\nrequests = 1\n";
//! let scenario = parse("one.toml", text, ".".as_ref(), None)?;
//! let report = run(&scenario.draw(1)?, SimOptions::default());
//! assert_eq!((report.verdict, report.finished), (RunVerdict::Held, 1));
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

mod abilities;
pub mod dma;
pub mod faults;
pub mod hash;
pub mod invariants;
pub mod keyed_rng;
pub mod memory;
pub mod net;
pub mod observation;
pub mod products;
pub mod queue;
pub mod replay;
mod slab;
#[cfg(test)]
mod testing;
pub mod world;
