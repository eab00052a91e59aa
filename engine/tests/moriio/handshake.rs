//! The handshake's request and its two replies.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::frame_kind::{MoriioFrameKind, form};
use kvferry_engine::core::dialect::moriio::handshake::*;
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::Value;
use std::sync::Arc;

pub(crate) fn metadata_of(decoded: &Value) -> AgentMetadata {
    AgentMetadata {
        engine_id: text(&decoded["engine_id"]).into(),
        engine: unhex(&decoded["agent_metadata"]).into(),
        base_addrs: list(&decoded["kv_caches_base_addr"])
            .iter()
            .map(|base| base.as_u64().unwrap())
            .collect(),
        num_blocks: number(&decoded["num_blocks"]),
        block_len: number(&decoded["block_len"]),
        attn_backend: text(&decoded["attn_backend_name"]).into(),
        layouts: CacheLayouts::default(),
        native: false,
    }
}

/// Layers under these names, in this order, with regions in hex.
fn layers_of(names: &[&str], regions: &Value) -> LayerMemory {
    let layer = |name: &&str| LayerRegions {
        name: (*name).into(),
        regions: parts(&regions[*name]).into_iter().map(Arc::from).collect(),
    };
    LayerMemory(names.iter().map(layer).collect())
}

#[test]
fn the_request_is_that_of_vllm_and_nothing_else_is_one() {
    let sent = parts(&load("handshake_request")["frames_as_sent_by_dealer"]);
    assert_eq!(sent, [REQUEST]);
    assert_eq!(decode_call(&sent), Ok(HandshakeRequest::Metadata));
    assert_eq!(form(&sent), Some(MoriioFrameKind::Call));
    assert_eq!(form(&[b"", REQUEST]), None);
    assert_eq!(decode_call(&[b"pop_done_recv"]), Ok(HandshakeRequest::DoneRecv));
    let bad = load("handshake_listener_bad_message");
    assert_eq!(bad["listener_thread_alive_after"], false);
    let error = decode_call(&[unhex(&bad["sent_hex"])]).unwrap_err();
    assert_eq!(error.to_string(), "unknown call in handshake");
    assert_eq!(load("handshake_listener_req_socket")["listener_thread_alive_after"], false);
    let error = decode_call(&[b"", REQUEST]).unwrap_err();
    assert_eq!(error.to_string(), "not one part in handshake");
}

#[test]
fn replies_are_written_and_read_as_by_vllm() {
    let first = load("handshake_reply_1_agent_metadata");
    let second = load("handshake_reply_2_layer_memory");
    let names: Vec<&str> = list(&second["decoded_keys"]).iter().map(text).collect();
    let mut replies = vec![(
        parts(&first["frames_as_seen_by_dealer"]),
        metadata_of(&first["decoded"]),
        parts(&second["frames_as_seen_by_dealer"]),
        layers_of(&names, &second["memory_desc_hex"]),
    )];
    let attention = |n| format!("model.layers.{n}.self_attn.attn");
    let names = [attention(0), attention(1), attention(2)];
    let names = names.each_ref().map(|name| &**name);
    for (flow, connection) in [
        ("flow_read", "P.handshake#1 listener_to_client"),
        ("flow_write", "D.handshake#1 listener_to_client"),
    ] {
        let messages = &load(flow)["messages_by_connection"][connection];
        replies.push((
            parts(&messages[1]["message_frames_hex"]),
            metadata_of(&messages[1]["decoded"]),
            parts(&messages[2]["message_frames_hex"]),
            layers_of(&names, &messages[2]["decoded"]),
        ));
    }
    for (first, metadata, second, layers) in replies {
        assert_eq!(metadata.encode(), first[..]);
        let forms = [form(&first), form(&second)];
        assert_eq!(forms, [Some(MoriioFrameKind::Metadata), Some(MoriioFrameKind::Memory)]);
        assert_eq!(AgentMetadata::decode(&first), Ok(metadata));
        assert_eq!(layers.encode(), second[..]);
        assert_eq!(LayerMemory::decode(&second), Ok(layers));
        assert!(AgentMetadata::decode(&first[1..]).is_err());
        assert!(LayerMemory::decode(&[&second[1], &second[1]]).is_err());
    }
}

#[test]
fn the_metadata_corpus_gets_its_verdicts() {
    let corpus = load("agent_metadata_decoder_corpus");
    for case in list(&corpus["cases"]) {
        let name = text(&case["name"]);
        let decoded = AgentMetadata::decode(&[Vec::new(), unhex(&case["hex"])]);
        match case.get("ok") {
            Some(ok) => assert_eq!(decoded, Ok(metadata_of(ok)), "{name}"),
            None => {
                let error = decoded.expect_err(name);
                // vLLM names the field as `name` or as `$.name`.
                let field = error.rule.split(' ').next().unwrap();
                let whole = ["not", "bytes"].contains(&field);
                assert!(whole || text(&case["error"]).contains(field), "{name}: {error}");
            }
        }
    }
    assert_eq!(list(&corpus["cases"]).len(), 12);
}

#[test]
fn a_layer_is_named_once() {
    let layer = LayerRegions { name: "a".into(), regions: vec![Arc::from(*b"x")] };
    let twice = LayerMemory(vec![layer.clone(), layer]).encode();
    assert_eq!(&*LayerMemory::decode(&twice).unwrap_err().rule, "layer named twice");
}

fn layouts() -> impl Strategy<Value = CacheLayouts> {
    let numbers = || proptest::collection::btree_map(any_text(), vec(any::<i64>(), 0..9), 0..4);
    let sizes = proptest::collection::btree_map(any_text(), any::<i64>(), 0..4);
    (numbers(), numbers(), sizes).prop_map(|(heads, states, sizes)| CacheLayouts {
        heads: heads.into_iter().collect(),
        states: states.into_iter().collect(),
        block_sizes: sizes.into_iter().collect(),
    })
}

fn metadata() -> impl Strategy<Value = AgentMetadata> {
    let numbers = (vec(any::<u64>(), 0..80), any::<i64>(), any::<i64>());
    let texts = (any_text(), any_bytes(), any_text());
    (texts, numbers, layouts(), any::<bool>()).prop_map(|(texts, numbers, layouts, native)| {
        let (engine_id, engine, attn_backend) = texts;
        let (base_addrs, num_blocks, block_len) = numbers;
        AgentMetadata {
            engine_id,
            engine,
            base_addrs,
            num_blocks,
            block_len,
            attn_backend,
            layouts,
            native,
        }
    })
}

fn layers() -> impl Strategy<Value = LayerMemory> {
    let layers = proptest::collection::btree_map(any_text(), vec(any_bytes(), 0..3), 0..20);
    layers.prop_map(|layers| {
        let layer = |(name, regions)| LayerRegions { name, regions };
        LayerMemory(layers.into_iter().rev().map(layer).collect())
    })
}

proptest! {
    #[test]
    fn replies_round_trip(metadata in metadata(), layers in layers()) {
        prop_assert_eq!(AgentMetadata::decode(&metadata.encode()), Ok(metadata));
        prop_assert_eq!(LayerMemory::decode(&layers.encode()), Ok(layers));
    }

    #[test]
    fn any_reply_is_survived(
        bytes in hostile(vec![
            parts(&load("handshake_reply_1_agent_metadata")["frames_as_seen_by_dealer"]).remove(1),
            parts(&load("handshake_reply_2_layer_memory")["frames_as_seen_by_dealer"]).remove(1),
        ]),
    ) {
        let parts = [Vec::new(), bytes];
        if let Ok(metadata) = AgentMetadata::decode(&parts) {
            prop_assert_eq!(AgentMetadata::decode(&metadata.encode()), Ok(metadata));
        }
        if let Ok(layers) = LayerMemory::decode(&parts) {
            prop_assert_eq!(LayerMemory::decode(&layers.encode()), Ok(layers));
        }
        let _ = decode_call(&parts[1..]);
    }
}
