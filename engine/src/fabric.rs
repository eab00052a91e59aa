//! The two planes through which an engine talks to the world: [`DataPlane`] moves bytes between
//! registered memory, [`ControlPlane`] moves frames. Both are poll-shaped and object safe. Calls are
//! meant to be short; [`DataPlane::deregister`] may wait for operations of peers.
//!
//! Ids are chosen by the caller, so that a call is one message without an answer and can be sent
//! to another thread or process. Only a link that the other side opened gets its id from the
//! plane ([`LinkId::INBOUND`]).
//!
//! The traits have two owners: the router has no memory, and on GPUs the control plane lives in
//! the host process while the data plane lives in the worker's.
//!
//! ```
//! use kvferry_engine::fabric::Credits;
//!
//! let (limit, one) = (Credits::of_operations(1), Credits { operations: 1, ranges: 4, bytes: 64 });
//! let mut used = Credits::default();
//! assert!(limit.fits(&used, &one));
//! used.add(&one);
//! assert!(!limit.fits(&used, &one));
//! ```

mod credits;
mod digest;
mod memory;
mod next_poll;

pub use credits::Credits;
pub use digest::{DigestBatch, DigestId, DigestParts, digest_of};
pub use memory::{Memory, OwnMemory};
pub use next_poll::NextPoll;

use crate::core::ids::{number_id, text_id};
use crate::core::time::Nanos;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::task::Waker;

number_id!(
    /// A memory region registered with a data plane.
    RegionId(u32)
);
number_id!(
    /// A remote data-plane endpoint (one TP rank of a peer engine, in one incarnation).
    PeerId(u32)
);
number_id!(
    /// A (local region, peer, remote region) triple that operations run on.
    SessionId(u32)
);
number_id!(
    /// One accepted batch; unique within a data plane's life.
    OpId(u64)
);
number_id!(
    /// Names one quiesce request.
    QuiesceTicket(u64)
);
number_id!(
    /// One end of a control connection.
    LinkId(u32)
);

impl LinkId {
    /// Set in the ids of links that the other side opened.
    pub const INBOUND: u32 = 1 << 31;

    /// Set in the ids of links that a core opens to peers that speak MoRIIO, so that they differ
    /// from those to native peers.
    pub(crate) const MORIIO: u32 = 1 << 30;

    /// True if the other side opened the link.
    pub const fn is_inbound(self) -> bool {
        self.0 & Self::INBOUND != 0
    }
}

/// Where a data plane can be reached: fabric kind, endpoint and incarnation, opaque to everyone
/// but planes of the same kind.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Address(pub Arc<[u8]>);

/// What a peer needs to reach into a region; opaque like [`Address`], void after a
/// [`DataEvent::Reset`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RegionDesc(pub Arc<[u8]>);

text_id!(
    /// Where a control plane listens, e.g. `tcp://10.0.0.1:6301`.
    Endpoint
);

impl Endpoint {
    /// A TCP port of a host; IPv6 addresses may be without brackets.
    pub fn tcp(host: &str, port: u16) -> Endpoint {
        Endpoint(format!("tcp://{}:{port}", bracketed(host)).into())
    }
}

/// The host without the brackets that an IPv6 address has before a port.
pub fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

/// The host as it stands before a port: an IPv6 address gets brackets.
pub fn bracketed(host: &str) -> Cow<'_, str> {
    match host.contains(':') && !host.starts_with('[') {
        true => format!("[{host}]").into(),
        false => host.into(),
    }
}

/// What a data plane can do; fixed for one incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Caps {
    /// Can pull.
    pub read: bool,
    /// Can push.
    pub write: bool,
    /// Most slices in one operation; one more is [`Refused::Invalid`].
    pub slices_max: u32,
    /// What may be in flight between the plane and one peer ([`PeerId`]).
    pub per_peer: Credits,
    /// What may be in flight on the plane.
    pub in_all: Credits,
    /// When written bytes are visible to their owner.
    pub placement: Placement,
    /// What [`DataPlane::fence`] revokes at most; a plane may revoke less where less will do.
    pub fence: FenceScope,
    /// How long its owner waits at least for what it cannot hurry.
    #[serde(default)]
    pub patience: PlaneTimeouts,
}

/// How long a plane may take before it reports by itself that something has failed; zero if it does
/// not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaneTimeouts {
    /// From [`DataPlane::open`] to [`DataEvent::Opened`].
    pub open: Nanos,
    /// From [`DataPlane::submit`] to [`DataEvent::Completed`].
    pub operation: Nanos,
}

/// When the bytes of a write are visible to the owner of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Placement {
    /// As soon as the operation has completed.
    OnCompletion,
    /// Only after the next `Quiet` of its session: completions may overtake data (several queue
    /// pairs, relaxed ordering). What is done is not lost, even if the session is closed before.
    OnQuiet,
}

/// What [`DataPlane::fence`] has to revoke to keep a peer out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FenceScope {
    /// The peer alone; others notice nothing.
    Peer,
    /// The regions the peer has descriptors of; other peers must learn new ones.
    Region,
    /// The whole backend: a [`DataEvent::Reset`] follows, unless the peer was kept out by less.
    Backend,
}

/// Which way an operation moves bytes, seen from its initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Direction {
    /// Remote to local.
    Read,
    /// Local to remote.
    Write,
}

/// One batch of byte ranges. The three lists have equal length; offsets are relative to the two
/// regions of the session.
#[derive(Clone, Copy, Debug)]
pub struct Submit<'a> {
    /// Chosen by the caller, who uses it once on this plane; of an operation that has not ended it is
    /// [`Refused::Invalid`].
    pub op: OpId,
    /// Names the two regions.
    pub session: SessionId,
    /// Which of them is written.
    pub direction: Direction,
    /// Offsets into the local region.
    pub local: &'a [u64],
    /// Offsets into the remote region.
    pub remote: &'a [u64],
    /// Lengths in bytes.
    pub len: &'a [u64],
}

/// Why a call was not taken. Nothing was posted and no event will follow.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refused {
    /// The plane has no room at the moment, though its [`Credits`] say so: back-pressure, never a
    /// failure. Try again after the next event.
    Busy,
    /// The session, peer or link is dead; open a new one.
    Gone,
    /// This plane cannot do it.
    Unsupported(Arc<str>),
    /// The arguments are wrong, e.g. a range outside its region; names the offender.
    Invalid(Arc<str>),
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refused::Busy => f.write_str("queue full, try again"),
            Refused::Gone => f.write_str("session, peer or link is gone"),
            Refused::Unsupported(what) => write!(f, "not supported: {what}"),
            Refused::Invalid(what) => write!(f, "invalid: {what}"),
        }
    }
}

impl std::error::Error for Refused {}

/// Why an accepted operation, registration or session failed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum FabricError {
    /// The queue pair went to its error state; the session is dead.
    QueuePair,
    /// The acknowledgement did not come in time.
    AckTimeout,
    /// The send queue overflowed below our own credits.
    QueueFull,
    /// The peer's memory refused the access.
    RemoteAccess,
    /// Our own memory refused the access.
    LocalAccess,
    /// The peer is gone.
    PeerGone,
    /// The session was closed by its owner.
    Closed,
    /// The peer could not be reached within the deadline.
    Unreachable,
    /// Anything else, in the backend's own words.
    Backend(Arc<str>),
}

impl fmt::Display for FabricError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FabricError::QueuePair => "queue pair error",
            FabricError::AckTimeout => "acknowledgement lost",
            FabricError::QueueFull => "send queue full",
            FabricError::RemoteAccess => "remote access error",
            FabricError::LocalAccess => "local protection error",
            FabricError::PeerGone => "peer gone",
            FabricError::Closed => "session closed",
            FabricError::Unreachable => "peer unreachable",
            FabricError::Backend(text) => text,
        })
    }
}

/// What is known about the bytes of a failed operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Landed {
    /// None arrived and none will.
    None,
    /// Some may have arrived, and more may until `Quiet`.
    Unknown,
    /// Every byte arrived: only the report of it failed.
    All,
}

/// How an accepted operation ended.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Completion {
    /// All bytes are in the target's memory (see [`Placement`] for their visibility).
    Done,
    /// The bytes are not to be used.
    Failed {
        /// What the plane says of it.
        cause: FabricError,
        /// What may have moved all the same.
        landed: Landed,
    },
}

/// What a data plane reports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum DataEvent {
    /// Answer to [`DataPlane::register`].
    Registered {
        /// As the caller named it.
        region: RegionId,
        /// Its descriptor for peers.
        result: Result<RegionDesc, FabricError>,
    },
    /// Answer to [`DataPlane::open`].
    Opened {
        /// As the caller named it.
        session: SessionId,
        /// Whether it can be used.
        result: Result<(), FabricError>,
    },
    /// Answer to an accepted [`DataPlane::submit`]; exactly one each.
    Completed {
        /// As the caller named it.
        op: OpId,
        /// Success, or why not.
        outcome: Completion,
    },
    /// Answer to an accepted [`DataPlane::digest`]; exactly one each.
    Digested {
        /// As the caller named it.
        id: DigestId,
        /// A digest for each part.
        result: Result<Vec<u64>, FabricError>,
    },
    /// No byte of any operation that the session accepted before the ticket can land any more,
    /// and what landed is visible.
    Quiet {
        /// As the caller named it.
        session: SessionId,
        /// The ticket of the quiesce call.
        ticket: QuiesceTicket,
    },
    /// No byte from this peer lands any more.
    Fenced {
        /// Who was fenced.
        peer: PeerId,
    },
    /// The peer is gone; its operations fail one by one.
    PeerDown {
        /// Who does not answer any more.
        peer: PeerId,
    },
    /// The backend was rebuilt: every id and descriptor is void, nothing of the old backend lands
    /// any more. One poll has one of these at most; of two between polls the later stands for both.
    Reset {
        /// The address with the new incarnation.
        address: Address,
    },
}

/// Moves bytes between registered memory of this process and of peers.
///
/// No order is promised between events of different operations, nor between data events and
/// control frames. There is no cancel: an abort stops submitting and asks for `Quiet`.
pub trait DataPlane: Send {
    /// What this plane can do.
    fn caps(&self) -> Caps;

    /// Where peers reach this plane.
    fn address(&self) -> Address;

    /// Makes memory reachable. Answered by [`DataEvent::Registered`].
    ///
    /// # Errors
    /// `Invalid` for an id in use or an empty region, `Unsupported` for this kind of memory.
    fn register(&mut self, region: RegionId, memory: Memory) -> Result<(), Refused>;

    /// Makes memory unreachable; on return no byte of a peer can land in it.
    ///
    /// # Errors
    /// `Busy` while own operations use it, `Invalid` if it is not registered.
    fn deregister(&mut self, region: RegionId) -> Result<(), Refused>;

    /// Names a peer and lets it in; no IO. Both sides connect with the fence key that they agreed
    /// on at their hello: a session opened under another, or under one that was fenced, reaches
    /// nothing, so a peer that was fenced cannot come back with what it knew before.
    ///
    /// # Errors
    /// `Invalid` for an id in use or an address of another kind of plane.
    fn connect(&mut self, peer: PeerId, address: &Address, fence_key: u64) -> Result<(), Refused>;

    /// Forgets a peer; its sessions are closed.
    fn disconnect(&mut self, peer: PeerId);

    /// Prepares transfers between two regions; may take seconds. Answered by
    /// [`DataEvent::Opened`].
    ///
    /// # Errors
    /// `Invalid` for an id in use, an unknown region or peer, or a descriptor of another kind.
    fn open(
        &mut self,
        session: SessionId,
        local: RegionId,
        peer: PeerId,
        remote: &RegionDesc,
    ) -> Result<(), Refused>;

    /// Tears a session down. Its operations fail one by one; then every outstanding quiesce
    /// ticket is answered: a closed session is quiet.
    fn close(&mut self, session: SessionId);

    /// Posts a batch.
    ///
    /// # Errors
    /// `Busy` without credit, `Gone` on a session that is dead, closed or unknown, `Unsupported` for
    /// the direction, `Invalid` for ranges outside the regions, ragged lists, too many slices, or an
    /// id of an operation that has not ended.
    fn submit(&mut self, batch: Submit<'_>) -> Result<(), Refused>;

    /// Asks for [`DataEvent::Quiet`], a barrier over what the session accepted before. Submits may
    /// go on. A session that is unknown or closed already is quiet and answers at once.
    fn quiesce(&mut self, session: SessionId, ticket: QuiesceTicket);

    /// Voids the fence key of a peer, as the owner of a destination. Answered by
    /// [`DataEvent::Fenced`]; an unknown peer is fenced already. The id stays in use until
    /// [`DataPlane::disconnect`]. Own operations towards the peer go on, unless
    /// [`FenceScope::Backend`] is revoked.
    fn fence(&mut self, peer: PeerId);

    /// True if the plane can [`DataPlane::digest`] its memory.
    fn digests(&self) -> bool {
        false
    }

    /// Digests own memory where it lies, as [`digest_of`] says; answered by
    /// [`DataEvent::Digested`]. Reads what is there at some time between the call and the answer,
    /// ahead of what is submitted later if the plane can. It takes its time in small parts, so that
    /// operations go on meanwhile. Over device memory it is a kernel on a stream of the plane's own.
    ///
    /// # Errors
    /// `Unsupported` if it cannot, `Invalid` for an unknown region or ranges outside it.
    fn digest(&mut self, _batch: DigestBatch) -> Result<(), Refused> {
        Err(Refused::Unsupported("digests of this memory".into()))
    }

    /// Wakes the owner when a poll has something to report, except what a call has done at once: the
    /// owner polls after each call.
    fn set_waker(&mut self, waker: Waker);

    /// In place of the waker, for an owner that can watch a descriptor: it becomes readable each
    /// time [`NextPoll::External`] ends, rung by the peer itself where there is one on this host,
    /// without the detour over a thread of the plane. To be asked for ahead of the first connect;
    /// from then on the waker is not called. None if the plane has no such thing.
    fn doorbell(&mut self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Appends what happened and says when to come again.
    fn poll(&mut self, now: Nanos, out: &mut Vec<DataEvent>) -> NextPoll;
}

/// What a control listener or link is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LinkKind {
    /// Hello of peers; native peers stay on it.
    Handshake,
    /// One-way messages of MoRIIO peers.
    Notify,
    /// Registration of instances with a router.
    Discovery,
    /// Handshake of MoRIIO peers with a TP rank above 0, whose memory they ask for; rank 0 is asked
    /// where peers say hello.
    RankHandshake(u16),
    /// What MoRIIO peers tell a TP rank above 0.
    RankNotify(u16),
}

impl LinkKind {
    /// Where MoRIIO peers ask for the memory of a TP rank.
    pub const fn handshake_of(rank: u16) -> LinkKind {
        if rank == 0 { LinkKind::Handshake } else { LinkKind::RankHandshake(rank) }
    }

    /// Where MoRIIO peers tell a TP rank something.
    pub const fn notify_of(rank: u16) -> LinkKind {
        if rank == 0 { LinkKind::Notify } else { LinkKind::RankNotify(rank) }
    }
}

/// What a control plane reports.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ControlEvent {
    /// A link can be used; for a link of the other side this is its first event.
    LinkUp {
        /// Its name in calls and events, chosen by who opened it.
        link: LinkId,
        /// What it is for.
        channel: LinkKind,
        /// Whence the other side opened it, where the plane can tell; meant for logs.
        from: Option<Endpoint>,
    },
    /// A message of one or more parts. Anonymous until the dialect names its sender.
    Frame {
        /// The link it came by.
        link: LinkId,
        /// Parts of a multipart message, in order.
        parts: Vec<Vec<u8>>,
    },
    /// The link is gone; what was queued on it may or may not have arrived.
    LinkDown {
        /// Whose name is void from now on.
        link: LinkId,
    },
}

/// Moves frames. Messages of one link arrive at most once and in order while the link lives;
/// nothing is promised beyond that.
pub trait ControlPlane: Send {
    /// Starts listening; fails at once if the address is taken.
    ///
    /// # Errors
    /// `Invalid` with address and reason.
    fn listen(&mut self, channel: LinkKind) -> Result<Endpoint, Refused>;

    /// Starts connecting. Answered by [`ControlEvent::LinkUp`] or [`ControlEvent::LinkDown`].
    ///
    /// # Errors
    /// `Invalid` for an id in use or of [`LinkId::INBOUND`], or an address that cannot be parsed.
    fn dial(&mut self, link: LinkId, to: &Endpoint, channel: LinkKind) -> Result<(), Refused>;

    /// Queues a message.
    ///
    /// # Errors
    /// `Busy` when the bounded queue is full, `Gone` for a link that is down.
    fn send(&mut self, link: LinkId, parts: &[&[u8]]) -> Result<(), Refused>;

    /// Lifts the limit for messages of a link whose peer was unproven, if the plane has such a
    /// limit.
    fn admit(&mut self, _link: LinkId) {}

    /// Closes a link; no event follows.
    fn hang_up(&mut self, link: LinkId);

    /// Wakes the owner when a poll has something to report, as [`DataPlane::set_waker`].
    fn set_waker(&mut self, waker: Waker);

    /// Appends what happened and says when to come again.
    fn poll(&mut self, now: Nanos, out: &mut Vec<ControlEvent>) -> NextPoll;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_have_brackets_around_ipv6_addresses_only() {
        for (host, in_endpoint) in [("10.0.0.1", "10.0.0.1"), ("::1", "[::1]"), ("[::1]", "[::1]")]
        {
            assert_eq!(Endpoint::tcp(host, 80), Endpoint(format!("tcp://{in_endpoint}:80").into()));
            assert_eq!(bracketed(host), in_endpoint);
            assert_eq!(unbracketed(in_endpoint), host.trim_matches(['[', ']']));
        }
        assert_eq!(unbracketed("[half"), "[half");
    }

    #[test]
    fn links_of_the_other_side_are_told_by_their_ids() {
        assert!(LinkId(LinkId::INBOUND | 3).is_inbound());
        assert!(!LinkId(LinkId::INBOUND - 1).is_inbound() && !LinkId(LinkId::MORIIO).is_inbound());
    }
}
