//! Notices: one way, unanswered, over a link per receiver that is kept.

use super::decode_proxy::HeardRelease;
use super::{MoriioPeers, MoriioTimer};
use crate::core::command::ControlCommand;
use crate::core::dialect::moriio::notify::{
    ReceivedPrefillNotice, decode_at_decode, decode_at_prefill,
};
use crate::core::message::Role;
use crate::core::peers::PeerTurn;
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId, LinkKind};
use std::collections::{BTreeMap, VecDeque};

/// Pause before a receiver is dialled again.
pub(super) const REDIAL: Nanos = Nanos::from_ms(200);

#[derive(Debug, Default)]
struct NotifyLink {
    link: Option<LinkId>,
    up: bool,
    /// Notices that wait for the link, with the time at which they are dropped.
    queue: VecDeque<(Nanos, Vec<u8>)>,
}

/// The links by which notices are sent.
#[derive(Debug, Default)]
pub(super) struct NoticeSender {
    lines: BTreeMap<Endpoint, NotifyLink>,
    links: BTreeMap<LinkId, Endpoint>,
    pub(super) dropped: u32,
}

impl NoticeSender {
    pub(super) fn links(&self) -> usize {
        self.links.len()
    }

    pub(super) fn has(&self, link: LinkId) -> bool {
        self.links.contains_key(&link)
    }

    /// Receivers that are kept in mind.
    pub(super) fn lines(&self) -> usize {
        self.lines.len()
    }

    pub(super) fn queued(&self) -> u32 {
        self.lines.values().map(|line| line.queue.len() as u32).sum()
    }

    /// A link can be used: sends what waits for it.
    pub(super) fn up(&mut self, link: LinkId, turn: &mut PeerTurn<'_>) {
        let Some(line) = self.links.get(&link).and_then(|to| self.lines.get_mut(to)) else {
            return;
        };
        line.up = true;
        let frames = line.queue.drain(..).map(|(_, frame)| ControlCommand::Send { link, frame });
        frames.for_each(|frame| turn.commands.push(frame));
    }

    /// A link is gone; returns where it led to and whether notices wait for it.
    pub(super) fn down(&mut self, link: LinkId) -> Option<(Endpoint, bool)> {
        let to = self.links.remove(&link)?;
        let line = self.lines.get_mut(&to)?;
        if line.queue.is_empty() {
            self.lines.remove(&to);
            return Some((to, false));
        }
        (line.link, line.up) = (None, false);
        Some((to, true))
    }

    /// Drops what has waited too long; false if nothing is left.
    fn expire(&mut self, now: Nanos, to: &Endpoint) -> bool {
        let Some(line) = self.lines.get_mut(to) else { return false };
        while line.queue.front().is_some_and(|(until, _)| *until <= now) {
            line.queue.pop_front();
            self.dropped = self.dropped.saturating_add(1);
        }
        if line.queue.is_empty() && line.link.is_none() {
            self.lines.remove(to);
            return false;
        }
        true
    }
}

impl MoriioPeers {
    /// Sends a notice, at the latest when the receiver can be reached again.
    pub(super) fn notify(&mut self, to: Endpoint, frame: Vec<u8>, turn: &mut PeerTurn<'_>) {
        let settings = &self.config.settings;
        let full = self.notices.lines.len() >= settings.links_max as usize;
        if full && !self.notices.lines.contains_key(&to) {
            self.notices.dropped = self.notices.dropped.saturating_add(1);
            return;
        }
        let line = self.notices.lines.entry(to.clone()).or_default();
        if let (Some(link), true) = (line.link, line.up) {
            turn.commands.push(ControlCommand::Send { link, frame });
            return;
        }
        if line.queue.len() >= settings.notices_max as usize {
            self.notices.dropped = self.notices.dropped.saturating_add(1);
            return;
        }
        line.queue.push_back((turn.now + settings.notice, frame));
        if line.link.is_none() {
            self.dial_line(to, turn);
        }
    }

    fn dial_line(&mut self, to: Endpoint, turn: &mut PeerTurn<'_>) {
        let link = self.fresh_link();
        let Some(line) = self.notices.lines.get_mut(&to) else { return };
        line.link = Some(link);
        self.notices.links.insert(link, to.clone());
        self.timers.arm(MoriioTimer::Notice(to.clone()), turn.now + self.config.settings.notice);
        turn.commands.push(ControlCommand::Dial { link, to, channel: LinkKind::Notify });
    }

    /// Notices wait for a receiver: dial it again, or give them up.
    pub(super) fn renotify(&mut self, to: &Endpoint, turn: &mut PeerTurn<'_>) {
        if !self.notices.expire(turn.now, to) {
            return;
        }
        let Some(line) = self.notices.lines.get(to) else { return };
        if line.link.is_none() {
            self.dial_line(to.clone(), turn);
        }
    }

    /// A notice came. What is none is counted, reported and dropped.
    pub(super) fn on_notice(&mut self, link: LinkId, parts: &[Vec<u8>], turn: &mut PeerTurn<'_>) {
        let rank = self.notify_links.get(&link).map_or(0, |(rank, _)| *rank);
        let heard = match self.role {
            Role::Prefill => decode_at_prefill(parts).map(Ok),
            Role::Decode => decode_at_decode(parts).map(Err),
        };
        match heard {
            Ok(Ok(ReceivedPrefillNotice::RemoteBlocks(notice))) => {
                self.on_blocks(rank, notice, turn);
            }
            Ok(Ok(ReceivedPrefillNotice::Release(notice))) => {
                self.on_release(HeardRelease { rank, link, notice }, turn);
            }
            Ok(Ok(ReceivedPrefillNotice::Unusable { transfer, rule })) => {
                let error = super::DecodeError { frame: "remote_blocks", rule: rule.into() };
                self.violation(link, &error, turn);
                self.unusable(&transfer, turn);
            }
            Ok(Err(notice)) => self.on_writer(&notice, (rank, link), turn),
            Err(error) => self.violation(link, &error, turn),
        }
    }
}
