//! What an instance counts, in the format of Prometheus.

use fabric_host::{Meter, Path, PathCount};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::fmt;

/// All metrics of the actor; clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Metrics {
    pub(super) legs: Counter,
    pub(super) finished: Counter,
    pub(super) failed: Counter,
    pub(super) transferred: Counter,
    pub(super) computed: Counter,
    pub(super) recomputed: Counter,
    pub(super) flows: Counter,
    pub(super) violations: Counter,
    pub(super) faults: Counter,
    pub(super) open: Gauge,
    pub(super) held: Gauge,
}

impl Metrics {
    /// New metrics, and the registry that has them and those of the data planes.
    pub(super) fn new(planes: Vec<Meter>) -> (Metrics, Registry) {
        let metrics = Metrics::default();
        let mut registry = Registry::with_prefix("kvferry");
        let counters = [
            ("legs", "Legs that arrived", &metrics.legs),
            ("legs_finished", "Legs that ended well", &metrics.finished),
            ("legs_failed", "Legs that did not", &metrics.failed),
            ("kv_transferred", "Legs whose KV was transferred", &metrics.transferred),
            ("kv_computed", "Legs whose KV was computed here", &metrics.computed),
            ("kv_recomputed", "Legs whose KV did not arrive", &metrics.recomputed),
            ("flows", "Transfers that this instance moves", &metrics.flows),
            ("violations", "Frames that broke the protocol", &metrics.violations),
            ("faults", "Broken promises of the protocol core", &metrics.faults),
        ];
        for (name, about, counter) in counters {
            registry.register(name, about, counter.clone());
        }
        registry.register("legs_open", "Legs that have not ended", metrics.open.clone());
        let about = "KV blocks in use or in quarantine";
        registry.register("blocks_held", about, metrics.held.clone());
        registry.register_collector(Box::new(Planes(planes)));
        (metrics, registry)
    }
}

/// The data planes, read when the page is scraped.
#[derive(Debug)]
struct Planes(Vec<Meter>);

#[derive(Clone, Debug, EncodeLabelSet)]
struct Way {
    side: &'static str,
    path: &'static str,
}

impl Planes {
    fn encode_sum(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, about): (&str, &str),
        value: fn(&PathCount) -> u64,
    ) -> fmt::Result {
        let counters: Vec<_> = self.0.iter().map(Meter::read).collect();
        let mut encoder = encoder.encode_descriptor(name, about, None, MetricType::Counter)?;
        for (side, initiated) in [("initiated", true), ("served", false)] {
            for (index, path) in Path::ALL.iter().enumerate() {
                let counts = counters.iter().map(|all| match initiated {
                    true => &all.initiated[index],
                    false => &all.served[index],
                });
                let sum = ConstCounter::new(counts.map(value).sum::<u64>());
                sum.encode(encoder.encode_family(&Way { side, path: path.name() })?)?;
            }
        }
        Ok(())
    }
}

impl Collector for Planes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let bytes = ("host_bytes", "Bytes moved, by side and path");
        self.encode_sum(&mut encoder, bytes, |count| count.bytes)?;
        let operations = ("host_operations", "Operations done, by side and path");
        self.encode_sum(&mut encoder, operations, |count| count.operations)
    }
}
