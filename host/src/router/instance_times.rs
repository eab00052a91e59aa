//! Times of each instance as the router sees them, in the format of Prometheus.

use super::metrics::role_name;
use crate::process::lock;
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::message::Role;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

/// Instances whose times are kept if nobody asks for the metrics: twice as many as may register at a
/// time. Those that left are dropped when the metrics are asked for.
const KEPT_MAX: usize = 2_048;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabels {
    role: &'static str,
    engine: String,
}

/// Histograms of seconds from `least` on, each bucket twice as long as the one before.
#[derive(Clone, Copy, Debug)]
struct Doubling {
    least: f64,
    buckets: u16,
}

impl MetricConstructor<Histogram> for Doubling {
    fn new_metric(&self) -> Histogram {
        Histogram::new(exponential_buckets(self.least, 2.0, self.buckets))
    }
}

type TimesFamily = Family<EngineLabels, Histogram, Doubling>;

/// The times of one instance, in seconds.
#[derive(Debug)]
pub(crate) struct InstanceTimes {
    /// From a request to the dispatch of a leg of it to the instance.
    pub(crate) queue: Histogram,
    /// From the dispatch of a leg to the first bytes of a stream, or the answer of a prefill.
    pub(crate) first_token: Histogram,
    /// Between the bytes of a stream.
    pub(crate) inter_token: Histogram,
    /// From the answer of the prefill to the first bytes of the decode's stream.
    pub(crate) transfer: Histogram,
}

type EngineKey = (&'static str, EngineId);

/// The times of all instances; clones share them.
#[derive(Clone, Debug)]
pub(crate) struct AllInstanceTimes {
    families: [TimesFamily; 4],
    known: Arc<Mutex<HashMap<EngineKey, Arc<InstanceTimes>>>>,
}

const FAMILIES: [(&str, &str); 4] = [
    ("instance_queue_seconds", "From a request to the dispatch of a leg of it to the instance"),
    ("instance_first_token_seconds", "From the dispatch of a leg to its first token"),
    ("instance_inter_token_seconds", "Between the parts of a stream of the instance"),
    (
        "instance_transfer_seconds",
        "From the answer of the prefill to the first token of the decode",
    ),
];

impl AllInstanceTimes {
    /// No times yet, in a registry.
    pub(crate) fn new(registry: &mut Registry) -> AllInstanceTimes {
        // Up to 131 s.
        let whole = Doubling { least: 1e-3, buckets: 18 };
        // Up to 4 s.
        let step = Doubling { least: 1e-3, buckets: 13 };
        let families = [whole, whole, step, whole].map(Family::new_with_constructor);
        for ((name, about), family) in FAMILIES.iter().zip(&families) {
            registry.register(*name, *about, family.clone());
        }
        AllInstanceTimes { families, known: Arc::default() }
    }

    /// Those of an instance.
    pub(crate) fn of(&self, role: Role, engine: &EngineId) -> Arc<InstanceTimes> {
        let key = (role_name(role), engine.clone());
        let mut known = lock(&self.known);
        if let Some(times) = known.get(&key) {
            return times.clone();
        }
        if known.len() >= KEPT_MAX {
            known.clear();
            self.families.iter().for_each(TimesFamily::clear);
        }
        let labels = EngineLabels { role: key.0, engine: engine.to_string() };
        let [queue, first_token, inter_token, transfer] =
            std::array::from_fn(|nth| self.families[nth].get_or_create_owned(&labels));
        let times = Arc::new(InstanceTimes { queue, first_token, inter_token, transfer });
        known.insert(key, times.clone());
        times
    }

    /// Drops those of all other instances.
    pub(crate) fn retain<'a>(&self, there: impl Iterator<Item = (Role, &'a str)>) {
        let there: HashSet<(&str, &str)> =
            there.map(|(role, engine)| (role_name(role), engine)).collect();
        lock(&self.known).retain(|(role, engine), _| {
            let stays = there.contains(&(*role, &*engine.0));
            if !stays {
                let labels = EngineLabels { role, engine: engine.to_string() };
                self.families.iter().for_each(|family| _ = family.remove(&labels));
            }
            stays
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::text::encode;

    fn page(registry: &Registry) -> String {
        let mut page = String::new();
        encode(&mut page, registry).expect("a text");
        page
    }

    #[test]
    fn times_of_instances_that_left_are_dropped() {
        let mut registry = Registry::default();
        let times = AllInstanceTimes::new(&mut registry);
        for name in ["a", "b"] {
            times.of(Role::Decode, &name.into()).queue.observe(0.5);
            times.of(Role::Decode, &name.into()).queue.observe(0.5);
        }
        times.retain([(Role::Decode, "b"), (Role::Prefill, "a")].into_iter());
        let page = self::page(&registry);
        let count = "instance_queue_seconds_count{role=\"decode\",engine=\"b\"} 2";
        assert!(page.contains(count) && !page.contains("engine=\"a\""), "{page}");
    }

    #[test]
    fn no_more_are_kept_than_there_is_room_for() {
        let mut registry = Registry::default();
        let times = AllInstanceTimes::new(&mut registry);
        for nth in 0..=KEPT_MAX {
            times.of(Role::Prefill, &format!("e{nth}").into()).queue.observe(0.1);
        }
        assert_eq!(lock(&times.known).len(), 1);
        let page = page(&registry);
        assert_eq!(page.matches("instance_queue_seconds_count{").count(), 1);
    }
}
