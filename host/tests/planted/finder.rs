//! Checks that find bugs: scenario files, seeds of a swarm, products of events, tests of the engine.

use kvferry_engine::planted::VARIABLE;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::process::Command;

/// Seeds that are swept at a time: what is found early costs no more.
const CHUNK: u64 = 25;

/// Targets with tests of the engine that find bugs, as `./test --planted` builds them.
const TARGETS: [&str; 9] = [
    "layout",
    "moriio_peers",
    "omni_mori",
    "pair",
    "payload",
    "payload_hosts",
    "peers",
    "peers_hello",
    "router",
];

#[derive(Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(untagged, deny_unknown_fields)]
pub(crate) enum Finder {
    /// A scenario file, and the beginning of what it says.
    File { file: String, by: String },
    /// So many seeds of a scenario with `seed = "any"`, from 0 on.
    Sweep { sweep: String, seeds: u64, by: String },
    /// An event at each input of a request in a fleet of `sweep --products`.
    Product { event: String, fleet: String, by: String },
    /// A test of the engine: where it is, and its whole name there.
    Test { r#in: String, test: String },
}

impl fmt::Display for Finder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finder::File { file, by } => write!(f, "{file} ({by})"),
            Finder::Sweep { sweep, seeds, by } => write!(f, "{sweep}, {seeds} seeds ({by})"),
            Finder::Product { event, fleet, by } => write!(f, "{event} in {fleet} ({by})"),
            Finder::Test { r#in, test } => write!(f, "{in} {test}"),
        }
    }
}

impl Finder {
    /// True if a complaint is what this check is there for.
    pub(crate) fn is_meant(&self, said: &str) -> bool {
        match self {
            Finder::File { by, .. } | Finder::Sweep { by, .. } | Finder::Product { by, .. } => {
                said.contains(&**by)
            }
            Finder::Test { .. } => true,
        }
    }
}

/// What the checks run, by name of the target: tests of the engine.
pub(crate) struct Programs(BTreeMap<String, PathBuf>);

impl Programs {
    /// As Cargo builds them, or has built them before.
    pub(crate) fn of_cargo() -> Programs {
        let output = Command::new(env!("CARGO"))
            .args(["test", "--locked", "--workspace", "--no-run", "--message-format=json"])
            .args(["--features", "kvferry-engine/conformance,kvferry/planted"])
            .args(TARGETS.iter().flat_map(|target| ["--test", target]))
            .output()
            .expect("cargo runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let lines = output.stdout.split(|byte| *byte == b'\n');
        let artifacts = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
        let programs = artifacts.filter_map(|it| {
            let of_engine = it["manifest_path"].as_str()?.ends_with("engine/Cargo.toml");
            let program = it["executable"].as_str().filter(|_| of_engine)?;
            Some((it["target"]["name"].as_str()?.to_owned(), program.into()))
        });
        Programs(programs.collect())
    }

    /// Runs a check with a bug or without.
    ///
    /// # Errors
    /// What the check complains about.
    pub(crate) fn run(&self, finder: &Finder, bug: Option<&str>) -> Result<(), String> {
        match finder {
            Finder::File { file, .. } => scenario(&["run", file], bug),
            Finder::Sweep { sweep, seeds, .. } => {
                for base in (0..*seeds).step_by(CHUNK as usize) {
                    let [count, base] = [CHUNK.min(seeds - base), base].map(|it| it.to_string());
                    let jobs = ["--jobs", "1"];
                    let args = ["sweep", sweep, "--seeds", &count, "--base", &base];
                    scenario(&[&args[..], &jobs].concat(), bug)?;
                }
                Ok(())
            }
            Finder::Product { event, fleet, .. } => {
                let cells = ["--products", "--fleet", fleet, "--event", event, "--jobs", "1"];
                scenario(&[&["sweep"], &cells[..]].concat(), bug)
            }
            Finder::Test { r#in, test } => {
                let program = self.0.get(r#in).unwrap_or_else(|| panic!("no tests {in}"));
                let mut command = Command::new(program);
                let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine");
                command.args(["--exact", test]).current_dir(manifest);
                let output = with(command, bug).output().expect("it starts");
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(said.contains("running 1 test\n"), "{finder} is not there: {said}");
                if output.status.success() { Ok(()) } else { Err(said) }
            }
        }
    }
}

fn with(mut command: Command, bug: Option<&str>) -> Command {
    command.env_remove(VARIABLE);
    command.envs(bug.map(|bug| (VARIABLE, bug)));
    command
}

/// Runs the program over a scenario; its complaints.
fn scenario(args: &[&str], bug: Option<&str>) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    command.args(args).arg("--json").current_dir(root);
    let output = with(command, bug).output().expect("the program starts");
    if output.status.success() {
        return Ok(());
    }
    let lines = output.stdout.split(|byte| *byte == b'\n');
    let outcomes = lines.filter_map(|line| serde_json::from_slice::<Value>(line).ok());
    let said: Vec<String> = outcomes
        .filter(|it| it["outcome"].as_str().map_or(it["exit"] != 0, |came| came == "failed"))
        .map(|outcome| match outcome["outcome"].as_str() {
            Some(_) => format!("{}: {}", outcome["cell"], outcome["text"]),
            None => format!("seed {}: {}", outcome["seed"], outcome["violations"]),
        })
        .collect();
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} {} {errors}", args.join(" "), said.join("; ")))
}
