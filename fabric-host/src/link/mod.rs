//! Connections between planes. Each has one side that initiates operations and one that serves
//! them; two planes that both initiate have two.

mod acceptor;
mod dial;
mod handshake;
mod inbound;
mod local_initiator;
mod local_link;
mod local_peer;
mod local_target;
mod outbound;
mod proof;
mod segment;
mod socket;
mod stream;
mod target;
mod tcp_initiator;
mod tcp_socket;
mod tcp_target;
mod tls_config;
mod tls_greeting;
mod tls_records;

#[cfg(all(test, not(feature = "loom")))]
mod hostile;
#[cfg(all(test, not(feature = "loom")))]
mod middleman;
#[cfg(all(test, not(feature = "loom")))]
mod several;
#[cfg(all(test, not(feature = "loom")))]
mod versions;

pub(crate) use acceptor::{HostListeners, listen};
pub(crate) use dial::{HostDialRequest, dial};
pub(crate) use inbound::HostInboundLink;
pub(crate) use local_peer::LocalPeer;
pub(crate) use outbound::{HostLinkEvent, HostOutboundLink, HostReadJob, HostReadSource};
pub(crate) use tls_config::LinkTls;

#[cfg(all(test, not(feature = "loom")))]
pub(crate) use segment::ShmSegment;

/// What carries a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum HostLinkKind {
    /// Rings in memory that two processes of one host share.
    Local,
    Tcp,
}
