//! Reliable, ordered delivery of [`Message`](super::message::Message)s over links that lose frames
//! and die.

use super::time::Nanos;
use serde::{Deserialize, Serialize};

/// Bits of [`super::message::Hello::capabilities`]; unknown bits are ignored.
pub mod capability {
    /// Prefill writes into decode's blocks.
    pub const PUSH: u32 = 1;
    /// Decode reads from prefill's blocks.
    pub const PULL: u32 = 1 << 1;
}

/// Times and limits of the channels of one engine core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ChannelConfig {
    /// A peer that does not answer the hello for this long is unreachable.
    pub hello: Nanos,
    /// First wait before an unacknowledged frame is sent again; doubles per repetition.
    pub retransmit: Nanos,
    /// Longest wait before a frame is sent again, and the interval of probes.
    pub retransmit_max: Nanos,
    /// A peer of which nothing is heard for this long, though something is expected, is down.
    pub silent: Nanos,
    /// Messages waiting per peer, acknowledged ones not counted; one more is `Overload`.
    pub queue_max: u32,
    /// Peers at a time.
    pub peers_max: u32,
    /// Links at a time.
    pub links_max: u32,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        ChannelConfig {
            hello: Nanos::from_secs(2),
            retransmit: Nanos::from_ms(50),
            retransmit_max: Nanos::from_secs(1),
            silent: Nanos::from_secs(7),
            queue_max: 65_536,
            peers_max: 4_096,
            links_max: 8_192,
        }
    }
}
