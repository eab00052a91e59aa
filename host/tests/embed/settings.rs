//! What is configured reaches the engine, and what cannot be had is named.

use super::refusal;
use crate::rig::*;
use kvferry::sidecar::SidecarClient;
use kvferry::sidecar::proto::{ClientIdentity, FromHost};
use kvferry::sidecar::spec::ServingEngine;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_fabric_host::{HugePages, MemfdPool};
use std::net::TcpListener;
use std::path::PathBuf;

/// Both parts of an engine, which is served or not.
fn parts(
    host: &SidecarProcess,
    engine: ServingEngine,
) -> (MemfdPool, SidecarClient, SidecarClient) {
    let pool = MemfdPool::new(2 * BLOCKS * BLOCK, HugePages::No).expect("some memory");
    let worker = host.connect(ClientIdentity::Worker(Box::new(worker(&pool, 32))));
    (pool, worker, host.connect(ClientIdentity::Scheduler(Box::new(engine))))
}

/// A free port, which another process may take before it is used again.
fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
    socket.local_addr().expect("bound").port()
}

fn ready(host: &SidecarProcess, engine: ServingEngine) -> (u64, Incarnation) {
    let (_pool, _worker, mut scheduler) = parts(host, engine);
    match next(&mut scheduler, |_| false) {
        FromHost::Ready { lease_ms, incarnation, .. } => (lease_ms, incarnation),
        other => panic!("{other:?}"),
    }
}

#[test]
fn limits_come_from_the_connector_before_the_host_before_the_defaults() {
    let set = ("KVFERRY_HOST_SET", "protocol.lease_ms=9000,protocol.orphan_ms=8000");
    for (name, set, given, lease) in [
        ("default", None, "{}", 30_000),
        ("host", Some(set), "{}", 9_000),
        ("connector", Some(set), r#"{"protocol": {"lease_ms": 12000.5}}"#, 12_000),
    ] {
        let host = SidecarProcess::with(&format!("limits-{name}"), set);
        let mut engine = engine(Role::Prefill, Mode::Pull, Sidecar);
        let given =
            kvferry::sidecar::settings::ConnectorSettings::read(given).expect("they are known");
        engine.settings.limits = given.limits;
        assert_eq!(ready(&host, engine).0, lease, "{name}");
    }
}

#[test]
fn a_taken_port_is_named_with_its_key_and_what_to_do() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = taken.local_addr().expect("bound").port();
    for key in ["handshake_port", "notify_port"] {
        let host = SidecarProcess::start(&format!("taken-{key}"));
        let mut engine = engine(Role::Prefill, Mode::Push, Sidecar);
        let given = match key {
            "handshake_port" => &mut engine.settings.handshake_port,
            _ => &mut engine.settings.notify_port,
        };
        *given = port;
        let (_pool, _worker, mut scheduler) = parts(&host, engine);
        let why = refusal(&mut scheduler);
        assert!(why.contains(&format!("{key} = {port}: cannot listen at 127.0.0.1")), "{why}");
        assert!(why.contains("ss -ltnp") && why.contains("another port"), "{why}");
    }
}

#[test]
fn an_address_of_another_machine_is_named_with_its_key() {
    let host = SidecarProcess::start("foreign");
    let mut engine = engine(Role::Prefill, Mode::Push, Sidecar);
    engine.settings.insecure_network = Some(true);
    // Kept for documentation: no machine has it.
    engine.settings.host_ip = "192.0.2.1".into();
    let (_pool, _worker, mut scheduler) = parts(&host, engine);
    let why = refusal(&mut scheduler);
    assert!(why.contains("host_ip = 192.0.2.1: cannot listen at 192.0.2.1"), "{why}");
}

#[test]
fn an_address_that_others_reach_needs_a_secret_or_a_word() {
    let refused = |name: &str, set: Option<(&str, &str)>, host_ip: &str| {
        let host = SidecarProcess::with(name, set);
        let mut engine = engine(Role::Decode, Mode::Push, Sidecar);
        engine.settings.host_ip = host_ip.into();
        let (_pool, _worker, mut scheduler) = parts(&host, engine);
        refusal(&mut scheduler)
    };
    let why = refused("trust-none", None, "192.0.2.1");
    assert!(why.contains("host_ip = 192.0.2.1: others reach this address"), "{why}");
    for remedy in ["secret_file", "KVFERRY_SECRET_FILE", "insecure_network", "127.0.0.1"] {
        assert!(why.contains(remedy), "{remedy}: {why}");
    }
    // Where it may, it tries.
    for (name, variable) in [
        ("trust-host", "KVFERRY_HOST_INSECURE_NETWORK"),
        ("trust-fleet", "KVFERRY_INSECURE_NETWORK"),
    ] {
        let why = refused(name, Some((variable, "true")), "192.0.2.1");
        assert!(why.contains("cannot listen at 192.0.2.1"), "{why}");
    }
}

#[test]
fn dp_ranks_whose_ports_would_collide_are_refused() {
    let host = SidecarProcess::start("collide");
    let mut engine = engine(Role::Prefill, Mode::Push, Sidecar);
    (engine.dp, engine.settings.handshake_port) = ((0, 4), 6_301);
    engine.settings.notify_port = 6_303;
    let (_pool, _worker, mut scheduler) = parts(&host, engine);
    let why = refusal(&mut scheduler);
    assert!(why.contains("notify_port = 6303: 4 DP ranks") && why.contains("4 apart"), "{why}");
}

/// A folder that is removed with it.
struct SettingsFolder(PathBuf);

impl Drop for SettingsFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Its clock says less than it did in its last incarnation, which is years ahead here.
#[test]
fn an_incarnation_is_later_than_the_one_before_whatever_the_clock_says() {
    let folder = format!("kvferry-test-{}-lives", std::process::id());
    let folder = SettingsFolder(std::env::temp_dir().join(folder));
    let path = folder.0.to_str().expect("UTF-8").to_owned();
    let ahead = 1 << 55;
    let mut last = Incarnation(0);
    for (n, told) in
        [None, Some(Incarnation(ahead)), None, Some(last), None].into_iter().enumerate()
    {
        let host = SidecarProcess::with(&format!("lives-{n}"), Some(("KVFERRY_HOST_STATE", &path)));
        let mut engine = engine(Role::Decode, Mode::Push, Sidecar);
        engine.settings.handshake_port = free_port();
        if n > 0 {
            let known = std::fs::read_dir(&folder.0).expect("it is there").next();
            let name = known.expect("a note").expect("a note").file_name();
            let (_, port) = name.to_str().expect("a name").rsplit_once(':').expect("a port");
            engine.settings.handshake_port = port.parse().expect("a port");
        }
        engine.last_incarnation = told;
        let (_, incarnation) = ready(&host, engine);
        assert!(incarnation > last, "{n}: {incarnation} after {last}");
        assert_eq!(incarnation.0 > ahead, n > 0, "{n}: {incarnation}");
        last = incarnation;
    }
}
