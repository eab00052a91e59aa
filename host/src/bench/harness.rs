//! A plane with its memory, and waiting for it.

use super::args::BenchPlan;
use super::connection::{BenchConnection, BenchHello};
use super::memory::BenchMemory;
use crate::instance::PlaneConfig;
use crate::process::CommandError;
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{
    DataEvent, DataPlane, FabricError, NextPoll, PeerId, QuiesceTicket, RegionDesc, RegionId,
    SessionId,
};
use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// The one region of a side.
pub(super) const REGION: RegionId = RegionId(1);

pub(super) const PEER: PeerId = PeerId(1);

/// The one session of the side that measures.
pub(super) const SESSION: SessionId = SessionId(1);

/// Wakes the thread that drives a plane.
struct BenchWaker(Thread);

impl task::Wake for BenchWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// One of the two processes, driven by the thread that made it.
pub(super) struct PlaneHarness {
    pub(super) plane: Box<dyn DataPlane>,
    /// After the plane, which it has to outlive.
    pub(super) bytes: BenchMemory,
    /// Bytes that are registered.
    pub(super) len: u64,
    backend: &'static str,
    /// `open_ms` and `operation_ms` of a plane that has them.
    limits: Option<(u32, u32)>,
    /// What the plane said and nobody looked at yet.
    pub(super) events: Vec<DataEvent>,
    /// The plane's backend was replaced: the region has to be registered again.
    pub(super) needs_registration: bool,
    begun: Instant,
    pub(super) patience: Duration,
    /// Set when the process is to end.
    shutdown: Arc<AtomicBool>,
}

impl PlaneHarness {
    /// Starts the plane at `host`.
    ///
    /// # Errors
    /// What the plane, or the memory, cannot have.
    pub(super) fn start(
        plan: &BenchPlan,
        host: &str,
        over: Arc<AtomicBool>,
    ) -> Result<PlaneHarness, CommandError> {
        let bytes = BenchMemory::new(plan).map_err(CommandError::Input)?;
        let backend = plan.plane.backend();
        let plane = plan.plane.clone().start_as("kvferry-bench".into(), host, false);
        let plane =
            plane.map_err(|why| CommandError::Input(format!("{backend} at {host}: {why}")))?.plane;
        Ok(PlaneHarness::with_plane(plane, bytes, plan, over))
    }

    /// The same over a plane that is there.
    pub(super) fn with_plane(
        mut plane: Box<dyn DataPlane>,
        bytes: BenchMemory,
        plan: &BenchPlan,
        over: Arc<AtomicBool>,
    ) -> PlaneHarness {
        plane.set_waker(Arc::new(BenchWaker(thread::current())).into());
        let (len, patience, backend) = (plan.memory, plan.patience, plan.plane.backend());
        let limits = match &plan.plane {
            PlaneConfig::Mori(config) | PlaneConfig::MoriMixed(config) => {
                Some((config.open_ms, config.operation_ms))
            }
            PlaneConfig::Host(_) => None,
        };
        let (events, is_void, begun) = (Vec::new(), false, Instant::now());
        PlaneHarness {
            plane,
            bytes,
            len,
            backend,
            limits,
            events,
            needs_registration: is_void,
            begun,
            patience,
            shutdown: over,
        }
    }

    /// `host`, `mori-rdma` or `mori-xgmi`.
    pub(super) fn backend(&self) -> &'static str {
        self.backend
    }

    /// Why something failed; a limit that has passed is named.
    pub(super) fn explain(&self, cause: &FabricError) -> String {
        match (cause, self.limits) {
            (FabricError::AckTimeout, Some((_, ms))) => format!(
                "{cause}, or not there within operation_ms = {ms}; --mori '{{\"operation_ms\": N}}' sets it"
            ),
            (FabricError::Unreachable, Some((ms, _))) => format!(
                "{cause}, or no answer within open_ms = {ms}; --mori '{{\"open_ms\": N}}' sets it"
            ),
            _ => cause.to_string(),
        }
    }

    /// Opens the session to the memory of the other side.
    ///
    /// # Errors
    /// It cannot be had, or the other side is gone.
    pub(super) fn open(
        &mut self,
        line: &BenchConnection,
        remote: &RegionDesc,
    ) -> Result<(), CommandError> {
        let what = format!("a session to {}", line.peer);
        let failed = |why: &dyn Display| CommandError::Input(format!("{what}: {why}"));
        self.plane.open(SESSION, REGION, PEER, remote).map_err(|why| failed(&why))?;
        let opened = self.wait(Some(line), &what, |event| match event {
            DataEvent::Opened { session: SESSION, result } => Some(result.clone()),
            _ => None,
        })?;
        opened.map_err(|why| failed(&self.explain(&why)))
    }

    /// Opens it anew after a batch has failed.
    ///
    /// # Errors
    /// As for the first time.
    pub(super) fn reopen(
        &mut self,
        line: &BenchConnection,
        remote: &RegionDesc,
    ) -> Result<(), CommandError> {
        const TICKET: QuiesceTicket = QuiesceTicket(1);
        self.plane.close(SESSION);
        self.plane.quiesce(SESSION, TICKET);
        self.wait(Some(line), "quiet after a batch that failed", |event| {
            (*event == DataEvent::Quiet { session: SESSION, ticket: TICKET }).then_some(())
        })?;
        self.open(line, remote)
    }

    /// True if the process is to end.
    pub(super) fn is_shutdown(&self) -> bool {
        self.shutdown.load(Ordering::Acquire)
    }

    /// Registers the memory.
    ///
    /// # Errors
    /// The plane does not take it.
    pub(super) fn register(&mut self) -> Result<RegionDesc, CommandError> {
        let what = format!("registering {} bytes with {}", self.len, self.backend);
        // SAFETY: The plane is dropped first, by the order of the fields.
        let memory = unsafe { self.bytes.memory() };
        let refused = self.plane.register(REGION, memory);
        refused.map_err(|why| CommandError::Input(format!("{what}: {why}")))?;
        let registered = self.wait(None, &what, |event| match event {
            DataEvent::Registered { region: REGION, result } => Some(result.clone()),
            _ => None,
        })?;
        registered.map_err(|why| CommandError::Input(format!("{what}: {why}")))
    }

    /// What it says of itself.
    pub(super) fn hello(&self, region: &RegionDesc, fence_key: u64) -> BenchHello {
        BenchHello {
            kvferry_bench: BenchHello::version(),
            backend: self.backend.into(),
            address: self.plane.address(),
            region: region.clone(),
            len: self.len,
            of_host: self.bytes.is_of_host(),
            fence_key,
        }
    }

    /// Polls the plane once. If it has nothing to say, sleeps until it has, or for `at_most`.
    pub(super) fn poll_once(&mut self, at_most: Duration) {
        let now = Nanos(self.begun.elapsed().as_nanos() as u64);
        let wake = self.plane.poll(now, &mut self.events);
        if !self.events.is_empty() {
            self.needs_registration |=
                self.events.iter().any(|event| matches!(event, DataEvent::Reset { .. }));
            return;
        }
        match wake {
            // The plane may wait for a thread, or a process, that waits for this core.
            NextPoll::Ready => thread::yield_now(),
            NextPoll::At(at) => {
                thread::park_timeout(at_most.min(Duration::from_nanos((at - now).0)))
            }
            NextPoll::External => thread::park_timeout(at_most),
        }
    }

    /// What every wait looks at: whether there still is what it waits for.
    ///
    /// # Errors
    /// There is not: the other side has ended, or the time is up.
    pub(super) fn check(
        &self,
        line: Option<&BenchConnection>,
        what: &dyn Display,
        since: Instant,
    ) -> Result<Duration, CommandError> {
        if let Some(line) = line {
            line.check().map_err(|why| CommandError::Input(format!("{what}: {why}")))?;
        }
        if self.is_shutdown() {
            return Err(CommandError::Input(format!("{what}: told to end")));
        }
        let left = self.patience.saturating_sub(since.elapsed());
        match left.is_zero() {
            false => Ok(left),
            true => Err(CommandError::Input(format!(
                "{what}: nothing came within {} s (--timeout)",
                self.patience.as_secs_f64()
            ))),
        }
    }

    /// Waits for an event of the plane; what else it says is forgotten.
    ///
    /// # Errors
    /// It did not come, or the peer at the end of the line is gone.
    pub(super) fn wait<T>(
        &mut self,
        line: Option<&BenchConnection>,
        what: &str,
        found: impl Fn(&DataEvent) -> Option<T>,
    ) -> Result<T, CommandError> {
        let since = Instant::now();
        loop {
            for event in self.events.drain(..) {
                if let Some(found) = found(&event) {
                    return Ok(found);
                }
                // Without a line there is no other side yet, or one that may go.
                if line.is_some()
                    && let Some(why) = fatal_event(&event)
                {
                    return Err(CommandError::Input(format!("{what}: {why}")));
                }
            }
            let left = self.check(line, &what, since)?;
            self.poll_once(left);
        }
    }

    /// Waits for a line of the other side.
    ///
    /// # Errors
    /// It did not come.
    pub(super) fn recv_line(
        &mut self,
        line: &BenchConnection,
        what: &str,
    ) -> Result<String, CommandError> {
        let since = Instant::now();
        loop {
            match line.try_recv() {
                Ok(Some(text)) => return Ok(text),
                Ok(None) => {}
                Err(why) => return Err(CommandError::Input(format!("{what}: {why}"))),
            }
            // A line that was read may be the last one.
            let left = self.check(None, &what, since)?;
            self.events.clear();
            self.poll_once(left);
        }
    }
}

/// What makes a plane's peer or its own regions void.
pub(super) fn fatal_event(event: &DataEvent) -> Option<&'static str> {
    match event {
        DataEvent::Reset { .. } => Some("the plane's backend failed and was replaced"),
        DataEvent::PeerDown { .. } => Some("the plane of the other side is gone"),
        _ => None,
    }
}
