//! Several TP ranks on either side: each listens for itself.

use crate::decode::{allocate, arrive_of_vllm as arrive_at_decode};
use crate::prefill::{arrive as arrive_at_prefill, compute, finish, written};
use crate::world::*;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::moriio::handshake::{AgentMetadata, LayerMemory, REQUEST};
use kvferry_engine::core::dialect::moriio::notify::*;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{BlockId, FlowId, TP_MAX, TransferId};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::*;
use kvferry_engine::fabric::{LinkId, LinkKind};
use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::sync::Arc;

fn release(consumer_tp: u16) -> Vec<u8> {
    let tp = NonZeroU16::new(consumer_tp).unwrap();
    Release::new("tx-p".into(), tp, 0).unwrap().encode()
}

fn blocks(decode_rank: u16) -> Vec<u8> {
    let ids = vec![[6, 7, 1].map(BlockId).to_vec()];
    RemoteBlocks::new(Some("d".into()), "tx-p".into(), ids, decode_rank).unwrap().encode()
}

/// What 0.33.0 says as one of several writers.
fn one_of(writers: i64) -> Vec<u8> {
    let transfer: TransferId = "tx-d".into();
    let mut frame = write_done(&transfer);
    frame[0] += 1;
    frame.extend(b"\xabnum_writers");
    frame.extend(rmp_serde::to_vec(&writers).unwrap());
    frame
}

fn done() -> Vec<u8> {
    write_done(&"tx-d".into())
}

fn notify(port: u16) -> String {
    format!("tcp://10.0.0.9:{port}")
}

/// A decode with so many ranks that has announced its blocks to a prefill with so many.
fn announced(own: u16, peer: u16, of_0_33: bool) -> DecodeTable {
    announced_to(own, peer, (of_0_33, false))
}

fn announced_to(own: u16, peer: u16, (of_0_33, native): (bool, bool)) -> DecodeTable {
    let mut table = decode_of(own, Mode::Push).ready_of(own);
    arrive_at_decode(&mut table, "d", Mode::Push, moriio_peer_of(peer));
    for rank in 0..peer {
        let data = 0x10_0000 * u64::from(rank + 1);
        let mut told = if of_0_33 { replies_of_0_33(peer, data) } else { replies_of(peer, data) };
        told.0.native = native;
        table.handshake_of(rank, &told);
    }
    let TransferJob::Peer { ranks, geometry, .. } = table.job() else { panic!("no peer job") };
    assert_eq!((ranks.len(), geometry.tp), (usize::from(peer), peer));
    assert_eq!(table.answer(), DecodeAnswer::Allocate { request: "d".into() });
    allocate(&mut table, "d", 0);
    for rank in 0..peer {
        let link = table.dialled(&notify(7301 + rank), LinkKind::Notify);
        table.up(link, LinkKind::Notify);
        let heard = decode_at_prefill(&[table.said(link)]);
        let Ok(ReceivedPrefillNotice::RemoteBlocks(notice)) = heard else { panic!("{heard:?}") };
        assert_eq!(notice.blocks(), [[3, 4, 5].map(BlockId)]);
    }
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table
}

fn loaded(table: &mut DecodeTable) {
    assert_eq!(table.answer(), DecodeAnswer::Loaded { request: "d".into() });
    assert!(table.wants.is_empty(), "{:?}", table.wants);
}

#[test]
fn what_is_written_to_each_rank_is_loaded() {
    for of_0_33 in [false, true] {
        let mut table = announced(2, 2, of_0_33);
        let [first, again, second] = [0, 0, 1].map(|rank| table.accept(LinkKind::notify_of(rank)));
        table.hear(first, &[&done()]);
        table.hear(first, &[&done()]);
        assert!(table.wants.is_empty(), "rank 1 has nothing: {:?}", table.wants);
        table.hear(again, &[&done()]);
        assert!(table.wants.is_empty(), "rank 1 has nothing: {:?}", table.wants);
        table.hear(second, &[&done()]);
        loaded(&mut table);
    }
}

#[test]
fn all_writers_of_a_rank_are_waited_for() {
    let mut table = announced(1, 2, true);
    let links = [(); 2].map(|()| table.accept(LinkKind::Notify));
    // A number that cannot be is none, and the same writer does not count twice.
    for link in links {
        for writers in [0, -1, 1, 3, 1 << 40] {
            table.hear(link, &[&one_of(writers)]);
        }
    }
    for _ in 0..2 {
        table.hear(links[0], &[&one_of(2)]);
    }
    table.wants.retain(|want| !matches!(want, CoreOutput::Violation(_)));
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table.hear(links[1], &[&one_of(2)]);
    loaded(&mut table);

    // One of ours says it once for all its ranks.
    let mut table = announced_to(1, 2, (true, true));
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&done()]);
    loaded(&mut table);

    let mut table = announced(2, 1, true);
    let links = [0, 1].map(|rank| table.accept(LinkKind::notify_of(rank)));
    table.hear(links[1], &[&done()]);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table.hear(links[0], &[&done()]);
    loaded(&mut table);
}

#[test]
fn a_prefill_that_will_not_write_gives_the_blocks_back_at_once() {
    let failed = write_failed(&"tx-d".into());
    let failure = Failure::PrefillEnded;
    let expected = DecodeAnswer::LoadFailed { request: "d".into(), failure };
    let mut table = announced(1, 1, true);
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&failed]);
    assert_eq!(table.answer(), expected);

    // While one rank may still write, another that will not is no reason.
    let mut table = announced(2, 2, true);
    let links = [0, 1].map(|rank| table.accept(LinkKind::notify_of(rank)));
    table.hear(links[0], &[&failed]);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table.hear(links[1], &[&done()]);
    assert_eq!(table.answer(), expected);

    let mut table = announced(1, 2, true);
    let links = [0, 0].map(|rank| table.accept(LinkKind::notify_of(rank)));
    table.hear(links[0], &[&failed]);
    table.hear(links[0], &[&failed]);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table.wait(Nanos::from_secs(121));
    let TransferJob::Fence { .. } = table.job() else { panic!("no fence") };
}

#[test]
fn a_writer_of_0_32_with_another_tp_size_is_refused() {
    for (own, peer) in [(1, 2), (2, 1)] {
        let mut table = decode_of(own, Mode::Push).ready_of(own);
        arrive_at_decode(&mut table, "d", Mode::Push, moriio_peer_of(peer));
        for rank in 0..peer {
            table.handshake_of(rank, &replies_of(peer, 0x10_0000 * u64::from(rank + 1)));
        }
        let DecodeAnswer::Rejected { failure: Failure::Mismatch(why), .. } = table.answer() else {
            panic!("not refused")
        };
        assert!(why.to_string().contains("equal TP sizes"), "{why}");
    }
}

/// It takes the blocks of the decode to lie as far apart as its own do.
#[test]
fn a_writer_of_0_32_with_interleaved_layers_is_refused_where_they_are_not() {
    let interleaved = |(mut metadata, memory): (AgentMetadata, LayerMemory)| {
        let block = block(1);
        metadata.base_addrs = (0..).map(|layer| 0x10_0000 + layer * block).take(2).collect();
        (metadata, memory)
    };
    for (mode, told, is_refused) in [
        (Mode::Push, interleaved(replies_of(1, 0x10_0000)), true),
        (Mode::Push, replies_of(1, 0x10_0000), false),
        // Who reads knows where the blocks of the other side are.
        (Mode::Pull, interleaved(replies_of(1, 0x10_0000)), false),
    ] {
        let mut table = decode_of(1, mode).ready_of(1);
        arrive_at_decode(&mut table, "d", mode, moriio_peer_of(1));
        table.handshake_of(0, &told);
        let mut wants = std::mem::take(&mut table.wants).into_iter();
        let refused = wants.find_map(|want| match want {
            CoreOutput::Answer(DecodeAnswer::Rejected { failure, .. }) => Some(failure.to_string()),
            _ => None,
        });
        let is_right = |why: &String| why.contains("1024 bytes apart") && why.contains("layers.0");
        assert_eq!(refused.is_some(), is_refused, "{mode}: {refused:?}");
        assert!(refused.iter().all(is_right), "{refused:?}");
    }
}

#[test]
fn ranks_that_are_none_and_layouts_that_are_none_are_refused() {
    let numbers = |change: fn(&mut Vec<i64>)| {
        let (mut metadata, memory) = replies_of_0_33(2, 0x10_0000);
        change(&mut metadata.layouts.heads[1].1);
        (metadata, memory)
    };
    let sizes = {
        let (mut metadata, memory) = replies_of_0_33(2, 0x10_0000);
        metadata.layouts.block_sizes[0].1 = 32;
        (metadata, memory)
    };
    for (told, why) in [
        (numbers(Vec::clear), "layout of no use"),
        (numbers(|numbers| numbers[0] = 2), "ends"),
        (numbers(|numbers| numbers[1] = 8), "on rank 0"),
        (numbers(|numbers| numbers[2] = 15), "layout of no use"),
        (numbers(|numbers| numbers[3] = i64::MAX - 1), "ends"),
        (numbers(|numbers| numbers[4] = -16), "layout of no use"),
        (numbers(|numbers| numbers[6] = 8), "layout of no use"),
        (sizes, "--block-size"),
        (replies_of(1, 0x10_0000), "512 bytes"),
    ] {
        let mut table = decode_of(2, Mode::Pull).ready_of(2);
        arrive_at_decode(&mut table, "d", Mode::Pull, moriio_peer_of(2));
        table.handshake_of(0, &replies_of_0_33(2, 0x20_0000));
        table.handshake_of(1, &told);
        let DecodeAnswer::Rejected { failure: Failure::Mismatch(said), .. } = table.answer() else {
            panic!("not refused: {why}")
        };
        assert!(said.to_string().contains(why), "{said}, not {why}");
    }
    for tp in [65, u16::MAX] {
        let mut table = decode(Mode::Push).ready();
        arrive_at_decode(&mut table, "d", Mode::Push, moriio_peer_of(tp));
        let DecodeAnswer::Rejected { failure: Failure::Mismatch(said), .. } = table.answer() else {
            panic!("not refused")
        };
        assert!(said.to_string().contains("TP ranks"), "{said}");
    }
}

#[test]
fn a_rank_that_is_silent_or_another_than_before_ends_the_whole_peer() {
    let mut table = decode_of(2, Mode::Push).ready_of(2);
    arrive_at_decode(&mut table, "d", Mode::Push, moriio_peer_of(2));
    table.handshake_of(1, &replies_of(2, 0x10_0000));
    assert!(matches!(table.wants[..], [CoreOutput::Control(_)]), "{:?}", table.wants);
    table.wait(Nanos::from_secs(6));
    let failure = Failure::Unreachable;
    assert_eq!(table.answer(), DecodeAnswer::Rejected { request: "d".into(), failure });

    let mut table = announced(2, 2, false);
    table.wait(Nanos::from_secs(6));
    arrive_at_decode(&mut table, "e", Mode::Push, moriio_peer_of(2));
    table.handshake_of(0, &replies_of(2, 0x10_0000));
    table.handshake_of(1, &replies_of(2, 0x30_0000));
    let TransferJob::Fence { .. } = table.job() else { panic!("no fence") };
}

#[test]
fn all_ranks_are_read_and_each_is_released_for_all_readers() {
    for (own, peer) in [(2, 2), (1, 2), (2, 1)] {
        let mut table = decode_of(own, Mode::Pull).ready_of(own);
        let blocks = vec![BlockList::new(vec![6, 7, 1])];
        let leg = MoriioLeg { peer: Some(peer_of(peer)), blocks, only: false };
        arrive_at_decode(&mut table, "d", Mode::Pull, Arc::new(leg));
        for rank in 0..peer {
            table.handshake_of(rank, &replies_of(peer, 0x10_0000 * u64::from(rank + 1)));
        }
        table.job();
        table.answer();
        allocate(&mut table, "d", 0);
        let TransferJob::Read { flow, .. } = table.job() else { panic!("no read") };
        for rank in 0..own {
            assert!(table.wants.is_empty(), "{:?}", table.wants);
            let state = FlowState::Done { bytes: 1 };
            table.report_of(rank, TransferReport::Flow { flow, state });
        }
        for rank in 0..peer {
            let link = table.dialled(&notify(7301 + rank), LinkKind::Notify);
            table.up(link, LinkKind::Notify);
            let heard = decode_at_prefill(&[table.said(link)]);
            let Ok(ReceivedPrefillNotice::Release(release)) = heard else { panic!("{heard:?}") };
            // A prefill of any size waits for one such word only.
            assert_eq!(release.consumer_tp(), NonZeroU16::MIN);
        }
        loaded(&mut table);
    }
}

/// A source of so many ranks that is computed and waits for its readers.
fn held(tp: u16) -> PrefillTable {
    let mut table = prefill_of(tp, Mode::Pull).ready_of(tp);
    arrive_at_prefill(&mut table, Mode::Pull, Arc::default());
    compute(&mut table);
    finish(&mut table);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    table
}

#[test]
fn a_source_is_kept_until_every_reader_of_every_rank_has_released_it() {
    let freed = PrefillAnswer::SourceFree { request: "p".into(), failure: None };
    // Ranks here, ranks of the decode, and the ranks here that hear a release.
    for (own, consumers, heard) in [
        (2, 2, vec![0, 1]),
        (1, 2, vec![0, 0]),
        (2, 4, vec![0, 1, 1, 0]),
        // 0.32.0 tells the rank that it reads from, 0.33.0 all that hold the same.
        (2, 1, vec![0]),
        (2, 1, vec![1]),
        (4, 2, vec![0, 2]),
        (4, 2, vec![1, 3]),
    ] {
        let mut table = held(own);
        for (index, rank) in heard.iter().enumerate() {
            let link = table.accept(LinkKind::notify_of(*rank));
            for _ in 0..2 {
                assert!(table.wants.is_empty(), "{own} {consumers} {heard:?}: {:?}", table.wants);
                table.hear(link, &[&release(consumers)]);
                if index + 1 == heard.len() {
                    break;
                }
            }
        }
        assert_eq!(table.answer(), freed, "{own} {consumers} {heard:?}");
    }
}

#[test]
fn releases_of_more_ranks_than_a_decode_may_have_are_violations() {
    let mut table = held(2);
    // The other rank here hears of none of them, so that the source is kept.
    for _ in 0..TP_MAX + 3 {
        let link = table.accept(LinkKind::notify_of(0));
        table.hear(link, &[&release(2)]);
    }
    assert_eq!(table.core.moriio().violations, 3);
    assert!(table.wants.is_empty(), "{:?}", table.wants);
}

#[test]
fn releases_of_all_ranks_that_came_before_the_leg_count() {
    let mut table = prefill_of(2, Mode::Pull).ready_of(2);
    for rank in [0, 1] {
        let link = table.accept(LinkKind::notify_of(rank));
        table.hear(link, &[&release(2)]);
    }
    arrive_at_prefill(&mut table, Mode::Pull, Arc::default());
    compute(&mut table);
    finish(&mut table);
    let freed = PrefillAnswer::SourceFree { request: "p".into(), failure: None };
    assert_eq!(table.answer(), freed);
}

/// The flow of a push to a decode that was met.
fn pushing(table: &mut PrefillTable) -> FlowId {
    compute(table);
    let flow = table.take("write", |want| match want {
        CoreOutput::Job(TransferJob::Write { flow, blocks, .. }) => {
            assert_eq!(blocks[0].ids, [6, 7, 1]);
            Some(*flow)
        }
        _ => None,
    });
    finish(table);
    flow
}

/// A prefill with so many ranks that writes to a decode with so many.
fn writing(own: u16, peer: u16, of_0_33: bool) -> (PrefillTable, FlowId) {
    let mut table = prefill_of(own, Mode::Push).ready_of(own);
    arrive_at_prefill(&mut table, Mode::Push, moriio_peer_of(peer));
    for rank in 0..peer {
        let data = 0x10_0000 * u64::from(rank + 1);
        let told = if of_0_33 { replies_of_0_33(peer, data) } else { replies_of(peer, data) };
        table.handshake_of(rank, &told);
    }
    for rank in 0..own {
        let link = table.accept(LinkKind::notify_of(rank));
        table.hear(link, &[&blocks(0)]);
    }
    assert_eq!(table.core.moriio().violations, 0, "each rank is told once");
    let flow = pushing(&mut table);
    (table, flow)
}

/// What each rank of the decode is told.
fn told(table: &mut PrefillTable, peer: u16) -> BTreeSet<Vec<u8>> {
    let rank = |rank: u16| {
        let link = table.dialled(&notify(7301 + rank), LinkKind::Notify);
        table.up(link, LinkKind::Notify);
        table.said(link)
    };
    (0..peer).map(rank).collect()
}

#[test]
fn every_rank_of_a_decode_is_told_when_all_ranks_here_are_done() {
    for (own, peer) in [(2, 2), (1, 2), (2, 1)] {
        let (mut table, flow) = writing(own, peer, false);
        for rank in 0..own {
            table.wants.retain(|want| !matches!(want, CoreOutput::Job(_)));
            assert!(table.wants.is_empty(), "{:?}", table.wants);
            let state = FlowState::Done { bytes: 1 };
            table.report_of(rank, TransferReport::Flow { flow, state });
        }
        let frames = told(&mut table, peer);
        let heard = frames.iter().map(|frame| decode_at_decode(&[frame])).collect::<Vec<_>>();
        assert_eq!(heard, [Ok(written())]);
    }
}

#[test]
fn only_a_decode_that_knows_the_word_is_told_of_a_failed_write() {
    for of_0_33 in [false, true] {
        let (mut table, flow) = writing(2, 2, of_0_33);
        for rank in 0..2 {
            let state = FlowState::Failed(Failure::Stalled);
            table.report_of(rank, TransferReport::Flow { flow, state });
        }
        if of_0_33 {
            let failed = write_failed(&"tx-p".into());
            assert_eq!(told(&mut table, 2), BTreeSet::from([failed]));
            assert_eq!(table.core.moriio().untold, 0);
        } else {
            let dials = |want: &CoreOutput<_>| {
                let said = format!("{want:?}");
                said.contains("Dial") || said.contains("Send")
            };
            assert!(!table.wants.iter().any(dials), "{:?}", table.wants);
            assert_eq!(table.core.moriio().untold, 1);
        }
    }
}

#[test]
fn the_dp_rank_that_announces_is_the_one_that_is_written_to() {
    let mut peer = peer_of(1);
    (peer.dp_size, peer.shape.dp_size_local) = (2, 2);
    let leg = Arc::new(MoriioLeg { peer: Some(peer), ..MoriioLeg::default() });
    let mut table = prefill(Mode::Push).ready();
    arrive_at_prefill(&mut table, Mode::Push, leg.clone());
    table.handshake_of(0, &replies_of(1, 0x10_0000));
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&blocks(1)]);
    table.handshake_of(1, &replies_of(1, 0x20_0000));
    let flow = pushing(&mut table);
    let state = FlowState::Done { bytes: 1 };
    table.report(TransferReport::Flow { flow, state });
    let link = table.dialled(&notify(7302), LinkKind::Notify);
    table.up(link, LinkKind::Notify);
    assert_eq!(decode_at_decode(&[table.said(link)]), Ok(written()));

    // One that the decode does not have is written to by nobody.
    let mut table = prefill(Mode::Push).ready();
    arrive_at_prefill(&mut table, Mode::Push, leg);
    table.handshake_of(0, &replies_of(1, 0x10_0000));
    let link = table.accept(LinkKind::Notify);
    table.hear(link, &[&blocks(2)]);
    compute(&mut table);
    assert!(
        !table
            .wants
            .iter()
            .any(|want| { matches!(want, CoreOutput::Job(TransferJob::Write { .. })) })
    );
    assert_eq!(table.core.moriio().untold, 1);
}

#[test]
fn each_rank_is_asked_for_its_own_memory() {
    let mut table = prefill_of(2, Mode::Pull);
    let links = [0, 1].map(|rank| table.accept(LinkKind::handshake_of(rank)));
    for link in links {
        table.hear(link, &[REQUEST]);
    }
    assert!(table.wants.is_empty(), "{:?}", table.wants);
    let mut table = table.ready_of(2);
    for (rank, link) in links.into_iter().enumerate() {
        let reply: Vec<Vec<u8>> = vec![Vec::new(), table.replied(link)];
        let metadata = AgentMetadata::decode(&reply).unwrap();
        let data = 0x1000 * (rank as u64 + 1);
        assert_eq!(metadata.base_addrs, [data, data + 2048]);
        assert_eq!(metadata.block_len, 256);
        // A writer of 0.33.0 with another TP size needs them.
        let heads = vec![1, 16, 16, 256, 256, 16, 0];
        assert_eq!(metadata.layouts.heads, [0, 1].map(|layer| (name(layer), heads.clone())));
        assert_eq!(metadata.layouts.block_sizes, [0, 1].map(|layer| (name(layer), 16)));
        let memory = LayerMemory::decode(&[Vec::new(), table.replied(link)]).unwrap();
        assert_eq!(*memory.0[1].regions[0], *blob(data, 4096));
    }
    // Nothing else is said at the port of a rank, and there is no third.
    let link = table.accept(LinkKind::RankHandshake(1));
    table.hear(link, &[b"hello"]);
    table.violation();
    for channel in [LinkKind::RankHandshake(2), LinkKind::RankNotify(u16::MAX)] {
        let link = table.accept(channel);
        table.take("hang-up", |want| match want {
            CoreOutput::Control(kvferry_engine::core::command::ControlCommand::HangUp {
                link: on,
            }) if *on == link => Some(()),
            _ => None,
        });
    }
    assert!(links.iter().all(|link| link.0 & LinkId::INBOUND != 0));
}
