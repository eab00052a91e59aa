//! What instances tell the router, and what becomes of it.

use super::error::Failure;
use super::ids::{EngineId, Incarnation, Mode, Role};
use super::layout::LayoutDigest;
use crate::fabric::Endpoint;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// An instance tells the router that it lives. Repeated; not acknowledged.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Registration {
    /// Name of the engine core; one registration per DP rank.
    pub engine: EngineId,
    pub incarnation: Incarnation,
    /// Counts the registrations of this incarnation; an older one changes nothing.
    pub sequence: u64,
    pub role: Role,
    /// How it wants to transfer.
    pub mode: Mode,
    /// Where legs are sent.
    pub http: Endpoint,
    /// Where peers say hello.
    pub control: Endpoint,
    /// DP rank of this engine core.
    pub dp_rank: u16,
    /// Number of DP ranks.
    pub dp_size: u16,
    /// Number of TP ranks.
    pub tp: u16,
    /// True in the last one: no new requests, please.
    pub draining: bool,
    /// What has to fit; none if it is not known. Only engines that fit are paired.
    #[serde(default)]
    pub fit: Option<Arc<LayoutDigest>>,
    /// Of a decode: the prefills whose KV has not got through since it last did, at most
    /// [`TROUBLES_MAX`]: a list of so many may leave some out.
    #[serde(default)]
    pub troubles: Vec<UnreachablePrefill>,
}

/// Prefills that a registration names as out of reach.
pub const TROUBLES_MAX: usize = 32;

/// What a decode tells a router of a prefill whose KV does not get through to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct UnreachablePrefill {
    pub engine: EngineId,
    /// Its incarnation, if the leg named it.
    #[serde(rename = "life")]
    pub incarnation: Option<Incarnation>,
    /// Number of the last prompt that did not come, of all that did not; a larger one is news.
    pub number: u32,
    /// Why the last one did not.
    pub failure: Failure,
}

/// What becomes of an engine's registrations, for the log.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RouterEvent {
    /// The router can be reached and was sent one. Routers do not acknowledge them.
    Registered { router: Endpoint },
    /// It cannot be reached; it is tried again.
    Silent { router: Endpoint },
}
