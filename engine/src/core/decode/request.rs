//! The engine's requests: announced, loaded or failed, and never answered twice.

use super::check::KvCheck;
use super::{Decode, DecodeTurn};
use crate::core::block_ledger::BlockOwner;
use crate::core::engine_core::CoreEffect;
use crate::core::error::Failure;
use crate::core::ids::{
    Attempt, ConnectionId, EngineId, FlowId, Incarnation, RankSet, RequestId, TransferKey,
};
use crate::core::layout::{BlockList, GroupKind, senders};
use crate::core::message::{AttemptTag, DecodeAnswer, DecodeLeg, Message, Mode, MoriioLeg};
use crate::core::peer_manager::{GroupBlocks, PeerManager};
use crate::core::prompt_hash::PromptHash;
use crate::core::time::Nanos;
use crate::core::verify::{KvDigest, Verify};
use crate::fabric::{Endpoint, Refused};
use std::sync::Arc;

/// The prefill's promise to keep a prompt's blocks.
#[derive(Debug)]
pub(super) struct Lease {
    /// When the newest question about it was sent, and its number.
    pub(super) asked: (Nanos, u32),
    /// How long it is granted for at a time; zero before the grant.
    pub(super) length: Nanos,
    /// Until when what was read may be used; none before the grant, nor if it took so long that it
    /// has to be renewed first.
    pub(super) expiry: Option<Nanos>,
    /// The source blocks, once they are granted.
    pub(super) remote: Option<GroupBlocks>,
    /// Their digest, if it was asked for.
    pub(super) digest: Option<Box<KvDigest>>,
}

impl Lease {
    fn asked(now: Nanos) -> Lease {
        Lease { asked: (now, 0), length: Nanos::ZERO, expiry: None, remote: None, digest: None }
    }
}

/// One read of a prompt's KV.
#[derive(Debug, Default)]
pub(super) struct KvRead {
    /// The flow and the ranks that have not ended it.
    pub(super) flow: Option<(FlowId, RankSet)>,
    pub(super) failure: Option<Failure>,
}

/// Where a request stands between its arrival and its answer.
#[derive(Debug)]
pub(super) enum DecodePhase {
    /// Waits for the prefill, if it is not `due`, and for blocks.
    Arrived { due: bool },
    /// Push: the prefill may write into the blocks.
    Announced { ranks: RankSet },
    /// Push: the load has failed, or nobody wants it; the prefill may still be writing.
    Ending(Failure),
    /// The peer is gone and being fenced; until then it may still be writing.
    Fencing(Failure),
    /// Pull: has blocks; waits for the grant, reads or stops.
    Reading(KvRead),
    /// Everything has arrived, and is looked at.
    Checking(KvCheck),
}

/// A request with a decode leg, from its arrival until its answer.
#[derive(Debug)]
pub(super) struct DecodeRequest {
    pub(super) connection: ConnectionId,
    pub(super) tag: AttemptTag,
    pub(super) tokens: u32,
    pub(super) prompt_hash: PromptHash,
    pub(super) computed: u32,
    /// Destination blocks, without those that hold KV already.
    pub(super) blocks: GroupBlocks,
    pub(super) phase: DecodePhase,
    /// The prefill's incarnation that has the prompt.
    pub(super) incarnation: Option<Incarnation>,
    /// Its name, and where it listens.
    pub(super) prefill: (EngineId, Endpoint),
    /// It, if it should speak MoRIIO only.
    pub(super) moriio: Option<Arc<MoriioLeg>>,
    /// Pull: what was asked and granted.
    pub(super) lease: Option<Lease>,
    pub(super) owner: BlockOwner,
}

impl DecodeRequest {
    /// True if it waits for the word that the prefill has stopped writing.
    pub(super) fn is_ending(&self) -> bool {
        matches!(self.phase, DecodePhase::Ending(_))
    }

    /// Push: where the prefill is to write.
    fn announcement(&self, verify: Option<Verify>) -> Message {
        let (tag, tokens, from) = (self.tag.clone(), self.tokens, self.computed);
        let blocks = self.blocks.to_vec();
        Message::Announce { tag, tokens, from, blocks, verify }
    }
}

impl Decode {
    pub(super) fn arrived(
        &mut self,
        id: RequestId,
        leg: DecodeLeg,
        (tokens, prompt_hash): (u32, PromptHash),
        turn: &mut DecodeTurn<'_>,
    ) {
        let admitted = self.admit(&id, &leg).and_then(|()| self.connect(&id, &leg, turn));
        let connection = match admitted {
            Ok(connection) if !self.is_past(connection, leg.incarnation) => connection,
            Ok(_) => return self.turn_away(id, &leg, Failure::PeerRestarted, turn),
            Err(failure) => return self.turn_away(id, &leg, failure, turn),
        };
        self.peer_manager.hold(connection, turn);
        let owner = BlockOwner(self.fresh());
        let lease = (leg.mode == Mode::Pull).then(|| Lease::asked(turn.now));
        // A key may come again, so that its attempts have to differ from those before.
        let attempt = Attempt(u32::try_from(owner.0).expect("fewer than 2^32 requests and flows"));
        let tag = AttemptTag { key: leg.key, sibling: leg.sibling, attempt };
        self.by_peer.insert(connection, id.clone());
        self.by_transfer.insert((tag.key.clone(), tag.sibling), id.clone());
        self.requests.insert(
            id.clone(),
            DecodeRequest {
                connection,
                tag,
                tokens,
                prompt_hash,
                computed: 0,
                blocks: GroupBlocks::default(),
                phase: DecodePhase::Arrived { due: false },
                incarnation: leg.incarnation,
                prefill: (leg.prefill, leg.control),
                moriio: leg.moriio,
                lease,
                owner,
            },
        );
        self.ask(&id, turn);
    }

    /// Rejects a leg that has just arrived.
    fn turn_away(
        &mut self,
        request: RequestId,
        leg: &DecodeLeg,
        failure: Failure,
        turn: &mut DecodeTurn<'_>,
    ) {
        note_failed_leg(&mut self.peer_manager, turn.now, (&leg.key, leg.sibling), &failure);
        turn.push(DecodeAnswer::Rejected { request, failure });
    }

    /// Returns the connection to a leg's prefill. A peer that a leg names in MoRIIO's form may be
    /// native: its answer to MoRIIO's handshake shows it, unless the leg allows one dialect only.
    fn connect(
        &mut self,
        id: &RequestId,
        leg: &DecodeLeg,
        turn: &mut DecodeTurn<'_>,
    ) -> Result<ConnectionId, Failure> {
        let only = self.config.moriio.as_ref().is_some_and(|moriio| moriio.settings.only);
        let named = match &leg.moriio {
            None => None,
            Some(moriio) => match &moriio.peer {
                Some(peer) if !only && !moriio.only => Some(peer.engine_at(&leg.control)),
                _ => return self.peer_manager.reach_moriio((id, &leg.key), moriio, turn),
            },
        };
        let name = named.as_ref().unwrap_or(&leg.prefill);
        Ok(self.peer_manager.reach(name, &leg.control, leg.incarnation, turn))
    }

    /// Asks the prefill for the prompt of a request.
    fn ask(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let Some(request) = self.requests.get(id) else { return };
        let DecodeRequest { connection, tokens, prompt_hash, .. } = *request;
        let (tag, verify) = (request.tag.clone(), self.config.verify.asked());
        let message = match request.lease {
            None => Message::Ask { tag, tokens, prompt_hash },
            Some(_) => Message::Pull { tag, tokens, prompt_hash, verify },
        };
        // A connection that is down says so itself, and why.
        let full = !self.flush_pending(connection, turn)
            || self.peer_manager.send(connection, message, turn) == Err(Failure::Overload);
        if full {
            self.reject(id, Failure::Overload, turn);
        }
    }

    /// The peer that a leg in MoRIIO's form names is not native: the same is said in MoRIIO's words.
    fn turn_to_moriio(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        if let Err(failure) = self.change_dialect(id, turn) {
            return self.reject(id, failure, turn);
        }
        self.ask(id, turn);
        let Some(request) = self.requests.get(id) else { return };
        if let DecodePhase::Announced { .. } = request.phase {
            let message = request.announcement(self.config.verify.asked());
            // Messages to such a peer always find room.
            let _ = self.peer_manager.send(request.connection, message, turn);
        }
    }

    /// From here on MoRIIO is spoken about a request with its peer, to which nothing was said.
    fn change_dialect(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) -> Result<(), Failure> {
        let Some(request) = self.requests.get_mut(id) else { return Ok(()) };
        let (before, key) = (request.connection, request.tag.key.clone());
        let Some(peer) = request.moriio.take() else { return Ok(()) };
        let connection = self.peer_manager.reach_moriio((id, &key), &peer, turn)?;
        request.connection = connection;
        request.lease = request.lease.is_some().then(|| Lease::asked(turn.now));
        self.by_peer.remove(before, id);
        self.by_peer.insert(connection, id.clone());
        self.peer_manager.unhold(before, turn);
        self.peer_manager.hold(connection, turn);
        turn.push(CoreEffect::SpeaksMoriio { request: id.clone() });
        Ok(())
    }

    /// True if the peer is known to have begun a new incarnation after this one.
    fn is_past(&self, connection: ConnectionId, incarnation: Option<Incarnation>) -> bool {
        incarnation
            .is_some_and(|incarnation| self.peer_manager.peers.is_past(connection, incarnation))
            && !planted!("past-incarnation-is-asked")
    }

    /// The peer said in which incarnation it is, and what waits for another one would wait in vain,
    /// later or not: a clock that went back gives a new incarnation a lower number.
    pub(super) fn peer_up(&mut self, connection: ConnectionId, turn: &mut DecodeTurn<'_>) {
        if connection.is_moriio() {
            // Whoever speaks MoRIIO has no incarnations.
            return;
        }
        let Some(incarnation) = self.peer_manager.info(connection).map(|info| info.incarnation)
        else {
            return;
        };
        for id in self.by_peer.of(connection) {
            let asked = self.requests.get(&id).and_then(|request| request.incarnation);
            if let Some(asked) = asked.filter(|asked| *asked != incarnation)
                && !planted!("past-incarnation-is-asked")
            {
                self.peer_manager.peers.is_over(connection, asked);
                self.fail(&id, Failure::PeerRestarted, turn);
            }
        }
    }

    /// The prefill is ready for the request's blocks.
    pub(super) fn due(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let Some(request) = self.requests.get_mut(id) else { return };
        if let DecodePhase::Arrived { due } = &mut request.phase
            && !std::mem::replace(due, true)
        {
            turn.push(DecodeAnswer::Allocate { request: id.clone() });
        }
    }

    fn admit(&self, id: &RequestId, leg: &DecodeLeg) -> Result<(), Failure> {
        self.peer_manager.admit(leg.mode, leg.moriio.as_ref(), self.requests.len())?;
        let transfer = (leg.key.clone(), leg.sibling);
        let duplicate = self.tombstones.contains(&transfer)
            || self.requests.contains_key(id)
            || self.by_transfer.contains_key(&transfer);
        if duplicate { Err(Failure::DuplicateKey) } else { Ok(()) }
    }

    pub(super) fn allocated(
        &mut self,
        id: RequestId,
        computed: u32,
        blocks: Vec<BlockList>,
        turn: &mut DecodeTurn<'_>,
    ) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        assert!(matches!(request.phase, DecodePhase::Arrived { .. }), "{id} was allocated twice");
        if computed >= request.tokens {
            if planted!("cached-prompt-is-not-released") {
                return self.answer(&id, Ok(()), turn);
            }
            self.release_source(&id, turn);
            return self.end(&id, Ok(()), turn);
        }
        let blocks = self.destinations(computed, blocks);
        let Some(request) = self.requests.get_mut(&id) else { return };
        for (group, list) in blocks.iter().enumerate() {
            if let Err(conflict) = self.ledger.claim_destination(request.owner, group, list) {
                let why = Refused::Invalid(conflict.to_string().into());
                self.release_source(&id, turn);
                return self.answer(&id, Err(Failure::Refused(why)), turn);
            }
        }
        request.computed = computed;
        request.blocks = Arc::new(blocks);
        if request.lease.is_some() {
            request.phase = DecodePhase::Reading(KvRead::default());
            return self.start_reading(&id, turn);
        }
        request.phase = DecodePhase::Announced { ranks: RankSet::EMPTY };
        let (connection, message) =
            (request.connection, request.announcement(self.config.verify.asked()));
        if let Err(failure) = self.peer_manager.send(connection, message, turn) {
            // The prefill waits for the blocks, and would for long.
            self.release_source(&id, turn);
            self.answer(&id, Err(failure), turn);
        }
    }

    /// Drops the blocks that hold KV already; a prefill must not write into them.
    fn destinations(&self, computed: u32, mut blocks: Vec<BlockList>) -> Vec<BlockList> {
        for (list, group) in blocks.iter_mut().zip(&self.config.geometry.groups) {
            if group.kind == GroupKind::State || planted!("hits-are-written-again") {
                continue;
            }
            let hits = (computed / group.block_tokens).saturating_sub(list.first);
            let hits = (hits as usize).min(list.ids.len());
            list.ids.drain(..hits);
            list.first += hits as u32;
            if planted!("one-hit-too-many") && hits > 0 && !list.ids.is_empty() {
                list.ids.remove(0);
                list.first += 1;
            }
        }
        blocks
    }

    pub(super) fn finished(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let Some(request) = self.requests.get(id) else { return };
        if matches!(request.phase, DecodePhase::Arrived { .. }) {
            self.release_source(id, turn);
            self.remove(id, turn);
        } else {
            self.fail(id, Failure::Cancelled, turn);
        }
    }

    /// Ends a request without success, as soon as no byte can land in its blocks.
    pub(super) fn fail(&mut self, id: &RequestId, failure: Failure, turn: &mut DecodeTurn<'_>) {
        let Some(request) = self.requests.get_mut(id) else { return };
        match &mut request.phase {
            DecodePhase::Arrived { .. } => {
                if !planted!("rejected-without-release") {
                    self.release_source(id, turn);
                }
                self.reject(id, failure, turn);
            }
            DecodePhase::Announced { .. } => {
                request.phase = DecodePhase::Ending(failure);
                let (connection, tag, owner) =
                    (request.connection, request.tag.clone(), request.owner);
                self.ledger.quarantine(owner);
                // Told by `Ended`, or by the peer's `Down` if the message cannot be sent.
                let _ = self.peer_manager.send(connection, Message::Cancel { tag }, turn);
                if planted!("cancel-waits-for-nobody") {
                    self.answer(id, Err(Failure::Cancelled), turn);
                }
            }
            DecodePhase::Reading(_) => self.stop_reading(id, failure, turn),
            DecodePhase::Checking(_) => self.stop_check(id, failure, turn),
            DecodePhase::Ending(_) | DecodePhase::Fencing(_) => {}
        }
    }

    pub(super) fn delivered(
        &mut self,
        id: RequestId,
        ranks: RankSet,
        (tokens, digest): (u32, Option<Box<KvDigest>>),
        turn: &mut DecodeTurn<'_>,
    ) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Some(info) = self.peer_manager.info(request.connection) else { return };
        let needed = senders(&info.geometry, &self.config.geometry);
        match &mut request.phase {
            DecodePhase::Announced { ranks: have } => {
                *have = have.union(ranks);
                if !have.covers(needed) {
                    return;
                }
                if tokens == request.tokens || planted!("fewer-tokens-will-do") {
                    return self.arrived_whole(&id, digest, turn);
                }
                let wanted = request.tokens;
                let text = format!("{tokens} tokens delivered, {wanted} wanted");
                self.answer(&id, Err(Failure::mismatch(text)), turn);
            }
            DecodePhase::Ending(failure) if ranks.covers(needed) => {
                let failure = failure.clone();
                self.answer(&id, Err(failure), turn);
            }
            _ => {}
        }
    }

    pub(super) fn ended(
        &mut self,
        id: &RequestId,
        failure: Failure,
        quiet: bool,
        turn: &mut DecodeTurn<'_>,
    ) {
        let Some(request) = self.requests.get_mut(id) else { return };
        let owner = request.owner;
        match &mut request.phase {
            DecodePhase::Announced { .. } if quiet || planted!("blocks-back-without-quiet") => {
                self.answer(id, Err(failure), turn);
            }
            DecodePhase::Announced { .. } => {
                request.phase = DecodePhase::Ending(failure);
                self.ledger.quarantine(owner);
            }
            DecodePhase::Ending(first) if quiet => {
                let first = first.clone();
                self.answer(id, Err(first), turn);
            }
            DecodePhase::Reading(_) => self.stop_reading(id, failure, turn),
            DecodePhase::Arrived { .. } if quiet => self.reject(id, failure, turn),
            DecodePhase::Arrived { .. } => self.fail(id, failure, turn),
            // What the prefill says after it has delivered is of no meaning.
            DecodePhase::Ending(_) | DecodePhase::Fencing(_) | DecodePhase::Checking(_) => {}
        }
    }

    pub(super) fn peer_down(
        &mut self,
        connection: ConnectionId,
        failure: &Failure,
        turn: &mut DecodeTurn<'_>,
    ) {
        let is_foreign = !connection.is_moriio() && failure.is_of_moriio();
        for id in self.by_peer.of(connection) {
            let Some(request) = self.requests.get_mut(&id) else { continue };
            let owner = request.owner;
            match &mut request.phase {
                _ if is_foreign && request.moriio.is_some() => self.turn_to_moriio(&id, turn),
                DecodePhase::Arrived { .. } => {
                    if connection.is_moriio() {
                        self.release_source(&id, turn);
                    } else {
                        // The prompt may be there, or a grant under way.
                        self.add_pending_release(turn.now, &id);
                    }
                    self.reject(&id, failure.clone(), turn);
                }
                DecodePhase::Announced { .. } => {
                    request.phase = DecodePhase::Fencing(failure.clone());
                    self.ledger.quarantine(owner);
                    if planted!("silent-writer-is-not-fenced") {
                        self.answer(&id, Err(failure.clone()), turn);
                    }
                    // The prefill may have heard neither of the blocks nor that they are gone.
                    self.add_pending_release(turn.now, &id);
                }
                DecodePhase::Ending(first) => {
                    request.phase = DecodePhase::Fencing(first.clone());
                    self.add_pending_release(turn.now, &id);
                }
                DecodePhase::Reading(_) => self.stop_reading(&id, failure.clone(), turn),
                // What is there needs no peer.
                DecodePhase::Fencing(_) | DecodePhase::Checking(_) => {}
            }
        }
    }

    /// Nothing of the peer lands here any more.
    pub(super) fn peer_fenced(&mut self, connection: ConnectionId, turn: &mut DecodeTurn<'_>) {
        for id in self.by_peer.of(connection) {
            if let Some(DecodeRequest { phase: DecodePhase::Fencing(failure), .. }) =
                self.requests.get(&id)
            {
                let failure = failure.clone();
                self.answer(&id, Err(failure), turn);
            }
        }
    }

    /// Tells the prefill that this engine needs nothing more of it.
    pub(super) fn release_source(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let is_up = |request: &DecodeRequest| self.peer_manager.info(request.connection).is_some();
        if !self.requests.get(id).is_some_and(is_up) {
            // What it speaks is not known, and who is native understands MoRIIO, too; one that does
            // not frees the prompt when its time is over.
            let _ = self.change_dialect(id, turn);
        }
        let Some(request) = self.requests.get(id) else { return };
        let ranks = RankSet::first(self.config.geometry.tp);
        let (connection, tag) = (request.connection, request.tag.clone());
        // A connection that is not up, or with an incarnation before that of the prompt, may end
        // unheard.
        let heard = |incarnation| {
            self.peer_manager.info(connection).is_some_and(|info| info.incarnation >= incarnation)
        };
        let told = request.incarnation.is_none_or(heard)
            && self.peer_manager.send(connection, Message::Release { tag, ranks }, turn).is_ok();
        if !told && !planted!("unheard-release-is-forgotten") {
            self.add_pending_release(turn.now, id);
        }
    }

    pub(super) fn reject(&mut self, id: &RequestId, failure: Failure, turn: &mut DecodeTurn<'_>) {
        self.note_peer(turn.now, id, Some(&failure));
        self.remove(id, turn);
        turn.push(DecodeAnswer::Rejected { request: id.clone(), failure });
    }

    /// The one answer of an allocated request.
    pub(super) fn answer(
        &mut self,
        id: &RequestId,
        result: Result<(), Failure>,
        turn: &mut DecodeTurn<'_>,
    ) {
        self.note_peer(turn.now, id, result.as_ref().err());
        self.end(id, result, turn);
    }

    fn end(&mut self, id: &RequestId, result: Result<(), Failure>, turn: &mut DecodeTurn<'_>) {
        self.remove(id, turn);
        let request = id.clone();
        turn.push(match result {
            Ok(()) => DecodeAnswer::Loaded { request },
            Err(failure) => DecodeAnswer::LoadFailed { request, failure },
        });
    }

    /// Remembers for the router why a request failed, and whether KV gets through between its prefill
    /// and this engine.
    fn note_peer(&mut self, now: Nanos, id: &RequestId, failure: Option<&Failure>) {
        let Some(request) = self.requests.get(id) else { return };
        if let Some(failure) = failure {
            let leg = (&request.tag.key, request.tag.sibling);
            note_failed_leg(&mut self.peer_manager, now, leg, failure);
        }
        let is_told = failure.is_some() || !planted!("trouble-never-ends");
        if is_told && failure.is_none_or(Failure::is_of_pair) {
            self.peer_manager.note_peer_result(
                now,
                (&request.prefill.0, request.incarnation),
                failure,
            );
        }
    }

    fn remove(&mut self, id: &RequestId, turn: &mut DecodeTurn<'_>) {
        let Some(request) = self.requests.remove(id) else { return };
        self.by_peer.remove(request.connection, id);
        let transfer = (request.tag.key, request.tag.sibling);
        self.by_transfer.remove(&transfer);
        if !planted!("ledger-keeps-its-entries") {
            self.ledger.release(request.owner);
        }
        self.cancel_timers(id);
        self.peer_manager.forget(&transfer.0);
        if !planted!("decode-forgets-ended-names") {
            self.tombstones.insert(transfer);
        }
        self.peer_manager.unhold(request.connection, turn);
    }
}

/// Has the router told why a leg failed, unless the leg was cancelled, or its key had been used: an
/// engine may send a leg again that it has answered, to let its prefill go.
fn note_failed_leg(
    peer_manager: &mut PeerManager,
    now: Nanos,
    leg: (&TransferKey, u32),
    failure: &Failure,
) {
    if !matches!(failure, Failure::Cancelled | Failure::DuplicateKey) {
        peer_manager.note_failed_leg(now, leg, failure);
    }
}
