//! Planes whose backend is gone and cannot be had again for a time, as MoRI's while a port is down:
//! what they had is dead and quiet, nobody reaches their memory, they open nothing. With the next
//! backend all that their owner and their peers knew is void.

use super::Dma;
use super::call::{DmaEvent, News, Output, PlaneIx};
use crate::queue::Schedule;
use engine::core::time::Nanos;
use engine::fabric::{Cause, DataEvent};

/// Why nothing can be opened.
pub(super) fn none() -> Cause {
    Cause::Backend("no backend: the port is down".into())
}

impl Dma {
    /// A plane has no backend from here on.
    pub fn lose_backend<S: Schedule<DmaEvent>>(
        &mut self,
        now: Nanos,
        plane: PlaneIx,
        queue: &mut S,
        out: &mut Vec<Output>,
    ) {
        let me = &self.planes[plane.0 as usize];
        if !me.alive || me.lost {
            return;
        }
        let sessions: Vec<u32> = me.sessions.values().copied().collect();
        self.flush_all_of(plane, out);
        let me = &mut self.planes[plane.0 as usize];
        me.lost = true;
        me.epoch += 1;
        me.places.clear();
        me.admitted.clear();
        out.push(Output::Void { plane });
        for slot in sessions {
            let session = &mut self.sessions[slot as usize];
            session.opened = session.opened.take().map(|_| Err(none()));
            if self.mark_dead(slot, out) {
                self.fail_all(now, slot, &none(), queue);
            }
        }
        for other in 0..self.planes.len() as u32 {
            self.kill_sessions(now, (PlaneIx(other), plane), queue, out);
        }
    }

    /// A plane that had none has a new backend.
    pub fn gain_backend<S: Schedule<DmaEvent>>(
        &mut self,
        now: Nanos,
        plane: PlaneIx,
        queue: &mut S,
        out: &mut Vec<Output>,
    ) {
        let me = &mut self.planes[plane.0 as usize];
        if !me.alive || !me.lost {
            return;
        }
        (me.lost, me.life) = (false, me.life + 1);
        self.forget(plane, out);
        let is_event = |news: &News| matches!(news, News::Event(_));
        for mail in &mut self.mail {
            mail.take_if(|(to, news)| *to == plane && is_event(news));
        }
        let me = &mut self.planes[plane.0 as usize];
        me.held.retain(|news| !is_event(news));
        me.peers.clear();
        let address = plane.address(me.life);
        self.hand_over(plane, News::Event(DataEvent::Reset { address }), out);
        self.tell_peers(now + self.config.teardown, plane, queue);
    }
}
