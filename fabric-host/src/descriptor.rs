//! Addresses and region descriptors: MoRI's, so that handshakes that carry those carry these.
//!
//! What this plane needs beyond MoRI's fields is in the node id (`boot id/pid
//! namespace/network namespace/incarnation`) and in the first bytes of the region's IPC handle.

use kvferry_engine::core::dialect::moriio::descriptor::{
    DescLayout, IpcHandle, MoriEngineDesc, MoriMemoryDesc,
};
use kvferry_engine::fabric::{Address, RegionDesc, RegionId};
use kvferry_fabric_common::PlaneIdentity;
use std::fs;
use std::sync::Arc;

/// First bytes of the handle of a region; the last one is a version.
const MARK: [u8; 8] = *b"kvfhost\x01";

/// Where a plane can be reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostPlaneAddress {
    pub(crate) who: PlaneIdentity,
    /// Planes of equal node share a kernel, process ids and Unix sockets.
    pub(crate) node: Arc<str>,
    pub(crate) hostname: Arc<str>,
    pub(crate) host: Arc<str>,
    pub(crate) port: u16,
    pub(crate) pid: u32,
}

/// Boot id, and namespaces of process ids and of networks, of this process.
pub fn this_node() -> Arc<str> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = |kind: &str| -> String {
        let link = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap_or_default();
        link.to_string_lossy().chars().filter(char::is_ascii_digit).collect()
    };
    format!("{}/{}/{}", boot.trim(), space("pid"), space("net")).into()
}

impl HostPlaneAddress {
    pub(crate) fn encode(&self) -> Address {
        let desc = MoriEngineDesc {
            key: self.who.key.clone(),
            node_id: format!("{}/{:016x}", self.node, self.who.incarnation).into(),
            hostname: self.hostname.clone(),
            host: self.host.clone(),
            port: i32::from(self.port),
            pid: self.pid as i32,
        };
        Address(desc.encode(DescLayout::V1_2_2).into())
    }

    /// None for the address of another kind of plane.
    pub(crate) fn decode(address: &Address) -> Option<HostPlaneAddress> {
        let desc = MoriEngineDesc::decode(&address.0).ok()?;
        let (node, incarnation) = desc.node_id.rsplit_once('/')?;
        if incarnation.len() != 16 || !node.contains('/') || desc.host.is_empty() {
            return None;
        }
        Some(HostPlaneAddress {
            who: PlaneIdentity {
                key: desc.key,
                incarnation: u64::from_str_radix(incarnation, 16).ok()?,
            },
            node: node.into(),
            hostname: desc.hostname,
            host: desc.host,
            port: u16::try_from(desc.port).ok()?,
            pid: u32::try_from(desc.pid).ok()?,
        })
    }

    /// Abstract name of the Unix socket that the plane listens at.
    pub(crate) fn socket_name(&self) -> Vec<u8> {
        format!("kvferry-host-{:016x}", self.who.incarnation).into_bytes()
    }
}

/// What a descriptor says of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostRegionDescriptor {
    pub(crate) owner: PlaneIdentity,
    pub(crate) region: RegionId,
    pub(crate) token: u64,
    pub(crate) base: u64,
    pub(crate) len: u64,
}

impl HostRegionDescriptor {
    pub(crate) fn encode(&self) -> RegionDesc {
        let mut handle: IpcHandle = [0; 64];
        handle[..8].copy_from_slice(&MARK);
        handle[8..16].copy_from_slice(&self.owner.incarnation.to_le_bytes());
        handle[16..24].copy_from_slice(&self.token.to_le_bytes());
        let desc = MoriMemoryDesc {
            engine_key: self.owner.key.clone(),
            id: self.region.0,
            data: self.base,
            size: self.len,
            loc: MoriMemoryDesc::LOC_CPU,
            ipc_handle: handle,
            ..MoriMemoryDesc::default()
        };
        RegionDesc(desc.encode(DescLayout::V1_2_2).into())
    }

    /// None for a descriptor of another kind of plane.
    pub(crate) fn decode(desc: &RegionDesc) -> Option<HostRegionDescriptor> {
        let (_, desc) = MoriMemoryDesc::decode(&desc.0).ok()?;
        let handle = desc.ipc_handle;
        if handle[..8] != MARK || desc.size == 0 {
            return None;
        }
        let word = |at: usize| handle[at..at + 8].try_into().map(u64::from_le_bytes).ok();
        Some(HostRegionDescriptor {
            owner: PlaneIdentity { key: desc.engine_key, incarnation: word(8)? },
            region: RegionId(desc.id),
            token: word(16)?,
            base: desc.data,
            len: desc.size,
        })
    }
}
