//! Addresses and request ids.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::address::*;
use kvferry_engine::core::ids::{Incarnation, RequestId};
use kvferry_engine::core::message::Role;
use proptest::prelude::*;
use serde_json::json;

#[test]
fn peers_in_request_ids_are_found_as_by_vllm() {
    let fixture = load("address_forms");
    for case in list(&fixture["request_ids"]) {
        let name = text(&case["name"]);
        let request = RequestId::from(text(&case["request_id"]));
        let at_prefill = embedded_peer(Role::Prefill, &request);
        let at_decode = embedded_peer(Role::Decode, &request);
        assert_eq!(json!(at_prefill), case["peer_seen_by_producer(decode addr)"], "{name}");
        assert_eq!(json!(at_decode), case["peer_seen_by_consumer(prefill addr)"], "{name}");
    }
    assert_eq!(list(&fixture["request_ids"]).len(), 12);
}

#[test]
fn addresses_are_read_as_by_vllm() {
    let fixture = load("address_forms");
    for case in list(&fixture["zmq_addresses"]) {
        let out = match ZmqAddress::parse(text(&case["in"])) {
            Some(ZmqAddress { host, handshake, notify }) => json!([&*host, handshake, notify]),
            None => json!("ValueError"),
        };
        assert_eq!(out, case["out[host,handshake,notify]"], "{}", case["in"]);
    }
    assert_eq!(list(&fixture["zmq_addresses"]).len(), 15);
    for port in ["1__0", "_1", "1_", "", "+", "- 1", "1.0", "9223372036854775808"] {
        assert_eq!(ZmqAddress::parse(&format!("host:h,handshake:{port},notify:2")), None, "{port}");
    }
}

#[test]
fn only_addresses_that_are_read_back_as_meant_are_sent() {
    let address =
        |host: &str, handshake, notify| ZmqAddress { host: host.into(), handshake, notify };
    let good = address("fd00::1", 6301, 61005);
    assert_eq!(good.check(), Ok(()));
    for (bad, rule) in [
        (address("", 1, 1), "host that is none"),
        (address("a,b", 1, 1), "host that is none"),
        (address(" a", 1, 1), "host that is none"),
        (address("a\r\nX: 1", 1, 1), "host that is none"),
        (address("a___decode_addr_", 1, 1), "host with the mark of a request id"),
        (address("a", 0, 1), "port out of range"),
        (address("a", -1, 1), "port out of range"),
        (address("a", 1, 65536), "port out of range"),
    ] {
        assert_eq!(bad.check().unwrap_err().rule, rule);
        assert!(embed(&bad, &good, 1).is_err());
        assert!(embed(&good, &bad, 1).is_err());
    }
}

#[test]
fn request_ids_are_those_of_the_routers() {
    let fixture = load("address_forms");
    let expected = text(&fixture["request_ids"][0]["request_id"]);
    let prefill = ZmqAddress::parse("host:10.0.0.1,handshake:6301,notify:61005").unwrap();
    let decode = ZmqAddress::parse("host:10.0.0.2,handshake:7301,notify:7501").unwrap();
    let made = embed(&prefill, &decode, 0x16f4_1eb3_df75_420f_a6b7_8acc_63ba_fd9a).unwrap();
    assert_eq!(&*made.0, expected);
}

/// What the pattern `___prefill_addr_(.+?)___decode_addr_` finds, by trying everything.
fn prefill_pattern(id: &str) -> Option<&str> {
    let (mark, end) = ("___prefill_addr_", "___decode_addr_");
    id.match_indices("_").filter(|(at, _)| id[*at..].starts_with(mark)).find_map(|(at, _)| {
        let rest = &id[at + mark.len()..];
        let stops = rest.char_indices().skip(1).map(|(stop, _)| stop);
        let mut stops = stops.take_while(|stop| !rest[..*stop].contains('\n'));
        stops.find(|stop| rest[*stop..].starts_with(end)).map(|stop| &rest[..stop])
    })
}

/// What the pattern `___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$` finds, by trying everything.
fn decode_pattern(id: &str) -> Option<&str> {
    let mark = "___decode_addr_";
    let is_end = |tail: &str| matches!(tail, "" | "\n");
    let ends = |rest: &str| {
        let Some(rest) = rest.strip_prefix('_') else { return false };
        let hex = rest.bytes().take_while(|c| b"0123456789abcdef".contains(c)).count();
        hex >= 32
            && (is_end(&rest[32..])
                || rest[32..]
                    .strip_prefix('-')
                    .is_some_and(|tail| is_end(tail.trim_start_matches(|c| c != '\n'))))
    };
    id.match_indices("_").filter(|(at, _)| id[*at..].starts_with(mark)).find_map(|(at, _)| {
        let rest = &id[at + mark.len()..];
        let stops = rest.char_indices().skip(1).map(|(stop, _)| stop).collect::<Vec<_>>();
        let mut stops = stops.into_iter().rev().filter(|stop| !rest[..*stop].contains('\n'));
        stops.find(|stop| ends(&rest[*stop..])).map(|stop| &rest[..stop])
    })
}

/// Texts of the pieces that the patterns look for.
fn pieces() -> impl Strategy<Value = String> {
    let pieces =
        ["___prefill_addr_", "___decode_addr_", "_", "0123456789abcdef", "-", "\n", "é", "A"];
    let hex = "_0123456789abcdef0123456789abcdef";
    let piece = prop_oneof![3 => prop::sample::select(pieces.to_vec()), 2 => Just(hex)];
    proptest::collection::vec(piece, 0..14).prop_map(|pieces| pieces.concat())
}

fn address() -> impl Strategy<Value = ZmqAddress> {
    (any_host(), 1..65536_i64, 1..65536_i64).prop_map(|(host, handshake, notify)| ZmqAddress {
        host: host.into(),
        handshake,
        notify,
    })
}

proptest! {
    #[test]
    fn request_ids_are_searched_like_the_patterns(id in pieces()) {
        let request = RequestId::from(&*id);
        prop_assert_eq!(embedded_peer(Role::Decode, &request), prefill_pattern(&id));
        prop_assert_eq!(embedded_peer(Role::Prefill, &request), decode_pattern(&id));
    }

    #[test]
    fn embedded_addresses_are_found_again(
        prefill in address(),
        decode in address(),
        unique in any::<u128>(),
        wrap in prop::sample::select(vec![("", ""), ("chatcmpl-", "-b8ee174a"), ("cmpl-", "-0-b8ee174a")]),
    ) {
        let id = embed(&prefill, &decode, unique).unwrap();
        let id = RequestId(format!("{}{id}{}", wrap.0, wrap.1).into());
        let found = |role| embedded_peer(role, &id).and_then(ZmqAddress::parse);
        prop_assert_eq!(found(Role::Decode), Some(prefill));
        prop_assert_eq!(found(Role::Prefill), Some(decode));
    }

    #[test]
    fn any_text_is_no_address_or_a_stable_one(text in "[a-z:,0-9 _+-]{0,30}|(host|handshake|notify|:|,|[0-9_+ -]){0,20}") {
        if let Some(address) = ZmqAddress::parse(&text) {
            prop_assert_eq!(ZmqAddress::parse(&address.to_string()), Some(address));
        }
    }
}

#[test]
fn an_address_can_say_that_its_engine_speaks_the_native_dialect() {
    let address = ZmqAddress { host: "::1".into(), handshake: 6301, notify: 61005 };
    let text = with_incarnation(&address, Incarnation(0x1f));
    assert_eq!(text, "host:::1,handshake:6301,notify:61005,kvferry:1f");
    assert_eq!(ZmqAddress::parse(&text), Some(address.clone()));
    assert_eq!(incarnation_of(&text), Some(Incarnation(0x1f)));
    assert_eq!(incarnation_of(&address.to_string()), None);
    assert_eq!(incarnation_of("host:x,kvferry:no"), None);
    // Behind a router that pastes addresses into request ids.
    let id = format!("___prefill_addr_{text}___decode_addr_{text}_{:032x}", 7).as_str().into();
    for role in [Role::Prefill, Role::Decode] {
        assert_eq!(embedded_peer(role, &id).and_then(incarnation_of), Some(Incarnation(0x1f)));
    }
}
