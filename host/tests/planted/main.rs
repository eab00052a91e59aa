//! Each planted bug is found by the check that `engine/planted.toml` names for it, and without a
//! bug every one of those checks holds. `./test --planted` runs this.

mod finder;
mod list;

use finder::{Finder, Programs};
use list::{Bug, bugs};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Does something with each of many on all processors; what came out, in order.
fn each<T: Sync, R: Send>(all: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some((at, one)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    all.get(at).map(|one| (at, one))
                } {
                    let result = work(one);
                    done.lock().expect("no worker panics").push((at, result));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("no worker panics");
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[test]
#[allow(clippy::print_stdout, reason = "what found which is what this is about")]
fn each_bug_is_found_and_nothing_without_one() {
    let (bugs, programs) = (bugs(), Programs::of_cargo());
    let finders: Vec<&Finder> =
        bugs.iter().map(|bug| &bug.found).collect::<BTreeSet<_>>().into_iter().collect();
    let alarms: Vec<String> =
        each(&finders, |finder| programs.run(finder, None).err()).into_iter().flatten().collect();
    assert!(alarms.is_empty(), "without a bug:\n{}", alarms.join("\n"));
    println!("without a bug {} checks hold", finders.len());
    let ended = each(&bugs, |bug: &Bug| programs.run(&bug.found, Some(&bug.name)));
    let mut missed = Vec::new();
    for (bug, ended) in bugs.iter().zip(ended) {
        match ended {
            Err(said) if bug.found.is_meant(&said) => {
                println!("{}: found by {}", bug.name, bug.found);
            }
            Err(said) => missed.push(format!("{}: {} says {said}", bug.name, bug.found)),
            Ok(()) => missed.push(format!("{}: {} does not find it", bug.name, bug.found)),
        }
    }
    assert!(missed.is_empty(), "of {} bugs:\n{}", bugs.len(), missed.join("\n"));
}
