//! `hosts` of `[topology]` and `[[stream]]`: payloads between stages.

use super::limits::{COUNT, FabricSpec, ProtocolSpec};
use super::topology::{InstanceDefaults, TopologySpec};
use crate::ScenarioError;
use crate::cost::StepCost;
use crate::decide::{DecisionKey, below, chance, kind};
use crate::doc::FileName;
use crate::run::{
    Departure, InstanceSettings, MemoryLayout, PayloadHostSettings, Served, StreamReceiver,
    WorkloadChunk, WorkloadEnd, WorkloadStream,
};
use crate::value::{ByteVolume, Distribution, InstanceName, Probability, or};
use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::{Mode, Role};
use kvferry_engine::core::payload::PayloadConfig;
use kvferry_engine::core::payload::pool::PAGE;
use kvferry_faults::{named_values, section, settings};

named_values! {
    Served: "requests" = Served::Requests, "payloads" = Served::Payloads;
    WorkloadEnd: "ends" = WorkloadEnd::Ends, "gives-up" = WorkloadEnd::GivesUp,
        "leaves" = WorkloadEnd::Leaves, "cleans-up" = WorkloadEnd::CleansUp;
    Departure: "abandons" = Departure::Abandons, "cleans-up" = Departure::CleansUp,
        "leaves" = Departure::Leaves;
}

section! {
    /// One table of `hosts`.
    #[derive(Debug)]
    pub(super) struct HostSpec(section) {
        pub(super) name: Option<InstanceName>;
        node: Option<InstanceName>;
        pub(super) count: Option<Distribution<u16>>, in (1, 64);
        pool: PoolSpec;
        protocol: ProtocolSpec;
        fabric: FabricSpec;
    } with {
        pub(super) line: u32 = section.line;
    }
}

settings! {
    struct PoolSpec sets PayloadConfig {
        bytes: ByteVolume => pool;
        hold: Nanos;
        room: Nanos;
        slots_max: u32, in COUNT;
        clients_max: u32, in COUNT;
        payloads_max: u32, in COUNT;
        hosts_max: u32, in COUNT;
        host_payloads_max: u32, in COUNT;
        reservations_max: u32, in COUNT;
        streams_max: u32, in COUNT;
        tombstones_max: u32, in COUNT;
    }
}

/// Bytes of a pool, unless its table says otherwise.
const POOL: u64 = 1 << 20;

/// How long what comes from another host waits for room, unless its table says otherwise.
const ROOM: Nanos = Nanos::from_secs(5);

section! {
    /// One table of `stream`.
    #[derive(Debug)]
    pub(super) struct StreamSpec(section) {
        count: Distribution<u32> = 1, in (1, 1 << 20);
        every: Distribution<Nanos> = Nanos::from_ms(1);
        begins: Distribution<Nanos> = Nanos::ZERO;
        /// Names the decisions of its first stream, see [`StreamSpec::begins`].
        decisions: Option<u64>;
        from: Option<Distribution<InstanceName>>;
        to: Option<Distribution<InstanceName>>;
        start: Distribution<Nanos> = Nanos::ZERO;
        chunks: Distribution<u32> = (1, 4), in (0, 1 << 16);
        bytes: Distribution<ByteVolume> = (ByteVolume(1), ByteVolume(64 << 10));
        empty: Distribution<Probability> = Probability(0);
        whole: Distribution<bool> = false;
        puts: Distribution<u32> = 1, in (1, 64);
        again: Distribution<u32> = 0, in (0, 64);
        copies: Option<Distribution<u32>>, in (1, 64);
        pause: Distribution<Nanos> = Nanos::ZERO;
        write: Distribution<Nanos> = Nanos::from_us(10);
        wait: Distribution<Nanos> = Nanos::from_secs(10);
        end: Distribution<WorkloadEnd> = WorkloadEnd::Ends;
        receivers: Distribution<u32> = 1, in (1, 64);
        asks: Distribution<Nanos> = Nanos::ZERO;
        reads: Distribution<Nanos> = Nanos::from_us(100);
        named: Distribution<Probability> = Probability(0);
        gone: DepartureSpec;
    } with {
        line: u32 = section.line;
    }
}

section! {
    /// `gone`: receivers that do not stay to the end.
    #[derive(Debug)]
    struct DepartureSpec {
        chance: Distribution<Probability> = Probability(0);
        after: Distribution<Nanos> = Nanos::ZERO;
        how: Distribution<Departure> = Departure::Abandons;
    }
}

/// The lower half of 64 bits.
const LOWER_HALF: u64 = u32::MAX as u64;

/// Name of the core of a host from which others pull, and of the one with which it pulls.
const CORES: [(&str, Role); 2] = [("prefill", Role::Prefill), ("decode", Role::Decode)];

impl HostSpec {
    /// Names that its hosts can get, numbered on from those without a name before them.
    pub(super) fn names(&self, unnamed: u16) -> Vec<String> {
        let count = self.count.as_ref().map_or(1, Distribution::largest);
        let name = |index| match (&self.name, &self.count) {
            (Some(name), None) => name.0.to_string(),
            (Some(prefix), Some(_)) => format!("{}{index}", prefix.0),
            (None, _) => format!("h{}", unnamed + index),
        };
        (0..count).map(name).collect()
    }

    fn host(
        &self,
        (name, instance): (String, u16),
        key: &DecisionKey,
        (shared, cost): (&InstanceDefaults, StepCost),
    ) -> (PayloadHostSettings, [InstanceSettings; 2]) {
        let base = PayloadConfig { pool: POOL, room: ROOM, ..PayloadConfig::default() };
        let mut config = self.pool.draw(&key.part("pool"), base);
        config.pool = config.pool.max(PAGE).next_multiple_of(PAGE);
        let protocol = self.protocol.draw(&key.part("protocol"), shared.protocol.clone());
        let fabric = self.fabric.draw(&key.part("fabric"), shared.fabric);
        let cores = CORES.map(|(part, role)| InstanceSettings {
            name: format!("{name}.{part}"),
            host: name.clone(),
            node: self.node.as_ref().map_or(name.clone(), |node| node.0.to_string()),
            role,
            is_pool: true,
            tp: 1,
            dp_rank: 0,
            dp_size: 1,
            blocks: (config.pool / PAGE) as u32,
            block_tokens: 1,
            layout: MemoryLayout::Block,
            mode: Mode::Pull,
            prefix_cache: false,
            cost,
            protocol: protocol.clone(),
            fabric: super::limits::within_credits(fabric),
            models: None,
        });
        (PayloadHostSettings { name, instance, config }, cores)
    }
}

impl TopologySpec {
    /// What a seed serves: payloads where there are hosts, unless the file says otherwise.
    pub(super) fn served(&self, seed: u64) -> Served {
        let default = if self.hosts.is_empty() { Served::Requests } else { Served::Payloads };
        or(&self.serves, default, &DecisionKey::new(seed, "topology.serves"))
    }

    /// The tables of hosts, each with the names that its hosts have.
    fn named_hosts(&self, seed: u64) -> impl Iterator<Item = (&HostSpec, Vec<String>)> {
        self.host_tables().map(move |(table, mut names)| {
            let key = DecisionKey::new(seed, "topology.count").actor(kind(&names[0]));
            names.truncate(or(&table.count, 1, &key).into());
            (table, names)
        })
    }

    /// Names of hosts, each with the number of its table.
    pub(super) fn host_names(&self, seed: u64) -> Vec<(usize, String)> {
        let tables = self.named_hosts(seed).enumerate();
        tables.flat_map(|(at, (_, names))| names.into_iter().map(move |name| (at, name))).collect()
    }

    /// The hosts and their cores.
    pub(super) fn hosts(
        &self,
        seed: u64,
        shared: (&InstanceDefaults, StepCost),
    ) -> (Vec<PayloadHostSettings>, Vec<InstanceSettings>) {
        let (mut hosts, mut instances) = (Vec::new(), Vec::new());
        for (table, names) in self.named_hosts(seed) {
            for name in names {
                let key = DecisionKey::new(seed, "topology.instance").actor(kind(&name));
                let (host, cores) = table.host((name, instances.len() as u16), &key, shared);
                hosts.push(host);
                instances.extend(cores);
            }
        }
        (hosts, instances)
    }
}

impl StreamSpec {
    /// Streams of the `table`th table, between these hosts and behind so many streams.
    pub(super) fn streams(
        &self,
        (file, table): (&FileName, u64),
        seed: u64,
        (hosts, before): (&[PayloadHostSettings], usize),
    ) -> Result<Vec<WorkloadStream>, ScenarioError> {
        let key = DecisionKey::new(seed, "stream");
        let mut streams = Vec::new();
        for (decisions, begins) in self.begins(table, seed) {
            let key = key.actor(decisions >> 32).nth(decisions & LOWER_HALF);
            streams.push(self.stream(file, (begins, None), &key, hosts)?);
            for again in 0..self.again.draw(&key.part("again")) {
                let of = Some((before + streams.len() - 1) as u32);
                let key = key.part("again").nth(u64::from(again));
                streams.push(self.stream(file, (Nanos::ZERO, of), &key, hosts)?);
            }
        }
        Ok(streams)
    }

    /// Starts of the streams of the `table`th table, each with what names its decisions: a table in
    /// the upper half of the bits, a number in the lower half.
    pub(super) fn begins(&self, table: u64, seed: u64) -> Vec<(u64, Nanos)> {
        let first = self.decisions.unwrap_or(table << 32);
        let key = DecisionKey::new(seed, "stream").actor(first >> 32);
        let mut begins = self.begins.draw(&key.part("begins"));
        let mut found = Vec::new();
        for decisions in (first..).take(self.count.draw(&key.part("count")) as usize) {
            found.push((decisions, begins));
            begins = begins + self.every.draw(&key.nth(decisions & LOWER_HALF).part("every"));
        }
        found
    }

    fn stream(
        &self,
        file: &FileName,
        (begins, of): (Nanos, Option<u32>),
        key: &DecisionKey,
        hosts: &[PayloadHostSettings],
    ) -> Result<WorkloadStream, ScenarioError> {
        let from = self.place(file, &self.from, key.part("from"), hosts)?;
        let empty = self.empty.draw(&key.part("empty.rate")).0;
        let chunk = |index: u32| {
            let key = key.part("chunk").nth(u64::from(index));
            WorkloadChunk {
                bytes: match chance(key.part("empty").get(), empty) {
                    true => 0,
                    false => self.bytes.draw(&key.part("bytes")).0,
                },
                pause: self.pause.draw(&key.part("pause")),
                write: self.write.draw(&key.part("write")),
            }
        };
        let is_whole = self.whole.draw(&key.part("whole"));
        let count = if is_whole { 1 } else { self.chunks.draw(&key.part("chunks")) };
        let chunks: Vec<_> = (0..count).map(chunk).collect();
        let longest = chunks.iter().map(|chunk| chunk.bytes).max().unwrap_or(0);
        let named = self.named.draw(&key.part("named.rate")).0;
        let mut receivers = Vec::new();
        for index in 0..self.receivers.draw(&key.part("receivers")) {
            let key = key.part("receiver").nth(u64::from(index));
            let host = self.place(file, &self.to, key.part("to"), hosts)?;
            let pool =
                hosts[usize::from(host)].config.pool.min(hosts[usize::from(from)].config.pool);
            if longest > pool {
                let what = format!("a payload of {longest} B fits no pool of {pool} B");
                return Err(file.error(self.line, what, "give the hosts larger pools"));
            }
            receivers.push(StreamReceiver {
                host,
                start: begins + self.asks.draw(&key.part("asks")),
                reads: self.reads.draw(&key.part("reads")),
                is_named: chance(key.part("named").get(), named),
                gone: self.gone.draw(&key.part("gone")),
            });
        }
        let start = begins + self.start.draw(&key.part("start"));
        let (wait, end) = (self.wait.draw(&key.part("wait")), self.end.draw(&key.part("end")));
        let puts = self.puts.draw(&key.part("puts"));
        let copies = or(&self.copies, receivers.len() as u32, &key.part("copies"));
        Ok(WorkloadStream { of, from, start, chunks, is_whole, puts, copies, wait, end, receivers })
    }

    /// The host that a name means; any if none is named.
    fn place(
        &self,
        file: &FileName,
        name: &Option<Distribution<InstanceName>>,
        key: DecisionKey,
        hosts: &[PayloadHostSettings],
    ) -> Result<u16, ScenarioError> {
        let any = below(key.part("any").get(), hosts.len() as u64) as u16;
        let Some(name) = name else { return Ok(any) };
        let drawn = name.draw(&key);
        if &*drawn.0 == "any" {
            return Ok(any);
        }
        let found = hosts.iter().position(|host| *host.name == *drawn.0);
        let names = || hosts.iter().map(|host| &*host.name).collect::<Vec<_>>().join(", ");
        found.map(|at| at as u16).ok_or_else(|| {
            let what = format!("no host is named `{}`", drawn.0);
            file.error(name.line, what, format!("use any, or one of {}", names()))
        })
    }
}

impl DepartureSpec {
    fn draw(&self, key: &DecisionKey) -> Option<(Nanos, Departure)> {
        let is_hit = chance(key.part("hit").get(), self.chance.draw(&key.part("rate")).0);
        is_hit.then(|| (self.after.draw(&key.part("after")), self.how.draw(&key.part("how"))))
    }
}
