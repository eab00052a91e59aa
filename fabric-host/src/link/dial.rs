//! Dials a peer and says hello. Each dial has a thread of its own for as long as it takes.

use super::greet::{limit, unblock};
use super::local_in::Ends;
use super::local_out::LocalOut;
use super::out::{HeardBy, OutLink};
use super::segment::Segment;
use super::tcp_out::TcpOut;
use super::{Kind, Station, greeting, socket};
use crate::config::Path;
use crate::descriptor::Location;
use crate::hub::{Hub, Notice};
use crate::memory::{Map, Process, ROLL_BYTES};
use crate::proto::{Control, OLDEST, Rules, VERSION};
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
pub(crate) struct Dial {
    pub(crate) id: u64,
    pub(crate) to: Location,
    pub(crate) pass: u64,
    pub(crate) kind: Kind,
    /// Broken links of ours that the peer has to leave before it answers.
    pub(crate) ends: Vec<u64>,
}

/// A link, and what its thread has to serve.
type Dialled = (Arc<OutLink>, Box<dyn Station>);

/// Why there is no link.
pub(super) struct Failed {
    why: String,
    /// Nobody answered; else it was a refusal or ours.
    unreachable: bool,
    /// The plane that was meant has ended.
    gone: bool,
}

impl Failed {
    pub(super) fn ours(why: impl ToString) -> Failed {
        Failed { why: why.to_string(), unreachable: false, gone: false }
    }

    pub(super) fn unreachable(why: impl ToString, gone: bool) -> Failed {
        Failed { why: why.to_string(), unreachable: true, gone }
    }
}

/// Starts to dial; the answer is a notice.
pub(crate) fn dial(hub: &Arc<Hub>, dial: Dial) {
    let hub_too = hub.clone();
    let id = dial.id;
    let run = move || {
        let link = match dial.kind {
            Kind::Local => dial_local(&hub_too, &dial),
            Kind::Tcp => dial_tcp(&hub_too, &dial),
        };
        hub_too.notify(match link {
            Ok((link, station)) => Notice::LinkUp { dial: dial.id, link, station },
            Err(Failed { why, unreachable, gone }) => {
                Notice::DialFailed { dial: dial.id, why, unreachable, gone }
            }
        });
    };
    if let Err(why) = std::thread::Builder::new().name("kvferry-dial".into()).spawn(run) {
        let why = format!("thread: {why}");
        hub.notify(Notice::DialFailed { dial: id, why, unreachable: false, gone: false });
    }
}

/// The hello of a dial.
pub(super) fn hello(hub: &Hub, dial: &Dial, link: u64) -> Control {
    Control::Hello {
        version: OLDEST,
        from: hub.location.encode().0.to_vec(),
        to: (dial.to.who.key.to_string(), dial.to.who.incarnation),
        pass: dial.pass,
        link,
        ends: dial.ends.clone(),
        rules: hub.rules(),
        newest: Some(VERSION),
    }
}

/// The rules of who let us in, and whether it may say more than this plane knows.
pub(super) fn welcomed(answer: Control) -> Result<(Rules, bool), Failed> {
    match answer {
        Control::Welcome { rules, version } => {
            let spoken = Control::chosen(version).map_err(Failed::ours)?;
            Ok((rules, spoken.is_later()))
        }
        Control::Refuse { why, over: gone } => {
            Err(Failed { why: format!("refused: {why}"), unreachable: false, gone })
        }
        _ => Err(Failed::ours("an answer that is none")),
    }
}

fn dial_local(hub: &Arc<Hub>, dial: &Dial) -> Result<Dialled, Failed> {
    let flags = SocketFlags::CLOEXEC;
    let peer = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        .map_err(|why| Failed::ours(format!("socket: {why}")))?;
    limit(peer.as_fd(), hub.config.connect()).map_err(Failed::ours)?;
    let name = dial.to.socket_name();
    let at = SocketAddrUnix::new_abstract_name(&name).map_err(Failed::ours)?;
    connect(&peer, &at).map_err(|why| {
        let text = format!("unix socket @{}: {why}", name.escape_ascii());
        // The name is that of one life of one plane in this network namespace.
        Failed::unreachable(text, why == Errno::CONNREFUSED)
    })?;
    let (segment, file) = Segment::create().map_err(Failed::ours)?;
    let id = hub.fresh();
    let worker = hub.worker_of(id);
    let silent = |_| Failed::unreachable("no answer to the hello", false);
    // Nobody but the owner needs to hear how its writes went.
    let (ours, heard_by) = match hub.bell() {
        Some(bell) => (bell, HeardBy::Owner),
        None => (worker.bell(), HeardBy::Thread),
    };
    socket::send(peer.as_fd(), &hello(hub, dial, id), &[file.as_fd(), ours]).map_err(silent)?;
    let (answer, fds) = socket::receive(peer.as_fd(), false)
        .map_err(silent)?
        .ok_or_else(|| Failed::unreachable("no answer to the hello in time", false))?;
    let (rules, later) = welcomed(answer)?;
    let [bell, roll] =
        <[OwnedFd; 2]>::try_from(fds).map_err(|_| Failed::ours("a welcome without descriptors"))?;
    let roll = Map::new(&roll, ROLL_BYTES, false).map_err(Failed::ours)?;
    unblock(peer.as_fd()).map_err(Failed::ours)?;
    let process = sys::peer_process(peer.as_fd()).and_then(|pid| Process::open(pid).ok());
    let watch = process.as_ref().and_then(|process| Process::open(process.pid).ok());
    let ring_bell = bell.try_clone().map_err(Failed::ours)?;
    let local = Some((&segment, ring_bell, heard_by));
    let link = Arc::new(OutLink::new(id, Kind::Local, worker.clone(), local));
    let ends = Ends {
        socket: peer,
        watch: watch.map(|process| process.handle),
        process: process.map(Arc::new),
        bell,
        segment,
        rules,
        later,
    };
    Ok((link.clone(), Box::new(LocalOut::new(ends, link, roll))))
}

fn dial_tcp(hub: &Arc<Hub>, dial: &Dial) -> Result<Dialled, Failed> {
    let deadline = Instant::now() + hub.config.connect();
    let (host, port) = (&*dial.to.host, dial.to.port);
    let at = |why: std::io::Error| format!("{host}:{port}: {why}");
    let addresses =
        (host, port).to_socket_addrs().map_err(|why| Failed::unreachable(at(why), false))?;
    let mut peer = Err(Failed::unreachable(format!("{host}:{port}: no such address"), false));
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        peer = TcpStream::connect_timeout(&address, left).map_err(|why| {
            // The listener of a plane outlives its threads.
            let gone = why.kind() == ErrorKind::ConnectionRefused;
            Failed::unreachable(at(why), gone)
        });
        if peer.is_ok() {
            break;
        }
    }
    let mut peer = peer?;
    let silent = |why| Failed::unreachable(at(why), false);
    greeting::tune(&peer, hub.config.dead_ms).map_err(silent)?;
    let id = hub.fresh();
    greeting::send(&mut peer, &hello(hub, dial, id), deadline).map_err(silent)?;
    let answer = greeting::receive(&mut peer, deadline).map_err(silent)?;
    let (rules, later) = welcomed(answer)?;
    if !rules.paths.contains(&Path::Tcp) {
        return Err(Failed::ours("the peer does not allow tcp: add it to its `paths`"));
    }
    unblock(peer.as_fd()).map_err(Failed::ours)?;
    let worker = hub.worker_of(id);
    let link = Arc::new(OutLink::new(id, Kind::Tcp, worker.clone(), None));
    Ok((link.clone(), Box::new(TcpOut::new(peer.into(), link, later))))
}
