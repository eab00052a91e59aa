//! A search from a failing scenario to its end.

use super::*;
use kvferry_scenarios::drawn_text;

/// An acknowledgement is lost, and nothing may fail: requests, instances, and other faults have
/// nothing to do with it.
const FAILS: &str = "\
about = 'an operation fails'
seed = 3
[model]
layers = '2..4'
[topology]
prefill = [{ count = 2, tp = '1|2' }]
decode = [{ count = 2 }]
[workload]
requests = 6
prompt_tokens = '16..64'
[[fault]]
kind = 'fabric.ack_lost'
chance = 1
[[fault]]
kind = 'wire.delay'
chance = 0.5
delay = '10us..100us'
[[fault]]
kind = 'memory.immediate_reuse'
[expect]
operations = { failed = 0 }
";

fn shrunk(text: &str, jobs: usize) -> Search {
    let deadline = Instant::now() + Duration::from_secs(600);
    let text = drawn_text(("x.toml", text), Path::new(""), 3).expect("it can be drawn");
    let jobs = NonZeroUsize::new(jobs);
    let mut search = start(Path::new("x.toml"), &text, 3, (jobs, deadline)).expect("it fails");
    search.shrink();
    search
}

#[test]
fn what_is_left_fails_alike_and_is_smaller() {
    let search = shrunk(FAILS, 2);
    let best = &search.best;
    assert_eq!(FailureCause::of(&best.outcome).as_ref(), Some(&search.cause));
    let text = written(&best.file);
    assert_eq!((best.run.instances.len(), best.run.requests.len()), (2, 1), "{text}");
    assert_eq!((best.run.faults.len(), best.run.shaped.len()), (1, 0), "{text}");
    assert!(best.outcome.events < 150, "{} events of {text}", best.outcome.events);
    // What is written says all of it.
    let scenario = kvferry_scenarios::parse("y.toml", &text, Path::new(""), None).expect("valid");
    assert_eq!(scenario.seed(), Some(3));
    let setup = RunSetup::plain(ScenarioSource::Bundled);
    let again = setup.run_seed(&scenario, 3, RerunPolicy::Never, &mut |_, _| {}).expect("it runs");
    assert_eq!(again.0.trace_hash, best.outcome.trace_hash);
    assert_eq!(FailureCause::of(&again.0), Some(search.cause));
}

#[test]
fn what_is_left_is_the_same_for_any_number_of_runs_at_a_time() {
    let [one, three] = [1, 3].map(|jobs| written(&shrunk(FAILS, jobs).best.file));
    assert_eq!(one, three);
}

#[test]
fn a_search_without_time_keeps_what_it_began_with() {
    let text = drawn_text(("x.toml", FAILS), Path::new(""), 3).expect("it can be drawn");
    let search = start(Path::new("x.toml"), &text, 3, (None, Instant::now()));
    let mut search = search.expect("it fails");
    let before = written(&search.best.file);
    search.shrink();
    assert_eq!((written(&search.best.file), search.runs), (before, 0));
}
