//! Which engines can exchange KV at all.

use kvferry_engine::core::layout::{self, RankLayout};
use kvferry_engine::core::message::Role;
use kvferry_engine::fabric::{Address, RegionDesc};
use kvferry_scenarios::geometry::{geometry, rank_memory};
use kvferry_scenarios::run::{InstanceSettings, ModelGeometry};

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
