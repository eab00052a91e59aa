//! The native dialect: what is encoded is decoded, and no bytes do harm.

use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native::*;
use kvferry_engine::core::error::*;
use kvferry_engine::core::ids::*;
use kvferry_engine::core::layout::*;
use kvferry_engine::core::message::*;
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::fabric::{Address, Endpoint, FabricError, Refused, RegionDesc};
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;

fn text() -> impl Strategy<Value = Arc<str>> {
    vec(any::<char>(), 0..40).prop_map(|text| String::from_iter(text).into())
}

fn bytes() -> impl Strategy<Value = Arc<[u8]>> {
    vec(any::<u8>(), 0..80).prop_map(Into::into)
}

fn tag() -> impl Strategy<Value = AttemptTag> {
    (text(), any::<u32>(), any::<u32>(), any::<u32>()).prop_map(|(id, prompt, sibling, attempt)| {
        let key = TransferKey { id: TransferId(id), prompt };
        AttemptTag { key, sibling, attempt: Attempt(attempt) }
    })
}

fn blocks() -> impl Strategy<Value = Vec<BlockList>> {
    let list = (any::<u32>(), vec(any::<u32>(), 0..300));
    vec(list.prop_map(|(first, ids)| BlockList { first, ids }), 0..4)
}

fn failure() -> impl Strategy<Value = Failure> {
    let plain = prop::sample::select(vec![
        Failure::Cancelled,
        Failure::PeerRestarted,
        Failure::LeaseExpired,
        Failure::Fabric(FabricError::AckTimeout),
        Failure::Refused(Refused::Busy),
        Failure::EngineGone,
        Failure::Unknown("Later".into()),
    ]);
    prop_oneof![
        plain,
        text().prop_map(Failure::HelloRefused),
        text().prop_map(|text| Failure::Mismatch(Mismatch(text))),
        text().prop_map(|text| Failure::Fabric(FabricError::Backend(text))),
        (text(), text(), text()).prop_map(|(peer, frame, rule)| {
            Failure::Violation(PeerViolation { peer, frame, rule })
        }),
    ]
}

fn message() -> impl Strategy<Value = Message> {
    let start = (tag(), any::<u32>(), any::<u32>(), blocks(), any::<u64>());
    let rest = (tag(), any::<u32>(), any::<u64>(), failure(), any::<bool>());
    prop_oneof![
        (0..5, start).prop_map(|(kind, (tag, tokens, from, blocks, lease))| match kind {
            3 => Message::Ask { tag, tokens, prompt_hash: PromptHash([lease, 7]) },
            4 => Message::Begun { tag },
            0 => Message::Announce { tag, tokens, from, blocks, verify: None },
            1 => Message::Pull { tag, tokens, prompt_hash: PromptHash([7, lease]), verify: None },
            _ => Message::Grant { tag, tokens, blocks, lease: Nanos(lease), digest: None },
        }),
        (0..6, rest).prop_map(|(kind, (tag, count, wide, failure, quiet))| match kind {
            0 => Message::Renew { tag, count },
            1 => Message::Renewed { tag, count, lease: Nanos(wide) },
            2 => Message::Delivered { tag, ranks: RankSet(wide), tokens: count, digest: None },
            3 => Message::Release { tag, ranks: RankSet(wide) },
            4 => Message::Cancel { tag },
            _ => Message::Ended { tag, failure, quiet },
        }),
    ]
}

fn layer() -> impl Strategy<Value = LayerLayout> {
    let numbers = (any::<u16>(), any::<u64>(), any::<[u32; 4]>(), any::<[u64; 4]>(), any::<u32>());
    (numbers, any::<bool>()).prop_map(|((region, base, shape, stride, element), split)| {
        let slots = if split { HeadSlots::Split } else { HeadSlots::Fused };
        LayerLayout { region, base, shape, stride, element, slots }
    })
}

fn rank() -> impl Strategy<Value = RankLayout> {
    let regions = vec((bytes().prop_map(RegionDesc), any::<u64>()), 0..3);
    (any::<u16>(), bytes(), regions, vec(layer(), 0..4)).prop_map(
        |(rank, address, regions, layers)| RankLayout {
            rank,
            address: Address(address),
            regions,
            layers,
        },
    )
}

fn geometry() -> impl Strategy<Value = Geometry> {
    let kind = prop_oneof![
        Just(GroupKind::Full),
        Just(GroupKind::State),
        any::<u32>().prop_map(|tokens| GroupKind::Window { tokens }),
    ];
    let group = (kind, any::<u32>(), vec(any::<u16>(), 0..4))
        .prop_map(|(kind, block_tokens, layers)| KvGroup { kind, block_tokens, layers });
    let numbers = (any::<u16>(), any::<u16>(), any::<u16>(), any::<[bool; 2]>());
    (text(), numbers, vec(group, 0..3)).prop_map(
        |(model, (tp, kv_heads, layers, [latent, packed]), groups)| Geometry {
            model,
            tp,
            kv_heads,
            latent,
            packed,
            layers,
            groups,
        },
    )
}

fn role() -> impl Strategy<Value = Role> {
    prop_oneof![Just(Role::Prefill), Just(Role::Decode)]
}

fn hello() -> impl Strategy<Value = Box<Hello>> {
    let numbers = (any::<u16>(), any::<u16>(), any::<u64>(), any::<u64>(), any::<u32>());
    let body = (numbers, any::<u64>(), geometry(), vec(rank(), 0..3));
    (text(), text(), role(), body).prop_map(|(engine, expects, role, body)| {
        let ((version, version_min, incarnation, session, capabilities), fingerprint, ..) = body;
        Box::new(Hello {
            version,
            version_min,
            engine: EngineId(engine),
            incarnation: Incarnation(incarnation),
            session,
            expects: EngineId(expects),
            role,
            capabilities,
            geometry: body.2,
            fingerprint,
            ranks: body.3,
        })
    })
}

fn registration() -> impl Strategy<Value = Registration> {
    let numbers = (any::<u64>(), any::<u64>(), any::<[u16; 3]>(), any::<bool>());
    (text(), text(), text(), role(), numbers).prop_map(
        |(engine, http, control, role, (incarnation, sequence, ranks, draining))| Registration {
            sequence,
            dp_rank: ranks[0],
            dp_size: ranks[1],
            tp: ranks[2],
            draining,
            ..Registration::new(
                EngineId(engine),
                Incarnation(incarnation),
                role,
                Mode::Push,
                Endpoint(http),
                Endpoint(control),
            )
        },
    )
}

fn frame() -> impl Strategy<Value = Frame> {
    let envelope = (any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(from, to, session)| {
        ConnectionHeader { version: VERSION, from: Incarnation(from), to: Incarnation(to), session }
    });
    let signal =
        (0..3, envelope.clone(), any::<u64>()).prop_map(|(kind, envelope, next)| match kind {
            0 => Frame::Ack { envelope, next },
            1 => Frame::Probe { envelope },
            _ => Frame::Bye { envelope },
        });
    prop_oneof![
        4 => (envelope.clone(), any::<u64>(), message())
            .prop_map(|(envelope, seq, message)| Frame::Data { envelope, seq, message }),
        2 => signal,
        1 => hello().prop_map(Frame::Hello),
        1 => hello().prop_map(Frame::Welcome),
        1 => (envelope, text(), text()).prop_map(|(envelope, engine, reason)| {
            let envelope = ConnectionHeader { version: 0, ..envelope };
            Frame::Refuse { envelope, engine: EngineId(engine), reason }
        }),
        1 => registration().prop_map(Frame::Register),
        1 => vec(tag().prop_map(|tag| tag.key), 0..4).prop_map(|keys| Frame::Abandon { keys }),
    ]
}

/// The name of what is inside, from the frame itself.
fn name(frame: &Frame) -> String {
    let debug = match frame {
        Frame::Data { message, .. } => format!("{message:?}"),
        other => format!("{other:?}"),
    };
    debug.chars().take_while(|c| c.is_alphabetic()).collect()
}

proptest! {
    #[test]
    fn frames_round_trip(frame in frame()) {
        let bytes = encode(&frame);
        prop_assert_eq!(peek(&bytes).map(|kind| kind.name().to_owned()), Some(name(&frame)));
        prop_assert_eq!(decode(&bytes), Ok(frame));
    }

    #[test]
    fn cut_or_extended_frames_are_refused(
        frame in frame(),
        cut in any::<prop::sample::Index>(),
        tail in vec(any::<u8>(), 1..20),
    ) {
        let mut bytes = encode(&frame);
        prop_assert!(decode(&bytes[..cut.index(bytes.len())]).is_err());
        bytes.extend(tail);
        prop_assert!(decode(&bytes).is_err());
    }

    #[test]
    fn mutated_frames_decode_to_what_they_say(
        frame in frame(),
        hits in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = encode(&frame);
        for (at, value) in hits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if let Ok(frame) = decode(&bytes) {
            prop_assert_eq!(peek(&bytes).map(|kind| kind.name().to_owned()), Some(name(&frame)));
            prop_assert_eq!(decode(&encode(&frame)), Ok(frame));
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_or_a_frame(
        kind in 0..32u8,
        version in 0..3u8,
        headed in any::<bool>(),
        body in vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = if headed { vec![MAGIC[0], MAGIC[1], version, kind] } else { Vec::new() };
        bytes.extend(body);
        if let Ok(frame) = decode(&bytes) {
            prop_assert_eq!(decode(&encode(&frame)), Ok(frame));
        }
    }

    #[test]
    fn what_fits_is_decoded(message in message()) {
        prop_assert!(fits(&message));
    }
}

#[test]
fn a_list_cannot_be_longer_than_the_frame() {
    for length in [[0xdd, 0xff, 0xff, 0xff, 0xff], [0xdd, 0, 0, 0, 9]] {
        let mut bytes = vec![MAGIC[0], MAGIC[1], 1, MessageKind::Ack as u8];
        bytes.extend(length);
        bytes.extend([0; 8]);
        assert_eq!(&*decode(&bytes).unwrap_err().rule, "list longer than the frame");
    }
}

#[test]
fn oversize_is_refused_before_it_is_read_and_never_sent() {
    let error = decode(&vec![0; FRAME_MAX + 1]).unwrap_err();
    assert_eq!(&*error.rule, "longer than a frame may be");
    let tag = AttemptTag {
        key: TransferKey { id: "t".into(), prompt: 0 },
        sibling: 0,
        attempt: Attempt(1),
    };
    let most = FRAME_MAX / 5 - 1024;
    let announce = |count: usize| Message::Announce {
        tag: tag.clone(),
        tokens: 1,
        from: 0,
        blocks: vec![BlockList::new(vec![u32::MAX; count])],
        verify: None,
    };
    let envelope =
        ConnectionHeader { version: VERSION, from: Incarnation(1), to: Incarnation(1), session: 1 };
    assert!(fits(&announce(most)));
    assert!(encode_data(&envelope, 0, &announce(most)).len() <= FRAME_MAX);
    assert!(!fits(&announce(FRAME_MAX / 5)));
}

#[test]
fn hellos_of_many_ranks_and_layers_fit_into_what_peers_read() {
    let text = "x".repeat(256);
    // As long as those of MoRI.
    let opaque = || std::sync::Arc::<[u8]>::from([0xff; 360]);
    let layer = LayerLayout {
        region: u16::MAX,
        base: u64::MAX,
        shape: [u32::MAX; 4],
        stride: [u64::MAX; 4],
        element: u32::MAX,
        slots: HeadSlots::Split,
    };
    let rank = |rank, layers: u16| RankLayout {
        rank,
        address: Address(opaque()),
        regions: vec![(RegionDesc(opaque()), u64::MAX); layers.into()],
        layers: vec![layer.clone(); layers.into()],
    };
    let geometry = |layers: u16| Geometry {
        model: text.as_str().into(),
        tp: TP_MAX,
        kv_heads: u16::MAX,
        latent: false,
        packed: false,
        layers,
        groups: vec![KvGroup::full(u32::MAX, 0..layers)],
    };
    let hello = |ranks: u16, layers: u16| {
        encode(&Frame::Hello(Box::new(Hello {
            version: VERSION,
            version_min: VERSION,
            engine: text.as_str().into(),
            incarnation: Incarnation(u64::MAX),
            session: u64::MAX,
            expects: text.as_str().into(),
            role: Role::Prefill,
            capabilities: u32::MAX,
            fingerprint: u64::MAX,
            geometry: geometry(layers),
            ranks: (0..ranks).map(|nth| rank(nth, layers)).collect(),
        })))
    };
    let long = hello(TP_MAX, 256);
    assert!(long.len() <= FRAME_MAX, "{} bytes", long.len());
    assert!(decode(&long).is_ok());
    // A link that has proven nothing takes a mebibyte, with the proof ahead of the hello.
    let usual = hello(8, 128);
    assert!(usual.len() + (4 << 10) <= 1 << 20, "{} bytes", usual.len());
}

#[test]
fn other_protocols_and_versions_are_told_apart() {
    let http = decode(b"GET / HTTP/1.1\r\n\r\n").unwrap_err();
    let foreign = decode(&[0x82, 0xa4, b't', b'y', b'p', b'e']).unwrap_err();
    assert_eq!((&*http.rule, &*foreign.rule), ("another protocol", "another protocol"));
    assert_eq!(peek(b"GET / HTTP/1.1"), None);
    let envelope =
        ConnectionHeader { version: VERSION, from: Incarnation(1), to: Incarnation(1), session: 1 };
    let mut bytes = encode(&Frame::Probe { envelope });
    bytes[2] = VERSION as u8 + 1;
    let error = decode(&bytes).unwrap_err();
    assert_eq!(error.to_string(), format!("unknown version {} in Probe", VERSION + 1));
    assert_eq!(error.violation("d0").peer, "d0".into());
}

#[test]
fn the_header_cannot_name_another_message() {
    let tag = AttemptTag {
        key: TransferKey { id: "t".into(), prompt: 0 },
        sibling: 0,
        attempt: Attempt(1),
    };
    let envelope =
        ConnectionHeader { version: VERSION, from: Incarnation(1), to: Incarnation(1), session: 1 };
    let mut bytes = encode_data(&envelope, 0, &Message::Cancel { tag });
    bytes[3] = MessageKind::Release as u8;
    assert_eq!(&*decode(&bytes).unwrap_err().rule, "header names another message");
}

#[test]
fn kinds_have_names() {
    for kind in MessageKind::ALL {
        assert_eq!(MessageKind::parse(kind.name()), Some(*kind));
    }
    assert_eq!(MessageKind::parse("Nothing"), None);
}

fn cancel(version: u16) -> (ConnectionHeader, AttemptTag, Vec<u8>) {
    let tag = AttemptTag {
        key: TransferKey { id: "t".into(), prompt: 0 },
        sibling: 0,
        attempt: Attempt(1),
    };
    let envelope =
        ConnectionHeader { version, from: Incarnation(1), to: Incarnation(1), session: 1 };
    let bytes = encode_data(&envelope, 7, &Message::Cancel { tag: tag.clone() });
    (envelope, tag, bytes)
}

#[test]
fn of_a_message_that_cannot_be_read_is_known_what_can_be() {
    for version in VERSION_MIN..=VERSION {
        let (envelope, tag, bytes) = cancel(version);
        let known = |about| Some(UnreadableMessage { envelope, seq: 7, about });
        for cut in 1..bytes.len() - 4 {
            let unread = read(&bytes[..bytes.len() - cut]).unwrap_err();
            assert!(!unread.later);
            // The tag is the last of it, and the number is 6 bytes behind the header.
            let expected = if cut <= bytes.len() - 4 - 6 { known(None) } else { None };
            assert_eq!(unread.message, expected, "{cut} bytes cut");
        }
        let longer = [&bytes[..], &[0xc0]].concat();
        let about = Some((MessageKind::Cancel, tag.clone()));
        assert_eq!(read(&longer).unwrap_err().message, known(about.clone()));
        // A header that was hit does not make it a message of a later version.
        let mut hit = bytes.clone();
        hit[3] = 99;
        let unread = read(&hit).unwrap_err();
        let expected = if version == 1 { None } else { known(about) };
        assert_eq!((unread.later, unread.message), (false, expected));
    }
}

#[test]
fn additions_are_read_from_version_2_on() {
    for version in VERSION_MIN..=VERSION {
        let (envelope, tag, bytes) = cancel(version);
        // A fourth value behind the message.
        let mut longer = bytes.clone();
        longer[4] += 1;
        longer.push(0xc0);
        let frame = Frame::Data { envelope, seq: 7, message: Message::Cancel { tag } };
        assert_eq!(decode(&longer).ok(), (version > 1).then_some(frame));
        // Kinds that are not known: of a signal, and of a message.
        for (kind, numbered) in [(11, false), (99, true)] {
            let head = [MAGIC[0], MAGIC[1], version as u8, kind];
            let body = [&bytes[4..10], b"\x81\xa3New\x90"].concat();
            let unread = read(&[&head[..], &body].concat()).unwrap_err();
            assert_eq!(&*unread.error.rule, format!("unknown kind {kind}"));
            assert_eq!(unread.later, version > 1);
            let known = numbered && version > 1;
            let lost = known.then_some(UnreadableMessage { envelope, seq: 7, about: None });
            assert_eq!(unread.message, lost);
        }
    }
}

#[test]
fn hellos_and_registrations_may_grow_at_their_end() {
    let registration = Registration::new(
        "p0".into(),
        Incarnation(5),
        Role::Prefill,
        Mode::Push,
        "10.0.0.1:8000".into(),
        "tcp://10.0.0.1:6301".into(),
    );
    let hello = Hello {
        version: VERSION,
        version_min: VERSION_MIN,
        engine: "p0".into(),
        incarnation: Incarnation(5),
        session: 1,
        expects: "d0".into(),
        role: Role::Prefill,
        capabilities: 0,
        fingerprint: 0,
        geometry: Geometry::new("m", 1, vec![KvGroup::full(16, [0])]),
        ranks: Vec::new(),
    };
    let welcome = Frame::Welcome(Box::new(hello.clone()));
    for frame in [Frame::Hello(Box::new(hello)), welcome, Frame::Register(registration)] {
        let mut bytes = encode(&frame);
        // A MessagePack array of fewer than 16 values, and how another number of them is written.
        let count = bytes[4] & 0x0f;
        assert_eq!(bytes[4] & 0xf0, 0x90);
        bytes.splice(4..5, [0xdc, 0, count + 1]);
        bytes.push(0xc0);
        assert_eq!(decode(&bytes), Ok(frame));
    }
}

#[test]
fn version_1_is_told_failures_in_its_own_words() {
    let (envelope, tag, _) = cancel(1);
    let failure = Failure::Unknown("Later".into());
    let ended = |failure| Message::Ended { tag: tag.clone(), failure, quiet: true };
    let message = ended(failure.clone());
    let bytes = encode_data(&envelope, 7, &message);
    let told = Failure::Fabric(FabricError::Backend(failure.to_string().into()));
    let message = ended(told);
    assert_eq!(decode(&bytes), Ok(Frame::Data { envelope, seq: 7, message }));
}
