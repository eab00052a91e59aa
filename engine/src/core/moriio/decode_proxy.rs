//! The decode's part at a prefill: asks in its name, and hears the notices that it sends.

use super::{DialPurpose, MoriioPeers, MoriioTimer, READERS};
use crate::core::dialect::moriio::notify::{Release, RemoteBlocks, write_done};
use crate::core::dialect::moriio::params::MoriioRemote;
use crate::core::dialect::moriio::ports::expected_acks;
use crate::core::ids::{Attempt, ConnectionId, RankSet, TransferId, TransferKey};
use crate::core::layout::BlockList;
use crate::core::message::{AttemptTag, Message, Mode, MoriioLeg};
use crate::core::peers::{PeerEvent, PeerTurn};
use crate::core::time::Nanos;
use std::sync::Arc;

/// A prompt that a decode fetches.
#[derive(Debug)]
pub(super) struct DecodeProxy {
    connection: ConnectionId,
    tag: AttemptTag,
    tokens: u32,
    peer: Arc<MoriioLeg>,
    /// Push: blocks were announced to the core.
    announced: bool,
    /// Pull: until when the source is kept, and how long each lease of the core is.
    hold: Option<(Nanos, Nanos)>,
    renewals: u32,
    /// Ranks of the decode that released.
    acks: u16,
}

/// Notices that came before the leg of their transfer.
#[derive(Debug, Default)]
pub(super) struct EarlyNotices {
    blocks: Option<Vec<u32>>,
    releases: Vec<Release>,
    unusable: bool,
}

impl EarlyNotices {
    /// The transfer and its releases.
    pub(super) fn entries(&self) -> usize {
        1 + self.releases.len()
    }
}

/// Releases kept for a transfer without a leg; as many as a decode has TP ranks.
pub(in crate::core) const EARLY_RELEASES_MAX: usize = crate::core::ids::TP_MAX as usize;

impl MoriioPeers {
    /// A leg with a decode that speaks MoRIIO arrived: a receiver asks for the prompt.
    pub fn expect(
        &mut self,
        key: &TransferKey,
        (mode, tokens): (Mode, u32),
        peer: &Arc<MoriioLeg>,
        turn: &mut PeerTurn<'_>,
    ) {
        let connection = match mode {
            Mode::Push => self.connection_of(peer, turn),
            Mode::Pull => READERS,
        };
        let tag = AttemptTag { key: key.clone(), sibling: 0, attempt: Attempt(1) };
        let feed = DecodeProxy {
            connection,
            tag: tag.clone(),
            tokens,
            peer: peer.clone(),
            announced: false,
            hold: None,
            renewals: 0,
            acks: 0,
        };
        self.feeds.insert(key.id.clone(), feed);
        if mode == Mode::Pull {
            let message = Message::Pull { tag, tokens };
            turn.events.push(PeerEvent::Message { connection, message });
        }
        let Some(early) = self.early.remove(&key.id) else { return };
        self.timers.cancel(&MoriioTimer::Early(key.id.clone()));
        if let Some(blocks) = early.blocks {
            self.announce(&key.id, blocks, turn);
        }
        for release in &early.releases {
            self.on_release(release, turn);
        }
        if early.unusable {
            self.unusable(&key.id, turn);
        }
    }

    /// The entry of a transfer without a leg; None if there are too many.
    fn early(&mut self, now: Nanos, transfer: &TransferId) -> Option<&mut EarlyNotices> {
        let full = self.early.len() >= self.config.settings.early_max as usize;
        if full && !self.early.contains_key(transfer) {
            self.counters.violations = self.counters.violations.saturating_add(1);
            return None;
        }
        let until = now + self.config.settings.hold;
        self.timers.arm_if_idle(MoriioTimer::Early(transfer.clone()), until);
        Some(self.early.entry(transfer.clone()).or_default())
    }

    pub(super) fn on_blocks(&mut self, notice: &RemoteBlocks, turn: &mut PeerTurn<'_>) {
        let blocks: Vec<u32> = notice.blocks().iter().map(|block| block.0).collect();
        if self.feeds.contains_key(notice.transfer()) {
            self.announce(notice.transfer(), blocks, turn);
        } else if let Some(early) = self.early(turn.now, notice.transfer()) {
            early.blocks.get_or_insert(blocks);
        }
    }

    /// The first list counts: writes to it may be under way.
    fn announce(&mut self, transfer: &TransferId, blocks: Vec<u32>, turn: &mut PeerTurn<'_>) {
        let Some(feed) = self.feeds.get_mut(transfer) else { return };
        if feed.connection == READERS || std::mem::replace(&mut feed.announced, true) {
            self.counters.violations = self.counters.violations.saturating_add(1);
            return;
        }
        let (mut connection, tag, tokens) = (feed.connection, feed.tag.clone(), feed.tokens);
        if !self.connections.contains_key(&connection) {
            // It could not be reached when the leg came, and is there now.
            let peer = feed.peer.clone();
            connection = self.connection_of(&peer, turn);
            if let Some(feed) = self.feeds.get_mut(transfer) {
                feed.connection = connection;
            }
        }
        let blocks = vec![BlockList::new(blocks)];
        self.tell(connection, Message::Announce { tag, tokens, from: 0, blocks }, turn);
    }

    pub(super) fn on_release(&mut self, notice: &Release, turn: &mut PeerTurn<'_>) {
        let Some(feed) = self.feeds.get_mut(notice.transfer()) else {
            if let Some(early) = self.early(turn.now, notice.transfer())
                && early.releases.len() < EARLY_RELEASES_MAX
            {
                early.releases.push(notice.clone());
            }
            return;
        };
        feed.acks = feed.acks.saturating_add(1);
        let needed = match feed.connection {
            READERS => expected_acks(self.geometry.tp, notice.consumer_tp().get()).unwrap_or(1),
            // An early release: nothing was announced, and no rank waits for the others.
            _ => 1,
        };
        if feed.acks < needed {
            return;
        }
        let (connection, tag) = (feed.connection, feed.tag.clone());
        let ranks = RankSet::first(self.geometry.tp);
        turn.events
            .push(PeerEvent::Message { connection, message: Message::Release { tag, ranks } });
    }

    /// A decode announced blocks that are none: nothing can be written for it.
    pub(super) fn unusable(&mut self, transfer: &TransferId, turn: &mut PeerTurn<'_>) {
        let Some(feed) = self.feeds.get(transfer) else {
            if let Some(early) = self.early(turn.now, transfer) {
                early.unusable = true;
            }
            return;
        };
        self.counters.untold = self.counters.untold.saturating_add(1);
        let (connection, tag) = (feed.connection, feed.tag.clone());
        turn.events.push(PeerEvent::Message { connection, message: Message::Cancel { tag } });
    }

    /// What the prefill core says to a decode.
    pub(super) fn on_prefill_message(&mut self, message: Message, turn: &mut PeerTurn<'_>) {
        let Some(transfer) = message.tag().map(|tag| tag.key.id.clone()) else { return };
        let Some(feed) = self.feeds.get_mut(&transfer) else { return };
        match message {
            Message::Grant { lease, .. } => {
                feed.hold = Some((turn.now + self.config.settings.hold, lease));
                self.timers.arm(MoriioTimer::Renew(transfer), turn.now + lease.scale(1, 3));
            }
            Message::Delivered { .. } => {
                if let Some(peer) = feed.peer.peer.clone() {
                    self.say_written(&peer, &transfer, turn);
                }
                self.forget(&transfer);
            }
            Message::Ended { quiet: true, .. } => {
                self.counters.untold += u32::from(feed.announced);
                self.forget(&transfer);
            }
            _ => {}
        }
    }

    /// Tells each rank that this engine wrote to.
    fn say_written(&mut self, peer: &MoriioRemote, transfer: &TransferId, turn: &mut PeerTurn<'_>) {
        for rank in 0..self.geometry.tp {
            match self.endpoint(DialPurpose::WriteDone, peer, rank) {
                Ok(to) => {
                    self.notify(to, write_done(transfer), turn);
                }
                Err(_) => self.counters.untold = self.counters.untold.saturating_add(1),
            }
        }
    }

    /// Keeps a source for a decode that never says that it still reads.
    pub(super) fn renew(&mut self, transfer: &TransferId, turn: &mut PeerTurn<'_>) {
        let Some(feed) = self.feeds.get_mut(transfer) else { return };
        let Some((until, lease)) = feed.hold else { return };
        if turn.now + lease > until {
            return;
        }
        feed.renewals += 1;
        let (connection, tag, count) = (feed.connection, feed.tag.clone(), feed.renewals);
        self.timers.arm(MoriioTimer::Renew(transfer.clone()), turn.now + lease.scale(1, 3));
        turn.events.push(PeerEvent::Message { connection, message: Message::Renew { tag, count } });
    }
}
