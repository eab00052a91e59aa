//! Bytes and statuses.

use super::rig::{ShimFaultGuard, ShimTestNode, kind, knob, pair, shim};
use mori_double::INSTALLS;
use mori_sys::{Code, Direction, Kind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn the_shim_says_what_it_was_compiled_for() {
    let (shim, install) = (shim(), INSTALLS[crate::CLASS]);
    assert_eq!(shim.info.layout, install.class);
    assert!(shim.info.sizes.iter().all(|size| *size > 0), "{:?}", shim.info.sizes);
    assert!(shim.info.compiled_for.starts_with("build-id:"));
    assert_eq!(Path::new(&shim.info.compiled_at), Path::new(install.lib).join("libmori_io.so"));
}

fn moves(make: fn() -> ShimTestNode, device: i32) {
    let _faults = ShimFaultGuard::set("");
    let (near, far) = pair(make, device);
    let status = near.take();
    near.post(0, Direction::READ, &[[0, 8, 16], [64, 512, 8]], status).expect("a batch");
    assert_eq!(near.finish(status), Code::SUCCESS, "{}", near.text(status));
    assert_eq!([0, 1, 2, 8].map(|at| near.word(0, at)), [1, 2, 0, 64]);
    near.give(status).expect("an end");

    let status = near.take();
    near.post(0, Direction::WRITE, &[[64, 8184, 8]], status).expect("one range");
    assert_eq!(near.finish(status), Code::SUCCESS);
    assert_eq!([1022, 1023].map(|at| far.word(0, at)), [1022, 64]);
    near.give(status).expect("an end");
    assert_eq!(near.counts(), (0, 0));
}

#[test]
fn rdma_moves_bytes() {
    moves(ShimTestNode::rdma, -1);
}

#[test]
fn xgmi_moves_bytes_when_it_is_polled() {
    moves(ShimTestNode::xgmi, 0);
}

#[test]
fn an_empty_batch_is_done() {
    let _faults = ShimFaultGuard::set("");
    let (near, _far) = pair(ShimTestNode::rdma, -1);
    let status = near.take();
    near.post(0, Direction::READ, &[], status).expect("nothing");
    assert_eq!(near.poll(status), Ok(Code::SUCCESS));
}

#[test]
fn a_handle_ends_when_it_is_given() {
    let _faults = ShimFaultGuard::set("");
    let node = ShimTestNode::bare();
    let first = node.take();
    assert_eq!(node.poll(first), Ok(Code::INIT));
    node.give(first).expect("an end");
    let again = node.take();
    assert_eq!(again & 0xff_ffff, first & 0xff_ffff, "the same status");
    for stale in [first, first + (4 << 24), 0, 1 << 24, u64::MAX, again ^ 1] {
        assert_eq!(node.poll(stale).expect_err("stale").0, Kind::STALE, "{stale:#x}");
        assert_eq!(kind(&node.give(stale)), Kind::STALE, "{stale:#x}");
    }
    assert_eq!(node.poll(again), Ok(Code::INIT));
    assert_eq!(node.counts(), (1, 0));
}

#[test]
fn many_statuses_are_all_different() {
    let _faults = ShimFaultGuard::set("");
    let node = ShimTestNode::bare();
    let mut handles: Vec<u64> = (0..1_000).map(|_| node.take()).collect();
    handles.iter().for_each(|handle| assert_eq!(node.poll(*handle), Ok(Code::INIT)));
    assert_eq!(node.counts(), (1_000, 0));
    handles.sort_unstable();
    handles.dedup();
    assert_eq!(handles.len(), 1_000);
    handles.iter().for_each(|handle| node.give(*handle).expect("an end"));
    assert_eq!(node.counts(), (0, 0));
}

#[test]
fn a_status_is_posted_once() {
    let _faults = ShimFaultGuard::set("");
    let (near, _far) = pair(ShimTestNode::rdma, -1);
    let status = near.take();
    near.post(0, Direction::READ, &[[0, 0, 8]], status).expect("a post");
    let again = near.post(0, Direction::READ, &[[0, 0, 8]], status).expect_err("twice");
    assert_eq!(again, (Kind::ARGUMENT, "the status has been posted before".into()));
    assert_eq!(near.finish(status), Code::SUCCESS);
    near.give(status).expect("an end");
    let stale = near.post(0, Direction::READ, &[[0, 0, 8]], status).expect_err("stale");
    assert_eq!(stale.0, Kind::STALE);
}

#[test]
fn a_failed_status_is_kept() {
    let _faults = ShimFaultGuard::set("qp_error@1");
    let (near, _far) = pair(ShimTestNode::rdma, -1);
    let status = near.take();
    near.post(0, Direction::WRITE, &[[0, 0, 8], [8, 64, 8]], status).expect("a post");
    assert_eq!(near.finish(status), Code::ERR_RDMA_OP);
    assert!(!near.text(status).is_empty());
    near.give(status).expect("an end");
    assert_eq!(near.counts(), (0, 1));
    assert_ne!(near.take() & 0xff_ffff, status & 0xff_ffff);
}

#[test]
fn one_that_is_on_its_way_is_kept() {
    let _faults = ShimFaultGuard::set("lost@1");
    let (near, _far) = pair(ShimTestNode::rdma, -1);
    let status = near.take();
    near.post(0, Direction::WRITE, &[[0, 0, 8]], status).expect("a post");
    assert_eq!(near.poll(status), Ok(Code::IN_PROGRESS));
    near.give(status).expect("an end");
    assert_eq!(near.counts(), (0, 1));
}

#[test]
fn threads_take_and_poll_while_one_posts() {
    let _faults = ShimFaultGuard::set("");
    let (near, _far) = pair(ShimTestNode::xgmi, 0);
    let (near, stop) = (&near, &AtomicBool::new(false));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let status = near.take();
                    assert_eq!(near.poll(status), Ok(Code::INIT));
                    near.give(status).expect("an end");
                }
            });
        }
        for _ in 0..500 {
            let status = near.take();
            let poller = scope.spawn(move || {
                while near.poll(status) != Ok(Code::SUCCESS) {
                    std::thread::yield_now();
                }
            });
            near.post(0, Direction::READ, &[[0, 0, 64], [128, 64, 64]], status).expect("a post");
            poller.join().expect("success");
            near.give(status).expect("an end");
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(near.counts(), (0, 0));
}

#[test]
fn memory_of_a_gpu_is_had_of_hip() {
    let (alloc, free) = (shim().functions.kf_device_alloc, shim().functions.kf_device_free);
    let mut base = 0;
    let mut had = |device, len| {
        // SAFETY: The place that the address goes to is valid.
        super::rig::answer(|error| unsafe { alloc(device, len, &raw mut base, error) })
    };
    assert_eq!(had(-1, 64), Err((Kind::SYSTEM, "hipSetDevice: error 101".into())));
    assert!(matches!(had(0, 0), Err((Kind::ARGUMENT, _))));
    assert_eq!(had(0, 64), Ok(()));
    // SAFETY: It was given out by the stand-in, whose memory is the host's.
    unsafe {
        std::slice::from_raw_parts_mut(base as *mut u8, 64).fill(1);
        assert_eq!(super::rig::answer(|error| free(base, error)), Ok(()));
    }
}

#[test]
fn an_event_is_asked_by_hip() {
    type New = unsafe extern "C" fn() -> u64;
    type Change = unsafe extern "C" fn(u64);
    let ask = shim().functions.kf_event_done;
    // SAFETY: Functions of the double, on its event.
    unsafe {
        let event = knob::<New>("mori_double_event_new")();
        let mut done = 7;
        let null = std::ptr::null_mut();
        assert_eq!((ask(event, &raw mut done, null), done), (Kind::OK, 0));
        knob::<Change>("mori_double_event_fire")(event);
        assert_eq!((ask(event, &raw mut done, null), done), (Kind::OK, 1));
        knob::<Change>("mori_double_event_free")(event);
        let gone = super::rig::answer(|error| ask(event, &raw mut done, error));
        assert_eq!(gone, Err((Kind::SYSTEM, "hipEventQuery: error 400".into())));
        assert_eq!(ask(0, &raw mut done, null), Kind::ARGUMENT);
    }
}
