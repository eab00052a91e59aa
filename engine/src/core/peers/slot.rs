//! One conversation with a peer, and the way to it.

use super::PeerInfo;
use crate::core::channel::{Channel, ChannelConfig};
use crate::core::ids::{EngineId, Incarnation};
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId};

/// Dials in a row without any progress of the conversation; then it is over.
pub(super) const REDIALS_MAX: u32 = 32;

/// Fresh links tried per silence, while the old one still stands.
const MENDS_MAX: u64 = 2;

/// How far a dialer is with its next link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dial {
    /// It needs none.
    Idle,
    /// It dials at this time.
    At(Nanos),
    /// It waits for the link, or for the answer to its hello.
    Trying {
        /// The link.
        link: LinkId,
        /// When it gives up on the link.
        until: Nanos,
        /// Once the link is up: when the hello is said again, and the wait before that.
        hello: Option<(Nanos, Nanos)>,
    },
}

/// What is due in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// The peer never answered.
    Unreachable,
    /// The peer is silent, or without a link, for too long.
    Silent,
    /// Dial.
    Dial,
    /// Give the link that is being tried up and dial again.
    Abandon(LinkId),
    /// Say hello again.
    Hello(LinkId),
    /// The link may be half-open: try another.
    Mend,
    /// The channel's timer.
    Channel,
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) engine: EngineId,
    /// Where to dial; None on the side that was dialled.
    pub(super) endpoint: Option<Endpoint>,
    pub(super) session: u64,
    /// Known from the hello on.
    pub(super) info: Option<PeerInfo>,
    /// The life of the peer that did not fit.
    pub(super) refused: Option<Incarnation>,
    /// The life before this one that said hello, for which the peer is asked whether it is there.
    pub(super) rival: Option<Incarnation>,
    pub(super) channel: Channel,
    pub(super) dial: Dial,
    /// The link on which the peer said that it takes hellos.
    pub(super) native: Option<LinkId>,
    /// Since when there is no link; None while there is, and before the first dial.
    unlinked: Option<Nanos>,
    /// That this began later than it did, as this process stood still.
    excused: bool,
    /// Dials since the last progress.
    pub(super) redials: u32,
    /// When the link was attached.
    linked: Nanos,
    /// The silence (by its start) and the links tried to end it.
    mends: (Nanos, u64),
    /// The deadline that the timer table has.
    pub(super) armed: Option<Nanos>,
}

impl ChannelConfig {
    /// Most dials of one peer in `span` of which none is answered: those of a conversation that was
    /// up, then conversations that never come up, with a pause after each.
    pub fn dials_max(&self, span: Nanos) -> u64 {
        let fruitless = (1..=u64::from(REDIALS_MAX)).map(|dials| self.fruitless(dials, span));
        u64::from(REDIALS_MAX) + fruitless.max().unwrap_or(0)
    }

    /// Dials in `span`, if every conversation makes as many as told.
    fn fruitless(&self, dials: u64, span: Nanos) -> u64 {
        let (first, most) = self.waits();
        let doubled = |wait: Nanos| (wait + wait).min(most);
        let (mut length, mut wait) = (Nanos::ZERO, first);
        for _ in 1..dials {
            length = length + wait;
            wait = doubled(wait);
        }
        let (mut left, mut count, mut pause) = (span, dials, first);
        while pause < most && left >= length + pause {
            left = left - (length + pause);
            pause = doubled(pause);
            count += dials;
        }
        count + dials * (left.0 / (length + pause).0)
    }
}

impl Slot {
    pub(super) fn new(
        engine: EngineId,
        endpoint: Option<Endpoint>,
        session: u64,
        channel: Channel,
    ) -> Slot {
        Slot {
            engine,
            endpoint,
            session,
            info: None,
            refused: None,
            rival: None,
            channel,
            native: None,
            dial: Dial::Idle,
            unlinked: None,
            excused: false,
            redials: 0,
            linked: Nanos::ZERO,
            mends: (Nanos::ZERO, 0),
            armed: None,
        }
    }

    /// Wants a link at once.
    pub(super) fn start(&mut self, now: Nanos) {
        self.unlinked = Some(now);
        self.dial = Dial::At(now);
    }

    /// The link in use is gone.
    pub(super) fn unlink(&mut self, now: Nanos, config: &ChannelConfig) {
        self.channel.detach();
        self.unlinked = Some(now);
        self.excused = false;
        if self.endpoint.is_some() && self.dial == Dial::Idle {
            if self.linked + config.silent <= now {
                self.redials = 0;
            }
            self.dial = Dial::At(now + self.backoff(config));
        }
    }

    /// The link being tried is gone or useless.
    pub(super) fn dial_again(&mut self, now: Nanos, config: &ChannelConfig) {
        self.dial = Dial::At(now + self.backoff(config));
    }

    /// A link was attached.
    pub(super) fn link(&mut self, now: Nanos) {
        self.dial = Dial::Idle;
        self.unlinked = None;
        self.linked = now;
    }

    /// None before the first repetition, then doubling.
    fn backoff(&self, config: &ChannelConfig) -> Nanos {
        match self.redials.checked_sub(1) {
            None => Nanos::ZERO,
            Some(doublings) => {
                config.retransmit.scale(1 << doublings.min(31), 1).min(config.retransmit_max)
            }
        }
    }

    /// Counts a fresh link against the current silence.
    pub(super) fn mend(&mut self) {
        if let Some(quiet) = self.channel.quiet() {
            self.mends = (quiet, self.mends_tried(quiet) + 1);
        }
    }

    fn mends_tried(&self, quiet: Nanos) -> u64 {
        if self.mends.0 == quiet { self.mends.1 } else { 0 }
    }

    /// How long there may be no link, and what is then due.
    fn limit(&self, config: &ChannelConfig) -> (Nanos, Due) {
        match self.info {
            None => (config.hello, Due::Unreachable),
            Some(_) => (config.silent, Due::Silent),
        }
    }

    /// This process stood still: the peer has a third of its time left, once per silence.
    pub(super) fn excuse(&mut self, now: Nanos, config: &ChannelConfig) {
        let latest = |limit: Nanos| now - limit.scale(2, 3);
        self.channel.excuse(latest(config.silent));
        let latest = latest(self.limit(config).0);
        if !self.excused && self.unlinked.is_some_and(|since| since < latest) {
            self.unlinked = Some(latest);
            self.excused = true;
        }
    }

    /// The earliest thing to do, and when. Ends come before attempts.
    pub(super) fn next(&self, config: &ChannelConfig) -> Option<(Nanos, Due)> {
        let limit = self.unlinked.map(|since| {
            let (limit, due) = self.limit(config);
            (since + limit, due)
        });
        let quiet = self.channel.quiet().filter(|_| self.info.is_some());
        let silent = quiet.map(|since| (since + config.silent, Due::Silent));
        let mend = quiet.and_then(|since| {
            let tried = self.mends_tried(since);
            let may = self.endpoint.is_some() && self.dial == Dial::Idle && tried < MENDS_MAX;
            may.then(|| (since + config.silent.scale(tried + 1, MENDS_MAX + 1), Due::Mend))
        });
        let (dial, hello) = match self.dial {
            Dial::Idle => (None, None),
            Dial::At(at) => (Some((at, Due::Dial)), None),
            Dial::Trying { link, until, hello } => {
                (Some((until, Due::Abandon(link))), hello.map(|(at, _)| (at, Due::Hello(link))))
            }
        };
        let channel = self.channel.deadline().map(|at| (at, Due::Channel));
        // min_by_key returns the first of equals.
        [limit, silent, dial, hello, mend, channel].into_iter().flatten().min_by_key(|(at, _)| *at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn dials_in_vain_are_as_many_as_the_pauses_allow() {
        let config = ChannelConfig::default();
        let most = u64::from(REDIALS_MAX);
        // At 0, 50, 150 and 350 ms, then pauses of 50, 100, ... ms, then one second after each.
        assert_eq!(config.dials_max(Nanos::ZERO), most + most);
        let hour = config.dials_max(Nanos::from_secs(3_600));
        assert!((3_600 * 2..3_600 * 4).contains(&hour), "{hour}");
        let eager = ChannelConfig { retransmit_max: config.retransmit, ..config };
        let hour = eager.dials_max(Nanos::from_secs(3_600));
        assert!((3_600 * 20..=3_600 * 20 + 3 * most).contains(&hour), "{hour}");
    }
}
