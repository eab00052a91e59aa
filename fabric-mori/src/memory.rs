//! Memory of a GPU, for who has none of its own.

use crate::mori::{MoriCallError, Shim, call};
use kvferry_engine::fabric::Memory;
use std::sync::Arc;

/// Memory of a GPU, freed when it is dropped: no plane may have it registered any more by then.
#[derive(Debug)]
pub struct DeviceMemory {
    shim: Arc<Shim>,
    base: u64,
    len: u64,
    device: u32,
}

impl DeviceMemory {
    /// `len` bytes, of any content, of the GPU that HIP numbers `device` (`hipMalloc`).
    ///
    /// # Errors
    /// What HIP says: there is no such GPU, or it has not so much memory.
    pub fn new(shim: &Arc<Shim>, device: u32, len: u64) -> Result<DeviceMemory, String> {
        let number = i32::try_from(device).map_err(|_| format!("there is no GPU {device}"))?;
        let mut base = 0;
        // SAFETY: The shim is loaded for good, and the result has a place.
        let given = call("kf_device_alloc", |text| unsafe {
            (shim.functions.kf_device_alloc)(number, len, &raw mut base, text)
        });
        given.map_err(|fault: MoriCallError| fault.to_string())?;
        Ok(DeviceMemory { shim: shim.clone(), base, len, device })
    }

    /// As a plane registers it.
    pub fn memory(&self) -> Memory {
        Memory::Device { base: self.base, len: self.len, device: self.device }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: Ours, and freed once.
        let freed = call("kf_device_free", |text| unsafe {
            (self.shim.functions.kf_device_free)(self.base, text)
        });
        debug_assert_eq!(freed, Ok(()), "memory of a GPU is leaked");
    }
}
