//! Listens, and greets who connects. Each greeting has a thread of its own for as long as it
//! takes, with a deadline, and there are only so many.

use super::local_target::{LocalLinkHandles, LocalTarget};
use super::segment::ShmSegment;
use super::tcp_target::TcpTarget;
use super::{HostInboundLink, HostLinkDriver, socket, tcp_handshake};
use crate::descriptor::{HostPlaneAddress, HostPlaneIdentity};
use crate::memory::PidfdProcess;
use crate::proto::{HostControlMessage, HostVersionRange, PathPolicy, VERSION};
use crate::shared::HostPlaneShared;
use crate::sys;
use crate::worker::HostWorkerCommand;
use kvferry_engine::fabric::Address;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, socket_with,
};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Greetings at a time; who comes then is dropped.
const GREETINGS_MAX: u32 = 64;

/// Connections that the kernel keeps for us.
const BACKLOG: i32 = 128;

/// The thread that listens.
#[derive(Debug)]
pub(crate) struct HostAcceptor {
    bell: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    greetings: Arc<AtomicU32>,
}

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
        tcp.set_nonblocking(true).map_err(|why| format!("listening: {why}"))?;
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
    ears: HostListeners,
) -> Result<HostAcceptor, String> {
    let bell = eventfd(0, EventfdFlags::CLOEXEC).map_err(|why| format!("doorbell: {why}"))?;
    let bell = Arc::new(bell);
    let heard = bell.clone();
    let greetings = Arc::<AtomicU32>::default();
    let going_on = greetings.clone();
    let thread = std::thread::Builder::new()
        .name("kvferry-listen".into())
        .spawn(move || accept_all(&hub, &ears, &heard, &going_on))
        .map_err(|why| format!("thread: {why}"))?;
    Ok(HostAcceptor { bell, thread: Some(thread), greetings })
}

impl Drop for HostAcceptor {
    fn drop(&mut self) {
        crate::worker::ring(self.bell.as_fd());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        // Each has a deadline of its own.
        while self.greetings.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
    }
}

fn accept_all(
    hub: &Arc<HostPlaneShared>,
    ears: &HostListeners,
    bell: &OwnedFd,
    greetings: &Arc<AtomicU32>,
) {
    loop {
        let mut polled = [
            PollFd::new(bell, PollFlags::IN),
            PollFd::new(&ears.unix, PollFlags::IN),
            PollFd::new(&ears.tcp, PollFlags::IN),
        ];
        if poll(&mut polled, None).is_err() {
            continue;
        }
        let [rung, unix, tcp] = polled.map(|fd| !fd.revents().is_empty());
        if rung {
            return;
        }
        if unix && let Ok(peer) = accept_with(&ears.unix, SocketFlags::CLOEXEC) {
            greet(hub, greetings, move |hub| greet_local(hub, peer));
        }
        if tcp && let Ok((peer, _)) = ears.tcp.accept() {
            greet(hub, greetings, move |hub| greet_tcp(hub, peer));
        }
    }
}

fn refuse(hub: &HostPlaneShared) {
    hub.counts.refused.fetch_add(1, Ordering::Relaxed);
}

/// `how` gives `None` where nobody was welcomed and nobody counted it.
fn greet(
    hub: &Arc<HostPlaneShared>,
    greetings: &Arc<AtomicU32>,
    how: impl FnOnce(&Arc<HostPlaneShared>) -> Option<()> + Send + 'static,
) {
    if greetings.fetch_add(1, Ordering::AcqRel) >= GREETINGS_MAX {
        greetings.fetch_sub(1, Ordering::AcqRel);
        refuse(hub);
        return;
    }
    let (hub_too, count) = (hub.clone(), greetings.clone());
    let greeting = move || {
        if how(&hub_too).is_none() {
            refuse(&hub_too);
        }
        count.fetch_sub(1, Ordering::AcqRel);
    };
    if std::thread::Builder::new().name("kvferry-greet".into()).spawn(greeting).is_err() {
        greetings.fetch_sub(1, Ordering::AcqRel);
        refuse(hub);
    }
}

/// Waits no longer than this for a socket that otherwise blocks.
pub(super) fn limit(socket: BorrowedFd<'_>, time: Duration) -> Result<(), String> {
    for way in [Timeout::Recv, Timeout::Send] {
        set_socket_timeout(socket, way, Some(time)).map_err(|why| format!("socket: {why}"))?;
    }
    Ok(())
}

/// From here on the socket belongs to a thread that does not wait for it.
pub(super) fn unblock(socket: BorrowedFd<'_>) -> Result<(), String> {
    fcntl_getfl(socket)
        .and_then(|flags| fcntl_setfl(socket, flags | OFlags::NONBLOCK))
        .map_err(|why| format!("socket: {why}"))
}

/// Who says hello, under which pass and rules.
pub(super) struct HostHello {
    pub(super) who: HostPlaneIdentity,
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
    let HostControlMessage::Hello { version, from, to, fence_key, link, ends, rules, newest } =
        hello
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

fn greet_local(hub: &Arc<HostPlaneShared>, peer: OwnedFd) -> Option<()> {
    limit(peer.as_fd(), hub.config.connect()).ok()?;
    let (hello, fds) = socket::receive(peer.as_fd(), false).ok()??;
    // Counted first: who is told that it was refused may look.
    let turn_away = |answer: &HostControlMessage| {
        refuse(hub);
        let _ = socket::send(peer.as_fd(), answer, &[]);
        Some(())
    };
    let caller = match caller(hub, hello) {
        Ok(caller) => caller,
        Err(answer) => return turn_away(&answer),
    };
    let [segment, bell] = <[OwnedFd; 2]>::try_from(fds).ok()?;
    let segment = ShmSegment::map(&segment).ok()?;
    let process = sys::peer_process(peer.as_fd()).and_then(|pid| PidfdProcess::open(pid).ok());
    let watch = process.as_ref().and_then(|process| PidfdProcess::open(process.pid).ok());
    let id = hub.fresh();
    let worker = hub.worker_of(id);
    let whose = (caller.who, caller.fence_key, caller.link);
    let inbound = Arc::new(HostInboundLink::new(id, whose, worker.clone(), Some(segment.clone())));
    if let Err(why) = hub.admit(&inbound, &caller.ends) {
        return turn_away(&HostControlMessage::Refuse { why, over: true });
    }
    let ready = || -> Result<(), String> {
        let roll =
            hub.with_registration_table(|roll| rustix::io::fcntl_dupfd_cloexec(roll.file(), 0));
        let roll = roll.map_err(|why| format!("roll: {why}"))?;
        let version = Some((caller.version, VERSION));
        let welcome = HostControlMessage::Welcome { rules: hub.rules(), version };
        socket::send(peer.as_fd(), &welcome, &[worker.bell(), roll.as_fd()])
            .map_err(|why| format!("{why:?}"))?;
        unblock(peer.as_fd())
    };
    if ready().is_err() {
        hub.dismiss(id);
        return None;
    }
    let ends = LocalLinkHandles {
        socket: peer,
        watch: watch.map(|process| process.handle),
        process: process.map(Arc::new),
        bell,
        segment,
        rules: caller.rules,
        later: caller.later,
    };
    let station: Box<dyn HostLinkDriver> = Box::new(LocalTarget::new(ends, inbound));
    worker.tell(HostWorkerCommand::Add(id, station));
    Some(())
}

fn greet_tcp(hub: &Arc<HostPlaneShared>, mut peer: TcpStream) -> Option<()> {
    let deadline = Instant::now() + hub.config.connect();
    peer.set_nonblocking(false).ok()?;
    tcp_handshake::set_keepalive(&peer, hub.config.dead_ms).ok()?;
    let hello = tcp_handshake::receive(&mut peer, deadline).ok()?;
    let mut turn_away = |answer: &HostControlMessage| {
        refuse(hub);
        let _ = tcp_handshake::send(&mut peer, answer, deadline);
        Some(())
    };
    let caller = match caller(hub, hello) {
        Ok(caller) => caller,
        Err(answer) => return turn_away(&answer),
    };
    let id = hub.fresh();
    let worker = hub.worker_of(id);
    let whose = (caller.who, caller.fence_key, caller.link);
    let inbound = Arc::new(HostInboundLink::new(id, whose, worker.clone(), None));
    if let Err(why) = hub.admit(&inbound, &caller.ends) {
        return turn_away(&HostControlMessage::Refuse { why, over: true });
    }
    let version = Some((caller.version, VERSION));
    let welcome = HostControlMessage::Welcome { rules: hub.rules(), version };
    let told = tcp_handshake::send(&mut peer, &welcome, deadline);
    if told.is_err() || unblock(peer.as_fd()).is_err() {
        hub.dismiss(id);
        return None;
    }
    let station: Box<dyn HostLinkDriver> =
        Box::new(TcpTarget::new(peer.into(), inbound, caller.later));
    worker.tell(HostWorkerCommand::Add(id, station));
    Some(())
}
