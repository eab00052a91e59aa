//! A stage's link to the host of its payloads.

use kvferry::sidecar::{
    ArrivedPayload, LinkGauges, PayloadLink, PayloadOutcome, PoolOffer, ReservedSlot,
};
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::payload::{
    ClaimId, FormerUse, PayloadClient, PayloadFailure, PayloadKey, PayloadStream, SlotId,
};
use kvferry_engine::fabric::Endpoint;
use pyo3::exceptions::{PyConnectionError, PyPermissionError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// The stage that puts, the one that gets, the request, and which chunk of it, if there are several.
type KeyTuple = (String, String, String, Option<u64>);

fn key_of((from, to, request, chunk): KeyTuple) -> PayloadKey {
    PayloadKey { stream: PayloadStream::new(&from, &to, &request), chunk }
}

fn gone(why: io::Error) -> PyErr {
    if why.get_ref().is_some_and(|inner| inner.is::<PyErr>()) {
        return PyErr::from(why);
    }
    match why.kind() {
        ErrorKind::InvalidInput => PyValueError::new_err(why.to_string()),
        // It does not get better by itself.
        ErrorKind::PermissionDenied => PyPermissionError::new_err(why.to_string()),
        // It may go on, and what this process has of it is still its own.
        ErrorKind::TimedOut => PyTimeoutError::new_err(why.to_string()),
        _ => PyConnectionError::new_err(why.to_string()),
    }
}

fn seconds(value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value.max(0.0))
        .map_err(|why| PyValueError::new_err(format!("{value} seconds: {why}")))
}

fn failed(why: &PayloadFailure) -> (&'static str, String) {
    (why.kind(), why.to_string())
}

fn former(former: FormerUse) -> &'static str {
    match former {
        FormerUse::No => "no",
        FormerUse::Perhaps => "perhaps",
        FormerUse::Yes => "yes",
    }
}

/// Ends a wait with the exception of a signal's handler, such as KeyboardInterrupt.
fn signalled() -> io::Result<()> {
    Python::attach(|py| py.check_signals())
        .map_err(|why| io::Error::new(ErrorKind::Interrupted, why))
}

fn outcome(py: Python<'_>, outcome: PayloadOutcome) -> PyResult<Bound<'_, PyTuple>> {
    match outcome {
        Ok(ArrivedPayload { claim, offset, bytes, generation }) => {
            ("arrived", claim.0, offset, bytes, generation).into_pyobject(py)
        }
        Err((why, of_former)) => {
            let (kind, text) = failed(&why);
            ("missing", kind, text, former(of_former)).into_pyobject(py)
        }
    }
}

/// A connection to the host of a pipeline's payloads. Threads may share it; who waits does not hold
/// the interpreter's lock. Every call raises ConnectionError once the host is gone, and TimeoutError if
/// it stands still.
#[pyclass(frozen, module = "kvferry._native", name = "PayloadLink")]
pub(crate) struct PyPayloadLink {
    link: PayloadLink,
    pool: Mutex<Option<PoolOffer>>,
}

impl PyPayloadLink {
    fn offer<T>(&self, of: impl FnOnce(&PoolOffer) -> T) -> PyResult<T> {
        let pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
        let not_yet = || PyValueError::new_err("the host has no pool yet: wait_ready comes first");
        pool.as_ref().map(of).ok_or_else(not_yet)
    }
}

#[pymethods]
impl PyPayloadLink {
    /// Connects as a process of a stage. A host with a pool of another size than `pool_bytes` that
    /// nobody uses ends, if a stage started it, and this raises ConnectionError.
    #[staticmethod]
    #[pyo3(signature = (path, deployment, stage, pool_bytes = None))]
    fn connect(
        py: Python<'_>,
        path: PathBuf,
        deployment: &str,
        stage: &str,
        pool_bytes: Option<u64>,
    ) -> PyResult<PyPayloadLink> {
        let link = py.detach(|| PayloadLink::connect_for(&path, (deployment, stage), pool_bytes));
        let link = link.map(|link| link.with_pulse(signalled)).map_err(|why| {
            let said = format!("no kvferry host at {}: {why}", path.display());
            gone(io::Error::new(why.kind(), said))
        })?;
        Ok(PyPayloadLink { link, pool: Mutex::default() })
    }

    /// Waits until the host has said where its pool is. Raises ValueError if it serves no stages.
    fn wait_ready(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let patience = seconds(patience)?;
        let pool =
            py.detach(|| self.link.wait_ready(patience)).map_err(|why| match why.kind() {
                ErrorKind::ConnectionRefused => PyValueError::new_err(why.to_string()),
                _ => gone(why),
            })?;
        *self.pool.lock().unwrap_or_else(PoisonError::into_inner) = Some(pool);
        Ok(())
    }

    /// Bytes of the pool.
    #[getter]
    fn pool_bytes(&self) -> PyResult<u64> {
        self.offer(|pool| pool.bytes)
    }

    /// The pool's memory file, which this object keeps open.
    #[getter]
    fn pool_fd(&self) -> PyResult<i32> {
        self.offer(|pool| pool.file.as_raw_fd())
    }

    /// HOST:PORT by which other hosts call this one; None if they do not reach it.
    #[getter]
    fn engine(&self) -> PyResult<Option<String>> {
        self.offer(|pool| pool.engine.as_ref().map(EngineId::to_string))
    }

    /// This process as the host numbers it.
    #[getter]
    fn client(&self) -> PyResult<u32> {
        self.offer(|pool| pool.client.0)
    }

    /// Names this run of the host.
    #[getter]
    fn incarnation(&self) -> PyResult<u64> {
        self.offer(|pool| pool.incarnation.0)
    }

    /// The socket, for who waits until it is closed.
    fn fileno(&self) -> i32 {
        self.link.as_fd().as_raw_fd()
    }

    /// A slot and where it begins in the pool, or None, the kind of the failure and its text.
    fn reserve<'py>(
        &self,
        py: Python<'py>,
        nbytes: u64,
        wait: f64,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let wait = seconds(wait)?;
        let reserved = py.detach(|| self.link.reserve(nbytes, wait)).map_err(gone)?;
        match reserved {
            Ok(ReservedSlot { slot, offset }) => (slot.0, offset).into_pyobject(py),
            Err(why) => {
                let (kind, text) = failed(&why);
                (None::<u64>, kind, text).into_pyobject(py)
            }
        }
    }

    /// What was written into a slot is for so many receivers, each once, as a chunk of the stream that
    /// the key names if `is_chunk`. None if whoever asks from now on gets it; or the kind of the failure
    /// and its text.
    #[pyo3(signature = (slot, key, is_chunk, receivers = 1))]
    fn put(
        &self,
        py: Python<'_>,
        slot: u64,
        key: KeyTuple,
        is_chunk: bool,
        receivers: u32,
    ) -> PyResult<Option<(&'static str, String)>> {
        let key = key_of(key);
        let stored = py.detach(|| self.link.put(SlotId(slot), key, (receivers, is_chunk)));
        Ok(stored.map_err(gone)?.err().map(|why| failed(&why)))
    }

    /// A slot that was reserved is not needed.
    fn give_back(&self, py: Python<'_>, slot: u64) -> PyResult<()> {
        py.detach(|| self.link.give_back(SlotId(slot))).map_err(gone)
    }

    /// Wants a payload; once, until its outcome was asked for or it is abandoned. With the process
    /// that is to put it goes what it has not put. With a host, which is called as its `engine`, it
    /// comes from there or not at all.
    #[pyo3(signature = (key, producer = None, host = None))]
    fn want(
        &self,
        py: Python<'_>,
        key: KeyTuple,
        producer: Option<u32>,
        host: Option<&str>,
    ) -> PyResult<()> {
        let (key, producer) = (key_of(key), producer.map(PayloadClient));
        py.detach(|| match host {
            Some(host) => self.link.want_from(&key, &host.into()),
            None => self.link.want(&key, producer),
        })
        .map_err(gone)
    }

    /// The same of a payload that is at a stage whose connector is vLLM-Omni's for MoRI and listens
    /// there.
    fn fetch(&self, py: Python<'_>, key: KeyTuple, host: &str, port: u16) -> PyResult<()> {
        let sender = Endpoint::tcp(host, port);
        py.detach(|| self.link.fetch(&key_of(key), sender)).map_err(gone)
    }

    /// What became of a payload, once: ("arrived", claim, offset, bytes of the slot, generation) or
    /// ("missing", kind, text, former); None if that is not known. `former` says whether it may be the
    /// outcome of an earlier request with the same id: "no", "perhaps" or "yes". Does not wait.
    fn poll<'py>(&self, py: Python<'py>, key: KeyTuple) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let found = self.link.poll(&key_of(key)).map_err(gone)?;
        found.map(|found| outcome(py, found)).transpose()
    }

    /// The same, after waiting for it, at most so long, and for the host's first answer a second
    /// longer.
    fn wait<'py>(
        &self,
        py: Python<'py>,
        key: KeyTuple,
        patience: f64,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let patience = seconds(patience)?;
        let found =
            py.detach(|| self.link.wait_for_answer(&key_of(key), patience)).map_err(gone)?;
        found.map(|found| outcome(py, found)).transpose()
    }

    /// Wants a payload no more; if it is there, it is for others.
    fn abandon(&self, py: Python<'_>, key: KeyTuple) -> PyResult<()> {
        py.detach(|| self.link.abandon(&key_of(key))).map_err(gone)
    }

    /// What arrived goes to nobody else.
    fn take(&self, py: Python<'_>, claim: u64) -> PyResult<()> {
        py.detach(|| self.link.take(ClaimId(claim))).map_err(gone)
    }

    /// Nobody reads what arrived any more.
    fn release(&self, py: Python<'_>, claim: u64) -> PyResult<()> {
        py.detach(|| self.link.release(ClaimId(claim))).map_err(gone)
    }

    /// A payload will not be put, for this reason.
    fn give_up(&self, py: Python<'_>, key: KeyTuple, is_chunk: bool, reason: &str) -> PyResult<()> {
        py.detach(|| self.link.give_up(key_of(key), is_chunk, reason)).map_err(gone)
    }

    /// Drops a payload that was not taken.
    fn drop_payload(&self, py: Python<'_>, key: KeyTuple) -> PyResult<()> {
        py.detach(|| self.link.drop_payload(key_of(key))).map_err(gone)
    }

    /// No further chunk of a stream is put; with a reason, because it was given up.
    #[pyo3(signature = (from_stage, to_stage, request, reason = None))]
    fn end(
        &self,
        py: Python<'_>,
        from_stage: &str,
        to_stage: &str,
        request: &str,
        reason: Option<&str>,
    ) -> PyResult<()> {
        let stream = PayloadStream::new(from_stage, to_stage, request);
        py.detach(|| self.link.end(stream, reason)).map_err(gone)
    }

    /// Drops the chunks of a stream that were not taken; with `is_own` only if this process puts or
    /// gets the stream, and no other one has begun a later stream with its name.
    fn clean_up(
        &self,
        py: Python<'_>,
        from_stage: &str,
        to_stage: &str,
        request: &str,
        is_own: bool,
    ) -> PyResult<()> {
        let stream = PayloadStream::new(from_stage, to_stage, request);
        py.detach(|| self.link.clean_up(stream, is_own)).map_err(gone)
    }

    /// How it is used now: `wants` that have no outcome that was asked for, `tickets` of slots that
    /// are waited for, and `spares`, slots that are kept for small payloads.
    fn stats(&self) -> BTreeMap<&'static str, usize> {
        let LinkGauges { wants, tickets, spares } = self.link.gauges();
        [("wants", wants), ("tickets", tickets), ("spares", spares)].into()
    }

    /// Ends the connection; nothing of the pool may be in use any more.
    fn close(&self) {
        self.link.close();
    }
}
