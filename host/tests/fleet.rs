//! `kvferry run --fabric host` and `--fabric mori`: scenarios as real processes.

use serde_json::Value;
use std::path::PathBuf;
use std::process::Command;

fn scenario(text: &str) -> PathBuf {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hash = DefaultHasher::new();
    text.hash(&mut hash);
    let name = format!("fleet-{:016x}.toml", hash.finish());
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, text).expect("the folder for tests can be written");
    path
}

fn run(path: &std::path::Path) -> (Option<i32>, Value, String) {
    run_over("host", path)
}

fn run_over(fabric: &str, path: &std::path::Path) -> (Option<i32>, Value, String) {
    let (code, result, errors) = run_with(fabric, path, &[]);
    if let (Some(0), Some(folder)) = (code, result["logs"].as_str()) {
        // Of a run that held.
        let _gone = std::fs::remove_dir_all(folder);
    }
    (code, result, errors)
}

/// With a command that takes ports down, which the stand-in for MoRI has one of for each process.
fn run_with(
    fabric: &str,
    path: &std::path::Path,
    more: &[&std::ffi::OsStr],
) -> (Option<i32>, Value, String) {
    let ports = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fleet-ports");
    std::fs::create_dir_all(&ports).expect("the folder for tests can be written");
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["run", "--fabric", fabric, "--json"])
        .arg(path)
        .args(more)
        // For those over MoRI: its stand-in.
        .env("KVFERRY_MORI_SHIM", mori_double::INSTALLS[1].shim)
        .env("KVFERRY_MORI_WITHOUT_DEVICES", "1")
        .env("MORI_DOUBLE_PORTS", ports)
        .env("KVFERRY_PORT_COMMAND", mori_double::PORT_COMMAND)
        .output()
        .expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let result = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code(), result, errors)
}

/// Limits that no process of a busy machine passes.
const PATIENT: &str = r#"
router = { expiry = "600s" }
[protocol]
hello = "600s"
silent = "600s"
operation = "600s"
fetch = "600s"
"#;

/// Those of processes of which some die: who waits for them is to give up in a while, and not
/// because a living one was late.
const WARY: &str = r#"
router = { expiry = "20s" }
[protocol]
hello = "60s"
silent = "20s"
operation = "20s"
fetch = "60s"
"#;

const TOPOLOGY: &str = r#"
[topology]
prefill = [{ name = "p0", blocks = 64 }, { name = "p1", tp = 2, blocks = 64 }]
decode = [{ name = "d0", blocks = 64 }, { name = "d1", tp = 2, blocks = 64 }]
"#;

#[test]
fn a_workload_goes_through_processes() {
    for (mode, fabric) in [("push", "host"), ("pull", "host"), ("push", "mori"), ("pull", "mori")] {
        let text = format!(
            "about = \"processes\"\nseed = 1\n{TOPOLOGY}{PATIENT}[workload]\nmode = \"{mode}\"\n\
             requests = 12\nprompt_tokens = \"16..200\"\n[expect]\nwithin = \"600s\"\n\
             requests = {{ finished = 12, recomputed = 0 }}\n"
        );
        let (code, result, errors) = run_over(fabric, &scenario(&text));
        assert_eq!(code, Some(0), "{fabric} {result}\n{errors}");
        assert_eq!(result["finished"], 12);
        assert!(result["bytes_moved"].as_u64() > Some(0), "{result}");
        let skipped = result["skipped"].to_string();
        assert!(skipped.contains("I2-no-early-reuse"), "{skipped}");
    }
}

#[test]
fn ports_that_flap_cost_no_request() {
    for mode in ["push", "pull"] {
        let text = format!(
            "about = \"ports\"\nseed = 3\n{TOPOLOGY}{WARY}[workload]\nmode = \"{mode}\"\n\
             requests = 32\nprompt_tokens = \"16..200\"\narrival = \"100ms\"\n\
             [[fault]]\nkind = \"fabric.port_down\"\ntarget = \"p0\"\n\
             on = {{ event = \"op.posted\", nth = 3 }}\nlasts = \"300ms\"\n\
             [[fault]]\nkind = \"fabric.port_down\"\ntarget = \"d1\"\n\
             on = {{ event = \"op.posted\", nth = 20 }}\nlasts = \"500ms\"\n\
             [expect]\nwithin = \"600s\"\nrequests = {{ finished = 32 }}\n"
        );
        let folder = format!("fleet-logs-{mode}-{}", std::process::id());
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(folder);
        let more = ["--logs".as_ref(), folder.as_os_str()];
        let (code, result, errors) = run_with("mori", &scenario(&text), &more);
        assert_eq!(code, Some(0), "{mode} {result}\n{errors}");
        assert!(!result["skipped"].to_string().contains("port_down"), "{result}");
        assert_eq!(result["logs"].as_str().map(PathBuf::from), Some(folder.clone()), "{result}");
        let log = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        let down = ["p0.log", "d1.log"].map(log).concat();
        assert!(
            down.contains("no backend; it is tried again"),
            "{mode}: nothing went down\n{down}"
        );
        let _gone = std::fs::remove_dir_all(&folder);
    }
}

#[test]
fn faults_of_processes_are_signals_and_others_are_listed() {
    for fabric in ["host", "mori"] {
        faults_of_processes(fabric);
    }
}

fn faults_of_processes(fabric: &str) {
    let text = format!(
        "about = \"faults\"\nseed = 1\n{TOPOLOGY}{WARY}[workload]\nmode = \"push\"\nrequests = 24\n\
         prompt_tokens = \"16..200\"\narrival = \"5ms\"\n\
         [[fault]]\nkind = \"process.restart\"\ntarget = \"p0\"\n\
         on = {{ event = \"op.posted\", nth = 3 }}\nlasts = \"10ms\"\n\
         [[fault]]\nkind = \"process.crash\"\ntarget = \"d1\"\nat = \"40ms\"\n\
         [[fault]]\nkind = \"process.pause\"\ntarget = \"p1\"\nat = \"20ms\"\nlasts = \"200ms\"\n\
         [[fault]]\nkind = \"wire.loss\"\nchance = 0.1\n\
         [expect]\nwithin = \"600s\"\nrequests = {{ finished = 24 }}\n"
    );
    let (code, result, errors) = run_over(fabric, &scenario(&text));
    assert_eq!(code, Some(0), "{fabric} {result}\n{errors}");
    let skipped = result["skipped"].to_string();
    assert!(skipped.contains("wire.loss: this fabric cannot inject it"), "{skipped}");
    assert!(!skipped.contains("process."), "{skipped}");
}

#[test]
fn why_a_prompt_was_recomputed_is_reported_with_the_logs() {
    // While the port of the only decode is down it reads nothing.
    let text = format!(
        "about = \"causes\"\nseed = 1\n[topology]\nprefill = [{{ name = \"p0\", blocks = 64 }}]\n\
         decode = [{{ name = \"d0\", blocks = 64 }}]\n{WARY}[workload]\nmode = \"pull\"\nrequests = 24\n\
         prompt_tokens = \"16..200\"\narrival = \"50ms\"\n\
         [[fault]]\nkind = \"fabric.port_down\"\ntarget = \"d0\"\n\
         on = {{ event = \"op.posted\", nth = 3 }}\nlasts = \"5s\"\n\
         [expect]\nwithin = \"600s\"\nrequests = {{ finished = 24 }}\n"
    );
    let (code, result, errors) = run_with("mori", &scenario(&text), &[]);
    assert_eq!(code, Some(0), "{result}\n{errors}");
    let causes = result["recomputed_causes"].as_object().expect("a table");
    let told: u64 = causes.values().filter_map(Value::as_u64).sum();
    assert!(told > 0 && Some(told) == result["recomputed"].as_u64(), "{result}");
    let folder = PathBuf::from(result["logs"].as_str().expect("it is named"));
    let logs = ["router.log", "p0.log", "d0.log"].map(|name| folder.join(name));
    assert!(logs.iter().all(|log| log.is_file()), "{result}");
    let _gone = std::fs::remove_dir_all(&folder);
}

#[test]
fn a_process_that_does_not_start_shows_the_end_of_its_log() {
    let text = format!(
        "about = \"start\"\nseed = 1\n{TOPOLOGY}[workload]\nmode = \"pull\"\nrequests = 1\nprompt_tokens = 16\n"
    );
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["run", "--fabric", "mori"])
        .arg(scenario(&text))
        .env("KVFERRY_MORI_SHIM", "/nonexistent/shim.so")
        .output()
        .expect("the program starts");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{errors}");
    assert!(errors.contains("cannot start p0: it ended at once"), "{errors}");
    assert!(errors.contains("/nonexistent/shim.so"), "{errors}");
    let named = errors.trim_end().rsplit_once("logs of the processes: ");
    let folder = PathBuf::from(named.expect("they are named").1);
    assert!(folder.join("p0.log").is_file(), "{errors}");
    let _gone = std::fs::remove_dir_all(&folder);
}

#[test]
fn what_processes_cannot_play_is_said() {
    let text = format!(
        "about = \"state layers\"\nseed = 1\n[model]\nlayers = 2\nstate_layers = 1\n{TOPOLOGY}[workload]\nmode = \"pull\"\nrequests = 1\nprompt_tokens = 16\n"
    );
    let (code, _, errors) = run(&scenario(&text));
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("state layers"), "{errors}");
}
