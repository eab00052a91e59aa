//! The prefill's part at a decode: answers in its name, and hears the notices that it sends.

use super::handshake::MoriioConnection;
use super::{DialPurpose, MoriioPeers, MoriioTimer};
use crate::core::dialect::moriio::notify::{ReceivedDecodeNotice, Release, RemoteBlocks};
use crate::core::dialect::moriio::params::MoriioRemote;
use crate::core::dialect::moriio::ports::expected_writers;
use crate::core::error::Failure;
use crate::core::ids::{BlockId, ConnectionId, RankSet, RequestId, TransferId};
use crate::core::layout::{BlockList, Geometry, GroupKind, senders};
use crate::core::message::{AttemptTag, Message, MoriioLeg};
use crate::core::peers::{PeerEvent, PeerTurn};
use crate::fabric::{LinkId, Refused};
use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::sync::Arc;

/// A prompt that is fetched from a prefill.
#[derive(Debug)]
pub(super) struct PrefillProxy {
    pub(super) connection: ConnectionId,
    request: RequestId,
    pub(super) peer: Arc<MoriioLeg>,
    /// What the core asked for, and the tokens of the prompt.
    asked: Option<(AttemptTag, u32)>,
    /// Push: what each rank here has heard of its writers.
    written: Vec<RankWriters>,
}

/// What a rank has heard of those who write to it.
#[derive(Clone, Debug, Default)]
struct RankWriters {
    /// By which links. Each writer has its own, so that one that says it twice counts once.
    links: BTreeSet<LinkId>,
    /// One of them will not write.
    has_failed: bool,
}

impl MoriioPeers {
    /// The connection of the prefill of a leg; what is said of the transfer goes there.
    pub fn reach(
        &mut self,
        request: &RequestId,
        transfer: &TransferId,
        peer: &Arc<MoriioLeg>,
        turn: &mut PeerTurn<'_>,
    ) -> ConnectionId {
        let connection = self.connection_of(peer, turn);
        let fetch = PrefillProxy {
            connection,
            request: request.clone(),
            peer: peer.clone(),
            asked: None,
            written: vec![RankWriters::default(); usize::from(self.geometry.tp)],
        };
        self.fetches.insert(transfer.clone(), fetch);
        connection
    }

    /// What the decode core says to a prefill.
    pub(super) fn on_decode_message(
        &mut self,
        connection: ConnectionId,
        message: Message,
        turn: &mut PeerTurn<'_>,
    ) {
        let Some(transfer) = message.tag().map(|tag| tag.key.id.clone()) else { return };
        let Some(fetch) = self.fetches.get_mut(&transfer) else { return };
        match message {
            Message::Ask { tag, tokens, .. } => {
                fetch.asked = Some((tag.clone(), tokens));
                self.tell(connection, Message::Begun { tag }, turn);
            }
            Message::Pull { tag, tokens, .. } => {
                fetch.asked = Some((tag.clone(), tokens));
                let blocks = placed(&self.geometry, tokens, &fetch.peer.blocks);
                let lease = self.config.settings.hold;
                let grant = Message::Grant { tag, tokens, blocks, lease, digest: None };
                self.tell(connection, grant, turn);
            }
            Message::Announce { tag, tokens, from, blocks, .. } => {
                fetch.asked = Some((tag.clone(), tokens));
                if let Err(failure) = self.say_blocks(&transfer, from, &blocks, turn) {
                    let message = Message::Ended { tag, failure, quiet: true };
                    turn.events.push(PeerEvent::Message { connection, message });
                    self.forget(&transfer);
                }
            }
            Message::Release { .. } => self.say_release(&transfer, turn),
            // A write cannot be called off: the word that it is done is waited for, or its time.
            _ => {}
        }
    }

    fn say_blocks(
        &mut self,
        transfer: &TransferId,
        from: u32,
        blocks: &[BlockList],
        turn: &mut PeerTurn<'_>,
    ) -> Result<(), Failure> {
        let unsupported = |text: &str| Err(Failure::Refused(Refused::Unsupported(text.into())));
        if from != 0 {
            return unsupported("MoRIIO cannot name prefix hits");
        }
        let Some(fetch) = self.fetches.get(transfer) else { return Ok(()) };
        let Some(peer) = fetch.peer.peer.clone() else { return Err(Failure::Unreachable) };
        let knows_groups =
            self.connections.get(&fetch.connection).is_some_and(MoriioConnection::is_of_0_33);
        if blocks.len() != 1 && !knows_groups {
            return unsupported("vLLM 0.32.0 writes to one KV group only, not to several");
        }
        if blocks.iter().any(|list| list.first != 0) {
            return unsupported("MoRIIO cannot name blocks that do not begin with the prompt");
        }
        let ids = |list: &BlockList| list.ids.iter().map(|id| BlockId(*id)).collect();
        let request = Some(fetch.request.clone());
        let blocks = blocks.iter().map(ids).collect();
        let Ok(notice) = RemoteBlocks::new(request, transfer.clone(), blocks, 0) else {
            return unsupported("MoRIIO cannot announce that there is no block");
        };
        let frame = notice.encode();
        self.say_to_ranks(DialPurpose::RemoteBlocks, &peer, &frame, turn)?;
        let until = turn.now + self.config.settings.write;
        self.timers.arm(MoriioTimer::Written(transfer.clone()), until);
        Ok(())
    }

    /// Tells the prefill that its blocks are needed no more, or that there are none here for it.
    fn say_release(&mut self, transfer: &TransferId, turn: &mut PeerTurn<'_>) {
        let Some(fetch) = self.fetches.get(transfer) else { return };
        let Some(peer) = fetch.peer.peer.clone() else { return };
        let what = if fetch.peer.blocks.is_empty() {
            DialPurpose::EarlyRelease
        } else {
            DialPurpose::Release
        };
        // One word for all ranks here to each rank there: it is to wait for no other.
        match Release::new(transfer.clone(), NonZeroU16::MIN, peer.shape.tp_size) {
            Ok(release) => {
                let frame = release.encode();
                // An address of no use was met at the handshake.
                let _ = self.say_to_ranks(what, &peer, &frame, turn);
            }
            Err(_) => self.notices.dropped = self.notices.dropped.saturating_add(1),
        }
        self.forget(transfer);
    }

    fn say_to_ranks(
        &mut self,
        what: DialPurpose,
        peer: &MoriioRemote,
        frame: &[u8],
        turn: &mut PeerTurn<'_>,
    ) -> Result<(), Failure> {
        for rank in 0..self.tp_of(peer) {
            let to = self.endpoint(what, peer, rank)?;
            self.notify(to, frame.to_vec(), turn);
        }
        Ok(())
    }

    /// A rank here has heard by a link that a writer is done with it, or will not write.
    pub(super) fn on_writer(
        &mut self,
        notice: &ReceivedDecodeNotice,
        (rank, link): (u16, LinkId),
        turn: &mut PeerTurn<'_>,
    ) {
        let (transfer, count) = match notice {
            ReceivedDecodeNotice::Written { transfer, writers } => (transfer, Some(*writers)),
            ReceivedDecodeNotice::Failed(transfer) => (transfer, None),
        };
        let own_tp = self.geometry.tp;
        let Some(fetch) = self.fetches.get_mut(transfer) else { return };
        let (connection, Some((tag, tokens))) = (fetch.connection, fetch.asked.clone()) else {
            return;
        };
        let peer_tp = fetch.peer.peer.as_ref().map_or(own_tp, |peer| peer.shape.tp_size_or(own_tp));
        // What they say has to be what follows from the sizes; one of ours speaks for all its ranks.
        let is_one = self.connections.get(&connection).is_some_and(MoriioConnection::is_ours);
        let expected = match is_one {
            true => 1,
            false => expected_writers(peer_tp, own_tp, self.geometry.kv_heads),
        };
        let can_be = count.is_none_or(|count| count.get() == expected);
        let mut link = link;
        if planted!("a-duplicate-is-another-writer") {
            link.0 = fetch.written.iter().map(|rank| rank.links.len() as u32).sum();
        }
        let is_over = |rank: &RankWriters| rank.links.len() >= usize::from(expected);
        let heard = fetch.written.get_mut(usize::from(rank));
        let heard = heard.filter(|heard| can_be && !is_over(heard) && !heard.links.contains(&link));
        let Some(heard) = heard else {
            self.counters.violations = self.counters.violations.saturating_add(1);
            return;
        };
        heard.links.insert(link);
        heard.has_failed |= count.is_none();
        let are_over = match planted!("a-written-rank-stands-for-all") {
            true => fetch.written.iter().any(is_over),
            false => fetch.written.iter().all(is_over),
        };
        if !are_over {
            return;
        }
        let has_failed = fetch.written.iter().any(|rank| rank.has_failed);
        self.timers.cancel(&MoriioTimer::Written(transfer.clone()));
        let message = match self.info(connection) {
            _ if has_failed => Message::Ended { tag, failure: Failure::PrefillEnded, quiet: true },
            Some(info) => {
                let ranks = senders(&info.geometry, &self.geometry);
                Message::Delivered { tag, ranks, tokens, digest: None }
            }
            None => Message::Delivered { tag, ranks: RankSet::EMPTY, tokens, digest: None },
        };
        turn.events.push(PeerEvent::Message { connection, message });
    }

    /// Nothing was heard of a write. It may still be under way, so that its blocks can be had back
    /// only by keeping the prefill out.
    pub(super) fn overdue(&mut self, transfer: &TransferId, turn: &mut PeerTurn<'_>) {
        if let Some(connection) = self.fetches.get(transfer).map(|fetch| fetch.connection) {
            self.fail(connection, Failure::Stalled, turn);
        }
    }
}

/// The lists of a prefill's answer, with where in the prompt they begin: those of sliding windows end
/// with it, and have only as many blocks as the window needs. The first of them may be vLLM's null block,
/// 0, in place of one that the prefill has freed.
fn placed(geometry: &Geometry, tokens: u32, lists: &[BlockList]) -> Vec<BlockList> {
    let place = |(index, list): (usize, &BlockList)| {
        let group = geometry.groups.get(index);
        match group.map(|group| (group.kind, group.block_tokens)) {
            Some((GroupKind::Window { .. }, block_tokens)) if block_tokens > 0 => {
                let ids: Vec<u32> = list.ids.iter().copied().skip_while(|id| *id == 0).collect();
                let first = tokens.div_ceil(block_tokens).saturating_sub(ids.len() as u32);
                BlockList { first, ids }
            }
            _ => list.clone(),
        }
    };
    lists.iter().enumerate().map(place).collect()
}
