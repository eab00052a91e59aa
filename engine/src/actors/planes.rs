//! The planes of an instance, each polled when it has something to say.

use crate::core::command::{ControlCommand, DataCommand, DataRefusal};
use crate::core::instance::InstanceInput;
use crate::core::time::Nanos;
use crate::driver::{perform_control, perform_data};
use crate::fabric::{ControlEvent, ControlPlane, DataPlane, Wake};
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{self, Waker};

/// What the machines of an instance call.
pub trait Fabric: Unpin + 'static {
    /// Calls the control plane; what it refuses comes back as an event.
    fn control(&mut self, command: ControlCommand) -> Option<ControlEvent>;

    /// Calls the data plane of a rank.
    fn data(&mut self, rank: u16, command: DataCommand) -> Option<DataRefusal>;

    /// Collects what the planes report and says when to come again.
    fn poll(&mut self, now: Nanos, out: &mut VecDeque<InstanceInput>) -> Wake;

    /// Who the planes wake.
    fn set_waker(&mut self, waker: &Waker);

    /// What planes ring in place of the waker, with names for [`Fabric::rung`].
    fn doorbells(&mut self) -> Vec<(usize, BorrowedFd<'_>)> {
        Vec::new()
    }

    /// A doorbell was rung.
    fn rung(&mut self, _bell: usize) {}
}

/// A plane, and whether it has to be polled.
struct Watched<P: ?Sized> {
    wake: Wake,
    bell: Arc<Bell>,
    plane: Box<P>,
}

impl<P: ?Sized> Watched<P> {
    fn new(plane: Box<P>) -> Watched<P> {
        let bell =
            Arc::new(Bell { has_news: AtomicBool::new(true), driver: Waker::noop().clone() });
        Watched { wake: Wake::External, bell, plane }
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
                Wake::Ready => true,
                Wake::At(at) => at <= now,
                Wake::External => false,
            }
    }

    fn waker(&mut self, driver: &Waker) -> Waker {
        self.bell = Arc::new(Bell { has_news: AtomicBool::new(true), driver: driver.clone() });
        Waker::from(self.bell.clone())
    }
}

/// Notes that a plane has news, and wakes the driver.
struct Bell {
    has_news: AtomicBool,
    driver: Waker,
}

impl task::Wake for Bell {
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
pub struct Planes {
    control: Option<Watched<dyn ControlPlane>>,
    ranks: Vec<(u16, Watched<dyn DataPlane>)>,
}

impl Planes {
    /// No planes.
    pub fn new() -> Planes {
        Planes::default()
    }

    /// Sets the control plane.
    pub fn set_control(&mut self, plane: Box<dyn ControlPlane>) {
        self.control = Some(Watched::new(plane));
    }

    /// Adds the data plane of a rank.
    pub fn add_rank(&mut self, rank: u16, plane: Box<dyn DataPlane>) {
        self.ranks.push((rank, Watched::new(plane)));
    }
}

fn sooner(one: Wake, other: Wake) -> Wake {
    match (one, other) {
        (Wake::Ready, _) | (_, Wake::Ready) => Wake::Ready,
        (Wake::At(one), Wake::At(other)) => Wake::At(one.min(other)),
        (Wake::At(at), Wake::External) | (Wake::External, Wake::At(at)) => Wake::At(at),
        (Wake::External, Wake::External) => Wake::External,
    }
}

impl Fabric for Planes {
    fn control(&mut self, command: ControlCommand) -> Option<ControlEvent> {
        perform_control(self.control.as_mut()?.call(), command)
    }

    fn data(&mut self, rank: u16, command: DataCommand) -> Option<DataRefusal> {
        let (_, plane) = self.ranks.iter_mut().find(|(own, _)| *own == rank)?;
        perform_data(plane.call(), command)
    }

    fn poll(&mut self, now: Nanos, out: &mut VecDeque<InstanceInput>) -> Wake {
        let mut wake = Wake::External;
        for (rank, watched) in &mut self.ranks {
            if watched.is_due(now) {
                let mut events = Vec::new();
                watched.wake = watched.plane.poll(now, &mut events);
                let rank = *rank;
                out.extend(events.into_iter().map(|event| InstanceInput::Data { rank, event }));
            }
            wake = sooner(wake, watched.wake);
        }
        if let Some(watched) = &mut self.control {
            if watched.is_due(now) {
                let mut events = Vec::new();
                watched.wake = watched.plane.poll(now, &mut events);
                out.extend(events.into_iter().map(InstanceInput::Control));
            }
            wake = sooner(wake, watched.wake);
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

    fn rung(&mut self, bell: usize) {
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
        let [early, late] = [Wake::At(Nanos(3)), Wake::At(Nanos(5))];
        for (one, other, both) in [
            (Wake::Ready, early, Wake::Ready),
            (early, late, early),
            (late, Wake::External, late),
            (Wake::External, Wake::External, Wake::External),
        ] {
            assert_eq!((sooner(one, other), sooner(other, one)), (both, both));
        }
    }
}
