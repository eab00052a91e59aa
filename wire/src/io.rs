//! The thread that has the sockets.

use crate::connection::{ZmqConnection, ZmqPhase};
use crate::shared::{CONNECTION_CUTS, SendQueueDepth, ZmqEventQueue, ZmqLinkEvent};
use crate::zmtp::{MESSAGE_MAX, NOTIFY_MAX, ZmtpEvent};
use kvferry_engine::fabric::{LinkId, LinkKind};
use kvferry_engine::source::{PeerSource, SourceBudget};
use kvferry_fabric_common::{ACCEPT_PAUSE, AcceptFailures};
use rustix::buffer::spare_capacity;
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketFlags, SocketType, accept_with, connect, socket_with, sockopt,
};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::{Duration, Instant};

/// Bytes of memory that unfinished messages may have. If there is more, who has most is cut.
const UNFINISHED_MAX: usize = 128 << 20;

/// Bytes of messages that peers have not read. If there is more, who has most of it is cut.
const UNSENT_MAX: usize = 256 << 20;

/// Connections of peers that have not said what they are. If there are more, the oldest of who has
/// most of them is cut.
const GREETINGS_MAX: usize = 256;

/// Connections of peers; who has its share gets no other.
const CONNECTIONS_MAX: usize = 16_384;

/// How long a closed connection goes on sending.
const LINGER: Duration = Duration::from_millis(200);

/// How long a peer that dialled may take to say what it is.
const GREETING: Duration = Duration::from_secs(5);

/// Connections that are accepted in a round.
const ACCEPTED_TOGETHER: usize = 64;

/// Bytes that are read at a time.
const CHUNK: usize = 64 << 10;

/// In the events of the kernel, in place of the number of a connection: the bell, and from the
/// second number on the listeners.
const BELL: u64 = 1 << 63;
const LISTENERS: u64 = BELL + 1;

/// What the plane wants of the thread.
pub(crate) enum ZmqCommand {
    Listen {
        channel: LinkKind,
        socket: TcpListener,
        answer: SyncSender<io::Result<()>>,
    },
    Dial {
        link: LinkId,
        channel: LinkKind,
        to: SocketAddr,
        queued: Arc<SendQueueDepth>,
        wait: Duration,
    },
    Send {
        link: LinkId,
        message: Vec<u8>,
    },
    /// Raises the limit of the link's messages to that of proven peers.
    Admit {
        link: LinkId,
    },
    HangUp {
        link: LinkId,
    },
    StopListening,
}

/// A channel that is listened on.
struct ZmqListener {
    socket: TcpListener,
    channel: LinkKind,
    /// Somebody may have come.
    is_due: bool,
}

pub(crate) struct ZmqIoThread {
    epoll: OwnedFd,
    wake_pending: Arc<AtomicBool>,
    commands: Receiver<ZmqCommand>,
    pub(crate) inbox: Arc<ZmqEventQueue>,
    /// Largest cost of a message until its link is admitted, except on links of notifications.
    unproven_max: usize,
    listeners: Vec<ZmqListener>,
    /// By numbers that are never used again, so that those before are older.
    pub(crate) connections: BTreeMap<u64, ZmqConnection>,
    pub(crate) by_link: BTreeMap<LinkId, u64>,
    next: u64,
    pub(crate) next_inbound: u32,
    /// Connections of which something can be read, and those that have to wait until the plane has
    /// taken what they said.
    pub(crate) due: Vec<u64>,
    pub(crate) waiting: Vec<u64>,
    /// Connections that were given something to say.
    unwritten: Vec<u64>,
    pub(crate) deadlines: BTreeSet<(Instant, u64)>,
    /// Connections that peers dialled and that are not open yet.
    pub(crate) greeting: BTreeSet<u64>,
    pub(crate) greetings: SourceBudget,
    pub(crate) inbound: SourceBudget,
    pub(crate) unfinished: SourceBudget,
    pub(crate) unsent: SourceBudget,
    /// When it is tried again to accept.
    accept_at: Option<Instant>,
    accept_failures: AcceptFailures,
    pub(crate) chunk: Box<[u8]>,
    pub(crate) said: Vec<ZmtpEvent>,
    pub(crate) news: Vec<ZmqLinkEvent>,
}

fn ready_for() -> epoll::EventFlags {
    use epoll::EventFlags as Flags;
    // By edge: nobody who waits is told again, and nothing has to be changed for that.
    Flags::IN | Flags::OUT | Flags::RDHUP | Flags::ET
}

impl ZmqIoThread {
    /// A thread that the bell tells of commands, and of room in the inbox.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new(
        (bell, wake_pending): (&OwnedFd, Arc<AtomicBool>),
        commands: Receiver<ZmqCommand>,
        (inbox, unproven_max): (Arc<ZmqEventQueue>, usize),
    ) -> io::Result<ZmqIoThread> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, bell, epoll::EventData::new_u64(BELL), ready_for())?;
        Ok(ZmqIoThread {
            epoll,
            wake_pending,
            commands,
            inbox,
            unproven_max,
            listeners: Vec::new(),
            connections: BTreeMap::new(),
            by_link: BTreeMap::new(),
            next: 0,
            next_inbound: 0,
            due: Vec::new(),
            waiting: Vec::new(),
            unwritten: Vec::new(),
            deadlines: BTreeSet::new(),
            greeting: BTreeSet::new(),
            greetings: SourceBudget::new(GREETINGS_MAX),
            inbound: SourceBudget::new(CONNECTIONS_MAX),
            unfinished: SourceBudget::new(UNFINISHED_MAX),
            unsent: SourceBudget::new(UNSENT_MAX),
            accept_at: None,
            accept_failures: AcceptFailures::new("ZeroMQ peers"),
            chunk: vec![0; CHUNK].into(),
            said: Vec::new(),
            news: Vec::new(),
        })
    }

    /// Runs until the plane is gone and what it had to say is said.
    pub(crate) fn run(mut self) {
        let mut events = Vec::with_capacity(256);
        let mut is_over = false;
        while !is_over || !self.connections.is_empty() {
            let timeout = self.timeout();
            let _interrupted =
                epoll::wait(&self.epoll, spare_capacity(&mut events), timeout.as_ref());
            for event in events.drain(..) {
                self.ready(event.data.u64(), event.flags);
            }
            if !is_over && !self.obey() {
                is_over = true;
                self.finish();
            }
            for token in std::mem::take(&mut self.unwritten) {
                self.flush(token);
            }
            self.accept_all();
            for token in std::mem::take(&mut self.due) {
                self.read(token);
            }
            self.end_late();
        }
    }

    /// How long nothing is to be done; no end if that is for the kernel to say.
    fn timeout(&self) -> Option<Timespec> {
        let has_due = self.accept_at.is_none() && self.listeners.iter().any(|it| it.is_due);
        if has_due || !self.due.is_empty() {
            return Some(Timespec::default());
        }
        let first = self.deadlines.first().map(|(at, _)| *at);
        let at = first.into_iter().chain(self.accept_at).min()?;
        // A round later rather than one too early.
        let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        Timespec::try_from(left).ok()
    }

    /// The kernel has something to say of a connection, a listener or the bell.
    fn ready(&mut self, token: u64, flags: epoll::EventFlags) {
        use epoll::EventFlags as Flags;
        if token >= BELL {
            if let Some(listener) = token.checked_sub(LISTENERS)
                && let Some(listener) = self.listeners.get_mut(listener as usize)
            {
                listener.is_due = true;
            }
            return;
        }
        let Some(connection) = self.connections.get_mut(&token) else { return };
        if flags.intersects(Flags::OUT | Flags::ERR | Flags::HUP) {
            if connection.phase == ZmqPhase::Connecting {
                return self.connected(token);
            }
            connection.set_writable();
        }
        connection.has_ended |= flags.intersects(Flags::RDHUP | Flags::ERR | Flags::HUP);
        self.flush(token);
        if flags.intersects(Flags::IN | Flags::RDHUP | Flags::ERR | Flags::HUP) {
            self.is_due(token);
        }
    }

    pub(crate) fn is_due(&mut self, token: u64) {
        if let Some(connection) = self.connections.get_mut(&token)
            && !std::mem::replace(&mut connection.is_due, true)
        {
            self.due.push(token);
        }
    }

    /// Does what the plane wants; false if there is none any more.
    fn obey(&mut self) -> bool {
        // Before the commands are looked at: what comes later rings again.
        if self.wake_pending.swap(false, Ordering::AcqRel) {
            self.due.append(&mut self.waiting);
        }
        loop {
            match self.commands.try_recv() {
                Ok(ZmqCommand::Listen { channel, socket, answer }) => {
                    // A plane that does not wait for the answer is gone.
                    let _gone = answer.send(self.listen(channel, socket));
                }
                Ok(ZmqCommand::Dial { link, channel, to, queued, wait }) => {
                    self.dial(link, (channel, to), queued, wait);
                }
                Ok(ZmqCommand::Send { link, message }) => {
                    if let Some(&token) = self.by_link.get(&link)
                        && let Some(connection) = self.connections.get_mut(&token)
                    {
                        connection.push(message);
                        if !std::mem::replace(&mut connection.is_unwritten, true) {
                            self.unwritten.push(token);
                        }
                    }
                }
                Ok(ZmqCommand::Admit { link }) => {
                    if let Some(token) = self.by_link.get(&link)
                        && let Some(connection) = self.connections.get_mut(token)
                    {
                        connection.reader.set_most(MESSAGE_MAX);
                    }
                }
                Ok(ZmqCommand::HangUp { link }) => {
                    if let Some(token) = self.by_link.remove(&link) {
                        self.hang_up(token);
                    }
                }
                Ok(ZmqCommand::StopListening) => self.stop_listening(),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn listen(&mut self, channel: LinkKind, socket: TcpListener) -> io::Result<()> {
        let token = LISTENERS + self.listeners.len() as u64;
        epoll::add(&self.epoll, &socket, epoll::EventData::new_u64(token), ready_for())?;
        self.listeners.push(ZmqListener { socket, channel, is_due: true });
        Ok(())
    }

    fn dial(
        &mut self,
        link: LinkId,
        (channel, to): (LinkKind, SocketAddr),
        queued: Arc<SendQueueDepth>,
        wait: Duration,
    ) {
        let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let begun = socket_with(family, SocketType::STREAM, flags, None).and_then(|socket| {
            match connect(&socket, &to) {
                Ok(()) | Err(Errno::INPROGRESS) => Ok(socket),
                Err(why) => Err(why),
            }
        });
        let added = begun.and_then(|socket| {
            let connection = ZmqConnection::new((socket, to), channel, Some(link), queued);
            self.add(connection, wait)
        });
        match added {
            Ok(token) => _ = self.by_link.insert(link, token),
            Err(why) => {
                tracing::debug!(peer = %to, %why, "cannot dial");
                self.news.push(ZmqLinkEvent::Down { link });
                self.inbox.push(&mut self.news, (PeerSource::new(to.ip()), 0));
            }
        }
    }

    /// Has the kernel tell of a connection, which has to get on in so long.
    fn add(&mut self, mut connection: ZmqConnection, wait: Duration) -> Result<u64, Errno> {
        let token = self.next;
        // What is written is not held back. It cannot fail for a socket of TCP.
        let _set = sockopt::set_tcp_nodelay(&connection.socket, true);
        let data = epoll::EventData::new_u64(token);
        epoll::add(&self.epoll, &connection.socket, data, ready_for())?;
        self.next += 1;
        let most = match connection.channel {
            LinkKind::Notify | LinkKind::RankNotify(_) => self.unproven_max.max(NOTIFY_MAX),
            _ => self.unproven_max,
        };
        connection.reader.set_most(most);
        let deadline = Instant::now() + wait;
        (connection.deadline, connection.patience) = (Some(deadline), wait);
        self.deadlines.insert((deadline, token));
        self.connections.insert(token, connection);
        Ok(token)
    }

    /// The kernel has dialled, or says why it cannot.
    fn connected(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        match sockopt::socket_error(&connection.socket) {
            Ok(Ok(())) => {
                connection.phase = ZmqPhase::Greeting;
                connection.set_writable();
                let wait = connection.patience;
                self.set_deadline(token, Some(Instant::now() + wait));
                self.flush(token);
                self.is_due(token);
            }
            _ => self.close(token),
        }
    }

    fn accept_all(&mut self) {
        if self.accept_at.is_some_and(|at| at > Instant::now()) {
            return;
        }
        for nth in 0..self.listeners.len() {
            for _ in 0..ACCEPTED_TOGETHER {
                let listener = &mut self.listeners[nth];
                if !listener.is_due {
                    break;
                }
                let channel = listener.channel;
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                match accept_with(&listener.socket, flags) {
                    Ok(socket) => {
                        self.accept_at = None;
                        self.accepted(socket, channel);
                    }
                    Err(Errno::AGAIN) => (self.accept_at, listener.is_due) = (None, false),
                    Err(why) if self.accept_failures.must_wait(&why.into()) => {
                        self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
                        return;
                    }
                    // Of a connection that is gone already.
                    Err(_) => {}
                }
            }
        }
    }

    fn accepted(&mut self, socket: OwnedFd, channel: LinkKind) {
        let peer = rustix::net::getpeername(&socket).ok().flatten();
        // One without an address is gone already.
        let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) else { return };
        let connection = ZmqConnection::new((socket, peer), channel, None, Arc::default());
        let source = connection.source;
        if self.inbound.room(source) == 0 {
            CONNECTION_CUTS.connections.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let Ok(token) = self.add(connection, GREETING) else { return };
        self.inbound.change(source, 0, 1);
        self.greetings.change(source, 0, 1);
        self.greeting.insert(token);
        self.flush(token);
        if let Some(largest) = self.greetings.largest_if_over() {
            let of = |token: &&u64| self.connections[*token].source == largest;
            if let Some(oldest) = self.greeting.iter().find(of).copied() {
                CONNECTION_CUTS.greetings.fetch_add(1, Ordering::Relaxed);
                self.close(oldest);
            }
        }
    }

    /// Who dials is refused from now on.
    fn stop_listening(&mut self) {
        self.listeners.clear();
        self.accept_at = None;
    }

    /// Nobody is told any more; what was queued is still said.
    fn finish(&mut self) {
        self.stop_listening();
        self.by_link.clear();
        for token in self.connections.keys().copied().collect::<Vec<_>>() {
            self.hang_up(token);
        }
    }

    fn hang_up(&mut self, token: u64) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        connection.link = None;
        if !connection.has_output() {
            return self.close(token);
        }
        connection.is_hung_up = true;
        self.set_deadline(token, Some(Instant::now() + LINGER));
        self.flush(token);
    }
}

#[cfg(test)]
mod tests;
