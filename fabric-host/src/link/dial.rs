//! Dials a peer and says hello. Each dial has a thread of its own for as long as it takes.

use super::handshake::HandshakeSocket;
use super::local_initiator::LocalInitiator;
use super::local_link::LocalLinkHandles;
use super::outbound::{HostOutboundLink, LocalOutbound};
use super::proof::say_hello;
use super::segment::ShmSegment;
use super::target::share_files;
use super::tcp_initiator::TcpInitiator;
use super::tcp_socket::TcpLinkSocket;
use super::{HostLinkKind, LocalPeer};
use crate::config::DataPath;
use crate::descriptor::HostPlaneAddress;
use crate::doorbell::{HeardBell, PeerBell};
use crate::memory::{MemfdMapping, TABLE_BYTES};
use crate::proto::{HostControlMessage, OLDEST, PathPolicy, VERSION, local_version};
use crate::shared::{DialledLink, HostDialError, HostPlaneShared, HostWorkerEvent};
use kvferry_fabric_common::spawn;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

/// Whom to dial and how.
#[derive(Clone, Debug)]
pub(crate) struct HostDialRequest {
    pub(crate) id: u64,
    pub(crate) to: HostPlaneAddress,
    pub(crate) fence_key: u64,
    pub(crate) kind: HostLinkKind,
    /// Connections by TCP.
    pub(crate) streams: u32,
    /// Broken links of ours that the peer has to leave before it answers.
    pub(crate) ends: Vec<u64>,
}

impl HostDialError {
    pub(super) fn ours(why: impl ToString) -> HostDialError {
        HostDialError { why: why.to_string(), unreachable: false, gone: false }
    }

    pub(super) fn unreachable(why: impl ToString, gone: bool) -> HostDialError {
        HostDialError { why: why.to_string(), unreachable: true, gone }
    }
}

/// Starts to dial; the answer is a notice.
pub(crate) fn dial(hub: &Arc<HostPlaneShared>, dial: HostDialRequest) {
    let hub_too = hub.clone();
    let id = dial.id;
    let run = move || {
        let result = dial_links(&hub_too, &dial);
        hub_too.notify(HostWorkerEvent::Dialled { dial: id, result });
    };
    if let Err(why) = spawn("kvferry-dial", run) {
        hub.notify(HostWorkerEvent::Dialled { dial: id, result: Err(HostDialError::ours(why)) });
    }
}

/// The hello of a dial.
pub(super) fn hello(
    hub: &HostPlaneShared,
    dial: &HostDialRequest,
    link: u64,
) -> HostControlMessage {
    HostControlMessage::Hello {
        version: OLDEST,
        from: hub.location.encode().0.to_vec(),
        to: (dial.to.who.key.to_string(), dial.to.who.incarnation),
        fence_key: dial.fence_key,
        link,
        ends: dial.ends.clone(),
        rules: hub.rules(),
        newest: Some(VERSION),
        offer: None,
    }
}

/// The rules of who let us in, and whether it may say more than this plane knows.
pub(super) fn welcomed(
    answer: HostControlMessage,
    kind: HostLinkKind,
) -> Result<(PathPolicy, bool), HostDialError> {
    match answer {
        HostControlMessage::Welcome { rules, version } => {
            let spoken = HostControlMessage::chosen(version).map_err(HostDialError::ours)?;
            if kind == HostLinkKind::Local {
                local_version(spoken.oldest).map_err(HostDialError::ours)?;
            }
            Ok((rules, spoken.is_later()))
        }
        HostControlMessage::Refuse { why, over: gone } => {
            Err(HostDialError { why: format!("refused: {why}"), unreachable: false, gone })
        }
        _ => Err(HostDialError::ours("an answer that is none")),
    }
}

fn connect_local(to: &HostPlaneAddress) -> Result<OwnedFd, HostDialError> {
    let flags = SocketFlags::CLOEXEC;
    let peer = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|why| HostDialError::ours(format!("socket: {why}")))?;
    let name = to.socket_name();
    let at = SocketAddrUnix::new_abstract_name(&name).map_err(HostDialError::ours)?;
    connect(&peer, &at).map_err(|why| {
        let text = format!("unix socket @{}: {why}", name.escape_ascii());
        // The name is that of one incarnation of one plane in this network namespace.
        HostDialError::unreachable(text, why == Errno::CONNREFUSED)
    })?;
    Ok(peer)
}

fn connect_tcp(to: &HostPlaneAddress, deadline: Instant) -> Result<OwnedFd, HostDialError> {
    let at = |why: std::io::Error| format!("{}:{}: {why}", to.host, to.port);
    let addresses = (&*to.host, to.port)
        .to_socket_addrs()
        .map_err(|why| HostDialError::unreachable(at(why), false))?;
    let nowhere = format!("{}:{}: no such address", to.host, to.port);
    let mut peer = Err(HostDialError::unreachable(nowhere, false));
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        peer = TcpStream::connect_timeout(&address, left).map(OwnedFd::from).map_err(|why| {
            // The listener of a plane outlives its threads.
            let gone = why.kind() == ErrorKind::ConnectionRefused;
            HostDialError::unreachable(at(why), gone)
        });
        if peer.is_ok() {
            break;
        }
    }
    peer
}

fn dial_links(
    hub: &Arc<HostPlaneShared>,
    dial: &HostDialRequest,
) -> Result<Vec<DialledLink>, HostDialError> {
    let deadline = Instant::now() + hub.config.connect();
    let count = if dial.kind == HostLinkKind::Tcp { dial.streams } else { 1 };
    let mut links: Vec<DialledLink> = Vec::new();
    for _ in 0..count {
        let id = hub.fresh_link(links.iter().map(|(link, _)| link.id));
        links.push(dial_link(hub, dial, id, deadline)?);
    }
    Ok(links)
}

fn dial_link(
    hub: &Arc<HostPlaneShared>,
    dial: &HostDialRequest,
    id: u64,
    deadline: Instant,
) -> Result<DialledLink, HostDialError> {
    let peer = match dial.kind {
        HostLinkKind::Local => connect_local(&dial.to)?,
        HostLinkKind::Tcp => connect_tcp(&dial.to, deadline)?,
    };
    let at = match dial.kind {
        HostLinkKind::Local => String::new(),
        HostLinkKind::Tcp => format!("{}:{}: ", dial.to.host, dial.to.port),
    };
    let silent = |why| HostDialError::unreachable(format!("{at}{why}"), false);
    let named = match dial.kind {
        HostLinkKind::Local => {
            let named = LocalPeer::new(peer.as_fd(), &hub.config.trust.uids);
            Some(named.map_err(|why| HostDialError::ours(format!("not dialled: {why}")))?)
        }
        HostLinkKind::Tcp => None,
    };
    let mut peer =
        HandshakeSocket::new(dial.kind, peer, (&hub.config, deadline)).map_err(silent)?;
    if let (HandshakeSocket::Tcp(peer), Some(tls)) = (&mut peer, &hub.tls) {
        peer.dial(tls).map_err(|why| match why.kind() {
            // It was there, and is told of.
            ErrorKind::Other => HostDialError::ours(format!("{at}{why}")),
            _ => silent(why),
        })?;
    }
    let segment = (dial.kind == HostLinkKind::Local).then(ShmSegment::create).transpose();
    let segment = segment.map_err(HostDialError::ours)?;
    let worker = hub.worker_of(id).clone();
    let local = segment.map(|segment| HeardBell::pair().map(|bell| (segment, bell))).transpose();
    let local = local.map_err(HostDialError::ours)?;
    let along: Vec<_> =
        local.iter().flat_map(|((_, file), (_, rung))| [file.as_fd(), rung.as_fd()]).collect();
    let (answer, fds) = say_hello(hub, (&mut peer, &at), hello(hub, dial, id), &along)?;
    let (rules, later) = welcomed(answer, dial.kind)?;
    let (Some(((segment, _), (heard, _))), Some(named)) = (local, named) else {
        if !rules.paths.contains(&DataPath::Tcp) {
            return Err(HostDialError::ours("the peer does not allow tcp: add it to its `paths`"));
        }
        let (socket, tls) = peer.unblock().map_err(HostDialError::ours)?;
        let socket = TcpLinkSocket::new(socket, tls).map_err(HostDialError::ours)?;
        let link = Arc::new(HostOutboundLink::new(id, HostLinkKind::Tcp, worker, None));
        return Ok((link.clone(), Box::new(TcpInitiator::new(socket, link, later))));
    };
    let [bell, table] = <[OwnedFd; 2]>::try_from(fds)
        .map_err(|_| HostDialError::ours("a welcome without descriptors"))?;
    let table = MemfdMapping::new(&table, TABLE_BYTES, false).map_err(HostDialError::ours)?;
    let (socket, _) = peer.unblock().map_err(HostDialError::ours)?;
    let bell = PeerBell::new(bell).map_err(HostDialError::ours)?;
    // Nobody but the owner needs to hear how its writes went.
    let (by_owner, by_thread) = match hub.bell() {
        Some(owner) => {
            owner.watch(id, &heard).map_err(HostDialError::ours)?;
            (Some(heard), None)
        }
        None => (None, Some(heard)),
    };
    let files = share_files([&hub.rules(), &rules]);
    let local =
        LocalOutbound { segment: segment.clone(), bell: bell.clone(), heard: by_owner, files };
    let link = Arc::new(HostOutboundLink::new(id, HostLinkKind::Local, worker, Some(local)));
    let ends = LocalLinkHandles::new((socket, named), (bell, by_thread), segment, (rules, later));
    Ok((link.clone(), Box::new(LocalInitiator::new(ends, link, table))))
}
