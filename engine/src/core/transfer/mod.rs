//! Moves bytes: one per TP rank, told what by its prefill or decode core.
//!
//! A *flow* is one attempt to move one prompt between this engine and a peer. What it can move is
//! queued in *pieces* (a token range of a group of layers towards one remote rank). Operations are
//! cut from them, and planned, when the plane has credit for them: `fair_queue` says whose turn it
//! is, `rate_estimator` how large an operation is and how much is in flight. `source` follows what
//! the engine has computed, `flow` the life of a flow, `stripe` says what its pieces are,
//! `work_request` follows an operation, `session` peers and their sessions.
//!
//! Whatever ends a flow early, its last report says that no byte of it can land any more: every
//! session that it touched is quiesced first.
//!
//! ```
//! use kvferry_engine::core::command::DataCommand;
//! use kvferry_engine::core::config::CoreConfig;
//! use kvferry_engine::core::ids::Incarnation;
//! use kvferry_engine::core::layout::{Geometry, KvGroup, LayerLayout};
//! use kvferry_engine::core::message::Role;
//! use kvferry_engine::core::transfer::{Transfer, TransferConfig, TransferEffect, TransferInput};
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//! use kvferry_engine::fabric::*;
//!
//! let geometry = Geometry::new("m", 2, vec![KvGroup::full(16, [0])]);
//! let control = "tcp://10.0.0.1:6301".into();
//! let core = CoreConfig::new(Role::Prefill, "prefill-0", Incarnation(1), geometry, control);
//! let caps = Caps {
//!     read: true,
//!     write: true,
//!     slices_max: 1024,
//!     per_peer: Credits::UNLIMITED,
//!     in_all: Credits::of_operations(64),
//!     placement: Placement::OnCompletion,
//!     fence: FenceScope::Peer,
//!     patience: PlaneTimeouts::default(),
//! };
//! // A layer of 64 blocks with 2 heads, 16 tokens, and 8 elements of 2 bytes.
//! let layers = vec![LayerLayout::contiguous(0, [64, 2, 16, 8], 2)];
//! // The actor follows no address.
//! let memory = vec![Memory::Own(OwnMemory::unproven(1 << 20, 64 * 512))];
//! let plane = (Address(b"plane".as_slice().into()), caps);
//! let config = TransferConfig::new(&core, 0, plane, memory, layers);
//! let (mut rank, mut out) = (Transfer::new(config), Outbox::new());
//! rank.handle(Nanos::ZERO, TransferInput::Start, &mut out);
//! let [TransferEffect::Data(DataCommand::Register { .. })] = out.as_slice() else {
//!     panic!("{out:?}");
//! };
//! ```

mod fair_queue;
mod flow;
mod rate_estimator;
mod session;
mod source;
mod stripe;
mod verify;
mod work_request;

use crate::core::command::{DataCommand, DataRefusal};
use crate::core::config::CoreConfig;
use crate::core::error::Failure;
use crate::core::ids::{ConnectionId, FlowId, SourceId, StepId};
use crate::core::layout::{Geometry, LayerLayout, RankLayout, Slices};
use crate::core::machine::{Gauges, Machine, Outbox, Turn};
use crate::core::message::{Mode, Role, TransferJob, TransferReport};
use crate::core::time::Nanos;
use crate::core::timers::Timers;
use crate::fabric::{
    Address, Caps, Credits, DataEvent, DigestId, FabricError, Memory, OpId, PeerId, QuiesceTicket,
    RegionDesc, RegionId, SessionId,
};
use flow::{Flow, LocalKv};
use serde::{Deserialize, Serialize};
use session::TransferPeer;
use source::PushSource;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use stripe::StripeRange;
use verify::{DigestRequest, FlowDigest};
use work_request::WorkRequest;

/// What can happen to a transfer actor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransferInput {
    Start,
    /// A job of the core.
    Job(TransferJob),
    /// The engine's worker computed layers `..layers` of a step (`save_kv_layer`,
    /// `wait_for_save`); the model's layer count ends the step. Steps come in order, a step may be
    /// skipped, and a later step means that the earlier ones are complete.
    Layers {
        step: StepId,
        layers: u16,
    },
    /// The data plane reports.
    Data(DataEvent),
    /// The data plane did not take a call.
    Refused(DataRefusal),
    /// A deadline may be due.
    Tick,
}

/// What a transfer actor wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TransferEffect {
    /// Call the data plane.
    Data(DataCommand),
    Report(TransferReport),
}

impl From<DataCommand> for TransferEffect {
    fn from(command: DataCommand) -> Self {
        TransferEffect::Data(command)
    }
}

impl From<TransferReport> for TransferEffect {
    fn from(report: TransferReport) -> Self {
        TransferEffect::Report(report)
    }
}

/// Times and limits of a transfer actor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TransferSettings {
    /// Layers that share one operation.
    pub layers_per_op: u16,
    /// Operations in flight; also bounded by the plane.
    pub operations_max: u32,
    /// Slices per operation; also bounded by the plane.
    pub slices_max: u32,
    /// An operation has no more bytes than the link to the peer carries in this time, as measured,
    pub operation_time: Nanos,
    /// but this many at least,
    pub operation_bytes_min: u64,
    /// and this many at most; also bounded by the plane.
    pub operation_bytes_max: u64,
    /// A session with operations in flight and no completion for this long is torn down. A plane
    /// that says itself when an operation has failed has at least its own time.
    pub stall: Nanos,
    /// Longest wait for `Opened`; the same goes for it.
    pub open: Nanos,
    /// Longest wait for `Quiet` before the session is torn down.
    pub quiet: Nanos,
    /// Tries of one post beyond the first.
    pub retries_max: u32,
    /// Times a session is opened anew without a success in between.
    pub reopens_max: u32,
    /// Pause before the first reopening; doubles.
    pub reopen_delay: Nanos,
    /// Pause after `Busy` when no completion is due.
    pub busy_delay: Nanos,
}

impl Default for TransferSettings {
    fn default() -> Self {
        TransferSettings {
            layers_per_op: 1,
            operations_max: 1024,
            slices_max: 65_536,
            operation_time: Nanos::from_ms(20),
            operation_bytes_min: 128 << 10,
            operation_bytes_max: 16 << 20,
            stall: Nanos::from_secs(2),
            open: Nanos::from_secs(3),
            quiet: Nanos::from_secs(1),
            retries_max: 3,
            reopens_max: 4,
            reopen_delay: Nanos::from_ms(20),
            busy_delay: Nanos::from_ms(1),
        }
    }
}

/// Who a transfer actor is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferConfig {
    /// TP rank.
    pub rank: u16,
    /// What its engine does.
    pub role: Role,
    /// Who moves the bytes; with push the prefill's actors open sessions, with pull the decode's.
    pub mode: Mode,
    /// The engine's KV cache.
    pub geometry: Arc<Geometry>,
    pub address: Address,
    /// What that can do.
    pub caps: Caps,
    /// Memory to register, one entry per region of the layout.
    pub memory: Vec<Memory>,
    /// Where its layers lie in the regions.
    pub layers: Vec<LayerLayout>,
    /// Times and limits.
    pub settings: TransferSettings,
}

impl TransferConfig {
    /// The actor of a rank of an engine with this core, with the default times and limits.
    ///
    /// It is told the address of its data plane and what that can do. `memory` is what it registers,
    /// and `layers` where its layers lie in that.
    pub fn new(
        core: &CoreConfig,
        rank: u16,
        (address, caps): (Address, Caps),
        memory: Vec<Memory>,
        layers: Vec<LayerLayout>,
    ) -> TransferConfig {
        TransferConfig {
            rank,
            role: core.role,
            mode: core.mode,
            geometry: core.geometry.clone(),
            address,
            caps,
            memory,
            layers,
            settings: TransferSettings::default(),
        }
    }

    /// Longest wait for `Opened`.
    fn open(&self) -> Nanos {
        self.settings.open.max(self.caps.patience.open)
    }

    /// Longest time without a completion while operations are in flight.
    fn stall(&self) -> Nanos {
        self.settings.stall.max(self.caps.patience.operation)
    }

    /// Operations in flight at most.
    pub fn operations_max(&self) -> u32 {
        self.settings.operations_max.min(self.caps.in_all.operations)
    }

    /// What may be in flight.
    fn in_all(&self) -> Credits {
        Credits { operations: self.operations_max(), ..self.caps.in_all }
    }

    /// What one operation may take, on a link that carries `bytes` in its time: half of what may be
    /// in flight, so that there can be two.
    fn operation_most(&self, bytes: u64) -> Credits {
        let half = |of: fn(&Credits) -> u64| {
            (of(&self.caps.per_peer).min(of(&self.caps.in_all)) / 2).max(1)
        };
        let slices = self.settings.slices_max.min(self.caps.slices_max);
        Credits {
            operations: 1,
            ranges: half(|credits| credits.ranges).min(u64::from(slices)).max(1),
            bytes: half(|credits| credits.bytes).min(bytes),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TransferTimer {
    Stalled(SessionId),
    Opening(SessionId),
    Reopen(ConnectionId, usize),
    Quiet(SessionId),
    Busy(ConnectionId),
}

/// Since when a quiesce ticket could be answered as far as known, and who waits for it: since it
/// was asked for, or since an operation before it was over.
#[derive(Clone, Debug)]
struct QuiesceRecord {
    at: Nanos,
    waiter: QuiesceWaiter,
}

/// Who waits for a quiesce ticket.
#[derive(Clone, Debug)]
enum QuiesceWaiter {
    Retry(FlowId, StripeRange),
    Flow(FlowId),
    Fence(ConnectionId),
    Reopen(ConnectionId, usize),
}

/// The transfer state machine of one TP rank.
#[derive(Debug)]
pub struct Transfer {
    config: TransferConfig,
    address: Address,
    regions: Vec<Option<RegionDesc>>,
    peers: BTreeMap<ConnectionId, TransferPeer>,
    sessions: BTreeMap<SessionId, (ConnectionId, usize)>,
    fencing: BTreeMap<PeerId, ConnectionId>,
    sources: BTreeMap<SourceId, PushSource>,
    steps: BTreeMap<StepId, Vec<SourceId>>,
    computed: (StepId, u16),
    flows: BTreeMap<FlowId, Flow>,
    /// Pieces of all flows that are queued.
    pieces: u32,
    /// Peers on whose links something may be posted, in turns.
    ring: VecDeque<ConnectionId>,
    ops: BTreeMap<OpId, WorkRequest>,
    /// What is in flight.
    used: Credits,
    tickets: BTreeMap<(SessionId, QuiesceTicket), QuiesceRecord>,
    /// Digests that are not complete, by their flows, and what was asked of the plane for them.
    digests: BTreeMap<FlowId, FlowDigest>,
    digest_requests: BTreeMap<DigestId, DigestRequest>,
    timers: Timers<TransferTimer>,
    scratch: Slices,
    next_id: u64,
    /// Ids up to this one are of backends that are gone. Calls that were under way when the backend
    /// was replaced may still be answered.
    void: u64,
    violations: u32,
}

type TransferTurn<'a> = Turn<'a, TransferEffect>;

impl Transfer {
    /// A machine that has done nothing; its first input is [`TransferInput::Start`].
    pub fn new(config: TransferConfig) -> Transfer {
        Transfer {
            address: config.address.clone(),
            regions: vec![None; config.memory.len()],
            config,
            peers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            fencing: BTreeMap::new(),
            sources: BTreeMap::new(),
            steps: BTreeMap::new(),
            computed: (StepId(0), 0),
            flows: BTreeMap::new(),
            pieces: 0,
            ring: VecDeque::new(),
            ops: BTreeMap::new(),
            used: Credits::default(),
            tickets: BTreeMap::new(),
            digests: BTreeMap::new(),
            digest_requests: BTreeMap::new(),
            timers: Timers::default(),
            scratch: Slices::default(),
            next_id: 0,
            void: 0,
            violations: 0,
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Nobody asked for what is answered under this id.
    fn unasked(&mut self, id: u64) {
        if id > self.void || planted!("void-answers-are-violations") {
            self.violations = self.violations.saturating_add(1);
        }
    }

    fn initiates(&self) -> bool {
        matches!(
            (self.config.role, self.config.mode),
            (Role::Prefill, Mode::Push) | (Role::Decode, Mode::Pull)
        )
    }

    fn register_all(&mut self, turn: &mut TransferTurn<'_>) {
        self.regions.fill(None);
        for (index, memory) in self.config.memory.iter().enumerate() {
            turn.push(DataCommand::Register { region: RegionId(index as u32), memory: *memory });
        }
    }

    fn registered(
        &mut self,
        region: RegionId,
        result: Result<RegionDesc, FabricError>,
        turn: &mut TransferTurn<'_>,
    ) {
        match result {
            Ok(desc) => {
                let Some(connection) = self.regions.get_mut(region.0 as usize) else {
                    self.violations = self.violations.saturating_add(1);
                    return;
                };
                *connection = Some(desc);
                if let Some(layout) = self.layout() {
                    turn.push(TransferReport::Ready { layout });
                }
            }
            Err(cause) => turn.push(TransferReport::Unusable { failure: Failure::Fabric(cause) }),
        }
    }

    /// Where this rank's KV lies, once every region is registered.
    fn layout(&self) -> Option<RankLayout> {
        let regions = self
            .regions
            .iter()
            .zip(&self.config.memory)
            .map(|(desc, memory)| desc.clone().map(|desc| (desc, memory.len())))
            .collect::<Option<Vec<_>>>()?;
        Some(RankLayout {
            rank: self.config.rank,
            address: self.address.clone(),
            regions,
            layers: self.config.layers.clone(),
        })
    }

    fn job(&mut self, job: TransferJob, turn: &mut TransferTurn<'_>) {
        match job {
            TransferJob::Peer { peer, geometry, ranks, fence_key } => {
                self.peer_known(peer, &geometry, &ranks, fence_key, turn);
            }
            TransferJob::Fence { peer } => self.fence(peer, turn),
            TransferJob::Source { source, step, ready, to, blocks, .. } => {
                self.source_grew(source, step, ready, to, &blocks);
                self.advance_source(source, 0..u16::MAX, turn);
            }
            TransferJob::Forget { source } => {
                self.sources.remove(&source);
            }
            TransferJob::Write { flow, source, peer, from, tokens, blocks, verify, .. } => {
                let kv = (LocalKv::Source(source), blocks);
                self.start_flow(flow, (peer, verify), (from, tokens), kv, turn);
            }
            TransferJob::Read { flow, peer, from, tokens, remote, local, .. } => {
                let kv = (LocalKv::Blocks(local), remote);
                self.start_flow(flow, (peer, None), (from, tokens), kv, turn);
            }
            TransferJob::Digest { flow, peer, from, tokens, blocks, plan } => {
                self.digest_blocks(flow, (peer, plan), (from, tokens), &blocks, turn);
            }
            TransferJob::Stop { flow } => {
                self.stop_digest(flow, turn);
                self.fail_flow(flow, Failure::Cancelled, false, turn);
            }
        }
    }

    fn data(&mut self, event: DataEvent, turn: &mut TransferTurn<'_>) {
        match event {
            DataEvent::Registered { region, result } => self.registered(region, result, turn),
            DataEvent::Opened { session, result } => self.opened(session, result, turn),
            DataEvent::Completed { op, outcome } => self.completed(op, outcome, turn),
            DataEvent::Quiet { session, ticket } => self.quiet(session, ticket, turn),
            DataEvent::Fenced { peer } => self.fenced(peer, turn),
            DataEvent::PeerDown { peer } => self.peer_down(peer, turn),
            DataEvent::Digested { id, result } => {
                self.digested(id, result.map_err(Failure::Fabric), turn)
            }
            DataEvent::Reset { address } => self.reset(address, turn),
        }
    }

    fn refused(&mut self, refusal: DataRefusal, turn: &mut TransferTurn<'_>) {
        match refusal {
            DataRefusal::Register { why, .. } => {
                turn.push(TransferReport::Unusable { failure: Failure::Refused(why) });
            }
            DataRefusal::Connect { peer, why } => self.connect_refused(peer, why, turn),
            DataRefusal::Open { session, why } => {
                let cause = FabricError::Backend(why.to_string().into());
                self.opened(session, Err(cause), turn);
            }
            DataRefusal::Submit { op, why } => self.submit_refused(op, why, turn),
            DataRefusal::Digest { id, why } => {
                self.digested(id, Err(Failure::Refused(why)), turn);
            }
        }
    }

    /// Asks for `Quiet` of a session on behalf of `waiter`.
    fn quiesce(&mut self, session: SessionId, waiter: QuiesceWaiter, turn: &mut TransferTurn<'_>) {
        let ticket = QuiesceTicket(self.fresh());
        self.tickets.insert((session, ticket), QuiesceRecord { at: turn.now, waiter });
        self.timers
            .arm_if_idle(TransferTimer::Quiet(session), turn.now + self.config.settings.quiet);
        turn.push(DataCommand::Quiesce { session, ticket });
    }

    fn quiet(&mut self, session: SessionId, ticket: QuiesceTicket, turn: &mut TransferTurn<'_>) {
        let Some(QuiesceRecord { waiter, .. }) = self.tickets.remove(&(session, ticket)) else {
            return self.unasked(ticket.0);
        };
        if self.oldest_ticket(session).is_none() {
            self.timers.cancel(&TransferTimer::Quiet(session));
        }
        match waiter {
            QuiesceWaiter::Retry(flow, piece) => self.retry(flow, piece),
            QuiesceWaiter::Flow(flow) => self.flow_quiet(flow, turn),
            QuiesceWaiter::Fence(peer) => self.fence_part_done(peer, turn),
            QuiesceWaiter::Reopen(peer, index) => self.session_quiet(turn.now, peer, index),
        }
    }

    /// The ticket of a session that is waited for longest, and since when.
    fn oldest_ticket(&self, session: SessionId) -> Option<(QuiesceTicket, Nanos)> {
        let ((of, ticket), asked) = self.tickets.range((session, QuiesceTicket(0))..).next()?;
        (*of == session).then_some((*ticket, asked.at))
    }

    /// A session that owes no `Quiet` before older operations on it are over is not to blame for
    /// its silence: these have a time of their own.
    fn check_quiet(&mut self, session: SessionId, turn: &mut TransferTurn<'_>) {
        let Some((ticket, asked)) = self.oldest_ticket(session) else { return };
        let older = self.ops.range(..OpId(ticket.0)).any(|(_, op)| op.session == session)
            && !planted!("quiet-does-not-wait-for-operations");
        let due = if older { turn.now } else { asked } + self.config.settings.quiet;
        if turn.now < due {
            self.timers.arm(TransferTimer::Quiet(session), due);
        } else {
            self.session_died(session, FabricError::AckTimeout, turn);
        }
    }

    fn tick(&mut self, turn: &mut TransferTurn<'_>) {
        while let Some(timer) = self.timers.pop_due(turn.now) {
            match timer {
                TransferTimer::Stalled(session) => self.check_stalled(session, turn),
                TransferTimer::Opening(session) => {
                    self.opened(session, Err(FabricError::Unreachable), turn);
                }
                TransferTimer::Reopen(peer, index) => self.reopen(peer, index, turn),
                TransferTimer::Quiet(session) => self.check_quiet(session, turn),
                TransferTimer::Busy(peer) => self.busy_over(peer),
            }
        }
    }
}

impl Machine for Transfer {
    type Input = TransferInput;
    type Effect = TransferEffect;

    fn handle(&mut self, now: Nanos, input: TransferInput, out: &mut Outbox<TransferEffect>) {
        let turn = &mut Turn::new(now, out);
        match input {
            TransferInput::Start => self.register_all(turn),
            TransferInput::Job(job) => self.job(job, turn),
            TransferInput::Layers { step, layers } => self.layers_computed(step, layers, turn),
            TransferInput::Data(event) => self.data(event, turn),
            TransferInput::Refused(refusal) => self.refused(refusal, turn),
            TransferInput::Tick => self.tick(turn),
        }
        self.pump(turn);
    }

    fn deadline(&self) -> Option<Nanos> {
        self.timers.next()
    }

    fn gauges(&self) -> Gauges {
        let [flows, sources] = [
            self.flows.values().map(Flow::entries).sum::<usize>(),
            self.sources.values().map(PushSource::entries).sum(),
        ];
        let [listed, known] = [
            self.peers.values().map(|peer| peer.queue.flows()).sum::<usize>(),
            self.peers.values().map(TransferPeer::entries).sum(),
        ];
        let steps = self.steps.values().map(|sources| 1 + sources.len()).sum::<usize>();
        let entries = steps + flows + sources + listed + self.fencing.len() + self.ring.len();
        let failures: usize = self.peers.values().map(TransferPeer::failures).sum();
        let alone = self.digests.values().filter(|digest| digest.alone).count();
        Gauges {
            transfers: (self.flows.len() + alone) as u32,
            operations: self.ops.len() as u32,
            queued: self.pieces + (self.tickets.len() + self.digest_requests.len()) as u32,
            held: self.sources.len() as u32,
            peers: self.peers.len() as u32,
            entries: entries as u32,
            remembered: (self.sessions.len() + self.timers.len() + known) as u32,
            failures: failures as u32,
            violations: self.violations,
            ..Gauges::default()
        }
    }
}
