//! L2: after the faults stopped, new requests take the fast path again.

use super::payload_waits::PayloadWaits;
use super::state::TrackedClient;
use super::{CheckContext, Invariant, takes_few};
use crate::observation::{
    Observation, ObservationKind, PayloadSight, ReceiverOutcome, SimProcessId,
};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::ClientId;
use kvferry_engine::core::payload::PayloadFailure;
use kvferry_engine::core::router::{ClientAnswer, LegFailure};
use kvferry_engine::fabric::FabricError;
use kvferry_scenarios::lists::FaultKind;
use kvferry_scenarios::run::{InstanceSettings, Run};
use std::collections::{BTreeMap, BTreeSet};

/// A probe, which comes when everything transient is over and peers and breakers have had their
/// time, has an answer in the end, and is neither recomputed nor failed, unless its last try met a
/// fault for good or a pair that does not fit; where a pair of the core is whole, no pair that does
/// not fit is met twice, and some probe finds a whole one. The last probes are for one pair each, and
/// every pair that fits serves its own. Who tries no operation twice fails over
/// queue pairs that died before, until all of them were met. Once per pair an instance whose clock
/// went back may be taken for its own past.
#[derive(Debug, Default)]
pub(super) struct HealsFastPath {
    /// Probes without an answer, with the prefill and the decode that alone may serve them.
    open: BTreeMap<ClientId, Option<(u16, u16)>>,
    /// Pairs that do not fit and served a probe.
    misfits: BTreeSet<BTreeSet<u16>>,
    /// Pairs one of which was taken for its own past.
    doubts: BTreeSet<BTreeSet<u16>>,
    /// Instances whose clock went back.
    back: BTreeSet<u16>,
    /// Some operations are tried only once, and whoever meets a queue pair that died before fails.
    once: bool,
    /// Some cores take so few requests that prompts which wait for their lease are all.
    few: bool,
    payloads: PayloadWaits,
    /// Probes that took the fast path, and others.
    fast: u32,
    slow: u32,
}

/// True if these engines said that they do not fit, and it is so.
fn is_misfit(now: CheckContext<'_>, why: &Failure, served: &BTreeSet<u16>) -> bool {
    matches!(why, Failure::Mismatch(_) | Failure::HelloRefused(_)) && now.state.has_misfit(served)
}

impl HealsFastPath {
    pub(super) fn new(run: &Run) -> HealsFastPath {
        let once = |one: &InstanceSettings| one.protocol.transfer.retries_max == 0;
        let any = |of: &dyn Fn(&InstanceSettings) -> bool| run.instances.iter().any(of);
        let payloads = PayloadWaits::new(run);
        HealsFastPath {
            once: any(&once),
            few: any(&takes_few),
            payloads,
            ..HealsFastPath::default()
        }
    }

    /// What the world itself puts at a host of the core arrives at another one.
    fn payload(&mut self, now: CheckContext<'_>, host: SimProcessId, sight: &PayloadSight<'_>) {
        if let PayloadSight::Ended { stream, outcome, .. } = *sight
            && self.payloads.is_probe(stream)
            && *outcome != ReceiverOutcome::Finished
        {
            let from = self.payloads.source(stream).unwrap_or(host.instance);
            // Prompts that wait for their lease are all that a core takes.
            let is_excused =
                self.few && matches!(outcome, ReceiverOutcome::Missing(PayloadFailure::Expired));
            if !is_excused && self.payloads.are_well(now, [from, host.instance]) {
                let [from, to] = [from, host.instance].map(|one| now.name(one));
                now.report(|| {
                    format!(
                        "stream {stream} from {from} to {to} came after the faults, but ended with \
                         {outcome:?}"
                    )
                });
            }
        }
        self.payloads.follow(now.at, host, sight);
    }

    fn answered(&mut self, now: CheckContext<'_>, client: ClientId, answer: &ClientAnswer) {
        let Some(pair) = self.open.remove(&client) else { return };
        let tried = now.state.client(client).map(TrackedClient::last_try).unwrap_or_default();
        let named: BTreeSet<u16> = pair.into_iter().flat_map(|(p, d)| [p, d]).collect();
        let served = if tried.is_empty() { &named } else { &tried };
        let excused = match answer {
            ClientAnswer::Finished { recomputed: None } => {
                self.fast += 1;
                return;
            }
            ClientAnswer::Finished { recomputed: Some(why) }
            | ClientAnswer::Failed(LegFailure::Instance(why)) => {
                // Who had nothing to say to the incarnation before learns only now that it is over.
                let of_incarnation = matches!(
                    why,
                    Failure::HelloRefused(_)
                        | Failure::PeerRestarted
                        | Failure::Fabric(FabricError::PeerGone)
                );
                let doubted = of_incarnation && served.iter().any(|one| self.back.contains(one));
                // A request that is drawn with two different prompts never gets KV.
                matches!(why, Failure::PromptMismatch { .. })
                    || self.few && *why == Failure::Overload
                    || self.once && matches!(why, Failure::Fabric(FabricError::QueuePair))
                    || doubted && self.doubts.insert(served.clone())
                    || is_misfit(now, why, served)
                        && (self.misfits.insert(served.clone())
                            || now.state.whole_pairs().next().is_none())
            }
            // Requests of the simulator's own name no model.
            ClientAnswer::Failed(_) | ClientAnswer::NoModel(_) | ClientAnswer::NoRole { .. } => {
                false
            }
            ClientAnswer::NoInstance(_) | ClientAnswer::Misfit(_) | ClientAnswer::Overload => {
                served.is_empty() && now.state.whole_pairs().next().is_none()
            }
        };
        self.slow += 1;
        if !excused && (served.is_empty() || !now.state.is_broken(served)) {
            let names: Vec<_> = served.iter().map(|one| now.name(*one)).collect();
            now.report(|| {
                format!(
                    "client {client} came after the faults and was served by {}, but ended with \
                     {answer:?}",
                    names.join(" and ")
                )
            });
        }
    }
}

impl Invariant for HealsFastPath {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Faulted, Probed, Answered, Payload]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        match seen {
            Observation::Faulted { kind: FaultKind::ClockBack, from, .. } => {
                self.back.extend(*from);
            }
            Observation::Faulted { kind: FaultKind::Drain, from, .. } => {
                self.payloads.drained.extend(*from);
            }
            Observation::Probed { client, pair } => {
                self.open.insert(*client, *pair);
            }
            Observation::Answered { client, answer } => {
                self.answered(now, *client, answer);
            }
            Observation::Payload { host, sight } => self.payload(now, *host, sight),
            _ => {}
        }
    }

    fn finish(&mut self, now: CheckContext<'_>, _at_rest: bool) {
        for client in std::mem::take(&mut self.open).into_keys() {
            now.report(|| format!("client {client} came after the faults and has no answer"));
        }
        let whole = now.state.whole_pairs().next();
        if let (Some((p, d)), true) = (whole, self.slow > 0 && self.fast == 0) {
            let (slow, [p, d]) = (self.slow, [p, d].map(|one| now.name(one)));
            now.report(|| {
                format!("none of {slow} requests after the faults found that {p} and {d} are whole")
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, D1, InvariantBench, InvariantId, P0, P1, decode_body, finished_answer, prefill_body,
    };
    use crate::observation::SimProcessId;
    use kvferry_engine::core::layout::Mismatch;
    use kvferry_engine::core::message::Role;
    use kvferry_engine::core::router::Unavailable;

    const ALL: &[u16] = &[0, 1, 2, 3];

    fn bench(frozen: &[u16], broken: &[(u16, Option<u16>)]) -> InvariantBench {
        let mut bench = InvariantBench::new(InvariantId::Heals);
        bench.see(Observation::Settled { core: ALL, frozen, broken });
        bench
    }

    fn begin(
        bench: &mut InvariantBench,
        client: u64,
        name: &str,
        p: SimProcessId,
        d: SimProcessId,
    ) {
        bench.dispatched(client, 2 * client, p, &prefill_body(name));
        bench.dispatched(client, 2 * client + 1, d, &decode_body(name));
    }

    fn serve(
        bench: &mut InvariantBench,
        client: u64,
        (p, d): (SimProcessId, SimProcessId),
        recomputed: bool,
    ) {
        bench.probed(client);
        begin(bench, client, "r", p, d);
        bench.answered(client, &finished_answer(recomputed));
    }

    #[test]
    fn a_recompute_long_after_the_faults_is_reported() {
        let mut bench = bench(&[], &[]);
        bench.asked(1);
        begin(&mut bench, 1, "r", P0, D0);
        bench.answered(1, &finished_answer(true));
        serve(&mut bench, 3, (P0, D0), false);
        bench.finish();
        bench.holds();
        serve(&mut bench, 4, (P0, D0), true);
        bench.fails("client 4 came after the faults and was served by p0 and d0");
    }

    #[test]
    fn a_probe_has_an_answer_in_the_end() {
        let mut bench = bench(&[], &[]);
        bench.probed(1);
        bench.finish();
        bench.fails("client 1 came after the faults and has no answer");
    }

    #[test]
    fn pair_that_is_whole_serves_the_probe_that_is_for_it() {
        let none = || ClientAnswer::NoInstance(Unavailable::NoRole(Role::Prefill));
        for (broken, held) in [(None, false), (Some((P0.instance, None)), true)] {
            let mut bench = bench(&[], broken.as_slice());
            bench.probed_at(1, P1, D1);
            begin(&mut bench, 1, "r", P1, D1);
            bench.answered(1, &finished_answer(false));
            bench.probed_at(2, P0, D0);
            bench.answered(2, &none());
            bench.judges(held, "client 2 came after the faults and was served by p0 and d0");
        }
    }

    #[test]
    fn what_is_broken_for_good_is_excused_and_nothing_else() {
        let cut = (P0.instance, Some(D0.instance));
        let mut bench = bench(&[P1.instance], &[cut]);
        serve(&mut bench, 1, (P0, D0), true);
        serve(&mut bench, 2, (P1, D1), true);
        bench.holds();
        serve(&mut bench, 3, (P0, D1), true);
        bench.fails("served by p0 and d1");
    }

    #[test]
    fn only_the_last_try_is_excused() {
        let mut bench = bench(&[], &[(D0.instance, None)]);
        bench.probed(1);
        begin(&mut bench, 1, "r", P0, D0);
        begin(&mut bench, 1, "s", P0, D1);
        bench.answered(1, &finished_answer(true));
        bench.fails("served by p0 and d1");
    }

    #[test]
    fn a_misfit_has_to_be_one() {
        let mismatch = || Failure::Mismatch(Mismatch("tokens".into()));
        let mut bench = bench(&[], &[]);
        bench.probed(1);
        begin(&mut bench, 1, "r", P0, D0);
        bench.answered(1, &ClientAnswer::Finished { recomputed: Some(mismatch()) });
        bench.fails("served by p0 and d0");
        let mut bench = self::bench(&[], &[]);
        bench.start_as(D0, |spec| spec.block_tokens = 24);
        bench.probed(1);
        begin(&mut bench, 1, "r", P0, D0);
        bench.answered(1, &ClientAnswer::Finished { recomputed: Some(mismatch()) });
        bench.holds();
    }

    #[test]
    fn a_misfit_is_met_once_if_a_pair_is_whole() {
        let mismatch = || Failure::Mismatch(Mismatch("tokens".into()));
        for whole in [false, true] {
            let mut bench = match whole {
                true => bench(&[], &[]),
                false => bench(&[], &[(D1.instance, None), (P1.instance, None)]),
            };
            bench.start_as(D0, |spec| spec.block_tokens = 24);
            for client in 1..3 {
                bench.holds();
                bench.probed(client);
                begin(&mut bench, client, "r", P0, D0);
                bench.answered(client, &ClientAnswer::Finished { recomputed: Some(mismatch()) });
            }
            bench.judges(!whole, "client 2 came after the faults and was served by p0 and d0");
        }
    }

    #[test]
    fn a_pair_may_be_in_doubt_once_and_then_not_fit() {
        let gone = || Failure::Fabric(FabricError::PeerGone);
        let mismatch = || Failure::Mismatch(Mismatch("tokens".into()));
        for (second, held) in [(mismatch(), true), (gone(), false)] {
            let mut bench = bench(&[], &[]);
            bench.start_as(D0, |spec| spec.block_tokens = 24);
            let (kind, from) = (FaultKind::ClockBack, Some(D0.instance));
            bench.see(Observation::Faulted { kind, from, to: None });
            for (client, why) in [(1, gone()), (2, second)] {
                bench.holds();
                bench.probed(client);
                begin(&mut bench, client, "r", P0, D0);
                bench.answered(client, &ClientAnswer::Finished { recomputed: Some(why) });
            }
            bench.judges(held, "client 2 came after the faults and was served by p0 and d0");
        }
    }

    #[test]
    fn some_probe_finds_a_whole_pair() {
        let mut bench = bench(&[], &[(D0.instance, None)]);
        serve(&mut bench, 1, (P0, D0), true);
        serve(&mut bench, 2, (P1, D0), true);
        bench.holds();
        bench.finish();
        bench.fails("none of 2 requests after the faults found that p0 and d1 are whole");
    }
}
