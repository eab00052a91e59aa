//! `kvferry serve`: pairs of real processes, with the test in the router's place.

mod carried;
mod process;
mod prompts;

use carried::{PATH, leg};
use process::ServeProcess;
use serde_json::{Value, json};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

/// Times of the protocol that no busy machine passes.
const PATIENT: &str = "channel.hello_ms=600000,channel.silent_ms=600000,protocol.lease_ms=600000,\
     protocol.orphan_ms=600000,protocol.resume_ms=600000,operations.stall_ms=600000,\
     operations.open_ms=600000,operations.quiet_ms=600000";

/// A prefill and a decode with a mode.
struct ServePair {
    prefill: ServeProcess,
    decode: ServeProcess,
    mode: &'static str,
    native: bool,
    next: u32,
    /// TP ranks of prefill and decode, as legs tell the other one.
    tp: [u16; 2],
}

/// Two that speak the native dialect find out that they do, whatever their legs say.
fn only(native: bool) -> &'static [&'static str] {
    if native { &[] } else { &["--moriio-only"] }
}

impl ServePair {
    fn start(mode: &'static str, native: bool, more: &[&str]) -> ServePair {
        let start = |role| {
            let mut args = vec!["--role", role, "--mode", mode, "--set", PATIENT];
            args.extend_from_slice(only(native));
            args.extend_from_slice(more);
            ServeProcess::serve(&args)
        };
        let (prefill, decode) = (start("prefill"), start("decode"));
        ServePair { prefill, decode, mode, native, next: 0, tp: [1, 1] }
    }

    /// One of so many TP ranks each, with other arguments of either.
    fn of_ranks(mode: &'static str, native: bool, tp: [u16; 2], more: [&[&str]; 2]) -> ServePair {
        let start = |role, tp: u16, more: &[&str]| {
            let tp = tp.to_string();
            let args = ["--role", role, "--mode", mode, "--set", PATIENT, "--tp", &tp];
            ServeProcess::serve(&[&args, only(native), more].concat())
        };
        let prefill = start("prefill", tp[0], more[0]);
        let decode = start("decode", tp[1], more[1]);
        ServePair { prefill, decode, mode, native, next: 0, tp }
    }

    /// The request id that a router would make, and the transfer.
    fn ids(&mut self) -> (String, String) {
        self.next += 1;
        let (p, d) = (self.prefill.address(self.native), self.decode.address(self.native));
        let id = format!("___prefill_addr_{p}___decode_addr_{d}_{:032x}", self.next);
        (id, format!("tx-{:032x}", self.next))
    }

    fn legs(&mut self, tokens: &[u32]) -> (String, Value, Value) {
        let (id, transfer) = self.ids();
        let params = |prefill: bool| {
            json!({
                "do_remote_decode": prefill, "do_remote_prefill": !prefill,
                "remote_engine_id": null, "remote_block_ids": null,
                "transfer_id": transfer, "remote_dp_size": 1,
                "remote_tp_size": self.tp[usize::from(prefill)],
            })
        };
        let body = |prefill, max_tokens| {
            json!({"prompt": tokens, "max_tokens": max_tokens, "stream": false,
                "kv_transfer_params": params(prefill)})
        };
        (id, body(true, 1), body(false, 4))
    }

    /// Serves a prompt with both legs; the answers of prefill and decode.
    fn request(&mut self, tokens: &[u32]) -> (Value, Value) {
        let (id, prefill, mut decode) = self.legs(tokens);
        let path = "/v1/completions";
        let answers = if self.mode == "push" {
            std::thread::scope(|scope| {
                let first = scope.spawn(|| self.prefill.post(path, &id, &prefill));
                let second = self.decode.post(path, &id, &decode);
                [first.join().expect("no panic"), second]
            })
        } else {
            let first = self.prefill.post(path, &id, &prefill);
            let answer: Value = serde_json::from_str(&first.1).expect("JSON");
            decode["kv_transfer_params"] = answer["kv_transfer_params"].clone();
            [first, self.decode.post(path, &id, &decode)]
        };
        let [prefill, decode] = answers.map(|(status, body)| {
            assert_eq!(status, 200, "{body}");
            serde_json::from_str(&body).expect("JSON")
        });
        (prefill, decode)
    }
}

fn prompt(len: u32, seed: u32) -> Vec<u32> {
    (0..len).map(|at| (at * 7 + seed * 13) % 251).collect()
}

/// Metrics of an instance by name.
fn metric(process: &ServeProcess, name: &str) -> u64 {
    let text = process.get("/metrics");
    let line = text.lines().find(|line| line.starts_with(name));
    let value = line.and_then(|line| line.rsplit_once(' ')).map(|(_, value)| value.parse());
    value.unwrap_or_else(|| panic!("no {name} in {text}")).expect("a number")
}

fn serves(mode: &'static str, native: bool, more: &[&str], path: &str) {
    let mut pair = ServePair::start(mode, native, more);
    let lengths = [1, 31, 32, 33, 100, 2500];
    for (seed, len) in (0..).zip(lengths) {
        let tokens = prompt(len, seed);
        let (prefill, decode) = pair.request(&tokens);
        assert_eq!(decode["kvferry"]["source"], "transferred", "{decode}");
        assert_eq!(decode["kvferry"]["digest"], prefill["kvferry"]["expected"]);
        assert_eq!(decode["choices"][0]["text"], prefill["choices"][0]["text"]);
        assert_eq!(decode["usage"]["prompt_tokens"], len);
        assert_eq!(decode["usage"]["completion_tokens"], 4);
    }
    let count = lengths.len() as u64;
    assert_eq!(metric(&pair.decode, "kvferry_kv_transferred_total"), count);
    let initiator = if mode == "push" { &pair.prefill } else { &pair.decode };
    let bytes = metric(
        initiator,
        &format!("kvferry_host_bytes_total{{side=\"initiated\",path=\"{path}\"}}"),
    );
    let tokens: u32 = lengths.iter().sum();
    assert!(bytes >= u64::from(tokens) * 4 * 4 * 512, "{bytes} bytes went by {path}");
    for process in [&pair.prefill, &pair.decode] {
        assert_eq!(metric(process, "kvferry_faults_total"), 0);
        assert_eq!(metric(process, "kvferry_violations_total"), 0);
    }
}

#[test]
fn push_over_moriio() {
    serves("push", false, &[], "shared-memory");
}

#[test]
fn pull_over_moriio() {
    serves("pull", false, &[], "shared-memory");
}

#[test]
fn push_over_the_native_dialect() {
    serves("push", true, &[], "shared-memory");
}

#[test]
fn pull_over_the_native_dialect() {
    serves("pull", true, &[], "shared-memory");
}

#[test]
fn over_mori() {
    for mode in ["push", "pull"] {
        for native in [false, true] {
            serves(mode, native, &["--fabric", "mori"], "mori-rdma");
        }
    }
}

#[test]
fn push_between_private_memories() {
    serves("push", false, &["--private-memory"], "cross-memory");
}

#[test]
fn pull_between_private_memories() {
    serves("pull", true, &["--private-memory"], "cross-memory");
}

#[test]
fn ranks_and_layouts_may_differ() {
    let others: [&[&str]; 2] =
        [&["--layout", "head-split"], &["--block-tokens", "16", "--blocks", "1024"]];
    let mut pair = ServePair::of_ranks("pull", true, [2, 8], others);
    let (prefill, decode) = pair.request(&prompt(333, 1));
    assert_eq!(decode["kvferry"]["source"], "transferred", "{decode}");
    assert_eq!(decode["kvferry"]["digest"], prefill["kvferry"]["expected"]);
}

#[test]
fn ranks_and_order_of_heads_may_differ_over_moriio() {
    let (block, token): (&[&str], &[&str]) = (&["--layout", "block"], &["--layout", "token"]);
    for mode in ["push", "pull"] {
        for (tp, layouts) in [
            ([2, 2], [block, block]),
            ([1, 2], [token, block]),
            ([4, 2], [block, token]),
            ([2, 8], [token, token]),
        ] {
            // A decode wants the word of each writer of a rank by a link of its own, as of vLLM, where
            // each is a process. One of ours that speaks for all is known as such only where it
            // says that it is native.
            if mode == "push" && tp[0] > tp[1] {
                continue;
            }
            let mut pair = ServePair::of_ranks(mode, false, tp, layouts);
            for (seed, len) in [(1, 333), (2, 32), (3, 7)] {
                let (prefill, decode) = pair.request(&prompt(len, seed));
                assert_eq!(decode["kvferry"]["source"], "transferred", "{tp:?} {decode}");
                assert_eq!(decode["kvferry"]["digest"], prefill["kvferry"]["expected"]);
            }
            for process in [&pair.prefill, &pair.decode] {
                assert_eq!(metric(process, "kvferry_violations_total"), 0, "{tp:?}");
                assert_eq!(metric(process, "kvferry_faults_total"), 0, "{tp:?}");
            }
        }
    }
}

/// The file of a fleet's secret.
fn secret(name: &str, secret: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("secret-{name}"));
    // One that is there from a run before may be read and not written.
    let _old = fs::remove_file(&path);
    fs::write(&path, secret).expect("the folder for tests can be written");
    fs::set_permissions(&path, Permissions::from_mode(0o400)).expect("its mode");
    path.into_os_string().into_string().expect("UTF-8")
}

#[test]
fn a_fleet_with_a_secret_serves_as_one_without() {
    let secret = secret("fleet", "0123456789abcdef0123456789abcdef");
    let known: &[&str] = &["--secret-file", &secret];
    for mode in ["push", "pull"] {
        for native in [false, true] {
            serves(mode, native, known, "shared-memory");
        }
        serves(mode, true, &[known, &["--fabric", "mori"]].concat(), "mori-rdma");
    }
}

#[test]
fn moriio_peers_are_served_where_there_are_some_and_native_ones_everywhere() {
    let closed: &[&str] = &["--moriio-peers=false"];
    serves("push", true, closed, "shared-memory");
    let secret = secret("closed", "0123456789abcdef0123456789abcdef");
    serves("pull", true, &[closed, &["--secret-file", &secret]].concat(), "shared-memory");
    let start = |role, more: &[&str]| {
        ServeProcess::serve(&[&["--role", role, "--mode", "push", "--set", PATIENT], more].concat())
    };
    // A decode that has no such peers takes no leg in their form; a prefill takes it, for a native
    // decode.
    for (more_p, more_d) in [(closed, &[][..]), (&[], closed)] {
        let (prefill, decode) = (start("prefill", more_p), start("decode", more_d));
        let mut pair =
            ServePair { prefill, decode, mode: "push", native: false, next: 0, tp: [1; 2] };
        if more_d.is_empty() {
            let (_, decode) = pair.request(&prompt(40, 1));
            assert_eq!(decode["kvferry"]["source"], "transferred", "{decode}");
        } else {
            let (id, _, to_decode) = pair.legs(&prompt(40, 1));
            let (status, body) = pair.decode.post("/v1/completions", &id, &to_decode);
            assert_eq!(status, 500, "{body}");
            assert!(body.contains("moriio_peers"), "{body}");
        }
        pair.native = true;
        let (_, decode) = pair.request(&prompt(40, 2));
        assert_eq!(decode["kvferry"]["source"], "transferred", "{decode}");
    }
}

#[test]
fn who_has_another_secret_or_none_is_told_why() {
    let ours = secret("ours", "0123456789abcdef0123456789abcdef");
    let theirs = secret("theirs", "fedcba9876543210fedcba9876543210");
    // A decode with a secret detects it by the seal of the leg, one without by the hello.
    for (decode, status, said) in [
        (&["--secret-file", &*theirs][..], 400, "the two sides have different secrets"),
        (&[], 500, "a proof of the fleet's secret is demanded here"),
    ] {
        let pair = ServePair::unequal("push", &["--secret-file", &ours], decode);
        let (_, params) = pair.prefilled("r", &prompt(40, 1));
        let (found, body) = pair.decode.post(PATH, "r", &leg(&prompt(40, 1), 4, &params));
        assert_eq!(found, status, "{body}");
        assert!(body.contains(said) && body.contains("secret_file"), "{body}");
    }
}

#[test]
fn what_is_to_be_encrypted_needs_a_secret_and_a_plane_that_does_it() {
    let secret = secret("encrypt", "0123456789abcdef0123456789abcdef");
    for (more, said) in [
        (&[][..], "encrypt = true: it needs a secret"),
        (&["--secret-file", &secret, "--fabric", "mori"], "encrypt: nothing encrypts"),
    ] {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(["serve", "--role", "prefill", "--mode", "push", "--encrypt"])
            .args(more)
            .output()
            .expect("it runs");
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && err.contains(said), "{err}");
    }
    serves("pull", true, &["--secret-file", &secret, "--encrypt"], "shared-memory");
}

#[test]
fn a_stream_has_the_digest_and_ends() {
    let mut pair = ServePair::start("push", true, &[]);
    let (id, prefill, mut decode) = pair.legs(&prompt(70, 3));
    decode["stream"] = true.into();
    let path = "/v1/completions";
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| pair.prefill.post(path, &id, &prefill));
        let second = pair.decode.post(path, &id, &decode);
        (first.join().expect("no panic"), second)
    });
    let answer: Value = serde_json::from_str(&first.1).expect("JSON");
    let digest = answer["kvferry"]["expected"].as_str().expect("a text");
    let events: Vec<&str> =
        second.1.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert!(events[0].contains(digest), "{events:?}");
    assert_eq!(events.last(), Some(&"[DONE]"));
}

#[test]
fn a_decode_whose_prefill_died_answers_an_error() {
    let mut pair = ServePair::start("push", false, &[]);
    pair.request(&prompt(40, 1));
    let (id, _, decode) = pair.legs(&prompt(40, 2));
    pair.prefill.signal("KILL");
    pair.prefill.wait();
    let (status, body) = pair.decode.post("/v1/completions", &id, &decode);
    assert_eq!(status, 500, "{body}");
    let body: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(body["error"]["type"], "server_error");
}

/// A leg as a router of MoRIIO sends it, without one of its keys.
fn leg_without(key: &str) -> Value {
    let mut params = json!({"do_remote_decode": false, "do_remote_prefill": true, "transfer_id": "t",
        "remote_engine_id": null, "remote_block_ids": null});
    params.as_object_mut().expect("an object").remove(key).expect("it had the key");
    json!({"prompt": "a", "kv_transfer_params": params})
}

#[test]
fn bad_requests_are_answered_with_what_is_wrong() {
    let decode = ServeProcess::serve(&["--role", "decode", "--mode", "push"]);
    let cases = [
        (json!({"max_tokens": 1}), "prompt is missing"),
        (json!({"prompt": ["a", "b"]}), "2 prompts"),
        (json!({"prompt": "a", "n": 2}), "n is 2"),
        (json!({"prompt": []}), "the prompt is empty"),
        (json!({"prompt": "a", "kv_transfer_params": 7}), "no object"),
        (leg_without("remote_engine_id"), "no remote_engine_id"),
        (leg_without("remote_block_ids"), "no remote_block_ids"),
    ];
    for (body, text) in cases {
        let (status, answer) = decode.post("/v1/completions", "r", &body);
        assert_eq!(status, 400, "{body}: {answer}");
        assert!(answer.contains(text), "{body}: {answer}");
    }
}

#[test]
fn a_leg_for_the_other_role_is_misdirected() {
    for (role, own, other) in [
        ("prefill", "do_remote_decode", "do_remote_prefill"),
        ("decode", "do_remote_prefill", "do_remote_decode"),
    ] {
        let server = ServeProcess::serve(&["--role", role, "--mode", "push"]);
        let status = |params: Value| {
            let body = json!({"prompt": "a", "max_tokens": 1, "kv_transfer_params": params});
            let (status, answer) = server.post("/v1/completions", "r", &body);
            assert!(status != 421 || answer.contains("\"code\":421"), "{answer}");
            status
        };
        let native = json!({"key": {"id": "t", "prompt": 0}});
        assert_eq!(status(json!({other: true, own: false, "transfer_id": "t"})), 421, "{role}");
        assert_eq!(status(json!({other: true, "kvferry": native})), 421, "{role}");
        assert_eq!(status(json!({own: true, "kvferry": native})), 400, "{role}: it lacks the rest");
        assert_eq!(
            status(Value::Null) == 421,
            role == "prefill",
            "who decodes computes prompts, too"
        );
    }
}

/// Its clock says less than it did in its last incarnation, which is years ahead here.
#[test]
fn an_incarnation_is_later_than_the_one_before_whatever_the_clock_says() {
    let folder = std::env::temp_dir().join(format!("kvferry-serve-{}-lives", std::process::id()));
    let state = folder.to_str().expect("UTF-8");
    let role = ["--role", "decode", "--mode", "push", "--state", state];
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr());
    let port = free.expect("a port").port().to_string();
    let begin = |more: &[&str]| {
        let args: Vec<&str> = role.iter().chain(more).copied().collect();
        ServeProcess::serve(&args).ready["incarnation"].as_u64().expect("a number")
    };
    let given = ["--handshake-port", &port];
    let first = begin(&given);
    let note =
        std::fs::read_dir(&folder).expect("a folder").next().expect("a note").expect("a note");
    std::fs::write(note.path(), format!("{}\n", 1_u64 << 55)).expect("a note");
    assert!(first < 1 << 55);
    assert_eq!([begin(&given), begin(&given)], [(1 << 55) + 1, (1 << 55) + 2]);
    // Without a port of its own it has another name each time, and no note.
    begin(&[]);
    assert_eq!(std::fs::read_dir(&folder).expect("a folder").count(), 1);
    std::fs::remove_dir_all(&folder).expect("it was there");
}

#[test]
fn a_taken_port_and_missing_arguments_are_said_at_the_start() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let run = |args: &[&str]| {
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .arg("serve")
            .args(args)
            .output()
            .expect("the program starts");
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for flag in ["--http-port", "--handshake-port", "--notify-port"] {
        let (code, text) = run(&["--role", "decode", "--mode", "push", flag, &port]);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains(&format!("127.0.0.1:{port}")), "{text}");
    }
    let (code, text) = run(&["--mode", "push"]);
    assert!(code == Some(2) && text.contains("--role"), "{text}");
}
