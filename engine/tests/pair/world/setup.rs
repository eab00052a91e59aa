//! How the engines of a pair are configured.

use super::PairWorld;
use kvferry_engine::core::config::{CoreConfig, CoreSettings};
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::dialect::moriio::descriptor::{DescLayout, MoriMemoryDesc};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::{Geometry, KvGroup, LayerLayout};
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::moriio::{MoriioConfig, MoriioSettings};
use kvferry_engine::core::prompt_hash::PromptHash;
use kvferry_engine::core::transfer::{TransferConfig, TransferSettings};
use kvferry_engine::core::verify::Verify;
use kvferry_engine::fabric::*;

/// The recorded connections are of as many.
pub(crate) const LAYERS: u16 = 16;
pub(crate) const BLOCK: u32 = 16;
/// Hash of the prompt.
pub(crate) const HASH: PromptHash = PromptHash([7, 7]);

fn geometry(tp: u16) -> Geometry {
    Geometry { tp, ..Geometry::new("pair", 4, vec![KvGroup::full(BLOCK, 0..LAYERS)]) }
}

pub(crate) fn layers(tp: u16, blocks: u32) -> Vec<LayerLayout> {
    let heads = u64::from(4 / tp);
    let row = 8;
    let bytes = u64::from(blocks) * heads * u64::from(BLOCK) * row * 2;
    let shape = [blocks, heads as u32, BLOCK, row as u32];
    let layer = |layer| LayerLayout::contiguous(u64::from(layer) * bytes, shape, 2);
    (0..LAYERS).map(layer).collect()
}

pub(crate) fn core_config(role: Role, mode: Mode, tp: u16, settings: &CoreSettings) -> CoreConfig {
    let (engine, incarnation) = (role.to_string(), Incarnation(1));
    CoreConfig {
        mode,
        http: "http".into(),
        settings: settings.clone(),
        ..CoreConfig::new(role, engine, incarnation, geometry(tp), "prefill-control".into())
    }
}

/// What a prefill is to peers that speak MoRIIO.
fn moriio() -> MoriioConfig {
    MoriioConfig {
        address: ZmqAddress { host: "10.0.0.1".into(), handshake: 6300, notify: 7300 },
        layer_names: (0..LAYERS).map(|layer| format!("l.{layer}").into()).collect(),
        attn_backend: "".into(),
        settings: MoriioSettings::default(),
        closed: None,
    }
}

/// A region as MoRI describes it.
pub(super) fn mori_region() -> RegionDesc {
    let desc = MoriMemoryDesc {
        engine_key: "k".into(),
        size: 1 << 25,
        loc: 1,
        ..MoriMemoryDesc::default()
    };
    RegionDesc(desc.encode(DescLayout::V1_2_2).into())
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
    let core = core_config(role, mode, tp, &CoreSettings::default());
    let plane = (Address([role as u8, rank as u8].into()), caps);
    let memory = vec![Memory::Own(OwnMemory::unproven(0, 1 << 25))];
    TransferConfig::new(&core, rank, plane, memory, layers(tp, 1_000))
}

/// A geometry, and where its layers lie.
pub(super) type KvCache = (Geometry, Vec<LayerLayout>);

impl PairWorld {
    /// One rank each, whose prefill deals with peers that speak MoRIIO, too.
    pub(crate) fn beside_moriio(mode: Mode) -> PairWorld {
        let core = |role| core_config(role, mode, 1, &CoreSettings::default());
        let prefill = CoreConfig { moriio: Some(moriio()), ..core(Role::Prefill) };
        PairWorld::of(prefill, core(Role::Decode), caps(), TransferSettings::default())
    }

    /// One rank each, whose decode registers with a router.
    pub(crate) fn behind_a_router(mode: Mode, settings: TransferSettings) -> PairWorld {
        let core = |role| core_config(role, mode, 1, &CoreSettings::default());
        let decode = CoreConfig { router: Some("router".into()), ..core(Role::Decode) };
        PairWorld::of(core(Role::Prefill), decode, caps(), settings)
    }

    /// KV caches of their own, which all ranks of an engine have alike.
    pub(crate) fn with_kv(mode: Mode, kv: [KvCache; 2], verify: Verify) -> PairWorld {
        let roles = [Role::Prefill, Role::Decode];
        let core = |at: usize| CoreConfig {
            geometry: kv[at].0.clone().into(),
            verify,
            ..core_config(roles[at], mode, 1, &CoreSettings::default())
        };
        let (cores, kv) = ((core(0), core(1)), roles.into_iter().zip(kv.clone()).collect());
        PairWorld::start(cores, caps(), TransferSettings::default(), kv)
    }
}
