//! Tells the router that the engine lives: one registration per heartbeat, over a link of its own.
//! A peer that is out of reach or there again, or a leg that failed, moves the next one forward.

use super::command::ControlCommand;
use super::config::CoreConfig;
use super::dialect::moriio::registration::MoriioRegistration;
use super::dialect::native::{self, DecodeError, Frame};
use super::error::Failure;
use super::ids::{EngineId, Incarnation, TransferKey};
use super::layout::{Geometry, LayoutDigest, RankLayout};
use super::message::{
    FAILED_LEG_ID_MAX, FAILED_LEGS_MAX, FailedLeg, Registration, RouterEvent, TROUBLES_MAX,
    UnreachablePrefill,
};
use super::moriio::MoriioConfig;
use super::peers::{PeerEvent, PeerTurn, Peers};
use super::time::Nanos;
use crate::fabric::{ControlEvent, Endpoint, LinkId, LinkKind};
use std::collections::VecDeque;
use std::mem;
use std::num::NonZeroU16;
use std::sync::Arc;

/// Heartbeats without a link after which the router is said to be silent.
const SILENT_AFTER: u32 = 3;

/// Time between two registrations at least, unless failed legs are left for the second, and before a
/// link that ended is dialled again; doubles per dial up to a heartbeat.
const PAUSE: Nanos = Nanos::from_ms(100);

/// Failed legs that wait for a registration; of more, nothing is told.
pub(super) const BACKLOG_MAX: usize = 1024;

/// Sends registrations while the engine lives; a lost one is replaced by the next.
#[derive(Debug)]
pub(super) struct Heartbeat {
    router: Endpoint,
    heartbeat: Nanos,
    registration: Registration,
    /// What routers that know only MoRIIO are told, too.
    moriio: Option<MoriioRegistration>,
    link: Option<LinkId>,
    up: bool,
    next: Option<Nanos>,
    /// When the last registration was sent.
    last: Nanos,
    /// Dials since a link lasted for more than one registration.
    dials: u32,
    /// Since when there is no link; none while there is one.
    without_link: Option<Nanos>,
    /// The router is said to be silent.
    is_silent: bool,
    /// Prompts of peers that did not come.
    failed: u32,
    /// Legs that failed since the last registration; none without a link.
    failed_legs: VecDeque<FailedLeg>,
    /// What is to be said of the router.
    router_events: Vec<RouterEvent>,
    /// Frames that are none that a router sends.
    violations: u32,
}

impl Heartbeat {
    pub(super) fn new(config: &CoreConfig) -> Option<Heartbeat> {
        let router = config.router.clone()?;
        Some(Heartbeat {
            router,
            moriio: config.moriio.as_ref().map(|moriio| heartbeat(config, moriio)),
            heartbeat: config.settings.heartbeat,
            registration: Registration {
                sequence: 0,
                dp_rank: config.dp.0,
                dp_size: config.dp.1,
                tp: config.geometry.tp,
                models: config.models.clone(),
                ..Registration::new(
                    config.engine.clone(),
                    config.incarnation,
                    config.role,
                    config.mode,
                    config.http.clone(),
                    config.control.clone(),
                )
            },
            link: None,
            up: false,
            next: None,
            last: Nanos::ZERO,
            dials: 0,
            without_link: None,
            is_silent: false,
            failed: 0,
            failed_legs: VecDeque::new(),
            router_events: Vec::new(),
            violations: 0,
        })
    }

    pub(super) fn owns(&self, event: &ControlEvent) -> bool {
        let (ControlEvent::LinkUp { link, .. }
        | ControlEvent::Frame { link, .. }
        | ControlEvent::LinkDown { link }) = event;
        Some(*link) == self.link
    }

    /// Starts once the engine can serve, with the layouts of all its ranks.
    pub(super) fn start(
        &mut self,
        (geometry, ranks): (&Geometry, &[RankLayout]),
        peers: &mut Peers,
        turn: &mut PeerTurn<'_>,
    ) {
        self.registration.fit = Some(Arc::new(LayoutDigest::new(geometry, ranks)));
        if self.next.is_none() {
            self.dial(peers, turn);
        }
    }

    /// A prompt of a peer did not come, or one did. Told soon if that is new.
    pub(super) fn peer(
        &mut self,
        now: Nanos,
        (engine, incarnation): (&EngineId, Option<Incarnation>),
        failure: Option<&Failure>,
    ) {
        let troubles = &mut self.registration.troubles;
        let known = troubles.iter().position(|it| it.engine == *engine);
        if failure.is_none() && known.is_none() {
            return;
        }
        known.into_iter().for_each(|at| drop(troubles.remove(at)));
        if let Some(failure) = failure {
            if troubles.len() == TROUBLES_MAX {
                troubles.remove(0);
            }
            self.failed = self.failed.saturating_add(1);
            let (engine, failure) = (engine.clone(), failure.clipped());
            troubles.push(UnreachablePrefill { engine, incarnation, number: self.failed, failure });
        }
        self.hurry(now);
    }

    /// Tells the router soon why a leg failed. Without a link it is not told: the router answers the
    /// client before there is another one.
    pub(super) fn leg_failed(
        &mut self,
        now: Nanos,
        (key, sibling): (&TransferKey, u32),
        failure: &Failure,
    ) {
        let has_room = self.failed_legs.len() < BACKLOG_MAX && key.id.0.len() <= FAILED_LEG_ID_MAX;
        if !self.up || !has_room || planted!("causes-are-not-told") {
            return;
        }
        let (key, failure) = (key.clone(), failure.clipped());
        self.failed_legs.push_back(FailedLeg { key, sibling, failure });
        self.hurry(now);
    }

    /// Moves the next registration forward.
    fn hurry(&mut self, now: Nanos) {
        if self.up {
            let soon = now.max(self.last + PAUSE);
            self.next = self.next.map(|next| next.min(soon));
        }
    }

    /// Frames that no router sends, and what the next registration names: peers that are out of reach
    /// and failed legs.
    pub(super) fn sizes(&self) -> [u32; 2] {
        [self.violations, (self.registration.troubles.len() + self.failed_legs.len()) as u32]
    }

    /// What is to be said of the router since the last time.
    pub(super) fn take_router_events(&mut self) -> Vec<RouterEvent> {
        mem::take(&mut self.router_events)
    }

    fn dial(&mut self, peers: &mut Peers, turn: &mut PeerTurn<'_>) {
        let link = peers.fresh_link();
        self.link = Some(link);
        self.dials = self.dials.saturating_add(1);
        let since = *self.without_link.get_or_insert(turn.now);
        let is_over = turn.now - since >= self.heartbeat.scale(u64::from(SILENT_AFTER), 1);
        // A draining engine, as at a normal stop, needs no answer of the router.
        let is_over = is_over && !self.registration.draining;
        if is_over && !mem::replace(&mut self.is_silent, true) {
            self.router_events.push(RouterEvent::Silent { router: self.router.clone() });
        }
        self.next = Some(turn.now + self.heartbeat);
        turn.commands.push(ControlCommand::Dial {
            link,
            to: self.router.clone(),
            channel: LinkKind::Discovery,
        });
    }

    /// Takes an event of its link; returns the transfers of which the router says that nobody will
    /// fetch what is left.
    pub(super) fn control(
        &mut self,
        event: &ControlEvent,
        turn: &mut PeerTurn<'_>,
    ) -> Vec<TransferKey> {
        match event {
            ControlEvent::LinkUp { .. } => {
                (self.up, self.without_link, self.is_silent) = (true, None, false);
                self.router_events.push(RouterEvent::Registered { router: self.router.clone() });
                self.beat(turn);
            }
            ControlEvent::LinkDown { .. } => {
                self.up = false;
                self.link = None;
                self.failed_legs.clear();
                self.without_link.get_or_insert(turn.now);
                // A router that drains hangs up: the next one at its address is there, or soon.
                let pause = PAUSE.scale(1 << self.dials.min(16), 1).min(self.heartbeat);
                self.next = self.next.map(|next| next.min(turn.now + pause));
            }
            ControlEvent::Frame { parts, .. } => {
                let error = match native::decode(parts.first().map_or(&[], |part| &part[..])) {
                    Ok(Frame::Abandon { keys }) => return keys,
                    Ok(frame) => {
                        DecodeError { frame: frame.name(), rule: "not said by a router".into() }
                    }
                    Err(error) => error,
                };
                self.violations = self.violations.saturating_add(1);
                let violation = error.violation(&self.router.0);
                turn.events.push(PeerEvent::Violation(violation));
            }
        }
        Vec::new()
    }

    fn beat(&mut self, turn: &mut PeerTurn<'_>) {
        let Some(link) = self.link else { return };
        self.registration.sequence += 1;
        let told = self.failed_legs.len().min(FAILED_LEGS_MAX);
        self.registration.failed = self.failed_legs.drain(..told).collect();
        let frame = match &self.moriio {
            // Routers that know only MoRIIO take every heartbeat for life; without one, they
            // forget.
            Some(heartbeat) if !self.registration.draining => {
                heartbeat.encode_with(&self.registration)
            }
            _ => native::encode(&Frame::Register(self.registration.clone())),
        };
        turn.commands.push(ControlCommand::Send { link, frame });
        self.registration.failed.clear();
        self.last = turn.now;
        let has_more = !self.failed_legs.is_empty();
        self.next = Some(if has_more { turn.now } else { turn.now + self.heartbeat });
    }

    pub(super) fn tick(&mut self, peers: &mut Peers, turn: &mut PeerTurn<'_>) {
        if self.next.is_none_or(|next| next > turn.now) {
            return;
        }
        if self.up {
            self.dials = 0;
            self.beat(turn);
        } else {
            if let Some(link) = self.link.take() {
                turn.commands.push(ControlCommand::HangUp { link });
            }
            self.dial(peers, turn);
        }
    }

    pub(super) fn drain(&mut self, turn: &mut PeerTurn<'_>) {
        self.registration.draining = true;
        if self.up {
            self.beat(turn);
        }
    }

    pub(super) fn deadline(&self) -> Option<Nanos> {
        self.next
    }
}

/// # Panics
/// If the configuration says addresses that are none, which whoever made it has checked.
fn heartbeat(config: &CoreConfig, moriio: &MoriioConfig) -> MoriioRegistration {
    let size = |size| NonZeroU16::new(size).unwrap_or(NonZeroU16::MIN);
    let (dp, tp) = (size(config.dp.1), size(config.geometry.tp));
    let (http, zmq) = (config.http.clone(), moriio.address.clone());
    MoriioRegistration::new(config.role, http, zmq, dp, tp, config.mode)
        .unwrap_or_else(|why| panic!("{} cannot register: {why}", config.engine))
}
