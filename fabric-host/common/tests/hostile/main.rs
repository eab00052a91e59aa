//! A listener whose process has no descriptor left. The only test of its program, whose limit it
//! lowers.

use kvferry_fabric_common::{ConnectionHandler, ConnectionListener, ConnectionPlace};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::time::{ClockId, clock_gettime};
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

struct Tells(Sender<()>);

impl ConnectionHandler for Tells {
    fn serve(&self, _: usize, _: OwnedFd, _: &ConnectionPlace) {
        let _heard = self.0.send(());
    }
}

/// Processor time of this process.
fn spent() -> Duration {
    let now = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[test]
fn a_listener_without_descriptors_waits_for_some() {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a socket");
    socket.set_nonblocking(true).expect("it does not block");
    let at = socket.local_addr().expect("its address");
    let (tell, served) = channel();
    let names = ["listens", "serves"];
    let listener = ConnectionListener::start(names, vec![socket.into()], 1, Tells(tell));
    let listener = listener.expect("a listener");
    let limit = Rlimit { current: Some(64), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("it is lower");
    let mut all = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        all.push(file);
    }
    // One for the client, and none for who accepts.
    all.pop();
    let _client = TcpStream::connect(at).expect("a connection");
    let before = spent();
    let window = Duration::from_millis(500);
    assert_eq!(served.recv_timeout(window), Err(RecvTimeoutError::Timeout));
    // A thread that spins takes all that it gets; a busy machine gives less, which is no failure.
    let used = spent() - before;
    assert!(used < window / 4, "{used:?} of {window:?}");
    all.clear();
    served.recv().expect("it is served when there are some");
    listener.drain();
}
