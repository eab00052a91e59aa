//! `kvferry doctor --fabric mori` over MoRI's stand-in: what is said is what has happened.

use super::{WaitingDoctor, check, doctor, expect};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::time::Timespec;
use std::fs;
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};

const RDMA: &str = "mori-rdma-try";
const XGMI: &str = "mori-xgmi-try";

/// The program with the stand-in for MoRI.
fn program(args: &[&str]) -> Command {
    let mut command = super::program(&["--fabric", "mori"]);
    command
        .args(args)
        .env("KVFERRY_MORI_SHIM", mori_double::INSTALLS[1].shim)
        .env("KVFERRY_MORI_WITHOUT_DEVICES", "1");
    command
}

#[test]
fn bytes_are_moved_between_two_processes() {
    let mut command = program(&[]);
    let home = Path::new(mori_double::INSTALLS[1].lib).parent().expect("a folder");
    command.env_remove("MORI_INCLUDE_DIR").env_remove("MORI_LIB_DIR").env("MORI_HOME", home);
    let (code, checks) = doctor(command);
    let found = format!("MoRI at {}/lib/libmori_io.so, found by MORI_HOME", home.display());
    expect(&checks, "mori", "ok", &found, None);
    expect(&checks, "mori-shim", "ok", mori_double::INSTALLS[1].shim, None);
    expect(&checks, RDMA, "ok", "1 MiB written in ", None);
    expect(&checks, RDMA, "ok", " ms between two processes, every byte compared", None);
    expect(&checks, XGMI, "ok", " ms between GPUs 0 and 1, by two processes, ", None);
    expect(&checks, XGMI, "ok", "memory of GPUs is not compared", None);
    let is_unfit = checks.iter().any(|check| check["status"] == "fail");
    assert_eq!(code, i32::from(is_unfit), "{checks:?}");
    // What was only looked at does not decide.
    let looked = ["mori-gpu", "mori-rdma-ports", "mori-memlock", "mori-address", "mori-port"];
    assert!(looked.iter().all(|name| check(&checks, name)["status"] != "fail"), "{checks:?}");
}

#[test]
fn each_way_to_die_is_told_with_its_remedy() {
    let faults = |text: &'static str| ("MORI_DOUBLE_FAULTS", text);
    let start = |text: &'static str| ("MORI_DOUBLE_START", text);
    let abort = "signal 6 (SIGABRT: it aborted); last call into MoRI: ";
    for (knob, found, remedy) in [
        (
            ("MORI_DOUBLE_NO_SMI", "1"),
            "the process that waits ended with exit status 255; last call into MoRI: \
             IOEngine::CreateBackend(RDMA), under way; it said: mori double: rocm_smi cannot be loaded",
            "`rocm-smi`",
        ),
        (("MORI_DOUBLE_NO_NIC", "1"), "said: mori-rdma at 127.0.0.1: MoRI: ", "`rdma link`"),
        (
            faults("exit@1"),
            "the process that moves bytes ended with exit status 255",
            "LOG_LEVEL=debug",
        ),
        (faults("pin@1"), abort, "ulimit -l unlimited"),
        (faults("pin_remote@1"), "the process that waits was ended by signal 6", "ulimit -l"),
        (faults("skip@1+"), "wrong bytes arrived", "MORI_IB_ENABLE_RELAXED_ORDERING"),
        (faults("qp_error@1"), "said: write of 1 x 1M: MoRI: local QP", "MORI_IB_GID_INDEX"),
        (start("crash"), "the process that waits was ended by signal 11 (SIGSEGV", "coredumpctl"),
    ] {
        let mut command = program(&[]);
        let (code, checks) = {
            command.env(knob.0, knob.1);
            doctor(command)
        };
        expect(&checks, RDMA, "fail", found, Some(remedy));
        assert_eq!(code, 1, "{knob:?}");
    }
}

#[test]
fn a_process_that_hangs_is_killed() {
    // Others have to be done in that time.
    for limit in ["1", "4", "16", "64", "256"] {
        let mut command = program(&["--timeout", limit]);
        command.env("MORI_DOUBLE_START", "hang");
        let (code, checks) = doctor(command);
        if check(&checks, "mori-shim")["status"] == "ok" {
            let found = format!("the process that waits had not come to an end after {limit} s");
            expect(&checks, RDMA, "fail", &found, Some("MORI_RDMA_DEVICES=^NAME"));
            assert_eq!(code, 1);
            return;
        }
    }
    panic!("the shim is not loaded in any time");
}

#[test]
fn without_a_shim_nothing_is_tried() {
    let mut command = program(&[]);
    command.env("KVFERRY_MORI_SHIM", "/nonexistent/shim.so");
    let (code, checks) = doctor(command);
    let found = "(libkf_mori_shim.so); /nonexistent/shim.so: not there; ";
    expect(&checks, "mori-shim", "fail", found, Some("try `kvferry doctor --fix mori`"));
    assert_eq!(code, 1);
    for name in [RDMA, XGMI] {
        expect(&checks, name, "skip", "there is no MoRI", None);
    }
}

/// The program with the stand-in installed, and no shim.
fn without_shim(mut command: Command, cache: &Path) -> Command {
    let installed = mori_double::INSTALLS[1];
    command
        .env_remove("KVFERRY_MORI_SHIM")
        .env("KVFERRY_CACHE", cache)
        .env("MORI_INCLUDE_DIR", installed.include)
        .env("MORI_LIB_DIR", installed.lib);
    command
}

fn fix() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(["doctor", "--json", "--fix", "mori"]);
    command
}

#[test]
fn the_shim_is_compiled_on_demand_and_used() {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-fix");
    // It may be there from an earlier run.
    let _ = fs::remove_dir_all(&cache);
    let (code, checks) = doctor(without_shim(fix(), &cache));
    let compiled = format!("compiled {}/shim/build-id-", cache.display());
    expect(&checks, "mori-fix", "ok", &compiled, None);
    expect(&checks, "mori-fix", "ok", "found by MORI_INCLUDE_DIR and MORI_LIB_DIR", None);
    expect(&checks, "mori-shim", "ok", "/libkf_mori_shim.so, compiled earlier, for ", None);
    assert_eq!((code, checks.len()), (0, 2));
    let (_, checks) = doctor(without_shim(program(&[]), &cache));
    expect(&checks, "mori-shim", "ok", "compiled earlier, for ", None);
    expect(&checks, RDMA, "ok", "every byte compared", None);
}

#[test]
fn what_hinders_the_compiler_is_told() {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-no-fix");
    let mut command = without_shim(fix(), &cache);
    command.env("CXX", "/nonexistent/c++");
    let (code, checks) = doctor(command);
    let found = "; /nonexistent/c++: cannot be started: ";
    expect(&checks, "mori-fix", "fail", found, Some("name another compiler by CXX"));
    assert_eq!((code, checks.len()), (1, 1));
    let (_, checks) = doctor(without_shim(fix(), Path::new("/dev/null")));
    expect(&checks, "mori-fix", "fail", "/dev/null/shim/build-id-", Some(""));
    let mut command = without_shim(fix(), &cache);
    command.env("KVFERRY_MORI_SHIM", "/some/shim.so");
    let (_, checks) = doctor(command);
    expect(&checks, "mori-fix", "fail", "names /some/shim.so", Some("unset it"));
}

#[test]
fn what_the_plane_refuses_is_told() {
    let mut command = program(&[]);
    command.env_remove("KVFERRY_MORI_WITHOUT_DEVICES");
    let (_, checks) = doctor(command);
    let gpu = check(&checks, "mori-gpu");
    if gpu["status"] == "ok" {
        return;
    }
    let [found, to_do] = ["found", "remedy"].map(|key| gpu[key].as_str().expect("a text"));
    expect(&checks, RDMA, "fail", &format!("mori-gpu: {found}"), Some(to_do));
    let is_there = Path::new("/dev/kfd").exists();
    assert_eq!(to_do.starts_with("load the driver"), !is_there, "{to_do}");
}

#[test]
fn the_backend_that_is_asked_for_decides() {
    let mut command = program(&["--backend", "xgmi"]);
    command.env("MORI_DOUBLE_NO_SMI", "1");
    let (code, checks) = doctor(command);
    expect(&checks, RDMA, "warn", "ended with exit status 255", Some("`rocm-smi`"));
    expect(&checks, XGMI, "ok", "1 MiB written in ", None);
    assert_eq!(code, i32::from(checks.iter().any(|check| check["status"] == "fail")));
}

#[test]
fn settings_are_those_of_the_deployment() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = taken.local_addr().expect("bound");
    let settings = format!(r#"{{"port": {}}}"#, address.port());
    let (code, checks) = doctor(program(&["--mori", &settings]));
    let found = format!("{address}: Address already in use");
    expect(&checks, "mori-port", "warn", &found, Some("name another port"));
    expect(&checks, RDMA, "fail", &found, Some("name another port"));
    assert_eq!(code, 1);
    // Kept from others, and free for who listens; two processes of one machine get on with it.
    let kept = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    set_socket_reuseaddr(&kept, true).expect("an option");
    bind(&kept, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("loopback");
    let address = SocketAddr::try_from(getsockname(&kept).expect("bound")).expect("an address");
    let settings = format!(r#"{{"port": {}}}"#, address.port());
    let (_, checks) = doctor(program(&["--mori", &settings]));
    expect(&checks, RDMA, "ok", "1 MiB written in ", None);
}

#[test]
fn arguments_have_to_go_together() {
    let between = "--peer is not for --backend xgmi";
    let mori = ["--fabric", "mori"];
    let cases: [(&[&str], &str); 3] = [
        (&[&mori[..], &["--backend", "xgmi", "--peer", "h:1"]].concat(), between),
        (&["--mori", "{}"], "--mori is for --fabric mori"),
        (&[&mori[..], &["--mori", r#"{"prt": 1}"#]].concat(), "unknown field `prt`"),
    ];
    for (args, says) in cases {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        let output = command.arg("doctor").args(args).output().expect("the program starts");
        let err = String::from_utf8(output.stderr).expect("output is UTF-8");
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{err}");
        assert!(err.contains(says), "{err}");
        assert_eq!(err.matches("error: ").count(), 1, "one error: {err}");
    }
}

fn waiting(knobs: &[(&str, &str)]) -> WaitingDoctor {
    let mut command = program(&["--serve", "127.0.0.1:0"]);
    command.envs(knobs.iter().copied());
    WaitingDoctor::start(command)
}

#[test]
fn two_doctors_try_what_is_between_them() {
    let waiting = waiting(&[]);
    let (_, checks) = doctor(program(&["--peer", &waiting.address]));
    let between = format!("every byte compared between this machine and {}", waiting.address);
    expect(&checks, "peer-rate", "ok", "MoRI: written at ", None);
    expect(&checks, "peer-rate", "ok", &between, None);
    expect(&waiting.end(), "peer-served", "ok", "127.0.0.1 came and went", None);
}

#[test]
fn each_of_two_doctors_tells_what_it_saw() {
    let waiting = waiting(&[("MORI_DOUBLE_FAULTS", "pin_remote@1")]);
    let (code, checks) = doctor(program(&["--peer", &waiting.address]));
    expect(&checks, RDMA, "ok", "every byte compared", None);
    expect(&checks, "peer-rate", "fail", "the process that moves bytes said: ", Some(""));
    assert_eq!(code, 1);
    let abort = "the process that waits was ended by signal 6";
    expect(&waiting.end(), "peer-served", "fail", abort, Some("ulimit -l unlimited"));
}

/// A side that this process has started, and that is in MoRI by now.
fn side_of(parent: u32) -> Option<Pid> {
    let list = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let says = |pid: &str, file: &str, text: &str| {
        let said = fs::read_to_string(format!("/proc/{pid}/{file}"));
        said.is_ok_and(|said| said.contains(text))
    };
    let is_side = |pid: &&str| says(pid, "cmdline", "--serve") && says(pid, "maps", "libmori_io");
    Pid::from_raw(list.split_whitespace().find(is_side)?.parse().ok()?)
}

#[test]
fn processes_end_with_the_doctor() {
    let mut command = program(&["--timeout", "3600"]);
    command.env("MORI_DOUBLE_START", "hang").stdout(Stdio::null());
    let mut doctor = command.spawn().expect("it starts");
    let child = loop {
        match side_of(doctor.id()) {
            Some(child) => break child,
            None => std::thread::yield_now(),
        }
    };
    let child = pidfd_open(child, PidfdFlags::empty()).expect("it is there");
    doctor.kill().expect("it waits");
    doctor.wait().expect("a child");
    let mut ends = [PollFd::new(&child, PollFlags::IN)];
    let limit = Timespec { tv_sec: 300, tv_nsec: 0 };
    assert_eq!(poll(&mut ends, Some(&limit)), Ok(1), "it goes on alone");
}
