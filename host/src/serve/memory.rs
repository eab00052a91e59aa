//! The memory that an instance keeps its KV in, and what its data plane says of itself.

use super::args::Plan;
use super::content::Kv;
use engine::core::layout::{Geometry, LayerLayout};
use engine::fabric::Memory;
use fabric_host::{HugePages, Meter, Path, Pool};
use scenarios::geometry::{geometry, rank_memory};
use std::alloc::{Layout, alloc_zeroed};
use std::fmt::Write as _;

const PAGE: usize = 4096;

/// Memory of one region with the layout of one rank.
pub(super) struct Backing {
    kind: Kind,
    bytes: usize,
    geometry: Geometry,
    layers: Vec<LayerLayout>,
}

enum Kind {
    /// A memory file that peers of this host map.
    Shared(Pool),
    /// Memory of this process only.
    Private(*mut u8),
}

impl Backing {
    /// Memory for the KV cache of an instance; it lives until the process ends, because peers and
    /// threads of the data plane reach into it.
    ///
    /// # Errors
    /// A geometry that takes more than one region, or memory that cannot be had; with the remedy.
    pub(super) fn new(plan: &Plan, private: bool) -> Result<Backing, String> {
        if plan.instance.tp != 1 {
            let tp = plan.instance.tp;
            return Err(format!("serve plays one TP rank, the instance has {tp}: use tp = 1"));
        }
        let memory = rank_memory(&plan.model, &plan.instance);
        let [len] = memory.regions[..] else {
            let text = "the KV groups lie in several regions; serve needs one: use another layout";
            return Err(text.into());
        };
        let pages = len.div_ceil(PAGE as u64) * PAGE as u64;
        let bytes = usize::try_from(pages).map_err(|_| format!("{pages} bytes of KV"))?;
        let kind = if private {
            let layout = Layout::from_size_align(bytes.max(PAGE), PAGE)
                .map_err(|_| format!("{bytes} bytes of KV: use fewer --blocks"))?;
            // SAFETY: the size is not zero.
            let start = unsafe { alloc_zeroed(layout) };
            if start.is_null() {
                return Err(format!("no {bytes} bytes of memory for KV: use fewer --blocks"));
            }
            Kind::Private(start)
        } else {
            Kind::Shared(Pool::new(pages, HugePages::No)?)
        };
        let geometry = geometry(&plan.model, &plan.instance);
        Ok(Backing { kind, bytes, geometry, layers: memory.layers })
    }

    pub(super) fn layers(&self) -> &[LayerLayout] {
        &self.layers
    }

    /// What the data plane registers.
    pub(super) fn memory(&self) -> Memory {
        match &self.kind {
            Kind::Shared(pool) => pool.memory(),
            Kind::Private(start) => Memory::Own { base: *start as u64, len: self.bytes as u64 },
        }
    }

    pub(super) fn into_kv(self) -> Kv {
        let start = match self.kind {
            Kind::Private(start) => start,
            // Never unmapped, see `new`.
            Kind::Shared(pool) => Box::leak(Box::new(pool)).start(),
        };
        // SAFETY: the memory was mapped with this size and is never given back.
        unsafe { Kv::new(start, self.bytes, &self.geometry, self.layers) }
    }
}

/// Bytes and operations by path, as Prometheus text.
pub(super) fn metrics(meter: &Meter) -> String {
    let counters = meter.read();
    let sides = [("initiated", counters.initiated), ("served", counters.served)];
    let mut text = String::new();
    for (name, help) in [("bytes", "Bytes moved"), ("operations", "Operations done")] {
        let _ = writeln!(text, "# HELP kvferry_host_{name}_total {help}, by side and path.");
        let _ = writeln!(text, "# TYPE kvferry_host_{name}_total counter");
        for (side, counts) in &sides {
            for (path, count) in Path::ALL.iter().zip(counts) {
                let value = if name == "bytes" { count.bytes } else { count.operations };
                let labels = format!("side=\"{side}\",path=\"{path}\"");
                let _ = writeln!(text, "kvferry_host_{name}_total{{{labels}}} {value}");
            }
        }
    }
    text
}
