//! The receivers of a key: bound to its source, written to or granted a lease, and seen to their
//! end.

use super::request::Request;
use super::{FlowEntry, Out, Prefill, Timer};
use crate::core::dialect::native::{self, MessageKind};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, FlowId, Incarnation, PeerSlot, RankSet, SourceId, TransferKey};
use crate::core::layout::Mismatch;
use crate::core::message::{Job, Message, Mode, Tag};
use crate::core::station::{Blocks, CoreSettings};
use crate::core::time::Nanos;
use crate::fabric::Refused;

/// What a receiver asked for.
#[derive(Clone, Debug)]
pub(super) enum Want {
    /// Push: a word when the prompt's computation begins.
    Ask,
    /// Write `from..` into these blocks.
    Push { from: u32, blocks: Blocks },
    /// Tell the blocks.
    Pull,
}

#[derive(Debug)]
enum State {
    /// For the prefill leg or (pull) its end, or for the receiver's blocks.
    Waiting,
    /// The flow writes.
    Writing(FlowId),
    /// The flow stops because of a preemption; another one follows.
    Restarting(FlowId),
    /// The flow stops for good; the receiver has been told why.
    Ending(FlowId, Failure),
    /// The receiver reads under a lease.
    Granted { released: RankSet },
}

/// One receiver.
#[derive(Debug)]
pub(super) struct Sink {
    slot: PeerSlot,
    /// Who that is; it may speak for the receiver in a later conversation, too.
    reader: Option<(EngineId, Incarnation)>,
    tag: Tag,
    tokens: u32,
    want: Want,
    /// The receiver was told that the prompt (pull: the last of it) is being computed.
    begun: bool,
    state: State,
}

impl Sink {
    /// True if the receiver has, or may have, blocks for what it waits for.
    fn binds_blocks(&self) -> bool {
        match self.state {
            State::Waiting => match self.want {
                Want::Ask => false,
                Want::Push { .. } => true,
                Want::Pull => self.begun,
            },
            State::Writing(_) | State::Restarting(_) => true,
            State::Ending(..) | State::Granted { .. } => false,
        }
    }

    /// True if it waits for the prompt, and the prompt's blocks wait for its own.
    pub(super) fn only_asked(&self) -> bool {
        matches!((&self.state, &self.want), (State::Waiting, Want::Ask))
    }

    fn reads(&self) -> bool {
        matches!(self.state, State::Granted { .. })
    }
}

impl Prefill {
    fn tell(&mut self, now: Nanos, slot: PeerSlot, message: Message, out: &mut Out) {
        // A peer that is down learns nothing; one whose queue is full is about to be.
        let _ = self.station.send(now, slot, message, out);
    }

    fn tell_ended(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        tag: Tag,
        failure: Failure,
        quiet: bool,
        out: &mut Out,
    ) {
        self.tell(now, slot, Message::Ended { tag, failure, quiet }, out);
    }

    /// A decode announced blocks or asked for a grant.
    pub(super) fn wanted(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        tag: Tag,
        tokens: u32,
        want: Want,
        out: &mut Out,
    ) {
        let sink = self.keys.get_mut(&tag.key).and_then(|key| key.sinks.get_mut(&tag.sibling));
        if let Some(sink) = sink.filter(|sink| sink.slot == slot) {
            if sink.tag.attempt == tag.attempt && matches!(sink.want, Want::Ask) {
                (sink.want, sink.tokens) = (want, tokens);
                return self.bind(now, &tag.key, tag.sibling, out);
            }
            if sink.tag.attempt >= tag.attempt {
                return;
            }
        }
        // A decode asks before it announces, but for one that speaks MoRIIO. What is left of a
        // receiver that has ended may come when its name is forgotten and the prompt is there again.
        let asked = !matches!(want, Want::Push { .. }) || slot.is_moriio();
        let asked = if asked { Ok(()) } else { Err(Failure::UnknownTransfer) };
        let room = self.station.unusable().cloned().map_or(Ok(()), Err);
        if let Err(failure) = self.accepts(&tag).and(asked).and(room) {
            return self.tell_ended(now, slot, tag, failure, true, out);
        }
        let (key, sibling, reader) = (tag.key.clone(), tag.sibling, self.reader(slot));
        let entry = self.keys.entry(key.clone()).or_default();
        if entry.request.is_none() {
            let orphan = now + self.config.settings.orphan;
            self.timers.arm_if_idle(Timer::Orphan(key.clone()), orphan);
        }
        let state = State::Waiting;
        let sink = Sink { slot, reader, tag, tokens, want, begun: false, state };
        entry.sinks.insert(sibling, sink);
        self.by_peer.insert(slot, (key.clone(), sibling));
        self.station.hold(now, slot, out);
        self.bind(now, &key, sibling, out);
    }

    fn accepts(&self, tag: &Tag) -> Result<(), Failure> {
        if self.tombstones.contains(&tag.key) {
            return Err(Failure::UnknownTransfer);
        }
        match self.keys.get(&tag.key) {
            Some(key) if key.closed => Err(Failure::UnknownTransfer),
            Some(key) if key.sinks.contains_key(&tag.sibling) => Err(Failure::DuplicateKey),
            Some(key) if key.served.contains(&tag.sibling) => Err(Failure::DuplicateKey),
            Some(_) => Ok(()),
            None if self.keys.len() >= self.config.settings.early_max as usize => {
                Err(Failure::Overload)
            }
            None => Ok(()),
        }
    }

    pub(super) fn bind_sinks(&mut self, now: Nanos, key: &TransferKey, out: &mut Out) {
        let siblings: Vec<u32> =
            self.keys.get(key).map_or(Vec::new(), |entry| entry.sinks.keys().copied().collect());
        for sibling in siblings {
            self.bind(now, key, sibling, out);
        }
    }

    /// Brings a receiver and the prompt together if both are there.
    fn bind(&mut self, now: Nanos, key: &TransferKey, sibling: u32, out: &mut Out) {
        let Some(entry) = self.keys.get(key) else { return };
        let Some(request) = entry.request.as_ref().and_then(|id| self.requests.get(id)) else {
            return;
        };
        let Some(sink) = entry.sinks.get(&sibling) else { return };
        if !matches!(sink.state, State::Waiting) {
            return;
        }
        if sibling >= request.siblings() {
            let text = format!("sibling {sibling} of {}", request.siblings());
            return self.end_sink(now, key, sibling, Failure::Mismatch(Mismatch(text.into())), out);
        }
        let wanted = request.leg.mode;
        let mode = match sink.want {
            Want::Ask | Want::Push { .. } => Mode::Push,
            Want::Pull => Mode::Pull,
        };
        if mode != wanted || sink.tokens != request.tokens {
            let text = format!(
                "decode wants {mode} of {} tokens, prefill has {wanted} of {}",
                sink.tokens, request.tokens
            );
            return self.end_sink(now, key, sibling, Failure::Mismatch(Mismatch(text.into())), out);
        }
        match sink.want {
            Want::Ask if request.begun() => self.begin(now, key, sibling, out),
            Want::Push { .. } => {
                self.start_flow(key, sibling, out);
                self.await_resumption(now, key);
            }
            Want::Pull if request.computed() => self.grant(now, key, sibling, out),
            Want::Pull if request.ending() => self.begin(now, key, sibling, out),
            Want::Ask | Want::Pull => {}
        }
    }

    /// Tells a receiver to get blocks.
    fn begin(&mut self, now: Nanos, key: &TransferKey, sibling: u32, out: &mut Out) {
        let sink = self.keys.get_mut(key).and_then(|entry| entry.sinks.get_mut(&sibling));
        let Some(sink) = sink.filter(|sink| !sink.begun) else { return };
        sink.begun = true;
        let (slot, tag) = (sink.slot, sink.tag.clone());
        self.tell(now, slot, Message::Begun { tag }, out);
    }

    /// Receivers of a preempted prompt do not wait for it forever: their blocks may be what others
    /// need before it can be computed again.
    pub(super) fn await_resumption(&mut self, now: Nanos, key: &TransferKey) {
        let Some(entry) = self.keys.get(key) else { return };
        let request = entry.request.as_ref().and_then(|id| self.requests.get(id));
        let waits = entry.sinks.values().any(Sink::binds_blocks);
        if waits && request.is_some_and(Request::is_behind) {
            let resume = now + self.config.settings.resume;
            self.timers.arm_if_idle(Timer::Resume(key.clone()), resume);
        }
    }

    /// A preempted prompt is not computed again in time: its receivers do without.
    pub(super) fn not_resumed(&mut self, now: Nanos, key: &TransferKey, out: &mut Out) {
        let Some(entry) = self.keys.get(key) else { return };
        let waiting: Vec<u32> = entry
            .sinks
            .iter()
            .filter(|(_, sink)| sink.binds_blocks())
            .map(|(sibling, _)| *sibling)
            .collect();
        for sibling in waiting {
            self.end_sink(now, key, sibling, Failure::Preempted, out);
        }
    }

    fn start_flow(&mut self, key: &TransferKey, sibling: u32, out: &mut Out) {
        let flow = FlowId(self.fresh());
        let Some(entry) = self.keys.get_mut(key) else { return };
        let Some(id) = &entry.request else { return };
        let Some(request) = self.requests.get_mut(id) else { return };
        let Some(sink) = entry.sinks.get_mut(&sibling) else { return };
        let Want::Push { from, blocks } = &sink.want else { return };
        sink.state = State::Writing(flow);
        request.mentioned = true;
        out.push(Job::Write {
            flow,
            request: id.clone(),
            reader: self.station.info(sink.slot).map(|info| info.engine.clone()),
            source: request.source,
            peer: sink.slot,
            from: *from,
            tokens: sink.tokens,
            blocks: blocks.clone(),
        });
        self.flows.insert(
            flow,
            FlowEntry {
                key: key.clone(),
                sibling,
                source: request.source,
                left: RankSet::first(self.config.geometry.tp),
                failure: None,
            },
        );
    }

    fn grant(&mut self, now: Nanos, key: &TransferKey, sibling: u32, out: &mut Out) {
        let lease = self.config.settings.lease;
        let Some(entry) = self.keys.get_mut(key) else { return };
        let Some(request) = entry.request.as_ref().and_then(|id| self.requests.get(id)) else {
            return;
        };
        let Some(sink) = entry.sinks.get_mut(&sibling) else { return };
        let grant = Message::Grant {
            tag: sink.tag.clone(),
            tokens: request.tokens,
            blocks: request.blocks.clone(),
            lease,
        };
        if !native::fits(&grant) {
            let failure = Failure::Refused(Refused::Invalid("too many blocks for a frame".into()));
            return self.end_sink(now, key, sibling, failure, out);
        }
        sink.state = State::Granted { released: RankSet::EMPTY };
        let slot = sink.slot;
        self.timers.arm(Timer::Lease(key.clone(), sibling), now + lease);
        self.tell(now, slot, grant, out);
    }

    pub(super) fn renew(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        tag: Tag,
        count: u32,
        out: &mut Out,
    ) {
        let lease = self.config.settings.lease;
        match self.sink_state(slot, &tag) {
            Some(State::Granted { .. }) => {
                if !planted!("renewed-is-said-only") {
                    self.timers.arm(Timer::Lease(tag.key.clone(), tag.sibling), now + lease);
                }
                self.tell(now, slot, Message::Renewed { tag, count, lease }, out);
            }
            Some(_) => {}
            None => self.tell_ended(now, slot, tag, Failure::LeaseExpired, true, out),
        }
    }

    fn sink_state(&mut self, slot: PeerSlot, tag: &Tag) -> Option<&mut State> {
        let reader = self.reader(slot);
        let sink = self.keys.get_mut(&tag.key)?.sinks.get_mut(&tag.sibling)?;
        let known = sink.reader.is_some() && sink.reader == reader;
        let same = sink.slot == slot || known && !planted!("release-by-slot-only");
        let current = sink.tag.attempt == tag.attempt || planted!("prefill-ignores-attempts");
        (same && current).then_some(&mut sink.state)
    }

    fn reader(&self, slot: PeerSlot) -> Option<(EngineId, Incarnation)> {
        self.station.info(slot).map(|info| (info.engine.clone(), info.incarnation))
    }

    /// The receiver needs the source no more.
    pub(super) fn released(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        tag: &Tag,
        ranks: RankSet,
        out: &mut Out,
    ) {
        let needed = RankSet::first(self.station.info(slot).map_or(1, |info| info.geometry.tp));
        match self.sink_state(slot, tag) {
            Some(State::Granted { released }) => {
                *released = released.union(ranks);
                if released.covers(needed) {
                    self.sink_done(now, &tag.key, tag.sibling, None, out);
                }
            }
            Some(State::Waiting) => self.sink_done(now, &tag.key, tag.sibling, None, out),
            Some(_) => self.end_sink(now, &tag.key, tag.sibling, Failure::Cancelled, out),
            None => self.released_unasked(now, tag, out),
        }
    }

    /// A receiver that needed nothing, perhaps before the prefill leg arrived.
    fn released_unasked(&mut self, now: Nanos, tag: &Tag, out: &mut Out) {
        if self.accepts(tag).is_err() {
            return;
        }
        let entry = self.keys.entry(tag.key.clone()).or_default();
        if entry.request.is_none() {
            let orphan = now + self.config.settings.orphan;
            self.timers.arm_if_idle(Timer::Orphan(tag.key.clone()), orphan);
        }
        self.note_served(&tag.key, tag.sibling);
        self.try_free(&tag.key, out);
    }

    /// Remembers a sibling that has ended, if the prompt has it, and while there is room; before
    /// the leg it may have it.
    fn note_served(&mut self, key: &TransferKey, sibling: u32) {
        let CoreSettings { receivers_max, early_max, .. } = self.config.settings;
        let Some(entry) = self.keys.get_mut(key) else { return };
        let request = entry.request.as_ref().and_then(|id| self.requests.get(id));
        let of_prompt = request.is_none_or(|request| sibling < request.siblings())
            && !(request.is_none() && planted!("early-release-is-forgotten"));
        // What comes before the leg may name any sibling, and has room of its own.
        let most = match request.is_some() {
            true => receivers_max as usize + early_max as usize,
            false => early_max as usize,
        };
        let room = self.served < most;
        if of_prompt && room && entry.served.insert(sibling) {
            self.served += 1;
        }
    }

    /// The receiver wants its blocks back.
    pub(super) fn cancelled(&mut self, now: Nanos, slot: PeerSlot, tag: Tag, out: &mut Out) {
        if self.sink_state(slot, &tag).is_some() {
            self.end_sink(now, &tag.key, tag.sibling, Failure::Cancelled, out);
        } else {
            self.tell_ended(now, slot, tag.clone(), Failure::Cancelled, true, out);
            self.released_unasked(now, &tag, out);
        }
    }

    /// A message of a decode could not be read: the receiver that it was about ends, whatever it
    /// said. A renewal comes again.
    pub(super) fn lost(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        tag: Tag,
        (kind, failure): (MessageKind, Failure),
        out: &mut Out,
    ) {
        if kind == MessageKind::Renew {
            return;
        }
        if self.sink_state(slot, &tag).is_some() {
            self.end_sink(now, &tag.key, tag.sibling, failure, out);
        } else {
            self.tell_ended(now, slot, tag.clone(), failure, true, out);
            self.released_unasked(now, &tag, out);
        }
    }

    /// Ends a receiver without success: at once if no byte can be under way, else when its flow is
    /// quiet.
    pub(super) fn end_sink(
        &mut self,
        now: Nanos,
        key: &TransferKey,
        sibling: u32,
        failure: Failure,
        out: &mut Out,
    ) {
        let Some(sink) = self.keys.get_mut(key).and_then(|entry| entry.sinks.get_mut(&sibling))
        else {
            return;
        };
        let (slot, tag) = (sink.slot, sink.tag.clone());
        match &mut sink.state {
            State::Waiting => {
                self.tell_ended(now, slot, tag, failure.clone(), true, out);
                self.sink_done(now, key, sibling, Some(failure), out);
            }
            State::Granted { .. } => {
                let at_once = planted!("granted-source-freed-on-end").then(|| failure.clone());
                self.tell_ended(now, slot, tag, failure, false, out);
                if at_once.is_some() {
                    self.sink_done(now, key, sibling, at_once, out);
                }
            }
            State::Writing(flow) | State::Restarting(flow) => {
                let flow = *flow;
                sink.state = State::Ending(flow, failure.clone());
                let quiet = planted!("quiet-is-said-at-once");
                self.tell_ended(now, slot, tag, failure, quiet, out);
                out.push(Job::Stop { flow });
            }
            State::Ending(..) => {}
        }
    }

    fn sink_done(
        &mut self,
        now: Nanos,
        key: &TransferKey,
        sibling: u32,
        failure: Option<Failure>,
        out: &mut Out,
    ) {
        self.note_served(key, sibling);
        let Some(entry) = self.keys.get_mut(key) else { return };
        let slot = entry.sinks.remove(&sibling).map(|sink| sink.slot);
        if entry.failure.is_none() {
            entry.failure = failure;
        }
        self.timers.cancel(&Timer::Lease(key.clone(), sibling));
        if let Some(slot) = slot {
            self.by_peer.remove(slot, &(key.clone(), sibling));
            if !planted!("receivers-are-counted-for-ever") {
                self.station.unhold(now, slot, out);
            }
        }
        self.try_free(key, out);
    }

    pub(super) fn lease_ended(
        &mut self,
        now: Nanos,
        key: &TransferKey,
        sibling: u32,
        out: &mut Out,
    ) {
        let Some(sink) = self.keys.get(key).and_then(|entry| entry.sinks.get(&sibling)) else {
            return;
        };
        let (slot, tag) = (sink.slot, sink.tag.clone());
        self.tell_ended(now, slot, tag, Failure::LeaseExpired, true, out);
        self.sink_done(now, key, sibling, Some(Failure::LeaseExpired), out);
    }

    /// Stops the flows of a source that a preemption takes away; says how many there are.
    pub(super) fn restart_sinks(
        &mut self,
        key: &TransferKey,
        source: SourceId,
        out: &mut Out,
    ) -> u32 {
        if let Some(entry) = self.keys.get_mut(key) {
            for sink in entry.sinks.values_mut() {
                if let State::Writing(flow) = sink.state {
                    sink.state = State::Restarting(flow);
                    out.push(Job::Stop { flow });
                }
            }
        }
        let reading = |flow: &&FlowEntry| flow.key == *key && flow.source == source;
        self.flows.values().filter(reading).count() as u32
    }

    /// A rank says that the flow will fail: tell the receiver, stop the other ranks.
    pub(super) fn flow_failing(&mut self, now: Nanos, id: FlowId, out: &mut Out) {
        let Some(flow) = self.flows.get(&id) else { return };
        let failure = flow.failure.clone().unwrap_or(Failure::Cancelled);
        let (key, sibling) = (flow.key.clone(), flow.sibling);
        let state = self.keys.get(&key).and_then(|entry| entry.sinks.get(&sibling));
        if state.is_some_and(|sink| matches!(sink.state, State::Writing(writing) if writing == id))
        {
            self.end_sink(now, &key, sibling, failure, out);
        }
    }

    /// Every rank has reported the end of a flow: nothing of it is under way.
    pub(super) fn flow_ended(&mut self, now: Nanos, id: FlowId, out: &mut Out) {
        let Some(flow) = self.flows.remove(&id) else { return };
        let key = flow.key;
        let request = self.keys.get(&key).and_then(|entry| entry.request.clone());
        if let Some(request) = &request {
            self.drained(request, flow.source, out);
        }
        let Some(sink) =
            self.keys.get_mut(&key).and_then(|entry| entry.sinks.get_mut(&flow.sibling))
        else {
            return self.try_free(&key, out);
        };
        let (slot, tag, tokens) = (sink.slot, sink.tag.clone(), sink.tokens);
        match &sink.state {
            State::Ending(of, failure) if *of == id => {
                let failure = failure.clone();
                self.tell_ended(now, slot, tag, failure.clone(), true, out);
                self.sink_done(now, &key, flow.sibling, Some(failure), out);
            }
            State::Writing(of) | State::Restarting(of) if *of == id => match flow.failure {
                None => {
                    let ranks = RankSet::first(self.config.geometry.tp);
                    self.tell(now, slot, Message::Delivered { tag, ranks, tokens }, out);
                    self.sink_done(now, &key, flow.sibling, None, out);
                }
                Some(_) if matches!(sink.state, State::Restarting(_)) => {
                    self.start_flow(&key, flow.sibling, out);
                }
                Some(failure) => {
                    self.tell_ended(now, slot, tag, failure.clone(), true, out);
                    self.sink_done(now, &key, flow.sibling, Some(failure), out);
                }
            },
            _ => self.try_free(&key, out),
        }
    }

    /// The peer is gone: its receivers get nothing more. A source that it may be reading is kept
    /// until its lease ends, unless the reader is known to be dead.
    pub(super) fn peer_down(
        &mut self,
        now: Nanos,
        slot: PeerSlot,
        failure: &Failure,
        out: &mut Out,
    ) {
        for (key, sibling) in self.by_peer.of(slot) {
            let sink = self.keys.get(&key).and_then(|entry| entry.sinks.get(&sibling));
            let reads = sink.is_some_and(Sink::reads);
            if !reads {
                self.end_sink(now, &key, sibling, failure.clone(), out);
            } else if *failure == Failure::PeerRestarted
                || planted!("silent-reader-loses-its-source")
            {
                self.sink_done(now, &key, sibling, Some(failure.clone()), out);
            }
        }
    }
}
