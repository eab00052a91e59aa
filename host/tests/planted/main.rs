//! Each planted bug is found by the check that `engine/planted.toml` names for it, and without a
//! bug every one of those checks holds. `./test --planted` runs this.

mod each;
mod finder;
mod list;

use each::each;
use finder::{Finder, Programs};
use list::{Bug, bugs};
use std::collections::BTreeSet;

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
