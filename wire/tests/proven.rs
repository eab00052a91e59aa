//! Who has proven to know the secret speaks the native dialect; whoever is between the two sides
//! changes, repeats and forges nothing.

#[path = "common/cable.rs"]
mod cable;

use cable::{Cable, CableSide, OURS, Parts, THEIRS, proof};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native::{self, ConnectionHeader, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::{Geometry, KvGroup};
use kvferry_engine::core::message::{Hello, Role};
use kvferry_engine::fabric::{ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, Refused};
use kvferry_wire::ProvenPlane;
use proptest::prelude::*;
use std::sync::atomic::Ordering;

const OUT: LinkId = LinkId(7);
const IN: LinkId = LinkId(LinkId::INBOUND | 7);

/// Most frames that wait for a proof.
const WAITING_MAX: u64 = 64;

/// A side of a link of handshakes.
type ProvenTestSide = CableSide<ProvenPlane<Cable>>;

impl ProvenTestSide {
    fn new(link: LinkId, secret: Option<&str>) -> ProvenTestSide {
        let plane = |cable| ProvenPlane::new(cable, proof(secret), "test".into());
        let mut side = CableSide::over(link, LinkKind::Handshake, plane);
        side.told();
        side
    }

    fn told(&mut self) -> Vec<ControlEvent> {
        let mut told = Vec::new();
        self.plane.poll(Nanos::ZERO, &mut told);
        told
    }

    fn hear_event(&mut self, event: ControlEvent) -> Vec<ControlEvent> {
        self.put(event);
        self.told()
    }

    /// What its core is told of a message.
    fn hear(&mut self, parts: Parts) -> Vec<Parts> {
        let link = self.link;
        let told = self.hear_event(ControlEvent::Frame { link, parts }).into_iter();
        told.map(|event| match event {
            ControlEvent::Frame { parts, .. } => parts,
            other => panic!("{other:?}"),
        })
        .collect()
    }
}

/// What the cores of both sides are told of what these say.
fn carry(near: &mut ProvenTestSide, far: &mut ProvenTestSide) -> [Vec<Parts>; 2] {
    cable::carry([near, far], ProvenTestSide::hear)
}

fn pair(near: Option<&str>, far: Option<&str>) -> (ProvenTestSide, ProvenTestSide) {
    (ProvenTestSide::new(OUT, near), ProvenTestSide::new(IN, far))
}

fn hello() -> Vec<u8> {
    let geometry = Geometry::new("proven", 1, vec![KvGroup::full(16, [0])]);
    native::encode(&Frame::Hello(Box::new(Hello {
        version: native::VERSION,
        version_min: native::VERSION_MIN,
        engine: "decode".into(),
        incarnation: Incarnation(5),
        session: 9,
        expects: "prefill".into(),
        role: Role::Decode,
        capabilities: 3,
        fingerprint: geometry.fingerprint(),
        geometry,
        ranks: Vec::new(),
    })))
}

fn probe(session: u64) -> Vec<u8> {
    let version = native::VERSION;
    let (from, to) = (Incarnation(5), Incarnation(6));
    native::encode(&Frame::Probe { envelope: ConnectionHeader { version, from, to, session } })
}

/// A pair on which both are proven.
fn proven() -> (ProvenTestSide, ProvenTestSide) {
    let (mut near, mut far) = pair(Some(OURS), Some(OURS));
    near.say(&hello());
    assert_eq!(carry(&mut near, &mut far), [vec![], vec![vec![hello()]]]);
    (near, far)
}

fn reason(told: &[Parts]) -> String {
    let [parts] = told else { panic!("{} messages", told.len()) };
    match native::decode(&parts[0]) {
        Ok(Frame::Refuse { envelope, reason, .. }) => {
            assert_eq!((envelope.to, envelope.session), (Incarnation(5), 9));
            reason.to_string()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_is_said_arrives_once_both_are_proven() {
    let (mut near, mut far) = pair(Some(OURS), Some(OURS));
    near.say(&hello());
    // Said ahead of the proof, and the hello again as a dialler does that waits.
    near.say(&hello());
    near.say(&probe(1));
    let told = carry(&mut near, &mut far);
    assert_eq!(told, [vec![], vec![vec![hello()], vec![probe(1)]]]);
    for number in 2..5 {
        near.say(&probe(number));
        far.say(&probe(10 + number));
        let told = carry(&mut near, &mut far);
        assert_eq!(told, [vec![vec![probe(10 + number)]], vec![vec![probe(number)]]]);
    }
}

#[test]
fn frames_wait_for_a_proof_in_order_and_in_bounds() {
    let (mut near, mut far) = pair(Some(OURS), Some(OURS));
    near.say(&hello());
    let is_taken = |near: &mut ProvenTestSide, nth: u64| near.plane.send(near.link, &[&probe(nth)]);
    for nth in 0..WAITING_MAX {
        assert_eq!(is_taken(&mut near, nth), Ok(()), "frame {nth}");
    }
    assert_eq!(is_taken(&mut near, WAITING_MAX), Err(Refused::Busy));
    let [_, told] = carry(&mut near, &mut far);
    let expected = (0..WAITING_MAX).map(|nth| vec![probe(nth)]);
    assert_eq!(told, [vec![hello()]].into_iter().chain(expected).collect::<Vec<_>>());
    assert_eq!(is_taken(&mut near, WAITING_MAX), Ok(()), "nothing waits once it is proven");
}

#[test]
fn who_is_not_proven_is_told_why_and_its_core_too() {
    for (near, far, said) in [
        (Some(THEIRS), Some(OURS), "different secrets"),
        (None, Some(OURS), "a proof of the fleet's secret is demanded here"),
        (Some(OURS), None, "there is no secret_file where it has to come from"),
    ] {
        let (mut near, mut far) = pair(near, far);
        near.say(&hello());
        let [told, heard] = carry(&mut near, &mut far);
        assert!(reason(&told).contains(said), "{told:?}");
        assert_eq!(heard, Vec::<Parts>::new(), "its core heard of somebody who was not proven");
    }
}

#[test]
fn link_is_admitted_when_its_peer_is_proven_and_not_before() {
    let admitted = |side: &ProvenTestSide| side.cable.1.load(Ordering::Relaxed) > 0;
    for (secrets, is_proven) in [
        ([Some(OURS); 2], true),
        ([None; 2], true),
        ([Some(THEIRS), Some(OURS)], false),
        ([None, Some(OURS)], false),
    ] {
        let (mut near, mut far) = pair(secrets[0], secrets[1]);
        // A peer that speaks MoRIIO proves nothing.
        far.hear(vec![b"get_meta_msg".to_vec()]);
        assert!(!admitted(&far), "{secrets:?}");
        near.say(&hello());
        let offer = near.sent();
        far.hear(offer[0].clone());
        assert_eq!(admitted(&far), secrets[1].is_none(), "{secrets:?}: by its hello alone");
        for parts in far.sent() {
            near.hear(parts);
        }
        for parts in near.sent() {
            far.hear(parts);
        }
        assert_eq!(admitted(&far), is_proven, "{secrets:?}");
        // Without a secret, a dialling side trusts the address that it dialled.
        assert_eq!(admitted(&near), is_proven || secrets[0].is_none(), "{secrets:?}");
    }
}

#[test]
fn one_that_answers_without_a_proof_is_not_believed() {
    let mut near = ProvenTestSide::new(OUT, Some(OURS));
    near.say(&hello());
    let offer = near.sent();
    // An acceptor that knows of no secrets welcomes.
    let welcome = match native::decode(&hello()) {
        Ok(Frame::Hello(hello)) => native::encode(&Frame::Welcome(hello)),
        other => panic!("{other:?}"),
    };
    assert_eq!(near.hear(vec![probe(1)]), Vec::<Parts>::new());
    assert!(reason(&near.hear(vec![welcome])).contains("no secret_file"));
    // One that does not know it sends back what it heard.
    let mut near = ProvenTestSide::new(OUT, Some(OURS));
    near.say(&hello());
    assert_eq!(near.hear(offer[0].clone()), Vec::<Parts>::new());
}

#[test]
fn without_secrets_and_on_other_links_all_goes_by() {
    let (mut near, mut far) = pair(None, None);
    near.say(&hello());
    near.say(&probe(1));
    let told = carry(&mut near, &mut far);
    assert_eq!(told, [vec![], vec![vec![hello()], vec![probe(1)]]]);
    // MoRIIO's frames, which are none of ours.
    let (mut near, mut far) = pair(Some(OURS), Some(OURS));
    near.say(b"get_metadata");
    far.say(b"\x81\xa1k\x01");
    let told = carry(&mut near, &mut far);
    assert_eq!(told, [vec![vec![b"\x81\xa1k\x01".to_vec()]], vec![vec![b"get_metadata".to_vec()]]]);
    // Links of registrations: a router has its own proof.
    let (link, channel) = (LinkId(8), LinkKind::Discovery);
    near.plane.dial(link, &Endpoint::from("tcp://router:1"), channel).unwrap();
    near.hear_event(ControlEvent::LinkUp { link, channel, from: None });
    let parts = vec![native::encode(&Frame::Abandon { keys: Vec::new() })];
    let told = near.hear_event(ControlEvent::Frame { link, parts: parts.clone() });
    assert_eq!(told, [ControlEvent::Frame { link, parts }]);
}

#[test]
fn what_was_heard_cannot_be_said_again() {
    let (mut near, mut far) = pair(Some(OURS), Some(OURS));
    near.say(&hello());
    let mut heard = Vec::new();
    loop {
        let out = near.sent();
        heard.extend(out.iter().cloned());
        let told: Vec<_> = out.into_iter().flat_map(|parts| far.hear(parts)).collect();
        if !told.is_empty() {
            break;
        }
        for parts in far.sent() {
            near.hear(parts);
        }
    }
    near.say(&probe(1));
    let sealed = near.sent().remove(0);
    assert_eq!(far.hear(sealed.clone()), [vec![probe(1)]]);
    assert_eq!(far.hear(sealed.clone()), Vec::<Parts>::new(), "a frame twice");
    assert_eq!(near.hear(sealed.clone()), Vec::<Parts>::new(), "a frame back to who said it");
    // What was said ahead of the proof takes nothing back.
    for parts in &heard {
        assert_eq!(far.hear(parts.clone()), Vec::<Parts>::new());
    }
    assert_eq!(far.sent(), Vec::<Parts>::new());
    near.say(&probe(9));
    assert_eq!(far.hear(near.sent().remove(0)), [vec![probe(9)]]);
    // All of it on a link of its own.
    let mut victim = ProvenTestSide::new(IN, Some(OURS));
    heard.push(sealed);
    for parts in heard {
        assert_eq!(victim.hear(parts), Vec::<Parts>::new());
    }
    let plain = far.hear(vec![probe(2)]);
    assert_eq!(plain, Vec::<Parts>::new(), "without a seal");
}

proptest! {
    #[test]
    fn a_changed_byte_is_not_heard(part in 0..2_usize, at in any::<usize>(), by in 1..=u8::MAX) {
        let (mut near, mut far) = proven();
        near.say(&probe(3));
        let mut sealed = near.sent().remove(0);
        let at = at % sealed[part].len();
        sealed[part][at] ^= by;
        let told = far.hear(sealed);
        prop_assert_eq!(told, Vec::<Parts>::new());
    }

    #[test]
    fn any_bytes_are_survived(parts in proptest::collection::vec(any::<Vec<u8>>(), 0..4)) {
        let (mut near, mut far) = proven();
        let mut stranger = ProvenTestSide::new(IN, Some(OURS));
        for head in [&[][..], &[0xc1, b'p'], &[0xc1, b'k']] {
            let said: Parts = parts.iter().map(|part| [head, part].concat()).collect();
            for side in [&mut near, &mut far, &mut stranger] {
                let told = side.hear(said.clone());
                prop_assert!(told.iter().flatten().all(|part| !part.starts_with(&native::MAGIC)));
            }
        }
    }
}
