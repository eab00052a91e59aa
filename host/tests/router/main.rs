//! `kvferry router` with real sockets: stand-in instances over HTTP and ZeroMQ, and clients.

mod backend;
mod dispatch;
mod rig;
