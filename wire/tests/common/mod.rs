//! Planes of the tests, which wait for news and never sleep.
#![allow(dead_code, reason = "each test file uses a part")]

use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{ControlEvent, ControlPlane, LinkId};
use kvferry_wire::zmtp::MESSAGE_MAX;
use kvferry_wire::{WireConfig, ZmqPlane};
use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// A guard against waiting for ever; however busy the machine is, nothing takes as long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(300);

struct TestUnparkWaker(Thread);

impl Wake for TestUnparkWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A plane and the events that nobody asked for yet.
pub(crate) struct TestZmqPlane {
    pub(crate) plane: ZmqPlane,
    seen: VecDeque<ControlEvent>,
}

impl TestZmqPlane {
    /// A plane that listens at this host and wakes this thread.
    pub(crate) fn new(host: &str) -> TestZmqPlane {
        TestZmqPlane::with(WireConfig {
            host: host.into(),
            dial: PATIENCE,
            unproven_max: MESSAGE_MAX,
            ..WireConfig::default()
        })
    }

    pub(crate) fn with(config: WireConfig) -> TestZmqPlane {
        let mut plane = ZmqPlane::new(config).expect("there is room for a thread");
        plane.set_waker(Waker::from(Arc::new(TestUnparkWaker(std::thread::current()))));
        TestZmqPlane { plane, seen: VecDeque::new() }
    }

    /// The first event that is wanted; those before it are dropped.
    pub(crate) fn wait_for(&mut self, wanted: impl Fn(&ControlEvent) -> bool) -> ControlEvent {
        let start = Instant::now();
        loop {
            let mut events = Vec::new();
            self.plane.poll(Nanos::ZERO, &mut events);
            self.seen.extend(events);
            while let Some(event) = self.seen.pop_front() {
                if wanted(&event) {
                    return event;
                }
            }
            let left = PATIENCE.saturating_sub(start.elapsed());
            assert!(!left.is_zero(), "the event did not come");
            std::thread::park_timeout(left);
        }
    }

    /// The next frame and its link.
    pub(crate) fn next_frame(&mut self) -> (LinkId, Vec<Vec<u8>>) {
        match self.wait_for(|event| matches!(event, ControlEvent::Frame { .. })) {
            ControlEvent::Frame { link, parts } => (link, parts),
            other => panic!("asked for a frame, got {other:?}"),
        }
    }
}
