//! Whether MoRI moves bytes: tried by processes that it may end, each a side of the smallest
//! `bench`.

use super::child::{ChildExit, ChildProcess, ExitCause};
use super::exit_diagnosis::remedy;
use super::peer::{GpuProbe, ShimLoad, in_one_line, start};
use super::ports::joined;
use super::{Check, DoctorArgs, LOOPBACK};
use crate::instance::BackendArg;
use crate::process::name;
use kvferry_fabric_mori::{Shim, ShimSearchPath};
use serde_json::Value;
use std::io::{self, Write};
use std::time::Duration;

const SHIM: &str = "mori-shim";
const FIX: &str = "mori-fix";
const RDMA: &str = "mori-rdma-try";
const XGMI: &str = "mori-xgmi-try";
const PEER: &str = "mori-peer-try";
const SERVED: &str = "mori-served";

/// What each of two processes has registered: more than the usual limits of locked memory.
const MEMORY: &str = "64M";

/// What was wrong, and what to do.
type CheckProblem = (String, String);

/// What came of a try, which may be what was moved.
type CheckOutcome = Result<String, CheckProblem>;

/// Loads the shim for MoRI, and moves bytes by each backend that there is hardware for.
pub(super) fn mori(args: &DoctorArgs) -> Vec<Check> {
    let wanted = |backend, check, tried: CheckOutcome| match tried {
        Ok(found) => Check::ok(check, found),
        Err((found, remedy)) if args.backend == backend => Check::fail(check, found, remedy),
        Err((found, remedy)) => Check::warn(check, found, remedy),
    };
    let (shim, gpus) = match load(args.timeout) {
        Ok(loaded) => loaded,
        Err((why, remedy)) => {
            let skipped = |check| Check::skip(check, "there is no MoRI");
            return vec![Check::fail(SHIM, why, remedy), skipped(RDMA), skipped(XGMI)];
        }
    };
    let rdma = between(args, BackendArg::Rdma, [None, None]);
    let xgmi = match gpus.map(|gpus| lacks(&gpus)) {
        Ok(Some(why)) if args.backend == BackendArg::Rdma => Check::skip(XGMI, why),
        Ok(Some(why)) => Check::fail(XGMI, why, "give the servers two GPUs of one host"),
        Ok(None) => {
            let tried = between(args, BackendArg::Xgmi, [Some(0), Some(1)]);
            wanted(BackendArg::Xgmi, XGMI, tried)
        }
        Err(why) => wanted(BackendArg::Xgmi, XGMI, Err(why)),
    };
    vec![Check::ok(SHIM, shim), wanted(BackendArg::Rdma, RDMA, rdma), xgmi]
}

/// Compiles the shim for the MoRI that is installed, and loads it.
pub(super) fn fix(limit: Duration) -> Vec<Check> {
    if let Some(asked) = ShimSearchPath::of_process().asked {
        let found = format!("KVFERRY_MORI_SHIM names {}, which is taken", asked.display());
        return vec![Check::fail(FIX, found, "unset it to have one compiled")];
    }
    let made = match Shim::compile() {
        Ok(made) => made,
        Err(why) => {
            let remedy = remedy(&why).unwrap_or("correct what it says");
            return vec![Check::fail(FIX, in_one_line(&why), remedy)];
        }
    };
    let (path, took) = (made.path.display(), made.took.unwrap_or_default().as_secs_f64());
    let fixed = Check::ok(FIX, format!("compiled {path} in {took:.1} s, for {}", made.mori));
    let loaded = match load(limit) {
        Ok((shim, _)) => Check::ok(SHIM, shim),
        Err((why, remedy)) => Check::fail(SHIM, why, remedy),
    };
    vec![fixed, loaded]
}

/// Which shim was loaded, and GPUs by HIP; or what was wrong with either and what to do.
fn load(limit: Duration) -> Result<(String, Result<GpuProbe, CheckProblem>), CheckProblem> {
    let ended =
        |end: &ChildExit| (format!("the process that loads it {}", end.describe()), end.remedy());
    let process = start(&["load"]).map_err(unable)?;
    let (process, loaded) = process.ready::<ShimLoad>(limit).map_err(|end| ended(&end))?;
    let end = process.end(limit);
    let shim = loaded.map_err(|why| {
        let remedy = remedy(&why).unwrap_or("correct what it says");
        (why, remedy.to_owned())
    })?;
    let gpus = end.out.first().and_then(|line| serde_json::from_str(line).ok());
    Ok((shim, gpus.ok_or_else(|| ended(&end))))
}

/// Why there are not two GPUs.
fn lacks(gpus: &GpuProbe) -> Option<String> {
    let GpuProbe { count, why } = gpus;
    match count {
        0 => Some(format!("no GPU: {why}")),
        1 => Some(format!("one GPU, and xGMI is between two: {why}")),
        _ => None,
    }
}

/// Two processes of this machine.
fn between(args: &DoctorArgs, backend: BackendArg, devices: [Option<u32>; 2]) -> CheckOutcome {
    let limit = args.timeout;
    let [ours, theirs] = devices;
    let at = joined(&args.host_ip, 0);
    let settings = args.mori.as_deref().map(|text| (text.to_owned(), without_ports(text)));
    let (settings, others) = settings.unzip();
    let waiting = side(args, (backend, theirs, settings), ["--serve", &at]).map_err(unable)?;
    let said = |who: &str, end: &ChildExit| {
        (format!("the process that {who} {}", end.describe()), end.remedy())
    };
    let (waiting, ready) = waiting.ready::<Value>(limit).map_err(|end| said("waits", &end))?;
    let to = ready["address"].as_str().unwrap_or_default();
    let moving =
        side(args, (backend, ours, others), ["--to", to]).map_err(unable)?.wait(Some(limit));
    let waiting = waiting.end(limit);
    // Who is told that a peer is gone has less to say than the peer.
    if !matches!(waiting.how, ExitCause::Exit(0 | 2)) {
        return Err(said("waits", &waiting));
    }
    if moving.how != ExitCause::Exit(0) {
        return Err(said("moves bytes", &moving));
    }
    let whom = match devices {
        [Some(ours), Some(theirs)] => format!("GPUs {ours} and {theirs}, by two processes"),
        _ => "two processes".into(),
    };
    Ok(moved(&moving, &whom))
}

/// This machine and the doctor that waits on another one.
pub(super) fn with_peer(args: &DoctorArgs, to: &str) -> Check {
    let moving = side(args, (args.backend, None, args.mori.clone()), ["--to", to]).map_err(unable);
    match moving.map(|moving| moving.wait(Some(args.timeout))) {
        Err((why, remedy)) => Check::fail(PEER, why, remedy),
        Ok(end) if end.how != ExitCause::Exit(0) => Check::fail(
            PEER,
            format!("the process that moves bytes {}", end.describe()),
            end.remedy(),
        ),
        Ok(end) => Check::ok(PEER, moved(&end, &format!("this machine and {to}"))),
    }
}

/// Waits at this address until the doctor of another machine has tried.
pub(super) fn serve(args: &DoctorArgs, at: &str) -> Check {
    let waiting =
        side(args, (args.backend, None, args.mori.clone()), ["--serve", at]).map_err(unable);
    let fail = |end: &ChildExit| {
        Check::fail(SERVED, format!("the process that waits {}", end.describe()), end.remedy())
    };
    let (waiting, at) = match waiting.map(|waiting| waiting.ready::<Value>(args.timeout)) {
        Err((why, remedy)) => return Check::fail(SERVED, why, remedy),
        Ok(Err(end)) => return fail(&end),
        Ok(Ok((waiting, ready))) => {
            let at = ready["address"].as_str().unwrap_or(at).to_owned();
            let told = "waits for `kvferry doctor --fabric mori --peer";
            // It waits all the same.
            let _ = writeln!(io::stderr(), "note: {told} {at}`");
            (waiting, at)
        }
    };
    let end = waiting.wait(None);
    match end.how {
        ExitCause::Exit(0) => {
            Check::ok(SERVED, format!("{at}: a peer came and went; it says what it saw"))
        }
        _ => fail(&end),
    }
}

/// What was moved, by the rows of the process that did it.
fn moved(end: &ChildExit, whom: &str) -> String {
    let rows = end.out.iter().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let time = |row: Value| {
        let ms = row["mean_us"].as_f64().unwrap_or_default() / 1e3;
        let how = if row["direction"] == "read" { "read" } else { "written" };
        format!("{how} in {ms:.2} ms")
    };
    let times: Vec<_> = rows.map(time).collect();
    let bytes = match end.err.contains("bytes were not compared") {
        true => "memory of GPUs is not compared",
        false => "every byte compared",
    };
    format!("1 MiB {} between {whom}, {bytes}", times.join(" and "))
}

/// One side.
///
/// # Errors
/// It cannot be started.
fn side(
    args: &DoctorArgs,
    (backend, device, settings): (BackendArg, Option<u32>, Option<String>),
    role: [&str; 2],
) -> Result<ChildProcess, String> {
    let backend = name(&backend);
    // So that it says itself what did not come, before it is killed.
    let patience = (args.timeout / 4).max(Duration::from_millis(1)).as_secs_f64().to_string();
    let mut all = vec!["bench", "--child", "--fabric", "mori", "--backend", &backend];
    all.extend(["--memory", MEMORY, "--timeout", &patience]);
    if args.host_ip != LOOPBACK {
        // Otherwise its end of the connection, which another machine reaches.
        all.extend(["--host-ip", &args.host_ip]);
    }
    all.extend(role);
    let device = device.map(|device| device.to_string());
    all.extend(device.iter().flat_map(|device| ["--device", device]));
    all.extend(settings.iter().flat_map(|settings| ["--mori", settings]));
    all.extend(match role[0] {
        "--serve" => &["--once"][..],
        _ => &["--sizes", "1M", "--batches", "1", "--seconds", "0.001", "--json"],
    });
    ChildProcess::start(all)
}

/// Settings of the second side of a machine: only one can have a port.
fn without_ports(settings: &str) -> String {
    let mut settings: Value = serde_json::from_str(settings).unwrap_or_default();
    for port in ["port", "door_port"] {
        settings[port] = 0.into();
    }
    settings.to_string()
}

fn unable(why: String) -> CheckProblem {
    (why, "let kvferry start processes of itself".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn xgmi_needs_two_gpus() {
        let lacks = |count| lacks(&GpuProbe { count, why: "error 100".into() });
        assert_eq!(lacks(0).as_deref(), Some("no GPU: error 100"));
        assert!(lacks(1).is_some_and(|why| why.starts_with("one GPU, and xGMI is between two")));
        assert_eq!(lacks(2), None);
    }
}
