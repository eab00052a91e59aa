//! What data planes count, and metrics in the format of Prometheus.

use crate::process::lock;
use axum::response::{IntoResponse, Response};
use hyper::header::CONTENT_TYPE;
use kvferry_engine::actors::input_counts;
use kvferry_fabric_host::{DataPath, PathCount};
use kvferry_fabric_mori::MoriBackend;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::{Arc, Mutex};

/// How bytes get from one process to another, of all planes.
pub const PATHS: [&str; 5] = [
    DataPath::SharedMemory.name(),
    DataPath::CrossMemory.name(),
    DataPath::Tcp.name(),
    MoriBackend::Rdma.name(),
    MoriBackend::Xgmi.name(),
];

/// What a plane did so far, by path in the order of [`PATHS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaneCounters {
    pub initiated: [PathCount; PATHS.len()],
    /// Writes of peers that landed here, where the plane knows of them.
    pub served: [PathCount; PATHS.len()],
    /// How often its backend had to be replaced; since version 7 of the local protocol.
    #[serde(default)]
    pub backend: BackendCounts,
}

/// What became of the backend of a plane over MoRI, which does not recover by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendCounts {
    /// Replacements that were begun.
    pub rebuilds: u64,
    /// Those after which peers had to connect anew.
    pub resets: u64,
    /// 1 while there is none because MoRI cannot be started.
    pub missing: u64,
    /// How often queue pairs of peers have ended in the backend that there is, which keeps them.
    pub dead_queue_pairs: u64,
}

/// Reads what a plane did so far, also after its end.
#[derive(Clone, Debug)]
pub(crate) enum PlaneMeter {
    Host(kvferry_fabric_host::HostCounterReader),
    /// Of each backend.
    Mori(Vec<kvferry_fabric_mori::MoriCounterReader>),
}

impl PlaneMeter {
    pub(crate) fn read(&self) -> PlaneCounters {
        let mut counters = PlaneCounters::default();
        match self {
            PlaneMeter::Host(meter) => {
                let read = meter.read();
                counters.initiated[..read.initiated.len()].copy_from_slice(&read.initiated);
                counters.served[..read.served.len()].copy_from_slice(&read.served);
            }
            PlaneMeter::Mori(meters) => {
                let mut resets = None;
                for meter in meters {
                    let read = meter.read();
                    let (operations, bytes) = (read.operations, read.bytes);
                    let at = PATHS.iter().position(|path| *path == meter.backend().name());
                    counters.initiated[at.expect("it is one of them")] =
                        PathCount { operations, bytes };
                    counters.backend.rebuilds += read.rebuilds;
                    counters.backend.missing |= read.without;
                    counters.backend.dead_queue_pairs += read.dead_pairs;
                    // A reset is of all backends.
                    resets = Some(resets.map_or(read.resets, |least| read.resets.min(least)));
                }
                counters.backend.resets = resets.unwrap_or_default();
            }
        }
        counters
    }
}

/// Where the counters of a data plane are read.
#[derive(Clone, Debug)]
pub(crate) enum CounterSource {
    /// The plane is in this process.
    Here(PlaneMeter),
    /// It is in another one, which told them.
    Reported(Arc<Mutex<PlaneCounters>>),
}

impl CounterSource {
    pub(crate) fn read(&self) -> PlaneCounters {
        match self {
            CounterSource::Here(meter) => meter.read(),
            CounterSource::Reported(told) => *lock(told),
        }
    }

    /// Takes what the process of the plane told.
    pub(crate) fn update(&self, counters: PlaneCounters) {
        if let CounterSource::Reported(told) = self {
            *lock(told) = counters;
        }
    }
}

/// The data planes of an instance, read when the page is scraped.
#[derive(Debug)]
pub(crate) struct PlaneCollector {
    prefix: &'static str,
    tallies: Vec<CounterSource>,
}

#[derive(Clone, Debug, EncodeLabelSet)]
struct PathLabels {
    side: &'static str,
    path: &'static str,
}

impl PlaneCollector {
    /// The names of the series begin with `prefix`.
    pub(crate) fn new(prefix: &'static str, tallies: Vec<CounterSource>) -> PlaneCollector {
        PlaneCollector { prefix, tallies }
    }

    fn encode_sum(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, about): (&str, &str),
        value: fn(&PathCount) -> u64,
    ) -> fmt::Result {
        let counters: Vec<_> = self.tallies.iter().map(CounterSource::read).collect();
        let name = format!("{}_{name}", self.prefix);
        let mut encoder = encoder.encode_descriptor(&name, about, None, MetricType::Counter)?;
        for (side, initiated) in [("initiated", true), ("served", false)] {
            for (index, path) in PATHS.into_iter().enumerate() {
                let counts = counters.iter().map(|all| match initiated {
                    true => &all.initiated[index],
                    false => &all.served[index],
                });
                let sum = ConstCounter::new(counts.map(value).sum::<u64>());
                sum.encode(encoder.encode_family(&PathLabels { side, path })?)?;
            }
        }
        Ok(())
    }
}

impl PlaneCollector {
    fn encode_backend(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, about): (&str, &str),
        kind: MetricType,
        value: fn(&BackendCounts) -> u64,
    ) -> fmt::Result {
        let name = format!("{}_{name}", self.prefix);
        let sum: u64 = self.tallies.iter().map(|tally| value(&tally.read().backend)).sum();
        let encoder = encoder.encode_descriptor(&name, about, None, kind)?;
        match kind {
            MetricType::Gauge => ConstGauge::new(sum as i64).encode(encoder),
            _ => ConstCounter::new(sum).encode(encoder),
        }
    }
}

impl Collector for PlaneCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let bytes = ("bytes", "Bytes moved, by side and path");
        self.encode_sum(&mut encoder, bytes, |count| count.bytes)?;
        let operations = ("operations", "Operations done, by side and path");
        self.encode_sum(&mut encoder, operations, |count| count.operations)?;
        let rebuilds = ("backend_rebuilds", "Replacements of MoRI's backend that were begun");
        self.encode_backend(&mut encoder, rebuilds, MetricType::Counter, |it| it.rebuilds)?;
        let resets = ("backend_resets", "Those after which peers had to connect anew");
        self.encode_backend(&mut encoder, resets, MetricType::Counter, |it| it.resets)?;
        let missing = ("backend_missing", "Ranks without a backend since MoRI cannot be started");
        self.encode_backend(&mut encoder, missing, MetricType::Gauge, |it| it.missing)?;
        let dead =
            ("backend_dead_queue_pairs", "Queue pairs of peers that have ended and MoRI keeps");
        self.encode_backend(&mut encoder, dead, MetricType::Gauge, |it| it.dead_queue_pairs)
    }
}

/// The inputs that the machines of this process have taken, by machine and kind.
#[derive(Debug)]
pub(crate) struct InputCollector;

#[derive(Clone, Debug, EncodeLabelSet)]
struct InputLabels {
    machine: &'static str,
    kind: &'static str,
}

impl Collector for InputCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let about = "Inputs of the protocol's state machines, by kind";
        let mut encoder = encoder.encode_descriptor("inputs", about, None, MetricType::Counter)?;
        for (machine, kind, count) in input_counts().filter(|(_, _, count)| *count > 0) {
            let count = ConstCounter::new(count);
            count.encode(encoder.encode_family(&InputLabels { machine, kind })?)?;
        }
        Ok(())
    }
}

/// Name and help of the gauge of `Gauges::failures`.
pub(crate) const FAILURES_REMEMBERED: (&str, &str) = (
    "failures_remembered",
    "Strikes, pauses, tries in a row and dead sessions that a success with the same peer ends",
);

/// The connections that the control planes of this process have cut, by cause.
#[derive(Debug)]
pub(crate) struct CutCollector;

#[derive(Clone, Debug, EncodeLabelSet)]
struct CutLabels {
    cause: &'static str,
}

impl Collector for CutCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (name, about) = ("control_connections_cut", "Connections cut at the ZeroMQ ports");
        let mut encoder = encoder.encode_descriptor(name, about, None, MetricType::Counter)?;
        for (cause, count) in kvferry_wire::CONNECTION_CUTS.by_cause() {
            let count = ConstCounter::new(count);
            count.encode(encoder.encode_family(&CutLabels { cause })?)?;
        }
        Ok(())
    }
}

/// The kind of a page of metrics, as Prometheus reads it.
const PAGE_KIND: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The page that is scraped.
pub(crate) fn metrics_page(registry: &Registry) -> Response {
    metrics_answer(metrics_text(registry))
}

/// What the page says.
pub(crate) fn metrics_text(registry: &Registry) -> String {
    let mut page = String::new();
    // A String takes everything.
    let _ = text::encode(&mut page, registry);
    page
}

/// The answer with a page.
pub(crate) fn metrics_answer(page: String) -> Response {
    ([(CONTENT_TYPE, PAGE_KIND)], page).into_response()
}
