//! MoRI's descriptors.

use crate::fixture::*;
use kvferry_engine::core::dialect::moriio::descriptor::*;
use proptest::prelude::*;
use serde_json::Value;
use std::sync::Arc;

fn engine_of(fields: &Value) -> MoriEngineDesc {
    MoriEngineDesc {
        key: text(&fields[0]).into(),
        node_id: text(&fields[1]).into(),
        hostname: text(&fields[2]).into(),
        host: text(&fields[3]).into(),
        port: number(&fields[4]),
        pid: number(&fields[5]),
    }
}

fn memory_of(fields: &Value) -> MoriMemoryDesc {
    let handle = |field: &Value| unhex(field).try_into().unwrap();
    MoriMemoryDesc {
        engine_key: text(&fields[0]).into(),
        id: number(&fields[1]),
        device_id: number(&fields[2]),
        device_bus_id: text(&fields[3]).into(),
        data: number(&fields[4]),
        size: number(&fields[5]),
        loc: number(&fields[6]),
        ipc_handle: handle(&fields[7]),
        numa_node: number(&fields[8]),
        ipc_offset: number(&fields[9]),
        fabric_handle: handle(&fields[10]),
        vpod_id: number(&fields[11]),
        vpod_ppod_id: text(&fields[12]).into(),
        fabric_offset: number(&fields[13]),
        fabric_alloc_size: number(&fields[14]),
    }
}

#[test]
fn descriptors_are_written_and_read_as_by_mori() {
    let fixture = load("mori_descriptors");
    let bytes = unhex(&fixture["engine_desc"]["hex"]);
    let engine = engine_of(&fixture["engine_desc"]["decoded"]);
    assert_eq!(engine.encode(DescLayout::V1_2_2), bytes);
    assert_eq!(MoriEngineDesc::decode(&bytes), Ok(engine));
    for (name, loc) in
        [("memory_desc_gpu", MoriMemoryDesc::LOC_GPU), ("memory_desc_cpu", MoriMemoryDesc::LOC_CPU)]
    {
        let bytes = unhex(&fixture[name]["hex"]);
        let memory = memory_of(&fixture[name]["decoded"]);
        assert_eq!(memory.loc, loc);
        assert_eq!(memory.encode(DescLayout::V1_2_2), bytes);
        assert_eq!(MoriMemoryDesc::decode(&bytes), Ok((DescLayout::V1_2_2, memory)));
    }
}

/// Written by MoRI itself (624002c8): 64 KiB of host memory of the engine `k`, and an engine.
#[test]
fn bytes_of_mori_itself_are_equal() {
    let memory = MoriMemoryDesc {
        engine_key: "k".into(),
        data: 0x5624_4056_f930,
        size: 64 << 10,
        loc: MoriMemoryDesc::LOC_CPU,
        numa_node: 0,
        ..MoriMemoryDesc::default()
    };
    let zeros = "00".repeat(64);
    let hex =
        format!("9fa16b00ffa0cf000056244056f930ce0001000001c440{zeros}0000c440{zeros}ffa00000");
    assert_eq!(memory.encode(DescLayout::V1_2_2), unhex(&hex.into()));
    let engine = MoriEngineDesc {
        key: "k".into(),
        node_id: "n".repeat(36).into(),
        hostname: "vm".into(),
        host: "127.0.0.1".into(),
        port: 0,
        pid: 2187,
    };
    let hex = format!("96a16bd924{}a2766da93132372e302e302e3100cd088b", "6e".repeat(36));
    assert_eq!(engine.encode(DescLayout::V1_2_2), unhex(&hex.into()));
}

#[test]
fn layouts_have_the_fields_of_their_releases() {
    let (engine, memory) = (MoriEngineDesc::default(), MoriMemoryDesc::default());
    let counts = [(4, 6), (5, 7), (6, 8), (6, 9), (6, 14), (6, 15)];
    for (layout, (of_engine, of_memory)) in DescLayout::ALL.iter().zip(counts) {
        assert_eq!(engine.encode(*layout)[0], 0x90 | of_engine, "{layout:?}");
        assert_eq!(memory.encode(*layout)[0], 0x90 | of_memory, "{layout:?}");
    }
}

#[test]
fn shorter_arrays_leave_defaults_and_longer_ones_are_cut() {
    let full = engine_of(&load("mori_descriptors")["engine_desc"]["decoded"]);
    // Without port and process id, then without anything.
    let mut bytes = full.encode(DescLayout::V1_2_2);
    bytes.truncate(bytes.len() - 6);
    bytes[0] = 0x94;
    let cut = MoriEngineDesc { port: 0, pid: 0, ..full.clone() };
    assert_eq!(MoriEngineDesc::decode(&bytes), Ok(cut));
    assert_eq!(MoriEngineDesc::decode(&[0x90]), Ok(MoriEngineDesc::default()));
    let named =
        MoriEngineDesc { key: "k".into(), node_id: "n".into(), ..MoriEngineDesc::default() };
    let named = MoriEngineDesc { hostname: "h".into(), ..named };
    assert_eq!(MoriEngineDesc::decode(&[0x93, 0xa1, b'k', 0xa1, b'n', 0xa1, b'h']), Ok(named));
    let mut bytes = full.encode(DescLayout::V1_2_2);
    bytes.extend([0xa1, b'x', 0xc0]);
    bytes[0] = 0x98;
    assert_eq!(MoriEngineDesc::decode(&bytes), Ok(full));

    let memory = memory_of(&load("mori_descriptors")["memory_desc_gpu"]["decoded"]);
    let mut bytes = memory.encode(DescLayout::V1_2);
    bytes[0] = 0x9a;
    bytes.extend([0xcd, 0x10, 0x00]);
    // An offset alone makes no newer layout, and is not lost.
    let decoded = MoriMemoryDesc::decode(&bytes).unwrap();
    assert_eq!((decoded.0, decoded.1.ipc_offset), (DescLayout::V1_2, 4096));
    for layout in [DescLayout::NoIpcOffset, DescLayout::V1_2_2] {
        let mut bytes = memory.encode(layout);
        bytes[0] -= 1;
        assert_eq!(MoriMemoryDesc::decode(&bytes).unwrap().0, DescLayout::V1_2);
    }
    let mut bytes = memory.encode(DescLayout::V1_2_2);
    bytes[0] = 0xdc;
    bytes.splice(1..1, [0, 16]);
    bytes.push(0x80);
    assert_eq!(MoriMemoryDesc::decode(&bytes), Ok((DescLayout::V1_2_2, memory)));
}

#[test]
fn fields_of_another_type_are_refused() {
    let error = MoriEngineDesc::decode(&[0x91, 0x01]).unwrap_err();
    assert_eq!(error.to_string(), "field that is no text in EngineDesc");
    let error = MoriMemoryDesc::decode(&[0x92, 0xa1, b'k', 0xff]).unwrap_err();
    assert_eq!(error.to_string(), "field that is no number of its width in MemoryDesc");
    assert_eq!(&*MoriMemoryDesc::decode(&[0x80]).unwrap_err().rule, "not an array");
    let mut bytes = vec![0x97, 0xa0, 0, 0xff, 0, 0, 1, 0xc4, 65];
    bytes.extend([1; 65]);
    assert_eq!(&*MoriMemoryDesc::decode(&bytes).unwrap_err().rule, "handle above 64 bytes");
}

fn engine() -> impl Strategy<Value = MoriEngineDesc> {
    let texts = (any_text(), any_text(), any_text(), any_text());
    (texts, any::<i32>(), any::<i32>()).prop_map(|((key, node_id, hostname, host), port, pid)| {
        MoriEngineDesc { key, node_id, hostname, host, port, pid }
    })
}

fn memory() -> impl Strategy<Value = MoriMemoryDesc> {
    let texts = (any_text(), any_text(), any_text());
    let wide = any::<[u64; 5]>();
    let narrow = (any::<[u32; 2]>(), any::<[i32; 3]>());
    (texts, wide, narrow, any::<[[u8; 32]; 4]>()).prop_map(|(texts, wide, narrow, handles)| {
        let handle = |at: usize| [handles[at], handles[at + 1]].concat().try_into().unwrap();
        MoriMemoryDesc {
            engine_key: texts.0,
            id: narrow.0[0],
            device_id: narrow.1[0],
            device_bus_id: texts.1,
            data: wide[0],
            size: wide[1],
            loc: narrow.0[1],
            ipc_handle: handle(0),
            numa_node: narrow.1[1],
            ipc_offset: wide[2],
            fabric_handle: handle(2),
            vpod_id: narrow.1[2],
            vpod_ppod_id: texts.2,
            fabric_offset: wide[3],
            fabric_alloc_size: wide[4],
        }
    })
}

/// The descriptor with defaults where the layout has no field.
fn masked(layout: DescLayout, mut memory: MoriMemoryDesc) -> MoriMemoryDesc {
    let default = MoriMemoryDesc::default();
    if layout < DescLayout::V0_1 {
        memory.ipc_handle = default.ipc_handle;
    }
    if layout < DescLayout::V1_1 {
        memory.device_bus_id = Arc::default();
    }
    if layout < DescLayout::V1_2 {
        memory.numa_node = default.numa_node;
    }
    if layout < DescLayout::V1_2_2 {
        memory.ipc_offset = 0;
    }
    if layout < DescLayout::NoIpcOffset {
        memory.fabric_handle = default.fabric_handle;
        memory.vpod_id = default.vpod_id;
        memory.vpod_ppod_id = Arc::default();
        memory.fabric_offset = 0;
        memory.fabric_alloc_size = 0;
    }
    memory
}

proptest! {
    #[test]
    fn descriptors_of_every_layout_round_trip(
        engine in engine(),
        memory in memory(),
        layout in prop::sample::select(DescLayout::ALL),
    ) {
        let mut expected = engine.clone();
        if layout < DescLayout::V0_1 {
            expected.node_id = Arc::default();
        }
        if layout < DescLayout::V1_1 {
            expected.pid = 0;
        }
        prop_assert_eq!(MoriEngineDesc::decode(&engine.encode(layout)), Ok(expected));
        let decoded = MoriMemoryDesc::decode(&memory.encode(layout));
        prop_assert_eq!(decoded, Ok((layout, masked(layout, memory))));
    }

    #[test]
    fn any_descriptor_is_survived(
        bytes in hostile(
            DescLayout::ALL
                .iter()
                .flat_map(|layout| {
                    let memory = memory_of(&load("mori_descriptors")["memory_desc_gpu"]["decoded"]);
                    [MoriEngineDesc::default().encode(*layout), memory.encode(*layout)]
                })
                .collect(),
        ),
    ) {
        if let Ok((layout, memory)) = MoriMemoryDesc::decode(&bytes) {
            let known = masked(layout, memory);
            prop_assert_eq!(MoriMemoryDesc::decode(&known.encode(layout)), Ok((layout, known)));
        }
        if let Ok(engine) = MoriEngineDesc::decode(&bytes) {
            let again = engine.encode(DescLayout::V1_2_2);
            prop_assert_eq!(MoriEngineDesc::decode(&again), Ok(engine));
        }
    }
}
