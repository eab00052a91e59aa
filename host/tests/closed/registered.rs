//! An instance knows whether its router is there.

use crate::fleet::{PATIENCE, TestCluster, metric};
use std::thread;
use std::time::Instant;

#[test]
fn an_instance_tells_whether_it_is_registered() {
    let mut fleet = TestCluster::new(&[]);
    let p = fleet.serve("prefill", "push", &[]);
    let is = |value| {
        let start = Instant::now();
        while metric(&p, "kvferry_router_registered") != value {
            assert!(start.elapsed() < PATIENCE, "it is not {value}");
            thread::yield_now();
        }
    };
    is(1);
    fleet.router.signal("KILL");
    fleet.router.wait();
    is(0);
}
