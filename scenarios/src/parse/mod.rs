//! From a file to a [`Scenario`], and from a scenario and a seed to a [`Run`].

mod drawn;
mod explicit;
mod limits;
mod model;
mod payloads;
mod settings;
mod static_faults;
mod topology;
mod workload;

use crate::ScenarioError;
use crate::decide::DecisionKey;
use crate::doc::{FileName, TomlDoc, TomlSection};
use crate::lists::FaultKind;
use crate::preset::SMALL;
use crate::run::{
    CELL_LAYERS_MAX, Expect, FabricLimits, InstanceSettings, LivenessMode, MemoryFidelity,
    MemoryLayout, ModelGeometry, ModelGroup, PayloadHostSettings, ProtocolSettings, Run, Served,
    WorkloadStream,
};
use crate::value::Distribution;
pub use drawn::{drawn, drawn_text};
pub use explicit::{explicit, explicit_requests};
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::verify::Verify;
use kvferry_faults::file::{FIRST_SEED, ScenarioSeed, text_of};
use kvferry_faults::section;
use kvferry_faults::table::FaultSpec;
use limits::{FabricSpec, ProtocolSpec};
use model::ModelSpec;
use payloads::StreamSpec;
use settings::EngineSpec;
use std::path::{Path, PathBuf};
use topology::{InstanceDefaults, TopologySpec};
use workload::{TraceSource, WorkloadSpec};

/// Most seeds that a file can name; more are a sweep.
const SEEDS_MAX: u32 = 1_000;

section! {
    /// A scenario as written: every value may still be a range or a choice.
    #[derive(Debug)]
    pub struct Scenario(section) checked by Scenario::check_seeds {
        about: String, else ("the scenario has no `about`", "say what it shows");
        seed: ScenarioSeed = ScenarioSeed(None);
        seeds: u32 = 1_u32;
        memory: Distribution<MemoryFidelity> = MemoryFidelity::Bytes;
        verify: Distribution<Verify> = Verify::Off;
        liveness: Distribution<LivenessMode> = LivenessMode::Heal;
        probes: Distribution<bool> = true;
        model: ModelSpec;
        topology: TopologySpec;
        protocol: ProtocolSpec;
        fabric: FabricSpec;
        engine: EngineSpec;
        workload: WorkloadSpec;
        stream: Vec<StreamSpec>;
        fault: Vec<FaultSpec>;
        expect: Expect;
    } with {
        file: FileName = section.doc.file.clone();
    }
}

/// Loads and validates a scenario file.
///
/// # Errors
/// What is wrong with it, at which line, and what to do.
pub fn load(path: impl AsRef<Path>) -> Result<Scenario, ScenarioError> {
    load_with_trace(path, None)
}

/// As [`load`], with a trace in place of the one that the file names. The file must name one.
///
/// # Errors
/// As [`load`].
pub fn load_with_trace(
    path: impl AsRef<Path>,
    trace: Option<&Path>,
) -> Result<Scenario, ScenarioError> {
    let path = path.as_ref();
    let file = path.display().to_string();
    let remedy = "name a scenario file, see `kvferry list scenarios`";
    let text = text_of(path, "scenario", remedy)?;
    parse(&file, &text, path.parent().unwrap_or(Path::new("")), trace)
}

/// Parses and validates the text of a scenario; `file` is named in errors, traces are looked for
/// in `folder` unless `trace` replaces them.
///
/// # Errors
/// As [`load`].
pub fn parse(
    file: &str,
    text: &str,
    folder: &Path,
    trace: Option<&Path>,
) -> Result<Scenario, ScenarioError> {
    let mut scenario = read(file, text, folder)?;
    scenario.replace_trace(trace)?;
    scenario.check()?;
    Ok(scenario)
}

fn read(file: &str, text: &str, folder: &Path) -> Result<Scenario, ScenarioError> {
    let mut scenario: Scenario = TomlDoc::new(file, text).read()?;
    FaultSpec::number_twins(&mut scenario.fault);
    if let Some(trace) = &mut scenario.workload.trace {
        trace.path = folder.join(&trace.path);
    }
    Ok(scenario)
}

/// As [`parse`], with the text of a trace that stands for the file that the scenario names.
pub(crate) fn parse_bundled(
    file: &str,
    text: &str,
    trace_text: &'static str,
    trace: Option<&Path>,
) -> Result<Scenario, ScenarioError> {
    let mut scenario = read(file, text, Path::new(""))?;
    match &mut scenario.workload.trace {
        Some(source) if trace.is_none() => source.text = Some(trace_text),
        _ => scenario.replace_trace(trace)?,
    }
    scenario.check()?;
    Ok(scenario)
}

impl Scenario {
    fn check_seeds(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        let error = |what: &str, remedy: &str| {
            Err(section.error_at(section.line_of("seeds"), what, remedy))
        };
        match (self.seed.0, self.seeds) {
            (None, 1..=SEEDS_MAX) | (Some(_), 1) => Ok(()),
            (None, _) => {
                error(&format!("`seeds` is {}", self.seeds), &format!("give 1 to {SEEDS_MAX}"))
            }
            (Some(_), _) => error("`seeds` has no meaning for one `seed`", "write seed = \"any\""),
        }
    }

    /// The path as it was given.
    pub fn name(&self) -> &str {
        &self.file.0
    }

    pub fn about(&self) -> &str {
        &self.about
    }

    /// The seed that the file sets; `None` is one per run.
    pub fn seed(&self) -> Option<u64> {
        self.seed.0
    }

    /// The seeds with which the file is run where nobody names one.
    pub fn seeds(&self) -> impl Iterator<Item = u64> + use<> {
        let first = self.seed.0.unwrap_or(FIRST_SEED);
        first..first + u64::from(self.seeds)
    }

    /// What the file expects of every run.
    pub fn expect(&self) -> &Expect {
        &self.expect
    }

    /// The trace that the requests come from, if they do.
    pub fn trace(&self) -> Option<&Path> {
        self.workload.trace.as_ref().map(|trace| trace.path.as_path())
    }

    fn replace_trace(&mut self, with: Option<&Path>) -> Result<(), ScenarioError> {
        let Some(with) = with else { return Ok(()) };
        if let Err(why) = std::fs::metadata(with) {
            let file = FileName(with.display().to_string().into());
            let what = format!("cannot read the trace: {why}");
            return Err(file.error(0, what, "name a file that exists"));
        }
        match &mut self.workload.trace {
            Some(TraceSource { path, .. }) => {
                *path = PathBuf::from(with);
                Ok(())
            }
            None => {
                let what = format!("{} replaces a trace that there is not", with.display());
                Err(self.file.error(0, what, "use a scenario with `trace` in [workload]"))
            }
        }
    }

    /// What can be checked before any seed is known.
    fn check(&self) -> Result<(), ScenarioError> {
        self.topology.check_tp(&self.file, &self.model)?;
        let names = self.topology.names();
        for fault in &self.fault {
            fault.check_names(&self.file, &names)?;
            let restart = fault.restart_tp().into_iter().flat_map(|tp| tp.ends());
            for (tp, heads) in
                restart.flat_map(|tp| self.model.kv_heads.ends().map(move |heads| (*tp, *heads)))
            {
                topology::fits(&self.file, fault.line, tp, heads)?;
            }
        }
        if let Some(trace) = &self.workload.trace
            && trace.text.is_none()
            && let Err(why) = std::fs::metadata(&trace.path)
        {
            let what = format!("cannot read the trace {}: {why}", trace.path.display());
            let remedy = "paths are relative to the scenario file";
            return Err(self.file.error(trace.line, what, remedy));
        }
        Ok(())
    }

    /// Draws every value for a seed. Each value has a key of its own: nothing depends on what else
    /// is in the file, except where one value is made from another.
    ///
    /// # Errors
    /// Values that do not fit each other, or a trace that cannot be read.
    pub fn draw(&self, seed: u64) -> Result<Run, ScenarioError> {
        let key = DecisionKey::new(seed, "scenario");
        let block_tokens = self.model.block_tokens.draw(&key.part("block_tokens"));
        let shapes = self.topology.shapes(seed, block_tokens);
        let first = &shapes[0];
        let model = self.model.draw(&self.file, seed, first.tp, first.block_tokens)?;
        let mode = self.workload.mode.draw(&key.part("mode"));
        let prefix_tokens = self.workload.prefix_tokens(seed);
        let router = self.topology.router(seed, prefix_tokens);
        let mut protocol = ProtocolSettings::default();
        protocol.core.heartbeat = router.heartbeat;
        let shared = InstanceDefaults {
            mode,
            protocol: self.protocol.draw(&DecisionKey::new(seed, "protocol"), protocol),
            fabric: self.fabric.draw(&DecisionKey::new(seed, "fabric"), FabricLimits::default()),
        };
        let served = self.topology.served(seed);
        let (mut hosts, mut requests) = (Vec::new(), Vec::new());
        let instances = match served {
            Served::Requests => {
                requests = self.workload.requests(&self.file, seed, prefix_tokens)?;
                self.topology.instances(&self.file, &shapes, (&self.model, &model), &shared)?
            }
            Served::Payloads => {
                let instances;
                (hosts, instances) = self.topology.hosts(seed, (&shared, SMALL));
                instances
            }
        };
        let mut run = Run {
            name: self.file.0.to_string(),
            about: self.about.clone(),
            seed,
            network: self.topology.network(seed),
            router,
            engine: self.engine.draw_for(seed, SMALL).settings,
            memory: match served {
                Served::Requests => self.memory.draw(&key.part("memory")),
                Served::Payloads => MemoryFidelity::Bytes,
            },
            verify: match served {
                Served::Requests => self.verify.draw(&key.part("verify")),
                Served::Payloads => Verify::Off,
            },
            mode,
            prefix_tokens,
            requests,
            streams: self.streams(seed, &hosts)?,
            served,
            hosts,
            faults: Vec::new(),
            shaped: Vec::new(),
            liveness: self.liveness.draw(&key.part("liveness")),
            probes: self.probes.draw(&key.part("probes")),
            expect: self.expect.clone(),
            model,
            instances,
        };
        for instance in &mut run.instances {
            instance.cost = self.engine.draw_for(seed, instance.cost).cost;
        }
        let mut on: Vec<&FaultSpec> = self.fault.iter().filter(|fault| fault.is_on(seed)).collect();
        // How small a pool can be depends on the requests that the other faults leave.
        on.sort_by_key(|fault| fault.kind == FaultKind::SmallPool);
        for fault in on {
            static_faults::apply(fault, seed, &mut run);
        }
        self.price_restarts(seed, &mut run);
        self.check_lengths(&run)?;
        self.check_cells(&run)?;
        Ok(run)
    }

    /// What stages put, where payloads are served.
    fn streams(
        &self,
        seed: u64,
        hosts: &[PayloadHostSettings],
    ) -> Result<Vec<WorkloadStream>, ScenarioError> {
        if hosts.is_empty() {
            return Ok(Vec::new());
        }
        let mut streams = Vec::new();
        for (n, table) in (0..).zip(&self.stream) {
            let more = table.streams((&self.file, n), seed, (hosts, streams.len()))?;
            streams.extend(more);
        }
        Ok(streams)
    }

    /// The cost of a step follows the TP size, also after a restart.
    fn price_restarts(&self, seed: u64, run: &mut Run) {
        let model: &ModelGeometry = &run.model;
        for becomes in run.faults.iter_mut().filter_map(|fault| fault.becomes.as_mut()) {
            let cost = self.topology.cost(&self.model, model, becomes.tp);
            becomes.cost = self.engine.draw_for(seed, cost).cost;
        }
    }

    /// A cell has one bit per layer and stands for K and V alike, so it cannot follow them where
    /// one side keeps them apart and the other together.
    fn check_cells(&self, run: &Run) -> Result<(), ScenarioError> {
        if run.memory != MemoryFidelity::Cells {
            return Ok(());
        }
        if !run.verify.is_off() {
            let what = "cells have no bytes that could be digested";
            let remedy = "leave out `verify`, or set `memory` to \"bytes\"";
            return Err(self.file.error(self.verify.line, what, remedy));
        }
        if run.model.layers > CELL_LAYERS_MAX {
            let layers = run.model.layers;
            let what = format!("cells cannot tell {layers} layers apart");
            let remedy = format!("use at most {CELL_LAYERS_MAX}, or set `memory` to \"bytes\"");
            return Err(self.file.error(self.memory.line, what, remedy));
        }
        let window = |group: &&ModelGroup| matches!(group.kind, GroupKind::Window { .. });
        if run.model.groups.iter().any(|group| window(&group)) {
            let what = "cells cannot follow windows, which begin inside a cell";
            let remedy = "leave out `window_layers`, or set `memory` to \"bytes\"";
            return Err(self.file.error(self.memory.line, what, remedy));
        }
        let restarted = run.faults.iter().filter_map(|fault| fault.becomes.as_deref());
        let mut all: Vec<InstanceSettings> =
            run.instances.iter().chain(restarted).cloned().collect();
        if run.faults.iter().any(|fault| fault.kind == FaultKind::RoleSwitch) {
            all.extend(run.instances.iter().map(InstanceSettings::switched));
        }
        let of = |role| all.iter().filter(move |instance| instance.role == role);
        let apart = |instance: &InstanceSettings| instance.layout == MemoryLayout::HeadSplit;
        for prefill in of(Role::Prefill) {
            let decodes = of(Role::Decode).filter(|decode| decode.mode == prefill.mode);
            let other = decodes.into_iter().find(|decode| apart(decode) != apart(prefill));
            if let (false, Some(decode)) = (run.model.latent, other) {
                let (a, b) = (&prefill.name, &decode.name);
                let what =
                    format!("cells cannot follow K and V between the layouts of {a} and {b}");
                let remedy =
                    "use \"head-split\" for both or for none, or set `memory` to \"bytes\"";
                return Err(self.file.error(self.memory.line, what, remedy));
            }
        }
        Ok(())
    }

    /// Every request must fit into every pool, alone.
    fn check_lengths(&self, run: &Run) -> Result<(), ScenarioError> {
        let Some(tokens) = run.longest() else { return Ok(()) };
        let restarted = run.faults.iter().filter_map(|fault| fault.becomes.as_deref());
        for instance in run.instances.iter().chain(restarted) {
            let needed = run.blocks_for(instance, tokens);
            if needed > u64::from(instance.blocks) {
                let what = format!(
                    "a request of {tokens} tokens never fits the {} blocks of {}",
                    instance.blocks, instance.name
                );
                let line = self.workload.length_line();
                let remedy = format!("give it at least {needed} blocks, or shorten the requests");
                return Err(self.file.error(line, what, remedy));
            }
        }
        Ok(())
    }
}
