//! The blocks of an instance, and loads: what decode requests wait for, from their arrival to the
//! one answer.

use super::TrackedInstance;
use crate::observation::{BlockRef, ObservedLanding, SimProcessId};
use crate::slab::Slab;
use kvferry_engine::core::ids::{Attempt, RequestId, TransferKey};
use kvferry_engine::core::message::{AttemptTag, DecodeLeg};
use kvferry_engine::core::time::Nanos;
use std::collections::BTreeMap;

/// What is known of a block, all ranks together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TrackedBlock {
    /// Sequence number at which its owner changed last.
    pub(crate) since: u64,
    /// Number of the load that writes into it; 0 for none.
    pub(crate) load: u32,
    /// Operations that may still write into it.
    pub(crate) writes: u32,
    /// Operations of its own instance that may still read from it.
    pub(crate) reads: u32,
}

/// The blocks of all groups; grows with the ids that are seen.
#[derive(Debug, Default)]
pub(crate) struct TrackedBlocks {
    groups: Vec<Vec<TrackedBlock>>,
}

impl TrackedBlocks {
    #[inline]
    pub(super) fn get(&self, at: BlockRef) -> TrackedBlock {
        let group = self.groups.get(usize::from(at.group));
        group.and_then(|group| group.get(at.block as usize)).copied().unwrap_or_default()
    }

    #[inline]
    pub(super) fn get_mut(&mut self, at: BlockRef) -> &mut TrackedBlock {
        let (group, block) = (usize::from(at.group), at.block as usize);
        if self.groups.len() <= group {
            self.groups.resize_with(group + 1, Vec::new);
        }
        let group = &mut self.groups[group];
        if group.len() <= block {
            group.resize(block + 1, TrackedBlock::default());
        }
        &mut group[block]
    }
}

/// Bytes that were read from a block which had another owner by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TornRead {
    pub(crate) source: u16,
    pub(crate) block: BlockRef,
}

/// Blocks that a transfer fills.
#[derive(Clone, Debug)]
pub(crate) struct TrackedLoad {
    pub(crate) who: SimProcessId,
    pub(crate) request: RequestId,
    /// When it was allocated.
    pub(crate) begun: Nanos,
    /// The same as a sequence number: older operations may not write into its blocks.
    pub(crate) since: u64,
    /// Blocks that are to be written.
    pub(crate) blocks: Vec<BlockRef>,
    /// The prefill that was asked, and in which incarnation.
    pub(crate) peer: Option<SimProcessId>,
    /// The instance whose operations may write into the blocks, once one was asked.
    pub(crate) writer: Option<u16>,
    /// Sequence number of the grant.
    granted: u64,
    /// Something read after its source had another owner, in the newest attempt.
    pub(crate) torn: Option<TornRead>,
}

#[derive(Debug)]
struct KnownRequest {
    tokens: u32,
    tag: (TransferKey, u32),
    /// Index of the load, once allocated.
    load: u32,
    /// Said in a message before the blocks were allocated.
    asked: Option<(SimProcessId, u16)>,
    attempt: Attempt,
    granted: u64,
}

#[derive(Debug, Default)]
pub(crate) struct TrackedLoads {
    /// Number n is in slot n - 1.
    slots: Slab<TrackedLoad>,
    known: BTreeMap<(u16, RequestId), KnownRequest>,
    tags: BTreeMap<(u16, TransferKey, u32), RequestId>,
}

impl TrackedLoads {
    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<&TrackedLoad> {
        self.slots.get(number.checked_sub(1)?)
    }

    fn get_mut(&mut self, number: u32) -> Option<&mut TrackedLoad> {
        self.slots.get_mut(number.checked_sub(1)?)
    }

    pub(super) fn find(&self, instance: u16, request: &RequestId) -> Option<&TrackedLoad> {
        self.get(self.known.get(&(instance, request.clone()))?.load)
    }

    pub(super) fn number(&self, instance: u16, request: &RequestId) -> u32 {
        self.known.get(&(instance, request.clone())).map_or(0, |known| known.load)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &TrackedLoad> {
        self.slots.iter()
    }

    pub(super) fn arrived(
        &mut self,
        instance: u16,
        request: &RequestId,
        leg: &DecodeLeg,
        tokens: u32,
    ) {
        let tag = (leg.key.clone(), leg.sibling);
        self.tags.insert((instance, tag.0.clone(), tag.1), request.clone());
        let known =
            KnownRequest { tokens, tag, load: 0, asked: None, attempt: Attempt(0), granted: 0 };
        self.known.insert((instance, request.clone()), known);
    }

    pub(super) fn tokens(&self, instance: u16, request: &RequestId) -> u32 {
        self.known.get(&(instance, request.clone())).map_or(u32::MAX, |known| known.tokens)
    }

    pub(super) fn allocated(
        &mut self,
        (begun, since): (Nanos, u64),
        who: SimProcessId,
        request: &RequestId,
        blocks: &[BlockRef],
    ) -> u32 {
        let Some(known) = self.known.get_mut(&(who.instance, request.clone())) else { return 0 };
        let load = TrackedLoad {
            who,
            request: request.clone(),
            begun,
            since,
            blocks: blocks.to_vec(),
            peer: known.asked.map(|(peer, _)| peer),
            writer: known.asked.map(|(_, writer)| writer),
            granted: known.granted,
            torn: None,
        };
        known.load = self.slots.add(load) + 1;
        known.load
    }

    fn forget(&mut self, instance: u16, request: &RequestId) -> Option<TrackedLoad> {
        let known = self.known.remove(&(instance, request.clone()))?;
        let tag = (instance, known.tag.0, known.tag.1);
        if self.tags.get(&tag) == Some(request) {
            self.tags.remove(&tag);
        }
        Some(self.slots.take(known.load.checked_sub(1)?))
    }

    /// The request ended; with blocks it is known until its answer.
    pub(super) fn finished(&mut self, instance: u16, request: &RequestId) {
        let known = self.known.get(&(instance, request.clone()));
        if known.is_some_and(|known| known.load == 0) {
            self.forget(instance, request);
        }
    }

    /// The answer came; these blocks are no longer written.
    pub(super) fn ended(&mut self, instance: u16, request: &RequestId) -> Vec<BlockRef> {
        self.forget(instance, request).map_or(Vec::new(), |load| load.blocks)
    }

    pub(super) fn crashed(&mut self, instance: u16) {
        let of = |key: &(u16, RequestId)| (key.0 == instance).then(|| key.1.clone());
        let lost: Vec<_> = self.known.keys().filter_map(of).collect();
        for request in lost {
            self.forget(instance, &request);
        }
    }

    fn tagged(&self, instance: u16, tag: &AttemptTag) -> Option<(u16, RequestId)> {
        let request = self.tags.get(&(instance, tag.key.clone(), tag.sibling))?;
        Some((instance, request.clone()))
    }

    pub(super) fn attempt(&self, instance: u16, tag: &AttemptTag) -> Option<(&RequestId, Attempt)> {
        let request = self.tags.get(&(instance, tag.key.clone(), tag.sibling))?;
        let known = self.known.get(&(instance, request.clone()))?;
        Some((request, known.attempt))
    }

    /// A decode asked `peer` for an attempt, in which `writer` submits the operations.
    pub(super) fn set_writer(
        &mut self,
        instance: u16,
        tag: &AttemptTag,
        writer: u16,
        peer: SimProcessId,
    ) {
        let Some(key) = self.tagged(instance, tag) else { return };
        let Some(known) = self.known.get_mut(&key) else { return };
        if tag.attempt < known.attempt {
            // A repeated question of an attempt before.
            return;
        }
        known.asked = Some((peer, writer));
        let anew = tag.attempt > known.attempt;
        if anew {
            (known.attempt, known.granted) = (tag.attempt, 0);
        }
        let number = known.load;
        if let Some(load) = self.get_mut(number) {
            (load.peer, load.writer) = (Some(peer), Some(writer));
            if anew {
                (load.granted, load.torn) = (0, None);
            }
        }
    }

    /// A prefill granted its blocks to an attempt; only the newest counts.
    pub(super) fn granted(&mut self, instance: u16, tag: &AttemptTag, seq: u64) {
        let Some(key) = self.tagged(instance, tag) else { return };
        let Some(known) = self.known.get_mut(&key) else { return };
        // A retransmitted grant is no new one, nor is a late one of an attempt before.
        if known.granted != 0 || tag.attempt != known.attempt {
            return;
        }
        known.granted = seq;
        let number = known.load;
        if let Some(load) = self.get_mut(number) {
            load.granted = seq;
        }
    }

    /// Bytes arrived; remembers whether they were read from blocks of somebody else.
    #[inline]
    pub(super) fn landed(&mut self, seen: &ObservedLanding<'_>, places: &[TrackedInstance]) {
        if seen.from != seen.target {
            return;
        }
        let Some(source) = places.get(usize::from(seen.source.who.instance)) else { return };
        let Some(target) = places.get(usize::from(seen.target.who.instance)) else { return };
        let Some(first) = seen.written.first() else { return };
        let Some(load) = self.get_mut(target.blocks.get(*first).load) else { return };
        let torn = seen.read.iter().find(|at| source.blocks.get(**at).since > load.granted);
        if let (Some(block), true) = (torn, load.granted != 0) {
            load.torn = Some(TornRead { source: seen.source.who.instance, block: *block });
        }
    }
}
