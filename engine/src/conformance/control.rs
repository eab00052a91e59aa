//! Checks of control planes.

use super::wakes;
use crate::core::time::Nanos;
use crate::fabric::{ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind, NextPoll, Refused};
use std::collections::BTreeSet;

/// Rounds of [`ControlFixture::advance`] after which an event is considered missing.
const PATIENCE: usize = 20_000_000;

/// Rounds in which something that must not happen is waited for.
const SUSPICION: usize = 2_000;

/// Most frames that a link may queue before it says `Busy`.
const QUEUE_MAX: usize = 100_000;

pub(super) const LINK: LinkId = LinkId(4);

/// Two control planes that can reach each other; neither listens yet.
pub trait ControlFixture {
    /// Plane 0 or 1.
    fn plane(&mut self, index: usize) -> &mut dyn ControlPlane;

    /// An address of the right kind where nobody listens.
    fn nowhere(&mut self) -> Endpoint;

    /// Lets the planes make some progress; called up to 20,000,000 times for one event.
    fn advance(&mut self);

    /// The time that planes are polled with.
    fn now(&mut self) -> Nanos;
}

/// A check of a control plane.
pub type ControlCheck = fn(&mut dyn ControlFixture);

/// Checks of control planes with their names.
pub const CONTROL_CHECKS: &[(&str, ControlCheck)] = &[
    ("dial_brings_up_both_ends", dial_brings_up_both_ends),
    ("frames_keep_order_and_parts", frames_keep_order_and_parts),
    ("links_are_independent", links_are_independent),
    ("hang_up_tells_the_other_end", hang_up_tells_the_other_end),
    ("busy_when_the_queue_is_full", busy_when_the_queue_is_full),
    ("nobody_there_is_link_down", nobody_there_is_link_down),
    ("channels_are_apart", channels_are_apart),
    ("bad_calls_are_refused", bad_calls_are_refused),
    ("events_wake_the_owner_of_links", wakes::events_wake_the_owner_of_links),
];

/// A fixture with the events seen so far.
pub(super) struct ControlHarness<'a> {
    pub(super) fixture: &'a mut dyn ControlFixture,
    pub(super) seen: [Vec<ControlEvent>; 2],
    /// Links that are up, by plane.
    up: [BTreeSet<LinkId>; 2],
}

impl<'a> ControlHarness<'a> {
    pub(super) fn new(fixture: &'a mut dyn ControlFixture) -> ControlHarness<'a> {
        ControlHarness { fixture, seen: Default::default(), up: Default::default() }
    }

    /// Plane 1 listens and [`LINK`] of plane 0 is up; also the id of the other end.
    pub(super) fn connected(fixture: &'a mut dyn ControlFixture) -> (ControlHarness<'a>, LinkId) {
        let mut rig = ControlHarness::new(fixture);
        let to = rig.plane(1).listen(LinkKind::Handshake).expect("it listens");
        let inbound = rig.dial(LINK, &to, LinkKind::Handshake);
        (rig, inbound)
    }

    pub(super) fn plane(&mut self, index: usize) -> &mut dyn ControlPlane {
        self.fixture.plane(index)
    }

    fn pump(&mut self) {
        self.fixture.advance();
        let now = self.fixture.now();
        for index in 0..2 {
            self.poll(index, now);
        }
    }

    /// Polls a plane. Frames come on links that are up only, and a link goes down once.
    pub(super) fn poll(&mut self, index: usize, now: Nanos) -> NextPoll {
        let before = self.seen[index].len();
        let next = self.fixture.plane(index).poll(now, &mut self.seen[index]);
        for event in &self.seen[index][before..] {
            let up = &mut self.up[index];
            let is_right = match event {
                ControlEvent::LinkUp { link, .. } => up.insert(*link),
                ControlEvent::Frame { link, .. } => up.contains(link),
                // A link of this side may go without having been up.
                ControlEvent::LinkDown { link } => up.remove(link) || !link.is_inbound(),
            };
            assert!(is_right, "{event:?} on a link that is not in that state");
        }
        next
    }

    fn until(&mut self, what: &str, done: impl Fn(&ControlHarness<'_>) -> bool) {
        for _ in 0..PATIENCE {
            if done(self) {
                return;
            }
            self.pump();
        }
        panic!("no {what}; seen: {:?}", self.seen);
    }

    fn idle(&mut self) {
        for _ in 0..SUSPICION {
            self.pump();
        }
    }

    /// Dials from plane 0 to plane 1; the id of the new link on plane 1.
    fn dial(&mut self, link: LinkId, to: &Endpoint, channel: LinkKind) -> LinkId {
        let before = self.seen[1].len();
        self.plane(0).dial(link, to, channel).expect("a dial is taken");
        let up = |event: &ControlEvent| match *event {
            ControlEvent::LinkUp { link: its, channel: of, .. } => (its, of) == (link, channel),
            _ => false,
        };
        self.until("LinkUp of the dialler", |rig| rig.seen[0].iter().any(up));
        self.until("LinkUp of the listener", |rig| rig.seen[1].len() > before);
        match self.seen[1][before] {
            ControlEvent::LinkUp { link, channel: of, .. } if of == channel => link,
            ref other => panic!("expected LinkUp, got {other:?}"),
        }
    }

    pub(super) fn frames(&self, index: usize, of: LinkId) -> Vec<&Vec<Vec<u8>>> {
        let frame = |event| match event {
            &ControlEvent::Frame { link, ref parts } if link == of => Some(parts),
            _ => None,
        };
        self.seen[index].iter().filter_map(frame).collect()
    }

    pub(super) fn is_down(&self, index: usize, link: LinkId) -> bool {
        self.seen[index].contains(&ControlEvent::LinkDown { link })
    }
}

fn dial_brings_up_both_ends(fixture: &mut dyn ControlFixture) {
    let (mut rig, inbound) = ControlHarness::connected(fixture);
    assert!(inbound.is_inbound(), "the listener's id is marked as inbound");
    assert!(!LINK.is_inbound());
    rig.idle();
    assert_eq!(rig.seen.each_ref().map(Vec::len), [1, 1], "one event each: {:?}", rig.seen);
}

fn frames_keep_order_and_parts(fixture: &mut dyn ControlFixture) {
    let (mut rig, inbound) = ControlHarness::connected(fixture);
    let messages: Vec<Vec<Vec<u8>>> = (0..50_usize)
        .map(|n| (0..n % 4 + 1).map(|part| vec![n as u8; (n * 37 + part * 5) % 300]).collect())
        .collect();
    for (from, link) in [(0, LINK), (1, inbound)] {
        for message in &messages {
            let parts: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
            while rig.plane(from).send(link, &parts) == Err(Refused::Busy) {
                rig.pump();
            }
        }
    }
    for (to, link) in [(1, inbound), (0, LINK)] {
        rig.until("all frames", |rig| rig.frames(to, link).len() >= messages.len());
        let same = rig.frames(to, link).into_iter().eq(&messages);
        assert!(same, "frames on plane {to} differ from what was sent");
    }
    rig.idle();
    assert_eq!(rig.frames(1, inbound).len(), messages.len(), "a frame came twice");
}

fn links_are_independent(fixture: &mut dyn ControlFixture) {
    let mut rig = ControlHarness::new(fixture);
    let to = rig.plane(1).listen(LinkKind::Handshake).expect("it listens");
    let first = rig.dial(LinkId(1), &to, LinkKind::Handshake);
    let second = rig.dial(LinkId(2), &to, LinkKind::Handshake);
    assert!(first != second, "each inbound link has its own id");
    rig.plane(0).hang_up(LinkId(1));
    rig.until("LinkDown", |rig| rig.is_down(1, first));
    rig.plane(0).send(LinkId(2), &[b"still here"]).expect("the other link is up");
    rig.until("frame", |rig| rig.frames(1, second).len() == 1);
    assert!(!rig.is_down(1, second));
}

fn hang_up_tells_the_other_end(fixture: &mut dyn ControlFixture) {
    for closer in 0..2 {
        let link = LinkId(LINK.0 + closer as u32);
        let mut rig = ControlHarness::new(&mut *fixture);
        let channel = [LinkKind::Handshake, LinkKind::Notify][closer];
        let to = rig.plane(1).listen(channel).expect("it listens");
        let inbound = rig.dial(link, &to, channel);
        let (near, far) = if closer == 0 { (link, inbound) } else { (inbound, link) };
        let before = rig.seen[closer].len();
        rig.plane(closer).hang_up(near);
        rig.plane(closer).hang_up(near);
        rig.until("LinkDown", |rig| rig.is_down(1 - closer, far));
        assert_eq!(rig.plane(1 - closer).send(far, &[b"x"]), Err(Refused::Gone));
        rig.idle();
        assert_eq!(rig.seen[closer].len(), before, "an event after hanging up");
        assert_eq!(rig.plane(closer).send(near, &[b"x"]), Err(Refused::Gone));
    }
}

fn busy_when_the_queue_is_full(fixture: &mut dyn ControlFixture) {
    let (mut rig, inbound) = ControlHarness::connected(fixture);
    let frame = |n: usize| {
        let mut bytes = vec![0; 1_024];
        bytes[..8].copy_from_slice(&(n as u64).to_le_bytes());
        bytes
    };
    let mut sent = 0;
    let refused = loop {
        match rig.plane(0).send(LINK, &[&frame(sent)]) {
            Ok(()) => sent += 1,
            Err(refused) => break refused,
        }
        assert!(sent <= QUEUE_MAX, "no Busy after {sent} frames");
    };
    assert_eq!(refused, Refused::Busy);
    rig.until("the queued frames", |rig| rig.frames(1, inbound).len() >= sent);
    rig.plane(0).send(LINK, &[&frame(sent)]).expect("room after the queue drained");
    sent += 1;
    rig.until("the last frame", |rig| rig.frames(1, inbound).len() >= sent);
    rig.idle();
    let got = rig.frames(1, inbound);
    assert_eq!(got.len(), sent, "the refused frame was sent");
    assert!(got.iter().enumerate().all(|(n, parts)| parts[0] == frame(n)), "out of order");
}

fn nobody_there_is_link_down(fixture: &mut dyn ControlFixture) {
    let mut rig = ControlHarness::new(fixture);
    let nowhere = rig.fixture.nowhere();
    rig.plane(0).dial(LINK, &nowhere, LinkKind::Handshake).expect("a dial is taken");
    rig.until("LinkDown", |rig| rig.is_down(0, LINK));
    rig.idle();
    assert_eq!(rig.seen[0].len(), 1, "one event: {:?}", rig.seen[0]);
    let to = rig.plane(1).listen(LinkKind::Handshake).expect("it listens");
    rig.dial(LinkId(LINK.0 + 1), &to, LinkKind::Handshake);
}

fn channels_are_apart(fixture: &mut dyn ControlFixture) {
    let mut rig = ControlHarness::new(fixture);
    let channels = [LinkKind::Handshake, LinkKind::Notify, LinkKind::Discovery];
    for (n, channel) in channels.into_iter().enumerate() {
        let to = rig.plane(1).listen(channel).expect("it listens");
        assert!(rig.dial(LinkId(n as u32), &to, channel).is_inbound());
    }
    let inbound = |event: &ControlEvent| match event {
        ControlEvent::LinkUp { channel, .. } => Some(*channel),
        _ => None,
    };
    let seen: Vec<_> = rig.seen[1].iter().filter_map(inbound).collect();
    assert_eq!(seen, channels);
}

fn bad_calls_are_refused(fixture: &mut dyn ControlFixture) {
    let mut rig = ControlHarness::new(fixture);
    let to = rig.plane(1).listen(LinkKind::Handshake).expect("it listens");
    let again = rig.plane(1).listen(LinkKind::Handshake);
    assert!(matches!(again, Err(Refused::Invalid(_))), "listening twice: got {again:?}");
    assert_eq!(rig.plane(0).send(LINK, &[b"x"]), Err(Refused::Gone), "send on an unknown link");
    rig.dial(LINK, &to, LinkKind::Handshake);
    let again = rig.plane(0).dial(LINK, &to, LinkKind::Handshake);
    assert!(matches!(again, Err(Refused::Invalid(_))), "link id in use: got {again:?}");
    let garbage = Endpoint::from("not an address");
    let refused = rig.plane(0).dial(LinkId(9), &garbage, LinkKind::Handshake);
    assert!(matches!(refused, Err(Refused::Invalid(_))), "garbage address: got {refused:?}");
    let theirs = LinkId(LinkId::INBOUND | 9);
    let refused = rig.plane(0).dial(theirs, &to, LinkKind::Handshake);
    assert!(matches!(refused, Err(Refused::Invalid(_))), "an id of the other side: {refused:?}");
    rig.plane(0).hang_up(LinkId(99));
}
