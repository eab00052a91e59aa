//! `kvferry router` with real sockets: stand-in instances over HTTP and ZeroMQ, and clients.

mod admin;
mod backend;
mod bodies;
mod busy;
mod certificates;
mod dispatch;
mod ends;
mod failures;
mod limits;
mod load;
mod models;
mod parts;
mod proxied;
mod raw_instance;
mod registrations;
mod requests;
mod rig;
mod static_instances;
mod streams;
mod switch;
mod tls;
mod unread;
