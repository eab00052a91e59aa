//! `[topology]`: instances, links and the router.

use super::limits::{FabricSpec, ProtocolSpec, within_credits};
use super::model::ModelSpec;
use super::payloads::HostSpec;
use crate::ScenarioError;
use crate::cost::StepCost;
use crate::decide::{DecisionKey, kind};
use crate::doc::{ClosedList, FileName, FromKey, FromSection, TomlField, TomlSection};
use crate::preset::{HARDWARE, HardwarePreset, SMALL};
use crate::run::{
    FabricLimits, InstanceSettings, MemoryLayout, ModelGeometry, NetworkSettings, ProtocolSettings,
    RouterSettings, Served,
};
use crate::value::{Bandwidth, Distribution, InstanceName, ScenarioValue, or};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::ids::TP_MAX;
use kvferry_engine::core::message::{Mode, Role, ServedModels};
use kvferry_engine::core::router::RouterConfig;
use kvferry_faults::{section, settings};
use std::sync::Arc;

impl ClosedList for &'static HardwarePreset {
    fn named() -> Vec<(&'static str, &'static HardwarePreset)> {
        HARDWARE.iter().map(|machine| (machine.name, machine)).collect()
    }
}

section! {
    #[derive(Debug)]
    pub(super) struct TopologySpec checked by TopologySpec::unique_names {
        pub(super) hardware: Option<&'static HardwarePreset>;
        prefill: InstanceTables;
        decode: InstanceTables;
        pub(super) serves: Option<Distribution<Served>>;
        pub(super) hosts: Vec<HostSpec>;
        link: LinkSpec;
        router: RouterSpec;
    }
}

/// The tables of `prefill` or `decode`; one without keys if there is none.
#[derive(Debug)]
struct InstanceTables(Vec<InstanceSpec>);

impl FromKey for InstanceTables {
    fn from_field(field: &TomlField<'_>) -> Result<InstanceTables, ScenarioError> {
        let mut tables = Vec::from_field(field)?;
        if tables.is_empty() {
            tables.push(FromSection::from_section(&field.nothing())?);
        }
        Ok(InstanceTables(tables))
    }

    fn absent(
        section: &TomlSection<'_>,
        key: &'static str,
    ) -> Result<Option<InstanceTables>, ScenarioError> {
        let table = FromSection::from_section(&section.nothing(key))?;
        Ok(Some(InstanceTables(vec![table])))
    }
}

section! {
    /// One table of `prefill` or `decode`.
    #[derive(Debug)]
    struct InstanceSpec(section) {
        name: Option<InstanceName>;
        node: Option<InstanceName>;
        count: Option<Distribution<u16>>, in (1, 64);
        tp: Distribution<u16> = 1, in (1, TP_MAX);
        dp: Distribution<u16> = 1, in (1, 64);
        blocks: Option<Distribution<u32>>, in (1, 1 << 28);
        block_tokens: Option<Distribution<u32>>, in (1, 1 << 20);
        layout: Option<Distribution<MemoryLayout>>;
        mode: Option<Distribution<Mode>>;
        prefix_cache: Distribution<bool> = true;
        protocol: ProtocolSpec;
        fabric: FabricSpec;
        models: Distribution<ModelNames> = ModelNames(Vec::new());
    } with {
        line: u32 = section.line;
    }
}

/// The model that an instance serves and adapters of it; none if it does not say.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ModelNames(Vec<InstanceName>);

/// What stands for instances that do not say which models they serve.
const ANY_MODEL: &str = "any";

impl ScenarioValue for ModelNames {
    fn form() -> String {
        "names with commas between them, or \"any\"".into()
    }

    fn parse(text: &str) -> Option<ModelNames> {
        if text == ANY_MODEL {
            return Some(ModelNames(Vec::new()));
        }
        let names = text.split(',').map(|name| InstanceName::parse(name.trim()));
        names.collect::<Option<_>>().map(ModelNames)
    }

    fn spelled(&self) -> String {
        let names: Vec<&str> = self.0.iter().map(|name| &*name.0).collect();
        if names.is_empty() { ANY_MODEL.into() } else { names.join(",") }
    }
}

impl From<ModelNames> for Option<Arc<ServedModels>> {
    fn from(names: ModelNames) -> Option<Arc<ServedModels>> {
        let mut names = names.0.into_iter().map(|name| name.0);
        let names_of_model = vec![names.next()?];
        Some(Arc::new(ServedModels { names: names_of_model, adapters: names.collect() }))
    }
}

/// What holds for every instance that does not say otherwise.
pub(super) struct InstanceDefaults {
    pub(super) mode: Mode,
    pub(super) protocol: ProtocolSettings,
    pub(super) fabric: FabricLimits,
}

/// A drawn instance before the model is known.
pub(super) struct InstanceShape<'a> {
    role: Role,
    table: &'a InstanceSpec,
    name: String,
    pub(super) tp: u16,
    pub(super) block_tokens: u32,
    key: DecisionKey,
}

impl TopologySpec {
    fn unique_names(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        let payloads =
            |serves: &Distribution<Served>| serves.ends().any(|it| *it == Served::Payloads);
        if self.hosts.is_empty() && self.serves.as_ref().is_some_and(payloads) {
            let what = "payloads are served and there are no hosts";
            return Err(section.error_at(section.line_of("serves"), what, "add `hosts`"));
        }
        let mut seen = std::collections::BTreeSet::new();
        let hosts = self.host_tables().map(|(table, names)| (table.line, names));
        let tables = self.tables().map(|(_, table, names)| (table.line, names)).chain(hosts);
        for (line, names) in tables {
            for name in names {
                if ["router", "any", "prefill", "decode"].contains(&name.as_str()) {
                    let what = format!("an instance cannot be named `{name}`");
                    return Err(section.error_at(line, what, "choose another name"));
                }
                if seen.contains(&name) {
                    let what = format!("two instances are named `{name}`");
                    return Err(section.error_at(line, what, "give each `name` once"));
                }
                seen.insert(name);
            }
        }
        Ok(())
    }

    /// Every name that an instance can get from some seed.
    pub(super) fn names(&self) -> Vec<String> {
        let hosts = self.host_tables().flat_map(|(_, names)| names);
        self.tables().flat_map(|(_, _, names)| names).chain(hosts).collect()
    }

    /// The tables of hosts, each with the names that its hosts can get.
    pub(super) fn host_tables(&self) -> impl Iterator<Item = (&HostSpec, Vec<String>)> {
        let mut unnamed = 0;
        self.hosts.iter().map(move |table| {
            let names = table.names(unnamed);
            unnamed += if table.name.is_none() { names.len() as u16 } else { 0 };
            (table, names)
        })
    }

    /// The tables, each with the names that its instances can get. Unnamed ones are numbered on
    /// within their role.
    fn tables(&self) -> impl Iterator<Item = (Role, &InstanceSpec, Vec<String>)> {
        let roles = [(Role::Prefill, 'p', &self.prefill), (Role::Decode, 'd', &self.decode)];
        roles.into_iter().flat_map(|(role, letter, tables)| {
            let mut unnamed = 0;
            tables.0.iter().map(move |table| {
                let count = table.count.as_ref().map_or(1, Distribution::largest);
                let name = |index| match (&table.name, &table.count) {
                    (Some(name), None) => name.0.to_string(),
                    (Some(prefix), Some(_)) => format!("{}{index}", prefix.0),
                    (None, _) => format!("{letter}{}", unnamed + index),
                };
                let names = (0..count).map(name).collect();
                unnamed += if table.name.is_none() { count } else { 0 };
                (role, table, names)
            })
        })
    }

    /// Checks every TP size against every number of KV heads that can be drawn.
    pub(super) fn check_tp(&self, file: &FileName, model: &ModelSpec) -> Result<(), ScenarioError> {
        let heads: Vec<u16> = model.kv_heads.ends().copied().collect();
        for (_, spec, _) in self.tables() {
            for (tp, heads) in spec.tp.ends().flat_map(|tp| heads.iter().map(move |h| (*tp, *h))) {
                fits(file, spec.tp.line, tp, heads)?;
            }
        }
        Ok(())
    }

    /// The tables, each with the names that its instances have.
    fn named_tables(&self, seed: u64) -> impl Iterator<Item = (Role, &InstanceSpec, Vec<String>)> {
        self.tables().map(move |(role, table, mut names)| {
            let key = DecisionKey::new(seed, "topology.count").actor(kind(&names[0]));
            names.truncate(or(&table.count, 1, &key).into());
            (role, table, names)
        })
    }

    /// Names of instances, each with its role and the number of its table among those of its role.
    pub(super) fn instance_names(&self, seed: u64) -> Vec<(Role, usize, String)> {
        let mut found = Vec::new();
        for role in [Role::Prefill, Role::Decode] {
            let tables = self.named_tables(seed).filter(|(of, ..)| *of == role);
            for (at, (_, _, names)) in tables.enumerate() {
                found.extend(names.into_iter().map(|name| (role, at, name)));
            }
        }
        found
    }

    /// Draws names, TP and block sizes; the first is a prefill.
    pub(super) fn shapes(&self, seed: u64, block_tokens: u32) -> Vec<InstanceShape<'_>> {
        let mut shapes = Vec::new();
        for (role, table, names) in self.named_tables(seed) {
            for name in names {
                let key = DecisionKey::new(seed, "topology.instance").actor(kind(&name));
                let block_tokens = or(&table.block_tokens, block_tokens, &key.part("block_tokens"));
                let tp = table.tp.draw(&key.part("tp"));
                shapes.push(InstanceShape { role, table, name, tp, block_tokens, key });
            }
        }
        shapes
    }

    /// Completes the shapes to instances, one per DP rank.
    pub(super) fn instances(
        &self,
        file: &FileName,
        shapes: &[InstanceShape<'_>],
        (spec, model): (&ModelSpec, &ModelGeometry),
        shared: &InstanceDefaults,
    ) -> Result<Vec<InstanceSettings>, ScenarioError> {
        let mut instances = Vec::new();
        for shape in shapes {
            let table = shape.table;
            if !model.latent {
                fits(file, table.tp.line, shape.tp, model.kv_heads)?;
            }
            let blocks = match &table.blocks {
                Some(blocks) => blocks.draw(&shape.key.part("blocks")),
                None => self.default_blocks(file, spec, model, shape)?,
            };
            let layout = spec.layout.draw(&shape.key.part("layout"));
            let dp_size = table.dp.draw(&shape.key.part("dp"));
            let protocol =
                table.protocol.draw(&shape.key.part("protocol"), shared.protocol.clone());
            let fabric = table.fabric.draw(&shape.key.part("fabric"), shared.fabric);
            let models: Option<Arc<_>> = table.models.draw(&shape.key.part("models")).into();
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
                    role: shape.role,
                    is_pool: false,
                    tp: shape.tp,
                    dp_rank,
                    dp_size,
                    blocks,
                    block_tokens: shape.block_tokens,
                    layout: or(&table.layout, layout, &shape.key.part("layout")),
                    mode: or(&table.mode, shared.mode, &shape.key.part("mode")),
                    prefix_cache: table.prefix_cache.draw(&shape.key.part("prefix_cache")),
                    cost: self.cost(spec, model, shape.tp),
                    protocol: protocol.clone(),
                    fabric: within_credits(fabric),
                    models: models.clone(),
                });
            }
        }
        Ok(instances)
    }

    fn default_blocks(
        &self,
        file: &FileName,
        spec: &ModelSpec,
        model: &ModelGeometry,
        shape: &InstanceShape<'_>,
    ) -> Result<u32, ScenarioError> {
        let (Some(machine), Some(preset)) = (self.hardware, spec.preset) else { return Ok(256) };
        match machine.blocks(preset, model, shape.tp, shape.block_tokens) {
            0 => {
                let what = format!(
                    "the weights of {} do not fit into {} x {} with TP {}",
                    preset.name, shape.tp, machine.name, shape.tp
                );
                Err(file.error(shape.table.line, what, "use a larger `tp`, or set `blocks`"))
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
        let config = RouterConfig { prefix_tokens, ..RouterConfig::default() };
        let base = RouterSettings { config, heartbeat: Nanos::from_secs(1), ids_differ: true };
        self.router.draw(&DecisionKey::new(seed, "topology.router"), base)
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

const fn us(min: u64, max: u64) -> (Nanos, Nanos) {
    (Nanos::from_us(min), Nanos::from_us(max))
}

section! {
    #[derive(Debug)]
    struct LinkSpec {
        latency: Distribution<Nanos> = us(2, 10);
        bandwidth: Option<Distribution<Bandwidth>>;
        node_latency: Distribution<Nanos> = us(1, 3);
        node_bandwidth: Option<Distribution<Bandwidth>>;
        control_latency: Distribution<Nanos> = us(20, 60);
    }
}

impl LinkSpec {
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

settings! {
    struct RouterSpec sets RouterSettings {
        heartbeat: Nanos;
        ids_differ: bool;
        expiry: Nanos => config.expiry;
        suspicion: Nanos => config.suspicion;
        breaker_max: Nanos => config.breaker_max;
        host_wait: Nanos => config.host_wait;
        probe: Nanos => config.probe;
        stream_grace: Nanos => config.stream_grace;
        drain_max: Nanos => config.drain_max;
        wait_max: Nanos => config.wait_max;
        load_period: Nanos => config.load_period;
        instances_max: u32 => config.instances_max;
        legs_max: u32 => config.legs_max;
        retries_max: u32 => config.retries_max;
        waiting_max: u32 => config.waiting_max;
        requests_max: u32 => config.requests_max;
        affinity_percent: u32 => config.affinity_percent;
        prefixes_max: u32 => config.prefixes_max;
    }
}
