//! `[protocol]`, `[engine]` and `[expect]`.

use super::topology::or;
use crate::cost::Cost;
use crate::decide::Keyed;
use crate::doc::Section;
use crate::error::ScenarioError;
use crate::lists::InvariantId;
use crate::run::{
    Allocator, Bounds, Counts, EngineSettings, Expect, Liveness, LoadFailure, MemoryModel, Protocol,
};
use crate::value::{Draw, Femtos, named_values};
use ::engine::core::Nanos;

named_values! {
    LoadFailure: "recompute" = LoadFailure::Recompute, "fail" = LoadFailure::Fail;
    Allocator: "fifo" = Allocator::Fifo, "lifo" = Allocator::Lifo;
    Liveness: "heal" = Liveness::Heal, "core" = Liveness::Core;
    MemoryModel: "bytes" = MemoryModel::Bytes, "cells" = MemoryModel::Cells;
}

/// A time of [`Protocol`] and the key that sets it.
type Time = (&'static str, fn(&mut Protocol) -> &mut Option<Nanos>);

const TIMES: &[Time] = &[
    ("hello", |protocol| &mut protocol.hello),
    ("retransmit", |protocol| &mut protocol.retransmit),
    ("retransmit_max", |protocol| &mut protocol.retransmit_max),
    ("silent", |protocol| &mut protocol.silent),
    ("lease", |protocol| &mut protocol.lease),
    ("fence", |protocol| &mut protocol.fence),
    ("fetch", |protocol| &mut protocol.fetch),
    ("resume", |protocol| &mut protocol.resume),
    ("operation", |protocol| &mut protocol.operation),
];

/// A limit of [`Protocol`] and the key that sets it.
type Limit = (&'static str, fn(&mut Protocol) -> &mut Option<u32>);

const LIMITS: &[Limit] = &[
    ("retries", |protocol| &mut protocol.retries),
    ("requests_max", |protocol| &mut protocol.requests_max),
    ("early_max", |protocol| &mut protocol.early_max),
    ("receivers_max", |protocol| &mut protocol.receivers_max),
    ("tombstones_max", |protocol| &mut protocol.tombstones_max),
    ("queue_max", |protocol| &mut protocol.queue_max),
    ("peers_max", |protocol| &mut protocol.peers_max),
    ("links_max", |protocol| &mut protocol.links_max),
];

/// `[protocol]` as written.
#[derive(Debug)]
pub(super) struct ProtocolSpec {
    times: Vec<Option<Draw<Nanos>>>,
    limits: Vec<Option<Draw<u32>>>,
    layers_per_op: Draw<u16>,
}

impl ProtocolSpec {
    pub(super) fn read(section: &Section<'_>) -> Result<ProtocolSpec, ScenarioError> {
        let spec = ProtocolSpec {
            times: TIMES.iter().map(|(key, _)| section.draw(key)).collect::<Result<_, _>>()?,
            limits: LIMITS.iter().map(|(key, _)| section.draw(key)).collect::<Result<_, _>>()?,
            layers_per_op: section.limited_or("layers_per_op", 1, (1, 1024))?,
        };
        section.finish()?;
        Ok(spec)
    }

    pub(super) fn draw(&self, seed: u64) -> Protocol {
        let key = Keyed::new(seed, "protocol");
        let mut protocol = Protocol {
            layers_per_op: self.layers_per_op.draw(&key.part("layers_per_op")),
            ..Protocol::default()
        };
        for (draw, (name, field)) in self.times.iter().zip(TIMES) {
            *field(&mut protocol) = draw.as_ref().map(|draw| draw.draw(&key.part(name)));
        }
        for (draw, (name, field)) in self.limits.iter().zip(LIMITS) {
            *field(&mut protocol) = draw.as_ref().map(|draw| draw.draw(&key.part(name)));
        }
        protocol
    }
}

/// `[engine]` as written.
#[derive(Debug)]
pub(super) struct EngineSpec {
    chunk: Draw<u32>,
    max_running: Draw<u32>,
    max_waiting: Draw<u32>,
    load_failure: Draw<LoadFailure>,
    allocator: Draw<Allocator>,
    step: Option<Draw<Nanos>>,
    weights: Option<Draw<Nanos>>,
    token: Option<Draw<Femtos>>,
    pair: Option<Draw<Femtos>>,
    context: Option<Draw<Femtos>>,
}

impl EngineSpec {
    pub(super) fn read(section: &Section<'_>) -> Result<EngineSpec, ScenarioError> {
        let spec = EngineSpec {
            chunk: section.limited_or("chunk", 2048, (1, 1 << 24))?,
            max_running: section.limited_or("max_running", 256, (1, 1 << 20))?,
            max_waiting: section.limited_or("max_waiting", 1 << 16, (1, 1 << 20))?,
            load_failure: section.draw_or("load_failure", LoadFailure::Recompute)?,
            allocator: section.draw_or("allocator", Allocator::Fifo)?,
            step: section.draw("step")?,
            weights: section.draw("weights")?,
            token: section.draw("token")?,
            pair: section.draw("pair")?,
            context: section.draw("context")?,
        };
        section.finish()?;
        Ok(spec)
    }

    pub(super) fn draw(&self, seed: u64) -> EngineSettings {
        let key = Keyed::new(seed, "engine");
        EngineSettings {
            chunk: self.chunk.draw(&key.part("chunk")),
            max_running: self.max_running.draw(&key.part("max_running")),
            max_waiting: self.max_waiting.draw(&key.part("max_waiting")),
            load_failure: self.load_failure.draw(&key.part("load_failure")),
            allocator: self.allocator.draw(&key.part("allocator")),
        }
    }

    /// Replaces the parts of a cost that the file sets.
    pub(super) fn cost(&self, seed: u64, cost: Cost) -> Cost {
        let key = Keyed::new(seed, "engine");
        Cost {
            step: or(&self.step, cost.step, &key.part("step")),
            weights: or(&self.weights, cost.weights, &key.part("weights")),
            token_fs: or(&self.token, Femtos(cost.token_fs), &key.part("token")).0,
            pair_fs: or(&self.pair, Femtos(cost.pair_fs), &key.part("pair")).0,
            context_fs: or(&self.context, Femtos(cost.context_fs), &key.part("context")).0,
        }
    }
}

/// Exit codes that a run can have.
const EXITS: &[u64] = &[0, 3, 4, 5, 6];

/// Reads `[expect]`.
pub(super) fn expect(section: &Section<'_>) -> Result<Expect, ScenarioError> {
    let names: Vec<&str> = InvariantId::ALL.iter().map(|id| id.name()).collect();
    let hold = match section.get("hold") {
        Some(field) => field.entries(&names, InvariantId::from_name)?,
        None => InvariantId::ALL.to_vec(),
    };
    let exit = section.literal::<u64>("exit")?.unwrap_or(0);
    if !EXITS.contains(&exit) {
        let what = format!("`{}` is {exit}", section.path("exit"));
        let remedy =
            "give 0 (held), 3 (liveness), 4 (correctness), 5 (not deterministic) or 6 (panic)";
        return Err(section.doc.file.error(section.line_of("exit"), what, remedy));
    }
    let requests = section.section("requests")?;
    let counts = Counts {
        finished: bounds(&requests, "finished")?,
        failed: bounds(&requests, "failed")?,
        unknown: bounds(&requests, "unknown")?,
        recomputed: bounds(&requests, "recomputed")?,
    };
    requests.finish()?;
    let within = section.literal("within")?;
    section.finish()?;
    Ok(Expect { within, hold, requests: counts, exit: exit as u8 })
}

/// A count or a range of counts. Nothing is drawn: any count inside is right.
fn bounds(section: &Section<'_>, key: &'static str) -> Result<Option<Bounds>, ScenarioError> {
    let Some(draw) = section.draw::<u64>(key)? else { return Ok(None) };
    match draw.single() {
        Some((min, max)) => Ok(Some(Bounds { min: *min, max: *max })),
        None => {
            let what = format!("`{}` is a choice", section.path(key));
            Err(section.doc.file.error(draw.line, what, "give a count or a range of counts"))
        }
    }
}
