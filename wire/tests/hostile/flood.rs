//! Messages that cost their sender little: many in a turn, and long ones before a proof.

use crate::common::{PATIENCE, TestZmqPlane};
use crate::victim::{greeted_from, part};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{ControlEvent, ControlPlane, LinkId, LinkKind};
use kvferry_wire::zmtp::{MESSAGE_MAX, NOTIFY_MAX, UNPROVEN_MAX};
use kvferry_wire::{CONNECTION_CUTS, WireConfig};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

const HONEST: [u8; 4] = [127, 0, 0, 1];
const STRANGER: [u8; 4] = [127, 0, 0, 2];

/// Most messages of a single source in one turn.
const TURN_MAX: usize = 8_192;

fn listen(plane: &mut TestZmqPlane, channel: LinkKind) -> SocketAddr {
    let at = plane.plane.listen(channel).expect("a free port");
    at.0.strip_prefix("tcp://").expect("an address").parse().expect("host and port")
}

/// The events of one turn.
fn turn(ours: &mut TestZmqPlane) -> Vec<ControlEvent> {
    let mut events = Vec::new();
    ours.plane.poll(Nanos::ZERO, &mut events);
    events
}

fn frames(events: &[ControlEvent], of: Option<LinkId>) -> usize {
    let is = |event: &&ControlEvent| matches!(event, ControlEvent::Frame { link, .. } if Some(*link) == of);
    events.iter().filter(is).count()
}

fn up(ours: &mut TestZmqPlane) -> LinkId {
    match ours.wait_for(|event| matches!(event, ControlEvent::LinkUp { .. })) {
        ControlEvent::LinkUp { link, .. } => link,
        other => panic!("{other:?}"),
    }
}

/// Ends a connection when its test is over, whatever the result.
struct EndOnDrop(TcpStream);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        // The plane may have cut it.
        let _ = self.0.shutdown(Shutdown::Both);
    }
}

#[test]
fn flood_of_messages_is_taken_in_bounded_turns_and_its_connection_is_cut() {
    let mut ours = TestZmqPlane::new("127.0.0.1");
    let at = listen(&mut ours, LinkKind::Notify);
    let mut stranger = greeted_from(STRANGER, at);
    let flooder = up(&mut ours);
    let mut honest = greeted_from(HONEST, at);
    let peer = up(&mut ours);
    let said = &AtomicUsize::new(0);
    let end = EndOnDrop(stranger.try_clone().expect("a handle"));
    thread::scope(|scope| {
        let _end = end;
        scope.spawn(move || {
            // Empty messages, of two bytes each.
            while stranger.write_all(&[0; 64 << 10]).is_ok() {
                said.fetch_add(1, Ordering::SeqCst);
            }
        });
        let (mut is_cut, mut ahead) = (false, None);
        for nth in 0_usize.. {
            // Wait until the flood waits for the plane, as for a busy core.
            let (mut before, mut still) = (said.load(Ordering::SeqCst), 0);
            while still < 10 && !is_cut {
                thread::park_timeout(Duration::from_millis(1));
                let now = said.load(Ordering::SeqCst);
                (before, still) = (now, if now == before { still + 1 } else { 0 });
            }
            let events = turn(&mut ours);
            let flooded = frames(&events, Some(flooder));
            assert!(flooded <= TURN_MAX, "{flooded} messages of one source in a turn");
            is_cut |= events.contains(&ControlEvent::LinkDown { link: flooder });
            // Another peer sends a message meanwhile.
            let mut taken = ahead.take();
            if nth == 2 {
                honest.write_all(&part(false, 9)).expect("it is read");
                taken = Some(0);
            }
            if frames(&events, Some(peer)) == 0 {
                ahead = taken.map(|taken| taken + flooded);
                assert!(
                    ahead.is_none_or(|ahead| ahead <= 4 * TURN_MAX),
                    "{ahead:?} ahead of others"
                );
            }
            if is_cut && ahead.is_none() && nth > 2 {
                break;
            }
            assert!(nth < 10_000, "it was not cut");
        }
    });
    assert!(CONNECTION_CUTS.flood.load(Ordering::Relaxed) > 0);
    // The other peer's connection continues.
    honest.write_all(&part(false, 9)).expect("it is read");
    ours.wait_for(|event| matches!(event, ControlEvent::Frame { link, .. } if *link == peer));
}

#[test]
fn long_message_before_a_proof_cuts_its_connection_on_every_kind_of_link() {
    let kinds = [
        LinkKind::Handshake,
        LinkKind::RankHandshake(1),
        LinkKind::Notify,
        LinkKind::RankNotify(1),
        LinkKind::Discovery,
    ];
    for kind in kinds {
        let most = match kind {
            LinkKind::Notify | LinkKind::RankNotify(_) => NOTIFY_MAX,
            _ => UNPROVEN_MAX,
        };
        let config = WireConfig { dial: PATIENCE, ..WireConfig::default() };
        let mut ours = TestZmqPlane::with(config);
        let at = listen(&mut ours, kind);
        let mut stranger = greeted_from(STRANGER, at);
        // It may be cut before all of it is said.
        let _ = stranger.write_all(&part(false, most));
        let taken = ours.wait_for(|event| !matches!(event, ControlEvent::LinkUp { .. }));
        assert!(matches!(taken, ControlEvent::LinkDown { .. }), "{kind:?}: it was taken");
        let mut peer = greeted_from(HONEST, at);
        peer.write_all(&part(false, most - 64)).expect("it is read");
        let (of, parts) = ours.next_frame();
        assert_eq!(parts[0].len(), most - 64, "{kind:?}");
        ours.plane.admit(of);
        // An answer shows that the thread has read the message.
        ours.plane.send(of, &[b"go"]).expect("it is up");
        peer.read_exact(&mut [0; 4]).expect("an answer");
        peer.write_all(&part(false, MESSAGE_MAX - 64)).expect("it is read");
        assert_eq!(ours.next_frame().1[0].len(), MESSAGE_MAX - 64, "{kind:?}");
    }
}
