//! Whether MoRI moves bytes: tried by processes that it may end, each a side of the smallest
//! `bench`.

use super::child::{ChildExit, ExitCause};
use super::exit_diagnosis::remedy;
use super::peer::{GpuProbe, ShimLoad, in_one_line, start};
use super::ports::joined;
use super::side::{BenchRole, ONE, compared, rows, side};
use super::{Check, DoctorArgs};
use crate::instance::BackendArg;
use crate::process::name;
use kvferry_fabric_mori::{Shim, ShimSearchPath};
use serde_json::Value;
use std::time::Duration;

const SHIM: &str = "mori-shim";
const FIX: &str = "mori-fix";
const RDMA: &str = "mori-rdma-try";
const XGMI: &str = "mori-xgmi-try";

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
    let waiting = fabric(backend, theirs, settings.as_deref());
    let waiting = side(args, &waiting, BenchRole::Serve(&at)).map_err(unable)?;
    let said = |who: &str, end: &ChildExit| {
        (format!("the process that {who} {}", end.describe()), end.remedy())
    };
    let (waiting, ready) = waiting.ready::<Value>(limit).map_err(|end| said("waits", &end))?;
    let to = ready["address"].as_str().unwrap_or_default();
    let moving = fabric(backend, ours, others.as_deref());
    let moving = side(args, &moving, BenchRole::To(to, ONE)).map_err(unable)?.wait(Some(limit));
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

/// What was moved, by the rows of the process that did it.
fn moved(end: &ChildExit, whom: &str) -> String {
    let time = |row: Value| {
        let ms = row["mean_us"].as_f64().unwrap_or_default() / 1e3;
        let how = if row["direction"] == "read" { "read" } else { "written" };
        format!("{how} in {ms:.2} ms")
    };
    let times: Vec<_> = rows(end).map(time).collect();
    let bytes = compared(end);
    format!("1 MiB {} between {whom}, {bytes}", times.join(" and "))
}

/// The arguments of `bench` by which a side has this plane.
pub(super) fn fabric(
    backend: BackendArg,
    device: Option<u32>,
    settings: Option<&str>,
) -> Vec<String> {
    let mut all: Vec<String> = ["--fabric", "mori", "--backend"].map(Into::into).into();
    all.push(name(&backend));
    all.extend(device.into_iter().flat_map(|device| ["--device".into(), device.to_string()]));
    all.extend(settings.into_iter().flat_map(|text| ["--mori".into(), text.into()]));
    all
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
