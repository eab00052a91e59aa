//! The planes of an instance, each polled when it has something to say.

use crate::core::command::{ControlCommand, DataCommand, DataRefusal};
use crate::core::instance::InstanceInput;
use crate::core::time::Nanos;
use crate::effects::{perform_control, perform_data};
use crate::fabric::{ControlEvent, ControlPlane, DataPlane, NextPoll};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{self, Waker};

/// What the machines of an instance call.
pub trait PlaneSet: Unpin + 'static {
    /// Calls the control plane; what it refuses comes back as an event.
    fn control(&mut self, command: ControlCommand) -> Option<ControlEvent>;

    /// Calls the data plane of a rank.
    fn data(&mut self, rank: u16, command: DataCommand) -> Option<DataRefusal>;

    /// Collects what the planes report and says when to come again.
    fn poll(&mut self, now: Nanos, out: &mut VecDeque<InstanceInput>) -> NextPoll;

    /// Who the planes wake.
    fn set_waker(&mut self, waker: &Waker);

    /// What planes ring in place of the waker, with names for [`PlaneSet::on_doorbell`].
    fn doorbells(&mut self) -> Vec<(usize, BorrowedFd<'_>)> {
        Vec::new()
    }

    /// A doorbell was rung.
    fn on_doorbell(&mut self, _bell: usize) {}
}

/// A plane, and whether it has to be polled.
struct PolledPlane<P: ?Sized> {
    wake: NextPoll,
    bell: Arc<PlaneWaker>,
    plane: Box<P>,
}

impl<P: ?Sized> PolledPlane<P> {
    fn new(plane: Box<P>) -> PolledPlane<P> {
        let bell =
            Arc::new(PlaneWaker { has_news: AtomicBool::new(true), driver: Waker::noop().clone() });
        PolledPlane { wake: NextPoll::External, bell, plane }
    }

    /// The plane, about to be called: it may have news of that.
    fn call(&mut self) -> &mut P {
        self.bell.has_news.store(true, Ordering::Relaxed);
        &mut self.plane
    }

    fn is_due(&self, now: Nanos) -> bool {
        let has_news = self.bell.has_news.swap(false, Ordering::AcqRel);
        has_news
            || match self.wake {
                NextPoll::Ready => true,
                NextPoll::At(at) => at <= now,
                NextPoll::External => false,
            }
    }

    fn waker(&mut self, driver: &Waker) -> Waker {
        self.bell =
            Arc::new(PlaneWaker { has_news: AtomicBool::new(true), driver: driver.clone() });
        Waker::from(self.bell.clone())
    }
}

/// Notes that a plane has news, and wakes the driver.
struct PlaneWaker {
    has_news: AtomicBool,
    driver: Waker,
}

impl task::Wake for PlaneWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.has_news.store(true, Ordering::Release);
        self.driver.wake_by_ref();
    }
}

/// The planes of an instance that are in this process.
#[derive(Default)]
pub struct LocalPlanes {
    control: Option<PolledPlane<dyn ControlPlane>>,
    ranks: Vec<(u16, PolledPlane<dyn DataPlane>)>,
}

impl LocalPlanes {
    /// A set to which planes are added.
    pub fn new() -> LocalPlanes {
        LocalPlanes::default()
    }

    /// Sets the control plane.
    pub(super) fn set_control(&mut self, plane: Box<dyn ControlPlane>) {
        self.control = Some(PolledPlane::new(plane));
    }

    /// Adds the data plane of a rank.
    pub(super) fn add_rank(&mut self, rank: u16, plane: Box<dyn DataPlane>) {
        self.ranks.push((rank, PolledPlane::new(plane)));
    }
}

impl PlaneSet for LocalPlanes {
    fn control(&mut self, command: ControlCommand) -> Option<ControlEvent> {
        perform_control(self.control.as_mut()?.call(), command)
    }

    fn data(&mut self, rank: u16, command: DataCommand) -> Option<DataRefusal> {
        let (_, plane) = self.ranks.iter_mut().find(|(own, _)| *own == rank)?;
        perform_data(plane.call(), command)
    }

    fn poll(&mut self, now: Nanos, out: &mut VecDeque<InstanceInput>) -> NextPoll {
        let mut wake = NextPoll::External;
        for (rank, watched) in &mut self.ranks {
            if watched.is_due(now) {
                let mut events = Vec::new();
                watched.wake = watched.plane.poll(now, &mut events);
                let rank = *rank;
                out.extend(events.into_iter().map(|event| InstanceInput::Data { rank, event }));
            }
            wake = wake.sooner(watched.wake);
        }
        if let Some(watched) = &mut self.control {
            if watched.is_due(now) {
                let mut events = Vec::new();
                watched.wake = watched.plane.poll(now, &mut events);
                out.extend(events.into_iter().map(InstanceInput::Control));
            }
            wake = wake.sooner(watched.wake);
        }
        wake
    }

    fn set_waker(&mut self, waker: &Waker) {
        for (_, watched) in &mut self.ranks {
            let bell = watched.waker(waker);
            watched.plane.set_waker(bell);
        }
        if let Some(watched) = &mut self.control {
            let bell = watched.waker(waker);
            watched.plane.set_waker(bell);
        }
    }

    fn doorbells(&mut self) -> Vec<(usize, BorrowedFd<'_>)> {
        let ranks = self.ranks.iter_mut().enumerate();
        ranks.filter_map(|(nth, (_, watched))| Some((nth, watched.plane.doorbell()?))).collect()
    }

    fn on_doorbell(&mut self, bell: usize) {
        if let Some((_, watched)) = self.ranks.get_mut(bell) {
            watched.call();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soonest_wish_of_all_planes_holds() {
        let [early, late] = [NextPoll::At(Nanos(3)), NextPoll::At(Nanos(5))];
        for (one, other, both) in [
            (NextPoll::Ready, early, NextPoll::Ready),
            (early, late, early),
            (late, NextPoll::External, late),
            (NextPoll::External, NextPoll::External, NextPoll::External),
        ] {
            assert_eq!((one.sooner(other), other.sooner(one)), (both, both));
        }
    }
}
