//! Requests that wait for an instance, in a line for each model: one that nobody takes holds up those
//! for the same model only. Requests that name the same engines have a line of their own.

use crate::core::ids::{ClientId, EngineId};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Models that have a line though no instance says that it serves them; more of these share one.
const UNLISTED_MAX: usize = 256;

/// Place in the queue: retries before new requests, then in order of arrival.
pub(super) type QueuePosition = (bool, u64);

/// The model of a line, which is none for requests that name none and empty for those that share one,
/// and the engines that its requests name.
pub(super) type QueueLine = (Option<Arc<str>>, Option<Arc<[EngineId]>>);

#[derive(Debug, Default)]
pub(super) struct RequestQueue {
    /// No line is empty.
    lines: BTreeMap<QueueLine, BTreeMap<QueuePosition, ClientId>>,
    len: usize,
}

impl RequestQueue {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The line of a model: its own while there are few, or if it is listed.
    pub(super) fn line(
        &self,
        model: Option<&Arc<str>>,
        engines: Option<&Arc<[EngineId]>>,
        is_listed: impl Fn() -> bool,
    ) -> QueueLine {
        let model = model.filter(|_| !planted!("models-wait-in-one-line")).cloned();
        let line = (model, engines.cloned());
        let is_own =
            self.lines.len() < UNLISTED_MAX || self.lines.contains_key(&line) || is_listed();
        let (model, engines) = line;
        (model.map(|name| if is_own { name } else { "".into() }), engines)
    }

    /// True if nobody waits there.
    pub(super) fn is_free(&self, line: &QueueLine) -> bool {
        !self.lines.contains_key(line)
    }

    pub(super) fn add(&mut self, line: QueueLine, position: QueuePosition, client: ClientId) {
        let before = self.lines.entry(line).or_default().insert(position, client);
        assert!(before.is_none(), "{position:?} was given twice");
        self.len += 1;
    }

    pub(super) fn remove(&mut self, line: &QueueLine, position: QueuePosition) {
        let Some(waiting) = self.lines.get_mut(line) else { return };
        self.len -= usize::from(waiting.remove(&position).is_some());
        if waiting.is_empty() {
            self.lines.remove(line);
        }
    }

    /// Who waits for the longest time in a line, retries before new requests.
    pub(super) fn first(&self, line: &QueueLine) -> Option<(QueuePosition, ClientId)> {
        let waiting = self.lines.get(line)?;
        let first = match planted!("newest-waits-least") {
            true => waiting.last_key_value(),
            false => waiting.first_key_value(),
        };
        first.map(|(position, client)| (*position, *client))
    }

    /// The first of every line, in the order of all.
    pub(super) fn firsts(&self) -> BTreeMap<QueuePosition, (QueueLine, ClientId)> {
        let first = |line: &QueueLine| {
            self.first(line).map(|(position, client)| (position, (line.clone(), client)))
        };
        self.lines.keys().filter_map(first).collect()
    }
}
