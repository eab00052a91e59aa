//! Messages of the local socket as MessagePack, and what is skipped of those of another version.

use super::proto::VersionRange;
use bytes::Bytes;
use kvferry_engine::core::enum_variants::{is_foreign, name_of};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io;

/// A message with the names of its fields.
pub(super) fn encode<T: Serialize>(message: &T) -> io::Result<Bytes> {
    rmp_serde::to_vec_named(message).map(Bytes::from).map_err(io::Error::other)
}

/// Appends a message with the names of its fields.
pub(super) fn encode_into<T: Serialize>(message: &T, out: &mut Vec<u8>) -> io::Result<()> {
    rmp_serde::encode::write_named(out, message).map_err(io::Error::other)
}

/// Reads a message that has to be understood.
pub(super) fn decode<T: DeserializeOwned>(frame: &[u8]) -> io::Result<T> {
    rmp_serde::from_slice(frame).map_err(io::Error::other)
}

/// Reads the messages of one connection.
#[derive(Debug)]
pub(super) struct MessageDecoder {
    /// The other side speaks a later version.
    is_later: bool,
    /// Messages that were not understood.
    skipped: u64,
}

impl MessageDecoder {
    /// For who speaks these versions.
    pub(super) fn new(other: VersionRange) -> MessageDecoder {
        MessageDecoder { is_later: other.newest > VersionRange::OWN.newest, skipped: 0 }
    }

    /// The other side says now which versions it speaks.
    pub(super) fn learn(&mut self, other: VersionRange) {
        self.is_later = other.newest > VersionRange::OWN.newest;
    }

    /// The message in a frame; none for one that there is in a later version only, which is
    /// skipped.
    ///
    /// # Errors
    /// What is no message.
    pub(super) fn read<T>(&mut self, frame: &[u8]) -> io::Result<Option<T>>
    where
        T: DeserializeOwned,
    {
        let why = match rmp_serde::from_slice(frame) {
            Ok(message) => return Ok(Some(message)),
            Err(why) => why,
        };
        if !is_foreign::<T>(frame) && !self.is_later {
            return Err(io::Error::other(why));
        }
        self.skipped += 1;
        if self.skipped == 1 {
            tracing::warn!(message = name_of(frame), %why, "skipped a message of a later version of kvferry");
        }
        Ok(None)
    }
}

#[cfg(test)]
mod samples;
#[cfg(test)]
mod tests;
