//! Request traces in Mooncake's format: one JSON object per line with `timestamp` (ms),
//! `input_length`, `output_length` (tokens) and `hash_ids`, one id per started run of 512 prompt
//! tokens. Equal ids are equal prefixes up to and including their run.
//!
//! ```
//! use kvferry_scenarios::trace::TraceReader;
//!
//! let line = r#"{"timestamp": 40, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}"#;
//! let record = TraceReader::new(line.as_bytes(), "chat.jsonl").next().unwrap()?;
//! let request = record.request(2_000);
//! // At twice the speed; one run of 512 tokens is full, the other is the prompt's tail.
//! assert_eq!(request.arrival, kvferry_engine::core::Nanos::from_ms(20));
//! assert_eq!(request.prompts[0].prefix.len(), 1);
//! # Ok::<(), kvferry_scenarios::ScenarioError>(())
//! ```

pub mod generate;

use crate::ScenarioError;
use crate::decide::{kind, mix};
use crate::run::{WorkloadPrompt, WorkloadRequest};
use kvferry_engine::core::Nanos;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;

/// Prompt tokens per entry of `hash_ids`.
pub const TOKENS_PER_HASH: u32 = 512;

/// Longest prompt or output of a trace, in tokens.
const LENGTH_MAX: u32 = 1 << 24;

/// One line of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRecord {
    /// Arrival in milliseconds since the start of the trace.
    pub timestamp: u64,
    /// Tokens of the prompt.
    pub input_length: u32,
    pub output_length: u32,
    /// One id per started run of [`TOKENS_PER_HASH`] prompt tokens.
    pub hash_ids: Vec<u64>,
}

impl TraceRecord {
    /// The request, `speed` thousandths of the recorded speed. A last run that is not full is the
    /// prompt's tail.
    pub fn request(&self, speed: u32) -> WorkloadRequest {
        const NANOS_PER_MS: u64 = 1_000_000;
        let salt = kind("trace.prefix");
        let full = (self.input_length / TOKENS_PER_HASH) as usize;
        let hash = |id: &u64| mix(salt, *id);
        // Content behind the full runs; without any, it is named by what is before.
        let tail = self
            .hash_ids
            .get(full)
            .map_or_else(|| mix(salt, hash(self.hash_ids.last().unwrap_or(&0))), hash);
        let prompt = WorkloadPrompt {
            tokens: self.input_length,
            prefix: self.hash_ids[..full].iter().map(hash).collect(),
            tail,
        };
        WorkloadRequest {
            arrival: Nanos(self.timestamp.saturating_mul(NANOS_PER_MS)).scale(1000, speed.into()),
            prompts: vec![prompt],
            samples: 1,
            output: self.output_length,
            abort: None,
            stop: false,
            model: None,
            decode_rendering: None,
        }
    }
}

/// Reads a trace line by line and checks each; one line is in memory at a time.
#[derive(Debug)]
pub struct TraceReader<R> {
    source: R,
    file: Arc<str>,
    line: u32,
    text: String,
    last: u64,
}

impl TraceReader<BufReader<File>> {
    /// Opens a trace.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn open(path: &Path) -> Result<Self, ScenarioError> {
        let file: Arc<str> = path.display().to_string().into();
        match File::open(path) {
            Ok(source) => Ok(TraceReader::new(BufReader::with_capacity(1 << 16, source), file)),
            Err(why) => Err(ScenarioError {
                file,
                line: 0,
                what: format!("cannot read the trace: {why}"),
                remedy: "name a file that exists".into(),
            }),
        }
    }
}

impl<R: BufRead> TraceReader<R> {
    /// Reads from `source`; `file` is named in errors.
    pub fn new(source: R, file: impl Into<Arc<str>>) -> TraceReader<R> {
        TraceReader { source, file: file.into(), line: 0, text: String::new(), last: 0 }
    }

    fn error(&self, what: impl Into<String>, remedy: impl Into<String>) -> ScenarioError {
        ScenarioError {
            file: self.file.clone(),
            line: self.line,
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    fn read(&mut self) -> Result<Option<TraceRecord>, ScenarioError> {
        loop {
            self.text.clear();
            self.line += 1;
            match self.source.read_line(&mut self.text) {
                Ok(0) => return Ok(None),
                Ok(_) if self.text.trim().is_empty() => {}
                Ok(_) => return self.check().map(Some),
                Err(why) => {
                    return Err(self.error(
                        format!("cannot read the line: {why}"),
                        "give a text file in UTF-8",
                    ));
                }
            }
        }
    }

    fn check(&mut self) -> Result<TraceRecord, ScenarioError> {
        let record: TraceRecord = serde_json::from_str(self.text.trim()).map_err(|why| {
            if why.is_eof() {
                let what = format!("the line is cut off after {} bytes", self.text.trim().len());
                return self.error(what, "restore or remove the line");
            }
            let text = why.to_string();
            // serde_json counts lines of its own input, which is this one line.
            let text = text.split(" at line ").next().unwrap_or(&text);
            let remedy =
                "give one object with `timestamp`, `input_length`, `output_length` and `hash_ids`";
            self.error(format!("not a trace record: {text}"), remedy)
        })?;
        if record.timestamp < self.last {
            let what = format!("timestamp {} is before {}", record.timestamp, self.last);
            return Err(self.error(what, "sort the trace by timestamp"));
        }
        let hashes = record.input_length.div_ceil(TOKENS_PER_HASH) as usize;
        if record.hash_ids.len() != hashes {
            let what = format!(
                "{} hash_ids for an input_length of {}",
                record.hash_ids.len(),
                record.input_length
            );
            return Err(self.error(what, format!("give {hashes}, one per 512 tokens")));
        }
        if record.input_length == 0 || record.output_length == 0 {
            return Err(self.error("a length is 0", "give at least one token"));
        }
        if record.input_length > LENGTH_MAX || record.output_length > LENGTH_MAX {
            return Err(self.error("a length is too large", format!("give at most {LENGTH_MAX}")));
        }
        self.last = record.timestamp;
        Ok(record)
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<TraceRecord, ScenarioError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}
