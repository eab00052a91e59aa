//! Registrations.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::address::{ZmqAddress, incarnation_of};
use kvferry_engine::core::dialect::moriio::registration::*;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::fabric::{Endpoint, bracketed};
use proptest::prelude::*;
use serde_json::Value;
use std::num::NonZeroU16;

fn heartbeat_of(decoded: &Value) -> MoriioRegistration {
    let size = |key| NonZeroU16::new(number(&decoded[key])).unwrap();
    MoriioRegistration::new(
        if decoded["type"] == "P" { Role::Prefill } else { Role::Decode },
        text(&decoded["http_address"]).into(),
        ZmqAddress::parse(text(&decoded["zmq_address"])).unwrap(),
        size("dp_size"),
        size("tp_size"),
        if decoded["transfer_mode"] == "READ" { Mode::Pull } else { Mode::Push },
    )
    .unwrap()
}

#[test]
fn registrations_are_written_and_read_as_by_vllm_and_its_router() {
    let (beats, accepted) = (load("registration_heartbeat"), load("registrations_accepted"));
    let beats = list(&beats["messages"]).iter().map(|message| (&message["hex"], message));
    let routed = list(&accepted["messages"]);
    let routed = routed.iter().map(|message| (&message["zmq_frames_hex"][0], message));
    let all: Vec<_> = beats.chain(routed).collect();
    assert_eq!(all.len(), 10);
    for (hex, message) in all {
        let (frame, heartbeat) = (unhex(hex), heartbeat_of(&message["decoded"]));
        assert_eq!(heartbeat.encode(), frame);
        let heard = UncheckedRegistration::decode(&[frame]).unwrap();
        assert_eq!(heard.zmq_address.to_string(), heartbeat.zmq().to_string());
        assert_eq!(heard.check(), Ok(heartbeat));
    }
}

/// What the router takes although each request that it sends there fails.
const HARMFUL: [(&str, &str); 9] = [
    ("dp 1e6", "dp_size out of range"),
    ("tp 0", "tp_size out of range"),
    ("http scheme", "http_address that is not host:port"),
    ("http empty", "http_address that is not host:port"),
    ("http garbage", "http_address that is not host:port"),
    ("zmq empty", "zmq_address that is none"),
    ("zmq plain", "zmq_address that is none"),
    ("zmq newline", "host that is none"),
    ("zmq utf8", "host that is none"),
];

#[test]
fn odd_registrations_get_the_verdicts_of_the_router() {
    let fixture = load("registrations_edge_cases");
    let good = unhex(&fixture["cases"][0]["payload_hex"]);
    for case in list(&fixture["cases"]) {
        let name = text(&case["name"]);
        let parts = match (case.get("payload_hex"), name) {
            (Some(hex), _) => vec![unhex(hex)],
            (None, "REQ style (empty delimiter)") => vec![Vec::new(), good.clone()],
            (None, "3 frames") => vec![good.clone(), b"x".to_vec(), b"y".to_vec()],
            (None, "big 1MB extra") => {
                let mut big = good.clone();
                big[0] += 1;
                big.extend([0xa1, b'x', 0xc6, 0, 0x10, 0, 0]);
                big.extend(vec![0; 1 << 20]);
                vec![big]
            }
            (None, _) => panic!("{name}"),
        };
        let heard = UncheckedRegistration::decode(&parts);
        // Modes that differ are a matter of the whole fleet, not of one frame.
        let accepted = case["accepted"] == true || name == "mode READ(mismatch)";
        assert_eq!(heard.is_ok(), accepted, "{name}: {heard:?}");
        let Ok(heard) = heard else { continue };
        let rule = HARMFUL.iter().find(|(harmful, _)| *harmful == name).map(|(_, rule)| *rule);
        let checked = heard.check();
        assert_eq!(checked.as_ref().err().map(|error| &*error.rule), rule, "{name}");
        assert!(rule.is_some() || case["next_request_status"] != 500, "{name}");
    }
    assert_eq!(list(&fixture["cases"]).len(), 40);
}

#[test]
fn sizes_that_are_not_told_are_one() {
    let case = |name: &str| {
        let fixture = load("registrations_edge_cases");
        let case =
            list(&fixture["cases"]).iter().find(|case| case["name"] == name).unwrap().clone();
        let heard = UncheckedRegistration::decode(&[unhex(&case["payload_hex"])]).unwrap();
        (heard.dp_size, heard.tp_size)
    };
    assert_eq!((case("no dp").0, case("dp nil").0, case("dp 0").0), (1, 1, 1));
    assert_eq!((case("no tp").1, case("tp 0").1, case("dp 1e6").0), (1, 0, 1_000_000));
}

#[test]
fn http_addresses_are_checked() {
    let new = |http: &str| {
        let zmq = ZmqAddress::parse("host:h,handshake:1,notify:2").unwrap();
        let one = NonZeroU16::MIN;
        MoriioRegistration::new(Role::Prefill, Endpoint(http.into()), zmq, one, one, Mode::Push)
            .is_ok()
    };
    assert!(new("10.0.0.1:8000") && new("[::1]:8000") && new("my-host:1"));
    for bad in [
        "",
        "::1:8000",
        "[::1:8000",
        "[]:1",
        "[::1]",
        ":1",
        "h",
        "h:",
        "h:0",
        "h:65536",
        "h:+1",
        "h/x:1",
        "http://h:1",
        "h :1",
        "h\n:1",
    ] {
        assert!(!new(bad), "{bad}");
    }
}

#[test]
fn vllm_leaves_out_the_brackets() {
    let beats = load("registration_heartbeat");
    let mut decoded = beats["messages"][0]["decoded"].clone();
    decoded["http_address"] = "fd00::1:8000".into();
    let entries = FixtureEntries(decoded.as_object().unwrap().clone().into_iter().collect());
    let heard = UncheckedRegistration::decode(&[entries.pack()]).unwrap();
    assert_eq!(heard.check().unwrap().http(), &Endpoint("[fd00::1]:8000".into()));
    let measured = beats["measured_interval_s"].as_f64().unwrap();
    assert!((PERIOD.0 as f64 / 1e9 - measured).abs() < 0.1);
}

fn heartbeat() -> impl Strategy<Value = MoriioRegistration> {
    let role = prop_oneof![Just(Role::Prefill), Just(Role::Decode)];
    let mode = prop_oneof![Just(Mode::Push), Just(Mode::Pull)];
    let size = || (1..=u16::MAX).prop_map(|size| NonZeroU16::new(size).unwrap());
    let ports = (1..65536_i64, 1..65536_i64, 1..65536_i64);
    (any_host(), any_host(), ports, size(), size(), role, mode).prop_map(
        |(http, host, ports, dp, tp, role, mode)| {
            let zmq = ZmqAddress { host: host.into(), handshake: ports.0, notify: ports.1 };
            let http = Endpoint(format!("{}:{}", bracketed(&http), ports.2).into());
            MoriioRegistration::new(role, http, zmq, dp, tp, mode).unwrap()
        },
    )
}

proptest! {
    #[test]
    fn registrations_round_trip(heartbeat in heartbeat()) {
        let heard = UncheckedRegistration::decode(&[heartbeat.encode()]).unwrap();
        prop_assert_eq!(heard.check(), Ok(heartbeat.clone()));
        // What only our own routers read is in nobody's way.
        let (role, mode, http) = (heartbeat.role(), heartbeat.mode(), heartbeat.http().clone());
        let control = "tcp://10.0.0.1:1".into();
        let registration = Registration::new("e".into(), Incarnation(7), role, mode, http, control);
        let native = UncheckedRegistration::decode(&[heartbeat.encode_with(&registration)]).unwrap();
        prop_assert_eq!(incarnation_of(&native.zmq_address), Some(Incarnation(7)));
        prop_assert_eq!(native.native.as_deref(), Some(&registration));
        prop_assert_eq!(native.check(), Ok(heartbeat));
    }

    #[test]
    fn keys_of_registrations_come_in_any_order(
        entries in shuffled(load("registration_heartbeat")["messages"][0]["decoded"].clone()),
    ) {
        let expected = heartbeat_of(&load("registration_heartbeat")["messages"][0]["decoded"]);
        prop_assert_eq!(UncheckedRegistration::decode(&[entries.pack()]).unwrap().check(), Ok(expected));
    }

    #[test]
    fn any_registration_is_survived(
        bytes in hostile(vec![unhex(&load("registration_heartbeat")["messages"][0]["hex"])]),
    ) {
        if let Ok(heartbeat) = UncheckedRegistration::decode(&[&bytes]).and_then(|heard| heard.check()) {
            let again = UncheckedRegistration::decode(&[heartbeat.encode()]).unwrap();
            prop_assert_eq!(again.check(), Ok(heartbeat));
        }
    }
}
