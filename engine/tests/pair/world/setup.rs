//! How the engines of a pair are configured.

use kvferry_engine::core::channel::ChannelConfig;
use kvferry_engine::core::config::{CoreConfig, CoreSettings};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::{Geometry, GroupKind, HeadSlots, KvGroup, LayerLayout};
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::transfer::{TransferConfig, TransferSettings};
use kvferry_engine::fabric::*;
use std::sync::Arc;

/// The recorded connections are of as many.
pub(crate) const LAYERS: u16 = 16;
pub(crate) const BLOCK: u32 = 16;

fn geometry(tp: u16) -> Geometry {
    Geometry {
        model: "pair".into(),
        tp,
        kv_heads: 4,
        latent: false,
        packed: false,
        layers: LAYERS,
        groups: vec![KvGroup {
            kind: GroupKind::Full,
            block_tokens: BLOCK,
            layers: (0..LAYERS).collect(),
        }],
    }
}

pub(crate) fn layers(tp: u16, blocks: u32) -> Vec<LayerLayout> {
    let heads = u64::from(4 / tp);
    let row = 8;
    (0..LAYERS)
        .map(|layer| LayerLayout {
            region: 0,
            base: u64::from(layer) * u64::from(blocks) * heads * u64::from(BLOCK) * row * 2,
            shape: [blocks, heads as u32, BLOCK, row as u32],
            stride: [heads * u64::from(BLOCK) * row, u64::from(BLOCK) * row, row, 1],
            element: 2,
            slots: HeadSlots::Fused,
        })
        .collect()
}

pub(crate) fn core_config(role: Role, mode: Mode, tp: u16, settings: &CoreSettings) -> CoreConfig {
    CoreConfig {
        engine: role.to_string().into(),
        incarnation: Incarnation(1),
        role,
        mode,
        geometry: Arc::new(geometry(tp)),
        http: "http".into(),
        control: "prefill-control".into(),
        dp: (0, 1),
        router: None,
        settings: settings.clone(),
        channel: ChannelConfig::default(),
        moriio: None,
    }
}

pub(crate) fn caps() -> Caps {
    Caps {
        read: true,
        write: true,
        slices_max: 1024,
        per_peer: Credits::UNLIMITED,
        in_all: Credits::UNLIMITED,
        placement: Placement::OnQuiet,
        fence: FenceScope::Peer,
        patience: PlaneTimeouts::default(),
    }
}

pub(crate) fn actor(role: Role, mode: Mode, tp: u16, rank: u16, caps: Caps) -> TransferConfig {
    let blocks = 1_000;
    TransferConfig {
        rank,
        role,
        mode,
        geometry: Arc::new(geometry(tp)),
        address: Address([role as u8, rank as u8].into()),
        caps,
        memory: vec![Memory::Own { base: 0, len: 1 << 25 }],
        layers: layers(tp, blocks),
        settings: TransferSettings::default(),
    }
}
