//! Planes whose backend is gone and cannot be had again for a time, as MoRI's while a port is down:
//! what they had is dead and quiet, nobody reaches their memory, they open nothing. With the next
//! backend all that their owner and their peers knew is void.

use super::Dma;
use super::call::{DataPlaneIx, DmaContext, DmaMessage, DmaOutput};
use kvferry_engine::fabric::{DataEvent, FabricError};

/// Why nothing can be opened.
pub(super) fn none() -> FabricError {
    FabricError::Backend("no backend: the port is down".into())
}

impl Dma {
    /// A plane has no backend from here on.
    pub fn lose_backend(&mut self, plane: DataPlaneIx, cx: &mut DmaContext<'_>) {
        let me = &self.planes[plane.0 as usize];
        if !me.alive || me.lost {
            return;
        }
        let sessions: Vec<u32> = me.sessions.values().copied().collect();
        self.flush_all_of(plane, cx);
        let me = &mut self.planes[plane.0 as usize];
        me.lost = true;
        me.epoch += 1;
        me.places.clear();
        me.admitted.clear();
        cx.out.push(DmaOutput::Void { plane });
        for slot in sessions {
            let session = &mut self.sessions[slot as usize];
            session.opened = session.opened.take().map(|_| Err(none()));
            if self.mark_dead(slot, cx) {
                self.fail_all(slot, &none(), cx);
            }
        }
        for other in 0..self.planes.len() as u32 {
            self.kill_sessions((DataPlaneIx(other), plane), cx);
        }
    }

    /// A plane that had none has a new backend.
    pub fn gain_backend(&mut self, plane: DataPlaneIx, cx: &mut DmaContext<'_>) {
        let me = &mut self.planes[plane.0 as usize];
        if !me.alive || !me.lost {
            return;
        }
        (me.lost, me.backend_generation) = (false, me.backend_generation + 1);
        self.forget(plane, cx);
        let is_event = |news: &DmaMessage| matches!(news, DmaMessage::Event(_));
        for mail in self.mail.iter_mut() {
            mail.take_if(|(to, news)| *to == plane && is_event(news));
        }
        let me = &mut self.planes[plane.0 as usize];
        me.held.retain(|news| !is_event(news));
        me.peers.clear();
        let address = plane.address(me.backend_generation);
        self.hand_over(plane, DmaMessage::Event(DataEvent::Reset { address }), cx);
        self.tell_peers(cx.now + self.config.teardown, plane, cx);
    }
}
