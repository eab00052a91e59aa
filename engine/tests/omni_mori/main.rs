//! A host's payloads for connectors of MoRI: the bytes that 0.30.0 says and takes, and peers that
//! lie, hang and vanish.

mod steps;
mod world;

use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::moriio::descriptor::{
    DescLayout, MoriEngineDesc, MoriMemoryDesc,
};
use kvferry_engine::core::dialect::omni_mori::{
    ConnectorCall, PullAnswer, PullRequest, QueryAnswer,
};
use kvferry_engine::core::omni_mori::OmniMoriSettings;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeMap;
use steps::{WireStep, step};
use world::OmniMoriWorld;

/// What was recorded of 0.30.0, by name.
fn golden() -> BTreeMap<&'static str, Vec<u8>> {
    let lines = include_str!("../golden/omni-mori.txt").lines();
    let byte = |hex: &str, at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hex");
    let entry = |line: &'static str| {
        let (name, hex) = line.split_once(' ').expect("a name and bytes");
        (name, (0..hex.len()).step_by(2).map(|at| byte(hex, at)).collect())
    };
    lines.map(entry).collect()
}

#[test]
fn what_is_said_is_what_0_30_0_says() {
    let golden = golden();
    let id = "req-1_0_0@0_1";
    let long = format!("kéy-{}@0_1", "x".repeat(300));
    for (name, request_id) in [("query_request", id), ("query_request_utf8_long_key", &*long)] {
        let query = ConnectorCall::Query { request_id: request_id.into() };
        assert_eq!(query.encode(), golden[name], "{name}");
    }
    let kv = "omni_0_to_1_kv_cache_r@0_1";
    for (name, request_id, data_size, is_fast_path) in [
        ("query_response_fast", id, 3_305, true),
        ("query_response_serialized", id, 1_611_882, false),
        ("query_response_5gib", kv, 5_368_709_120, true),
    ] {
        let answer = QueryAnswer::Found { request_id: request_id.into(), data_size, is_fast_path };
        assert_eq!(answer.encode(), golden[name], "{name}");
    }
    assert_eq!(QueryAnswer::NotFound.encode(), golden["info_not_found"]);
    assert_eq!(PullAnswer::Done.encode(), golden["trans_done"]);
    assert_eq!(PullAnswer::Failed("".into()).encode(), golden["trans_error"]);
    let engine: std::sync::Arc<[u8]> = golden["engine_desc_packed"][..].into();
    let memory: std::sync::Arc<[u8]> = golden["mem_desc_packed_cpu_pool"][..].into();
    for (name, dst_offset, length) in [
        ("pull_request_small", 0, 3_305),
        ("pull_request_mid", 4_096, 1_611_882),
        ("pull_request_end_of_pool", 1_073_737_728, 1),
        ("pull_request_over_4gib", 4_294_967_296, 5_368_709_120),
    ] {
        let (request_id, engine, memory) = (id.into(), engine.clone(), memory.clone());
        let pull = PullRequest { request_id, engine, memory, dst_offset, length };
        assert_eq!(ConnectorCall::Pull(pull).encode(), golden[name], "{name}");
    }
}

#[test]
fn what_0_30_0_says_is_understood() {
    let mut read = 0;
    for (name, bytes) in golden() {
        let parts = [&[][..], &bytes];
        let again = if name.contains("_desc_") {
            continue;
        } else if name.ends_with("_req") || name.contains("request") {
            ConnectorCall::decode(&parts).map(|call| call.encode())
        } else if name.contains("trans_") || bytes.starts_with(b"trans_") {
            PullAnswer::decode(&parts).map(|answer| answer.encode())
        } else {
            QueryAnswer::decode(&parts).map(|answer| answer.encode())
        };
        assert_eq!(again.as_ref(), Ok(&bytes), "{name}");
        read += 1;
    }
    assert_eq!(read, 24);
    let (engine, memory) = (&golden()["engine_desc_packed"], &golden()["mem_desc_packed_cpu_pool"]);
    let engine = MoriEngineDesc::decode(engine).expect("an engine");
    let (layout, memory) = MoriMemoryDesc::decode(memory).expect("memory");
    assert_eq!((layout, memory.size), (DescLayout::V1_2_2, 1 << 30));
    assert_eq!(memory.engine_key, engine.key);
}

#[test]
fn what_is_no_message_is_refused_by_name() {
    let query = |body: &[u8]| ConnectorCall::decode(&[&b""[..], &[b"query_info", body].concat()]);
    for (body, rule) in [
        (&b""[..], "in query"),
        (b"\x91\xa1r", "not a map"),
        (b"\x81\xaarequest_id\x05", "request_id missing or no text"),
        (b"\x81\xa1x\x05", "request_id missing or no text"),
        (b"\x81\xaarequest_id\xa1r\x00", "bytes after the end"),
    ] {
        let why = query(body).expect_err("no query").to_string();
        assert!(why.contains(rule), "{why}");
    }
    // Other keys, and another order, are no matter.
    let call = query(b"\x82\xa1x\x05\xaarequest_id\xa1r");
    assert_eq!(call, Ok(ConnectorCall::Query { request_id: "r".into() }));
    assert!(ConnectorCall::decode(&[b"query_info"]).is_err(), "no empty part");
    assert!(ConnectorCall::decode(&[&b""[..], &vec![0; 65_537]]).is_err(), "too long");
    let negative =
        b"\x85\xaarequest_id\xa1r\xb2engine_desc_packed\xc4\x00\xafmem_desc_packed\xc4\x00\
        \xaadst_offset\xff\xa6length\x01";
    let why = ConnectorCall::decode(&[&b""[..], negative]).expect_err("no offset").to_string();
    assert!(why.contains("dst_offset"), "{why}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 768, ..ProptestConfig::default() })]

    #[test]
    fn no_byte_is_where_it_was_not_offered_and_no_slot_is_lost(steps in vec(step(), 1..220)) {
        let mut world = OmniMoriWorld::new();
        for step in steps {
            world.step(step);
        }
        world.finish();
    }
}

#[test]
fn payload_is_one_operation_by_default() {
    let mut world = OmniMoriWorld::with(OmniMoriSettings::default());
    for step in [
        WireStep::Put { key: 0, bytes: 12_000, usable: true },
        WireStep::LinkUp { link: 0 },
        WireStep::Pull { link: 0, key: 0, engine: 0, dst: 64, lie: 0 },
        WireStep::Opens { ok: true },
        WireStep::Deliver,
        WireStep::Completes { op: 0, how: 0 },
        WireStep::Deliver,
    ] {
        world.step(step);
    }
    assert_eq!(world.pulled, 1);
    world.finish();
}

/// A receiver that has waited in vain comes back, and gets it.
#[test]
fn a_payload_waits_for_a_receiver_whose_connection_was_lost() {
    for is_lost_before_done in [true, false] {
        let mut world = OmniMoriWorld::new();
        for step in [
            WireStep::Put { key: 0, bytes: 500, usable: true },
            WireStep::LinkUp { link: 0 },
            WireStep::Query { link: 0, key: 0 },
            WireStep::Pull { link: 0, key: 0, engine: 0, dst: 64, lie: 0 },
            WireStep::Opens { ok: true },
            WireStep::Deliver,
        ] {
            world.step(step);
        }
        if is_lost_before_done {
            world.step(WireStep::LinkDown { link: 0 });
        }
        world.step(WireStep::Completes { op: 0, how: 0 });
        world.step(WireStep::Deliver);
        assert_eq!(world.pulled, u32::from(!is_lost_before_done));
        // The answer may have been lost with the connection.
        world.step(WireStep::LinkDown { link: 0 });
        world.step(WireStep::Wait { ms: 5_000 });
        world.step(WireStep::LinkUp { link: 1 });
        if !is_lost_before_done {
            world.step(WireStep::Pull { link: 1, key: 0, engine: 1, dst: 0, lie: 0 });
            assert_eq!(world.refused, ["trans_error: another receiver has it"]);
        }
        for step in [
            WireStep::Pull { link: 1, key: 0, engine: 0, dst: 128, lie: 0 },
            WireStep::Completes { op: 0, how: 0 },
            WireStep::Deliver,
        ] {
            world.step(step);
        }
        assert_eq!(world.pulled, 1 + u32::from(!is_lost_before_done));
        world.finish();
    }
}

/// A receiver pulls once more what it has, by another connection, and uses the first one meanwhile.
#[test]
fn a_slot_that_is_written_again_is_not_free() {
    let mut world = OmniMoriWorld::new();
    let pull = |link| WireStep::Pull { link, key: 0, engine: 0, dst: 64, lie: 0 };
    for step in [
        WireStep::Put { key: 0, bytes: 500, usable: true },
        WireStep::LinkUp { link: 0 },
        WireStep::LinkUp { link: 1 },
        pull(0),
        WireStep::Opens { ok: true },
        WireStep::Deliver,
        WireStep::Completes { op: 0, how: 0 },
        WireStep::Deliver,
        pull(1),
        WireStep::Query { link: 0, key: 1 },
        // It would take the place.
        WireStep::Put { key: 1, bytes: 500, usable: true },
        WireStep::Completes { op: 0, how: 0 },
        WireStep::Deliver,
    ] {
        world.step(step);
    }
    assert_eq!(world.pulled, 2);
    world.finish();
}

/// A write that never ends keeps its slot, and stops nobody else.
#[test]
fn a_receiver_that_hangs_stops_nobody() {
    let mut world = OmniMoriWorld::new();
    for key in [0, 1] {
        world.step(WireStep::Put { key, bytes: 500, usable: true });
        world.step(WireStep::LinkUp { link: key });
    }
    world.step(WireStep::Pull { link: 0, key: 0, engine: 0, dst: 0, lie: 0 });
    world.step(WireStep::Opens { ok: true });
    world.step(WireStep::Deliver);
    world.step(WireStep::Pull { link: 1, key: 1, engine: 1, dst: 0, lie: 0 });
    world.step(WireStep::Opens { ok: true });
    world.step(WireStep::Deliver);
    world.step(WireStep::Completes { op: 1, how: 0 });
    world.step(WireStep::Deliver);
    assert_eq!((world.pulled, world.refused.len()), (1, 0));
    world.step(WireStep::Wait { ms: Nanos::from_secs(31).0 / 1_000_000 });
    assert_eq!(world.refused, ["trans_error: the write takes too long"]);
    // It is not for others, who would have others take its place: its bytes may land yet.
    world.step(WireStep::Fetch { key: 0, sender: 0 });
    world.step(WireStep::Wait { ms: 11_000 });
    for _ in 0..20 {
        world.step(WireStep::Put { key: 2, bytes: 500, usable: true });
    }
    world.step(WireStep::Completes { op: 0, how: 0 });
    world.finish();
}

/// The same of a write that failed, as long as it is not known that it is over.
#[test]
fn a_write_that_failed_may_go_on() {
    let mut world = OmniMoriWorld::new();
    for step in [
        WireStep::Put { key: 0, bytes: 500, usable: true },
        WireStep::LinkUp { link: 0 },
        WireStep::Pull { link: 0, key: 0, engine: 0, dst: 0, lie: 0 },
        WireStep::Opens { ok: true },
        WireStep::Deliver,
        WireStep::Completes { op: 0, how: 3 },
        WireStep::Deliver,
        WireStep::Fetch { key: 0, sender: 0 },
        WireStep::Wait { ms: 11_000 },
        WireStep::Put { key: 1, bytes: 500, usable: true },
        WireStep::Completes { op: 0, how: 0 },
    ] {
        world.step(step);
    }
    assert!(world.refused.is_empty(), "{:?}", world.refused);
    world.step(WireStep::Completes { op: 0, how: 1 });
    world.step(WireStep::Deliver);
    assert_eq!(world.refused, ["trans_error: the write failed: queue pair error"]);
    world.finish();
}

#[test]
fn what_crossed_with_its_abandonment_is_nobody_s() {
    let mut world = OmniMoriWorld::new();
    for step in [
        WireStep::LinkUp { link: 0 },
        WireStep::Query { link: 0, key: 0 },
        WireStep::Delay { delay: true },
        WireStep::Put { key: 0, bytes: 500, usable: true },
        // Receivers seem to ask no more, and a process of this host gets it.
        WireStep::Wait { ms: 11_000 },
        WireStep::Fetch { key: 0, sender: 0 },
        WireStep::Query { link: 0, key: 0 },
        WireStep::Delay { delay: false },
        WireStep::Pull { link: 0, key: 0, engine: 0, dst: 0, lie: 0 },
    ] {
        world.step(step);
    }
    assert_eq!(world.refused, ["trans_error: another receiver has it"]);
    world.finish();
}

/// Who waits for a sender that is not there is told, and not before it was tried for a while.
#[test]
fn a_sender_that_cannot_be_reached_is_an_outcome() {
    let mut world = OmniMoriWorld::new();
    world.step(WireStep::Fetch { key: 0, sender: 0 });
    for tenths in 0..=105 {
        assert_eq!(world.missing.is_empty(), tenths <= 100, "{tenths}");
        world.step(WireStep::Dialled { link: 0, up: false });
        world.step(WireStep::Wait { ms: 100 });
    }
    assert_eq!(world.missing.len(), 1);
    assert!(world.missing[0].contains("tcp://sender:1 cannot be reached"), "{:?}", world.missing);
    world.finish();
}

/// Whoever waits long may see a sender fail often, as long as it answers between.
#[test]
fn failures_with_an_answer_between_end_no_fetch() {
    let (mut world, tries) = (OmniMoriWorld::new(), OmniMoriSettings::default().tries_max);
    world.step(WireStep::Fetch { key: 0, sender: 0 });
    world.step(WireStep::Dialled { link: 0, up: true });
    let [impossible_size, not_found] = [4, 3];
    let says = |world: &mut OmniMoriWorld, how| {
        world.step(WireStep::SenderSays { link: 0, how });
        world.step(WireStep::Wait { ms: 100 });
    };
    for _ in 0..tries + 2 {
        (1..tries).for_each(|_| says(&mut world, impossible_size));
        says(&mut world, not_found);
    }
    assert!(world.missing.is_empty(), "{:?}", world.missing);
    (0..tries).for_each(|_| says(&mut world, impossible_size));
    assert_eq!(world.missing.len(), 1);
    world.finish();
}

#[test]
fn what_is_wrong_with_a_pull_is_said() {
    let mut world = OmniMoriWorld::new();
    world.step(WireStep::Put { key: 0, bytes: 500, usable: true });
    world.step(WireStep::LinkUp { link: 0 });
    for (key, lie) in [(1, 0), (0, 1), (0, 3), (0, 5), (0, 6)] {
        world.step(WireStep::Pull { link: 0, key, engine: 0, dst: 0, lie });
    }
    world.step(WireStep::Garbage { link: 0, bytes: b"query_info\x91\xa1r".to_vec() });
    let expected = [
        "trans_error: there is no such payload, or not yet",
        "trans_error: length 501, the payload has 500 bytes",
        "trans_error: dst_offset 1099511627776 and length 500 are not within the region of 32768 bytes",
        "trans_error: the region is of another engine",
        "trans_error: engine_desc_packed: not an array in EngineDesc",
        "trans_error: not a map in query",
    ];
    assert_eq!(world.refused, expected);
    world.finish();
}

/// Thousands of connections and keys are asked by nobody who is known.
#[test]
fn many_strangers_take_no_more_room_than_there_is() {
    let mut world = OmniMoriWorld::new();
    world.step(WireStep::Put { key: 0, bytes: 500, usable: true });
    world.strangers(3_000, 9_000);
    let gauges = world.gauges();
    assert!(gauges.links <= 1_024, "{gauges:?}");
    assert!(gauges.entries <= 4_096 + 1_024, "{gauges:?}");
    world.finish();
}
