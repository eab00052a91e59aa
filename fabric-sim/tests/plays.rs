//! Scenario files and seeds of the swarms, each with the outcome that it is to have. What runs them
//! for a change is `kvferry run` and `kvferry sweep`; this is the last resort of `./test --mutants`.

use kvferry_scenarios::Scenario;
use kvferry_sim::world::{RunReport, SimOptions, run};
use std::path::{Path, PathBuf};

/// Seeds of the swarm, and of the one under load.
const SEEDS: u64 = 300;
const LOADED: u64 = 60;

/// Files that belong to tools.
const TOOLS: [&str; 2] = ["Cargo.toml", "clippy.toml"];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios")
}

fn load(path: &Path) -> Scenario {
    kvferry_scenarios::load(path).unwrap_or_else(|why| panic!("{why}"))
}

/// Scenario files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("the folder is there");
    let mut entries: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be listed").path()).collect();
    entries.sort();
    let is_scenario = |path: &Path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.ends_with(".toml") && !TOOLS.contains(&name.as_str())
    };
    let found = entries.into_iter().flat_map(|path| match path.is_dir() {
        true => files(&path),
        false => Vec::from_iter(Some(path).filter(|path| is_scenario(path))),
    });
    found.collect()
}

/// Plays a seed of a scenario, which has to end as it expects.
#[track_caller]
fn play(scenario: &Scenario, seed: u64) -> RunReport {
    let drawn = scenario.draw(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
    let report = run(&drawn, SimOptions::default());
    let (name, violations) = (&drawn.name, &report.violations);
    let verdict = report.verdict.code();
    assert_eq!(verdict, drawn.expect.exit, "{name}, seed {seed}: {violations:#?} {report:#?}");
    report
}

/// Percentages of requests that failed and that were recomputed.
#[track_caller]
fn swarm(file: &str, seeds: u64) -> (f64, f64) {
    let scenario = load(&folder().join(file));
    let reports: Vec<RunReport> = (0..seeds).map(|seed| play(&scenario, seed)).collect();
    let sum = |of: fn(&RunReport) -> u64| reports.iter().map(of).sum::<u64>() as f64;
    let (finished, failed) = (sum(|it| it.finished), sum(|it| it.failed));
    assert!(finished > 0.0, "nothing finished");
    (100.0 * failed / (finished + failed), 100.0 * sum(|it| it.recomputed) / finished)
}

#[test]
fn each_scenario_file_ends_as_it_expects() {
    let mut count = 0;
    for path in files(&folder()) {
        let scenario = load(&path);
        for seed in scenario.seeds() {
            play(&scenario, seed);
            count += 1;
        }
    }
    assert!(count > 200, "only {count} runs");
}

#[test]
fn seeds_of_the_swarm_end_as_they_expect() {
    let (failed, recomputed) = swarm("swarm.toml", SEEDS);
    assert!(failed <= 28.0 && recomputed <= 31.0, "{failed} % failed, {recomputed} % recomputed");
}

#[test]
fn seeds_of_the_swarm_under_load_end_as_they_expect() {
    let (failed, recomputed) = swarm("swarm-load.toml", LOADED);
    assert!(failed <= 6.0 && recomputed <= 11.0, "{failed} % failed, {recomputed} % recomputed");
}
