//! What the connector in a serving engine and its host tell each other over the local socket:
//! frames of a length (four bytes, big-endian) and a value of [`ToHost`] or [`FromHost`] in
//! MessagePack.
//!
//! Each side says which versions it speaks, the connector in its [`ConnectorHello`] and the host in
//! [`FromHost::Ready`], and both speak the newest that they share. Structs go as maps of their
//! fields: what a side does not know of one it skips, and a field that is missing has its default.
//! A message that it does not know it skips as well. So a version that adds fields and messages is
//! spoken with the one before; one that changes the meaning of what there is raises [`OLDEST`].

use super::rank::RankPlan;
use super::record::{TransferSummary, TransferTrace};
use super::spec::{ServingEngine, ServingWorker};
use crate::instance::{Overrides, PlaneCounters, PrefillOffer};
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{EngineId, Incarnation, RequestId, StepId};
use kvferry_engine::core::message::{
    DecodeAnswer, DecodeHook, PrefillAnswer, PrefillHook, TransferJob, TransferReport,
};
use kvferry_engine::core::payload::{PayloadAnswer, PayloadClient, PayloadHook, PayloadKey};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::fabric::{Endpoint, FabricError};
use serde::{Deserialize, Serialize};
use std::os::fd::RawFd;
use std::sync::Arc;

/// The newest version of these messages that is spoken.
pub const VERSION: u16 = 10;

/// The oldest version that is spoken.
pub const OLDEST: u16 = 5;

/// The first version that knows how KV is verified.
pub const VERIFIES: u16 = 10;

/// Reason to serve a request without a transfer if its connector sent no hash of the prompt.
pub(super) const NO_PROMPT_HASH: &str = "the connector sent no hash of the prompt, without which no KV is \
     handed over: it is of an earlier version; install one version of kvferry for both";

/// Longest frame in bytes.
pub const FRAME_MAX: usize = 64 << 20;

/// The versions that a side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VersionRange {
    pub oldest: u16,
    pub newest: u16,
}

impl VersionRange {
    /// Those of this program.
    pub const OWN: VersionRange = VersionRange { oldest: OLDEST, newest: VERSION };

    /// Those of hosts that did not say which they speak.
    fn unstated() -> VersionRange {
        VersionRange { oldest: 5, newest: 5 }
    }

    /// The version that this program speaks with a side that speaks these.
    ///
    /// # Errors
    /// Both ranges, and what to do.
    pub fn agree(self, other: &str) -> Result<u16, String> {
        let VersionRange { oldest, newest } = self;
        let agreed = newest.min(VERSION);
        if agreed >= oldest.max(OLDEST) {
            return Ok(agreed);
        }
        Err(format!(
            "{other} speaks versions {oldest} to {newest} of the local protocol, and kvferry {} here \
             {OLDEST} to {VERSION}; install one version of kvferry for both",
            env!("CARGO_PKG_VERSION")
        ))
    }
}

/// The first message of a connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ConnectorHello {
    /// The oldest version that who connects speaks; hosts of version 5 demand that it is theirs.
    pub version: u16,
    pub who: ClientIdentity,
    /// The newest; those of version 5 spoke one only, and did not say this.
    #[serde(default)]
    pub newest: Option<u16>,
}

impl ClientIdentity {
    /// The oldest version that has all of this, and what earlier ones lack.
    pub fn needs(&self) -> (u16, &'static str) {
        match self {
            ClientIdentity::Scheduler(engine) if !engine.settings.verify.is_off() => {
                (VERIFIES, "verification of KV; leave `verify` out, or")
            }
            ClientIdentity::Scheduler(engine) if engine.settings.limits != Overrides::default() => {
                (6, "times and limits; leave them out, or")
            }
            ClientIdentity::Stage { .. } => (8, "payloads of stages;"),
            _ => (OLDEST, ""),
        }
    }
}

impl ConnectorHello {
    /// The hello of this program.
    pub fn new(who: ClientIdentity) -> ConnectorHello {
        ConnectorHello { version: OLDEST, who, newest: Some(VERSION) }
    }

    /// The versions that who connects speaks.
    pub fn versions(&self) -> VersionRange {
        VersionRange { oldest: self.version, newest: self.newest.unwrap_or(self.version) }
    }
}

/// A part of a serving engine, or who looks on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ClientIdentity {
    /// Its scheduler; one per engine.
    Scheduler(Box<ServingEngine>),
    /// One of its workers.
    Worker(Box<ServingWorker>),
    /// The transfer actor in one of its workers, where they are there.
    Transfer {
        rank: u16,
        /// Descriptor, in the worker, of the pipe that gets its last words.
        #[serde(rename = "words")]
        last_error: Option<i32>,
    },
    /// Somebody else, who is told the last transfers.
    Observer,
    /// A process of a stage, which puts and gets payloads.
    Stage {
        /// Whose processes meet each other.
        deployment: Arc<str>,
        stage: Arc<str>,
        /// Bytes of the pool that it asks for, if it would have started the host. One that nobody uses
        /// and that has another pool ends.
        pool: Option<u64>,
    },
}

/// What a connector tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToHost {
    /// Scheduler: a request with transfer parameters arrived (`on_new_request`).
    Arrived {
        /// The request, as the engine names it.
        request: RequestId,
        /// Its `kv_transfer_params`, a JSON object.
        params: Arc<str>,
        /// Tokens of its prompt.
        tokens: u32,
        /// Hash of its prompt. Connectors of earlier versions send none; their requests are served
        /// without a transfer.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        prompt_hash: Option<PromptHash>,
    },
    /// Scheduler of a prefill: anything else of a request that arrived.
    Prefill(PrefillHook),
    /// Scheduler of a decode: the same.
    Decode(DecodeHook),
    /// Worker of a prefill: the first `layers` layers of a step are computed.
    Layers { step: StepId, layers: u16 },
    /// Transfer actor: for the core.
    Report {
        report: TransferReport,
        /// What its data plane did so far.
        moved: PlaneCounters,
    },
    /// Transfer actor: what its data plane did so far; when it changed, at most once per second.
    Moved(PlaneCounters),
    /// Transfer actor: it cannot begin.
    Unable {
        /// What it lacks and what to do.
        why: String,
    },
    /// A process of a stage; what is not for [`ClientIdentity::Stage`] to say ends the connection.
    Payload(PayloadHook),
    /// A process of a stage: it wants a payload of a stage whose connector is vLLM-Omni's for MoRI.
    /// What follows is that of [`PayloadHook::Want`].
    Fetch {
        key: PayloadKey,
        /// Where that connector listens.
        sender: Endpoint,
    },
}

/// What a host tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromHost {
    /// To all: the engine is served. Hooks before it are lost.
    Ready {
        /// Where peers find the engine.
        address: ZmqAddress,
        /// Milliseconds for which a finished prefill's blocks may be read by others though the host
        /// has ended; 0 where nobody does.
        lease_ms: u64,
        /// That of this host's actors.
        #[serde(rename = "life")]
        incarnation: Incarnation,
        /// The versions that this host speaks.
        #[serde(default = "VersionRange::unstated")]
        versions: VersionRange,
        /// What a prefill's answers are made of; earlier hosts do not say it.
        #[serde(default)]
        offer: Option<Box<PrefillOffer>>,
    },
    /// To the scheduler of a prefill: its answers are made of this from now on, because the secret
    /// was changed.
    Offer(Box<PrefillOffer>),
    /// To all: it is not, and why; the connection ends.
    Refused {
        /// What is wrong and what to do.
        why: String,
    },
    /// To a scheduler: the request is served as if it had no transfer parameters, or not at all.
    Unusable {
        request: RequestId,
        /// What is wrong with its parameters.
        why: String,
    },
    /// To a transfer actor, before any job: what it is.
    Begin(Box<RankPlan>),
    /// To all transfer actors.
    Job(TransferJob),
    /// To the scheduler of a prefill; that blocks may be reused, to its workers.
    Prefill(PrefillAnswer),
    /// To the scheduler of a decode.
    Decode(DecodeAnswer),
    /// To a scheduler, before the answer that ends it: a transfer ended.
    Ended(TransferSummary),
    /// To a scheduler, when they change, at most once per second: KV blocks that the host keeps
    /// from reuse.
    Kept {
        /// Of a prefill, for its transfers.
        held: u32,
        /// Of a decode, because bytes of a failed transfer may still land.
        quarantined: u32,
    },
    /// To an observer, whose connection then ends.
    Trace(Box<TransferTrace>),
    /// To a process of a stage, in the place of `Ready`: where it puts and gets.
    Pool {
        /// Its number at this host.
        client: PayloadClient,
        /// Bytes of the pool.
        bytes: u64,
        /// Of the pool's memory file, in the host; the client gets one of its own with the message.
        #[serde(skip)]
        descriptor: RawFd,
        /// What other hosts call this one, if they reach it.
        engine: Option<EngineId>,
        incarnation: Incarnation,
        versions: VersionRange,
    },
    /// To a process of a stage.
    Payload(PayloadAnswer),
}

impl FromHost {
    /// The message in the words of a version: what that did not know is said by what is nearest.
    pub fn in_version(mut self, version: u16) -> FromHost {
        if let Some(failure) = self.failure_mut().filter(|_| version < 6) {
            match failure {
                Failure::OtherLife => *failure = Failure::PeerRestarted,
                Failure::Unknown(_) => {
                    let text = failure.to_string().into();
                    *failure = Failure::Fabric(FabricError::Backend(text));
                }
                _ => {}
            }
        }
        self
    }

    /// The failure that it tells, if it does.
    fn failure_mut(&mut self) -> Option<&mut Failure> {
        match self {
            FromHost::Prefill(PrefillAnswer::SourceFree { failure, .. }) => failure.as_mut(),
            FromHost::Prefill(PrefillAnswer::Rejected { failure, .. })
            | FromHost::Decode(DecodeAnswer::LoadFailed { failure, .. })
            | FromHost::Decode(DecodeAnswer::Rejected { failure, .. }) => Some(failure),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_connector_is_told_failures_that_it_knows() {
        let request = || RequestId::from("r");
        let all = |failure: &Failure| {
            let failure = || failure.clone();
            [
                FromHost::Prefill(PrefillAnswer::SourceFree {
                    request: request(),
                    failure: Some(failure()),
                }),
                FromHost::Prefill(PrefillAnswer::Rejected {
                    request: request(),
                    failure: failure(),
                }),
                FromHost::Decode(DecodeAnswer::LoadFailed {
                    request: request(),
                    failure: failure(),
                }),
                FromHost::Decode(DecodeAnswer::Rejected { request: request(), failure: failure() }),
            ]
        };
        let unknown = Failure::Unknown("next-years".into());
        let backend = Failure::Fabric(FabricError::Backend(unknown.to_string().into()));
        for (failure, in_five) in [
            (&Failure::OtherLife, &Failure::PeerRestarted),
            (&unknown, &backend),
            (&Failure::Overload, &Failure::Overload),
        ] {
            for (version, expected) in [(5, in_five), (6, failure)] {
                for message in all(failure) {
                    let mut told = message.in_version(version);
                    assert_eq!(told.failure_mut(), Some(&mut expected.clone()), "{version}");
                }
            }
        }
        let free = PrefillAnswer::SourceFree { request: request(), failure: None };
        assert!(FromHost::Prefill(free).in_version(5).failure_mut().is_none());
    }
}
