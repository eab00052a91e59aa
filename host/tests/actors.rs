//! The actors do what the cores do: the same trace, whichever of the two is simulated. `kvferry run --actors`,
//! which `./test` calls, compares them in each scenario file.

use kvferry::simulator::actors;
use kvferry_scenarios::Scenario;
use kvferry_sim::world::{self, SimOptions};
use std::path::{Path, PathBuf};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios")
}

fn load(path: &Path) -> Scenario {
    kvferry_scenarios::load(path).unwrap_or_else(|error| panic!("{error}"))
}

/// Plays a seed both ways.
fn compare(scenario: &Scenario, seed: u64) {
    let run = scenario.draw(seed).unwrap_or_else(|error| panic!("{error}"));
    let options = SimOptions { check: false, outputs: true, ..SimOptions::default() };
    let (cores, actors) = (world::run(&run, options), actors::run(&run, options));
    let name = scenario.name();
    assert!(cores.events > 0, "{name}: nothing happened");
    assert_eq!(cores.trace_hash, actors.trace_hash, "{name} seed {seed}: the traces differ");
    assert_eq!(cores, actors, "{name} seed {seed}: the traces are equal, the reports are not");
}

#[test]
fn swarm_seeds_give_the_same_trace_through_cores_and_actors() {
    for (name, seeds) in [("swarm.toml", 1..=100), ("swarm-load.toml", 1..=20)] {
        let swarm = load(&folder().join(name));
        seeds.for_each(|seed| compare(&swarm, seed));
    }
}

#[test]
fn a_hundred_runs_of_a_seed_give_one_trace_and_another_seed_another() {
    let swarm = load(&folder().join("swarm.toml"));
    let hash = |seed| {
        let run = swarm.draw(seed).unwrap_or_else(|error| panic!("{error}"));
        world::run(&run, SimOptions::default()).trace_hash
    };
    let first = hash(3);
    assert!((0..100).all(|_| hash(3) == first));
    assert_ne!(hash(4), first);
}
