//! `kv_transfer_params`.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::params::*;
use kvferry_engine::core::dialect::moriio::{DecodeError, EncodeError};
use kvferry_engine::core::ids::{BlockId, EngineId, RequestId, TransferId};
use kvferry_engine::core::message::{Mode, Role};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use serde_json::{Value, json};

fn decode(value: &Value) -> KvTransferParams {
    KvTransferParams::decode(value.to_string().as_bytes()).unwrap()
}

fn parsed(bytes: Result<Vec<u8>, EncodeError>) -> Value {
    serde_json::from_slice(&bytes.unwrap()).unwrap()
}

/// A request id without addresses.
fn plain() -> RequestId {
    "chatcmpl-4c1f0c2b11-1d7a8f0c".into()
}

/// A request id with the addresses of both engines.
fn embedded() -> RequestId {
    text(&load("address_forms")["request_ids"][0]["request_id"]).into()
}

/// The object with ports as numbers: vLLM passes them on as they are configured.
fn with_ports(object: &Value) -> Value {
    let mut object = object.clone();
    for key in ["remote_handshake_port", "remote_notify_port"] {
        if let Some(port) = object[key].as_str() {
            object[key] = json!(port.parse::<u16>().unwrap());
        }
    }
    object
}

/// What vLLM makes of params and request id, as JSON.
fn meta(role: Role, request: &RequestId, json: &Value) -> Result<Value, String> {
    let read = || {
        let params = KvTransferParams::decode(json.to_string().as_bytes())?;
        let transfer = params.transfer()?.clone();
        let peer = params.peer(role, request)?;
        Ok((params, transfer, peer))
    };
    let (params, transfer, peer) = read().map_err(|error: DecodeError| error.rule.to_string())?;
    Ok(json!({
        "transfer_id": transfer,
        "remote_block_ids": params.remote_block_ids,
        "remote_engine_id": params.remote_engine_id,
        "remote_host": peer.address.host,
        "remote_port": peer.address.handshake,
        "remote_handshake_port": peer.address.handshake,
        "remote_notify_port": peer.address.notify,
        "tp_size": peer.shape.tp_size,
        "remote_dp_size": peer.dp_size,
        "remote_dp_rank": peer.dp_rank,
        "multi_pod_hosts": peer.hosts,
        "remote_dp_size_local": peer.shape.dp_size_local,
    }))
}

#[test]
fn params_and_request_ids_are_taken_as_by_vllm() {
    let fixture = load("add_new_req");
    let mut rules = Vec::new();
    for case in list(&fixture["cases"]) {
        let name = text(&case["name"]);
        let role = if case["write_mode"] == true { Role::Prefill } else { Role::Decode };
        let request = RequestId::from(text(&case["request_id"]));
        match (meta(role, &request, &case["kv_transfer_params"]), case.get("req_meta")) {
            (Ok(meta), Some(expected)) => {
                let mut expected = expected.clone();
                expected.as_object_mut().unwrap().remove("local_block_ids");
                assert_eq!(meta, expected, "{name}");
            }
            (Err(rule), None) => rules.push(rule),
            (meta, _) => panic!("{name}: {meta:?}"),
        }
    }
    let no_address = "no address, nor in the request id";
    assert_eq!(
        rules,
        [
            "no transfer_id",
            "no remote_engine_id",
            "no remote_block_ids",
            no_address,
            no_address,
            "address in the request id that is none",
            no_address,
        ]
    );
    assert_eq!(list(&fixture["cases"]).len(), 17);
}

#[test]
fn answers_of_a_prefill_are_written_and_read_as_by_vllm() {
    let fixture = load("request_finished_producer");
    let answers: Vec<_> =
        list(&fixture["cases"]).iter().filter(|case| case["returns"][1].is_object()).collect();
    assert_eq!(answers.len(), 2);
    for case in answers {
        let blocks =
            if case["name"] == "length capped, blocks held" { &[11, 12, 13][..] } else { &[] };
        let answer = KvTransferParams {
            do_remote_prefill: true,
            transfer_id: Some("tx-3f0a4f0e-6f1f-4f43-9c1c-1d7a8f0c2b11".into()),
            remote_engine_id: Some("10.0.0.1:6301".into()),
            remote_block_ids: Some(vec![blocks.iter().copied().map(BlockId).collect()]),
            remote: ZmqAddress::parse("host:10.0.0.1,handshake:6301,notify:61005"),
            remote_dp_rank: Some(1),
            remote_dp_rank_override: true,
            remote_dp_size: Some(2),
            remote_dp_size_local: Some(2),
            remote_tp_size: 4,
            ..KvTransferParams::default()
        };
        assert_eq!(decode(&case["returns"][1]), answer);
        assert_eq!(parsed(answer.encode_answer()), with_ports(&case["returns"][1]));
    }
    // Keys in the order of vLLM.
    let answer = decode(&fixture["cases"][0]["returns"][1]).encode_answer().unwrap();
    let keys = ["do_remote_prefill", "remote_block_ids", "remote_host", "tp_size", "transfer_id"];
    let answer = String::from_utf8(answer).unwrap();
    assert!(keys.iter().map(|key| answer.find(key)).is_sorted());
}

/// The explicit form, as in the two recorded flows.
#[test]
fn explicit_legs_are_written_and_read_as_in_the_flows() {
    for (flow, mode) in [("flow_read", Mode::Pull), ("flow_write", Mode::Push)] {
        let flow = load(flow);
        for (key, to) in [
            ("kv_transfer_params_to_prefill", Role::Prefill),
            ("kv_transfer_params_to_decode", Role::Decode),
        ] {
            let object = &flow[key];
            let params = decode(object);
            let peer = params.peer(to, &plain()).unwrap();
            assert_eq!(peer.address.handshake, number::<i64>(&object["remote_handshake_port"]));
            assert_eq!((peer.dp_size, peer.dp_rank, peer.shape.tp_size), (1, 0, 1));
            if object["remote_block_ids"].is_null() {
                let made = KvTransferParams {
                    remote_dp_size: Some(1),
                    remote_tp_size: 1,
                    ..KvTransferParams::leg(
                        to,
                        params.transfer().unwrap().clone(),
                        Some(peer.address),
                    )
                };
                assert_eq!(parsed(made.encode_leg(to, mode, &plain())), *object);
            } else {
                // What the serving layer adds is ignored.
                let mut known = object.clone();
                assert!(
                    known.as_object_mut().unwrap().remove("remote_prefill_cached_tokens").is_some()
                );
                assert_eq!(parsed(params.encode_leg(to, mode, &plain())), known);
            }
        }
        let answer = &flow["kv_transfer_params_from_prefill"];
        assert_eq!(decode(answer), decode(&with_ports(answer)));
    }
}

/// The form with addresses in the request id, as vllm-router 0.1.17 sends it.
#[test]
fn embedded_legs_are_written_and_read_as_by_the_router() {
    let leg = |to: Role, dp: u16, tp: u16, rank: Option<u16>| KvTransferParams {
        remote_dp_size: Some(dp),
        remote_tp_size: tp,
        remote_dp_rank: rank,
        ..KvTransferParams::leg(to, "tx-1".into(), None)
    };
    for (object, (to, mode, params)) in [
        (
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,
                "remote_block_ids":null,"transfer_id":"tx-1","remote_dp_size":1}"#,
            (Role::Prefill, Mode::Pull, leg(Role::Prefill, 1, 0, None)),
        ),
        (
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,
                "remote_block_ids":null,"remote_dp_size":4,"remote_tp_size":2,
                "transfer_id":"tx-1","remote_dp_rank":1}"#,
            (Role::Prefill, Mode::Push, leg(Role::Prefill, 4, 2, Some(1))),
        ),
        (
            r#"{"do_remote_decode":false,"do_remote_prefill":true,"remote_engine_id":null,
                "remote_block_ids":null,"transfer_id":"tx-1","remote_dp_size":2,
                "remote_tp_size":4,"remote_dp_rank":0}"#,
            (Role::Decode, Mode::Push, leg(Role::Decode, 2, 4, Some(0))),
        ),
    ] {
        assert_eq!(KvTransferParams::decode(object.as_bytes()), Ok(params.clone()));
        let bytes = params.encode_leg(to, mode, &embedded());
        assert_eq!(parsed(bytes), serde_json::from_str::<Value>(object).unwrap());
    }
}

#[test]
fn params_that_end_an_engine_are_not_sent() {
    let (push, pull) = (Mode::Push, Mode::Pull);
    let remote = ZmqAddress::parse("host:10.0.0.1,handshake:6301,notify:61005").unwrap();
    let prefill = KvTransferParams::leg(Role::Prefill, "t".into(), Some(remote.clone()));
    let decode = KvTransferParams::leg(Role::Decode, "t".into(), Some(remote.clone()));
    let read =
        KvTransferParams { remote_block_ids: Some(vec![vec![BlockId(1)]]), ..decode.clone() };
    assert!(read.encode_answer().is_ok());
    assert!(
        KvTransferParams::leg(Role::Prefill, "t".into(), None)
            .encode_leg(Role::Prefill, push, &embedded())
            .is_ok()
    );
    let waits = KvTransferParams::leg(Role::Prefill, "t".into(), None);
    assert!(waits.encode_leg(Role::Prefill, pull, &plain()).is_ok());
    let refused = |params: &KvTransferParams, to, mode, request: RequestId, rule| {
        assert_eq!(params.encode_leg(to, mode, &request).unwrap_err().rule, rule);
    };
    let unnamed = KvTransferParams { transfer_id: None, ..prefill.clone() };
    refused(&unnamed, Role::Prefill, push, plain(), "no transfer_id");
    refused(&unnamed, Role::Prefill, pull, plain(), "no transfer_id");
    refused(&prefill, Role::Decode, push, plain(), "flags of another leg");
    refused(&decode, Role::Prefill, pull, plain(), "flags of another leg");
    refused(&decode, Role::Decode, pull, plain(), "no blocks to read");
    let nowhere = KvTransferParams { remote: None, ..read.clone() };
    for mode in [push, pull] {
        let rule = "no address, nor in the request id";
        refused(&nowhere, Role::Decode, mode, plain(), rule);
        let bad = "___prefill_addr_10.0.0.1:8100___decode_addr_x".into();
        refused(&read, Role::Decode, mode, bad, rule);
    }
    let far = ZmqAddress { notify: 0, ..remote };
    let far = KvTransferParams { remote: Some(far), ..read };
    refused(&far, Role::Decode, pull, plain(), "port out of range");
    let here = ZmqAddress { host: "".into(), handshake: 1, notify: 1 };
    let hosts = vec!["a".into()];
    let here = KvTransferParams { remote: Some(here), remote_hosts: hosts, ..prefill.clone() };
    refused(&here, Role::Prefill, push, plain(), "host that is none");
    let pods = KvTransferParams { remote_hosts: vec!["a".into(), "b,c".into()], ..prefill };
    refused(&pods, Role::Prefill, push, plain(), "host that is none");
}

/// As llm-d asks a prefill to keep KV for a read.
#[test]
fn a_read_without_a_transfer_id_is_named_by_the_prefill() {
    let object = r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,
        "remote_block_ids":null,"remote_host":null,"remote_port":null}"#;
    let params = KvTransferParams::decode(object.as_bytes()).unwrap();
    assert!(params.do_remote_decode && params.remote.is_none() && params.transfer().is_err());
    let request = RequestId::from("cmpl-4c1f0c2b11-0-1d7a8f0c");
    assert_eq!(unnamed_transfer(&request), "sidecar-cmpl-4c1f0c2b11-0-1d7a8f0c".into());
}

#[test]
fn pods_have_their_hosts() {
    let case = &load("add_new_req")["cases"][7];
    assert_eq!(case["name"], "multi-pod hosts list");
    let peer = decode(&case["kv_transfer_params"]).peer(Role::Prefill, &"r".into()).unwrap();
    let host = |dp| &**peer.host(dp);
    assert_eq!(
        (host(0), host(7), host(8), host(15)),
        ("10.0.0.9", "10.0.0.9", "10.0.0.10", "10.0.0.10")
    );
    assert_eq!(host(16), "10.0.0.9");
    let mut one = case["kv_transfer_params"].clone();
    one["remote_hosts"] = json!("10.0.0.11");
    one["remote_dp_size_local"] = json!(0);
    let peer = decode(&one).peer(Role::Prefill, &plain()).unwrap();
    assert_eq!((&**peer.host(0), peer.shape.dp_size_local), ("10.0.0.11", 16));
}

#[test]
fn one_decode_rank_tells_the_prefill() {
    let base = KvTransferParams { remote_dp_rank: Some(9), ..KvTransferParams::default() };
    let leads = |params: &KvTransferParams| {
        (0..16).filter(|dp| params.is_leader(*dp, 8)).collect::<Vec<_>>()
    };
    assert_eq!(leads(&base), (0..8).collect::<Vec<_>>());
    let by_rank = KvTransferParams { remote_dp_rank_override: true, ..base };
    assert_eq!(leads(&by_rank), [9]);
    let by_word = KvTransferParams { is_request_leader: Some(false), ..by_rank };
    assert!(leads(&by_word).is_empty());
}

#[test]
fn values_of_no_use_are_named() {
    let rule = |key: &str, value: Value| {
        let mut object = json!({"remote_engine_id": null, "remote_block_ids": null});
        object[key] = value;
        KvTransferParams::decode(object.to_string().as_bytes())
            .map_err(|error| error.rule.to_string())
    };
    let refused = |key: &str, value: Value, expected: &str| {
        assert_eq!(rule(key, value.clone()), Err(expected.to_owned()), "{key}: {value}");
    };
    refused("transfer_id", json!(7), "transfer_id is no text");
    refused("remote_engine_id", json!([]), "remote_engine_id is no text");
    for lists in [json!(1), json!([1]), json!([[-1]]), json!([[1_u64 << 32]]), json!({"a": 1})] {
        refused("remote_block_ids", lists, "remote_block_ids that are no lists of ids");
    }
    refused("remote_dp_size", json!(1_000_000), "remote_dp_size is no size");
    refused("remote_tp_size", json!("x"), "remote_tp_size is no size");
    refused("tp_size", json!(-1), "tp_size is no size");
    refused("remote_dp_rank", json!(-1), "remote_dp_rank is no rank");
    assert_eq!(rule("remote_dp_size", json!(" 4 ")).unwrap().remote_dp_size, Some(4));
    assert!(!rule("do_remote_prefill", json!(0)).unwrap().do_remote_prefill);
    assert!(rule("do_remote_prefill", json!(1)).unwrap().do_remote_prefill);
    assert_eq!(rule("is_request_leader", Value::Null).unwrap().is_request_leader, None);
    assert_eq!(rule("is_request_leader", json!(0)).unwrap().is_request_leader, Some(false));
    assert_eq!(&*KvTransferParams::decode(b"[]").unwrap_err().rule, "no object");
    assert_eq!(&*KvTransferParams::decode(&[b'['; 1 << 20]).unwrap_err().rule, "no object");
}

/// A leg that may be sent under any request id, and its mode.
fn leg() -> impl Strategy<Value = (Role, Mode, KvTransferParams)> {
    let modes = prop::sample::select(vec![Mode::Push, Mode::Pull]);
    let to = prop::sample::select(vec![Role::Prefill, Role::Decode]);
    let flags = (any::<bool>(), option::of(any::<bool>()));
    let blocks = vec(vec(any::<u32>().prop_map(BlockId), 0..20), 0..3);
    let ids = (any_text(), option::of(any_text()), option::weighted(0.9, blocks));
    let remote = (any_host(), 1..65536_i64, 1..65536_i64);
    let sizes = (option::of(any::<u16>()), option::of(any::<u16>()), option::of(any::<u16>()));
    let rest = (vec(any_host(), 0..3), any::<u16>());
    (to, modes, flags, ids, remote, sizes, rest).prop_map(
        |(to, mode, flags, (id, engine, blocks), (host, handshake, notify), sizes, rest)| {
            let remote = ZmqAddress { host: host.into(), handshake, notify };
            let read = (to, mode) == (Role::Decode, Mode::Pull);
            let params = KvTransferParams {
                remote_engine_id: engine.map(EngineId),
                remote_block_ids: if read { blocks.or(Some(Vec::new())) } else { None },
                remote_hosts: rest.0.into_iter().map(Into::into).collect(),
                remote_dp_rank: sizes.0,
                remote_dp_rank_override: flags.0,
                is_request_leader: flags.1,
                remote_dp_size: sizes.1,
                remote_dp_size_local: sizes.2,
                remote_tp_size: rest.1,
                ..KvTransferParams::leg(to, TransferId(id), Some(remote))
            };
            (to, mode, params)
        },
    )
}

proptest! {
    #[test]
    fn params_round_trip((to, mode, params) in leg()) {
        let bytes = params.encode_leg(to, mode, &plain()).unwrap();
        prop_assert_eq!(KvTransferParams::decode(&bytes), Ok(params));
    }

    #[test]
    fn any_params_are_survived(
        bytes in hostile(
            list(&load("add_new_req")["cases"])
                .iter()
                .map(|case| case["kv_transfer_params"].to_string().into_bytes())
                .collect(),
        ),
        request in any_text(),
    ) {
        if let Ok(params) = KvTransferParams::decode(&bytes) {
            let leg = |to| params.encode_leg(to, Mode::Pull, &plain());
            for bytes in [leg(Role::Prefill), leg(Role::Decode)].into_iter().flatten() {
                prop_assert_eq!(KvTransferParams::decode(&bytes), Ok(params.clone()));
            }
            if let Ok(peer) = params.peer(Role::Decode, &RequestId(request)) {
                let _ = peer.host(u16::MAX);
            }
        }
    }
}
