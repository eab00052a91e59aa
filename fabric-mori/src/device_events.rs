//! What orders transfers behind the kernels of a GPU.

use crate::mori::{MoriCallError, Shim, call};
use std::sync::Arc;

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
        let asked = call("kf_event_done", |text| unsafe {
            (self.0.functions.kf_event_done)(event, &raw mut done, text)
        });
        asked.map_err(|fault: MoriCallError| fault.to_string())?;
        Ok(done != 0)
    }
}
