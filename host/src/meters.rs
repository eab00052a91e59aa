//! What data planes count, in the format of Prometheus.

use fabric_host::{Meter, Path, PathCount};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use std::fmt;

/// The data planes of an instance, read when the page is scraped.
#[derive(Debug)]
pub(crate) struct Planes {
    prefix: &'static str,
    meters: Vec<Meter>,
}

#[derive(Clone, Debug, EncodeLabelSet)]
struct Way {
    side: &'static str,
    path: &'static str,
}

impl Planes {
    /// The names of the series begin with `prefix`.
    pub(crate) fn new(prefix: &'static str, meters: Vec<Meter>) -> Planes {
        Planes { prefix, meters }
    }

    fn encode_sum(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, about): (&str, &str),
        value: fn(&PathCount) -> u64,
    ) -> fmt::Result {
        let counters: Vec<_> = self.meters.iter().map(Meter::read).collect();
        let name = format!("{}_{name}", self.prefix);
        let mut encoder = encoder.encode_descriptor(&name, about, None, MetricType::Counter)?;
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
        let bytes = ("bytes", "Bytes moved, by side and path");
        self.encode_sum(&mut encoder, bytes, |count| count.bytes)?;
        let operations = ("operations", "Operations done, by side and path");
        self.encode_sum(&mut encoder, operations, |count| count.operations)
    }
}
