//! A decode core and a prefill of vLLM.

use crate::world::*;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::dialect::moriio::handshake::{AgentMetadata, REQUEST};
use kvferry_engine::core::dialect::moriio::notify::{
    ReceivedPrefillNotice, decode_at_prefill, write_done,
};
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{BlockId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::*;
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::fabric::{Address, ControlEvent, LinkKind};
use std::sync::Arc;

pub(crate) fn arrive(table: &mut DecodeTable, name: &str, mode: Mode, peer: Arc<MoriioLeg>) {
    let leg = DecodeLeg {
        key: TransferKey { id: format!("tx-{name}").as_str().into(), prompt: 0 },
        sibling: 0,
        mode,
        prefill: "10.0.0.9:6301".into(),
        control: "tcp://10.0.0.9:6301".into(),
        incarnation: None,
        moriio: Some(peer),
    };
    let hook = DecodeHook::Arrived {
        request: name.into(),
        leg,
        tokens: 40,
        prompt_hash: PromptHash::default(),
    };
    table.give(DecodeInput::Hook(hook));
}

/// The same of a peer that turns out to be vLLM.
pub(crate) fn arrive_of_vllm(
    table: &mut DecodeTable,
    name: &str,
    mode: Mode,
    peer: Arc<MoriioLeg>,
) {
    arrive(table, name, mode, peer);
    table.meet_vllm();
}

pub(crate) fn allocate(table: &mut DecodeTable, name: &str, computed: u32) {
    let blocks = vec![BlockList::new(vec![3, 4, 5])];
    let hook = DecodeHook::Allocated { request: name.into(), computed, blocks };
    table.give(DecodeInput::Hook(hook));
}

/// A push up to the announcement; returns the table.
fn announced(name: &str) -> DecodeTable {
    let mut table = decode(Mode::Push).ready();
    arrive_of_vllm(&mut table, name, Mode::Push, moriio_peer());
    table.handshake(&good_replies());
    let TransferJob::Peer { ranks, fence_key, .. } = table.job() else { panic!("no peer job") };
    assert_eq!((fence_key, &ranks[0].address), (0, &Address((*b"its engine").into())));
    assert_eq!(table.answer(), DecodeAnswer::Allocate { request: name.into() });
    allocate(&mut table, name, 0);
    let link = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
    table.up(link, LinkKind::Notify);
    let Ok(ReceivedPrefillNotice::RemoteBlocks(notice)) = decode_at_prefill(&[table.said(link)])
    else {
        panic!("no remote_blocks")
    };
    assert_eq!(&*notice.transfer().0, format!("tx-{name}"));
    assert_eq!(notice.blocks(), [[3, 4, 5].map(BlockId)]);
    assert_eq!(notice.request(), Some(&name.into()));
    table
}

#[test]
fn blocks_are_announced_and_the_word_that_they_are_written_loads_them() {
    let mut table = announced("d");
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&write_done(&"tx-other".into())]);
    table.hear(link, &[&write_done(&"tx-d".into())]);
    assert_eq!(table.answer(), DecodeAnswer::Loaded { request: "d".into() });
    // Twice is once.
    table.hear(link, &[&write_done(&"tx-d".into())]);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
}

#[test]
fn a_cancelled_push_keeps_its_blocks_until_they_are_written() {
    let mut table = announced("d");
    let (request, reason) = ("d".into(), FinishReason::Aborted);
    table.give(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[b"tx-d"]);
    let failure = Failure::Cancelled;
    assert_eq!(table.answer(), DecodeAnswer::LoadFailed { request: "d".into(), failure });
}

#[test]
fn a_prefill_that_says_nothing_is_kept_out_before_the_blocks_go() {
    let mut table = announced("d");
    table.wait(Nanos::from_secs(121));
    let TransferJob::Fence { peer } = table.job() else { panic!("no fence") };
    // The link by which it was found out what it speaks.
    table.hung_up();
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table.report(TransferReport::Fenced { peer });
    let failure = Failure::Stalled;
    assert_eq!(table.answer(), DecodeAnswer::LoadFailed { request: "d".into(), failure });
}

#[test]
fn a_prefill_that_the_data_plane_lost_is_kept_out() {
    let mut table = announced("d");
    table.wait(Nanos::from_ms(10));
    let peer = kvferry_engine::core::ids::ConnectionId(1 << 31 | 1);
    let failure = Failure::Unreachable;
    table.report(TransferReport::PeerFailed { peer, failure: failure.clone() });
    assert_eq!(table.job(), TransferJob::Fence { peer });
    table.report(TransferReport::Fenced { peer });
    assert_eq!(table.answer(), DecodeAnswer::LoadFailed { request: "d".into(), failure });
}

#[test]
fn a_prefill_that_hung_up_is_asked_whether_it_is_still_there() {
    for alive in [true, false] {
        let mut table = decode(Mode::Push).ready();
        arrive_of_vllm(&mut table, "d", Mode::Push, moriio_peer());
        table.handshake(&good_replies());
        let TransferJob::Peer { peer, .. } = table.job() else { panic!("no peer job") };
        table.answer();
        allocate(&mut table, "d", 0);
        let notify = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
        table.up(notify, LinkKind::Notify);
        table.said(notify);
        table.control(ControlEvent::LinkDown { link: notify });
        if alive {
            table.handshake(&good_replies());
            assert!(table.wants.is_empty(), "{:?}", table.wants);
            continue;
        }
        let link = table.dialled("tcp://10.0.0.9:6301", LinkKind::Handshake);
        table.control(ControlEvent::LinkDown { link });
        assert_eq!(table.job(), TransferJob::Fence { peer });
        table.report(TransferReport::Fenced { peer });
        let failure = Failure::Unreachable;
        assert_eq!(table.answer(), DecodeAnswer::LoadFailed { request: "d".into(), failure });
    }
}

#[test]
fn prefix_hits_cannot_be_announced() {
    let mut table = decode(Mode::Push).ready();
    arrive_of_vllm(&mut table, "d", Mode::Push, moriio_peer());
    table.handshake(&good_replies());
    table.job();
    table.answer();
    allocate(&mut table, "d", 16);
    let DecodeAnswer::LoadFailed { failure: Failure::Refused(_), .. } = table.answer() else {
        panic!("announced prefix hits")
    };
}

#[test]
fn a_prompt_that_is_there_already_is_released() {
    let mut table = decode(Mode::Push).ready();
    arrive_of_vllm(&mut table, "d", Mode::Push, moriio_peer());
    table.handshake(&good_replies());
    table.job();
    table.answer();
    allocate(&mut table, "d", 40);
    assert_eq!(table.answer(), DecodeAnswer::Loaded { request: "d".into() });
    let link = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
    table.up(link, LinkKind::Notify);
    assert_released(&mut table, link);
}

fn assert_released(table: &mut DecodeTable, link: kvferry_engine::fabric::LinkId) {
    match decode_at_prefill(&[table.said(link)]) {
        Ok(ReceivedPrefillNotice::Release(release)) => assert_eq!(&*release.transfer().0, "tx-d"),
        other => panic!("no release: {other:?}"),
    }
}

/// A pull up to the read; returns the flow.
fn reading() -> (DecodeTable, kvferry_engine::core::ids::FlowId) {
    let mut table = decode(Mode::Pull).ready();
    let blocks = vec![BlockList::new(vec![6, 7, 1])];
    let peer = Arc::new(MoriioLeg { peer: Some(peer()), blocks: blocks.clone(), only: false });
    arrive_of_vllm(&mut table, "d", Mode::Pull, peer);
    table.handshake(&good_replies());
    table.job();
    assert_eq!(table.answer(), DecodeAnswer::Allocate { request: "d".into() });
    allocate(&mut table, "d", 0);
    let TransferJob::Read { flow, remote, tokens: 40, .. } = table.job() else { panic!("no read") };
    assert_eq!(*remote, blocks);
    (table, flow)
}

#[test]
fn the_blocks_of_the_leg_are_read_and_then_released() {
    let (mut table, flow) = reading();
    table.report(TransferReport::Flow { flow, state: FlowState::Done { bytes: 1 } });
    assert_eq!(table.answer(), DecodeAnswer::Loaded { request: "d".into() });
    let link = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
    table.up(link, LinkKind::Notify);
    assert_released(&mut table, link);
}

#[test]
fn of_a_sliding_window_the_last_blocks_are_told_and_read() {
    // vLLM may have its null block in place of those that it has freed.
    for told in [vec![4, 5], vec![0, 4, 5]] {
        let mut table = windowed_decode(Mode::Pull).ready();
        let lists = [vec![6, 7, 1], told].map(BlockList::new).to_vec();
        let peer = Arc::new(MoriioLeg { peer: Some(peer()), blocks: lists, only: false });
        arrive_of_vllm(&mut table, "d", Mode::Pull, peer);
        table.handshake(&good_replies());
        table.job();
        table.answer();
        let blocks = vec![BlockList::new(vec![3, 4, 5]), BlockList { first: 1, ids: vec![6, 7] }];
        let hook = DecodeHook::Allocated { request: "d".into(), computed: 0, blocks };
        table.give(DecodeInput::Hook(hook));
        let TransferJob::Read { remote, tokens: 40, .. } = table.job() else { panic!("no read") };
        let expected = [BlockList::new(vec![6, 7, 1]), BlockList { first: 1, ids: vec![4, 5] }];
        assert_eq!(**remote, expected);
    }
}

#[test]
fn several_groups_are_announced_to_who_knows_them() {
    for of_0_33 in [false, true] {
        let mut table = windowed_decode(Mode::Push).ready();
        arrive_of_vllm(&mut table, "d", Mode::Push, moriio_peer());
        let told = if of_0_33 { replies_of_0_33(1, 0x10_0000) } else { good_replies() };
        table.handshake(&told);
        table.job();
        table.answer();
        let lists = [vec![3, 4, 5], vec![6, 7, 2]];
        let blocks = lists.clone().map(BlockList::new).to_vec();
        let hook = DecodeHook::Allocated { request: "d".into(), computed: 0, blocks };
        table.give(DecodeInput::Hook(hook));
        if of_0_33 {
            let link = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
            table.up(link, LinkKind::Notify);
            let heard = decode_at_prefill(&[table.said(link)]);
            let Ok(ReceivedPrefillNotice::RemoteBlocks(notice)) = heard else {
                panic!("{heard:?}")
            };
            assert_eq!(
                notice.blocks(),
                lists.map(|ids| ids.into_iter().map(BlockId).collect::<Vec<_>>())
            );
        } else {
            let DecodeAnswer::LoadFailed { failure: Failure::Refused(why), .. } = table.answer()
            else {
                panic!("announced to 0.32.0")
            };
            assert!(why.to_string().contains("one KV group only"), "{why}");
        }
    }
}

#[test]
fn what_was_read_too_late_is_not_used() {
    let (mut table, flow) = reading();
    table.wait(Nanos::from_secs(55));
    assert_eq!(table.job(), TransferJob::Stop { flow });
    table.report(TransferReport::Flow { flow, state: FlowState::Done { bytes: 1 } });
    let failure = Failure::LeaseExpired;
    assert_eq!(table.answer(), DecodeAnswer::LoadFailed { request: "d".into(), failure });
}

#[test]
fn peers_that_do_not_fit_are_refused() {
    let mut table = decode(Mode::Push).ready();
    arrive_of_vllm(&mut table, "d", Mode::Push, moriio_peer());
    table.handshake(&replies(0x10_0000, 4096));
    let DecodeAnswer::Rejected { failure: Failure::Mismatch(why), .. } = table.answer() else {
        panic!("not refused")
    };
    assert!(why.to_string().contains("4096"), "{why}");
    // The prefill is told that nobody comes.
    let link = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
    table.up(link, LinkKind::Notify);
    assert_released(&mut table, link);
}

#[test]
fn a_native_peer_that_a_leg_in_moriios_form_names_is_spoken_to_natively() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut table = decode(mode).ready();
        arrive(&mut table, "d", mode, moriio_peer());
        let link = table.dialled("tcp://10.0.0.9:6301", LinkKind::Handshake);
        table.up(link, LinkKind::Handshake);
        assert_eq!(table.said(link), REQUEST);
        // It has no memory for those that are not.
        let (metadata, _) = good_replies();
        let metadata = AgentMetadata { engine: CLOSED.as_bytes().into(), native: true, ..metadata };
        let frame = metadata.encode();
        table.hear(link, &[&frame[0], &frame[1]]);
        let Ok(Frame::Hello(hello)) = native::decode(&table.said(link)) else { panic!("no hello") };
        assert_eq!(hello.expects, "10.0.0.9:6301".into());
        assert!(table.wants.is_empty(), "{:?}", table.wants);
    }
}

#[test]
fn a_request_that_ends_before_its_peer_is_known_releases_the_prompt_in_words_that_both_know() {
    let mut table = decode(Mode::Push).ready();
    arrive(&mut table, "d", Mode::Push, moriio_peer());
    let (request, reason) = ("d".into(), FinishReason::Aborted);
    table.give(DecodeInput::Hook(DecodeHook::Finished { request, reason }));
    table.turned_to_moriio();
    let link = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
    table.up(link, LinkKind::Notify);
    assert_released(&mut table, link);
}

#[test]
fn blocks_that_are_there_before_the_peer_is_known_are_announced_to_it() {
    let mut table = decode(Mode::Push).ready();
    arrive(&mut table, "d", Mode::Push, moriio_peer());
    allocate(&mut table, "d", 0);
    table.meet_vllm();
    table.handshake(&good_replies());
    let link = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
    table.up(link, LinkKind::Notify);
    let Ok(ReceivedPrefillNotice::RemoteBlocks(notice)) = decode_at_prefill(&[table.said(link)])
    else {
        panic!("no remote_blocks")
    };
    assert_eq!(notice.blocks(), [vec![BlockId(3), BlockId(4), BlockId(5)]]);
}

#[test]
fn where_there_are_no_such_peers_a_prompt_without_one_is_nobody_s_fault() {
    let mut table = closed_decode(Mode::Push).ready();
    arrive(&mut table, "d", Mode::Push, moriio_peer());
    let DecodeAnswer::Rejected { failure: Failure::Mismatch(why), .. } = table.answer() else {
        panic!("not refused")
    };
    assert_eq!(why.to_string(), CLOSED);
    arrive(&mut table, "e", Mode::Push, Arc::default());
    let failure = Failure::Unreachable;
    assert_eq!(table.answer(), DecodeAnswer::Rejected { request: "e".into(), failure });
}

#[test]
fn who_verifies_deals_with_no_peers_of_moriio() {
    for mode in [Mode::Push, Mode::Pull] {
        let mut table = verifying_decode(mode).ready();
        arrive(&mut table, "d", mode, moriio_peer());
        let DecodeAnswer::Rejected { failure: Failure::Mismatch(why), .. } = table.answer() else {
            panic!("not refused")
        };
        let why = why.to_string();
        assert!(why.contains("verifies KV") && why.contains("turn its `verify` off"), "{why}");
    }
}

#[test]
fn a_prefill_that_was_restarted_is_met_anew() {
    let mut table = announced("a");
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[b"tx-a"]);
    table.answer();
    table.wait(Nanos::from_secs(6));
    arrive_of_vllm(&mut table, "b", Mode::Push, moriio_peer());
    table.handshake(&replies(0x20_0000, 512));
    let TransferJob::Fence { .. } = table.job() else {
        panic!("the old incarnation is not kept out")
    };
    let failure = Failure::PeerRestarted;
    assert_eq!(table.answer(), DecodeAnswer::Rejected { request: "b".into(), failure });
    // What it speaks was found out just now.
    arrive(&mut table, "c", Mode::Push, moriio_peer());
    table.turned_to_moriio();
    table.handshake(&replies(0x20_0000, 512));
    let TransferJob::Peer { .. } = table.job() else { panic!("the new incarnation is not met") };
}

#[test]
fn a_silent_handshake_and_a_refused_one_end() {
    let mut table = decode(Mode::Push).ready();
    arrive_of_vllm(&mut table, "d", Mode::Push, moriio_peer());
    let link = table.dialled("tcp://10.0.0.9:6301", LinkKind::Handshake);
    table.up(link, LinkKind::Handshake);
    table.wait(Nanos::from_secs(6));
    let failure = Failure::Unreachable;
    assert_eq!(table.answer(), DecodeAnswer::Rejected { request: "d".into(), failure });
    arrive_of_vllm(&mut table, "e", Mode::Push, moriio_peer());
    let link = table.dialled("tcp://10.0.0.9:6301", LinkKind::Handshake);
    table.control(ControlEvent::LinkDown { link });
    let failure = Failure::Unreachable;
    assert_eq!(table.answer(), DecodeAnswer::Rejected { request: "e".into(), failure });
}

/// A leg of a router that knows both ends to speak the native dialect.
fn arrive_natively(table: &mut DecodeTable) -> kvferry_engine::fabric::LinkId {
    let leg = DecodeLeg::new(
        TransferKey { id: "tx".into(), prompt: 0 },
        Mode::Push,
        "10.0.0.9:6301".into(),
        "tcp://10.0.0.9:6301".into(),
    );
    let hook = DecodeHook::Arrived {
        request: "d".into(),
        leg,
        tokens: 40,
        prompt_hash: PromptHash::default(),
    };
    table.give(DecodeInput::Hook(hook));
    let link = table.dialled("tcp://10.0.0.9:6301", LinkKind::Handshake);
    table.up(link, LinkKind::Handshake);
    assert_eq!(table.said(link), REQUEST);
    assert!(table.wants.is_empty(), "said more than vLLM can hear: {:?}", table.wants);
    link
}

#[test]
fn a_hello_is_said_only_to_who_takes_hellos() {
    let mut table = decode(Mode::Push).ready();
    let link = arrive_natively(&mut table);
    let (metadata, memory) = good_replies();
    let frame = metadata.encode();
    table.hear(link, &[&frame[0], &frame[1]]);
    let DecodeAnswer::Rejected { failure: Failure::HelloRefused(why), .. } = table.answer() else {
        panic!("not refused")
    };
    assert!(why.contains("only MoRIIO"), "{why}");
    assert!(
        !table
            .wants
            .iter()
            .any(|want| matches!(want, CoreOutput::Control(ControlCommand::Send { .. })))
    );

    let mut table = decode(Mode::Push).ready();
    let link = arrive_natively(&mut table);
    for frame in [AgentMetadata { native: true, ..metadata }.encode(), memory.encode()] {
        table.hear(link, &[&frame[0], &frame[1]]);
    }
    let Ok(Frame::Hello(hello)) = native::decode(&table.said(link)) else { panic!("no hello") };
    assert_eq!(hello.expects, "10.0.0.9:6301".into());
    assert!(table.wants.is_empty(), "{:?}", table.wants);
}
