//! What led to what, where a recording has no number for it: between processes, and through a data
//! plane.

use super::Lane;
use super::words::Names;
use std::collections::{BTreeMap, VecDeque};

/// The last events that others can come from, as indices.
#[derive(Debug, Default)]
pub(super) struct CauseIndex {
    /// By number of the record, from 1.
    records: Vec<u32>,
    /// Effects that send a frame, by sender and bytes.
    sends: BTreeMap<(Lane, u64), u32>,
    /// The same by sender, receiver and bytes.
    sent: BTreeMap<(u16, u16, u64), u32>,
    /// Frames that arrived and are not handled, by receiver and bytes, with the effect behind them.
    arrived: BTreeMap<(u16, u64), VecDeque<Option<u32>>>,
    /// Effects by what they name.
    numbers: BTreeMap<(Lane, &'static str, u64), u32>,
    landings: BTreeMap<(Lane, u64), u32>,
    /// Legs by transfer, of prefills or not.
    dispatches: BTreeMap<(u32, bool), u32>,
    /// Requests that engines made of legs.
    legs: BTreeMap<u64, (u16, String)>,
    /// Requests of clients.
    asked: BTreeMap<u64, u32>,
    requests: BTreeMap<(u16, String), u32>,
    transfers: BTreeMap<(u16, u32), u32>,
}

/// Names of numbers by which what a data plane says is known as an answer.
const ANSWERED: [&str; 3] = ["ticket", "session", "region"];

impl CauseIndex {
    /// The event of a record.
    pub(super) fn record(&self, seq: u64) -> Option<u32> {
        self.records.get(usize::try_from(seq).ok()?).copied().filter(|event| *event != u32::MAX)
    }

    pub(super) fn add_record(&mut self, seq: u64, event: u32) {
        let Ok(seq) = usize::try_from(seq) else { return };
        // Numbers go up by one, whatever a damaged recording says.
        if seq <= self.records.len() + 1 {
            self.records.resize(self.records.len().max(seq + 1), u32::MAX);
            self.records[seq] = event;
        }
    }

    /// An effect sends a frame.
    pub(super) fn sends(&mut self, lane: Lane, frame: u64, event: u32) {
        self.sends.insert((lane, frame), event);
    }

    /// A frame is on its way: the effect that sends it.
    pub(super) fn sent(&mut self, from: u16, to: u16, frame: u64) -> Option<u32> {
        let event = *self.sends.get(&(Lane::core(from), frame))?;
        self.sent.insert((from, to, frame), event);
        Some(event)
    }

    /// A frame arrived: the effect that sent it. Of several that are the same it is the latest.
    pub(super) fn arrived(&mut self, from: Option<u16>, to: u16, frame: u64) -> Option<u32> {
        let event = from.and_then(|from| self.sent.get(&(from, to, frame)).copied());
        self.arrived.entry((to, frame)).or_default().push_back(event);
        event
    }

    /// A machine handles a frame: the effect that sent it.
    pub(super) fn handled(&mut self, to: Lane, frame: u64) -> Option<u32> {
        self.arrived.get_mut(&(to.instance()?, frame))?.pop_front()?
    }

    pub(super) fn landed(&mut self, at: Lane, op: u64, event: u32) -> Option<u32> {
        self.landings.insert((at, op), event);
        self.number(at, "op", op)
    }

    /// The last effect of a machine that names a number.
    pub(super) fn number(&self, lane: Lane, name: &'static str, number: u64) -> Option<u32> {
        self.numbers.get(&(lane, name, number)).copied()
    }

    pub(super) fn dispatched(&mut self, transfer: u32, is_prefill: bool, event: u32) {
        self.dispatches.insert((transfer, is_prefill), event);
    }

    /// A core is told of a leg: its dispatch.
    pub(super) fn dispatch(&self, transfer: u32, is_prefill: bool) -> Option<u32> {
        self.dispatches.get(&(transfer, is_prefill)).copied()
    }

    pub(super) fn leg_taken(&mut self, leg: u64, instance: u16, request: String) {
        self.legs.insert(leg, (instance, request));
    }

    pub(super) fn asked(&mut self, client: u64, event: u32) {
        self.asked.insert(client, event);
    }

    /// The last word of a client.
    pub(super) fn client(&self, client: u64) -> Option<u32> {
        self.asked.get(&client).copied()
    }

    /// What led to an input that names this, if it came through a plane or from another process.
    pub(super) fn outside(&self, lane: Lane, names: &Names) -> Option<u32> {
        if let Some(op) = names.number("op") {
            let landed = self.landings.get(&(lane, op)).copied();
            return landed.or_else(|| self.number(lane, "op", op));
        }
        let answers = ANSWERED.iter().filter_map(|name| {
            let number = names.number(name)?;
            self.number(lane, name, number)
        });
        if let Some(asked) = answers.max() {
            return Some(asked);
        }
        if let (Lane::Router, Some(leg)) = (lane, names.number("leg")) {
            let of_engine = self.legs.get(&leg).and_then(|place| self.requests.get(place)).copied();
            return of_engine.or_else(|| self.number(lane, "leg", leg));
        }
        let client = names.number("client").filter(|_| lane == Lane::Router);
        client.and_then(|client| self.client(client))
    }

    /// The event before of a request, or else of a transfer, in the same instance.
    pub(super) fn before(&self, lane: Lane, names: &Names, transfers: &[u32]) -> Option<u32> {
        let instance = lane.instance()?;
        let of = |request: &String| self.requests.get(&(instance, request.clone())).copied();
        let of_request = names.requests.iter().filter_map(of).max();
        let of = |transfer: &u32| self.transfers.get(&(instance, *transfer)).copied();
        of_request.or_else(|| transfers.iter().filter_map(of).max())
    }

    /// Enters an event where those behind it look for it.
    pub(super) fn enter(&mut self, lane: Lane, names: &Names, transfers: &[u32], event: u32) {
        let Some(instance) = lane.instance() else { return };
        for request in &names.requests {
            self.requests.insert((instance, request.clone()), event);
        }
        for transfer in transfers {
            self.transfers.insert((instance, *transfer), event);
        }
    }

    /// The same for an effect, which can be answered by what it names.
    pub(super) fn enter_numbers(&mut self, lane: Lane, names: &Names, event: u32) {
        for (name, number) in &names.numbers {
            self.numbers.insert((lane, name, *number), event);
        }
    }
}
