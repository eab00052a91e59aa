//! The real binary: exit codes, messages and JSON.

mod program;

use program::{ProgramFolder, kvferry, scenarios};
use serde_json::Value;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::thread;

/// A small scenario that holds.
const SMALL: &str = r#"about = "A few short prompts"
seed = 3
[model]
layers = 2
kv_heads = 4
block_tokens = 16
[topology]
prefill = [{ tp = 2, blocks = 64 }]
decode = [{ tp = 2, blocks = 64 }]
[workload]
requests = 5
prompt_tokens = "1..100"
"#;

const TRACE: &str = r#"{"timestamp":0,"input_length":600,"output_length":2,"hash_ids":[0,1]}
{"timestamp":5,"input_length":700,"output_length":3,"hash_ids":[0,2]}
"#;

/// [`SMALL`] with a trace of the folder as its workload.
fn traced(folder: &ProgramFolder, trace: &str) -> String {
    let name = folder.write("trace.jsonl", trace);
    let workload = format!("trace = {name:?}\n");
    SMALL.replace("requests = 5\nprompt_tokens = \"1..100\"\n", &workload)
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a line is one object")).collect()
}

#[test]
fn bad_scenarios_are_refused_with_their_line() {
    let folder = ProgramFolder::new("bad-scenarios");
    let cases = [
        ("layers = 2", "layres = 2", 4, "unknown key `layres`"),
        ("blocks = 64 }]\ndecode", "blocks = 0 }]\ndecode", 8, "blocks"),
        ("prefill = [{ tp = 2", "prefill = [{ tp = 3", 8, "tp"),
        ("requests = 5", "requests = \"5..\"", 11, "requests"),
        ("seed = 3", "seed = 3 3", 2, "not TOML"),
        ("1..100", "1..1000000", 12, "never fits"),
    ];
    for (good, bad, line, says) in cases {
        assert!(SMALL.contains(good), "{good}");
        let file = folder.write("bad.toml", &SMALL.replace(good, bad));
        let ended = kvferry(["run", &file]);
        assert_eq!(ended.code, 2, "{bad}: {ended:?}");
        assert!(ended.err.starts_with(&format!("error: {file}:{line}: ")), "{bad}: {}", ended.err);
        assert!(ended.err.contains(says), "{bad}: {}", ended.err);
        assert_eq!(ended.err.lines().count(), 1, "one error: {}", ended.err);
        assert_eq!(ended.out, "");
    }
}

#[test]
fn a_trace_cut_anywhere_in_its_last_line_is_refused_with_its_line() {
    let folder = ProgramFolder::new("cut-trace");
    let last = TRACE.lines().last().map_or(0, str::len);
    for cut in (2..last).step_by(7) {
        let file = folder.write("cut.toml", &traced(&folder, &TRACE[..TRACE.len() - cut]));
        let ended = kvferry(["run", &file]);
        assert_eq!(ended.code, 2, "{ended:?}");
        assert!(ended.err.contains("trace.jsonl:2: the line is cut off"), "{}", ended.err);
    }
}

/// Rows of what `run` prints, but the one that has a speed in it.
fn rows(text: &str) -> Vec<(&str, &str)> {
    let rows = text.lines().filter_map(|line| line.strip_prefix(' ')?.split_once("  "));
    rows.map(|(name, value)| (name, value.trim())).filter(|(name, _)| *name != "events").collect()
}

#[test]
fn the_readme_shows_what_its_first_command_prints() {
    let readme = fs::read_to_string(scenarios().join("../README.md")).expect("it is there");
    let shown = readme.split("```text\n").nth(1).and_then(|text| text.split("```").next());
    let ended = kvferry(["run", &scenarios().join("trace/push.toml").display().to_string()]);
    let printed = rows(&ended.out);
    let shown = rows(shown.expect("a block of what is printed"));
    assert!(shown.len() > 6, "{shown:?}");
    for row in shown {
        let is_path = row.0.ends_with("push.toml");
        assert!(is_path || printed.contains(&row), "README.md: {row:?} is none of {printed:?}");
    }
}

#[test]
fn what_is_missing_is_named() {
    let folder = ProgramFolder::new("missing");
    let file = folder.write("small.toml", SMALL);
    let trace = folder.write("traced.toml", &traced(&folder, TRACE));
    let empty = folder.path("empty");
    fs::create_dir(&empty).expect("folder is new");
    let cases: &[(&[&str], &str)] = &[
        (&["run", "no-such.toml"], "no-such.toml: cannot read the scenario"),
        (&["run", &empty], "no scenario in it"),
        (&["run", &trace, "--workload-trace", "no-such.jsonl"], "no-such.jsonl: cannot read"),
        (&["run", &file, "--workload-trace", "no-such.jsonl"], "no-such.jsonl"),
        (&["run", &file, &trace, "--record", "x.rec"], "--record keeps one run"),
        (&["run", &file, "--record", &empty], "cannot write the file"),
        (&["sweep", "no-such.toml", "--seeds", "3"], "no-such.toml: cannot read the scenario"),
        (&["sweep", &file, "--seeds", "0"], "--seeds at least 1"),
        (&["replay", "no-such.rec"], "no-such.rec: cannot read the recording"),
        (&["replay", &file], "not a recording"),
        (&["list", "nonsense"], "possible values: scenarios, faults, events, messages, invariants"),
        (&["list", "scenarios", "no-such-folder"], "no-such-folder: not a directory"),
        (&["sweep", &file], "--seeds"),
        (&["sweep", &file, "--products"], "cannot be used with"),
        (&["sweep", "--products=all"], "possible values: singles, same-input, pairs"),
        (&["sweep", "--products", "--fleet", "full"], "push-full-pools"),
        (&["sweep", "--products", "--event", "death"], "router-dies"),
        (&["sweep", &file, "--seeds", "1", "--event", "abort"], "cannot be used with"),
        (&["sweep", &file, "--seeds", "1", "--out", "x"], "cannot be used with"),
    ];
    for (args, says) in cases {
        let ended = kvferry(*args);
        assert_eq!(ended.code, 2, "{args:?}: {ended:?}");
        assert!(ended.err.contains(says), "{args:?}: {}", ended.err);
        assert_eq!(ended.out, "", "{args:?}");
    }
}

/// Arguments that are rejected, with a part of the error, which names the remedy.
#[test]
fn wrong_numbers_and_addresses_are_refused_at_the_start() {
    let port = "port notaport is not a TCP port (1-65535); give HOST:PORT";
    let serve = ["serve", "--role", "decode", "--mode", "push", "--proxy"];
    let cases: &[(&[&str], &str)] = &[
        (&["run", "--seed", "x"], "'--seed <SEED>': not a whole number"),
        (&["sweep", "f.toml", "--seeds", ""], "'--seeds <N>': not a whole number"),
        (&[&serve[..], &["127.0.0.1:notaport"]].concat(), port),
        (&[&serve[..], &["tcp://127.0.0.1:36367"]].concat(), "is not a host name or address"),
        (&[&serve[..], &["127.0.0.1"]].concat(), "it has no port; give HOST:PORT"),
        (&["doctor", "--proxy", "127.0.0.1:notaport"], port),
        (&["doctor", "--peer", "127.0.0.1:notaport"], port),
        (&["doctor", "--serve", "127.0.0.1:notaport"], port),
        (&["bench", "--to", "127.0.0.1:notaport"], port),
        (&["bench", "--serve", "127.0.0.1:notaport"], port),
        (&["health", "127.0.0.1:notaport/readiness"], port),
        (&["host", "--socket", "x.sock", "--metrics", "127.0.0.1:notaport"], port),
        (&["host", "--socket", "x.sock", "--payload-listen", "127.0.0.1:notaport"], "HOST:PORT"),
        (&["host", "--socket", "x.sock", "--payload-hosts", "a b:7000"], "HOST:PORT"),
        (&["router", "--listen", "127.0.0.1:notaport"], "give HOST:PORT"),
        (&["router", "--admin-addr", "127.0.0.1:notaport"], "give HOST:PORT"),
        (
            &[
                "router",
                "--listen",
                "127.0.0.1:0",
                "--admin-addr",
                "127.0.0.1:0",
                "--discovery",
                "127.0.0.1:notaport",
            ],
            "give HOST:PORT",
        ),
        (&["router", "--prefill", "127.0.0.1:notaport"], "HOST:PORT"),
        (&["router", "--prefill-dns", "prefill:notaport"], "give NAME:PORT"),
    ];
    for (args, says) in cases {
        let ended = kvferry(*args);
        assert_eq!(ended.code, 2, "{args:?}: {ended:?}");
        assert!(ended.err.contains(says), "{args:?}: {}", ended.err);
        assert!(!ended.err.contains("invalid digit"), "{args:?}: {}", ended.err);
    }
}

#[test]
fn port_in_use_is_refused_with_the_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let at = taken.local_addr().expect("bound").to_string();
    let port = taken.local_addr().expect("bound").port().to_string();
    let free = "127.0.0.1:0";
    let router = |listen: &str, admin: &str, discovery: &str| {
        let options = ["--listen", listen, "--admin-addr", admin, "--discovery", discovery];
        kvferry([&["router"], &options[..]].concat())
    };
    let serve = ["serve", "--role", "decode", "--mode", "push", "--http-port", &port];
    for ended in
        [router(&at, free, free), router(free, &at, free), router(free, free, &at), kvferry(serve)]
    {
        assert_eq!(ended.code, 2, "{ended:?}");
        let remedy = format!("(`ss -ltnp 'sport = :{port}'` shows it), or give another port");
        assert!(ended.err.contains(&at) && ended.err.contains(&remedy), "{}", ended.err);
    }
}

#[test]
fn files_are_overwritten_only_with_force() {
    let folder = ProgramFolder::new("overwrite");
    let file = folder.write("small.toml", SMALL);
    let recording = folder.path("small.rec");
    assert_eq!(kvferry(["run", &file, "--record", &recording]).code, 0);
    let precious = folder.write("precious.txt", "mine");
    let commands: [&[&str]; 6] = [
        &["run", &file, "--record", &precious],
        &["run", &file, "--html", &precious],
        &["export", &recording, "--html", &precious],
        &["export", "--live", "no.sock", "--out", &precious],
        &["draw", &file, "--seed", "1", "--out", &precious],
        &["run", &file, "--record", &file],
    ];
    let unchanged = |command: &[&str]| {
        let kept = fs::read_to_string(&precious).expect("it is there");
        assert_eq!(kept, "mine", "{command:?}");
        assert_eq!(fs::read_to_string(&file).expect("it is there"), SMALL, "{command:?}");
    };
    for command in commands {
        let ended = kvferry(command);
        assert_eq!((ended.code, ended.out.as_str()), (2, ""), "{command:?}: {ended:?}");
        let remedy = "the file exists; name another file, or overwrite it with --force";
        assert!(ended.err.contains(remedy), "{command:?}: {}", ended.err);
        unchanged(command);
    }
    let ended = kvferry(["run", &file, "--html", &precious, "--force"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_ne!(fs::read_to_string(&precious).expect("a page"), "mine");
    // The error for a file that is not a recording does not advise to make it one.
    for command in ["replay", "show"] {
        let ended = kvferry([command, &file]);
        assert_eq!(ended.code, 2, "{ended:?}");
        assert!(!ended.err.contains(&format!("--record {file}")), "{}", ended.err);
        assert!(ended.err.contains("--record NEW_FILE"), "{}", ended.err);
    }
}

#[test]
fn help_says_what_the_program_is_for() {
    let help = kvferry(["--help"]);
    assert_eq!(help.code, 0, "{help:?}");
    let first = help.out.lines().next().unwrap_or_default();
    assert_eq!(
        first,
        "Moves the KV cache from prefill to decode servers of LLMs, and simulates that"
    );
}

#[test]
fn fault_that_never_hits_is_listed_once_with_its_seeds() {
    let folder = ProgramFolder::new("never-hit-seeds");
    let never =
        "[[fault]]\nkind = \"fabric.partial\"\non = { event = \"op.posted\", nth = 1000000 }\n";
    let seeds = SMALL.replace("seed = 3", "seed = \"any\"\nseeds = 4");
    folder.write("a.toml", &format!("{seeds}{never}"));
    folder.write("b.toml", &format!("{SMALL}{never}"));
    let ended = kvferry(["run", &folder.path("")]);
    assert_eq!(ended.code, 0, "{ended:?}");
    let line = SMALL.lines().count() + 2;
    let never: Vec<_> = ended.out.lines().filter(|row| row.contains("never hit")).collect();
    let [several, one] = never[..] else { panic!("{never:?}") };
    let several_end =
        format!("a.toml: never hit: fabric.partial of line {} (4 of 4 seeds: 1-4)", line + 1);
    let one_end = format!("b.toml: never hit: fabric.partial of line {line} (seed 3)");
    assert!(several.ends_with(&several_end) && one.ends_with(&one_end), "{never:?}");
}

#[test]
fn a_bad_file_does_not_keep_the_others_from_running() {
    let folder = ProgramFolder::new("bad-among-good");
    folder.write("a.toml", SMALL);
    folder.write("b.toml", "about = 1");
    folder.write("c.toml", SMALL);
    folder.write("Cargo.toml", "[package]");
    let ended = kvferry(["run", &folder.path(""), "--json"]);
    assert_eq!(ended.code, 2, "{ended:?}");
    let names: Vec<_> = lines(&ended.out).iter().map(|it| it["scenario"].to_string()).collect();
    assert!(names[0].contains("a.toml") && names[1].contains("c.toml"), "{names:?}");
    assert_eq!(names.len(), 2);
    assert!(ended.err.contains("b.toml:1"), "{}", ended.err);
}

#[test]
fn json_tells_how_every_request_ended() {
    let folder = ProgramFolder::new("json");
    let file = folder.write("small.toml", SMALL);
    let ended = kvferry(["run", &file, "--json"]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""), "{ended:?}");
    let all = lines(&ended.out);
    let [one] = all.as_slice() else { panic!("{all:?}") };
    assert_eq!(one["scenario"], *file);
    assert_eq!(one["seed"], 3);
    assert_eq!(one["verdict"], "held");
    assert_eq!(one["exit"], 0);
    let count = |key: &str| one[key].as_u64().unwrap_or_else(|| panic!("{key} is a number"));
    assert_eq!(count("requests"), 5);
    assert_eq!(count("finished") + count("failed") + count("unknown"), 5);
    assert!(count("recomputed") <= count("finished"));
    assert!(count("events") > 0 && count("bytes_moved") > 0 && count("peak_blocks") > 0);
    assert_eq!(one["violations"], Value::Array(Vec::new()));
    for hash in ["trace_hash", "outputs_hash"] {
        assert_eq!(one[hash].as_str().map(str::len), Some(16), "{hash}");
    }
    assert!(one["sim_seconds"].is_f64() && one["wall_seconds"].is_f64());
    for spread in ["ttft", "transfer"] {
        let at = |key: &str| one[spread][key].as_f64().unwrap_or_else(|| panic!("{spread} {key}"));
        assert!(0.0 < at("p50") && at("p50") <= at("p90") && at("p90") <= at("p99"), "{one}");
    }
}

#[test]
fn a_sweep_is_the_runs_of_its_seeds_in_order() {
    let folder = ProgramFolder::new("sweep");
    let file = folder.write("small.toml", &SMALL.replace("seed = 3", "seed = \"any\""));
    let swept = kvferry(["sweep", &file, "--seeds", "8", "--base", "40", "--jobs", "3", "--json"]);
    assert_eq!((swept.code, swept.err.as_str()), (0, ""), "{swept:?}");
    let swept = lines(&swept.out);
    let seeds: Vec<_> = swept.iter().filter_map(|it| it["seed"].as_u64()).collect();
    assert_eq!(seeds, (40..48).collect::<Vec<_>>());
    let mut hashes: Vec<_> = swept.iter().map(|it| it["trace_hash"].to_string()).collect();
    let alone = kvferry(["run", &file, "--seed", "45", "--json"]);
    for hash in ["trace_hash", "outputs_hash"] {
        assert_eq!(lines(&alone.out)[0][hash], swept[5][hash]);
    }
    hashes.sort();
    hashes.dedup();
    assert_eq!(hashes.len(), 8, "each seed has a trace of its own");
}

#[test]
fn what_fails_comes_with_the_command_that_repeats_it() {
    let folder = ProgramFolder::new("failing");
    let unmet = format!("{SMALL}[expect]\nrequests = {{ finished = 4 }}\n");
    let file = folder.write("it fails.toml", &unmet);
    for args in [&["run", &file][..], &["sweep", &file, "--seeds", "2", "--base", "3"]] {
        let ended = kvferry(args);
        assert_eq!(ended.code, 4, "{ended:?}");
        assert!(ended.out.contains("5 requests finished"), "{}", ended.out);
        let command = format!("kvferry run '{file}' --seed 3");
        assert!(ended.out.contains(&command), "{}", ended.out);
    }
    let ended = kvferry(["run", &file]);
    assert!(ended.out.contains("5 requests finished, not 4\n"), "{}", ended.out);
    let expected = folder.write(
        "expected.toml",
        &format!("{unmet}exit = 4\n").replace(
            "[expect]\nrequests = { finished = 4 }\nexit = 4",
            "[expect]\nexit = 4\nrequests = { finished = 4 }",
        ),
    );
    let ended = kvferry(["run", &expected, "--json"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(lines(&ended.out)[0]["verdict"], "correctness");
    let holds = folder.write("holds.toml", &format!("{SMALL}[expect]\nexit = 4\n"));
    let ended = kvferry(["run", &holds]);
    assert_eq!(ended.code, 4, "{ended:?}");
    assert!(ended.out.contains("everything held, but exit 4 is expected"), "{}", ended.out);
}

#[test]
fn a_replayed_recording_does_the_same_and_a_doctored_one_does_not() {
    let folder = ProgramFolder::new("replay");
    let file = folder.write("small.toml", SMALL);
    let recording = folder.path("small.rec");
    let ended = kvferry(["run", &file, "--record", &recording]);
    assert_eq!(ended.code, 0, "{ended:?}");
    let ended = kvferry(["replay", &recording]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""), "{ended:?}");
    assert!(ended.out.contains("seed 3"), "{}", ended.out);

    let bytes = fs::read(&recording).expect("the recording was written");
    let doctored = folder.path("doctored.rec");
    fs::write(&doctored, &bytes[..bytes.len() - 1]).expect("can be written");
    let ended = kvferry(["replay", &doctored]);
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(ended.err.contains("damaged after"), "{}", ended.err);
    // A whole record is missing, so an effect is.
    for at in [bytes.len() / 3, bytes.len() / 2] {
        let mut bytes = bytes.clone();
        bytes.drain(at..at + 200);
        fs::write(&doctored, &bytes).expect("can be written");
        let ended = kvferry(["replay", &doctored]);
        assert_ne!(ended.code, 0, "{ended:?}");
        assert!(ended.err.starts_with("error: "), "{}", ended.err);
    }
}

#[test]
fn lists_name_everything() {
    let listed = kvferry(["list", "faults"]).out;
    assert_eq!(listed.lines().count(), kvferry_scenarios::FaultKind::ALL.len());
    for kind in kvferry_scenarios::FaultKind::ALL {
        assert!(listed.contains(kind.name()), "{kind}");
    }
    let listed = kvferry(["list", "invariants"]).out;
    for id in kvferry_scenarios::InvariantId::ALL {
        assert!(listed.contains(id.name()), "{id}");
    }
    let listed = kvferry(["list", "scenarios", &scenarios().display().to_string()]);
    assert_eq!(listed.code, 0, "{listed:?}");
    assert!(listed.out.contains("swarm.toml") && listed.out.contains(kvferry_scenarios::BUNDLED));
    assert_eq!(kvferry(["list", "events"]).code, 0);
    assert_eq!(kvferry(["list", "messages"]).code, 0);
}

#[test]
fn another_trace_can_take_the_place_of_the_bundled_one() {
    let folder = ProgramFolder::new("other-trace");
    let trace = folder.write("other.jsonl", TRACE);
    let ended = kvferry(["run", "--workload-trace", &trace, "--json"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(lines(&ended.out)[0]["requests"], 2);
}

#[test]
fn a_sweep_names_the_faults_that_never_hit() {
    let folder = ProgramFolder::new("never-hit");
    let fault = |kind: &str, nth| {
        let on = format!("on = {{ event = \"op.posted\", nth = {nth} }}");
        format!("[[fault]]\nkind = \"{kind}\"\n{on}\n")
    };
    let faults = [("ack_lost", 1), ("partial", 1_000_000), ("ack_lost", 1_000_000)]
        .map(|(kind, nth)| fault(&format!("fabric.{kind}"), nth))
        .concat();
    let file = folder.write("some.toml", &format!("{SMALL}{faults}"));
    let ended = kvferry(["sweep", &file, "--seeds", "2", "--base", "3"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    let (partial, ack) = (SMALL.lines().count() + 5, SMALL.lines().count() + 8);
    let never = format!("fabric.partial of line {partial}, fabric.ack_lost of line {ack}\n");
    assert!(ended.out.contains(&format!("\nnever hit: {never}")), "{}", ended.out);
    let ended = kvferry(["run", &file]);
    for (kind, line) in [("partial", partial), ("ack_lost", ack)] {
        let name = format!("fabric.{kind}, line {line} ");
        let row = ended.out.lines().find(|row| row.contains(&name));
        assert!(row.is_some_and(|row| row.contains("never hit")), "{name}: {}", ended.out);
    }
    assert!(ended.out.contains("hit once") && !ended.out.contains("wire.loss"), "{}", ended.out);
}

#[test]
fn a_sweep_outside_its_budget_says_what_is_too_much() {
    let folder = ProgramFolder::new("budget");
    let fault = "[[fault]]\nkind = \"fabric.sibling_failure\"\nchance = 1\n";
    let small = SMALL.replace("seed = 3", "seed = \"any\"");
    let file = folder.write("some.toml", &format!("{small}{fault}"));
    let sweep = |budget: &[&str]| {
        kvferry(["sweep", &file, "--seeds", "2", "--base", "3"].iter().chain(budget))
    };
    let ended = sweep(&["--failed-max", "0", "--recomputed-max", "100", "--full-links-min", "0"]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""), "{ended:?}");
    let ended = sweep(&["--recomputed-max", "12.5", "--full-links-min", "12.5"]);
    let said = "error: recomputed requests: 100.00 %, at most 12.5 % are allowed\n\
                error: seeds with a full link: 0.00 %, at least 12.5 % are allowed\n";
    assert_eq!((ended.code, ended.err.as_str()), (3, said), "{ended:?}");
    // Requests that fail instead of being recomputed.
    let small = small.replace("[workload]", "router = { retries_max = 0 }\n[workload]");
    let failing = format!("{small}{fault}[engine]\nload_failure = \"fail\"\n");
    let file = folder.write("failing.toml", &failing);
    let ended = kvferry(["sweep", &file, "--seeds", "2", "--base", "3", "--failed-max", "99.5"]);
    let said = "error: failed requests: 100.00 %, at most 99.5 % are allowed\n";
    assert_eq!((ended.code, ended.err.as_str()), (3, said), "{ended:?}");
    let ended = sweep(&["--failed-max", "120"]);
    assert!(ended.code == 2 && ended.err.contains("from 0 to 100"), "{ended:?}");
}

#[test]
fn a_host_is_not_started_with_a_configuration_that_cannot_be_used() {
    let folder = ProgramFolder::new("host-configuration");
    let file = folder.write("host.toml", "slower = true\ncopier = 2\n");
    let ended = kvferry(["host", "--socket", "unused.sock", "--config", &file]);
    let said =
        format!("error: {file}:2: copier: there is no such key; did you mean \"copiers\"?\n");
    assert_eq!((ended.code, ended.err), (2, said));
    let ended = kvferry(["host"]);
    assert_eq!(ended.code, 2);
    assert!(ended.err.contains("give --socket PATH, KVFERRY_HOST_SOCKET"), "{}", ended.err);
}

#[test]
fn secret_is_written_for_its_owner_alone_and_over_no_file() {
    let folder = ProgramFolder::new("cli-secret");
    let path = folder.path("secret");
    let ended = kvferry(["secret", &path]);
    assert_eq!((ended.code, &*ended.out), (0, ""), "{}", ended.err);
    let mode = fs::metadata(&path).expect("it was written").permissions().mode();
    assert_eq!(mode & 0o7777, 0o600, "{mode:o}");
    let secret = fs::read_to_string(&path).expect("it is this user's");
    kvferry_trust::FleetSecret::parse(&secret).expect("a secret");
    // A file, and a link to a file that does not exist.
    let link = folder.path("link");
    std::os::unix::fs::symlink(folder.path("elsewhere"), &link).expect("a link");
    for taken in [&path, &link] {
        let ended = kvferry(["secret", taken]);
        assert_eq!(ended.code, 2, "{}", ended.err);
        assert!(ended.err.contains(taken) && ended.err.contains("no file is overwritten"));
    }
    assert_eq!(fs::read_to_string(&path).expect("it is there"), secret);
    assert!(!fs::exists(folder.path("elsewhere")).expect("the folder can be read"));
    let ended = kvferry(["secret", &folder.path("no/secret")]);
    assert!(ended.code == 2 && ended.err.contains("create its folder"), "{}", ended.err);
    let printed = kvferry(["secret"]);
    assert!(printed.code == 0 && printed.out != secret, "{}", printed.err);
    kvferry_trust::FleetSecret::parse(&printed.out).expect("a secret");
}

#[test]
fn health_is_what_a_server_answers() {
    let server = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let at = server.local_addr().expect("bound");
    let asked = thread::spawn(move || {
        let mut asked = Vec::new();
        for status in ["200 OK", "204 No Content", "302 Found", "503 Service Unavailable"] {
            let (mut client, _) = server.accept().expect("a client");
            let mut lines = BufReader::new(&client).lines().map(|line| line.expect("a line"));
            asked.push(lines.next().expect("a request"));
            let end = lines.find(String::is_empty);
            assert!(end.is_some(), "a whole head");
            write!(client, "HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").expect("it reads");
        }
        (server, asked)
    });
    let health = |path: &str| {
        let ended = kvferry(["health", &format!("{path}/readiness"), "--timeout", "600"]);
        assert_eq!(ended.err, "");
        (ended.code, ended.out)
    };
    let [bare, url] = [at.to_string(), format!("http://{at}")];
    assert_eq!(health(&bare), (0, format!("{at}/readiness: 200 OK\n")));
    assert_eq!(health(&url), (0, format!("{url}/readiness: 204 No Content\n")));
    assert_eq!(health(&bare), (1, format!("{at}/readiness: 302 Found\n")));
    assert_eq!(health(&bare), (1, format!("{at}/readiness: 503 Service Unavailable\n")));
    let (server, asked) = asked.join().expect("no panic");
    assert_eq!(asked, ["GET /readiness HTTP/1.1"; 4]);
    // It takes connections, and says nothing.
    let ended = kvferry(["health", &at.to_string(), "--timeout", "0.1"]);
    assert_eq!((ended.code, ended.out), (1, format!("{at}: no answer within 100ms\n")));
    drop(server);
    let (code, said) = health(&bare);
    assert!(code == 1 && said.contains("Connection refused"), "{said}");
    for (wrong, why) in [("https://127.0.0.1/", "https is not spoken"), ("a b", "invalid")] {
        let ended = kvferry(["health", wrong]);
        assert_eq!(ended.code, 2, "{ended:?}");
        let is_told = ended.err.starts_with(&format!("error: {wrong}: {why}"));
        assert!(is_told && ended.err.contains("; give HOST:PORT/PATH"), "{ended:?}");
    }
}

#[test]
fn a_seed_that_fails_is_shrunk_to_a_file_that_fails_alike() {
    let folder = ProgramFolder::new("shrunk");
    let file = folder.write("f.toml", &format!("{SMALL}[expect]\noperations = {{ posted = 0 }}\n"));
    let [small, page] = ["small.toml", "small.html"].map(|name| folder.path(name));
    let args = ["shrink", &file, "--seed", "3", "--out", &small];
    let ended = kvferry(args);
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.out.contains("before") && ended.out.contains("candidates in"), "{}", ended.out);
    assert!(std::fs::read_to_string(&page).is_ok_and(|page| page.starts_with("<!")), "no page");
    let [before, after] = [[&file, "--seed", "3"].as_slice(), &[&small]].map(|args| {
        let ended =
            kvferry(["run", "--json"].into_iter().chain(args.iter().map(|arg| arg as &str)));
        assert_eq!(ended.code, 4, "{ended:?}");
        lines(&ended.out).remove(0)
    });
    assert_eq!(after["requests"], 1);
    assert!(after["events"].as_u64() < before["events"].as_u64(), "{after}");
    for outcome in [&before, &after] {
        let told = outcome["violations"][0].as_str().unwrap_or_default();
        assert!(told.contains("operations posted, not 0"), "{outcome}");
    }
    let again = kvferry(args);
    assert_eq!((again.code, again.err.contains("--force")), (2, true), "{again:?}");
    let swept = kvferry(["sweep", &file, "--seeds", "1", "--base", "3"]);
    assert!(
        swept.out.contains(&format!("shrink with: kvferry shrink {file} --seed 3")),
        "{swept:?}"
    );
}

#[test]
fn what_cannot_be_shrunk_is_told_with_the_remedy() {
    let folder = ProgramFolder::new("unshrunk");
    let file = folder.write("f.toml", SMALL);
    let any = folder.write("any.toml", &SMALL.replace("seed = 3", "seed = \"any\""));
    for (args, told) in [
        (&["shrink", &file, "--seed", "3"][..], "seed 3: it came out as expected"),
        (&["shrink", &any], "give the one that fails with --seed"),
        (&["shrink", "none.toml", "--seed", "1"], "cannot read"),
        (&["shrink", &file, "--out", "x.html"], "name another file with --html"),
    ] {
        let ended = kvferry(args);
        assert_eq!(ended.code, 2, "{ended:?}");
        let lines = ended.err.lines().count();
        assert!(lines == 1 && ended.err.contains(told), "{ended:?}");
    }
}
