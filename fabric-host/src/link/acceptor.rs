//! Listens, and greets who connects. Each greeting has a thread of its own for as long as it
//! takes, with a deadline, and there are only so many.

use super::handshake::HandshakeSocket;
use super::local_link::LocalLinkHandles;
use super::local_target::LocalTarget;
use super::proof::check_dialler;
use super::segment::ShmSegment;
use super::tcp_target::TcpTarget;
use super::{HostInboundLink, HostLinkKind};
use crate::descriptor::HostPlaneAddress;
use crate::proto::{HostControlMessage, HostVersionRange, PathPolicy, VERSION};
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
    Ok(HostHello { who: from.who, fence_key, link, ends, rules, version, later })
}

/// None where nobody was welcomed.
fn greet(
    hub: &Arc<HostPlaneShared>,
    mut peer: HandshakeSocket,
    place: &ConnectionPlace,
) -> Option<()> {
    let (hello, fds) = peer.receive().ok()?;
    let turn_away = |mut peer: HandshakeSocket, answer: &HostControlMessage| {
        // Counted first: who is told that it was refused may look.
        hub.counts.refused.fetch_add(1, Ordering::Relaxed);
        let _ = peer.send(answer, &[]);
        Some(())
    };
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
    let shared = match &peer {
        HandshakeSocket::Local(_) => {
            let [segment, bell] = <[OwnedFd; 2]>::try_from(fds).ok()?;
            Some((ShmSegment::map(&segment).ok()?, bell))
        }
        HandshakeSocket::Tcp(..) => None,
    };
    // What follows takes no time of the peer's, and changes what it and others see.
    if !place.keep() {
        return None;
    }
    let id = hub.fresh();
    let worker = hub.worker_of(id).clone();
    let segment = shared.as_ref().map(|(segment, _)| segment.clone());
    let whose = (caller.who, caller.fence_key, caller.link);
    let inbound = Arc::new(HostInboundLink::new(id, whose, worker.clone(), segment));
    if let Err(why) = hub.admit(&inbound, &caller.ends) {
        return turn_away(peer, &answers.seal(HostControlMessage::Refuse { why, over: true }));
    }
    let version = Some((caller.version, VERSION));
    let welcome = answers.seal(HostControlMessage::Welcome { rules: hub.rules(), version });
    let told = || -> std::io::Result<OwnedFd> {
        if shared.is_none() {
            peer.send(&welcome, &[])?;
        } else {
            let table = hub
                .with_registration_table(|table| rustix::io::fcntl_dupfd_cloexec(table.file(), 0));
            peer.send(&welcome, &[worker.bell(), table?.as_fd()])?;
        }
        peer.unblock()
    };
    let Ok(socket) = told() else {
        hub.dismiss(id);
        return None;
    };
    let driver: Box<dyn HostLinkDriver> = match shared {
        Some((segment, bell)) => {
            let said = (caller.rules, caller.later);
            Box::new(LocalTarget::new(LocalLinkHandles::new(socket, bell, segment, said), inbound))
        }
        None => Box::new(TcpTarget::new(socket, inbound, caller.later)),
    };
    hub.tell_worker(id, HostWorkerCommand::Add(id, driver));
    Some(())
}
