//! What the router knows of a client's request.

use super::io::{ClientRequest, LegFailure, RoutedPrompt};
use super::queue::{QueueLine, QueuePosition};
use super::registry::InstanceId;
use crate::core::error::Failure;
use crate::core::ids::{EngineId, LegId, TransferKey};
use crate::core::time::Nanos;
use std::sync::Arc;

/// How far a sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SampleProgress {
    /// Not sent, or sent without success.
    Waiting,
    /// Sent; no token yet.
    Running(LegId),
    /// The client has seen tokens of it.
    Streaming(LegId),
    /// All tokens are there.
    Done,
}

/// One sample of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleState {
    pub(super) progress: SampleProgress,
    /// Decode legs sent for it so far.
    pub(super) dispatched: u32,
}

/// One prompt of a request. Samples that run have the same transfer key; there is at most one
/// prefill leg, the one for them.
#[derive(Clone, Debug)]
pub(super) struct PromptState {
    pub(super) prompt: RoutedPrompt,
    /// The model that it is for, if that is said.
    pub(super) model: Option<Arc<str>>,
    /// Engines that alone may serve it; none takes any.
    pub(super) engines: Option<Arc<[EngineId]>>,
    pub(super) output: u32,
    pub(super) samples: Vec<SampleState>,
    /// The prefill leg, while it is in flight.
    pub(super) prefill: Option<LegId>,
    /// Where the last prefill leg was sent, and as what.
    pub(super) source: Option<(InstanceId, TransferKey)>,
    /// A decode went without its KV.
    pub(super) recomputed: bool,
    /// Instances that failed it, alone or in a pair.
    pub(super) avoid: Vec<InstanceId>,
    /// Those that failed it alone, once per time.
    pub(super) blamed: Vec<InstanceId>,
    /// Prefills and decodes between which its KV did not get through, once per time.
    pub(super) failed_pairs: Vec<(InstanceId, InstanceId)>,
}

impl PromptState {
    /// Its samples, and what is noted of those that failed it.
    fn entries(&self) -> usize {
        self.samples.len() + self.avoid.len() + self.blamed.len() + self.failed_pairs.len()
    }

    /// True if a sample waits for an instance.
    pub(super) fn is_waiting(&self) -> bool {
        self.samples.iter().any(|sample| sample.progress == SampleProgress::Waiting)
    }

    /// True if the prefill leg is still of use.
    pub(super) fn needs_prefill(&self) -> bool {
        self.samples.iter().any(|sample| matches!(sample.progress, SampleProgress::Running(_)))
    }

    /// True if somebody failed it.
    pub(super) fn has_failed(&self) -> bool {
        !self.blamed.is_empty() || !self.failed_pairs.is_empty()
    }

    /// True if these failed it before.
    pub(super) fn failed_by(&self, prefill: InstanceId, decode: InstanceId) -> bool {
        self.failed_pairs.contains(&(prefill, decode))
            || self.blamed.iter().any(|instance_id| [prefill, decode].contains(instance_id))
    }

    /// True if all samples are there.
    pub(super) fn is_done(&self) -> bool {
        self.samples.iter().all(|sample| sample.progress == SampleProgress::Done)
    }

    /// Notes the instance or the pair that failed it.
    pub(super) fn blame(
        &mut self,
        instance_id: InstanceId,
        prefill: Option<InstanceId>,
        failure: &LegFailure,
    ) {
        self.avoid(instance_id);
        match (failure, prefill) {
            (LegFailure::Instance(why), Some(prefill)) if why.is_of_pair() => {
                self.failed_pairs.push((prefill, instance_id));
            }
            _ => self.blamed.push(instance_id),
        }
    }

    /// Prefers other instances from now on.
    pub(super) fn avoid(&mut self, instance_id: InstanceId) {
        if !self.avoid.contains(&instance_id) {
            self.avoid.push(instance_id);
        }
    }

    /// Its legs in flight.
    pub(super) fn legs(&self) -> impl Iterator<Item = LegId> {
        let decodes = self.samples.iter().filter_map(|sample| match sample.progress {
            SampleProgress::Running(leg) | SampleProgress::Streaming(leg) => Some(leg),
            SampleProgress::Waiting | SampleProgress::Done => None,
        });
        self.prefill.into_iter().chain(decodes)
    }
}

/// A request that has not ended.
#[derive(Clone, Debug)]
pub(super) struct RouterRequest {
    pub(super) works: Vec<PromptState>,
    /// Samples of all prompts that are not done.
    pub(super) open: u64,
    /// True once a leg was sent.
    pub(super) started: bool,
    /// Its place in the queue, if something of it waits.
    pub(super) ticket: Option<(QueueLine, QueuePosition)>,
    /// Times that something of it was sent again, or is to be.
    pub(super) tried: u32,
    /// Tries that did not count, because an instance had lost its host.
    pub(super) excused: u32,
    /// The last failure of a leg.
    pub(super) cause: Option<LegFailure>,
    /// End of the time in which it has to find room, set when a leg is first refused as busy.
    pub(super) busy_until: Option<Nanos>,
    /// Time until which an instance that had no host was waited for.
    pub(super) host_until: Option<Nanos>,
    /// The first reason why a decode computed a prompt itself.
    pub(super) recomputed: Option<Failure>,
}

impl RouterRequest {
    /// Its prompts and what is kept of each.
    pub(super) fn entries(&self) -> usize {
        self.works.iter().map(|work| 1 + work.entries()).sum()
    }

    /// True if a leg of it is in flight.
    pub(super) fn has_legs(&self) -> bool {
        self.works.iter().any(|work| work.legs().next().is_some())
    }

    /// A request that is in order; else why not.
    pub(super) fn new(request: ClientRequest, legs_max: u32) -> Result<Self, &'static str> {
        let ClientRequest { prompts, samples, output, model, engines, .. } = request;
        if prompts.is_empty() || samples == 0 || output == 0 {
            return Err("no prompt, no sample or no token asked for");
        }
        let legs = (prompts.len() as u64).saturating_mul(u64::from(samples) + 1);
        if legs > u64::from(legs_max) {
            return Err("too many prompts and samples");
        }
        let sample = SampleState { progress: SampleProgress::Waiting, dispatched: 0 };
        let work = |prompt| PromptState {
            prompt,
            model: model.clone(),
            engines: engines.clone(),
            output,
            samples: vec![sample; samples as usize],
            prefill: None,
            source: None,
            recomputed: false,
            avoid: Vec::new(),
            blamed: Vec::new(),
            failed_pairs: Vec::new(),
        };
        let open = prompts.len() as u64 * u64::from(samples);
        let works = prompts.into_iter().map(work).collect();
        Ok(RouterRequest {
            works,
            open,
            started: false,
            ticket: None,
            tried: 0,
            excused: 0,
            cause: None,
            busy_until: None,
            host_until: None,
            recomputed: None,
        })
    }
}
