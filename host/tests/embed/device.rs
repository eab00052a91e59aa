//! KV in memory of a GPU, which is a word to the stand-in for MoRI, and events that the test fires.

use super::rig::*;
use kvferry::sidecar::proto::FromHost;
use kvferry::sidecar::settings::TransferBackend;
use kvferry_engine::core::message::{DecodeAnswer, Mode, Role};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use mori_double::INSTALLS;
use std::ffi::c_void;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Set where MoRI is the stand-in.
const SHIM: &str = "KVFERRY_MORI_SHIM";

/// Long enough that bytes would have landed.
const A_WHILE: Duration = Duration::from_millis(50);

/// Runs a test of this program again, where MoRI is to be found: that is told by the environment,
/// which a process with threads cannot change. None in that process. Who listens at 127.0.0.2 is
/// of another node there.
fn elsewhere(test: &str, faults: &str) -> Option<Output> {
    if std::env::var_os(SHIM).is_some() {
        return None;
    }
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture"])
        .env(SHIM, INSTALLS[1].shim)
        .env("KVFERRY_MORI_WITHOUT_DEVICES", "1")
        .env("MORI_DOUBLE_FAULTS", faults)
        .env("MORI_DOUBLE_NODES", "127.0.0.2=elsewhere")
        .output();
    Some(output.expect("it runs"))
}

/// True here, where all of the test was done elsewhere.
fn is_done_elsewhere(test: &str) -> bool {
    elsewhere(test, "").is_some_and(|output| {
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
        true
    })
}

struct StubEvents(Library);

impl StubEvents {
    fn load() -> StubEvents {
        let path = format!("{}/libmori_io.so", INSTALLS[1].lib);
        // SAFETY: Code of this project, which runs nothing when it is loaded.
        StubEvents(unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.expect("it loads"))
    }

    fn new_event(&self) -> u64 {
        // SAFETY: As the stand-in declares it.
        let event = unsafe {
            let new =
                self.0.get::<unsafe extern "C" fn() -> *mut c_void>(b"mori_double_event_new\0");
            (new.expect("it is there"))()
        };
        event as u64
    }

    fn call(&self, name: &[u8], event: u64) {
        // SAFETY: As the stand-in declares it.
        unsafe {
            let call = self.0.get::<unsafe extern "C" fn(*mut c_void)>(name);
            (call.expect("it is there"))(event as *mut c_void);
        }
    }

    fn fire(&self, event: u64) {
        self.call(b"mori_double_event_fire\0", event);
    }

    fn free(&self, event: u64) {
        self.call(b"mori_double_event_free\0", event);
    }
}

/// A prefill and a decode with their KV in memory of a GPU, and the hosts of both.
fn pair(name: &str) -> ([SidecarProcess; 2], [SidecarFixture; 2]) {
    let hosts = ["p", "d"].map(|role| SidecarProcess::start(&format!("device-{name}-{role}")));
    let rig = |host, role| {
        let mut engine = engine(role, Mode::Push, InWorker);
        engine.settings.backend = Some(TransferBackend::MoriXgmi);
        SidecarFixture::of(host, engine)
    };
    let rigs = [rig(&hosts[0], Role::Prefill), rig(&hosts[1], Role::Decode)];
    (hosts, rigs)
}

fn has_landed(d: &mut SidecarFixture, layer: u64) -> bool {
    // It lands in its order: these are the last.
    d.block(layer, 1)[0] == layer as u8 * 16 + 5
}

fn soon(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn nothing_is_moved_before_its_kernels_are_done() {
    if is_done_elsewhere("device::nothing_is_moved_before_its_kernels_are_done") {
        return;
    }
    let (_hosts, [mut p, mut d]) = pair("order");
    let events = StubEvents::load();
    let [first, second] = [events.new_event(), events.new_event()];
    p.events = [Some(first), Some(second)];
    allocate(&mut p, &mut d, Mode::Push, &mut Vec::new());
    std::thread::sleep(A_WHILE);
    assert!(!has_landed(&mut d, 0) && !has_landed(&mut d, 1), "kernels of both are running");
    events.fire(first);
    soon("the first layer lands", || has_landed(&mut d, 0));
    std::thread::sleep(A_WHILE);
    assert!(!has_landed(&mut d, 1), "its kernels are running");
    assert_eq!(p.transfers.as_ref().map(|transfers| transfers.seen()), Some(1));
    events.fire(second);
    let loaded = next(&mut d.scheduler, |message| is_stats(message, &mut Vec::new()));
    assert!(matches!(loaded, FromHost::Decode(DecodeAnswer::Loaded { .. })), "{loaded:?}");
    assert!(has_landed(&mut d, 1));
    assert_eq!(p.transfers.as_ref().map(|transfers| transfers.seen()), Some(2));
    for event in [first, second] {
        events.free(event);
    }
}

#[test]
fn what_failed_on_the_gpu_is_not_handed_over() {
    if is_done_elsewhere("device::what_failed_on_the_gpu_is_not_handed_over") {
        return;
    }
    let (_hosts, [mut p, mut d]) = pair("failed");
    let events = StubEvents::load();
    let [first, second] = [events.new_event(), events.new_event()];
    events.fire(second);
    p.events = [Some(first), Some(second)];
    allocate(&mut p, &mut d, Mode::Push, &mut Vec::new());
    // HIP answers that there is none.
    events.free(first);
    let failed = next(&mut d.scheduler, |message| is_stats(message, &mut Vec::new()));
    assert!(matches!(failed, FromHost::Decode(DecodeAnswer::LoadFailed { .. })), "{failed:?}");
    assert!(!has_landed(&mut d, 0) && !has_landed(&mut d, 1));
    events.free(second);
}

/// The paths by which a prefill with both backends, and a decode with `backend` at an address, move
/// a prompt, and the bytes of each.
fn paths(mode: Mode, at: &str, backend: TransferBackend) -> Vec<(String, u64)> {
    let hosts = ["p", "d"]
        .map(|role| SidecarProcess::start(&format!("paths-{mode}-{at}-{backend}-{role}")));
    let rig = |host, role, host_ip: &str, backend| {
        let mut engine = engine(role, mode, InWorker);
        (engine.settings.host_ip, engine.settings.backend) = (host_ip.into(), Some(backend));
        // As long as nothing takes.
        (engine.settings.mori.open_ms, engine.settings.mori.operation_ms) = (600_000, 600_000);
        SidecarFixture::of(host, engine)
    };
    let mut p = rig(&hosts[0], Role::Prefill, "127.0.0.1", TransferBackend::Mori);
    let mut d = rig(&hosts[1], Role::Decode, at, backend);
    let (of_p, of_d) = transfer(&mut p, &mut d, mode);
    let ended = if mode == Mode::Push { of_p } else { of_d };
    ended.iter().flat_map(|it| &it.bytes).map(|(path, bytes)| (path.to_string(), *bytes)).collect()
}

#[test]
fn peers_of_the_node_are_reached_by_xgmi_and_others_by_rdma() {
    const TEST: &str = "device::peers_of_the_node_are_reached_by_xgmi_and_others_by_rdma";
    let Some(output) = elsewhere(TEST, "") else {
        for mode in [Mode::Push, Mode::Pull] {
            for (at, backend, path) in [
                ("127.0.0.1", TransferBackend::Mori, "mori-xgmi"),
                ("127.0.0.2", TransferBackend::Mori, "mori-rdma"),
                ("127.0.0.1", TransferBackend::MoriRdma, "mori-rdma"),
            ] {
                let expected = vec![(path.to_owned(), 2 * LAYERS.len() as u64 * BLOCK)];
                assert_eq!(paths(mode, at, backend), expected, "{mode} {at} {backend}");
            }
        }
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for (path, why) in [
        ("mori-xgmi", "it is of this node"),
        ("mori-rdma", "it is of another node"),
        ("mori-rdma", "it has RDMA alone"),
    ] {
        let line = |line: &&str| {
            let has = |part: &str| line.contains(part);
            has("what moves KV to and from a peer") && has(&format!("path={path}")) && has(why)
        };
        assert!(said.lines().any(|it| line(&it)), "no line of {path} since {why} in {said}");
    }
}

#[test]
fn the_host_says_how_mori_ended_a_worker() {
    let Some(output) = elsewhere("device::the_host_says_how_mori_ended_a_worker", "exit@1") else {
        let (_hosts, [mut p, mut d]) = pair("ended");
        load(&mut p, &mut d, Mode::Push, &mut Vec::new());
        unreachable!("MoRI ends the process in the first post");
    };
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(255), "{said}");
    let line = |line: &&str| line.contains("the process of a worker has ended");
    let logged: Vec<_> = said.lines().filter(line).collect();
    // Of both engines the workers were in it.
    assert_eq!(logged.len(), 1, "one pipe is read once: {said}");
    for part in ["rank=0", "exits with status 255", "IOEngineSession::BatchWrite, under way"] {
        assert!(logged[0].contains(part), "{said}");
    }
}
