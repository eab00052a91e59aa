//! Pairs prefill and decode instances and sees every request to its end.
//!
//! The router knows instances by their registrations, clients by number, and sends legs through
//! the shell (HTTP in a deployment). It holds no KV.
//!
//! A prompt is served by one prefill leg and one decode leg per sample, sent together under one
//! transfer key. When a leg fails, the others of that dispatch are cancelled at once and the
//! samples of which the client has seen nothing are sent again under a new transfer id: at once to
//! others, to the same instances after a pause, which ends when one comes that has not failed them.
//! A leg that an instance refuses as busy waits for room, there or elsewhere. It is not a try.
//! The timeout of a leg is the shell's business (it sees the bytes of a stream); it is reported as
//! [`LegFailure::Connection`].
//!
//! ```
//! use kvferry_engine::core::ids::{ClientId, Incarnation, Mode, Role};
//! use kvferry_engine::core::message::Registration;
//! use kvferry_engine::core::router::*;
//! use kvferry_engine::core::{Machine, Nanos, Outbox};
//!
//! let instance = |engine: &str, role| {
//!     let http = format!("{engine}:8000").as_str().into();
//!     let control = format!("tcp://{engine}:6301").as_str().into();
//!     Registration::new(engine.into(), Incarnation(1), role, Mode::Push, http, control)
//! };
//! let (mut router, mut out) = (Router::new(RouterConfig::default(), Incarnation(1)), Outbox::new());
//! let prompts = vec![RoutedPrompt { tokens: 100, prefix: [].into() }];
//! let (client, samples, output) = (ClientId(1), 1, 20);
//! let request = ClientRequest { client, prompts, samples, output, model: None, engines: None };
//! for input in [
//!     RouterInput::Register(instance("p0", Role::Prefill)),
//!     RouterInput::Register(instance("d0", Role::Decode)),
//!     RouterInput::Request(request),
//! ] {
//!     router.handle(Nanos::ZERO, input, &mut out);
//! }
//! let engine_of = |effect: &RouterEffect| match effect {
//!     RouterEffect::Dispatch { engine, .. } => engine.to_string(),
//!     other => panic!("{other:?}"),
//! };
//! assert_eq!(out.as_slice().iter().map(engine_of).collect::<Vec<_>>(), ["p0", "d0"]);
//! ```

mod abandon_queue;
mod admission;
mod budget;
mod discovery;
mod dispatcher;
mod failed_legs;
mod health;
mod hosts;
mod io;
mod lifecycle;
mod load;
mod pairing;
mod prefixes;
mod queue;
mod registry;
mod rejections;
mod release;
mod requests;
mod room;
mod view;

pub use admission::ListedInstances;
pub(super) use discovery::{RegistrationKind, registration_kind};
pub(super) use health::{FailureSeverity, of_instance};
pub use io::*;
pub use load::ServerLoad;
pub use rejections::RejectReason;
pub use rejections::Rejection;
pub use view::{InstanceState, InstanceView, RouterCounters};

use self::budget::RetryBudget;
use self::discovery::{DiscoveryMessage, RegistrationEntry};
use self::dispatcher::{LegDispatcher, RouterTimer};
use self::queue::RequestQueue;
use self::registry::{InstanceId, RegisterOutcome};
use self::rejections::Rejections;
use self::requests::RouterRequest;
use super::dialect::moriio::registration::MoriioRegistration;
use super::error::stranger;
use super::ids::{ClientId, EngineId, Incarnation};
use super::layout::Mismatch;
use super::machine::{Gauges, Machine, Outbox, Turn};
use super::time::Nanos;
use crate::fabric::{ControlEvent, Endpoint, LinkId};
use crate::source::PeerSource;
use std::collections::{BTreeMap, BTreeSet};

/// What nobody fetches any more of one prefill.
pub(super) const ABANDONED_MAX: usize = abandon_queue::KEYS_MAX;

/// Links that are remembered with whence they came.
const NAMED_MAX: usize = 4_096;

/// Entries that are kept whatever instances there are: whence links came, registrations that were not
/// taken, each and by reason, and models that were served before.
pub(super) const KEPT_MAX: usize =
    NAMED_MAX + rejections::LISTED_MAX + rejections::REASONS + registry::models::SERVED_MAX;

type RouterTurn<'a> = Turn<'a, RouterEffect>;

#[derive(Debug)]
pub struct Router {
    dispatcher: LegDispatcher,
    requests: BTreeMap<ClientId, RouterRequest>,
    waiting: RequestQueue,
    /// Requests that wait before they are sent again to who failed them.
    paused: BTreeSet<ClientId>,
    next_ticket: u64,
    /// Requests of which a leg was sent.
    active: u32,
    budget: RetryBudget,
    draining: bool,
    /// It has let its instances go: what it knows of them is what they said last.
    released: bool,
    rejections: Rejections,
    /// Whence links came, as far as known.
    from: BTreeMap<LinkId, Endpoint>,
    /// Links of who has proven to know the secret.
    signed: BTreeSet<LinkId>,
}

impl Router {
    /// A router without instances. `incarnation` makes the transfer ids unique, so no other router
    /// of the same instances and no earlier incarnation may have had it.
    pub fn new(mut config: RouterConfig, incarnation: Incarnation) -> Self {
        config.probe = config.probe.filter(|period| *period > Nanos::ZERO);
        Router {
            dispatcher: LegDispatcher::new(config, incarnation),
            requests: BTreeMap::new(),
            waiting: RequestQueue::default(),
            paused: BTreeSet::new(),
            next_ticket: 0,
            active: 0,
            budget: RetryBudget::default(),
            draining: false,
            released: false,
            rejections: Rejections::default(),
            from: BTreeMap::new(),
            signed: BTreeSet::new(),
        }
    }

    /// The instances, oldest first.
    pub fn instances(&self, now: Nanos) -> impl Iterator<Item = InstanceView<'_>> {
        self.dispatcher.registry.iter().map(move |(_, instance)| InstanceView::new(instance, now))
    }

    /// What was counted since the start.
    pub fn counters(&self) -> &RouterCounters {
        &self.dispatcher.counters
    }

    /// The registrations that were not taken lately, oldest first.
    pub fn rejections(&self) -> impl Iterator<Item = &Rejection> {
        self.rejections.iter()
    }

    /// Pairs that are not made because they do not fit: prefill, decode, and why.
    pub fn misfits(&self) -> impl Iterator<Item = (&EngineId, &EngineId, &Mismatch)> {
        let registry = &self.dispatcher.registry;
        registry.iter().flat_map(move |(_, prefill)| {
            prefill.misfits.iter().filter_map(move |(decode, why)| {
                let decode = &registry.get(*decode)?.registration.engine;
                Some((&prefill.registration.engine, decode, why))
            })
        })
    }

    /// True if it is about to end: it has let its instances go, or takes no new requests.
    pub fn is_draining(&self) -> bool {
        self.draining || self.released
    }

    /// Time after which a client should retry a request that is refused now: until an instance
    /// takes legs and the waiting requests are served at the recent rate, from one second to one
    /// minute.
    pub fn retry_after(&self, now: Nanos) -> Nanos {
        let again = match self.dispatcher.has_both(now) {
            true => {
                let opens = self.dispatcher.registry.opens_after(now);
                opens.max(self.budget.time_for(now, self.waits() + 1))
            }
            // An instance that comes back has registered by then.
            false => self.dispatcher.config.expiry,
        };
        again.clamp(Nanos::from_secs(1), Nanos::from_secs(60))
    }

    fn control(&mut self, event: ControlEvent, turn: &mut RouterTurn<'_>) {
        // An instance is known by its registrations, not by its link: links come and go.
        match event {
            ControlEvent::Frame { link, parts, .. } => match discovery::read(&parts) {
                Ok(DiscoveryMessage::Entry(entry)) => {
                    // Why it was not taken is listed.
                    let _listed = self.register(*entry, Some(link), turn);
                }
                Ok(DiscoveryMessage::MoriioRegistration(beat)) => self.heartbeat(&beat, link, turn),
                Err(unread) => {
                    let from =
                        unread.from.unwrap_or_else(|| stranger(link, self.from.get(&link)).into());
                    self.reject(turn.now, &from, unread.reason, &unread.why);
                }
            },
            ControlEvent::LinkDown { link } => self.unlinked(link, turn),
            ControlEvent::LinkUp { link, from, .. } => {
                let from = from.filter(|_| self.from.len() < NAMED_MAX);
                self.from.extend(from.map(|from| (link, from)));
            }
        }
    }

    fn reject(&mut self, now: Nanos, from: &str, reason: RejectReason, why: &str) {
        *self.dispatcher.counters.rejected.entry(reason).or_default() += 1;
        self.rejections.add(now, from, reason, why);
    }

    fn heartbeat(&mut self, beat: &MoriioRegistration, link: LinkId, turn: &mut RouterTurn<'_>) {
        if u32::from(beat.dp_size().get()) > self.dispatcher.config.instances_max {
            let why = "dp_size above the number of instances that the router takes";
            return self.reject(turn.now, &beat.http().0, RejectReason::DataParallel, why);
        }
        let is_signed = self.signed.contains(&link);
        if let Err(reason) = admission::admit(beat.http(), is_signed, &self.dispatcher.config) {
            return self.reject(turn.now, &beat.http().0, reason, &reason.to_string());
        }
        let entries = self.dispatcher.registry.entries(beat);
        self.dispatcher.registry.retire_replaced(&entries);
        for entry in entries {
            if self.register(entry, Some(link), turn).is_err() {
                // The other ranks would be told the same.
                return;
            }
        }
    }

    /// Whence a link came, of those that came from an address.
    fn source(&self, link: LinkId) -> Option<PeerSource> {
        match self.from.get(&link) {
            Some(from) => admission::source_of(from),
            None => (self.from.len() >= NAMED_MAX).then_some(admission::UNNAMED),
        }
    }

    fn reject_registration(
        &mut self,
        now: Nanos,
        http: &Endpoint,
        source: Option<PeerSource>,
        reason: RejectReason,
    ) {
        let why = match (reason, source) {
            (RejectReason::Share, Some(source)) => {
                format!("as many instances registered from {source} as are left for others")
            }
            _ => reason.to_string(),
        };
        self.reject(now, &http.0, reason, &why);
    }

    fn register(
        &mut self,
        mut entry: RegistrationEntry,
        link: Option<LinkId>,
        turn: &mut RouterTurn<'_>,
    ) -> Result<(), RejectReason> {
        entry.signed = link.is_some_and(|link| self.signed.contains(&link));
        // What did not come by a link is the operator's.
        let is_trusted = entry.signed || link.is_none();
        let (draining, native) = (entry.registration.draining, entry.native);
        let is_static = entry.dialects().is_static();
        let http = entry.registration.http.clone();
        let causes = failed_legs::take(&mut entry.registration);
        let source = link.and_then(|link| self.source(link));
        let LegDispatcher { registry, config, .. } = &mut self.dispatcher;
        let new = registry.next_instance();
        let admitted = if is_static { Ok(()) } else { admission::admit(&http, is_trusted, config) };
        let registered =
            admitted.and_then(|()| registry.register(turn.now, (entry, source), config));
        let (instance_id, replaced, switched) = match registered {
            Ok(RegisterOutcome::Current { instance_id, replaced, switched }) => {
                (instance_id, replaced, switched)
            }
            Ok(RegisterOutcome::Stale) => {
                self.dispatcher.counters.stale += 1;
                return Ok(());
            }
            // It registered by itself as well, which says more.
            Err(reason @ (RejectReason::Superseded | RejectReason::SignedBefore)) if is_static => {
                return Err(reason);
            }
            Err(reason) => {
                self.reject_registration(turn.now, &http, source, reason);
                return Err(reason);
            }
        };
        if let Some(instance_id) = instance_id {
            let lives = if draining { config.drain_max } else { config.expiry };
            self.dispatcher.timers.arm(RouterTimer::Expiry(instance_id), turn.now + lives);
            let instance = self.dispatcher.registry.instance_mut(instance_id);
            (instance.link, instance.hostless) = (link, None);
            self.dispatcher.registry.note_models(instance_id);
            causes.into_iter().for_each(|causes| turn.push(causes));
            // MoRIIO has no messages of routers.
            if let Some(link) = link.filter(|_| native) {
                let abandoned = &mut self.dispatcher.registry.instance_mut(instance_id).abandoned;
                let told = abandoned.repeat(link);
                told.into_iter().for_each(|command| turn.push(command));
            }
            self.dispatcher.heard_of_pairs(turn.now, instance_id);
            self.dispatcher.await_loads(turn.now);
            if instance_id == new && (link.is_some() || is_static) {
                let is_unproven = self.dispatcher.config.probe.is_some();
                self.dispatcher.registry.instance_mut(instance_id).unproven = is_unproven;
                self.dispatcher.probe(instance_id, turn);
            }
            if self.dispatcher.registry.is_over(instance_id) {
                self.dispatcher.remove(instance_id);
            }
        }
        if let Some(former) = switched {
            self.dispatcher.counters.switched += 1;
            let until = turn.now + self.dispatcher.config.drain_max;
            self.dispatcher.timers.arm(RouterTimer::Expiry(former), until);
        }
        for replaced in replaced {
            self.replaced(replaced, turn);
        }
        self.limit_former(instance_id, turn.now);
        if instance_id == Some(new) {
            self.wake(turn);
        }
        Ok(())
    }

    fn fire(&mut self, turn: &mut RouterTurn<'_>) {
        while let Some(due) = self.dispatcher.timers.next()
            && let Some(timer) = self.dispatcher.timers.pop_due(turn.now)
        {
            if self.put_off(&timer, due, turn.now) {
                continue;
            }
            match timer {
                RouterTimer::Expiry(instance_id) => self.expired(instance_id, turn),
                // Nothing to do: each turn checks the waiting requests after its timers.
                RouterTimer::Heal(_) | RouterTimer::Room(_) => {}
                RouterTimer::Probe(instance_id) => self.dispatcher.probe(instance_id, turn),
                RouterTimer::Load => self.dispatcher.ask_loads(turn),
                RouterTimer::Wait(client) => self.gave_up(client, turn),
                RouterTimer::Retry(client) => self.retry(client, turn),
            }
        }
    }
}

impl Machine for Router {
    type Input = RouterInput;
    type Effect = RouterEffect;

    fn handle(&mut self, now: Nanos, input: RouterInput, out: &mut Outbox<RouterEffect>) {
        let turn = &mut Turn::new(now, out);
        self.fire(turn);
        match input {
            RouterInput::Control(event) if self.released => self.turn_away(&event, turn),
            RouterInput::Control(event) => self.control(event, turn),
            RouterInput::Proof { .. } if self.released => {}
            RouterInput::Proof { link, proof: RegistrationProof::Signed } => {
                self.signed.insert(link);
            }
            RouterInput::Proof { link, proof: RegistrationProof::Wrong(why) } => {
                let from = stranger(link, self.from.get(&link));
                self.reject(turn.now, &from, RejectReason::WrongSignature, &why);
            }
            RouterInput::Register(registration) => {
                let _listed = self.register(RegistrationEntry::native(registration), None, turn);
            }
            RouterInput::Static(_) if self.released => {}
            RouterInput::Static(named) => {
                for entry in self.dispatcher.registry.static_entries(&named) {
                    // Why it was not taken is listed.
                    let _listed = self.register(entry, None, turn);
                }
            }
            RouterInput::Request(request) => self.request(request, turn),
            RouterInput::Gone { client } => self.finish(client, None, turn),
            RouterInput::Leg { leg, event } => self.leg_event(leg, event, turn),
            RouterInput::Probed { probe, answers, models } => {
                if !answers {
                    self.unanswered(InstanceId(probe.0), turn);
                }
                // Models that it lists later are checked when the pauses are over.
                if self.dispatcher.probed(turn.now, probe, (answers, models)) {
                    self.wake(turn);
                }
            }
            RouterInput::Load { http, load } => self.dispatcher.loaded(turn.now, &http, load),
            RouterInput::Release => self.release(turn),
            RouterInput::Drain => self.draining = true,
            RouterInput::Tick => {}
        }
        self.pump(turn);
    }

    fn deadline(&self) -> Option<Nanos> {
        self.dispatcher.timers.next()
    }

    fn gauges(&self) -> Gauges {
        let rejected: u64 = self.dispatcher.counters.rejected.values().sum();
        let requests = self.requests.values().map(RouterRequest::entries).sum::<usize>();
        let remembered = self.dispatcher.remembered()
            + self.from.len()
            + self.signed.len()
            + self.rejections.len();
        Gauges {
            transfers: self.requests.len() as u32,
            queued: self.waits() as u32,
            peers: self.dispatcher.registry.len() as u32,
            entries: (self.dispatcher.entries() + requests) as u32,
            remembered: remembered as u32,
            failures: self.dispatcher.registry.failures() as u32,
            violations: rejected.min(u64::from(u32::MAX)) as u32,
            ..Gauges::default()
        }
    }
}

#[cfg(test)]
mod tests;
