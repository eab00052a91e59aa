//! What the router tells about itself.

use super::io::Dialects;
use super::load::ServerLoad;
use super::registry::{HostLoss, RegisteredInstance};
use super::rejections::RejectReason;
use crate::core::dialect::moriio::address::ZmqAddress;
use crate::core::ids::{EngineId, Incarnation};
use crate::core::message::{Mode, Role, ServedModels};
use crate::core::time::Nanos;
use crate::fabric::Endpoint;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Whether an instance gets new legs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum InstanceState {
    Ready,
    /// It has not answered a probe yet.
    Unproven,
    /// It failed lately and is left alone for a time.
    Suspect,
    /// The connection that it registered by has ended, and its server may go on: it gets no legs until
    /// it registers again.
    Disconnected,
    /// It has not registered again in time, and its server may go on: the same.
    Late,
    /// It failed repeatedly and has to serve one client before it gets more.
    Trial,
    /// It asked for no more, or registered anew in another role.
    Draining,
    /// Its registration expired; its streams go on for a time.
    Lost,
    /// Its server has legs of another role to finish first.
    Switching,
}

impl InstanceState {
    /// True if an instance in this state can serve now, as far as is known.
    pub fn serves(self) -> bool {
        matches!(self, InstanceState::Ready | InstanceState::Trial)
    }
}

/// An instance as the router sees it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InstanceView<'a> {
    pub engine: &'a EngineId,
    pub incarnation: Incarnation,
    pub role: Role,
    pub mode: Mode,
    /// Where it takes legs.
    pub http: &'a Endpoint,
    /// Where MoRIIO peers find it, if it speaks MoRIIO.
    pub zmq: Option<&'a ZmqAddress>,
    /// How it is spoken to.
    pub dialects: Dialects,
    pub dp_rank: u16,
    /// Number of DP ranks.
    pub dp_size: u16,
    /// Number of TP ranks.
    pub tp: u16,
    /// Time since its last registration.
    pub age: Nanos,
    /// Tokens of its legs in flight.
    pub tokens: u64,
    pub legs: u32,
    /// What its server said of its load and how long ago, if that counts.
    pub load: Option<(ServerLoad, Nanos)>,
    /// True if other servers are preferred because of that load, or if it takes no more legs now.
    pub busy: bool,
    /// Legs that it takes at a time, if it refused one as busy.
    pub legs_max: Option<u32>,
    /// Whether it gets new legs.
    pub state: InstanceState,
    /// The models that it serves, as far as known.
    pub models: Option<&'a Arc<ServedModels>>,
}

impl<'a> InstanceView<'a> {
    pub(super) fn new(instance: &'a RegisteredInstance, now: Nanos) -> Self {
        let registration = &instance.registration;
        let state = if instance.lost {
            InstanceState::Lost
        } else if instance.is_leaving() {
            InstanceState::Draining
        } else if instance.follows.is_some() {
            InstanceState::Switching
        } else if instance.unproven {
            InstanceState::Unproven
        } else if let Some(loss) = instance.hostless {
            match loss {
                HostLoss::LinkEnded => InstanceState::Disconnected,
                HostLoss::Silent => InstanceState::Late,
            }
        } else if instance.health.is_suspect(now) {
            InstanceState::Suspect
        } else if instance.health.on_trial().is_some() {
            InstanceState::Trial
        } else {
            InstanceState::Ready
        };
        InstanceView {
            engine: &registration.engine,
            incarnation: registration.incarnation,
            role: registration.role,
            mode: registration.mode,
            http: &registration.http,
            zmq: instance.zmq.as_ref(),
            dialects: instance.dialects(),
            dp_rank: registration.dp_rank,
            dp_size: registration.dp_size,
            tp: registration.tp,
            age: now - instance.registered,
            tokens: instance.tokens,
            legs: instance.legs.len() as u32,
            load: instance.load(now).map(|load| (load.said, now - load.at)),
            busy: instance.is_busy(now) || !instance.has_room(now),
            legs_max: instance.room.limit(),
            state,
            models: instance.models(),
        }
    }
}

/// What the router counted since it started.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RouterCounters {
    /// Registrations not taken, by reason.
    pub rejected: BTreeMap<RejectReason, u64>,
    /// Registrations that repeated or preceded what was known.
    pub stale: u64,
    /// Instances whose registration expired and that did not answer at their HTTP address, or came
    /// back too late.
    pub expired: u64,
    /// Times that the connection of registrations of an instance ended, or that it was late.
    pub hostless: u64,
    /// Instances that were replaced by a newer incarnation.
    pub replaced: u64,
    /// Instances that registered anew in another role while they had legs in the former one.
    pub switched: u64,
    /// Times that an instance became suspect.
    pub suspicions: u64,
    pub legs: u64,
    pub cancelled: u64,
    /// Decode legs that should read by MoRIIO, or are of static instances, and were sent without
    /// anything to read, because the prefill's answer has nothing.
    pub unread: u64,
    /// Samples sent again.
    pub retries: u64,
    /// Those of them that do not count against the tries of their request, because an instance had
    /// lost its host.
    pub excused: u64,
    /// Legs that instances refused as busy.
    pub busy: u64,
    /// Failures after which nothing was sent again, because too much was.
    pub refused_retries: u64,
    /// Requests that were refused because too many were open or waited.
    pub shed: u64,
    /// Requests for a model that no instance serves.
    pub unknown_models: u64,
    /// Prompts that were sent to a decode alone.
    pub direct: u64,
    /// News of legs that were unknown or had ended.
    pub late: u64,
}
