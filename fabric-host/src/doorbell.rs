//! What wakes threads: eventfds within the process, and pipes between two processes.
//!
//! An eventfd is one thing for all who have it: a peer could have who writes to it wait for ever. Of
//! a pipe each side has an end of its own, which is opened so that a write does not wait for room,
//! whatever the peer does with its end. Datagram sockets do the same and take 1 us more for a ring.

use crate::ring::{AtomicBool, Ordering};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::{Mode, OFlags, fchmod, open, readlink};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A descriptor to be rung by threads of this process, which alone has it.
fn doorbell() -> Result<OwnedFd, Errno> {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
}

fn ring(bell: &OwnedFd) {
    // It cannot overflow: each ring is heard before the next.
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

/// By what a thread of a peer is rung.
#[derive(Clone, Debug)]
pub(crate) struct PeerBell(Arc<OwnedFd>);

impl PeerBell {
    /// Of the pipe that a peer sent. Its end is opened anew: what the peer does with the flags of
    /// the one that it sent has no effect here.
    ///
    /// # Errors
    /// It is none, so that to ring it could take as long as the peer likes.
    pub(crate) fn new(sent: OwnedFd) -> Result<PeerBell, String> {
        let path = format!("/proc/self/fd/{}", sent.as_raw_fd());
        // Nothing with a path is named like this.
        let is_pipe = |name: &std::ffi::CStr| name.to_bytes().starts_with(b"pipe:[");
        if !readlink(&path, Vec::new()).is_ok_and(|name| is_pipe(&name)) {
            return Err("a doorbell that is no pipe, which no plane sends".into());
        }
        // For reading, too: a write to a pipe that nobody reads any more is a signal.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let own = open(path, flags, Mode::empty());
        own.map(|own| PeerBell(Arc::new(own))).map_err(|why| format!("doorbell: {why}"))
    }

    pub(crate) fn ring(&self) {
        // Where there is no room it is rung already. If the peer broke it, it is its loss.
        let _ = rustix::io::write(&*self.0, &[1]);
    }
}

/// By what a peer rings a thread of this process, for one link.
#[derive(Debug)]
pub(crate) struct HeardBell(OwnedFd);

impl HeardBell {
    /// One, and what the peer is to ring.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn pair() -> Result<(HeardBell, OwnedFd), Errno> {
        let (heard, rung) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // For a peer of another user, who opens it again.
        fchmod(&rung, Mode::from_raw_mode(0o666))?;
        Ok((HeardBell(heard), rung))
    }

    /// It was heard; readable again only if it was rung more often, for something else perhaps.
    pub(crate) fn hear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 1]);
    }

    /// What is readable when it was rung.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether a thread sleeps, for those that have something for it.
///
/// Who has left something asks whether to ring, and who sleeps announces that before it looks for
/// the last time: both swap, so that one of them sees what the other did.
#[derive(Debug)]
pub(crate) struct SleepFlag(AtomicBool);

impl SleepFlag {
    pub(crate) fn new() -> SleepFlag {
        SleepFlag(AtomicBool::new(false))
    }

    /// Announces that the thread sleeps. It may, unless there is something for it by now.
    pub(crate) fn announce(&self) {
        let _was = self.0.swap(true, Ordering::AcqRel);
    }

    /// The thread looks by itself.
    pub(crate) fn attend(&self) {
        // A swap, not a store: who came in between was told not to ring, and is seen by it.
        let _was = self.0.swap(false, Ordering::AcqRel);
    }

    /// True if it has to be rung for what was left for it; once for each sleep.
    pub(crate) fn must_ring(&self) -> bool {
        self.0.swap(false, Ordering::AcqRel)
    }
}

/// Whether an eventfd was rung and not heard, so that hearing costs no system call if it was not.
#[derive(Debug)]
pub(crate) struct RungFlag(AtomicBool);

impl RungFlag {
    pub(crate) fn new() -> RungFlag {
        RungFlag(AtomicBool::new(false))
    }

    /// Rings: the word is ahead of the ring, so that no ring stays unheard without one.
    pub(crate) fn ring(&self, ring: impl FnOnce()) {
        self.0.store(true, Ordering::SeqCst);
        ring();
    }

    /// Hears what was rung. Who hears looks afterwards for what it was rung for.
    pub(crate) fn hear(&self, hear: impl FnOnce()) {
        if self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::SeqCst) {
            hear();
        }
    }
}

/// The number of the bell of this process among those that an owner watches.
const OWN: u64 = u64::MAX;

/// What the owner of a plane watches: it is rung by threads of the plane and by peers.
#[derive(Debug)]
pub(crate) struct OwnerBell {
    own: OwnedFd,
    is_rung: RungFlag,
    all: OwnedFd,
}

impl OwnerBell {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> Result<OwnerBell, Errno> {
        let (own, all) = (doorbell()?, epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&all, &own, epoll::EventData::new_u64(OWN), epoll::EventFlags::IN)?;
        Ok(OwnerBell { own, is_rung: RungFlag::new(), all })
    }

    /// Readable when any of them was rung.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.all.as_fd()
    }

    /// Has the owner watch the bell of a link, as long as that is there.
    ///
    /// # Errors
    /// No memory is left.
    pub(crate) fn watch(&self, link: u64, bell: &HeardBell) -> Result<(), Errno> {
        let link = epoll::EventData::new_u64(link);
        epoll::add(&self.all, bell.fd(), link, epoll::EventFlags::IN)
    }

    pub(crate) fn ring(&self) {
        self.is_rung.ring(|| ring(&self.own));
    }

    /// What this process rang is heard.
    pub(crate) fn hear(&self) {
        self.is_rung.hear(|| _ = rustix::io::read(&self.own, &mut [0; 8]));
    }

    /// The links that were rung by, some of them if there are many.
    pub(crate) fn rung(&self, mut hear: impl FnMut(u64)) {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let (flags, data) = (epoll::EventFlags::empty(), epoll::EventData::new_u64(0));
        let mut events = [epoll::Event { flags, data }; 64];
        let count = epoll::wait(&self.all, &mut events[..], Some(&now)).unwrap_or(0);
        for event in &events[..count] {
            match event.data.u64() {
                // By a ring that came between its word and its write.
                OWN => _ = rustix::io::read(&self.own, &mut [0; 8]),
                link => hear(link),
            }
        }
    }
}

/// A thread, for others of its process.
#[derive(Debug)]
pub(crate) struct WorkerHandle {
    bell: OwnedFd,
    pub(crate) asleep: SleepFlag,
}

impl WorkerHandle {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> Result<WorkerHandle, Errno> {
        Ok(WorkerHandle { bell: doorbell()?, asleep: SleepFlag::new() })
    }

    /// What the thread watches.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Wakes the thread if it sleeps.
    pub(crate) fn wake(&self) {
        if self.asleep.must_ring() {
            ring(&self.bell);
        }
    }
}

#[cfg(all(test, feature = "loom"))]
mod model;
