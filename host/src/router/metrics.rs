//! What is counted, in the format of Prometheus.

use super::instance_times::AllInstanceTimes;
use super::static_instances::ListedSource;
use crate::instance::{CutCollector, FAILURES_REMEMBERED, InputCollector};
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::{InstanceState, RouterCounters};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::sync::atomic::Ordering;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct RequestLabels {
    pub(crate) path: &'static str,
    pub(crate) code: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct LegLabels {
    pub(crate) role: &'static str,
    pub(crate) outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct LoadLabels {
    pub(crate) outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RoleLabels {
    role: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InstanceLabels {
    role: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RejectionLabels {
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SourceLabels {
    source: String,
}

/// One thing in a gauge, for as long as this is there; also if the future that has it is dropped.
pub(crate) struct Counted<'a>(&'a Gauge);

impl Counted<'_> {
    pub(crate) fn begin(gauge: &Gauge) -> Counted<'_> {
        gauge.inc();
        Counted(gauge)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// What is counted of the connections to a listener; clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientMeters {
    pub(crate) connections: Gauge,
    /// Connections that found no place.
    pub(crate) refused: Counter,
    /// Connections that did not come to speak TLS.
    pub(crate) handshakes_failed: Counter,
}

/// All metrics; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct RouterMetrics {
    pub(crate) requests: Family<RequestLabels, Counter>,
    pub(crate) legs: Family<LegLabels, Counter>,
    pub(crate) in_flight: Gauge,
    pub(crate) clients: ClientMeters,
    /// Parts of requests and answers that were refused for lack of memory.
    pub(crate) memory_refused: Counter,
    /// Seconds from a request to the begin of its answer.
    pub(crate) first_byte: Histogram,
    /// Times of each instance.
    pub(crate) times: AllInstanceTimes,
    /// Questions to servers for their load.
    pub(crate) loads: Family<LoadLabels, Counter>,
    /// 1 if a pair can serve, as in `/readiness`.
    ready: Gauge,
    instances: Family<InstanceLabels, Gauge>,
    busy: Family<RoleLabels, Gauge>,
    rejected: Family<RejectionLabels, Counter>,
    waiting: Gauge,
    remembered: Gauge,
    /// By what names static instances: how many, and whether it could be asked.
    named: Family<SourceLabels, Gauge>,
    named_up: Family<SourceLabels, Gauge>,
    /// Those of the router core, in the order of [`CORE`].
    core: [Counter; CORE.len()],
}

const CORE: [(&str, &str); 14] = [
    ("busy_legs", "Legs that instances refused as busy"),
    ("retries", "Transfers sent again after a failure"),
    ("retries_excused", "Those of them that are no try, because an instance had lost its host"),
    ("retries_refused", "Failures after which nothing was sent again, for --retry-budget"),
    ("shed", "Requests that were refused because too many are open or wait"),
    ("unknown_models", "Requests for a model that no instance serves"),
    ("direct_prompts", "Prompts that were sent to a decode alone"),
    ("hosts_lost", "Times that an instance lost its connection of registrations, or was late"),
    ("expired", "Instances that were given up because they did not register"),
    ("replaced", "Instances that were replaced by a new incarnation"),
    ("role_switches", "Instances that registered anew in another role and had legs to finish"),
    ("suspicions", "Times that an instance became suspect"),
    ("cancelled_legs", "Legs that were cancelled"),
    ("unread_prefills", "Decode legs that should pull and found nothing to read"),
];

impl RouterMetrics {
    /// New metrics and the registry that has them.
    pub(crate) fn new() -> (RouterMetrics, Registry) {
        // From 0.5 ms up to 4 min.
        let buckets = prometheus_client::metrics::histogram::exponential_buckets(5e-4, 2.0, 20);
        let mut registry = Registry::with_prefix("kvferry_router");
        let metrics = RouterMetrics {
            times: AllInstanceTimes::new(&mut registry),
            requests: Family::default(),
            legs: Family::default(),
            in_flight: Gauge::default(),
            clients: ClientMeters::default(),
            memory_refused: Counter::default(),
            first_byte: Histogram::new(buckets),
            loads: Family::default(),
            ready: Gauge::default(),
            instances: Family::default(),
            busy: Family::default(),
            rejected: Family::default(),
            waiting: Gauge::default(),
            remembered: Gauge::default(),
            named: Family::default(),
            named_up: Family::default(),
            core: Default::default(),
        };
        let all = &metrics;
        registry.register("requests", "Answers to clients", all.requests.clone());
        registry.register("legs", "Legs that ended", all.legs.clone());
        registry.register("in_flight", "Requests in flight", all.in_flight.clone());
        let clients = &all.clients;
        registry.register("connections", "Connections of clients", clients.connections.clone());
        let about = "Connections that were refused because all are in use";
        registry.register("connections_refused", about, clients.refused.clone());
        let about = "Connections of clients that failed in the TLS handshake";
        registry.register("handshakes_failed", about, clients.handshakes_failed.clone());
        let about = "Parts of requests and answers that there was no memory for";
        registry.register("memory_refused", about, all.memory_refused.clone());
        let about = "From a request to the begin of its answer";
        registry.register("first_byte_seconds", about, all.first_byte.clone());
        let about = "Whether a prefill and a decode can serve together now, as /readiness says";
        registry.register("ready", about, all.ready.clone());
        registry.register("instances", "Instances by state", all.instances.clone());
        let about = "Questions to servers for their load (--scrape-load)";
        registry.register("load_scrapes", about, all.loads.clone());
        let about = "Instances whose server is busy by its own word";
        registry.register("busy_instances", about, all.busy.clone());
        let about = "Registrations that were not taken";
        registry.register("registrations_rejected", about, all.rejected.clone());
        registry.register("waiting", "Requests that wait for an instance", all.waiting.clone());
        registry.register(FAILURES_REMEMBERED.0, FAILURES_REMEMBERED.1, all.remembered.clone());
        let about = "Static instances that a source names";
        registry.register("static_instances", about, all.named.clone());
        let about = "Whether a source of static instances could be asked or read";
        registry.register("static_source_up", about, all.named_up.clone());
        registry.register_collector(Box::new(InputCollector));
        registry.register_collector(Box::new(CutCollector));
        for ((name, about), counter) in CORE.iter().zip(&all.core) {
            registry.register(*name, *about, counter.clone());
        }
        (metrics, registry)
    }

    /// Sets the gauge to the result of `/readiness`.
    pub(crate) fn update_readiness(&self, is_ready: bool) {
        self.ready.set(i64::from(is_ready));
    }

    /// Takes over what names static instances.
    pub(crate) fn update_static(&self, sources: &[ListedSource]) {
        for it in sources {
            let labels = SourceLabels { source: it.source.clone() };
            self.named.get_or_create(&labels).set(it.instances as i64);
            self.named_up.get_or_create(&labels).set(i64::from(it.error.is_none()));
        }
    }

    /// Takes over what the router core counts.
    pub(crate) fn update(
        &self,
        counters: &RouterCounters,
        instances: impl Iterator<Item = (Role, InstanceState, bool)>,
        (waiting, remembered): (u32, u32),
    ) {
        self.instances.clear();
        self.busy.clear();
        for (role, state, is_busy) in instances {
            let role = role_name(role);
            let labels = InstanceLabels { role, state: state_name(state) };
            self.instances.get_or_create(&labels).inc();
            self.busy.get_or_create(&RoleLabels { role }).inc_by(i64::from(is_busy));
        }
        for (reason, count) in &counters.rejected {
            let counter =
                self.rejected.get_or_create(&RejectionLabels { reason: reason.to_string() });
            counter.inner().store(*count, Ordering::Relaxed);
        }
        self.waiting.set(i64::from(waiting));
        self.remembered.set(i64::from(remembered));
        let RouterCounters { retries, refused_retries, shed, direct, expired, .. } = counters;
        let RouterCounters { replaced, switched, suspicions, cancelled, unread, .. } = counters;
        let RouterCounters { busy, unknown_models, excused, hostless, .. } = counters;
        let counts = [
            busy,
            retries,
            excused,
            refused_retries,
            shed,
            unknown_models,
            direct,
            hostless,
            expired,
            replaced,
            switched,
            suspicions,
            cancelled,
            unread,
        ];
        for (counter, count) in self.core.iter().zip(counts) {
            counter.inner().store(*count, Ordering::Relaxed);
        }
    }
}

/// The name of a role in metrics and lists.
pub(crate) fn role_name(role: Role) -> &'static str {
    match role {
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    }
}

/// The name of a state in metrics and lists.
pub(crate) fn state_name(state: InstanceState) -> &'static str {
    match state {
        InstanceState::Ready => "ready",
        InstanceState::Unproven => "unproven",
        InstanceState::Suspect => "suspect",
        InstanceState::Disconnected => "disconnected",
        InstanceState::Late => "late",
        InstanceState::Trial => "trial",
        InstanceState::Draining => "draining",
        InstanceState::Lost => "lost",
        InstanceState::Switching => "switching",
    }
}
