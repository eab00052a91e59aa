//! The conformance suite of control planes, over loopback.

mod common;

use common::TestZmqPlane;
use kvferry_engine::conformance::{ControlFixture, control_plane};
use kvferry_engine::core::Nanos;
use kvferry_engine::fabric::{ControlPlane, Endpoint};
use kvferry_wire::ZmqPlane;
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Longest wait for news in one round.
const ROUND: Duration = Duration::from_micros(100);

struct ZmqTestPair {
    planes: [ZmqPlane; 2],
    start: Instant,
}

impl ZmqTestPair {
    fn new(host: &str) -> ZmqTestPair {
        let plane = || TestZmqPlane::new(host).plane;
        ZmqTestPair { planes: [plane(), plane()], start: Instant::now() }
    }
}

impl ControlFixture for ZmqTestPair {
    fn plane(&mut self, index: usize) -> &mut dyn ControlPlane {
        &mut self.planes[index]
    }

    fn nowhere(&mut self) -> Endpoint {
        let taken = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = taken.local_addr().expect("it is bound");
        Endpoint::from(format!("tcp://{address}").as_str())
    }

    fn advance(&mut self) {
        std::thread::park_timeout(ROUND);
    }

    fn now(&mut self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }
}

#[test]
fn control_plane_over_ipv4_conforms() {
    control_plane(&mut || Box::new(ZmqTestPair::new("127.0.0.1")));
}

#[test]
#[allow(clippy::print_stderr, reason = "a check that is left out has to be seen")]
fn control_plane_over_ipv6_conforms() {
    if let Err(why) = TcpListener::bind("[::1]:0") {
        eprintln!("not run, this machine has no IPv6: {why}");
        return;
    }
    control_plane(&mut || Box::new(ZmqTestPair::new("[::1]")));
}
