//! What keeps the bytes of an operation from landing.

use super::Dma;
use crate::memory::CopySide;
use kvferry_engine::fabric::{Direction, FabricError};

impl Dma {
    /// Whether the next slice may land. What was read before the peer shut us out is ours.
    pub(super) fn may_land(&mut self, key: u32) -> Result<(), FabricError> {
        let op = &self.ops[key as usize];
        let read = op.direction == Direction::Read && op.is_past();
        let epochs = (self.planes[op.plane.0 as usize].epoch, self.epoch_of(key));
        if op.checked == Some(epochs) {
            return Ok(());
        }
        match self.check_access(key, epochs) {
            Err(FabricError::RemoteAccess) if read => Ok(()),
            checked => checked,
        }
    }

    /// Whether both regions exist and the peer lets us in.
    fn check_access(&mut self, key: u32, epochs: (u32, u32)) -> Result<(), FabricError> {
        let op = &self.ops[key as usize];
        let session = &self.sessions[op.session as usize];
        let me = &self.planes[op.plane.0 as usize];
        let peer = &self.planes[op.peer.0 as usize];
        let Some((local, _)) = me.places.get(&session.local) else {
            return Err(FabricError::LocalAccess);
        };
        if !peer.alive {
            return Err(FabricError::PeerGone);
        }
        let remote = peer.places.get(&session.remote.serial);
        let admitted = peer.admitted.contains(&(op.plane, session.fence_key));
        let Some((remote, _)) = remote.filter(|_| admitted) else {
            return Err(FabricError::RemoteAccess);
        };
        let local = CopySide { store: self.store_ix(op.plane), place: *local };
        let remote = CopySide { store: self.store_ix(op.peer), place: *remote };
        let op = &mut self.ops[key as usize];
        (op.from, op.to) = match op.direction {
            Direction::Write => (local, remote),
            Direction::Read => (remote, local),
        };
        op.checked = Some(epochs);
        Ok(())
    }

    pub(super) fn is_cut(&self, key: u32) -> bool {
        let op = &self.ops[key as usize];
        let asked = op.direction == Direction::Read && self.cut_between(op.peer, op.plane);
        asked || self.cut_between(op.plane, op.peer)
    }

    fn epoch_of(&self, key: u32) -> u32 {
        self.planes[self.ops[key as usize].peer.0 as usize].epoch
    }
}
