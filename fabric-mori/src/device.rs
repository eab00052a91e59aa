//! The GPU of who has no runtime of its own: memory, and what orders transfers behind kernels.

use crate::mori::{MoriCallError, Shim};
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
        let given = unsafe { call!(shim, kf_device_alloc(number, len, &raw mut base)) };
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
        let freed = unsafe { call!(self.shim, kf_device_free(self.base)) };
        debug_assert_eq!(freed, Ok(()), "memory of a GPU is leaked");
    }
}

/// Asks HIP about events, from any thread.
#[derive(Clone, Debug)]
pub struct DeviceEvents(Arc<Shim>);

impl DeviceEvents {
    pub(crate) fn of(shim: &Arc<Shim>) -> DeviceEvents {
        DeviceEvents(shim.clone())
    }

    /// Whether the device has done all that it was given before an event, a `hipEvent_t` of this
    /// process (`hipEventQuery`).
    ///
    /// # Errors
    /// What HIP says: there is no such event, or what was before it failed.
    pub fn is_done(&self, event: u64) -> Result<bool, String> {
        let mut done = 0;
        // SAFETY: The shim is loaded as long as this is; HIP knows its events.
        let asked = unsafe { call!(self.0, kf_event_done(event, &raw mut done)) };
        asked.map_err(|fault: MoriCallError| fault.to_string())?;
        Ok(done != 0)
    }
}
