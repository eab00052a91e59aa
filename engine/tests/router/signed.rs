//! Which registrations are taken where instances sign them.

use crate::discovery::{DiscoveryBench, beat, native};
use kvferry_engine::core::dialect::native::{self as wire, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    ListedInstances, RegistrationProof, RejectReason, RouterConfig, RouterInput,
};
use kvferry_engine::fabric::{ControlEvent, LinkId, LinkKind};

const SIGNED: LinkId = LinkId(LinkId::INBOUND | 1);
const PLAIN: LinkId = LinkId(LinkId::INBOUND | 2);
const OTHER: LinkId = LinkId(LinkId::INBOUND | 3);

/// A router to which one link was proven.
fn bench(config: RouterConfig) -> DiscoveryBench {
    let mut bench = DiscoveryBench::new(config);
    bench.give(RouterInput::Proof { link: SIGNED, proof: RegistrationProof::Signed });
    bench
}

fn hear(bench: &mut DiscoveryBench, link: LinkId, registration: Registration) {
    let parts = vec![wire::encode(&Frame::Register(registration))];
    bench.give(RouterInput::Control(ControlEvent::Frame { link, parts }));
}

/// Why what was said last was not taken.
fn reason(bench: &DiscoveryBench) -> Option<RejectReason> {
    bench.router.rejections().last().map(|it| it.reason)
}

fn prefill(name: &str) -> Registration {
    native(name, Role::Prefill, Mode::Push)
}

#[test]
fn only_signed_ones_are_taken_where_that_is_required() {
    let mut bench = bench(RouterConfig { require_signed: true, ..RouterConfig::default() });
    hear(&mut bench, PLAIN, prefill("p0"));
    assert_eq!((bench.engines().len(), reason(&bench)), (0, Some(RejectReason::Unsigned)));
    let frame = beat(Role::Prefill, "10.0.0.1", 6301, 1, Mode::Push).encode();
    bench.give(RouterInput::Control(ControlEvent::Frame { link: PLAIN, parts: vec![frame] }));
    assert_eq!((bench.engines().len(), reason(&bench)), (0, Some(RejectReason::Unsigned)));
    hear(&mut bench, SIGNED, prefill("p0"));
    assert_eq!(bench.engines(), ["p0"]);
    // A link that comes again has to be proven again.
    bench.give(RouterInput::Control(ControlEvent::LinkDown { link: SIGNED }));
    hear(&mut bench, SIGNED, prefill("p1"));
    assert_eq!(bench.engines(), ["p0"]);
    let proof = RegistrationProof::Wrong("a lie".into());
    bench.give(RouterInput::Proof { link: PLAIN, proof });
    assert_eq!(reason(&bench), Some(RejectReason::WrongSignature));
    assert_eq!(bench.router.counters().rejected[&RejectReason::WrongSignature], 1);
}

#[test]
fn a_list_is_whole_unless_signed_ones_are_on_it() {
    let listed: ListedInstances = "p0".parse().expect("a list");
    for (lists_signed, taken) in [(false, &["p0"][..]), (true, &["p0", "p1"])] {
        let listed = if lists_signed { listed.clone().or_signed() } else { listed.clone() };
        let mut bench = bench(RouterConfig { listed: Some(listed), ..RouterConfig::default() });
        hear(&mut bench, PLAIN, prefill("p0"));
        hear(&mut bench, SIGNED, prefill("p1"));
        hear(&mut bench, PLAIN, prefill("p2"));
        assert_eq!(bench.engines(), taken);
    }
}

#[test]
fn what_was_signed_is_not_replaced_by_what_is_not() {
    let mut bench = bench(RouterConfig::default());
    hear(&mut bench, SIGNED, prefill("p0"));
    let later = |name: &str| Registration {
        incarnation: Incarnation(9),
        http: prefill("p0").http,
        ..prefill(name)
    };
    for said in [later("p0"), later("p1"), Registration { sequence: 2, ..prefill("p0") }] {
        hear(&mut bench, PLAIN, said);
        assert_eq!(
            (bench.engines(), reason(&bench)),
            (vec!["p0".into()], Some(RejectReason::SignedBefore))
        );
    }
    hear(&mut bench, PLAIN, Registration { draining: true, ..later("p0") });
    assert_eq!(bench.engines(), ["p0"]);
    // Who is signed replaces it as ever.
    hear(&mut bench, SIGNED, later("p1"));
    assert_eq!(bench.engines(), ["p1"]);
}

#[test]
fn signed_instance_takes_the_place_of_an_unsigned_one() {
    let config = RouterConfig { signed_min: 512, ..RouterConfig::default() };
    let mut bench = bench(config);
    // 18 addresses with made-up instances only, and one with an honest instance.
    let link = |nth: u32| LinkId(LinkId::INBOUND | (100 + nth));
    let up = |bench: &mut DiscoveryBench, link, address: String| {
        let (channel, from) = (LinkKind::Discovery, Some(address.as_str().into()));
        bench.give(RouterInput::Control(ControlEvent::LinkUp { link, channel, from }));
    };
    for nth in 0..18 {
        up(&mut bench, link(nth), format!("tcp://10.0.0.{}:1000", nth + 1));
        for made_up in 0..1_100 {
            hear(&mut bench, link(nth), prefill(&format!("m{nth}-{made_up}")));
        }
    }
    assert_eq!(bench.engines().len(), 512, "the rest is kept for those that sign");
    up(&mut bench, SIGNED, "tcp://10.0.0.1:2000".into());
    for nth in 0..512 {
        hear(&mut bench, SIGNED, prefill(&format!("s{nth}")));
        assert!(bench.engines().contains(&format!("s{nth}")), "{nth}: {:?}", reason(&bench));
    }
    // One address leaves places for others that sign, wherever these come from.
    hear(&mut bench, SIGNED, prefill("s512"));
    assert_eq!(reason(&bench), Some(RejectReason::Share));
    let of = |bench: &DiscoveryBench, first| {
        bench.engines().iter().filter(|it| it.starts_with(first)).count()
    };
    assert_eq!((of(&bench, 's'), of(&bench, 'm')), (512, 512));
    up(&mut bench, OTHER, "tcp://10.0.1.1:1000".into());
    bench.give(RouterInput::Proof { link: OTHER, proof: RegistrationProof::Signed });
    hear(&mut bench, OTHER, prefill("t"));
    assert_eq!((of(&bench, 't'), of(&bench, 's'), of(&bench, 'm')), (1, 512, 511));
    // No signed instance leaves for an unsigned one.
    hear(&mut bench, PLAIN, prefill("n"));
    assert_eq!((of(&bench, 'n'), reason(&bench)), (0, Some(RejectReason::Full)));
}

#[test]
fn what_anybody_said_does_not_keep_out_what_is_signed() {
    let squatter = |name: &str| Registration {
        incarnation: Incarnation(u64::MAX),
        sequence: u64::MAX,
        http: prefill("p0").http,
        ..prefill(name)
    };
    for name in ["p0", "p1"] {
        let mut bench = bench(RouterConfig::default());
        hear(&mut bench, PLAIN, squatter(name));
        assert_eq!(bench.engines(), [name]);
        hear(&mut bench, SIGNED, prefill("p0"));
        assert_eq!(bench.engines(), ["p0"]);
        hear(&mut bench, SIGNED, Registration { sequence: 2, ..prefill("p0") });
        assert_eq!(bench.router.counters().replaced, 1, "{name}");
    }
    // Nor after it was said to be leaving.
    let mut bench = bench(RouterConfig::default());
    hear(&mut bench, PLAIN, Registration { draining: true, ..squatter("p0") });
    hear(&mut bench, SIGNED, prefill("p0"));
    assert_eq!(bench.engines(), ["p0"]);
}
