//! Checks that the owner of a plane can sleep until it is woken.

use super::control::{ControlFixture, ControlHarness, LINK};
use super::data_harness::{DataFixture, DataHarness, PATIENCE, SESSION};
use crate::core::time::Nanos;
use crate::fabric::{ControlEvent, Direction, NextPoll, QuiesceTicket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

/// Operations of each direction after which it is slept.
const OPERATIONS: u64 = 20;

/// A waker that remembers that it was called.
#[derive(Default)]
struct CalledWaker(AtomicBool);

impl Wake for CalledWaker {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl CalledWaker {
    /// True if a plane that answers `next` is to be polled, because it says so or has called.
    fn is_due(&self, next: NextPoll, now: Nanos) -> bool {
        let by_time = match next {
            NextPoll::Ready => true,
            NextPoll::At(at) => at <= now,
            NextPoll::External => false,
        };
        by_time || self.0.swap(false, Ordering::SeqCst)
    }
}

/// Polls plane 0 only when it has said or called that it wants to be polled, until it is done.
fn sleep_until(
    rig: &mut DataHarness<'_>,
    (waker, next): (&CalledWaker, &mut NextPoll),
    done: impl Fn(&DataHarness<'_>) -> bool,
) {
    for _ in 0..PATIENCE {
        if done(rig) {
            return;
        }
        rig.fixture.advance();
        let now = rig.fixture.now();
        rig.poll(1, now);
        if waker.is_due(*next, now) {
            *next = rig.poll(0, now);
        }
    }
    panic!("the owner was not woken; seen: {:?}", rig.seen);
}

pub(super) fn events_wake_the_owner_of_memory(fixture: &mut dyn DataFixture) {
    let mut rig = DataHarness::connected(fixture);
    let waker = Arc::<CalledWaker>::default();
    rig.plane(0).set_waker(Waker::from(waker.clone()));
    for direction in rig.directions() {
        for n in 0..OPERATIONS {
            let op = rig.submit(SESSION, direction, &[(0, 0, 64 << (n % 9))]).expect("it is taken");
            // What a call does at once is learnt by the poll after it.
            let now = rig.fixture.now();
            let mut next = rig.poll(0, now);
            sleep_until(&mut rig, (&waker, &mut next), |rig| rig.completions(op) > 0);
            let ticket = QuiesceTicket(n + OPERATIONS * u64::from(direction == Direction::Read));
            rig.plane(0).quiesce(SESSION, ticket);
            let now = rig.fixture.now();
            next = rig.poll(0, now);
            sleep_until(&mut rig, (&waker, &mut next), |rig| rig.quiets(SESSION, ticket) > 0);
        }
    }
}

pub(super) fn events_wake_the_owner_of_links(fixture: &mut dyn ControlFixture) {
    let (mut rig, inbound) = ControlHarness::connected(fixture);
    let waker = Arc::<CalledWaker>::default();
    rig.plane(0).set_waker(Waker::from(waker.clone()));
    let mut next = NextPoll::Ready;
    for n in 0..OPERATIONS as usize {
        match n + 1 < OPERATIONS as usize {
            true => rig.plane(1).send(inbound, &[&[n as u8]]).expect("it is taken"),
            false => rig.plane(1).hang_up(inbound),
        }
        for _ in 0..PATIENCE {
            if rig.frames(0, LINK).len() > n || rig.is_down(0, LINK) {
                break;
            }
            rig.fixture.advance();
            let now = rig.fixture.now();
            rig.poll(1, now);
            if waker.is_due(next, now) {
                next = rig.poll(0, now);
            }
        }
        let is_last = n + 1 == OPERATIONS as usize;
        let woken = if is_last { rig.is_down(0, LINK) } else { rig.frames(0, LINK).len() > n };
        assert!(woken, "the owner was not woken; seen: {:?}", rig.seen);
    }
    assert!(rig.seen[0].contains(&ControlEvent::LinkDown { link: LINK }));
}
