//! What the `MoriTransferEngineConnector` of vLLM-Omni 0.30.0 says between two stages: a receiver
//! asks a sender whether it has a payload, and then to write it into the receiver's memory.
//!
//! Encoders write what 0.30.0 writes, byte for byte. Decoders take what it takes: keys in any order,
//! and keys that nobody knows. Its receiver takes any answer to a pull but `trans_done` for a failure,
//! and logs its bytes; so a failure says more here.
//!
//! ```
//! use kvferry_engine::core::dialect::omni_mori::{ConnectorCall, PullAnswer, QueryAnswer};
//!
//! let query = ConnectorCall::Query { request_id: "req-1_0_0@0_1".into() };
//! assert_eq!(ConnectorCall::decode(&[b"", &query.encode()[..]]), Ok(query));
//! assert_eq!(QueryAnswer::NotFound.encode(), b"info_not_found");
//! let why = PullAnswer::Failed("length 2, the payload has 500 bytes".into());
//! assert_eq!(why.encode(), b"trans_error: length 2, the payload has 500 bytes");
//! ```

use super::DecodeError;
use super::moriio::{Bin, error, pack};
use super::msgpack::{MsgpackMap, MsgpackValue};
use crate::text::printable;
use serde::Serialize;
use std::sync::Arc;

/// Longest message, in bytes. One with the descriptors of MoRI has some 360 and the request's id.
pub const MESSAGE_MAX: usize = 64 << 10;

/// Characters that are kept of why a peer refuses.
const WHY_MAX: usize = 256;

const QUERY: &[u8] = b"query_info";
const NOT_FOUND: &[u8] = b"info_not_found";
const DONE: &[u8] = b"trans_done";
const FAILED: &[u8] = b"trans_error";

/// Asks a sender to write a payload.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PullRequest {
    /// `{key}@{from_stage}_{to_stage}`.
    pub request_id: Arc<str>,
    /// The receiver's MoRI engine; for MoRI, these bytes and no others.
    pub engine: Arc<[u8]>,
    /// Its region; for MoRI, these bytes and no others.
    pub memory: Arc<[u8]>,
    /// Where in the region the payload is to be, in bytes.
    pub dst_offset: u64,
    /// Bytes of the payload, as the receiver knows.
    pub length: u64,
}

/// What a receiver asks a sender; it asks the next when this is answered.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ConnectorCall {
    Query { request_id: Arc<str> },
    Pull(PullRequest),
}

#[derive(Serialize)]
struct QueryWire<'a> {
    request_id: &'a str,
}

#[derive(Serialize)]
struct QueryAnswerWire<'a> {
    request_id: &'a str,
    data_size: u64,
    is_fast_path: bool,
}

#[derive(Serialize)]
struct PullWire<'a> {
    request_id: &'a str,
    engine_desc_packed: Bin<'a>,
    mem_desc_packed: Bin<'a>,
    dst_offset: u64,
    length: u64,
}

/// What follows the empty part that leads every message of a REQ socket and every answer to it.
fn only<'a, P: AsRef<[u8]>>(frame: &'static str, parts: &'a [P]) -> Result<&'a [u8], DecodeError> {
    match parts {
        [empty, part] if empty.as_ref().is_empty() => match part.as_ref() {
            part if part.len() > MESSAGE_MAX => Err(error(frame, "more bytes than a message has")),
            part => Ok(part),
        },
        _ => Err(error(frame, "not an empty part and one more")),
    }
}

fn map<'a>(frame: &'static str, bytes: &'a [u8]) -> Result<MsgpackMap<'a>, DecodeError> {
    MsgpackValue::only(bytes).and_then(MsgpackMap::read).map_err(|rule| error(frame, rule))
}

fn request_id(frame: &'static str, map: &MsgpackMap<'_>) -> Result<Arc<str>, DecodeError> {
    let text = map.get("request_id").and_then(MsgpackValue::text);
    text.map(Arc::from).ok_or_else(|| error(frame, "request_id missing or no text"))
}

fn bytes(map: &MsgpackMap<'_>, name: &str, rule: &'static str) -> Result<Arc<[u8]>, DecodeError> {
    let bytes = map.get(name).and_then(MsgpackValue::bin);
    bytes.map(Arc::from).ok_or_else(|| error("pull", rule))
}

fn number(
    frame: &'static str,
    map: &MsgpackMap<'_>,
    (name, rule): (&str, &'static str),
) -> Result<u64, DecodeError> {
    map.get(name).and_then(MsgpackValue::number).ok_or_else(|| error(frame, rule))
}

impl ConnectorCall {
    /// The part behind the empty one.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            ConnectorCall::Query { request_id } => {
                [QUERY, &pack(&QueryWire { request_id })].concat()
            }
            ConnectorCall::Pull(PullRequest { request_id, engine, memory, dst_offset, length }) => {
                pack(&PullWire {
                    request_id,
                    engine_desc_packed: Bin(engine),
                    mem_desc_packed: Bin(memory),
                    dst_offset: *dst_offset,
                    length: *length,
                })
            }
        }
    }

    /// The call that the parts after the sender's identity are.
    ///
    /// # Errors
    /// Names the field that is missing or of another type.
    pub fn decode<P: AsRef<[u8]>>(parts: &[P]) -> Result<ConnectorCall, DecodeError> {
        let part = only("call", parts)?;
        if let Some(body) = part.strip_prefix(QUERY) {
            let request_id = request_id("query", &map("query", body)?)?;
            return Ok(ConnectorCall::Query { request_id });
        }
        let map = map("pull", part)?;
        let offset = ("dst_offset", "dst_offset missing or no offset");
        Ok(ConnectorCall::Pull(PullRequest {
            request_id: request_id("pull", &map)?,
            engine: bytes(&map, "engine_desc_packed", "engine_desc_packed missing or no bytes")?,
            memory: bytes(&map, "mem_desc_packed", "mem_desc_packed missing or no bytes")?,
            dst_offset: number("pull", &map, offset)?,
            length: number("pull", &map, ("length", "length missing or no length"))?,
        }))
    }
}

/// What a sender says of a payload.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum QueryAnswer {
    /// It is not there, or not yet.
    NotFound,
    Found {
        request_id: Arc<str>,
        /// Bytes.
        data_size: u64,
        /// True if it is to be had as bytes, false if it was serialized.
        is_fast_path: bool,
    },
    /// The query cannot be answered. 0.30.0 does not say this, and takes it for "not yet".
    Failed(Arc<str>),
}

impl QueryAnswer {
    /// The part behind the empty one.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            QueryAnswer::NotFound => NOT_FOUND.to_vec(),
            QueryAnswer::Found { request_id, data_size, is_fast_path } => pack(&QueryAnswerWire {
                request_id,
                data_size: *data_size,
                is_fast_path: *is_fast_path,
            }),
            QueryAnswer::Failed(why) => failed(why),
        }
    }

    /// The answer that the parts are.
    ///
    /// # Errors
    /// Names the field that is missing or of another type.
    pub fn decode<P: AsRef<[u8]>>(parts: &[P]) -> Result<QueryAnswer, DecodeError> {
        let frame = "query answer";
        let part = only(frame, parts)?;
        if part == NOT_FOUND {
            return Ok(QueryAnswer::NotFound);
        }
        if let Some(why) = part.strip_prefix(FAILED) {
            return Ok(QueryAnswer::Failed(reason(why)));
        }
        let map = map(frame, part)?;
        let is_fast_path = match map.get("is_fast_path").and_then(MsgpackValue::cut) {
            Some(flag @ 0..=1) => flag == 1,
            _ => return Err(error(frame, "is_fast_path missing or no flag")),
        };
        Ok(QueryAnswer::Found {
            request_id: request_id(frame, &map)?,
            data_size: number(frame, &map, ("data_size", "data_size missing or no size"))?,
            is_fast_path,
        })
    }
}

/// How a pull ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PullAnswer {
    /// All bytes are in the receiver's memory.
    Done,
    /// They are not, and the reason if it is said; 0.30.0 says none.
    Failed(Arc<str>),
}

impl PullAnswer {
    /// The part behind the empty one.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            PullAnswer::Done => DONE.to_vec(),
            PullAnswer::Failed(why) => failed(why),
        }
    }

    /// The answer that the parts are.
    ///
    /// # Errors
    /// It is none.
    pub fn decode<P: AsRef<[u8]>>(parts: &[P]) -> Result<PullAnswer, DecodeError> {
        let part = only("pull answer", parts)?;
        match part.strip_prefix(FAILED) {
            Some(why) => Ok(PullAnswer::Failed(reason(why))),
            None if part == DONE => Ok(PullAnswer::Done),
            None => Err(error("pull answer", "unknown answer")),
        }
    }
}

fn failed(why: &str) -> Vec<u8> {
    let colon: &[u8] = if why.is_empty() { b"" } else { b": " };
    [FAILED, colon, why.as_bytes()].concat()
}

fn reason(bytes: &[u8]) -> Arc<str> {
    let text = String::from_utf8_lossy(bytes.strip_prefix(b": ").unwrap_or(bytes));
    printable(&text, WHY_MAX).into()
}
