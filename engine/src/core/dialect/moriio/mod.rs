//! MoRIIO, as the connector of that name in vLLM 0.32.0 speaks it.
//!
//! Encoders write what 0.32.0 writes, byte for byte, and take no message that ends one of its
//! listeners. Decoders take what it takes: keys in any order, and keys that nobody knows. What
//! ends a listener of 0.32.0 is here an error like others, and costs one frame. All rules in these
//! errors are fixed texts, so that drops can be counted by rule.

pub mod address;
pub mod blocks;
pub mod ports;

use std::fmt;

/// Why a message may not be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Unsendable {
    /// Name of the message.
    pub frame: &'static str,
    /// What is wrong.
    pub rule: &'static str,
}

impl fmt::Display for Unsendable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in {}", self.rule, self.frame)
    }
}

impl std::error::Error for Unsendable {}
