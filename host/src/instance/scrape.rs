//! Metrics as Prometheus reads them.

use axum::response::{IntoResponse, Response};
use hyper::header::CONTENT_TYPE;
use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

const KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The page that is scraped.
pub(crate) fn page(registry: &Registry) -> Response {
    answer(encode(registry))
}

/// What the page says.
pub(crate) fn encode(registry: &Registry) -> String {
    let mut page = String::new();
    // A String takes everything.
    let _ = text::encode(&mut page, registry);
    page
}

/// The answer with a page.
pub(crate) fn answer(page: String) -> Response {
    ([(CONTENT_TYPE, KIND)], page).into_response()
}
