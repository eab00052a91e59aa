//! Settings of the MoRIIO side of one engine core.

use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::dialect::moriio::ports::PortFormula;
use crate::core::time::Nanos;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Who an engine core is to peers that speak MoRIIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoriioConfig {
    pub address: ZmqAddress,
    /// Names of the layers, by which peers find each other's memory.
    pub layer_names: Vec<Arc<str>>,
    /// Attention backend that it claims to have; no peer checks it.
    pub attn_backend: Arc<str>,
    /// Times and limits.
    pub settings: MoriioSettings,
    /// Why such peers are not dealt with, which they and their requests are told. Peers that speak
    /// the native dialect are told by MoRIIO's handshake that this engine does so, too.
    // Left out where it says nothing: the hash of a trace is also over its settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub closed: Option<Arc<str>>,
}

/// Times and limits towards peers that speak MoRIIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MoriioSettings {
    /// How the ports of ranks are made.
    pub ports: PortFormula,
    /// A peer that has not answered a handshake after this long is unreachable.
    pub handshake: Nanos,
    /// A handshake older than this is repeated before the next transfer, because a peer that was
    /// restarted says so nowhere.
    pub trust: Nanos,
    /// How long a prefill keeps what a decode may come to read: `defer_timeout` of 0.32.0, whose
    /// prefills free at that time whoever reads.
    pub hold: Nanos,
    /// How long a decode waits for the words that its blocks are written, and then keeps the
    /// prefill out: `recv_abort_timeout` of 0.32.0, which it counts for reads only.
    pub write: Nanos,
    /// A notice that could not be sent after this long is dropped.
    pub notice: Nanos,
    /// Notices that wait for one peer; more are dropped.
    pub notices_max: u32,
    /// Transfers of which a notice came before the leg.
    pub early_max: u32,
    /// Peers at a time.
    pub peers_max: u32,
    /// Links by which notices come, and likewise receivers of notices, at a time. Further links are
    /// closed at once, notices to further receivers are dropped.
    pub links_max: u32,
    /// Nothing else is spoken, as by vLLM's own connector: peers are told no other, and a decode asks
    /// none whether they speak another.
    // Left out where it says nothing: the hash of a trace is also over its settings.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub only: bool,
}

impl Default for MoriioSettings {
    fn default() -> Self {
        MoriioSettings {
            ports: PortFormula::Legacy,
            handshake: Nanos::from_secs(5),
            trust: Nanos::from_secs(5),
            hold: Nanos::from_secs(60),
            write: Nanos::from_secs(120),
            notice: Nanos::from_secs(10),
            notices_max: 4_096,
            early_max: 65_536,
            peers_max: 4_096,
            links_max: 8_192,
            only: false,
        }
    }
}
