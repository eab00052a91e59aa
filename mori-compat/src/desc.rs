//! Descriptors: the plane's bytes, and what can be read from them.

use crate::error::CompatError;
use kvferry_engine::core::dialect::moriio::descriptor;
use kvferry_engine::fabric::{Address, RegionDesc};
use kvferry_engine::text::printable;
use std::sync::Arc;

/// Characters that are kept of why a peer gives no address.
const WHY_MAX: usize = 256;

/// Where an engine is reached; travels in the handshake as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompatEngineDesc {
    bytes: Arc<[u8]>,
    fields: Arc<descriptor::MoriEngineDesc>,
}

impl CompatEngineDesc {
    /// Reads the bytes of a peer, which are kept as they came.
    ///
    /// # Errors
    /// `Argument` if they are no descriptor.
    pub fn unpack(bytes: &[u8]) -> Result<CompatEngineDesc, CompatError> {
        let fields = descriptor::MoriEngineDesc::decode(bytes).map_err(|why| {
            // A kvferry that deals with no MoRIIO peers says why in place of an address. What else
            // comes is MessagePack, whose first byte begins no text.
            let said = std::str::from_utf8(bytes).ok().filter(|text| !text.is_empty());
            CompatError::Argument(match said {
                Some(why) => format!("the peer says: {}", printable(why, WHY_MAX)),
                None => format!("EngineDesc of {} B: {why}", bytes.len()),
            })
        })?;
        Ok(CompatEngineDesc { bytes: bytes.into(), fields: Arc::new(fields) })
    }

    /// The bytes that peers unpack.
    pub fn pack(&self) -> &[u8] {
        &self.bytes
    }

    /// The unique name of the engine.
    pub fn key(&self) -> &Arc<str> {
        &self.fields.key
    }

    /// Where it listens: host or address.
    pub fn host(&self) -> &str {
        &self.fields.host
    }

    /// Where it listens: port.
    pub fn port(&self) -> i32 {
        self.fields.port
    }

    pub(crate) fn address(&self) -> Address {
        Address(self.bytes.clone())
    }
}

/// Registered memory; travels in the handshake as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompatMemoryDesc {
    bytes: Arc<[u8]>,
    fields: Arc<descriptor::MoriMemoryDesc>,
}

impl CompatMemoryDesc {
    /// Reads the bytes of a peer, which are kept as they came.
    ///
    /// # Errors
    /// `Argument` if they are no descriptor.
    pub fn unpack(bytes: &[u8]) -> Result<CompatMemoryDesc, CompatError> {
        let (_, fields) = descriptor::MoriMemoryDesc::decode(bytes).map_err(|why| {
            CompatError::Argument(format!("MemoryDesc of {} B: {why}", bytes.len()))
        })?;
        Ok(CompatMemoryDesc { bytes: bytes.into(), fields: Arc::new(fields) })
    }

    /// The bytes that peers unpack.
    pub fn pack(&self) -> &[u8] {
        &self.bytes
    }

    /// The engine that it is registered with.
    pub fn engine_key(&self) -> &Arc<str> {
        &self.fields.engine_key
    }

    /// Number within its engine.
    pub fn id(&self) -> u32 {
        self.fields.id
    }

    /// Its first byte in the address space of its owner.
    pub fn data(&self) -> u64 {
        self.fields.data
    }

    /// Its length in bytes.
    pub fn size(&self) -> u64 {
        self.fields.size
    }

    pub(crate) fn region(&self) -> RegionDesc {
        RegionDesc(self.bytes.clone())
    }
}
