//! From a recording to a [`Timeline`].

use super::blocks::{BlockOwners, BlockUse};
use super::causes::CauseIndex;
use super::requests::RequestStages;
use super::words::{EventWords, Names, cut, frame, words};
use super::{EventKind, LIVENESS_PHASE, Lane, PoolSize, Timeline, TimelineEvent};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::decode::DecodeInput;
use kvferry_engine::core::message::{DecodeHook, PrefillHook};
use kvferry_engine::core::prefill::PrefillInput;
use kvferry_engine::core::router::{LegBody, RouterEffect};
use kvferry_sim::replay::ReplayError;
use kvferry_sim::world::{
    MachineEffect, MachineId, MachineInput, RecordedDetail, RecordedEvent, Recording, Sight,
    frame_digest,
};
use std::collections::{BTreeMap, BTreeSet};

/// Reads a whole recording.
///
/// # Errors
/// The recording cannot be read.
pub(crate) fn read(recording: &Recording) -> Result<Timeline, ReplayError> {
    let damaged = |records, why: rmp_serde::decode::Error| ReplayError::Damaged {
        records,
        why: why.to_string(),
    };
    let (scenario, seed, records) = recording.read().map_err(|why| damaged(0, why))?;
    let mut reader = TimelineReader::default();
    for (count, record) in (0..).zip(records) {
        reader.record(record.map_err(|why| damaged(count, why))?);
    }
    Ok(Timeline { scenario, seed, ..reader.into_timeline() })
}

/// A timeline that is being read.
#[derive(Debug, Default)]
struct TimelineReader {
    timeline: Timeline,
    causes: CauseIndex,
    owners: BlockOwners,
    stages: RequestStages,
    /// Indices of transfers by their names.
    known: BTreeMap<String, u32>,
    /// Transfers of the requests of each instance.
    requests: BTreeMap<(u16, String), u32>,
    /// Transfers of the flows of each instance.
    flows: BTreeMap<(u16, u64), u32>,
    legs: BTreeMap<u64, u32>,
    clients: BTreeMap<u64, Vec<u32>>,
    names: BTreeMap<u16, String>,
}

fn event(
    at: Nanos,
    kind: EventKind,
    lane: Option<Lane>,
    label: impl Into<String>,
) -> TimelineEvent {
    TimelineEvent {
        at,
        kind,
        lane,
        cause: None,
        before: None,
        from: None,
        to: None,
        is_lost: false,
        is_minor: false,
        transfers: Vec::new(),
        label: label.into(),
        detail: String::new(),
    }
}

/// Blocks in words: those of each group.
fn spelled(blocks: &[(u16, u32)]) -> String {
    let words: Vec<_> = blocks.iter().map(|(group, block)| format!("{group}:{block}")).collect();
    words.join(" ")
}

impl TimelineReader {
    fn record(&mut self, record: RecordedEvent) {
        let lane = Lane::of_machine(record.actor);
        match &record.detail {
            RecordedDetail::Start(_) => {
                let started = event(record.t, EventKind::Process, Some(lane), "starts");
                let index = self.push(started);
                self.causes.add_record(record.seq, index);
            }
            RecordedDetail::Stop => {
                let stopped = event(record.t, EventKind::Process, Some(lane), "ends");
                let index = self.push(stopped);
                self.causes.add_record(record.seq, index);
            }
            RecordedDetail::Settled(core) => {
                let label = format!("{LIVENESS_PHASE}: {} have to make progress", core.join(", "));
                self.push(event(record.t, EventKind::Phase, None, label));
            }
            RecordedDetail::Saw(sight) => self.sight(record.t, sight),
            RecordedDetail::Input(_) | RecordedDetail::Effect(_) => self.machine(&record, lane),
        }
    }

    fn push(&mut self, event: TimelineEvent) -> u32 {
        self.timeline.events.push(event);
        (self.timeline.events.len() - 1) as u32
    }

    fn transfer(&mut self, key: &str) -> u32 {
        if let Some(index) = self.known.get(key) {
            return *index;
        }
        let index = self.timeline.transfers.len() as u32;
        self.timeline.transfers.push(key.into());
        self.known.insert(key.into(), index);
        index
    }

    /// An input or effect of a machine.
    fn machine(&mut self, record: &RecordedEvent, lane: Lane) {
        let EventWords { label, detail, is_minor, names } = words(&record.detail);
        let is_input = matches!(record.detail, RecordedDetail::Input(_));
        let kind = if is_input { EventKind::Input } else { EventKind::Effect };
        let mut transfers = self.transfers_of(record, lane, &names);
        let cause = match self.causes.record(record.cause) {
            Some(cause) if record.cause > 0 => Some(cause),
            _ if is_input => self.outside(record, lane, &names, &transfers),
            _ => None,
        };
        if let (true, Some(cause)) = (transfers.is_empty(), cause) {
            transfers.clone_from(&self.timeline.events[cause as usize].transfers);
        }
        let before = self.causes.before(lane, &names, &transfers);
        let index = self.push(TimelineEvent {
            cause,
            before,
            is_minor,
            detail,
            transfers: transfers.clone(),
            ..event(record.t, kind, Some(lane), label)
        });
        self.causes.add_record(record.seq, index);
        self.causes.enter(lane, &names, &transfers, index);
        if !is_input {
            self.causes.enter_numbers(lane, &names, index);
            if let Some(bytes) = frame(&record.detail) {
                self.causes.sends(lane, frame_digest(bytes), index);
            }
        }
        self.follow(record, index, &transfers);
        let place = match record.actor {
            MachineId::Transfer(instance, rank) => (instance, rank),
            _ => (lane.instance().unwrap_or_default(), 0),
        };
        let requests = &self.requests;
        self.stages.machine(record.t, place, &record.detail, |request| {
            requests.get(&(place.0, request.0.to_string())).copied()
        });
    }

    /// Transfers that a record names, itself or by what is known to belong to one.
    fn transfers_of(&mut self, record: &RecordedEvent, lane: Lane, names: &Names) -> Vec<u32> {
        let mut transfers = BTreeSet::new();
        let own = record.transfer.as_ref().map(ToString::to_string);
        for key in names.keys.iter().chain(&own) {
            transfers.insert(self.transfer(key));
        }
        if let Some(instance) = lane.instance() {
            if let (1, [request]) = (transfers.len(), names.requests.as_slice()) {
                let only = *transfers.iter().next().expect("there is one");
                self.requests.insert((instance, request.clone()), only);
            }
            let of = |request: &String| self.requests.get(&(instance, request.clone()));
            transfers.extend(names.requests.iter().filter_map(of));
            if let Some(flow) = names.number("flow") {
                match transfers.iter().next() {
                    Some(only) if transfers.len() == 1 => {
                        self.flows.insert((instance, flow), *only);
                    }
                    _ => transfers.extend(self.flows.get(&(instance, flow))),
                }
            }
        }
        if lane == Lane::Router {
            transfers.extend(names.number("leg").and_then(|leg| self.legs.get(&leg)));
            let client = names.number("client").filter(|_| transfers.is_empty());
            transfers
                .extend(client.and_then(|client| self.clients.get(&client)).into_iter().flatten());
        }
        transfers.into_iter().collect()
    }

    /// What led to an input that is not from a machine of the same process.
    fn outside(
        &mut self,
        record: &RecordedEvent,
        lane: Lane,
        names: &Names,
        transfers: &[u32],
    ) -> Option<u32> {
        if let Some(bytes) = frame(&record.detail) {
            return self.causes.handled(lane, frame_digest(bytes));
        }
        let hook = match &record.detail {
            RecordedDetail::Input(MachineInput::Prefill(PrefillInput::Hook(
                PrefillHook::Arrived { .. },
            ))) => Some(true),
            RecordedDetail::Input(MachineInput::Decode(DecodeInput::Hook(
                DecodeHook::Arrived { .. },
            ))) => Some(false),
            _ => None,
        };
        if let (Some(is_prefill), Some(transfer)) = (hook, transfers.first()) {
            return self.causes.dispatch(*transfer, is_prefill);
        }
        self.causes.outside(lane, names)
    }

    /// What follows from a record for legs and blocks.
    fn follow(&mut self, record: &RecordedEvent, index: u32, transfers: &[u32]) {
        let first = transfers.first().copied();
        let ended = match &record.detail {
            RecordedDetail::Effect(MachineEffect::Router(RouterEffect::Dispatch {
                leg,
                client,
                body,
                ..
            })) => {
                let Some(transfer) = first else { return };
                self.causes.dispatched(transfer, matches!(body, LegBody::Prefill { .. }), index);
                self.legs.insert(leg.0, transfer);
                self.stages.dispatched(client.0, leg.0, transfer);
                let of_client = self.clients.entry(client.0).or_default();
                if !of_client.contains(&transfer) {
                    of_client.push(transfer);
                }
                if let Some(asked) = self.causes.client(client.0) {
                    self.timeline.events[asked as usize].transfers.clone_from(of_client);
                }
                return;
            }
            RecordedDetail::Input(MachineInput::Prefill(PrefillInput::Hook(
                PrefillHook::Finished { request, .. },
            )))
            | RecordedDetail::Input(MachineInput::Decode(DecodeInput::Hook(
                DecodeHook::Finished { request, .. },
            ))) => request,
            _ => return,
        };
        if let Some(instance) = Lane::of_machine(record.actor).instance() {
            self.owners.mark_owned((index, first), (instance, &ended.0), BlockUse::Held);
        }
    }

    fn sight(&mut self, at: Nanos, sight: &Sight) {
        match sight {
            Sight::Started { instance, name, blocks, .. } => {
                self.names.insert(*instance, name.clone());
                let pool = PoolSize { instance: *instance, name: name.clone(), blocks: *blocks };
                match self.timeline.pools.iter_mut().find(|pool| pool.instance == *instance) {
                    Some(known) => *known = pool,
                    None => self.timeline.pools.push(pool),
                }
            }
            Sight::Crashed { instance } => {
                let lane = Some(Lane::core(*instance));
                let index = self.push(event(at, EventKind::Process, lane, "process ends"));
                self.owners.lost(index, *instance);
            }
            Sight::Sent { .. } | Sight::Arrived { .. } => self.frame(sight),
            Sight::LegTaken { .. } | Sight::Asked { .. } | Sight::Answered { .. } => {
                self.client(at, sight)
            }
            Sight::Landed { .. } => self.landed(at, sight),
            Sight::Taken { instance, request, blocks } => {
                let (index, first) = self.ownership(at, (*instance, &request.0), "takes", blocks);
                self.owners.taken((index, first), (*instance, &request.0), blocks);
            }
            Sight::Freed { instance, request, blocks } => {
                let (index, first) = self.ownership(at, (*instance, &request.0), "frees", blocks);
                self.owners.freed((index, first), (*instance, &request.0), blocks);
            }
            Sight::Used { at: rank, request, tokens, wrong } => {
                self.used(at, (rank.0, &request.0), *tokens, wrong.as_deref());
            }
            Sight::Fault { kind, from, to } => self.fault(at, kind, *from, *to),
            Sight::Payload { instance, text } => {
                let label = text.split([' ', '{']).next().unwrap_or_default();
                let lane = Some(Lane::core(*instance));
                let detail = cut(text);
                self.push(TimelineEvent { detail, ..event(at, EventKind::Input, lane, label) });
            }
            Sight::Violation { id, text } => {
                let detail = text.clone();
                self.push(TimelineEvent { detail, ..event(at, EventKind::Violation, None, id) });
            }
            Sight::Ended { verdict, unmet, left } => {
                let expected = unmet.iter().map(|unmet| format!("expected otherwise: {unmet}"));
                let left = left.iter().map(|left| format!("left at the end: {left}"));
                let detail = expected.chain(left).collect::<Vec<_>>().join("; ");
                let label = format!("the run is over: {verdict}");
                self.push(TimelineEvent { detail, ..event(at, EventKind::Phase, None, label) });
                self.timeline.verdict = Some(verdict.clone());
            }
        }
    }

    /// A frame is on its way, or has arrived.
    fn frame(&mut self, sight: &Sight) {
        match sight {
            Sight::Sent { from, to, frame } => {
                if let Some(index) = self.causes.sent(*from, *to, *frame) {
                    let sent = &mut self.timeline.events[index as usize];
                    (sent.to, sent.is_lost) = (Some(Lane::core(*to)), true);
                }
            }
            Sight::Arrived { from, to, frame } => {
                if let Some(index) = self.causes.arrived(*from, *to, *frame) {
                    self.timeline.events[index as usize].is_lost = false;
                }
            }
            _ => {}
        }
    }

    /// What clients and their legs do.
    fn client(&mut self, at: Nanos, sight: &Sight) {
        match sight {
            Sight::LegTaken { instance, leg, request } => {
                self.causes.leg_taken(leg.0, *instance, request.0.to_string());
            }
            Sight::Asked { client } => {
                let label = format!("client {client} asks");
                let index = self.push(event(at, EventKind::Input, Some(Lane::Clients), label));
                self.causes.asked(client.0, index);
                self.stages.asked(at, client.0, index);
            }
            Sight::Answered { client, answer } => {
                self.stages.answered(at, client.0, answer);
                let index = self.push(TimelineEvent {
                    cause: self.causes.number(Lane::Router, "client", client.0),
                    transfers: self.clients.get(&client.0).cloned().unwrap_or_default(),
                    detail: cut(answer),
                    ..event(
                        at,
                        EventKind::Input,
                        Some(Lane::Clients),
                        format!("client {client} is done"),
                    )
                });
                self.causes.asked(client.0, index);
            }
            _ => {}
        }
    }

    /// Bytes arrived.
    fn landed(&mut self, now: Nanos, sight: &Sight) {
        let Sight::Landed { at, op, source, target, read, written } = sight else { return };
        let owner = |(instance, _): &(u16, u16), blocks: &[(u16, u32)]| {
            let owner = self.owners.owner(*instance, *blocks.first()?)?;
            self.requests.get(&(*instance, owner.to_owned())).copied()
        };
        let transfer = owner(target, written).or_else(|| owner(source, read));
        let index = self.timeline.events.len() as u32;
        self.stages.arrived(now, *at, *op, [source.0, target.0]);
        let submitted = self.causes.landed(Lane::rank(*at), *op, index);
        if let Some(submitted) = submitted {
            let submitted = &mut self.timeline.events[submitted as usize];
            // Of a turn that names several it has whichever: the blocks know better.
            if let Some(transfer) = transfer {
                submitted.transfers = vec![transfer];
            }
        }
        let transfers = match (transfer, submitted) {
            (Some(transfer), _) => vec![transfer],
            (None, Some(submitted)) => self.timeline.events[submitted as usize].transfers.clone(),
            (None, None) => Vec::new(),
        };
        let first = transfers.first().copied();
        let label = match written.len() {
            1 => "1 block lands".into(),
            many => format!("{many} blocks land"),
        };
        self.push(TimelineEvent {
            cause: submitted,
            from: Some(Lane::rank(*source)),
            transfers,
            detail: cut(&format!(
                "operation {op}: read {} (group:block), written {}",
                spelled(read),
                spelled(written)
            )),
            ..event(now, EventKind::Landing, Some(Lane::rank(*target)), label)
        });
        self.owners.mark((index, first), source.0, read, BlockUse::Moved);
        self.owners.mark((index, first), target.0, written, BlockUse::Landed);
    }

    /// A request takes or frees blocks: the event, and the transfer that it is for.
    fn ownership(
        &mut self,
        at: Nanos,
        (instance, request): (u16, &str),
        verb: &str,
        blocks: &[Vec<u32>],
    ) -> (u32, Option<u32>) {
        let transfer = self.requests.get(&(instance, request.to_owned())).copied();
        let count: usize = blocks.iter().map(Vec::len).sum();
        let names = Names { requests: vec![request.to_owned()], ..Names::default() };
        let lane = Lane::core(instance);
        let index = self.push(TimelineEvent {
            before: self.causes.before(lane, &names, &[]),
            is_minor: true,
            transfers: transfer.into_iter().collect(),
            detail: cut(&format!("{request}: ids per group {blocks:?}")),
            ..event(at, EventKind::Blocks, Some(lane), format!("{verb} {count} blocks"))
        });
        (index, transfer)
    }

    /// A request begins to use what came to a rank.
    fn used(&mut self, at: Nanos, request: (u16, &str), tokens: u32, wrong: Option<&str>) {
        let (instance, name) = request;
        let transfer = self.requests.get(&(instance, name.to_owned())).copied();
        let names = Names { requests: vec![name.to_owned()], ..Names::default() };
        let lane = Lane::core(instance);
        let kind = if wrong.is_some() { EventKind::Violation } else { EventKind::Blocks };
        let label = match wrong {
            Some(_) => format!("uses wrong KV of {tokens} tokens"),
            None => format!("uses the KV of {tokens} tokens"),
        };
        let index = self.push(TimelineEvent {
            before: self.causes.before(lane, &names, &[]),
            transfers: transfer.into_iter().collect(),
            detail: wrong.map_or_else(|| name.to_owned(), |wrong| format!("{name}: {wrong}")),
            ..event(at, kind, Some(lane), label)
        });
        self.owners.mark_owned((index, transfer), request, BlockUse::Used);
    }

    /// A fault hit: by what is at hand of where it hit.
    fn fault(&mut self, at: Nanos, kind: &str, from: Option<u16>, to: Option<u16>) {
        let (lane, to) = (from.map(Lane::core), to.map(Lane::core));
        let now = self.timeline.events.iter().enumerate().rev();
        let now = now.take_while(|(_, event)| event.at == at);
        let own = |event: &TimelineEvent| event.lane.and_then(Lane::instance) == from;
        let mut at_hand = None;
        for (index, event) in now {
            if from.is_some() && own(event) && event.kind != EventKind::Fault {
                if to.is_some() && event.to == to {
                    at_hand = Some(index as u32);
                    break;
                }
                at_hand.get_or_insert(index as u32);
            }
        }
        let hit = at_hand.map(|index| &self.timeline.events[index as usize]);
        let transfers = hit.map(|event| event.transfers.clone()).unwrap_or_default();
        let lane = if kind.starts_with("client.") { Some(Lane::Clients) } else { lane };
        self.push(TimelineEvent {
            cause: at_hand,
            to,
            transfers,
            ..event(at, EventKind::Fault, lane, kind)
        });
    }

    fn into_timeline(mut self) -> Timeline {
        self.timeline.changes = std::mem::take(&mut self.owners.changes);
        let place = self.order();
        let stages = std::mem::take(&mut self.stages);
        (self.timeline.requests, self.timeline.landed) = stages.finish(&place);
        let lanes: BTreeSet<Lane> = self
            .timeline
            .events
            .iter()
            .flat_map(|event| [event.lane, event.to, event.from])
            .flatten()
            .collect();
        let named = |lane: Lane| {
            let name = lane.instance().and_then(|instance| self.names.get(&instance));
            (lane, lane.name(name.map(String::as_str)))
        };
        self.timeline.lanes = lanes.into_iter().map(named).collect();
        self.explain_violations();
        self.timeline
    }

    /// Sorts events by time; violations are recorded at the end. Returns the new index of each
    /// event.
    fn order(&mut self) -> Vec<u32> {
        let timeline = &mut self.timeline;
        let mut order: Vec<u32> = (0..timeline.events.len() as u32).collect();
        order.sort_by_key(|index| timeline.events[*index as usize].at);
        let mut place = vec![0; order.len()];
        for (new, old) in (0..).zip(&order) {
            place[*old as usize] = new;
        }
        for event in &mut timeline.events {
            event.cause = event.cause.map(|cause| place[cause as usize]);
            event.before = event.before.map(|before| place[before as usize]);
        }
        for change in &mut timeline.changes {
            change.event = place[change.event as usize];
        }
        timeline.changes.sort_by_key(|change| change.event);
        timeline.events.sort_by_key(|event| event.at);
        place
    }

    /// Says of violations which transfers their texts name, and what was before in these, or else
    /// in the instances that they name.
    fn explain_violations(&mut self) {
        let timeline = &mut self.timeline;
        for at in 0..timeline.events.len() {
            if timeline.events[at].kind != EventKind::Violation
                || timeline.events[at].lane.is_some()
            {
                continue;
            }
            let text = timeline.events[at].detail.clone();
            let named = |name: &str| has_word(&text, name);
            let transfers: Vec<u32> = (0..)
                .zip(&timeline.transfers)
                .filter(|(_, key)| named(key))
                .map(|(n, _)| n)
                .collect();
            let lanes: Vec<Lane> = timeline
                .lanes
                .iter()
                .filter(|(_, name)| named(name))
                .map(|(lane, _)| *lane)
                .collect();
            let led = |event: &TimelineEvent| match transfers.is_empty() {
                false => event.transfers.iter().any(|one| transfers.contains(one)),
                true => event.lane.is_some_and(|lane| lanes.contains(&lane)),
            };
            let before =
                timeline.events[..at].iter().rposition(|event| !event.is_minor && led(event));
            let violation = &mut timeline.events[at];
            violation.before = before.map(|before| before as u32);
            violation.transfers = transfers;
        }
    }
}

/// True if a text has this word, and not just as a part of a longer one.
fn has_word(text: &str, word: &str) -> bool {
    let part = |c: char| c.is_alphanumeric() || c == '_' || c == '/';
    text.match_indices(word).any(|(at, _)| {
        let (before, behind) = (&text[..at], &text[at + word.len()..]);
        !before.ends_with(part) && !behind.starts_with(part)
    })
}
