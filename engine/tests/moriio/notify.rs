//! The notify channel.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::frame_kind::{MoriioFrameKind, form};
use kvferry_engine::core::dialect::moriio::notify::*;
use kvferry_engine::core::ids::{BlockId, RequestId, TransferId};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::num::NonZeroU16;

/// The fixture's only frame.
fn sent(fixture: &Value) -> Vec<u8> {
    let mut parts = parts(&fixture["frames_as_sent_by_dealer"]);
    assert_eq!(parts.len(), 1);
    parts.remove(0)
}

fn remote_blocks_of(decoded: &Value) -> RemoteBlocks {
    let blocks = list(&decoded["block_notify_list"]).iter().map(|id| BlockId(number(id)));
    let request = Some(RequestId::from(text(&decoded["req_id"])));
    let transfer = TransferId::from(text(&decoded["transfer_id"]));
    let blocks = vec![blocks.collect()];
    RemoteBlocks::new(request, transfer, blocks, number(&decoded["decode_rank"])).unwrap()
}

/// What a decode hears from its only writer.
fn written(transfer: TransferId) -> ReceivedDecodeNotice {
    ReceivedDecodeNotice::Written { transfer, writers: NonZeroU16::MIN }
}

fn release_of(decoded: &Value) -> Release {
    let transfer = TransferId::from(text(&decoded["transfer_id"]));
    let consumer_tp = NonZeroU16::new(number(&decoded["consumer_tp_size"])).unwrap();
    Release::new(transfer, consumer_tp, 0).unwrap()
}

#[test]
fn remote_blocks_are_written_and_read_as_by_vllm() {
    let fixture = load("notify_remote_blocks");
    let flow = &load("flow_write")["messages_by_connection"]["P.notify#1 client_to_listener"][1];
    let frame = parts(&flow["message_frames_hex"]).remove(0);
    for (frame, decoded) in [(sent(&fixture), &fixture["decoded"]), (frame, &flow["decoded"])] {
        let message = remote_blocks_of(decoded);
        assert_eq!(message.encode(), frame);
        assert_eq!(form(&[&frame]), Some(MoriioFrameKind::Blocks));
        assert_eq!(decode_at_prefill(&[&frame]), Ok(ReceivedPrefillNotice::RemoteBlocks(message)));
    }
}

#[test]
fn releases_are_written_and_read_as_by_vllm() {
    let fixture = load("notify_release");
    let flow = &load("flow_read")["messages_by_connection"]["P.notify#1 client_to_listener"][1];
    let by_scheduler = unhex(&fixture["scheduler_variant_hex"]);
    for (frame, decoded) in [
        (sent(&fixture), &fixture["decoded"]),
        (by_scheduler, &fixture["scheduler_variant_decoded"]),
        (parts(&flow["message_frames_hex"]).remove(0), &flow["decoded"]),
    ] {
        let message = release_of(decoded);
        assert_eq!(message.encode(), frame);
        assert_eq!(form(&[&frame]), Some(MoriioFrameKind::Release));
        assert_eq!(decode_at_prefill(&[&frame]), Ok(ReceivedPrefillNotice::Release(message)));
    }
}

#[test]
fn completions_are_written_and_read_as_by_vllm() {
    let fixture = load("notify_write_done");
    let flow = &load("flow_write")["messages_by_connection"]["D.notify#1 client_to_listener"][1];
    let frame = parts(&flow["message_frames_hex"]).remove(0);
    for (frame, decoded) in [(sent(&fixture), &fixture["decoded"]), (frame, &flow["decoded"])] {
        let transfer = TransferId::from(text(&decoded["transfer_id"]));
        assert_eq!(write_done(&transfer), frame);
        assert_eq!(form(&[&frame]), Some(MoriioFrameKind::Written));
        assert_eq!(decode_at_decode(&[&frame]), Ok(written(transfer)));
    }
    for message in list(&load("notify_raw_completion")["messages"]) {
        let (frame, transfer) = (unhex(&message["hex"]), TransferId::from(text(&message["text"])));
        assert_eq!(form(&[&frame]), Some(MoriioFrameKind::Text));
        assert_eq!(decode_at_decode(&[&frame]), Ok(written(transfer.clone())));
        let release = Release::new(transfer, NonZeroU16::MIN, 4).unwrap();
        assert_eq!(decode_at_prefill(&[&frame]), Ok(ReceivedPrefillNotice::Release(release)));
    }
}

/// Compares what was heard with what vLLM's engine half knows afterwards.
fn check_prefill(name: &str, heard: ReceivedPrefillNotice, after: &Value) {
    match heard {
        ReceivedPrefillNotice::RemoteBlocks(message) => {
            let blocks: Vec<u32> = message.blocks()[0].iter().map(|id| id.0).collect();
            let entry = &after["done_remote_allocate"][&*message.transfer().0];
            assert_eq!(entry["block_ids"], json!(blocks), "{name}");
            assert_eq!(entry["decode_dp_rank"], message.decode_rank(), "{name}");
        }
        ReceivedPrefillNotice::Release(release) => {
            let acks = json!([[release.transfer(), release.consumer_tp()]]);
            assert_eq!(after["done_req_ids"], acks, "{name}");
        }
        ReceivedPrefillNotice::Unusable { transfer, rule } => {
            assert_eq!(rule, "block id that is none", "{name}");
            assert_eq!(after["done_remote_allocate"][&*transfer.0]["block_ids"], json!(["x"]));
        }
    }
}

#[test]
fn the_notify_corpus_gets_its_verdicts() {
    let corpus = load("notify_decoder_corpus");
    let mut rules = BTreeMap::<(String, String), u32>::new();
    let mut unusable = 0;
    for case in list(&corpus["cases"]) {
        let (name, frame) = (text(&case["name"]), unhex(&case["hex"]));
        let (at_prefill, at_decode) = (decode_at_prefill(&[&frame]), decode_at_decode(&[&frame]));
        assert_eq!(at_prefill.is_ok(), case["producer"]["error"].is_null(), "{name}");
        // The type that is none there is one of 0.33.0.
        let is_later = matches!(at_decode, Ok(ReceivedDecodeNotice::Failed(_)));
        assert_eq!(is_later, name == "unknown type", "{name}");
        assert!(is_later || at_decode.is_ok() == case["consumer"]["error"].is_null(), "{name}");
        for error in [at_prefill.as_ref().err(), at_decode.as_ref().err()].into_iter().flatten() {
            let violation = error.violation("10.0.0.2");
            assert_eq!(&*violation.peer, "10.0.0.2");
            *rules.entry((violation.frame.to_string(), violation.rule.to_string())).or_default() +=
                1;
        }
        if let Ok(heard) = at_prefill {
            unusable += u32::from(matches!(heard, ReceivedPrefillNotice::Unusable { .. }));
            check_prefill(name, heard, &case["producer"]);
        }
        if let Ok(ReceivedDecodeNotice::Written { transfer, .. }) = at_decode {
            let id = &case["consumer"]["done_write_cache_req_ids"][0];
            let bytes = || String::from_utf8(unhex(id)).unwrap();
            let id = if name == "transfer_id as bin" { bytes() } else { text(id).to_owned() };
            assert_eq!(&*transfer.0, id, "{name}");
        }
    }
    assert_eq!((list(&corpus["cases"]).len(), unusable), (22, 1));
    let count = |frame: &str, rule: &str| rules[&(frame.to_owned(), rule.to_owned())];
    assert_eq!(count("remote_blocks", "told to the wrong role"), 4);
    assert_eq!(count("release", "told to the wrong role"), 3);
    assert_eq!(count("write_done", "told to the wrong role"), 3);
    assert_eq!(count("remote_blocks", "no transfer_id"), 1);
    assert_eq!(count("write_done", "no transfer_id"), 1);
    assert_eq!(count("release", "consumer_tp_size is no size"), 1);
    assert_eq!(count("write_failed", "told to the wrong role"), 1);
    assert_eq!(count("notify", "no type"), 2);
    assert_eq!(count("notify", "empty"), 2);
    assert_eq!(count("notify", "neither map nor text"), 8);
    assert_eq!(count("notify", "key that is no text"), 2);
    assert_eq!(count("notify", "bytes after the end"), 2);
    assert_eq!(rules.values().sum::<u32>(), 32, "{rules:?}");
}

#[test]
fn nothing_that_ends_a_listener_can_be_made() {
    let empty = load("notify_remote_blocks_empty");
    assert!(empty["real_decoder_producer"]["error"].is_string());
    let error = decode_at_prefill(&[sent(&empty)]).unwrap_err();
    assert_eq!(error.to_string(), "no blocks in remote_blocks");
    let error = RemoteBlocks::new(None, "t".into(), Vec::new(), 0).unwrap_err();
    assert_eq!(error.to_string(), "no blocks in remote_blocks");
    let six = NonZeroU16::new(6).unwrap();
    assert!(Release::new("t".into(), six, 4).is_err());
    assert!([0, 2, 3, 12].iter().all(|tp| Release::new("t".into(), six, *tp).is_ok()));
}

#[test]
fn frames_have_one_part() {
    let frame = b"tx-1".to_vec();
    for parts in [vec![], vec![frame.clone(), frame.clone()], vec![Vec::new(), frame]] {
        assert_eq!(decode_at_prefill(&parts).unwrap_err().to_string(), "not one part in notify");
        assert_eq!(decode_at_decode(&parts).unwrap_err().to_string(), "not one part in notify");
    }
}

#[test]
fn numbers_are_converted_as_by_python() {
    let release = |size: Value| {
        let id = ("transfer_id".to_owned(), json!("t"));
        let kind = ("type".to_owned(), json!("release"));
        let entries = FixtureEntries(vec![kind, id, ("consumer_tp_size".to_owned(), size)]);
        match decode_at_prefill(&[entries.pack()]) {
            Ok(ReceivedPrefillNotice::Release(release)) => Some(release.consumer_tp().get()),
            Err(error) if &*error.rule == "consumer_tp_size is no size" => None,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(release(json!(8)), Some(8));
    assert_eq!(release(json!(" 1_6 ")), Some(16));
    assert_eq!(release(json!(2.9)), Some(2));
    assert_eq!(release(json!(true)), Some(1));
    for none in [json!(0), json!(-1), json!(0.5), json!("x"), json!(null), json!([1]), json!(65536)]
    {
        assert_eq!(release(none.clone()), None, "{none}");
    }
}

#[test]
fn announcements_of_no_use_cost_their_transfer() {
    let announce = |blocks: Value, rank: Value| {
        let entry = |key: &str, value| (key.to_owned(), value);
        let entries = vec![
            entry("req_id", json!("r")),
            entry("transfer_id", json!("t")),
            entry("block_notify_list", blocks),
            entry("decode_rank", rank),
        ];
        match decode_at_prefill(&[FixtureEntries(entries).pack()]) {
            Ok(ReceivedPrefillNotice::Unusable { transfer, rule }) => {
                assert_eq!(transfer, "t".into());
                rule
            }
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(announce(json!([1, -1]), json!(0)), "block id that is none");
    assert_eq!(announce(json!([1_u64 << 32]), json!(0)), "block id that is none");
    assert_eq!(announce(json!("abc"), json!(0)), "block_notify_list is no list");
    assert_eq!(announce(json!([1]), json!(-1)), "decode_rank is no rank");
}

#[test]
fn announcements_name_blocks() {
    for list in [None, Some(Value::Null), Some(json!([]))] {
        let known = [("type", json!("remote_blocks")), ("transfer_id", json!("t"))];
        let entries = known.into_iter().chain(list.map(|list| ("block_notify_list", list)));
        let frame =
            FixtureEntries(entries.map(|(key, value)| (key.to_owned(), value)).collect()).pack();
        assert_eq!(decode_at_prefill(&[frame]).unwrap_err().frame, "remote_blocks");
    }
}

#[test]
fn nesting_and_lengths_cost_no_stack_and_no_memory() {
    let mut deep = vec![0x81, 0xa1, b'x'];
    deep.extend(vec![0x91; 1 << 20]);
    deep.push(0xc0);
    assert_eq!(&*decode_at_prefill(&[&deep]).unwrap_err().rule, "no type");
    let long = [0x81, 0xa1, b'x', 0xdd, 0xff, 0xff, 0xff, 0xff, 0];
    assert_eq!(&*decode_at_prefill(&[&long]).unwrap_err().rule, "list longer than the frame");
}

#[test]
fn lengths_of_every_width_are_read() {
    for length in [1, 15, 16, 31, 32, 255, 256, 65_535, 65_536] {
        let blocks = vec![(0..length).map(|id| BlockId(u32::MAX - id)).collect()];
        let transfer = TransferId("t".repeat(length as usize).into());
        let message = RemoteBlocks::new(None, transfer.clone(), blocks, u16::MAX).unwrap();
        let frame = message.encode();
        assert_eq!(decode_at_prefill(&[frame]), Ok(ReceivedPrefillNotice::RemoteBlocks(message)));
        let known = [("type", "write_done"), ("transfer_id", &transfer.0)];
        let known = known.map(|(key, value)| (key.to_owned(), json!(value)));
        let others = (2..length).map(|at| (format!("x{at}"), json!([at])));
        let frame = FixtureEntries(known.into_iter().chain(others).collect()).pack();
        assert_eq!(decode_at_decode(&[frame]), Ok(written(transfer)), "{length}");
    }
}

#[test]
fn a_type_of_nil_is_none() {
    let mut decoded = load("notify_remote_blocks")["decoded"].clone();
    let expected = remote_blocks_of(&decoded);
    decoded["type"] = Value::Null;
    let entries = FixtureEntries(decoded.as_object().unwrap().clone().into_iter().collect());
    assert_eq!(
        decode_at_prefill(&[entries.pack()]),
        Ok(ReceivedPrefillNotice::RemoteBlocks(expected))
    );
}

#[test]
fn of_equal_keys_the_last_counts() {
    let entry = |key: &str, value: &str| (key.to_owned(), json!(value));
    let entries = vec![
        entry("transfer_id", "a"),
        entry("type", "release"),
        entry("transfer_id", "b"),
        entry("type", "write_done"),
    ];
    assert_eq!(decode_at_decode(&[FixtureEntries(entries).pack()]), Ok(written("b".into())));
}

fn transfer() -> impl Strategy<Value = TransferId> {
    any_text().prop_map(TransferId)
}

fn remote_blocks() -> impl Strategy<Value = RemoteBlocks> {
    let list = || vec(any::<u32>().prop_map(BlockId), 1..400);
    let blocks = vec(list(), 1..4);
    let request = proptest::option::of(any_text().prop_map(RequestId));
    (request, transfer(), blocks, any::<u16>()).prop_map(|(request, transfer, blocks, rank)| {
        RemoteBlocks::new(request, transfer, blocks, rank).unwrap()
    })
}

fn a_release() -> impl Strategy<Value = Release> {
    (transfer(), 1..=u16::MAX)
        .prop_map(|(transfer, tp)| Release::new(transfer, NonZeroU16::new(tp).unwrap(), 1).unwrap())
}

proptest! {
    #[test]
    fn notify_messages_round_trip(
        blocks in remote_blocks(),
        release in a_release(),
        done in transfer(),
    ) {
        let heard = decode_at_prefill(&[blocks.encode()]);
        prop_assert_eq!(heard, Ok(ReceivedPrefillNotice::RemoteBlocks(blocks)));
        let heard = decode_at_prefill(&[release.encode()]);
        prop_assert_eq!(heard, Ok(ReceivedPrefillNotice::Release(release)));
        let bytes = write_done(&done);
        prop_assert!(decode_at_prefill(&[&bytes]).is_err());
        prop_assert_eq!(decode_at_decode(&[bytes]), Ok(written(done.clone())));
        let bytes = write_failed(&done);
        prop_assert!(decode_at_prefill(&[&bytes]).is_err());
        prop_assert_eq!(decode_at_decode(&[bytes]), Ok(ReceivedDecodeNotice::Failed(done)));
    }

    #[test]
    fn an_id_alone_is_taken_for_itself_by_both_roles(transfer in transfer()) {
        let bytes = transfer.0.as_bytes();
        // What begins like a long map could be one.
        prop_assume!(!matches!(bytes, [] | [0x80..=0x8f | 0xde | 0xdf, ..]));
        prop_assert_eq!(decode_at_decode(&[bytes]), Ok(written(transfer.clone())));
        let release = Release::new(transfer.clone(), NonZeroU16::MIN, 1).unwrap();
        prop_assert_eq!(
            decode_at_prefill(&[bytes]),
            Ok(ReceivedPrefillNotice::Release(release))
        );
    }

    #[test]
    fn keys_come_in_any_order_and_with_others(
        entries in shuffled(load("notify_remote_blocks")["decoded"].clone()),
    ) {
        let expected = remote_blocks_of(&load("notify_remote_blocks")["decoded"]);
        let heard = decode_at_prefill(&[entries.pack()]);
        prop_assert_eq!(heard, Ok(ReceivedPrefillNotice::RemoteBlocks(expected)));
    }

    #[test]
    fn any_notify_frame_is_survived(
        bytes in hostile(
            list(&load("notify_decoder_corpus")["cases"])
                .iter()
                .map(|case| unhex(&case["hex"]))
                .chain([sent(&load("notify_remote_blocks"))])
                .collect(),
        ),
    ) {
        match decode_at_prefill(&[&bytes]) {
            Ok(ReceivedPrefillNotice::RemoteBlocks(blocks)) => {
                let again = blocks.encode();
                prop_assert_eq!(decode_at_prefill(&[again]), Ok(ReceivedPrefillNotice::RemoteBlocks(blocks)));
            }
            Ok(ReceivedPrefillNotice::Release(release)) => {
                let again = release.encode();
                prop_assert_eq!(decode_at_prefill(&[again]), Ok(ReceivedPrefillNotice::Release(release)));
            }
            _ => {}
        }
        if let Ok(ReceivedDecodeNotice::Written { transfer, .. }) = decode_at_decode(&[&bytes]) {
            let again = write_done(&transfer);
            prop_assert_eq!(decode_at_decode(&[again]), Ok(written(transfer)));
        }
    }
}
