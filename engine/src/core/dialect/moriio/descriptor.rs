//! MoRI's descriptors of engines and memory: MessagePack arrays without a version, into which
//! MoRI's releases inserted fields.
//!
//! Reading them tells a peer's addresses and its [`DescLayout`] without MoRI. A descriptor that
//! goes on to MoRI goes on as the bytes that came, never encoded anew.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::descriptor::{DescLayout, MoriEngineDesc};
//!
//! let desc = MoriEngineDesc {
//!     key: "prefill-0".into(),
//!     node_id: "".into(),
//!     hostname: "node1".into(),
//!     host: "10.0.0.1".into(),
//!     port: 7000,
//!     pid: 0,
//! };
//! // The oldest layout has neither node nor process.
//! assert_eq!(MoriEngineDesc::decode(&desc.encode(DescLayout::V0_0)), Ok(desc));
//! ```

use super::{Bin, DecodeError, error, pack};
use crate::core::dialect::msgpack::{MsgpackItems, MsgpackValue};
use std::iter::Peekable;
use std::sync::Arc;

/// The MoRI releases whose descriptors have the same fields. Releases from `V1_1` on decode each
/// other's, except `NoIpcOffset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DescLayout {
    /// Before v0.1.0, seen at commit 2d02c6a9: 4 fields of an engine, 6 of memory.
    V0_0,
    /// v0.1.0: the engine has a node id, memory an IPC handle; 5 and 7 fields.
    V0_1,
    /// v1.1.0 and v1.1.1: the engine has a process id, memory a bus id; 6 and 8 fields.
    V1_1,
    /// v1.2.0 and v1.2.1: memory has a NUMA node; 6 and 9 fields.
    V1_2,
    /// Between commits ade9fd97 and 33a903f7: as `V1_2_2`, but without `ipc_offset`; 6 and 14.
    NoIpcOffset,
    /// v1.2.2 and later, as of commit 624002c8: 6 and 15 fields.
    V1_2_2,
}

impl DescLayout {
    pub const ALL: &[DescLayout] = &[
        DescLayout::V0_0,
        DescLayout::V0_1,
        DescLayout::V1_1,
        DescLayout::V1_2,
        DescLayout::NoIpcOffset,
        DescLayout::V1_2_2,
    ];
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct MoriEngineDesc {
    /// Unique name; of the connector `producer|consumer:{ip}:{handshake_port}:tp{t}:dp{d}`.
    pub key: Arc<str>,
    /// `MORI_NODE_ID`, else the kernel's boot id, else the host name; from `V0_1`.
    pub node_id: Arc<str>,
    /// Name of the host.
    pub hostname: Arc<str>,
    /// Where MoRI's own connections are accepted.
    pub host: Arc<str>,
    pub port: i32,
    /// Process id; from `V1_1`.
    pub pid: i32,
}

impl MoriEngineDesc {
    /// The bytes that MoRI of this layout writes. Fields that the layout lacks are left out.
    pub fn encode(&self, layout: DescLayout) -> Vec<u8> {
        let MoriEngineDesc { key, node_id, hostname, host, port, pid } = self;
        match layout {
            DescLayout::V0_0 => pack(&(key, hostname, host, port)),
            DescLayout::V0_1 => pack(&(key, node_id, hostname, host, port)),
            _ => pack(&(key, node_id, hostname, host, port, pid)),
        }
    }

    /// The descriptor, of any layout. As in MoRI, fields that are missing at the end have their
    /// defaults and more are ignored. Layouts from `V1_1` on look the same.
    ///
    /// # Errors
    /// No array, or a field of another type.
    pub fn decode(bytes: &[u8]) -> Result<MoriEngineDesc, DecodeError> {
        let read = || {
            let mut fields = DescriptorFields::read(bytes)?;
            let key = fields.text()?;
            let second = fields.text()?;
            let third = fields.text()?;
            // The oldest layout goes on with the port.
            let (node_id, hostname, host) = match fields.next_is_text() {
                true => (second, third, fields.text()?),
                false if fields.is_over() => (second, third, Arc::default()),
                false => (Arc::default(), second, third),
            };
            let (port, pid) = (fields.number(0)?, fields.number(0)?);
            Ok(MoriEngineDesc { key, node_id, hostname, host, port, pid })
        };
        read().map_err(|rule| error("EngineDesc", rule))
    }
}

/// A handle of 64 bytes.
pub type IpcHandle = [u8; 64];

/// Memory registered with a MoRI engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MoriMemoryDesc {
    /// [`MoriEngineDesc::key`] of its engine.
    pub engine_key: Arc<str>,
    /// Number within the engine.
    pub id: u32,
    /// GPU, -1 for host memory.
    pub device_id: i32,
    /// PCI address of the GPU, e.g. `0000:c1:00.0`; from `V1_1`.
    pub device_bus_id: Arc<str>,
    /// Address in the owner's process.
    pub data: u64,
    /// Bytes.
    pub size: u64,
    /// [`LOC_CPU`](MoriMemoryDesc::LOC_CPU) or [`LOC_GPU`](MoriMemoryDesc::LOC_GPU).
    pub loc: u32,
    /// Handle for another process of the host; from `V0_1`.
    pub ipc_handle: IpcHandle,
    /// -1 if not known; from `V1_2`.
    pub numa_node: i32,
    /// Bytes from the start of what `ipc_handle` opens to `data`; in `V1_2_2`.
    pub ipc_offset: u64,
    /// Handle for another host of the same fabric; from `NoIpcOffset`, as all that follows.
    pub fabric_handle: IpcHandle,
    /// -1 if there is none.
    pub vpod_id: i32,
    /// Physical pod of the vpod.
    pub vpod_ppod_id: Arc<str>,
    /// Bytes from the start of what `fabric_handle` opens to `data`.
    pub fabric_offset: u64,
    /// Bytes of what `fabric_handle` opens.
    pub fabric_alloc_size: u64,
}

impl Default for MoriMemoryDesc {
    fn default() -> Self {
        MoriMemoryDesc {
            engine_key: Arc::default(),
            id: 0,
            device_id: -1,
            device_bus_id: Arc::default(),
            data: 0,
            size: 0,
            loc: 0,
            ipc_handle: [0; 64],
            numa_node: -1,
            ipc_offset: 0,
            fabric_handle: [0; 64],
            vpod_id: -1,
            vpod_ppod_id: Arc::default(),
            fabric_offset: 0,
            fabric_alloc_size: 0,
        }
    }
}

impl MoriMemoryDesc {
    pub const LOC_CPU: u32 = 1;

    /// Memory of a GPU.
    pub const LOC_GPU: u32 = 2;

    /// The bytes that MoRI of this layout writes. Fields that the layout lacks are left out.
    pub fn encode(&self, layout: DescLayout) -> Vec<u8> {
        let (key, id, device) = (&self.engine_key, self.id, self.device_id);
        let (bus, data, size, loc) = (&self.device_bus_id, self.data, self.size, self.loc);
        let (ipc, numa, offset) = (Bin(&self.ipc_handle), self.numa_node, self.ipc_offset);
        let (fabric, vpod) = (Bin(&self.fabric_handle), self.vpod_id);
        let (ppod, from, all) = (&self.vpod_ppod_id, self.fabric_offset, self.fabric_alloc_size);
        match layout {
            DescLayout::V0_0 => pack(&(key, id, device, data, size, loc)),
            DescLayout::V0_1 => pack(&(key, id, device, data, size, loc, ipc)),
            DescLayout::V1_1 => pack(&(key, id, device, bus, data, size, loc, ipc)),
            DescLayout::V1_2 => pack(&(key, id, device, bus, data, size, loc, ipc, numa)),
            DescLayout::NoIpcOffset => pack(&(
                key, id, device, bus, data, size, loc, ipc, numa, fabric, vpod, ppod, from, all,
            )),
            DescLayout::V1_2_2 => pack(&(
                key, id, device, bus, data, size, loc, ipc, numa, offset, fabric, vpod, ppod, from,
                all,
            )),
        }
    }

    /// The descriptor and its layout, told apart by the types of the inserted fields and then by
    /// length. As in MoRI, fields that are missing at the end have their defaults and more are
    /// ignored; the layout is then the newest that is there as a whole.
    ///
    /// # Errors
    /// No array, or a field of another type.
    pub fn decode(bytes: &[u8]) -> Result<(DescLayout, MoriMemoryDesc), DecodeError> {
        MoriMemoryDesc::read(bytes).map_err(|rule| error("MemoryDesc", rule))
    }

    fn read(bytes: &[u8]) -> Result<(DescLayout, MoriMemoryDesc), &'static str> {
        let mut fields = DescriptorFields::read(bytes)?;
        let count = fields.count();
        let mut desc = MoriMemoryDesc {
            engine_key: fields.text()?,
            id: fields.number(0)?,
            device_id: fields.number(-1)?,
            ..MoriMemoryDesc::default()
        };
        let old = fields.next_is_int();
        if !old {
            desc.device_bus_id = fields.text()?;
        }
        desc.data = fields.number(0)?;
        desc.size = fields.number(0)?;
        desc.loc = fields.number(0)?;
        desc.ipc_handle = fields.handle()?;
        if old {
            let layout = if count >= 7 { DescLayout::V0_1 } else { DescLayout::V0_0 };
            return Ok((layout, desc));
        }
        desc.numa_node = fields.number(-1)?;
        let no_offset = fields.next_is_bin();
        if !no_offset {
            desc.ipc_offset = fields.number(0)?;
        }
        desc.fabric_handle = fields.handle()?;
        desc.vpod_id = fields.number(-1)?;
        desc.vpod_ppod_id = fields.text()?;
        desc.fabric_offset = fields.number(0)?;
        desc.fabric_alloc_size = fields.number(0)?;
        let layout = match (count, no_offset) {
            (15.., false) => DescLayout::V1_2_2,
            (14.., true) => DescLayout::NoIpcOffset,
            (9.., _) => DescLayout::V1_2,
            _ => DescLayout::V1_1,
        };
        Ok((layout, desc))
    }
}

/// The fields of a descriptor in their order; those after the last are defaults.
struct DescriptorFields<'a>(Peekable<MsgpackItems<'a>>);

impl<'a> DescriptorFields<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, &'static str> {
        // MoRI ignores what follows the array.
        let (array, _) = MsgpackValue::first(bytes)?;
        Ok(DescriptorFields(array.items().ok_or("not an array")?.peekable()))
    }

    fn count(&self) -> usize {
        self.0.clone().count()
    }

    fn is_over(&mut self) -> bool {
        self.0.peek().is_none()
    }

    fn next_is_text(&mut self) -> bool {
        self.0.peek().is_some_and(|field| field.text().is_some())
    }

    fn next_is_int(&mut self) -> bool {
        self.0.peek().is_some_and(|field| field.int().is_some())
    }

    fn next_is_bin(&mut self) -> bool {
        self.0.peek().is_some_and(|field| field.bin().is_some())
    }

    fn text(&mut self) -> Result<Arc<str>, &'static str> {
        match self.0.next() {
            Some(field) => field.text().map(Arc::from).ok_or("field that is no text"),
            None => Ok(Arc::default()),
        }
    }

    fn number<T: TryFrom<i128>>(&mut self, default: T) -> Result<T, &'static str> {
        match self.0.next() {
            Some(field) => field.number().ok_or("field that is no number of its width"),
            None => Ok(default),
        }
    }

    /// Shorter handles end in zeros.
    fn handle(&mut self) -> Result<IpcHandle, &'static str> {
        let mut handle = [0; 64];
        if let Some(field) = self.0.next() {
            let bytes = field.bin().ok_or("field that is no bytes")?;
            handle.get_mut(..bytes.len()).ok_or("handle above 64 bytes")?.copy_from_slice(bytes);
        }
        Ok(handle)
    }
}
