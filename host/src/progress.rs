//! Progress of long work, on stderr and only if that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io;
use std::time::Duration;

/// A bar over `steps` steps; gone when dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Shows a bar.
    pub(crate) fn new(steps: u64) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = "{spinner} [{elapsed_precise}] {wide_bar} {human_pos}/{human_len} {msg}";
        bar.set_style(ProgressStyle::with_template(style).expect("the template is valid"));
        bar.enable_steady_tick(Duration::from_millis(100));
        Progress(bar)
    }

    /// Says what is being done.
    pub(crate) fn say(&self, text: impl Into<String>) {
        self.0.set_message(text.into());
    }

    /// Some steps are done.
    pub(crate) fn set(&self, steps: u64) {
        self.0.set_position(steps);
    }

    /// Hides the bar while something else is written.
    pub(crate) fn pause(&self, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        self.0.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
