//! `[workload]`: generated requests or a trace.

use crate::ScenarioError;
use crate::decide::{DecisionKey, below, chance, kind, mix};
use crate::doc::{FileName, FromKey, TomlField, TomlSection};
use crate::run::{WorkloadPrompt, WorkloadRequest};
use crate::trace::{TOKENS_PER_HASH, TraceReader, TraceRecord};
use crate::value::{Distribution, InstanceName, Probability, ScaleFactor, or};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::Mode;
use kvferry_faults::section;
use std::path::PathBuf;
use std::sync::Arc;

/// Longest prompt or output that can be asked for, in tokens.
const TOKENS_MAX: u32 = 1 << 24;

section! {
    #[derive(Debug)]
    pub(super) struct WorkloadSpec(section) checked by WorkloadSpec::check {
        pub(super) mode: Distribution<Mode> = Mode::Push;
        pub(super) trace: Option<TraceSource>;
        requests: Distribution<u32> = 8, in (0, 1 << 20);
        prompt_tokens: Distribution<u32> = (16, 256), in (0, TOKENS_MAX);
        output_tokens: Distribution<u32> = (1, 16), in (1, TOKENS_MAX);
        prompts: Distribution<u32> = 1, in (1, 64);
        arrival: Distribution<Nanos> = Nanos::from_ms(1);
        start: Distribution<Nanos> = Nanos::ZERO;
        samples: Distribution<u32> = 1, in (1, 64);
        stop: Probability = Probability(0);
        abort: AbortSpec;
        models: Option<NamedModels>;
        prefix: PrefixSpec;
        single: Vec<SingleRequestSpec>;
        speed: Distribution<ScaleFactor> = ScaleFactor(1000);
        limit: Option<Distribution<u32>>;
    } with {
        line: u32 = section.line;
    }
}

/// A trace file and where it is named.
#[derive(Debug)]
pub(super) struct TraceSource {
    pub(super) path: PathBuf,
    /// The trace itself, if it is part of the program.
    pub(super) text: Option<&'static str>,
    pub(super) line: u32,
}

impl FromKey for TraceSource {
    fn from_field(field: &TomlField<'_>) -> Result<TraceSource, ScenarioError> {
        Ok(TraceSource { path: field.text()?.into(), text: None, line: field.line })
    }
}

section! {
    /// `abort`: clients that go away.
    #[derive(Debug)]
    struct AbortSpec {
        chance: Distribution<Probability> = Probability(0);
        after: Distribution<Nanos> = Nanos::ZERO;
    }
}

section! {
    /// `models`: requests that name a model.
    #[derive(Debug)]
    struct NamedModels {
        chance: Distribution<Probability> = Probability(1_000_000);
        names: Distribution<InstanceName>,
            else ("`models` has no `names`", "say which model requests name");
    }
}

section! {
    /// `prefix`: prompts that start the same.
    #[derive(Debug)]
    struct PrefixSpec {
        chance: Distribution<Probability> = Probability(0);
        pools: Distribution<u32> = 1, in (1, 1 << 20);
        tokens: Distribution<u32> = 0, in (0, TOKENS_MAX);
        run: Distribution<u32> = 16, in (1, TOKENS_MAX);
    }
}

section! {
    /// `single`: a request of its own beside those that are alike.
    #[derive(Debug)]
    struct SingleRequestSpec {
        at: Distribution<Nanos>,
            else ("a single request without `at`", "say when it arrives");
        prompt_tokens: Distribution<u32> = 16, in (0, TOKENS_MAX);
        output_tokens: Distribution<u32> = 1, in (1, TOKENS_MAX);
        prompts: Distribution<u32> = 1, in (1, 64);
        samples: Option<Distribution<u32>>, in (1, 64);
        stop: Option<Distribution<bool>>;
        abort: Option<Distribution<Nanos>>;
        model: Option<Distribution<InstanceName>>;
        /// Makes its decisions those of the request of this number among those that are alike.
        decisions: Option<u64>;
    }
}

/// Keys that make no sense beside `trace`.
const GENERATED: &[&str] = &[
    "requests",
    "prompt_tokens",
    "output_tokens",
    "prompts",
    "arrival",
    "start",
    "prefix",
    "single",
];

impl WorkloadSpec {
    fn check(&self, section: &TomlSection<'_>) -> Result<(), ScenarioError> {
        let (with, without): (&[&str], &str) = match &self.trace {
            Some(_) => (GENERATED, "with"),
            None => (&["speed", "limit"], "without"),
        };
        match section.keys().find(|key| with.contains(key)) {
            None => Ok(()),
            Some(key) => {
                let what = format!("`workload.{key}` has no meaning {without} `trace`");
                Err(section.error_at(section.line_of(key), what, "remove one of them"))
            }
        }
    }

    /// Tokens per prefix hash.
    pub(super) fn prefix_tokens(&self, seed: u64) -> u32 {
        match self.trace {
            Some(_) => TOKENS_PER_HASH,
            None => self.prefix.run.draw(&DecisionKey::new(seed, "workload.prefix.run")),
        }
    }

    /// The requests by arrival. Request n draws from keys of its own.
    pub(super) fn requests(
        &self,
        file: &FileName,
        seed: u64,
        prefix_tokens: u32,
    ) -> Result<Vec<WorkloadRequest>, ScenarioError> {
        let mut requests: Vec<GeneratedRequest<'_>> = match &self.trace {
            Some(trace) => {
                let traced = self.traced(file, trace, seed)?;
                traced.into_iter().map(|request| (request, None)).collect()
            }
            None => self.generated(seed, prefix_tokens),
        };
        let key = DecisionKey::new(seed, "workload");
        for (n, (request, single)) in requests.iter_mut().enumerate() {
            let key = key.actor(n as u64);
            request.samples = self.samples.draw(&key.part("samples"));
            request.stop = chance(key.part("stop").get(), self.stop.0);
            request.abort = self.abort.draw(&key.part("abort"));
            request.model = self.models.as_ref().and_then(|it| it.draw(&key.part("model")));
            if let Some((single, key)) = single {
                single.complete(request, key);
            }
        }
        Ok(requests.into_iter().map(|(request, _)| request).collect())
    }

    fn traced(
        &self,
        file: &FileName,
        trace: &TraceSource,
        seed: u64,
    ) -> Result<Vec<WorkloadRequest>, ScenarioError> {
        let key = DecisionKey::new(seed, "workload.trace");
        let limit = or(&self.limit, u32::MAX, &key.part("limit")) as usize;
        let speed = self.speed.draw(&key.part("speed")).0;
        let request = |record: TraceRecord| record.request(speed);
        if let Some(text) = trace.text {
            let reader = TraceReader::new(text.as_bytes(), file.0.clone());
            return reader.take(limit).map(|record| record.map(request)).collect();
        }
        let reader = TraceReader::open(&trace.path).map_err(|why| {
            file.error(trace.line, format!("{}: {}", why.file, why.what), why.remedy)
        })?;
        reader.take(limit).map(|record| record.map(request)).collect()
    }

    /// Requests by arrival, and for those of a table of their own that table and its key.
    fn generated(&self, seed: u64, prefix_tokens: u32) -> Vec<GeneratedRequest<'_>> {
        let key = DecisionKey::new(seed, "workload");
        let mut at = self.start.draw(&key.part("start"));
        let mut requests: Vec<GeneratedRequest<'_>> = Vec::new();
        for n in 0..self.requests.draw(&key.part("requests")) {
            let key = key.actor(u64::from(n));
            let prompts = (0..self.prompts.draw(&key.part("prompts"))).map(|index| {
                let key = key.nth(u64::from(index));
                let tokens = self.prompt_tokens.draw(&key.part("prompt_tokens"));
                self.prefix.prompt(tokens, prefix_tokens, &key.part("prefix"))
            });
            let output = self.output_tokens.draw(&key.part("output_tokens"));
            requests.push((request(at, prompts.collect(), output), None));
            at = at + self.arrival.draw(&key.part("arrival"));
        }
        for (n, single) in (0..).zip(&self.single) {
            let key = match single.decisions {
                Some(like) => key.actor(like),
                None => key.part("single").actor(n),
            };
            let request = single.draw(&self.prefix, prefix_tokens, &key);
            requests.push((request, Some((single, key))));
        }
        requests.sort_by_key(|(request, _)| request.arrival);
        requests
    }

    /// Where the length of prompts is set.
    pub(super) fn length_line(&self) -> u32 {
        let lines = [self.prompt_tokens.line, self.line];
        self.trace.as_ref().map_or_else(|| *lines.iter().max().unwrap_or(&0), |trace| trace.line)
    }
}

impl SingleRequestSpec {
    fn draw(&self, prefix: &PrefixSpec, run: u32, key: &DecisionKey) -> WorkloadRequest {
        let prompts = (0..self.prompts.draw(&key.part("prompts"))).map(|index| {
            let key = key.nth(u64::from(index));
            let tokens = self.prompt_tokens.draw(&key.part("prompt_tokens"));
            prefix.prompt(tokens, run, &key.part("prefix"))
        });
        let output = self.output_tokens.draw(&key.part("output_tokens"));
        request(self.at.draw(&key.part("at")), prompts.collect(), output)
    }

    /// Sets what its table says of it, in place of what all requests have.
    fn complete(&self, request: &mut WorkloadRequest, key: &DecisionKey) {
        request.samples = or(&self.samples, request.samples, &key.part("samples"));
        request.stop = or(&self.stop, request.stop, &key.part("stop"));
        if let Some(after) = &self.abort {
            request.abort = Some(after.draw(&key.part("abort")));
        }
        if let Some(model) = &self.model {
            request.model = Some(model.draw(&key.part("model")).0);
        }
    }
}

/// A request, and if it has a table of its own that table and its key.
type GeneratedRequest<'a> = (WorkloadRequest, Option<(&'a SingleRequestSpec, DecisionKey)>);

/// A request of which no more is known.
fn request(arrival: Nanos, prompts: Vec<WorkloadPrompt>, output: u32) -> WorkloadRequest {
    WorkloadRequest {
        arrival,
        prompts,
        samples: 1,
        output,
        abort: None,
        stop: false,
        model: None,
        decode_rendering: None,
    }
}

impl AbortSpec {
    fn draw(&self, key: &DecisionKey) -> Option<Nanos> {
        // The probability itself is one for the whole run.
        let ppm = self.chance.draw(&key.actor(0).part("rate")).0;
        chance(key.part("hit").get(), ppm).then(|| self.after.draw(&key.part("after")))
    }
}

impl NamedModels {
    fn draw(&self, key: &DecisionKey) -> Option<Arc<str>> {
        // The probability itself is one for the whole run.
        let ppm = self.chance.draw(&key.actor(0).part("rate")).0;
        chance(key.part("hit").get(), ppm).then(|| self.names.draw(&key.part("name")).0)
    }
}

impl PrefixSpec {
    /// A prompt that starts like the others of its pool for some tokens, rounded down to whole
    /// runs, and goes on like no other.
    fn prompt(&self, tokens: u32, run: u32, key: &DecisionKey) -> WorkloadPrompt {
        let of_run = key.actor(0).nth(0);
        let ppm = self.chance.draw(&of_run.part("rate")).0;
        let pools = self.pools.draw(&of_run.part("pools"));
        let shared = if chance(key.part("hit").get(), ppm) {
            self.tokens.draw(&key.part("tokens")) / run
        } else {
            0
        };
        let pool = below(key.part("pool").get(), u64::from(pools));
        let common = mix(of_run.part("common").get(), pool);
        let own = key.part("own").get();
        let hash = |index: u32| mix(if index < shared { common } else { own }, index.into());
        WorkloadPrompt {
            tokens,
            prefix: (0..tokens / run).map(hash).collect(),
            tail: mix(own, TAIL),
        }
    }
}

/// Distinguishes a tail from the runs of a prompt, which are numbered from 0.
const TAIL: u64 = kind("tail");
