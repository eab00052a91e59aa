//! I22: what the router expects of a prefix cache was given to the instance in its present life, and until
//! the first fault it hits.

use super::{CheckContext, Invariant, leading};
use crate::observation::{Observation, ObservationKind, SimProcessId};
use kvferry_engine::core::ids::{ClientId, Incarnation, LegId, RequestId};
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::message::DecodeHook;
use kvferry_engine::core::router::{LegBody, LegEvent, PrefixEstimate};
use kvferry_scenarios::run::{Run, WorkloadPrompt};
use std::collections::{BTreeMap, BTreeSet};

/// Compares each estimate with the prompts of the legs before it, and with the hit.
///
/// An estimate may be lower after a fault, as registrations lapse and routers die with what they knew, but
/// never higher. Hits are judged where nothing but full attention is cached, for prompts that an instance has
/// served to their end, as long as none of their blocks was handed out once more.
#[derive(Debug, Default)]
pub(super) struct PrefixEstimates {
    is_faulted: bool,
    /// The router has room for all prefixes.
    knows_all: bool,
    /// Tokens of a hash for the router, and in prompts.
    run_tokens: (u32, u32),
    /// Prompts by client and index.
    prompts: Vec<Vec<WorkloadPrompt>>,
    /// Clients whose prompts decode engines render to other tokens than they are known by.
    differing: BTreeSet<ClientId>,
    /// Hashes of prompts that lives of instances were given.
    given: BTreeMap<(u16, Incarnation), BTreeSet<u64>>,
    /// Caches by instance.
    caches: Vec<PrefixCache>,
    /// Legs that have not ended.
    legs: BTreeMap<LegId, EstimatedLeg>,
    /// The same by what engines call them.
    requests: BTreeMap<(u16, RequestId), LegId>,
}

/// Content that the cache of an instance has to have.
#[derive(Debug, Default)]
struct PrefixCache {
    /// Tokens of which a hit is a multiple; zero where hits are not judged.
    align: u32,
    hashes: BTreeSet<u64>,
    /// For whose prompt each block, by group and id, was taken last; none if that is not known.
    blocks: BTreeMap<(usize, u32), Option<(ClientId, u32)>>,
}

impl PrefixCache {
    /// Marks the content of a prompt as content that the cache may lack.
    fn forget(&mut self, prompt: Option<&WorkloadPrompt>) {
        for hash in prompt.iter().flat_map(|prompt| prompt.prefix.iter()) {
            self.hashes.remove(hash);
        }
    }
}

#[derive(Debug)]
struct EstimatedLeg {
    instance: u16,
    /// Name that the engine gave it.
    request: Option<RequestId>,
    place: (ClientId, u32),
    /// Tokens that are expected.
    tokens: u32,
    /// Leading hashes of its prompt that the cache had when it was sent.
    hashes: usize,
    /// The engine has not told of its hit.
    is_open: bool,
    /// The cache may not have its prompt when it was served: the engine renders it to other tokens, or blocks were
    /// handed out once more to another one while it ran, which may have been the only ones that the cache knew of a
    /// prefix that it had computed, too.
    is_doubtful: bool,
}

/// A prompt of a client; none of requests of the simulator's own.
fn prompt_at(
    prompts: &[Vec<WorkloadPrompt>],
    (client, prompt): (ClientId, u32),
) -> Option<&WorkloadPrompt> {
    prompts.get(client.0 as usize)?.get(prompt as usize)
}

impl PrefixEstimates {
    pub(super) fn new(run: &Run) -> PrefixEstimates {
        let prompts: Vec<_> = run.requests.iter().map(|request| request.prompts.clone()).collect();
        let hashes: usize = prompts.iter().flatten().map(|prompt| prompt.prefix.len()).sum();
        let is_full = run.model.groups.iter().all(|group| group.kind == GroupKind::Full);
        let differing = (0u32..).zip(&run.requests).filter(|(_, of)| of.decode_rendering.is_some());
        let caches = run.instances.iter().map(|one| PrefixCache {
            align: if is_full && one.prefix_cache { one.block_tokens } else { 0 },
            ..PrefixCache::default()
        });
        PrefixEstimates {
            knows_all: hashes <= run.router.config.prefixes_max as usize,
            run_tokens: (run.router.config.prefix_tokens, run.prefix_tokens),
            differing: differing.map(|(client, _)| ClientId(client.into())).collect(),
            caches: caches.collect(),
            prompts,
            ..PrefixEstimates::default()
        }
    }

    fn prompt(&self, place: (ClientId, u32)) -> Option<&WorkloadPrompt> {
        prompt_at(&self.prompts, place)
    }

    fn dispatched(
        &mut self,
        now: CheckContext<'_>,
        (leg, instance): (LegId, u16),
        (client, body): (ClientId, &LegBody),
        expected: PrefixEstimate,
    ) {
        let (LegBody::Prefill { prompt, .. } | LegBody::Decode { prompt, .. }) = body;
        let place = (client, *prompt);
        let is_other = matches!(body, LegBody::Decode { .. }) && self.differing.contains(&client);
        let PrefixEstimate { incarnation, tokens } = expected;
        let life = (instance, incarnation);
        let (mut most, mut hashes) = (0, 0);
        if let Some(prompt) = self.prompt(place) {
            let known = leading(&prompt.prefix, self.given.get(&life)) as u32;
            most = known.saturating_mul(self.run_tokens.0).min(prompt.tokens);
            if !is_other {
                hashes = leading(&prompt.prefix, Some(&self.caches[usize::from(instance)].hashes));
            }
            let given = prompt.prefix.clone();
            self.given.entry(life).or_default().extend(given.iter());
        }
        if tokens > most || tokens < most && self.knows_all && !self.is_faulted {
            let name = now.name(instance);
            now.report(|| {
                format!(
                    "{tokens} tokens of leg {leg} of client {} are expected to hit at {name}, which was given {most}",
                    place.0
                )
            });
        }
        if !self.is_faulted {
            let (request, is_open, is_doubtful) = (None, true, is_other);
            let sent =
                EstimatedLeg { instance, request, place, tokens, hashes, is_open, is_doubtful };
            self.legs.insert(leg, sent);
        }
    }

    /// Judges how many tokens of a leg's prompt an engine had, once for each leg.
    fn hit(&mut self, now: CheckContext<'_>, leg: LegId, hit: u32) {
        let Some(of) = self.legs.get_mut(&leg) else { return };
        if !std::mem::take(&mut of.is_open) {
            return;
        }
        let EstimatedLeg { instance, place, tokens, hashes, .. } = *of;
        let cache = &self.caches[usize::from(instance)];
        let Some(prompt) = self.prompt(place).filter(|_| cache.align > 0) else { return };
        let kept = leading(&prompt.prefix, Some(&cache.hashes)).min(hashes) as u32;
        // The last token is computed in any case.
        let most = tokens.min(prompt.tokens.saturating_sub(1));
        let kept = kept.saturating_mul(self.run_tokens.1).min(most);
        let due = kept - kept % cache.align;
        if hit < due {
            let name = now.name(instance);
            now.report(|| {
                format!(
                    "{tokens} tokens of leg {leg} of client {} were expected to hit at {name}, which has {due} of them: {hit} did",
                    place.0
                )
            });
        }
    }

    /// Takes the first news of a request for what it hit.
    fn hit_of(
        &mut self,
        now: CheckContext<'_>,
        (who, request): (SimProcessId, &RequestId),
        hit: u32,
    ) {
        if let Some(leg) = self.requests.get(&(who.instance, request.clone())) {
            self.hit(now, *leg, hit);
        }
    }

    fn taken(&mut self, (who, request): (SimProcessId, &RequestId), blocks: &[Vec<u32>]) {
        let taker = self.requests.get(&(who.instance, request.clone())).copied();
        let place = taker.and_then(|leg| self.legs.get(&leg)).map(|leg| leg.place);
        let cache = &mut self.caches[usize::from(who.instance)];
        if cache.align == 0 {
            return;
        }
        let all = (0..).zip(blocks).flat_map(|(group, ids)| ids.iter().map(move |id| (group, *id)));
        let mut is_again = false;
        for block in all {
            let Some(former) = cache.blocks.insert(block, place) else { continue };
            is_again = true;
            cache.forget(former.and_then(|place| prompt_at(&self.prompts, place)));
        }
        if is_again {
            for (id, leg) in &mut self.legs {
                leg.is_doubtful |= leg.instance == who.instance && Some(*id) != taker;
            }
        }
    }

    fn closed(&mut self, leg: LegId) -> Option<EstimatedLeg> {
        let mut of = self.legs.remove(&leg)?;
        if let Some(request) = of.request.take() {
            self.requests.remove(&(of.instance, request));
        }
        Some(of)
    }

    /// A leg was closed before its end. A decode that waited for KV quarantines all of its blocks, those that
    /// it shares with a prompt before it among them, and a quarantined block hits nothing.
    fn given_up(&mut self, leg: LegId) {
        let Some(of) = self.closed(leg) else { return };
        self.caches[usize::from(of.instance)].forget(prompt_at(&self.prompts, of.place));
    }

    /// A prompt was served: its KV is in the cache.
    fn served(&mut self, leg: LegId) {
        let Some(of) = self.closed(leg).filter(|of| !of.is_doubtful) else { return };
        if let Some(prompt) = self.prompt(of.place) {
            let prefix = prompt.prefix.clone();
            self.caches[usize::from(of.instance)].hashes.extend(prefix.iter());
        }
    }
}

impl Invariant for PrefixEstimates {
    fn wants(&self) -> &'static [ObservationKind] {
        use ObservationKind::*;
        &[Faulted, Dispatched, LegTaken, Taken, DecodeHook, Used, Leg, LegClosed]
    }

    fn observe(&mut self, now: CheckContext<'_>, seen: &Observation<'_>) {
        if let Observation::Dispatched { leg, client, instance, body, expected } = seen {
            return self.dispatched(now, (*leg, *instance), (*client, body), *expected);
        }
        if self.is_faulted {
            return;
        }
        match seen {
            Observation::Faulted { .. } | Observation::Leg { event: LegEvent::Failed(_), .. } => {
                self.is_faulted = true;
                self.legs.clear();
                self.requests.clear();
            }
            Observation::LegTaken { who, leg, request } => {
                if let Some(of) = self.legs.get_mut(leg) {
                    of.request = Some((*request).clone());
                    self.requests.insert((who.instance, (*request).clone()), *leg);
                }
            }
            Observation::Taken { who, request, blocks } => self.taken((*who, request), blocks),
            Observation::DecodeHook {
                who,
                hook: DecodeHook::Allocated { request, computed, .. },
            } => {
                self.hit_of(now, (*who, request), *computed);
            }
            Observation::Used { at, request, tokens, .. } => {
                self.hit_of(now, (at.who, request), *tokens);
            }
            Observation::Leg { leg, event, .. } => {
                self.hit(now, *leg, 0);
                if !matches!(event, LegEvent::FirstToken) {
                    self.served(*leg);
                }
            }
            Observation::LegClosed { leg } => self.given_up(*leg),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariants::testing::{
        D0, InvariantBench, InvariantId, P0, asks_for, decode_body, finished, prefill_body, rank,
        request,
    };
    use kvferry_scenarios::lists::FaultKind;
    use std::sync::Arc;

    /// Tokens of the prompts, which begin with two known runs.
    const TOKENS: u32 = 1_100;

    /// Requests with prompts of these runs of 512 tokens.
    fn bench(prefixes: &[&[u64]]) -> InvariantBench {
        bench_with(prefixes, |_| ())
    }

    fn bench_with(prefixes: &[&[u64]], change: impl Fn(&mut Run)) -> InvariantBench {
        InvariantBench::with(InvariantId::PrefixEstimates, |run| {
            let mut asks = asks_for("m");
            run.requests.clear();
            for prefix in prefixes {
                let prefix: Arc<[u64]> = (*prefix).into();
                asks.prompts = vec![WorkloadPrompt { tokens: TOKENS, prefix, tail: 1 }];
                run.requests.push(asks.clone());
            }
            run.instances.iter_mut().for_each(|one| one.prefix_cache = true);
            change(run);
        })
    }

    /// A leg runs to its end, for which blocks are taken.
    fn serve(bench: &mut InvariantBench, number: u64, expected: u32, ids: &[u32]) {
        let name = &format!("r{number}");
        bench.dispatched_expecting((number, number), P0, &prefill_body(name), expected);
        bench.leg_taken(P0, number, name);
        bench.taken(P0, name, ids);
        bench.leg(P0, number, &finished());
    }

    #[test]
    fn what_the_instance_was_given_is_expected_no_more_and_no_less() {
        for (expected, held) in [(0, false), (512, false), (1_024, true), (1_100, false)] {
            let mut bench = bench(&[&[1, 2], &[1, 2]]);
            serve(&mut bench, 0, 0, &[1, 2, 3]);
            bench.dispatched_expecting((1, 1), P0, &prefill_body("r1"), expected);
            let text = format!(
                "{expected} tokens of leg 1 of client 1 are expected to hit at p0, which was given 1024"
            );
            bench.judges(held, &text);
        }
    }

    #[test]
    fn after_a_fault_less_may_be_expected_and_in_the_next_life_nothing() {
        for (incarnation, expected, held) in
            [(0, 0, true), (0, 1_100, false), (1, 0, true), (1, 512, false)]
        {
            let mut bench = bench(&[&[1, 2], &[1, 2]]);
            serve(&mut bench, 0, 0, &[1, 2, 3]);
            bench.see(Observation::Faulted { kind: FaultKind::Crash, from: Some(0), to: None });
            let who = SimProcessId { incarnation, ..P0 };
            bench.dispatched_expecting((1, 1), who, &prefill_body("r1"), expected);
            bench.judges(held, "are expected to hit at p0");
        }
    }

    /// A prompt that begins alike begins to be served.
    fn follow(bench: &mut InvariantBench, ids: &[u32]) {
        bench.dispatched_expecting((1, 1), P0, &prefill_body("r1"), 512);
        bench.leg_taken(P0, 1, "r1");
        bench.taken(P0, "r1", ids);
    }

    #[test]
    fn what_is_expected_hits() {
        let miss =
            "512 tokens of leg 1 of client 1 were expected to hit at p0, which has 512 of them";
        for (hit, held) in [(Some(512), true), (Some(496), false), (None, false)] {
            let mut bench = bench(&[&[1, 2], &[1, 3]]);
            serve(&mut bench, 0, 0, &[1, 2, 3]);
            follow(&mut bench, &[4]);
            if let Some(tokens) = hit {
                let (at, request) = (rank(P0), request("r1"));
                bench.see(Observation::Used { at, request: &request, tokens, wrong: None });
            }
            bench.leg(P0, 1, &LegEvent::FirstToken);
            bench.judges(held, miss);
        }
    }

    /// Two prompts that begin alike are decoded, one after the other, and nothing of the second one hits.
    fn decode_both(bench: &mut InvariantBench) {
        for number in 0..2 {
            let name = &format!("r{number}");
            bench.dispatched_expecting(
                (number, number),
                D0,
                &decode_body(name),
                512 * number as u32,
            );
            bench.leg_taken(D0, number, name);
            bench.allocated(D0, name, TOKENS, &[1 + number as u32]);
            bench.leg(D0, number, &finished());
        }
    }

    #[test]
    fn a_decode_tells_of_its_hit_when_it_asks_for_the_rest() {
        let mut bench = bench(&[&[1, 2], &[1, 3]]);
        decode_both(&mut bench);
        bench.fails("512 tokens of leg 1 of client 1 were expected to hit at d0, which has 512 of them: 0 did");
    }

    #[test]
    fn a_prompt_that_the_decode_renders_to_other_tokens_may_miss() {
        for differs in 0..2 {
            let mut bench = bench_with(&[&[1, 2], &[1, 3]], |run| {
                run.requests[differs].decode_rendering = Some(7);
            });
            decode_both(&mut bench);
            bench.holds();
        }
    }

    #[test]
    fn blocks_that_were_handed_out_once_more_may_miss() {
        let mut bench = bench(&[&[1, 2], &[1, 3], &[7, 8]]);
        serve(&mut bench, 0, 0, &[1, 2, 3]);
        serve(&mut bench, 2, 0, &[3, 4]);
        follow(&mut bench, &[5]);
        bench.leg(P0, 1, &LegEvent::FirstToken);
        bench.holds();
    }

    #[test]
    fn a_prompt_beside_which_blocks_were_handed_out_once_more_may_miss() {
        let mut bench = bench(&[&[1, 2], &[1, 3], &[7, 8]]);
        serve(&mut bench, 2, 0, &[3, 4]);
        bench.dispatched_expecting((0, 0), P0, &prefill_body("r0"), 0);
        serve(&mut bench, 9, 0, &[4]);
        bench.leg(P0, 0, &finished());
        follow(&mut bench, &[5]);
        bench.leg(P0, 1, &LegEvent::FirstToken);
        bench.holds();
    }

    /// It has a number beyond those of the file.
    #[test]
    fn a_request_of_the_simulators_own_takes_blocks_that_others_get_after_it() {
        let mut bench = bench(&[&[1, 2], &[1, 3]]);
        serve(&mut bench, 9, 0, &[1, 2]);
        serve(&mut bench, 0, 0, &[2, 3]);
        follow(&mut bench, &[1]);
        bench.leg(P0, 1, &LegEvent::FirstToken);
        bench.fails("512 tokens of leg 1 of client 1 were expected to hit at p0");
    }

    #[test]
    fn what_still_runs_may_miss() {
        let mut bench = bench(&[&[1, 2], &[1, 3]]);
        bench.dispatched_expecting((0, 0), P0, &prefill_body("r0"), 0);
        follow(&mut bench, &[5]);
        bench.leg(P0, 1, &LegEvent::FirstToken);
        bench.holds();
    }

    #[test]
    fn prefix_of_a_prompt_that_was_given_up_may_miss() {
        for is_closed in [false, true] {
            let mut bench = bench(&[&[1, 2], &[1, 3], &[1, 4]]);
            serve(&mut bench, 0, 0, &[1, 2, 3]);
            bench.dispatched_expecting((2, 2), P0, &prefill_body("r2"), 512);
            if is_closed {
                bench.see(Observation::LegClosed { leg: LegId(2) });
            }
            follow(&mut bench, &[5]);
            bench.leg(P0, 1, &LegEvent::FirstToken);
            bench.judges(is_closed, "512 tokens of leg 1 of client 1 were expected to hit at p0");
        }
    }
}
