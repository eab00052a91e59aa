//! Pairs that compute for a long time, so that what goes wrong does so amid a transfer; with the
//! test in the router's place.

use crate::fleet::{PATIENCE, registration};
use crate::process::ServeProcess;
use crate::seen::{SeenInputs, read, until, until_any, until_count};
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;

/// A step that lasts longer than any test.
const ENDLESS: &str = "900s";

/// A prefill of which a step takes its time, and decodes.
struct Slow {
    file: PathBuf,
    mode: Mode,
    /// Of each prompt. A step computes 64.
    tokens: u32,
}

impl Slow {
    /// `prefill` and `decode` are what is special about these.
    fn new(name: &str, mode: Mode, step: &str, [prefill, decode]: [&str; 2]) -> Slow {
        let times = "hello = \"900s\"\nsilent = \"900s\"\nlease = \"900s\"\nfetch = \"900s\"\n\
             resume = \"900s\"\nclaim = \"900s\"\noperation = \"900s\"\nopen = \"900s\"\n\
             quiet = \"900s\"\n";
        let text = format!(
            "about = \"slow\"\nseed = 1\n[topology]\nprefill = [{{ {prefill} }}]\ndecode = [{{ {decode} }}]\n\
             [protocol]\n{times}[engine]\nchunk = 64\nstep = \"{step}\"\n[workload]\n\
             mode = \"{mode}\"\nrequests = 1\nprompt_tokens = 16\n"
        );
        let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("slow-{name}.toml"));
        std::fs::write(&file, text).expect("the folder for tests can be written");
        Slow { file, mode, tokens: 200 }
    }

    fn start(&self, instance: &str) -> ServeProcess {
        let file = self.file.to_str().expect("UTF-8");
        ServeProcess::serve(&["--scenario", file, "--instance", instance])
    }

    /// Sends the leg of a prompt to a prefill. The answer is nobody's business.
    fn prefill(&self, p: &ServeProcess, prompt: u32, siblings: u32) -> TcpStream {
        let mode = format!("{:?}", self.mode);
        let leg = json!({"key": {"id": "t", "prompt": prompt}, "siblings": siblings, "mode": mode,
            "life": null});
        begin(p, (prompt, self.tokens), &leg)
    }

    /// Sends a sample's leg of a prompt to a decode.
    fn decode(&self, d: &ServeProcess, p: &ServeProcess, prompt: u32, sibling: u32) -> TcpStream {
        let told = registration(p, Role::Prefill, self.mode, p.text("handshake"));
        let mode = format!("{:?}", self.mode);
        let leg = json!({"key": {"id": "t", "prompt": prompt}, "sibling": sibling, "mode": mode,
            "prefill": told.engine, "control": told.control, "life": null});
        begin(d, (prompt, self.tokens), &leg)
    }
}

/// Sends a request with a leg, of a prompt that no other has begun with.
fn begin(to: &ServeProcess, (prompt, tokens): (u32, u32), leg: &Value) -> TcpStream {
    let tokens: Vec<u32> = (0..tokens).map(|at| (at * 7 + prompt * 13) % 251).collect();
    let body = json!({"prompt": tokens, "max_tokens": 1, "kv_transfer_params": {"kvferry": leg}});
    send(to.text("http"), &body)
}

/// Sends a request; who drops the connection before the answer goes.
pub(crate) fn send(to: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    let mut client = TcpStream::connect(to).expect("it listens");
    client.write_all((head + &body).as_bytes()).expect("it reads");
    client
}

/// Two samples of a prompt that is never computed to its end: one is given up, the other's decode
/// is killed amid the writes.
pub(crate) fn amid_writes(seen: &mut SeenInputs) {
    let slow = Slow::new("writes", Mode::Push, ENDLESS, ["", ""]);
    let [p, d1, mut d2] = ["p0", "d0", "d0"].map(|name| slow.start(name));
    let _prefill = slow.prefill(&p, 0, 2);
    let given_up = slow.decode(&d1, &p, 0, 0);
    until(seen, &p, "transfer", &["JobWrite", "Moved"]);
    drop(given_up);
    until(seen, &p, "prefill", &["Cancel", "FlowFailed"]);
    until(seen, &p, "transfer", &["JobStop"]);
    until(seen, &d1, "decode", &["Ended"]);
    let _killed = slow.decode(&d2, &p, 0, 1);
    until(seen, &d2, "decode", &["Begun", "Probe"]);
    until(seen, &p, "prefill", &["Probe"]);
    // Those of the other one, too.
    until_count(&p, "transfer", "JobWrite", 2);
    d2.signal("KILL");
    d2.wait();
    until(seen, &p, "transfer", &["PeerDown", "Unopened", "Tick", "JobFence", "Fenced", "Quiet"]);
    until(seen, &p, "prefill", &["FlowFailing", "PeerFailed", "Fenced"]);
}

/// A prefill is killed while a decode that has its grant waits for blocks. When it has some it
/// reads by sessions that are to be opened anew; then it is given up, or they are.
pub(crate) fn amid_reads(seen: &mut SeenInputs) {
    amid_read(seen, "900s");
    let failing = ("decode".to_owned(), "FlowFailing".to_owned());
    // A busy machine may give the sessions up before it reads.
    for _ in 0..10 {
        if seen.contains(&failing) {
            break;
        }
        amid_read(seen, "1s");
    }
}

fn amid_read(seen: &mut SeenInputs, reopen: &str) {
    let few = format!("blocks = 5, protocol = {{ reopen = \"{reopen}\" }}");
    let [endless, quick] = [("reads-endless", ENDLESS), ("reads-quick", "1ms")]
        .map(|(name, step)| Slow { tokens: 60, ..Slow::new(name, Mode::Pull, step, ["", &few]) });
    let [other, d] = ["p0", "d0"].map(|name| endless.start(name));
    let mut p = quick.start("p0");
    // It has all blocks, for a prompt that is being computed for ever.
    let _prefill = endless.prefill(&other, 0, 1);
    let first = endless.decode(&d, &other, 0, 0);
    until(seen, &d, "decode", &["Allocated"]);
    let _prefill = quick.prefill(&p, 1, 1);
    let second = quick.decode(&d, &p, 1, 0);
    until(seen, &d, "decode", &["Grant"]);
    // By both.
    until_count(&d, "decode", "PeerReady", 2);
    p.signal("KILL");
    p.wait();
    until(seen, &d, "transfer", &["PeerDown"]);
    drop(first);
    if reopen == "900s" {
        until(seen, &d, "transfer", &["JobRead"]);
        drop(second);
        until(seen, &d, "transfer", &["JobStop"]);
        until(seen, &d, "decode", &["FlowFailed"]);
    } else {
        until(seen, &d, "decode", &["PeerFailed", "Fenced"]);
    }
}

/// A prompt that takes seconds.
pub(crate) fn moving(seen: &mut SeenInputs) {
    let slow = Slow::new("moving", Mode::Push, "1500ms", ["", ""]);
    let [p, d] = ["p0", "d0"].map(|name| slow.start(name));
    let _legs = [slow.prefill(&p, 0, 1), slow.decode(&d, &p, 0, 0)];
    until(seen, &p, "prefill", &["FlowMoving", "FlowDone"]);
    until(seen, &d, "decode", &["Delivered"]);
}

/// A side that takes the other for dead says goodbye.
pub(crate) fn goodbyes(seen: &mut SeenInputs) {
    let quick = "protocol = { silent = \"100ms\" }";
    for (name, machine, sides) in
        [("by-prefill", "decode", [quick, ""]), ("by-decode", "prefill", ["", quick])]
    {
        let slow = Slow::new(name, Mode::Push, ENDLESS, sides);
        // On a busy machine the other may be taken for dead before it can be told so.
        let tries = 10;
        assert!((0..tries).any(|_| says_goodbye(seen, &slow, machine)), "no goodbye to {machine}");
    }
}

/// Whether a side is told that it is taken for dead; otherwise it finds that out by itself.
fn says_goodbye(seen: &mut SeenInputs, slow: &Slow, machine: &str) -> bool {
    let [p, d] = ["p0", "d0"].map(|name| slow.start(name));
    let _legs = [slow.prefill(&p, 0, 1), slow.decode(&d, &p, 0, 0)];
    let told = if machine == "decode" { &d } else { &p };
    let ended = until_any(seen, told, machine, &["Bye", "PeerFailed"]);
    ended == "Bye" || until_any(seen, told, machine, &["Bye", "Fenced"]) == "Bye"
}

/// A prompt that is computed for nearly as long as it is held.
pub(crate) fn renewed(seen: &mut SeenInputs) {
    let slow = Slow::new("renewed", Mode::Pull, "1s", ["protocol = { lease = \"3s\" }", ""]);
    let [p, d] = ["p0", "d0"].map(|name| slow.start(name));
    let renewed = ("decode".to_owned(), "Renewed".to_owned());
    // A busy machine may be too late for a lease.
    for prompt in 0..10 {
        let mut leg = slow.decode(&d, &p, prompt, 0);
        let _prefill = slow.prefill(&p, prompt, 1);
        leg.set_read_timeout(Some(PATIENCE)).expect("a time");
        leg.read_exact(&mut [0]).expect("an answer");
        read(seen, &p);
        read(seen, &d);
        if seen.contains(&renewed) {
            break;
        }
    }
}

/// A decode is sent to another prefill than the leg says.
pub(crate) fn refused(seen: &mut SeenInputs) {
    let p = ServeProcess::serve(&["--role", "prefill", "--mode", "push"]);
    let d = ServeProcess::serve(&["--role", "decode", "--mode", "push"]);
    let leg = json!({"key": {"id": "t", "prompt": 0}, "sibling": 0, "mode": "Push",
        "prefill": "nobody:1", "control": p.text("handshake"), "life": null});
    let _leg = begin(&d, (0, 20), &leg);
    until(seen, &d, "decode", &["Refuse"]);
}
