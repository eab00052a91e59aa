//! One connection with a peer, and the way to it.

use super::PeerInfo;
use crate::core::channel::{Channel, ChannelConfig};
use crate::core::ids::{EngineId, Incarnation};
use crate::core::message::{AttemptTag, Message};
use crate::core::time::Nanos;
use crate::fabric::{Endpoint, LinkId};

/// Dials in a row without any progress of the connection; then it is over.
pub(super) const REDIALS_MAX: u32 = 32;

/// Fresh links tried per silence, while the old one still stands.
const PATH_PROBES_MAX: u64 = 2;

/// How far a dialer is with its next link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DialState {
    Idle,
    /// It dials at this time.
    At(Nanos),
    /// It waits for the link, or for the answer to its hello.
    Trying {
        link: LinkId,
        /// When it gives up on the link.
        until: Nanos,
        /// Once the link is up: when the hello is said again, and the wait before that.
        hello: Option<(Nanos, Nanos)>,
    },
}

/// What is due in a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ConnectionAction {
    /// The peer never answered.
    Unreachable,
    /// The peer is silent, or without a link, for too long.
    Silent,
    Dial,
    /// Give the link that is being tried up and dial again.
    Abandon(LinkId),
    Hello(LinkId),
    /// The link may be half-open: try another.
    ProbePath,
    Channel,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) engine: EngineId,
    /// Where to dial; None on the side that was dialled.
    pub(super) endpoint: Option<Endpoint>,
    pub(super) session: u64,
    /// Known from the hello on.
    pub(super) info: Option<PeerInfo>,
    /// The incarnation of the peer that did not fit.
    pub(super) refused: Option<Incarnation>,
    /// The incarnation before this one that said hello, for which the peer is asked whether it is
    /// there.
    pub(super) rival: Option<Incarnation>,
    pub(super) channel: Channel,
    pub(super) dial: DialState,
    /// The link on which the peer said that it takes hellos.
    pub(super) native: Option<LinkId>,
    /// Since when there is no link; None while there is, and before the first dial.
    unlinked: Option<Nanos>,
    /// That this began later than it did, as this process stood still.
    stall_compensated: bool,
    /// Dials since the last progress.
    pub(super) redials: u32,
    /// When the link was attached.
    linked: Nanos,
    /// The silence (by its start) and the links tried to end it.
    path_probes: (Nanos, u64),
    /// The deadline that the timer table has.
    pub(super) armed: Option<Nanos>,
}

impl ChannelConfig {
    /// Most dials of one peer in `span` of which none is answered: those of a connection that was
    /// up, then connections that never come up, with a pause after each.
    pub fn dials_max(&self, span: Nanos) -> u64 {
        let fruitless = (1..=u64::from(REDIALS_MAX)).map(|dials| self.fruitless(dials, span));
        u64::from(REDIALS_MAX) + fruitless.max().unwrap_or(0)
    }

    /// Dials in `span`, if every connection makes as many as told.
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

impl Connection {
    pub(super) fn new(
        engine: EngineId,
        endpoint: Option<Endpoint>,
        session: u64,
        channel: Channel,
    ) -> Connection {
        Connection {
            engine,
            endpoint,
            session,
            info: None,
            refused: None,
            rival: None,
            channel,
            native: None,
            dial: DialState::Idle,
            unlinked: None,
            stall_compensated: false,
            redials: 0,
            linked: Nanos::ZERO,
            path_probes: (Nanos::ZERO, 0),
            armed: None,
        }
    }

    /// Wants a link at once.
    pub(super) fn start(&mut self, now: Nanos) {
        self.unlinked = Some(now);
        self.dial = DialState::At(now);
    }

    /// The link in use is gone.
    pub(super) fn unlink(&mut self, now: Nanos, config: &ChannelConfig) {
        self.channel.detach();
        self.unlinked = Some(now);
        self.stall_compensated = false;
        if self.endpoint.is_some() && self.dial == DialState::Idle {
            if self.linked + config.silent <= now {
                self.redials = 0;
            }
            self.dial = DialState::At(now + self.backoff(config));
        }
    }

    /// The link being tried is gone or useless.
    pub(super) fn dial_again(&mut self, now: Nanos, config: &ChannelConfig) {
        self.dial = DialState::At(now + self.backoff(config));
    }

    /// True while there is no link.
    pub(super) fn is_unlinked(&self) -> bool {
        self.unlinked.is_some()
    }

    /// A link was attached.
    pub(super) fn link(&mut self, now: Nanos) {
        self.dial = DialState::Idle;
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
    pub(super) fn count_path_probe(&mut self) {
        if let Some(quiet) = self.channel.silent_since() {
            self.path_probes = (quiet, self.path_probes_tried(quiet) + 1);
        }
    }

    fn path_probes_tried(&self, quiet: Nanos) -> u64 {
        if self.path_probes.0 == quiet { self.path_probes.1 } else { 0 }
    }

    /// How long there may be no link, and what is then due.
    fn limit(&self, config: &ChannelConfig) -> (Nanos, ConnectionAction) {
        match self.info {
            None => (config.hello, ConnectionAction::Unreachable),
            Some(_) => (config.silent, ConnectionAction::Silent),
        }
    }

    /// This process stood still: the peer has a third of its time left, once per silence.
    pub(super) fn compensate_stall(&mut self, now: Nanos, config: &ChannelConfig) {
        let latest = |limit: Nanos| now - limit.scale(2, 3);
        self.channel.compensate_stall(latest(config.silent));
        let latest = latest(self.limit(config).0);
        if !self.stall_compensated && self.unlinked.is_some_and(|since| since < latest) {
            self.unlinked = Some(latest);
            self.stall_compensated = true;
        }
    }

    /// The earliest thing to do, and when. Ends come before attempts.
    pub(super) fn next(&self, config: &ChannelConfig) -> Option<(Nanos, ConnectionAction)> {
        let limit = self.unlinked.map(|since| {
            let (limit, due) = self.limit(config);
            (since + limit, due)
        });
        let quiet = self.channel.silent_since().filter(|_| self.info.is_some());
        let silent = quiet.map(|since| (since + config.silent, ConnectionAction::Silent));
        let probe = quiet.and_then(|since| {
            let tried = self.path_probes_tried(since);
            let may =
                self.endpoint.is_some() && self.dial == DialState::Idle && tried < PATH_PROBES_MAX;
            may.then(|| {
                (
                    since + config.silent.scale(tried + 1, PATH_PROBES_MAX + 1),
                    ConnectionAction::ProbePath,
                )
            })
        });
        let (dial, hello) = match self.dial {
            DialState::Idle => (None, None),
            DialState::At(at) => (Some((at, ConnectionAction::Dial)), None),
            DialState::Trying { link, until, hello } => (
                Some((until, ConnectionAction::Abandon(link))),
                hello.map(|(at, _)| (at, ConnectionAction::Hello(link))),
            ),
        };
        let channel = self.channel.deadline().map(|at| (at, ConnectionAction::Channel));
        // min_by_key returns the first of equals.
        [limit, silent, dial, hello, probe, channel].into_iter().flatten().min_by_key(|(at, _)| *at)
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

/// Releases that a peer has not acknowledged when the connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnackedReleases {
    pub engine: EngineId,
    pub control: Endpoint,
    /// The incarnation that has what is released.
    pub incarnation: Incarnation,
    pub tags: Vec<AttemptTag>,
}

impl UnackedReleases {
    pub(super) fn of(connection: &Connection) -> Option<Box<UnackedReleases>> {
        let (control, info) = (connection.endpoint.clone()?, connection.info.as_ref()?);
        let releases = connection.channel.unacknowledged().filter_map(|message| match message {
            Message::Release { tag, .. } => Some(tag.clone()),
            _ => None,
        });
        let tags: Vec<AttemptTag> = releases.collect();
        let (engine, incarnation) = (connection.engine.clone(), info.incarnation);
        (!tags.is_empty()).then(|| Box::new(UnackedReleases { engine, control, incarnation, tags }))
    }
}
