//! The handshake: a dialler asks once, the listener answers with two replies.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::handshake::{HandshakeRequest, REQUEST, decode_call};
//!
//! assert_eq!(decode_call(&[REQUEST]), Ok(HandshakeRequest::Metadata));
//! let error = decode_call(&[b"get_meta"]).unwrap_err();
//! assert_eq!((error.frame, &*error.rule), ("handshake", "unknown call"));
//! ```

use super::{Bin, DecodeError, error, only, pack};
use crate::core::dialect::msgpack::{MsgpackMap, MsgpackValue};
use serde::{Serialize, Serializer};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Asks for both replies; the only part of a frame.
pub const REQUEST: &[u8] = b"get_meta_msg";

/// Announces that the next frame is the id of a finished transfer. Sent by nobody, only logged by
/// 0.32.0.
const DONE_RECV: &[u8] = b"pop_done_recv";

/// What a handshake listener is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HandshakeRequest {
    /// Both replies are wanted.
    Metadata,
    /// The next frame of the same link is an id and of no consequence.
    DoneRecv,
}

/// What a listener is asked with this frame; `parts` are those after the sender's identity.
///
/// # Errors
/// Anything else, also the leading empty part of a REQ socket. Ends the listener of 0.32.0.
pub fn decode_call<P: AsRef<[u8]>>(parts: &[P]) -> Result<HandshakeRequest, DecodeError> {
    match only("handshake", parts)? {
        REQUEST => Ok(HandshakeRequest::Metadata),
        DONE_RECV => Ok(HandshakeRequest::DoneRecv),
        _ => Err(error("handshake", "unknown call")),
    }
}

/// First reply: a rank's MoRI engine and its KV cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AgentMetadata {
    /// `host:port` with the handshake port of rank 0, the same for all ranks of the engine.
    pub engine_id: Arc<str>,
    /// [`EngineDesc`](super::descriptor::MoriEngineDesc); for MoRI, these bytes and no others.
    pub engine: Arc<[u8]>,
    /// Address of each registered region, in the order of registration.
    pub base_addrs: Vec<u64>,
    /// Blocks per layer. Signed on the wire and not checked here.
    pub num_blocks: i64,
    /// Bytes of one block of the first attention layer. Signed on the wire and not checked here.
    pub block_len: i64,
    /// E.g. `FLASH_ATTN`.
    pub attn_backend: Arc<str>,
    /// How the blocks lie, which 0.33.0 and later say.
    pub layouts: CacheLayouts,
    /// The listener takes hellos of the native dialect, too; said by one more key, which vLLM
    /// ignores.
    pub native: bool,
}

/// How the blocks of each layer lie, by the names of the layers. A peer of 0.32.0 says nothing of
/// it, and ignores it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheLayouts {
    /// Of attention with heads: their number, tokens, bytes of a head and token, then the strides of
    /// blocks, heads and tokens in bytes, and where K, or K and V, begin in a block.
    pub heads: NamedNumbers,
    /// Of layers with a state, in numbers of their own.
    pub states: NamedNumbers,
    /// Of attention: tokens per block.
    pub block_sizes: Vec<(Arc<str>, i64)>,
}

/// Numbers of some layers, each named at most once.
pub type NamedNumbers = Vec<(Arc<str>, Vec<i64>)>;

/// A map that is left out if there is nothing in it.
struct NamedMap<'a, V>(&'a [(Arc<str>, V)]);

impl<V> NamedMap<'_, V> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<V: Serialize> Serialize for NamedMap<'_, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

#[derive(Serialize)]
struct MetadataWire<'a> {
    engine_id: &'a str,
    agent_metadata: Bin<'a>,
    kv_caches_base_addr: &'a [u64],
    num_blocks: i64,
    block_len: i64,
    attn_backend_name: &'a str,
    #[serde(skip_serializing_if = "NamedMap::is_empty")]
    kv_head_layouts: NamedMap<'a, Vec<i64>>,
    #[serde(skip_serializing_if = "NamedMap::is_empty")]
    mamba_state_layouts: NamedMap<'a, Vec<i64>>,
    #[serde(skip_serializing_if = "NamedMap::is_empty")]
    attention_block_sizes: NamedMap<'a, i64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    kvferry: bool,
}

impl AgentMetadata {
    /// True if the listener is of vLLM 0.33.0 or later, as what it says of its blocks shows: as a
    /// decode it takes [`write_failed`](super::notify::write_failed), and its own writers say how
    /// many they are. Unknown notices end the listeners of 0.32.0.
    pub fn is_of_0_33(&self) -> bool {
        self.layouts != CacheLayouts::default()
    }

    /// The two parts after the dialler's identity.
    pub fn encode(&self) -> [Vec<u8>; 2] {
        let wire = MetadataWire {
            engine_id: &self.engine_id,
            agent_metadata: Bin(&self.engine),
            kv_caches_base_addr: &self.base_addrs,
            num_blocks: self.num_blocks,
            block_len: self.block_len,
            attn_backend_name: &self.attn_backend,
            kv_head_layouts: NamedMap(&self.layouts.heads),
            mamba_state_layouts: NamedMap(&self.layouts.states),
            attention_block_sizes: NamedMap(&self.layouts.block_sizes),
            kvferry: self.native,
        };
        [Vec::new(), pack(&wire)]
    }

    /// The reply that the parts are. Types are as strict as in 0.32.0: nothing is converted.
    ///
    /// # Errors
    /// Names the field that is missing or of another type.
    pub fn decode<P: AsRef<[u8]>>(parts: &[P]) -> Result<AgentMetadata, DecodeError> {
        let frame = "agent_metadata";
        let map = MsgpackValue::only(reply(frame, parts)?).and_then(MsgpackMap::read);
        let map = map.map_err(|rule| error(frame, rule))?;
        let fields = || {
            let text = |name, rule| map.get(name).and_then(MsgpackValue::text).ok_or(rule);
            let int = |name, rule| map.get(name).and_then(MsgpackValue::number).ok_or(rule);
            let engine = map.get("agent_metadata").and_then(MsgpackValue::bin);
            let bases = map.get("kv_caches_base_addr").and_then(MsgpackValue::items);
            let bases =
                bases.and_then(|items| items.map(MsgpackValue::number).collect::<Option<_>>());
            Ok(AgentMetadata {
                engine_id: text("engine_id", "engine_id missing or no text")?.into(),
                engine: engine.ok_or("agent_metadata missing or no bytes")?.into(),
                base_addrs: bases.ok_or("kv_caches_base_addr missing or no addresses")?,
                num_blocks: int("num_blocks", "num_blocks missing or no number")?,
                block_len: int("block_len", "block_len missing or no number")?,
                attn_backend: text("attn_backend_name", "attn_backend_name missing or no text")?
                    .into(),
                layouts: layouts(&map)?,
                native: map.get("kvferry").is_some(),
            })
        };
        fields().map_err(|rule| error(frame, rule))
    }
}

fn layouts(map: &MsgpackMap<'_>) -> Result<CacheLayouts, &'static str> {
    let numbers = |value: MsgpackValue<'_>| value.items()?.map(MsgpackValue::number).collect();
    Ok(CacheLayouts {
        heads: named(map.get("kv_head_layouts"), numbers).ok_or("kv_head_layouts of no use")?,
        states: named(map.get("mamba_state_layouts"), numbers)
            .ok_or("mamba_state_layouts of no use")?,
        block_sizes: named(map.get("attention_block_sizes"), MsgpackValue::number)
            .ok_or("attention_block_sizes of no use")?,
    })
}

/// The entries of a map, which may be left out; none if one has another type or comes twice.
fn named<'a, V>(
    map: Option<MsgpackValue<'a>>,
    read: impl Fn(MsgpackValue<'a>) -> Option<V>,
) -> Option<Vec<(Arc<str>, V)>> {
    let Some(map) = map else { return Some(Vec::new()) };
    let mut names = BTreeSet::new();
    let entry = |(name, value): (MsgpackValue<'a>, MsgpackValue<'a>)| {
        let name = name.text().filter(|name| names.insert(*name))?;
        Some((name.into(), read(value)?))
    };
    map.entries()?.map(entry).collect()
}

/// One layer of the second reply.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerRegions {
    /// Name of the layer, e.g. `model.layers.0.self_attn.attn`.
    pub name: Arc<str>,
    /// A [`MemoryDesc`](super::descriptor::MoriMemoryDesc) per region: one of an attention layer,
    /// two (conv, ssm) of a state layer. For MoRI, these bytes and no others.
    pub regions: Vec<Arc<[u8]>>,
}

/// Second reply: the memory of each layer, in the order of registration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct LayerMemory(pub Vec<LayerRegions>);

impl Serialize for LayerMemory {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|layer| {
            (&layer.name, layer.regions.iter().map(|region| Bin(region)).collect::<Vec<_>>())
        }))
    }
}

impl LayerMemory {
    /// The two parts after the dialler's identity.
    pub fn encode(&self) -> [Vec<u8>; 2] {
        [Vec::new(), pack(self)]
    }

    /// The reply that the parts are.
    ///
    /// # Errors
    /// Not a map of lists of bytes, or a layer named twice: its memory would be a guess.
    pub fn decode<P: AsRef<[u8]>>(parts: &[P]) -> Result<LayerMemory, DecodeError> {
        let frame = "layer_memory";
        let map = MsgpackValue::only(reply(frame, parts)?).map_err(|rule| error(frame, rule))?;
        let entries = map.entries().ok_or_else(|| error(frame, "not a map"))?;
        let mut layers = Vec::new();
        let mut names = BTreeSet::new();
        for (name, regions) in entries {
            let name = name.text().ok_or_else(|| error(frame, "name that is no text"))?;
            let regions = regions.items().and_then(|items| {
                items.map(|region| region.bin().map(Arc::from)).collect::<Option<Vec<_>>>()
            });
            let regions = regions.ok_or_else(|| error(frame, "regions that are no bytes"))?;
            if !names.insert(name) {
                return Err(error(frame, "layer named twice"));
            }
            layers.push(LayerRegions { name: name.into(), regions });
        }
        Ok(LayerMemory(layers))
    }
}

/// What follows the empty part that leads every reply.
fn reply<'a, P: AsRef<[u8]>>(frame: &'static str, parts: &'a [P]) -> Result<&'a [u8], DecodeError> {
    match parts {
        [empty, part] if empty.as_ref().is_empty() => Ok(part.as_ref()),
        _ => Err(error(frame, "not an empty part and one more")),
    }
}
