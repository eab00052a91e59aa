//! L4: a fault on pair (p, d) makes no request of another pair end failed.

use super::state::TrackedClient;
use super::{CheckContext, Invariant, models};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::dialect::native::Frame;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::ClientId;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{ClientAnswer, LegBody, LegFailure};
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::Run;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Time in which an instance is done with what a client left.
const CANCEL: Nanos = Nanos::from_secs(1);

/// A request may fail only if in the last try of one of its samples some fault concerned the
/// router, an instance that served it, or both of them, or if the two do not fit. That no instance
/// was left needs faults that concern all of a role that serve its model; that nobody serves it,
/// faults that concern all who have registered and do. That a client goes away concerns nobody
/// else. There were more requests than a core takes if one is full, and than the router takes if
/// that is before any fault. A request may fail as busy only if its time to find room is over: a
/// full instance is not broken.
#[derive(Debug, Default)]
pub(super) struct FaultIsolation {
    /// Tries of samples of requests that are open, at least one for each request, and the most that
    /// there were: an instance may not be done yet with one that failed.
    open: u64,
    peak: u64,
    /// Those of clients that went away, and until when instances may not be done with them.
    left: VecDeque<(Nanos, u64)>,
    /// Arrival of each open request.
    asked: BTreeMap<ClientId, Nanos>,
    /// Time that a request has to find room.
    wait_max: Nanos,
    /// Requests that a core takes, and the router.
    room: (u64, u64),
    instances: BTreeSet<u16>,
    pairs: BTreeSet<(u16, u16)>,
    /// A fault concerned the router, or everybody.
    general: bool,
    models: Vec<Option<Arc<str>>>,
    /// Instances of which the router has heard.
    registered: BTreeSet<u16>,
}

/// Decode legs that were sent.
fn legs(client: &TrackedClient) -> u64 {
    client.legs.iter().filter(|leg| leg.is_decode()).count() as u64
}

/// The same, or one for a request that none was sent for.
fn tries(client: &TrackedClient) -> u64 {
    legs(client).max(1)
}

impl FaultIsolation {
    pub(super) fn new(run: &Run) -> FaultIsolation {
        let cores = run.instances.iter().map(|spec| {
            let core = &spec.protocol.core;
            // A request says several things before it hears anything.
            let said = spec.protocol.channel.queue_max / 8;
            core.requests_max.min(core.early_max).min(core.receivers_max).min(said)
        });
        let router = &run.router.config;
        let cores = u64::from(cores.min().unwrap_or(0));
        let room = (cores, u64::from(router.requests_max) + u64::from(router.waiting_max));
        let wait_max = router.wait_max;
        FaultIsolation { room, models: models(run), wait_max, ..FaultIsolation::default() }
    }

    /// True if a core or the router was full by the number of requests alone.
    fn is_full(&self, answer: &ClientAnswer) -> bool {
        let calm = self.instances.is_empty() && self.pairs.is_empty() && !self.general;
        let (core, router) = self.room;
        match answer {
            ClientAnswer::Failed(LegFailure::Instance(Failure::Overload)) => self.peak > core,
            ClientAnswer::NoInstance(_) | ClientAnswer::Misfit(_) | ClientAnswer::Overload => {
                calm && self.peak > router
            }
            _ => false,
        }
    }

    fn opened(&mut self, now: Nanos) {
        while let Some((until, tries)) = self.left.front().copied()
            && until <= now
        {
            self.left.pop_front();
            self.open -= tries;
        }
        self.open += 1;
        self.peak = self.peak.max(self.open);
    }

    fn ended(&mut self, client: Option<&TrackedClient>) {
        self.open -= client.map_or(0, tries);
    }

    fn faulted(&mut self, kind: FaultKind, from: Option<u16>, to: Option<u16>) {
        match (from, to) {
            _ if matches!(kind, FaultKind::Abort | FaultKind::BothAbort) => {}
            (Some(u16::MAX), Some(one)) | (Some(one), None | Some(u16::MAX)) if one != u16::MAX => {
                self.instances.insert(one);
            }
            (None | Some(u16::MAX), _) => self.general = true,
            (Some(from), to) => self.pairs.extend(to.map(|to| (from, to))),
        }
    }

    fn concerns(&self, served: &BTreeSet<u16>) -> bool {
        let pair = |(a, b): &(u16, u16)| served.contains(a) && served.contains(b);
        served.iter().any(|instance| self.instances.contains(instance))
            || self.pairs.iter().any(pair)
    }

    /// Instances that serve a model and that no fault concerns.
    fn spared(&self, now: CheckContext<'_>, model: Option<&str>) -> BTreeSet<u16> {
        let is_spared = |index: &u16| {
            let paired = self.pairs.iter().any(|(a, b)| a == index || b == index);
            now.state.serves(*index, model) && !self.instances.contains(index) && !paired
        };
        let all = (0..).take_while(|index| now.state.place(*index).is_some());
        all.filter(is_spared).collect()
    }

    /// True if some fault concerns every instance of a role, of those that serve a model; where one is
    /// named, they may not fit each other.
    fn concerns_all(&self, now: CheckContext<'_>, model: Option<&str>) -> bool {
        let spared = self.spared(now, model);
        let is_of = |index: &&u16, role| now.state.place(**index).is_some_and(|it| it.role == role);
        let of = |role| spared.iter().filter(move |index| is_of(index, role));
        let mut pairs = of(Role::Prefill).flat_map(|p| of(Role::Decode).map(move |d| (*p, *d)));
        !pairs.any(|(p, d)| model.is_none() || now.state.fits(p, d))
    }

    /// The model that a client's request names.
    fn model(&self, client: ClientId) -> Option<&str> {
        self.models.get(client.0 as usize)?.as_deref()
    }

    fn is_explained(
        &self,
        now: CheckContext<'_>,
        (tries, model): (Option<&TrackedClient>, Option<&str>),
        (answer, has_waited): (&ClientAnswer, bool),
    ) -> bool {
        match answer {
            ClientAnswer::Finished { .. } => true,
            ClientAnswer::NoModel(_) => {
                model.is_some() && self.spared(now, model).is_disjoint(&self.registered)
            }
            ClientAnswer::NoRole { missing, .. } => {
                let is_missing = |index: &&u16| {
                    now.state.place(**index).is_some_and(|place| place.role == *missing)
                };
                let spared = self.spared(now, model);
                let mut known = spared.intersection(&self.registered).filter(is_missing);
                model.is_some() && (self.concerns_all(now, model) || known.next().is_none())
            }
            ClientAnswer::Failed(LegFailure::Request(_)) => true,
            ClientAnswer::Failed(LegFailure::Busy { .. }) => has_waited,
            // The prompts of its two legs differ.
            ClientAnswer::Failed(LegFailure::Instance(Failure::PromptMismatch { .. })) => true,
            _ if self.general || self.is_full(answer) => true,
            ClientAnswer::NoInstance(_) | ClientAnswer::Overload => self.concerns_all(now, model),
            ClientAnswer::Misfit(_) => {
                let serves = |instance| now.state.serves(instance, model);
                !now.state.whole_pairs().any(|(a, b)| serves(a) && serves(b))
            }
            ClientAnswer::Failed(why) => {
                let refused = matches!(
                    why,
                    LegFailure::Instance(Failure::Mismatch(_) | Failure::HelloRefused(_))
                );
                tries.into_iter().flat_map(TrackedClient::last_tries).any(|served| {
                    self.concerns(&served) || (refused && now.state.has_misfit(&served))
                })
            }
        }
    }
}

impl Invariant for FaultIsolation {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Asked, Dispatched, Answered, ClientGone, Faulted, FrameArrived]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Faulted { kind, from, to } => self.faulted(*kind, *from, *to),
            Observation::FrameArrived { from, to: SimProcessId::ROUTER, frame } => {
                if matches!(frame, Frame::Register(_)) {
                    self.registered.insert(from.instance);
                }
            }
            Observation::Asked { client } => {
                self.asked.insert(*client, now.at);
                self.opened(now.at);
            }
            Observation::Dispatched { client, body, .. } => {
                let again = matches!(body, LegBody::Decode { .. });
                let client = now.state.client(*client);
                if client.is_none_or(|client| again && legs(client) > 0) {
                    self.opened(now.at);
                }
            }
            Observation::ClientGone { client } => {
                self.asked.remove(client);
                let tries = now.state.client(*client).map_or(0, tries);
                self.left.push_back((now.at + CANCEL, tries));
            }
            Observation::Answered { client, answer } => {
                let tries = now.state.client(*client);
                self.ended(tries);
                let asked = self.asked.remove(client);
                let has_waited = asked.is_none_or(|asked| now.at >= asked + self.wait_max);
                let request = (tries, self.model(*client));
                if !self.is_explained(now, request, (answer, has_waited)) {
                    let served = tries.into_iter().flat_map(TrackedClient::last_tries).flatten();
                    let names: Vec<_> = served
                        .collect::<BTreeSet<_>>()
                        .into_iter()
                        .map(|one| now.name(one))
                        .collect();
                    let names = names.join(" and ");
                    now.report(|| {
                        format!(
                            "client {client}, served by {names}, failed though no fault concerned \
                             them: {answer:?}"
                        )
                    });
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, D1, InvariantBench, InvariantId, P0, P1, asks_for, decode_body, finished_answer,
        prefill_body, serves,
    };
    use crate::observation::SimProcessId;
    use kvferry_engine::core::router::Unavailable;
    use kvferry_scenarios::lists::FaultKind;

    fn bench() -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::Isolation);
        let (from, to) = (Some(P0.instance), Some(D0.instance));
        bench.see(Observation::Faulted { kind: FaultKind::QpError, from, to });
        bench
    }

    fn fail(bench: &mut InvariantBench, client: u64, p: SimProcessId, d: SimProcessId) {
        bench.dispatched(client, 2 * client, p, &prefill_body("r"));
        bench.dispatched(client, 2 * client + 1, d, &decode_body("r"));
        bench.answered(client, &ClientAnswer::Failed(LegFailure::Connection));
    }

    #[test]
    fn a_request_of_the_same_pair_may_fail() {
        let mut bench = bench();
        fail(&mut bench, 1, P0, D0);
        bench.dispatched(2, 9, P1, &prefill_body("s"));
        bench.answered(2, &finished_answer(true));
        bench.holds();
    }

    #[test]
    fn a_request_fails_as_busy_only_when_its_time_is_over() {
        let busy = ClientAnswer::Failed(LegFailure::Busy { retry_after: None });
        for (waits, holds) in [(29, false), (30, true)] {
            let mut bench = bench();
            bench.see(Observation::Asked { client: ClientId(1) });
            bench.dispatched(1, 1, P1, &prefill_body("r"));
            bench.dispatched(1, 2, D1, &decode_body("r"));
            bench.pass(Nanos::from_secs(waits));
            bench.answered(1, &busy);
            if holds { bench.holds() } else { bench.fails("client 1, served by p1 and d1, failed") }
        }
    }

    #[test]
    fn a_request_of_another_pair_may_not() {
        let mut bench = bench();
        fail(&mut bench, 1, P0, D1);
        bench.fails("client 1, served by p0 and d1, failed");
    }

    #[test]
    fn a_crash_concerns_everything_at_its_instance() {
        let mut bench = InvariantBench::new(InvariantId::Isolation);
        let from = Some(P1.instance);
        bench.see(Observation::Faulted { kind: FaultKind::Crash, from, to: None });
        fail(&mut bench, 1, P1, D1);
        bench.holds();
        fail(&mut bench, 2, P0, D1);
        bench.fails("client 2");
    }

    /// A client that asks for a model and is told so; it is served where this is, in the role in which
    /// instances registered, and hit by faults, or not.
    #[test]
    fn a_model_is_unknown_only_if_nobody_serves_it() {
        for (served, heard, hit, held) in [
            ("b", true, false, true),
            ("a", false, false, true),
            ("a", true, true, true),
            ("a", true, false, false),
        ] {
            let mut bench = InvariantBench::with(InvariantId::Isolation, |run| {
                run.requests = vec![asks_for("a")];
            });
            for who in [P0, P1, D0, D1] {
                let models = if who == P1 { served } else { "other" };
                bench.start_as(who, |spec| spec.models = serves(models));
            }
            if heard {
                bench.hear(P1, Role::Prefill, 1);
            }
            if hit {
                let (kind, from) = (FaultKind::Restart, Some(P1.instance));
                bench.see(Observation::Faulted { kind, from, to: None });
            }
            bench.asked(0);
            bench.answered(0, &ClientAnswer::NoModel([].into()));
            bench.judges(held, "client 0, served by , failed though no fault concerned them");
        }
    }

    #[test]
    fn role_of_a_model_is_missing_until_an_instance_of_it_registers() {
        for (heard, held) in [(false, true), (true, false)] {
            let mut bench = InvariantBench::with(InvariantId::Isolation, |run| {
                run.requests = vec![asks_for("a")];
            });
            for who in [P0, P1, D0, D1] {
                let models = if who == D0 { "other" } else { "a" };
                bench.start_as(who, |spec| spec.models = serves(models));
            }
            for who in [P0, P1] {
                bench.hear(who, Role::Prefill, 1);
            }
            bench.hear(D0, Role::Decode, 1);
            if heard {
                bench.hear(D1, Role::Decode, 1);
            }
            bench.asked(0);
            let served = [].into();
            bench.answered(0, &ClientAnswer::NoRole { missing: Role::Decode, served });
            bench.judges(held, "client 0, served by , failed though no fault concerned them");
        }
    }

    #[test]
    fn only_the_last_try_counts() {
        let mut bench = bench();
        bench.dispatched(1, 1, P0, &prefill_body("r"));
        bench.dispatched(1, 2, D0, &decode_body("r"));
        bench.dispatched(1, 3, P0, &prefill_body("s"));
        bench.dispatched(1, 4, D1, &decode_body("s"));
        bench.answered(1, &ClientAnswer::Failed(LegFailure::Connection));
        bench.fails("client 1, served by p0 and d1, failed");
    }

    #[test]
    fn that_a_client_goes_away_concerns_nobody_else() {
        let mut bench = InvariantBench::new(InvariantId::Isolation);
        let (from, to) = (Some(u16::MAX), None);
        bench.see(Observation::Faulted { kind: FaultKind::Abort, from, to });
        fail(&mut bench, 1, P0, D0);
        bench.fails("client 1");
    }

    #[test]
    fn a_misfit_has_to_be_one() {
        let refused =
            || ClientAnswer::Failed(LegFailure::Instance(Failure::HelloRefused("tp".into())));
        for (others, misfit) in [(&[D1][..], true), (&[D0, D1], true), (&[D0], false)] {
            let mut bench = InvariantBench::new(InvariantId::Isolation);
            bench.start_as(D1, |spec| spec.block_tokens = 24);
            bench.dispatched(1, 1, P0, &prefill_body("r"));
            for (leg, d) in (2..).zip(others) {
                bench.dispatched(1, leg, *d, &decode_body("r"));
            }
            bench.answered(1, &refused());
            bench.judges(misfit, "client 1, served by p0 and d0");
        }
    }

    #[test]
    fn a_full_table_needs_as_many_requests_or_a_fault() {
        let full = || ClientAnswer::Failed(LegFailure::Instance(Failure::Overload));
        for (asked, room) in [(3, true), (2, false)] {
            let limit = |run: &mut Run| {
                for one in &mut run.instances {
                    one.protocol.core.requests_max = 2;
                }
                run.router.config.requests_max = 1;
                run.router.config.waiting_max = 1;
            };
            for answer in [full(), ClientAnswer::NoInstance(Unavailable::NotReady)] {
                let mut bench = InvariantBench::with(InvariantId::Isolation, limit);
                (1..=asked).for_each(|client| bench.asked(client));
                bench.answered(1, &answer);
                bench.judges(room, "client 1");
            }
        }
        let mut bench = bench();
        bench.asked(1);
        bench.answered(1, &full());
        bench.fails("client 1");
    }

    #[test]
    fn what_a_client_left_fills_a_table_for_a_time() {
        for (later, room) in [(Nanos::from_ms(1), true), (CANCEL, false)] {
            let mut bench = InvariantBench::with(InvariantId::Isolation, |run| {
                run.instances.iter_mut().for_each(|one| one.protocol.core.requests_max = 1);
            });
            bench.asked(1);
            bench.see(Observation::ClientGone { client: ClientId(1) });
            bench.now = bench.now + later;
            bench.asked(2);
            let full = ClientAnswer::Failed(LegFailure::Instance(Failure::Overload));
            bench.answered(2, &full);
            bench.judges(room, "client 2");
        }
    }

    #[test]
    fn no_instance_needs_faults_at_all_of_a_role() {
        let mut bench = bench();
        bench.answered(1, &ClientAnswer::NoInstance(Unavailable::NotReady));
        bench.fails("client 1");
        let mut bench = self::bench();
        let from = Some(D1.instance);
        bench.see(Observation::Faulted { kind: FaultKind::Pause, from, to: None });
        bench.answered(1, &ClientAnswer::NoInstance(Unavailable::NotReady));
        bench.holds();
    }
}
