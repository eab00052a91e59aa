//! Why things end without success.
//!
//! ```
//! use kvferry_engine::core::error::Failure;
//!
//! // The kind is for metrics, the text for people.
//! let failure = Failure::HelloRefused("geometry of d is damaged".into());
//! assert_eq!(failure.kind(), "hello-refused");
//! assert!(failure.to_string().contains("geometry of d is damaged"));
//! // Another pair of engines may do better.
//! assert!(failure.is_of_pair() && !Failure::Cancelled.is_of_pair());
//! ```

use super::ids::EngineId;
use super::layout::Mismatch;
use super::prompt_hash::PromptHash;
use crate::fabric::{Endpoint, FabricError, LinkId, Refused};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// Why a transfer ended without success, as told to peers, engines and people.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Failure {
    /// The receiver, its client or the router gave up.
    Cancelled,
    /// The prefill request was aborted or failed on its engine.
    PrefillEnded,
    /// An operation failed and its retries did too.
    Fabric(FabricError),
    /// The data plane refused a call for good.
    Refused(Refused),
    /// The peer did not answer in time.
    PeerSilent,
    PeerRestarted,
    /// The peer could not be reached.
    Unreachable,
    /// The two engines do not fit.
    Mismatch(Mismatch),
    /// The peer refused the hello.
    HelloRefused(Arc<str>),
    /// The prefill knows no such transfer, or no longer.
    UnknownTransfer,
    /// The lease ended before the read was complete.
    LeaseExpired,
    /// The prefill preempted the prompt and did not come back to it in time.
    Preempted,
    /// Nobody fetched the KV in time.
    NotFetched,
    /// The key is in use.
    DuplicateKey,
    /// No progress within the deadline.
    Stalled,
    /// A bounded table is full.
    Overload,
    /// The peer broke the protocol.
    Violation(PeerViolation),
    /// The engine or a worker rank behind the core is gone.
    EngineGone,
    /// The leg is for another incarnation of this engine.
    OtherLife,
    /// The KV that arrived is not that of the prefill; says where.
    Corrupt(Arc<str>),
    /// The two legs have different prompts: the KV of one cannot serve the other.
    PromptMismatch {
        /// Hash of the decode's prompt.
        decode: PromptHash,
        /// Hash of the prefill's.
        prefill: PromptHash,
    },
    /// What a peer of a later version calls by this name.
    Unknown(Arc<str>),
}

/// Longest text of a failure in a registration, in characters.
const CLIPPED_MAX: usize = 256;

/// What a peer does that does not speak the native dialect.
const SPEAKS_MORIIO: &str = " speaks only MoRIIO";

/// Why nothing of the native dialect is said to a peer.
pub(super) fn speaks_only_moriio(engine: &EngineId) -> Failure {
    Failure::HelloRefused(format!("{engine}{SPEAKS_MORIIO}").into())
}

impl Failure {
    /// True of a peer to which nothing of the native dialect is said; see [`speaks_only_moriio`].
    pub(super) fn is_of_moriio(&self) -> bool {
        matches!(self, Failure::HelloRefused(why) if why.ends_with(SPEAKS_MORIIO))
    }

    pub(super) fn mismatch(why: impl Into<Arc<str>>) -> Failure {
        Failure::Mismatch(Mismatch(why.into()))
    }

    /// The first version of the native dialect that has it.
    pub(super) fn since(&self) -> u16 {
        match self {
            Failure::Cancelled
            | Failure::PrefillEnded
            | Failure::PeerSilent
            | Failure::PeerRestarted
            | Failure::Unreachable
            | Failure::Mismatch(_)
            | Failure::HelloRefused(_)
            | Failure::UnknownTransfer
            | Failure::LeaseExpired
            | Failure::Preempted
            | Failure::NotFetched
            | Failure::DuplicateKey
            | Failure::Stalled
            | Failure::Overload
            | Failure::Violation(_)
            | Failure::EngineGone
            | Failure::PromptMismatch { .. } => 1,
            Failure::Fabric(cause) => match cause {
                FabricError::QueuePair
                | FabricError::AckTimeout
                | FabricError::QueueFull
                | FabricError::RemoteAccess
                | FabricError::LocalAccess
                | FabricError::PeerGone
                | FabricError::Closed
                | FabricError::Unreachable
                | FabricError::Backend(_) => 1,
            },
            Failure::Refused(refused) => match refused {
                Refused::Busy | Refused::Gone | Refused::Unsupported(_) | Refused::Invalid(_) => 1,
            },
            Failure::OtherLife | Failure::Corrupt(_) | Failure::Unknown(_) => 2,
        }
    }

    /// The name of the kind, for tables and metrics.
    pub fn kind(&self) -> &'static str {
        match self {
            Failure::Cancelled => "cancelled",
            Failure::PrefillEnded => "prefill-ended",
            Failure::Fabric(_) => "fabric",
            Failure::Refused(_) => "refused",
            Failure::PeerSilent => "peer-silent",
            Failure::PeerRestarted => "peer-restarted",
            Failure::Unreachable => "unreachable",
            Failure::Mismatch(_) => "mismatch",
            Failure::HelloRefused(_) => "hello-refused",
            Failure::UnknownTransfer => "unknown-transfer",
            Failure::LeaseExpired => "lease-expired",
            Failure::Preempted => "preempted",
            Failure::NotFetched => "not-fetched",
            Failure::DuplicateKey => "duplicate-key",
            Failure::Stalled => "stalled",
            Failure::Overload => "overload",
            Failure::Violation(_) => "violation",
            Failure::EngineGone => "engine-gone",
            Failure::OtherLife => "other-life",
            Failure::Corrupt(_) => "corrupt",
            Failure::PromptMismatch { .. } => "prompt-mismatch",
            Failure::Unknown(_) => "unknown",
        }
    }

    /// The same with texts of at most [`CLIPPED_MAX`] characters, for lists that are said again and
    /// again: a peer's text may be as long as a frame.
    pub(super) fn clipped(&self) -> Failure {
        fn cut(text: &str) -> Arc<str> {
            let end = text.char_indices().nth(CLIPPED_MAX).map_or(text.len(), |(at, _)| at);
            text[..end].into()
        }
        match self {
            Failure::Fabric(FabricError::Backend(text)) => {
                Failure::Fabric(FabricError::Backend(cut(text)))
            }
            Failure::Refused(Refused::Unsupported(text)) => {
                Failure::Refused(Refused::Unsupported(cut(text)))
            }
            Failure::Refused(Refused::Invalid(text)) => {
                Failure::Refused(Refused::Invalid(cut(text)))
            }
            Failure::Mismatch(Mismatch(text)) => Failure::Mismatch(Mismatch(cut(text))),
            Failure::HelloRefused(text) => Failure::HelloRefused(cut(text)),
            Failure::Corrupt(text) => Failure::Corrupt(cut(text)),
            Failure::Unknown(text) => Failure::Unknown(cut(text)),
            Failure::Violation(PeerViolation { peer, frame, rule }) => {
                let (peer, frame, rule) = (cut(peer), cut(frame), cut(rule));
                Failure::Violation(PeerViolation { peer, frame, rule })
            }
            other => other.clone(),
        }
    }

    /// Remedy for people who run the servers, as a clause; none if the text of the failure has it.
    pub fn remedy(&self) -> Option<&'static str> {
        Some(match self {
            Failure::Cancelled => "send the request again",
            Failure::PrefillEnded => "the log of the prefill's server has the reason",
            Failure::Fabric(_) | Failure::Stalled => "check the network between the two instances",
            Failure::Refused(_) => {
                "check `paths`, `slower` and `uids` of both instances, and their memory"
            }
            Failure::PeerSilent => {
                "check that the host of the prefill runs and is not starved of CPU time"
            }
            Failure::PeerRestarted => "the log of the prefill's host has the reason of its end",
            Failure::Unreachable => {
                "check that the host of the prefill runs, its host_ip and ports, and the firewall"
            }
            Failure::Mismatch(_) => {
                "give both engines the same model, block size and type of the KV cache"
            }
            Failure::HelloRefused(_) => {
                "`refused a hello` in the log of the prefill's host has more"
            }
            Failure::UnknownTransfer => "the log of the prefill has what became of its leg",
            Failure::LeaseExpired => "use a faster path, or raise protocol.lease_ms",
            Failure::Preempted => "give the prefill more KV blocks, or raise protocol.resume_ms",
            Failure::NotFetched => "the log of the decode has what became of its leg",
            Failure::DuplicateKey => "use each transfer id once",
            Failure::Overload => "reduce the load, or raise the limits of `protocol` and `channel`",
            Failure::Violation(_) | Failure::Unknown(_) => {
                "install one version of kvferry on both instances"
            }
            Failure::EngineGone => "the log of the server has the reason of its end",
            Failure::OtherLife => "send the request again: the instance has been restarted",
            Failure::Corrupt(_) => "check memory, drivers and the data plane of the two instances",
            Failure::PromptMismatch { .. } => return None,
        })
    }

    /// True if the request alone causes it: every pair of engines fails it in the same way.
    pub fn is_of_request(&self) -> bool {
        matches!(self, Failure::PromptMismatch { .. })
    }

    /// True if it is about two engines together: KV does not get through between them, though
    /// each may serve with others.
    pub fn is_of_pair(&self) -> bool {
        matches!(
            self,
            Failure::HelloRefused(_)
                | Failure::Mismatch(_)
                | Failure::Unreachable
                | Failure::PeerSilent
                | Failure::Stalled
                | Failure::Fabric(_)
                | Failure::Refused(_)
                | Failure::Violation(_)
                | Failure::Corrupt(_)
        )
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Cancelled => f.write_str("cancelled"),
            Failure::PrefillEnded => f.write_str("the prefill request ended early"),
            Failure::Fabric(cause) => write!(f, "transfer failed: {cause}"),
            Failure::Refused(refused) => write!(f, "data plane refused: {refused}"),
            Failure::PeerSilent => f.write_str("peer does not answer"),
            Failure::PeerRestarted => f.write_str("peer restarted"),
            Failure::Unreachable => {
                f.write_str("peer cannot be reached: it has channel.hello_ms to answer a hello")
            }
            Failure::Mismatch(mismatch) => write!(f, "engines do not fit: {mismatch}"),
            Failure::HelloRefused(reason) => write!(f, "peer refused the hello: {reason}"),
            Failure::UnknownTransfer => f.write_str("prefill knows no such transfer"),
            Failure::LeaseExpired => f.write_str("lease expired before the read was complete"),
            Failure::Preempted => f.write_str("prefill preempted the prompt"),
            Failure::NotFetched => f.write_str("nobody fetched the KV in time"),
            Failure::DuplicateKey => f.write_str("transfer key is in use"),
            Failure::Stalled => f.write_str("no progress within the deadline"),
            Failure::Overload => f.write_str("table full"),
            Failure::Violation(violation) => write!(f, "{violation}"),
            Failure::EngineGone => f.write_str("engine or worker rank is gone"),
            Failure::OtherLife => f.write_str("the leg is for another incarnation of this engine"),
            Failure::Corrupt(what) => write!(f, "KV did not arrive as it was sent: {what}"),
            Failure::PromptMismatch { decode, prefill } => write!(
                f,
                "the two legs have different prompts: the decode's has hash {decode}, the \
                 prefill's {prefill}; give both engines the same tokenizer and chat template, or \
                 send the prompt as token ids"
            ),
            Failure::Unknown(name) => write!(f, "{name}, which this version does not know"),
        }
    }
}

impl std::error::Error for Failure {}

/// The other side broke the protocol. Costs the message, or the transfer it is about, never the
/// process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PeerViolation {
    /// Who, as far as known.
    pub peer: Arc<str>,
    pub frame: Arc<str>,
    pub rule: Arc<str>,
}

/// Who sent what is not known to be of a peer: whence the link came if the plane told, else its
/// number.
pub(super) fn stranger(link: LinkId, from: Option<&Endpoint>) -> String {
    match from {
        Some(from) => format!("at {from}"),
        None => format!("on link {link}"),
    }
}

impl fmt::Display for PeerViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {} broke the protocol: {} in {}", self.peer, self.rule, self.frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_again_and_again_is_short() {
        let long: Arc<str> = "\u{e4}".repeat(1 << 20).into();
        let clip: Arc<str> = "\u{e4}".repeat(CLIPPED_MAX).into();
        let all = |text: &Arc<str>| {
            let part = || text.clone();
            let violation = PeerViolation { peer: part(), frame: part(), rule: part() };
            [
                Failure::Fabric(FabricError::Backend(part())),
                Failure::Refused(Refused::Unsupported(part())),
                Failure::Refused(Refused::Invalid(part())),
                Failure::Mismatch(Mismatch(part())),
                Failure::HelloRefused(part()),
                Failure::Corrupt(part()),
                Failure::Unknown(part()),
                Failure::Violation(violation),
            ]
        };
        assert_eq!(all(&long).map(|failure| failure.clipped()), all(&clip));
        assert_eq!(all(&clip).map(|failure| failure.clipped()), all(&clip));
        assert_eq!(Failure::Stalled.clipped(), Failure::Stalled);
    }
}
