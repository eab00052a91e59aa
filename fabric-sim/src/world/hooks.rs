//! What the planes' networks ask the world.

use super::process::DataOwner;
use super::watch::Watch;
use crate::dma::{Hooks, OpFate, OpInfo, PlaneIx};
use crate::net::{FrameFate, FrameInfo, NetHooks};
use crate::observe::Who;
use engine::core::time::Nanos;
use engine::fabric::Cause;

/// Decides about operations.
#[derive(Debug)]
pub(super) struct DataHooks<'a> {
    pub(super) watch: &'a mut Watch,
    pub(super) planes: &'a [DataOwner],
}

impl Hooks for DataHooks<'_> {
    fn fate(&mut self, now: Nanos, op: &OpInfo<'_>) -> OpFate {
        self.watch.submitted(now, self.planes, op)
    }

    fn register(&mut self, now: Nanos, plane: PlaneIx) -> Option<Cause> {
        self.watch.registered(now, &self.planes[plane.0 as usize])
    }
}

/// Decides about frames.
#[derive(Debug)]
pub(super) struct FrameHooks<'a> {
    pub(super) watch: &'a mut Watch,
    /// Owner of each control plane.
    pub(super) control: &'a [Who],
}

impl NetHooks for FrameHooks<'_> {
    fn fate(&mut self, now: Nanos, frame: &FrameInfo<'_>) -> FrameFate {
        let owner = |ix: crate::net::NetIx| self.control[ix.0 as usize];
        let (from, to) = (owner(frame.from), owner(frame.to));
        self.watch.frame_sent(now, from, to, frame)
    }
}
