//! Which instance gets a leg: the least loaded one in tokens, less what a known prefix saves.
//!
//! Prefill and decode are chosen independently. Equal candidates take turns: a prefill the one
//! that waited longest, a decode the one that met this prefill longest ago, so that all pairs get
//! used and not P_i with D_i only.

use super::io::{Prompt, RouterConfig};
use super::registry::{Instance, Registry, Slot};
use crate::core::ids::ClientId;
use crate::core::message::{Mode, Role};
use crate::core::time::Nanos;

/// What a leg is chosen for.
#[derive(Clone, Copy)]
pub(super) struct Want<'a> {
    pub(super) now: Nanos,
    pub(super) client: ClientId,
    pub(super) prompt: &'a Prompt,
    /// Instances that failed this prompt; taken only if there is no other.
    pub(super) avoid: &'a [Slot],
}

/// An instance for a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) slot: Slot,
    pub(super) mode: Mode,
    /// Tokens of the prompt whose KV it probably has.
    pub(super) saved: u32,
}

impl Want<'_> {
    fn saved(&self, instance: &Instance, config: &RouterConfig) -> u32 {
        let hits = instance.prefixes.matched(&self.prompt.prefix) as u64;
        let saved = hits.saturating_mul(u64::from(config.prefix_tokens));
        saved.min(u64::from(self.prompt.tokens)) as u32
    }

    /// What `candidate` costs (smaller is better) and the choice that it would be.
    fn weigh(
        &self,
        (slot, instance): (Slot, &Instance),
        config: &RouterConfig,
    ) -> ((bool, i128), Choice) {
        let saved = self.saved(instance, config);
        let bonus = i128::from(saved) * i128::from(config.affinity_percent);
        let cost = i128::from(instance.tokens) * 100 - bonus;
        let choice = Choice { slot, mode: instance.registration.mode, saved };
        ((self.avoid.contains(&slot), cost), choice)
    }

    fn takers<'r>(
        &self,
        registry: &'r Registry,
        role: Role,
    ) -> impl Iterator<Item = (Slot, &'r Instance)> {
        let (now, client) = (self.now, self.client);
        registry.of_role(role).filter(move |(_, instance)| instance.takes(now, client))
    }
}

/// The prefill for a prompt; none unless there is a decode of the same mode, too.
pub(super) fn choose_prefill(
    registry: &Registry,
    want: &Want<'_>,
    config: &RouterConfig,
) -> Option<Choice> {
    let mut modes = [false; 2];
    for (_, decode) in want.takers(registry, Role::Decode) {
        modes[decode.registration.mode as usize] = true;
    }
    want.takers(registry, Role::Prefill)
        .filter(|(_, prefill)| modes[prefill.registration.mode as usize])
        .map(|candidate| (want.weigh(candidate, config), candidate.1.picked))
        .min_by_key(|((cost, choice), picked)| (*cost, *picked, choice.slot))
        .map(|((_, choice), _)| choice)
}

/// The decode for a sample that gets its KV from `prefill`.
pub(super) fn choose_decode(
    registry: &Registry,
    want: &Want<'_>,
    prefill: Choice,
    config: &RouterConfig,
) -> Option<Choice> {
    let partners = &registry.get(prefill.slot)?.paired;
    want.takers(registry, Role::Decode)
        .filter(|(_, decode)| decode.registration.mode == prefill.mode)
        .map(|candidate| {
            let met = partners.get(&candidate.0).copied();
            (want.weigh(candidate, config), met, candidate.1.picked)
        })
        .min_by_key(|((cost, choice), met, picked)| (*cost, *met, *picked, choice.slot))
        .map(|((_, choice), ..)| choice)
}
