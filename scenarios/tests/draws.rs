//! What a seed draws: inside what is written, and nothing depends on what else is written.

use kvferry_scenarios::run::{FaultTrigger, InjectedFault, Run, WorkloadRequest};
use proptest::prelude::*;
use std::path::Path;

fn parse(text: &str) -> kvferry_scenarios::Scenario {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("smoke");
    kvferry_scenarios::parse("x.toml", text, &folder, None).unwrap_or_else(|why| panic!("{why}"))
}

/// A drawn run whose faults do not say where their tables stand.
fn draw_anywhere(text: &str, seed: u64) -> Run {
    let mut run = draw(text, seed);
    run.faults.iter_mut().for_each(|fault| fault.line = 0);
    run
}

fn draw(text: &str, seed: u64) -> Run {
    parse(text).draw(seed).unwrap_or_else(|why| panic!("{why}"))
}

/// The first example of the language's design: differing block sizes and one lost completion.
const ACK_LOST: &str = r#"
about = "One lost write ACK must not wedge decode: blocks come back and the request is retried, never hung"
seed = 7
[model]
layers = 4
kv_heads = 8
block_tokens = 16
block_bytes = 8192          # one block of one layer on one prefill rank
[topology]
prefill = [{ name = "p0", tp = 2, blocks = 256 }]
decode = [{ name = "d0", tp = 2, blocks = 256, block_tokens = 32 }]   # block size differs on purpose
link = { latency = "2us..15us", bandwidth = "40GB/s" }
[workload]
mode = "push"
requests = 12
prompt_tokens = "64..2048"
arrival = "1ms"
[[fault]]
kind = "fabric.ack_lost"                      # bytes land, completion reports failure
on = { event = "op.posted", from = "p0", nth = 9 }
[expect]
within = "5s"
hold = ["I1-no-foreign-bytes", "I3-no-leak", "I5-one-outcome", "L1-every-request-ends"]
requests = { finished = 12 }
"#;

/// The second example: aborts, a pause and duplicated frames.
const ABORT: &str = r#"
about = "Client aborts during a push while the prefill process pauses; its blocks are wanted by the next request"
seed = "any"                                  # one per run, or `sweep --seeds N`
[model]
layers = 2
block_tokens = 16
block_bytes = 4096
[topology]
prefill = [{ name = "p0", blocks = 64 }, { name = "p1", blocks = 64 }]
decode = [{ name = "d0", blocks = 24 }]       # tight, so reuse is immediate
router = { heartbeat = "1s" }
[workload]
mode = "push"
requests = 40
prompt_tokens = "16..320"
abort = { chance = 0.2, after = "0ms..8ms" }
[[fault]]
kind = "process.pause"
target = "p0"
on = { event = "transfer.writing", nth = 3 }
lasts = "50ms..4s"
[[fault]]
kind = "wire.duplicate"
match = { message = "BlocksReady" }
chance = 0.1
[expect]
within = "30s"
hold = ["I1-no-foreign-bytes", "I2-no-early-reuse", "I3-no-leak", "L1-every-request-ends", "L2-heals"]
"#;

#[test]
fn both_examples_mean_what_they_say() {
    let run = draw(ACK_LOST, 7);
    assert_eq!(parse(ACK_LOST).seed(), Some(7));
    // 8192 bytes = 16 tokens x 4 heads per rank x 128 bytes.
    assert_eq!(run.model.head_bytes, 128);
    assert_eq!(run.instances[1].block_tokens, 32);
    assert_eq!(run.network.bandwidth, 40_000_000_000);
    assert_eq!((run.network.latency.min.0, run.network.latency.max.0), (2_000, 15_000));
    assert_eq!(run.requests.len(), 12);
    assert_eq!(run.requests[11].arrival.0, 11_000_000);
    assert!(
        matches!(&run.faults[0].trigger, FaultTrigger::On { nth: 9, from: Some(p), .. } if p == "p0")
    );
    assert_eq!(run.expect.hold.len(), 4);
    assert!(run.expect.requests.finished.is_some_and(|bounds| bounds.contains(12)));

    let run = draw(ABORT, 3);
    assert_eq!(parse(ABORT).seed(), None);
    let aborted = run.requests.iter().filter_map(|request| request.abort);
    assert!((1..20).contains(&aborted.clone().count()));
    assert!(aborted.into_iter().all(|after| after.0 <= 8_000_000));
    assert_eq!(run.faults[1].message, Some(kvferry_scenarios::MessageName::Announce));
    assert_eq!(run.faults[1].trigger, FaultTrigger::Chance(100_000));
}

#[test]
fn a_run_survives_being_recorded() {
    for text in [ACK_LOST, ABORT] {
        let run = draw(text, 5);
        let json = serde_json::to_string(&run).expect("a run is plain data");
        assert_eq!(serde_json::from_str::<Run>(&json).expect("as written"), run);
    }
}

#[test]
fn prompts_with_a_common_prefix_have_common_hashes_and_nothing_else() {
    let text = "about = \"t\"\n[workload]\nrequests = 60\nprompt_tokens = 100\n\
                prefix = { chance = 1, pools = 2, tokens = \"0..100\", run = 16 }";
    let run = draw(text, 1);
    let (mut partly, mut wholly) = (0, 0);
    for (n, one) in run.requests.iter().enumerate() {
        for other in &run.requests[..n] {
            let (a, b) = (&one.prompts[0], &other.prompts[0]);
            assert_eq!(a.prefix.len(), 6);
            let common = a.prefix.iter().zip(&*b.prefix).take_while(|(x, y)| x == y).count();
            let later = a.prefix.iter().zip(&*b.prefix).skip(common).any(|(x, y)| x == y);
            assert!(!later, "equal behind a difference");
            assert_ne!(a.tail, b.tail);
            partly += usize::from((1..6).contains(&common));
            wholly += usize::from(common == 6);
        }
    }
    // Half of the pairs are of one pool; nearly all of those share something, few everything.
    assert!(partly > 400 && wholly < 100, "{partly} {wholly}");
}

#[test]
fn requests_name_models_and_instances_serve_some() {
    let text = "about = \"t\"\n[topology]\nprefill = [{ models = \"base, adapter\" }]\n\
                decode = [{ count = 30, models = \"any|base\" }]\n[workload]\nrequests = 100\n\
                models = { chance = 0.5, names = \"base|adapter|unknown\" }";
    let run = draw(text, 1);
    let named = |name| run.requests.iter().filter(|it| it.model.as_deref() == Some(name)).count();
    let counts = ["base", "adapter", "unknown"].map(named);
    assert!(counts.iter().all(|count| (5..30).contains(count)), "{counts:?}");
    let serves =
        |at: usize| ["base", "adapter", "unknown"].map(|name| run.instances[at].serves(Some(name)));
    assert_eq!(serves(0), [true, true, false]);
    let any = (1..31).filter(|at| serves(*at) == [true; 3]).count();
    assert_eq!((1..31).filter(|at| serves(*at) == [true, false, false]).count(), 30 - any);
    assert!((5..25).contains(&any), "{any}");
    // Nothing else is drawn in another way where none are named.
    let without = draw(text.split("\nmodels = { chance").next().expect("before it"), 1);
    let unnamed = run.requests.iter().cloned().map(|it| WorkloadRequest { model: None, ..it });
    assert_eq!(unnamed.collect::<Vec<_>>(), without.requests);
}

#[test]
fn each_role_has_an_instance_even_if_the_file_lists_none() {
    let names = |text: &str| -> Vec<String> {
        let run = draw(&format!("about = \"t\"\n{text}"), 1);
        run.instances.into_iter().map(|one| one.name).collect()
    };
    for text in ["", "[topology]\nprefill = []\ndecode = []", "[topology]\ndecode = [{}]"] {
        assert_eq!(names(text), ["p0", "d0"], "{text}");
    }
}

#[test]
fn one_word_is_one_instance_within_a_fault() {
    let text = "about = \"t\"\n[topology]\nprefill = [{ count = 8 }]\n[[fault]]\nkind = \"process.pause\"\n\
                target = \"prefill\"\non = { event = \"transfer.writing\", from = \"prefill\" }";
    let mut targets = std::collections::BTreeSet::new();
    for seed in 0..50 {
        let fault = draw(text, seed).faults.remove(0);
        let FaultTrigger::On { from, .. } = fault.trigger else { panic!("it is `on`") };
        assert_eq!(fault.target, from);
        targets.insert(from);
    }
    assert_eq!(targets.len(), 8);
}

#[test]
fn repeated_faults_have_times_and_keys_of_their_own() {
    let text = "about = \"t\"\n[[fault]]\nkind = \"wire.partition\"\nat = \"1s\"\nevery = \"1s..2s\"\ntimes = 5";
    let faults = draw(text, 1).faults;
    let at: Vec<u64> = faults
        .iter()
        .map(|fault| match fault.trigger {
            FaultTrigger::At(at) => at.0,
            _ => panic!("it is `at`"),
        })
        .collect();
    assert_eq!(at.len(), 5);
    assert!(at.windows(2).all(|two| (1_000_000_000..=2_000_000_000).contains(&(two[1] - two[0]))));
    let keys: std::collections::BTreeSet<u64> = faults.iter().map(|fault| fault.key).collect();
    assert_eq!(keys.len(), 5);
}

#[test]
fn a_burst_keeps_the_order_and_compresses_time() {
    let base = "about = \"t\"\n[workload]\nrequests = 100\narrival = \"10ms\"\n";
    let burst = "[[fault]]\nkind = \"client.burst\"\nat = \"200ms\"\nlasts = \"20ms\"\nfactor = 10";
    let arrivals = |text: &str| -> Vec<u64> {
        draw(text, 1).requests.iter().map(|request| request.arrival.0 / 1_000_000).collect()
    };
    let (before, after) = (arrivals(base), arrivals(&format!("{base}{burst}")));
    assert_eq!(after[..21], before[..21]);
    assert_eq!(after[21..25], [201, 202, 203, 204]);
    assert_eq!(after[40], 220);
    assert_eq!(after[41], 230);
}

/// Fault tables that draw much.
const FAULTS: [&str; 6] = [
    "kind = \"wire.loss\"\nenabled = 0.8\nchance = \"0.01..0.9\"\ntimes = \"1..9\"",
    "kind = \"wire.loss\"\nenabled = 0.8\nchance = \"0.01..0.8\"\ntimes = \"1..9\"",
    "kind = \"process.pause\"\ntarget = \"any\"\nat = \"1ms..9s\"\nlasts = \"1ms|2ms|3ms..9ms\"",
    "kind = \"process.rank_lag\"\ntarget = \"decode\"\nat = \"1ms..9s\"",
    "kind = \"process.restart_other_geometry\"\ntarget = \"any\"\nat = \"1ms..9s\"\ntp = \"1|2|4\"\nblock_tokens = \"8|16\"",
    "kind = \"fabric.partial\"\non = { event = \"op.posted|op.landed\", from = \"any\", nth = \"1..99\" }",
];

fn with_faults(mask: u8) -> String {
    let mut text = "about = \"t\"\n[topology]\nprefill = [{ count = \"1..3\" }]\ndecode = [{ tp = \"1|2\" }]\n\
                    [workload]\nprompt_tokens = \"1..99\"\n"
        .to_string();
    for (_, fault) in FAULTS.iter().enumerate().filter(|(n, _)| mask >> n & 1 == 1) {
        text.push_str(&format!("[[fault]]\n{fault}\n"));
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn values_are_drawn_inside_their_ranges(
        seed: u64,
        prompt in 1_u32..500,
        more in 0_u32..500,
        gap in 0_u64..1_000,
        others in 1_u64..1_000,
    ) {
        let text = format!(
            "about = \"t\"\n[topology]\nprefill = [{{ tp = \"1|4\", blocks = 999 }}]\ndecode = [{{ blocks = 999 }}]\n\
             [workload]\nprompt_tokens = \"{prompt}..{}\"\noutput_tokens = \"3|7..9\"\narrival = \"{gap}us..{}us\"",
            prompt + more,
            gap + others
        );
        let run = draw(&text, seed);
        prop_assert!([1, 4].contains(&run.instances[0].tp));
        for request in &run.requests {
            prop_assert!((prompt..=prompt + more).contains(&request.prompts[0].tokens));
            prop_assert!([3, 7, 8, 9].contains(&request.output));
        }
        for two in run.requests.windows(2) {
            let gap_drawn = (two[1].arrival - two[0].arrival).0;
            prop_assert!((gap * 1_000..=(gap + others) * 1_000).contains(&gap_drawn));
        }
    }

    #[test]
    fn removing_a_fault_changes_nothing_else(seed: u64, mask in 0_u8..64) {
        let all = draw_anywhere(&with_faults(63), seed);
        let some = draw_anywhere(&with_faults(mask), seed);
        for fault in &some.faults {
            prop_assert!(all.faults.contains(fault), "{fault:?}");
        }
        let left: Vec<&InjectedFault> = all.faults.iter().filter(|one| some.faults.contains(one)).collect();
        prop_assert_eq!(left.len(), some.faults.len());
        let without = |run: Run| Run { faults: Vec::new(), ..run };
        prop_assert_eq!(without(all), without(some));
    }

    #[test]
    fn a_file_without_what_a_seed_turned_off_draws_the_same(seed: u64) {
        // A fault that is off leaves no trace.
        let all = draw_anywhere(&with_faults(3), seed);
        let mut mask = 0;
        for n in 0..2 {
            if !draw_anywhere(&with_faults(1 << n), seed).faults.is_empty() {
                mask |= 1 << n;
            }
        }
        prop_assert_eq!(all, draw_anywhere(&with_faults(mask), seed));
    }

    #[test]
    fn values_never_panic(
        key in prop::sample::select(KEYS),
        value in "\"?[0-9.|]{0,6}(ms|KiB|GB/s|us|p0|any|node|early|push|true)?(\\.\\.[0-9]{0,3}(ms|s)?)?\"?",
        seed: u64,
    ) {
        let text = format!("about = \"t\"\n{}", key.replace('?', &value));
        if let Ok(scenario) = kvferry_scenarios::parse("x.toml", &text, Path::new(""), None) {
            let _ = scenario.draw(seed);
        }
    }
}

/// Places for a value of any kind.
const KEYS: &[&str] = &[
    "seed = ?",
    "model = ?",
    "[model]\nlayers = ?",
    "[model]\nkv_heads = ?",
    "[model]\nblock_bytes = ?",
    "[model]\nstate_layers = ?\nstate_bytes = ?",
    "[topology]\nprefill = [{ count = ?, tp = ? }]",
    "[topology]\ndecode = [{ name = ?, blocks = ?, dp = ? }]",
    "[topology]\nlink = { latency = ?, bandwidth = ? }",
    "[workload]\narrival = ?",
    "[workload]\nprompt_tokens = ?\noutput_tokens = ?",
    "[workload]\nabort = { chance = ?, after = ? }",
    "[workload]\nprefix = { chance = ?, run = ?, pools = ? }",
    "[[fault]]\nkind = \"wire.partition\"\nat = ?\ndirection = ?\ntarget = \"any\"",
    "[[fault]]\nkind = \"wire.partition\"\nat = \"1s\"\nevery = ?\ntimes = ?",
    "[[fault]]\nkind = \"process.rank_crash\"\ntarget = ?\nat = \"1s\"\nrank = ?",
    "[[fault]]\nkind = \"client.burst\"\nat = ?\nfactor = ?\nlasts = ?",
    "[[fault]]\nkind = \"client.degenerate_prompts\"\nchance = ?",
    "[expect]\nrequests = { finished = ? }",
];

#[test]
fn the_file_of_a_seed_is_the_same_run_with_what_was_drawn() {
    for file in ["swarm.toml", "swarm-load.toml", "faults/mixed.toml", "trace/push.toml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        let scenario = kvferry_scenarios::load(&path).unwrap();
        for seed in 1..30 {
            let text = kvferry_scenarios::drawn(&path, seed).unwrap();
            let again = kvferry_scenarios::parse("x.toml", &text, Path::new(""), None);
            let again = again.unwrap_or_else(|why| panic!("{file} {seed}: {why}\n{text}"));
            assert_eq!(again.seed(), Some(seed));
            let [mut once, mut again] = [&scenario, &again].map(|it| it.draw(seed).unwrap());
            for run in [&mut once, &mut again] {
                run.name.clear();
                run.faults.iter_mut().for_each(|fault| fault.line = 0);
            }
            assert_eq!(once, again, "{file} {seed}:\n{text}");
            // Faults that the seed does not have are gone, and it is certain of the others.
            assert!(!text.contains("enabled = 0"), "{file} {seed}:\n{text}");
        }
    }
}

#[test]
fn decisions_stay_whatever_is_changed_in_a_table() {
    let text = "about = 'x'\nseed = 1\n[[fault]]\nkind = 'wire.loss'\nchance = 0.25\n";
    let keys = |text: &str| draw(text, 1).faults.iter().map(|one| one.key).collect::<Vec<_>>();
    let key = keys(text)[0];
    assert_ne!(keys(&text.replace("0.25", "0.5")), [key]);
    let named = text.replace("0.25", &format!("0.5\ndecisions = '{key}'"));
    assert_eq!(keys(&named), [key]);
}

#[test]
fn a_table_for_each_instance_and_stream_is_the_same_run() {
    for file in ["swarm.toml", "swarm-load.toml", "payloads/ids-used-again.toml"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
        for seed in 1..30 {
            let text = kvferry_scenarios::drawn(&path, seed).unwrap();
            let once = draw_anywhere(&text, seed);
            let explicit = kvferry_scenarios::explicit(("x.toml", &text), Path::new(""), seed);
            let explicit = explicit.unwrap();
            assert_eq!(draw_anywhere(&explicit, seed), once, "{file} {seed}:\n{explicit}");
            let tables: toml::Table = explicit.parse().unwrap();
            let streams = tables.get("stream").and_then(toml::Value::as_array);
            let is_repeated = |stream: &toml::Value| stream.get("every").is_some();
            assert!(!streams.into_iter().flatten().any(is_repeated), "{file} {seed}:\n{explicit}");
            for key in ["count", "enabled", "serves"] {
                assert!(
                    !explicit.contains(&format!("{key} =")),
                    "{key} of {file} {seed}:\n{explicit}"
                );
            }
        }
    }
}

#[test]
fn a_table_for_each_request_makes_the_same_requests() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("swarm.toml");
    let mut compared = 0;
    for seed in 1..80 {
        let text = kvferry_scenarios::drawn(&path, seed).unwrap();
        let text = kvferry_scenarios::explicit(("x.toml", &text), Path::new(""), seed).unwrap();
        let explicit = kvferry_scenarios::explicit_requests(("x.toml", &text), Path::new(""), seed);
        let Some(explicit) = explicit.unwrap() else { continue };
        let (once, again) = (draw_anywhere(&text, seed), draw_anywhere(&explicit, seed));
        let lengths = |run: &Run| -> Vec<_> {
            // Of several prompts a fault may have cut one.
            let prompts = run.requests.iter().filter(|request| request.prompts.len() == 1);
            prompts.map(|request| request.prompts[0].tokens).collect()
        };
        assert_eq!(lengths(&again), lengths(&once), "{seed}:\n{explicit}");
        for (again, once) in again.instances.iter().zip(&once.instances) {
            // A fault makes pools small by DP rank.
            assert!(again == once || once.dp_size > 1, "{seed}:\n{explicit}");
        }
        assert_eq!(again.engine, once.engine, "{seed}:\n{explicit}");
        assert_eq!(again.router, once.router, "{seed}:\n{explicit}");
        // Prompts that a fault has cut go on with other tokens.
        if !once.shaped.contains(&kvferry_scenarios::FaultKind::DegeneratePrompts) {
            assert_eq!(again.requests, once.requests, "{seed}:\n{explicit}");
            compared += 1;
        }
    }
    assert!(compared > 20, "{compared} seeds");
}

#[test]
fn a_request_of_its_own_is_what_its_table_says() {
    let text = "about = 't'\n[workload]\nrequests = 3\nprompt_tokens = 7\nstop = 0\n\
                single = [{ at = '1ms', decisions = '1' }, { at = '5ms', prompts = 2, samples = 3, \
                stop = true, abort = '2ms', model = 'm' }]";
    let requests = draw(text, 1).requests;
    assert_eq!(requests.len(), 5);
    let [like, single] = [2, 4].map(|at| &requests[at]);
    // The second one that is alike arrives at the same time, and is what this one draws.
    assert_eq!(like.prompts[0].tail, requests[1].prompts[0].tail);
    assert_eq!((like.prompts[0].tokens, like.samples, like.stop), (16, 1, false));
    assert_eq!((single.prompts.len(), single.samples, single.stop), (2, 3, true));
    assert_eq!(single.abort.map(|after| after.0), Some(2_000_000));
    assert_eq!(single.model.as_deref(), Some("m"));
}
