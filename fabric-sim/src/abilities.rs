//! What instances and their data planes can do: who can exchange KV at all, how much a plane takes,
//! how soon the parts of a process host hear one another.

use kvferry_engine::core::layout::{self, RankLayout};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::{
    Address, Caps, Credits, FenceScope, Placement, PlaneTimeouts, RegionDesc,
};
use kvferry_scenarios::geometry::{geometry, rank_memory};
use kvferry_scenarios::run::{FabricLimits, InstanceSettings, ModelGeometry};

/// Latency between the parts of one process host: core, transfer actors, engine.
pub(crate) const LOCAL: Nanos = Nanos(2_000);

/// True if the router may pair two instances and their hello is not refused, by the rule that the
/// engines themselves apply.
pub(crate) fn fits(model: &ModelGeometry, a: &InstanceSettings, b: &InstanceSettings) -> bool {
    let (source, sink) = match (a.role, b.role) {
        (Role::Prefill, Role::Decode) => (a, b),
        (Role::Decode, Role::Prefill) => (b, a),
        _ => return false,
    };
    let side = |spec| (geometry(model, spec), layouts(model, spec));
    let (source_side, sink_side) = (side(source), side(sink));
    source.mode == sink.mode
        && layout::check((&source_side.0, &source_side.1), (&sink_side.0, &sink_side.1)).is_ok()
}

fn layouts(model: &ModelGeometry, spec: &InstanceSettings) -> Vec<RankLayout> {
    let memory = rank_memory(model, spec);
    let region = |bytes: &u64| (RegionDesc([].into()), *bytes);
    let layout = |rank| RankLayout {
        rank,
        address: Address([].into()),
        regions: memory.regions.iter().map(region).collect(),
        layers: memory.layers.clone(),
    };
    (0..spec.tp).map(layout).collect()
}

/// What a data plane can do; limits that the scenario does not set are those of a NIC with room for
/// more than any test needs.
pub(crate) fn caps(placement: Placement, limits: &FabricLimits) -> Caps {
    let credits = |operations: u32, ranges: Option<u32>, bytes: Option<u64>| Credits {
        operations,
        ranges: ranges.map_or(u64::MAX, u64::from),
        bytes: bytes.unwrap_or(u64::MAX),
    };
    let of_peer = limits.operations_per_peer.unwrap_or(u32::MAX);
    Caps {
        read: true,
        write: true,
        slices_max: limits.slices_max.unwrap_or(65_536),
        per_peer: credits(of_peer, limits.ranges_per_peer, limits.bytes_per_peer),
        in_all: credits(limits.operations_max.unwrap_or(1024), limits.ranges_max, limits.bytes_max),
        placement,
        fence: FenceScope::Peer,
        patience: PlaneTimeouts::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{run, two_and_two};
    use kvferry_engine::core::layout::GroupKind;
    use kvferry_engine::core::message::Mode;

    #[test]
    fn what_engines_refuse_and_the_router_does_not_pair_does_not_fit() {
        let mut model = run(Vec::new(), Vec::new()).model;
        let [p, _, d, _] = <[InstanceSettings; 4]>::try_from(two_and_two()).unwrap();
        assert!(fits(&model, &p, &d) && fits(&model, &d, &p));
        assert!(!fits(&model, &p, &p));
        let pull = InstanceSettings { mode: Mode::Pull, ..d.clone() };
        assert!(!fits(&model, &p, &pull));
        let odd = InstanceSettings { block_tokens: 24, ..d.clone() };
        assert!(!fits(&model, &p, &odd));
        let one = InstanceSettings { tp: 1, ..d };
        assert!(fits(&model, &p, &one));
        model.groups[0].kind = GroupKind::State;
        assert!(!fits(&model, &p, &one));
    }
}
