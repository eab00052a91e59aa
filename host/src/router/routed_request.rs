//! A request of a client, and the requests of its legs.

use super::api::GenerationRequest;
use super::headers::ClientRequestId;
use super::leg::{DP_RANK, HttpLegRequest, JSON, MadeLeg, REQUEST_ID};
use super::memory_budget::MemoryCharge;
use super::params::{self, TransferUid};
use super::request_spans::LegTracer;
use crate::spans::insert_context;
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use kvferry_engine::core::ids::TransferKey;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::router::{InstancePair, LegBody};
use kvferry_engine::fabric::Endpoint;
use kvferry_trust::FleetProof;
use opentelemetry::trace::SpanContext;

#[derive(Debug)]
pub(crate) struct RoutedRequest {
    pub(crate) asked: GenerationRequest,
    /// Headers that all legs carry.
    pub(crate) headers: HeaderMap,
    /// The client's id, which the ids of its legs contain.
    pub(crate) id: ClientRequestId,
    /// Begins the spans of its legs, if it is traced.
    pub(crate) spans: Option<LegTracer>,
    /// Charge for its body, which is kept for retries.
    pub(crate) memory: MemoryCharge,
}

impl RoutedRequest {
    /// A job whose legs carry these headers.
    pub(crate) fn new(
        (asked, memory): (GenerationRequest, MemoryCharge),
        mut headers: HeaderMap,
        id: ClientRequestId,
        spans: Option<LegTracer>,
    ) -> RoutedRequest {
        headers.insert(CONTENT_TYPE, JSON);
        RoutedRequest { asked, headers, id, spans, memory }
    }
}

/// True if the instance computes the prompt itself: it is told of no transfer.
pub(super) fn is_alone(body: &LegBody) -> bool {
    matches!(body, LegBody::Decode { transfer, .. } if transfer.is_alone())
}

/// What the core calls the transfer of a leg, and who moves its bytes.
pub(super) fn transfer_of(body: &LegBody) -> (&TransferKey, Mode) {
    match body {
        LegBody::Prefill { transfer, .. } => (&transfer.key, transfer.mode),
        LegBody::Decode { transfer, .. } => (&transfer.key, transfer.mode),
    }
}

/// The request of a leg of one part, which names `span` as the one that its transfer is part of.
///
/// # Errors
/// A prefill answer that is no object, or an address that no instance may have registered with.
pub(super) fn order(
    job: &RoutedRequest,
    part: usize,
    http: &Endpoint,
    (pair, body): (&InstancePair, &LegBody),
    (unique, proof, span): (TransferUid, &FleetProof, Option<&SpanContext>),
) -> MadeLeg {
    let mut headers = job.headers.clone();
    let found = if is_alone(body) { None } else { unique.request_id_of(pair)? };
    // Clients must not see the addresses in it.
    let inner_id = found.as_ref().map(|id| id.0.clone());
    let id = match found {
        Some(id) => HeaderValue::try_from(&*id.0),
        None => HeaderValue::try_from(unique.request_id(job.id.as_str())),
    };
    headers.insert(REQUEST_ID, id.map_err(|why| why.to_string())?);
    let to = match body {
        LegBody::Prefill { .. } => &pair.prefill,
        LegBody::Decode { .. } => &pair.decode,
    };
    if to.dp_size > 1 {
        headers.insert(DP_RANK, to.dp_rank.into());
    }
    let mut transfer = params::write(body, pair, unique, proof)?;
    if let Some(span) = span {
        insert_context(&mut headers, span);
        transfer = transfer.map(|params| params::with_span(params, span)).transpose()?;
    }
    let role = body.role();
    let prefill = role == Role::Prefill;
    let stream = job.asked.stream && !prefill;
    let body = job.asked.leg(part, prefill, transfer);
    let (path, memory) = (job.asked.api.path(), job.memory.another());
    let to = http.clone();
    Ok(Box::new(HttpLegRequest { to, role, path, headers, body, inner_id, memory, stream }))
}
