//! The threads that copy. Each serves its links in turns of one chunk, looks for work for a while
//! when there is none, and then sleeps.

use crate::doorbell::WorkerHandle;
use crate::shared::{
    CompletionProducer, HostCloseReason, HostLinkDriver, HostPlaneShared, HostWorkerCommand,
    WorkerContext,
};
use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Rounds with work between two looks at the sockets.
const SOCKETS_EVERY: u32 = 16;

/// Descriptors that one link may have watched.
const FDS_MAX: u64 = 4;

/// The number of the doorbell among watched descriptors.
const BELL: u64 = u64::MAX;

pub(crate) struct HostWorker {
    number: usize,
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
        number: usize,
        outcomes: CompletionProducer,
    ) -> Result<HostWorker, Errno> {
        let handle = hub.workers[number].clone();
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let bell = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, handle.bell(), bell, epoll::EventFlags::IN)?;
        let spin = Duration::from_micros(hub.config.spin_us.into());
        let cx = WorkerContext::new(hub, outcomes);
        Ok(HostWorker { number, handle, epoll, cx, links: BTreeMap::new(), spin })
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
                self.handle.asleep.attend();
                last_work = Instant::now();
            }
        }
        for (_, link) in std::mem::take(&mut self.links) {
            link.end(&mut self.cx, HostCloseReason::LocallyClosed);
        }
    }

    /// One step of every link.
    fn round(&mut self) -> bool {
        let mut worked = false;
        if self.cx.hub.has_commands(self.number) {
            worked = true;
            for command in self.cx.hub.take_commands(self.number) {
                match command {
                    HostWorkerCommand::Add(id, link) => self.add(id, link),
                    HostWorkerCommand::Remove(id) => {
                        if let Some(link) = self.links.remove(&id) {
                            link.end(&mut self.cx, HostCloseReason::LocallyClosed);
                        }
                    }
                }
            }
        }
        self.cx.flush();
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
            Err(_) => link.end(&mut self.cx, HostCloseReason::LocallyClosed),
        }
    }

    /// Announces that this thread sleeps; false if there is work.
    fn may_sleep(&mut self) -> bool {
        self.handle.asleep.announce();
        self.links.values_mut().all(|link| link.prepare_sleep())
            && !self.cx.hub.has_commands(self.number)
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
