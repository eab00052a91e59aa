//! What the allocator of vLLM-Omni's MoRI connector did (`BufferAllocator` of 0.30.0, recorded in
//! `allocator_trace.json`), done by ours.

use kvferry_engine::core::payload::pool::{AllocateError, PayloadPool};
use serde_json::Value;
use std::collections::BTreeMap;

#[test]
fn a_recorded_run_of_the_mori_connectors_allocator_goes_the_same_way() {
    let trace: Value = serde_json::from_str(include_str!("allocator_trace.json")).unwrap();
    let number = |value: &Value| value.as_u64().unwrap();
    let mut pool = PayloadPool::new(number(&trace["total_size"]));
    let mut ranges = BTreeMap::new();
    let mut steps = 0;
    for step in trace["steps"].as_array().unwrap() {
        let args: Vec<u64> = step["args"].as_array().unwrap().iter().map(number).collect();
        match (step["op"].as_str().unwrap(), &args[..]) {
            ("alloc", [bytes]) => match (pool.allocate(*bytes), &step["result"]) {
                (Ok(range), offset) => {
                    assert_eq!(range.offset(), number(offset), "{step}");
                    ranges.insert((range.offset(), *bytes), range);
                }
                (Err(error), result) => {
                    assert_eq!(result, "MemoryError");
                    assert!(matches!(error, AllocateError::NoRoom { .. }), "{step}");
                }
            },
            // It warns of what was freed before.
            ("free", [offset, bytes]) => match ranges.get(&(*offset, *bytes)) {
                Some(range) => {
                    let before = pool.free_bytes();
                    let freed = pool.free(*range).is_ok();
                    assert_eq!(freed, pool.free_bytes() > before, "{step}");
                }
                // What was never allocated cannot be said.
                None => assert_eq!(step["result"], "RuntimeError"),
            },
            other => panic!("{other:?}"),
        }
        let holes = step["free_blocks"].as_array().unwrap().iter();
        let sizes: Vec<u64> = holes.map(|hole| number(&hole[1])).collect();
        let free = (sizes.iter().sum::<u64>(), sizes.iter().max().copied().unwrap_or(0));
        assert_eq!((pool.free_bytes(), pool.largest()), free, "{step}");
        steps += 1;
    }
    assert_eq!(steps, 13);
}
