//! I11: the core loop and the actor shells give the same trace.

use fabric_sim::world::Options;
use std::path::{Path, PathBuf};

fn scenario_files(folder: &Path, out: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            scenario_files(&path, out);
        } else if path.extension().is_some_and(|ending| ending == "toml") {
            out.push(path);
        }
    }
}

fn equal_through_actors(path: &Path, seed: u64) {
    let run = scenarios::load(path).unwrap().draw(seed).unwrap();
    let cores = fabric_sim::run(&run, Options::default());
    let actors = kvferry::actors::run(&run, Options::default());
    assert_eq!(
        (cores.trace_hash, cores.events),
        (actors.trace_hash, actors.events),
        "{} with seed {seed}",
        path.display()
    );
}

#[test]
fn every_scenario_file_gives_the_same_trace_through_cores_and_actors() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios");
    let mut files = Vec::new();
    for folder in ["smoke", "faults", "known", "trace"] {
        scenario_files(&root.join(folder), &mut files);
    }
    assert!(files.len() >= 25, "{} scenario files", files.len());
    for path in files {
        equal_through_actors(&path, 7);
    }
}

#[test]
fn swarm_seeds_give_the_same_trace_through_cores_and_actors() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/swarm.toml");
    for seed in 0..40 {
        equal_through_actors(&path, seed);
    }
}
