//! Connections to senders, each with one call at a time: the answers of 0.30.0 do not say to what.

use super::{OmniMori, OmniMoriTimer, StageTurn};
use crate::core::command::ControlCommand;
use crate::core::payload::PayloadKey;
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId, LinkKind};
use std::collections::VecDeque;

/// A sender, as long as there is a connection to it or a fetch from it.
#[derive(Debug, Default)]
pub(super) struct ConnectorSender {
    /// Connections, those that are dialled among them.
    links: u32,
    dialling: u32,
    idle: Vec<LinkId>,
    /// Fetches that wait for a connection.
    pub(super) queue: VecDeque<PayloadKey>,
    /// Since when it cannot be reached, if it cannot.
    failing: Option<Nanos>,
}

/// A connection to a sender.
#[derive(Debug)]
pub(super) struct SenderLink {
    sender: Endpoint,
    is_up: bool,
    /// What was asked for and not answered.
    call: Option<PayloadKey>,
}

impl OmniMori {
    /// A fetch waits for a connection.
    pub(super) fn enqueue(&mut self, to: &Endpoint, key: PayloadKey, turn: &mut StageTurn<'_>) {
        self.senders.entry(to.clone()).or_default().queue.push_back(key);
        self.pump(to, turn);
    }

    /// It does not wait any more.
    pub(super) fn dequeue(&mut self, from: &Endpoint, key: &PayloadKey) {
        if let Some(sender) = self.senders.get_mut(from) {
            sender.queue.retain(|queued| queued != key);
        }
        self.forget_sender(from);
    }

    fn forget_sender(&mut self, endpoint: &Endpoint) {
        let Some(sender) = self.senders.get(endpoint) else { return };
        if sender.links == 0 && sender.queue.is_empty() {
            self.senders.remove(endpoint);
            self.timers.cancel(&OmniMoriTimer::Redial(endpoint.clone()));
        }
    }

    /// Gives connections to those who wait, and dials as many as there may be.
    pub(super) fn pump(&mut self, to: &Endpoint, turn: &mut StageTurn<'_>) {
        loop {
            let Some(sender) = self.senders.get_mut(to) else { return };
            if sender.queue.is_empty() {
                break;
            }
            let Some(link) = sender.idle.pop() else { break };
            let Some(key) = sender.queue.pop_front() else { break };
            self.call(link, key, turn);
        }
        let most = self.config.settings.links_per_sender;
        let Some(sender) = self.senders.get_mut(to) else { return };
        // One tells whether a sender can be reached that could not be.
        let wanted = match sender.failing {
            Some(_) => sender.queue.len().min(1),
            None => sender.queue.len(),
        };
        if sender.links < most && wanted > sender.dialling as usize {
            sender.links += 1;
            sender.dialling += 1;
            let link = self.fresh_link();
            self.sender_links
                .insert(link, SenderLink { sender: to.clone(), is_up: false, call: None });
            // A plane that never says that it failed would be waited for.
            let until = turn.now + self.config.settings.reach;
            self.timers.arm(OmniMoriTimer::Link(link), until);
            turn.push(ControlCommand::Dial { link, to: to.clone(), channel: LinkKind::Handshake });
        }
        self.forget_sender(to);
    }

    fn fresh_link(&mut self) -> LinkId {
        loop {
            self.next_link = self.next_link.wrapping_add(1) & !LinkId::INBOUND;
            let link = LinkId(self.next_link);
            if !self.sender_links.contains_key(&link) {
                return link;
            }
        }
    }

    fn call(&mut self, link: LinkId, key: PayloadKey, turn: &mut StageTurn<'_>) {
        let asked = self.call_of(&key);
        let Some(entry) = self.sender_links.get_mut(&link) else { return };
        let Some((call, patience)) = asked else { return self.idle(link, turn) };
        if let Some(fetch) = self.fetches.get_mut(&key) {
            fetch.link = Some(link);
        }
        entry.call = Some(key);
        self.timers.arm(OmniMoriTimer::Link(link), turn.now + patience);
        turn.push(ControlCommand::Reply { link, frame: call.encode() });
    }

    fn idle(&mut self, link: LinkId, turn: &mut StageTurn<'_>) {
        let Some(entry) = self.sender_links.get(&link) else { return };
        if let Some(sender) = self.senders.get_mut(&entry.sender) {
            sender.idle.push(link);
        }
        let until = turn.now + self.config.settings.link_idle;
        self.timers.arm(OmniMoriTimer::Link(link), until);
    }

    pub(super) fn sender_up(&mut self, link: LinkId, turn: &mut StageTurn<'_>) {
        let Some(entry) = self.sender_links.get_mut(&link).filter(|entry| !entry.is_up) else {
            return;
        };
        entry.is_up = true;
        let endpoint = entry.sender.clone();
        if let Some(sender) = self.senders.get_mut(&endpoint) {
            sender.failing = None;
            sender.dialling -= 1;
        }
        self.idle(link, turn);
        self.pump(&endpoint, turn);
    }

    pub(super) fn on_answer(&mut self, link: LinkId, parts: &[Vec<u8>], turn: &mut StageTurn<'_>) {
        let Some(entry) = self.sender_links.get_mut(&link) else { return };
        let endpoint = entry.sender.clone();
        let Some(key) = entry.call.take() else {
            self.violation(Some(endpoint), "an answer to nothing", turn);
            return self.lose(link, "it answers what was not asked", turn);
        };
        self.idle(link, turn);
        self.call_answered(&key, parts, turn);
        self.pump(&endpoint, turn);
    }

    /// A connection is of no use any more: what comes by it is not for who asks next.
    fn lose(&mut self, link: LinkId, why: &str, turn: &mut StageTurn<'_>) {
        turn.push(ControlCommand::HangUp { link });
        self.lost(link, why, turn);
    }

    fn lost(&mut self, link: LinkId, why: &str, turn: &mut StageTurn<'_>) {
        let Some(entry) = self.sender_links.remove(&link) else { return };
        self.timers.cancel(&OmniMoriTimer::Link(link));
        if let Some(sender) = self.senders.get_mut(&entry.sender) {
            sender.links -= 1;
            sender.dialling -= u32::from(!entry.is_up);
            sender.idle.retain(|idle| *idle != link);
        }
        if !entry.is_up {
            return self.unreachable(&entry.sender, turn);
        }
        if let Some(key) = entry.call {
            self.call_lost(&key, why, turn);
        }
        self.pump(&entry.sender, turn);
    }

    pub(super) fn sender_down(&mut self, link: LinkId, turn: &mut StageTurn<'_>) {
        self.lost(link, "the connection to it is lost", turn);
    }

    /// It was not reached. It is tried again, unless it was for long enough.
    fn unreachable(&mut self, endpoint: &Endpoint, turn: &mut StageTurn<'_>) {
        let (reach, redial) = (self.config.settings.reach, self.config.settings.redial);
        let Some(sender) = self.senders.get_mut(endpoint) else { return };
        let since = *sender.failing.get_or_insert(turn.now);
        if turn.now < since + reach {
            let at = turn.now + redial;
            return self.timers.arm_if_idle(OmniMoriTimer::Redial(endpoint.clone()), at);
        }
        let lost = std::mem::take(&mut sender.queue);
        sender.failing = None;
        for key in lost {
            self.call_unreachable(&key, endpoint, turn);
        }
        self.forget_sender(endpoint);
    }

    /// No answer came in time, or nothing was asked for long.
    pub(super) fn link_overdue(&mut self, link: LinkId, turn: &mut StageTurn<'_>) {
        self.lose(link, "it does not answer in time", turn);
    }

    /// A fetch asks for nothing any more.
    pub(super) fn give_up_link(&mut self, key: &PayloadKey, turn: &mut StageTurn<'_>) {
        let Some(fetch) = self.fetches.get_mut(key) else { return };
        let (link, sender) = (fetch.link.take(), fetch.sender.clone());
        if let Some(waiting) = self.senders.get_mut(&sender) {
            waiting.queue.retain(|queued| queued != key);
        }
        let Some(link) = link else { return };
        if let Some(entry) = self.sender_links.get_mut(&link) {
            entry.call = None;
            self.lose(link, "", turn);
        }
    }
}
