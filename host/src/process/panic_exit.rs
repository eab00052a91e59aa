//! What a panic does to the program.

use super::Exit;
use rustix::stdio::stderr;
use std::panic::{self, PanicHookInfo};
use std::thread;

/// Has a panic in any thread end the process with one line: a thread less would go unnoticed, and
/// who waits for it would wait for ever. To be called once, by the program and not by who embeds
/// its library.
pub(crate) fn exit_on_panic() {
    panic::set_hook(Box::new(|info| {
        // As one write, and without a lock that the thread may hold.
        let _ = rustix::io::write(stderr(), line(info).as_bytes());
        std::process::exit(Exit::PANIC.0.into());
    }));
}

fn line(info: &PanicHookInfo<'_>) -> String {
    let thread = thread::current();
    let said = info.payload();
    let owned = said.downcast_ref::<String>().map(String::as_str);
    let said = owned.or_else(|| said.downcast_ref::<&str>().copied());
    let said = said.unwrap_or("without a text").replace('\n', " ");
    let place = info.location().map_or("an unknown place".into(), ToString::to_string);
    format!("error: thread '{}' panicked at {place}: {said}\n", thread.name().unwrap_or("unnamed"))
}
