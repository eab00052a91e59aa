//! Listens, and greets who connects. Each greeting has a thread of its own for as long as it
//! takes, with a deadline, and there are only so many.

use super::handshake::HandshakeSocket;
use super::local_link::LocalLinkHandles;
use super::local_target::LocalTarget;
use super::proof::check_dialler;
use super::segment::ShmSegment;
use super::tcp_socket::TcpLinkSocket;
use super::tcp_target::TcpTarget;
use super::{HostInboundLink, HostLinkKind, LocalPeer};
use crate::config::DataPath;
use crate::descriptor::HostPlaneAddress;
use crate::doorbell::{HeardBell, PeerBell};
use crate::proto::{HostControlMessage, HostVersionRange, PathPolicy, VERSION, local_version};
use crate::shared::{HostLinkDriver, HostPlaneShared, HostWorkerCommand};
use kvferry_engine::fabric::Address;
use kvferry_fabric_common::{
    ConnectionHandler, ConnectionListener, ConnectionPlace, PlaneIdentity,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, socket_with};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Greetings at a time; who comes then takes the place of one that says nothing.
const GREETINGS_MAX: u32 = 64;

/// Connections that the kernel keeps for us. Who comes when there are more waits for a second.
const BACKLOG: i32 = 1_024;

/// Sockets to listen at.
pub(crate) struct HostListeners {
    pub(crate) tcp: TcpListener,
    pub(crate) unix: OwnedFd,
}

impl HostListeners {
    /// # Errors
    /// What cannot be listened at and why.
    pub(crate) fn open(at: &[SocketAddr], name: &[u8]) -> Result<HostListeners, String> {
        let tcp = TcpListener::bind(at).map_err(|why| {
            let at: Vec<_> = at.iter().map(ToString::to_string).collect();
            format!("cannot listen at {}: {why}", at.join(" or "))
        })?;
        let listening = |why: std::io::Error| format!("listening: {why}");
        tcp.set_nonblocking(true).map_err(listening)?;
        rustix::net::listen(&tcp, BACKLOG).map_err(|why| listening(why.into()))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let unix = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .and_then(|unix| {
                bind(&unix, &SocketAddrUnix::new_abstract_name(name)?)?;
                rustix::net::listen(&unix, BACKLOG)?;
                Ok(unix)
            })
            .map_err(|why| {
                format!("cannot listen at unix socket @{}: {why}", name.escape_ascii())
            })?;
        Ok(HostListeners { tcp, unix })
    }
}

/// Starts to listen.
///
/// # Errors
/// No thread or descriptor is left.
pub(crate) fn listen(
    hub: Arc<HostPlaneShared>,
    listeners: HostListeners,
) -> Result<ConnectionListener, String> {
    let (names, sockets) =
        (["kvferry-listen", "kvferry-greet"], vec![listeners.unix, listeners.tcp.into()]);
    ConnectionListener::start(names, sockets, GREETINGS_MAX, HostGreeter(hub))
        .map_err(|why| why.to_string())
}

struct HostGreeter(Arc<HostPlaneShared>);

impl ConnectionHandler for HostGreeter {
    fn serve(&self, socket: usize, connection: OwnedFd, place: &ConnectionPlace) {
        let kind = [HostLinkKind::Local, HostLinkKind::Tcp][socket];
        let limits = (&self.0.config, Instant::now() + self.0.config.connect());
        let peer = HandshakeSocket::new(kind, connection, limits).ok();
        if peer.and_then(|peer| greet(&self.0, peer, place)).is_none() {
            self.turned_away();
        }
    }

    fn turned_away(&self) {
        self.0.counts.refused.fetch_add(1, Ordering::Relaxed);
    }
}

/// Who says hello, under which fence key and rules.
pub(super) struct HostHello {
    pub(super) who: PlaneIdentity,
    pub(super) fence_key: u64,
    pub(super) link: u64,
    pub(super) ends: Vec<u64>,
    pub(super) rules: PathPolicy,
    /// The version that is spoken with it.
    pub(super) version: u32,
    /// It may say more than this plane knows.
    pub(super) later: bool,
    /// The process that it says it is.
    pub(super) pid: u32,
}

/// # Errors
/// What to answer.
pub(super) fn caller(
    hub: &HostPlaneShared,
    hello: HostControlMessage,
) -> Result<HostHello, Box<HostControlMessage>> {
    let refuse = |why: &str, over| Box::new(HostControlMessage::Refuse { why: why.into(), over });
    let HostControlMessage::Hello {
        version, from, to, fence_key, link, ends, rules, newest, ..
    } = hello
    else {
        return Err(refuse("no hello", false));
    };
    let spoken = HostVersionRange { oldest: version, newest: newest.unwrap_or(version) };
    let version = spoken.agree().map_err(|why| refuse(&why, false))?;
    let later = spoken.is_later();
    let own = &hub.location.who;
    if (&*to.0, to.1) != (&*own.key, own.incarnation) {
        let why = format!(
            "here is {} in incarnation {:016x}, not {} in {:016x}: it was restarted",
            own.key, own.incarnation, to.0, to.1
        );
        return Err(refuse(&why, true));
    }
    let from = HostPlaneAddress::decode(&Address(from.into()));
    let Some(from) = from else { return Err(refuse("an address of another kind", false)) };
    let (who, pid) = (from.who, from.pid);
    Ok(HostHello { who, fence_key, link, ends, rules, version, later, pid })
}

/// Who connects, where it may.
enum Greeted {
    Local(LocalPeer),
    Tcp,
}

/// Whether somebody may say hello at all: it is not listened to otherwise.
///
/// # Errors
/// What to answer; nothing where the connection ended or says what it may not.
fn admissible(
    hub: &HostPlaneShared,
    peer: &mut HandshakeSocket,
) -> Result<Greeted, Option<String>> {
    match peer {
        HandshakeSocket::Local(socket) => {
            LocalPeer::new(socket.as_fd(), &hub.config.trust.uids).map(Greeted::Local).map_err(Some)
        }
        HandshakeSocket::Tcp(peer) if hub.config.allows(DataPath::Tcp) => {
            peer.accept(hub.tls.as_ref()).map(|()| Greeted::Tcp)
        }
        HandshakeSocket::Tcp(..) => {
            Err(Some("tcp is not served here: add it to `paths` on both sides".into()))
        }
    }
}

/// What a local peer sends along with its hello.
fn local_parts(
    peer: LocalPeer,
    (pid, version): (u32, u32),
    fds: Vec<OwnedFd>,
) -> Result<(LocalPeer, ShmSegment, PeerBell), String> {
    local_version(version)?;
    if pid != peer.process.pid {
        let own = peer.process.pid;
        return Err(format!("a hello of process {pid} by a socket of process {own}"));
    }
    let [segment, bell] =
        <[OwnedFd; 2]>::try_from(fds).map_err(|_| "a hello without segment and doorbell")?;
    Ok((peer, ShmSegment::map(&segment)?, PeerBell::new(bell)?))
}

/// None where nobody was welcomed.
fn greet(
    hub: &Arc<HostPlaneShared>,
    mut peer: HandshakeSocket,
    place: &ConnectionPlace,
) -> Option<()> {
    let turn_away = |mut peer: HandshakeSocket, answer: &HostControlMessage| {
        // Counted first: who is told that it was refused may look.
        hub.counts.refused.fetch_add(1, Ordering::Relaxed);
        let _ = peer.send(answer, &[]);
        Some(())
    };
    let refuse = |why, over| HostControlMessage::Refuse { why, over };
    let greeted = match admissible(hub, &mut peer) {
        Ok(greeted) => greeted,
        Err(why) => {
            let why = why?;
            hub.proof.warn_of_refusal(&hub.location.who.key, &why);
            // What it says has to be taken first, or the end of the connection takes the answer.
            peer.discard();
            return turn_away(peer, &refuse(why, false));
        }
    };
    let (hello, fds) = peer.receive().ok()?;
    let answers = match check_dialler(hub, &mut peer, &hello) {
        Ok(answers) => answers,
        Err(why) => {
            let why = why?;
            hub.proof.warn_of_refusal(&hub.location.who.key, &why);
            return turn_away(peer, &HostControlMessage::Refuse { why, over: false });
        }
    };
    let caller = match caller(hub, hello) {
        Ok(caller) => caller,
        Err(answer) => return turn_away(peer, &answers.seal(*answer)),
    };
    let local = match greeted {
        Greeted::Tcp => None,
        Greeted::Local(who) => match local_parts(who, (caller.pid, caller.version), fds) {
            Ok(parts) => Some(parts),
            Err(why) => return turn_away(peer, &answers.seal(refuse(why, false))),
        },
    };
    // What follows takes no time of the peer's, and changes what it and others see.
    if !place.keep() {
        return None;
    }
    let id = hub.fresh_inbound(&caller.who);
    let worker = hub.worker_of(id).clone();
    let segment = local.as_ref().map(|(_, segment, _)| segment.clone());
    let whose = (caller.who, caller.fence_key, caller.link);
    let inbound = Arc::new(HostInboundLink::new(id, whose, worker, segment));
    if let Err(why) = hub.admit(&inbound, &caller.ends) {
        return turn_away(peer, &answers.seal(refuse(why, true)));
    }
    let version = Some((caller.version, VERSION));
    let welcome = answers.seal(HostControlMessage::Welcome { rules: hub.rules(), version });
    let said = (caller.rules, caller.later);
    let Ok(driver) = welcomed(hub, (peer, local), welcome, said, inbound) else {
        hub.dismiss(id);
        return None;
    };
    hub.tell_worker(id, HostWorkerCommand::Add(id, driver));
    Some(())
}

/// Welcomes a peer; what serves it from then on.
fn welcomed(
    hub: &HostPlaneShared,
    (mut peer, local): (HandshakeSocket, Option<(LocalPeer, ShmSegment, PeerBell)>),
    welcome: HostControlMessage,
    (rules, later): (PathPolicy, bool),
    inbound: Arc<HostInboundLink>,
) -> std::io::Result<Box<dyn HostLinkDriver>> {
    let Some((who, segment, bell)) = local else {
        peer.send(&welcome, &[])?;
        let (socket, tls) = peer.unblock()?;
        let socket = TcpLinkSocket::new(socket, tls).map_err(std::io::Error::other)?;
        return Ok(Box::new(TcpTarget::new(socket, inbound, later)));
    };
    let table =
        hub.with_registration_table(|table| rustix::io::fcntl_dupfd_cloexec(table.file(), 0))?;
    let (heard, rung) = HeardBell::pair()?;
    peer.send(&welcome, &[rung.as_fd(), table.as_fd()])?;
    let bells = (bell, Some(heard));
    let ends = LocalLinkHandles::new((peer.unblock()?.0, who), bells, segment, (rules, later));
    Ok(Box::new(LocalTarget::new(ends, inbound)))
}
