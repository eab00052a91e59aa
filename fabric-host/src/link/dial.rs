//! Dials a peer and says hello. Each dial has a thread of its own for as long as it takes.

use super::acceptor::{limit, unblock};
use super::local_initiator::LocalInitiator;
use super::local_target::LocalLinkHandles;
use super::outbound::{DoorbellTarget, HostOutboundLink};
use super::segment::ShmSegment;
use super::tcp_initiator::TcpInitiator;
use super::{HostLinkDriver, HostLinkKind, socket, tcp_handshake};
use crate::config::DataPath;
use crate::descriptor::HostPlaneAddress;
use crate::memory::{MemfdMapping, PidfdProcess, ROLL_BYTES};
use crate::proto::{HostControlMessage, OLDEST, PathPolicy, VERSION};
use crate::shared::{HostPlaneShared, HostWorkerEvent};
use crate::sys;
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
    /// Broken links of ours that the peer has to leave before it answers.
    pub(crate) ends: Vec<u64>,
}

/// A link, and what its thread has to serve.
type DialledLink = (Arc<HostOutboundLink>, Box<dyn HostLinkDriver>);

/// Why there is no link.
pub(super) struct HostDialError {
    why: String,
    /// Nobody answered; else it was a refusal or ours.
    unreachable: bool,
    /// The plane that was meant has ended.
    gone: bool,
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
        let link = match dial.kind {
            HostLinkKind::Local => dial_local(&hub_too, &dial),
            HostLinkKind::Tcp => dial_tcp(&hub_too, &dial),
        };
        hub_too.notify(match link {
            Ok((link, station)) => HostWorkerEvent::LinkUp { dial: dial.id, link, station },
            Err(HostDialError { why, unreachable, gone }) => {
                HostWorkerEvent::DialFailed { dial: dial.id, why, unreachable, gone }
            }
        });
    };
    if let Err(why) = std::thread::Builder::new().name("kvferry-dial".into()).spawn(run) {
        let why = format!("thread: {why}");
        hub.notify(HostWorkerEvent::DialFailed { dial: id, why, unreachable: false, gone: false });
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
    }
}

/// The rules of who let us in, and whether it may say more than this plane knows.
pub(super) fn welcomed(answer: HostControlMessage) -> Result<(PathPolicy, bool), HostDialError> {
    match answer {
        HostControlMessage::Welcome { rules, version } => {
            let spoken = HostControlMessage::chosen(version).map_err(HostDialError::ours)?;
            Ok((rules, spoken.is_later()))
        }
        HostControlMessage::Refuse { why, over: gone } => {
            Err(HostDialError { why: format!("refused: {why}"), unreachable: false, gone })
        }
        _ => Err(HostDialError::ours("an answer that is none")),
    }
}

fn dial_local(
    hub: &Arc<HostPlaneShared>,
    dial: &HostDialRequest,
) -> Result<DialledLink, HostDialError> {
    let flags = SocketFlags::CLOEXEC;
    let peer = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|why| HostDialError::ours(format!("socket: {why}")))?;
    limit(peer.as_fd(), hub.config.connect()).map_err(HostDialError::ours)?;
    let name = dial.to.socket_name();
    let at = SocketAddrUnix::new_abstract_name(&name).map_err(HostDialError::ours)?;
    connect(&peer, &at).map_err(|why| {
        let text = format!("unix socket @{}: {why}", name.escape_ascii());
        // The name is that of one incarnation of one plane in this network namespace.
        HostDialError::unreachable(text, why == Errno::CONNREFUSED)
    })?;
    let (segment, file) = ShmSegment::create().map_err(HostDialError::ours)?;
    let id = hub.fresh();
    let worker = hub.worker_of(id);
    let silent = |_| HostDialError::unreachable("no answer to the hello", false);
    // Nobody but the owner needs to hear how its writes went.
    let (ours, heard_by) = match hub.bell() {
        Some(bell) => (bell, DoorbellTarget::Owner),
        None => (worker.bell(), DoorbellTarget::Thread),
    };
    socket::send(peer.as_fd(), &hello(hub, dial, id), &[file.as_fd(), ours]).map_err(silent)?;
    let (answer, fds) = socket::receive(peer.as_fd(), false)
        .map_err(silent)?
        .ok_or_else(|| HostDialError::unreachable("no answer to the hello in time", false))?;
    let (rules, later) = welcomed(answer)?;
    let [bell, roll] = <[OwnedFd; 2]>::try_from(fds)
        .map_err(|_| HostDialError::ours("a welcome without descriptors"))?;
    let roll = MemfdMapping::new(&roll, ROLL_BYTES, false).map_err(HostDialError::ours)?;
    unblock(peer.as_fd()).map_err(HostDialError::ours)?;
    let process = sys::peer_process(peer.as_fd()).and_then(|pid| PidfdProcess::open(pid).ok());
    let watch = process.as_ref().and_then(|process| PidfdProcess::open(process.pid).ok());
    let ring_bell = bell.try_clone().map_err(HostDialError::ours)?;
    let local = Some((&segment, ring_bell, heard_by));
    let link = Arc::new(HostOutboundLink::new(id, HostLinkKind::Local, worker.clone(), local));
    let ends = LocalLinkHandles {
        socket: peer,
        watch: watch.map(|process| process.handle),
        process: process.map(Arc::new),
        bell,
        segment,
        rules,
        later,
    };
    Ok((link.clone(), Box::new(LocalInitiator::new(ends, link, roll))))
}

fn dial_tcp(
    hub: &Arc<HostPlaneShared>,
    dial: &HostDialRequest,
) -> Result<DialledLink, HostDialError> {
    let deadline = Instant::now() + hub.config.connect();
    let (host, port) = (&*dial.to.host, dial.to.port);
    let at = |why: std::io::Error| format!("{host}:{port}: {why}");
    let addresses =
        (host, port).to_socket_addrs().map_err(|why| HostDialError::unreachable(at(why), false))?;
    let mut peer =
        Err(HostDialError::unreachable(format!("{host}:{port}: no such address"), false));
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        peer = TcpStream::connect_timeout(&address, left).map_err(|why| {
            // The listener of a plane outlives its threads.
            let gone = why.kind() == ErrorKind::ConnectionRefused;
            HostDialError::unreachable(at(why), gone)
        });
        if peer.is_ok() {
            break;
        }
    }
    let mut peer = peer?;
    let silent = |why| HostDialError::unreachable(at(why), false);
    tcp_handshake::set_keepalive(&peer, hub.config.dead_ms).map_err(silent)?;
    let id = hub.fresh();
    tcp_handshake::send(&mut peer, &hello(hub, dial, id), deadline).map_err(silent)?;
    let answer = tcp_handshake::receive(&mut peer, deadline).map_err(silent)?;
    let (rules, later) = welcomed(answer)?;
    if !rules.paths.contains(&DataPath::Tcp) {
        return Err(HostDialError::ours("the peer does not allow tcp: add it to its `paths`"));
    }
    unblock(peer.as_fd()).map_err(HostDialError::ours)?;
    let worker = hub.worker_of(id);
    let link = Arc::new(HostOutboundLink::new(id, HostLinkKind::Tcp, worker.clone(), None));
    Ok((link.clone(), Box::new(TcpInitiator::new(peer.into(), link, later))))
}
