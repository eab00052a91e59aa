//! MoRI's descriptors: what decodes is written in every layout and read back, less what the layout
//! lacks.

use kvferry_engine::core::dialect::moriio::descriptor::{
    DescLayout, MoriEngineDesc, MoriMemoryDesc,
};

/// Decodes the bytes as either descriptor.
///
/// # Panics
/// If a field changes on its way through a layout that has it, or the layout is not found again.
pub fn run(data: &[u8]) {
    if let Ok(desc) = MoriEngineDesc::decode(data) {
        for layout in DescLayout::ALL {
            let again = MoriEngineDesc::decode(&desc.encode(*layout));
            assert_eq!(again, Ok(engine_in(*layout, &desc)), "{layout:?}");
        }
    }
    if let Ok((found, desc)) = MoriMemoryDesc::decode(data) {
        for layout in DescLayout::ALL {
            let again = MoriMemoryDesc::decode(&desc.encode(*layout));
            let expected = memory_in(*layout, &desc);
            assert_eq!(again, Ok((*layout, expected)), "found {found:?}");
        }
    }
}

/// What is left of an engine in a layout.
fn engine_in(layout: DescLayout, desc: &MoriEngineDesc) -> MoriEngineDesc {
    let mut desc = desc.clone();
    if layout < DescLayout::V0_1 {
        desc.node_id = "".into();
    }
    if layout < DescLayout::V1_1 {
        desc.pid = 0;
    }
    desc
}

/// What is left of memory in a layout.
fn memory_in(layout: DescLayout, desc: &MoriMemoryDesc) -> MoriMemoryDesc {
    let (mut desc, blank) = (desc.clone(), MoriMemoryDesc::default());
    if layout < DescLayout::V0_1 {
        desc.ipc_handle = blank.ipc_handle;
    }
    if layout < DescLayout::V1_1 {
        desc.device_bus_id = blank.device_bus_id;
    }
    if layout < DescLayout::V1_2 {
        desc.numa_node = blank.numa_node;
    }
    if layout < DescLayout::V1_2_2 {
        desc.ipc_offset = blank.ipc_offset;
    }
    if layout < DescLayout::NoIpcOffset {
        desc.fabric_handle = blank.fabric_handle;
        desc.vpod_id = blank.vpod_id;
        desc.vpod_ppod_id = blank.vpod_ppod_id;
        desc.fabric_offset = blank.fabric_offset;
        desc.fabric_alloc_size = blank.fabric_alloc_size;
    }
    desc
}
