//! Client requests and legs in flight, as the adapter of the router core keeps them.

use super::error::HttpError;
use super::http_adapter::ClientEvent;
use super::instance_times::InstanceTimes;
use super::leg::LegError;
use super::memory_budget::MemoryCharge;
use super::params::TransferUid;
use super::routed_request::RoutedRequest;
use crate::spans::OpenSpan;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::{ClientId, EngineId, TransferId, TransferKey};
use kvferry_engine::core::message::Role;
use kvferry_engine::fabric::Endpoint;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

/// A client's request that has not ended.
pub(super) struct ClientState {
    pub(super) job: Arc<RoutedRequest>,
    pub(super) arrived: Instant,
    pub(super) events: mpsc::Sender<ClientEvent>,
    pub(super) parts: Vec<PartState>,
    /// What it is told if the legs that were sent last come to nothing.
    pub(super) fault: Option<HttpError>,
}

/// One transfer of a request.
#[derive(Debug, Default)]
pub(super) struct PartState {
    /// Ids that the legs of its last attempt share.
    pub(super) unique: Option<(TransferId, TransferUid)>,
    /// Attempts so far.
    pub(super) attempts: u32,
    /// Prompt tokens that the prefill had cached.
    pub(super) cached: Option<u64>,
    /// Time at which the prefill of its last attempt answered.
    pub(super) prefilled: Option<Instant>,
    /// Memory of the `kv_transfer_params` that this prefill answered.
    pub(super) params_memory: Option<MemoryCharge>,
}

/// A leg in flight.
pub(super) struct InFlightLeg {
    pub(super) client: ClientId,
    pub(super) part: usize,
    pub(super) role: Role,
    pub(super) engine: EngineId,
    /// The request id if it names addresses of instances.
    pub(super) inner_id: Option<Arc<str>>,
    pub(super) http: Endpoint,
    /// True if the decode reads KV by the prefill's answer.
    pub(super) wants_params: bool,
    /// True if the instance reports failed loads of KV.
    pub(super) reports_failures: bool,
    /// What the host of its decode calls its transfer, if that host tells why KV does not come.
    pub(super) transfer: Option<(TransferKey, u32)>,
    /// Why its KV did not come, in the words of that host.
    pub(super) cause: Option<Failure>,
    /// The leg has failed and waits for that word.
    pub(super) uncaused: Option<Box<LegError>>,
    pub(super) sent: Instant,
    pub(super) times: Arc<InstanceTimes>,
    pub(super) task: JoinHandle<()>,
    /// Cuts the stream when it is dropped.
    pub(super) cut: Option<oneshot::Sender<()>>,
    pub(super) span: Option<OpenSpan>,
}
