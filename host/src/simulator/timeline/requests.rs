//! Requests of clients and bytes on links, for the overview of a run.

use kvferry_engine::core::Nanos;
use kvferry_engine::core::command::DataCommand;
use kvferry_engine::core::decode::DecodeEffect;
use kvferry_engine::core::ids::RequestId;
use kvferry_engine::core::message::PrefillHook;
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::router::{LegEvent, RouterInput};
use kvferry_engine::core::transfer::TransferEffect;
use kvferry_sim::world::{MachineEffect, MachineInput, RecordedDetail};
use std::collections::BTreeMap;

/// A client's request with the times of its stages. With several prompts, a stage begins with the
/// first of them and ends with the last.
#[derive(Clone, Debug, Default)]
pub(crate) struct RequestSpan {
    pub(crate) client: u64,
    /// Event at which the client sent it.
    pub(crate) event: u32,
    pub(crate) asked: Nanos,
    /// Time at which a prefill began to compute it.
    pub(crate) begun: Option<Nanos>,
    /// Time at which the prefills had computed it.
    pub(crate) computed: Option<Nanos>,
    /// Time at which the decodes had its KV, or gave it up.
    pub(crate) loaded: Option<Nanos>,
    pub(crate) first_token: Option<Nanos>,
    pub(crate) ended: Option<Nanos>,
    /// True if its client got an answer that is not an error.
    pub(crate) is_answered: bool,
    /// Index of the transfer that was sent last.
    pub(crate) transfer: Option<u32>,
}

/// Bytes of one operation that arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkBytes {
    pub(crate) at: Nanos,
    /// The two instances, as indices into those of the run.
    pub(crate) from: u16,
    pub(crate) to: u16,
    pub(crate) bytes: u64,
}

/// State of the overview while a recording is read.
#[derive(Debug, Default)]
pub(super) struct RequestStages {
    spans: Vec<RequestSpan>,
    /// Indices of spans by client.
    clients: BTreeMap<u64, usize>,
    legs: BTreeMap<u64, usize>,
    transfers: BTreeMap<u32, usize>,
    /// Bytes of operations that were submitted and have not landed, by instance, rank and number.
    submitted: BTreeMap<(u16, u16, u64), u64>,
    landed: Vec<LinkBytes>,
}

impl RequestStages {
    /// A client sent a request.
    pub(super) fn asked(&mut self, at: Nanos, client: u64, event: u32) {
        self.clients.insert(client, self.spans.len());
        self.spans.push(RequestSpan { client, event, asked: at, ..RequestSpan::default() });
    }

    /// A client got its answer, or disconnected.
    pub(super) fn answered(&mut self, at: Nanos, client: u64, answer: &str) {
        if let Some(span) = self.clients.get(&client).and_then(|index| self.spans.get_mut(*index)) {
            span.ended.get_or_insert(at);
            span.is_answered = answer.starts_with("Finished");
        }
    }

    /// The router sent a leg of a transfer.
    pub(super) fn dispatched(&mut self, client: u64, leg: u64, transfer: u32) {
        if let Some(index) = self.clients.get(&client) {
            self.legs.insert(leg, *index);
            self.transfers.insert(transfer, *index);
            self.spans[*index].transfer = Some(transfer);
        }
    }

    fn of_transfer(&mut self, transfer: Option<u32>) -> Option<&mut RequestSpan> {
        let index = self.transfers.get(&transfer?)?;
        self.spans.get_mut(*index)
    }

    /// An input or effect of a machine; `transfer_of` knows the transfers of an engine's requests.
    pub(super) fn machine(
        &mut self,
        at: Nanos,
        place: (u16, u16),
        detail: &RecordedDetail,
        transfer_of: impl Fn(&RequestId) -> Option<u32>,
    ) {
        match detail {
            RecordedDetail::Input(MachineInput::Prefill(PrefillInput::Hook(hook))) => match hook {
                PrefillHook::Scheduled { chunks, .. } => {
                    for chunk in chunks {
                        if let Some(span) = self.of_transfer(transfer_of(&chunk.request)) {
                            span.begun.get_or_insert(at);
                        }
                    }
                }
                PrefillHook::Finished { request, .. } => {
                    if let Some(span) = self.of_transfer(transfer_of(request)) {
                        span.computed = Some(at);
                    }
                }
                _ => {}
            },
            RecordedDetail::Effect(MachineEffect::Decode(DecodeEffect::Answer(answer)))
                if answer.is_last() =>
            {
                if let Some(span) = self.of_transfer(transfer_of(answer.request())) {
                    span.loaded = Some(at);
                }
            }
            RecordedDetail::Input(MachineInput::Router(RouterInput::Leg {
                leg,
                event: LegEvent::FirstToken,
            })) => {
                if let Some(index) = self.legs.get(&leg.0) {
                    self.spans[*index].first_token.get_or_insert(at);
                }
            }
            RecordedDetail::Effect(MachineEffect::Transfer(TransferEffect::Data(
                DataCommand::Submit { op, slices, .. },
            ))) => {
                self.submitted.insert((place.0, place.1, op.0), slices.bytes());
            }
            _ => {}
        }
    }

    /// Bytes of an operation arrived. If they arrive in parts, all count when the first part does.
    pub(super) fn arrived(&mut self, at: Nanos, by: (u16, u16), op: u64, [from, to]: [u16; 2]) {
        if let Some(bytes) = self.submitted.remove(&(by.0, by.1, op)) {
            self.landed.push(LinkBytes { at, from, to, bytes });
        }
    }

    /// The requests by arrival; `place` maps old to new indices of events.
    pub(super) fn finish(self, place: &[u32]) -> (Vec<RequestSpan>, Vec<LinkBytes>) {
        let mut spans = self.spans;
        for span in &mut spans {
            span.event = place[span.event as usize];
        }
        (spans, self.landed)
    }
}
