//! The control plane, from the side of the core.

use crate::address::{bind, resolve};
use crate::io::{ZmqCommand, ZmqIoThread};
use crate::shared::{SendQueueDepth, ZmqEventQueue, ZmqLinkEvent};
use crate::zmtp::{UNPROVEN_MAX, encode};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{
    ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, NextPoll, Refused,
};
use rustix::event::{EventfdFlags, eventfd};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

/// Where a plane listens and how long it dials.
#[derive(Clone, Debug)]
pub struct WireConfig {
    /// Host or address to listen at, IPv6 in brackets; `*` for all.
    pub host: String,
    /// Port of each channel; a free one where none is given.
    pub ports: BTreeMap<LinkKind, u16>,
    /// A connection, and then the answer to a greeting, that takes longer has failed.
    pub dial: Duration,
    /// Largest cost of a message until [`ControlPlane::admit`] of its link, in bytes plus 64 for each
    /// part; [`zmtp::MESSAGE_MAX`](crate::zmtp::MESSAGE_MAX) from then on. On links of notifications at
    /// least [`zmtp::NOTIFY_MAX`](crate::zmtp::NOTIFY_MAX) from the first.
    pub unproven_max: usize,
}

impl Default for WireConfig {
    fn default() -> Self {
        WireConfig {
            host: "127.0.0.1".into(),
            ports: BTreeMap::new(),
            dial: Duration::from_secs(2),
            unproven_max: UNPROVEN_MAX,
        }
    }
}

/// A control plane over ZeroMQ.
pub struct ZmqPlane {
    config: WireConfig,
    inbox: Arc<ZmqEventQueue>,
    commands: Option<Sender<ZmqCommand>>,
    bell: OwnedFd,
    wake_pending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    links: BTreeMap<LinkId, Arc<SendQueueDepth>>,
    listens: BTreeSet<LinkKind>,
}

impl std::fmt::Debug for ZmqPlane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZmqPlane").field("config", &self.config).finish_non_exhaustive()
    }
}

impl ZmqPlane {
    /// A plane that has done nothing, and its thread.
    ///
    /// # Errors
    /// What the system says when there is no room for a descriptor or a thread.
    pub fn new(config: WireConfig) -> std::io::Result<ZmqPlane> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (commands, receiver) = channel();
        let inbox = Arc::<ZmqEventQueue>::default();
        let rung = Arc::<AtomicBool>::default();
        let rings = (&bell, rung.clone());
        let io = ZmqIoThread::new(rings, receiver, (inbox.clone(), config.unproven_max))?;
        let thread = std::thread::Builder::new().name("kvferry-wire".into()).spawn(|| io.run())?;
        Ok(ZmqPlane {
            config,
            inbox,
            commands: Some(commands),
            bell,
            wake_pending: rung,
            thread: Some(thread),
            links: BTreeMap::new(),
            listens: BTreeSet::new(),
        })
    }

    /// Closes what it listens at: who dials is refused. Links that are there go on.
    pub fn stop_listening(&mut self) {
        self.listens.clear();
        // Without the thread nobody listens.
        let _ = self.tell(ZmqCommand::StopListening);
    }

    /// Sends a command to the thread; an error if the thread is gone.
    fn tell(&self, command: ZmqCommand) -> Result<(), Refused> {
        let commands = self.commands.as_ref().ok_or(Refused::Gone)?;
        commands.send(command).map_err(|_| Refused::Gone)?;
        self.ring();
        Ok(())
    }

    /// Wakes the thread, unless it was woken and has not looked yet: a burst of messages costs one
    /// system call.
    fn ring(&self) {
        if !self.wake_pending.swap(true, Ordering::AcqRel) {
            // It cannot count so far that it is full.
            let _rung = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
        }
    }
}

impl Drop for ZmqPlane {
    fn drop(&mut self) {
        self.commands = None;
        self.ring();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl ControlPlane for ZmqPlane {
    fn listen(&mut self, channel: LinkKind) -> Result<Endpoint, Refused> {
        if !self.listens.insert(channel) {
            return Err(Refused::Invalid(format!("{channel:?} is listened on already").into()));
        }
        let port = self.config.ports.get(&channel).copied().unwrap_or(0);
        let bound = bind(&self.config.host, port).and_then(|(socket, bound)| {
            let (answer, done) = sync_channel(1);
            let gone = |_| io::Error::other("the thread of the plane is gone");
            self.tell(ZmqCommand::Listen { channel, socket, answer }).map_err(gone)?;
            done.recv().map_err(|_| gone(Refused::Gone))??;
            Ok(bound)
        });
        bound.map_err(|why| {
            self.listens.remove(&channel);
            let at = format!("tcp://{}:{port}", self.config.host);
            Refused::Invalid(format!("cannot listen at {at}: {why}").into())
        })
    }

    fn dial(&mut self, link: LinkId, to: &Endpoint, channel: LinkKind) -> Result<(), Refused> {
        if link.is_inbound() || self.links.contains_key(&link) {
            return Err(Refused::Invalid(format!("link id {link} is in use").into()));
        }
        let to = resolve(to)?;
        let queued = Arc::<SendQueueDepth>::default();
        let wait = self.config.dial;
        self.tell(ZmqCommand::Dial { link, channel, to, queued: queued.clone(), wait })?;
        self.links.insert(link, queued);
        Ok(())
    }

    fn send(&mut self, link: LinkId, parts: &[&[u8]]) -> Result<(), Refused> {
        let queued = self.links.get(&link).ok_or(Refused::Gone)?;
        if !queued.enter() {
            return Err(Refused::Busy);
        }
        self.tell(ZmqCommand::Send { link, message: encode(parts) })
    }

    fn admit(&mut self, link: LinkId) {
        if self.links.contains_key(&link) {
            // If the thread has ended, nothing is read.
            let _ = self.tell(ZmqCommand::Admit { link });
        }
    }

    fn hang_up(&mut self, link: LinkId) {
        if self.links.remove(&link).is_some() {
            // Without the thread there is nothing to hang up.
            let _ = self.tell(ZmqCommand::HangUp { link });
        }
    }

    fn set_waker(&mut self, waker: Waker) {
        self.inbox.set_waker(waker);
    }

    fn poll(&mut self, _now: Nanos, out: &mut Vec<ControlEvent>) -> NextPoll {
        let (news, is_awaited) = self.inbox.take();
        for news in news {
            match news {
                ZmqLinkEvent::Up { link, channel, queued, from } => {
                    if link.is_inbound() {
                        self.links.insert(link, queued);
                    } else if !self.links.contains_key(&link) {
                        continue;
                    }
                    out.push(ControlEvent::LinkUp { link, channel, from });
                }
                ZmqLinkEvent::Frame { link, parts } if self.links.contains_key(&link) => {
                    out.push(ControlEvent::Frame { link, parts });
                }
                ZmqLinkEvent::Down { link } if self.links.remove(&link).is_some() => {
                    out.push(ControlEvent::LinkDown { link });
                }
                // Of a link that was hung up.
                ZmqLinkEvent::Frame { .. } | ZmqLinkEvent::Down { .. } => {}
            }
        }
        if is_awaited {
            self.ring();
        }
        if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
            let lost = std::mem::take(&mut self.links).into_keys();
            out.extend(lost.map(|link| ControlEvent::LinkDown { link }));
        }
        NextPoll::External
    }
}
