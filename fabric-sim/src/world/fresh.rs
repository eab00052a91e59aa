//! Who was healed is as good as new: beside a fleet of the same shape that never saw a fault, a
//! request over a pair takes as long, and machines have as many peers and links.

use super::report::{RunReport, verdict};
use super::{SimOptions, Simulation, simulate};
use crate::invariants::Violation;
use crate::observation::InstanceMachine;
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::time::Nanos;
use kvferry_scenarios::lists::{FaultKind, InvariantId};
use kvferry_scenarios::run::{InstanceSettings, LivenessMode, Run};
use std::collections::BTreeSet;

/// What a request after the faults may take beside one in a fresh fleet, whose times are drawn
/// anew: twice as long, and the jitter of a few messages more. Each pause of the protocol is longer. In a pool that was
/// used, blocks that are not side by side make more operations, each of which may take a round trip.
fn longest(fresh: &PairProbe, operations: u64, jitter: Nanos) -> Nanos {
    let more = operations.saturating_sub(fresh.operations);
    fresh.took.scale(2, 1) + jitter.scale(16 + 2 * more, 1)
}

/// A request that was served by a pair of instances over the fast path after the faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairProbe {
    /// The prefill and the decode, as they were then.
    pub(super) pair: [InstanceSettings; 2],
    /// From the request to its answer.
    pub(super) took: Nanos,
    /// Operations that were posted meanwhile.
    pub(super) operations: u64,
}

impl PairProbe {
    fn names(&self) -> [&str; 2] {
        self.pair.each_ref().map(|one| one.name.as_str())
    }
}

/// What a machine held at the end, by the name of its instance.
pub type MachineAtRest = (String, InstanceMachine, Gauges);

impl Simulation {
    /// A probe for one pair took the fast path.
    pub(super) fn pair_served(&mut self, pair: (u16, u16), took: Nanos, operations: u64) {
        let spec = |at: u16| self.instances[usize::from(at)].spec.clone();
        let pair = [spec(pair.0), spec(pair.1)];
        let probe = PairProbe { pair, took, operations };
        // Of several the last counts.
        self.pairs.retain(|known| known.names() != probe.names());
        self.pairs.push(probe);
    }

    /// What the machines of instances held when they were asked last.
    pub(super) fn machines_at_rest(&self) -> Vec<MachineAtRest> {
        let slots = (0..self.machines.len() as u32).filter(|slot| self.acts(*slot));
        let known = slots.filter_map(|slot| {
            let machine = &self.machines[slot as usize];
            let (_, part) = self.machine(slot)?;
            let name = self.run.instances[usize::from(machine.instance?)].name.clone();
            Some((name, part, machine.gauges))
        });
        known.collect()
    }
}

/// A fleet of the instances that served after the faults, as they were then, to which nothing
/// happens.
fn fresh_run(run: &Run, pairs: &[PairProbe]) -> Run {
    let served = |name: &str| {
        let mut both = pairs.iter().flat_map(|probe| &probe.pair);
        both.find(|one| one.name == name).cloned()
    };
    let instances = run.instances.iter().filter_map(|one| served(&one.name)).collect();
    // Runs that differ in their texts only have the same fleet.
    let (about, faults, liveness) = (String::new(), Vec::new(), LivenessMode::Heal);
    Run { about, instances, faults, liveness, ..run.clone() }
}

/// The fresh fleet beside which a run was judged last; it is not simulated again for a run that needs the
/// same one.
#[derive(Debug, Default)]
pub struct FreshFleet {
    known: Option<(Run, SimOptions, FreshOutcome)>,
}

/// Outcome of a fleet to which nothing happened.
#[derive(Debug)]
struct FreshOutcome {
    pairs: Vec<PairProbe>,
    rest: Vec<MachineAtRest>,
}

impl FreshFleet {
    fn outcome(&mut self, run: Run, options: SimOptions) -> &FreshOutcome {
        let is_same = |(known, with, _): &(Run, SimOptions, _)| (known, *with) == (&run, options);
        let known = self.known.take().filter(is_same);
        let (.., outcome) = self.known.insert(known.unwrap_or_else(|| {
            let RunReport { pairs, rest, .. } = simulate(&run, options, &mut |_| {});
            (run, options, FreshOutcome { pairs, rest })
        }));
        outcome
    }
}

/// Adds to the report what is worse than in a fresh fleet.
pub(super) fn judge(
    run: &Run,
    options: SimOptions,
    fleet: &mut FreshFleet,
    report: &mut RunReport,
) {
    let is_held = run.expect.hold.is_empty() || run.expect.hold.contains(&InvariantId::Heals);
    if options.fresh || !options.check || !is_held || report.pairs.is_empty() {
        return;
    }
    let options = SimOptions {
        fresh: true,
        check: false,
        record: false,
        inputs: false,
        outputs: false,
        ..options
    };
    let fresh = fleet.outcome(fresh_run(run, &report.pairs), options);
    let mut found = slower(run, &report.pairs, &fresh.pairs);
    // Who knows instances that are gone, or that do not fit, has more.
    let roles = |role: usize| {
        report.pairs.iter().map(move |it| it.pair[role].name.as_str()).collect::<BTreeSet<_>>()
    };
    let switches = run.faults.iter().any(|fault| fault.kind == FaultKind::RoleSwitch);
    let is_whole = !switches
        && roles(0).len() + roles(1).len() == run.instances.len()
        && roles(0).len() * roles(1).len() == report.pairs.len();
    if is_whole && report.left.is_none() {
        found.extend(differences(&report.rest, &fresh.rest));
    }
    report.violation_count += found.len() as u64;
    let at = report.sim_time;
    let found = found.into_iter().map(|text| Violation { id: InvariantId::Heals, at, text });
    report.violations.extend(found);
    report.verdict = verdict(&report.violations, &report.unmet);
}

/// Pairs whose request took longer than in the fresh fleet.
fn slower(run: &Run, healed: &[PairProbe], fresh: &[PairProbe]) -> Vec<String> {
    let jitter = run.network.control_latency.max + run.network.latency.max;
    // DP ranks share a link, which stays slow if one of them is no member of the core.
    let slows = run.liveness == LivenessMode::Core
        && run.faults.iter().any(|fault| fault.kind == FaultKind::SlowLink);
    let is_slow = |probe: &&PairProbe| slows && probe.pair.iter().any(|one| one.dp_size > 1);
    let mut found = Vec::new();
    for probe in healed.iter().filter(|probe| !is_slow(probe)) {
        let Some(same) = fresh.iter().find(|same| same.names() == probe.names()) else { continue };
        if probe.took > longest(same, probe.operations, jitter) {
            let ([p, d], took, was) = (probe.names(), probe.took, same.took);
            found.push(format!(
                "a request over {p} and {d} after the faults took {took}, and {was} in a fresh fleet"
            ));
        }
    }
    found
}

/// Machines that have other peers or links than in the fresh fleet.
fn differences(healed: &[MachineAtRest], fresh: &[MachineAtRest]) -> Vec<String> {
    let mut found = Vec::new();
    for (name, part, gauges) in healed {
        let Some((.., same)) = fresh.iter().find(|it| (&it.0, it.1) == (name, *part)) else {
            continue;
        };
        if (gauges.peers, gauges.links) != (same.peers, same.links) {
            found.push(format!(
                "the {part} of {name} has {} peers and {} links after the faults, and {} and {} in \
                 a fresh fleet",
                gauges.peers, gauges.links, same.peers, same.links
            ));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::{RunVerdict, run_beside};

    /// With a fault that does not come: pairs are asked after faults.
    fn over(latency: &str) -> Run {
        let text = format!(
            "about = 'two pairs'\nseed = 1\n[topology]\nprefill = [{{ count = 2 }}]\n\
             link = {{ control_latency = '{latency}' }}\n[workload]\nmode = 'push'\nrequests = 1\n\
             [[fault]]\nkind = 'client.abort'\nchance = 0.000001\n"
        );
        kvferry_scenarios::parse("two.toml", &text, ".".as_ref(), None).unwrap().draw(1).unwrap()
    }

    fn drawn() -> Run {
        over("40us")
    }

    fn fresh(run: &Run) -> RunReport {
        simulate(run, SimOptions { fresh: true, ..SimOptions::default() }, &mut |_| {})
    }

    #[test]
    fn fresh_fleet_serves_each_pair_and_nothing_else() {
        let run = drawn();
        let report = fresh(&run);
        let names: Vec<_> = report.pairs.iter().map(PairProbe::names).collect();
        assert_eq!(names, [["p0", "d0"], ["p1", "d0"]]);
        assert_eq!((report.finished, report.left), (0, None));
        assert_eq!(report.rest.len(), 6, "three cores with a rank each");
    }

    #[test]
    fn request_may_take_twice_the_time_of_a_fresh_fleet_and_some_jitter() {
        let run = drawn();
        let pairs = fresh(&run).pairs;
        let jitter = run.network.control_latency.max + run.network.latency.max;
        let operations = pairs[1].operations;
        for (operations, more, is_slow) in [
            (operations, Nanos::ZERO, false),
            (operations, Nanos(1), true),
            (operations + 1, jitter.scale(2, 1), false),
            (operations + 1, jitter.scale(2, 1) + Nanos(1), true),
        ] {
            let mut healed = pairs.clone();
            healed[1].took = longest(&pairs[1], pairs[1].operations, jitter) + more;
            healed[1].operations = operations;
            assert_eq!(slower(&run, &healed, &pairs).len(), usize::from(is_slow));
        }
        // A pause of the protocol is longer than what is allowed.
        assert!(
            longest(&pairs[0], pairs[0].operations, jitter)
                < run.instances[0].protocol.channel.retransmit
        );
    }

    #[test]
    fn each_machine_has_the_peers_and_links_of_a_fresh_one() {
        let fresh = fresh(&drawn()).rest;
        assert_eq!(differences(&fresh, &fresh), Vec::<String>::new());
        for index in 0..fresh.len() {
            for change in [|one: &mut Gauges| one.peers += 1, |one: &mut Gauges| one.links += 1] {
                let mut healed = fresh.clone();
                change(&mut healed[index].2);
                assert_eq!(differences(&healed, &fresh).len(), 1);
            }
        }
    }

    #[test]
    fn fleet_of_the_run_before_is_taken_again_for_the_same_run_only() {
        let options = SimOptions::default();
        let mut fleet = FreshFleet::default();
        let mut known = Vec::new();
        for latency in ["40us", "40us", "4ms"] {
            let report = run_beside(&over(latency), options, &mut fleet);
            assert_eq!(report.verdict, RunVerdict::Held, "{latency}: {:?}", report.violations);
            known.push(fleet.known.as_ref().map(|(.., fresh)| fresh.pairs.as_ptr()));
        }
        assert!(known[0].is_some(), "no fleet was run");
        assert_eq!(known[0], known[1], "the same fleet was run twice");
    }
}
