//! Faults that are worked into the run before it starts.

use crate::decide::{DecisionKey, below, chance, kind, mix};
use crate::lists::FaultKind;
use crate::run::{AllocationOrder, Run, WorkloadPrompt, WorkloadRequest};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::Role;
use kvferry_faults::table::FaultSpec;

/// Adds a fault to a run: to its list, or to what it works on.
pub(super) fn apply(fault: &FaultSpec, seed: u64, run: &mut Run) {
    if !fault.kind.is_static() {
        run.faults.extend(fault.draw(seed, &run.instances));
        return;
    }
    match fault.kind {
        FaultKind::SmallPool => small_pool(fault, seed, run),
        FaultKind::ImmediateReuse => run.engine.allocator = AllocationOrder::Lifo,
        FaultKind::PrefixHitOneSide => one_side(fault, seed, run),
        FaultKind::Siblings => siblings(fault, seed, run),
        FaultKind::IdsDiffer => run.router.ids_differ = true,
        FaultKind::Burst => burst(fault, seed, &mut run.requests),
        FaultKind::DegeneratePrompts => degenerate(fault, seed, run),
        FaultKind::PromptsDiffer => prompts_differ(fault, seed, run),
        other => unreachable!("{other} is not worked in"),
    }
    run.shaped.push(fault.kind);
}

/// Shrinks pools to the longest request and up to a quarter more.
fn small_pool(fault: &FaultSpec, seed: u64, run: &mut Run) {
    let Some(tokens) = run.longest() else { return };
    for at in 0..run.instances.len() {
        let instance = &run.instances[at];
        if fault.hits(seed, instance) {
            let needed = run.blocks_for(instance, tokens);
            let key = fault.part(seed, "spare").actor(kind(&instance.name));
            let blocks = u32::try_from(needed + below(key.get(), needed / 4 + 1));
            let blocks = blocks.unwrap_or(u32::MAX).min(instance.blocks);
            run.instances[at].blocks = blocks;
        }
    }
}

/// Lets only one side keep prefixes, and makes prompts share them.
fn one_side(fault: &FaultSpec, seed: u64, run: &mut Run) {
    let heads = chance(fault.part(seed, "side").get(), 500_000);
    let drawn = if heads { Role::Prefill } else { Role::Decode };
    for instance in &mut run.instances {
        let hit =
            if fault.has_target() { fault.hits(seed, instance) } else { instance.role == drawn };
        instance.prefix_cache &= !hit;
    }
    let shared: Vec<WorkloadPrompt> =
        run.requests.iter().take(2).filter_map(|one| one.prompts.first().cloned()).collect();
    let key = fault.part(seed, "share");
    for (n, request) in run.requests.iter_mut().enumerate().skip(2) {
        let key = key.actor(n as u64);
        let like = &shared[below(key.part("with").get(), shared.len() as u64) as usize];
        for (index, prompt) in request.prompts.iter_mut().enumerate() {
            let key = key.nth(index as u64);
            if chance(key.part("hit").get(), 600_000) {
                share(prompt, like, &key.part("runs"));
            }
        }
    }
}

/// Makes a prompt start like another one for some runs.
fn share(prompt: &mut WorkloadPrompt, like: &WorkloadPrompt, key: &DecisionKey) {
    let most = prompt.prefix.len().min(like.prefix.len()) as u64;
    let runs = below(key.get(), most + 1) as usize;
    // What comes behind gets new names, since a name stands for everything before it too.
    let own = key.part("own").get();
    let rest = (runs..prompt.prefix.len()).map(|index| mix(own, index as u64));
    prompt.prefix = like.prefix[..runs].iter().copied().chain(rest).collect();
    prompt.tail = mix(own, prompt.tail);
}

fn siblings(fault: &FaultSpec, seed: u64, run: &mut Run) {
    for (n, request) in run.requests.iter_mut().enumerate() {
        if fault.is_hit(seed, n) {
            let key = fault.part(seed, "samples").nth(n as u64);
            request.samples = fault.samples.draw(&key);
        }
    }
}

/// The arrivals from `at` on, for `factor` times `lasts`, come within `lasts`; the later ones
/// come earlier by as much, so that the order stays.
fn burst(fault: &FaultSpec, seed: u64, requests: &mut [WorkloadRequest]) {
    let Some(at) = &fault.at else { return };
    let (start, factor) = (at.draw(&fault.part(seed, "at")), u64::from(fault.factor(seed)));
    let lasts = fault.lasts(seed);
    let end = start + lasts.scale(factor, 1);
    let saved = lasts.scale(factor - 1, 1);
    for request in requests.iter_mut() {
        if request.arrival >= end {
            request.arrival = request.arrival - saved;
        } else if request.arrival > start {
            request.arrival = start + Nanos((request.arrival - start).0 / factor);
        }
    }
}

/// Prompts of 0, 1, block - 1, block, block + 1 and the most tokens of the run.
fn degenerate(fault: &FaultSpec, seed: u64, run: &mut Run) {
    let block = run.instances[0].block_tokens;
    let most = run.requests.iter().flat_map(|one| &one.prompts).map(|one| one.tokens).max();
    let lengths = [0, 1, block - 1, block, block + 1, most.unwrap_or(1)];
    for (n, request) in run.requests.iter_mut().enumerate() {
        if !fault.is_hit(seed, n) {
            continue;
        }
        for (index, prompt) in request.prompts.iter_mut().enumerate() {
            let key = fault.part(seed, "length").actor(n as u64).nth(index as u64);
            let tokens = lengths[below(key.get(), lengths.len() as u64) as usize];
            resize(prompt, tokens.min(most.unwrap_or(1)), run.prefix_tokens);
        }
    }
}

/// Makes decode engines render the prompts of a request to other tokens.
fn prompts_differ(fault: &FaultSpec, seed: u64, run: &mut Run) {
    for (n, request) in run.requests.iter_mut().enumerate() {
        if fault.is_hit(seed, n) {
            let key = fault.part(seed, "rendering").nth(n as u64);
            request.decode_rendering = Some(key.get());
        }
    }
}

/// Cuts a prompt, or continues it with runs of its own.
fn resize(prompt: &mut WorkloadPrompt, tokens: u32, run: u32) {
    let own = prompt.tail;
    let hash = |index: u32| {
        prompt.prefix.get(index as usize).copied().unwrap_or_else(|| mix(own, index.into()))
    };
    prompt.prefix = (0..tokens / run).map(hash).collect();
    prompt.tail = mix(own, u64::MAX);
    prompt.tokens = tokens;
}
