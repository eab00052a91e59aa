//! The way of spans to the collector.

use super::{FLUSH, SpanCounters};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Request, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry::Context;
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::SpanExporter as OtlpExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Span, SpanData, SpanExporter, SpanProcessor,
};
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// Longest answer of a collector that is read, in bytes.
const ANSWER_MAX: usize = 64 << 10;

/// The SDK's queue and thread, in front of which spans are counted that find no room.
#[derive(Debug)]
pub(super) struct BoundedProcessor {
    batches: BatchSpanProcessor,
    room: usize,
    /// Spans that were taken and have neither been exported nor lost.
    pending: Arc<AtomicUsize>,
    counters: SpanCounters,
}

impl BoundedProcessor {
    /// A queue with `room` for so many spans.
    pub(super) fn new(
        mut exporter: CountedExporter,
        room: usize,
        counters: SpanCounters,
    ) -> BoundedProcessor {
        let pending = Arc::<AtomicUsize>::default();
        exporter.pending = pending.clone();
        // What the SDK drops by itself it does not count for others: its queue never is full.
        let config = BatchConfigBuilder::default().with_max_queue_size(room).build();
        let batches = BatchSpanProcessor::builder(exporter).with_batch_config(config).build();
        BoundedProcessor { batches, room, pending, counters }
    }
}

impl SpanProcessor for BoundedProcessor {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if self.pending.fetch_add(1, Ordering::Relaxed) >= self.room {
            self.pending.fetch_sub(1, Ordering::Relaxed);
            self.counters.dropped("queue_full", 1);
            return;
        }
        self.batches.on_end(span);
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.batches.force_flush()
    }

    /// However it ends: the provider does it with a time of its own when it is dropped.
    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.batches.shutdown_with_timeout(timeout.min(FLUSH))
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.batches.set_resource(resource);
    }
}

/// An exporter that counts what becomes of spans.
#[derive(Debug)]
pub(super) struct CountedExporter {
    otlp: OtlpExporter,
    /// Runs in the thread of the queue, while a batch is sent.
    runtime: Runtime,
    pending: Arc<AtomicUsize>,
    counters: SpanCounters,
    /// The last batch was not taken, and the log says so.
    is_failing: AtomicBool,
}

impl CountedExporter {
    /// # Errors
    /// The system gives no descriptors for a runtime.
    pub(super) fn new(otlp: OtlpExporter, counters: SpanCounters) -> io::Result<CountedExporter> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let (pending, is_failing) = Default::default();
        Ok(CountedExporter { otlp, runtime, pending, counters, is_failing })
    }
}

impl SpanExporter for CountedExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        // The SDK polls this in a thread of its own, where nothing else runs.
        let exported = self.runtime.block_on(self.otlp.export(batch));
        self.pending.fetch_sub(spans, Ordering::Relaxed);
        let failed_before = self.is_failing.swap(exported.is_err(), Ordering::Relaxed);
        match &exported {
            Ok(()) => _ = self.counters.exported.inc_by(spans as u64),
            Err(why) => {
                self.counters.dropped("not_exported", spans);
                if !failed_before {
                    tracing::warn!(%why, "the collector does not take spans; they are lost until it does");
                }
            }
        }
        exported
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.otlp.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.otlp.set_resource(resource);
    }
}

/// Posts to a collector.
#[derive(Debug)]
pub(super) struct CollectorClient {
    client: Client<HttpConnector, Full<Bytes>>,
    /// Time for an answer.
    patience: Duration,
}

impl CollectorClient {
    pub(super) fn new(patience: Duration) -> CollectorClient {
        let client = Client::builder(TokioExecutor::new()).build_http();
        CollectorClient { client, patience }
    }

    async fn post(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (head, body) = self.client.request(request.map(Full::new)).await?.into_parts();
        let body = Limited::new(body, ANSWER_MAX).collect().await?.to_bytes();
        Ok(Response::from_parts(head, body))
    }
}

impl HttpClient for CollectorClient {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move { timeout(self.patience, self.post(request)).await? })
    }
}
