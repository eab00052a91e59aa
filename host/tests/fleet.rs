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
    let ports = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("fleet-ports");
    std::fs::create_dir_all(&ports).expect("the folder for tests can be written");
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["run", "--fabric", fabric, "--json"])
        .arg(path)
        // For those over MoRI: its stand-in.
        .env("KVFERRY_MORI_SHIM", mori_double::INSTALLS[1].shim)
        .env("KVFERRY_MORI_WITHOUT_DEVICES", "1")
        .env("MORI_DOUBLE_PORTS", ports)
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
        let (code, result, errors) = run_over("mori", &scenario(&text));
        assert_eq!(code, Some(0), "{mode} {result}\n{errors}");
        assert!(!result["skipped"].to_string().contains("port_down"), "{result}");
        assert!(
            errors.contains("no backend; it is tried again"),
            "{mode}: nothing went down\n{errors}"
        );
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
fn what_processes_cannot_play_is_said() {
    let text = format!(
        "about = \"state layers\"\nseed = 1\n[model]\nlayers = 2\nstate_layers = 1\n{TOPOLOGY}[workload]\nmode = \"pull\"\nrequests = 1\nprompt_tokens = 16\n"
    );
    let (code, _, errors) = run(&scenario(&text));
    assert_eq!(code, Some(2), "{errors}");
    assert!(errors.contains("state layers"), "{errors}");
}
