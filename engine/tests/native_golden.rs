//! The bytes of every message of the native dialect, as they were when its version was new: who
//! speaks that version writes and reads these, for ever.

use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native::*;
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::*;
use kvferry_engine::core::layout::*;
use kvferry_engine::core::message::*;
use kvferry_engine::core::payload::*;
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::verify::{KvDigest, Verify};
use kvferry_engine::fabric::{Address, FabricError, Refused, RegionDesc};
use std::fmt::Write;
use std::path::{Path, PathBuf};

const PROMPT_HASH: PromptHash = PromptHash([1 << 60, 7]);

fn key() -> TransferKey {
    TransferKey { id: "tx-07".into(), prompt: 3 }
}

fn tag() -> AttemptTag {
    AttemptTag { key: key(), sibling: 2, attempt: Attempt(70_000) }
}

fn hello() -> Box<Hello> {
    let group = |kind| KvGroup { kind, block_tokens: 16, layers: vec![0, 1] };
    let geometry = Geometry {
        model: "model".into(),
        tp: 1,
        kv_heads: 2,
        latent: false,
        packed: true,
        layers: 2,
        groups: vec![
            group(GroupKind::Full),
            group(GroupKind::Window { tokens: 1024 }),
            group(GroupKind::State),
        ],
    };
    let layer = |slots| LayerLayout {
        region: 0,
        base: 1 << 40,
        shape: [300, 2, 16, 8],
        stride: [256, 128, 8, 1],
        element: 2,
        slots,
    };
    let rank = RankLayout {
        rank: 0,
        address: Address([1, 200].into()),
        regions: vec![(RegionDesc([3, 255].into()), 1 << 41)],
        layers: vec![layer(HeadSlots::Fused), layer(HeadSlots::Split)],
    };
    Box::new(Hello {
        version: 1,
        version_min: 1,
        engine: "engine".into(),
        incarnation: Incarnation(1_700_000_000_000_000),
        session: 9,
        expects: "other".into(),
        role: Role::Decode,
        capabilities: 3,
        fingerprint: geometry.fingerprint(),
        geometry,
        ranks: vec![rank],
    })
}

fn failures() -> Vec<Failure> {
    let text = || "why".into();
    vec![
        Failure::Cancelled,
        Failure::PrefillEnded,
        Failure::Fabric(FabricError::AckTimeout),
        Failure::Fabric(FabricError::Backend(text())),
        Failure::Refused(Refused::Busy),
        Failure::Refused(Refused::Invalid(text())),
        Failure::PeerSilent,
        Failure::PeerRestarted,
        Failure::Unreachable,
        Failure::Mismatch(Mismatch(text())),
        Failure::HelloRefused(text()),
        Failure::UnknownTransfer,
        Failure::LeaseExpired,
        Failure::Preempted,
        Failure::NotFetched,
        Failure::DuplicateKey,
        Failure::Stalled,
        Failure::Overload,
        Failure::Violation(PeerViolation { peer: text(), frame: text(), rule: text() }),
        Failure::EngineGone,
        Failure::PromptMismatch { decode: PROMPT_HASH, prefill: PromptHash([300, u64::MAX]) },
    ]
}

/// The failures that are in no line of version 1; a test of the crate sees that all are in one.
fn later() -> Vec<Failure> {
    let causes = [
        FabricError::QueuePair,
        FabricError::QueueFull,
        FabricError::RemoteAccess,
        FabricError::LocalAccess,
        FabricError::PeerGone,
        FabricError::Closed,
        FabricError::Unreachable,
    ];
    let mut failures = vec![Failure::Unknown("Later".into()), Failure::OtherLife];
    failures.extend(causes.map(Failure::Fabric));
    failures.extend([Refused::Gone, Refused::Unsupported("why".into())].map(Failure::Refused));
    failures
}

/// All messages, those that carry a failure with each.
fn messages() -> Vec<Message> {
    let blocks = || vec![BlockList { first: 4, ids: vec![1, 128, 70_000] }, BlockList::default()];
    let (tokens, count, ranks, lease) = (4096, 7, RankSet(5), Nanos::from_secs(30));
    let prompt_hash = PROMPT_HASH;
    let mut messages = vec![
        Message::Ask { tag: tag(), tokens, prompt_hash },
        Message::Begun { tag: tag() },
        Message::Announce { tag: tag(), tokens, from: 64, blocks: blocks(), verify: None },
        Message::Pull { tag: tag(), tokens, prompt_hash, verify: None },
        Message::Grant { tag: tag(), tokens, blocks: blocks(), lease, digest: None },
        Message::Renew { tag: tag(), count },
        Message::Renewed { tag: tag(), count, lease },
        Message::Delivered { tag: tag(), ranks, tokens, digest: None },
        Message::Release { tag: tag(), ranks },
        Message::Cancel { tag: tag() },
    ];
    let ended = |failure| Message::Ended { tag: tag(), failure, quiet: false };
    messages.extend(failures().into_iter().map(ended));
    messages
}

/// All notes about payloads, those that carry a failure with each.
fn notes() -> Vec<PayloadNote> {
    let stream = PayloadStream::new("0", "1", "r/@\u{e4}");
    let place = |key| ScopedKey { deployment: "a".into(), key };
    let (number, bytes, generation, want) = (7, 1_611_713, 70_000, 300);
    let mut notes = vec![
        PayloadNote::Want { place: place(stream.chunk(300)), want },
        PayloadNote::Unwant { place: place(stream.whole()) },
        PayloadNote::Done { number, got: true },
        PayloadNote::Offer {
            place: place(stream.chunk(0)),
            number,
            bytes,
            generation,
            is_chunk: true,
            want,
        },
        PayloadNote::Absent { place: place(stream.chunk(0)), has_stage: true, want },
        PayloadNote::Settled { number },
    ];
    let failures = [
        PayloadFailure::Ended,
        PayloadFailure::GivenUp("why".into()),
        PayloadFailure::ProducerGone,
        PayloadFailure::PeerGone("host".into()),
        PayloadFailure::NotMoved("why".into()),
        PayloadFailure::Taken,
        PayloadFailure::Expired,
        PayloadFailure::CleanedUp,
        PayloadFailure::PoolFull { bytes, free: 1, largest: 2, share: 3 },
        PayloadFailure::TooLong { bytes, pool: 4 },
        PayloadFailure::Overload("what".into()),
        PayloadFailure::Closed,
        PayloadFailure::Unknown("Later".into()),
    ];
    let missing = |failure| PayloadNote::Missing { place: place(stream.chunk(0)), failure, want };
    notes.extend(failures.map(missing));
    notes
}

/// What is said where KV is verified.
fn verified() -> Vec<Message> {
    let blocks = || vec![BlockList { first: 4, ids: vec![1, 128, 70_000] }];
    let (tokens, ranks, lease) = (4096, RankSet(5), Nanos::from_secs(30));
    let prompt_hash = PROMPT_HASH;
    let digest =
        || Some(Box::new(KvDigest { blocks: vec![1 << 60, 7], layers: vec![300], count: 4 }));
    vec![
        Message::Announce {
            tag: tag(),
            tokens,
            from: 64,
            blocks: blocks(),
            verify: Some(Verify::All),
        },
        Message::Pull { tag: tag(), tokens, prompt_hash, verify: Some(Verify::Sample) },
        Message::Grant { tag: tag(), tokens, blocks: blocks(), lease, digest: digest() },
        Message::Delivered { tag: tag(), ranks, tokens, digest: digest() },
        Message::Ended { tag: tag(), failure: Failure::Corrupt("why".into()), quiet: true },
    ]
}

/// The same with all that a registration may say.
fn whole(registration: Registration) -> Registration {
    let Hello { geometry, mut ranks, .. } = *hello();
    let rank = ranks.remove(0);
    let fit = LayoutDigest::new(&geometry, &[rank]);
    let trouble = |incarnation| UnreachablePrefill {
        engine: "other".into(),
        incarnation,
        failure: Failure::Fabric(FabricError::PeerGone),
        number: 300,
    };
    let troubles = vec![trouble(Some(Incarnation(7))), trouble(None)];
    let models = ServedModels { names: vec!["m".into()], adapters: vec!["lora".into()] };
    let models = Some(models.into());
    let failure = Failure::PeerSilent;
    let failed = vec![FailedLeg { key: tag().key, sibling: 2, failure }];
    Registration { fit: Some(fit.into()), troubles, models, failed, ..registration }
}

/// At least one frame of each kind, in a connection of a version.
fn frames(version: u16) -> Vec<Frame> {
    let envelope =
        ConnectionHeader { version, from: Incarnation(1 << 50), to: Incarnation(2), session: 300 };
    let registration = Registration {
        sequence: 260,
        dp_rank: 1,
        dp_size: 2,
        tp: 8,
        draining: true,
        ..Registration::new(
            "engine".into(),
            Incarnation(5),
            Role::Prefill,
            Mode::Pull,
            "10.0.0.1:8000".into(),
            "tcp://10.0.0.1:6301".into(),
        )
    };
    let mut frames = vec![
        Frame::Hello(hello()),
        Frame::Welcome(hello()),
        Frame::Refuse { envelope, engine: "engine".into(), reason: "no".into() },
        Frame::Ack { envelope, next: 130 },
        Frame::Probe { envelope },
        Frame::Bye { envelope },
        Frame::Register(registration.clone()),
        Frame::Abandon { keys: vec![key()] },
    ];
    let mut messages = messages();
    if version > 1 {
        let ended = |failure| Message::Ended { tag: tag(), failure, quiet: true };
        messages.extend(later().into_iter().map(ended));
    }
    let numbered = (40..).zip(messages);
    frames.extend(numbered.map(|(seq, message)| Frame::Data { envelope, seq, message }));
    if version > 1 {
        frames.push(Frame::Register(whole(registration)));
        let numbered = (300..).zip(notes());
        let noted = |(seq, note)| Frame::Data { envelope, seq, message: Message::Payload { note } };
        frames.extend(numbered.map(noted));
        let numbered = (400..).zip(verified());
        frames.extend(numbered.map(|(seq, message)| Frame::Data { envelope, seq, message }));
    }
    frames
}

/// The bytes of a line.
fn bytes(line: &str) -> Vec<u8> {
    let (_, hex) = line.split_once(' ').unwrap();
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
    (0..hex.len()).step_by(2).map(byte).collect()
}

fn path(version: u16) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/native-{version}.txt"))
}

fn text(version: u16) -> String {
    let mut text = String::new();
    for frame in frames(version) {
        let bytes = encode(&frame);
        write!(text, "{} ", peek(&bytes).unwrap().name()).unwrap();
        bytes.iter().for_each(|byte| write!(text, "{byte:02x}").unwrap());
        text.push('\n');
    }
    text
}

/// Writes the bytes of today's version, to be kept by the versions after it.
#[test]
#[ignore = "writes files that are kept"]
fn record() {
    std::fs::write(path(VERSION), text(VERSION)).unwrap();
}

#[test]
fn every_version_has_the_bytes_that_it_had() {
    for version in VERSION_MIN..=VERSION {
        let kept = std::fs::read_to_string(path(version)).unwrap();
        let (today, mut known) = (text(version), kept.lines());
        for (frame, line) in frames(version).iter().zip(today.lines()) {
            let known = known.next().unwrap();
            // What has no version says what the newest one has, and the shorter ones are read.
            if matches!(frame, Frame::Register(_)) && version < VERSION {
                assert_eq!(decode(&bytes(known)).as_ref(), Ok(frame), "{version}");
            } else {
                assert_eq!(line, known, "{version}");
            }
        }
        assert_eq!(known.next(), None, "{version}");
    }
}

#[test]
fn every_kind_has_golden_bytes() {
    let text = std::fs::read_to_string(path(VERSION)).unwrap();
    for kind in MessageKind::ALL {
        let known = text.lines().any(|line| line.split(' ').next() == Some(kind.name()));
        assert!(known, "{}", kind.name());
    }
}
