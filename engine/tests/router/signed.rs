//! Which registrations are taken where instances sign them.

use crate::discovery::{DiscoveryBench, beat, native};
use kvferry_engine::core::dialect::native::{self as wire, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::core::router::{
    ListedInstances, RegistrationProof, RejectReason, RouterConfig, RouterInput,
};
use kvferry_engine::fabric::{ControlEvent, LinkId};

const SIGNED: LinkId = LinkId(LinkId::INBOUND | 1);
const PLAIN: LinkId = LinkId(LinkId::INBOUND | 2);

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
