//! Spans of OpenTelemetry: what a request, its legs and its transfers took, sent to a collector by
//! OTLP over HTTP. There are none unless a collector is named.
//!
//! Nothing waits for a collector: spans that end wait in a queue of bounded length, a thread of
//! their own sends them, and what finds no room or is not taken is counted.

mod export;
mod settings;
mod trace_context;

pub(crate) use settings::SpanArgs;
pub(crate) use trace_context::{PARENT_KEY, insert_context, parent_in, parent_of, traceparent};

use export::{BoundedProcessor, CountedExporter};
use opentelemetry::trace::{
    Span as _, SpanContext, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider, Span};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use settings::SpanSettings;
use std::time::{Duration, SystemTime};

/// Time in which what is queued is sent when the process ends.
const FLUSH: Duration = Duration::from_secs(2);

/// Bytes of what others say that a span keeps.
const TEXT_MAX: usize = 256;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DropLabels {
    cause: &'static str,
}

/// What became of spans that ended; clones share it.
#[derive(Clone, Debug, Default)]
struct SpanCounters {
    exported: Counter,
    dropped: Family<DropLabels, Counter>,
}

impl SpanCounters {
    fn dropped(&self, cause: &'static str, spans: usize) {
        self.dropped.get_or_create(&DropLabels { cause }).inc_by(spans as u64);
    }
}

/// Begins spans, which go to the collector when they end; clones share the queue.
#[derive(Clone, Debug)]
pub(crate) struct SpanTracer {
    tracer: SdkTracer,
    provider: SdkTracerProvider,
    counters: SpanCounters,
}

impl SpanTracer {
    fn start(settings: SpanSettings) -> std::io::Result<SpanTracer> {
        let SpanSettings { exporter, resource, queue } = settings;
        let counters = SpanCounters::default();
        let exporter = CountedExporter::new(exporter, counters.clone())?;
        let processor = BoundedProcessor::new(exporter, queue, counters.clone());
        let provider =
            SdkTracerProvider::builder().with_resource(resource).with_span_processor(processor);
        let provider = provider.build();
        Ok(SpanTracer { tracer: provider.tracer("kvferry"), provider, counters })
    }

    /// Adds what is counted of spans to the metrics of a process.
    fn register(&self, registry: &mut Registry) {
        let about = "Spans that the collector took";
        registry.register("spans_exported", about, self.counters.exported.clone());
        let about = "Spans that were lost, by cause";
        registry.register("spans_dropped", about, self.counters.dropped.clone());
    }

    /// Begins a span below `parent`, or one without a parent.
    pub(crate) fn begin(
        &self,
        (kind, name): (SpanKind, &'static str),
        parent: Option<&SpanContext>,
        attributes: impl FnOnce() -> Vec<KeyValue>,
    ) -> OpenSpan {
        self.begin_at((kind, name, SystemTime::now()), parent, attributes)
    }

    /// The same of what began earlier. The attributes are made only if the span is sampled.
    pub(crate) fn begin_at(
        &self,
        (kind, name, at): (SpanKind, &'static str, SystemTime),
        parent: Option<&SpanContext>,
        attributes: impl FnOnce() -> Vec<KeyValue>,
    ) -> OpenSpan {
        let mut above = Context::new();
        if let Some(parent) = parent {
            above = above.with_remote_span_context(parent.clone());
        }
        let span = self.tracer.span_builder(name).with_kind(kind).with_start_time(at);
        let mut span = span.start_with_context(&self.tracer, &above);
        if span.is_recording() {
            span.set_attributes(attributes());
        }
        OpenSpan { span, is_told: false }
    }

    /// Sends what is queued, for [`FLUSH`] at most. Spans that end later are lost.
    pub(crate) fn finish(&self) {
        if self.provider.shutdown().is_err() {
            tracing::warn!(within = ?FLUSH, "the collector did not take the last spans in time");
        }
    }
}

/// A span that has not ended. If it is dropped nobody waits for its end any more: it is cancelled.
#[derive(Debug)]
pub(crate) struct OpenSpan {
    span: Span,
    is_told: bool,
}

impl OpenSpan {
    /// What spans below it name as their parent.
    pub(crate) fn context(&self) -> &SpanContext {
        self.span.span_context()
    }

    pub(crate) fn set(&mut self, key: &'static str, value: impl Into<Value>) {
        self.span.set_attribute(KeyValue::new(key, value));
    }

    /// Notes that something happens now.
    pub(crate) fn event(&mut self, name: &'static str) {
        self.event_at(name, SystemTime::now());
    }

    pub(crate) fn event_at(&mut self, name: &'static str, at: SystemTime) {
        self.span.add_event_with_timestamp(name, at, Vec::new());
    }

    /// Ends it.
    pub(crate) fn end(mut self, outcome: &'static str) {
        self.tell(outcome);
    }

    /// Ends it with an error: what kind, and in words.
    pub(crate) fn fail(mut self, kind: impl Into<Value>, why: &str) {
        self.set("error.type", kind);
        self.span.set_status(Status::error(bounded(why).to_owned()));
        self.tell("failed");
    }

    fn tell(&mut self, outcome: &'static str) {
        self.set("kvferry.outcome", outcome);
        self.is_told = true;
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if !self.is_told {
            self.tell("cancelled");
        }
    }
}

/// The begin of a text that a span may keep.
pub(crate) fn bounded(text: &str) -> &str {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
