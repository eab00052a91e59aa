//! A process of a stage at the host of its payloads.

mod state;

use super::SidecarClient;
use super::proto::{ClientIdentity, ToHost};
use kvferry_engine::core::ids::{EngineId, Incarnation};
use kvferry_engine::core::payload::{
    ClaimId, FormerUse, KEY_BYTES_MAX, PayloadClient, PayloadFailure, PayloadHook, PayloadKey,
    PayloadStream, SlotId,
};
use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::Endpoint;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use state::{LinkState, WantedPayload};
use std::fmt;
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

/// How often a wait looks whether it is to end.
const PULSE: Duration = Duration::from_millis(20);

/// How long the first answer of a host is waited for beyond what a caller waits for a payload.
const ANSWER_WAIT: Duration = Duration::from_secs(1);

const NO_ANSWER: &str = "the kvferry host does not answer: it stands still";

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
pub type PayloadOutcome = Result<ArrivedPayload, (PayloadFailure, FormerUse)>;

/// Called every now and then by a thread that waits; an error ends the wait.
type Pulse = Box<dyn Fn() -> io::Result<()> + Send + Sync>;

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
///     Some(Err((why, _))) => println!("{key} does not come: {why}"),
///     None => println!("not yet"),
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct PayloadLink {
    state: Mutex<LinkState>,
    /// Something was heard, or the thread that listened does not any more.
    heard: Condvar,
    /// The socket once more, to sleep on without the state.
    socket: OwnedFd,
    /// Whose it is: a fork has it, too.
    process: u32,
    pulse: Option<Pulse>,
}

impl fmt::Debug for PayloadLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PayloadLink { state, process, .. } = self;
        f.debug_struct("PayloadLink")
            .field("state", state)
            .field("process", process)
            .finish_non_exhaustive()
    }
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

/// A host takes no longer names.
fn check_names(bytes: usize) -> io::Result<()> {
    if bytes <= KEY_BYTES_MAX {
        return Ok(());
    }
    let why = format!(
        "a payload whose key and stages have {bytes} bytes, {KEY_BYTES_MAX} at most: give requests \
         shorter ids"
    );
    Err(io::Error::new(ErrorKind::InvalidInput, why))
}

impl PayloadLink {
    /// Says hello to the host at a path, as a process of a stage.
    ///
    /// # Errors
    /// As [`SidecarClient::connect`].
    pub fn connect(path: &Path, deployment: &str, stage: &str) -> io::Result<PayloadLink> {
        PayloadLink::connect_for(path, (deployment, stage), None)
    }

    /// The same, for a pool of so many bytes: a host that another one started, that has a pool of
    /// another size and that nobody uses ends, and the connection with it.
    ///
    /// # Errors
    /// As [`SidecarClient::connect`].
    pub fn connect_for(
        path: &Path,
        (deployment, stage): (&str, &str),
        pool: Option<u64>,
    ) -> io::Result<PayloadLink> {
        let (deployment, stage) = (deployment.into(), stage.into());
        let who = ClientIdentity::Stage { deployment, stage, pool };
        let client = SidecarClient::connect(path, who)?;
        client.limit_writes(GRACE)?;
        let socket = client.as_fd().try_clone_to_owned()?;
        let state = LinkState::new(client);
        let process = std::process::id();
        let (state, heard, pulse) = (Mutex::new(state), Condvar::new(), None);
        Ok(PayloadLink { state, heard, socket, process, pulse })
    }

    /// Has each wait call this every now and then, without a lock; an error of it ends the wait.
    pub fn with_pulse(
        mut self,
        pulse: impl Fn() -> io::Result<()> + Send + Sync + 'static,
    ) -> PayloadLink {
        self.pulse = Some(Box::new(pulse));
        self
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
        let mut next_pulse = PULSE;
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
            if let Some(pulse) = self.pulse.as_ref().filter(|_| waited >= next_pulse) {
                next_pulse = waited + PULSE;
                drop(state);
                pulse()?;
                state = self.state();
                continue;
            }
            let left = if self.pulse.is_some() { left.min(PULSE) } else { left };
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
        Err(io::Error::new(ErrorKind::TimedOut, NO_ANSWER))
    }

    /// Gives what was written into a reserved slot to so many receivers, as a chunk of the stream that
    /// the key names if `is_chunk`. Whoever asks after this has returned gets it, unless a failure
    /// says why nobody does.
    ///
    /// # Errors
    /// The host is gone or stands still, or the key is too long (`InvalidInput`).
    pub fn put(
        &self,
        slot: SlotId,
        key: PayloadKey,
        (receivers, is_chunk): (u32, bool),
    ) -> io::Result<Result<(), PayloadFailure>> {
        check_names(key.text_len())?;
        let mut state = self.state();
        let put = PayloadHook::Put { slot, key, receivers, is_chunk };
        let mut hooks = vec![ToHost::Payload(put)];
        hooks.extend(state.ask_spares());
        state.puts.insert(slot, None);
        let sent = state.send(&hooks);
        drop(state);
        let stored = |state: &mut LinkState| {
            state.puts.get(&slot)?.as_ref()?;
            state.puts.remove(&slot).flatten()
        };
        let stored = sent.and_then(|()| self.until(GRACE, stored));
        self.state().puts.remove(&slot);
        stored?.ok_or_else(|| io::Error::new(ErrorKind::TimedOut, NO_ANSWER))
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
        check_names(key.text_len())?;
        let mut state = self.state();
        state.check()?;
        if state.wants.contains_key(key) {
            return Ok(());
        }
        state.wants.insert(key.clone(), WantedPayload::default());
        state.tell(hook(key.clone()))
    }

    /// Wants a payload of a stage whose connector is vLLM-Omni's for MoRI and listens at `sender`.
    ///
    /// # Errors
    /// The host is gone.
    pub fn fetch(&self, key: &PayloadKey, sender: Endpoint) -> io::Result<()> {
        check_names(key.text_len())?;
        let mut state = self.state();
        state.check()?;
        if state.wants.contains_key(key) {
            return Ok(());
        }
        state.wants.insert(key.clone(), WantedPayload::default());
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

    /// The same; but a host that has not answered at all by then is waited for, at most for
    /// a second, so that what was put before is not missed.
    ///
    /// # Errors
    /// The host is gone.
    pub fn wait_for_answer(
        &self,
        key: &PayloadKey,
        patience: Duration,
    ) -> io::Result<Option<PayloadOutcome>> {
        if let Some(outcome) = self.wait(key, patience)? {
            return Ok(Some(outcome));
        }
        let answer = |state: &mut LinkState| state.has_answer(key).then(|| state.take_outcome(key));
        let left = ANSWER_WAIT.saturating_sub(patience);
        Ok(self.until(left, answer)?.flatten())
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

    /// Tells those who want a payload that it will not be put, for this reason.
    ///
    /// # Errors
    /// The host is gone, or the key is too long (`InvalidInput`).
    pub fn give_up(&self, key: PayloadKey, is_chunk: bool, reason: &str) -> io::Result<()> {
        check_names(key.text_len())?;
        self.state().tell(PayloadHook::GiveUp { key, is_chunk, failure: reason.into() })
    }

    /// Drops a payload that was not taken.
    ///
    /// # Errors
    /// The host is gone, or the key is too long (`InvalidInput`).
    pub fn drop_payload(&self, key: PayloadKey) -> io::Result<()> {
        check_names(key.text_len())?;
        self.state().tell(PayloadHook::Drop { key })
    }

    /// Ends the stream that this process puts; with a reason, because it was given up.
    ///
    /// # Errors
    /// The host is gone, or the name is too long (`InvalidInput`).
    pub fn end(&self, stream: PayloadStream, reason: Option<&str>) -> io::Result<()> {
        check_names(stream.text_len())?;
        let failure = reason.map(Into::into);
        self.state().tell(PayloadHook::End { stream, failure, is_own: true })
    }

    /// Drops the chunks of a stream that were not taken; with `is_own` only if this process puts or
    /// gets the stream, and no other one has begun a later stream with its name.
    ///
    /// # Errors
    /// The host is gone, or the name is too long (`InvalidInput`).
    pub fn clean_up(&self, stream: PayloadStream, is_own: bool) -> io::Result<()> {
        check_names(stream.text_len())?;
        self.state().tell(PayloadHook::CleanUp { stream, is_own })
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
