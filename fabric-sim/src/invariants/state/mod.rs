//! What several invariants need to know: incarnations, blocks, loads and operations.
//!
//! Changed after the invariants have seen an observation, so they see the state before it.

mod loads;
mod ops;
mod requests;

pub(crate) use loads::{TrackedBlock, TrackedLoad};
pub(crate) use ops::{OpExtent, TrackedOp};
pub(crate) use requests::{RequestAt, TrackedClient, freed};

use crate::abilities::fits;
use crate::observation::{BlockRef, InstanceMachine, Observation, SimProcessId, SimRankId};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::ids::{Attempt, RequestId};
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::message::{AttemptTag, DecodeHook, Message, Role};
use kvferry_engine::core::router::RouterConfig;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{Completion, Landed};
use kvferry_scenarios::run::{InstanceSettings, ModelGeometry, Run};
use loads::{TrackedBlocks, TrackedLoads};
use ops::TrackedOps;
use requests::TrackedRequests;
use std::collections::{BTreeMap, BTreeSet};

/// An instance as the invariants see it.
#[derive(Debug)]
pub(crate) struct TrackedInstance {
    name: String,
    pub(crate) spec: InstanceSettings,
    pub(crate) role: Role,
    /// Its newest incarnation, none before its first start.
    pub(crate) incarnation: Option<u32>,
    /// True unless that incarnation ended.
    pub(crate) alive: bool,
    /// It never makes a step again, though its memory is there.
    pub(crate) frozen: bool,
    /// Number of TP ranks.
    pub(crate) tp: u16,
    blocks: TrackedBlocks,
}

impl TrackedInstance {
    fn new(name: String, spec: &InstanceSettings, incarnation: Option<u32>) -> TrackedInstance {
        TrackedInstance {
            name,
            spec: spec.clone(),
            role: spec.role,
            incarnation,
            alive: incarnation.is_some(),
            frozen: false,
            tp: spec.tp,
            blocks: TrackedBlocks::default(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct InvariantState {
    /// Counts the observations.
    pub(crate) seq: u64,
    places: Vec<TrackedInstance>,
    model: ModelGeometry,
    loads: TrackedLoads,
    ops: TrackedOps,
    requests: TrackedRequests,
    /// Instances that were healed and stay connected.
    pub(crate) core: BTreeSet<u16>,
    /// Instances, and ordered pairs, with a fault for good.
    broken: Vec<(u16, Option<u16>)>,
    /// When a fault hit last or everything healed.
    pub(crate) last_hit: Nanos,
    /// The same, or when the router knows of the instances that never answer again.
    pub(crate) last_fault: Nanos,
    /// How long the router relies on an instance that is silent.
    trust: Nanos,
    /// When everything transient was over.
    pub(crate) healed: Option<Nanos>,
    /// What each machine said of itself last; at the end, what it is at rest.
    gauges: BTreeMap<(SimProcessId, InstanceMachine), Gauges>,
}

/// Longest time for which the router relies on an instance that is silent: whoever has none but
/// instances without hosts waits for these.
fn trust(router: &RouterConfig) -> Nanos {
    let has_probes = router.probe.is_some_and(|period| period > Nanos::ZERO);
    let host_wait = if has_probes { router.host_wait } else { Nanos::ZERO };
    router.expiry + host_wait + router.stream_grace
}

impl InvariantState {
    pub(crate) fn new(run: &Run) -> InvariantState {
        let place = |one: &InstanceSettings| TrackedInstance::new(one.name.clone(), one, None);
        InvariantState {
            seq: 1,
            places: run.instances.iter().map(place).collect(),
            model: run.model.clone(),
            loads: TrackedLoads::default(),
            ops: TrackedOps::new(run.instances.len()),
            requests: TrackedRequests::default(),
            core: BTreeSet::new(),
            broken: Vec::new(),
            last_hit: Nanos::ZERO,
            last_fault: Nanos::ZERO,
            trust: trust(&run.router.config),
            healed: None,
            gauges: BTreeMap::new(),
        }
    }

    /// An instance; none for the router.
    #[inline]
    pub(crate) fn place(&self, instance: u16) -> Option<&TrackedInstance> {
        self.places.get(usize::from(instance))
    }

    /// All instances by their numbers.
    pub(crate) fn instances(&self) -> impl Iterator<Item = u16> + '_ {
        0..self.places.len() as u16
    }

    /// The role of an instance; none for the router.
    pub(crate) fn role(&self, instance: u16) -> Option<Role> {
        self.place(instance).map(|place| place.role)
    }

    /// True if requests for this model may go to an instance; none is any.
    pub(crate) fn serves(&self, instance: u16, model: Option<&str>) -> bool {
        self.place(instance).is_some_and(|place| place.spec.serves(model))
    }

    /// The name of an instance, for texts.
    pub(crate) fn name(&self, instance: u16) -> &str {
        self.place(instance).map_or("router", |place| &place.name)
    }

    /// True if this is the newest incarnation of its instance, and it has not ended.
    #[inline]
    pub(crate) fn is_current(&self, who: SimProcessId) -> bool {
        self.place(who.instance).is_some_and(|p| p.alive && p.incarnation == Some(who.incarnation))
    }

    /// True if this is the newest incarnation of its instance, and it may still make a step.
    pub(crate) fn acts(&self, who: SimProcessId) -> bool {
        self.is_current(who) && !self.is_frozen(who.instance)
    }

    /// True for an instance that never makes a step again, though its memory is there.
    pub(crate) fn is_frozen(&self, instance: u16) -> bool {
        self.place(instance).is_some_and(|place| place.frozen)
    }

    /// True for an instance that has a fault of its own to the end: it tries again and again, and is
    /// never at rest.
    pub(crate) fn has_lasting_fault(&self, instance: u16) -> bool {
        self.broken.contains(&(instance, None))
    }

    /// What a machine said of itself last.
    pub(crate) fn gauges(&self, who: SimProcessId, part: InstanceMachine) -> Gauges {
        self.gauges.get(&(who, part)).copied().unwrap_or_default()
    }

    /// The same of all machines but those that give nothing back because they stand still.
    pub(crate) fn gauges_at_rest(
        &self,
    ) -> impl Iterator<Item = (SimProcessId, InstanceMachine, &Gauges)> {
        let moves = self.gauges.iter().filter(|((who, _), _)| !self.is_frozen(who.instance));
        moves.map(|((who, part), gauges)| (*who, *part, gauges))
    }

    /// True if two instances, as they are now, can exchange KV.
    pub(crate) fn fits(&self, a: u16, b: u16) -> bool {
        let spec = |one: u16| self.place(one).map(|place| &place.spec);
        spec(a).zip(spec(b)).is_some_and(|(a, b)| fits(&self.model, a, b))
    }

    /// True if a prefill and a decode of these cannot exchange KV.
    pub(crate) fn has_misfit(&self, these: &BTreeSet<u16>) -> bool {
        let of = |role| {
            let is = move |one: &&u16| self.place(**one).is_some_and(|place| place.role == role);
            these.iter().filter(is)
        };
        of(Role::Prefill).any(|p| of(Role::Decode).any(|d| !self.fits(*p, *d)))
    }

    /// True if one of these instances is down or has a fault for good, or two of them between them.
    pub(crate) fn is_broken(&self, these: &BTreeSet<u16>) -> bool {
        let well = |one: &u16| self.place(*one).is_some_and(|place| place.alive && !place.frozen);
        let hit = |(from, to): &(u16, Option<u16>)| {
            these.contains(from) && to.is_none_or(|to| these.contains(&to))
        };
        !these.iter().all(well) || self.broken.iter().any(hit)
    }

    /// Pairs of the core that fit each other and that nothing is wrong with.
    pub(crate) fn whole_pairs(&self) -> impl Iterator<Item = (u16, u16)> + '_ {
        let pairs = self.core.iter().flat_map(|a| self.core.iter().map(|b| (*a, *b)));
        pairs.filter(|(a, b)| a < b && self.fits(*a, *b) && !self.is_broken(&[*a, *b].into()))
    }

    /// True for a group of layers that need a window of the prompt only.
    pub(crate) fn slides(&self, group: u16) -> bool {
        let kind = self.model.groups.get(usize::from(group)).map(|group| group.kind);
        matches!(kind, Some(GroupKind::Window { .. }))
    }

    /// A block in the present incarnation of its instance.
    #[inline]
    pub(crate) fn block(&self, instance: u16, at: BlockRef) -> TrackedBlock {
        self.place(instance).map_or(TrackedBlock::default(), |place| place.blocks.get(at))
    }

    /// The load that writes into a block.
    #[inline]
    pub(crate) fn load_of(&self, block: &TrackedBlock) -> Option<&TrackedLoad> {
        self.loads.get(block.load)
    }

    /// The load with a number, as blocks name it.
    pub(crate) fn load_at(&self, number: u32) -> Option<&TrackedLoad> {
        self.loads.get(number)
    }

    /// The number of a request's load, which no other has until it ends; 0 for none.
    pub(crate) fn load_number(&self, instance: u16, request: &RequestId) -> u32 {
        self.loads.number(instance, request)
    }

    /// The load of a request.
    pub(crate) fn load(&self, instance: u16, request: &RequestId) -> Option<&TrackedLoad> {
        self.loads.find(instance, request)
    }

    /// The request that a tag of a decode names, and its newest attempt.
    pub(crate) fn tagged(&self, instance: u16, tag: &AttemptTag) -> Option<(&RequestId, Attempt)> {
        self.loads.attempt(instance, tag)
    }

    /// Loads that have not ended.
    pub(crate) fn loads(&self) -> impl Iterator<Item = &TrackedLoad> {
        self.loads.iter()
    }

    /// An operation that has not both completed and settled.
    #[inline]
    pub(crate) fn op(&self, from: SimRankId, op: u64) -> Option<&TrackedOp> {
        self.ops.get(from, op)
    }

    /// Operations that have not both completed and settled.
    pub(crate) fn ops(&self) -> impl Iterator<Item = (SimRankId, &TrackedOp)> {
        self.ops.iter()
    }

    #[inline]
    pub(crate) fn follow(&mut self, now: Nanos, seen: &Observation<'_>) {
        self.seq += 1;
        match seen {
            // What lands changes memory, not who owns it.
            Observation::Landed(landing) => self.loads.landed(landing, &self.places),
            Observation::Submitted(seen) => self.ops.submitted(seen, self.seq, &mut self.places),
            Observation::Completed { from, op, outcome } => {
                let settled = match outcome {
                    Completion::Done => None,
                    Completion::Failed { landed, .. } => Some(*landed != Landed::Unknown),
                };
                self.ops.completed(*from, op.0, settled, &mut self.places);
            }
            Observation::Quiesced { from, session, ticket } => {
                self.ops.quiesced(*from, *session, *ticket, self.seq);
            }
            Observation::Quiet { from, session, ticket } => {
                self.ops.quiet(*from, *session, *ticket, &mut self.places);
            }
            Observation::Fenced { at, peer, fence_key } => {
                self.ops.fenced(*at, *peer, *fence_key, &mut self.places);
            }
            Observation::Void { at } => self.ops.void(*at, &mut self.places),
            Observation::Gauges { who, part, gauges, .. } => {
                self.gauges.insert((*who, *part), *gauges);
            }
            Observation::Faulted { .. } => self.faulted(now),
            Observation::Healed => {
                self.faulted(now);
                self.healed = Some(now);
            }
            _ => self.follow_rare(now, seen),
        }
    }

    fn follow_rare(&mut self, now: Nanos, seen: &Observation<'_>) {
        match seen {
            Observation::Started { who, spec } => self.started(*who, spec),
            Observation::Settled { core, frozen, broken } => {
                self.core = core.iter().copied().collect();
                self.broken = broken.to_vec();
                if !frozen.is_empty() || broken.iter().any(|(_, to)| to.is_none()) {
                    self.last_fault = now + self.trust;
                }
                for (index, place) in (0..).zip(&mut self.places) {
                    place.frozen = frozen.contains(&index);
                }
            }
            Observation::Crashed { who } => self.crashed(*who),
            Observation::Taken { who, blocks, .. } => self.change_owner(*who, blocks),
            Observation::Freed { who, blocks, .. } => self.change_owner(*who, blocks),
            Observation::DecodeHook { who, hook } => self.decode_hook(now, *who, hook),
            Observation::DecodeAnswer { who, answer } if answer.is_last() => {
                self.end_load(who.instance, answer.request());
            }
            Observation::FrameSent { from, to, frame: Frame::Data { message, .. } } => {
                self.message_sent(*from, *to, message);
            }
            _ => self.requests.follow(now, seen),
        }
    }

    fn faulted(&mut self, now: Nanos) {
        self.last_hit = now;
        self.last_fault = self.last_fault.max(now);
    }

    fn started(&mut self, who: SimProcessId, spec: &InstanceSettings) {
        let Some(place) = self.places.get_mut(usize::from(who.instance)) else { return };
        let name = std::mem::take(&mut place.name);
        *place = TrackedInstance::new(name, spec, Some(who.incarnation));
    }

    fn crashed(&mut self, who: SimProcessId) {
        let Some(place) = self.places.get_mut(usize::from(who.instance)) else { return };
        place.alive = false;
        place.blocks = TrackedBlocks::default();
        self.gauges.retain(|key, _| key.0 != who);
        self.loads.crashed(who.instance);
        self.ops.crashed(who, &mut self.places);
    }

    fn change_owner(&mut self, who: SimProcessId, blocks: &[Vec<u32>]) {
        let seq = self.seq;
        let Some(place) = self.places.get_mut(usize::from(who.instance)) else { return };
        for at in BlockRef::all(blocks) {
            let block = place.blocks.get_mut(at);
            (block.since, block.load) = (seq, 0);
        }
    }

    fn decode_hook(&mut self, now: Nanos, who: SimProcessId, hook: &DecodeHook) {
        match hook {
            DecodeHook::Arrived { request, leg, tokens, .. } => {
                self.loads.arrived(who.instance, request, leg, *tokens);
            }
            DecodeHook::Allocated { request, computed, blocks } => {
                let Some(place) = self.places.get_mut(usize::from(who.instance)) else { return };
                let tokens = self.loads.tokens(who.instance, request);
                let mut written = Vec::new();
                for (group, list) in blocks.iter().enumerate() {
                    let kind = self.model.groups.get(group).map(|group| group.kind);
                    let state = kind == Some(GroupKind::State);
                    let size = place.spec.block_tokens.max(1);
                    let hits = if state { 0 } else { *computed / size };
                    let hits = hits.saturating_sub(list.first) as usize;
                    let ids = if *computed >= tokens { &[] } else { &list.ids[..] };
                    let reference = |id: &u32| BlockRef { group: group as u16, block: *id };
                    written.extend(ids.iter().skip(hits).map(reference));
                }
                let load = self.loads.allocated((now, self.seq), who, request, &written);
                for at in written {
                    place.blocks.get_mut(at).load = load;
                }
            }
            DecodeHook::Finished { request, .. } => self.loads.finished(who.instance, request),
        }
    }

    fn end_load(&mut self, instance: u16, request: &RequestId) {
        let Some(place) = self.places.get_mut(usize::from(instance)) else { return };
        for at in self.loads.ended(instance, request) {
            place.blocks.get_mut(at).load = 0;
        }
    }

    fn message_sent(&mut self, from: SimProcessId, to: SimProcessId, message: &Message) {
        let seq = self.seq;
        match message {
            Message::Announce { tag, .. } => {
                self.loads.set_writer(from.instance, tag, to.instance, to);
            }
            Message::Pull { tag, .. } => {
                self.loads.set_writer(from.instance, tag, from.instance, to);
            }
            Message::Grant { tag, .. } => self.loads.granted(to.instance, tag, seq),
            _ => {}
        }
    }
}
