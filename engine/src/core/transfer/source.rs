//! What the engine has computed of the prompts that are pushed.

use super::{Transfer, TransferTurn};
use crate::core::ids::{FlowId, SourceId, StepId};
use crate::core::layout::BlockList;
use std::collections::VecDeque;
use std::ops::Range;

/// One prompt being computed by the engine.
#[derive(Debug, Default)]
pub(super) struct PushSource {
    /// Tokens whose KV is complete in every layer.
    complete: u32,
    /// Steps under way and the tokens that are complete after each.
    chunks: VecDeque<(StepId, u32)>,
    /// Blocks so far, per group.
    pub(super) blocks: Vec<BlockList>,
    /// Flows that read from it.
    pub(super) flows: Vec<FlowId>,
}

impl PushSource {
    /// Steps under way, and flows that read.
    pub(super) fn entries(&self) -> usize {
        self.chunks.len() + self.flows.len()
    }

    /// Tokens whose KV is complete in layers `..=last`, given that layers `..layers` of `step` are
    /// computed and every earlier step is complete.
    pub(super) fn ready(&self, last: u16, (step, layers): (StepId, u16)) -> u32 {
        let mut ready = self.complete;
        for &(chunk, to) in &self.chunks {
            let early = planted!("a-layer-is-sent-before-it-is-computed");
            if chunk > step || (chunk == step && layers + u16::from(early) <= last) {
                break;
            }
            ready = to;
        }
        ready
    }

    fn settle(&mut self, (step, layers): (StepId, u16), model_layers: u16) {
        while let Some(&(chunk, to)) = self.chunks.front() {
            if chunk > step || (chunk == step && layers < model_layers) {
                break;
            }
            self.complete = to;
            self.chunks.pop_front();
        }
    }

    fn add_blocks(&mut self, added: &[BlockList]) {
        self.blocks.resize_with(added.len().max(self.blocks.len()), BlockList::default);
        for (have, new) in self.blocks.iter_mut().zip(added) {
            if new.ids.is_empty() {
                continue;
            }
            if have.ids.is_empty() {
                have.first = new.first;
            }
            assert_eq!(
                have.first as usize + have.ids.len(),
                new.first as usize,
                "blocks of a source must be appended without a gap"
            );
            have.ids.extend_from_slice(&new.ids);
        }
    }
}

impl Transfer {
    pub(super) fn source_grew(
        &mut self,
        id: SourceId,
        step: StepId,
        ready: u32,
        to: u32,
        blocks: &[BlockList],
    ) {
        let source = self.sources.entry(id).or_default();
        source.complete = source.complete.max(ready.min(to));
        source.chunks.push_back((step, to));
        source.add_blocks(blocks);
        self.steps.entry(step).or_default().push(id);
        self.settle_steps();
    }

    pub(super) fn layers_computed(
        &mut self,
        step: StepId,
        layers: u16,
        turn: &mut TransferTurn<'_>,
    ) {
        if (step, layers) <= self.computed {
            return;
        }
        let before = std::mem::replace(&mut self.computed, (step, layers));
        // Of a step that goes on only the layers that are new have more to send.
        let new = if before.0 == step { before.1..layers } else { 0..u16::MAX };
        let grown: Vec<SourceId> =
            self.steps.range(..=step).flat_map(|(_, ids)| ids.iter().copied()).collect();
        for id in grown {
            self.advance_source(id, new.clone(), turn);
        }
        self.settle_steps();
    }

    /// Forgets steps that are complete.
    fn settle_steps(&mut self) {
        let model_layers = self.config.geometry.layers;
        while let Some(entry) = self.steps.first_entry() {
            let (step, layers) = self.computed;
            if *entry.key() > step || (*entry.key() == step && layers < model_layers) {
                break;
            }
            for id in entry.remove() {
                if let Some(source) = self.sources.get_mut(&id) {
                    source.settle(self.computed, model_layers);
                }
            }
        }
    }

    /// Queues what the flows of a source can send now in units that end with one of `layers`.
    pub(super) fn advance_source(
        &mut self,
        id: SourceId,
        layers: Range<u16>,
        turn: &mut TransferTurn<'_>,
    ) {
        let count = self.sources.get(&id).map_or(0, |source| source.flows.len());
        // From the back, since a flow that ends is removed from the list.
        for index in (0..count).rev() {
            let flow = self.sources.get(&id).and_then(|source| source.flows.get(index).copied());
            if let Some(flow) = flow {
                self.advance(flow, layers.clone(), turn);
            }
        }
    }
}
