//! Payloads between two hosts.

use super::sidecar_process::{PATIENCE, SidecarProcess, host, place, scrape, series};
use super::{POOL_ARGS, StageProcess, stream};
use kvferry::sidecar::PayloadOutcome;
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::payload::PayloadFailure;

const LISTEN: [&str; 4] = [POOL_ARGS[0], POOL_ARGS[1], "--payload-listen", "127.0.0.1:0"];

/// Quicker than by default to find that a host is gone.
const QUICK: [&str; 2] = ["--set", "channel.silent_ms=2000"];

fn named(engine: &EngineId) -> Vec<String> {
    LISTEN
        .map(String::from)
        .into_iter()
        .chain(["--payload-hosts".into(), engine.to_string()])
        .collect()
}

/// A host, and one that looks for payloads there.
fn two_hosts(name: &str) -> [SidecarProcess; 2] {
    let puts = SidecarProcess::with_args(&format!("{name}-puts"), &[LISTEN].concat());
    let engine = StageProcess::of(&puts, "probe").engine.expect("others reach it");
    let more = named(&engine);
    let more: Vec<&str> = more.iter().map(String::as_str).chain(QUICK).collect();
    [puts, SidecarProcess::with_args(&format!("{name}-gets"), &more)]
}

fn data(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at ^ (at >> 8)) as u8).collect()
}

#[test]
fn a_payload_comes_to_another_host_once_whichever_way_it_is_asked_for() {
    let [puts, gets] = two_hosts("crossing");
    let (thinker, talker) = (StageProcess::of(&puts, "0"), StageProcess::of(&gets, "1"));
    let there = thinker.engine.clone().expect("others reach it");
    for (chunk, bytes) in [(0, 0), (1, 3_305), (2, 1_611_713), (3, 16 << 20)] {
        let key = stream("r").chunk(chunk);
        let data = data(bytes);
        let payload = if chunk % 2 == 0 {
            thinker.put(&key, &data);
            talker.wait(&key)
        } else {
            talker.link.want_from(&key, &there).expect("a host");
            thinker.put(&key, &data);
            let outcome = talker.link.wait(&key, PATIENCE).expect("a host");
            outcome.expect("an outcome").map_err(|(failure, _)| failure)
        };
        let payload = payload.expect("it was put");
        assert!(talker.read(&payload, bytes) == data, "{bytes} bytes");
        talker.link.release(payload.claim).expect("a host");
        assert_eq!(talker.wait(&key), Err(PayloadFailure::Taken));
    }
    thinker.link.end(stream("r"), Some("out of tokens")).expect("a host");
    let given_up = PayloadFailure::GivenUp("out of tokens".into());
    assert_eq!(talker.wait(&stream("r").chunk(4)), Err(given_up));
}

#[test]
fn both_ways_between_two_hosts_and_all_that_was_moved_is_free() {
    let (first, first_metrics) = SidecarProcess::with_metrics("both-ways-1", &LISTEN);
    let (second, second_metrics) = SidecarProcess::with_metrics("both-ways-2", &LISTEN);
    let ends = [StageProcess::of(&first, "0"), StageProcess::of(&second, "1")];
    let engines = ends.each_ref().map(|end| end.engine.clone().expect("others reach it"));
    std::thread::scope(|scope| {
        for (from, to) in [(0, 1), (1, 0)] {
            let (ends, engines) = (&ends, &engines);
            let key = move |chunk| stream(&format!("{from} to {to}")).chunk(chunk);
            scope.spawn(move || {
                for chunk in 0..40 {
                    ends[from].put(&key(chunk), &data(100_000 + chunk as usize));
                }
            });
            scope.spawn(move || {
                for chunk in 0..40 {
                    ends[to].link.want_from(&key(chunk), &engines[from]).expect("a host");
                }
                for chunk in 0..40 {
                    let link = &ends[to].link;
                    let payload = link.wait(&key(chunk), PATIENCE).expect("a host");
                    let payload = payload.expect("an outcome").expect("it was put");
                    let bytes = 100_000 + chunk as usize;
                    assert!(ends[to].read(&payload, bytes) == data(bytes));
                    link.release(payload.claim).expect("a host");
                }
            });
        }
    });
    drop(ends);
    for metrics in [first_metrics, second_metrics] {
        while !scrape(metrics)
            .lines()
            .any(|line| line == "kvferry_payload_pool_free_bytes 67108864")
        {
            std::thread::yield_now();
        }
        let page = scrape(metrics);
        series(&page, "kvferry_payload_misuses_total 0");
        let moved = "kvferry_transfer_bytes_total{side=\"initiated\",path=\"shared-memory\"}";
        let bytes = page.lines().find_map(|line| line.strip_prefix(moved)).expect("a series");
        assert!(bytes.trim().parse::<u64>().expect("a number") >= 40 * 100_000, "{bytes}");
    }
}

#[test]
fn who_waits_for_another_host_learns_of_the_death_of_a_process_and_of_the_host() {
    let [mut puts, gets] = two_hosts("deaths");
    let (thinker, talker) = (StageProcess::of(&puts, "0"), StageProcess::of(&gets, "1"));
    let there = thinker.engine.clone().expect("others reach it");
    let key = stream("r").chunk(1);
    thinker.put(&stream("r").chunk(0), b"first");
    talker.wait(&stream("r").chunk(0)).expect("it was put");
    talker.link.want_from(&key, &there).expect("a host");
    drop(thinker);
    let outcome = talker.link.wait(&key, PATIENCE).expect("a host");
    assert_eq!(failure(outcome), Some(PayloadFailure::ProducerGone));
    let thinker = StageProcess::of(&puts, "0");
    thinker.put(&stream("s").chunk(0), b"first");
    talker.wait(&stream("s").chunk(0)).expect("it was put");
    let key = stream("s").chunk(1);
    talker.link.want_from(&key, &there).expect("a host");
    puts.child.kill().expect("it runs");
    puts.child.wait().expect("it ends");
    let outcome = talker.link.wait(&key, PATIENCE).expect("a host");
    assert_eq!(failure(outcome), Some(PayloadFailure::PeerGone(there.0)));
}

#[test]
fn a_host_that_others_reach_has_a_secret_or_does_not_start() {
    let socket = place("open-pool");
    let args = [POOL_ARGS[0], POOL_ARGS[1], "--payload-listen", "192.0.2.2:0"];
    let open = host(&socket, None, &args).output().expect("the binary runs");
    let said = String::from_utf8_lossy(&open.stderr).into_owned();
    assert_eq!(open.status.code(), Some(2), "{said}");
    assert!(said.contains("payload_listen = 192.0.2.2") && said.contains("secret"), "{said}");
}

/// Why a payload does not come.
fn failure(outcome: Option<PayloadOutcome>) -> Option<PayloadFailure> {
    outcome?.err().map(|(failure, _)| failure)
}
