//! Spans of requests and of their legs.

use super::api::Api;
use super::error::HttpError;
use super::metrics::role_name;
use super::params::TransferUid;
use super::routed_request::{is_alone, transfer_of};
use crate::spans::{OpenSpan, SpanTracer, bounded, parent_of};
use hyper::StatusCode;
use hyper::header::HeaderMap;
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{InstancePair, LegBody, LegFailure};
use kvferry_engine::fabric::{Endpoint, unbracketed};
use opentelemetry::KeyValue;
use opentelemetry::trace::{SpanContext, SpanKind};
use std::borrow::Cow;

/// The attribute with the status of an answer.
const STATUS: &str = "http.response.status_code";

/// Begins the span of a request, below the one that its client names.
pub(super) fn begin(tracer: &SpanTracer, api: Api, headers: &HeaderMap, id: &str) -> OpenSpan {
    let attributes = || {
        vec![
            KeyValue::new("http.request.method", "POST"),
            KeyValue::new("http.route", api.path()),
            KeyValue::new("kvferry.request_id", bounded(id).to_owned()),
        ]
    };
    tracer.begin((SpanKind::Server, "request"), parent_of(headers).as_ref(), attributes)
}

/// Ends the span of a request by its answer.
pub(super) fn answered(mut span: OpenSpan, answer: Result<StatusCode, &HttpError>) {
    let status = answer.unwrap_or_else(|refusal| refusal.status);
    span.set(STATUS, i64::from(status.as_u16()));
    match answer {
        Err(refusal) if status.is_server_error() => refused(span, refusal),
        _ if status.is_success() => span.end("done"),
        _ => span.end("refused"),
    }
}

/// The answer of a request has begun, and its stream goes on.
pub(super) fn streaming(span: &mut OpenSpan, status: StatusCode) {
    span.set(STATUS, i64::from(status.as_u16()));
    span.event("first_token");
}

/// Ends the span of a request that failed.
pub(super) fn refused(span: OpenSpan, refusal: &HttpError) {
    span.fail(refusal.status.as_str().to_owned(), &refusal.message());
}

/// Begins the spans of the legs of one request.
#[derive(Debug)]
pub(crate) struct LegTracer {
    pub(super) tracer: SpanTracer,
    pub(super) request: SpanContext,
}

impl LegTracer {
    /// Begins the span of a leg to an engine, by what its transfer is called and in which attempt,
    /// from 1.
    pub(super) fn begin(
        &self,
        (engine, http): (&EngineId, &Endpoint),
        (pair, body): (&InstancePair, &LegBody),
        (unique, attempt): (TransferUid, u32),
    ) -> OpenSpan {
        let role = body.role();
        let name = match role {
            Role::Prefill => "prefill leg",
            Role::Decode => "decode leg",
        };
        let attributes = || {
            let (key, mode) = transfer_of(body);
            let (host, port) = http.0.rsplit_once(':').unwrap_or((&http.0, ""));
            let mut attributes = vec![
                KeyValue::new("http.request.method", "POST"),
                KeyValue::new("http.request.resend_count", i64::from(attempt.saturating_sub(1))),
                KeyValue::new("server.address", unbracketed(host).to_owned()),
                KeyValue::new("kvferry.engine", engine.to_string()),
                KeyValue::new("kvferry.role", role_name(role)),
                KeyValue::new("kvferry.mode", mode.to_string()),
            ];
            if let Ok(port) = port.parse::<u16>() {
                attributes.push(KeyValue::new("server.port", i64::from(port)));
            }
            if !is_alone(body) {
                let id = match pair.is_native() {
                    true => key.id.0.as_ref().to_owned(),
                    false => unique.transfer_id(),
                };
                attributes.push(KeyValue::new("kvferry.transfer_id", id));
            }
            attributes
        };
        self.tracer.begin((SpanKind::Client, name), Some(&self.request), attributes)
    }
}

/// Ends the span of a leg that failed.
pub(super) fn leg_failed(span: OpenSpan, failure: &LegFailure) {
    let kind: Cow<'static, str> = match failure {
        LegFailure::Connection => "connection".into(),
        LegFailure::Busy { .. } => "busy".into(),
        LegFailure::Instance(failure) => failure.kind().into(),
        LegFailure::Answer(status) => status.to_string().into(),
        LegFailure::Request(_) => "request".into(),
        LegFailure::Left(_) => "left".into(),
        _ => "other".into(),
    };
    span.fail(kind, &failure.to_string());
}
