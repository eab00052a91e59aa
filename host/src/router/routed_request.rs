//! A request of a client, and the requests of its legs.

use super::api::GenerationRequest;
use super::body_budget::BodyBytes;
use super::leg::{self, DP_RANK, HttpLegRequest, JSON, REQUEST_ID};
use super::params::{self, TransferUid};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{InstancePair, LegBody};
use kvferry_engine::fabric::Endpoint;
use kvferry_trust::FleetProof;

#[derive(Debug)]
pub(crate) struct RoutedRequest {
    pub(crate) asked: GenerationRequest,
    /// Headers that all legs carry.
    pub(crate) headers: HeaderMap,
    /// The memory of its body, which is kept for legs that are sent again.
    _held: BodyBytes,
}

impl RoutedRequest {
    /// A job whose legs carry these headers of the client, and this authorization.
    pub(crate) fn new(
        (asked, held): (GenerationRequest, BodyBytes),
        client: &HeaderMap,
        own: Option<&HeaderValue>,
    ) -> RoutedRequest {
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(CONTENT_TYPE, JSON);
        if let Some(key) = own.or_else(|| client.get(AUTHORIZATION)) {
            headers.insert(AUTHORIZATION, key.clone());
        }
        for name in leg::TRACE {
            if let Some(value) = client.get(&name) {
                headers.insert(name, value.clone());
            }
        }
        RoutedRequest { asked, headers, _held: held }
    }
}

/// True if the instance computes the prompt itself: it is told of no transfer.
pub(super) fn is_alone(body: &LegBody) -> bool {
    matches!(body, LegBody::Decode { transfer, .. } if transfer.is_alone())
}

/// Who takes the leg.
pub(super) fn role_of(body: &LegBody) -> Role {
    match body {
        LegBody::Prefill { .. } => Role::Prefill,
        LegBody::Decode { .. } => Role::Decode,
    }
}

/// The request of a leg of one part.
///
/// # Errors
/// A prefill answer that is no object, or an address that no instance may have registered with.
pub(super) fn order(
    job: &RoutedRequest,
    part: usize,
    http: &Endpoint,
    (pair, body): (&InstancePair, &LegBody),
    (unique, proof): (TransferUid, &FleetProof),
) -> Result<HttpLegRequest, String> {
    let mut headers = job.headers.clone();
    let id = match is_alone(body) {
        true => unique.request_id_alone(),
        false => unique.request_id(pair)?,
    };
    headers.insert(REQUEST_ID, HeaderValue::try_from(id).map_err(|why| why.to_string())?);
    let to = match body {
        LegBody::Prefill { .. } => &pair.prefill,
        LegBody::Decode { .. } => &pair.decode,
    };
    if to.dp_size > 1 {
        headers.insert(DP_RANK, to.dp_rank.into());
    }
    let transfer = params::write(body, pair, unique, proof)?;
    let prefill = role_of(body) == Role::Prefill;
    let stream = job.asked.stream && !prefill;
    let body = job.asked.leg(part, prefill, transfer.as_deref()).into();
    Ok(HttpLegRequest { to: http.clone(), path: job.asked.api.path(), headers, body, stream })
}
