//! The receivers of a key: bound to its source, written to or granted a lease, and seen to their
//! end.

use super::receiver::{Receiver, ReceiverRequest, ReceiverState, WantedPrompt};
use super::request::PrefillRequest;
use super::{FlowEntry, Prefill, PrefillTimer, PrefillTurn, PromptTransfer};
use crate::core::config::CoreSettings;
use crate::core::dialect::native;
use crate::core::error::Failure;
use crate::core::ids::{
    ConnectionId, EngineId, FlowId, Incarnation, RankSet, SourceId, TransferKey,
};
use crate::core::message::{AttemptTag, Message, Mode, TransferJob};
use crate::core::time::Nanos;
use crate::core::verify::{DigestPlan, KvDigest};
use crate::fabric::Refused;

/// Why a receiver cannot be told what it is to be told.
fn too_large() -> Failure {
    Failure::Refused(Refused::Invalid("too many blocks for a frame".into()))
}

impl Prefill {
    fn tell(&mut self, connection: ConnectionId, message: Message, turn: &mut PrefillTurn<'_>) {
        // A peer that is down learns nothing; one whose queue is full is about to be.
        let _ = self.peer_manager.send(connection, message, turn);
    }

    fn tell_ended(
        &mut self,
        connection: ConnectionId,
        tag: AttemptTag,
        failure: Failure,
        quiet: bool,
        turn: &mut PrefillTurn<'_>,
    ) {
        self.tell(connection, Message::Ended { tag, failure, quiet }, turn);
    }

    fn receiver(&self, key: &TransferKey, sibling: u32) -> Option<&Receiver> {
        self.keys.get(key)?.receivers.get(&sibling)
    }

    fn receiver_mut(&mut self, key: &TransferKey, sibling: u32) -> Option<&mut Receiver> {
        self.keys.get_mut(key)?.receivers.get_mut(&sibling)
    }

    /// A key that a decode speaks of; without a prefill leg it does not stay for ever.
    fn mentioned(&mut self, now: Nanos, key: &TransferKey) -> &mut PromptTransfer {
        let entry = self.keys.entry(key.clone()).or_default();
        if entry.request.is_none() {
            let orphan = now + self.config.settings.orphan;
            self.timers.arm_if_idle(PrefillTimer::Orphan(key.clone()), orphan);
        }
        entry
    }

    /// A decode announced blocks or asked for a grant.
    pub(super) fn wanted(
        &mut self,
        connection: ConnectionId,
        tag: AttemptTag,
        prompt: WantedPrompt,
        want: ReceiverRequest,
        turn: &mut PrefillTurn<'_>,
    ) {
        let receiver = self.receiver_mut(&tag.key, tag.sibling);
        if let Some(receiver) = receiver.filter(|receiver| receiver.connection == connection) {
            if receiver.tag.attempt == tag.attempt && matches!(receiver.want, ReceiverRequest::Ask)
            {
                let hash = prompt.hash.or(receiver.prompt.hash);
                (receiver.want, receiver.prompt) = (want, WantedPrompt { hash, ..prompt });
                return self.bind(&tag.key, tag.sibling, turn);
            }
            if receiver.tag.attempt >= tag.attempt {
                return;
            }
        }
        self.make_way(connection, &tag, &want, turn);
        // A decode asks before it announces, but for one that speaks MoRIIO. What is left of a
        // receiver that has ended may come when its name is forgotten and the prompt is there
        // again.
        let asked = !matches!(want, ReceiverRequest::Push { .. }) || connection.is_moriio();
        let asked = if asked { Ok(()) } else { Err(Failure::UnknownTransfer) };
        let room = self.peer_manager.unusable().cloned().map_or(Ok(()), Err);
        if let Err(failure) = self.accepts(&tag).and(asked).and(room) {
            return self.tell_ended(connection, tag, failure, true, turn);
        }
        let (key, sibling, reader) = (tag.key.clone(), tag.sibling, self.reader(connection));
        let state = ReceiverState::Waiting;
        let begun = false;
        let receiver = Receiver { connection, reader, tag, prompt, want, begun, state };
        self.mentioned(turn.now, &key).receivers.insert(sibling, receiver);
        self.by_peer.insert(connection, (key.clone(), sibling));
        self.peer_manager.hold(connection, turn);
        self.bind(&key, sibling, turn);
    }

    /// A leg that names no decode is held for whoever reads it, in whose place the native peer comes
    /// that it is for.
    fn make_way(
        &mut self,
        connection: ConnectionId,
        tag: &AttemptTag,
        want: &ReceiverRequest,
        turn: &mut PrefillTurn<'_>,
    ) {
        let is_native = matches!(want, ReceiverRequest::Pull) && !connection.is_moriio();
        let Some(known) = self.receiver(&tag.key, tag.sibling) else { return };
        let (anyone, is_read) = (known.connection, matches!(known.want, ReceiverRequest::Pull));
        if !is_native
            || !anyone.is_moriio()
            || !is_read
            || planted!("native-reader-finds-its-place-taken")
        {
            return;
        }
        self.peer_manager.forget(&tag.key);
        if let Some(entry) = self.keys.get_mut(&tag.key) {
            entry.receivers.remove(&tag.sibling);
        }
        self.timers.cancel(&PrefillTimer::Lease(tag.key.clone(), tag.sibling));
        self.by_peer.remove(anyone, &(tag.key.clone(), tag.sibling));
        self.peer_manager.unhold(anyone, turn);
    }

    fn accepts(&self, tag: &AttemptTag) -> Result<(), Failure> {
        if self.tombstones.contains(&tag.key) {
            return Err(Failure::UnknownTransfer);
        }
        match self.keys.get(&tag.key) {
            Some(key) if key.closed => Err(Failure::UnknownTransfer),
            Some(key) if key.receivers.contains_key(&tag.sibling) => Err(Failure::DuplicateKey),
            Some(key) if key.served.contains(&tag.sibling) => Err(Failure::DuplicateKey),
            Some(_) => Ok(()),
            None if self.keys.len() >= self.config.settings.early_max as usize => {
                Err(Failure::Overload)
            }
            None => Ok(()),
        }
    }

    pub(super) fn bind_receivers(&mut self, key: &TransferKey, turn: &mut PrefillTurn<'_>) {
        let Some(entry) = self.keys.get(key) else { return };
        let siblings: Vec<u32> = entry.receivers.keys().copied().collect();
        for sibling in siblings {
            self.bind(key, sibling, turn);
        }
    }

    /// Brings a receiver and the prompt together if both are there.
    fn bind(&mut self, key: &TransferKey, sibling: u32, turn: &mut PrefillTurn<'_>) {
        let Some(entry) = self.keys.get(key) else { return };
        let Some(request) = entry.request.as_ref().and_then(|id| self.requests.get(id)) else {
            return;
        };
        let Some(receiver) = entry.receivers.get(&sibling) else { return };
        if !matches!(receiver.state, ReceiverState::Waiting) {
            return;
        }
        if sibling >= request.siblings() {
            let text = format!("sibling {sibling} of {}", request.siblings());
            return self.end_receiver(key, sibling, Failure::mismatch(text), turn);
        }
        let wanted = request.leg.mode;
        let mode = match receiver.want {
            ReceiverRequest::Ask | ReceiverRequest::Push { .. } => Mode::Push,
            ReceiverRequest::Pull => Mode::Pull,
        };
        let WantedPrompt { tokens, hash, .. } = receiver.prompt;
        if mode != wanted || tokens != request.tokens {
            let text = format!(
                "decode wants {mode} of {tokens} tokens, prefill has {wanted} of {}",
                request.tokens
            );
            return self.end_receiver(key, sibling, Failure::mismatch(text), turn);
        }
        let prefill = request.prompt_hash;
        if let Some(decode) = hash.filter(|hash| *hash != prefill)
            && !planted!("prompt-hash-is-not-compared")
        {
            let failure = Failure::PromptMismatch { decode, prefill };
            return self.end_receiver(key, sibling, failure, turn);
        }
        match receiver.want {
            ReceiverRequest::Ask if request.begun() => self.begin(key, sibling, turn),
            ReceiverRequest::Push { .. } => {
                let plan = self.digest_plan(key, receiver, prefill);
                self.start_flow(key, sibling, plan, turn);
                self.await_resumption(turn.now, key);
            }
            ReceiverRequest::Pull if request.computed() => {
                match self.digest_plan(key, receiver, prefill) {
                    None => self.grant(key, sibling, None, turn),
                    Some(plan) => self.digest_source(key, sibling, plan, turn),
                }
            }
            ReceiverRequest::Pull if request.ending() => self.begin(key, sibling, turn),
            ReceiverRequest::Ask | ReceiverRequest::Pull => {}
        }
    }

    /// Tells a receiver to get blocks.
    fn begin(&mut self, key: &TransferKey, sibling: u32, turn: &mut PrefillTurn<'_>) {
        let receiver = self.receiver_mut(key, sibling);
        let Some(receiver) = receiver.filter(|receiver| !receiver.begun) else { return };
        receiver.begun = true;
        let (connection, tag) = (receiver.connection, receiver.tag.clone());
        self.tell(connection, Message::Begun { tag }, turn);
    }

    /// Receivers of a preempted prompt do not wait for it forever: their blocks may be what others
    /// need before it can be computed again.
    pub(super) fn await_resumption(&mut self, now: Nanos, key: &TransferKey) {
        let Some(entry) = self.keys.get(key) else { return };
        let request = entry.request.as_ref().and_then(|id| self.requests.get(id));
        let waits = entry.receivers.values().any(Receiver::binds_blocks);
        if waits && request.is_some_and(PrefillRequest::is_behind) {
            let resume = now + self.config.settings.resume;
            self.timers.arm_if_idle(PrefillTimer::Resume(key.clone()), resume);
        }
    }

    /// Those of the receivers of a key that are told do without.
    pub(super) fn end_receivers(
        &mut self,
        key: &TransferKey,
        which: impl Fn(&Receiver) -> bool,
        failure: &Failure,
        turn: &mut PrefillTurn<'_>,
    ) {
        let Some(entry) = self.keys.get(key) else { return };
        let told = entry.receivers.iter().filter(|(_, receiver)| which(receiver));
        let told: Vec<u32> = told.map(|(sibling, _)| *sibling).collect();
        for sibling in told {
            self.end_receiver(key, sibling, failure.clone(), turn);
        }
    }

    fn start_flow(
        &mut self,
        key: &TransferKey,
        sibling: u32,
        verify: Option<DigestPlan>,
        turn: &mut PrefillTurn<'_>,
    ) {
        let flow = FlowId(self.fresh());
        let Some(entry) = self.keys.get_mut(key) else { return };
        let Some(id) = &entry.request else { return };
        let Some(request) = self.requests.get_mut(id) else { return };
        let Some(receiver) = entry.receivers.get_mut(&sibling) else { return };
        let ReceiverRequest::Push { from, blocks } = &receiver.want else { return };
        receiver.state = ReceiverState::Writing(flow);
        request.mentioned = true;
        turn.push(TransferJob::Write {
            flow,
            request: id.clone(),
            reader: self.peer_manager.info(receiver.connection).map(|info| info.engine.clone()),
            source: request.source,
            peer: receiver.connection,
            from: *from,
            tokens: receiver.prompt.tokens,
            blocks: blocks.clone(),
            verify,
        });
        self.flows.insert(
            flow,
            FlowEntry {
                key: key.clone(),
                sibling,
                source: request.source,
                left: RankSet::first(self.config.geometry.tp),
                failure: None,
                plan: verify,
                digest: None,
            },
        );
    }

    fn grant(
        &mut self,
        key: &TransferKey,
        sibling: u32,
        digest: Option<Box<KvDigest>>,
        turn: &mut PrefillTurn<'_>,
    ) {
        let lease = self.config.settings.lease;
        let Some(entry) = self.keys.get_mut(key) else { return };
        let Some(request) = entry.request.as_ref().and_then(|id| self.requests.get(id)) else {
            return;
        };
        let Some(receiver) = entry.receivers.get_mut(&sibling) else { return };
        let grant = Message::Grant {
            tag: receiver.tag.clone(),
            tokens: request.tokens,
            blocks: self.config.geometry.kept(&request.blocks, request.tokens),
            lease,
            digest,
        };
        if !native::fits(&grant) {
            return self.end_receiver(key, sibling, too_large(), turn);
        }
        receiver.state = ReceiverState::Granted { released: RankSet::EMPTY };
        let connection = receiver.connection;
        self.timers.arm(PrefillTimer::Lease(key.clone(), sibling), turn.now + lease);
        self.tell(connection, grant, turn);
    }

    pub(super) fn renew(
        &mut self,
        connection: ConnectionId,
        tag: AttemptTag,
        count: u32,
        turn: &mut PrefillTurn<'_>,
    ) {
        let lease = self.config.settings.lease;
        match self.receiver_state(connection, &tag) {
            Some(ReceiverState::Granted { .. }) => {
                if !planted!("renewed-is-said-only") {
                    self.timers
                        .arm(PrefillTimer::Lease(tag.key.clone(), tag.sibling), turn.now + lease);
                }
                self.tell(connection, Message::Renewed { tag, count, lease }, turn);
            }
            Some(_) => {}
            None => self.tell_ended(connection, tag, Failure::LeaseExpired, true, turn),
        }
    }

    fn receiver_state(
        &mut self,
        connection: ConnectionId,
        tag: &AttemptTag,
    ) -> Option<&mut ReceiverState> {
        let reader = self.reader(connection);
        let receiver = self.keys.get_mut(&tag.key)?.receivers.get_mut(&tag.sibling)?;
        let known = receiver.reader.is_some() && receiver.reader == reader;
        let same = receiver.connection == connection || known && !planted!("release-by-slot-only");
        let current = receiver.tag.attempt == tag.attempt || planted!("prefill-ignores-attempts");
        (same && current).then_some(&mut receiver.state)
    }

    fn reader(&self, connection: ConnectionId) -> Option<(EngineId, Incarnation)> {
        self.peer_manager.info(connection).map(|info| (info.engine.clone(), info.incarnation))
    }

    /// The receiver needs the source no more.
    pub(super) fn released(
        &mut self,
        connection: ConnectionId,
        tag: &AttemptTag,
        ranks: RankSet,
        turn: &mut PrefillTurn<'_>,
    ) {
        let needed =
            RankSet::first(self.peer_manager.info(connection).map_or(1, |info| info.geometry.tp));
        match self.receiver_state(connection, tag) {
            Some(ReceiverState::Granted { released }) => {
                *released = released.union(ranks);
                if released.covers(needed) {
                    self.receiver_done(&tag.key, tag.sibling, None, turn);
                }
            }
            Some(ReceiverState::Waiting) => self.receiver_done(&tag.key, tag.sibling, None, turn),
            Some(ReceiverState::Digesting(flow)) => {
                let flow = *flow;
                turn.push(TransferJob::Stop { flow });
                self.receiver_done(&tag.key, tag.sibling, None, turn);
            }
            Some(_) => self.end_receiver(&tag.key, tag.sibling, Failure::Cancelled, turn),
            None => self.released_unasked(tag, turn),
        }
    }

    /// A receiver that needed nothing, perhaps before the prefill leg arrived.
    fn released_unasked(&mut self, tag: &AttemptTag, turn: &mut PrefillTurn<'_>) {
        if self.accepts(tag).is_err() {
            return;
        }
        self.mentioned(turn.now, &tag.key);
        self.note_served(&tag.key, tag.sibling);
        self.try_free(&tag.key, turn);
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

    /// A decode wants its blocks back, or what it said of an attempt could not be read: the
    /// receiver ends.
    pub(super) fn give_up(
        &mut self,
        connection: ConnectionId,
        tag: AttemptTag,
        failure: Failure,
        turn: &mut PrefillTurn<'_>,
    ) {
        if self.receiver_state(connection, &tag).is_some() {
            self.end_receiver(&tag.key, tag.sibling, failure, turn);
        } else {
            self.tell_ended(connection, tag.clone(), failure, true, turn);
            self.released_unasked(&tag, turn);
        }
    }

    /// Ends a receiver without success: at once if no byte can be under way, else when its flow is
    /// quiet.
    pub(super) fn end_receiver(
        &mut self,
        key: &TransferKey,
        sibling: u32,
        failure: Failure,
        turn: &mut PrefillTurn<'_>,
    ) {
        let Some(receiver) = self.receiver_mut(key, sibling) else { return };
        let (connection, tag) = (receiver.connection, receiver.tag.clone());
        match &mut receiver.state {
            ReceiverState::Waiting => self.end_quiet(key, sibling, failure, turn),
            ReceiverState::Digesting(flow) => {
                // Nothing reads it but this engine, to no purpose any more.
                let flow = *flow;
                turn.push(TransferJob::Stop { flow });
                self.end_quiet(key, sibling, failure, turn);
            }
            ReceiverState::Granted { .. } => {
                let at_once = planted!("granted-source-freed-on-end").then(|| failure.clone());
                self.tell_ended(connection, tag, failure, false, turn);
                if at_once.is_some() {
                    self.receiver_done(key, sibling, at_once, turn);
                }
            }
            ReceiverState::Writing(flow) | ReceiverState::Restarting(flow) => {
                let flow = *flow;
                receiver.state = ReceiverState::Ending(flow, failure.clone());
                let quiet = planted!("quiet-is-said-at-once");
                self.tell_ended(connection, tag, failure, quiet, turn);
                turn.push(TransferJob::Stop { flow });
            }
            ReceiverState::Ending(..) => {}
        }
    }

    fn receiver_done(
        &mut self,
        key: &TransferKey,
        sibling: u32,
        failure: Option<Failure>,
        turn: &mut PrefillTurn<'_>,
    ) {
        self.note_served(key, sibling);
        let Some(entry) = self.keys.get_mut(key) else { return };
        let connection = entry.receivers.remove(&sibling).map(|receiver| receiver.connection);
        if entry.failure.is_none() {
            entry.failure = failure;
        }
        self.timers.cancel(&PrefillTimer::Lease(key.clone(), sibling));
        if let Some(connection) = connection {
            self.by_peer.remove(connection, &(key.clone(), sibling));
            if !planted!("receivers-are-counted-for-ever") {
                self.peer_manager.unhold(connection, turn);
            }
        }
        self.try_free(key, turn);
    }

    /// Ends a receiver without success of whose attempt no byte is under way.
    pub(super) fn end_quiet(
        &mut self,
        key: &TransferKey,
        sibling: u32,
        failure: Failure,
        turn: &mut PrefillTurn<'_>,
    ) {
        let Some(receiver) = self.receiver(key, sibling) else { return };
        let (connection, tag) = (receiver.connection, receiver.tag.clone());
        self.tell_ended(connection, tag, failure.clone(), true, turn);
        self.receiver_done(key, sibling, Some(failure), turn);
    }

    /// Stops the flows of a source that a preemption takes away; says how many there are.
    pub(super) fn restart_receivers(
        &mut self,
        key: &TransferKey,
        source: SourceId,
        turn: &mut PrefillTurn<'_>,
    ) -> u32 {
        let mut restarted = 0;
        if let Some(entry) = self.keys.get_mut(key) {
            for receiver in entry.receivers.values_mut() {
                if let ReceiverState::Writing(flow) = receiver.state {
                    restarted += 1;
                    receiver.state = ReceiverState::Restarting(flow);
                    turn.push(TransferJob::Stop { flow });
                }
            }
        }
        let reading = |flow: &&FlowEntry| flow.key == *key && flow.source == source;
        match planted!("flows-that-end-read-nothing") {
            true => restarted,
            false => self.flows.values().filter(reading).count() as u32,
        }
    }

    /// A rank says that the flow will fail: tell the receiver, stop the other ranks.
    pub(super) fn flow_failing(&mut self, id: FlowId, turn: &mut PrefillTurn<'_>) {
        let Some(flow) = self.flows.get(&id) else { return };
        let failure = flow.failure.clone().unwrap_or(Failure::Cancelled);
        let (key, sibling) = (flow.key.clone(), flow.sibling);
        let is_written =
            |receiver: &Receiver| matches!(receiver.state, ReceiverState::Writing(of) if of == id);
        if self.receiver(&key, sibling).is_some_and(is_written) {
            self.end_receiver(&key, sibling, failure, turn);
        }
    }

    /// Every rank has reported the end of a flow: nothing of it is under way.
    pub(super) fn flow_ended(&mut self, id: FlowId, turn: &mut PrefillTurn<'_>) {
        let Some(flow) = self.flows.remove(&id) else { return };
        let key = flow.key;
        let request = self.keys.get(&key).and_then(|entry| entry.request.clone());
        if let Some(request) = &request {
            self.drained(request, flow.source, turn);
        }
        let Some(receiver) = self.receiver(&key, flow.sibling) else {
            return self.try_free(&key, turn);
        };
        match &receiver.state {
            ReceiverState::Ending(of, failure) if *of == id => {
                let failure = failure.clone();
                self.end_quiet(&key, flow.sibling, failure, turn);
            }
            ReceiverState::Writing(of) | ReceiverState::Restarting(of) if *of == id => {
                match flow.failure {
                    None => {
                        let (connection, tokens) = (receiver.connection, receiver.prompt.tokens);
                        let tag = receiver.tag.clone();
                        let (ranks, digest) =
                            (RankSet::first(self.config.geometry.tp), flow.digest);
                        let delivered = Message::Delivered { tag, ranks, tokens, digest };
                        if !native::fits(&delivered) {
                            return self.end_quiet(&key, flow.sibling, too_large(), turn);
                        }
                        self.tell(connection, delivered, turn);
                        self.receiver_done(&key, flow.sibling, None, turn);
                    }
                    Some(_) if matches!(receiver.state, ReceiverState::Restarting(_)) => {
                        self.start_flow(&key, flow.sibling, flow.plan, turn);
                    }
                    Some(failure) => self.end_quiet(&key, flow.sibling, failure, turn),
                }
            }
            ReceiverState::Digesting(of) if *of == id => match flow.failure {
                None => self.grant(&key, flow.sibling, flow.digest, turn),
                Some(failure) => self.end_quiet(&key, flow.sibling, failure, turn),
            },
            _ => self.try_free(&key, turn),
        }
    }

    /// The peer is gone: its receivers get nothing more. A source that it may be reading is kept
    /// until its lease ends, unless the reader is known to be dead.
    pub(super) fn peer_down(
        &mut self,
        connection: ConnectionId,
        failure: &Failure,
        turn: &mut PrefillTurn<'_>,
    ) {
        for (key, sibling) in self.by_peer.of(connection) {
            if !self.receiver(&key, sibling).is_some_and(Receiver::reads) {
                self.end_receiver(&key, sibling, failure.clone(), turn);
            } else if *failure == Failure::PeerRestarted
                || planted!("silent-reader-loses-its-source")
            {
                self.receiver_done(&key, sibling, Some(failure.clone()), turn);
            }
        }
    }
}
