//! Faults of the control network do what they say, and no more.

use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind};
use kvferry_sim::keyed_rng::InclusiveRange;
use kvferry_sim::net::{
    ControlNetwork, ControlPlaneIx, FrameDecision, FrameInfo, NetCalls, NetConfig, NetContext,
    NetEvent, NetHooks, NetOutput, SimControlPlane,
};
use kvferry_sim::queue::{EventQueue, StepContext};
use std::collections::BTreeMap;

const LINK: LinkId = LinkId(0);
const INBOUND: LinkId = LinkId(LinkId::INBOUND);

/// Fates by first byte of the frame.
#[derive(Default)]
struct ScriptedFrames(BTreeMap<u8, FrameDecision>);

impl NetHooks for ScriptedFrames {
    fn decide_frame(&mut self, _now: Nanos, frame: &FrameInfo<'_>) -> FrameDecision {
        self.0.get(&frame.parts[0][0]).copied().unwrap_or_default()
    }
}

/// Plane 0 on node 0 has dialled plane 1, named "b", on node 1.
struct NetBench {
    net: ControlNetwork,
    planes: Vec<SimControlPlane>,
    queue: EventQueue<NetEvent>,
    fates: ScriptedFrames,
    seen: Vec<Vec<ControlEvent>>,
}

impl NetBench {
    fn new() -> NetBench {
        let latency = InclusiveRange::new(10_000, 20_000);
        let mut net =
            ControlNetwork::new(NetConfig { latency, queue_max: 4, ..NetConfig::default() });
        let mut planes = vec![net.add_plane("a", 0), net.add_plane("b", 1)];
        let to = planes[1].listen(LinkKind::Handshake).expect("it listens");
        planes[0].dial(LINK, &to, LinkKind::Handshake).expect("a dial is taken");
        let seen = vec![Vec::new(); 2];
        let (queue, fates) = (EventQueue::new(), ScriptedFrames::default());
        let mut pair = NetBench { net, planes, queue, fates, seen };
        pair.run();
        pair.seen.iter_mut().for_each(Vec::clear);
        pair
    }

    /// Has the network do something; what it did.
    fn act(
        &mut self,
        now: Nanos,
        act: impl FnOnce(&mut ControlNetwork, &mut NetContext<'_>),
    ) -> Vec<NetOutput> {
        let mut out = Vec::new();
        act(&mut self.net, &mut StepContext::new(now, &mut self.queue, &mut out));
        out
    }

    fn perform(&mut self) {
        let (mut calls, now) = (NetCalls::default(), self.queue.now());
        for plane in self.planes.iter_mut().rev() {
            plane.take_calls(&mut calls);
            let mut out = Vec::new();
            let cx = &mut StepContext::new(now, &mut self.queue, &mut out);
            self.net.perform(plane.ix(), &mut calls, &mut self.fates, cx);
        }
    }

    fn take(&mut self, out: Vec<NetOutput>) {
        for NetOutput::Deliver { plane, message: news, .. } in out {
            self.planes[plane.0 as usize].deliver(news);
        }
        for (plane, seen) in self.planes.iter_mut().zip(&mut self.seen) {
            plane.poll(self.queue.now(), seen);
        }
    }

    fn run(&mut self) {
        self.perform();
        while let Some((now, event)) = self.queue.pop() {
            let out = self.act(now, |net, cx| net.step(event, cx));
            self.take(out);
            self.perform();
        }
    }

    /// Sends frames of one byte from plane 0 and runs; what plane 1 got.
    fn send(&mut self, frames: &[u8]) -> Vec<u8> {
        for frame in frames {
            self.planes[0].send(LINK, &[&[*frame]]).expect("there is room");
        }
        self.run();
        self.got()
    }

    fn got(&mut self) -> Vec<u8> {
        let frame = |event| match event {
            ControlEvent::Frame { link: INBOUND, parts } => parts[0][0],
            other => panic!("expected a frame, got {other:?}"),
        };
        self.seen[1].drain(..).map(frame).collect()
    }
}

#[test]
fn frames_are_dropped_doubled_delayed_and_overtaken() {
    let mut pair = NetBench::new();
    let late = Nanos::from_ms(5);
    let fate = FrameDecision::default();
    pair.fates.0.insert(2, FrameDecision { drop: true, ..fate });
    pair.fates.0.insert(3, FrameDecision { duplicate: Some(late), ..fate });
    pair.fates.0.insert(5, FrameDecision { delay: late, ..fate });
    pair.fates.0.insert(6, FrameDecision { delay: late, reorder: true, ..fate });
    assert_eq!(pair.send(&[1, 2, 4]), [1, 4]);
    assert_eq!(pair.send(&[3, 4, 1]), [3, 4, 1, 3]);
    assert_eq!(pair.send(&[1, 5, 4]), [1, 5, 4]);
    assert_eq!(pair.send(&[1, 6, 4]), [1, 4, 6]);
    pair.fates.0.insert(7, FrameDecision { reorder: true, ..fate });
    assert_eq!(pair.send(&[5, 7, 4]), [7, 5, 4]);
    // Lost frames leave the queue of the link: there is room for four again.
    assert!(pair.send(&[2, 2, 2, 2]).is_empty());
    assert_eq!(pair.send(&[1, 1, 1, 1]), [1, 1, 1, 1]);
}

#[test]
fn a_partition_loses_frames_and_keeps_the_link() {
    let mut pair = NetBench::new();
    pair.net.set_cut((0, 1), true);
    assert!(pair.send(&[1, 2]).is_empty());
    pair.planes[1].send(INBOUND, &[b"back"]).expect("the link is up");
    pair.run();
    assert_eq!(pair.seen[0].len(), 1, "the other way is open");
    pair.net.set_cut((0, 1), false);
    assert_eq!(pair.send(&[3]), [3]);
}

#[test]
fn a_half_open_link_swallows_one_direction() {
    let mut pair = NetBench::new();
    pair.net.mute(ControlPlaneIx(0), LINK);
    assert!(pair.send(&[1, 2]).is_empty());
    pair.planes[1].send(INBOUND, &[b"back"]).expect("the link is up");
    pair.run();
    assert_eq!(pair.seen[0].len(), 1);
}

#[test]
fn a_paused_process_gets_its_frames_later_and_holds_up_the_queue() {
    let mut pair = NetBench::new();
    pair.act(Nanos::ZERO, |net, cx| net.set_paused(ControlPlaneIx(1), true, cx));
    assert!(pair.send(&[1, 2, 3, 4]).is_empty());
    assert!(pair.planes[0].send(LINK, &[&[5]]).is_err(), "nothing left the queue");
    let mut out = Vec::new();
    out.extend(pair.act(Nanos::ZERO, |net, cx| net.set_paused(ControlPlaneIx(1), false, cx)));
    pair.take(out);
    assert_eq!(pair.got(), [1, 2, 3, 4]);
    assert_eq!(pair.send(&[5]), [5]);
}

#[test]
fn a_crash_is_told_or_not() {
    for told in [Some(Nanos::from_ms(3)), None] {
        let mut pair = NetBench::new();
        pair.planes[1].send(INBOUND, &[b"last words"]).expect("the link is up");
        pair.perform();
        let now = pair.queue.now();
        pair.act(now, |net, cx| net.crash(ControlPlaneIx(1), told, cx));
        pair.run();
        let parts = vec![b"last words".to_vec()];
        let mut expected = vec![ControlEvent::Frame { link: LINK, parts }];
        expected.extend(told.map(|_| ControlEvent::LinkDown { link: LINK }));
        assert_eq!(pair.seen[0], expected);
        assert_eq!(pair.planes[0].send(LINK, &[b"x"]).is_ok(), told.is_none());
        pair.run();
        assert_eq!(pair.seen[1], []);
    }
}

#[test]
fn a_restarted_process_takes_over_the_name() {
    let mut pair = NetBench::new();
    let now = pair.queue.now();
    pair.act(now, |net, cx| net.crash(ControlPlaneIx(1), None, cx));
    let name = Endpoint::from("sim://b");
    pair.planes[0].dial(LinkId(1), &name, LinkKind::Handshake).expect("a dial is taken");
    pair.run();
    assert_eq!(pair.seen[0], [ControlEvent::LinkDown { link: LinkId(1) }]);
    pair.planes.push(pair.net.add_plane("b", 1));
    pair.seen.push(Vec::new());
    pair.planes[2].listen(LinkKind::Handshake).expect("it listens");
    pair.planes[0].dial(LinkId(2), &name, LinkKind::Handshake).expect("a dial is taken");
    pair.run();
    let up = ControlEvent::LinkUp { link: INBOUND, channel: LinkKind::Handshake, from: None };
    assert_eq!(pair.seen[2], [up]);
    assert!(pair.send(&[1]).is_empty(), "the old link leads nowhere");
    assert_eq!(pair.seen[2].len(), 1);
}
