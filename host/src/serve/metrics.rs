//! What an instance counts, in the format of Prometheus.

use crate::instance::{
    CounterSource, CutCollector, FAILURES_REMEMBERED, InputCollector, InstanceTrust, PlaneCollector,
};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CauseLabels {
    pub(super) cause: &'static str,
}

/// All metrics of the actor; clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct InstanceMetrics {
    pub(super) legs: Counter,
    pub(super) finished: Counter,
    pub(super) failed: Counter,
    pub(super) transferred: Counter,
    pub(super) computed: Counter,
    pub(super) recomputed: Family<CauseLabels, Counter>,
    pub(super) flows: Counter,
    pub(super) violations: Counter,
    pub(super) faults: Counter,
    pub(super) verified: Counter,
    pub(super) mismatches: Counter,
    pub(super) open: Gauge,
    pub(super) held: Gauge,
    pub(super) remembered: Gauge,
    pub(super) registered: Gauge,
}

impl InstanceMetrics {
    /// New metrics, and the registry that has them and those of the data planes.
    pub(super) fn new(
        planes: Vec<CounterSource>,
        trust: InstanceTrust,
    ) -> (InstanceMetrics, Registry) {
        let metrics = InstanceMetrics::default();
        let mut registry = Registry::with_prefix("kvferry");
        let counters = [
            ("legs", "Legs that arrived", &metrics.legs),
            ("legs_finished", "Legs that ended well", &metrics.finished),
            ("legs_failed", "Legs that did not", &metrics.failed),
            ("kv_transferred", "Legs whose KV was transferred", &metrics.transferred),
            ("kv_computed", "Legs whose KV was computed here", &metrics.computed),
            ("flows", "Transfers that this instance moves", &metrics.flows),
            ("violations", "Frames that broke the protocol", &metrics.violations),
            ("faults", "Broken promises of the protocol core", &metrics.faults),
            (
                "kv_blocks_verified",
                "Blocks of a layer that arrived as they were",
                &metrics.verified,
            ),
            ("kv_mismatches", "Transfers whose KV did not", &metrics.mismatches),
        ];
        for (name, about, counter) in counters {
            registry.register(name, about, counter.clone());
        }
        let about = "Legs whose KV did not arrive, by cause";
        registry.register("kv_recomputed", about, metrics.recomputed.clone());
        registry.register("legs_open", "Legs that have not ended", metrics.open.clone());
        let about = "KV blocks in use or in quarantine";
        registry.register("blocks_held", about, metrics.held.clone());
        registry.register(FAILURES_REMEMBERED.0, FAILURES_REMEMBERED.1, metrics.remembered.clone());
        let about = "1 if the router can be reached and was sent a registration";
        registry.register("router_registered", about, metrics.registered.clone());
        trust.register(&mut registry);
        registry.register_collector(Box::new(PlaneCollector::new("host", planes)));
        registry.register_collector(Box::new(InputCollector));
        registry.register_collector(Box::new(CutCollector));
        (metrics, registry)
    }
}
