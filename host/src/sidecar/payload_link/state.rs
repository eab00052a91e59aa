//! What a link to the host of payloads has under way, and what it has heard.

use super::{
    ArrivedPayload, PayloadOutcome, PoolOffer, ReservedSlot, SPARE_BYTES, SPARE_WAIT, SPARES_MAX,
    STANDS_STILL,
};
use crate::sidecar::SidecarClient;
use crate::sidecar::proto::{FromHost, ToHost};
use kvferry_engine::core::payload::{
    PayloadAnswer, PayloadFailure, PayloadHook, PayloadKey, SlotId,
};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;

/// A payload that is wanted, and what the host has said of it.
#[derive(Debug, Default)]
pub(super) enum WantedPayload {
    /// Nothing.
    #[default]
    Asked,
    /// It is not there yet.
    Waits,
    Ended(PayloadOutcome),
}

#[derive(Debug)]
pub(super) struct LinkState {
    pub(super) client: SidecarClient,
    /// A thread sleeps until the host says something.
    pub(super) is_listening: bool,
    pub(super) inbox: Vec<FromHost>,
    pub(super) pool: Option<PoolOffer>,
    /// Why nothing comes any more; refused by the host, or gone.
    pub(super) end: Option<(ErrorKind, String)>,
    pub(super) next_ticket: u64,
    /// Slots that were asked for, and what came of it.
    pub(super) tickets: BTreeMap<u64, Option<Result<ReservedSlot, PayloadFailure>>>,
    pub(super) spares: Vec<ReservedSlot>,
    /// Tickets of spare slots that have not come.
    pub(super) spares_asked: Vec<u64>,
    /// Slots that were put, and the host's receipt.
    pub(super) puts: BTreeMap<SlotId, Option<Result<(), PayloadFailure>>>,
    pub(super) wants: HashMap<PayloadKey, WantedPayload>,
    /// How often a key was abandoned and the host has not said so.
    pub(super) abandoned: HashMap<PayloadKey, u32>,
}

impl LinkState {
    /// The state of a new connection.
    pub(super) fn new(client: SidecarClient) -> LinkState {
        LinkState {
            client,
            is_listening: false,
            inbox: Vec::new(),
            pool: None,
            end: None,
            next_ticket: 0,
            tickets: BTreeMap::new(),
            spares: Vec::new(),
            spares_asked: Vec::new(),
            puts: BTreeMap::new(),
            wants: HashMap::new(),
            abandoned: HashMap::new(),
        }
    }

    /// Why nothing can be said or heard any more.
    pub(super) fn check(&self) -> io::Result<()> {
        match &self.end {
            None => Ok(()),
            Some((kind, why)) => Err(io::Error::new(*kind, why.clone())),
        }
    }

    pub(super) fn lose(&mut self, why: &io::Error) {
        let why = match why.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => STANDS_STILL.into(),
            _ => format!("the kvferry host is gone: {why}"),
        };
        self.end.get_or_insert((ErrorKind::NotConnected, why));
    }

    pub(super) fn send(&mut self, hooks: &[ToHost]) -> io::Result<()> {
        self.check()?;
        if let Err(why) = self.client.send_all(hooks) {
            self.lose(&why);
        }
        self.check()
    }

    pub(super) fn tell(&mut self, hook: PayloadHook) -> io::Result<()> {
        self.send(&[ToHost::Payload(hook)])
    }

    /// Takes what the host said.
    pub(super) fn listen(&mut self) {
        if self.end.is_some() {
            return;
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        if let Err(why) = self.client.poll(&mut inbox) {
            self.lose(&why);
        }
        for message in inbox.drain(..) {
            match message {
                FromHost::Payload(answer) => self.answer(answer),
                FromHost::Refused { why } => {
                    let why = format!("the kvferry host: {why}");
                    self.end.get_or_insert((ErrorKind::ConnectionRefused, why));
                }
                FromHost::Pool { client, bytes, engine, incarnation, .. } => {
                    let file = self.client.take_descriptor();
                    self.begin(file, |file| PoolOffer { client, bytes, engine, incarnation, file });
                }
                _ => {}
            }
        }
        self.inbox = inbox;
    }

    fn begin(&mut self, file: Option<OwnedFd>, offer: impl FnOnce(OwnedFd) -> PoolOffer) {
        let Some(file) = file else {
            return self.lose(&io::Error::other("it gave no memory with its pool"));
        };
        self.pool = Some(offer(file));
        let hooks = self.ask_spares();
        // One that is gone is noticed by the next who wants something.
        let _ = self.send(&hooks);
    }

    /// Has as many spare slots as there are to be.
    pub(super) fn ask_spares(&mut self) -> Vec<ToHost> {
        let bytes = self.pool.as_ref().map_or(0, |pool| pool.bytes);
        let wanted = (bytes / 1_024 / SPARE_BYTES).min(SPARES_MAX) as usize;
        let mut hooks = Vec::new();
        while self.spares.len() + self.spares_asked.len() < wanted {
            let ticket = self.ticket();
            self.spares_asked.push(ticket);
            let hook = PayloadHook::Reserve { ticket, bytes: SPARE_BYTES, wait: SPARE_WAIT };
            hooks.push(ToHost::Payload(hook));
        }
        hooks
    }

    pub(super) fn ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }

    fn answer(&mut self, answer: PayloadAnswer) {
        match answer {
            PayloadAnswer::Reserved { ticket, slot, offset } => {
                self.ticketed(ticket, Ok(ReservedSlot { slot, offset }));
            }
            PayloadAnswer::NotReserved { ticket, failure } => self.ticketed(ticket, Err(failure)),
            PayloadAnswer::Arrived { key, claim, offset, bytes, generation } => {
                self.outcome(key, Ok(ArrivedPayload { claim, offset, bytes, generation }));
            }
            PayloadAnswer::Missing { key, failure, former } => {
                self.outcome(key, Err((failure, former)));
            }
            PayloadAnswer::Waits { key } if !self.abandoned.contains_key(&key) => {
                if let Some(wanted @ WantedPayload::Asked) = self.wants.get_mut(&key) {
                    *wanted = WantedPayload::Waits;
                }
            }
            PayloadAnswer::Waits { .. } => {}
            PayloadAnswer::Stored { slot, failure } => {
                if let Some(put) = self.puts.get_mut(&slot) {
                    *put = Some(failure.map_or(Ok(()), Err));
                }
            }
            PayloadAnswer::Abandoned { key } => {
                if let Some(times) = self.abandoned.get_mut(&key) {
                    *times -= 1;
                    if *times == 0 {
                        self.abandoned.remove(&key);
                    }
                }
            }
        }
    }

    fn ticketed(&mut self, ticket: u64, result: Result<ReservedSlot, PayloadFailure>) {
        if let Some(at) = self.spares_asked.iter().position(|asked| *asked == ticket) {
            self.spares_asked.swap_remove(at);
            self.spares.extend(result);
        } else if let Some(slot) = self.tickets.get_mut(&ticket) {
            *slot = Some(result);
        } else if let Ok(ReservedSlot { slot, .. }) = result {
            // Who asked for it waits no more.
            let _ = self.tell(PayloadHook::Return { slot });
        }
    }

    fn outcome(&mut self, key: PayloadKey, outcome: PayloadOutcome) {
        // What crossed with an abandonment is for nobody.
        if self.abandoned.contains_key(&key) {
            return;
        }
        if let Some(wanted) = self.wants.get_mut(&key) {
            *wanted = WantedPayload::Ended(outcome);
        }
    }

    /// Whether the host has said anything of a payload that is wanted.
    pub(super) fn has_answer(&self, key: &PayloadKey) -> bool {
        !matches!(self.wants.get(key), Some(WantedPayload::Asked))
    }

    /// What became of a payload; then it is wanted no more.
    pub(super) fn take_outcome(&mut self, key: &PayloadKey) -> Option<PayloadOutcome> {
        if !matches!(self.wants.get(key)?, WantedPayload::Ended(_)) {
            return None;
        }
        match self.wants.remove(key)? {
            WantedPayload::Ended(outcome) => Some(outcome),
            WantedPayload::Asked | WantedPayload::Waits => None,
        }
    }
}
