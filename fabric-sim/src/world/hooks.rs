//! What the planes' networks ask the world.

use super::observer::Observer;
use super::process::DataPlaneOwner;
use crate::dma::{DataPlaneIx, DmaHooks, OpDecision, OpInfo};
use crate::net::{FrameDecision, FrameInfo, NetHooks};
use crate::observation::SimProcessId;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::FabricError;

/// Decides about operations.
#[derive(Debug)]
pub(super) struct WorldDmaHooks<'a> {
    pub(super) observer: &'a mut Observer,
    pub(super) planes: &'a [DataPlaneOwner],
}

impl DmaHooks for WorldDmaHooks<'_> {
    fn decide_op(&mut self, now: Nanos, op: &OpInfo<'_>) -> OpDecision {
        self.observer.submitted(now, self.planes, op)
    }

    fn register(&mut self, now: Nanos, plane: DataPlaneIx) -> Option<FabricError> {
        self.observer.registered(now, &self.planes[plane.0 as usize])
    }
}

/// Decides about frames.
#[derive(Debug)]
pub(super) struct WorldNetHooks<'a> {
    pub(super) observer: &'a mut Observer,
    /// Owner of each control plane.
    pub(super) control: &'a [SimProcessId],
}

impl NetHooks for WorldNetHooks<'_> {
    fn decide_frame(&mut self, now: Nanos, frame: &FrameInfo<'_>) -> FrameDecision {
        let owner = |ix: crate::net::ControlPlaneIx| self.control[ix.0 as usize];
        let (from, to) = (owner(frame.from), owner(frame.to));
        self.observer.frame_sent(now, from, to, frame)
    }
}
