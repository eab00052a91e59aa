//! The thread that has the sockets.

use crate::dialler::ZmqDialler;
use crate::listener::ZmqListener;
use crate::shared::{SendQueueDepth, ZmqEventQueue, ZmqLinkEvent};
use kvferry_engine::fabric::{LinkId, LinkKind};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError};
use std::time::Duration;
use zmq::{Context, POLLIN, POLLOUT, Socket};

/// Longest message in bytes; that of the native dialect and some for its envelope.
const MESSAGE_MAX: i64 = 17 << 20;

/// Messages that libzmq itself holds per connection and direction.
const HIGH_WATER: i32 = 1_000;

/// How long a closed socket goes on sending, in milliseconds.
const LINGER: i32 = 200;

/// How long a peer that dialled may take to say what it is, in milliseconds.
const GREETING: i32 = 5_000;

/// How often a ROUTER that a peer gives no room tries again, in milliseconds.
const RETRY: i64 = 1;

/// What the plane wants of the thread.
pub(crate) enum ZmqCommand {
    Listen {
        channel: LinkKind,
        at: String,
        answer: SyncSender<zmq::Result<String>>,
    },
    Dial {
        link: LinkId,
        channel: LinkKind,
        to: String,
        queued: Arc<SendQueueDepth>,
        wait: Duration,
    },
    Send {
        link: LinkId,
        parts: Vec<Vec<u8>>,
    },
    HangUp {
        link: LinkId,
    },
}

/// Options of all sockets.
pub(crate) fn prepare(socket: &Socket) -> zmq::Result<()> {
    socket.set_ipv6(true)?;
    socket.set_linger(LINGER)?;
    socket.set_sndhwm(HIGH_WATER)?;
    socket.set_rcvhwm(HIGH_WATER)?;
    socket.set_maxmsgsize(MESSAGE_MAX)?;
    socket.set_handshake_ivl(GREETING)
}

pub(crate) struct ZmqIoThread {
    context: Context,
    /// Rings when there is a command or room in the inbox.
    bell: Socket,
    wake_pending: Arc<AtomicBool>,
    commands: Receiver<ZmqCommand>,
    inbox: Arc<ZmqEventQueue>,
    listeners: Vec<(LinkKind, ZmqListener)>,
    diallers: BTreeMap<LinkId, ZmqDialler>,
    next_inbound: u32,
}

impl ZmqIoThread {
    pub(crate) fn new(
        context: Context,
        (bell, rung): (Socket, Arc<AtomicBool>),
        commands: Receiver<ZmqCommand>,
        inbox: Arc<ZmqEventQueue>,
    ) -> ZmqIoThread {
        let (listeners, diallers) = (Vec::new(), BTreeMap::new());
        ZmqIoThread {
            context,
            bell,
            wake_pending: rung,
            commands,
            inbox,
            listeners,
            diallers,
            next_inbound: 0,
        }
    }

    /// Runs until the plane is gone.
    pub(crate) fn run(mut self) {
        loop {
            self.wait();
            while self.bell.recv_bytes(zmq::DONTWAIT).is_ok() {}
            // Before the commands are looked at: what comes later rings again.
            self.wake_pending.store(false, Ordering::Release);
            loop {
                match self.commands.try_recv() {
                    Ok(command) => self.command(command),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return,
                }
            }
            for (_, listener) in &mut self.listeners {
                listener.pump(&mut self.next_inbound, &self.inbox);
            }
            let inbox = &self.inbox;
            self.diallers.retain(|_, dialler| dialler.pump(inbox));
        }
    }

    fn wait(&self) {
        let full = self.inbox.is_full();
        let wanted = if full { zmq::PollEvents::empty() } else { POLLIN };
        let mut items = vec![self.bell.as_poll_item(POLLIN)];
        for (_, listener) in &self.listeners {
            items.push(listener.watched.events.as_poll_item(POLLIN));
            items.push(listener.watched.socket.as_poll_item(wanted));
        }
        for dialler in self.diallers.values() {
            items.push(dialler.watched.events.as_poll_item(POLLIN));
            items.push(dialler.watched.socket.as_poll_item(wanted));
            if dialler.has_output() {
                items.push(dialler.watched.socket.as_poll_item(POLLOUT));
            }
        }
        let retry = self.listeners.iter().any(|(_, listener)| listener.has_output());
        let timeout = if retry { RETRY } else { -1 };
        // Interrupted by a signal: the loop comes again.
        let _ = zmq::poll(&mut items, timeout);
    }

    fn command(&mut self, command: ZmqCommand) {
        match command {
            ZmqCommand::Listen { channel, at, answer } => {
                let made =
                    ZmqListener::new(&self.context, channel, &at).map(|(listener, bound)| {
                        self.listeners.push((channel, listener));
                        bound
                    });
                // A plane that does not wait for the answer is gone.
                let _ = answer.send(made);
            }
            ZmqCommand::Dial { link, channel, to, queued, wait } => {
                match ZmqDialler::new(&self.context, link, channel, &to, queued, wait) {
                    Ok(dialler) => _ = self.diallers.insert(link, dialler),
                    Err(_) => self.inbox.push(ZmqLinkEvent::Down { link }),
                }
            }
            ZmqCommand::Send { link, parts } => self.send(link, parts),
            ZmqCommand::HangUp { link } => self.hang_up(link),
        }
    }

    fn send(&mut self, link: LinkId, parts: Vec<Vec<u8>>) {
        if let Some(dialler) = self.diallers.get_mut(&link) {
            dialler.push(parts);
            dialler.flush();
        } else if let Some((_, listener)) = self.listeners.iter_mut().find(|(_, l)| l.has(link)) {
            listener.push(link, parts);
        }
    }

    fn hang_up(&mut self, link: LinkId) {
        self.diallers.remove(&link);
        for (_, listener) in &mut self.listeners {
            listener.hang_up(link);
        }
    }
}
