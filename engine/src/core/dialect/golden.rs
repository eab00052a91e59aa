//! Every failure has golden bytes.

use super::native::{self, Frame};
use crate::core::error::{Failure, PeerViolation};
use crate::core::layout::Mismatch;
use crate::core::message::Message;
use crate::core::prompt_hash::PromptHash;
use crate::fabric::{FabricError, Refused};

/// One of each; a variant that is not listed does not compile.
macro_rules! all {
    ($($pattern:pat = $failure:expr),+ $(,)?) => {
        fn all() -> Vec<Failure> {
            let known = |failure: &Failure| match failure {
                $($pattern => {}),+
            };
            let all = vec![$($failure),+];
            all.iter().for_each(known);
            all
        }
    };
}

all! {
    Failure::Cancelled = Failure::Cancelled,
    Failure::PrefillEnded = Failure::PrefillEnded,
    Failure::Fabric(FabricError::QueuePair) = Failure::Fabric(FabricError::QueuePair),
    Failure::Fabric(FabricError::AckTimeout) = Failure::Fabric(FabricError::AckTimeout),
    Failure::Fabric(FabricError::QueueFull) = Failure::Fabric(FabricError::QueueFull),
    Failure::Fabric(FabricError::RemoteAccess) = Failure::Fabric(FabricError::RemoteAccess),
    Failure::Fabric(FabricError::LocalAccess) = Failure::Fabric(FabricError::LocalAccess),
    Failure::Fabric(FabricError::PeerGone) = Failure::Fabric(FabricError::PeerGone),
    Failure::Fabric(FabricError::Closed) = Failure::Fabric(FabricError::Closed),
    Failure::Fabric(FabricError::Unreachable) = Failure::Fabric(FabricError::Unreachable),
    Failure::Fabric(FabricError::Backend(_)) = Failure::Fabric(FabricError::Backend("why".into())),
    Failure::Refused(Refused::Busy) = Failure::Refused(Refused::Busy),
    Failure::Refused(Refused::Gone) = Failure::Refused(Refused::Gone),
    Failure::Refused(Refused::Unsupported(_)) =
        Failure::Refused(Refused::Unsupported("why".into())),
    Failure::Refused(Refused::Invalid(_)) = Failure::Refused(Refused::Invalid("why".into())),
    Failure::PeerSilent = Failure::PeerSilent,
    Failure::PeerRestarted = Failure::PeerRestarted,
    Failure::Unreachable = Failure::Unreachable,
    Failure::Mismatch(_) = Failure::Mismatch(Mismatch("why".into())),
    Failure::HelloRefused(_) = Failure::HelloRefused("why".into()),
    Failure::UnknownTransfer = Failure::UnknownTransfer,
    Failure::LeaseExpired = Failure::LeaseExpired,
    Failure::Preempted = Failure::Preempted,
    Failure::NotFetched = Failure::NotFetched,
    Failure::DuplicateKey = Failure::DuplicateKey,
    Failure::Stalled = Failure::Stalled,
    Failure::Overload = Failure::Overload,
    Failure::Violation(_) = Failure::Violation(PeerViolation {
        peer: "why".into(),
        frame: "why".into(),
        rule: "why".into(),
    }),
    Failure::EngineGone = Failure::EngineGone,
    Failure::OtherLife = Failure::OtherLife,
    Failure::Corrupt(_) = Failure::Corrupt("why".into()),
    Failure::PromptMismatch { .. } = Failure::PromptMismatch {
        decode: PromptHash([1 << 60, 7]),
        prefill: PromptHash([300, u64::MAX]),
    },
    Failure::Unknown(_) = Failure::Unknown("Later".into()),
}

#[test]
fn every_failure_has_golden_bytes() {
    let text = include_str!("../../../tests/golden/native-2.txt");
    let failure = |line: &str| {
        let (_, hex) = line.split_once(' ').expect("a kind and bytes");
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("a byte");
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        match native::decode(&bytes) {
            Ok(Frame::Data { message: Message::Ended { failure, .. }, .. }) => Some(failure),
            _ => None,
        }
    };
    let kept: Vec<Failure> = text.lines().filter_map(failure).collect();
    let missing: Vec<Failure> =
        all().into_iter().filter(|failure| !kept.contains(failure)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
