//! One scenario with one seed: run, caught if it panics, run again and compared.

use crate::process::CommandError;
use crate::simulator::outcome::RunOutcome;
use crate::simulator::scenario_files::ScenarioSource;
use kvferry_engine::core::Nanos;
use kvferry_scenarios::{Run, Scenario, ScenarioError};
use kvferry_sim::invariants::compare_traces;
use kvferry_sim::world::{self, Recording, RunVerdict, SimOptions};
use std::cell::{Cell, RefCell};
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::time::Instant;

/// A run with more events than this is not run twice.
const CHEAP_EVENTS: u64 = 2_000_000;

/// When a run is run again to see whether its trace is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RerunPolicy {
    Never,
    /// If it had few events.
    IfCheap,
    Always,
}

/// What is run and how.
#[derive(Clone, Debug)]
pub(crate) struct RunSetup {
    pub(crate) source: ScenarioSource,
    /// The trace in place of the one that the scenario names.
    pub(crate) trace: Option<PathBuf>,
    /// Factor of the bandwidth of every link.
    pub(crate) link_scale: f64,
    /// Through the actors; the second run is not.
    pub(crate) actors: bool,
    pub(crate) record: bool,
    /// With the hash of the effects that leave machines.
    pub(crate) outputs: bool,
}

impl RunSetup {
    /// A scenario as it is.
    pub(crate) fn plain(source: ScenarioSource) -> RunSetup {
        RunSetup {
            source,
            trace: None,
            link_scale: 1.0,
            actors: false,
            record: false,
            outputs: false,
        }
    }

    /// Reads the scenario.
    ///
    /// # Errors
    /// As [`kvferry_scenarios::load`].
    pub(crate) fn load(&self) -> Result<Scenario, ScenarioError> {
        self.source.load(self.trace.as_deref())
    }

    /// The command that makes this run.
    fn repro_command(&self, seed: u64) -> String {
        let mut words = vec!["kvferry run".to_string()];
        if let ScenarioSource::File(path) = &self.source {
            words.push(quoted(&path.display().to_string()));
        }
        words.push(format!("--seed {seed}"));
        if let Some(trace) = &self.trace {
            words.push(format!("--workload-trace {}", quoted(&trace.display().to_string())));
        }
        if self.link_scale != 1.0 {
            words.push(format!("--link-scale {}", self.link_scale));
        }
        if self.actors {
            words.push("--actors".into());
        }
        words.join(" ")
    }

    /// Runs the scenario with a seed; `watch` is told its virtual time now and then, with the
    /// time at which the last request arrives.
    ///
    /// # Errors
    /// Values that do not fit each other, or a trace that cannot be read.
    pub(crate) fn run_seed(
        &self,
        scenario: &Scenario,
        seed: u64,
        again: RerunPolicy,
        watch: &mut dyn FnMut(Nanos, Nanos),
    ) -> Result<(RunOutcome, Option<Recording>), CommandError> {
        let mut run = scenario.draw(seed)?;
        if self.link_scale != 1.0 {
            let scaled = |rate: u64| ((rate as f64 * self.link_scale) as u64).max(1);
            run.network.bandwidth = scaled(run.network.bandwidth);
            run.network.node_bandwidth = scaled(run.network.node_bandwidth);
        }
        let run = run;
        let mut outcome = RunOutcome::empty(&run, self.repro_command(seed));
        let started = Instant::now();
        let options =
            SimOptions { record: self.record, outputs: self.outputs, ..SimOptions::default() };
        let last = run.requests.last().map_or(Nanos::ZERO, |request| request.arrival);
        let first = guarded(|| {
            #[cfg(feature = "full")]
            if self.actors {
                return crate::simulator::actors::run(&run, options);
            }
            world::run_watched(&run, options, &mut |now| watch(now, last))
        });
        outcome.wall_seconds = started.elapsed().as_secs_f64();
        let mut recording = None;
        match first {
            Err(text) => outcome.violate(RunVerdict::Panic, text),
            Ok(mut report) => {
                recording = report.recording.take();
                let twice = match again {
                    RerunPolicy::Never => false,
                    RerunPolicy::IfCheap => report.events <= CHEAP_EVENTS,
                    RerunPolicy::Always => true,
                };
                if twice {
                    compare(&run, (report.trace_hash, report.events), &mut outcome);
                }
                outcome.fill(report);
            }
        }
        outcome.judge(run.expect.exit);
        Ok((outcome, recording))
    }
}

/// Runs it once more, without actors.
fn compare(run: &Run, first: (u64, u64), outcome: &mut RunOutcome) {
    match guarded(|| world::run(run, SimOptions::default())) {
        Ok(second) => {
            let second = (second.trace_hash, second.events);
            if let Some(violation) = compare_traces("a second run", first, second) {
                let text = format!("{}: {}", violation.id.name(), violation.text);
                outcome.violate(RunVerdict::NotDeterministic, text);
            }
        }
        Err(text) => {
            outcome.violate(RunVerdict::Panic, format!("only when run again: {text}"));
        }
    }
}

/// A word of a command line, in quotes if a shell would take it apart.
pub(crate) fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    match !word.is_empty() && word.chars().all(plain) {
        true => word.into(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

thread_local! {
    /// True while this thread runs something that may panic.
    static GUARDED: Cell<bool> = const { Cell::new(false) };
    /// What the last panic of it said.
    static SAID: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Makes panics of [`guarded`] work silent; to be called once before any.
pub(crate) fn quiet_panics() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !GUARDED.get() {
            return before(info);
        }
        let payload = info.payload();
        let owned = payload.downcast_ref::<String>().map(String::as_str);
        let text = owned.or_else(|| payload.downcast_ref::<&str>().copied());
        let text = text.unwrap_or("without a text");
        let place = info.location().map_or(String::new(), |place| format!(" at {place}"));
        SAID.set(Some(format!("panic: {text}{place}")));
    }));
}

/// The result of `work`, or what it said when it panicked.
pub(crate) fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    GUARDED.set(true);
    let result = panic::catch_unwind(AssertUnwindSafe(work));
    GUARDED.set(false);
    result.map_err(|_| SAID.take().unwrap_or_else(|| "panic".into()))
}
