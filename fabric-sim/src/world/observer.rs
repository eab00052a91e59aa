//! Everyone who looks on: the invariants, and the fault engine, which also decides.

use super::process::DataPlaneOwner;
use super::sight::{Sight, SightLog, frame_digest};
use super::{LOCAL, Simulation};
use crate::dma::{Dma, DmaLanding, OpDecision, OpInfo};
use crate::faults::{FaultAction, FaultHit, FaultScheduler, FaultSubject, LegDecision, ROUTER};
use crate::invariants::{self, Invariants, Violation};
use crate::memory::OpSlice;
use crate::net::{FrameDecision, FrameInfo};
use crate::observation::{self, BlockRef, MemoryRange, Observation, SimProcessId, Submission};
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::{ClientId, LegId, RequestId};
use kvferry_engine::core::message::{
    Chunk, DecodeHook, FinishReason, Message, PrefillHook, TransferJob,
};
use kvferry_engine::core::router::{LegBody, LegEvent};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{Completion, Direction, FabricError};
use kvferry_scenarios::Run;
use kvferry_scenarios::lists::{MessageName, TriggerEvent};
use std::collections::BTreeMap;

#[derive(Debug)]
pub(super) struct Observer {
    pub(super) faults: FaultScheduler,
    /// The run has no faults, so nobody needs to be told of events.
    calm: bool,
    invariants: Option<Invariants>,
    /// What a recording keeps of what is seen.
    pub(super) sights: Option<SightLog>,
    /// Flows of each instance whose first operation is not posted.
    unposted: Vec<u32>,
    /// Steps of each instance.
    steps: Vec<u64>,
    /// The frame with which each instance registered last.
    pub(super) registrations: Vec<Vec<Vec<u8>>>,
    local: Vec<BlockRef>,
    remote: Vec<BlockRef>,
    hits: Vec<FaultHit>,
    /// When a decode asked for a prompt, and for what a block is to be filled with; kept for faults
    /// that race.
    arrived: BTreeMap<(u16, RequestId), Nanos>,
    asked: BTreeMap<(u16, BlockRef), Nanos>,
    /// The lease that each instance grants, as its readers count it.
    usable: Vec<Nanos>,
    /// How long each instance waits for an operation that does not go forward.
    patience: Vec<Nanos>,
}

impl Observer {
    pub(super) fn new(run: &Run, check: bool, record: bool) -> Observer {
        let instances = run.instances.len();
        Observer {
            faults: FaultScheduler::new(run),
            calm: run.faults.is_empty(),
            invariants: check.then(|| Invariants::new(run)),
            sights: record.then(SightLog::default),
            unposted: vec![0; instances],
            steps: vec![0; instances],
            registrations: vec![Vec::new(); instances],
            local: Vec::new(),
            remote: Vec::new(),
            hits: Vec::new(),
            arrived: BTreeMap::new(),
            asked: BTreeMap::new(),
            usable: invariants::usable(run),
            patience: run.instances.iter().map(|one| one.protocol.transfer.stall).collect(),
        }
    }

    #[inline]
    pub(super) fn observe(&mut self, now: Nanos, seen: &Observation<'_>) {
        if let Some(invariants) = &mut self.invariants {
            invariants.observe(now, seen);
        }
        if let Some(sights) = &mut self.sights {
            sights.observe(now, seen);
        }
        if !self.calm {
            self.tell_faults(now, seen);
        }
    }

    /// An input is due or was handled.
    pub(super) fn input(&mut self, now: Nanos, event: TriggerEvent, spot: &FaultSubject) {
        self.event(now, event, spot);
    }

    fn event(&mut self, now: Nanos, event: TriggerEvent, spot: &FaultSubject) {
        if !self.calm {
            self.faults.on_event(now, event, spot);
        }
    }

    /// Translates what happened to what faults wait for.
    fn tell_faults(&mut self, now: Nanos, seen: &Observation<'_>) {
        let here = |who: &SimProcessId| FaultSubject::at(who.instance);
        let client = |client: &ClientId| FaultSubject {
            client: Some(*client),
            nth: client.0,
            ..FaultSubject::at(ROUTER)
        };
        let (event, spot) = match seen {
            Observation::Started { who, .. } => (TriggerEvent::InstanceStarted, here(who)),
            Observation::Asked { client: id } => (TriggerEvent::RequestArrived, client(id)),
            Observation::Answered { client: id, .. } => (TriggerEvent::RequestFinished, client(id)),
            Observation::Leg { who, event, .. } => match event {
                LegEvent::FirstToken => (TriggerEvent::RequestFirstToken, here(who)),
                _ => (TriggerEvent::LegEnded, FaultSubject::between(who.instance, ROUTER)),
            },
            Observation::PrefillHook { who, hook } => match hook {
                PrefillHook::Scheduled { chunks, .. } => {
                    let first = |chunk: &&Chunk| {
                        chunk.blocks.iter().any(|list| list.first == 0 && !list.ids.is_empty())
                    };
                    for _ in chunks.iter().filter(first) {
                        self.faults.on_event(now, TriggerEvent::RequestScheduled, &here(who));
                    }
                    return;
                }
                PrefillHook::Finished { reason, .. } => match reason {
                    FinishReason::Length | FinishReason::Stop => {
                        (TriggerEvent::RequestPrefilled, here(who))
                    }
                    _ => return,
                },
                PrefillHook::Preempted { .. } => (TriggerEvent::RequestPreempted, here(who)),
                PrefillHook::Arrived { .. } => return,
            },
            Observation::DecodeHook { who, hook } => {
                self.note_lease(now, who.instance, hook);
                let DecodeHook::Allocated { .. } = hook else { return };
                (TriggerEvent::RequestAllocated, here(who))
            }
            Observation::DecodeAnswer { who, answer } if answer.is_last() => {
                (TriggerEvent::TransferEnded, here(who))
            }
            Observation::Job { who, job: TransferJob::Write { .. } | TransferJob::Read { .. } } => {
                self.unposted[usize::from(who.instance)] += 1;
                return;
            }
            Observation::Freed { who, .. } => (TriggerEvent::BlockFreed, here(who)),
            Observation::Completed { from, outcome, .. } => {
                let spot = FaultSubject { rank: from.rank, ..here(&from.who) };
                if **outcome == Completion::Done {
                    self.faults.on_event(now, TriggerEvent::OpLanded, &spot);
                }
                (TriggerEvent::OpCompleted, spot)
            }
            _ => return,
        };
        self.faults.on_event(now, event, &spot);
    }

    /// A pull asks for its lease when its core is told of its leg.
    fn note_lease(&mut self, now: Nanos, instance: u16, hook: &DecodeHook) {
        if !self.faults.races() {
            return;
        }
        match hook {
            DecodeHook::Arrived { request, .. } => {
                self.arrived.insert((instance, request.clone()), now + LOCAL);
            }
            DecodeHook::Allocated { request, blocks, .. } => {
                let asked = self.arrived.get(&(instance, request.clone()));
                let Some(asked) = asked.copied() else { return };
                for (group, list) in (0..).zip(blocks) {
                    let at = |block: &u32| ((instance, BlockRef { group, block: *block }), asked);
                    self.asked.extend(list.ids.iter().map(at));
                }
            }
            DecodeHook::Finished { request, .. } => {
                self.arrived.remove(&(instance, request.clone()));
            }
        }
    }

    /// When the lease of a read ends, if it has not been renewed, and if an operation is waited for
    /// as long.
    fn lease_end(
        &mut self,
        now: Nanos,
        (from, to): (&DataPlaneOwner, &DataPlaneOwner),
        op: &OpInfo<'_>,
    ) -> Option<Nanos> {
        if !self.faults.races() || op.direction != Direction::Read {
            return None;
        }
        self.local.clear();
        let (at, first) = (op.local_at?, op.slices.get(..1)?);
        from.shape.blocks(at, first, |slice| pick(slice, true), &mut self.local);
        let asked = *self.asked.get(&(from.at.who.instance, *self.local.first()?))?;
        let usable = self.usable[usize::from(to.at.who.instance)];
        let end = asked + usable;
        let waits = end < now + self.patience[usize::from(from.at.who.instance)];
        (waits && now < asked + usable.scale(1, 3)).then_some(end)
    }

    /// An operation was accepted.
    pub(super) fn submitted(
        &mut self,
        now: Nanos,
        planes: &[DataPlaneOwner],
        op: &OpInfo<'_>,
    ) -> OpDecision {
        let (from, to) = (&planes[op.plane.0 as usize], &planes[op.peer.0 as usize]);
        if let Some(invariants) = &mut self.invariants {
            self.local.clear();
            self.remote.clear();
            let sides =
                [(from, op.local_at, &mut self.local), (to, op.remote_at, &mut self.remote)];
            for (nth, (owner, at, into)) in sides.into_iter().enumerate() {
                if let Some(at) = at {
                    owner.shape.blocks(at, op.slices, |slice| pick(slice, nth == 0), into);
                }
            }
            let (segment, base) = op.local_at.unwrap_or((u32::MAX, 0));
            let (mut begin, mut end, mut bytes) = (u64::MAX, 0, 0);
            for slice in op.slices {
                begin = begin.min(base + slice.local);
                end = end.max(base + slice.local + slice.len);
                bytes += slice.len;
            }
            let remote_at = op.slices.first().map_or(0, |slice| slice.remote);
            let seen = Submission {
                reach: MemoryRange { segment, from: begin, to: end },
                remote_at,
                bytes,
                from: from.at,
                peer: to.at,
                op: op.op,
                session: op.session,
                fence_key: op.fence_key,
                direction: op.direction,
                placement: from.placement,
                credits: from.credits,
                local: &self.local,
                remote: &self.remote,
            };
            invariants.observe(now, &Observation::Submitted(seen));
        }
        if self.calm {
            return OpDecision::default();
        }
        let (instance, rank) = (from.at.who.instance, from.at.rank);
        let lease = self.lease_end(now, (from, to), op);
        let between = FaultSubject::between(instance, to.at.who.instance);
        let spot = FaultSubject { rank, nth: op.nth, lease, ..between };
        let unposted = &mut self.unposted[usize::from(instance)];
        if *unposted > 0 {
            *unposted -= 1;
            let event = match op.direction {
                Direction::Write => TriggerEvent::TransferWriting,
                Direction::Read => TriggerEvent::TransferReading,
            };
            self.faults.on_event(now, event, &spot);
        }
        let fate = self.faults.decide_op(now, &spot);
        // The core hears of it from its actor.
        OpDecision { not_before: fate.not_before - LOCAL, ..fate }
    }

    /// A rank registers memory; why it cannot.
    pub(super) fn registered(&mut self, now: Nanos, owner: &DataPlaneOwner) -> Option<FabricError> {
        if self.calm {
            return None;
        }
        let (who, rank) = (owner.at.who, owner.at.rank);
        let spot = FaultSubject {
            rank,
            nth: u64::from(who.incarnation),
            ..FaultSubject::at(who.instance)
        };
        let fails = self.faults.register_fails(now, &spot);
        fails.then(|| FabricError::Backend("injected: memory cannot be registered".into()))
    }

    /// Bytes arrived.
    pub(super) fn landed(
        &mut self,
        now: Nanos,
        planes: &[DataPlaneOwner],
        dma: &Dma,
        landing: &DmaLanding,
    ) {
        if self.invariants.is_none() && self.sights.is_none() {
            return;
        }
        let slices = dma.slices(landing);
        let writes = landing.direction == Direction::Write;
        let owner = |ix: crate::dma::DataPlaneIx| &planes[ix.0 as usize];
        let (source, target) = (owner(landing.source), owner(landing.target));
        self.local.clear();
        self.remote.clear();
        let local = |slice: &OpSlice| pick(slice, writes);
        let remote = |slice: &OpSlice| pick(slice, !writes);
        source.shape.blocks(landing.source_at, slices, local, &mut self.local);
        target.shape.blocks(landing.target_at, slices, remote, &mut self.remote);
        let seen = observation::ObservedLanding {
            from: owner(landing.plane).at,
            op: landing.op,
            source: source.at,
            read: &self.local,
            target: target.at,
            written: &self.remote,
        };
        let seen = Observation::Landed(seen);
        if let Some(invariants) = &mut self.invariants {
            invariants.observe(now, &seen);
        }
        if let Some(sights) = &mut self.sights {
            sights.observe(now, &seen);
        }
    }

    /// A control frame was sent.
    pub(super) fn frame_sent(
        &mut self,
        now: Nanos,
        from: SimProcessId,
        to: SimProcessId,
        frame: &FrameInfo<'_>,
    ) -> FrameDecision {
        if let (Some(sights), Some(bytes)) = (&mut self.sights, frame.parts.last()) {
            let (from, to, frame) = (from.instance, to.instance, frame_digest(bytes));
            sights.add(now, Sight::Sent { from, to, frame });
        }
        if self.calm && self.invariants.is_none() {
            return FrameDecision::default();
        }
        let Some(decoded) = decode(frame.parts) else { return FrameDecision::default() };
        if matches!(decoded, Frame::Register(_))
            && let Some(slot) = self.registrations.get_mut(usize::from(from.instance))
        {
            *slot = frame.parts.to_vec();
        }
        if let Some(invariants) = &mut self.invariants {
            invariants.observe(now, &Observation::FrameSent { from, to, frame: &decoded });
        }
        if self.calm {
            return FrameDecision::default();
        }
        let message = name(&decoded);
        let spot = FaultSubject {
            message,
            nth: frame.nth,
            ..FaultSubject::between(from.instance, to.instance)
        };
        let event = match message {
            Some(MessageName::Announce | MessageName::Pull) => {
                Some(TriggerEvent::TransferAnnounced)
            }
            Some(MessageName::Grant) => Some(TriggerEvent::TransferGranted),
            Some(MessageName::Delivered | MessageName::Release) => {
                Some(TriggerEvent::TransferDelivered)
            }
            _ => None,
        };
        if let Some(event) = event {
            self.faults.on_event(now, event, &spot);
        }
        self.faults.decide_frame(now, &spot)
    }

    /// A control frame arrived; from nobody if it was forged or its link is gone.
    pub(super) fn frame_arrived(
        &mut self,
        now: Nanos,
        from: Option<SimProcessId>,
        to: SimProcessId,
        parts: &[Vec<u8>],
    ) {
        if let (Some(sights), Some(bytes)) = (&mut self.sights, parts.last()) {
            let (from, to, frame) =
                (from.map(|from| from.instance), to.instance, frame_digest(bytes));
            sights.add(now, Sight::Arrived { from, to, frame });
        }
        if self.calm && self.invariants.is_none() {
            return;
        }
        let frame = decode(parts);
        let (Some(from), Some(frame)) = (from, &frame) else {
            return self.observe(now, &Observation::Stray { to, frame: frame.as_ref() });
        };
        if let Some(invariants) = &mut self.invariants {
            invariants.observe(now, &Observation::FrameArrived { from, to, frame });
        }
        let message = name(frame);
        let spot = FaultSubject { message, ..FaultSubject::between(from.instance, to.instance) };
        self.event(now, TriggerEvent::FrameDelivered, &spot);
        match message {
            Some(MessageName::Register) => self.event(now, TriggerEvent::InstanceRegistered, &spot),
            Some(MessageName::Welcome) => self.event(now, TriggerEvent::PeerConnected, &spot),
            _ => {}
        }
    }

    /// The router sends a leg.
    pub(super) fn leg_sent(
        &mut self,
        now: Nanos,
        instance: u16,
        client: ClientId,
        leg: LegId,
        body: &LegBody,
    ) -> LegDecision {
        if self.calm {
            return LegDecision::default();
        }
        let decode = matches!(body, LegBody::Decode { .. });
        let between = FaultSubject::between(ROUTER, instance);
        let spot = FaultSubject { client: Some(client), nth: leg.0, ..between };
        self.faults.decide_leg(now, decode, &spot)
    }

    /// An engine starts a step.
    pub(super) fn step_started(&mut self, now: Nanos, instance: u16) {
        let nth = self.steps[usize::from(instance)];
        self.steps[usize::from(instance)] += 1;
        self.event(
            now,
            TriggerEvent::StepStarted,
            &FaultSubject { nth, ..FaultSubject::at(instance) },
        );
    }

    /// How much later than its engine a rank is.
    pub(super) fn lag(&self, instance: u16, rank: u16) -> Option<Nanos> {
        if self.calm {
            return None;
        }
        Some(self.faults.lag(instance, rank)).filter(|lag| *lag > Nanos::ZERO)
    }

    /// When the last fault hit or ended; `now` while one lasts or is to come.
    pub(super) fn last_fault(&self, now: Nanos) -> Option<Nanos> {
        (!self.calm).then(|| self.faults.last_fault(now))
    }

    /// The run is over.
    pub(super) fn finish(&mut self, now: Nanos, at_rest: bool) {
        if let Some(invariants) = &mut self.invariants {
            invariants.finish(now, at_rest);
        }
    }

    /// What was seen that must not be: the first few, and how many in all.
    pub(super) fn violations(&self) -> (Vec<Violation>, u64) {
        let Some(invariants) = &self.invariants else { return (Vec::new(), 0) };
        (invariants.violations(), invariants.count())
    }
}

impl Simulation {
    /// Tells of the faults that hit and does what they ask for.
    pub(super) fn perform_actions(&mut self) {
        while self.observer.faults.has_output() {
            let mut hits = std::mem::take(&mut self.observer.hits);
            self.observer.faults.take_hits(&mut hits);
            for FaultHit { kind, from, to } in hits.drain(..) {
                self.observer.observe(self.now, &Observation::Faulted { kind, from, to });
            }
            self.observer.hits = hits;
            let mut actions: Vec<FaultAction> = Vec::new();
            self.observer.faults.take_actions(&mut actions);
            for action in actions {
                self.perform_action(action);
            }
        }
        self.plan_faults();
    }
}

/// Offset and length of one side of a slice.
fn pick(slice: &OpSlice, local: bool) -> (u64, u64) {
    (if local { slice.local } else { slice.remote }, slice.len)
}

fn decode(parts: &[Vec<u8>]) -> Option<Frame> {
    native::decode(parts.first()?).ok()
}

/// What scenario files call a frame.
fn name(frame: &Frame) -> Option<MessageName> {
    Some(match frame {
        Frame::Hello(_) => MessageName::Hello,
        Frame::Welcome(_) => MessageName::Welcome,
        Frame::Refuse { .. } => MessageName::Refuse,
        Frame::Ack { .. } => MessageName::Ack,
        Frame::Probe { .. } => MessageName::Probe,
        Frame::Register(_) => MessageName::Register,
        Frame::Abandon { .. } => MessageName::Abandon,
        Frame::Data { message, .. } => match message {
            Message::Ask { .. } => MessageName::Ask,
            Message::Begun { .. } => MessageName::Begun,
            Message::Announce { .. } => MessageName::Announce,
            Message::Pull { .. } => MessageName::Pull,
            Message::Grant { .. } => MessageName::Grant,
            Message::Renew { .. } => MessageName::Renew,
            Message::Renewed { .. } => MessageName::Renewed,
            Message::Delivered { .. } => MessageName::Delivered,
            Message::Release { .. } => MessageName::Release,
            Message::Cancel { .. } => MessageName::Cancel,
            Message::Ended { .. } => MessageName::Ended,
            Message::Payload { .. } => MessageName::Payload,
        },
        _ => return None,
    })
}
