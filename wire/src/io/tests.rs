//! Limits of the thread, with budgets of a few connections.

use super::*;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{bind, socket};
use std::io::Read;
use std::net::{Ipv4Addr, TcpStream};
use std::sync::mpsc::{Sender, channel};

/// A thread that listens and that the test runs by hand.
struct StoppedThread {
    io: ZmqIoThread,
    at: SocketAddr,
    _commands: Sender<ZmqCommand>,
}

impl StoppedThread {
    fn new() -> StoppedThread {
        let bell = eventfd(0, EventfdFlags::NONBLOCK).expect("a bell");
        let (commands, receiver) = channel();
        let inbox = Arc::<ZmqEventQueue>::default();
        let mut io = ZmqIoThread::new((&bell, Arc::default()), receiver, (inbox, MESSAGE_MAX))
            .expect("a descriptor");
        let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
        socket.set_nonblocking(true).expect("it does not block");
        let at = socket.local_addr().expect("it is bound");
        io.listen(LinkKind::Handshake, socket).expect("it listens");
        StoppedThread { io, at, _commands: commands }
    }

    /// Connects from a loopback address and has the thread accept it.
    fn connect(&mut self, last: u8) -> TcpStream {
        let from = SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0));
        let stream = socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
        bind(&stream, &from).expect("all of 127.0.0.0/8 is this machine");
        connect(&stream, &self.at).expect("it listens");
        self.io.listeners[0].is_due = true;
        self.io.accept_all();
        TcpStream::from(stream)
    }

    /// Last numbers of the addresses whose connections there are, from the oldest on.
    fn sources(&self) -> Vec<u8> {
        let last = |connection: &ZmqConnection| match connection.peer {
            SocketAddr::V4(peer) => peer.ip().octets()[3],
            SocketAddr::V6(peer) => panic!("{peer}"),
        };
        self.io.connections.values().map(last).collect()
    }
}

/// True if the other side has closed a connection, on which it has said its greeting at most.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_nonblocking(true).expect("it does not block");
    let why = stream.read_to_end(&mut Vec::new()).map_err(|why| why.kind());
    why != Err(std::io::ErrorKind::WouldBlock)
}

#[test]
fn source_with_its_share_of_connections_gets_no_other() {
    let mut thread = StoppedThread::new();
    thread.io.inbound = SourceBudget::new(4);
    let refused = CONNECTION_CUTS.connections.load(Ordering::Relaxed);
    let mut all: Vec<_> = [1, 1, 1, 2, 2].map(|last| thread.connect(last)).into();
    assert_eq!(thread.sources(), [1, 1, 2]);
    let closed: Vec<bool> = all.iter_mut().map(is_closed).collect();
    assert_eq!(closed, [false, false, true, false, true]);
    assert!(CONNECTION_CUTS.connections.load(Ordering::Relaxed) >= refused + 2);
    // A connection that ends makes room.
    let first = *thread.io.connections.keys().next().expect("there are some");
    thread.io.close(first);
    all.push(thread.connect(1));
    assert_eq!(thread.sources(), [1, 2, 1]);
}

#[test]
fn oldest_greeting_of_the_source_with_most_of_them_is_cut() {
    let mut thread = StoppedThread::new();
    thread.io.greetings = SourceBudget::new(3);
    let mut all: Vec<_> = [2, 1, 1, 1].map(|last| thread.connect(last)).into();
    assert_eq!(thread.sources(), [2, 1, 1]);
    let closed: Vec<bool> = all.iter_mut().map(is_closed).collect();
    assert_eq!(closed, [false, true, false, false]);
}

#[test]
fn links_of_peers_get_ids_that_no_other_link_has() {
    let mut thread = StoppedThread::new();
    let io = &mut thread.io;
    io.next_inbound = !LinkId::INBOUND;
    let last = LinkId(u32::MAX);
    assert_eq!(io.fresh_link(), Some(last));
    io.next_inbound = !LinkId::INBOUND;
    io.by_link.insert(last, 1);
    io.by_link.insert(LinkId(LinkId::INBOUND), 2);
    assert_eq!(io.fresh_link(), Some(LinkId(LinkId::INBOUND | 1)));
}
