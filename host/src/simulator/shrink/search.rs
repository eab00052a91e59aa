//! Search for the smallest scenario that fails alike.

use super::cause::FailureCause;
use super::edits::{self, PinnedHit};
use crate::simulator::outcome::RunOutcome;
use crate::simulator::scenario_files::ScenarioSource;
use crate::simulator::seed_run::{RerunPolicy, RunSetup};
use kvferry_engine::core::Nanos;
use kvferry_faults::value::ScenarioValue;
use kvferry_scenarios::{Run, explicit_requests, parse, written};
use kvferry_sim::faults::ROUTER;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;
use toml::Table;

/// Most hits of a fault that get a table each.
const PINNED_MAX: usize = 64;

/// Seeds that are tried when nothing helps with the one of the file.
const SEEDS: Range<u64> = 0..16;

/// A scenario that fails, and how.
#[derive(Clone, Debug)]
pub(super) struct FailingScenario {
    pub(super) file: Table,
    pub(super) run: Run,
    pub(super) outcome: RunOutcome,
}

/// Settings of the runs of a search.
#[derive(Debug)]
pub(super) struct Trial {
    /// Name of the file that is shrunk.
    pub(super) name: String,
    /// Folder in which traces are looked for.
    pub(super) folder: PathBuf,
    pub(super) again: RerunPolicy,
    /// Time after which no candidate is run; none is never.
    pub(super) deadline: Option<Instant>,
}

impl Trial {
    /// True if no candidate is run any more.
    pub(super) fn is_over(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Runs a scenario, given as a table and as its text; none if it cannot be used or does not fail.
    pub(super) fn run(&self, file: Table, text: &str) -> Option<FailingScenario> {
        let scenario = parse(&self.name, text, &self.folder, None).ok()?;
        let seed = scenario.seed()?;
        let setup = RunSetup::plain(ScenarioSource::File(self.name.clone().into()));
        let mut watch = |_, _| assert!(!self.is_over(), "no time is left");
        let ran = setup.run_seed(&scenario, seed, self.again, &mut watch);
        let (outcome, _) = ran.ok()?;
        FailureCause::of(&outcome)?;
        let run = scenario.draw(seed).ok()?;
        Some(FailingScenario { file, run, outcome })
    }
}

/// Search with the smallest scenario so far.
#[derive(Debug)]
pub(super) struct Search {
    trial: Trial,
    pub(super) cause: FailureCause,
    jobs: usize,
    /// Candidates by the hash of their text: true for one that failed alike.
    known: HashMap<[u8; 32], bool>,
    pub(super) best: FailingScenario,
    /// Candidates that were run.
    pub(super) runs: u64,
}

impl Search {
    pub(super) fn new(
        trial: Trial,
        cause: FailureCause,
        first: FailingScenario,
        jobs: usize,
    ) -> Search {
        Search { trial, cause, jobs, known: HashMap::new(), best: first, runs: 0 }
    }

    /// Makes the scenario smaller until nothing helps or the time is over.
    pub(super) fn shrink(&mut self) {
        loop {
            self.shrink_seed();
            if self.is_over() || !self.reseed() {
                return;
            }
        }
    }

    /// Takes something away with another seed of what is still drawn, such as latencies; false if
    /// no seed lets anything go.
    fn reseed(&mut self) -> bool {
        let away = edits::one_away(&self.best.file);
        let candidates =
            SEEDS.flat_map(|seed| away.iter().map(move |file| edits::reseeded(file.clone(), seed)));
        self.first(candidates.collect()).is_some()
    }

    /// The same with one seed.
    fn shrink_seed(&mut self) {
        loop {
            let before = written(&self.best.file);
            self.make_requests_explicit();
            self.remove(edits::kinds, edits::without_kinds);
            self.remove_elements(&["fault"]);
            self.pin_faults();
            for keys in edits::LISTS {
                self.remove_elements(keys);
            }
            for floor in edits::FLOORS {
                self.first(edits::floored(&self.best.file, floor).into_iter().collect());
            }
            self.remove(edits::leaves, edits::without_keys);
            self.simplify();
            if self.is_over() || written(&self.best.file) == before {
                return;
            }
        }
    }

    /// True if the time is over.
    pub(super) fn is_over(&self) -> bool {
        self.trial.is_over()
    }

    /// Takes the first of these candidates that fails alike, and says which it is.
    pub(super) fn first(&mut self, candidates: Vec<Table>) -> Option<usize> {
        let texts: Vec<String> = candidates.iter().map(written).collect();
        let hash = |text: &String| <[u8; 32]>::from(Sha256::digest(text));
        let hashes: Vec<_> = texts.iter().map(hash).collect();
        let is_new = |at: &usize| self.known.get(&hashes[*at]) != Some(&false);
        let open: Vec<usize> = (0..candidates.len()).filter(is_new).collect();
        for some in open.chunks(self.jobs) {
            if self.is_over() {
                return None;
            }
            let ran = self.run_all(some, (&candidates, &texts));
            self.runs += some.len() as u64;
            for (at, ran) in some.iter().zip(ran) {
                let taken = ran.filter(|ran| self.is_alike(ran));
                if !self.is_over() {
                    self.known.insert(hashes[*at], taken.is_some());
                }
                if let Some(taken) = taken {
                    self.best = taken;
                    return Some(*at);
                }
            }
        }
        None
    }

    fn run_all(
        &self,
        some: &[usize],
        (candidates, texts): (&[Table], &[String]),
    ) -> Vec<Option<FailingScenario>> {
        thread::scope(|scope| {
            let run = |at: &usize| {
                let (candidate, text) = (candidates[*at].clone(), &texts[*at]);
                scope.spawn(move || self.trial.run(candidate, text))
            };
            let running: Vec<_> = some.iter().map(run).collect();
            let ended = running.into_iter().map(|one| one.join().expect("runs are guarded"));
            ended.collect()
        })
    }

    /// True if a run failed as the first one did, and took about as long at most.
    fn is_alike(&self, ran: &FailingScenario) -> bool {
        let most = self.best.outcome.events + self.best.outcome.events / 4 + 50;
        FailureCause::of(&ran.outcome).as_ref() == Some(&self.cause) && ran.outcome.events <= most
    }

    /// Gives each request a table of its own.
    pub(super) fn make_requests_explicit(&mut self) {
        let (name, folder) = (&self.trial.name, &self.trial.folder);
        let text = written(&self.best.file);
        let made = explicit_requests((name, &text), folder, self.best.run.seed);
        let candidate = made.ok().flatten().and_then(|text| text.parse().ok());
        self.first(candidate.into_iter().collect());
    }

    /// Removes items, as many at a time as possible.
    fn remove<T>(
        &mut self,
        items: impl Fn(&Table) -> Vec<T>,
        without: impl Fn(&Table, &[T]) -> Option<Table>,
    ) {
        let mut size = items(&self.best.file).len();
        let mut kept = 0;
        while size > 0 && !self.is_over() {
            let all = items(&self.best.file);
            let open = all.get(kept..).unwrap_or_default();
            let candidates = open.chunks(size).enumerate();
            let (places, candidates): (Vec<usize>, Vec<Table>) = candidates
                .filter_map(|(at, gone)| Some((at, without(&self.best.file, gone)?)))
                .unzip();
            match self.first(candidates) {
                Some(at) => kept += places[at] * size,
                None => (size, kept) = (size / 2, 0),
            }
        }
    }

    /// Removes elements of a list: all but one, or else as many at a time as possible.
    fn remove_elements(&mut self, keys: &[&str]) {
        let count = edits::list(&self.best.file, keys).len();
        let but_one = (0..count).filter_map(|one| {
            let gone: Vec<usize> = (0..count).filter(|at| *at != one).collect();
            edits::without(&self.best.file, keys, &gone)
        });
        if count > 2 {
            self.first(but_one.collect());
        }
        let items = |file: &Table| (0..edits::list(file, keys).len()).collect();
        self.remove(items, |file, gone| edits::without(file, keys, gone));
    }

    /// Gives each hit of a fault with `chance` a table of its own.
    fn pin_faults(&mut self) {
        for index in (0..edits::list(&self.best.file, &["fault"]).len()).rev() {
            let hits = self.hits();
            let pinned = |hits: &[PinnedHit]| edits::pinned(&self.best.file, index, hits);
            let each = hits.iter().map(|hit| pinned(std::slice::from_ref(hit)));
            let candidates = each.chain([pinned(&hits)]).flatten();
            self.first(candidates.collect());
        }
    }

    /// Hits of faults with `chance` in the run of the smallest scenario.
    fn hits(&self) -> Vec<PinnedHit> {
        let spelled = |time: Option<Nanos>| time.map(|time| time.spelled());
        let hits = self.best.outcome.chance_hits.iter().filter_map(|hit| {
            let from = match hit.from {
                ROUTER => "router".into(),
                at => self.best.run.instances.get(usize::from(at))?.name.clone(),
            };
            let (lasts, delay) = (spelled(hit.lasts), spelled(hit.delay));
            let (key, event, nth) = (hit.key.to_string(), hit.event.name(), hit.nth);
            Some(PinnedHit { key, event, from, nth, lasts, delay })
        });
        hits.take(PINNED_MAX).collect()
    }

    /// Takes each value to a simpler one.
    fn simplify(&mut self) {
        for path in edits::leaves(&self.best.file) {
            while let Some(value) = edits::value(&self.best.file, &path) {
                let simpler = edits::simpler(value).into_iter();
                let candidates = simpler.filter_map(|new| edits::with(&self.best.file, &path, new));
                if self.is_over() || self.first(candidates.collect()).is_none() {
                    break;
                }
            }
        }
    }
}
