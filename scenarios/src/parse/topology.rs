//! `[topology]`: instances, links and the router.

use super::limits::{FabricSpec, ProtocolSpec};
use super::model::ModelSpec;
use crate::cost::StepCost;
use crate::decide::{DecisionKey, kind};
use crate::doc::{FileName, TomlSection};
use crate::error::ScenarioError;
use crate::preset::{HARDWARE, HardwarePreset, SMALL};
use crate::run::{
    FabricLimits, InstanceSettings, MemoryLayout, ModelGeometry, NetworkSettings, ProtocolSettings,
    RouterSettings,
};
use crate::value::{Bandwidth, Distribution, InstanceName, ScenarioValue, named_values};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::TP_MAX;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::router::RouterConfig;

named_values! {
    Mode: "push" = Mode::Push, "pull" = Mode::Pull;
}

#[derive(Debug)]
pub(super) struct TopologySpec {
    pub(super) hardware: Option<&'static HardwarePreset>,
    instances: Vec<InstanceSpec>,
    link: LinkSpec,
    router: RouterSpec,
}

/// One table of `prefill` or `decode`.
#[derive(Debug)]
struct InstanceSpec {
    role: Role,
    name: Option<InstanceName>,
    node: Option<InstanceName>,
    count: Option<Distribution<u16>>,
    tp: Distribution<u16>,
    dp: Distribution<u16>,
    blocks: Option<Distribution<u32>>,
    block_tokens: Option<Distribution<u32>>,
    layout: Option<Distribution<MemoryLayout>>,
    mode: Option<Distribution<Mode>>,
    prefix_cache: Distribution<bool>,
    protocol: ProtocolSpec,
    fabric: FabricSpec,
    line: u32,
}

/// What holds for every instance that does not say otherwise.
pub(super) struct InstanceDefaults {
    pub(super) mode: Mode,
    pub(super) protocol: ProtocolSettings,
    pub(super) fabric: FabricLimits,
}

/// A drawn instance before the model is known.
pub(super) struct InstanceShape {
    spec: usize,
    name: String,
    pub(super) tp: u16,
    pub(super) block_tokens: u32,
    key: DecisionKey,
}

impl TopologySpec {
    pub(super) fn read(section: &TomlSection<'_>) -> Result<TopologySpec, ScenarioError> {
        let names: Vec<&str> = HARDWARE.iter().map(|machine| machine.name).collect();
        let find = |name: &str| HARDWARE.iter().find(|machine| machine.name == name);
        let hardware =
            section.get("hardware").map(|field| field.entry(&names, find)).transpose()?;
        let mut instances = Vec::new();
        for (role, key) in [(Role::Prefill, "prefill"), (Role::Decode, "decode")] {
            let tables = section.sections(key)?;
            if tables.is_empty() {
                let empty = TomlSection::new(section.doc, section.path(key), None, section.line);
                instances.push(InstanceSpec::read(role, &empty)?);
            }
            for table in &tables {
                instances.push(InstanceSpec::read(role, table)?);
            }
        }
        let link = LinkSpec::read(&section.section("link")?)?;
        let router = RouterSpec::read(&section.section("router")?)?;
        section.finish()?;
        let spec = TopologySpec { hardware, instances, link, router };
        spec.unique_names(&section.doc.file)?;
        Ok(spec)
    }

    fn unique_names(&self, file: &FileName) -> Result<(), ScenarioError> {
        let mut seen = std::collections::BTreeSet::new();
        for (spec, name) in self.possible_names() {
            if ["router", "any", "prefill", "decode"].contains(&name.as_str()) {
                let what = format!("an instance cannot be named `{name}`");
                return Err(file.error(spec.line, what, "choose another name"));
            }
            if !seen.insert(name.clone()) {
                let what = format!("two instances are named `{name}`");
                return Err(file.error(spec.line, what, "give each `name` once"));
            }
        }
        Ok(())
    }

    /// Every name that an instance can get from some seed.
    pub(super) fn names(&self) -> Vec<String> {
        self.possible_names().map(|(_, name)| name).collect()
    }

    fn possible_names(&self) -> impl Iterator<Item = (&InstanceSpec, String)> {
        self.instances.iter().enumerate().flat_map(move |(at, spec)| {
            let count = spec.count.as_ref().map_or(1, Distribution::largest);
            (0..count).map(move |index| (spec, self.name(at, index)))
        })
    }

    /// The name of the `index`-th instance of a table. Unnamed ones are numbered on within their
    /// role.
    fn name(&self, at: usize, index: u16) -> String {
        let spec = &self.instances[at];
        match (&spec.name, &spec.count) {
            (Some(name), None) => name.0.to_string(),
            (Some(prefix), Some(_)) => format!("{}{index}", prefix.0),
            (None, _) => {
                let before = self.instances[..at]
                    .iter()
                    .filter(|other| other.role == spec.role && other.name.is_none())
                    .map(|other| other.count.as_ref().map_or(1, Distribution::largest));
                let letter = if spec.role == Role::Prefill { 'p' } else { 'd' };
                format!("{letter}{}", before.sum::<u16>() + index)
            }
        }
    }

    /// Checks every TP size against every number of KV heads that can be drawn.
    pub(super) fn check_tp(&self, file: &FileName, model: &ModelSpec) -> Result<(), ScenarioError> {
        let heads: Vec<u16> = model.kv_heads.ends().copied().collect();
        for spec in &self.instances {
            for (tp, heads) in spec.tp.ends().flat_map(|tp| heads.iter().map(move |h| (*tp, *h))) {
                fits(file, spec.tp.line, tp, heads)?;
            }
        }
        Ok(())
    }

    /// Draws names, TP and block sizes; the first is a prefill.
    pub(super) fn shapes(&self, seed: u64, block_tokens: u32) -> Vec<InstanceShape> {
        let mut shapes = Vec::new();
        for (at, spec) in self.instances.iter().enumerate() {
            let count = match &spec.count {
                Some(count) => {
                    let key =
                        DecisionKey::new(seed, "topology.count").actor(kind(&self.name(at, 0)));
                    count.draw(&key)
                }
                None => 1,
            };
            for index in 0..count {
                let name = self.name(at, index);
                let key = DecisionKey::new(seed, "topology.instance").actor(kind(&name));
                let block_tokens = or(&spec.block_tokens, block_tokens, &key.part("block_tokens"));
                let tp = spec.tp.draw(&key.part("tp"));
                shapes.push(InstanceShape { spec: at, name, tp, block_tokens, key });
            }
        }
        shapes
    }

    /// Completes the shapes to instances, one per DP rank.
    pub(super) fn instances(
        &self,
        file: &FileName,
        shapes: &[InstanceShape],
        (spec, model): (&ModelSpec, &ModelGeometry),
        shared: &InstanceDefaults,
    ) -> Result<Vec<InstanceSettings>, ScenarioError> {
        let mut instances = Vec::new();
        for shape in shapes {
            let table = &self.instances[shape.spec];
            if !model.latent {
                fits(file, table.tp.line, shape.tp, model.kv_heads)?;
            }
            let blocks = match &table.blocks {
                Some(blocks) => blocks.draw(&shape.key.part("blocks")),
                None => self.default_blocks(file, table.line, spec, model, shape)?,
            };
            let layout = spec.layout.draw(&shape.key.part("layout"));
            let dp_size = table.dp.draw(&shape.key.part("dp"));
            let protocol = table.protocol.draw(&shape.key.part("protocol"), shared.protocol);
            let fabric = table.fabric.draw(&shape.key.part("fabric"), shared.fabric);
            for dp_rank in 0..dp_size {
                let name = if dp_size == 1 {
                    shape.name.clone()
                } else {
                    format!("{}.{dp_rank}", shape.name)
                };
                instances.push(InstanceSettings {
                    name,
                    host: shape.name.clone(),
                    node: table.node.as_ref().map_or(shape.name.clone(), |node| node.0.to_string()),
                    role: table.role,
                    tp: shape.tp,
                    dp_rank,
                    dp_size,
                    blocks,
                    block_tokens: shape.block_tokens,
                    layout: or(&table.layout, layout, &shape.key.part("layout")),
                    mode: or(&table.mode, shared.mode, &shape.key.part("mode")),
                    prefix_cache: table.prefix_cache.draw(&shape.key.part("prefix_cache")),
                    cost: self.cost(spec, model, shape.tp),
                    protocol,
                    fabric,
                });
            }
        }
        Ok(instances)
    }

    fn default_blocks(
        &self,
        file: &FileName,
        line: u32,
        spec: &ModelSpec,
        model: &ModelGeometry,
        shape: &InstanceShape,
    ) -> Result<u32, ScenarioError> {
        let (Some(machine), Some(preset)) = (self.hardware, spec.preset) else { return Ok(256) };
        match machine.blocks(preset, model, shape.tp, shape.block_tokens) {
            0 => {
                let what = format!(
                    "the weights of {} do not fit into {} x {} with TP {}",
                    preset.name, shape.tp, machine.name, shape.tp
                );
                Err(file.error(line, what, "use a larger `tp`, or set `blocks`"))
            }
            blocks => Ok(blocks),
        }
    }

    /// Cost of a step: of model and machine where both are presets.
    pub(super) fn cost(&self, spec: &ModelSpec, model: &ModelGeometry, tp: u16) -> StepCost {
        match (self.hardware, spec.preset) {
            (Some(machine), Some(preset)) => machine.cost(preset, model, tp),
            _ => SMALL,
        }
    }

    pub(super) fn network(&self, seed: u64) -> NetworkSettings {
        self.link.draw(seed, self.hardware)
    }

    pub(super) fn router(&self, seed: u64, prefix_tokens: u32) -> RouterSettings {
        self.router.draw(seed, prefix_tokens)
    }
}

/// TP splits the heads evenly or replicates each on equally many ranks.
pub(super) fn fits(file: &FileName, line: u32, tp: u16, heads: u16) -> Result<(), ScenarioError> {
    if heads.is_multiple_of(tp) || tp.is_multiple_of(heads) {
        return Ok(());
    }
    let what = format!("`tp` {tp} does not fit {heads} KV heads");
    let fitting: Vec<String> = (1..=TP_MAX)
        .filter(|tp| heads.is_multiple_of(*tp) || tp.is_multiple_of(heads))
        .take(6)
        .map(|tp| tp.to_string())
        .collect();
    Err(file.error(line, what, format!("use a divisor or multiple: {}", fitting.join(", "))))
}

impl InstanceSpec {
    fn read(role: Role, section: &TomlSection<'_>) -> Result<InstanceSpec, ScenarioError> {
        let spec = InstanceSpec {
            role,
            name: section.literal("name")?,
            node: section.literal("node")?,
            count: section.limited("count", 1, 64)?,
            tp: section.limited_or("tp", 1, (1, TP_MAX))?,
            dp: section.limited_or("dp", 1, (1, 64))?,
            blocks: section.limited("blocks", 1, 1 << 28)?,
            block_tokens: section.limited("block_tokens", 1, 1 << 20)?,
            layout: section.draw("layout")?,
            mode: section.draw("mode")?,
            prefix_cache: section.draw_or("prefix_cache", true)?,
            protocol: ProtocolSpec::read(&section.section("protocol")?)?,
            fabric: FabricSpec::read(&section.section("fabric")?)?,
            line: section.line,
        };
        section.finish()?;
        Ok(spec)
    }
}

#[derive(Debug)]
struct LinkSpec {
    latency: Distribution<Nanos>,
    bandwidth: Option<Distribution<Bandwidth>>,
    node_latency: Distribution<Nanos>,
    node_bandwidth: Option<Distribution<Bandwidth>>,
    control_latency: Distribution<Nanos>,
}

impl LinkSpec {
    fn read(section: &TomlSection<'_>) -> Result<LinkSpec, ScenarioError> {
        let latency = |key, min, max| -> Result<Distribution<Nanos>, ScenarioError> {
            let default = || Distribution::range(Nanos::from_us(min), Nanos::from_us(max));
            Ok(section.draw(key)?.unwrap_or_else(default))
        };
        let rate = |key| -> Result<Option<Distribution<Bandwidth>>, ScenarioError> {
            let rate: Option<Distribution<Bandwidth>> = section.draw(key)?;
            match &rate {
                Some(zero) if zero.ends().any(|end| end.0 == 0) => {
                    let what = format!("`{}` is 0", section.path(key));
                    Err(section.doc.file.error(zero.line, what, "give at least \"1B/s\""))
                }
                _ => Ok(rate),
            }
        };
        let spec = LinkSpec {
            latency: latency("latency", 2, 10)?,
            bandwidth: rate("bandwidth")?,
            node_latency: latency("node_latency", 1, 3)?,
            node_bandwidth: rate("node_bandwidth")?,
            control_latency: latency("control_latency", 20, 60)?,
        };
        section.finish()?;
        Ok(spec)
    }

    fn draw(&self, seed: u64, hardware: Option<&HardwarePreset>) -> NetworkSettings {
        let key = |name: &str| DecisionKey::new(seed, "topology.link").part(name);
        // Without a machine: the same NIC and node link as the MI300X platform.
        let machine = hardware.unwrap_or(&HARDWARE[0]);
        NetworkSettings {
            latency: self.latency.span(&key("latency")),
            bandwidth: or(&self.bandwidth, Bandwidth(machine.nic_rate), &key("bandwidth")).0,
            node_latency: self.node_latency.span(&key("node_latency")),
            node_bandwidth: or(&self.node_bandwidth, Bandwidth(machine.node_rate), &key("node")).0,
            control_latency: self.control_latency.span(&key("control_latency")),
        }
    }
}

/// A duration of [`RouterConfig`] and the key that sets it.
type RouterTimeKey = (&'static str, fn(&mut RouterConfig) -> &mut Nanos);
/// A limit of [`RouterConfig`] and the key that sets it.
type RouterLimitKey = (&'static str, fn(&mut RouterConfig) -> &mut u32);

const TIMES: &[RouterTimeKey] = &[
    ("expiry", |config| &mut config.expiry),
    ("suspicion", |config| &mut config.suspicion),
    ("breaker_max", |config| &mut config.breaker_max),
    ("stream_grace", |config| &mut config.stream_grace),
    ("drain_max", |config| &mut config.drain_max),
    ("wait_max", |config| &mut config.wait_max),
];

const LIMITS: &[RouterLimitKey] = &[
    ("instances_max", |config| &mut config.instances_max),
    ("legs_max", |config| &mut config.legs_max),
    ("retries_max", |config| &mut config.retries_max),
    ("waiting_max", |config| &mut config.waiting_max),
    ("requests_max", |config| &mut config.requests_max),
    ("affinity_percent", |config| &mut config.affinity_percent),
    ("prefixes_max", |config| &mut config.prefixes_max),
];

#[derive(Debug)]
struct RouterSpec {
    heartbeat: Distribution<Nanos>,
    ids_differ: Distribution<bool>,
    times: Vec<Option<Distribution<Nanos>>>,
    limits: Vec<Option<Distribution<u32>>>,
}

impl RouterSpec {
    fn read(section: &TomlSection<'_>) -> Result<RouterSpec, ScenarioError> {
        let spec = RouterSpec {
            heartbeat: section.draw_or("heartbeat", Nanos::from_secs(1))?,
            ids_differ: section.draw_or("ids_differ", true)?,
            times: TIMES.iter().map(|(key, _)| section.draw(key)).collect::<Result<_, _>>()?,
            limits: LIMITS.iter().map(|(key, _)| section.draw(key)).collect::<Result<_, _>>()?,
        };
        section.finish()?;
        Ok(spec)
    }

    fn draw(&self, seed: u64, prefix_tokens: u32) -> RouterSettings {
        let key = DecisionKey::new(seed, "topology.router");
        let mut config = RouterConfig { prefix_tokens, ..RouterConfig::default() };
        for (draw, (name, field)) in self.times.iter().zip(TIMES) {
            if let Some(draw) = draw {
                *field(&mut config) = draw.draw(&key.part(name));
            }
        }
        for (draw, (name, field)) in self.limits.iter().zip(LIMITS) {
            if let Some(draw) = draw {
                *field(&mut config) = draw.draw(&key.part(name));
            }
        }
        RouterSettings {
            config,
            heartbeat: self.heartbeat.draw(&key.part("heartbeat")),
            ids_differ: self.ids_differ.draw(&key.part("ids_differ")),
        }
    }
}

/// What was written, or else the default.
pub(super) fn or<T: ScenarioValue>(
    draw: &Option<Distribution<T>>,
    default: T,
    key: &DecisionKey,
) -> T {
    draw.as_ref().map_or(default, |draw| draw.draw(key))
}
