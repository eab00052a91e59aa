//! Registrations are signed where both sides have a secret, and read by everybody as they were.

#[path = "common/cable.rs"]
mod cable;

use cable::{Cable, CableSide, OURS, Parts, THEIRS, proof};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::registration::{
    MoriioRegistration, UncheckedRegistration,
};
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use kvferry_engine::fabric::{ControlEvent, LinkId, LinkKind};
use kvferry_wire::{SignedEvent, SignedPlane};
use proptest::prelude::*;
use std::num::NonZeroU16;

const OUT: LinkId = LinkId(3);
const IN: LinkId = LinkId(LinkId::INBOUND | 3);

/// A side of a link of registrations.
type SignedTestSide = CableSide<SignedPlane<Cable>>;

impl SignedTestSide {
    fn new(link: LinkId, secret: Option<&str>) -> SignedTestSide {
        let plane = |cable| SignedPlane::new(cable, proof(secret)).demanding();
        let mut side = CableSide::over(link, LinkKind::Discovery, plane);
        side.told();
        side
    }

    fn told(&mut self) -> Vec<SignedEvent> {
        let mut told = Vec::new();
        self.plane.poll_signed(Nanos::ZERO, &mut told);
        told
    }

    fn hear(&mut self, parts: Parts) -> Vec<SignedEvent> {
        self.put(ControlEvent::Frame { link: self.link, parts });
        self.told()
    }
}

/// What the router and the instance hear of what both say.
fn carry(instance: &mut SignedTestSide, router: &mut SignedTestSide) -> [Vec<SignedEvent>; 2] {
    let [of_instance, of_router] = cable::carry([instance, router], SignedTestSide::hear);
    [of_router, of_instance]
}

fn registration(sequence: u64, draining: bool) -> Registration {
    Registration {
        sequence,
        draining,
        ..Registration::new(
            "10.0.0.1:6301".into(),
            Incarnation(5),
            Role::Prefill,
            Mode::Push,
            "10.0.0.1:8000".into(),
            "tcp://10.0.0.1:6301".into(),
        )
    }
}

fn heartbeat(sequence: u64) -> Vec<u8> {
    let zmq = ZmqAddress::parse("host:10.0.0.1,handshake:6301,notify:61005").unwrap();
    let one = NonZeroU16::MIN;
    let beat =
        MoriioRegistration::new(Role::Prefill, "10.0.0.1:8000".into(), zmq, one, one, Mode::Push);
    beat.unwrap().encode_with(&registration(sequence, false))
}

fn frame(link: LinkId, frame: Vec<u8>) -> SignedEvent {
    SignedEvent::Control(ControlEvent::Frame { link, parts: vec![frame] })
}

fn pair(instance: Option<&str>, router: Option<&str>) -> (SignedTestSide, SignedTestSide) {
    (SignedTestSide::new(OUT, instance), SignedTestSide::new(IN, router))
}

/// A pair of which the router knows that the other side is proven.
fn proven() -> (SignedTestSide, SignedTestSide) {
    let (mut instance, mut router) = pair(Some(OURS), Some(OURS));
    instance.say(&heartbeat(1));
    let [heard, _] = carry(&mut instance, &mut router);
    assert_eq!(heard, [SignedEvent::Proven(IN), frame(IN, heartbeat(1))]);
    (instance, router)
}

#[test]
fn what_is_signed_is_read_by_everybody_as_it_was() {
    let plain = UncheckedRegistration::decode(&[heartbeat(1)]).unwrap();
    let (mut instance, mut router) = pair(Some(OURS), Some(OURS));
    instance.say(&heartbeat(1));
    let offered = instance.sent();
    let [parts] = &offered[..] else { panic!("{offered:?}") };
    assert_eq!((parts.len(), UncheckedRegistration::decode(parts)), (1, Ok(plain)));
    for parts in offered {
        assert_eq!(router.hear(parts), []);
    }
    carry(&mut instance, &mut router);
    instance.say(&heartbeat(2));
    let sealed = instance.sent().remove(0);
    let read = UncheckedRegistration::decode(&sealed).unwrap();
    assert_eq!((sealed.len(), read.native.map(|it| it.sequence)), (1, Some(2)));
    // Nobody but who has a secret adds a byte.
    let (mut instance, _) = pair(None, None);
    instance.say(&heartbeat(1));
    assert_eq!(instance.sent(), [[heartbeat(1)]]);
}

/// As where a router is busy for longer than a heartbeat.
#[test]
fn an_offer_that_is_repeated_has_one_answer() {
    let (mut instance, mut router) = pair(Some(OURS), Some(OURS));
    instance.say(&heartbeat(1));
    for parts in instance.sent() {
        assert_eq!(router.hear(parts), []);
    }
    // The answer gets lost, as where the instance has no room for what it says to it.
    let lost = router.sent();
    instance.say(&heartbeat(1));
    for parts in instance.sent() {
        assert_eq!(router.hear(parts), []);
    }
    assert_eq!(router.sent(), lost);
    instance.say(&heartbeat(1));
    instance.say(&heartbeat(2));
    let [heard, _] = carry(&mut instance, &mut router);
    assert_eq!(heard, [SignedEvent::Proven(IN), frame(IN, heartbeat(2))]);
    instance.say(&heartbeat(3));
    let [heard, _] = carry(&mut instance, &mut router);
    assert_eq!(heard, [frame(IN, heartbeat(3))]);
}

#[test]
fn both_directions_are_sealed_once_both_are_proven() {
    let (mut instance, mut router) = proven();
    let drains = native::encode(&Frame::Register(registration(3, true)));
    let abandon = native::encode(&Frame::Abandon { keys: Vec::new() });
    instance.say(&drains);
    router.say(&abandon);
    let told = carry(&mut instance, &mut router);
    assert_eq!(told, [vec![frame(IN, drains)], vec![frame(OUT, abandon.clone())]]);
    let plain = instance.hear(vec![abandon]);
    assert!(matches!(&plain[..], [SignedEvent::Wrong(OUT, _)]), "{plain:?}");
}

#[test]
fn who_has_no_secret_or_another_is_told_once() {
    for (instance, router, said) in [
        (Some(THEIRS), Some(OURS), "different secrets"),
        (None, Some(OURS), "a proof of the fleet's secret is demanded here"),
    ] {
        let (mut near, mut far) = pair(instance, router);
        near.say(&heartbeat(1));
        let heard = near.sent().into_iter().flat_map(|parts| far.hear(parts)).collect::<Vec<_>>();
        match instance {
            Some(_) => assert!(
                matches!(&heard[..], [SignedEvent::Wrong(IN, why)] if why.contains(said)),
                "{heard:?}"
            ),
            None => assert_eq!(heard, [frame(IN, heartbeat(1))]),
        }
        let refusals = far.sent();
        assert_eq!(refusals.len(), 1, "{said}");
        assert!(String::from_utf8_lossy(&refusals[0][0]).contains(said), "{refusals:?}");
        assert_eq!(near.hear(refusals[0].clone()), []);
        if instance.is_none() {
            near.say(&heartbeat(2));
            carry(&mut near, &mut far);
            assert_eq!(far.sent(), Vec::<Parts>::new());
        }
    }
    // A router without a secret takes what there is.
    let (mut near, mut far) = pair(Some(OURS), None);
    near.say(&heartbeat(1));
    let [heard, _] = carry(&mut near, &mut far);
    let [SignedEvent::Control(ControlEvent::Frame { parts, .. })] = &heard[..] else {
        panic!("{heard:?}")
    };
    assert!(UncheckedRegistration::decode(parts).is_ok());
}

#[test]
fn what_was_heard_cannot_be_said_again() {
    let (mut instance, mut router) = pair(Some(OURS), Some(OURS));
    instance.say(&heartbeat(1));
    let mut heard = Vec::new();
    loop {
        let out = instance.sent();
        if out.is_empty() {
            break;
        }
        for parts in out {
            heard.push(parts.clone());
            router.hear(parts);
        }
        router.sent().into_iter().for_each(|parts| drop(instance.hear(parts)));
    }
    assert!(heard.len() >= 3, "an offer, a confirmation and a seal: {}", heard.len());
    let mut other = SignedTestSide::new(IN, Some(OURS));
    for parts in heard.iter().chain(&heard) {
        let told = other.hear(parts.clone());
        assert!(told.iter().all(|it| matches!(it, SignedEvent::Wrong(..))), "{told:?}");
    }
    // On its own link, too.
    let told = router.hear(heard.pop().unwrap());
    assert!(matches!(&told[..], [SignedEvent::Wrong(..)]), "{told:?}");
    // And back to who said it.
    instance.say(&heartbeat(2));
    let told = instance.hear(instance.sent().remove(0));
    assert!(matches!(&told[..], [SignedEvent::Wrong(..)]), "{told:?}");
}

proptest! {
    #[test]
    fn a_changed_byte_is_not_taken(at in any::<usize>(), by in 1..=u8::MAX) {
        let (mut instance, mut router) = proven();
        instance.say(&heartbeat(2));
        let mut sealed = instance.sent().remove(0);
        let at = at % sealed[0].len();
        sealed[0][at] ^= by;
        let told = router.hear(sealed);
        prop_assert!(told.iter().all(|it| matches!(it, SignedEvent::Wrong(..))), "{:?}", told);
    }

    #[test]
    fn any_bytes_are_survived(parts in proptest::collection::vec(any::<Vec<u8>>(), 0..4)) {
        let (mut instance, mut router) = proven();
        let mut stranger = SignedTestSide::new(IN, Some(OURS));
        let key: &[u8] = b"\x81\xadkvferry_proof\xc4";
        for head in [&[][..], &[0xc1, b'p'], &[0xc1, b'k'], key] {
            let said: Parts = parts.iter().map(|part| [head, part].concat()).collect();
            instance.hear(said.clone());
            let is_taken = |it: &SignedEvent| matches!(it, SignedEvent::Control(_) | SignedEvent::Proven(_));
            prop_assert!(!router.hear(said.clone()).iter().any(is_taken));
            let proven = |it: &SignedEvent| matches!(it, SignedEvent::Proven(_));
            prop_assert!(!stranger.hear(said).iter().any(proven));
        }
    }
}
