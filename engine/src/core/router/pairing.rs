//! Which instance gets a leg: the least loaded one in tokens, less what a known prefix saves.
//!
//! Prefill and decode are chosen independently, but for pairs that do not fit, which are not taken,
//! and those between which KV did not get through lately, or that are one server: they are taken only
//! if there is no other. A server that is both has the load of both. What servers say of requests of
//! others counts as well, and who is busy by its own word is taken only if all are.
//! Among equals, who met the other side's choice longest ago is taken, then who was not chosen for
//! longest: all pairs get used, and not P_i with D_i only.

use super::health::Health;
use super::io::{RoutedPrompt, RouterConfig};
use super::registry::{InstanceId, RegisteredInstance, Registry};
use crate::core::ids::{ClientId, EngineId};
use crate::core::message::{Mode, Role};
use crate::core::time::Nanos;

/// Whether the pair is suspect, whether the instance failed this prompt, and whether the pair is one
/// server.
type PairSuspicion = (bool, bool, bool);

/// Then whether its server is busy by its own word, hundredths of tokens, and failures of the pair in a
/// row; smaller is better.
type LegCost = (PairSuspicion, bool, i128, u32);

/// What a leg is chosen for, and among whom.
#[derive(Clone, Copy)]
pub(super) struct SelectionRequest<'a> {
    pub(super) registry: &'a Registry,
    pub(super) config: &'a RouterConfig,
    pub(super) now: Nanos,
    pub(super) client: ClientId,
    pub(super) prompt: &'a RoutedPrompt,
    /// The model that it is for, if that is said.
    pub(super) model: Option<&'a str>,
    /// Engines that alone may serve it; none takes any.
    pub(super) engines: Option<&'a [EngineId]>,
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

impl<'a> SelectionRequest<'a> {
    /// What `candidate` costs, without regard to a partner, and the choice that it would be.
    fn weigh(self, (id, instance): (InstanceId, &RegisteredInstance)) -> (LegCost, Choice) {
        let mut hits = instance.prefixes.matched(&self.prompt.prefix) as u64;
        if planted!("a-hit-more-is-expected") && hits > 0 {
            hits += 1;
        }
        let saved = hits.saturating_mul(u64::from(self.config.prefix_tokens));
        let saved = saved.min(u64::from(self.prompt.tokens)) as u32;
        let bonus = i128::from(saved) * i128::from(self.config.affinity_percent);
        let beside = instance.beside.and_then(|beside| self.registry.get(beside));
        let tokens = instance.tokens + beside.map_or(0, |beside| beside.tokens);
        let tokens = i128::from(tokens) + i128::from(self.registry.others(self.now, instance));
        let cost = match planted!("busiest-instance-is-chosen") {
            true => bonus - tokens * 100,
            false => tokens * 100 - bonus,
        };
        let choice = Choice { instance_id: id, mode: instance.registration.mode, saved };
        let is_busy = instance.is_busy(self.now);
        (((false, self.avoid.contains(&id), false), is_busy, cost, 0), choice)
    }

    /// The same for a decode of KV from `prefill`.
    fn weigh_pair(
        self,
        prefill: &RegisteredInstance,
        decode: (InstanceId, &RegisteredInstance),
    ) -> (LegCost, Choice) {
        let (((_, avoid, _), is_busy, cost, _), choice) = self.weigh(decode);
        let health = prefill.failing.get(&decode.0);
        let suspect = health.is_some_and(|health| health.is_suspect(self.now));
        let is_one = prefill.beside == Some(decode.0);
        let failures = health.map_or(0, Health::failures);
        (((suspect, avoid, is_one), is_busy, cost, failures), choice)
    }

    fn takers(self, role: Role) -> impl Iterator<Item = (InstanceId, &'a RegisteredInstance)> {
        let SelectionRequest { now, client, model, engines, .. } = self;
        let is_named = move |it: &RegisteredInstance| {
            engines.is_none_or(|engines| engines.contains(&it.registration.engine))
        };
        self.registry
            .of_role(role)
            .filter(move |(_, it)| it.takes(now, client) && it.serves(model) && is_named(it))
    }

    fn decodes_for(
        self,
        prefill: &'a RegisteredInstance,
    ) -> impl Iterator<Item = (InstanceId, &'a RegisteredInstance)> {
        let mode = prefill.registration.mode;
        self.takers(Role::Decode)
            .filter(move |(_, decode)| {
                decode.registration.mode == mode && decode.understands(prefill)
            })
            .filter(|(instance_id, _)| !prefill.misfits.contains_key(instance_id))
    }

    /// The prefill for a prompt; none unless there is a decode of the same mode, too.
    pub(super) fn choose_prefill(self) -> Option<Choice> {
        let mut decodes = [const { None }; 2];
        // Whether all decodes understand those who speak one dialect only.
        let (mut all_native, mut all_moriio, mut all_static) = (true, true, true);
        for candidate in self.takers(Role::Decode) {
            let dialects = candidate.1.dialects();
            all_native &= dialects.native;
            all_moriio &= dialects.moriio;
            all_static &= dialects.is_static();
            let (cost, choice) = self.weigh(candidate);
            BestDecode::update(&mut decodes[choice.mode as usize], cost, choice.instance_id);
        }
        self.takers(Role::Prefill)
            .filter_map(|candidate| {
                let (((_, avoid, _), is_busy, cost, _), choice) = self.weigh(candidate);
                let prefill = candidate.1;
                let anyone = decodes[choice.mode as usize]?;
                let dialects = prefill.dialects();
                let understood = dialects.native && all_native
                    || dialects.moriio && all_moriio
                    || dialects.is_static() && all_static;
                let all_fit = prefill.misfits.is_empty();
                // The best one is that of the same server.
                let is_one = prefill.beside.is_some() && prefill.beside == anyone.only;
                let decode = match prefill.failing.is_empty() && all_fit && understood && !is_one {
                    true => anyone,
                    false => self.best_decode(prefill)?,
                };
                let ((suspect, avoids, is_one), decode_busy, _, failures) = decode.cost;
                let met = decode.only.and_then(|decode| prefill.paired.get(&decode).copied());
                let doubts = (suspect, avoid, avoids, is_one, is_busy, decode_busy);
                Some(((doubts, cost, failures, met, prefill.picked, choice.instance_id), choice))
            })
            .min_by_key(|(rank, _)| *rank)
            .map(|(_, choice)| choice)
    }

    /// The best decode for KV from `prefill`.
    fn best_decode(self, prefill: &'a RegisteredInstance) -> Option<BestDecode> {
        let mut best = None;
        for candidate in self.decodes_for(prefill) {
            let (cost, choice) = self.weigh_pair(prefill, candidate);
            BestDecode::update(&mut best, cost, choice.instance_id);
        }
        best
    }

    /// True if little of the prompt is to be computed, so that a decode is to do it alone.
    pub(super) fn is_direct(self) -> bool {
        let below = self.config.direct_below;
        below > 0 && self.choose_alone().is_some_and(|it| self.prompt.tokens - it.saved < below)
    }

    /// The decode for a prompt that it computes itself.
    pub(super) fn choose_alone(self) -> Option<Choice> {
        self.takers(Role::Decode)
            .map(|candidate| {
                let (cost, choice) = self.weigh(candidate);
                ((cost, candidate.1.picked, choice.instance_id), choice)
            })
            .min_by_key(|(rank, _)| *rank)
            .map(|(_, choice)| choice)
    }

    /// The decode for a sample that gets its KV from `prefill`.
    pub(super) fn choose_decode(self, prefill: InstanceId) -> Option<Choice> {
        let prefill = self.registry.get(prefill)?;
        self.decodes_for(prefill)
            .map(|candidate| {
                let (cost, choice) = self.weigh_pair(prefill, candidate);
                let met = prefill.paired.get(&candidate.0).copied();
                ((cost, met, candidate.1.picked, choice.instance_id), choice)
            })
            .min_by_key(|(rank, _)| *rank)
            .map(|(_, choice)| choice)
    }
}

/// The smallest cost seen, and who has it if it is only one.
#[derive(Clone, Copy)]
struct BestDecode {
    cost: LegCost,
    only: Option<InstanceId>,
}

impl BestDecode {
    fn update(best: &mut Option<BestDecode>, cost: LegCost, instance_id: InstanceId) {
        match best {
            Some(best) if best.cost < cost => {}
            Some(best) if best.cost == cost => best.only = None,
            _ => *best = Some(BestDecode { cost, only: Some(instance_id) }),
        }
    }
}
