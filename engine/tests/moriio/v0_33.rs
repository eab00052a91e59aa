//! What vLLM 0.33.0 says that 0.32.0 does not.

use crate::fixture::*;
use crate::handshake::metadata_of;
use kvferry_engine::core::dialect::moriio::frame_kind::{MoriioFrameKind, form};
use kvferry_engine::core::dialect::moriio::handshake::*;
use kvferry_engine::core::dialect::moriio::notify::*;
use kvferry_engine::core::dialect::moriio::ports::expected_writers;
use kvferry_engine::core::ids::{BlockId, TransferId};
use serde_json::Value;
use std::num::NonZeroU16;
use std::sync::Arc;

fn captured() -> Value {
    load("vllm_0_33")
}

fn transfer() -> TransferId {
    "tx-0033".into()
}

/// The entries of a map in the order of vLLM's lists, which is that of the names.
fn named<V>(map: &Value, value: impl Fn(&Value) -> V) -> Vec<(Arc<str>, V)> {
    let entries = map.as_object().unwrap().iter();
    entries.map(|(name, of)| (name.as_str().into(), value(of))).collect()
}

fn numbers(numbers: &Value) -> Vec<i64> {
    list(numbers).iter().map(number).collect()
}

#[test]
fn layouts_are_written_and_read_as_by_vllm_and_tell_its_version() {
    for (name, case) in captured()["metadata"].as_object().unwrap() {
        let decoded = &case["decoded"];
        let mut metadata = metadata_of(decoded);
        metadata.layouts = CacheLayouts {
            heads: named(&decoded["kv_head_layouts"], numbers),
            states: named(&decoded["mamba_state_layouts"], numbers),
            block_sizes: named(&decoded["attention_block_sizes"], number),
        };
        let frame = [Vec::new(), unhex(&case["hex"])];
        assert_eq!(metadata.encode(), frame, "{name}");
        assert_eq!(metadata.is_of_0_33(), name != "none", "{name}");
        assert_eq!(AgentMetadata::decode(&frame), Ok(metadata), "{name}");
        assert_eq!(form(&frame), Some(MoriioFrameKind::Metadata));
    }
}

#[test]
fn layouts_of_another_type_are_refused_as_by_vllm() {
    let captured = captured();
    for case in list(&captured["metadata_cases"]) {
        let decoded = AgentMetadata::decode(&[Vec::new(), unhex(&case["hex"])]);
        assert_eq!(decoded.is_ok(), case["error"].is_null(), "{}", case["name"]);
        if let Err(error) = decoded {
            assert!(text(&case["error"]).contains(error.rule.split(' ').next().unwrap()));
        }
    }
    assert_eq!(list(&captured["metadata_cases"]).len(), 8);
}

#[test]
fn notices_are_written_as_by_vllm() {
    let notices = captured()["notices"].clone();
    let sent = |name: &str| unhex(&notices[name]);
    assert_eq!(write_done(&transfer()), sent("write_done"));
    assert_eq!(write_failed(&transfer()), sent("write_failed"));
    assert_eq!(form(&[sent("write_failed")]), Some(MoriioFrameKind::Failed));
    for (name, consumers) in [("release_for_one", 1), ("release_of_4", 4)] {
        let tp = NonZeroU16::new(consumers).unwrap();
        assert_eq!(Release::new(transfer(), tp, 1).unwrap().encode(), sent(name));
    }
    for (name, groups) in [
        ("remote_blocks_flat", vec![vec![3, 4]]),
        ("remote_blocks_of_groups", vec![vec![3, 4], vec![9]]),
    ] {
        let blocks = groups.iter().map(|ids| ids.iter().copied().map(BlockId).collect());
        let request = Some("cmpl-1".into());
        let notice = RemoteBlocks::new(request, transfer(), blocks.collect(), 1).unwrap();
        assert_eq!(notice.encode(), sent(name));
        assert_eq!(form(&[sent(name)]), Some(MoriioFrameKind::Blocks));
        let heard = ReceivedPrefillNotice::RemoteBlocks(notice);
        assert_eq!(decode_at_prefill(&[sent(name)]), Ok(heard));
    }
}

#[test]
fn as_many_ranks_write_to_one_as_in_vllm() {
    let captured = captured();
    for row in list(&captured["write_tp_mapping"]) {
        let [producer, consumer, heads] =
            ["producer_tp", "consumer_tp", "heads"].map(|name| number::<u16>(&row[name]));
        let expected = expected_writers(producer, consumer, heads);
        for writers in list(&row["writers"]) {
            assert_eq!(list(writers).len(), usize::from(expected), "{row}");
            for writer in list(writers) {
                assert_eq!(number::<u16>(&writer[1]), expected, "{row}");
            }
        }
    }
    assert_eq!(list(&captured["write_tp_mapping"]).len(), 64);
    // Sizes that are none are no reason to wait for nobody.
    assert_eq!((expected_writers(0, 0, 0), expected_writers(u16::MAX, 1, 1)), (1, 1));
}

/// Verdicts of vLLM that are not followed: it takes numbers of writers that are none, and takes
/// lists of which it can use nothing.
const STRICTER: [&str; 5] = [
    "num_writers 0",
    "num_writers negative",
    "num_writers huge",
    "groups, the first empty",
    "groups and ids",
];

#[test]
fn the_corpus_gets_its_verdicts() {
    let captured = captured();
    for case in list(&captured["corpus"]) {
        let (name, frame) = (text(&case["name"]), unhex(&case["hex"]));
        let stricter = STRICTER.contains(&name);
        match decode_at_decode(&[&frame]) {
            Ok(ReceivedDecodeNotice::Written { transfer, writers }) => {
                // It has heard of the first writer.
                let after = &case["consumer"];
                let is_over = list(&after["written"]).iter().any(|id| text(id) == &*transfer.0);
                assert_eq!(is_over, writers == NonZeroU16::MIN, "{name}");
            }
            Ok(ReceivedDecodeNotice::Failed(transfer)) => {
                assert_eq!(text(&case["consumer"]["failed"][0]), &*transfer.0, "{name}");
            }
            Err(_) => assert!(stricter || !case["consumer"]["error"].is_null(), "{name}"),
        }
        match decode_at_prefill(&[&frame]) {
            Ok(ReceivedPrefillNotice::RemoteBlocks(notice)) => {
                let blocks = serde_json::to_value(notice.blocks()).unwrap();
                assert_eq!(case["producer"]["blocks"][&*notice.transfer().0], blocks, "{name}");
            }
            Ok(ReceivedPrefillNotice::Release(release)) => {
                let acks = serde_json::json!([[release.transfer(), release.consumer_tp()]]);
                assert_eq!(case["producer"]["released"], acks, "{name}");
            }
            Ok(ReceivedPrefillNotice::Unusable { .. }) => assert!(stricter, "{name}"),
            Err(_) => assert!(stricter || !case["producer"]["error"].is_null(), "{name}"),
        }
    }
    assert_eq!(list(&captured["corpus"]).len(), 17);
}
