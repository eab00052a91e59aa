//! I11 and I13, which take two runs to see: scenario files and seeds of the swarm come out the same
//! when they are run again, and when all wall clocks are shifted.

use kvferry_scenarios::{Run, Scenario};
use kvferry_sim::invariants::{compare_clocks, compare_traces};
use kvferry_sim::world::{RunReport, SimOptions, run};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

/// Ten years, in microseconds.
const SHIFT: u64 = 10 * 365 * 86_400 * 1_000_000;

/// Requests of a run that is cheap enough.
const REQUESTS: usize = 64;

/// Seeds of the swarm, and of the one under load.
const SEEDS: u64 = 24;
const LOADED: u64 = 8;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios")
}

fn load(path: &Path) -> Scenario {
    kvferry_scenarios::load(path).unwrap_or_else(|why| panic!("{why}"))
}

fn files(folder: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(self::folder().join(folder)).expect("the folder is there");
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.expect("it can be listed").path()).collect();
    files.retain(|path| path.extension().is_some_and(|ext| ext == "toml"));
    files.sort();
    files
}

/// All that a run came to, but for what names incarnations by their wall clocks: frames, and so the
/// trace.
fn outline(report: &RunReport) -> u64 {
    let report = RunReport { trace_hash: 0, recording: None, ..report.clone() };
    let mut hasher = DefaultHasher::new();
    format!("{report:?}").hash(&mut hasher);
    hasher.finish()
}

/// A second run has the same trace; of scenario files `kvferry run` sees that.
#[track_caller]
fn same(what: &Run) {
    let [first, again] = [(); 2].map(|()| run(what, SimOptions::default()));
    let traces = [&first, &again].map(|report| (report.trace_hash, report.events));
    assert_eq!(compare_traces("a second run", traces[0], traces[1]), None, "{}", what.name);
    same_by_any_clock(what, &first);
}

#[track_caller]
fn same_by_any_clock(what: &Run, first: &RunReport) {
    let shifted = run(what, SimOptions { wall: SHIFT, ..SimOptions::default() });
    assert_ne!(shifted.trace_hash, first.trace_hash, "{}: no clock was shifted", what.name);
    let outlines = [first, &shifted].map(|report| (outline(report), report.events));
    let differ = compare_clocks(outlines[0], outlines[1]);
    assert_eq!(differ, None, "{} seed {}: {first:#?} {shifted:#?}", what.name, what.seed);
}

#[test]
fn scenario_files_come_out_the_same_by_any_clock() {
    let mut count = 0;
    for path in ["smoke", "faults", "known", "load", "regressions"].into_iter().flat_map(files) {
        let scenario = load(&path);
        let seed = scenario.seeds().next().expect("a file has a seed");
        let drawn = scenario.draw(seed).unwrap_or_else(|why| panic!("{why}"));
        if drawn.requests.len() <= REQUESTS {
            same_by_any_clock(&drawn, &run(&drawn, SimOptions::default()));
            count += 1;
        }
    }
    assert!(count > 95, "only {count} files are cheap");
}

#[test]
fn seeds_of_the_swarm_come_out_the_same() {
    let swarm = load(&folder().join("swarm.toml"));
    for seed in 0..SEEDS {
        same(&swarm.draw(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}")));
    }
}

#[test]
fn seeds_of_the_swarm_under_load_come_out_the_same() {
    let swarm = load(&folder().join("swarm-load.toml"));
    for seed in 0..LOADED {
        same(&swarm.draw(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}")));
    }
}
