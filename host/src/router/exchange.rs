//! A client's request from its arrival to the beginning of its answer: its id, its metrics, and its
//! log line.

use super::connections::ClientConnection;
use super::error::HttpError;
use super::handler::RequestHandler;
use super::headers::ClientRequestId;
use super::leg::REQUEST_ID;
use super::metrics::{Counted, RequestLabels};
use axum::response::{IntoResponse, Response};
use hyper::header::{CONNECTION, HeaderMap, HeaderValue};
use hyper::http::Extensions;
use kvferry_engine::source::PeerSource;
use rand::distr::{Alphanumeric, SampleString};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A request that has no answer yet. Dropped if the client disconnects.
pub(crate) struct ClientExchange<'a> {
    handler: &'a RequestHandler,
    /// The path, as in the table of paths.
    path: &'static str,
    pub(crate) id: ClientRequestId,
    start: Instant,
    in_flight: Counted<'a>,
}

impl<'a> ClientExchange<'a> {
    /// Begins the exchange; an id made by the router begins with `prefix`.
    pub(crate) fn begin(
        handler: &'a RequestHandler,
        path: &'static str,
        headers: &HeaderMap,
        prefix: &str,
    ) -> ClientExchange<'a> {
        let id = ClientRequestId::of(headers, || {
            let mut id = prefix.to_owned();
            Alphanumeric.append_string(&mut rand::rng(), &mut id, 24);
            id
        });
        let in_flight = Counted::begin(&handler.metrics.in_flight);
        ClientExchange { handler, path, id, start: Instant::now(), in_flight }
    }

    /// The answer in the form in which the client gets it.
    pub(crate) fn finish(self, answer: Result<Response, HttpError>) -> Response {
        let ClientExchange { handler, path, id, start, in_flight } = self;
        let mut response = answer.unwrap_or_else(IntoResponse::into_response);
        drop(in_flight);
        let (status, elapsed) = (response.status().as_u16(), start.elapsed());
        handler.metrics.first_byte.observe(elapsed.as_secs_f64());
        handler.metrics.requests.get_or_create(&RequestLabels { path, code: status }).inc();
        let ms = elapsed.as_millis() as u64;
        tracing::debug!(request = id.as_str(), path, status, ms, "request answered");
        response.headers_mut().insert(REQUEST_ID, id.header());
        if handler.is_draining.load(Ordering::Relaxed) {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// The connection of a request, and the source whose share of limits it uses.
pub(crate) fn source_of(extensions: &Extensions) -> (Option<&Arc<ClientConnection>>, PeerSource) {
    let connection = extensions.get::<Arc<ClientConnection>>();
    let source =
        connection.map_or(PeerSource::new(Ipv4Addr::UNSPECIFIED.into()), |it| it.account());
    (connection, source)
}
