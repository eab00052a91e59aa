//! A process of a stage at the host of its payloads.

use super::SidecarClient;
use super::proto::{ClientIdentity, FromHost, ToHost};
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::payload::{
    ClaimId, PayloadAnswer, PayloadClient, PayloadFailure, PayloadHook, PayloadKey, PayloadStream,
    SlotId,
};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Endpoint;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes of the slots that are kept reserved, so that a small payload is put without a round trip.
const SPARE_BYTES: u64 = 16 << 10;

/// Slots that are kept reserved; fewer where they would be more than a thousandth of the pool.
const SPARES_MAX: u64 = 8;

/// How long a spare slot is waited for. Who puts meanwhile waits for one of its own.
const SPARE_WAIT: Nanos = Nanos::from_secs(3_600);

/// How long an answer is looked for before the thread sleeps: about what waking it takes.
const SPIN: Duration = Duration::from_micros(40);

/// How long a host may stand still. It is given up then: it answers who waits for a slot when that
/// time is over, and reads what is said.
const GRACE: Duration = Duration::from_secs(5);

const STANDS_STILL: &str = "the kvferry host stands still: it neither reads nor answers";

/// The pool of a host, as one of its clients has it.
#[derive(Debug)]
pub struct PoolOffer {
    /// This process at the host.
    pub client: PayloadClient,
    /// Bytes of the pool.
    pub bytes: u64,
    /// What other hosts call this one, if they reach it.
    pub engine: Option<EngineId>,
    pub incarnation: Incarnation,
    /// The pool's memory file, to be mapped.
    pub file: OwnedFd,
}

/// A slot that this process may write, until it puts or returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservedSlot {
    pub slot: SlotId,
    /// Where it begins in the pool, in bytes.
    pub offset: u64,
}

/// A payload that this process may read, until it releases it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivedPayload {
    pub claim: ClaimId,
    /// Where it begins in the pool, in bytes.
    pub offset: u64,
    /// Bytes of its slot, the payload's and maybe more.
    pub bytes: u64,
    /// Counts the payloads of the host.
    pub generation: u64,
}

/// What became of a payload that was wanted.
pub type PayloadOutcome = Result<ArrivedPayload, PayloadFailure>;

/// A connection to the host of payloads. Threads share it; each may wait.
///
/// ```no_run
/// use kvferry::sidecar::PayloadLink;
/// use kvferry_engine::core::payload::PayloadStream;
/// use std::time::Duration;
///
/// let link = PayloadLink::connect("/run/user/1000/kvferry/omni.sock".as_ref(), "server", "1")?;
/// let pool = link.wait_ready(Duration::from_secs(10))?;
/// println!("a pool of {} bytes", pool.bytes);
/// let key = PayloadStream::new("0", "1", "request-7").chunk(0);
/// link.want(&key, None)?;
/// match link.wait(&key, Duration::from_millis(10))? {
///     Some(Ok(payload)) => link.release(payload.claim)?,
///     Some(Err(why)) => println!("{key} does not come: {why}"),
///     None => println!("not yet"),
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct PayloadLink {
    state: Mutex<LinkState>,
    /// Something was heard, or the thread that listened does not any more.
    heard: Condvar,
    /// The socket once more, to sleep on without the state.
    socket: OwnedFd,
    /// Whose it is: a fork has it, too.
    process: u32,
}

#[derive(Debug)]
struct LinkState {
    client: SidecarClient,
    /// A thread sleeps until the host says something.
    is_listening: bool,
    inbox: Vec<FromHost>,
    pool: Option<PoolOffer>,
    /// Why nothing comes any more; refused by the host, or gone.
    end: Option<(ErrorKind, String)>,
    next_ticket: u64,
    /// Slots that were asked for, and what came of it.
    tickets: BTreeMap<u64, Option<Result<ReservedSlot, PayloadFailure>>>,
    spares: Vec<ReservedSlot>,
    /// Tickets of spare slots that have not come.
    spares_asked: Vec<u64>,
    wants: HashMap<PayloadKey, Option<PayloadOutcome>>,
    /// How often a key was abandoned and the host has not said so.
    abandoned: HashMap<PayloadKey, u32>,
}

/// The state of a link for who wants to know how it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkGauges {
    /// Payloads that are wanted, or are there and were not asked for.
    pub wants: usize,
    /// Slots that are waited for.
    pub tickets: usize,
    /// Slots that are kept reserved.
    pub spares: usize,
}

impl LinkState {
    /// Why nothing can be said or heard any more.
    fn check(&self) -> io::Result<()> {
        match &self.end {
            None => Ok(()),
            Some((kind, why)) => Err(io::Error::new(*kind, why.clone())),
        }
    }

    fn lose(&mut self, why: &io::Error) {
        let why = match why.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => STANDS_STILL.into(),
            _ => format!("the kvferry host is gone: {why}"),
        };
        self.end.get_or_insert((ErrorKind::NotConnected, why));
    }

    fn send(&mut self, hooks: &[ToHost]) -> io::Result<()> {
        self.check()?;
        if let Err(why) = self.client.send_all(hooks) {
            self.lose(&why);
        }
        self.check()
    }

    fn tell(&mut self, hook: PayloadHook) -> io::Result<()> {
        self.send(&[ToHost::Payload(hook)])
    }

    /// Takes what the host said.
    fn listen(&mut self) {
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
    fn ask_spares(&mut self) -> Vec<ToHost> {
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

    fn ticket(&mut self) -> u64 {
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
            PayloadAnswer::Missing { key, failure } => self.outcome(key, Err(failure)),
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
            *wanted = Some(outcome);
        }
    }

    /// What became of a payload; then it is wanted no more.
    fn take_outcome(&mut self, key: &PayloadKey) -> Option<PayloadOutcome> {
        self.wants.get(key)?.as_ref()?;
        self.wants.remove(key).flatten()
    }
}

impl PayloadLink {
    /// Says hello to the host at a path, as a process of a stage.
    ///
    /// # Errors
    /// As [`SidecarClient::connect`].
    pub fn connect(path: &Path, deployment: &str, stage: &str) -> io::Result<PayloadLink> {
        let who = ClientIdentity::Stage { deployment: deployment.into(), stage: stage.into() };
        let client = SidecarClient::connect(path, who)?;
        client.limit_writes(GRACE)?;
        let socket = client.as_fd().try_clone_to_owned()?;
        let state = LinkState {
            client,
            is_listening: false,
            inbox: Vec::new(),
            pool: None,
            end: None,
            next_ticket: 0,
            tickets: BTreeMap::new(),
            spares: Vec::new(),
            spares_asked: Vec::new(),
            wants: HashMap::new(),
            abandoned: HashMap::new(),
        };
        let process = std::process::id();
        Ok(PayloadLink { state: Mutex::new(state), heard: Condvar::new(), socket, process })
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Listens until `found` finds something, at most so long. One thread sleeps on the socket, and
    /// the others until it has heard something.
    fn until<T>(
        &self,
        patience: Duration,
        mut found: impl FnMut(&mut LinkState) -> Option<T>,
    ) -> io::Result<Option<T>> {
        let begun = Instant::now();
        let mut state = self.state();
        loop {
            if !state.is_listening {
                state.listen();
                self.heard.notify_all();
            }
            if let Some(found) = found(&mut state) {
                return Ok(Some(found));
            }
            state.check()?;
            let waited = begun.elapsed();
            let Some(left) = patience.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            if state.is_listening {
                let woken = self.heard.wait_timeout(state, left);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            state.is_listening = true;
            drop(state);
            if waited < SPIN {
                std::thread::yield_now();
            } else {
                self.sleep(left);
            }
            state = self.state();
            state.is_listening = false;
        }
    }

    /// Until the host says something, at most so long.
    fn sleep(&self, left: Duration) {
        let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut watched = [PollFd::new(&self.socket, PollFlags::IN)];
        // Interrupted or not, who sleeps looks again.
        let _ = poll(&mut watched, Some(&left));
    }

    /// Waits until the host has said where its pool is.
    ///
    /// # Errors
    /// The host is gone, is silent for longer than `patience`, or refuses: it serves no stages
    /// (`ConnectionRefused`).
    pub fn wait_ready(&self, patience: Duration) -> io::Result<PoolOffer> {
        let found = |state: &mut LinkState| {
            let &PoolOffer { client, bytes, ref engine, incarnation, ref file } =
                state.pool.as_ref()?;
            let engine = engine.clone();
            Some(file.try_clone().map(|file| PoolOffer {
                client,
                bytes,
                engine,
                incarnation,
                file,
            }))
        };
        let silent = || io::Error::new(ErrorKind::TimedOut, "the kvferry host is silent");
        self.until(patience, found)?.ok_or_else(silent)?
    }

    /// A slot of so many bytes, for which this waits at most so long: or why there is none.
    ///
    /// # Errors
    /// The host is gone, or stands still.
    pub fn reserve(
        &self,
        bytes: u64,
        wait: Duration,
    ) -> io::Result<Result<ReservedSlot, PayloadFailure>> {
        let mut state = self.state();
        if bytes <= SPARE_BYTES {
            if state.spares.is_empty() && !state.is_listening {
                state.listen();
            }
            state.check()?;
            if let Some(spare) = state.spares.pop() {
                return Ok(Ok(spare));
            }
        }
        let ticket = state.ticket();
        state.tickets.insert(ticket, None);
        let nanos = Nanos(u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX));
        state.tell(PayloadHook::Reserve { ticket, bytes, wait: nanos })?;
        drop(state);
        let found = |state: &mut LinkState| {
            state.tickets.get(&ticket)?.as_ref()?;
            state.tickets.remove(&ticket).flatten()
        };
        let found = self.until(wait.saturating_add(GRACE), found);
        if let Ok(Some(result)) = found {
            return Ok(result);
        }
        self.state().tickets.remove(&ticket);
        found?;
        Err(io::Error::new(
            ErrorKind::TimedOut,
            "the kvferry host does not answer: it stands still",
        ))
    }

    /// What was written into a reserved slot is for so many receivers.
    ///
    /// # Errors
    /// The host is gone.
    pub fn put(&self, slot: SlotId, key: PayloadKey, receivers: u32) -> io::Result<()> {
        let mut state = self.state();
        let mut hooks = vec![ToHost::Payload(PayloadHook::Put { slot, key, receivers })];
        hooks.extend(state.ask_spares());
        state.send(&hooks)
    }

    /// A reserved slot is not needed.
    ///
    /// # Errors
    /// The host is gone.
    pub fn give_back(&self, slot: SlotId) -> io::Result<()> {
        self.state().tell(PayloadHook::Return { slot })
    }

    /// Wants a payload, of this client of the host if it is given; once until it has come, does not
    /// come, or is abandoned.
    ///
    /// # Errors
    /// The host is gone.
    pub fn want(&self, key: &PayloadKey, producer: Option<PayloadClient>) -> io::Result<()> {
        self.want_by(key, |key| PayloadHook::Want { key, producer })
    }

    /// The same, of what a process at another host puts, which is called as its
    /// [`PoolOffer::engine`].
    ///
    /// # Errors
    /// The host is gone.
    pub fn want_from(&self, key: &PayloadKey, host: &EngineId) -> io::Result<()> {
        self.want_by(key, |key| PayloadHook::WantFrom { key, host: host.clone() })
    }

    fn want_by(
        &self,
        key: &PayloadKey,
        hook: impl FnOnce(PayloadKey) -> PayloadHook,
    ) -> io::Result<()> {
        let mut state = self.state();
        state.check()?;
        if state.wants.contains_key(key) {
            return Ok(());
        }
        state.wants.insert(key.clone(), None);
        state.tell(hook(key.clone()))
    }

    /// Wants a payload of a stage whose connector is vLLM-Omni's for MoRI and listens at `sender`.
    ///
    /// # Errors
    /// The host is gone.
    pub fn fetch(&self, key: &PayloadKey, sender: Endpoint) -> io::Result<()> {
        let mut state = self.state();
        state.check()?;
        if state.wants.contains_key(key) {
            return Ok(());
        }
        state.wants.insert(key.clone(), None);
        state.send(&[ToHost::Fetch { key: key.clone(), sender }])
    }

    /// What became of a wanted payload, if it is known, without waiting; after that it is wanted no
    /// more.
    ///
    /// # Errors
    /// The host is gone.
    pub fn poll(&self, key: &PayloadKey) -> io::Result<Option<PayloadOutcome>> {
        let mut state = self.state();
        if !state.is_listening {
            state.listen();
        }
        match state.take_outcome(key) {
            Some(outcome) => Ok(Some(outcome)),
            None => state.check().map(|()| None),
        }
    }

    /// The same, after waiting for it, at most so long.
    ///
    /// # Errors
    /// The host is gone.
    pub fn wait(&self, key: &PayloadKey, patience: Duration) -> io::Result<Option<PayloadOutcome>> {
        self.until(patience, |state| state.take_outcome(key))
    }

    /// Wants a payload no more; if it is there, it is for others.
    ///
    /// # Errors
    /// The host is gone.
    pub fn abandon(&self, key: &PayloadKey) -> io::Result<()> {
        let mut state = self.state();
        state.check()?;
        if state.wants.remove(key).is_none() {
            return Ok(());
        }
        *state.abandoned.entry(key.clone()).or_default() += 1;
        state.tell(PayloadHook::Abandon { key: key.clone() })
    }

    /// What arrived was given to the stage, and goes to nobody else.
    ///
    /// # Errors
    /// The host is gone.
    pub fn take(&self, claim: ClaimId) -> io::Result<()> {
        self.state().tell(PayloadHook::Take { claim })
    }

    /// Nobody reads what arrived any more.
    ///
    /// # Errors
    /// The host is gone.
    pub fn release(&self, claim: ClaimId) -> io::Result<()> {
        self.state().tell(PayloadHook::Release { claim })
    }

    /// No further chunk of a stream is put; with a reason, because it was given up.
    ///
    /// # Errors
    /// The host is gone.
    pub fn end(&self, stream: PayloadStream, reason: Option<&str>) -> io::Result<()> {
        self.state().tell(PayloadHook::End { stream, failure: reason.map(Into::into) })
    }

    /// Nobody gets what is there of a stream and was not taken.
    ///
    /// # Errors
    /// The host is gone.
    pub fn clean_up(&self, stream: PayloadStream) -> io::Result<()> {
        self.state().tell(PayloadHook::CleanUp { stream })
    }

    /// How it is used now.
    pub fn gauges(&self) -> LinkGauges {
        let state = self.state();
        LinkGauges {
            wants: state.wants.len(),
            tickets: state.tickets.len(),
            spares: state.spares.len(),
        }
    }

    /// Ends the connection: whoever waits gets an error. The host takes what this process has for
    /// free, so nothing of the pool may be in use any more.
    pub fn close(&self) {
        let mut state = self.state();
        // What was heard and not read would look to the host as if this process had died.
        state.listen();
        let why = "the link to the kvferry host is closed".into();
        state.end.get_or_insert((ErrorKind::NotConnected, why));
        state.client.close();
        self.heard.notify_all();
    }
}

impl Drop for PayloadLink {
    fn drop(&mut self) {
        // What a fork lets go of its parent may be using.
        if self.process == std::process::id() {
            self.close();
        }
    }
}

impl AsFd for PayloadLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
