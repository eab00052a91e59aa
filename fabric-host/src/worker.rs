//! The threads that copy. Each serves its links in turns of one chunk, looks for work for a while
//! when there is none, and then sleeps.

use crate::copy::{CopyBuffers, CopySlice};
use crate::link::HostLinkDriver;
use crate::proto::HostCopyStatus;
use crate::ring::Producer;
use crate::shared::HostPlaneShared;
use crate::sync::{AtomicU64 as Word, lock};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Rounds with work between two looks at the sockets.
const SOCKETS_EVERY: u32 = 16;

/// Rounds with work before an owner that sleeps hears of outcomes: it would take the very core that
/// copies. A round is a chunk of each link.
const QUIET_ROUNDS: u32 = 4;

/// Descriptors that one link may have watched.
const FDS_MAX: u64 = 4;

/// The number of the doorbell among watched descriptors.
const BELL: u64 = u64::MAX;

/// Operations of more bytes take longer than it takes to wake a thread: nobody stays awake for the
/// end of one, or for what may come after it.
pub(crate) const SHORT_MAX: u64 = 64 << 10;

/// What a thread is told.
pub(crate) enum HostWorkerCommand {
    Add(u64, Box<dyn HostLinkDriver>),
    Remove(u64),
}

/// A thread, for others.
pub(crate) struct WorkerHandle {
    bell: OwnedFd,
    asleep: AtomicBool,
    commands: Mutex<Vec<HostWorkerCommand>>,
}

impl std::fmt::Debug for WorkerHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkerHandle").field("asleep", &self.asleep).finish_non_exhaustive()
    }
}

/// A descriptor to be rung.
pub(crate) fn doorbell() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

/// Rings the doorbell of a thread of this or of another process.
pub(crate) fn ring(bell: BorrowedFd<'_>) {
    // It cannot overflow: each ring is heard before the next. If the peer broke it, it is its loss.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

impl WorkerHandle {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> Result<WorkerHandle, Errno> {
        let bell = doorbell()?;
        Ok(WorkerHandle { bell, asleep: AtomicBool::new(false), commands: Mutex::default() })
    }

    /// The doorbell, for peers.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Wakes the thread if it sleeps.
    pub(crate) fn wake(&self) {
        if self.asleep.swap(false, Ordering::AcqRel) {
            ring(self.bell());
        }
    }

    pub(crate) fn tell(&self, command: HostWorkerCommand) {
        lock(&self.commands).push(command);
        self.wake();
    }

    fn take(&self) -> Vec<HostWorkerCommand> {
        std::mem::take(&mut *lock(&self.commands))
    }

    fn has_commands(&self) -> bool {
        !lock(&self.commands).is_empty()
    }
}

/// Completions on their way to the owner.
pub(crate) type CompletionProducer = Producer<Arc<[Word]>>;

/// What a link needs to take a step.
pub(crate) struct WorkerContext {
    pub(crate) hub: Arc<HostPlaneShared>,
    pub(crate) scratch: CopyBuffers,
    pub(crate) chunk: Vec<CopySlice>,
    pub(crate) record: Vec<u64>,
    pub(crate) bounce: Vec<u8>,
    outcomes: CompletionProducer,
    /// Outcomes of operations that were closed before, for which no room was kept.
    late: VecDeque<[u64; 2]>,
    /// Rounds since outcomes were passed on that the owner may not know of.
    unannounced_rounds: Option<u32>,
}

impl WorkerContext {
    /// Tells the owner how an operation ended.
    pub(crate) fn complete(&mut self, op: u64, status: HostCopyStatus) {
        self.late.push_back([op, status as u64]);
        self.flush();
    }

    /// Passes on what had no room; the owner rings when there is some.
    fn flush(&mut self) {
        while let Some(outcome) = self.late.front() {
            match self.outcomes.push(outcome) {
                Ok(true) => _ = self.unannounced_rounds.get_or_insert(0),
                // The owner is of this process and breaks nothing.
                Ok(false) | Err(_) => break,
            }
            self.late.pop_front();
        }
    }

    /// Wakes the owner for outcomes, unless there is more to do first.
    fn tell(&mut self, idle: bool) {
        let Some(rounds) = &mut self.unannounced_rounds else { return };
        *rounds += 1;
        if idle || *rounds >= QUIET_ROUNDS {
            self.unannounced_rounds = None;
            if self.outcomes.must_wake() {
                self.hub.wake();
            }
        }
    }
}

/// The thread itself.
pub(crate) struct HostWorker {
    handle: Arc<WorkerHandle>,
    epoll: OwnedFd,
    cx: WorkerContext,
    links: BTreeMap<u64, Box<dyn HostLinkDriver>>,
    spin: Duration,
}

impl HostWorker {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new(
        hub: Arc<HostPlaneShared>,
        handle: Arc<WorkerHandle>,
        outcomes: CompletionProducer,
    ) -> Result<HostWorker, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, handle.bell(), bell, epoll::EventFlags::IN)?;
        let spin = Duration::from_micros(hub.config.spin_us.into());
        let cx = WorkerContext {
            scratch: CopyBuffers::new(hub.copy_pool.clone()),
            hub,
            chunk: Vec::new(),
            record: Vec::new(),
            bounce: Vec::new(),
            outcomes,
            late: VecDeque::new(),
            unannounced_rounds: None,
        };
        Ok(HostWorker { handle, epoll, cx, links: BTreeMap::new(), spin })
    }

    pub(crate) fn run(mut self) {
        let mut last_work = Instant::now();
        let mut rounds = 0_u32;
        while !self.cx.hub.stopping.load(Ordering::Acquire) {
            let worked = self.round();
            self.cx.tell(!worked);
            rounds = rounds.wrapping_add(1);
            if worked {
                if rounds.is_multiple_of(SOCKETS_EVERY) {
                    self.poll_sockets(false);
                }
                last_work = Instant::now();
            } else if last_work.elapsed() < self.spin
                && self.links.values().any(|link| link.spins())
            {
                if self.links.values().any(|link| link.is_by_socket()) {
                    self.poll_sockets(false);
                }
                // Who is to give us work may wait for this very core.
                std::thread::yield_now();
            } else {
                self.cx.scratch.rest();
                if self.may_sleep() {
                    self.poll_sockets(true);
                } else {
                    self.poll_sockets(false);
                }
                self.handle.asleep.store(false, Ordering::Release);
                last_work = Instant::now();
            }
        }
        for (_, link) in std::mem::take(&mut self.links) {
            link.end(&mut self.cx, crate::link::HostCloseReason::LocallyClosed);
        }
    }

    /// One step of every link.
    fn round(&mut self) -> bool {
        let mut worked = false;
        if self.handle.has_commands() {
            worked = true;
            for command in self.handle.take() {
                match command {
                    HostWorkerCommand::Add(id, link) => self.add(id, link),
                    HostWorkerCommand::Remove(id) => {
                        if let Some(link) = self.links.remove(&id) {
                            link.end(&mut self.cx, crate::link::HostCloseReason::LocallyClosed);
                        }
                    }
                }
            }
        }
        if !self.cx.late.is_empty() {
            self.cx.flush();
        }
        let mut ended = Vec::new();
        for (id, link) in &mut self.links {
            match link.step(&mut self.cx) {
                Ok(step) => worked |= step,
                Err(why) => ended.push((*id, why)),
            }
        }
        for (id, why) in ended {
            worked = true;
            if let Some(link) = self.links.remove(&id) {
                link.end(&mut self.cx, why);
            }
        }
        worked
    }

    fn add(&mut self, id: u64, mut link: Box<dyn HostLinkDriver>) {
        let mut watched = Ok(());
        for (n, (fd, flags)) in link.fds().into_iter().enumerate() {
            let data = epoll::EventData::new_u64(id * FDS_MAX + n as u64);
            watched = watched.and_then(|()| epoll::add(&self.epoll, fd, data, flags));
        }
        match watched {
            Ok(()) => {
                // What came before it was watched.
                link.ready(0);
                self.links.insert(id, link);
            }
            Err(_) => link.end(&mut self.cx, crate::link::HostCloseReason::LocallyClosed),
        }
    }

    /// Announces that this thread sleeps; false if there is work.
    fn may_sleep(&mut self) -> bool {
        self.handle.asleep.swap(true, Ordering::AcqRel);
        self.links.values_mut().all(|link| link.prepare_sleep())
            && !self.handle.has_commands()
            && !self.cx.hub.stopping.load(Ordering::Acquire)
    }

    /// Takes in what happened at descriptors.
    fn poll_sockets(&mut self, wait: bool) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [epoll::Event {
            flags: epoll::EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        }; 64];
        let timeout = if wait { None } else { Some(&now) };
        // Interrupted is as good as nothing: the next round looks again.
        let count = epoll::wait(&self.epoll, &mut events[..], timeout).unwrap_or(0);
        for event in &events[..count] {
            let data = event.data.u64();
            if data == BELL {
                let _ = rustix::io::read(self.handle.bell(), &mut [0; 8]);
            } else if let Some(link) = self.links.get_mut(&(data / FDS_MAX)) {
                link.ready((data % FDS_MAX) as usize);
            }
        }
    }
}
