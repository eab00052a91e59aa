//! Hosts, tables and queues that are full.

use super::{HostBench, OTHER, TALKER, THINKER, chunk, stream};
use crate::cluster::{HostSettings, PAGE, prefill_name};
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::payload::*;
use kvferry_engine::core::{Machine as _, Nanos};

fn pool_of(pages: u64) -> PayloadConfig {
    PayloadConfig { pool: pages * PAGE, ..PayloadConfig::default() }
}

fn settings(payload: PayloadConfig) -> HostSettings {
    let core = CoreSettings { lease: Nanos::from_secs(3), ..CoreSettings::default() };
    HostSettings::new(payload, core)
}

/// How many payloads arrived.
fn arrivals(bench: &mut HostBench) -> usize {
    let arrived = |answer: &PayloadAnswer| matches!(answer, PayloadAnswer::Arrived { .. });
    bench.told().iter().filter(|(.., answer)| arrived(answer)).count()
}

#[test]
fn a_host_that_wants_nothing_takes_no_place() {
    let mut bench = HostBench::with(4, PayloadConfig { hosts_max: 1, ..pool_of(16) });
    for (host, index) in [(1, 0), (2, 1), (3, 2), (1, 3)] {
        bench.want_from(host, chunk(index), 0);
        bench.pass(50);
        bench.put(0, chunk(index), 5, 1);
        bench.pass(50);
        assert_eq!(bench.arrived().0, host);
    }
    // One that waits has it until it waits no longer.
    bench.want_from(1, chunk(4), 0);
    bench.pass(50);
    bench.want_from(2, chunk(5), 0);
    bench.pass(500);
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(4) });
    bench.pass(1_000);
    bench.tell(0, THINKER, PayloadHook::End { stream: stream(), failure: None, is_own: false });
    bench.pass(20);
    assert_eq!(bench.missing(), PayloadFailure::Ended);
}

#[test]
fn hosts_beyond_the_limit_take_no_place() {
    let mut bench = HostBench::with(4, PayloadConfig { hosts_max: 1, ..pool_of(16) });
    bench.want_from(1, chunk(0), 0);
    bench.pass(50);
    let remembered = |bench: &HostBench| bench.cluster.hosts[0].payload.gauges().remembered;
    let of_one = remembered(&bench);
    for (host, index) in [(2, 1), (3, 2)] {
        bench.want_from(host, chunk(index), 0);
        bench.pass(50);
        assert_eq!(remembered(&bench), of_one, "host {host} has a place");
    }
}

#[test]
fn what_is_there_does_not_wait_behind_what_is_not() {
    let limits = [
        PayloadConfig { hosts_max: 1, ..pool_of(16) },
        PayloadConfig { host_payloads_max: 1, ..pool_of(16) },
    ];
    for (config, host) in limits.into_iter().zip([2, 1]) {
        let mut bench = HostBench::with(3, config);
        bench.want_from(1, chunk(0), 0);
        bench.pass(50);
        bench.want_from(host, chunk(1), 0);
        bench.pass(50);
        assert_eq!(bench.told(), []);
        bench.put(0, chunk(1), 5, 1);
        bench.pass(1_000);
        assert_eq!(bench.arrived().0, host);
    }
}

#[test]
fn what_never_comes_does_not_wait_for_a_place() {
    let limits = [
        PayloadConfig { hosts_max: 1, ..pool_of(16) },
        PayloadConfig { host_payloads_max: 1, ..pool_of(16) },
    ];
    for (config, host) in limits.into_iter().zip([2, 1]) {
        let mut bench = HostBench::with(3, config);
        bench.want_from(1, PayloadStream::new("0", "1", "another").whole(), 0);
        bench.tell(0, THINKER, PayloadHook::End { stream: stream(), failure: None, is_own: false });
        bench.pass(50);
        bench.want_from(host, chunk(0), 0);
        bench.pass(50);
        assert_eq!(bench.missing(), PayloadFailure::Ended);
    }
}

#[test]
fn what_is_refused_costs_little() {
    let mut bench = HostBench::with(2, PayloadConfig { host_payloads_max: 1, ..pool_of(16) });
    for index in 0..9 {
        bench.want(1, TALKER, chunk(index));
    }
    bench.pass(20_000);
    let notes = bench.cluster.notes;
    bench.pass(64_000);
    // Each of the eight asks every 6.4 s, and is answered.
    assert!(bench.cluster.notes - notes <= 8 * 2 * 11, "{}", bench.cluster.notes - notes);
}

/// A host that wants so many chunks of another one, by queues for so many messages.
fn wanting(chunks: u64, queue_max: u32, pages: u64) -> HostBench {
    let mut bench = HostBench::set(2, HostSettings { queue_max, ..settings(pool_of(pages)) });
    for index in 0..chunks {
        bench.want(1, TALKER, chunk(index));
    }
    bench
}

#[test]
fn a_host_of_which_much_is_wanted_hears_all_of_it() {
    let mut bench = wanting(64, 24, 256);
    // What it answers has to find room as well.
    for index in 0..64 {
        bench.put(0, chunk(index), 5, 1);
        bench.pass(50);
    }
    bench.pass(60_000);
    assert_eq!(arrivals(&mut bench), 64);
}

#[test]
fn answers_beyond_a_full_queue_end_no_connection() {
    let mut bench = wanting(12, 4, 16);
    bench.pass(60_000);
    bench.tell(0, THINKER, PayloadHook::End { stream: stream(), failure: None, is_own: false });
    bench.pass(1_000);
    let told = bench.told();
    let failures = told.iter().map(|(.., answer)| match answer {
        PayloadAnswer::Missing { failure, .. } => failure.clone(),
        answer => panic!("{answer:?}"),
    });
    assert_eq!(failures.collect::<Vec<_>>(), vec![PayloadFailure::Ended; 12]);
}

#[test]
fn a_core_at_its_limit_refuses_nothing_for_good() {
    let core = |set: fn(&mut CoreSettings)| {
        let mut settings = settings(pool_of(64));
        set(&mut settings.core);
        settings
    };
    let limits: [fn(&mut CoreSettings); 2] =
        [|core| core.requests_max = 1, |core| core.receivers_max = 1];
    for limit in limits {
        let mut bench = HostBench::set(3, core(limit));
        bench.cluster.faults.late = 30;
        for index in 0..8 {
            bench.put(0, chunk(index), PAGE, 1);
            let host = 1 + index as usize % 2;
            bench.tell(host, TALKER, PayloadHook::Want { key: chunk(index), producer: None });
        }
        // Long before an offer that nobody can pull would be over by itself.
        bench.pass(25_000);
        assert_eq!(arrivals(&mut bench), 8);
    }
}

#[test]
fn what_was_offered_to_a_host_that_left_is_there_for_others() {
    let mut bench = HostBench::new(3, 16);
    // So that the host is met before.
    bench.want_from(1, chunk(1), 0);
    bench.pass(50);
    bench.put(0, chunk(0), 5, 1);
    bench.want_from(1, chunk(0), 0);
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(0) });
    bench.want_from(2, chunk(0), 0);
    // Less than the lease of what was offered.
    bench.pass(1_000);
    assert_eq!(bench.arrived().0, 2);
}

#[test]
fn two_hosts_that_wait_for_each_other_learn_it() {
    let room = Nanos::from_secs(20);
    let config = PayloadConfig { hold: Nanos::ZERO, room, ..pool_of(8) };
    let mut bench = HostBench::with(2, config);
    bench.join(1, THINKER, "0");
    bench.join(0, TALKER, "1");
    // Longer than a half, so that neither finds room for the other one's.
    for (host, key) in [(0, chunk(0)), (1, chunk(1))] {
        bench.put(host, key, 6 * PAGE, 1);
    }
    bench.want_from(1, chunk(0), 0);
    bench.want_from(0, chunk(1), 1);
    bench.pass(19_000);
    assert_eq!(bench.told(), [], "somebody may come for what is there");
    bench.pass(5_000);
    let told = bench.told();
    let is_full = |answer: &PayloadAnswer| {
        let PayloadAnswer::Missing { failure, .. } = answer else { return false };
        matches!(failure, PayloadFailure::PoolFull { bytes, free, .. }
            if (*bytes, *free) == (6 * PAGE, 2 * PAGE))
    };
    assert!(told.len() == 2 && told.iter().all(|(.., answer)| is_full(answer)), "{told:?}");
    // What was waited for is still there.
    bench.tell(1, OTHER, PayloadHook::WantFrom { key: chunk(1), host: prefill_name(1) });
    let (.., claim, _, _) = bench.arrived();
    bench.tell(1, OTHER, PayloadHook::Release { claim });
    bench.want_from(1, chunk(0), 0);
    bench.pass(5_000);
    assert_eq!(bench.arrived().4, 1);
}

#[test]
fn what_is_left_of_a_copy_is_for_other_hosts() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.want(1, TALKER, chunk(0));
    bench.pass(50);
    assert_eq!(bench.arrived().0, 1);
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(0) });
    bench.want(2, OTHER, chunk(0));
    bench.pass(500);
    let (host, client, claim, _, stamp) = bench.arrived();
    assert_eq!((host, client, stamp), (2, OTHER, 1));
    bench.tell(2, OTHER, PayloadHook::Release { claim });
    bench.pass(500);
    bench.at_rest();
}

#[test]
fn who_waits_beside_a_copy_of_another_host_learns_that_the_own_one_is_gone() {
    let mut bench = HostBench::new(2, 16);
    bench.join(1, THINKER, "0");
    // Of this host all have it.
    bench.put(1, chunk(0), 5, 1);
    bench.tell(1, TALKER, PayloadHook::WantFrom { key: chunk(0), host: prefill_name(1) });
    let (.., claim, _, _) = bench.arrived();
    bench.tell(1, TALKER, PayloadHook::Release { claim });
    bench.put(0, chunk(0), 5, 1);
    bench.want_from(1, chunk(0), 0);
    bench.pass(50);
    let (.., claim, _, _) = bench.arrived();
    bench.tell(1, OTHER, PayloadHook::WantFrom { key: chunk(0), host: prefill_name(1) });
    assert_eq!(bench.told(), [], "it may come back");
    bench.tell(1, TALKER, PayloadHook::Release { claim });
    assert_eq!(bench.missing(), PayloadFailure::Taken);
}

#[test]
fn who_lacks_it_may_put_it_again() {
    let mut bench = HostBench::new(3, 16);
    bench.join(1, THINKER, "0");
    // Two hosts have begun the stream, of which one has ended it.
    bench.put(1, chunk(0), 5, 1);
    bench.tell(0, THINKER, PayloadHook::End { stream: stream(), failure: None, is_own: false });
    bench.want(2, TALKER, chunk(1));
    bench.pass(500);
    assert_eq!(bench.told(), []);
    bench.put(0, chunk(1), 5, 1);
    bench.pass(7_000);
    assert_eq!(bench.arrived().0, 2);
}
