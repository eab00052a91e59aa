//! What instances tell the router, and what becomes of it.

use super::error::Failure;
use super::ids::{EngineId, Incarnation, Mode, Role, TransferKey};
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
    /// The models that it serves; none if it does not say, and then it may serve any.
    #[serde(default)]
    pub models: Option<Arc<ServedModels>>,
    /// Legs of a decode whose KV has not come since the registration before. Each leg is in one
    /// registration; a registration has at most [`FAILED_LEGS_MAX`].
    #[serde(default)]
    pub failed: Vec<FailedLeg>,
}

impl Registration {
    /// The first one of an incarnation, of one rank, that says nothing but who it is and where.
    pub fn new(
        engine: EngineId,
        incarnation: Incarnation,
        role: Role,
        mode: Mode,
        http: Endpoint,
        control: Endpoint,
    ) -> Registration {
        Registration {
            engine,
            incarnation,
            sequence: 1,
            role,
            mode,
            http,
            control,
            dp_rank: 0,
            dp_size: 1,
            tp: 1,
            draining: false,
            fit: None,
            troubles: Vec::new(),
            models: None,
            failed: Vec::new(),
        }
    }
}

/// Names by which an instance takes requests. May be other ones later: adapters come and go.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ServedModels {
    /// Of its model, the first one before all others.
    pub names: Vec<Arc<str>>,
    /// Of the adapters of its model, LoRA for example.
    #[serde(default)]
    pub adapters: Vec<Arc<str>>,
}

/// Names that an instance has at most, and the bytes of each.
pub const MODELS_MAX: usize = 256;
pub const MODEL_NAME_MAX: usize = 256;

impl ServedModels {
    /// All names.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<str>> {
        self.names.iter().chain(&self.adapters)
    }

    /// True if requests for this name are served.
    pub fn has(&self, name: &str) -> bool {
        self.iter().any(|own| **own == *name)
    }

    /// True if there is a name, and they are no more and no longer than may be, of printable
    /// characters.
    pub fn is_well_formed(&self) -> bool {
        let is_name = |name: &Arc<str>| {
            (1..=MODEL_NAME_MAX).contains(&name.len()) && !name.contains(char::is_control)
        };
        (1..=MODELS_MAX).contains(&self.iter().count()) && self.iter().all(is_name)
    }
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

/// Failed legs in one registration; further ones are in the next one, which follows at once.
pub const FAILED_LEGS_MAX: usize = 128;

/// Longest transfer id of a failed leg in a registration, in bytes; legs with longer ones are left out.
pub const FAILED_LEG_ID_MAX: usize = 128;

/// Why a decode leg went without its KV. The server of the decode may answer the leg with an error that
/// does not contain the reason.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FailedLeg {
    /// The transfer of the leg.
    pub key: TransferKey,
    /// Which of the decode legs of the transfer it is.
    pub sibling: u32,
    /// Why the KV did not come.
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
