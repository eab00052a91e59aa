//! Hosts that begin anew, or are out of reach, or are named no more.

use super::{HostBench, OTHER, TALKER, THINKER, chunk};
use crate::cluster::{PAGE, prefill_name};
use kvferry_engine::core::payload::*;
use kvferry_engine::core::{Machine, Nanos};

#[test]
fn what_a_host_got_that_never_comes_back_is_not_waited_for() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.want_from(1, chunk(0), 0);
    bench.until_told();
    bench.arrived();
    // Before it could say that it has it; and it has nothing to do with the other one any more.
    bench.cluster.crash(1, false);
    bench.cluster.restart(1);
    bench.want_from(2, chunk(0), 0);
    bench.pass(100_000);
    assert_eq!(bench.told(), [], "it may say so yet");
    bench.pass(40_000);
    assert_eq!(bench.missing(), PayloadFailure::Taken);
    bench.at_rest();
}

#[test]
fn what_a_host_never_read_is_for_others() {
    let mut bench = HostBench::new(3, 16);
    bench.want_from(1, chunk(0), 0);
    bench.pass(50);
    // What is offered to it gets there no more.
    bench.cluster.crash(1, false);
    bench.put(0, chunk(0), 5, 1);
    bench.want_from(2, chunk(0), 0);
    bench.cluster.restart(1);
    bench.join(1, TALKER, "1");
    bench.want_from(1, chunk(1), 0);
    bench.pass(10_000);
    assert_eq!(bench.arrived().0, 2);
}

#[test]
fn a_host_out_of_reach_says_what_became_of_it_when_it_is_back() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.want_from(1, chunk(0), 0);
    while !bench.cluster.is_reading(1) {
        let now = bench.cluster.now;
        assert!(bench.cluster.step(now + Nanos::from_secs(1)));
    }
    bench.cluster.cut.push((0, 1));
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(0) });
    bench.want_from(2, chunk(0), 0);
    // New wants in vain do not make it give up sooner.
    for _ in 0..20 {
        bench.pass(5_000);
        bench.want_from(1, chunk(1), 0);
    }
    bench.told().iter().for_each(|(host, ..)| assert_eq!(*host, 1));
    bench.cluster.cut.clear();
    bench.pass(40_000);
    assert_eq!(bench.arrived().0, 2);
}

#[test]
fn who_is_named_no_more_hears_what_became_of_it() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 4 * PAGE, 1);
    bench.cluster.faults.late = 100;
    bench.want_from(1, chunk(0), 0);
    while !bench.cluster.is_reading(1) {
        let now = bench.cluster.now;
        assert!(bench.cluster.step(now + Nanos::from_secs(1)));
    }
    bench.cluster.name_others(1, vec![2]);
    bench.pass(1_000);
    assert_eq!(bench.missing(), PayloadFailure::PeerGone(prefill_name(0).0));
    bench.want_from(2, chunk(0), 0);
    bench.pass(10_000);
    assert_eq!(bench.arrived().0, 2);
    let gauges = bench.cluster.hosts[1].payload.gauges();
    assert_eq!((gauges.entries, gauges.remembered), (0, 2), "the other host, and a stage");
}

/// A client gets the one payload that there is for it, and reads it no more.
fn gets(bench: &mut HostBench, host: usize, key: PayloadKey) -> u64 {
    bench.want(host, TALKER, key);
    bench.pass(100);
    let (_, client, claim, _, stamp) = bench.arrived();
    bench.tell(host, client, PayloadHook::Release { claim });
    bench.pass(100);
    bench.told();
    stamp
}

#[test]
fn an_id_is_used_again_after_an_abort_on_another_host() {
    let mut bench = HostBench::new(2, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.put(0, chunk(1), 5, 1);
    gets(&mut bench, 1, chunk(0));
    let clean_up = PayloadHook::CleanUp { stream: chunk(0).stream, is_own: true };
    bench.tell(1, TALKER, clean_up);
    bench.want(1, TALKER, chunk(0));
    bench.pass(100);
    for (.., answer) in bench.told() {
        let PayloadAnswer::Missing { former, .. } = answer else { panic!("{answer:?}") };
        assert_ne!(former, FormerUse::No, "it is that of the request before");
    }
    bench.put(0, chunk(0), 5, 1);
    assert_eq!(gets(&mut bench, 1, chunk(0)), 3);
    bench.put(0, chunk(1), 5, 1);
    assert_eq!(gets(&mut bench, 1, chunk(1)), 4);
}

#[test]
fn whole_payload_of_another_host_begins_no_stream_anew() {
    let hold = Nanos::from_ms(100);
    let mut bench =
        HostBench::with(2, PayloadConfig { hold, pool: 16 * PAGE, ..PayloadConfig::default() });
    bench.join(1, THINKER, "0");
    bench.put_as(0, (chunk(1), false), 5, 1);
    bench.pass(200);
    bench.want_from(1, chunk(1), 0);
    bench.pass(50);
    assert_eq!(bench.missing(), PayloadFailure::Expired);
    bench.join(0, TALKER, "1");
    bench.put_as(1, (chunk(0), false), 5, 1);
    assert_eq!(gets(&mut bench, 0, chunk(0)), 2);
    bench.want_from(0, chunk(1), 0);
    assert_eq!(bench.missing(), PayloadFailure::Expired);
}

#[test]
fn an_abort_where_nothing_was_put_is_no_answer_for_other_hosts() {
    let mut bench = HostBench::new(3, 16);
    let clean_up = PayloadHook::CleanUp { stream: chunk(0).stream, is_own: true };
    bench.tell(1, TALKER, clean_up);
    bench.want(2, TALKER, chunk(0));
    bench.pass(10_000);
    assert_eq!(bench.told(), []);
    bench.put(0, chunk(0), 5, 1);
    bench.pass(100);
    assert_eq!(bench.arrived().4, 1);
}

#[test]
fn an_id_is_used_again_from_another_host() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.put(0, chunk(1), 5, 1);
    for index in 0..2 {
        gets(&mut bench, 2, chunk(index));
    }
    bench.join(1, THINKER, "0");
    for index in 0..2 {
        bench.put(1, chunk(index), 5, 1);
        assert_eq!(gets(&mut bench, 2, chunk(index)), 3 + index);
    }
}

#[test]
fn an_id_is_used_again_where_it_was_got() {
    let mut bench = HostBench::new(2, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.put(0, chunk(1), 5, 1);
    for index in 0..2 {
        gets(&mut bench, 1, chunk(index));
    }
    bench.join(1, THINKER, "0");
    bench.put(1, chunk(0), 5, 1);
    assert_eq!(gets(&mut bench, 1, chunk(0)), 3);
    // The next one waits for what the host of the request before says was taken.
    bench.want(1, TALKER, chunk(1));
    bench.pass(10_000);
    assert_eq!(bench.told(), []);
    let end = PayloadHook::End { stream: chunk(0).stream, failure: None, is_own: true };
    bench.tell(1, THINKER, end);
    bench.pass(10_000);
    assert_eq!(bench.missing(), PayloadFailure::Ended);
}

#[test]
fn where_a_stream_is_forgotten_no_other_host_answers_for_it() {
    let config = PayloadConfig { pool: 16 * PAGE, tombstones_max: 1, ..PayloadConfig::default() };
    let mut bench = HostBench::with(3, config);
    let stream = chunk(0).stream;
    bench.put(0, chunk(0), 5, 1);
    gets(&mut bench, 2, chunk(0));
    let clean_up = PayloadHook::CleanUp { stream: stream.clone(), is_own: true };
    bench.tell(0, THINKER, clean_up);
    bench.join(1, THINKER, "0");
    bench.put(1, chunk(0), 5, 1);
    assert_eq!(gets(&mut bench, 2, chunk(0)), 2);
    for request in [stream, PayloadStream::new("0", "1", "next")] {
        bench.tell(1, THINKER, PayloadHook::End { stream: request, failure: None, is_own: true });
    }
    // The first host still knows that the request before was cleaned up.
    bench.want(2, TALKER, chunk(1));
    bench.pass(100);
    assert_eq!(bench.missing(), PayloadFailure::Expired);
}

#[test]
fn what_crosses_with_a_want_does_not_answer_it() {
    let mut bench = HostBench::new(2, 16);
    bench.join(0, OTHER, "2");
    bench.want(1, TALKER, chunk(0));
    bench.pass(100);
    // What became of the want before is on its way while that of the next request is.
    let clean_up = PayloadHook::CleanUp { stream: chunk(0).stream, is_own: false };
    bench.tell(0, OTHER, clean_up);
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(0) });
    bench.want(1, TALKER, chunk(0));
    bench.pass(10_000);
    assert_eq!(bench.told(), []);
    bench.put(0, chunk(0), 5, 1);
    bench.until_told();
    let (.., claim, _, _) = bench.arrived();
    bench.tell(1, TALKER, PayloadHook::Release { claim });
    let ended = PayloadHook::End { stream: chunk(0).stream, failure: None, is_own: true };
    bench.tell(0, THINKER, ended);
    bench.pass(10_000);
    for host in 0..2 {
        let gauges = bench.cluster.hosts[host].payload.gauges();
        assert_eq!(gauges.entries, 0, "host {host}: {gauges:?}");
    }
}

#[test]
fn what_was_withdrawn_is_not_offered_again() {
    let mut bench = HostBench::new(2, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.cluster.faults.late = 200;
    bench.want(1, TALKER, chunk(0));
    // The offer is on its way when the request is over.
    while bench.cluster.at_work(0)[1] == 0 {
        bench.pass(1);
    }
    assert!(bench.cluster.at_work(1) == [0; 4]);
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(0) });
    let clean_up = PayloadHook::CleanUp { stream: chunk(0).stream, is_own: false };
    bench.tell(0, THINKER, clean_up);
    bench.want(1, TALKER, chunk(0));
    bench.pass(1_000);
    bench.put(0, chunk(0), 5, 1);
    bench.want(1, TALKER, chunk(0));
    bench.pass(10_000);
    assert_eq!(bench.arrived().4, 2);
}
