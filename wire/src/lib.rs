//! Control plane over ZeroMQ: DEALER for links that are dialled, one ROUTER for each channel that
//! is listened on, over TCP. Unmodified vLLM peers and routers use the same sockets.
//!
//! ```text
//!  core --> ControlPlane --> ZmqPlane ==commands==> thread: DEALER --TCP--> ROUTER of a peer
//!       <-- events ---------         <==frames=====         ROUTER <-TCP--- DEALER of a peer
//! ```
//!
//! ```
//! use kvferry_engine::fabric::{ControlPlane, LinkId, LinkKind};
//! use kvferry_wire::{WireConfig, ZmqPlane};
//!
//! let mut plane = ZmqPlane::new(WireConfig::default())?;
//! let endpoint = plane.listen(LinkKind::Handshake)?;
//! assert!(endpoint.0.starts_with("tcp://127.0.0.1:"));
//! // A peer does this; the answer is a `LinkUp` on either side, or a `LinkDown`.
//! let mut peer = ZmqPlane::new(WireConfig::default())?;
//! peer.dial(LinkId(0), &endpoint, LinkKind::Handshake)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The example `connector` of this package is two serving engines over it.
//!
//! A link is one TCP connection, which is not made again: a link that breaks is down, and the core
//! dials another. ZMTP is spoken here and not by libzmq, which has no limit for the parts of a
//! message nor for the bytes that it holds: here all memory that peers can have is limited, and
//! shared fairly by their addresses.
#![warn(missing_docs)]

mod address;
mod connection;
mod io;
mod pace;
mod plane;
mod proven;
mod seal;
mod shared;
mod signed;
mod traffic;
pub mod zmtp;

pub use plane::{WireConfig, ZmqPlane};
pub use proven::ProvenPlane;
pub use shared::{CONNECTION_CUTS, ConnectionCuts};
pub use signed::{SignedEvent, SignedPlane};
