//! The frames that peers say, well formed.

use super::step::{FuzzFrameSpec, NativeMessageSpec};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::channel::capability;
use kvferry_engine::core::dialect::moriio::descriptor::{DescLayout, MoriMemoryDesc};
use kvferry_engine::core::dialect::moriio::handshake::{
    AgentMetadata, CacheLayouts, LayerMemory, LayerRegions, REQUEST,
};
use kvferry_engine::core::dialect::moriio::notify::{
    Release, RemoteBlocks, write_done, write_failed,
};
use kvferry_engine::core::dialect::native::{ConnectionHeader, Frame, VERSION, VERSION_MIN};
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{Attempt, BlockId, Incarnation, RankSet, TransferId, TransferKey};
use kvferry_engine::core::layout::{
    BlockList, Geometry, HeadSlots, KvGroup, LayerLayout, RankLayout,
};
use kvferry_engine::core::message::{AttemptTag, Hello, Message, Mode, Registration, Role};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::fabric::{Address, RegionDesc};
use std::num::NonZeroU16;
use std::sync::Arc;

/// Hash of the prompts of all requests.
pub(super) const PROMPT_HASH: PromptHash = PromptHash([7, 7]);
pub(super) const LAYERS: u16 = 2;
pub(super) const BLOCKS: u32 = 32;
pub(super) const BLOCK_TOKENS: u32 = 16;
/// Bytes of a block: 2 heads, 16 tokens, 8 elements of 2 bytes.
const BLOCK: u64 = 2 * BLOCK_TOKENS as u64 * 8 * 2;
const LAYER: u64 = BLOCK * BLOCKS as u64;
/// The engine whose core is tested, and its incarnation.
pub(super) const OWN: (&str, Incarnation) = ("10.0.0.1:6300", Incarnation(5));

pub(super) fn geometry() -> Geometry {
    let group = KvGroup::full(BLOCK_TOKENS, 0..LAYERS);
    Geometry::new("m", 2, vec![group])
}

pub(super) fn layer_name(layer: u16) -> Arc<str> {
    format!("model.layers.{layer}.self_attn.attn").into()
}

fn region(data: u64) -> Vec<u8> {
    let size = LAYER * u64::from(LAYERS);
    let desc =
        MoriMemoryDesc { engine_key: "k".into(), data, size, loc: 1, ..MoriMemoryDesc::default() };
    desc.encode(DescLayout::V1_2_2)
}

/// The KV of the only rank, both layers in one region that begins at `data`.
pub(super) fn layout(data: u64) -> RankLayout {
    let layer = |layer: u16| LayerLayout {
        region: 0,
        base: u64::from(layer) * LAYER,
        shape: [BLOCKS, 2, BLOCK_TOKENS, 8],
        stride: [256, 128, 8, 1],
        element: 2,
        slots: HeadSlots::Fused,
    };
    RankLayout {
        rank: 0,
        address: Address((*b"an engine").into()),
        regions: vec![(RegionDesc(region(data).into()), LAYER * u64::from(LAYERS))],
        layers: (0..LAYERS).map(layer).collect(),
    }
}

/// What vLLM answers to a handshake, its memory at `data`.
pub(super) fn metadata(data: u64, num_blocks: i64) -> AgentMetadata {
    AgentMetadata {
        engine_id: "10.0.0.9:6301".into(),
        engine: (*b"its engine").into(),
        base_addrs: (0..LAYERS).map(|layer| data + u64::from(layer) * LAYER).collect(),
        num_blocks,
        block_len: BLOCK as i64,
        attn_backend: "CPU_ATTN".into(),
        layouts: CacheLayouts {
            // One of vLLM 0.33.0, or of 0.32.0, which says nothing of it.
            block_sizes: (0..LAYERS * u16::from(num_blocks % 3 == 0))
                .map(|layer| (layer_name(layer), i64::from(BLOCK_TOKENS)))
                .collect(),
            ..CacheLayouts::default()
        },
        native: num_blocks % 2 == 1,
    }
}

pub(super) fn memory(data: u64, layers: u16) -> LayerMemory {
    let region: Arc<[u8]> = region(data).into();
    let layer = |layer| LayerRegions { name: layer_name(layer), regions: vec![region.clone()] };
    LayerMemory((0..layers).map(layer).collect())
}

pub(super) fn transfer(number: u8) -> TransferId {
    format!("tx-{}", number % 6).into()
}

/// The newest version that a peer speaks in this incarnation.
pub(super) fn version(incarnation: u64) -> u16 {
    if incarnation.is_multiple_of(2) { VERSION_MIN } else { VERSION }
}

/// The hello of a peer with this role; `odd` other than 0 makes it one that does not fit.
pub(super) fn hello(
    role: Role,
    peer: u8,
    (incarnation, session): (u64, u64),
    odd: u8,
) -> Box<Hello> {
    let mut geometry = geometry();
    let mut ranks = vec![layout(0x10_0000)];
    match odd % 16 {
        1 => geometry.kv_heads = 3,
        2 => geometry.tp = 2,
        3 => ranks.clear(),
        4 => ranks[0].layers[0].stride = [u64::MAX; 4],
        5 => ranks[0].layers[0].shape = [u32::MAX, 2, u32::MAX, 8],
        6 => geometry.groups[0].block_tokens = 0,
        7 => geometry.groups.clear(),
        _ => {}
    }
    Box::new(Hello {
        version: if odd % 16 == 8 { 9 } else { version(incarnation) },
        version_min: if odd % 16 == 8 { 9 } else { 1 },
        engine: format!("peer-{}", peer % 4).into(),
        incarnation: Incarnation(incarnation),
        session,
        expects: OWN.0.into(),
        role,
        capabilities: capability::PUSH | capability::PULL,
        fingerprint: geometry.fingerprint(),
        geometry,
        ranks,
    })
}

/// A number that a peer says: the last of a byte are the last of 32 bits.
pub(super) fn said(number: u8) -> u32 {
    if number < 224 { number.into() } else { u32::MAX - u32::from(u8::MAX - number) }
}

/// The same of 64 bits.
pub(super) fn said_long(number: u8) -> u64 {
    if number < 224 { number.into() } else { u64::MAX - u64::from(u8::MAX - number) }
}

/// A native message; tags that the core used are in `known`.
pub(super) fn message(saying: &NativeMessageSpec, known: &[AttemptTag]) -> Message {
    let tag = saying.tag.and_then(|at| known.get(usize::from(at) % known.len().max(1))).cloned();
    let tag = tag.unwrap_or_else(|| AttemptTag {
        key: TransferKey { id: transfer(saying.transfer), prompt: 0 },
        sibling: u32::from(saying.sibling % 4),
        attempt: Attempt(said(saying.attempt)),
    });
    let (tokens, count) = (said(saying.tokens), said(saying.from));
    let ids = saying.blocks.iter().map(|id| said(*id)).collect();
    let blocks = vec![BlockList { first: said(saying.first), ids }];
    let ranks = RankSet(said_long(saying.ranks));
    let lease = Nanos(saying.time);
    let prompt_hash = if saying.quiet { PROMPT_HASH } else { PromptHash([1, 2]) };
    match saying.kind % 11 {
        0 => Message::Ask { tag, tokens, prompt_hash },
        1 => Message::Announce { tag, tokens, from: count, blocks, verify: None },
        2 => Message::Pull { tag, tokens, prompt_hash, verify: None },
        3 => Message::Grant { tag, tokens, blocks, lease, digest: None },
        4 => Message::Delivered { tag, ranks, tokens, digest: None },
        5 => Message::Release { tag, ranks },
        6 => Message::Cancel { tag },
        7 => Message::Ended { tag, failure: Failure::Stalled, quiet: saying.quiet },
        8 => Message::Begun { tag },
        9 => Message::Renew { tag, count },
        _ => Message::Renewed { tag, count, lease },
    }
}

/// The parts of words that are the same over every link; none for words of the native dialect.
pub(super) fn moriio(words: &FuzzFrameSpec) -> Option<Vec<Vec<u8>>> {
    let part = match words {
        FuzzFrameSpec::Blocks { transfer: id, ids, rank } => {
            let ids = vec![ids.iter().map(|id| BlockId(u32::from(*id))).collect()];
            let blocks = RemoteBlocks::new(None, transfer(*id), ids, u16::from(*rank));
            blocks.ok()?.encode()
        }
        FuzzFrameSpec::Released { transfer: id, tp } => {
            let release = Release::new(transfer(*id), NonZeroU16::new(*tp)?, 0);
            release.ok()?.encode()
        }
        FuzzFrameSpec::Written { transfer: id } if *id < 128 => write_done(&transfer(*id)),
        FuzzFrameSpec::Written { transfer: id } => write_failed(&transfer(*id)),
        FuzzFrameSpec::Bare { transfer: id } => transfer(*id).0.as_bytes().to_vec(),
        FuzzFrameSpec::Call => REQUEST.to_vec(),
        FuzzFrameSpec::Metadata { shift, blocks } => {
            let data = 0x10_0000 + u64::from(*shift) / 2;
            return Some(metadata(data, i64::from(*blocks)).encode().into());
        }
        FuzzFrameSpec::Memory { shift, layers } => {
            let data = 0x10_0000 + u64::from(*shift) / 2;
            return Some(memory(data, u16::from(*layers % 4)).encode().into());
        }
        _ => return None,
    };
    Some(vec![part])
}

/// One native frame of each kind, as connections of this version have them.
pub(crate) fn samples(version: u16) -> Vec<Frame> {
    let envelope = ConnectionHeader { version, from: Incarnation(7), to: OWN.1, session: 1 };
    let saying = NativeMessageSpec {
        kind: 0,
        tag: None,
        transfer: 1,
        sibling: 1,
        attempt: 1,
        tokens: 40,
        from: 16,
        first: 0,
        blocks: vec![1, 2, 200],
        ranks: 1,
        time: 9_000_000_000,
        quiet: true,
    };
    let data = (0..11).map(|kind| {
        let message = message(&NativeMessageSpec { kind, ..saying.clone() }, &[]);
        Frame::Data { envelope, seq: u64::from(kind), message }
    });
    let hello = hello(Role::Decode, 0, (7, 1), 0);
    let registration = Registration::new(
        OWN.0.into(),
        OWN.1,
        Role::Decode,
        Mode::Pull,
        "10.0.0.1:80".into(),
        "tcp://10.0.0.1:6300".into(),
    );
    let others = [
        Frame::Hello(hello.clone()),
        Frame::Welcome(hello),
        Frame::Refuse { envelope, engine: OWN.0.into(), reason: "full".into() },
        Frame::Ack { envelope, next: 1 },
        Frame::Probe { envelope },
        Frame::Bye { envelope },
        Frame::Register(registration),
        Frame::Abandon { keys: vec![TransferKey { id: transfer(1), prompt: 0 }] },
    ];
    data.chain(others).collect()
}
