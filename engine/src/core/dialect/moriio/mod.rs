//! MoRIIO, as the connector of that name in vLLM 0.32.0 speaks it.
//!
//! Encoders write what 0.32.0 writes, byte for byte, and take no message that ends one of its
//! listeners. Decoders take what it takes: keys in any order, and keys that nobody knows. What
//! ends a listener of 0.32.0 is here an error like others, and costs one frame. All rules in these
//! errors are fixed texts, so that drops can be counted by rule.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::notify::Release;
//! use std::num::NonZeroU16;
//!
//! // Between 3 ranks and 2 the wire has no release, so none can be made.
//! let error = Release::new("t".into(), NonZeroU16::new(3).unwrap(), 2).unwrap_err();
//! assert_eq!(error.to_string(), "TP sizes that do not divide in release");
//! ```

pub mod address;
pub mod blocks;
pub mod descriptor;
pub mod frame_kind;
pub mod handshake;
pub mod notify;
pub mod params;
pub mod ports;
pub mod registration;

pub use super::DecodeError;

use serde::{Serialize, Serializer};
use std::fmt;

/// Why a message may not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EncodeError {
    /// Name of the message.
    pub frame: &'static str,
    pub rule: &'static str,
}

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.rule, self.frame)
    }
}

impl std::error::Error for EncodeError {}

/// Bytes that are written as `bin`.
pub(super) struct Bin<'a>(pub(super) &'a [u8]);

impl Serialize for Bin<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(self.0)
    }
}

/// The bytes of a value whose structs are maps with keys in the order of declaration.
pub(super) fn pack(value: &impl Serialize) -> Vec<u8> {
    rmp_serde::to_vec_named(value).expect("a Vec takes every value of known length")
}

pub(super) fn error(frame: &'static str, rule: &'static str) -> DecodeError {
    DecodeError { frame, rule: rule.into() }
}

/// The only part of a frame.
fn only<'a, P: AsRef<[u8]>>(frame: &'static str, parts: &'a [P]) -> Result<&'a [u8], DecodeError> {
    match parts {
        [part] => Ok(part.as_ref()),
        _ => Err(error(frame, "not one part")),
    }
}
