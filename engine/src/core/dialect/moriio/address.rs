//! Where an engine listens, and request ids that say it of both engines of a transfer.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::address::{ZmqAddress, embed};
//!
//! let prefill = ZmqAddress::parse("host:10.0.0.1,handshake:6301,notify:61005").unwrap();
//! assert_eq!(&*prefill.engine().0, "10.0.0.1:6301");
//! let request = embed(&prefill, &ZmqAddress { host: "10.0.0.2".into(), ..prefill.clone() }, 7)?;
//! assert!(request.0.starts_with(&format!("___prefill_addr_{prefill}___decode_addr_host:10.0.0.2")));
//! # Ok::<(), kvferry_engine::core::dialect::moriio::EncodeError>(())
//! ```

use super::EncodeError;
use crate::authority;
use crate::core::ids::{EngineId, Incarnation, RequestId, Role, push_hex};
use serde::{Deserialize, Serialize};
use std::fmt::{self, Write};
use std::sync::Arc;

/// Mark at which a request id with the addresses of its engines begins.
pub const PREFILL_MARK: &str = "___prefill_addr_";
const DECODE_MARK: &str = "___decode_addr_";

/// Host and base ports of an engine's listeners, `host:{ip},handshake:{port},notify:{port}` in
/// registrations and request ids.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ZmqAddress {
    /// Name or address; IPv6 without brackets.
    pub host: Arc<str>,
    /// Base port of the handshake listeners. As wide as 0.32.0 reads it; only a rank's port, see
    /// [`port`](super::ports::port), has to be one.
    pub handshake: i64,
    /// Base port of the notify listeners, likewise.
    pub notify: i64,
}

impl ZmqAddress {
    /// The address in the text: parts between commas, each split at its first colon, blanks
    /// trimmed; of equal keys the last counts, unknown ones are ignored.
    pub fn parse(text: &str) -> Option<ZmqAddress> {
        let (mut host, mut handshake, mut notify) = (None, None, None);
        for part in text.split(',') {
            let Some((key, value)) = part.split_once(':') else { continue };
            match key.trim() {
                "host" => host = Some(value.trim()),
                "handshake" => handshake = Some(value),
                "notify" => notify = Some(value),
                _ => {}
            }
        }
        let (handshake, notify) = (int(handshake?)?, int(notify?)?);
        Some(ZmqAddress { host: host?.into(), handshake, notify })
    }

    /// Name of the engine, the same for all its ranks.
    pub fn engine(&self) -> EngineId {
        format!("{}:{}", self.host, self.handshake).into()
    }

    /// Checks that 0.32.0 and the routers read the address back as it is meant.
    ///
    /// # Errors
    /// Characters that are in no host name or address, marks of a request id, or ports out of
    /// range.
    pub fn check(&self) -> Result<(), EncodeError> {
        let ports = 1..=i64::from(u16::MAX);
        let rule = if !authority::is_host(&self.host) {
            "host that is none"
        } else if self.host.as_bytes().windows(3).any(|part| part == b"___") {
            "host with the mark of a request id"
        } else if !ports.contains(&self.handshake) || !ports.contains(&self.notify) {
            "port out of range"
        } else {
            return Ok(());
        };
        Err(EncodeError { frame: "zmq_address", rule })
    }
}

impl fmt::Display for ZmqAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host:{},handshake:{},notify:{}", self.host, self.handshake, self.notify)
    }
}

/// The request id with the addresses of both engines; `unique` is of this client request only.
///
/// # Errors
/// Those of [`ZmqAddress::check`].
pub fn embed(
    prefill: &ZmqAddress,
    decode: &ZmqAddress,
    unique: u128,
) -> Result<RequestId, EncodeError> {
    prefill.check()?;
    decode.check()?;
    // Long enough for the marks, the numbers and the names of the parts, too: legs wait for it.
    let mut id = String::with_capacity(160 + prefill.host.len() + decode.host.len());
    // Writing to a String does not fail.
    let _ = write!(id, "{PREFILL_MARK}{prefill}{DECODE_MARK}{decode}_");
    push_hex(&mut id, unique);
    Ok(id.into())
}

/// Name of the part by which an address says that its engine speaks the native dialect, too. Peers
/// and routers of 0.32.0 ignore it and pass it on.
const NATIVE: &str = "kvferry";

/// The address of an engine that speaks the native dialect, too, in this incarnation of it.
pub fn with_incarnation(address: &ZmqAddress, incarnation: Incarnation) -> String {
    format!("{address},{NATIVE}:{:x}", incarnation.0)
}

/// The incarnation in the text of an address, if its engine speaks the native dialect.
pub fn incarnation_of(text: &str) -> Option<Incarnation> {
    let mut parts = text.rsplit(',').filter_map(|part| part.split_once(':'));
    let (_, incarnation) = parts.find(|(key, _)| key.trim() == NATIVE)?;
    u64::from_str_radix(incarnation.trim(), 16).ok().map(Incarnation)
}

/// The text in an engine's request id that should be its peer's address, if there is one: at a
/// prefill that of the decode, at a decode that of the prefill. Finds what the two patterns
/// of 0.32.0 find, in time in proportion to the id:
/// `___prefill_addr_(.+?)___decode_addr_` and `___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$`.
pub fn embedded_peer(role: Role, request: &RequestId) -> Option<&str> {
    match role {
        // A dot does not match the end of a line.
        Role::Decode => request.0.split('\n').find_map(prefill_part),
        // The end is also before one last line feed.
        Role::Prefill => {
            let id = request.0.strip_suffix('\n').unwrap_or(&request.0);
            decode_part(id.rsplit('\n').next()?)
        }
    }
}

fn prefill_part(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(PREFILL_MARK)?;
    let first = rest.chars().next()?.len_utf8();
    let end = first + rest[first..].find(DECODE_MARK)?;
    Some(&rest[..end])
}

fn decode_part(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(DECODE_MARK)?;
    let ends_here = |at: &usize| {
        let Some((hex, tail)) = rest.as_bytes()[at + 1..].split_at_checked(32) else {
            return false;
        };
        hex.iter().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f'))
            && matches!(tail, [] | [b'-', ..])
    };
    let end = rest.rmatch_indices('_').map(|(at, _)| at).filter(|at| *at > 0).find(ends_here)?;
    Some(&rest[..end])
}

/// The number that Python's `int()` makes of a text: blanks around it, a sign, and single
/// underscores between digits are allowed.
pub(super) fn int(text: &str) -> Option<i64> {
    let text = text.trim();
    let (sign, digits) = match text.as_bytes().first()? {
        b'-' => ("-", &text[1..]),
        b'+' => ("", &text[1..]),
        _ => ("", text),
    };
    let grouped =
        |group: &str| !group.is_empty() && group.bytes().all(|digit| digit.is_ascii_digit());
    if !digits.split('_').all(grouped) {
        return None;
    }
    format!("{sign}{}", digits.replace('_', "")).parse().ok()
}
