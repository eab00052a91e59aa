//! What clients asked for and where it was sent, and prompts that prefills hold.

use super::InvariantState;
use crate::observation::{Observation, SimProcessId};
use kvferry_engine::core::ids::{ClientId, LegId, RequestId, TransferKey};
use kvferry_engine::core::message::{Mode, PrefillAnswer, PrefillHook};
use kvferry_engine::core::router::{LegBody, LegEvent, LegFailure};
use kvferry_engine::core::time::Nanos;
use std::collections::{BTreeMap, BTreeSet};

/// The part of a request that a leg serves, which stays the same over retries: its prompt, and the
/// sample of a decode leg.
type DispatchedPart = (u32, Option<u32>);

/// A leg that the router sent.
#[derive(Clone, Debug)]
pub(crate) struct TrackedLeg {
    pub(crate) leg: LegId,
    /// The instance that is to serve it.
    instance: u16,
    pub(crate) part: DispatchedPart,
    /// Each try has a key of its own.
    pub(crate) key: TransferKey,
}

impl TrackedLeg {
    fn new(leg: LegId, instance: u16, body: &LegBody) -> TrackedLeg {
        let (part, key) = match body {
            LegBody::Prefill { transfer, prompt } => ((*prompt, None), &transfer.key),
            LegBody::Decode { transfer, prompt, sample, .. } => {
                ((*prompt, Some(*sample)), &transfer.key)
            }
        };
        TrackedLeg { leg, instance, part, key: key.clone() }
    }

    pub(crate) fn is_decode(&self) -> bool {
        self.part.1.is_some()
    }
}

/// The legs of a request, in the order in which they were sent.
#[derive(Clone, Debug, Default)]
pub(crate) struct TrackedClient {
    pub(crate) legs: Vec<TrackedLeg>,
    /// Tries that an instance refused as busy.
    busy: BTreeSet<TransferKey>,
}

impl TrackedClient {
    /// Legs that were sent for a part of the request: without the tries refused as busy, and only
    /// those.
    pub(crate) fn tries(&self, part: DispatchedPart) -> [usize; 2] {
        let all = self.legs.iter().filter(|leg| leg.part == part);
        let (busy, counted): (Vec<_>, Vec<_>) = all.partition(|leg| self.busy.contains(&leg.key));
        [counted.len(), busy.len()]
    }

    /// The newest decode leg of each sample.
    pub(crate) fn newest(&self) -> impl Iterator<Item = &TrackedLeg> {
        let decode = self.legs.iter().filter(|leg| leg.is_decode());
        decode.map(|leg| (leg.part, leg)).collect::<BTreeMap<_, _>>().into_values()
    }

    /// Who served the last try of each sample.
    pub(crate) fn last_tries(&self) -> impl Iterator<Item = BTreeSet<u16>> {
        self.newest().map(|last| {
            let of_try = self.legs.iter().filter(|leg| leg.key == last.key);
            of_try.map(|leg| leg.instance).collect()
        })
    }

    /// Who served the last try of a request of one prompt.
    pub(crate) fn last_try(&self) -> BTreeSet<u16> {
        let Some(last) = self.legs.last() else { return BTreeSet::new() };
        let of_it = self.legs.iter().rev().take_while(|leg| leg.key == last.key);
        of_it.map(|leg| leg.instance).collect()
    }
}

/// A request of a prefill, from its arrival until its blocks are free.
#[derive(Debug)]
pub(crate) struct TrackedPrompt {
    pub(crate) key: TransferKey,
    pub(crate) mode: Mode,
    /// When it was computed, or ended otherwise.
    pub(crate) finished: Option<Nanos>,
    /// Its engine said after that that nobody comes for it any more.
    pub(crate) is_given_up: bool,
}

/// A request at the process that took it in.
pub(crate) type RequestAt = (SimProcessId, RequestId);

#[derive(Debug, Default)]
pub(super) struct TrackedRequests {
    clients: BTreeMap<ClientId, TrackedClient>,
    /// Those of incarnations that ended stay.
    prompts: BTreeMap<RequestAt, TrackedPrompt>,
}

impl TrackedRequests {
    pub(super) fn follow(&mut self, now: Nanos, seen: &Observation<'_>) {
        match seen {
            Observation::Asked { client } => {
                self.clients.insert(*client, TrackedClient::default());
            }
            Observation::Dispatched { leg, client, instance, body, .. } => {
                let leg = TrackedLeg::new(*leg, *instance, body);
                self.clients.entry(*client).or_default().legs.push(leg);
            }
            Observation::Leg { leg, event: LegEvent::Failed(LegFailure::Busy { .. }), .. } => {
                for client in self.clients.values_mut() {
                    let refused = client.legs.iter().find(|it| it.leg == *leg);
                    client.busy.extend(refused.map(|refused| refused.key.clone()));
                }
            }
            Observation::Answered { client, .. } | Observation::ClientGone { client } => {
                self.clients.remove(client);
            }
            Observation::PrefillHook { who, hook } => match hook {
                PrefillHook::Arrived { request, leg, .. } => {
                    let (key, mode) = (leg.key.clone(), leg.mode);
                    let prompt = TrackedPrompt { key, mode, finished: None, is_given_up: false };
                    self.prompts.insert((*who, request.clone()), prompt);
                }
                PrefillHook::Finished { request, .. } => {
                    if let Some(prompt) = self.prompts.get_mut(&(*who, request.clone())) {
                        prompt.is_given_up = prompt.finished.is_some();
                        prompt.finished.get_or_insert(now);
                    }
                }
                PrefillHook::Scheduled { .. } | PrefillHook::Preempted { .. } => {}
            },
            Observation::PrefillAnswer { who, answer } => {
                if let Some(request) = freed(answer) {
                    self.prompts.remove(&(*who, request.clone()));
                }
            }
            _ => {}
        }
    }
}

/// The request whose blocks a prefill may free.
pub(crate) fn freed(answer: &PrefillAnswer) -> Option<&RequestId> {
    match answer {
        PrefillAnswer::SourceFree { request, .. } | PrefillAnswer::Rejected { request, .. } => {
            Some(request)
        }
        PrefillAnswer::PreemptionSafe { .. } => None,
    }
}

impl InvariantState {
    /// The legs of a client that asked, or that a leg was sent for, and that has no answer.
    pub(crate) fn client(&self, client: ClientId) -> Option<&TrackedClient> {
        self.requests.clients.get(&client)
    }

    /// A request of a prefill that holds its blocks.
    pub(crate) fn prompt(&self, who: SimProcessId, request: &RequestId) -> Option<&TrackedPrompt> {
        self.requests.prompts.get(&(who, request.clone()))
    }

    pub(crate) fn prompts(&self) -> impl Iterator<Item = (&RequestAt, &TrackedPrompt)> {
        self.requests.prompts.iter()
    }
}
