//! Releases that a prefill out of reach has not got. Until it is met again, or a lease is over, it
//! keeps blocks that nobody reads. One that stood still may hear in the same conversation, after the
//! lease, who asks for them, and then keeps them for a claim; a conversation that ends, ends that.

use super::{Decode, Out, Timer};
use crate::core::ids::{EngineId, Incarnation, PeerSlot, RankSet, RequestId};
use crate::core::message::{Message, Tag};
use crate::core::peers::Unsaid;
use crate::core::time::Nanos;
use crate::fabric::Endpoint;

/// Who is owed: a prefill, in the life that has the prompts. No other life has any of them, and which
/// of two is the later one their numbers do not say.
pub(super) type Creditor = (EngineId, Incarnation);

/// What a prefill is still to be told.
#[derive(Clone, Debug)]
pub(super) struct Debt {
    control: Endpoint,
    /// By then leases have freed all of it, but for what is said in a conversation that goes on.
    until: Nanos,
    /// What was given up: what waited in a queue of messages, and what the requests at that time asked
    /// for.
    tags: Vec<Tag>,
}

impl Decode {
    /// Notes that a prefill could not be told that a request is done with its source.
    pub(super) fn owe_release(&mut self, now: Nanos, id: &RequestId) {
        let Some(request) = self.requests.get(id) else { return };
        let met = self.station.info(request.slot).filter(|_| !request.slot.is_moriio());
        let Some(life) = request.life.or(met.map(|info| info.incarnation)) else { return };
        let (engine, control) = request.prefill.clone();
        self.owe(now, Unsaid { engine, control, life, tags: vec![request.tag.clone()] });
    }

    /// Notes what a prefill is still to be told. There is room for all that one conversation can leave
    /// behind, see [`Decode::settled`]; of more, the lease ends what is left.
    pub(super) fn owe(&mut self, now: Nanos, unsaid: Unsaid) {
        let Unsaid { engine, control, life, tags } = unsaid;
        let creditor = (engine, life);
        let full = self.debts.len() >= self.config.channel.peers_max as usize;
        if full && !self.debts.contains_key(&creditor) {
            return;
        }
        let again = now + self.config.channel.retransmit_max;
        self.timers.arm_if_idle(Timer::Remind(creditor.clone()), again);
        let until = now + self.config.settings.lease;
        let fresh = || Debt { control, until, tags: Vec::new() };
        let debt = self.debts.entry(creditor).or_insert_with(fresh);
        debt.until = until;
        let most = self.config.channel.queue_max.saturating_add(self.config.settings.requests_max);
        let room = (most as usize).saturating_sub(debt.tags.len());
        debt.tags.extend(tags.into_iter().take(room));
    }

    /// Looks for a prefill that is to be told something.
    pub(super) fn remind(&mut self, now: Nanos, creditor: &Creditor, out: &mut Out) {
        let (engine, life) = creditor;
        let Some(Debt { control, until, .. }) = self.debts.get(creditor) else { return };
        let slot = if now < *until {
            Some(self.station.reach(now, engine, control, Some(*life), out))
        } else {
            let slot = self.station.peers.slot_of(engine, control);
            let info = slot.and_then(|slot| self.station.info(slot));
            slot.filter(|_| info.is_some_and(|info| info.incarnation == *life))
        };
        let Some(slot) = slot else {
            self.debts.remove(creditor);
            return;
        };
        let again = now + self.config.channel.retransmit_max;
        self.timers.arm(Timer::Remind(creditor.clone()), again);
        self.pay(now, slot, out);
    }

    /// Tells a prefill what it is still to be told, if it is up. What its other lives are owed is
    /// forgotten, but for one that may still come.
    pub(super) fn pay(&mut self, now: Nanos, slot: PeerSlot, out: &mut Out) {
        let Some(info) = self.station.info(slot) else { return };
        let (engine, life) = (info.engine.clone(), info.incarnation);
        let of_engine = (engine.clone(), Incarnation(0))..=(engine, Incarnation(u64::MAX));
        let owed: Vec<Creditor> =
            self.debts.range(of_engine).map(|(creditor, _)| creditor.clone()).collect();
        for creditor in owed {
            let settled = if creditor.1 == life || planted!("debt-paid-to-a-later-life") {
                self.say(now, slot, &creditor, out)
            } else {
                self.station.peers.is_past(slot, creditor.1)
            };
            if settled {
                self.debts.remove(&creditor);
                self.timers.cancel(&Timer::Remind(creditor));
            }
        }
    }

    /// Queues what a prefill is owed, and says whether all of it found room.
    fn say(&mut self, now: Nanos, slot: PeerSlot, creditor: &Creditor, out: &mut Out) -> bool {
        let Some(debt) = self.debts.get_mut(creditor) else { return true };
        let ranks = RankSet::first(self.config.geometry.tp);
        while let Some(tag) = debt.tags.last() {
            let message = Message::Release { tag: tag.clone(), ranks };
            if self.station.send(now, slot, message, out).is_err() {
                return false;
            }
            debt.tags.pop();
        }
        true
    }

    /// Tells a prefill what it is still to be told, and says whether that was all. Nothing new is asked
    /// of one before: what is given up while its queue is full would grow without end, and a prefill
    /// that hears of its reader keeps for it what nobody reads.
    pub(super) fn settled(&mut self, now: Nanos, slot: PeerSlot, out: &mut Out) -> bool {
        if self.debts.is_empty() {
            return true;
        }
        self.pay(now, slot, out);
        let Some(info) = self.station.info(slot) else { return true };
        !self.debts.contains_key(&(info.engine.clone(), info.incarnation))
    }

    /// Messages that wait for prefills out of reach.
    pub(super) fn owed(&self) -> u32 {
        self.debts.values().map(|debt| debt.tags.len() as u32).sum()
    }
}
