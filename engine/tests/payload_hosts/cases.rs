//! What has to hold between hosts, one by one.

mod anew;
mod full;
mod notes;

use crate::cluster::{Cluster, HostSettings, PAGE, WayFaults, prefill_name};
use kvferry_engine::core::config::CoreSettings;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::payload::*;
use kvferry_engine::core::transfer::TransferSettings;
use kvferry_engine::core::{Machine, Nanos};

const THINKER: PayloadClient = PayloadClient(0);
const TALKER: PayloadClient = PayloadClient(1);
const OTHER: PayloadClient = PayloadClient(2);

fn stream() -> PayloadStream {
    PayloadStream::new("0", "1", "r/@\u{e4}")
}

fn chunk(index: u64) -> PayloadKey {
    stream().chunk(index)
}

struct HostBench {
    cluster: Cluster,
    stamp: u64,
}

impl HostBench {
    /// A thinker on the first host, two talkers on each other one.
    fn new(hosts: usize, pages: u64) -> HostBench {
        HostBench::with(hosts, PayloadConfig { pool: pages * PAGE, ..PayloadConfig::default() })
    }

    fn with(hosts: usize, config: PayloadConfig) -> HostBench {
        let core = CoreSettings { lease: Nanos::from_secs(3), ..CoreSettings::default() };
        HostBench::set(hosts, HostSettings::new(config, core))
    }

    fn set(hosts: usize, settings: HostSettings) -> HostBench {
        let cluster = Cluster::new(hosts, settings, 1);
        let mut bench = HostBench { cluster, stamp: 0 };
        bench.join(0, THINKER, "0");
        for host in 1..hosts {
            bench.join(host, TALKER, "1");
            bench.join(host, OTHER, "1");
        }
        bench
    }

    fn join(&mut self, host: usize, client: PayloadClient, stage: &str) {
        let joined = PayloadHook::Joined { deployment: "a".into(), stage: stage.into() };
        self.tell(host, client, joined);
    }

    fn tell(&mut self, host: usize, client: PayloadClient, hook: PayloadHook) {
        self.cluster.payload(host, PayloadInput::Hook { client, hook });
    }

    fn put(&mut self, host: usize, key: PayloadKey, bytes: u64, receivers: u32) {
        let is_chunk = key.chunk.is_some();
        self.put_as(host, (key, is_chunk), bytes, receivers);
    }

    fn put_as(
        &mut self,
        host: usize,
        (key, is_chunk): (PayloadKey, bool),
        bytes: u64,
        receivers: u32,
    ) {
        let hook = PayloadHook::Reserve { ticket: 1, bytes, wait: Nanos::ZERO };
        self.tell(host, THINKER, hook);
        let Some((_, _, PayloadAnswer::Reserved { slot, offset, .. })) = self.cluster.answers.pop()
        else {
            panic!("there is room")
        };
        self.stamp += 1;
        let pages = (offset / PAGE) as usize..((offset + bytes).div_ceil(PAGE)) as usize;
        self.cluster.hosts[host].memory[pages].fill(self.stamp);
        self.tell(host, THINKER, PayloadHook::Put { slot, key, receivers, is_chunk });
    }

    fn want(&mut self, host: usize, client: PayloadClient, key: PayloadKey) {
        self.tell(host, client, PayloadHook::Want { key, producer: None });
    }

    fn want_from(&mut self, host: usize, key: PayloadKey, from: usize) {
        self.tell(host, TALKER, PayloadHook::WantFrom { key, host: prefill_name(from) });
    }

    /// Steps until somebody is told something.
    fn until_told(&mut self) {
        let until = self.cluster.now + Nanos::from_secs(60);
        while self.cluster.answers.is_empty() && self.cluster.step(until) {}
    }

    /// Whether somebody can have so many pages at once.
    fn has_room(&mut self, host: usize, client: PayloadClient, pages: u64) -> bool {
        let hook = PayloadHook::Reserve { ticket: 7, bytes: pages * PAGE, wait: Nanos::ZERO };
        self.tell(host, client, hook);
        match self.cluster.answers.pop() {
            Some((_, _, PayloadAnswer::Reserved { slot, .. })) => {
                self.tell(host, client, PayloadHook::Return { slot });
                true
            }
            _ => false,
        }
    }

    fn pass(&mut self, ms: u64) {
        self.cluster.run(self.cluster.now + Nanos::from_ms(ms));
    }

    /// What the clients were told meanwhile.
    fn told(&mut self) -> Vec<(usize, PayloadClient, PayloadAnswer)> {
        let mut told = std::mem::take(&mut self.cluster.answers);
        told.retain(|(.., answer)| !matches!(answer, PayloadAnswer::Abandoned { .. }));
        told
    }

    /// The one payload that arrived, with who wrote its first page; others may have been told that
    /// it does not come.
    fn arrived(&mut self) -> (usize, PayloadClient, ClaimId, u64, u64) {
        let mut told = self.told();
        told.retain(|(.., answer)| !matches!(answer, PayloadAnswer::Missing { .. }));
        let [(host, client, PayloadAnswer::Arrived { claim, offset, bytes, .. })] = &told[..]
        else {
            panic!("{told:?}")
        };
        let page = self.cluster.hosts[*host].memory.get((offset / PAGE) as usize);
        (*host, *client, *claim, *bytes, page.copied().unwrap_or(0))
    }

    fn missing(&mut self) -> PayloadFailure {
        let told = self.told();
        let [(.., PayloadAnswer::Missing { failure, .. })] = &told[..] else { panic!("{told:?}") };
        failure.clone()
    }

    /// All slots of all hosts are free, and nobody has anything to do.
    fn at_rest(&mut self) {
        for host in 0..self.cluster.hosts.len() {
            let core = &self.cluster.hosts[host].payload;
            let gauges = core.gauges();
            assert_eq!((gauges.transfers, gauges.held), (0, 0), "host {host}: {gauges:?}");
            assert_eq!(self.cluster.at_work(host), [0; 4], "host {host}");
        }
    }
}

#[test]
fn a_payload_goes_to_the_host_that_wants_it() {
    let mut bench = HostBench::new(2, 16);
    bench.put(0, chunk(0), 3 * PAGE + 5, 1);
    bench.want(1, TALKER, chunk(0));
    bench.pass(50);
    let (host, client, claim, bytes, stamp) = bench.arrived();
    assert_eq!((host, client, bytes, stamp), (1, TALKER, 3 * PAGE + 5, 1));
    assert_eq!(bench.cluster.moved, 4 * PAGE);
    bench.tell(1, TALKER, PayloadHook::Release { claim });
    bench.pass(50);
    bench.at_rest();
    // It waits at one that is not there yet.
    bench.want(1, TALKER, chunk(1));
    bench.pass(50);
    bench.put(0, chunk(1), 0, 1);
    bench.pass(50);
    let (.., claim, bytes, _) = bench.arrived();
    assert_eq!(bytes, 0, "an empty payload is one");
    bench.tell(1, TALKER, PayloadHook::Release { claim });
    bench.pass(50);
    bench.at_rest();
}

#[test]
fn what_is_lost_on_the_way_or_twice_there_moves_once() {
    let mut bench = HostBench::new(2, 64);
    bench.cluster.faults = WayFaults { lost: 30, repeated: 30, damaged: 10, failed: 20, late: 5 };
    for index in 0..8 {
        bench.put(0, chunk(index), 2 * PAGE, 1);
        bench.want(1, TALKER, chunk(index));
        bench.until_told();
        let (.., claim, bytes, stamp) = bench.arrived();
        assert_eq!((bytes, stamp), (2 * PAGE, index + 1));
        bench.tell(1, TALKER, PayloadHook::Release { claim });
    }
    bench.cluster.faults = WayFaults::default();
    bench.pass(20_000);
    bench.at_rest();
}

#[test]
fn bytes_that_fail_to_come_between_successes_are_read_again_each_time() {
    let tries = 1 + TransferSettings::default().retries_max;
    let mut bench = HostBench::new(2, 16);
    bench.put(0, chunk(0), 5, 10);
    let gets = |bench: &mut HostBench, failing_fetches: u32| {
        bench.cluster.reads_to_fail = failing_fetches * tries;
        bench.until_told();
        bench.told()
    };
    for client in [TALKER, OTHER] {
        bench.want(1, client, chunk(0));
    }
    for _ in 0..5 {
        let told = gets(&mut bench, 2);
        let [(_, client, PayloadAnswer::Arrived { claim, .. })] = told[..] else {
            panic!("{told:?}")
        };
        bench.tell(1, client, PayloadHook::Release { claim });
        bench.want(1, client, chunk(0));
    }
    let told = gets(&mut bench, 3);
    let is_not_moved = |(.., answer): &(usize, PayloadClient, PayloadAnswer)| {
        matches!(answer, PayloadAnswer::Missing { failure: PayloadFailure::NotMoved(_), .. })
    };
    assert!(told.len() == 2 && told.iter().all(is_not_moved), "{told:?}");
}

#[test]
fn what_is_pulled_stays_whatever_becomes_of_the_payload() {
    let mut bench = HostBench::new(2, 8);
    bench.put(0, chunk(0), 4 * PAGE, 1);
    bench.cluster.faults.late = 200;
    bench.want(1, TALKER, chunk(0));
    // It is lent, and the other host has not read it.
    while bench.cluster.at_work(0)[1] == 0 {
        bench.pass(1);
    }
    bench.tell(0, THINKER, PayloadHook::CleanUp { stream: stream(), is_own: false });
    assert!(bench.has_room(0, THINKER, 4) && !bench.has_room(0, THINKER, 8));
    bench.until_told();
    let (.., stamp) = bench.arrived();
    assert_eq!(stamp, 1);
    bench.cluster.faults.late = 0;
    bench.pass(5_000);
    assert!(bench.has_room(0, THINKER, 8));
}

#[test]
fn a_slot_that_late_bytes_may_land_in_is_nobody_elses() {
    let mut bench = HostBench::new(2, 8);
    bench.put(0, chunk(0), 4 * PAGE, 1);
    bench.want(1, TALKER, chunk(0));
    while !bench.cluster.is_reading(1) {
        bench.cluster.faults.late = 100;
        let now = bench.cluster.now;
        assert!(bench.cluster.step(now + Nanos::from_secs(1)));
    }
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(0) });
    assert!(bench.has_room(1, TALKER, 4) && !bench.has_room(1, TALKER, 8));
    bench.cluster.faults.late = 0;
    bench.pass(5_000);
    assert!(bench.has_room(1, TALKER, 8));
    // Nobody got it: it is there for the next one.
    bench.want(1, OTHER, chunk(0));
    bench.pass(200);
    assert_eq!(bench.arrived().1, OTHER);
}

#[test]
fn who_waits_learns_that_the_host_is_gone() {
    for is_told in [true, false] {
        let mut bench = HostBench::new(3, 8);
        bench.want_from(1, chunk(0), 0);
        bench.want(2, TALKER, chunk(0));
        bench.pass(100);
        assert_eq!(bench.told(), []);
        bench.cluster.crash(0, is_told);
        bench.pass(9_500);
        let told = bench.told();
        let gone = |host| {
            let failure = PayloadFailure::PeerGone("payload-0-p".into());
            (host, TALKER, PayloadAnswer::Missing { key: chunk(0), failure, former: FormerUse::No })
        };
        assert_eq!(told, [gone(1), gone(2)], "{is_told}");
        // It is the same for who comes now, and well when the host is there again.
        bench.want_from(1, chunk(0), 0);
        bench.pass(3_000);
        assert_eq!(bench.told(), [gone(1)]);
        bench.cluster.restart(0);
        bench.join(0, THINKER, "0");
        bench.put(0, chunk(0), 5, 1);
        bench.pass(1_000);
        bench.want_from(1, chunk(0), 0);
        bench.pass(1_000);
        assert_eq!(bench.arrived().0, 1);
    }
}

#[test]
fn a_host_that_nobody_named_is_not_waited_for() {
    let mut bench = HostBench::new(2, 8);
    let host = "payload-9-p".into();
    bench.tell(1, TALKER, PayloadHook::WantFrom { key: chunk(0), host });
    assert_eq!(bench.missing(), PayloadFailure::PeerGone("payload-9-p".into()));
}

#[test]
fn the_end_of_a_stream_is_heard_on_other_hosts() {
    type End = (fn() -> PayloadHook, PayloadFailure);
    let ends: [End; 4] = [
        (
            || PayloadHook::End { stream: stream(), failure: None, is_own: false },
            PayloadFailure::Ended,
        ),
        (
            || PayloadHook::End {
                stream: stream(),
                failure: Some("out of memory".into()),
                is_own: false,
            },
            PayloadFailure::GivenUp("out of memory".into()),
        ),
        (|| PayloadHook::Left, PayloadFailure::ProducerGone),
        (|| PayloadHook::CleanUp { stream: stream(), is_own: false }, PayloadFailure::CleanedUp),
    ];
    for (hook, failure) in ends {
        let mut bench = HostBench::new(2, 8);
        bench.want(1, TALKER, chunk(0));
        bench.pass(50);
        bench.tell(0, THINKER, hook());
        bench.pass(50);
        assert_eq!(bench.missing(), failure);
        if failure != PayloadFailure::ProducerGone {
            bench.want_from(1, chunk(1), 0);
            bench.pass(50);
            assert_eq!(bench.missing(), failure, "who comes later hears the same");
        }
    }
}

#[test]
fn a_host_ends_no_stream_of_another() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.want(1, TALKER, chunk(0));
    bench.pass(50);
    bench.arrived();
    bench.want(1, TALKER, chunk(1));
    bench.pass(50);
    let place = ScopedKey { deployment: "a".into(), key: chunk(1) };
    for (peer, is_its) in [(2, false), (0, true)] {
        let (place, failure) = (place.clone(), PayloadFailure::Ended);
        let want = bench.cluster.last_wants[&prefill_name(peer)];
        let note = PayloadNote::Missing { place, failure, want };
        let (peer, incarnation) = (prefill_name(peer), Incarnation(1));
        let told = DirectoryNews::Told { peer, incarnation, note };
        bench.cluster.payload(1, PayloadInput::DecodePeer(told));
        assert_eq!(!bench.told().is_empty(), is_its);
    }
}

#[test]
fn each_payload_has_as_many_receivers_as_were_said() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    for host in [1, 2] {
        for client in [TALKER, OTHER] {
            bench.want_from(host, chunk(0), 0);
            bench.tell(
                host,
                client,
                PayloadHook::WantFrom { key: chunk(0), host: prefill_name(0) },
            );
        }
    }
    bench.pass(100);
    let told = bench.told();
    let arrived = |(.., answer): &&(usize, PayloadClient, PayloadAnswer)| {
        matches!(answer, PayloadAnswer::Arrived { .. })
    };
    let got: Vec<_> = told.iter().filter(arrived).collect();
    let [(host, client, PayloadAnswer::Arrived { claim, .. })] = got[..] else {
        panic!("{told:?}")
    };
    let (host, client, claim) = (*host, *client, *claim);
    bench.tell(host, client, PayloadHook::Release { claim });
    bench.pass(100);
    let told = [told, bench.told()].concat();
    let taken = PayloadAnswer::Missing {
        key: chunk(0),
        failure: PayloadFailure::Taken,
        former: FormerUse::Yes,
    };
    assert_eq!(told.iter().filter(|(.., answer)| *answer == taken).count(), 3, "{told:?}");
    // Two on one host, and the bytes moved once.
    let moved = bench.cluster.moved;
    bench.put(0, chunk(1), 5, 2);
    bench.want(1, TALKER, chunk(1));
    bench.want(1, OTHER, chunk(1));
    bench.pass(100);
    let told = bench.told();
    assert_eq!(told.iter().filter(arrived).count(), 2, "{told:?}");
    assert_eq!(bench.cluster.moved - moved, PAGE);
}

#[test]
fn what_a_host_may_have_got_goes_to_nobody_else() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.want_from(1, chunk(0), 0);
    bench.until_told();
    bench.arrived();
    // Before it could say that it has it.
    bench.cluster.crash(1, true);
    bench.want_from(2, chunk(0), 0);
    bench.pass(5_000);
    assert_eq!(bench.told(), [], "it may come back");
    bench.cluster.restart(1);
    bench.join(1, TALKER, "1");
    bench.want_from(1, chunk(0), 0);
    bench.pass(10_000);
    let told = bench.told();
    let failure = PayloadFailure::Taken;
    let taken = |host| {
        let answer = PayloadAnswer::Missing {
            key: chunk(0),
            failure: failure.clone(),
            former: FormerUse::Yes,
        };
        (host, TALKER, answer)
    };
    assert!(told.contains(&taken(1)) && told.contains(&taken(2)), "{told:?}");
    bench.at_rest();
}

#[test]
fn a_lost_end_gives_the_same_host_the_same_bytes() {
    let mut bench = HostBench::new(3, 16);
    bench.put(0, chunk(0), 5, 1);
    bench.cluster.cut.push((0, 1));
    bench.want_from(1, chunk(0), 0);
    bench.pass(3_000);
    bench.missing();
    bench.cluster.cut.clear();
    bench.want_from(1, chunk(0), 0);
    while bench.cluster.at_work(0)[1] == 0 {
        let now = bench.cluster.now;
        assert!(bench.cluster.step(now + Nanos::from_secs(9)));
    }
    // The offer is on its way, and is lost.
    bench.cluster.cut.push((0, 1));
    bench.want_from(2, chunk(0), 0);
    bench.pass(500);
    assert_eq!(bench.told(), [], "it is the other one's");
    bench.cluster.cut.clear();
    bench.pass(5_000);
    let (host, .., stamp) = bench.arrived();
    assert_eq!((host, stamp), (1, 1));
}

#[test]
fn a_host_ends_no_loan_of_another() {
    let mut bench = HostBench::new(3, 8);
    bench.cluster.faults.late = 100;
    bench.put(0, chunk(0), 8 * PAGE, 1);
    bench.want_from(1, chunk(0), 0);
    while bench.cluster.at_work(0)[1] == 0 {
        bench.pass(1);
    }
    let (peer, incarnation) = ("payload-2-d".into(), Incarnation(1));
    let met = DirectoryNews::Met { peer, incarnation };
    bench.cluster.payload(0, PayloadInput::PrefillPeer(met));
    for got in [true, false] {
        let note = PayloadNote::Done { number: 1, got };
        let told = DirectoryNews::Told { peer: "payload-2-d".into(), incarnation, note };
        bench.cluster.payload(0, PayloadInput::PrefillPeer(told));
    }
    assert_eq!(bench.cluster.hosts[0].payload.gauges().transfers, 1, "nobody has it");
    bench.until_told();
    assert_eq!(bench.arrived().4, 1);
}

#[test]
fn a_host_with_its_fill_of_wants_waits() {
    let config =
        PayloadConfig { pool: 16 * PAGE, host_payloads_max: 1, ..PayloadConfig::default() };
    let mut bench = HostBench::with(2, config);
    for index in 0..3 {
        bench.want(1, TALKER, chunk(index));
    }
    bench.pass(50);
    let gauges = bench.cluster.hosts[0].payload.gauges();
    assert_eq!(gauges.entries, 3, "one that waits, by its name, and that the host does");
    for index in 0..3 {
        bench.put(0, chunk(index), 5, 1);
        bench.pass(500);
    }
    assert_eq!(bench.told().len(), 3);
}

#[test]
fn what_has_no_room_in_the_pool_is_refused_with_both_sizes() {
    let mut bench = HostBench::new(2, 8);
    bench.want(1, TALKER, chunk(0));
    bench.pass(50);
    let place = ScopedKey { deployment: "a".into(), key: chunk(0) };
    let (bytes, want) = (9 * PAGE, bench.cluster.last_wants[&prefill_name(0)]);
    let note = PayloadNote::Offer { place, number: 1, bytes, generation: 1, is_chunk: true, want };
    let told = DirectoryNews::Told { peer: prefill_name(0), incarnation: Incarnation(1), note };
    bench.cluster.payload(1, PayloadInput::DecodePeer(told));
    assert_eq!(bench.missing(), PayloadFailure::TooLong { bytes, pool: 8 * PAGE });
}

#[test]
fn a_host_without_room_leaves_it_to_others() {
    let mut bench = HostBench::new(3, 8);
    bench.put(0, chunk(0), 3 * PAGE, 1);
    let hook = PayloadHook::Reserve { ticket: 1, bytes: 8 * PAGE, wait: Nanos::ZERO };
    bench.tell(1, TALKER, hook);
    bench.told();
    bench.want_from(1, chunk(0), 0);
    bench.pass(100);
    bench.want_from(2, chunk(0), 0);
    bench.pass(2_000);
    assert_eq!(bench.arrived().0, 2);
}

#[test]
fn two_hosts_that_are_full_of_what_the_other_wants_get_it() {
    let mut bench = HostBench::new(2, 16);
    bench.join(1, THINKER, "0");
    bench.join(0, TALKER, "1");
    for (host, key) in [(0, chunk(0)), (1, chunk(1))] {
        // All that its stage may have.
        bench.put(host, key, 8 * PAGE, 1);
        assert!(!bench.has_room(host, THINKER, 1));
    }
    bench.want_from(1, chunk(0), 0);
    bench.want_from(0, chunk(1), 1);
    bench.pass(500);
    assert_eq!(bench.told().len(), 2);
}

#[test]
fn deployments_do_not_meet_on_other_hosts() {
    let mut bench = HostBench::new(2, 8);
    let stranger = PayloadClient(9);
    let joined = PayloadHook::Joined { deployment: "b".into(), stage: "1".into() };
    bench.tell(1, stranger, joined);
    bench.put(0, chunk(0), 5, 1);
    bench.want(1, stranger, chunk(0));
    bench.pass(100);
    assert_eq!(bench.told(), []);
    bench.want(1, TALKER, chunk(0));
    bench.pass(100);
    assert_eq!(bench.arrived().1, TALKER);
}

#[test]
fn of_what_was_put_here_nothing_is_looked_for_elsewhere() {
    let mut bench = HostBench::new(2, 16);
    bench.join(1, THINKER, "0");
    for host in [0, 1] {
        bench.put(host, chunk(0), 5, 1);
    }
    bench.want(1, TALKER, chunk(0));
    assert_eq!(bench.arrived().4, 2);
    // It may come back.
    bench.want(1, OTHER, chunk(0));
    bench.pass(2_000);
    assert_eq!((bench.told(), bench.cluster.moved), (Vec::new(), 0));
    bench.tell(1, TALKER, PayloadHook::Abandon { key: chunk(0) });
    assert_eq!(bench.arrived().1, OTHER);
}

#[test]
fn a_host_has_no_more_remembered_than_is_said() {
    let config = PayloadConfig { pool: 8 * PAGE, ..PayloadConfig::default() };
    let mut bench = HostBench::with(2, config);
    let long = |index: u64| PayloadStream::new("0", "1", &"r".repeat(60_000)).chunk(index);
    for index in 0..400 {
        bench.want_from(1, long(index), 0);
    }
    bench.pass(50);
    // 16 MiB of names of 60,003 bytes; each counts as a want of the host, and as one who waits.
    assert_eq!(bench.cluster.hosts[0].payload.gauges().entries, 3 * ((16 << 20) / 60_003));
    let too_long = PayloadStream::new("0", "1", &"r".repeat(70_000)).whole();
    bench.told();
    bench.want_from(1, too_long, 0);
    assert!(matches!(bench.missing(), PayloadFailure::Overload(_)));
    // What nobody wants any more is forgotten.
    bench.tell(1, TALKER, PayloadHook::Left);
    bench.pass(500);
    assert_eq!(bench.cluster.hosts[0].payload.gauges().entries, 0);
}
