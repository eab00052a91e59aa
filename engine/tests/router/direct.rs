//! Short prompts go to a decode alone.

use crate::discovery::{DiscoveryBench, SentLeg, done, native, sent};
use kvferry_engine::core::ids::ClientId;
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    ClientAnswer, ClientRequest, LegBody, LegEvent, LegFailure, RoutedPrompt, RouterConfig,
    RouterEffect, RouterInput,
};

const BELOW: u32 = 200;

fn bench(names: &[&str]) -> DiscoveryBench {
    let config = RouterConfig { direct_below: BELOW, ..RouterConfig::default() };
    let mut bench = DiscoveryBench::new(config);
    for name in names {
        let role = if name.starts_with('p') { Role::Prefill } else { Role::Decode };
        let one = Registration { dp_rank: 0, dp_size: 1, ..native(name, role, Mode::Push) };
        bench.give(RouterInput::Register(one));
    }
    bench
}

/// Asks for prompts of so many tokens, each with these hashes of prefixes.
fn ask(bench: &mut DiscoveryBench, prompts: &[(u32, &[u64])]) -> Vec<SentLeg> {
    let client = ClientId(bench.clients);
    bench.clients += 1;
    let prompts = prompts
        .iter()
        .map(|(tokens, prefix)| RoutedPrompt { tokens: *tokens, prefix: (*prefix).into() });
    let prompts = prompts.collect();
    sent(bench.give(RouterInput::Request(ClientRequest {
        client,
        prompts,
        samples: 1,
        output: 4,
        model: None,
        engines: None,
    })))
}

fn is_alone(leg: &SentLeg) -> bool {
    matches!(&leg.body, LegBody::Decode { transfer, .. } if transfer.is_alone())
}

/// The engines of the legs, which have all ended well.
fn served(bench: &mut DiscoveryBench, legs: &[SentLeg]) -> Vec<String> {
    legs.iter().for_each(|leg| drop(bench.leg(leg.leg, done())));
    legs.iter().map(|leg| leg.engine.clone()).collect()
}

#[test]
fn only_prompts_below_the_length_skip_prefill() {
    let mut bench = bench(&["p0", "d0"]);
    let short = ask(&mut bench, &[(BELOW - 1, &[])]);
    assert!(short.len() == 1 && is_alone(&short[0]), "{short:?}");
    let answers = bench.leg(short[0].leg, done());
    let finished = ClientAnswer::Finished { recomputed: None };
    assert!(
        matches!(&answers[..], [RouterEffect::Answer { answer, .. }] if *answer == finished),
        "{answers:?}"
    );
    let long = ask(&mut bench, &[(BELOW, &[])]);
    assert!(!long.iter().any(is_alone));
    assert_eq!(served(&mut bench, &long), ["p0", "d0"]);
    assert_eq!(bench.router.counters().direct, 1);
    // Off, unless it is asked for.
    let mut usual = DiscoveryBench::new(RouterConfig::default());
    for (name, role) in [("p0", Role::Prefill), ("d0", Role::Decode)] {
        usual.give(RouterInput::Register(native(name, role, Mode::Push)));
    }
    assert_eq!(ask(&mut usual, &[(1, &[])]).len(), 2);
}

#[test]
fn what_the_decode_has_of_a_prompt_does_not_count() {
    let mut bench = bench(&["p0", "d0", "d1"]);
    let prompt = (1_200, &[1, 2][..]);
    let first = ask(&mut bench, &[prompt]);
    let engines = served(&mut bench, &first);
    assert_eq!(engines.len(), 2);
    let again = ask(&mut bench, &[prompt]);
    assert!(is_alone(&again[0]));
    assert_eq!(served(&mut bench, &again), engines[1..]);
    // 176 tokens of it are new; of this one 1,024 and 176.
    let other = ask(&mut bench, &[(1_200, &[3, 2])]);
    assert_eq!(other.len(), 2);
}

#[test]
fn prompts_of_one_request_go_the_same_way() {
    let mut bench = bench(&["p0", "d0"]);
    let mixed = ask(&mut bench, &[(10, &[]), (1_000, &[])]);
    assert_eq!(served(&mut bench, &mixed), ["p0", "d0", "p0", "d0"]);
    let short = ask(&mut bench, &[(10, &[]), (20, &[])]);
    assert_eq!(served(&mut bench, &short), ["d0", "d0"]);
    assert_eq!(bench.router.counters().direct, 2);
}

#[test]
fn a_short_prompt_needs_no_prefill_to_be_there() {
    let mut bench = bench(&["d0"]);
    assert!(ask(&mut bench, &[(BELOW, &[])]).is_empty(), "it waits");
    let short = ask(&mut bench, &[(10, &[])]);
    assert!(short.is_empty(), "behind who waits");
    let mut bench = self::bench(&["d0"]);
    let short = ask(&mut bench, &[(10, &[])]);
    assert_eq!(served(&mut bench, &short), ["d0"]);
}

#[test]
fn another_decode_takes_what_one_failed() {
    let mut bench = bench(&["p0", "d0", "d1"]);
    let first = ask(&mut bench, &[(10, &[])]);
    let again = sent(bench.leg(first[0].leg, LegEvent::Failed(LegFailure::Connection)));
    assert!(again.len() == 1 && is_alone(&again[0]) && again[0].engine != first[0].engine);
    // Both have failed it now: there is a pause before it goes back.
    let failed = LegEvent::Failed(LegFailure::Answer(500));
    assert!(sent(bench.leg(again[0].leg, failed)).is_empty());
    let back = (0..4).map(|_| sent(bench.tick())).find(|legs| !legs.is_empty());
    assert!(back.is_some_and(|legs| legs.len() == 1 && is_alone(&legs[0])));
}
