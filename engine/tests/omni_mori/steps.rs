//! What happens to a world, and what things in it are called.

use kvferry_engine::core::dialect::moriio::descriptor::{
    DescLayout, MoriEngineDesc, MoriMemoryDesc,
};
use kvferry_engine::core::payload::{PayloadKey, PayloadStream};
use kvferry_engine::fabric::LinkId;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;

/// Bytes of a receiver's region.
pub(crate) const REGION: u64 = 32_768;

#[derive(Clone, Debug)]
pub(crate) enum WireStep {
    Put {
        key: u8,
        bytes: u64,
        usable: bool,
    },
    CleanUp {
        key: u8,
    },
    LinkUp {
        link: u8,
    },
    LinkDown {
        link: u8,
    },
    Query {
        link: u8,
        key: u8,
    },
    Pull {
        link: u8,
        key: u8,
        engine: u8,
        dst: u64,
        lie: u8,
    },
    Garbage {
        link: u8,
        bytes: Vec<u8>,
    },
    Opens {
        ok: bool,
    },
    Completes {
        op: u8,
        how: u8,
    },
    Deliver,
    Busy {
        busy: bool,
    },
    /// What the payload core answers is on its way for a while.
    Delay {
        delay: bool,
    },
    Reset,
    Fetch {
        key: u8,
        sender: u8,
    },
    Stop {
        key: u8,
    },
    Dialled {
        link: u8,
        up: bool,
    },
    SenderSays {
        link: u8,
        how: u8,
    },
    LateWrite {
        region: u8,
    },
    Wait {
        ms: u64,
    },
}

pub(crate) fn step() -> impl Strategy<Value = WireStep> {
    let (key, link, engine) = (0..3u8, 0..5u8, 0..3u8);
    prop_oneof![
        6 => (key.clone(), 1..9_000u64, 0..8u8)
            .prop_map(|(key, bytes, usable)| WireStep::Put { key, bytes, usable: usable > 0 }),
        2 => key.clone().prop_map(|key| WireStep::CleanUp { key }),
        3 => link.clone().prop_map(|link| WireStep::LinkUp { link }),
        2 => link.clone().prop_map(|link| WireStep::LinkDown { link }),
        8 => (link.clone(), key.clone()).prop_map(|(link, key)| WireStep::Query { link, key }),
        10 => (link.clone(), key.clone(), engine, 0..40_000u64, 0..12u8).prop_map(
            |(link, key, engine, dst, lie)| WireStep::Pull { link, key, engine, dst, lie }
        ),
        1 => (link, vec(any::<u8>(), 0..40)).prop_map(|(link, bytes)| WireStep::Garbage { link, bytes }),
        5 => any::<bool>().prop_map(|ok| WireStep::Opens { ok }),
        10 => (any::<u8>(), 0..6u8).prop_map(|(op, how)| WireStep::Completes { op, how }),
        10 => Just(WireStep::Deliver),
        1 => any::<bool>().prop_map(|busy| WireStep::Busy { busy }),
        2 => any::<bool>().prop_map(|delay| WireStep::Delay { delay }),
        1 => Just(WireStep::Reset),
        5 => (key.clone(), 0..2u8).prop_map(|(key, sender)| WireStep::Fetch { key, sender }),
        1 => key.prop_map(|key| WireStep::Stop { key }),
        5 => (any::<u8>(), any::<bool>()).prop_map(|(link, up)| WireStep::Dialled { link, up }),
        10 => (any::<u8>(), 0..9u8).prop_map(|(link, how)| WireStep::SenderSays { link, how }),
        3 => any::<u8>().prop_map(|region| WireStep::LateWrite { region }),
        4 => (0..2_000u64).prop_map(|ms| WireStep::Wait { ms }),
        1 => Just(WireStep::Wait { ms: 40_000 }),
    ]
}

pub(crate) fn key(key: u8) -> PayloadKey {
    let stream = PayloadStream::new("0", "1", &format!("request-{key}"));
    if key == 2 { stream.whole() } else { stream.chunk(key.into()) }
}

pub(crate) fn id(of: &PayloadKey) -> Arc<str> {
    match of.chunk {
        Some(chunk) => format!("{}_0_{chunk}@0_1", of.stream.request).into(),
        None => format!("{}@0_1", of.stream.request).into(),
    }
}

pub(crate) fn engine_desc(engine: u8) -> Arc<[u8]> {
    let key = format!("omni-receiver-{engine}").into();
    MoriEngineDesc { key, ..MoriEngineDesc::default() }.encode(DescLayout::V1_2_2).into()
}

pub(crate) fn memory_desc(engine: u8) -> Arc<[u8]> {
    let engine_key = format!("omni-receiver-{engine}").into();
    let desc = MoriMemoryDesc { engine_key, size: REGION, ..MoriMemoryDesc::default() };
    desc.encode(DescLayout::V1_2_2).into()
}

pub(crate) fn caller(link: u8) -> LinkId {
    LinkId(LinkId::INBOUND | u32::from(link))
}
