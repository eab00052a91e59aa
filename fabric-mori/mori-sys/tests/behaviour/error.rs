//! Every way in which a call can fail.

use super::rig::{ShimFaultGuard, ShimTestNode, answer, kind, pair};
use mori_sys::{Code, Direction, Kind, Shim, ShimSearchPath, Text};
use std::ptr::{null, null_mut};

#[test]
fn exceptions_end_at_the_shim() {
    let faults = ShimFaultGuard::set("");
    let (near, _far) = pair(ShimTestNode::rdma, -1);
    for (fault, expected, part) in [
        ("throw@1", Kind::SYSTEM, "connect("),
        ("throw_other@1", Kind::EXCEPTION, "no std::exception"),
    ] {
        faults.again(fault);
        for way in [Direction::READ, Direction::WRITE] {
            let status = near.take();
            let thrown = near.post(0, way, &[[0, 0, 8]; 2][..1], status);
            if way == Direction::READ {
                let (kind, text) = thrown.expect_err(fault);
                assert_eq!(kind, expected, "{text}");
                assert!(text.contains(part), "{text}");
            } else {
                thrown.expect("it throws once");
                assert_eq!(near.finish(status), Code::SUCCESS);
            }
            near.give(status).expect("an end");
        }
    }
    // Part of what was thrown out of may be on its way.
    assert_eq!(near.counts(), (0, 2));
}

#[test]
fn a_region_that_the_peer_does_not_know_is_an_exception() {
    let _faults = ShimFaultGuard::set("");
    let (mut near, mut far) = pair(ShimTestNode::rdma, -1);
    let gone = far.memory(vec![0; 8], -1);
    let desc = far.memory_desc(gone);
    let other = ShimTestNode::rdma();
    near.meet(&other.desc()).expect("a peer");
    // The same region, of an engine that has none.
    let mut moved = desc;
    let key = far.desc()[2..8].to_vec();
    let other_key = other.desc()[2..8].to_vec();
    assert_eq!(&moved[2..8], key);
    moved[2..8].copy_from_slice(&other_key);
    let (kind, text) = near.try_session(0, &moved).expect_err("unknown");
    assert_eq!(kind, Kind::EXCEPTION, "{text}");
    assert!(!text.is_empty());
}

#[test]
fn a_closed_port_is_a_system_error() {
    let _faults = ShimFaultGuard::set("");
    let (mut near, far) = pair(ShimTestNode::rdma, -1);
    let mut gone = ShimTestNode::rdma();
    gone.memory(vec![0; 8], -1);
    let (peer, memory) = (gone.desc(), gone.memory_desc(0));
    drop(gone);
    near.meet(&peer).expect("a peer");
    let (kind, text) = near.try_session(0, &memory).expect_err("closed");
    assert_eq!(kind, Kind::SYSTEM, "{text}");
    drop(far);
}

#[test]
fn bytes_that_are_no_descriptor() {
    let _faults = ShimFaultGuard::set("");
    let (mut near, far) = pair(ShimTestNode::rdma, -1);
    let (engine, memory) = (far.desc(), far.memory_desc(0));
    let garbage: [&[u8]; 8] = [
        b"",
        b"\x90",
        b"\xc1",
        b"\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x96\x01",
        b"\x81\x01\x02",
        b"\xa1k",
    ];
    let cut = |whole: &[u8]| (1..whole.len()).map(|end| whole[..end].to_vec()).collect::<Vec<_>>();
    let garbage = garbage.map(<[u8]>::to_vec);
    for bytes in garbage.iter().chain(&cut(&engine)) {
        assert_eq!(kind(&near.meet(bytes)), Kind::DESCRIPTOR, "{bytes:02x?}");
    }
    for bytes in garbage.iter().chain(&cut(&memory)) {
        let (kind, text) = near.try_session(0, bytes).expect_err("garbage");
        assert_eq!(kind, Kind::DESCRIPTOR, "{bytes:02x?}: {text}");
    }
    // What a later version appends is ignored.
    assert_eq!(engine[0], 0x96);
    let longer = [&[0x97], &engine[1..], &[0x2a]].concat();
    near.meet(&longer).expect("a longer one");
}

#[test]
fn no_backend_is_no_route() {
    let _faults = ShimFaultGuard::set("");
    let (mut node, mut far) = (ShimTestNode::bare(), ShimTestNode::rdma());
    node.memory(vec![0; 8], -1);
    far.memory(vec![0; 8], -1);
    node.meet(&far.desc()).expect("a peer");
    let (kind, text) = node.try_session(0, &far.memory_desc(0)).expect_err("no backend");
    assert_eq!(kind, Kind::NO_ROUTE, "{text}");
}

#[test]
fn ranges_stay_inside() {
    let _faults = ShimFaultGuard::set("");
    let (near, _far) = pair(ShimTestNode::xgmi, 0);
    let status = near.take();
    let out = [
        ([8192, 0, 1], "local"),
        ([0, 8192, 1], "remote"),
        ([8185, 0, 8], "local"),
        ([0, 0, 8193], "local"),
        ([u64::MAX - 4, 0, 8], "local"),
        ([0, u64::MAX - 4, 8], "remote"),
        ([0, 8, u64::MAX], "local"),
    ];
    for (range, side) in out {
        let (kind, text) =
            near.post(0, Direction::READ, &[[0, 0, 8], range], status).expect_err("outside");
        assert_eq!(kind, Kind::ARGUMENT);
        assert!(text.starts_with("range 1 of ") && text.contains(side), "{text}");
    }
    assert_eq!(kind(&near.post(0, 2, &[[0, 0, 8]], status)), Kind::ARGUMENT);
    // None of them reached the status.
    near.post(0, Direction::READ, &[[8192, 8192, 0], [0, 8184, 8]], status).expect("inside");
    assert_eq!(near.finish(status), Code::SUCCESS);
    near.give(status).expect("an end");
}

#[test]
fn what_is_in_use_is_not_freed() {
    let _faults = ShimFaultGuard::set("");
    let (mut near, _far) = pair(ShimTestNode::rdma, -1);
    let functions = near.shim.functions;
    let (engine, memory) = (near.engine, near.raw_memory(0));
    // SAFETY: Refused, so that all stay what they were.
    unsafe {
        let (kind, text) =
            answer(|e| (functions.kf_engine_free)(engine, e)).expect_err("a session");
        assert_eq!(kind, Kind::ARGUMENT);
        assert_eq!(text, "the engine still has 1 sessions and 1 memories");
        let (kind, text) =
            answer(|e| (functions.kf_memory_free)(memory, e)).expect_err("a session");
        assert_eq!((kind, text.as_str()), (Kind::ARGUMENT, "the memory still has 1 sessions"));
        near.free_session(0).expect("an end");
        let refused = answer(|e| (functions.kf_engine_free)(engine, e));
        assert_eq!(
            refused.expect_err("a memory").1,
            "the engine still has 0 sessions and 1 memories"
        );
    }
    near.try_session(0, b"").expect_err("it still answers");
}

#[test]
fn null_is_an_argument() {
    let _faults = ShimFaultGuard::set("");
    let (near, _far) = pair(ShimTestNode::rdma, -1);
    let f = near.shim.functions;
    let (engine, session, status) = (near.engine, near.session(0), near.take());
    let no = null_mut();
    // SAFETY: What is not null is right.
    let kinds = unsafe {
        [
            (f.kf_mori_info)(null_mut()),
            (f.kf_engine_new)(null(), c"".as_ptr(), 0, &mut null_mut(), no),
            (f.kf_engine_new)(c"".as_ptr(), c"".as_ptr(), 0, &mut null_mut(), no),
            (f.kf_engine_new)(c"k".as_ptr(), c"".as_ptr(), 0, null_mut(), no),
            (f.kf_engine_free)(null_mut(), no),
            (f.kf_engine_rdma)(engine, null(), no),
            (f.kf_engine_xgmi)(engine, -1, 0, no),
            (f.kf_engine_desc)(engine, null_mut(), 8, &mut 0, no),
            (f.kf_engine_desc)(engine, null_mut(), 0, null_mut(), no),
            (f.kf_peer_add)(engine, null(), 8, no),
            (f.kf_peer_remove)(null_mut(), null(), 8, no),
            (f.kf_memory_new)(engine, 0, 8, -1, 1, &mut null_mut(), no),
            (f.kf_memory_new)(engine, 8, 0, -1, 1, &mut null_mut(), no),
            (f.kf_memory_new)(engine, 8, u64::MAX, -1, 1, &mut null_mut(), no),
            (f.kf_memory_new)(engine, 8, 8, 0, 1, &mut null_mut(), no),
            (f.kf_memory_new)(engine, 8, 8, -1, 2, &mut null_mut(), no),
            (f.kf_memory_new)(engine, 8, 8, -1, 3, &mut null_mut(), no),
            (f.kf_memory_free)(null_mut(), no),
            (f.kf_session_new)(engine, null(), null(), 8, &mut null_mut(), no),
            (f.kf_session_free)(null_mut(), no),
            (f.kf_status_take)(engine, null_mut(), no),
            (f.kf_status_poll)(engine, status, null_mut(), no),
            (f.kf_status_text)(null_mut(), status, no),
            (f.kf_status_count)(engine, null_mut(), no),
            (f.kf_post)(session, 0, 1, null(), null(), null(), status, no),
            (f.kf_post)(null_mut(), 0, 0, null(), null(), null(), status, no),
        ]
    };
    assert_eq!(kinds, [Kind::ARGUMENT; 26]);
    assert_eq!(near.counts(), (1, 0));
}

#[test]
fn a_short_buffer_says_how_long_it_has_to_be() {
    let _faults = ShimFaultGuard::set("");
    let node = ShimTestNode::rdma();
    let (whole, mut len) = (node.desc(), 0);
    let desc = node.shim.functions.kf_engine_desc;
    let mut out = vec![0; whole.len() - 1];
    // SAFETY: The buffer has this room.
    let short =
        answer(|e| unsafe { desc(node.engine, out.as_mut_ptr(), out.len(), &raw mut len, e) });
    assert_eq!((kind(&short), len), (Kind::ARGUMENT, whole.len()));
}

#[test]
fn texts_are_cut_where_a_character_starts() {
    let _faults = ShimFaultGuard::set("");
    let node = ShimTestNode::bare();
    // A key that comes back in the text, three bytes a character.
    let (mut near, mut far) = (ShimTestNode::bare(), ShimTestNode::rdma());
    near.memory(vec![0; 8], -1);
    far.memory(vec![0; 8], -1);
    drop(node);
    let desc = far.memory_desc(0);
    let key_len = usize::from(desc[1] & 0x1f);
    let renamed = [&[desc[0], 0xa6], "鉄鉄".as_bytes(), &desc[2 + key_len..]].concat();
    let whole = near.try_session(0, &renamed).expect_err("no backend").1;
    assert!(whole.ends_with("鉄鉄"), "{whole}");
    let (new, local) = (near.shim.functions.kf_session_new, near.raw_memory(0));
    for room in 0..=whole.len() + 2 {
        let mut bytes = vec![0x55u8; whole.len() + 8];
        let mut text = Text { data: bytes.as_mut_ptr().cast(), room };
        let (from, len) = (renamed.as_ptr(), renamed.len());
        // SAFETY: The buffer has this room.
        unsafe { new(near.engine, local, from, len, &mut null_mut(), &raw mut text) };
        assert!(bytes[room..].iter().all(|byte| *byte == 0x55), "{room}");
        if room > 0 {
            let end = bytes.iter().position(|byte| *byte == 0).expect("NUL");
            let cut = std::str::from_utf8(&bytes[..end]).expect("UTF-8");
            assert!(whole.starts_with(cut) && end + 3 >= room.min(whole.len()), "{room}: {cut}");
        }
    }
}

#[test]
fn a_shim_of_another_class_is_refused() {
    let _faults = ShimFaultGuard::set("");
    super::rig::shim();
    let other = mori_double::INSTALLS[1 - crate::CLASS];
    let places = ShimSearchPath { asked: Some(other.shim.into()), ..ShimSearchPath::default() };
    let why = Shim::load(&places).expect_err("one MoRI to a process").tried.remove(0).why;
    let here = mori_double::INSTALLS[crate::CLASS].lib;
    assert!(
        why.contains(&format!("({here}/libmori_io.so), but the shim was compiled for")),
        "{why}"
    );
}
