//! Every interleaving of those who ring with who sleeps.

use super::{RungFlag, SleepFlag};
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// An eventfd: counts, and is readable as long as it has counted.
#[derive(Default)]
struct ModelBell {
    rung: Mutex<u64>,
    is_readable: Condvar,
}

impl ModelBell {
    fn ring(&self) {
        *self.rung.lock().unwrap() += 1;
        self.is_readable.notify_one();
    }

    /// Reads it, if there is something to read.
    fn hear(&self) {
        *self.rung.lock().unwrap() = 0;
    }

    /// Waits until it can be read. One that is never rung any more is a deadlock, which loom finds.
    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while *rung == 0 {
            rung = self.is_readable.wait(rung).unwrap();
        }
    }
}

/// All interleavings in which a thread that could go on gives way twice at most: all of them
/// are too many, and these find a store in place of a swap.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut all = loom::model::Builder::new();
    all.preemption_bound = Some(2);
    all.check(model);
}

/// A thread of the plane, as `HostWorker::run` and `HostPlaneShared::tell_worker` have it: two
/// others leave commands for it, one of which is to stop.
#[test]
fn a_thread_never_sleeps_over_a_command() {
    check(|| {
        let asleep = Arc::new(SleepFlag::new());
        let bell = Arc::new(ModelBell::default());
        let commands = Arc::new(Mutex::new(0));
        let stopping = Arc::new(AtomicBool::new(false));
        let teller = {
            let (asleep, bell, commands) = (asleep.clone(), bell.clone(), commands.clone());
            thread::spawn(move || {
                *commands.lock().unwrap() += 1;
                if asleep.must_ring() {
                    bell.ring();
                }
            })
        };
        let stopper = {
            let (asleep, bell, stopping) = (asleep.clone(), bell.clone(), stopping.clone());
            thread::spawn(move || {
                stopping.store(true, Ordering::Release);
                if asleep.must_ring() {
                    bell.ring();
                }
            })
        };
        let mut done = 0;
        while !stopping.load(Ordering::Acquire) || done < 1 {
            done += std::mem::take(&mut *commands.lock().unwrap());
            asleep.announce();
            let has_commands = *commands.lock().unwrap() > 0;
            let is_over = stopping.load(Ordering::Acquire) && done == 1;
            if !has_commands && !is_over {
                bell.wait();
                bell.hear();
            }
            asleep.attend();
        }
        teller.join().unwrap();
        stopper.join().unwrap();
    });
}

/// The owner of a plane, as `HostPlane::poll` and `HostPlaneShared::notify` have it: what it
/// watches is readable, or it has taken what was left for it. Strays are heard ahead of looking.
#[test]
fn an_owner_never_sleeps_over_news() {
    check(|| {
        let is_rung = Arc::new(RungFlag::new());
        let bell = Arc::new(ModelBell::default());
        let news = Arc::new(Mutex::new(0));
        let tellers = [1, 2].map(|_| {
            let (is_rung, bell, news) = (is_rung.clone(), bell.clone(), news.clone());
            thread::spawn(move || {
                *news.lock().unwrap() += 1;
                is_rung.ring(|| bell.ring());
            })
        });
        let (mut taken, mut polls) = (0, 0);
        loop {
            is_rung.hear(|| bell.hear());
            if polls > 0 {
                // A ring whose word was heard ahead of it.
                bell.hear();
            }
            taken += std::mem::take(&mut *news.lock().unwrap());
            if taken == 2 {
                break;
            }
            polls += 1;
            bell.wait();
        }
        tellers.into_iter().for_each(|teller| teller.join().unwrap());
    });
}
