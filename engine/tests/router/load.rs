//! What servers say of their load: requests of others count, who is busy is passed over, and what is
//! old or a lie costs nobody a request.

use crate::discovery::{DiscoveryBench, SentLeg, done, native, sent};
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{RouterConfig, RouterEffect, RouterInput, ServerLoad};
use kvferry_engine::core::{Machine, Nanos};

const PERIOD: Nanos = Nanos::from_secs(1);

fn one(name: &str) -> Registration {
    let role = if name.starts_with('p') { Role::Prefill } else { Role::Decode };
    Registration { dp_rank: 0, dp_size: 1, ..native(name, role, Mode::Push) }
}

/// A prefill and two decodes.
fn bench() -> DiscoveryBench {
    let config = RouterConfig {
        load_period: Some(PERIOD),
        expiry: Nanos::from_secs(1000),
        ..RouterConfig::default()
    };
    let mut bench = DiscoveryBench::new(config);
    for name in ["p0", "d0", "d1"] {
        bench.give(RouterInput::Register(one(name)));
    }
    bench
}

fn says(bench: &mut DiscoveryBench, name: &str, load: ServerLoad) {
    let http = format!("{name}:8000").as_str().into();
    assert!(bench.give(RouterInput::Load { http, load }).is_empty());
}

fn running(running: u32) -> ServerLoad {
    ServerLoad { running, ..ServerLoad::default() }
}

/// The legs of a request that is sent at once.
fn legs(bench: &mut DiscoveryBench) -> [SentLeg; 2] {
    sent(bench.ask()).try_into().expect("a prefill and a decode leg")
}

/// The decode of a request that is served at once.
fn decode(bench: &mut DiscoveryBench) -> String {
    let legs = legs(bench);
    for leg in &legs {
        bench.leg(leg.leg, done());
    }
    legs[1].engine.clone()
}

fn decodes(bench: &mut DiscoveryBench, times: usize) -> Vec<String> {
    (0..times).map(|_| decode(bench)).collect()
}

#[test]
fn each_server_is_asked_once_a_period_while_there_is_one() {
    let mut bench = bench();
    // A second rank of one server, and one that leaves.
    let rank = Registration { dp_rank: 1, http: "d0:8000".into(), ..one("d2") };
    bench.give(RouterInput::Register(rank));
    bench.give(RouterInput::Register(Registration { sequence: 2, draining: true, ..one("d1") }));
    for _ in 0..3 {
        let before = bench.now;
        let asked = bench.tick();
        assert_eq!(bench.now, before + PERIOD);
        let ask = |name: &str| RouterEffect::AskLoad { http: name.into() };
        assert_eq!(asked, ["d0:8000", "p0:8000"].map(ask));
    }
    bench.pass(Nanos::from_secs(5000));
    assert!(bench.engines().is_empty(), "all have expired");
    assert_eq!(bench.router.deadline(), None);
    let mut without = DiscoveryBench::new(RouterConfig::default());
    without.give(RouterInput::Register(one("p0")));
    says(&mut without, "p0", running(9));
    assert!(without.router.instances(without.now).all(|it| it.load.is_none()));
}

#[test]
fn requests_of_others_count() {
    let mut bench = bench();
    assert_eq!(decodes(&mut bench, 4), ["d0", "d1", "d0", "d1"]);
    says(&mut bench, "d0", running(3));
    assert_eq!(decodes(&mut bench, 3), ["d1"; 3]);
    // As many at the other, and one more.
    says(&mut bench, "d1", running(4));
    assert_eq!(decodes(&mut bench, 3), ["d0"; 3]);
}

#[test]
fn what_the_router_sent_itself_counts_once() {
    let mut bench = bench();
    let [_, mine] = legs(&mut bench);
    assert_eq!(mine.engine, "d0");
    bench.tick();
    says(&mut bench, "d0", running(1));
    // Those of the other are of somebody else, and weigh as much each.
    says(&mut bench, "d1", running(2));
    let [_, second] = legs(&mut bench);
    assert_eq!(second.engine, "d0");
    bench.leg(second.leg, done());
    bench.leg(mine.leg, done());
    assert_eq!(decode(&mut bench), "d0", "what has ended counts no more");
}

#[test]
fn who_has_a_queue_or_no_room_is_passed_over_while_others_are_free() {
    let queue = ServerLoad { waiting: 1, queued: 1, ..ServerLoad::default() };
    let full = ServerLoad { kv_cache: 990, ..ServerLoad::default() };
    for busy in [queue, full, ServerLoad { kv_cache: u16::MAX, ..full }] {
        let mut bench = bench();
        says(&mut bench, "d0", busy);
        says(&mut bench, "d1", running(5));
        assert_eq!(decodes(&mut bench, 3), ["d1"; 3], "{busy:?}");
        let views: Vec<_> = bench.router.instances(bench.now).map(|it| it.busy).collect();
        assert_eq!(views, [false, true, false]);
        // Where all are busy the one with less to do is taken.
        says(&mut bench, "d1", ServerLoad { running: 5, ..busy });
        assert_eq!(decodes(&mut bench, 3), ["d0"; 3]);
        // A request that waits for KV is no queue.
        says(&mut bench, "d0", ServerLoad { waiting: 2, ..ServerLoad::default() });
        assert_eq!(decode(&mut bench), "d0");
    }
}

#[test]
fn a_free_server_is_not_taken_for_free_for_ever() {
    let mut bench = bench();
    says(&mut bench, "d0", ServerLoad { waiting: 1, queued: 1, ..ServerLoad::default() });
    says(&mut bench, "d1", running(0));
    let got: Vec<String> = (0..24).map(|_| legs(&mut bench)[1].engine.clone()).collect();
    let first = got.iter().position(|it| it == "d0").expect("the busy one gets some, too");
    assert!((9..20).contains(&first), "{got:?}");
    assert!(got[first..].iter().filter(|it| *it == "d0").count() > 5, "{got:?}");
}

#[test]
fn what_is_old_does_not_count() {
    let mut bench = bench();
    says(&mut bench, "d0", ServerLoad { running: 50, queued: 9, ..ServerLoad::default() });
    bench.now = bench.now + PERIOD.scale(3, 1) - Nanos(1);
    assert_eq!(decodes(&mut bench, 2), ["d1"; 2]);
    bench.now = bench.now + Nanos(1);
    assert_eq!(decodes(&mut bench, 2), ["d0", "d1"]);
    assert!(bench.router.instances(bench.now).all(|it| it.load.is_none() && !it.busy));
}

#[test]
fn a_server_of_both_roles_has_one_load() {
    let mut bench = bench();
    let both = Registration { http: "p0:8000".into(), ..one("d2") };
    bench.give(RouterInput::Register(both));
    says(&mut bench, "p0", running(2));
    let loads: Vec<_> = bench.router.instances(bench.now).map(|it| it.load.is_some()).collect();
    assert_eq!(loads, [true, false, false, true]);
    // Of nobody, and of one that is not there.
    says(&mut bench, "nobody", running(7));
}
