//! Descriptors: the plane's bytes, and what can be read from them.

use crate::error::Error;
use ::engine::core::dialect::moriio::descriptor;
use ::engine::fabric::{Address, RegionDesc};
use std::sync::Arc;

/// Where an engine is reached; travels in the handshake as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineDesc {
    bytes: Arc<[u8]>,
    fields: Arc<descriptor::EngineDesc>,
}

impl EngineDesc {
    /// Reads the bytes of a peer, which are kept as they came.
    ///
    /// # Errors
    /// `Argument` if they are no descriptor.
    pub fn unpack(bytes: &[u8]) -> Result<EngineDesc, Error> {
        let fields = descriptor::EngineDesc::decode(bytes)
            .map_err(|why| Error::Argument(format!("EngineDesc of {} B: {why}", bytes.len())))?;
        Ok(EngineDesc { bytes: bytes.into(), fields: Arc::new(fields) })
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
pub struct MemoryDesc {
    bytes: Arc<[u8]>,
    fields: Arc<descriptor::MemoryDesc>,
}

impl MemoryDesc {
    /// Reads the bytes of a peer, which are kept as they came.
    ///
    /// # Errors
    /// `Argument` if they are no descriptor.
    pub fn unpack(bytes: &[u8]) -> Result<MemoryDesc, Error> {
        let (_, fields) = descriptor::MemoryDesc::decode(bytes)
            .map_err(|why| Error::Argument(format!("MemoryDesc of {} B: {why}", bytes.len())))?;
        Ok(MemoryDesc { bytes: bytes.into(), fields: Arc::new(fields) })
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
