//! What a prefill or decode core is configured with.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_engine::core::config::CoreConfig;
//! use kvferry_engine::core::ids::{Incarnation, Mode, Role};
//! use kvferry_engine::core::layout::{Geometry, KvGroup};
//!
//! let geometry = Geometry::new("llama", 8, vec![KvGroup::full(16, 0..32)]);
//! let control = "tcp://10.0.0.2:6301".into();
//! let mut config = CoreConfig::new(Role::Decode, "decode-0", Incarnation(1), geometry, control);
//! assert_eq!((config.mode, config.dp), (Mode::Push, (0, 1)));
//! config.router = Some("tcp://10.0.0.9:6300".into());
//! config.settings.lease = Nanos::from_secs(60);
//! ```

use super::channel::ChannelConfig;
use super::ids::{EngineId, Incarnation};
use super::layout::Geometry;
use super::message::{Mode, Role, ServedModels};
use super::moriio::MoriioConfig;
use super::time::Nanos;
use super::verify::Verify;
use crate::fabric::Endpoint;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Times in a row that the ranks of a peer that still answers are connected anew, before the
/// connection is ended.
pub const REBUILDS_MAX: u32 = 5;

/// Who a prefill or decode core is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoreConfig {
    /// Name of the engine core; one per DP rank.
    pub engine: EngineId,
    pub incarnation: Incarnation,
    pub role: Role,
    pub mode: Mode,
    pub geometry: Arc<Geometry>,
    /// Where legs are sent.
    pub http: Endpoint,
    /// Where peers say hello.
    pub control: Endpoint,
    /// DP rank and number of DP ranks.
    pub dp: (u16, u16),
    /// Discovery endpoint of the router, if there is one.
    pub router: Option<Endpoint>,
    /// Times and limits.
    pub settings: CoreSettings,
    /// Times and limits of the channels to peers.
    pub channel: ChannelConfig,
    /// Who it is to peers that speak MoRIIO, if it deals with any.
    pub moriio: Option<MoriioConfig>,
    /// True if there are payloads behind it, about which its peers may have notes.
    #[serde(default)]
    pub payloads: bool,
    /// How much of the KV is verified; on, peers have to verify too, and a decode's level counts.
    #[serde(default, skip_serializing_if = "Verify::is_off")]
    pub verify: Verify,
    /// The models that routers send it requests for; none for any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub models: Option<Arc<ServedModels>>,
}

impl CoreConfig {
    /// A core that pushes, is the only DP rank, registers nowhere, speaks to native peers alone, and
    /// has the default times and limits; change what is different by its fields.
    ///
    /// The incarnation is a later one than that of every earlier run of the engine, see
    /// [`Incarnation::begin`]. `control` is where its control plane listens for handshakes.
    pub fn new(
        role: Role,
        engine: impl Into<EngineId>,
        incarnation: Incarnation,
        geometry: impl Into<Arc<Geometry>>,
        control: Endpoint,
    ) -> CoreConfig {
        CoreConfig {
            engine: engine.into(),
            incarnation,
            role,
            mode: Mode::Push,
            geometry: geometry.into(),
            http: "".into(),
            control,
            dp: (0, 1),
            router: None,
            settings: CoreSettings::default(),
            channel: ChannelConfig::default(),
            payloads: false,
            verify: Verify::Off,
            moriio: None,
            models: None,
        }
    }
}

/// Times and limits of a prefill or decode core.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CoreSettings {
    pub heartbeat: Nanos,
    /// Length of a source lease: how long a finished prefill waits for its receivers, and how long
    /// a reader may read without renewing.
    pub lease: Nanos,
    /// What a reader takes off a lease, in percent, because clocks differ.
    pub drift_percent: u32,
    /// How long an announcement waits for its prefill leg.
    pub orphan: Nanos,
    /// How long the receivers of a preempted prompt wait until it is scheduled again.
    pub resume: Nanos,
    /// Transfers announced before their prefill leg arrived.
    pub early_max: u32,
    /// Remembered ids of ended transfers.
    pub tombstones_max: u32,
    /// Pause before a peer whose sessions failed is connected anew; doubles.
    pub rebuild_delay: Nanos,
    /// Requests with a leg at one time.
    pub requests_max: u32,
    /// Receivers at one time, all prompts together; further ones are refused.
    pub receivers_max: u32,
    /// Push: how long a computed prompt waits for receivers that have asked for it to say where it
    /// shall go, at least a lease. They may wait for blocks themselves.
    pub claim: Nanos,
}

impl Default for CoreSettings {
    fn default() -> Self {
        CoreSettings {
            heartbeat: Nanos::from_secs(1),
            lease: Nanos::from_secs(30),
            drift_percent: 10,
            orphan: Nanos::from_secs(30),
            resume: Nanos::from_secs(5),
            early_max: 65_536,
            tombstones_max: 4_096,
            rebuild_delay: Nanos::from_ms(200),
            requests_max: 65_536,
            receivers_max: 262_144,
            claim: Nanos::from_secs(600),
        }
    }
}
