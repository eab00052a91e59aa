//! What engines tell each other on the notify channel: one part each, one way, unanswered.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::notify::{
//!     ReceivedDecodeNotice, RemoteBlocks, decode_at_decode, write_failed,
//! };
//! use kvferry_engine::core::ids::BlockId;
//!
//! let failed = ReceivedDecodeNotice::Failed("t".into());
//! assert_eq!(decode_at_decode(&[write_failed(&"t".into())]), Ok(failed));
//! // A prefill is told where to write; that is nothing that a decode takes.
//! let blocks = RemoteBlocks::new(None, "t".into(), vec![vec![BlockId(3)]], 0)?;
//! assert!(decode_at_decode(&[blocks.encode()]).is_err());
//! # Ok::<(), kvferry_engine::core::dialect::moriio::EncodeError>(())
//! ```

use super::address::int;
use super::ports::expected_acks;
use super::{DecodeError, EncodeError, error, only, pack};
use crate::core::dialect::msgpack::{MsgpackItems, MsgpackMap, MsgpackValue};
use crate::core::ids::{BlockId, RequestId, Role, TransferId};
use serde::Serialize;
use std::num::NonZeroU16;

/// A decode tells a prefill rank where to write; WRITE mode.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct RemoteBlocks {
    request: Option<RequestId>,
    transfer: TransferId,
    blocks: Vec<Vec<BlockId>>,
    decode_rank: u16,
}

impl RemoteBlocks {
    /// Blocks of each KV group in the order of the prompt; 0.32.0 knows lists of one group only.
    /// `request` is the decode's name of the request, which 0.32.0 sends and does not need;
    /// `decode_rank` is its global DP rank.
    ///
    /// # Errors
    /// No blocks: that ends the listener of 0.32.0. A [`Release`] says that nothing is needed.
    pub fn new(
        request: Option<RequestId>,
        transfer: TransferId,
        blocks: Vec<Vec<BlockId>>,
        decode_rank: u16,
    ) -> Result<RemoteBlocks, EncodeError> {
        // Both versions look at the first list.
        if blocks.first().is_none_or(Vec::is_empty) {
            return Err(EncodeError { frame: "remote_blocks", rule: "no blocks" });
        }
        Ok(RemoteBlocks { request, transfer, blocks, decode_rank })
    }

    /// The request as the decode names it.
    pub fn request(&self) -> Option<&RequestId> {
        self.request.as_ref()
    }

    pub fn transfer(&self) -> &TransferId {
        &self.transfer
    }

    /// Blocks of the decode, those of each group; at least one of the first.
    pub fn blocks(&self) -> &[Vec<BlockId>] {
        &self.blocks
    }

    /// Global DP rank of the decode.
    pub fn decode_rank(&self) -> u16 {
        self.decode_rank
    }

    /// The bytes of the only part.
    pub fn encode(&self) -> Vec<u8> {
        pack(&RemoteBlocksWire {
            req_id: self.request.as_ref(),
            transfer_id: &self.transfer,
            block_notify_list: match &self.blocks[..] {
                [flat] => BlockListsWire::Flat(flat),
                groups => BlockListsWire::Groups(groups),
            },
            decode_rank: self.decode_rank,
            r#type: "remote_blocks",
        })
    }
}

/// A decode needs a prefill rank's blocks no longer, or never did.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Release {
    transfer: TransferId,
    consumer_tp: NonZeroU16,
}

impl Release {
    /// The release of a decode with `consumer_tp` TP ranks for a prefill with `producer_tp`, 0 if
    /// that is not known.
    ///
    /// # Errors
    /// Sizes from which 0.32.0 cannot tell how many releases to wait for: it fails there.
    pub fn new(
        transfer: TransferId,
        consumer_tp: NonZeroU16,
        producer_tp: u16,
    ) -> Result<Release, EncodeError> {
        let producer_tp = if producer_tp == 0 { consumer_tp.get() } else { producer_tp };
        match expected_acks(producer_tp, consumer_tp.get()) {
            Ok(_) => Ok(Release { transfer, consumer_tp }),
            Err(_) => Err(EncodeError { frame: "release", rule: "TP sizes that do not divide" }),
        }
    }

    pub fn transfer(&self) -> &TransferId {
        &self.transfer
    }

    /// TP size of the decode, from which a prefill derives how many releases it waits for, see
    /// [`expected_acks`].
    pub fn consumer_tp(&self) -> NonZeroU16 {
        self.consumer_tp
    }

    /// The bytes of the only part.
    pub fn encode(&self) -> Vec<u8> {
        let consumer_tp_size = Some(self.consumer_tp);
        pack(&TypedWire { r#type: "release", transfer_id: &self.transfer, consumer_tp_size })
    }
}

#[derive(Serialize)]
struct RemoteBlocksWire<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    req_id: Option<&'a RequestId>,
    transfer_id: &'a TransferId,
    block_notify_list: BlockListsWire<'a>,
    decode_rank: u16,
    r#type: &'static str,
}

#[derive(Serialize)]
#[serde(untagged)]
enum BlockListsWire<'a> {
    Flat(&'a [BlockId]),
    Groups(&'a [Vec<BlockId>]),
}

#[derive(Serialize)]
struct TypedWire<'a> {
    r#type: &'static str,
    transfer_id: &'a TransferId,
    #[serde(skip_serializing_if = "Option::is_none")]
    consumer_tp_size: Option<NonZeroU16>,
}

/// The word that everything of this transfer is written, for a decode rank: the bytes of the only
/// part.
pub fn write_done(transfer: &TransferId) -> Vec<u8> {
    pack(&TypedWire { r#type: "write_done", transfer_id: transfer, consumer_tp_size: None })
}

/// The word that nothing of this transfer will be written any more, for a decode rank: the bytes of
/// the only part. It ends a listener of 0.32.0, see
/// [`is_of_0_33`](super::handshake::AgentMetadata::is_of_0_33).
pub fn write_failed(transfer: &TransferId) -> Vec<u8> {
    pack(&TypedWire { r#type: "write_failed", transfer_id: transfer, consumer_tp_size: None })
}

/// What the notify listener of a prefill rank hears.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReceivedPrefillNotice {
    RemoteBlocks(RemoteBlocks),
    /// The blocks are free. Also a transfer id without anything around it, which 0.32.0 takes for
    /// the release of a decode of TP size 1, and does not send.
    Release(Release),
    /// Blocks or a rank that are none. 0.32.0 takes such an announcement and fails later; here it
    /// costs the transfer that it names.
    Unusable {
        transfer: TransferId,
        rule: &'static str,
    },
}

/// What a prefill rank hears with this frame; `parts` are those after the sender's identity.
///
/// # Errors
/// Names the message and the rule. Most of these end the listener of 0.32.0.
pub fn decode_at_prefill<P: AsRef<[u8]>>(
    parts: &[P],
) -> Result<ReceivedPrefillNotice, DecodeError> {
    match read(Role::Prefill, parts)? {
        NoticeBody::Text(transfer) => {
            Ok(ReceivedPrefillNotice::Release(Release { transfer, consumer_tp: NonZeroU16::MIN }))
        }
        NoticeBody::Typed("release", map) => release(&map).map(ReceivedPrefillNotice::Release),
        NoticeBody::Typed(_, map) => remote_blocks(&map),
    }
}

/// What the notify listener of a decode rank hears.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ReceivedDecodeNotice {
    /// A writer is done; the rank has its KV when so many are. Of 0.32.0 it is always one.
    Written { transfer: TransferId, writers: NonZeroU16 },
    /// Nothing will be written; from 0.33.0.
    Failed(TransferId),
}

/// What a decode rank hears with this frame; `parts` are those after the sender's identity.
///
/// # Errors
/// Names the message and the rule. Most of these end the listener of 0.32.0.
pub fn decode_at_decode<P: AsRef<[u8]>>(parts: &[P]) -> Result<ReceivedDecodeNotice, DecodeError> {
    match read(Role::Decode, parts)? {
        NoticeBody::Text(transfer) => {
            Ok(ReceivedDecodeNotice::Written { transfer, writers: NonZeroU16::MIN })
        }
        NoticeBody::Typed(kind @ "write_failed", map) => {
            transfer_of(kind, &map).map(ReceivedDecodeNotice::Failed)
        }
        NoticeBody::Typed(kind, map) => {
            let transfer = transfer_of(kind, &map)?;
            let writers = count(&map, "num_writers");
            let writers = writers.ok_or_else(|| error(kind, "num_writers is no count"))?;
            Ok(ReceivedDecodeNotice::Written { transfer, writers })
        }
    }
}

enum NoticeBody<'a> {
    Text(TransferId),
    /// A map of a type that the role is told.
    Typed(&'static str, MsgpackMap<'a>),
}

fn read<'a, P: AsRef<[u8]>>(role: Role, parts: &'a [P]) -> Result<NoticeBody<'a>, DecodeError> {
    let frame = only("notify", parts)?;
    let first = *frame.first().ok_or_else(|| error("notify", "empty"))?;
    let map = if starts_map(first) {
        MsgpackValue::only(frame).and_then(MsgpackMap::read)
    } else {
        Err("neither map nor text")
    };
    let map = match (map, std::str::from_utf8(frame)) {
        (Ok(map), _) => map,
        (Err(_), Ok(text)) => return Ok(NoticeBody::Text(text.into())),
        (Err(rule), Err(_)) => return Err(error("notify", rule)),
    };
    let kind = match map.get("type").filter(|kind| !kind.is_nil()) {
        Some(kind) => kind.text(),
        None => map.get("req_id").map(|_| "remote_blocks"),
    };
    let (kind, receiver) = match kind {
        Some("remote_blocks") => ("remote_blocks", Role::Prefill),
        Some("release") => ("release", Role::Prefill),
        Some("write_done") => ("write_done", Role::Decode),
        Some("write_failed") => ("write_failed", Role::Decode),
        Some(_) => return Err(error("notify", "unknown type")),
        None => return Err(error("notify", "no type")),
    };
    if role == receiver {
        Ok(NoticeBody::Typed(kind, map))
    } else {
        Err(error(kind, "told to the wrong role"))
    }
}

/// True for the first byte of a map; a text may start with those of long ones.
pub(super) fn starts_map(byte: u8) -> bool {
    matches!(byte, 0x80..=0x8f | 0xde | 0xdf)
}

fn transfer_of(kind: &'static str, map: &MsgpackMap<'_>) -> Result<TransferId, DecodeError> {
    let id = map.get("transfer_id").ok_or_else(|| error(kind, "no transfer_id"))?;
    let text = id.text_or_bin().ok_or_else(|| error(kind, "transfer_id is no text"))?;
    Ok(text.into())
}

/// The number of this name as Python's `int()` makes it, 1 if it is left out; none if it is no count.
fn count(map: &MsgpackMap<'_>, name: &str) -> Option<NonZeroU16> {
    let Some(size) = map.get(name) else { return Some(NonZeroU16::MIN) };
    let size: i64 = size.number().or_else(|| size.cut()).or_else(|| int(size.text_or_bin()?))?;
    u16::try_from(size).ok().and_then(NonZeroU16::new)
}

fn release(map: &MsgpackMap<'_>) -> Result<Release, DecodeError> {
    let transfer = transfer_of("release", map)?;
    let consumer_tp = count(map, "consumer_tp_size");
    let consumer_tp = consumer_tp.ok_or_else(|| error("release", "consumer_tp_size is no size"))?;
    Ok(Release { transfer, consumer_tp })
}

/// Ids, or lists of ids as from 0.33.0, which looks at the first to tell them apart.
fn block_lists(items: MsgpackItems<'_>) -> Option<Vec<Vec<BlockId>>> {
    let items: Vec<MsgpackValue<'_>> = items.collect();
    let flat = |ids: &mut dyn Iterator<Item = MsgpackValue<'_>>| {
        ids.map(|id| id.number().map(BlockId)).collect::<Option<Vec<_>>>()
    };
    match items.first().map(|first| first.items().is_some()) {
        Some(true) => items.into_iter().map(|list| flat(&mut list.items()?)).collect(),
        _ => flat(&mut items.into_iter()).map(|list| vec![list]),
    }
}

fn remote_blocks(map: &MsgpackMap<'_>) -> Result<ReceivedPrefillNotice, DecodeError> {
    let kind = "remote_blocks";
    let transfer = transfer_of(kind, map)?;
    let list = map.get("block_notify_list").filter(|list| !list.is_nil());
    let list = list.ok_or_else(|| error(kind, "no block_notify_list"))?;
    let Some(items) = list.items() else {
        return Ok(ReceivedPrefillNotice::Unusable {
            transfer,
            rule: "block_notify_list is no list",
        });
    };
    let Some(blocks) = block_lists(items) else {
        return Ok(ReceivedPrefillNotice::Unusable { transfer, rule: "block id that is none" });
    };
    let Some(decode_rank) = map.get("decode_rank").map_or(Some(0), |rank| rank.number()) else {
        return Ok(ReceivedPrefillNotice::Unusable { transfer, rule: "decode_rank is no rank" });
    };
    let request = map.get("req_id").and_then(|id| id.text()).map(RequestId::from);
    RemoteBlocks::new(request, transfer, blocks, decode_rank)
        .map(ReceivedPrefillNotice::RemoteBlocks)
        .map_err(|unsendable| error(kind, unsendable.rule))
}
