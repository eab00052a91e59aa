//! The connector's line to its host.

use kvferry::sidecar::proto::{ClientIdentity, FromHost, ToHost};
use kvferry::sidecar::record::{SpokenDialect, TransferOutcome, TransferSummary};
use kvferry::sidecar::settings::{
    ConnectorSettings, HostStart, KvMemory, TransferBackend, TransferPlacement,
};
use kvferry::sidecar::spec::{ServingEngine, numbered_layers};
use kvferry::sidecar::{
    PrefillOffer, SidecarClient as Line, answer_params, failed_params, unusable_params,
};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::dialect::moriio::address::ZmqAddress;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{RequestId, StepId};
use kvferry_engine::core::layout::BlockList;
use kvferry_engine::core::message::{
    Chunk, DecodeAnswer, DecodeHook, FinishReason, PrefillAnswer, PrefillHook, Role,
};
use kvferry_engine::core::prompt_hash::PromptHash;
use pyo3::exceptions::{PyConnectionError, PyPermissionError, PyValueError};
use pyo3::prelude::*;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// What the host says of a request: kind, request, and why, with the level of the log for that.
type PyLinkEvent = (&'static str, String, Option<(&'static str, String)>);

/// Blocks of a chunk: request, first token, one past the last, and per group where its added blocks
/// begin in the request's list, and their ids.
type ChunkTuple = (String, u32, u32, Vec<(u32, Vec<u32>)>);

/// A transfer that ended: how, for which cause, seconds until it began, seconds that it took, and
/// bytes that were moved meanwhile, by path.
type EndedTuple = (
    &'static str,
    Option<String>,
    Option<f64>,
    Option<f64>,
    Vec<(String, u64)>,
    Option<&'static str>,
);

/// Blocks held and in quarantine.
type KeptBlocks = (u32, u32);

fn ended_tuple(
    TransferSummary { outcome, queued, duration, bytes, dialect }: TransferSummary,
) -> EndedTuple {
    let name = outcome.name();
    let cause = match outcome {
        TransferOutcome::Failed { cause, .. } => Some(cause.to_string()),
        TransferOutcome::Done | TransferOutcome::Local => None,
    };
    let bytes = bytes.into_iter().map(|(path, bytes)| (path.to_string(), bytes)).collect();
    let seconds = |span: Option<Nanos>| span.map(Nanos::as_secs_f64);
    (name, cause, seconds(queued), seconds(duration), bytes, dialect.map(SpokenDialect::name))
}

/// The blocks of a request in a group, the first of which is its `first`. Where a sliding window
/// has dropped blocks, vLLM's list begins with its null block, 0.
fn block_list(first: u32, mut ids: Vec<u32>) -> BlockList {
    let dropped = ids.iter().take_while(|id| **id == 0).count();
    ids.drain(..dropped);
    BlockList { first: first + dropped as u32, ids }
}

fn gone(why: io::Error) -> PyErr {
    PyConnectionError::new_err(match why.kind() {
        io::ErrorKind::WouldBlock => "the kvferry host stands still: it does not read".into(),
        _ => format!("the kvferry host is gone: {why}"),
    })
}

fn read<T: DeserializeOwned>(what: &str, json: &str) -> PyResult<T> {
    serde_json::from_str(json).map_err(|why| PyValueError::new_err(format!("{what}: {why}")))
}

/// A connection to the host of this engine.
#[pyclass(module = "kvferry._native", name = "Link")]
pub(crate) struct PyLink {
    line: Line,
    role: Role,
    heard: Vec<FromHost>,
    /// Transfers that ended and were not asked for.
    ended: Vec<EndedTuple>,
    /// Blocks held and in quarantine, if they changed.
    kept: Option<KeptBlocks>,
    /// Why requests were not handed over or did not come, for their answers.
    failure_params: BTreeMap<RequestId, String>,
    address: Option<ZmqAddress>,
    offer: Option<Box<PrefillOffer>>,
    lease_ms: u64,
    incarnation: u64,
}

/// Most requests of which something is in `failure_params`; all are such that the engine has not
/// ended yet.
const FAILURE_PARAMS_MAX: usize = 65_536;

impl PyLink {
    fn connect(path: PathBuf, role: Role, who: ClientIdentity) -> PyResult<PyLink> {
        let line = Line::connect(&path, who).map_err(|why| {
            let said = format!("no kvferry host at {}: {why}", path.display());
            match why.kind() {
                // It does not get better by itself.
                io::ErrorKind::PermissionDenied => PyPermissionError::new_err(said),
                _ => PyConnectionError::new_err(said),
            }
        })?;
        let (heard, ended) = (Vec::new(), Vec::new());
        let (kept, address, offer, lease_ms, incarnation) = (None, None, None, 0, 0);
        let failure_params = BTreeMap::new();
        Ok(PyLink {
            line,
            role,
            heard,
            ended,
            kept,
            failure_params,
            address,
            offer,
            lease_ms,
            incarnation,
        })
    }

    fn send(&mut self, message: &ToHost) -> PyResult<()> {
        self.line.send(message).map_err(gone)
    }

    fn events(&mut self) -> Vec<PyLinkEvent> {
        let mut events = Vec::new();
        for message in self.heard.drain(..) {
            match message {
                FromHost::Ended(ended) => self.ended.push(ended_tuple(ended)),
                FromHost::Kept { held, quarantined } => self.kept = Some((held, quarantined)),
                FromHost::Offer(offer) => self.offer = Some(offer),
                message => {
                    if self.failure_params.len() < FAILURE_PARAMS_MAX {
                        self.failure_params.extend(failure_params(&message));
                    }
                    events.extend(event(message));
                }
            }
        }
        events
    }
}

/// What the answer of a request tells the router, if its transfer failed.
fn failure_params(message: &FromHost) -> Option<(RequestId, String)> {
    match message {
        FromHost::Unusable { request, why } => Some((request.clone(), unusable_params(why))),
        FromHost::Prefill(PrefillAnswer::Rejected { request, failure })
        | FromHost::Decode(DecodeAnswer::LoadFailed { request, failure })
        | FromHost::Decode(DecodeAnswer::Rejected { request, failure }) => {
            Some((request.clone(), failed_params(failure)))
        }
        _ => None,
    }
}

/// Why something failed, and at which level of the log that is said. What clients did is no news to
/// people: they leave, and then vLLM ends both requests, or sends the decode's once more.
fn leveled(failure: &Failure) -> (&'static str, String) {
    let level = match failure {
        Failure::Cancelled => "debug",
        Failure::PrefillEnded | Failure::DuplicateKey | Failure::UnknownTransfer => "info",
        _ => "warning",
    };
    (level, failure.to_string())
}

fn event(message: FromHost) -> Option<PyLinkEvent> {
    let warning = |why| Some(("warning", why));
    let (kind, request, why) = match message {
        FromHost::Ready { .. }
        | FromHost::Begin(_)
        | FromHost::Job(_)
        | FromHost::Ended(_)
        | FromHost::Offer(_)
        | FromHost::Kept { .. }
        | FromHost::Trace(_)
        | FromHost::Pool { .. }
        | FromHost::Payload(_) => return None,
        FromHost::Refused { why } => return Some(("refused", String::new(), warning(why))),
        FromHost::Unusable { request, why } => ("rejected", request, warning(why)),
        FromHost::Prefill(PrefillAnswer::SourceFree { request, failure }) => {
            ("source_free", request, failure.as_ref().map(leveled))
        }
        FromHost::Prefill(PrefillAnswer::PreemptionSafe { request }) => {
            ("preemption_safe", request, None)
        }
        FromHost::Prefill(PrefillAnswer::Rejected { request, failure })
        | FromHost::Decode(DecodeAnswer::Rejected { request, failure }) => {
            ("rejected", request, Some(leveled(&failure)))
        }
        FromHost::Decode(DecodeAnswer::Allocate { request }) => ("allocate", request, None),
        FromHost::Decode(DecodeAnswer::Loaded { request }) => ("loaded", request, None),
        FromHost::Decode(DecodeAnswer::LoadFailed { request, failure }) => {
            ("load_failed", request, Some(leveled(&failure)))
        }
    };
    Some((kind, request.0.to_string(), why))
}

#[pymethods]
impl PyLink {
    /// Connects as the scheduler of an engine, which is described in JSON, with what the user set.
    #[staticmethod]
    fn scheduler(path: PathBuf, engine: &str, settings: &str) -> PyResult<PyLink> {
        let mut engine: Box<ServingEngine> = read("engine", engine)?;
        engine.settings = ConnectorSettings::read(settings).map_err(PyValueError::new_err)?;
        PyLink::connect(path, engine.role, ClientIdentity::Scheduler(engine))
    }

    /// Connects as a worker, which is described in JSON.
    #[staticmethod]
    fn worker(path: PathBuf, worker: &str) -> PyResult<PyLink> {
        // Workers end no request.
        PyLink::connect(path, Role::Prefill, ClientIdentity::Worker(read("worker", worker)?))
    }

    /// Waits until the host serves the engine.
    fn wait_ready(&mut self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        while self.address.is_none() {
            let left = end.saturating_duration_since(Instant::now());
            let (line, heard) = (&mut self.line, &mut self.heard);
            py.detach(|| line.wait(left, heard)).map_err(gone)?;
            for message in self.heard.drain(..) {
                match message {
                    FromHost::Ready { address, lease_ms, incarnation, offer, .. } => {
                        let earlier = || Box::new(PrefillOffer::of_moriio((address.clone(), 1)));
                        self.offer = Some(offer.unwrap_or_else(earlier));
                        (self.address, self.lease_ms) = (Some(address), lease_ms);
                        self.incarnation = incarnation.0;
                    }
                    FromHost::Refused { why } => {
                        return Err(PyValueError::new_err(format!("the kvferry host: {why}")));
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The ports that the host listens at, as settings.
    #[getter]
    fn ports(&self) -> BTreeMap<&'static str, i64> {
        let Some(ZmqAddress { handshake, notify, .. }) = self.address.as_ref() else {
            return BTreeMap::new();
        };
        [("handshake_port", *handshake), ("notify_port", *notify)].into()
    }

    /// Seconds for which blocks of finished prefills may be read though the host has ended.
    #[getter]
    fn lease_s(&self) -> f64 {
        Duration::from_millis(self.lease_ms).as_secs_f64()
    }

    /// Names the host's actors; 0 before `wait_ready`.
    #[getter]
    fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Has what is said fail when the host has read nothing for so long: it stands still. Else it is
    /// waited for as long as it takes.
    fn limit_writes(&self, seconds: f64) -> PyResult<()> {
        self.line.limit_writes(Duration::from_secs_f64(seconds)).map_err(gone)
    }

    /// The socket, for who waits until it is closed.
    fn fileno(&self) -> i32 {
        self.line.as_fd().as_raw_fd()
    }

    fn arrived(
        &mut self,
        request: String,
        params: String,
        tokens: u32,
        prompt_hash: [u8; 16],
    ) -> PyResult<()> {
        let (request, params) = (request.into(), params.into());
        let prompt_hash = Some(PromptHash::from_bytes(prompt_hash));
        self.send(&ToHost::Arrived { request, params, tokens, prompt_hash })
    }

    fn scheduled(&mut self, step: u64, chunks: Vec<ChunkTuple>) -> PyResult<()> {
        let chunk = |(request, from, to, blocks): ChunkTuple| Chunk {
            request: request.into(),
            from,
            to,
            blocks: blocks.into_iter().map(|(first, ids)| block_list(first, ids)).collect(),
        };
        let chunks = chunks.into_iter().map(chunk).collect();
        self.send(&ToHost::Prefill(PrefillHook::Scheduled { step: StepId(step), chunks }))
    }

    fn preempted(&mut self, request: String) -> PyResult<()> {
        self.send(&ToHost::Prefill(PrefillHook::Preempted { request: request.into() }))
    }

    fn allocated(&mut self, request: String, computed: u32, blocks: Vec<Vec<u32>>) -> PyResult<()> {
        let blocks = blocks.into_iter().map(|ids| block_list(0, ids)).collect();
        let request = request.into();
        self.send(&ToHost::Decode(DecodeHook::Allocated { request, computed, blocks }))
    }

    fn finished(&mut self, request: String, reason: &str) -> PyResult<()> {
        let reason = match reason {
            "length" => FinishReason::Length,
            "stop" => FinishReason::Stop,
            "abort" => FinishReason::Aborted,
            _ => FinishReason::Error,
        };
        let request = request.into();
        self.send(&match self.role {
            Role::Prefill => ToHost::Prefill(PrefillHook::Finished { request, reason }),
            Role::Decode => ToHost::Decode(DecodeHook::Finished { request, reason }),
        })
    }

    fn layers(&mut self, step: u64, layers: u16) -> PyResult<()> {
        self.send(&ToHost::Layers { step: StepId(step), layers })
    }

    /// Ends the connection; the host gives up the engine.
    fn close(&self) {
        self.line.close();
    }

    /// What the host said since the last time.
    fn poll(&mut self) -> PyResult<Vec<PyLinkEvent>> {
        self.line.poll(&mut self.heard).map_err(gone)?;
        Ok(self.events())
    }

    /// The same, after waiting for something, at most so long.
    fn wait(&mut self, py: Python<'_>, seconds: f64) -> PyResult<Vec<PyLinkEvent>> {
        let (line, heard) = (&mut self.line, &mut self.heard);
        let waited = py.detach(|| line.wait(Duration::from_secs_f64(seconds), heard));
        match waited {
            Err(why) if why.kind() != io::ErrorKind::TimedOut => Err(gone(why)),
            _ => Ok(self.events()),
        }
    }

    /// Transfers that ended, and blocks held and in quarantine if they changed: what `poll` and
    /// `wait` heard since the last time; none if that was nothing.
    fn stats(&mut self) -> Option<(Vec<EndedTuple>, Option<KeptBlocks>)> {
        if self.ended.is_empty() && self.kept.is_none() {
            return None;
        }
        Some((std::mem::take(&mut self.ended), self.kept.take()))
    }

    /// `kv_transfer_params` that tell why the transfer of a request failed, in JSON, if it did;
    /// once.
    fn told(&mut self, request: String) -> Option<String> {
        self.failure_params.remove(&RequestId::from(request))
    }

    /// `kv_transfer_params` that a prefill answers a request with that came with `params`, in JSON.
    fn answer(&self, request: &str, params: &str, blocks: Vec<Vec<u32>>) -> PyResult<String> {
        let Some(offer) = &self.offer else {
            return Err(PyValueError::new_err("the host does not serve this engine yet"));
        };
        answer_params(offer, (request, params), blocks).map_err(PyValueError::new_err)
    }
}

/// Reads what the user set: path of the host's socket (empty if it was not given), whether the host
/// is to be started, whether the KV cache is to lie in a memory file, whether the transfer actors
/// are in the workers, how many seconds the start may take, whether the KV of what drafts tokens is
/// handed over, and whether KV is verified.
#[pyfunction]
pub(crate) fn settings(json: &str) -> PyResult<(String, bool, bool, bool, f64, bool)> {
    let settings = ConnectorSettings::read(json).map_err(PyValueError::new_err)?;
    // MoRI takes memory where it is.
    let in_file =
        settings.kv_memory == KvMemory::File && settings.backend() == TransferBackend::Host;
    let in_worker = settings.transfer() == TransferPlacement::Worker;
    let (spawns, start) = (settings.host == HostStart::Spawn, settings.start_timeout());
    let drafts = settings.draft_kv;
    Ok((settings.socket, spawns, in_file, in_worker, start.as_secs_f64(), drafts))
}

/// Layers in the order in which they are counted for the host, see `Link.layers`.
#[pyfunction]
pub(crate) fn layer_order(names: Vec<String>) -> Vec<String> {
    let names = numbered_layers(names.into_iter().map(Into::into));
    names.iter().map(ToString::to_string).collect()
}

/// Raises ValueError if others reach the address and there is no secret; with `ports` also if a port
/// that was given cannot be listened at, or the address is not this machine's. Where the host is not
/// started by the connector, or is there, nothing is tried.
#[pyfunction]
pub(crate) fn check_address(py: Python<'_>, json: &str, ports: bool) -> PyResult<()> {
    let settings = ConnectorSettings::read(json).map_err(PyValueError::new_err)?;
    py.detach(|| settings.try_listen(ports)).map_err(PyValueError::new_err)
}

/// Who is answered at the ports of an engine: `loopback`, `secret` or `insecure`, and whether peers that
/// speak MoRIIO are. None where the connector does not start the host, which knows it.
#[pyfunction]
pub(crate) fn answered(json: &str) -> PyResult<Option<(&'static str, bool)>> {
    let settings = ConnectorSettings::read(json).map_err(PyValueError::new_err)?;
    settings.answered().map_err(PyValueError::new_err)
}

/// Makes the folder for the sockets of this user unless it is there; raises PermissionError if what
/// is there is not this user's alone.
#[pyfunction]
pub(crate) fn socket_folder(path: PathBuf) -> PyResult<()> {
    Ok(kvferry::sidecar::prepare_socket_folder(&path)?)
}

/// Raises ValueError if no host of this user could listen at the path.
#[pyfunction]
pub(crate) fn check_socket(path: PathBuf) -> PyResult<()> {
    kvferry::sidecar::try_socket(&path).map_err(PyValueError::new_err)
}

/// Runs `kvferry` with these arguments until it ends; the exit code.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, args: Vec<String>) -> PyResult<u8> {
    let python: OsString = py.import("sys")?.getattr("executable")?.extract()?;
    // Excludes the working directory from imports.
    let safe = (py.version_info() >= (3, 11)).then(|| "-P".into());
    kvferry::interpreted_by(
        std::iter::once(python).chain(safe).chain(["-m".into(), "kvferry".into()]),
    );
    let args = std::iter::once("kvferry".to_string()).chain(args);
    Ok(py.detach(|| kvferry::main(args.map(Into::into))))
}
