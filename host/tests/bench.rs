//! `kvferry bench` over host memory, and over MoRI's stand-in.

use serde_json::Value;
use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};

/// How the program ended.
#[derive(Debug)]
struct BenchOutput {
    code: i32,
    out: String,
    err: String,
}

/// The program with the stand-in for MoRI.
fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command
        .arg("bench")
        .args(args)
        .env("KVFERRY_MORI_SHIM", mori_double::INSTALLS[1].shim)
        .env("KVFERRY_MORI_WITHOUT_DEVICES", "1");
    command
}

fn ended(mut command: Command) -> BenchOutput {
    let output = command.output().expect("the program starts");
    BenchOutput {
        code: output.status.code().expect("it ends by itself"),
        out: String::from_utf8(output.stdout).expect("output is UTF-8"),
        err: String::from_utf8(output.stderr).expect("output is UTF-8"),
    }
}

fn bench(args: &[&str]) -> BenchOutput {
    ended(program(args))
}

const SHORT: [&str; 8] =
    ["--seconds", "0.05", "--sizes", "1K,3000", "--batches", "1,128", "--memory", "1M"];

/// The rows of a short run that has to end well, and what it says besides.
fn rows(args: &[&str]) -> (Vec<Value>, String) {
    let args: Vec<_> = args.iter().copied().chain(SHORT).chain(["--json"]).collect();
    let BenchOutput { code, out, err } = bench(&args);
    assert_eq!(code, 0, "{args:?}: {err}");
    let lines = out.lines().map(|line| serde_json::from_str(line).expect("an object per line"));
    (lines.collect(), err)
}

#[test]
fn what_a_library_says_is_not_among_the_rows() {
    let args = ["--fabric", "mori", "--json"];
    let mut command = program(&args.into_iter().chain(SHORT).collect::<Vec<_>>());
    command.env("MORI_DOUBLE_FAULTS", "ack_lost@3");
    let BenchOutput { out, err, .. } = ended(command);
    for line in out.lines() {
        assert!(serde_json::from_str::<Value>(line).is_ok(), "{line}");
    }
    assert!(err.contains("[ROOT CAUSE]"), "{err}");
}

/// Checks that each direction has its four rows, and that the figures of each go together.
fn check_rows(rows: &[Value], fabric: &str, directions: &[&str]) {
    let mut seen = BTreeSet::new();
    for row in rows {
        assert_eq!(row["fabric"], fabric, "{row}");
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("no {key} in {row}"));
        let direction = row["direction"].as_str().expect("a direction");
        let [size, batch] = ["size", "batch"].map(|key| row[key].as_u64().expect("a number"));
        assert!(seen.insert((direction, size, batch)), "{row} twice");
        assert!(number("mean_us") > 0.0 && number("p50_us") <= number("p99_us"), "{row}");
        let alone = (size * batch) as f64 / number("mean_us") / 1e3;
        assert!((number("gb_per_s") / alone - 1.0).abs() < 0.01, "{row}: {alone}");
        assert!((1.0..=8.0).contains(&number("inflight")), "{row}");
        assert!(number("inflight_gb_per_s") > 0.0, "{row}");
    }
    let expected = directions.iter().flat_map(|direction| {
        [1, 128]
            .into_iter()
            .flat_map(move |batch| [1_024, 3_000].map(|size| (*direction, size, batch)))
    });
    assert_eq!(seen, expected.collect());
}

fn published(rows: &[Value], direction: &str, size: u64, batch: u64) -> Value {
    let row = rows
        .iter()
        .find(|row| row["direction"] == direction && row["size"] == size && row["batch"] == batch);
    row.expect("the row is there")["published"].clone()
}

#[test]
fn host_memory_is_measured_in_both_directions() {
    let (rows, said) = rows(&[]);
    check_rows(&rows, "host", &["write", "read"]);
    assert!(rows.iter().all(|row| row["published"].is_null()), "{rows:?}");
    for kind in ["write of 128 x 3000", "read of 128 x 3000"] {
        assert!(said.contains(&format!("compared the bytes of one more {kind}: right")), "{said}");
    }
}

#[test]
fn rdma_stands_beside_what_is_published() {
    let (rows, said) = rows(&["--fabric", "mori", "--mori", r#"{"qp_per_transfer":4}"#]);
    check_rows(&rows, "mori-rdma", &["write", "read"]);
    assert!(said.contains("one more write of 128 x 3000: right"), "{said}");
    assert!(said.contains("one more read of 128 x 3000: right"), "{said}");
    let figures = |direction, batch| {
        let found = published(&rows, direction, 1_024, batch);
        (found["card"].clone(), found["latency_us"].clone(), found["gb_per_s"].clone())
    };
    assert_eq!(figures("write", 1), ("ConnectX-7".into(), 5.87.into(), 0.17.into()));
    assert_eq!(figures("read", 1), ("ConnectX-7".into(), 6.74.into(), 0.15.into()));
    for direction in ["write", "read"] {
        assert_eq!(figures(direction, 128), ("Thor2".into(), 37.09.into(), 3.53.into()));
        assert!(published(&rows, direction, 3_000, 1).is_null());
    }
}

#[test]
fn memory_of_a_gpu_is_measured_and_not_looked_at() {
    for (backend, directions, direction) in
        [("xgmi", &["write", "read"][..], "both"), ("rdma", &["read"][..], "read")]
    {
        let args = ["--fabric", "mori", "--backend", backend, "--device", "0"];
        let args: Vec<_> = args.into_iter().chain(["--direction", direction]).collect();
        let (rows, said) = rows(&args);
        check_rows(&rows, &format!("mori-{backend}"), directions);
        let some = rows.iter().any(|row| !row["published"].is_null());
        assert_eq!(some, backend == "rdma", "network cards are none of xGMI's: {rows:?}");
        assert!(said.contains("bytes were not compared"), "{said}");
    }
}

#[test]
fn rows_without_room_are_left_out() {
    let args = ["--direction", "write", "--batches", "1,2,65537", "--sizes", "4K,8K"];
    let more = ["--memory", "8K", "--seconds", "0.01"];
    let BenchOutput { code, out, err } = bench(&[&args[..], &more].concat());
    assert_eq!(code, 0, "{err}");
    let lines: Vec<_> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    let of = |line: &Vec<&str>| line.first() == Some(&"write");
    let rows: Vec<_> = lines.iter().filter(|line| of(line)).map(|line| &line[..3]).collect();
    assert_eq!(rows, [["write", "1", "4K"], ["write", "1", "8K"], ["write", "2", "4K"]], "{out}");
    assert!(out.contains("more --memory than 8K: 2 x 8K\n"), "{out}");
    assert!(out.contains("65536 ranges at most: batches of 65537\n"), "{out}");
    let BenchOutput { code, err, .. } = bench(&["--memory", "8K", "--sizes", "16K"]);
    assert_eq!(code, 2);
    assert!(err.contains("there is no row") && err.contains("1 x 16K, 128 x 16K"), "{err}");
}

#[test]
fn bad_arguments_are_refused_with_what_to_do() {
    let mori = ["--fabric", "mori"];
    let cases: [(&[&str], &str); 11] = [
        (&["--fabric", "tcp"], "possible values: host, mori"),
        (&["--sizes", "1K,0"], "'0' for '--sizes <SIZES>'"),
        (&["--batches", "0"], "'0' for '--batches <COUNTS>'"),
        (&["--inflight", "0"], "'0' for '--inflight <N>'"),
        (&["--seconds", "0"], "0 is not from 0.001 to 86400 seconds"),
        (&["--device", "0"], "--device is for --fabric mori"),
        (&[&mori[..], &["--backend", "xgmi"]].concat(), "give --device N"),
        (
            &[&mori[..], &["--mori", r#"{"qp_per_transfr":4}"#]].concat(),
            "`qp_per_transfr`, expected",
        ),
        (&[&mori[..], &["--mori", r#"{"backend":"xgmi"}"#]].concat(), "given by --backend"),
        (
            &[&mori[..], &["--mori", r#"{"sge_max":65}"#]].concat(),
            "sge_max = 65: it may be 0 to 64",
        ),
        (&["--serve", "0.0.0.0:0"], "give --host-ip"),
    ];
    for (args, says) in cases {
        let BenchOutput { code, out, err } = bench(args);
        assert_eq!((code, &*out), (2, ""), "{args:?}: {err}");
        assert!(err.contains(says), "{args:?}: {err}");
        assert_eq!(err.matches("error: ").count(), 1, "one error: {err}");
    }
}

#[test]
fn a_child_that_cannot_start_says_why() {
    let mut command = program(&["--fabric", "mori"]);
    command.env("KVFERRY_MORI_SHIM", "/nonexistent/shim.so");
    let BenchOutput { code, err, .. } = ended(command);
    assert_eq!(code, 2);
    assert!(err.contains("/nonexistent/shim.so: not there"), "{err}");
    assert!(err.contains("it ended (exit status: 2) before it was ready"), "{err}");
}

#[test]
fn failures_of_batches_are_errors() {
    let mut command = program(&["--fabric", "mori", "--sizes", "1K", "--seconds", "0.01"]);
    command.env("MORI_DOUBLE_FAULTS", "qp_error@3");
    let BenchOutput { code, err, .. } = ended(command);
    assert_eq!(code, 2);
    assert!(err.contains("write of 1 x 1K: MoRI: "), "{err}");
}

#[test]
fn rows_fail_one_by_one() {
    let sizes = ["--sizes", "1K,2K,4K", "--batches", "1", "--seconds", "0.01", "--json"];
    let limit = ["--direction", "write", "--mori", r#"{"operation_ms": 800}"#];
    let mut command = program(&[&["--fabric", "mori"][..], &sizes, &limit].concat());
    // The first batch of the first row.
    command.env("MORI_DOUBLE_FAULTS", "lost@1");
    let BenchOutput { code, out, err } = ended(command);
    assert_eq!(code, 2, "{err}");
    let rows: Vec<Value> =
        out.lines().map(|line| serde_json::from_str(line).expect("an object per line")).collect();
    assert_eq!(rows.len(), 3, "{out}{err}");
    let [failed, measured, last] = &rows[..] else { panic!() };
    let why = failed["error"].as_str().unwrap_or_else(|| panic!("{failed}"));
    assert!(why.starts_with("write of 1 x 1K") && why.contains("operation_ms = 800"), "{why}");
    assert!(measured["error"].is_null() && last["error"].is_null(), "{out}");
    assert!(measured["p50_us"].is_number() && err.contains(why), "{err}");
}

/// A side that waits; killed with the test.
struct WaitingBench {
    child: Child,
    address: String,
}

impl WaitingBench {
    fn start(args: &[&str]) -> WaitingBench {
        let mut command = program(&["--serve", "127.0.0.1:0"]);
        let mut child = command.args(args).stdout(Stdio::piped()).spawn().expect("it starts");
        let ready = line(&mut BufReader::new(child.stdout.take().expect("a pipe")));
        assert_eq!(ready["host_ip"], "127.0.0.1");
        let address = ready["address"].as_str().expect("an address").into();
        WaitingBench { child, address }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        let done = Command::new("kill").args(["-s", name, &pid]).status().expect("kill runs");
        assert!(done.success());
    }
}

impl Drop for WaitingBench {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn line(from: &mut BufReader<ChildStdout>) -> Value {
    let mut line = String::new();
    from.read_line(&mut line).expect("a pipe can be read");
    serde_json::from_str(&line).unwrap_or_else(|why| panic!("{why}: {line:?}"))
}

#[test]
fn a_side_serves_one_after_the_other_until_it_is_told_to_end() {
    for (fabric, signal) in [("host", "TERM"), ("mori", "INT")] {
        let mut waiting = WaitingBench::start(&["--fabric", fabric, "--memory", "512K"]);
        let to = ["--fabric", fabric, "--to", &waiting.address];
        for direction in ["write", "read"] {
            let (rows, said) = rows(&[&to[..], &["--direction", direction]].concat());
            check_rows(&rows, if fabric == "host" { "host" } else { "mori-rdma" }, &[direction]);
            assert!(said.contains("right"), "{said}");
        }
        // Whose memory is the smaller one.
        let wide = ["--sizes", "64K,1M", "--batches", "1", "--seconds", "0.01"];
        let BenchOutput { code, out, err } = bench(&[&to[..], &wide].concat());
        assert_eq!(code, 0, "{err}");
        assert!(out.contains("more --memory than 512K: 1 x 1M"), "{out}");
        waiting.signal(signal);
        let status = waiting.child.wait().expect("a child");
        assert_eq!(status.code(), Some(0), "{fabric} {signal}");
    }
}

#[test]
fn a_peer_of_another_kind_is_refused_and_the_next_one_served() {
    let waiting = WaitingBench::start(&["--fabric", "mori"]);
    let BenchOutput { code, err, .. } = bench(&["--to", &waiting.address]);
    assert_eq!(code, 2);
    assert!(err.contains("moves bytes by mori-rdma and this side by host"), "{err}");
    assert_eq!(err.matches("error: ").count(), 1, "one error: {err}");
    let xgmi = ["--fabric", "mori", "--backend", "xgmi", "--device", "0"];
    let BenchOutput { code, err, .. } = bench(&[&xgmi[..], &["--to", &waiting.address]].concat());
    assert_eq!(code, 2);
    assert!(err.contains("by mori-rdma and this side by mori-xgmi"), "{err}");
    let (rows, _) = rows(&["--fabric", "mori", "--to", &waiting.address, "--direction", "read"]);
    check_rows(&rows, "mori-rdma", &["read"]);
}

#[test]
fn nobody_there_is_an_error() {
    // Nobody else gets the port, and nobody listens at it.
    use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
    let silent = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    bind(&silent, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("loopback");
    let address = SocketAddr::try_from(getsockname(&silent).expect("bound")).expect("an address");
    let BenchOutput { code, err, .. } = bench(&["--to", &address.to_string()]);
    assert_eq!(code, 2);
    assert!(err.contains(&format!("--to {address}: cannot connect: ")), "{err}");
    assert!(err.contains("start `kvferry bench --serve ADDR:PORT` there"), "{err}");
}

#[test]
fn the_end_of_the_other_side_ends_the_run() {
    for fabric in ["host", "mori"] {
        let waiting = WaitingBench::start(&["--fabric", fabric, "--memory", "1M"]);
        // It would take an hour, but for the first row.
        let sizes = (1..=3_600).map(|size| size.to_string()).collect::<Vec<_>>().join(",");
        let mut client = program(&["--fabric", fabric, "--to", &waiting.address, "--json"])
            .args(["--sizes", &sizes, "--batches", "1", "--memory", "1M", "--seconds", "1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut out = BufReader::new(client.stdout.take().expect("a pipe"));
        assert_eq!(line(&mut out)["size"], 1);
        waiting.signal("KILL");
        let output = client.wait_with_output().expect("it ends");
        let err = String::from_utf8(output.stderr).expect("output is UTF-8");
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(err.contains("write of 1 x "), "{fabric}: {err}");
    }
}
