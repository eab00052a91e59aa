//! A driver whose plane has a doorbell and nothing else to be woken by.

use crate::Echo;
use actix::System;
use kvferry_engine::actors::{Driver, PlaneAdapter};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::NextPoll;
use std::collections::VecDeque;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;
use tokio::sync::mpsc;

/// Each poll is news, of which there are as many as polls.
struct Belfry {
    polls: u32,
    rung: UnixStream,
    seen: mpsc::UnboundedSender<u32>,
}

impl PlaneAdapter for Belfry {
    type Machine = Echo;

    fn poll(&mut self, _: Nanos, _: &mut VecDeque<u32>) -> NextPoll {
        self.polls += 1;
        let _ = self.seen.send(self.polls);
        NextPoll::External
    }

    fn perform(&mut self, _: &Echo, _: u32, _: &mut VecDeque<u32>) {}

    fn ticks(&self, _: &Echo, _: Nanos, _: &mut VecDeque<u32>) {}

    fn set_waker(&mut self, _: Waker) {}

    fn doorbells(&mut self) -> Vec<(usize, BorrowedFd<'_>)> {
        vec![(0, self.rung.as_fd())]
    }
}

#[test]
fn each_ring_is_a_poll() {
    System::new().block_on(async {
        let (mut bell, rung) = UnixStream::pair().unwrap();
        let (seen, mut polls) = mpsc::unbounded_channel();
        let adapter = |_| Belfry { polls: 0, rung, seen };
        let _driver = Driver::start(adapter, Echo, None, Arc::new(|| Nanos::ZERO));
        for poll in 1..20 {
            let next = tokio::time::timeout(Duration::from_secs(300), polls.recv()).await;
            assert_eq!(next, Ok(Some(poll)));
            bell.write_all(&[1]).unwrap();
        }
    });
}
