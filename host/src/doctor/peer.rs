//! Processes that try what this one had better not. Two are neither parent nor child of each other,
//! as hosts and servers are: one holds bytes, the other tries to get at them.

use super::child::ChildProcess;
use crate::process::{CommandError, Exit, follow_parent};
use clap::{Args, Subcommand};
use kvferry_engine::fabric::Memory;
use kvferry_fabric_host::{HugePages, MemfdPool, read_memory};
use kvferry_fabric_mori::{DeviceMemory, Shim, ShimSearchPath};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::time::Duration;

/// Bytes that are looked at.
pub(super) const LEN: usize = 4_096;

/// Arguments of the processes.
#[derive(Clone, Debug, Args)]
pub(crate) struct DoctorPeerArgs {
    #[command(subcommand)]
    part: DoctorPeerCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum DoctorPeerCommand {
    /// Hold bytes until the input ends
    Hold { seed: u64 },
    /// Look for them
    Look { seed: u64, held: String },
    /// Load the shim for MoRI, and look for GPUs
    Load,
}

/// What a process that loads the shim says first: which, or why there is none.
pub(super) type ShimLoad = Result<String, String>;

/// What it says then.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct GpuProbe {
    /// Those that gave memory, up to two.
    pub(super) count: u32,
    /// Why there is no other one.
    pub(super) why: String,
}

/// Where the bytes are.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct HeldMemory {
    pid: u32,
    base: u64,
    /// Number of the memory file, or why there is none.
    file: Result<i32, String>,
}

/// Why something cannot be done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AccessError {
    /// As the kernel says it; 0 if it does not.
    pub(super) errno: i32,
    pub(super) why: String,
}

impl From<io::Error> for AccessError {
    fn from(error: io::Error) -> AccessError {
        AccessError { errno: error.raw_os_error().unwrap_or(0), why: error.to_string() }
    }
}

/// What one process can do with another one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct AccessTrial {
    /// Read its memory by cross-memory attach.
    pub(super) memory: Result<(), AccessError>,
    /// Have a sealed memory file of its own.
    pub(super) created: Result<(), String>,
    /// Open the other's memory file; as good as `created` if there is none.
    pub(super) opened: Result<(), AccessError>,
}

/// Runs both processes.
///
/// # Errors
/// They could not be run, and why.
pub(super) fn trial(limit: Duration) -> Result<AccessTrial, String> {
    let seed = rand::random::<u64>().to_string();
    let holder = start(&["hold", &seed])?.ready::<HeldMemory>(limit);
    let (_holder, held) =
        holder.map_err(|end| format!("a process that holds memory {}", end.describe()))?;
    let held = serde_json::to_string(&held).map_err(|why| why.to_string())?;
    let looked = start(&["look", &seed, &held])?.wait(Some(limit));
    let trial = looked.out.first().and_then(|line| serde_json::from_str(line).ok());
    trial.ok_or_else(|| format!("a process that looks at another one {}", looked.describe()))
}

/// A process of these.
///
/// # Errors
/// It cannot be started.
pub(super) fn start(args: &[&str]) -> Result<ChildProcess, String> {
    ChildProcess::start(["doctor-peer"].iter().chain(args))
}

fn pattern(seed: u64) -> Vec<u8> {
    seed.to_le_bytes().repeat(LEN / 8)
}

/// Is one of them.
///
/// # Errors
/// Output that cannot be written, or a parent that has ended.
pub(crate) fn command(args: &DoctorPeerArgs, out: &mut dyn Write) -> Result<Exit, CommandError> {
    // One that hangs in HIP is not to be left behind.
    follow_parent()?;
    match &args.part {
        DoctorPeerCommand::Hold { seed } => hold(*seed, out)?,
        DoctorPeerCommand::Look { seed, held } => {
            let held: HeldMemory = serde_json::from_str(held).map_err(io::Error::from)?;
            serde_json::to_writer(out, &trial_of(&held, &pattern(*seed)))
                .map_err(io::Error::from)?;
        }
        DoctorPeerCommand::Load => load(out)?,
    }
    Ok(Exit::HELD)
}

/// A text of several lines.
pub(super) fn in_one_line(text: &str) -> String {
    text.lines().map(str::trim).collect::<Vec<_>>().join("; ")
}

/// HIP, too, may end the process: what is known by then is told first.
fn load(out: &mut dyn Write) -> io::Result<()> {
    let shim = Shim::load(&ShimSearchPath::of_process());
    let loaded: ShimLoad = match &shim {
        Ok(shim) => {
            let (path, info) = (shim.path.display(), &shim.info);
            let (library, layout, origin) = (&info.compiled_at, info.layout, shim.origin);
            Ok(format!("{path}, {origin}, for {library} ({layout} fields per memory)"))
        }
        Err(why) => Err(in_one_line(&why.to_string())),
    };
    writeln!(out, "{}", serde_json::to_string(&loaded)?)?;
    out.flush()?;
    let Ok(shim) = shim else { return Ok(()) };
    let mut gpus = GpuProbe { count: 0, why: String::new() };
    while gpus.count < 2 && gpus.why.is_empty() {
        match DeviceMemory::new(&shim, gpus.count, LEN as u64) {
            Ok(_) => gpus.count += 1,
            Err(why) => gpus.why = why,
        }
    }
    writeln!(out, "{}", serde_json::to_string(&gpus)?)
}

fn hold(seed: u64, out: &mut dyn Write) -> io::Result<()> {
    let bytes = pattern(seed);
    let (pool, file) = match file(&bytes) {
        Ok((pool, file)) => (Some(pool), Ok(file)),
        Err(why) => (None, Err(why)),
    };
    let held = HeldMemory { pid: std::process::id(), base: bytes.as_ptr() as u64, file };
    writeln!(out, "{}", serde_json::to_string(&held)?)?;
    out.flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    // They had to be there until now.
    drop((std::hint::black_box(bytes), pool));
    Ok(())
}

/// A memory file like the one of a KV cache.
fn file(bytes: &[u8]) -> Result<(MemfdPool, i32), String> {
    let pool = MemfdPool::new(LEN as u64, HugePages::No)?;
    let Memory::MemFd { fd, .. } = pool.memory() else { return Err("no memory file".into()) };
    let path = format!("/proc/self/fd/{fd}");
    let written = OpenOptions::new().write(true).open(&path);
    written
        .and_then(|file| file.write_all_at(bytes, 0))
        .map_err(|why| format!("writing {path}, a memory file: {why}"))?;
    Ok((pool, fd))
}

fn trial_of(held: &HeldMemory, expected: &[u8]) -> AccessTrial {
    let same = |bytes: &[u8]| match bytes == expected {
        true => Ok(()),
        false => Err(AccessError { errno: 0, why: "other bytes were read than are there".into() }),
    };
    let mut bytes = vec![0; LEN];
    let memory = read_memory(held.pid, held.base, &mut bytes);
    let memory = memory.map_err(AccessError::from).and_then(|len| same(&bytes[..len]));
    let (created, opened) = match &held.file {
        Ok(file) => {
            (Ok(()), open(held.pid, *file).map_err(AccessError::from).and_then(|b| same(&b)))
        }
        Err(why) => (Err(why.clone()), Ok(())),
    };
    AccessTrial { memory, created, opened }
}

/// Opens it as `kvferry host` opens the KV of a worker.
fn open(pid: u32, file: i32) -> io::Result<Vec<u8>> {
    let path = format!("/proc/{pid}/fd/{file}");
    let file: File = OpenOptions::new().read(true).write(true).open(path)?;
    let mut bytes = vec![0; LEN];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_tells_the_bytes_from_others() {
        let bytes = pattern(7);
        let (_pool, file) = file(&bytes).expect("memory files are needed for all else");
        let (pid, base) = (std::process::id(), bytes.as_ptr() as u64);
        let held = HeldMemory { pid, base, file: Ok(file) };
        let AccessTrial { memory, created, opened } = trial_of(&held, &bytes);
        assert_eq!((memory, created, opened), (Ok(()), Ok(()), Ok(())));
        let AccessTrial { memory, opened, .. } = trial_of(&held, &pattern(8));
        for failed in [memory, opened] {
            assert!(failed.is_err_and(|failure| failure.why.contains("other bytes")));
        }
        let none = HeldMemory { base: 0, file: Err("none".into()), ..held };
        let AccessTrial { memory, created, opened } = trial_of(&none, &bytes);
        assert!(memory.is_err_and(|failure| failure.errno != 0));
        assert_eq!((created, opened), (Err("none".into()), Ok(())));
    }
}
