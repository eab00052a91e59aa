//! Every scenario file of the repository is valid, and so is the bundled trace.

use kvferry_scenarios::FaultKind;
use kvferry_scenarios::run::InstanceSettings;
use kvferry_scenarios::trace::TraceReader;
use kvferry_scenarios::trace::generate::{CHAT, generate, to_jsonl};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder().to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("folder can be listed") {
            let path = entry.expect("entry can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "toml")
                && path
                    .file_name()
                    .is_some_and(|name| name != "Cargo.toml" && name != "clippy.toml")
            {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

#[test]
fn every_file_parses_and_draws_twenty_seeds() {
    let files = files();
    assert!(files.len() >= 6, "found only {files:?}");
    for file in files {
        let scenario = kvferry_scenarios::load(&file).unwrap_or_else(|why| panic!("{why}"));
        for seed in 0..20 {
            let run = scenario.draw(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
            assert_eq!(run, scenario.draw(seed).expect("the same as before"));
            assert!(run.requests.is_sorted_by_key(|request| request.arrival), "{}", run.name);
            let names: BTreeSet<_> = run.instances.iter().map(|one| &one.name).collect();
            assert_eq!(names.len(), run.instances.len(), "{}", run.name);
        }
    }
}

#[test]
fn the_swarm_reaches_every_fault_kind_and_leaves_every_one_out() {
    let swarm =
        kvferry_scenarios::load(folder().join("swarm.toml")).unwrap_or_else(|why| panic!("{why}"));
    // No run survives operations that move nothing.
    let survivable = |kind: &FaultKind| *kind != FaultKind::NoCopy;
    let mut seen = BTreeSet::new();
    let mut left_out = BTreeSet::new();
    let mut pairs = BTreeSet::new();
    for seed in 0..400 {
        let run = swarm.draw(seed).unwrap_or_else(|why| panic!("seed {seed}: {why}"));
        assert!(run.requests.len() <= 12);
        let on: BTreeSet<_> =
            run.faults.iter().map(|fault| fault.kind).chain(run.shaped.iter().copied()).collect();
        left_out
            .extend(FaultKind::ALL.iter().filter(|kind| !on.contains(kind) && survivable(kind)));
        pairs.insert([FaultKind::Loss, FaultKind::AckLost].map(|kind| on.contains(&kind)));
        seen.extend(on);
    }
    let all: BTreeSet<_> = FaultKind::ALL.iter().copied().filter(survivable).collect();
    assert_eq!(seen, all);
    assert_eq!(left_out, all);
    assert_eq!(pairs.len(), 4, "two kinds are on independently of each other");
}

#[test]
fn the_loaded_swarm_draws_what_fills_links() {
    let path = folder().join("swarm-load.toml");
    let swarm = kvferry_scenarios::load(path).unwrap_or_else(|why| panic!("{why}"));
    let runs: Vec<_> =
        (0..400).map(|seed| swarm.draw(seed).expect("every seed is valid")).collect();
    let share = |fits: &dyn Fn(&kvferry_scenarios::Run) -> bool| {
        runs.iter().filter(|run| fits(run)).count()
    };
    let rates = runs.iter().map(|run| run.network.bandwidth);
    assert!(rates.clone().min() < Some(200_000_000) && rates.max() > Some(40_000_000_000));
    assert!(share(&|run| run.longest() > Some(16_384)) > 100);
    assert!(share(&|run| run.requests.len() >= 8) > 100);
    assert!(share(&|run| run.instances.iter().any(|one| one.dp_size > 1)) > 50);
    let two = |one: &InstanceSettings| one.fabric.operations_max == Some(2);
    assert!(share(&|run| run.instances.iter().any(two)) > 20);
    let few = |one: &InstanceSettings| one.protocol.core.tombstones_max < 8;
    assert!(share(&|run| run.instances.iter().any(few)) > 100);
    let lease = |one: &InstanceSettings| one.protocol.core.lease;
    let unequal = |run: &kvferry_scenarios::Run| {
        run.instances.iter().any(|one| lease(one) != lease(&run.instances[0]))
    };
    assert!(share(&unequal) > 200);
}

#[test]
fn the_bundled_trace_is_what_its_generator_makes() {
    let file = folder().join("traces/chat.jsonl");
    let text = std::fs::read_to_string(&file).expect("the trace is bundled");
    let records = generate(&CHAT);
    assert_eq!(text, to_jsonl(&records), "run `cargo run -p scenarios --example make-trace`");
    let read: Vec<_> = TraceReader::open(&file)
        .and_then(|reader| reader.collect())
        .unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(read, records);
}

#[test]
fn the_bundled_scenario_is_the_file() {
    let file = kvferry_scenarios::load(folder().join("trace/push.toml"))
        .unwrap_or_else(|why| panic!("{why}"));
    let bundled = kvferry_scenarios::bundled(None).unwrap_or_else(|why| panic!("{why}"));
    let draw = |scenario: &kvferry_scenarios::Scenario| {
        scenario.draw(1).unwrap_or_else(|why| panic!("{why}"))
    };
    let (file, mut bundled) = (draw(&file), draw(&bundled));
    bundled.name.clone_from(&file.name);
    assert_eq!(bundled, file);
}
