//! `kvferry doctor` on this machine.

use super::check;
use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{AddressFamily, SocketType, bind, getsockname, socket};
use serde_json::Value;
use std::net::{SocketAddr, TcpListener};

/// The exit code, and the checks, with these arguments.
fn doctor(args: &[&str]) -> (i32, Vec<Value>) {
    super::doctor(super::program(args))
}

#[test]
fn what_is_not_ok_has_a_remedy() {
    let (code, checks) = doctor(&["--kv-memory", "private"]);
    for name in
        ["cross-memory", "memory-file", "memlock", "open-files", "host-ip", "socket", "rdma"]
    {
        check(&checks, name);
    }
    for check in &checks {
        let remedy = check["remedy"].as_str();
        assert!(check["found"].as_str().is_some_and(|text| !text.is_empty()), "{check}");
        assert_eq!(check["status"] == "ok", remedy.is_none(), "{check}");
        assert!(remedy.is_none_or(|text| !text.is_empty()), "{check}");
    }
    let is_unfit = checks.iter().any(|check| check["status"] == "fail");
    assert_eq!(code, i32::from(is_unfit), "{checks:?}");
    // Where memory can be read, it was read: it is not a guess from settings.
    let attach = check(&checks, "cross-memory");
    assert!(attach["found"].as_str().is_some_and(|text| text.contains("process_vm_readv")));
}

#[test]
fn a_taken_port_is_a_failure_that_names_it() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("loopback");
    let address = taken.local_addr().expect("bound");
    let port = address.port().to_string();
    for flag in ["--handshake-port", "--notify-port"] {
        let (code, checks) = doctor(&[flag, &port]);
        let check = check(&checks, flag.trim_start_matches("--"));
        assert_eq!((code, &check["status"]), (1, &"fail".into()), "{check}");
        let [found, remedy] = ["found", "remedy"].map(|key| check[key].as_str().expect("a text"));
        assert!(found.starts_with(&address.to_string()), "{check}");
        assert!(remedy.contains(&port) && remedy.contains("give another port"), "{check}");
    }
    let (code, checks) = doctor(&["--proxy", &address.to_string(), "--handshake-port", "0"]);
    assert_eq!(check(&checks, "proxy")["status"], "ok");
    assert_eq!(check(&checks, "handshake-port")["status"], "ok");
    let others = checks.iter().any(|check| check["status"] == "fail");
    assert_eq!(code, i32::from(others));
}

#[test]
fn ports_that_are_to_be_one_are_a_failure() {
    // Kept from others, and free for who listens.
    let kept = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    set_socket_reuseaddr(&kept, true).expect("an option");
    bind(&kept, &SocketAddr::from(([127, 0, 0, 1], 0))).expect("loopback");
    let address = getsockname(&kept).expect("bound");
    let port = SocketAddr::try_from(address).expect("of the internet").port().to_string();
    let (code, checks) = doctor(&["--handshake-port", &port, "--notify-port", &port]);
    assert_eq!(check(&checks, "handshake-port")["status"], "ok");
    let check = check(&checks, "notify-port");
    assert_eq!((code, &check["status"]), (1, &"fail".into()), "{check}");
    let found = check["found"].as_str().expect("a text");
    assert!(found.contains(&port) && found.contains("is to be handshake-port, too"), "{check}");
}

#[test]
fn a_configuration_that_cannot_be_used_is_a_failure() {
    let (code, checks) = doctor(&["--config", "/nonexistent/host.toml"]);
    let check = check(&checks, "configuration");
    assert_eq!((code, &check["status"]), (1, &"fail".into()), "{check}");
    let found = check["found"].as_str().expect("a text");
    assert!(found.contains("/nonexistent/host.toml: cannot read it"), "{check}");
}

#[test]
fn an_address_that_others_reach_is_fit_with_a_secret_or_a_word() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-secret");
    // One that is there from a run before may be read and not written.
    let _old = std::fs::remove_file(&file);
    std::fs::write(&file, "0123456789abcdef0123456789abcdef").expect("a file");
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o400))
        .expect("its mode");
    let file = file.to_str().expect("UTF-8");
    // Kept for documentation: no machine has it.
    let far = ["--host-ip", "192.0.2.1"];
    for (more, status, said) in [
        (&[][..], "fail", "host_ip = 192.0.2.1: others reach this address"),
        (&["--insecure-network"], "warn", "insecure network"),
        (&["--secret-file", file], "ok", "secret: who connects to 192.0.2.1 has to know"),
        (&["--secret-file", "/nonexistent"], "fail", "secret file /nonexistent"),
    ] {
        let (_, checks) = doctor(&[&far, more].concat());
        let check = check(&checks, "trust");
        assert_eq!(check["status"], status, "{check}");
        assert!(check["found"].as_str().is_some_and(|found| found.contains(said)), "{check}");
    }
    let (_, checks) = doctor(&[]);
    let check = check(&checks, "trust");
    assert_eq!(check["status"], "ok", "{check}");
    assert!(check["found"].as_str().is_some_and(|found| found.contains("loopback")), "{check}");
}

#[test]
fn plain_tcp_between_hosts_with_a_secret_is_a_warning() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-plain-secret");
    // A file of an earlier run can be read and not written.
    let _old = std::fs::remove_file(&file);
    std::fs::write(&file, "0123456789abcdef0123456789abcdef").expect("a file");
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o400))
        .expect("its mode");
    let secret = ["--secret-file", file.to_str().expect("UTF-8")];
    let far = ["--host-ip", "192.0.2.1"];
    let encrypted = file.with_file_name("doctor-encrypt.toml");
    std::fs::write(&encrypted, "encrypt = true\n").expect("a file");
    let encrypted = ["--config", encrypted.to_str().expect("UTF-8")];
    let cases: [(&[&[&str]], _, _); 4] = [
        (&[&far, &secret], "warn", "plain TCP: whoever can insert bytes"),
        (&[&far, &secret, &encrypted], "ok", "TLS 1.3"),
        (&[&far, &["--insecure-network"]], "skip", "without a secret"),
        (&[&secret], "ok", "no KV leaves this machine"),
    ];
    for (args, status, said) in cases {
        let (_, checks) = doctor(&args.concat());
        let check = check(&checks, "encrypt");
        assert_eq!(check["status"], status, "{check}");
        assert!(check["found"].as_str().is_some_and(|found| found.contains(said)), "{check}");
        assert_eq!(status == "warn", check["remedy"].is_string(), "{check}");
    }
}

#[test]
fn settings_of_a_pool_that_there_is_not_are_a_warning() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("doctor-no-pool.toml");
    std::fs::write(&file, "payload_hold_ms = 7\n").expect("a file");
    let (_, checks) = doctor(&["--config", file.to_str().expect("UTF-8")]);
    let check = check(&checks, "configuration");
    assert_eq!(check["status"], "warn", "{check}");
    let found = check["found"].as_str().expect("a text");
    assert!(found.contains("payload_hold_ms: ignored, as there is no payload_pool"), "{check}");
}
