//! The decode's part at a prefill: asks in its name, and hears the notices that it sends.

use super::{DialPurpose, MoriioPeers, MoriioTimer, NOBODY, READERS};
use crate::core::dialect::moriio::notify::{Release, RemoteBlocks, write_done, write_failed};
use crate::core::dialect::moriio::params::MoriioRemote;
use crate::core::dialect::moriio::ports::expected_acks;
use crate::core::ids::{Attempt, BlockId, ConnectionId, RankSet, TransferId, TransferKey};
use crate::core::layout::BlockList;
use crate::core::message::{AttemptTag, Message, Mode, MoriioLeg};
use crate::core::peers::{PeerEvent, PeerTurn};
use crate::core::prompt_hash::PromptHash;
use crate::core::time::Nanos;
use crate::fabric::LinkId;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A prompt that a decode fetches.
#[derive(Debug)]
pub(super) struct DecodeProxy {
    connection: ConnectionId,
    tag: AttemptTag,
    tokens: u32,
    peer: Arc<MoriioLeg>,
    /// Push: ranks here that were told of blocks, of which the core was told once.
    announced: RankSet,
    /// Pull: until when the source is kept, and how long each lease of the core is.
    hold: Option<(Nanos, Nanos)>,
    renewals: u32,
    /// Pull: who released which rank here. Each rank of a decode has links of its own, so that one
    /// that says it twice counts once.
    released: BTreeSet<(u16, LinkId)>,
}

/// A release, with the rank here that heard it and by which link.
#[derive(Clone, Debug)]
pub(super) struct HeardRelease {
    pub(super) rank: u16,
    pub(super) link: LinkId,
    pub(super) notice: Release,
}

/// Notices that came before the leg of their transfer.
#[derive(Debug, Default)]
pub(super) struct EarlyNotices {
    /// With the rank that heard it; the same is told to each.
    blocks: Option<(u16, RemoteBlocks)>,
    releases: Vec<HeardRelease>,
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
    /// A leg arrived whose decode may speak MoRIIO. A receiver asks for the prompt in the decode's
    /// name and with this engine's hash, because MoRIIO has none. A native decode asks by itself.
    pub fn expect(
        &mut self,
        (key, mode): (&TransferKey, Mode),
        (tokens, prompt_hash): (u32, PromptHash),
        peer: &Arc<MoriioLeg>,
        turn: &mut PeerTurn<'_>,
    ) {
        if self.config.closed.is_some() || self.fits().is_err() {
            return;
        }
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
            announced: RankSet::EMPTY,
            hold: None,
            renewals: 0,
            released: BTreeSet::new(),
        };
        self.feeds.insert(key.id.clone(), feed);
        if mode == Mode::Pull {
            let message = Message::Pull { tag, tokens, prompt_hash, verify: None };
            turn.events.push(PeerEvent::Message { connection, message });
        }
        let Some(early) = self.early.remove(&key.id) else { return };
        self.timers.cancel(&MoriioTimer::Early(key.id.clone()));
        if let Some((rank, notice)) = &early.blocks {
            self.announce(*rank, notice, turn);
        }
        for release in early.releases {
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

    /// A rank was told where to write.
    pub(super) fn on_blocks(&mut self, rank: u16, notice: RemoteBlocks, turn: &mut PeerTurn<'_>) {
        if self.feeds.contains_key(notice.transfer()) {
            self.announce(rank, &notice, turn);
        } else if let Some(early) = self.early(turn.now, notice.transfer()) {
            early.blocks.get_or_insert((rank, notice));
        }
    }

    /// The first list counts: writes to it may be under way.
    fn announce(&mut self, rank: u16, notice: &RemoteBlocks, turn: &mut PeerTurn<'_>) {
        let transfer = notice.transfer();
        let Some(feed) = self.feeds.get_mut(transfer) else { return };
        let is_first = feed.announced.is_empty();
        if feed.connection == READERS || !feed.announced.insert(rank) {
            self.counters.violations = self.counters.violations.saturating_add(1);
            return;
        }
        if !is_first {
            return;
        }
        let groups = self.geometry.groups.len();
        let named = notice.blocks().len();
        let Some(peer) = feed.peer.peer.as_ref().filter(|_| named == groups) else {
            return self.unusable(transfer, turn);
        };
        if notice.decode_rank() != peer.dp_rank {
            // The decode's own router chose the DP rank.
            if notice.decode_rank() >= peer.dp_size {
                return self.unusable(transfer, turn);
            }
            let peer = MoriioRemote { dp_rank: notice.decode_rank(), ..peer.clone() };
            feed.peer = Arc::new(MoriioLeg { peer: Some(peer), ..MoriioLeg::default() });
            feed.connection = NOBODY;
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
        let ids = |list: &Vec<BlockId>| BlockList::new(list.iter().map(|id| id.0).collect());
        let blocks = notice.blocks().iter().map(ids).collect();
        let announce = Message::Announce { tag, tokens, from: 0, blocks, verify: None };
        self.tell(connection, announce, turn);
    }

    pub(super) fn on_release(&mut self, heard: HeardRelease, turn: &mut PeerTurn<'_>) {
        let transfer = heard.notice.transfer();
        let Some(feed) = self.feeds.get_mut(transfer) else {
            if let Some(early) = self.early(turn.now, transfer)
                && early.releases.len() < EARLY_RELEASES_MAX
            {
                early.releases.push(heard);
            }
            return;
        };
        // An early release of a push: nothing was announced, and no rank waits for the others.
        if feed.connection == READERS {
            if feed.released.len() >= EARLY_RELEASES_MAX {
                self.counters.violations = self.counters.violations.saturating_add(1);
                return;
            }
            let count = feed.released.len() as u32;
            let link =
                if planted!("a-duplicate-is-another-reader") { LinkId(count) } else { heard.link };
            feed.released.insert((heard.rank, link));
            if !is_released(self.geometry.tp, heard.notice.consumer_tp().get(), &feed.released) {
                return;
            }
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
        // One that was announced is counted when it has ended.
        let is_untold = feed.announced.is_empty();
        self.counters.untold = self.counters.untold.saturating_add(u32::from(is_untold));
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
                    self.say_to_decode(&peer, &write_done(&transfer), turn);
                }
                self.forget(&transfer);
            }
            Message::Ended { quiet: true, .. } => {
                let (connection, was_told) = (feed.connection, !feed.announced.is_empty());
                let peer = feed.peer.peer.clone();
                let knows = self.connections.get(&connection).filter(|peer| {
                    peer.is_of_0_33() || planted!("an-old-decode-hears-of-failures")
                });
                match peer.filter(|_| knows.is_some()) {
                    Some(peer) => self.say_to_decode(&peer, &write_failed(&transfer), turn),
                    // A listener of 0.32.0 would end with it.
                    None => self.counters.untold += u32::from(was_told),
                }
                self.forget(&transfer);
            }
            _ => {}
        }
    }

    /// Tells each rank of a decode; what it hears holds for all that was written here.
    fn say_to_decode(&mut self, peer: &MoriioRemote, frame: &[u8], turn: &mut PeerTurn<'_>) {
        for rank in 0..self.tp_of(peer) {
            match self.endpoint(DialPurpose::WriteDone, peer, rank) {
                Ok(to) => self.notify(to, frame.to_vec(), turn),
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

/// True if all readers of a decode with `consumer_tp` ranks have released the ranks here that they
/// read from. With fewer readers than ranks one release stands for the ranks that hold the same, as
/// 0.32.0 tells only the one that it reads from.
fn is_released(own_tp: u16, consumer_tp: u16, released: &BTreeSet<(u16, LinkId)>) -> bool {
    let needed = expected_acks(own_tp, consumer_tp).unwrap_or(1);
    let holders = (own_tp / consumer_tp).max(1);
    (0..own_tp).step_by(usize::from(holders)).all(|first| {
        let group = (first, LinkId(0))..(first.saturating_add(holders), LinkId(0));
        released.range(group).count() >= usize::from(needed)
    })
}
