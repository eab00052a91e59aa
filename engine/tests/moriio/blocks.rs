//! Blocks that belong together, and the byte ranges that are planned for them.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::blocks::*;
use kvferry_engine::core::ids::BlockId;
use kvferry_engine::core::layout::*;
use kvferry_engine::fabric::{Address, RegionDesc};
use serde_json::{Value, json};
use std::sync::Arc;

fn ids(value: &Value) -> Vec<BlockId> {
    list(value).iter().map(|id| BlockId(number(id))).collect()
}

#[test]
fn reads_pair_blocks_as_vllm_does() {
    let fixture = load("read_block_alignment");
    for case in list(&fixture["cases"]) {
        let (decode, prefill) = (ids(&case["local"]), ids(&case["remote"]));
        match to_read(&decode, &prefill, number::<u16>(&case["max_tail"]).into()) {
            Ok(pair) => assert_eq!(json!(pair), case["out"], "{case}"),
            Err(_) => assert!(case["out"].is_string(), "{case}"),
        }
    }
    assert_eq!(list(&fixture["cases"]).len(), 6);
}

/// One layer of the case with this many blocks.
fn rank(case: &Value, blocks: u32) -> RankLayout {
    let [_, slots, rows, row] = [0, 1, 2, 3].map(|axis| number(&case["shape"][axis]));
    let layer = LayerLayout {
        region: 0,
        base: 0,
        shape: [blocks, slots, rows, row],
        stride: [0, 1, 2, 3].map(|axis| case["stride"][axis].as_u64().unwrap()),
        element: number(&case["element_size"]),
        slots: HeadSlots::Fused,
    };
    let address = Address(Arc::from([]));
    let regions = vec![(RegionDesc(Arc::from([])), u64::MAX >> 1)];
    RankLayout { rank: 0, address, regions, layers: vec![layer] }
}

/// The ranges `[local, remote, size]` that write the case's blocks.
fn planned(case: &Value) -> Result<Value, Mismatch> {
    let spec = &case["spec"];
    let block_tokens = number(&spec["block_size"]);
    let geometry = Geometry {
        model: "m".into(),
        tp: 1,
        kv_heads: number(&spec["num_heads"]),
        latent: spec["kind"] == "MLAAttentionSpec",
        packed: false,
        layers: 1,
        groups: vec![KvGroup { kind: GroupKind::Full, block_tokens, layers: vec![0] }],
    };
    let local = rank(case, number(&case["shape"][0]));
    let remote = [rank(case, number(&case["remote_num_blocks"]))];
    let route = routes(true, (&geometry, &local), (&geometry, &remote))?.remove(0);
    let (own, theirs) = (ids(&case["local_block_ids"]), ids(&case["remote_block_ids"]));
    let (own, theirs) = to_write(&own, &theirs)?;
    let blocks = |ids: &[BlockId]| BlockList::new(ids.iter().map(|id| id.0).collect());
    let to = block_tokens * own.len() as u32;
    let (own, theirs) = (blocks(own), blocks(theirs));
    let mut out = Slices::default();
    let span = TokenSpan { group: 0, from: 0, to, local: &own, remote: &theirs };
    route.plan(&[0], &span, &mut out)?;
    let ranges = out.local.iter().zip(&out.remote).zip(&out.len);
    let mut ranges: Vec<_> = ranges.map(|((local, remote), len)| [*local, *remote, *len]).collect();
    ranges.sort_unstable();
    Ok(json!(ranges))
}

/// The layouts of 0.32.0 itself, that is one tensor `[B, H, N, C]` per layer.
#[test]
fn writes_move_the_byte_ranges_of_vllm() {
    let mut checked = 0;
    for case in list(&load("block_offsets")["cases"]) {
        let name = text(&case["name"]);
        // A block of 64 tokens in a tensor with 16 per block is told to no planner of ours.
        if list(&case["shape"]).len() != 4 || name.contains("kernel-split") {
            continue;
        }
        checked += 1;
        match planned(case) {
            Ok(ranges) => assert_eq!(ranges, case["merged[local,remote,size]"], "{name}"),
            Err(error) => assert!(case["error"].is_string(), "{name}: {error}"),
        }
    }
    assert_eq!(checked, 12);
}
