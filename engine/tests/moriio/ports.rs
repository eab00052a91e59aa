//! Ports, ranks and acknowledgements.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::ports::*;
use kvferry_engine::core::layout::Mismatch;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const DIALS: [DialPurpose; 5] = [
    DialPurpose::Handshake,
    DialPurpose::RemoteBlocks,
    DialPurpose::EarlyRelease,
    DialPurpose::Release,
    DialPurpose::WriteDone,
];

/// A number, or that there is none.
fn verdict(result: Result<u16, Mismatch>) -> Value {
    result.map_or(json!("error"), |number| json!(number))
}

fn expected(out: &Value) -> Value {
    if out.is_string() { json!("error") } else { out.clone() }
}

#[test]
fn the_rank_tables_are_those_of_vllm() {
    let fixture = load("rank_and_port_math");
    for case in list(&fixture["get_port_offset(dp,tp,tp_size=1)"]) {
        let args: Vec<u16> = list(&case["args"]).iter().map(number).collect();
        let tp_size = args.get(2).copied().unwrap_or(1);
        assert_eq!(case["out"], port_offset(args[0], args[1], tp_size), "{case}");
    }
    for case in list(&fixture["fold_local_rank"]) {
        assert_eq!(case["out"], fold(number(&case["args"][0]), number(&case["args"][1])), "{case}");
    }
    for case in list(&fixture["pod_index"]) {
        assert_eq!(
            case["out"],
            pod_of(number(&case["args"][0]), number(&case["args"][1])),
            "{case}"
        );
    }
    for case in list(&fixture["remote_tp_rank"]) {
        let (rank, local) = (number(&case["local_rank"]), number(&case["local_tp"]));
        let out = remote_tp_rank(rank, local, number(&case["remote_tp"]));
        assert_eq!(verdict(out), expected(&case["out"]), "{case}");
    }
    for case in list(&fixture["expected_acks"]) {
        let out = expected_acks(number(&case["producer_tp"]), number(&case["consumer_tp"]));
        assert_eq!(verdict(out), expected(&case["out"]), "{case}");
    }
    for case in list(&fixture["kv_head_guard"]) {
        let (local, remote) = (number(&case["local_tp"]), number(&case["remote_tp"]));
        let out = check_heads(local, remote, number(&case["kv_heads"]), case["mla"] == true);
        assert_eq!(out.is_ok(), case["out"].is_null(), "{case}");
    }
}

#[test]
fn an_unknown_size_is_the_own_one() {
    assert_eq!(remote_tp_rank(3, 4, 0), Ok(3));
    assert!(remote_tp_rank(0, 0, 0).is_err());
    assert!(remote_tp_rank(4, 4, 8).is_err());
}

#[test]
fn legacy_listeners_collide_as_those_of_vllm() {
    let collisions = &load("rank_and_port_math")["bind_collisions_dp2_tp2"];
    let shape = ParallelSizes { dp_size_local: 2, tp_size: 2 };
    for (dp, tp) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        let offset = PortFormula::Legacy.listen(shape, dp, tp).unwrap();
        assert_eq!(collisions[format!("dp{dp}tp{tp}")], offset);
    }
}

#[test]
fn legacy_diallers_look_where_those_of_vllm_look() {
    let peer = ParallelSizes { dp_size_local: 8, tp_size: 4 };
    let dial = |what| PortFormula::Legacy.dial(what, peer, 10, 3).unwrap();
    assert_eq!(DIALS.map(dial), [43, 5, 13, 43, 5]);
    let unknown = ParallelSizes { dp_size_local: 0, tp_size: 0 };
    let dial = |what| PortFormula::Legacy.dial(what, unknown, 10, 3).unwrap();
    assert_eq!(DIALS.map(dial), [3, 13, 13, 3, 13]);
    assert_eq!((peer.tp_size_or(2), unknown.tp_size_or(2)), (4, 2));
}

#[test]
fn a_port_is_a_port_or_none() {
    assert_eq!(port(6301, 3), Some(6304));
    assert_eq!(port(-1, 2), Some(1));
    for (base, offset) in [(0, 0), (-1, 1), (65535, 1), (99999, 0), (i64::MAX, u32::MAX)] {
        assert_eq!(port(base, offset), None);
    }
}

proptest! {
    #[test]
    fn injective_ports_differ_and_are_dialled_where_they_listen(
        dp_size in 1..9_u16,
        tp_size in 1..9_u16,
        pods in 1..4_u16,
        what in prop::sample::select(&DIALS[..]),
    ) {
        let shape = ParallelSizes { dp_size_local: dp_size, tp_size };
        let formula = PortFormula::Injective;
        let mut seen = BTreeSet::new();
        for dp in 0..dp_size * pods {
            for tp in 0..tp_size {
                let offset = formula.listen(shape, dp, tp).unwrap();
                prop_assert_eq!(formula.dial(what, shape, dp, tp), Ok(offset));
                prop_assert!(seen.insert((pod_of(dp, dp_size), offset)));
                prop_assert!(offset < u32::from(dp_size * tp_size));
            }
            prop_assert!(formula.listen(shape, dp, tp_size).is_err());
            let unknown = ParallelSizes { tp_size: 0, ..shape };
            prop_assert!(formula.dial(what, unknown, dp, 0).is_err());
        }
    }

    #[test]
    fn legacy_handshakes_arrive_only_without_dp_or_without_tp(
        dp in 0..9_u16,
        tp in 0..9_u16,
        tp_size in 0..9_u16,
    ) {
        let shape = ParallelSizes { dp_size_local: 0, tp_size };
        let listens = PortFormula::Legacy.listen(shape, dp, tp);
        let dialled = PortFormula::Legacy.dial(DialPurpose::Handshake, shape, dp, tp);
        prop_assert_eq!(listens == dialled, dp == 0 || tp_size == 1);
    }

    #[test]
    fn every_decode_rank_reads_from_some_prefill_rank(
        prefill in 1..65_u16,
        decode in 1..65_u16,
    ) {
        match expected_acks(prefill, decode) {
            Ok(acks) if prefill.is_multiple_of(decode) || decode.is_multiple_of(prefill) => {
                let mut heard = vec![0; usize::from(prefill)];
                for rank in 0..decode {
                    heard[usize::from(remote_tp_rank(rank, decode, prefill).unwrap())] += 1;
                }
                prop_assert!(heard.iter().all(|count| *count == acks || *count == 0));
                prop_assert_eq!(heard.contains(&0), decode < prefill);
            }
            _ => prop_assert!(remote_tp_rank(0, decode, prefill).is_err()),
        }
    }
}
