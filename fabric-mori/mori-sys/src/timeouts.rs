//! MoRI's own time-outs. It has no call for them: it reads them from the environment, once in a
//! process.

use std::sync::OnceLock;
use std::time::Duration;

/// Of each step of MoRI's control plane (connect, send, receive), in milliseconds; MoRI's default
/// is 5,000.
const CONTROL: &str = "MORI_IO_CP_TIMEOUT_MS";

/// The longest that MoRI takes.
const CONTROL_MAX: u128 = 24 * 60 * 60 * 1_000;

/// For which a post waits for room in a send queue, in microseconds; MoRI's default is 5,000,000.
const ROOM: &str = "MORI_IO_SQ_BACKOFF_TIMEOUT_US";

static OURS: OnceLock<Vec<&'static str>> = OnceLock::new();

/// Has MoRI give up a step of its control plane after `control`, and a post that finds no room
/// after `room`, unless the environment says otherwise. Of a process only the first call counts, as
/// MoRI reads them when its first engine is made.
#[allow(unsafe_code, reason = "the environment is the only way")]
pub fn set_timeouts(control: Duration, room: Duration) {
    OURS.get_or_init(|| {
        let control = control.as_millis().clamp(1, CONTROL_MAX);
        let room = room.as_micros().clamp(1, i32::MAX as u128);
        let mut ours = Vec::new();
        for (name, value) in [(CONTROL, control), (ROOM, room)] {
            if std::env::var_os(name).is_none() {
                // SAFETY: Once in a process, before MoRI has threads, and synchronised with what
                // else in Rust uses the environment. With C that reads it on another thread at this
                // moment it races, as whatever Python sets in `os.environ` does.
                unsafe { std::env::set_var(name, value.to_string()) };
                ours.push(name);
            }
        }
        ours
    });
}

/// The variables that [`set_timeouts`] has set, and nobody else.
pub fn timeouts_set() -> &'static [&'static str] {
    OURS.get().map_or(&[], Vec::as_slice)
}
