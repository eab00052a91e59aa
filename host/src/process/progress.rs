//! Progress of long work, on stderr and only if that is a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
#[cfg(feature = "simulator")]
use std::io;
use std::time::Duration;

/// Parts that a step can be done to.
const PARTS: u64 = 1000;

/// A bar over `steps` steps; gone when dropped.
#[derive(Debug)]
pub(crate) struct CliProgress {
    bar: ProgressBar,
    steps: u64,
}

impl CliProgress {
    pub(crate) fn new(steps: u64) -> CliProgress {
        let whole = Some(steps.saturating_mul(PARTS));
        let bar = ProgressBar::with_draw_target(whole, ProgressDrawTarget::stderr());
        let style = "{spinner} [{elapsed_precise}] {wide_bar} {percent:>3} % {prefix} {msg}";
        bar.set_style(ProgressStyle::with_template(style).expect("the template is valid"));
        bar.enable_steady_tick(Duration::from_millis(100));
        CliProgress { bar, steps }
    }

    /// Says what is being done.
    pub(crate) fn say(&self, text: impl Into<String>) {
        self.bar.set_message(text.into());
    }

    /// Some steps are done.
    pub(crate) fn set(&self, done: u64) {
        self.bar.set_prefix(format!("{done}/{}", self.steps));
        self.bar.set_position(done.saturating_mul(PARTS));
    }

    /// The step after `done` is done to `part` of `whole`.
    #[cfg(feature = "simulator")]
    pub(crate) fn set_part(&self, done: u64, part: u64, whole: u64) {
        let parts = u128::from(part) * u128::from(PARTS) / u128::from(whole.max(1));
        let parts = u64::try_from(parts).unwrap_or(PARTS).min(PARTS);
        self.bar.set_position(done.saturating_mul(PARTS).saturating_add(parts));
    }

    /// Hides the bar while something else is written.
    #[cfg(feature = "simulator")]
    pub(crate) fn pause(&self, write: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        self.bar.suspend(write)
    }
}

impl Drop for CliProgress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
