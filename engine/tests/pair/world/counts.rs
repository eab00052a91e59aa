//! Counts that the machines of a pair should have, from what they are told and say.

use super::RankId;
use kvferry_engine::core::ids::RequestId;
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::message::{FlowState, PrefillAnswer, PrefillHook, TransferReport};
use kvferry_engine::core::prefill::PrefillInput;
use std::collections::BTreeMap;

/// Blocks and bytes that are held and were moved.
#[derive(Debug, Default)]
pub(super) struct WorldCounts {
    /// Blocks of each request that a prefill has taken in.
    blocks: BTreeMap<RequestId, usize>,
    /// The request that has just arrived a second time.
    again: Option<RequestId>,
    /// Submissions that were refused, of which the ranks have not heard.
    refused: BTreeMap<RankId, u32>,
    moved: BTreeMap<RankId, BytesMoved>,
}

/// Bytes of a rank.
#[derive(Debug, Default)]
struct BytesMoved {
    completed: u64,
    /// Bytes of flows that are done.
    reported: u64,
    /// A flow of it has failed, and its bytes are not reported.
    has_failed: bool,
}

impl WorldCounts {
    pub(super) fn prefill_hears(&mut self, input: &PrefillInput) {
        self.again = None;
        let PrefillInput::Hook(hook) = input else { return };
        match hook {
            PrefillHook::Arrived { request, .. } => match self.blocks.contains_key(request) {
                true => self.again = Some(request.clone()),
                false => drop(self.blocks.insert(request.clone(), 0)),
            },
            PrefillHook::Scheduled { chunks, .. } => {
                for chunk in chunks {
                    if let Some(blocks) = self.blocks.get_mut(&chunk.request) {
                        *blocks += chunk.blocks.iter().map(|list| list.ids.len()).sum::<usize>();
                    }
                }
            }
            PrefillHook::Preempted { request } => {
                self.blocks.entry(request.clone()).and_modify(|blocks| *blocks = 0);
            }
            PrefillHook::Finished { .. } => {}
        }
    }

    pub(super) fn prefill_says(&mut self, answer: &PrefillAnswer) {
        match answer {
            PrefillAnswer::SourceFree { request, .. } => drop(self.blocks.remove(request)),
            PrefillAnswer::Rejected { request, .. } => {
                if self.again.as_ref() != Some(request) {
                    self.blocks.remove(request);
                }
            }
            PrefillAnswer::PreemptionSafe { .. } => {}
        }
    }

    /// Blocks that the prefill keeps from being reused are those that it was told of.
    pub(super) fn judge_prefill(&self, gauges: Gauges) {
        assert_eq!(gauges.held as usize, self.blocks.values().sum::<usize>(), "blocks held");
    }

    pub(super) fn refused(&mut self, rank: RankId) {
        *self.refused.entry(rank).or_default() += 1;
    }

    pub(super) fn refusal_heard(&mut self, rank: RankId) {
        *self.refused.entry(rank).or_default() -= 1;
    }

    pub(super) fn completed(&mut self, rank: RankId, bytes: u64) {
        self.moved.entry(rank).or_default().completed += bytes;
    }

    pub(super) fn reported(&mut self, rank: RankId, report: &TransferReport) {
        let moved = self.moved.entry(rank).or_default();
        match report {
            TransferReport::Flow { state: FlowState::Done { bytes }, .. } => {
                moved.reported += bytes
            }
            TransferReport::Flow { state: FlowState::Failed(_), .. } => moved.has_failed = true,
            _ => {}
        }
    }

    /// A rank has the operations that its plane has, and when it has no flow it has reported the bytes that
    /// its plane moved.
    pub(super) fn judge_rank(&self, rank: RankId, in_flight: u32, gauges: Gauges) {
        let refused = self.refused.get(&rank).copied().unwrap_or_default();
        assert_eq!(gauges.operations, in_flight + refused, "operations of {rank:?}");
        let Some(moved) = self.moved.get(&rank).filter(|moved| !moved.has_failed) else { return };
        match gauges.transfers {
            0 => assert_eq!(moved.reported, moved.completed, "bytes of {rank:?}"),
            _ => assert!(moved.reported <= moved.completed, "bytes of {rank:?}"),
        }
    }
}
