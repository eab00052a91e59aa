//! The memory that an instance keeps its KV in.

use super::args::ServePlan;
use super::kv_content::RankKv;
use kvferry_engine::core::layout::GroupKind;
use kvferry_engine::core::layout::LayerLayout;
use kvferry_engine::fabric::{Memory, OwnMemory};
use kvferry_fabric_host::{HugePages, MemfdPool};
use kvferry_scenarios::geometry::rank_memory;
use std::alloc::{Layout, alloc_zeroed};

const PAGE: usize = 4096;

/// The memory of one rank: one region.
pub(super) struct Backing {
    kind: BackingKind,
    bytes: usize,
    layers: Vec<LayerLayout>,
}

enum BackingKind {
    /// A memory file that peers of this host map.
    Shared(MemfdPool),
    /// Memory of this process only.
    Private(*mut u8),
}

impl Backing {
    /// Memory for the KV cache of a rank; it lives until the process ends, because peers and
    /// threads of the data plane reach into it.
    ///
    /// # Errors
    /// A geometry that takes more than one region, or memory that cannot be had; with the remedy.
    pub(super) fn new(plan: &ServePlan, private: bool) -> Result<Backing, String> {
        if plan.model.groups.iter().any(|group| group.kind == GroupKind::State) {
            return Err("the model has state layers, of which serve has no KV to compute".into());
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
            // SAFETY: The size is not zero.
            let start = unsafe { alloc_zeroed(layout) };
            if start.is_null() {
                return Err(format!("no {bytes} bytes of memory for KV: use fewer --blocks"));
            }
            BackingKind::Private(start)
        } else {
            BackingKind::Shared(MemfdPool::new(pages, HugePages::No)?)
        };
        Ok(Backing { kind, bytes, layers: memory.layers })
    }

    pub(super) fn layers(&self) -> &[LayerLayout] {
        &self.layers
    }

    /// What the data plane registers.
    pub(super) fn memory(&self) -> Memory {
        match &self.kind {
            BackingKind::Shared(pool) => pool.memory(),
            BackingKind::Private(start) => {
                // SAFETY: It is never given back, and `RankKv` makes no reference to it.
                Memory::Own(unsafe { OwnMemory::new(*start as u64, self.bytes as u64) })
            }
        }
    }

    pub(super) fn into_rank(self) -> RankKv {
        let start = match self.kind {
            BackingKind::Private(start) => start,
            // Never unmapped, see `new`.
            BackingKind::Shared(pool) => Box::leak(Box::new(pool)).start(),
        };
        // SAFETY: The memory was mapped with this size and is never given back; planes and peers
        // reach it by its address.
        unsafe { RankKv::new(start, self.bytes, self.layers) }
    }
}
