//! The GPU of who has no runtime of its own: memory, and what orders transfers behind kernels.

use crate::mori::{MoriCallError, Shim};
use kvferry_engine::fabric::{Memory, OwnMemory};
use std::sync::Arc;

/// Memory of a GPU, freed when it is dropped.
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
    ///
    /// # Safety
    /// This lives until every plane that it was registered with has deregistered it or is dropped:
    /// its drop frees what the GPU and peers would still reach.
    pub unsafe fn memory(&self) -> Memory {
        // SAFETY: It is allocated as long as this lives, which the caller promises.
        let range = unsafe { OwnMemory::new(self.base, self.len) };
        Memory::Device { range, device: self.device }
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: Ours, and freed once.
        let freed = unsafe { call!(self.shim, kf_device_free(self.base)) };
        debug_assert_eq!(freed, Ok(()), "memory of a GPU is leaked");
    }
}

/// An event of HIP, a `hipEvent_t` of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DeviceEvent(u64);

impl DeviceEvent {
    /// The event behind a pointer, as `torch.cuda.Event.cuda_event` has it.
    ///
    /// # Safety
    /// It was made by the runtime of HIP in this process, and is not destroyed while somebody may
    /// ask for it.
    pub const unsafe fn new(event: u64) -> DeviceEvent {
        DeviceEvent(event)
    }
}

/// Asks HIP about events, from any thread.
#[derive(Clone, Debug)]
pub struct DeviceEvents(Arc<Shim>);

impl DeviceEvents {
    pub(crate) fn of(shim: &Arc<Shim>) -> DeviceEvents {
        DeviceEvents(shim.clone())
    }

    /// Whether the device has done all that it was given before an event (`hipEventQuery`).
    ///
    /// # Errors
    /// What HIP says: what was before the event failed.
    pub fn is_done(&self, event: DeviceEvent) -> Result<bool, String> {
        let mut done = 0;
        // SAFETY: The shim is loaded as long as this is. HIP follows the pointer, which who made
        // the event has promised to be one of its own.
        let asked = unsafe { call!(self.0, kf_event_done(event.0, &raw mut done)) };
        asked.map_err(|fault: MoriCallError| fault.to_string())?;
        Ok(done != 0)
    }
}
