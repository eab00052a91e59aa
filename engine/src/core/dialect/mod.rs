//! Typed frames and their bytes.
//!
//! ```
//! use kvferry_engine::core::dialect::moriio::frame_kind::form;
//! use kvferry_engine::core::dialect::moriio::notify::write_done;
//! use kvferry_engine::core::dialect::native::{Frame, encode, peek};
//!
//! // What comes says by its first bytes which dialect it is of.
//! let frame = encode(&Frame::Abandon { keys: Vec::new() });
//! assert!(peek(&frame).is_some() && form(&[frame]).is_none());
//! let notice = write_done(&"t".into());
//! assert!(peek(&notice).is_none() && form(&[notice]).is_some());
//! ```

#[cfg(test)]
mod golden;
mod kind;
pub mod moriio;
mod msgpack;
pub mod native;
pub mod omni_mori;
mod skim;
mod unpack;

use crate::core::error::PeerViolation;
use std::fmt;
use std::sync::Arc;

/// Why bytes are no frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeError {
    /// Name of the message, if the header says it.
    pub frame: &'static str,
    pub rule: Arc<str>,
}

impl DecodeError {
    /// The violation, with the name of who sent the bytes.
    pub fn violation(&self, peer: &str) -> PeerViolation {
        PeerViolation { peer: peer.into(), frame: self.frame.into(), rule: self.rule.clone() }
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.rule, self.frame)
    }
}

impl std::error::Error for DecodeError {}
