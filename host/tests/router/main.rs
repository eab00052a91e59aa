//! `kvferry router` with real sockets: stand-in instances over HTTP and ZeroMQ, and clients.

mod access;
mod admin;
mod backend;
mod bodies;
mod busy;
mod certificates;
mod dispatch;
mod ends;
mod failures;
mod headers;
mod limits;
mod load;
mod loops;
mod models;
mod parts;
mod paths;
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
