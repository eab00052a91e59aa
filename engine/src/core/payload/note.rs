//! What the payload cores of two hosts say to each other, and how they meet: over the connection
//! between the decode core of the host that gets and the prefill core of the host that puts, see
//! [`crate::core::message::Message::Payload`].

use super::io::{PayloadFailure, PayloadKey, PayloadStream};
use crate::core::error::Failure;
use crate::core::ids::{EngineId, Incarnation};
use crate::core::prompt_hash::{PromptHash, PromptHasher};
use crate::fabric::Endpoint;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Most bytes that the names of a payload which another host wants may have.
pub const REMOTE_NAMES_MAX: usize = 64 << 10;

/// A key of one deployment.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ScopedKey {
    pub deployment: Arc<str>,
    pub key: PayloadKey,
}

impl ScopedKey {
    /// Bytes of its names.
    pub fn text_len(&self) -> usize {
        self.deployment.len() + self.key.text_len()
    }

    /// Hash of the payload's key, which takes the place of a prompt's hash in the hand-over.
    pub(super) fn prompt_hash(&self) -> PromptHash {
        let PayloadKey { stream: PayloadStream { from, to, request }, chunk } = &self.key;
        let mut hasher = PromptHasher::default();
        for (name, part) in
            [("deployment", &self.deployment), ("from", from), ("to", to), ("request", request)]
        {
            hasher.part(name, part.as_bytes());
        }
        if let Some(chunk) = chunk {
            hasher.part("chunk", &chunk.to_le_bytes());
        }
        hasher.finish()
    }
}

/// What one payload core says to that of another host. A note is delivered in order, or the
/// connection ends.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PayloadNote {
    /// Who gets: hand it over when it is there. An `Offer` or a `Missing` follows.
    Want {
        place: ScopedKey,
        /// Number of the want, which is repeated in what answers it.
        want: u64,
    },
    /// Who gets: it is not wanted any more. An offer may be on its way.
    Unwant { place: ScopedKey },
    /// Who gets: no byte of the offered payload is read any more. Repeated in every connection until
    /// it is `Settled`.
    Done {
        number: u64,
        /// True if it has the payload. Else the payload is as if it had not been offered.
        got: bool,
    },
    /// Who puts: it is there for this host alone, and can be pulled under this number.
    Offer {
        place: ScopedKey,
        /// Grows; the same again in a later connection is the same offer.
        number: u64,
        bytes: u64,
        /// Of two payloads with one key the later has the larger number.
        generation: u64,
        /// True if it is a chunk of the stream that its key names.
        is_chunk: bool,
        /// The latest want that it answers.
        want: u64,
    },
    /// Who puts: it does not come.
    Missing { place: ScopedKey, failure: PayloadFailure, want: u64 },
    /// Who puts: nobody here has begun the stream. The want stays.
    Absent {
        place: ScopedKey,
        /// True if a process of the stage that puts it is there.
        has_stage: bool,
        want: u64,
    },
    /// Who puts: heard of the `Done`.
    Settled { number: u64 },
}

impl PayloadNote {
    /// True if the peer would wait for the note for ever. Others are said again if there is no room.
    pub(in crate::core) fn is_awaited(&self) -> bool {
        !matches!(self, PayloadNote::Want { .. } | PayloadNote::Done { .. })
    }

    /// Bytes of its texts.
    pub fn text_len(&self) -> usize {
        match self {
            PayloadNote::Want { place, .. }
            | PayloadNote::Unwant { place }
            | PayloadNote::Offer { place, .. }
            | PayloadNote::Absent { place, .. } => place.text_len(),
            PayloadNote::Missing { place, failure, .. } => {
                let text = match failure {
                    PayloadFailure::GivenUp(text)
                    | PayloadFailure::Overload(text)
                    | PayloadFailure::PeerGone(text)
                    | PayloadFailure::NotMoved(text)
                    | PayloadFailure::Unknown(text) => text.len(),
                    _ => 0,
                };
                place.text_len() + text
            }
            PayloadNote::Done { .. } | PayloadNote::Settled { .. } => 0,
        }
    }
}

/// What a payload core has a prefill or decode core do with its peers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DirectoryCall {
    /// A decode: get in touch with this prefill, and notice if it falls silent. One
    /// [`DirectoryNews::Met`] follows, or [`DirectoryNews::Parted`]; and that one also later, if the
    /// peer is lost before [`DirectoryCall::Leave`].
    Meet { peer: EngineId, control: Endpoint },
    /// A decode: nothing is expected of it any more.
    Leave { peer: EngineId },
    /// Tell a peer that was met. What cannot be told parts from it, or is [`DirectoryNews::Untold`].
    Tell { peer: EngineId, incarnation: Incarnation, note: PayloadNote },
}

/// What a prefill or decode core tells the payload core of its peers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DirectoryNews {
    /// The peer is there, with payloads.
    Met { peer: EngineId, incarnation: Incarnation },
    /// The connection is over, or there is none.
    Parted {
        peer: EngineId,
        /// Of the peer that was met; none if it was not.
        incarnation: Option<Incarnation>,
        failure: Failure,
    },
    /// A peer that was met says something.
    Told { peer: EngineId, incarnation: Incarnation, note: PayloadNote },
    /// A decode: there was no room for a [`PayloadNote::Want`] or [`PayloadNote::Done`] beside what
    /// the peer has not acknowledged. It is to be told again later.
    Untold { peer: EngineId, incarnation: Incarnation, note: PayloadNote },
}
