//! A prefill core and a decode of vLLM.

use crate::world::*;
use kvferry_engine::core::command::ControlCommand;
use kvferry_engine::core::dialect::moriio::handshake::{AgentMetadata, LayerMemory, REQUEST};
use kvferry_engine::core::dialect::moriio::notify::{
    ReceivedDecodeNotice, Release, RemoteBlocks, decode_at_decode,
};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{BlockId, FlowId, StepId, TransferKey};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::*;
use kvferry_engine::core::moriio::MoriioSettings;
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::{Machine, Nanos};
use kvferry_engine::fabric::{ControlEvent, LinkId, LinkKind};
use std::num::NonZeroU16;
use std::sync::Arc;

pub(crate) fn arrive(table: &mut PrefillTable, mode: Mode, peer: Arc<MoriioLeg>) {
    let key = TransferKey { id: "tx-p".into(), prompt: 0 };
    let leg = PrefillLeg { moriio: Some(peer), ..PrefillLeg::new(key, mode) };
    let hook = PrefillHook::Arrived {
        request: "p".into(),
        leg,
        tokens: 40,
        prompt_hash: PromptHash::default(),
    };
    table.give(PrefillInput::Hook(hook));
}

pub(crate) fn compute(table: &mut PrefillTable) {
    let blocks = vec![BlockList::new(vec![1, 2, 3])];
    let chunk = Chunk { request: "p".into(), from: 0, to: 40, blocks };
    let hook = PrefillHook::Scheduled { step: StepId(1), chunks: vec![chunk] };
    table.give(PrefillInput::Hook(hook));
}

pub(crate) fn finish(table: &mut PrefillTable) {
    let (request, reason) = ("p".into(), FinishReason::Length);
    table.give(PrefillInput::Hook(PrefillHook::Finished { request, reason }));
}

fn blocks() -> Vec<u8> {
    let ids = vec![[6, 7, 1].map(BlockId).to_vec()];
    let notice = RemoteBlocks::new(Some("d".into()), "tx-p".into(), ids, 0).unwrap();
    notice.encode()
}

fn release(consumer_tp: u16) -> Vec<u8> {
    let tp = NonZeroU16::new(consumer_tp).unwrap();
    Release::new("tx-p".into(), tp, 1).unwrap().encode()
}

/// What a decode hears from its only writer.
pub(crate) fn written() -> ReceivedDecodeNotice {
    ReceivedDecodeNotice::Written { transfer: "tx-p".into(), writers: NonZeroU16::MIN }
}

/// The flow that writes into the announced blocks.
fn writing(table: &mut PrefillTable) -> FlowId {
    table.take("write", |want| match want {
        CoreOutput::Job(TransferJob::Write { flow, blocks, .. }) => {
            assert_eq!(blocks[0].ids, [6, 7, 1]);
            Some(*flow)
        }
        _ => None,
    })
}

#[test]
fn what_a_decode_announced_is_written_and_it_is_told() {
    for early in [false, true] {
        let mut table = prefill(Mode::Push).ready();
        let link = table.accept(LinkKind::Notify);
        if early {
            table.hear(link, &[&blocks()]);
        }
        arrive(&mut table, Mode::Push, moriio_peer());
        table.handshake(&good_replies());
        if !early {
            table.hear(link, &[&blocks()]);
        }
        compute(&mut table);
        let flow = writing(&mut table);
        // A second list changes nothing: writes to the first may be under way.
        table.hear(link, &[&blocks()]);
        finish(&mut table);
        table.report(TransferReport::Flow { flow, state: FlowState::Done { bytes: 1 } });
        let notify = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
        table.up(notify, LinkKind::Notify);
        assert_eq!(decode_at_decode(&[table.said(notify)]), Ok(written()));
        assert_eq!(
            table.answer(),
            PrefillAnswer::SourceFree { request: "p".into(), failure: None }
        );
    }
}

/// A prompt that is computed and being written, and its flow.
fn computed() -> (PrefillTable, FlowId) {
    let mut table = prefill(Mode::Push).ready();
    arrive(&mut table, Mode::Push, moriio_peer());
    table.handshake(&good_replies());
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&blocks()]);
    compute(&mut table);
    let flow = writing(&mut table);
    finish(&mut table);
    (table, flow)
}

#[test]
fn a_failed_write_is_counted_because_the_decode_cannot_be_told() {
    let (mut table, flow) = computed();
    let failure = Failure::Stalled;
    table.report(TransferReport::Flow { flow, state: FlowState::Failed(failure.clone()) });
    let freed = PrefillAnswer::SourceFree { request: "p".into(), failure: Some(failure) };
    assert_eq!(table.answer(), freed);
    assert_eq!(table.core.moriio().untold, 1);
}

#[test]
fn a_source_is_kept_until_it_is_released() {
    let mut table = prefill(Mode::Pull).ready();
    arrive(&mut table, Mode::Pull, Arc::default());
    compute(&mut table);
    finish(&mut table);
    table.wait(Nanos::from_secs(40));
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    let link = table.accept(LinkKind::Notify);
    // Two ranks of the decode read from this one; who says it twice is still one.
    for _ in 0..2 {
        table.hear(link, &[&release(2)]);
        assert!(table.wants.is_empty(), "{:?}", table.wants);
    }
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&release(2)]);
    assert_eq!(table.answer(), PrefillAnswer::SourceFree { request: "p".into(), failure: None });
}

#[test]
fn a_source_that_nobody_releases_goes_after_the_time_of_vllm() {
    let mut table = prefill(Mode::Pull).ready();
    arrive(&mut table, Mode::Pull, Arc::default());
    compute(&mut table);
    finish(&mut table);
    table.wait(Nanos::from_secs(50));
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table.wait(Nanos::from_secs(11));
    let failure = Some(Failure::LeaseExpired);
    assert_eq!(table.answer(), PrefillAnswer::SourceFree { request: "p".into(), failure });
}

#[test]
fn an_early_release_frees_the_source_of_a_push() {
    let mut table = prefill(Mode::Push).ready();
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&release(1)]);
    arrive(&mut table, Mode::Push, moriio_peer());
    table.handshake(&good_replies());
    compute(&mut table);
    finish(&mut table);
    assert!(table.wants.iter().any(|want| matches!(
        want,
        CoreOutput::Answer(PrefillAnswer::SourceFree { failure: None, .. })
    )));
}

#[test]
fn releases_may_come_again_and_again() {
    let mut table = prefill(Mode::Push).ready();
    let link = table.accept(LinkKind::Notify);
    arrive(&mut table, Mode::Push, moriio_peer());
    for _ in 0..=u16::MAX {
        table.hear(link, &[&release(1)]);
    }
    compute(&mut table);
    finish(&mut table);
    assert_eq!(table.answer(), PrefillAnswer::SourceFree { request: "p".into(), failure: None });
}

#[test]
fn links_above_the_limit_are_closed() {
    let mut table = prefill(Mode::Pull).ready();
    for _ in 0..MoriioSettings::default().links_max {
        table.accept(LinkKind::Notify);
    }
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    let link = table.accept(LinkKind::Notify);
    table.take("hang-up", |want| match want {
        CoreOutput::Control(ControlCommand::HangUp { link: on }) if *on == link => Some(()),
        _ => None,
    });
    table.control(ControlEvent::LinkDown { link: LinkId(LinkId::INBOUND + 1) });
    table.accept(LinkKind::Notify);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
}

#[test]
fn a_handshake_is_answered_with_what_the_blobs_say() {
    // Who asks before the memory is registered is answered later.
    let mut table = prefill(Mode::Pull);
    let link = table.accept(LinkKind::Handshake);
    table.hear(link, &[REQUEST]);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    let mut table = table.ready();
    let metadata = AgentMetadata::decode(&[Vec::new(), table.replied(link)]).unwrap();
    let memory = LayerMemory::decode(&[Vec::new(), table.replied(link)]).unwrap();
    assert_eq!(&*metadata.engine, b"own engine");
    assert_eq!(&*metadata.engine_id, "10.0.0.1:6300");
    assert_eq!(metadata.base_addrs, [0x1000, 0x1000 + 4096]);
    assert_eq!((metadata.num_blocks, metadata.block_len), (8, 512));
    assert_eq!(&*memory.0[1].name, "model.layers.1.self_attn.attn");
    assert_eq!(*memory.0[1].regions[0], *blob(0x1000, 8192));
}

#[test]
fn garbage_is_counted_reported_and_survived() {
    let mut table = prefill(Mode::Pull).ready();
    let link = table.accept(LinkKind::Notify);
    for frame in [&b""[..], b"\xff\xfe", b"\x81\xa4type\xa3foo"] {
        table.hear(link, &[frame]);
        assert!(table.violation().contains(STRANGER));
    }
    table.hear(link, &[b"a", b"b"]);
    table.violation();
    assert_eq!(table.core.moriio().violations, 4);
    let handshake = table.accept(LinkKind::Handshake);
    table.hear(handshake, &[b"garbage"]);
    table.violation();
    let handshake = table.accept(LinkKind::Handshake);
    table.hear(handshake, &[REQUEST]);
    table.replied(handshake);
}

#[test]
fn a_decode_that_could_not_be_reached_is_met_when_it_announces() {
    let mut table = prefill(Mode::Push).ready();
    arrive(&mut table, Mode::Push, moriio_peer());
    let link = table.dialled("tcp://10.0.0.9:6301", LinkKind::Handshake);
    table.control(ControlEvent::LinkDown { link });
    compute(&mut table);
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&blocks()]);
    table.handshake(&good_replies());
    writing(&mut table);
}

/// Entries, remembered and queued ones.
fn sizes(table: &PrefillTable) -> [u32; 3] {
    let gauges = table.core.gauges();
    [gauges.entries, gauges.remembered, gauges.queued]
}

#[test]
fn what_came_before_its_leg_is_counted_until_its_time_is_over() {
    let mut table = prefill(Mode::Push).ready();
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&blocks()]);
    // The transfer, and its deadline.
    assert_eq!(sizes(&table), [1, 1, 0]);
    table.hear(link, &[&release(2)]);
    assert_eq!(sizes(&table), [2, 1, 0]);
    table.wait(MoriioSettings::default().hold);
    assert_eq!(sizes(&table), [0, 0, 0]);
}

#[test]
fn who_asked_before_the_memory_was_there_is_counted() {
    let mut table = prefill(Mode::Pull);
    let link = table.accept(LinkKind::Handshake);
    let before = sizes(&table);
    table.hear(link, &[REQUEST]);
    assert_eq!(sizes(&table)[1], before[1] + 1);
    assert_eq!(sizes(&table.ready()), before);
}

#[test]
fn peers_that_speak_moriio_are_counted_with_what_waits_for_them() {
    let mut table = prefill(Mode::Push).ready();
    arrive(&mut table, Mode::Push, moriio_peer());
    // The request and its transfer; the peer's address and the deadline of its handshake.
    assert_eq!(sizes(&table), [2, 2, 0]);
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&blocks()]);
    assert_eq!(sizes(&table), [2, 2, 1], "the announcement waits for the handshake");
    table.handshake(&good_replies());
    // A receiver, by its key, by its peer and as a use of this; the ranks know the peer.
    assert_eq!(sizes(&table), [5, 2, 0]);
}

#[test]
fn a_receiver_of_notices_that_hung_up_leaves_no_deadline() {
    let (mut table, flow) = computed();
    let before = sizes(&table)[1];
    table.report(TransferReport::Flow { flow, state: FlowState::Done { bytes: 1 } });
    let notify = table.dialled("tcp://10.0.0.9:7301", LinkKind::Notify);
    assert_eq!(sizes(&table)[1], before + 2, "the receiver and its deadline");
    table.up(notify, LinkKind::Notify);
    table.control(ControlEvent::LinkDown { link: notify });
    assert_eq!(sizes(&table)[1], before);
}

#[test]
fn where_there_are_no_such_peers_they_are_told_so() {
    let mut table = closed_prefill(Mode::Push).ready();
    let link = table.accept(LinkKind::Handshake);
    table.hear(link, &[REQUEST]);
    let metadata = AgentMetadata::decode(&[Vec::new(), table.replied(link)]).unwrap();
    let memory = LayerMemory::decode(&[Vec::new(), table.replied(link)]).unwrap();
    assert_eq!((&*metadata.engine, metadata.native), (CLOSED.as_bytes(), true));
    assert_eq!((metadata.base_addrs.len(), memory.0.len()), (0, 0), "it tells where KV lies");
    let link = table.accept(LinkKind::Notify);
    table.take("hang-up", |want| match want {
        CoreOutput::Control(ControlCommand::HangUp { link: on }) if *on == link => Some(()),
        _ => None,
    });
    for (mode, peer) in [(Mode::Push, moriio_peer()), (Mode::Pull, Arc::default())] {
        let mut table = closed_prefill(mode).ready();
        // Who comes for it may be native.
        arrive(&mut table, mode, peer);
        assert!(table.wants.is_empty(), "{:?}", table.wants);
    }
}
