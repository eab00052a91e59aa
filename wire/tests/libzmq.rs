//! libzmq, which vLLM's peers and routers speak with, at the other end.

mod common;

use common::{PATIENCE, TestZmqPlane};
use kvferry_engine::fabric::{ControlEvent, ControlPlane, Endpoint, LinkId, LinkKind};
use zmq::{Context, Socket, SocketType};

const LINK: LinkId = LinkId(3);

/// Messages of one and of many parts, without bytes, short, long, and as long as one may be.
fn messages() -> Vec<Vec<Vec<u8>>> {
    let sizes: [&[usize]; 6] =
        [&[0], &[1, 0, 255], &[256, 0], &[70_000, 3], &[1; 300], &[16 << 20]];
    let part = |bytes: &usize| (0..*bytes).map(|at| ((at * 31) >> 3) as u8).collect();
    sizes.iter().map(|sizes| sizes.iter().map(part).collect()).collect()
}

fn socket(context: &Context, kind: SocketType) -> Socket {
    let socket = context.socket(kind).expect("a socket");
    for set in [Socket::set_rcvtimeo, Socket::set_sndtimeo] {
        set(&socket, PATIENCE.as_millis() as i32).expect("a time");
    }
    socket.set_linger(0).expect("a time");
    socket
}

fn send(plane: &mut TestZmqPlane, link: LinkId, message: &[Vec<u8>]) {
    let parts: Vec<&[u8]> = message.iter().map(Vec::as_slice).collect();
    plane.plane.send(link, &parts).expect("there is room");
}

#[test]
fn messages_come_as_they_were_sent_by_and_to_who_dials() {
    let (context, mut ours) = (Context::new(), TestZmqPlane::new("127.0.0.1"));
    let to = ours.plane.listen(LinkKind::Notify).unwrap();
    for kind in [SocketType::DEALER, SocketType::REQ] {
        let peer = socket(&context, kind);
        peer.connect(&to.0).unwrap();
        let mut link = None;
        for message in messages() {
            peer.send_multipart(&message, 0).unwrap();
            let (from, parts) = ours.next_frame();
            // A REQ has an empty part in front of all that it says.
            let front = usize::from(kind == SocketType::REQ);
            assert!(parts[front..] == message && parts[..front].iter().all(Vec::is_empty));
            assert!(link.is_none_or(|link| link == from), "{kind:?}");
            link = Some(from);
            send(&mut ours, from, &parts);
            assert!(peer.recv_multipart(0).expect("an answer") == message, "{kind:?}");
        }
    }
}

#[test]
fn messages_come_as_they_were_sent_by_and_to_who_listens() {
    let (context, mut ours) = (Context::new(), TestZmqPlane::new("127.0.0.1"));
    let peer = socket(&context, SocketType::ROUTER);
    peer.bind("tcp://127.0.0.1:*").unwrap();
    let to = peer.get_last_endpoint().unwrap().unwrap();
    ours.plane.dial(LINK, &Endpoint::from(to.as_str()), LinkKind::Notify).unwrap();
    ours.wait_for(|event| matches!(event, ControlEvent::LinkUp { .. }));
    for message in messages() {
        send(&mut ours, LINK, &message);
        let heard = peer.recv_multipart(0).expect("it came");
        assert!(heard[1..] == message);
        peer.send_multipart(&heard, 0).expect("an answer");
        assert!(ours.next_frame() == (LINK, message));
    }
}
