use super::*;
use kvferry_fabric_host::PeerTrust;
use std::path::Path;

#[test]
fn every_key_is_known() {
    for key in KEYS {
        let why =
            ConnectorSettings::default().set(key, &Value::Null).expect_err("null is no value");
        assert!(!why.contains("no such key"), "{key}: {why}");
    }
}

#[test]
fn what_moriio_users_give_is_taken() {
    let given = r#"{"proxy_ip": "10.0.0.1", "proxy_ping_port": "36367", "http_port": 8100,
        "handshake_port": "6301", "notify_port": 61005, "read_mode": "True", "num_workers": 4,
        "qp_per_transfer": 2, "defer_timeout": 90, "recv_abort_timeout": 1.5, "backend": "host",
        "protocol": {"lease_ms": "20000"}, "operations": {"stall_ms": 8500.5}}"#;
    let settings = ConnectorSettings::read(given).expect("all of it is known");
    let expected = ConnectorSettings {
        read_mode: true,
        proxy_ip: "10.0.0.1".into(),
        proxy_ping_port: 36_367,
        http_port: 8_100,
        handshake_port: 6_301,
        notify_port: 61_005,
        backend: Some(TransferBackend::Host),
        num_workers: 4,
        qp_per_transfer: Some(2),
        moriio: MoriioSettings {
            hold: Nanos::from_secs(90),
            write: Nanos::from_ms(1_500),
            ..MoriioSettings::default()
        },
        limits: settings.limits.clone(),
        ..ConnectorSettings::default()
    };
    assert_eq!(settings, expected);
    let limits = settings.limits.limits().expect("they go together");
    assert_eq!(limits.protocol.lease, Nanos::from_secs(20));
    assert_eq!(limits.operations.stall, Nanos::from_us(8_500_500));
    assert_eq!(settings.ignored_keys(), ["qp_per_transfer"]);
}

#[test]
fn who_serves_http_elsewhere_says_where() {
    let read = |given| ConnectorSettings::read(given);
    let own = read(r#"{"host_ip": "10.0.0.2"}"#).expect("all of it is known");
    assert_eq!((own.http_host(), own.draft_kv), ("10.0.0.2", true));
    let told = read(r#"{"host_ip": "10.0.0.2", "http_ip": "10.0.0.1", "draft_kv": false}"#);
    let told = told.expect("all of it is known");
    assert_eq!((told.http_host(), told.draft_kv), ("10.0.0.1", false));
    // Whoever knows fewer settings is told only what was set.
    let written = serde_json::to_string(&own).expect("it can be written");
    assert!(!written.contains("http_ip") && !written.contains("draft_kv"), "{written}");
    let why = read(r#"{"http_ip": "0.0.0.0"}"#).expect_err("nobody can connect to it");
    assert!(why.contains("http_ip = \"0.0.0.0\""), "{why}");
}

#[test]
fn mori_is_told_what_it_is_given() {
    let given = r#"{"backend": "xgmi", "host_ip": "10.0.0.1", "qp_per_transfer": 4,
        "post_batch_size": -1, "num_workers": 2, "mori": {"chunking": true, "qp_per_transfer": 9}}"#;
    let settings = ConnectorSettings::read(given).expect("all of it is known");
    assert_eq!(settings.transfer(), TransferPlacement::Worker);
    assert!(settings.ignored_keys().is_empty());
    let plane = settings.plane(&HostConfig::default()).expect("it can be");
    let expected = MoriConfig {
        backend: kvferry_fabric_mori::MoriBackend::Xgmi,
        host: "10.0.0.1".into(),
        qp_per_transfer: 4,
        num_workers: 2,
        chunking: true,
        ..MoriConfig::default()
    };
    assert_eq!(plane, PlaneConfig::Mori(expected.clone()));
    let both = ConnectorSettings { backend: Some(TransferBackend::Mori), ..settings.clone() };
    assert_eq!(
        (both.backend().to_string(), both.transfer()),
        ("mori".into(), TransferPlacement::Worker)
    );
    let expected = MoriConfig { backend: kvferry_fabric_mori::MoriBackend::Rdma, ..expected };
    let plane = both.plane(&HostConfig::default()).expect("it can be");
    assert_eq!((plane.backend(), plane), ("mori", PlaneConfig::MoriMixed(expected)));
    let mori = MoriConfig { door_port: 65_535, ..MoriConfig::default() };
    let why = ConnectorSettings { mori, ..both }.plane(&HostConfig::default());
    assert!(why.expect_err("xGMI has none").contains("mori: door_port = 65535"));
    let bad = ConnectorSettings { host_ip: "a.b".into(), ..settings };
    assert!(bad.plane(&HostConfig::default()).expect_err("a name").contains("IPv4"));
}

#[test]
fn one_secret_is_proven_in_hellos_and_by_planes() {
    let trust = PeerTrust { secret_file: Some("/host".into()), ..PeerTrust::default() };
    let fabric = HostConfig { trust, ..HostConfig::default() };
    for (given, file) in [
        (r#"{}"#, "/host"),
        (r#"{"secret_file": "/own"}"#, "/own"),
        (r#"{"backend": "rdma", "host_ip": "10.0.0.1"}"#, "/host"),
        (r#"{"backend": "rdma", "host_ip": "10.0.0.1", "mori": {"secret_file": "/m"}}"#, "/m"),
        (r#"{"backend": "mori", "host_ip": "10.0.0.1"}"#, "/host"),
    ] {
        let settings = ConnectorSettings::read(given).expect("all of it is known");
        let proven = settings.trust(&fabric).peers.secret_file;
        assert_eq!(proven.as_deref(), Some(Path::new(file)), "{given}");
        let plane = match settings.plane(&fabric).expect("it can be") {
            PlaneConfig::Host(config) => config.trust.secret_file,
            PlaneConfig::Mori(config) | PlaneConfig::MoriMixed(config) => config.secret_file,
        };
        assert_eq!(plane.as_deref(), Some(Path::new(file)), "{given}");
    }
}

#[test]
fn kv_is_encrypted_if_the_engine_or_its_host_says_so_and_never_silently_not() {
    let (yes, no) = (r#""encrypt": "true", "#, r#""encrypt": false, "#);
    for (given, of_host, expected) in [
        ("", false, false),
        ("", true, true),
        (yes, false, true),
        // Who says no means it.
        (no, true, false),
    ] {
        let secret_file = Some("/secret".into());
        let trust = PeerTrust { encrypt: of_host, secret_file, ..PeerTrust::default() };
        let fabric = HostConfig { trust, ..HostConfig::default() };
        let plane = |backend| {
            let given = format!(r#"{{{given}"host_ip": "10.0.0.1", "backend": "{backend}"}}"#);
            ConnectorSettings::read(&given).expect("it is known").plane(&fabric)
        };
        let Ok(PlaneConfig::Host(config)) = plane("host") else { panic!("it can be") };
        assert_eq!(config.trust.encrypt, expected, "{given:?} {of_host}");
        for (backend, named) in [("rdma", "is moved by mori-rdma:"), ("mori", "is moved by mori:")]
        {
            let is_said = plane(backend).is_err_and(|why| why.contains(named));
            assert_eq!(is_said, expected, "{given:?} {of_host}");
        }
    }
    let alone = ConnectorSettings::read(r#"{"encrypt": true}"#).expect("it is known");
    let why = alone.plane(&HostConfig::default()).expect_err("there is no secret");
    assert!(why.contains("encrypt = true: it needs a secret"), "{why}");
}

#[test]
fn what_the_engine_says_of_the_network_wins_over_its_host() {
    let (mut fabric, read) = (HostConfig::default(), ConnectorSettings::read);
    fabric.trust.insecure_network = true;
    let insecure = |given| read(given).expect("it is known").trust(&fabric).peers.insecure_network;
    assert!(insecure("{}") && !insecure(r#"{"insecure_network": false}"#));
    let why = read(r#"{"mori": {"insecure_network": true}}"#).expect_err("not there");
    assert!(why.contains("insecure_network is a key beside mori"), "{why}");
}

#[test]
fn mistakes_are_named_with_what_to_do() {
    for (given, said) in [
        (r#"{"red_mode": true}"#, "red_mode: there is no such key; did you mean \"read_mode\"?"),
        (r#"{"quux": 1}"#, "quux: there is no such key; there are read_mode, host_ip"),
        (r#"{"http_port": 70000}"#, "http_port: 70000 is no port from 0 to 65535"),
        (r#"{"read_mode": "perhaps"}"#, "read_mode: \"perhaps\" is neither true nor false"),
        (r#"{"defer_timeout": 0}"#, "defer_timeout: 0 is not from 0.001 to 86400 seconds"),
        (r#"{"backend": "tcp"}"#, "backend: \"tcp\" is none of host, mori-rdma"),
        (
            r#"{"backend": "rdma", "transfer": "sidecar"}"#,
            "backend mori-rdma has its transfer actors in the workers",
        ),
        (r#"{"backend": "mori", "transfer": "sidecar"}"#, "backend mori has its transfer actors"),
        (r#"{"backend": "mori", "verify": "all"}"#, "backend mori cannot digest"),
        (r#"{"mori": {"chunkin": true}}"#, "unknown field `chunkin`"),
        (r#"{"transfer": "host"}"#, "transfer: \"host\" is none of sidecar, worker"),
        (r#"{"num_workers": 0}"#, "num_workers is not from 1 to 256"),
        (r#"{"proxy_ip": "::1"}"#, "give both or none"),
        (r#"{"proxy_ip": "::1", "proxy_ping_port": 1}"#, "http_port is what the router"),
        (
            r#"{"proxy_ip": "10.0.0.1:36367", "proxy_ping_port": 36367, "http_port": 8100}"#,
            "proxy_ip = \"10.0.0.1:36367\" is not a host name or address",
        ),
        ("[]", "kv_connector_extra_config: invalid type"),
        (r#"{"host_ip": "0.0.0.0"}"#, "host_ip = \"0.0.0.0\": peers are told it"),
        (r#"{"host_ip": "[::]"}"#, "host_ip = \"[::]\": peers are told it"),
        (r#"{"host_ip": ""}"#, "host_ip = \"\": peers are told it"),
        (
            r#"{"handshake_port": 6301, "notify_port": "6301"}"#,
            "notify_port = 6301: it is handshake_port, too",
        ),
        (
            r#"{"http_port": 6301, "handshake_port": 6301}"#,
            "handshake_port = 6301: it is http_port, too",
        ),
        (
            r#"{"protocol": {"lease": 5}}"#,
            "kv_connector_extra_config: protocol.lease: there is no such key; did you mean \
             \"protocol.lease_ms\"?",
        ),
        (
            r#"{"channel": {"silent_ms": 500}}"#,
            "kv_connector_extra_config: channel.silent_ms = 500: peers are asked every",
        ),
    ] {
        let why = ConnectorSettings::read(given).expect_err(given);
        assert!(why.contains(said), "{given}: {why}");
    }
}
