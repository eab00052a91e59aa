//! What wakes threads: eventfds within the process, and pipes between two processes.
//!
//! An eventfd is one thing for all who have it: a peer could have who writes to it wait for ever. Of
//! a pipe each side has an end of its own, which is opened so that a write does not wait for room,
//! whatever the peer does with its end. Datagram sockets do the same and take 1 us more for a ring.

use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::fs::{Mode, OFlags, fchmod, open, readlink};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

    /// It was heard; readable again only if it is rung after that, or was very often.
    pub(crate) fn hear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 64]);
    }

    /// What is readable when it was rung.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The number of the bell of this process among those that an owner watches.
const OWN: u64 = u64::MAX;

/// What the owner of a plane watches: it is rung by threads of the plane and by peers.
#[derive(Debug)]
pub(crate) struct OwnerBell {
    own: OwnedFd,
    /// The one of this process was rung and not heard.
    is_rung: AtomicBool,
    all: OwnedFd,
}

impl OwnerBell {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> Result<OwnerBell, Errno> {
        let (own, all) = (doorbell()?, epoll::create(epoll::CreateFlags::CLOEXEC)?);
        epoll::add(&all, &own, epoll::EventData::new_u64(OWN), epoll::EventFlags::IN)?;
        Ok(OwnerBell { own, is_rung: AtomicBool::new(false), all })
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
        self.is_rung.store(true, Ordering::SeqCst);
        ring(&self.own);
    }

    /// What this process rang is heard.
    pub(crate) fn hear(&self) {
        if self.is_rung.load(Ordering::Relaxed) && self.is_rung.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::read(&self.own, &mut [0; 8]);
        }
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
    pub(crate) asleep: AtomicBool,
}

impl WorkerHandle {
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> Result<WorkerHandle, Errno> {
        Ok(WorkerHandle { bell: doorbell()?, asleep: AtomicBool::new(false) })
    }

    /// What the thread watches.
    pub(crate) fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Wakes the thread if it sleeps.
    pub(crate) fn wake(&self) {
        if self.asleep.swap(false, Ordering::AcqRel) {
            ring(&self.bell);
        }
    }
}
