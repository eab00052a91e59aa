//! What happened in a recorded run, in order, as pictures and texts show it: who did what, what
//! led to it, of which transfer it is, and who has which KV blocks.

mod blocks;
mod causes;
mod lane;
mod meanings;
mod reader;
mod requests;
mod words;

pub(crate) use blocks::{BlockChange, BlockUse};
pub(crate) use lane::Lane;
pub(crate) use meanings::meaning;
pub(crate) use reader::read;
pub(crate) use requests::{LinkBytes, RequestSpan};

use kvferry_engine::core::Nanos;
use serde::Serialize;

/// What kind of thing an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EventKind {
    /// A machine got something.
    Input,
    /// A machine wanted something.
    Effect,
    /// Bytes of KV or of a payload arrived.
    Landing,
    Fault,
    /// A process began or ended.
    Process,
    /// Who owns KV blocks, and who uses them.
    Blocks,
    /// A broken promise.
    Violation,
    /// A phase of the run begins, or the run is over.
    Phase,
}

/// One thing that happened.
#[derive(Clone, Debug)]
pub(crate) struct TimelineEvent {
    pub(crate) at: Nanos,
    pub(crate) kind: EventKind,
    /// Where it happened; none is everywhere.
    pub(crate) lane: Option<Lane>,
    /// The event that led here.
    pub(crate) cause: Option<u32>,
    /// The event of the same request before it in the same instance; of use where no cause is known.
    pub(crate) before: Option<u32>,
    /// Where bytes came from, if not from where the cause is.
    pub(crate) from: Option<Lane>,
    /// Whom a frame was for.
    pub(crate) to: Option<Lane>,
    /// A frame that was sent and never arrived.
    pub(crate) is_lost: bool,
    /// What goes on all the time: deadlines, acknowledgements, heartbeats.
    pub(crate) is_minor: bool,
    /// Indices into the transfers.
    pub(crate) transfers: Vec<u32>,
    pub(crate) label: String,
    /// Everything that is known of it, cut off at [`DETAIL_MAX`].
    pub(crate) detail: String,
}

/// Beginning of the label of the event at which all faults are over.
const LIVENESS_PHASE: &str = "liveness phase";

/// Most bytes of the text of an event.
pub(crate) const DETAIL_MAX: usize = 400;

/// The instances, as far as their KV is concerned.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PoolSize {
    /// Index into the instances of the run.
    pub(crate) instance: u16,
    pub(crate) name: String,
    /// Blocks of each KV cache group.
    pub(crate) blocks: u32,
}

/// A recorded run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Timeline {
    pub(crate) scenario: String,
    pub(crate) seed: u64,
    /// None of a recording that has no end.
    pub(crate) verdict: Option<String>,
    /// In the order in which they are drawn, with their names.
    pub(crate) lanes: Vec<(Lane, String)>,
    pub(crate) transfers: Vec<String>,
    /// By time.
    pub(crate) events: Vec<TimelineEvent>,
    pub(crate) pools: Vec<PoolSize>,
    /// By event.
    pub(crate) changes: Vec<BlockChange>,
    /// Sorted by arrival.
    pub(crate) requests: Vec<RequestSpan>,
    /// Sorted by time.
    pub(crate) landed: Vec<LinkBytes>,
}

impl Timeline {
    /// Name of a lane.
    pub(crate) fn name(&self, lane: Lane) -> &str {
        let found = self.lanes.binary_search_by_key(&lane, |(lane, _)| *lane);
        found.map_or("?", |at| self.lanes[at].1.as_str())
    }

    /// The first event at a time or after it.
    pub(crate) fn first_at(&self, at: Nanos) -> usize {
        self.events.partition_point(|event| event.at < at)
    }

    /// The first event of a kind.
    pub(crate) fn first_of(&self, kind: EventKind) -> Option<usize> {
        self.events.iter().position(|event| event.kind == kind)
    }

    /// Time at which the faults were over and the liveness phase began.
    pub(crate) fn settled(&self) -> Option<Nanos> {
        let begins = |event: &&TimelineEvent| event.label.starts_with(LIVENESS_PHASE);
        let phases = self.events.iter().filter(|event| event.kind == EventKind::Phase);
        phases.into_iter().find(begins).map(|event| event.at)
    }

    /// Event at which a reader should begin: the first violation, else the first fault, else the
    /// first transfer.
    pub(crate) fn focus(&self) -> usize {
        let wrong = self.first_of(EventKind::Violation);
        let ended = || {
            let is_bad = self.verdict.as_deref().is_some_and(|verdict| verdict != "held");
            is_bad.then(|| self.events.len().saturating_sub(1))
        };
        let fault = || self.first_of(EventKind::Fault);
        let transfer = || {
            let begins = |event: &TimelineEvent| {
                event.kind == EventKind::Effect && !event.is_minor && !event.transfers.is_empty()
            };
            self.events.iter().position(begins)
        };
        wrong.or_else(ended).or_else(fault).or_else(transfer).unwrap_or(0)
    }
}
