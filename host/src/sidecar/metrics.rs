//! What a host counts, in the format of Prometheus, and the endpoint that shows it.

use super::record::{TransferOutcome, TransferRecord, TransferSummary};
use super::settings::{TransferBackend, TransferPlacement};
use crate::instance::{
    CounterSource, CutCollector, FAILURES_REMEMBERED, InputCollector, InstanceTrust, PATHS,
    PlaneCollector, PlaneCounters, TransferLog, metrics_answer, metrics_text,
};
use crate::process::PatientListener;
use crate::router::guarded;
use crate::spans::SpanArgs;
use actix::{Message, Recipient};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use kvferry_engine::core::decode::VerifyCounters;
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::message::{Mode, Role, RouterEvent};
use kvferry_engine::core::time::Nanos;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::net::TcpListener;

/// Asks an actor for the page.
#[derive(Message)]
#[rtype(result = "String")]
pub(super) struct Scrape;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TransferLabels {
    role: String,
    mode: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DialectLabels {
    dialect: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FailureLabels {
    cause: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InfoLabels {
    backend: String,
    transfer: String,
    memory: &'static str,
    version: &'static str,
}

/// All metrics of an engine that is served.
#[derive(Debug)]
pub(super) struct SidecarMetrics {
    registry: Registry,
    transfers: Family<TransferLabels, Counter>,
    dialects: Family<DialectLabels, Counter>,
    failures: Family<FailureLabels, Counter>,
    duration: Histogram,
    queue: Histogram,
    open: Gauge,
    held: Gauge,
    quarantined: Gauge,
    remembered: Gauge,
    violations: Counter,
    verified: Counter,
    mismatches: Counter,
    registered: Gauge,
    side: (Role, Mode),
    tallies: Vec<CounterSource>,
    /// Bytes that the planes had moved when the last transfer ended, by path.
    moved: [u64; PATHS.len()],
}

impl SidecarMetrics {
    /// Of an engine whose ranks move bytes by the planes of these tallies; what moves them, where
    /// its transfer actors are, and how they reach the KV; and who is answered.
    pub(super) fn new(
        role: Role,
        mode: Mode,
        (backend, transfer, memory): (TransferBackend, TransferPlacement, &'static str),
        (tallies, trust): (Vec<CounterSource>, InstanceTrust),
    ) -> SidecarMetrics {
        // From 0.1 ms up to 100 s.
        let seconds = || Histogram::new(exponential_buckets(1e-4, 2.0, 21));
        let mut metrics = SidecarMetrics {
            registry: Registry::with_prefix("kvferry"),
            transfers: Family::default(),
            dialects: Family::default(),
            failures: Family::default(),
            duration: seconds(),
            queue: seconds(),
            open: Gauge::default(),
            held: Gauge::default(),
            quarantined: Gauge::default(),
            remembered: Gauge::default(),
            violations: Counter::default(),
            verified: Counter::default(),
            mismatches: Counter::default(),
            registered: Gauge::default(),
            side: (role, mode),
            moved: [0; PATHS.len()],
            tallies,
        };
        metrics.register(backend, transfer, memory);
        trust.register(&mut metrics.registry);
        metrics
    }

    fn register(
        &mut self,
        backend: TransferBackend,
        transfer: TransferPlacement,
        memory: &'static str,
    ) {
        let all = &mut self.registry;
        all.register("transfers", "Transfers that ended", self.transfers.clone());
        let about = "Transfers of a decode that were done, by what it spoke with the prefill";
        all.register("transfers_spoken", about, self.dialects.clone());
        let about = "Transfers that failed, by cause";
        all.register("transfer_failures", about, self.failures.clone());
        let about = "From the begin of a transfer to its last byte";
        all.register("transfer_duration_seconds", about, self.duration.clone());
        let about = "From the arrival of a request to the begin of its transfer";
        all.register("transfer_queue_seconds", about, self.queue.clone());
        all.register("transfers_open", "Transfers that have not ended", self.open.clone());
        let about = "KV blocks of a prefill that are kept for its transfers";
        all.register("blocks_held", about, self.held.clone());
        let about = "KV blocks of a decode that bytes of a failed transfer may still land in";
        all.register("blocks_quarantined", about, self.quarantined.clone());
        all.register(FAILURES_REMEMBERED.0, FAILURES_REMEMBERED.1, self.remembered.clone());
        let about = "Frames that broke the protocol";
        all.register("violations", about, self.violations.clone());
        let about = "Blocks of a layer, of a rank, that arrived as the prefill had them";
        all.register("kv_blocks_verified", about, self.verified.clone());
        let about = "Transfers whose KV did not arrive as it was sent";
        all.register("kv_mismatches", about, self.mismatches.clone());
        let about = "1 if the router can be reached and was sent a registration";
        all.register("router_registered", about, self.registered.clone());
        all.register_collector(Box::new(PlaneCollector::new("transfer", self.tallies.clone())));
        all.register_collector(Box::new(InputCollector));
        all.register_collector(Box::new(CutCollector));
        let info: Family<InfoLabels, Gauge> = Family::default();
        let (backend, transfer) = (backend.to_string(), transfer.to_string());
        let version = env!("CARGO_PKG_VERSION");
        info.get_or_create(&InfoLabels { backend, transfer, memory, version }).set(1);
        all.register("info", "What moves the bytes, and how it reaches the KV", info);
    }

    /// Has the transfers traced, if a collector is named. The variables by which it is are the
    /// server's, too: with some that cannot be used there are no spans, and the engine is served.
    pub(super) fn traced(&mut self, transfers: TransferLog, engine: &EngineId) -> TransferLog {
        let args = SpanArgs::default();
        match args.tracer("kvferry-host", &engine.to_string(), &mut self.registry) {
            Ok(Some(tracer)) => transfers.with_spans(tracer),
            Ok(None) => transfers,
            Err(why) => {
                tracing::warn!(%why, "transfers have no spans");
                transfers
            }
        }
    }

    /// Takes what becomes of the registrations.
    pub(super) fn router(&self, said: &RouterEvent) {
        self.registered.set(i64::from(matches!(said, RouterEvent::Registered { .. })));
    }

    /// Counts a transfer, if it ended; what its engine is told.
    pub(super) fn ended(&mut self, record: &TransferRecord) -> Option<TransferSummary> {
        let (_, outcome) = record.ended.as_ref()?;
        self.count(record, outcome);
        Some(TransferSummary {
            outcome: outcome.clone(),
            queued: record.queued(),
            duration: record.duration(),
            bytes: self.moved(),
            dialect: record.dialect,
        })
    }

    fn count(&self, record: &TransferRecord, outcome: &TransferOutcome) {
        let (role, mode) = (self.side.0.to_string(), self.side.1.to_string());
        self.transfers.get_or_create(&TransferLabels { role, mode, outcome: outcome.name() }).inc();
        if let (TransferOutcome::Done, Some(dialect)) = (outcome, record.dialect) {
            self.dialects.get_or_create(&DialectLabels { dialect: dialect.name() }).inc();
        }
        if let TransferOutcome::Failed { cause, .. } = outcome {
            self.failures.get_or_create(&FailureLabels { cause: cause.to_string() }).inc();
        }
        let observe = |into: &Histogram, span: Option<Nanos>| {
            if let Some(span) = span {
                into.observe(span.as_secs_f64());
            }
        };
        observe(&self.queue, record.queued());
        observe(&self.duration, record.duration());
    }

    /// Bytes that the planes moved since the last call, by path. The first of a path are logged, so
    /// that a slow one is seen.
    fn moved(&mut self) -> Vec<(Arc<str>, u64)> {
        let mut sums = [0; PATHS.len()];
        for all in self.tallies.iter().map(CounterSource::read) {
            for (index, sum) in sums.iter_mut().enumerate() {
                *sum += all.initiated[index].bytes + all.served[index].bytes;
            }
        }
        let mut moved = Vec::new();
        for ((path, sum), before) in PATHS.into_iter().zip(sums).zip(&mut self.moved) {
            if *before == 0 && sum > 0 {
                tracing::info!(%path, "KV takes this path");
            }
            if sum > *before {
                moved.push((path.into(), sum - *before));
                *before = sum;
            }
        }
        moved
    }

    /// What the plane of a rank in another process did so far.
    pub(super) fn set_rank_counters(&self, rank: u16, counters: PlaneCounters) {
        if let Some(tally) = self.tallies.get(usize::from(rank)) {
            tally.update(counters);
        }
    }

    pub(super) fn page(&self, open: usize, gauges: &Gauges, verified: VerifyCounters) -> String {
        self.open.set(open as i64);
        self.held.set(gauges.held.into());
        self.quarantined.set(gauges.quarantined.into());
        self.remembered.set(gauges.failures.into());
        let violations = u64::from(gauges.violations);
        self.violations.inner().store(violations, Ordering::Relaxed);
        self.verified.inner().store(verified.blocks, Ordering::Relaxed);
        self.mismatches.inner().store(verified.mismatches, Ordering::Relaxed);
        metrics_text(&self.registry)
    }
}

/// Listens for who scrapes the metrics, if anybody is to.
///
/// # Errors
/// The address that cannot be had, and why.
pub(super) async fn listen(address: Option<&str>) -> Result<Option<TcpListener>, String> {
    let Some(address) = address else { return Ok(None) };
    let fail = |why: std::io::Error| {
        format!("--metrics {address}: cannot listen: {why}; give another HOST:PORT, or port 0")
    };
    let listener = TcpListener::bind(address).await.map_err(fail)?;
    let at = listener.local_addr().map_err(fail)?;
    tracing::info!(metrics = %format_args!("http://{at}/metrics"), "serving metrics");
    Ok(Some(listener))
}

/// Serves the page for ever, if there is a listener.
pub(super) async fn serve(listener: Option<TcpListener>, asked: Recipient<Scrape>) {
    let Some(listener) = listener else { return pending().await };
    let app = axum::Router::new().route("/metrics", get(page)).with_state(asked);
    let served = match listener.local_addr() {
        Ok(at) => axum::serve(PatientListener::new(listener, "metrics"), guarded(app, at)).await,
        Err(why) => Err(why),
    };
    if let Err(why) = served {
        tracing::error!(%why, "metrics are not served any more");
    }
    pending().await
}

async fn page(State(asked): State<Recipient<Scrape>>) -> Response {
    match asked.send(Scrape).await {
        Ok(page) => metrics_answer(page),
        // The host is about to end.
        Err(_) => StatusCode::SERVICE_UNAVAILABLE.into_response(),
    }
}
