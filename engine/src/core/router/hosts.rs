//! Instances whose hosts are lost, and what the router gives up because of that.
//!
//! An instance whose host is lost gets no legs. It stays for [`RouterConfig::host_wait`] while its server
//! answers probes: legs there end with what the server answers, and requests wait for its next host.
//! Once a decode leg streams, nothing ends it but its HTTP connection, or a server that answers no
//! probe.
//!
//! [`RouterConfig::host_wait`]: super::RouterConfig::host_wait

use super::dispatcher::{LegDispatcher, LegInFlight, RouterTimer};
use super::io::{LeaveReason, LegFailure};
use super::registry::{HostLoss, InstanceId};
use super::{Router, RouterTurn};
use crate::core::ids::ClientId;
use crate::core::message::Role;
use crate::core::time::Nanos;
use crate::fabric::LinkId;

/// Delay of a deadline from which on the router takes itself to have stood still. Registrations that
/// came meanwhile have as much time again to be read.
const STANDSTILL: Nanos = Nanos::from_secs(1);

/// Shortest time between two looks whether a request still waits for a host.
const STEP_MIN: Nanos = Nanos::from_ms(100);

impl Router {
    /// Arms a deadline again that waits for registrations, if it fires so late that the router has
    /// not read yet what came before it. Returns true if it did.
    pub(super) fn put_off(&mut self, timer: &RouterTimer, due: Nanos, now: Nanos) -> bool {
        let awaits = matches!(timer, RouterTimer::Expiry(_) | RouterTimer::Wait(_));
        if !awaits || now - due < STANDSTILL || planted!("late-expiries-count-at-once") {
            return false;
        }
        let until = now + STANDSTILL;
        if let RouterTimer::Expiry(instance_id) = timer {
            let instance = self.dispatcher.registry.instance_mut(*instance_id);
            if instance.lost || instance.is_leaving() {
                return false;
            }
            instance.expires = instance.expires.max(until);
        }
        self.dispatcher.timers.arm(*timer, until);
        true
    }

    /// A registration has expired, or the time for an instance without a host, for the streams of one
    /// that is lost, or for the legs of one that drains.
    pub(super) fn expired(&mut self, instance_id: InstanceId, turn: &mut RouterTurn<'_>) {
        let instance = self.dispatcher.registry.instance_mut(instance_id);
        let is_first = !instance.lost && !instance.is_leaving();
        if !is_first {
            let is_silent = instance.lost && !instance.replaced;
            let reason = if is_silent { LeaveReason::Silent } else { LeaveReason::Drained };
            instance.lost = true;
            self.abandon(instance_id, true, reason, turn);
            self.remove_if_over(instance_id);
        } else if self.dispatcher.config.probe.is_some()
            && instance.hostless.is_none()
            && !self.released
        {
            self.host_lost(instance_id, HostLoss::Silent, turn);
        } else {
            self.lose(instance_id, turn);
        }
    }

    /// The connection that instances registered by has ended.
    pub(super) fn unlinked(&mut self, link: LinkId, turn: &mut RouterTurn<'_>) {
        for instance_id in self.forget(link) {
            let instance = self.dispatcher.registry.instance_mut(instance_id);
            // One that drains ends, and hangs up.
            if !instance.lost && !instance.is_leaving() {
                self.host_lost(instance_id, HostLoss::LinkEnded, turn);
            }
        }
    }

    /// Sends nothing more to an instance until it registers again, and asks whether its server goes
    /// on.
    fn host_lost(&mut self, instance_id: InstanceId, loss: HostLoss, turn: &mut RouterTurn<'_>) {
        let instance = self.dispatcher.registry.instance_mut(instance_id);
        let is_known = instance.hostless.replace(loss).is_some();
        if is_known {
            return;
        }
        self.dispatcher.counters.hostless += 1;
        if self.dispatcher.config.probe.is_some() {
            let until = turn.now + self.dispatcher.config.host_wait;
            self.dispatcher.registry.instance_mut(instance_id).expires = until;
            self.dispatcher.timers.arm(RouterTimer::Expiry(instance_id), until);
            self.dispatcher.probe(instance_id, turn);
        }
    }

    /// An instance did not answer a probe.
    pub(super) fn unanswered(&mut self, instance_id: InstanceId, turn: &mut RouterTurn<'_>) {
        let instance = self.dispatcher.registry.get(instance_id);
        if instance.is_some_and(|it| it.hostless.is_some() && !it.lost) {
            self.lose(instance_id, turn);
        }
    }

    /// The registration of an instance is over: its legs fail over, but for its streams.
    fn lose(&mut self, instance_id: InstanceId, turn: &mut RouterTurn<'_>) {
        self.dispatcher.registry.instance_mut(instance_id).lost = true;
        self.dispatcher.counters.expired += 1;
        let until = turn.now + self.dispatcher.config.stream_grace;
        self.dispatcher.timers.arm(RouterTimer::Expiry(instance_id), until);
        self.abandon(instance_id, false, LeaveReason::Silent, turn);
        self.remove_if_over(instance_id);
    }

    /// Gives up what an instance had whose place another one has now. Its streams go on, unless
    /// it had to make room in the table for another server.
    pub(super) fn replaced(&mut self, instance_id: InstanceId, turn: &mut RouterTurn<'_>) {
        self.dispatcher.counters.replaced += 1;
        let is_displaced = !self.dispatcher.registry.instance_mut(instance_id).replaced;
        let ends_streams = is_displaced || planted!("streams-end-with-their-incarnation");
        if !planted!("replaced-incarnation-keeps-its-legs") {
            self.abandon(instance_id, ends_streams, LeaveReason::Replaced, turn);
        }
        self.remove_if_over(instance_id);
        if self.dispatcher.registry.get(instance_id).is_some() {
            self.dispatcher.strip(instance_id);
        }
    }

    /// Gives the streams of a replaced incarnation in another role, for which a new instance waits, the
    /// time of one that drains.
    pub(super) fn limit_former(&mut self, instance_id: Option<InstanceId>, now: Nanos) {
        let LegDispatcher { registry, timers, config, .. } = &mut self.dispatcher;
        let new = instance_id.and_then(|instance_id| registry.get(instance_id));
        let former = new
            .and_then(|new| new.follows)
            .filter(|former| registry.get(*former).is_some_and(|former| former.replaced));
        if let Some(former) = former {
            timers.arm_if_idle(RouterTimer::Expiry(former), now + config.drain_max);
        }
    }

    fn remove_if_over(&mut self, instance_id: InstanceId) {
        if self.dispatcher.registry.is_over(instance_id) {
            self.dispatcher.remove(instance_id);
        }
    }

    /// The roles that a request needs instances of.
    pub(super) fn needed_roles(&self) -> &'static [Role] {
        match self.dispatcher.config.direct_below {
            0 => &[Role::Prefill, Role::Decode],
            // Decodes compute short prompts alone.
            _ => &[Role::Decode],
        }
    }

    /// Makes a request wait on whose instances have all lost their hosts, or did and have not answered
    /// a probe since. Returns false if that is not so.
    pub(super) fn waits_for_host(&mut self, client: ClientId, now: Nanos) -> bool {
        let roles = self.needed_roles();
        let LegDispatcher { registry, config, .. } = &self.dispatcher;
        let request = self.requests.get_mut(&client).expect("only known requests wait");
        let model = request.works.first().and_then(|work| work.model.as_deref());
        let hostless = registry.hostless_role(now, model, roles).map(|(_, until)| until);
        let returns = |until: &Nanos| {
            now < *until
                && registry.returns(now, model, roles)
                && !planted!("who-returns-is-not-waited-for")
        };
        let Some(until) = hostless.or_else(|| request.host_until.filter(returns)) else {
            return false;
        };
        request.host_until = Some(until);
        // An instance that answers no probe is not waited for any longer.
        let step = config.wait_max.max(STEP_MIN);
        self.dispatcher.timers.arm(RouterTimer::Wait(client), until.min(now + step));
        true
    }

    /// True if a failed leg is not a try, because an instance of its attempt has lost its host. A
    /// connection that failed may be the doing of the request itself, and so may a host that is lost
    /// again and again: only as many tries are excused as a request has.
    pub(super) fn is_excused(&self, leg: &LegInFlight, failure: &LegFailure) -> bool {
        let request = self.requests.get(&leg.client).expect("a leg has a request");
        let is_telling = matches!(failure, LegFailure::Connection | LegFailure::Busy { .. });
        if is_telling
            || failure.is_final()
            || request.excused >= self.dispatcher.config.retries_max
            || planted!("tries-without-a-host-count")
        {
            return false;
        }
        let others = request.works[leg.prompt].legs().filter_map(|id| self.dispatcher.leg(id));
        let mut ids = others.chain([leg]).flat_map(|leg| [Some(leg.instance_id), leg.prefill]);
        ids.any(|id| id.is_some_and(|id| self.dispatcher.registry.lacks_host(id)))
    }
}

impl LegDispatcher {
    /// Forgets an instance without legs.
    pub(super) fn remove(&mut self, instance_id: InstanceId) {
        self.disarm(instance_id);
        self.registry.remove(instance_id);
    }

    /// Keeps of an instance that was replaced what its streams need.
    pub(super) fn strip(&mut self, instance_id: InstanceId) {
        self.disarm(instance_id);
        self.registry.strip(instance_id);
    }

    fn disarm(&mut self, instance_id: InstanceId) {
        self.timers.cancel(&RouterTimer::Expiry(instance_id));
        self.timers.cancel(&RouterTimer::Heal(instance_id));
        self.timers.cancel(&RouterTimer::Room(instance_id));
        self.timers.cancel(&RouterTimer::Probe(instance_id));
    }
}
