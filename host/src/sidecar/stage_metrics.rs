//! What a host of payloads counts, in the format of Prometheus.

use super::mori_stages::MoriStageMetrics;
use crate::instance::{
    CounterSource, CutCollector, InputCollector, InstanceTrust, PlaneCollector, metrics_text,
};
use kvferry_engine::core::machine::Gauges;
use kvferry_engine::core::payload::{PayloadAnswer, PayloadHook};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::sync::atomic::Ordering;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

/// All metrics of a host with a pool.
#[derive(Debug)]
pub(super) struct StageMetrics {
    registry: Registry,
    puts: Counter,
    gets: Family<OutcomeLabels, Counter>,
    got_bytes: Counter,
    refused: Family<OutcomeLabels, Counter>,
    pool: Gauge,
    free: Gauge,
    slots: Gauge,
    payloads: Gauge,
    waiting: Gauge,
    processes: Gauge,
    misuses: Counter,
    pub(super) mori: MoriStageMetrics,
}

impl StageMetrics {
    /// Of a pool of so many bytes, and, where other hosts reach it, what moves the bytes and who is
    /// answered.
    pub(super) fn new(
        bytes: u64,
        peers: Option<(Vec<CounterSource>, InstanceTrust)>,
    ) -> StageMetrics {
        let mut metrics = StageMetrics {
            registry: Registry::with_prefix("kvferry"),
            puts: Counter::default(),
            gets: Family::default(),
            got_bytes: Counter::default(),
            refused: Family::default(),
            pool: Gauge::default(),
            free: Gauge::default(),
            slots: Gauge::default(),
            payloads: Gauge::default(),
            waiting: Gauge::default(),
            processes: Gauge::default(),
            misuses: Counter::default(),
            mori: MoriStageMetrics::default(),
        };
        metrics.pool.set(bytes as i64);
        metrics.register();
        if let Some((counters, trust)) = peers {
            let all = &mut metrics.registry;
            all.register_collector(Box::new(PlaneCollector::new("transfer", counters)));
            all.register_collector(Box::new(InputCollector));
            trust.register(all);
        }
        metrics
    }

    fn register(&mut self) {
        let all = &mut self.registry;
        all.register("payload_puts", "Payloads that were put", self.puts.clone());
        let about = "Wanted payloads that arrived, or why they did not";
        all.register("payload_gets", about, self.gets.clone());
        let about = "Bytes of slots whose payloads arrived";
        all.register("payload_got_bytes", about, self.got_bytes.clone());
        let about = "Slots that were not given, and why";
        all.register("payload_refused_slots", about, self.refused.clone());
        all.register("payload_pool_bytes", "Bytes of the pool", self.pool.clone());
        all.register("payload_pool_free_bytes", "Bytes of the pool in no slot", self.free.clone());
        let about = "Slots of the pool that somebody writes, waits for or reads";
        all.register("payload_slots", about, self.slots.clone());
        let about = "Payloads that not all of their receivers have taken";
        all.register("payloads", about, self.payloads.clone());
        let about = "Slots that are waited for";
        all.register("payload_waiting_slots", about, self.waiting.clone());
        all.register("payload_processes", "Processes of stages", self.processes.clone());
        let about = "What processes of stages said against the rules";
        all.register("payload_misuses", about, self.misuses.clone());
        self.mori.register(all);
        all.register_collector(Box::new(CutCollector));
    }

    pub(super) fn told(&self, hook: &PayloadHook) {
        if let PayloadHook::Put { .. } = hook {
            self.puts.inc();
        }
    }

    pub(super) fn answered(&self, answer: &PayloadAnswer) {
        let count = |into: &Family<OutcomeLabels, Counter>, outcome| {
            into.get_or_create(&OutcomeLabels { outcome }).inc();
        };
        match answer {
            PayloadAnswer::Arrived { bytes, .. } => {
                count(&self.gets, "arrived");
                self.got_bytes.inc_by(*bytes);
            }
            PayloadAnswer::Missing { failure, .. } => count(&self.gets, failure.kind()),
            PayloadAnswer::NotReserved { failure, .. } => count(&self.refused, failure.kind()),
            PayloadAnswer::Reserved { .. }
            | PayloadAnswer::Stored { .. }
            | PayloadAnswer::Waits { .. }
            | PayloadAnswer::Abandoned { .. } => {}
        }
    }

    pub(super) fn page(&self, gauges: &Gauges, free: u64) -> String {
        self.free.set(free as i64);
        self.slots.set(gauges.held.into());
        self.payloads.set(gauges.transfers.into());
        self.waiting.set(gauges.queued.into());
        self.processes.set(gauges.peers.into());
        self.misuses.inner().store(gauges.violations.into(), Ordering::Relaxed);
        metrics_text(&self.registry)
    }
}
