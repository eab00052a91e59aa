//! `[protocol]` and `[fabric]`, of the whole file and of one instance.

use crate::decide::DecisionKey;
use crate::doc::TomlSection;
use crate::error::ScenarioError;
use crate::run::{FabricLimits, ProtocolSettings};
use crate::value::{ByteVolume, Distribution};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::native::{VERSION, VERSION_MIN};

/// A time of [`ProtocolSettings`] and the key that sets it.
type ProtocolTimeKey = (&'static str, fn(&mut ProtocolSettings) -> &mut Option<Nanos>);

const TIMES: &[ProtocolTimeKey] = &[
    ("hello", |protocol| &mut protocol.hello),
    ("retransmit", |protocol| &mut protocol.retransmit),
    ("retransmit_max", |protocol| &mut protocol.retransmit_max),
    ("silent", |protocol| &mut protocol.silent),
    ("lease", |protocol| &mut protocol.lease),
    ("fence", |protocol| &mut protocol.fence),
    ("fetch", |protocol| &mut protocol.fetch),
    ("resume", |protocol| &mut protocol.resume),
    ("claim", |protocol| &mut protocol.claim),
    ("operation", |protocol| &mut protocol.operation),
    ("operation_time", |protocol| &mut protocol.operation_time),
    ("open", |protocol| &mut protocol.open),
    ("quiet", |protocol| &mut protocol.quiet),
    ("reopen", |protocol| &mut protocol.reopen),
    ("busy", |protocol| &mut protocol.busy),
    ("rebuild", |protocol| &mut protocol.rebuild),
];

/// A limit of [`ProtocolSettings`], the key that sets it, and its least and largest value.
type ProtocolLimitKey = (&'static str, (u32, u32), fn(&mut ProtocolSettings) -> &mut Option<u32>);

/// Of what there has to be at least one.
const COUNT: (u32, u32) = (1, u32::MAX);

/// Of what there may be none.
const ANY: (u32, u32) = (0, u32::MAX);

/// What a reader takes off a lease: something has to be left of it.
const DRIFT: (u32, u32) = (0, 90);

const LIMITS: &[ProtocolLimitKey] = &[
    ("drift_percent", DRIFT, |protocol| &mut protocol.drift_percent),
    ("operations_max", COUNT, |protocol| &mut protocol.operations_max),
    ("slices_max", COUNT, |protocol| &mut protocol.slices_max),
    ("retries", ANY, |protocol| &mut protocol.retries),
    ("reopens_max", ANY, |protocol| &mut protocol.reopens_max),
    ("requests_max", COUNT, |protocol| &mut protocol.requests_max),
    ("early_max", COUNT, |protocol| &mut protocol.early_max),
    ("receivers_max", COUNT, |protocol| &mut protocol.receivers_max),
    ("tombstones_max", COUNT, |protocol| &mut protocol.tombstones_max),
    ("queue_max", COUNT, |protocol| &mut protocol.queue_max),
    ("peers_max", COUNT, |protocol| &mut protocol.peers_max),
    ("links_max", COUNT, |protocol| &mut protocol.links_max),
];

/// Bytes of [`ProtocolSettings`] and the key that sets them.
type ProtocolSizeKey = (&'static str, fn(&mut ProtocolSettings) -> &mut Option<u64>);

const SIZES: &[ProtocolSizeKey] = &[
    ("operation_bytes_min", |protocol| &mut protocol.operation_bytes_min),
    ("operation_bytes_max", |protocol| &mut protocol.operation_bytes_max),
];

#[derive(Debug)]
pub(super) struct ProtocolSpec {
    times: Vec<Option<Distribution<Nanos>>>,
    limits: Vec<Option<Distribution<u32>>>,
    sizes: Vec<Option<Distribution<ByteVolume>>>,
    version: Option<Distribution<u16>>,
    layers_per_op: Option<Distribution<u16>>,
}

impl ProtocolSpec {
    pub(super) fn read(section: &TomlSection<'_>) -> Result<ProtocolSpec, ScenarioError> {
        let limit =
            |(key, (least, most), _): &ProtocolLimitKey| section.limited(key, *least, *most);
        let spec = ProtocolSpec {
            times: TIMES.iter().map(|(key, _)| section.draw(key)).collect::<Result<_, _>>()?,
            limits: LIMITS.iter().map(limit).collect::<Result<_, _>>()?,
            sizes: SIZES.iter().map(|(key, _)| volume(section, key)).collect::<Result<_, _>>()?,
            version: section.limited("version", VERSION_MIN, VERSION)?,
            layers_per_op: section.limited("layers_per_op", 1, 1024)?,
        };
        section.finish()?;
        Ok(spec)
    }

    /// What is written here, and `base` for the rest.
    pub(super) fn draw(&self, key: &DecisionKey, base: ProtocolSettings) -> ProtocolSettings {
        let mut protocol = base;
        for (draw, (name, field)) in self.times.iter().zip(TIMES) {
            set(field(&mut protocol), draw, &key.part(name));
        }
        for (draw, (name, _, field)) in self.limits.iter().zip(LIMITS) {
            set(field(&mut protocol), draw, &key.part(name));
        }
        for (draw, (name, field)) in self.sizes.iter().zip(SIZES) {
            set_sum(field(&mut protocol), draw, &key.part(name));
        }
        set(&mut protocol.version, &self.version, &key.part("version"));
        set(&mut protocol.layers_per_op, &self.layers_per_op, &key.part("layers_per_op"));
        protocol
    }
}

/// Draws what is written.
fn set<T: crate::value::ScenarioValue>(
    field: &mut Option<T>,
    draw: &Option<Distribution<T>>,
    key: &DecisionKey,
) {
    if let Some(draw) = draw {
        *field = Some(draw.draw(key));
    }
}

/// Draws what is written.
fn set_sum(field: &mut Option<u64>, draw: &Option<Distribution<ByteVolume>>, key: &DecisionKey) {
    if let Some(draw) = draw {
        *field = Some(draw.draw(key).0);
    }
}

/// A count of [`FabricLimits`] and the key that sets it.
type FabricCountKey = (&'static str, fn(&mut FabricLimits) -> &mut Option<u32>);

const COUNTS: &[FabricCountKey] = &[
    ("operations_max", |fabric| &mut fabric.operations_max),
    ("operations_per_peer", |fabric| &mut fabric.operations_per_peer),
    ("slices_max", |fabric| &mut fabric.slices_max),
    ("ranges_max", |fabric| &mut fabric.ranges_max),
    ("ranges_per_peer", |fabric| &mut fabric.ranges_per_peer),
];

/// Bytes of [`FabricLimits`] and the key that sets them.
type FabricBytesKey = (&'static str, fn(&mut FabricLimits) -> &mut Option<u64>);

const SUMS: &[FabricBytesKey] = &[
    ("bytes_max", |fabric| &mut fabric.bytes_max),
    ("bytes_per_peer", |fabric| &mut fabric.bytes_per_peer),
];

#[derive(Debug)]
pub(super) struct FabricSpec {
    counts: Vec<Option<Distribution<u32>>>,
    sums: Vec<Option<Distribution<ByteVolume>>>,
}

impl FabricSpec {
    pub(super) fn read(section: &TomlSection<'_>) -> Result<FabricSpec, ScenarioError> {
        let count = |(key, _): &FabricCountKey| section.limited(key, 1, u32::MAX);
        let spec = FabricSpec {
            counts: COUNTS.iter().map(count).collect::<Result<_, _>>()?,
            sums: SUMS.iter().map(|(key, _)| volume(section, key)).collect::<Result<_, _>>()?,
        };
        section.finish()?;
        Ok(spec)
    }

    /// What is written here, and `base` for the rest. An operation of the most ranges has to fit
    /// into the credits.
    pub(super) fn draw(&self, key: &DecisionKey, base: FabricLimits) -> FabricLimits {
        let mut fabric = base;
        for (draw, (name, field)) in self.counts.iter().zip(COUNTS) {
            set(field(&mut fabric), draw, &key.part(name));
        }
        for (draw, (name, field)) in self.sums.iter().zip(SUMS) {
            set_sum(field(&mut fabric), draw, &key.part(name));
        }
        let credits = [fabric.ranges_max, fabric.ranges_per_peer].into_iter().flatten().min();
        if let Some(credits) = credits {
            fabric.slices_max = Some(fabric.slices_max.map_or(credits, |most| most.min(credits)));
        }
        fabric
    }
}

fn volume(
    section: &TomlSection<'_>,
    key: &'static str,
) -> Result<Option<Distribution<ByteVolume>>, ScenarioError> {
    let draw: Option<Distribution<ByteVolume>> = section.draw(key)?;
    match &draw {
        Some(zero) if zero.ends().any(|end| end.0 == 0) => {
            let what = format!("`{}` is 0", section.path(key));
            Err(section.doc.file.error(zero.line, what, "give at least 1"))
        }
        _ => Ok(draw),
    }
}
