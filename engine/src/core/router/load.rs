//! What servers say of their load, beside what the router knows of its own legs: it is not the only
//! one that sends them requests.
//!
//! Of the requests that a server has, those beyond the router's own are of others. One of them
//! counts as much as a leg of its role did lately. What a server says counts for
//! [`PERIODS`] periods, and changes which instance is taken and nothing else, so that who lies gets
//! more requests or fewer.

use super::registry::{InstanceId, RegisteredInstance, Registry};
use crate::core::message::Role;
use crate::core::time::Nanos;
use crate::fabric::Endpoint;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What a server said counts for so many periods.
const PERIODS: u64 = 3;

/// From here on a KV cache is as good as full, in thousandths.
const FULL: u16 = 950;

/// A server without a queue takes so many requests, or as many as run there, before what it said is
/// no longer taken for a promise.
const FREE: u32 = 8;

/// Tokens of a leg before there was one.
const LEG_TOKENS: u64 = 1_024;

/// What a server says of its load, all its engines together.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct ServerLoad {
    /// Requests that are computed.
    pub running: u32,
    /// Requests that are not, for whatever reason.
    pub waiting: u32,
    /// Those of them that wait because there is no room.
    pub queued: u32,
    /// How much of the KV cache is in use, in thousandths, of the engine with the most; what is above
    /// 1000 is 1000.
    pub kv_cache: u16,
}

/// What is known of the load of an instance beside its legs.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownLoad {
    /// What its server said.
    pub(super) said: ServerLoad,
    /// When.
    pub(super) at: Nanos,
    until: Nanos,
    /// Requests of others, an even share where several ranks are one server.
    others: u64,
    /// Legs that it was sent since.
    pub(super) sent: u32,
}

impl KnownLoad {
    fn counts(&self, now: Nanos) -> bool {
        now < self.until || planted!("old-loads-count")
    }
}

/// What a leg of each role weighs, in tokens; none before there was one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LegWeights([Option<u64>; 2]);

impl LegWeights {
    /// A leg of so many tokens was sent.
    pub(super) fn sent(&mut self, role: Role, tokens: u64) {
        let weight = &mut self.0[role as usize];
        *weight = Some(weight.map_or(tokens, |before| (before * 7 + tokens).div_ceil(8)));
    }
}

impl RegisteredInstance {
    /// What its server said, if that still counts.
    pub(super) fn load(&self, now: Nanos) -> Option<&KnownLoad> {
        self.load.as_ref().filter(|load| load.counts(now))
    }

    /// True if its server has a queue or hardly any room, or has got so much since that it may.
    pub(super) fn is_busy(&self, now: Nanos) -> bool {
        self.load(now).is_some_and(|load| {
            let ServerLoad { running, queued, kv_cache, .. } = load.said;
            queued > 0 || kv_cache >= FULL || load.sent > running.max(FREE)
        })
    }
}

impl Registry {
    /// Tokens that requests of others at an instance come to.
    pub(super) fn others(&self, now: Nanos, instance: &RegisteredInstance) -> u64 {
        let weight = self.weights.0[instance.registration.role as usize].unwrap_or(LEG_TOKENS);
        instance.load(now).map_or(0, |load| load.others.saturating_mul(weight))
    }

    /// The servers that are to be asked for their load.
    pub(super) fn ask_loads(&mut self, now: Nanos) -> BTreeSet<Endpoint> {
        let there = self.instances.values_mut().filter(|instance| instance.is_there(now));
        there
            .map(|instance| {
                instance.legs_asked = instance.legs.len();
                instance.registration.http.clone()
            })
            .collect()
    }

    /// A server said how busy it is.
    pub(super) fn loaded(&mut self, now: Nanos, http: &Endpoint, said: ServerLoad, period: Nanos) {
        let here: Vec<InstanceId> = self.at(http).map(|(instance_id, _)| instance_id).collect();
        // Which ones of its own it had counted is not known. If too many are taken for its own, it
        // is as if it had said nothing.
        let own: usize =
            self.at(http).map(|(_, it)| it.legs.len().max(it.legs_asked)).sum::<usize>();
        let all = u64::from(said.running) + u64::from(said.waiting);
        let others = all.saturating_sub(own as u64);
        let ranks = |role| self.at(http).filter(|(_, it)| it.registration.role == role).count();
        let ranks = ranks(Role::Prefill).max(ranks(Role::Decode)).max(1) as u64;
        let until = now + period.scale(PERIODS, 1);
        let said = ServerLoad { kv_cache: said.kv_cache.min(1_000), ..said };
        let load = KnownLoad { said, at: now, until, others: others.div_ceil(ranks), sent: 0 };
        for instance_id in here {
            self.instance_mut(instance_id).load = Some(load);
        }
    }

    /// The instances of the server at this address.
    pub(super) fn at(
        &self,
        http: &Endpoint,
    ) -> impl Iterator<Item = (InstanceId, &RegisteredInstance)> {
        self.iter().filter(move |(_, instance)| instance.registration.http == *http)
    }
}
