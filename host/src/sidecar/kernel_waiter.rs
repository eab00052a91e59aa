//! Layers that kernels of a GPU still compute: none of their bytes is moved before.

use crate::process::lock;
use kvferry_engine::core::ids::StepId;
use kvferry_fabric_mori::DeviceEvent;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Pauses between two looks at an event: the next is twice as long as the last.
const PAUSES: [Duration; 2] = [Duration::from_micros(10), Duration::from_micros(200)];

/// The first `layers` layers of a step are computed when `event` is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PendingLayers {
    pub(super) step: StepId,
    pub(super) layers: u16,
    pub(super) event: DeviceEvent,
}

/// What is done when there is news of an event.
pub(super) struct KernelHooks {
    /// Whether all before an event is done.
    pub(super) ask: Box<dyn Fn(DeviceEvent) -> Result<bool, String> + Send>,
    pub(super) computed: Box<dyn Fn(PendingLayers) + Send>,
    /// Kernels failed, so that nobody knows what is in the memory.
    pub(super) failed: Box<dyn Fn(String) + Send>,
}

/// Waits for the events of one stream, in their order, on a thread of its own. Dropping it ends the
/// waiting: no event is looked at after that.
#[derive(Debug)]
pub(super) struct KernelWaiter {
    todo: Mutex<Option<mpsc::Sender<PendingLayers>>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl KernelWaiter {
    /// `seen` counts the events that nobody looks at any more.
    ///
    /// # Errors
    /// No thread can be had.
    pub(super) fn start(hooks: KernelHooks, seen: Arc<AtomicU64>) -> io::Result<KernelWaiter> {
        let (todo, inbox) = mpsc::channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let of_thread = is_over.clone();
        let thread = thread::Builder::new()
            .name("kvferry-kernels".into())
            .spawn(move || run(&inbox, &hooks, &of_thread, &seen))?;
        Ok(KernelWaiter { todo: Mutex::new(Some(todo)), is_over, thread: Some(thread) })
    }

    pub(super) fn wait(&self, layers: PendingLayers) {
        if let Some(todo) = &*lock(&self.todo) {
            // The thread takes all there is until this is dropped.
            let _taken = todo.send(layers);
        }
    }
}

impl Drop for KernelWaiter {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        *lock(&self.todo) = None;
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

fn run(
    inbox: &mpsc::Receiver<PendingLayers>,
    hooks: &KernelHooks,
    is_over: &AtomicBool,
    seen: &AtomicU64,
) {
    for layers in inbox {
        let done = done(layers.event, hooks, is_over);
        seen.fetch_add(1, Ordering::Release);
        match done {
            Ok(true) => (hooks.computed)(layers),
            Ok(false) => {}
            Err(why) => {
                is_over.store(true, Ordering::Release);
                (hooks.failed)(why);
            }
        }
    }
}

/// False if it is over before the event is done.
fn done(event: DeviceEvent, hooks: &KernelHooks, is_over: &AtomicBool) -> Result<bool, String> {
    let mut pause = PAUSES[0];
    while !is_over.load(Ordering::Acquire) {
        if (hooks.ask)(event)? {
            return Ok(true);
        }
        thread::sleep(pause);
        pause = (2 * pause).min(PAUSES[1]);
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    /// A GPU of which the test says what is done.
    #[derive(Default)]
    struct Device {
        events: Mutex<BTreeMap<DeviceEvent, Result<bool, String>>>,
        seen: Arc<AtomicU64>,
    }

    impl Device {
        fn set(&self, number: u64, is: Result<bool, String>) {
            lock(&self.events).insert(event(number), is);
        }

        fn seen(&self) -> u64 {
            self.seen.load(Ordering::Acquire)
        }

        fn kernels(self: &Arc<Self>) -> (KernelWaiter, mpsc::Receiver<Result<u16, String>>) {
            let (told, heard) = mpsc::channel();
            let (device, failed) = (self.clone(), told.clone());
            let hooks = KernelHooks {
                ask: Box::new(move |event| lock(&device.events)[&event].clone()),
                computed: Box::new(move |layers| told.send(Ok(layers.layers)).expect("heard")),
                failed: Box::new(move |why| failed.send(Err(why)).expect("heard")),
            };
            (KernelWaiter::start(hooks, self.seen.clone()).expect("a thread"), heard)
        }
    }

    fn event(number: u64) -> DeviceEvent {
        // SAFETY: No runtime is asked for it.
        unsafe { DeviceEvent::new(number) }
    }

    fn layers(layers: u16, number: u64) -> PendingLayers {
        PendingLayers { step: StepId(1), layers, event: event(number) }
    }

    #[test]
    fn layers_are_computed_when_their_event_is_done_and_not_before_earlier_ones() {
        let device = Arc::new(Device::default());
        device.set(10, Ok(false));
        device.set(11, Ok(true));
        let (kernels, heard) = device.kernels();
        kernels.wait(layers(1, 10));
        kernels.wait(layers(2, 11));
        // Long enough that the second would be heard of if it did not wait for the first.
        assert!(heard.recv_timeout(Duration::from_millis(20)).is_err());
        assert_eq!(device.seen(), 0);
        device.set(10, Ok(true));
        assert_eq!((heard.recv(), heard.recv()), (Ok(Ok(1)), Ok(Ok(2))));
        drop(kernels);
        assert_eq!(device.seen(), 2);
    }

    #[test]
    fn nothing_is_computed_after_kernels_that_failed() {
        let device = Arc::new(Device::default());
        device.set(10, Err("hipErrorIllegalAddress".into()));
        device.set(11, Ok(true));
        let (kernels, heard) = device.kernels();
        kernels.wait(layers(1, 10));
        kernels.wait(layers(2, 11));
        assert_eq!(heard.recv(), Ok(Err("hipErrorIllegalAddress".into())));
        drop(kernels);
        assert_eq!((heard.recv().ok(), device.seen()), (None, 2));
    }

    #[test]
    fn an_event_that_is_never_done_is_let_go_when_it_is_over() {
        let device = Arc::new(Device::default());
        device.set(10, Ok(false));
        let (kernels, heard) = device.kernels();
        kernels.wait(layers(1, 10));
        drop(kernels);
        assert_eq!((heard.recv().ok(), device.seen()), (None, 1));
    }
}
