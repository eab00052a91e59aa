//! The only rank of the engine: takes jobs, and reports on them as a transfer actor may.

use super::frames;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{ConnectionId, FlowId};
use kvferry_engine::core::message::{FlowState, TransferJob, TransferReport};
use kvferry_engine::fabric::FabricError;

/// Jobs that have not ended.
#[derive(Debug, Default)]
pub(super) struct FuzzRanks {
    peers: Vec<ConnectionId>,
    fences: Vec<ConnectionId>,
    flows: Vec<(FlowId, ConnectionId)>,
}

impl FuzzRanks {
    pub(super) fn job(&mut self, job: &TransferJob) {
        match *job {
            TransferJob::Peer { peer, .. } if !self.peers.contains(&peer) => self.peers.push(peer),
            TransferJob::Fence { peer } => {
                assert!(!self.fences.contains(&peer), "{peer} is fenced twice");
                self.peers.retain(|other| *other != peer);
                self.fences.push(peer);
            }
            TransferJob::Write { flow, peer, .. }
            | TransferJob::Read { flow, peer, .. }
            | TransferJob::Digest { flow, peer, .. } => {
                self.flows.push((flow, peer));
            }
            TransferJob::Peer { .. }
            | TransferJob::Source { .. }
            | TransferJob::Forget { .. }
            | TransferJob::Stop { .. } => {}
        }
    }

    /// One of the reports that there can be now, with those that come before it.
    pub(super) fn report(&mut self, what: u8, which: u8) -> Vec<TransferReport> {
        let which = usize::from(which);
        let peer = self.peers.get(which % self.peers.len().max(1)).copied();
        let flow = self.flows.get(which % self.flows.len().max(1)).map(|(flow, _)| *flow);
        let failure = Failure::Fabric(FabricError::AckTimeout);
        let state = match what % 8 {
            0 => return peer.map(|peer| TransferReport::PeerReady { peer }).into_iter().collect(),
            1 => {
                return peer
                    .map(|peer| TransferReport::PeerFailed { peer, failure })
                    .into_iter()
                    .collect();
            }
            2 => return self.fenced(which),
            3 => FlowState::Moving,
            4 => FlowState::Failing(failure),
            5 => FlowState::Done { bytes: 1 },
            6 => FlowState::Failed(failure),
            _ => return vec![TransferReport::Ready { layout: frames::layout(0x1000) }],
        };
        let Some(flow) = flow else { return Vec::new() };
        if matches!(state, FlowState::Done { .. } | FlowState::Failed(_)) {
            self.flows.retain(|(other, _)| *other != flow);
        }
        vec![TransferReport::Flow { flow, state }]
    }

    /// The flows of a peer fail before it is kept out.
    fn fenced(&mut self, which: usize) -> Vec<TransferReport> {
        if self.fences.is_empty() {
            return Vec::new();
        }
        let peer = self.fences.remove(which % self.fences.len());
        let (gone, left) = self.flows.drain(..).partition(|(_, other)| *other == peer);
        self.flows = left;
        let gone: Vec<(FlowId, ConnectionId)> = gone;
        let fail = |(flow, _)| TransferReport::Flow {
            flow,
            state: FlowState::Failed(Failure::EngineGone),
        };
        gone.into_iter().map(fail).chain([TransferReport::Fenced { peer }]).collect()
    }

    /// The end of everything under way.
    pub(super) fn end(&mut self) -> Vec<TransferReport> {
        let mut reports = Vec::new();
        while !self.fences.is_empty() {
            reports.extend(self.fenced(0));
        }
        while !self.flows.is_empty() {
            reports.extend(self.report(6, 0));
        }
        reports
    }
}
