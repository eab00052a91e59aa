//! Control plane over ZeroMQ: DEALER for links that are dialled, one ROUTER for each channel that
//! is listened on, over TCP. Unmodified vLLM peers and routers use the same sockets.
//!
//! A link is one TCP connection. libzmq does not get to reconnect: a link that breaks is down, and
//! the core dials another. libzmq cannot close one peer of a ROUTER, so hanging up an inbound link
//! means not listening to it any more; its memory is freed when the other side closes.
#![warn(missing_docs)]

mod address;
mod dialler;
mod io;
mod listener;
mod message;
mod monitor;
mod plane;
mod shared;

pub use plane::{WireConfig, ZmqPlane};
