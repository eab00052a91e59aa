//! The prefill's part at a decode: answers in its name, and hears the notices that it sends.

use super::{DialPurpose, MoriioPeers, MoriioTimer};
use crate::core::dialect::moriio::notify::{Release, RemoteBlocks};
use crate::core::dialect::moriio::params::MoriioRemote;
use crate::core::error::Failure;
use crate::core::ids::{BlockId, ConnectionId, RankSet, RequestId, TransferId};
use crate::core::layout::{BlockList, senders};
use crate::core::message::{AttemptTag, Message, MoriioLeg};
use crate::core::peers::{PeerEvent, PeerTurn};
use crate::fabric::Refused;
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
        let fetch =
            PrefillProxy { connection, request: request.clone(), peer: peer.clone(), asked: None };
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
            Message::Ask { tag, tokens } => {
                fetch.asked = Some((tag.clone(), tokens));
                self.tell(connection, Message::Begun { tag }, turn);
            }
            Message::Pull { tag, tokens } => {
                fetch.asked = Some((tag.clone(), tokens));
                let blocks = fetch.peer.blocks.clone();
                let lease = self.config.settings.hold;
                self.tell(connection, Message::Grant { tag, tokens, blocks, lease }, turn);
            }
            Message::Announce { tag, tokens, from, blocks } => {
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
        let ([list], 0) = (blocks, from) else {
            return unsupported("MoRIIO cannot name prefix hits, nor more than one KV group");
        };
        let Some(fetch) = self.fetches.get(transfer) else { return Ok(()) };
        let Some(peer) = fetch.peer.peer.clone() else { return Err(Failure::Unreachable) };
        let ids = list.ids.iter().map(|id| BlockId(*id)).collect();
        let request = Some(fetch.request.clone());
        let Ok(notice) = RemoteBlocks::new(request, transfer.clone(), ids, 0) else {
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
        let tp = NonZeroU16::new(self.geometry.tp).unwrap_or(NonZeroU16::MIN);
        let what = if fetch.peer.blocks.is_empty() {
            DialPurpose::EarlyRelease
        } else {
            DialPurpose::Release
        };
        match Release::new(transfer.clone(), tp, peer.shape.tp_size) {
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
        let ranks = self.config.settings.ports.fan_out(self.geometry.tp, peer.shape);
        for rank in 0..ranks {
            let to = self.endpoint(what, peer, rank)?;
            self.notify(to, frame.to_vec(), turn);
        }
        Ok(())
    }

    /// The prefill has written everything.
    pub(super) fn on_written(&mut self, transfer: &TransferId, turn: &mut PeerTurn<'_>) {
        let Some(fetch) = self.fetches.get(transfer) else { return };
        let (connection, Some((tag, tokens))) = (fetch.connection, fetch.asked.clone()) else {
            return;
        };
        self.timers.cancel(&MoriioTimer::Written(transfer.clone()));
        let ranks = match self.info(connection) {
            Some(info) => senders(&info.geometry, &self.geometry),
            None => RankSet::EMPTY,
        };
        let message = Message::Delivered { tag, ranks, tokens };
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
