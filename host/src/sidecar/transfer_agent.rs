//! The transfer actor of a rank in the worker whose memory it moves: on a thread with an actix
//! system of its own, connected to the host.

use super::codec::{MessageDecoder, encode};
use super::kernel_waiter::{KernelHooks, KernelWaiter, PendingLayers};
use super::ownership;
use super::proto::{ClientIdentity, ConnectorHello, FromHost, ToHost, VersionRange};
use super::rank::{RankPlan, SidecarRank};
use super::socket::{SocketFrames, WAITING_MAX, framed, send};
use crate::instance::{PlaneCounters, PlaneMeter};
use crate::process::lock;
use actix::System;
use futures_util::{SinkExt, StreamExt};
use kvferry_engine::actors::{
    EffectHandler, Input, InstanceBuilder, InstanceDriver, MailboxSender,
};
use kvferry_engine::core::ids::{Incarnation, StepId};
use kvferry_engine::core::instance::InstanceInput;
use kvferry_engine::core::message::TransferReport;
use kvferry_fabric_mori::DeviceEvent;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::{MissedTickBehavior, interval};

/// Between two looks for a host.
const PAUSE: Duration = Duration::from_millis(20);

/// How often a host may be told what was moved, beside reports.
const MOVED_EVERY: Duration = Duration::from_secs(1);

/// Jobs and layers that may wait for the actor.
const MAILBOX: usize = 4_096;

/// Between two looks for a place in a mailbox that is full.
const FULL: Duration = Duration::from_micros(50);

/// The actor: the machine of the rank, and its plane.
type RankActor = InstanceDriver<Reporter>;

/// The transfer actor of a rank, for one host after the other. Dropping it ends its thread.
#[derive(Debug)]
pub struct TransferAgent(Arc<AgentShared>);

#[derive(Debug, Default)]
struct AgentShared {
    state: Mutex<AgentState>,
    changed: Condvar,
    /// Events that nobody looks at any more.
    seen: Arc<AtomicU64>,
}

#[derive(Debug, Default)]
struct AgentState {
    /// There until nothing of it lands any more.
    running: Option<RunningRank>,
    /// The last host that ended; it is served no more, whatever is left of it in the socket.
    over: Option<Incarnation>,
    is_closed: bool,
}

#[derive(Debug)]
struct RunningRank {
    incarnation: Incarnation,
    computing: LayerNotifier,
    /// Waits for the GPU, if its memory is one's.
    kernels: Option<KernelWaiter>,
    end: Arc<Notify>,
}

/// The way of what is computed to the actor.
#[derive(Clone, Debug)]
struct LayerNotifier {
    rank: u16,
    actor: MailboxSender<RankActor>,
}

impl LayerNotifier {
    /// The first layers of a step are computed. Not for the actor's thread: it waits for a place.
    fn notify(&self, step: StepId, layers: u16) {
        let place = loop {
            match self.actor.try_wait() {
                Some(place) => break place,
                // Nothing computed is lost; places of an actor that has ended are free.
                None => thread::sleep(FULL),
            }
        };
        let rank = self.rank;
        self.actor.post(Input(InstanceInput::Layers { rank, step, layers }), place);
    }
}

impl TransferAgent {
    /// Looks for the host at `socket` from now on, and for the next one when it has ended.
    ///
    /// # Errors
    /// No thread can be had.
    ///
    /// # Safety
    /// The host says which memory of this process it moves, as a [worker](super::spec::ServingWorker)
    /// of this process has told it. What was told is as [`OwnMemory::new`] asks for, until this is
    /// dropped and its thread has ended; and who may write to the socket says nothing else.
    ///
    /// [`OwnMemory::new`]: kvferry_engine::fabric::OwnMemory::new
    pub unsafe fn start(socket: PathBuf, rank: u16) -> io::Result<TransferAgent> {
        super::log_to_stderr();
        let shared = Arc::new(AgentShared::default());
        let of_thread = shared.clone();
        // It ends when it is told to.
        let _detached = thread::Builder::new()
            .name(format!("kvferry-{rank}"))
            .spawn(move || of_thread.run(&socket, rank))?;
        Ok(TransferAgent(shared))
    }

    /// The first `layers` layers of a step are computed, or will be when the `event` of a GPU is
    /// done, which is asked for until it is [seen](TransferAgent::seen). Before the host serves the
    /// engine nobody hears it.
    pub fn layers(&self, step: StepId, layers: u16, event: Option<DeviceEvent>) {
        let state = self.0.lock();
        match (&state.running, event) {
            (Some(RunningRank { computing, .. }), None) => {
                let computing = computing.clone();
                drop(state);
                computing.notify(step, layers);
            }
            (Some(RunningRank { kernels: Some(kernels), .. }), Some(event)) => {
                kernels.wait(PendingLayers { step, layers, event });
            }
            (_, Some(_)) => _ = self.0.seen.fetch_add(1, Ordering::Release),
            (None, None) => {}
        }
    }

    /// Events that nobody looks at any more, in the order in which they were given.
    pub fn seen(&self) -> u64 {
        self.0.seen.load(Ordering::Acquire)
    }

    /// The host of this incarnation has ended: returns when nothing lands here any more that it
    /// began. Takes as long as a piece of a copy, or a greeting.
    pub fn end(&self, incarnation: Incarnation) {
        let mut state = self.0.lock();
        state.over = Some(incarnation);
        while let Some(running) =
            state.running.as_ref().filter(|running| running.incarnation == incarnation)
        {
            running.end.notify_one();
            state = self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for TransferAgent {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.is_closed = true;
        if let Some(running) = &state.running {
            running.end.notify_one();
        }
        self.0.changed.notify_all();
    }
}

impl AgentShared {
    fn lock(&self) -> MutexGuard<'_, AgentState> {
        lock(&self.state)
    }

    fn run(&self, socket: &Path, rank: u16) {
        let (mut state, mut is_told) = (self.lock(), false);
        while !state.is_closed {
            drop(state);
            match ownership::connect(socket) {
                Ok(stream) => self.session(stream, rank),
                Err(why) if why.kind() == ErrorKind::PermissionDenied => {
                    if !std::mem::replace(&mut is_told, true) {
                        tracing::error!(rank, %why, "the host is not this user's; it is looked for");
                    }
                }
                // It is not there yet, or not any more.
                Err(_) => is_told = false,
            }
            state = self.lock();
            state.running = None;
            self.changed.notify_all();
            if !state.is_closed {
                let waited = self.changed.wait_timeout(state, PAUSE);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }

    /// Serves a host until it has ended. The actor ends with the system, and with the actor its
    /// plane, which waits until nothing lands any more.
    fn session(&self, stream: UnixStream, rank: u16) {
        let system = System::new();
        if let Err(why) = system.block_on(self.serve(stream, rank)) {
            tracing::warn!(rank, %why, "the connection to the host ended");
        }
    }

    async fn serve(&self, stream: UnixStream, rank: u16) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        let mut frames = framed(tokio::net::UnixStream::from_std(stream)?);
        let words = kvferry_fabric_mori::last_error_pipe().ok().map(|pipe| pipe.as_raw_fd());
        let hello = ConnectorHello::new(ClientIdentity::Transfer { rank, last_error: words });
        frames.send(encode(&hello)?).await?;
        let mut reader = MessageDecoder::new(VersionRange::OWN);
        let end = Arc::new(Notify::new());
        let (out, mut waiting) = mpsc::channel(WAITING_MAX);
        let mut begun = None;
        let mut told = PlaneCounters::default();
        let mut every = interval(MOVED_EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                frame = frames.next() => match frame {
                    Some(frame) => match reader.read(&frame?)? {
                        Some(FromHost::Ready { versions, .. }) => reader.learn(versions),
                        Some(FromHost::Begin(plan)) => match self.begin(*plan, &out, &end) {
                            Ok(rank) => begun = Some(rank),
                            Err(why) => return tell(&mut frames, &ToHost::Unable { why }).await,
                        },
                        Some(FromHost::Job(job)) => {
                            if let Some((LayerNotifier { rank, actor }, _)) = &begun {
                                let (rank, place) = (*rank, actor.wait().await);
                                actor.post(Input(InstanceInput::Job { rank, job }), place);
                            }
                        }
                        Some(FromHost::Refused { why }) => return Err(io::Error::other(why)),
                        _ => {}
                    },
                    None => return Ok(()),
                },
                Some(message) = waiting.recv() => {
                    send(&mut frames, message, &mut waiting).await?;
                }
                () = end.notified() => return Ok(()),
                _ = every.tick() => {
                    let moved = begun.as_ref().map_or(told, |(_, meter)| meter.read());
                    if moved != told {
                        told = moved;
                        tell(&mut frames, &ToHost::Moved(moved)).await?;
                    }
                }
            }
        }
    }

    /// Starts the actor; it, and what tells what its plane did.
    fn begin(
        &self,
        mut plan: RankPlan,
        out: &mpsc::Sender<ToHost>,
        end: &Arc<Notify>,
    ) -> Result<(LayerNotifier, PlaneMeter), String> {
        let (incarnation, rank) = (plan.core.incarnation, plan.rank);
        let mut state = self.lock();
        if state.is_closed || state.over == Some(incarnation) {
            return Err(format!("rank {rank}: the host has ended"));
        }
        let of_rank = |why| format!("rank {rank}: {why}");
        for memory in &mut plan.memory {
            // SAFETY: Who started this has promised it of all that the host names.
            *memory = unsafe { memory.vouch() };
        }
        let core = plan.core.clone();
        let SidecarRank { parts, meter, events } = plan.parts().map_err(of_rank)?;
        let outlet = Reporter { meter: meter.clone(), out: out.clone(), end: end.clone() };
        let actor = parts.add_to(InstanceBuilder::new(core)).start(|_| outlet);
        let computing = LayerNotifier { rank, actor: MailboxSender::new(actor, MAILBOX) };
        let kernels = events.map(|events| {
            let (computing, end, out) = (computing.clone(), end.clone(), out.clone());
            let hooks = KernelHooks {
                ask: Box::new(move |event| events.is_done(event)),
                computed: Box::new(move |PendingLayers { step, layers, .. }| {
                    computing.notify(step, layers)
                }),
                failed: Box::new(move |why| {
                    let why = format!("rank {rank}: the GPU failed: {why}");
                    if out.try_send(ToHost::Unable { why }).is_err() {
                        end.notify_one();
                    }
                }),
            };
            KernelWaiter::start(hooks, self.seen.clone())
        });
        let kernels = kernels.transpose().map_err(|why| of_rank(why.to_string()))?;
        state.running = Some(RunningRank {
            incarnation,
            computing: computing.clone(),
            kernels,
            end: end.clone(),
        });
        tracing::info!(rank, "this worker moves its KV");
        Ok((computing, meter))
    }
}

async fn tell(frames: &mut SocketFrames, message: &ToHost) -> io::Result<()> {
    frames.send(encode(message)?).await
}

/// Passes on what the actor reports.
struct Reporter {
    meter: PlaneMeter,
    out: mpsc::Sender<ToHost>,
    end: Arc<Notify>,
}

impl EffectHandler for Reporter {
    fn report(&mut self, _: u16, report: &TransferReport) {
        let (report, moved) = (report.clone(), self.meter.read());
        if self.out.try_send(ToHost::Report { report, moved }).is_err() {
            // A host that does not take it would miss it.
            self.end.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::codec::decode;
    use super::*;
    use crate::instance::PlaneConfig;
    use kvferry_engine::core::config::CoreConfig;
    use kvferry_engine::core::layout::{Geometry, HeadSlots, KvGroup, LayerLayout};
    use kvferry_engine::core::message::{Role, TransferReport};
    use kvferry_engine::fabric::{Memory, OwnMemory};
    use kvferry_fabric_host::HostConfig;
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;
    use tokio::sync::mpsc::UnboundedReceiver;

    const LEN: usize = 4096;

    /// A rank with a layer of two blocks, whose plane listens at `port`.
    fn plan(incarnation: u64, memory: &'static [u8], port: u16) -> RankPlan {
        let geometry = Geometry::new("m", 1, vec![KvGroup::full(16, [0])]);
        let (incarnation, control) = (Incarnation(incarnation), "127.0.0.1:1".into());
        let core = CoreConfig::new(Role::Decode, "e", incarnation, geometry, control);
        let layer = LayerLayout {
            region: 0,
            base: 0,
            shape: [2, 1, 16, 8],
            stride: [256, 256, 8, 1],
            element: 4,
            slots: HeadSlots::Fused,
        };
        RankPlan {
            core,
            rank: 0,
            host: "127.0.0.1".into(),
            plane: PlaneConfig::Host(HostConfig { port, ..HostConfig::default() }),
            memory: vec![Memory::Own(OwnMemory::unproven(memory.as_ptr() as u64, LEN as u64))],
            layers: vec![layer],
            operations: crate::instance::ProtocolLimits::default().operations,
        }
    }

    /// A host of which the test has the other end.
    struct Played {
        begin: mpsc::UnboundedSender<RankPlan>,
        heard: UnboundedReceiver<ToHost>,
    }

    impl Played {
        /// Serves connections, each on the runtime of its own thread, until `begin` is dropped.
        fn listen(path: &Path) -> Played {
            let listener = UnixListener::bind(path).expect("a socket");
            let (begin, mut plans) = mpsc::unbounded_channel::<RankPlan>();
            let (told, heard) = mpsc::unbounded_channel();
            thread::spawn(move || {
                System::new().block_on(async move {
                    while let Some(plan) = plans.recv().await {
                        let (stream, _) = listener.accept().expect("it connects");
                        stream.set_nonblocking(true).expect("a socket");
                        let stream = tokio::net::UnixStream::from_std(stream).expect("a socket");
                        let mut frames = framed(stream);
                        let hello = frames.next().await.expect("a frame").expect("whole");
                        let ConnectorHello {
                            who: ClientIdentity::Transfer { rank: 0, .. }, ..
                        } = decode(&hello).expect("a hello")
                        else {
                            panic!("another part")
                        };
                        let begin = encode(&FromHost::Begin(Box::new(plan))).expect("it encodes");
                        frames.send(begin).await.expect("it is read");
                        while let Some(Ok(frame)) = frames.next().await {
                            told.send(decode(&frame).expect("a message")).expect("the test reads");
                        }
                    }
                });
            });
            Played { begin, heard }
        }

        fn next(&mut self) -> ToHost {
            self.heard.blocking_recv().expect("the host is there")
        }
    }

    fn is_heard(port: u16) -> bool {
        TcpStream::connect(("127.0.0.1", port)).is_ok()
    }

    #[test]
    fn nothing_is_left_of_the_actor_of_a_host_that_has_ended() {
        let memory: &'static [u8] = vec![0; LEN].leak();
        let path = std::env::temp_dir().join(format!("kvferry-over-{}.sock", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut host = Played::listen(&path);
        // SAFETY: The plans of this test name memory that is never freed nor looked at.
        let agent = unsafe { TransferAgent::start(path.clone(), 0) };
        let transfers = agent.expect("a thread");
        let free = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
        let port = free.expect("a port").port();
        // The second comes again with the incarnation that is over.
        for (incarnation, serves) in [(7, true), (7, false), (8, true)] {
            host.begin.send(plan(incarnation, memory, port)).expect("the host listens");
            let said = host.next();
            let is_ready =
                matches!(said, ToHost::Report { report: TransferReport::Ready { .. }, .. });
            assert_eq!((is_ready, is_heard(port)), (serves, serves), "{incarnation}: {said:?}");
            // Its connection is still open.
            transfers.end(Incarnation(incarnation));
            assert!(!is_heard(port), "the plane of {incarnation} is there");
            if !serves {
                assert!(matches!(said, ToHost::Unable { .. }), "{said:?}");
            }
        }
        std::fs::remove_file(&path).expect("it was there");
    }
}
