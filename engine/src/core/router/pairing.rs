//! Which instance gets a leg: the least loaded one in tokens, less what a known prefix saves.
//!
//! Prefill and decode are chosen independently, but for pairs that do not fit, which are not taken,
//! and those between which KV did not get through lately: they are taken only if there is no other.
//! Among equals, who met the other side's choice longest ago is taken, then who was not chosen for
//! longest: all pairs get used, and not P_i with D_i only.

use super::health::Health;
use super::io::{RoutedPrompt, RouterConfig};
use super::registry::{InstanceId, RegisteredInstance, Registry};
use crate::core::ids::ClientId;
use crate::core::message::{Mode, Role};
use crate::core::time::Nanos;

/// Whether the pair is suspect, and whether the instance failed this prompt.
type PairSuspicion = (bool, bool);

/// Then hundredths of tokens, and failures of the pair in a row; smaller is better.
type LegCost = (PairSuspicion, i128, u32);

/// What a leg is chosen for.
#[derive(Clone, Copy)]
pub(super) struct SelectionRequest<'a> {
    pub(super) now: Nanos,
    pub(super) client: ClientId,
    pub(super) prompt: &'a RoutedPrompt,
    /// Instances that failed this prompt; taken only if there is no other.
    pub(super) avoid: &'a [InstanceId],
}

/// An instance for a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Choice {
    pub(super) instance_id: InstanceId,
    pub(super) mode: Mode,
    /// Tokens of the prompt whose KV it probably has.
    pub(super) saved: u32,
}

impl SelectionRequest<'_> {
    fn saved(&self, instance: &RegisteredInstance, config: &RouterConfig) -> u32 {
        let hits = instance.prefixes.matched(&self.prompt.prefix) as u64;
        let saved = hits.saturating_mul(u64::from(config.prefix_tokens));
        saved.min(u64::from(self.prompt.tokens)) as u32
    }

    /// What `candidate` costs, without regard to a partner, and the choice that it would be.
    fn weigh(
        &self,
        (instance_id, instance): (InstanceId, &RegisteredInstance),
        config: &RouterConfig,
    ) -> (LegCost, Choice) {
        let saved = self.saved(instance, config);
        let bonus = i128::from(saved) * i128::from(config.affinity_percent);
        let cost = i128::from(instance.tokens) * 100 - bonus;
        let choice = Choice { instance_id, mode: instance.registration.mode, saved };
        (((false, self.avoid.contains(&instance_id)), cost, 0), choice)
    }

    /// The same for a decode of KV from `prefill`.
    fn weigh_pair(
        &self,
        prefill: &RegisteredInstance,
        decode: (InstanceId, &RegisteredInstance),
        config: &RouterConfig,
    ) -> (LegCost, Choice) {
        let (((_, avoid), cost, _), choice) = self.weigh(decode, config);
        let health = prefill.failing.get(&decode.0);
        let suspect = health.is_some_and(|health| health.is_suspect(self.now));
        (((suspect, avoid), cost, health.map_or(0, Health::failures)), choice)
    }

    fn takers<'r>(
        &self,
        registry: &'r Registry,
        role: Role,
    ) -> impl Iterator<Item = (InstanceId, &'r RegisteredInstance)> {
        let (now, client) = (self.now, self.client);
        registry.of_role(role).filter(move |(_, instance)| instance.takes(now, client))
    }

    fn decodes_for<'r>(
        &self,
        registry: &'r Registry,
        prefill: &'r RegisteredInstance,
    ) -> impl Iterator<Item = (InstanceId, &'r RegisteredInstance)> {
        let mode = prefill.registration.mode;
        self.takers(registry, Role::Decode)
            .filter(move |(_, decode)| {
                decode.registration.mode == mode && decode.understands(prefill)
            })
            .filter(|(instance_id, _)| !prefill.misfits.contains_key(instance_id))
    }
}

/// The prefill for a prompt; none unless there is a decode of the same mode, too.
pub(super) fn choose_prefill(
    registry: &Registry,
    want: &SelectionRequest<'_>,
    config: &RouterConfig,
) -> Option<Choice> {
    let mut decodes = [const { None }; 2];
    // Whether all decodes understand those who speak one dialect only.
    let (mut all_native, mut all_moriio) = (true, true);
    for candidate in want.takers(registry, Role::Decode) {
        all_native &= candidate.1.native;
        all_moriio &= candidate.1.zmq.is_some();
        let (cost, choice) = want.weigh(candidate, config);
        BestDecode::update(&mut decodes[choice.mode as usize], cost, choice.instance_id);
    }
    want.takers(registry, Role::Prefill)
        .filter_map(|candidate| {
            let (((_, avoid), cost, _), choice) = want.weigh(candidate, config);
            let prefill = candidate.1;
            let anyone = decodes[choice.mode as usize]?;
            let understood = prefill.native && all_native || prefill.zmq.is_some() && all_moriio;
            let all_fit = prefill.misfits.is_empty();
            let decode = match prefill.failing.is_empty() && all_fit && understood {
                true => anyone,
                false => BestDecode::of(registry, want, prefill, config)?,
            };
            let ((suspect, avoids), _, failures) = decode.cost;
            let met = decode.only.and_then(|decode| prefill.paired.get(&decode).copied());
            let doubts = (suspect, avoid, avoids);
            Some(((doubts, cost, failures, met, prefill.picked, choice.instance_id), choice))
        })
        .min_by_key(|(rank, _)| *rank)
        .map(|(_, choice)| choice)
}

/// The smallest cost seen, and who has it if it is only one.
#[derive(Clone, Copy)]
struct BestDecode {
    cost: LegCost,
    only: Option<InstanceId>,
}

impl BestDecode {
    /// The best decode for KV from `prefill`.
    fn of(
        registry: &Registry,
        want: &SelectionRequest<'_>,
        prefill: &RegisteredInstance,
        config: &RouterConfig,
    ) -> Option<BestDecode> {
        let mut best = None;
        for candidate in want.decodes_for(registry, prefill) {
            let (cost, choice) = want.weigh_pair(prefill, candidate, config);
            BestDecode::update(&mut best, cost, choice.instance_id);
        }
        best
    }

    fn update(best: &mut Option<BestDecode>, cost: LegCost, instance_id: InstanceId) {
        match best {
            Some(best) if best.cost < cost => {}
            Some(best) if best.cost == cost => best.only = None,
            _ => *best = Some(BestDecode { cost, only: Some(instance_id) }),
        }
    }
}

/// The decode for a sample that gets its KV from `prefill`.
pub(super) fn choose_decode(
    registry: &Registry,
    want: &SelectionRequest<'_>,
    prefill: InstanceId,
    config: &RouterConfig,
) -> Option<Choice> {
    let prefill = registry.get(prefill)?;
    want.decodes_for(registry, prefill)
        .map(|candidate| {
            let (cost, choice) = want.weigh_pair(prefill, candidate, config);
            let met = prefill.paired.get(&candidate.0).copied();
            ((cost, met, candidate.1.picked, choice.instance_id), choice)
        })
        .min_by_key(|(rank, _)| *rank)
        .map(|(_, choice)| choice)
}
