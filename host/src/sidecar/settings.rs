//! `kv_connector_extra_config`: the keys of vLLM's MoRIIOConnector and ours.

use crate::instance::limits::{self, Overrides};
use crate::instance::{ListenAddresses, PlaneConfig, TrustSettings};
use crate::process::address;
use clap::ValueEnum;
use kvferry_engine::core::moriio::MoriioSettings;
use kvferry_engine::core::time::Nanos;
use kvferry_engine::core::verify::Verify;
use kvferry_engine::text::nearest;
use kvferry_fabric_host::HostConfig;
use kvferry_fabric_mori::{MoriBackend, MoriConfig, MoriMixedPlane};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransferBackend {
    Host,
    /// MoRI over RDMA; MoRIIO calls it `rdma`.
    MoriRdma,
    /// MoRI over xGMI; MoRIIO calls it `xgmi`.
    MoriXgmi,
    /// MoRI over xGMI to peers of the node, and over RDMA to others.
    Mori,
}

/// Where the KV cache of a worker without a GPU lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum KvMemory {
    /// In a memory file, which hosts map.
    File,
    /// Where vLLM allocates it; hosts use cross-memory attach.
    Private,
}

/// Where the transfer actors of an engine are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TransferPlacement {
    /// In its host, which reaches the workers' memory from outside.
    Sidecar,
    /// In its workers, one in each. Memory of a GPU needs it: what one process imported from
    /// another cannot be passed on to a peer.
    Worker,
}

/// Where the host of an engine comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostStart {
    /// The connector starts it.
    Spawn,
    Connect,
}

/// The keys. Ports are numbers or texts of numbers, times seconds, as in MoRIIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectorSettings {
    /// Decode reads (MoRIIO's READ) in place of prefill that writes.
    pub read_mode: bool,
    /// Address to listen at and to tell others.
    pub host_ip: String,
    /// Host of the router's discovery socket; empty for none.
    pub proxy_ip: String,
    pub proxy_ping_port: u16,
    /// Port of the engine's HTTP server, for the router.
    pub http_port: u16,
    /// Port for handshakes; 0 for a free one.
    pub handshake_port: u16,
    /// Port for notices of MoRIIO peers; 0 for a free one.
    pub notify_port: u16,
    /// What moves the bytes; by default what the memory of the KV cache calls for.
    pub backend: Option<TransferBackend>,
    /// Threads per rank that copy.
    pub num_workers: u16,
    /// Queue pairs per transfer; for RDMA only.
    pub qp_per_transfer: Option<i32>,
    /// Work requests per post, -1 for MoRI's choice; for RDMA only.
    pub post_batch_size: Option<i32>,
    /// What else MoRI can be told.
    pub mori: MoriConfig,
    /// `defer_timeout` and `recv_abort_timeout`, towards MoRIIO peers. `transfer_timeout` is taken
    /// and not needed: an operation fails when its peer does.
    pub moriio: MoriioSettings,
    /// Where the KV cache lies.
    pub kv_memory: KvMemory,
    /// Where the transfer actors are; by default where the backend can be.
    pub transfer: Option<TransferPlacement>,
    /// Where the host comes from.
    pub host: HostStart,
    /// Path of the host's socket; empty for one that is named by the engine's id.
    pub socket: String,
    /// Times and limits: the tables `protocol`, `channel` and `operations`.
    #[serde(default)]
    pub limits: Overrides,
    /// File of the fleet's secret, in place of the one that the host is told of.
    // Who knows fewer settings refuses others, so it is said only if it was set, as what follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_file: Option<PathBuf>,
    /// Encrypt KV between hosts, in place of what the host is told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypt: Option<bool>,
    /// Listen where others reach this engine though there is no secret, in place of what the host is
    /// told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub insecure_network: Option<bool>,
    /// Whether there are peers that speak MoRIIO; if it is not said there are, unless others are to
    /// prove a secret there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moriio_peers: Option<bool>,
    /// How long the start of the engine may take, from when its scheduler is there; 300 s unless it was
    /// set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub start_timeout: Option<Nanos>,
    /// How much of the KV is verified before it is used.
    #[serde(default, skip_serializing_if = "Verify::is_off")]
    pub verify: Verify,
    /// Host of the engine's HTTP server, if it is not `host_ip`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub http_ip: String,
    /// Hand over the KV of what drafts tokens for speculative decoding, too; the connector's alone.
    #[serde(skip, default = "yes")]
    pub draft_kv: bool,
}

const fn yes() -> bool {
    true
}

/// Time for the start of an engine. A rank that registers 192 GB for RDMA takes minutes where its pages are
/// small.
const START: Nanos = Nanos(300_000_000_000);

impl Default for ConnectorSettings {
    fn default() -> Self {
        ConnectorSettings {
            read_mode: false,
            host_ip: "127.0.0.1".into(),
            proxy_ip: String::new(),
            proxy_ping_port: 0,
            http_port: 0,
            handshake_port: 0,
            notify_port: 0,
            backend: None,
            num_workers: 1,
            qp_per_transfer: None,
            post_batch_size: None,
            mori: MoriConfig::default(),
            moriio: MoriioSettings::default(),
            kv_memory: KvMemory::File,
            transfer: None,
            host: HostStart::Spawn,
            socket: String::new(),
            limits: Overrides::default(),
            secret_file: None,
            encrypt: None,
            insecure_network: None,
            moriio_peers: None,
            start_timeout: None,
            verify: Verify::Off,
            http_ip: String::new(),
            draft_kv: yes(),
        }
    }
}

/// All keys that a user may give.
const KEYS: [&str; 30] = [
    "read_mode",
    "host_ip",
    "proxy_ip",
    "proxy_ping_port",
    "http_port",
    "handshake_port",
    "notify_port",
    "backend",
    "num_workers",
    "qp_per_transfer",
    "post_batch_size",
    "mori",
    "transfer_timeout",
    "defer_timeout",
    "recv_abort_timeout",
    "kv_memory",
    "transfer",
    "host",
    "socket",
    "secret_file",
    "encrypt",
    "insecure_network",
    "moriio_peers",
    "start_timeout",
    "verify",
    "http_ip",
    "draft_kv",
    limits::PROTOCOL,
    limits::CHANNEL,
    limits::OPERATIONS,
];

impl fmt::Display for TransferBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransferBackend::Host => "host",
            TransferBackend::MoriRdma => "mori-rdma",
            TransferBackend::MoriXgmi => "mori-xgmi",
            TransferBackend::Mori => MoriMixedPlane::NAME,
        })
    }
}

const PLACES: [TransferPlacement; 2] = [TransferPlacement::Sidecar, TransferPlacement::Worker];

impl TransferPlacement {
    const fn name(self) -> &'static str {
        match self {
            TransferPlacement::Sidecar => "sidecar",
            TransferPlacement::Worker => "worker",
        }
    }
}

impl fmt::Display for TransferPlacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

fn text(value: &Value) -> Result<&str, String> {
    value.as_str().ok_or_else(|| format!("{value} is no text"))
}

fn flag(value: &Value) -> Result<bool, String> {
    match value {
        Value::Bool(flag) => Ok(*flag),
        Value::String(text) if ["true", "1"].contains(&&*text.to_lowercase()) => Ok(true),
        Value::String(text) if ["false", "0"].contains(&&*text.to_lowercase()) => Ok(false),
        other => Err(format!("{other} is neither true nor false")),
    }
}

/// A number, also as a text.
fn number<T: FromStr>(value: &Value, what: &str) -> Result<T, String> {
    let text = match value {
        Value::String(text) => text.trim().to_owned(),
        other => other.to_string(),
    };
    text.parse().map_err(|_| format!("{value} is no {what}"))
}

fn port(value: &Value) -> Result<u16, String> {
    number(value, "port from 0 to 65535")
}

fn seconds(value: &Value) -> Result<Nanos, String> {
    let seconds: f64 = number(value, "number of seconds")?;
    if seconds.is_finite() && (0.001..=86_400.0).contains(&seconds) {
        return Ok(Nanos((seconds * 1e9) as u64));
    }
    Err(format!("{value} is not from 0.001 to 86400 seconds"))
}

fn one_of<T: Copy>(value: &Value, known: &[(&str, T)]) -> Result<T, String> {
    let word = text(value)?;
    if let Some((_, found)) = known.iter().find(|(name, _)| *name == word) {
        return Ok(*found);
    }
    let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
    Err(format!("{word:?} is none of {}", names.join(", ")))
}

/// True for an address or name that others can be told; names are looked up where they are used.
fn is_told(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    !host.is_empty() && !bare.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified())
}

impl ConnectorSettings {
    /// Reads the keys that a user gave, a JSON object.
    ///
    /// # Errors
    /// A key that there is not, with the one that is nearest; a value and what it may be.
    pub fn read(json: &str) -> Result<ConnectorSettings, String> {
        let given: Map<String, Value> = serde_json::from_str(json)
            .map_err(|why| format!("kv_connector_extra_config: {why}"))?;
        let mut settings = ConnectorSettings::default();
        for (key, value) in &given {
            settings.set(key, value).map_err(|why| match limits::TABLES.contains(&&**key) {
                true => format!("kv_connector_extra_config: {why}"),
                false => format!("kv_connector_extra_config: {key}: {why}"),
            })?;
        }
        settings.check().map_err(|why| format!("kv_connector_extra_config: {why}"))?;
        Ok(settings)
    }

    fn set(&mut self, key: &str, value: &Value) -> Result<(), String> {
        match key {
            "read_mode" => self.read_mode = flag(value)?,
            "host_ip" => self.host_ip = text(value)?.into(),
            "proxy_ip" => self.proxy_ip = text(value)?.into(),
            "proxy_ping_port" => self.proxy_ping_port = port(value)?,
            "http_port" => self.http_port = port(value)?,
            "handshake_port" => self.handshake_port = port(value)?,
            "notify_port" => self.notify_port = port(value)?,
            "backend" => {
                let known = [
                    ("host", TransferBackend::Host),
                    ("mori-rdma", TransferBackend::MoriRdma),
                    ("mori-xgmi", TransferBackend::MoriXgmi),
                    (MoriMixedPlane::NAME, TransferBackend::Mori),
                    ("rdma", TransferBackend::MoriRdma),
                    ("xgmi", TransferBackend::MoriXgmi),
                ];
                self.backend = Some(one_of(value, &known)?);
            }
            "num_workers" => self.num_workers = number(value, "number of threads")?,
            "qp_per_transfer" => self.qp_per_transfer = Some(number(value, "number")?),
            "post_batch_size" => self.post_batch_size = Some(number(value, "number")?),
            "mori" if value.get("insecure_network").is_some() => {
                return Err("insecure_network is a key beside mori, and none of it".into());
            }
            "mori" => {
                self.mori =
                    MoriConfig::deserialize(value).map_err(|why| format!("{value}: {why}"))?;
            }
            "transfer_timeout" => _ = seconds(value)?,
            "defer_timeout" => self.moriio.hold = seconds(value)?,
            "recv_abort_timeout" => self.moriio.write = seconds(value)?,
            "kv_memory" => {
                let known = [("file", KvMemory::File), ("private", KvMemory::Private)];
                self.kv_memory = one_of(value, &known)?;
            }
            "transfer" => {
                let known = PLACES.map(|place| (place.name(), place));
                self.transfer = Some(one_of(value, &known)?);
            }
            "host" => {
                let known = [("spawn", HostStart::Spawn), ("connect", HostStart::Connect)];
                self.host = one_of(value, &known)?;
            }
            "socket" => self.socket = text(value)?.into(),
            "secret_file" => self.secret_file = Some(text(value)?.into()),
            "encrypt" => self.encrypt = Some(flag(value)?),
            "insecure_network" => self.insecure_network = Some(flag(value)?),
            "moriio_peers" => self.moriio_peers = Some(flag(value)?),
            "start_timeout" => self.start_timeout = Some(seconds(value)?),
            "verify" => self.verify = one_of(value, &Verify::NAMES)?,
            "http_ip" => self.http_ip = text(value)?.into(),
            "draft_kv" => self.draft_kv = flag(value)?,
            table if limits::TABLES.contains(&table) => self.limits.take(table, value)?,
            _ => {
                return Err(match nearest(key, &KEYS) {
                    Some(known) => format!("there is no such key; did you mean {known:?}?"),
                    None => format!("there is no such key; there are {}", KEYS.join(", ")),
                });
            }
        }
        Ok(())
    }

    /// How long the start of the engine may take.
    pub fn start_timeout(&self) -> Duration {
        Duration::from_nanos(self.start_timeout.unwrap_or(START).0)
    }

    /// # Errors
    /// What does not go together, and what to do.
    fn check(&self) -> Result<(), String> {
        self.limits.limits()?;
        let ports = [
            ("http_port", self.http_port),
            ("handshake_port", self.handshake_port),
            ("notify_port", self.notify_port),
        ];
        for (n, (key, port)) in ports.iter().enumerate() {
            if let Some((other, _)) = ports[..n].iter().find(|it| it.1 == *port && *port != 0) {
                return Err(format!(
                    "{key} = {port}: it is {other}, too; give one of them another port"
                ));
            }
        }
        let wrong = match self {
            ConnectorSettings { host_ip, .. } if !is_told(host_ip) => format!(
                "host_ip = {host_ip:?}: peers are told it and cannot connect to it; give the address \
                 of this machine that they reach"
            ),
            ConnectorSettings { http_ip, .. } if !http_ip.is_empty() && !is_told(http_ip) => {
                format!("http_ip = {http_ip:?}: the router is told it and cannot connect to it")
            }
            ConnectorSettings {
                backend: Some(backend),
                transfer: Some(TransferPlacement::Sidecar),
                ..
            } if *backend != TransferBackend::Host => format!(
                "backend {backend} has its transfer actors in the workers, whose memory MoRI takes: \
                 leave `transfer` out, or give \"worker\""
            ),
            ConnectorSettings {
                verify: verify @ (Verify::Sample | Verify::All),
                backend: Some(backend),
                ..
            } if *backend != TransferBackend::Host => format!(
                "verify = {verify}: backend {backend} cannot digest the memory of a device; leave \
                 `verify` out"
            ),
            ConnectorSettings { num_workers: 0 | 257.., .. } => {
                "num_workers is not from 1 to 256".into()
            }
            ConnectorSettings { proxy_ip, proxy_ping_port, .. }
                if proxy_ip.is_empty() != (*proxy_ping_port == 0) =>
            {
                "proxy_ip and proxy_ping_port name the router together: give both or none".into()
            }
            ConnectorSettings { proxy_ip, .. }
                if !proxy_ip.is_empty()
                    && !address::is_host(proxy_ip)
                    && !address::is_ipv6(proxy_ip) =>
            {
                format!(
                    "proxy_ip = {proxy_ip:?} is not a host name or address; the port is proxy_ping_port"
                )
            }
            ConnectorSettings { proxy_ip, http_port: 0, .. } if !proxy_ip.is_empty() => {
                "http_port is what the router sends requests to: give the port of vLLM's server"
                    .into()
            }
            _ => return Ok(()),
        };
        Err(wrong)
    }

    /// Where an engine with these ports and so many TP ranks is to listen.
    pub(crate) fn places(&self, [handshake, notify]: [u16; 2], ranks: u16) -> ListenAddresses<'_> {
        ListenAddresses {
            host: ("host_ip", &self.host_ip),
            handshake: ("handshake_port", handshake),
            notify: ("notify_port", notify),
            ranks,
        }
    }

    /// Host of the engine's HTTP server.
    pub(super) fn http_host(&self) -> &str {
        if self.http_ip.is_empty() { &self.host_ip } else { &self.http_ip }
    }

    /// What moves the bytes.
    pub fn backend(&self) -> TransferBackend {
        self.backend.unwrap_or(TransferBackend::Host)
    }

    /// Where the transfer actors are.
    pub fn transfer(&self) -> TransferPlacement {
        self.transfer.unwrap_or(match self.backend() {
            TransferBackend::Host => TransferPlacement::Sidecar,
            // What one process imported from another cannot be passed on to a peer.
            _ => TransferPlacement::Worker,
        })
    }

    /// Who is answered: what the engine says itself, else what its host was told.
    pub(super) fn trust(&self, fabric: &HostConfig) -> TrustSettings {
        let mut peers = fabric.trust.clone();
        let own = self.secret_file.as_ref().or(self.mori.secret_file.as_ref()).cloned();
        peers.secret_file = own.or(peers.secret_file);
        peers.insecure_network = self.insecure_network.unwrap_or(peers.insecure_network);
        peers.encrypt = self.encrypt.unwrap_or(peers.encrypt);
        TrustSettings { peers, moriio_peers: self.moriio_peers, verify: self.verify }
    }

    /// The data plane of a rank; `fabric` has what a host was told of host memory.
    ///
    /// # Errors
    /// A setting that cannot be.
    pub fn plane(&self, fabric: &HostConfig) -> Result<PlaneConfig, String> {
        let wrong = |why| format!("kv_connector_extra_config: {why}");
        let trust = self.trust(fabric).peers;
        let backend = match self.backend() {
            TransferBackend::Host => {
                let workers = self.num_workers.into();
                let config = HostConfig { workers, trust, ..fabric.clone() };
                config.check().map_err(wrong)?;
                return Ok(PlaneConfig::Host(config));
            }
            TransferBackend::MoriRdma => Some(MoriBackend::Rdma),
            TransferBackend::MoriXgmi => Some(MoriBackend::Xgmi),
            TransferBackend::Mori => None,
        };
        let positive = |value: Option<i32>| value.and_then(|value| u32::try_from(value).ok());
        let config = MoriConfig {
            backend: backend.unwrap_or_default(),
            qp_per_transfer: positive(self.qp_per_transfer).unwrap_or(self.mori.qp_per_transfer),
            post_batch_size: positive(self.post_batch_size).unwrap_or(self.mori.post_batch_size),
            num_workers: self.num_workers.into(),
            host: self.host_ip.clone(),
            ..self.mori.clone()
        };
        let (checked, make): (_, fn(_, _) -> _) = match backend {
            Some(_) => (config.check(), PlaneConfig::mori),
            None => (MoriMixedPlane::check(&config), PlaneConfig::mori_mixed),
        };
        checked.map_err(|why| wrong(format!("mori: {why}")))?;
        make(config, trust).map_err(wrong)
    }

    /// Keys that were given and have no meaning for host memory.
    pub fn ignored_keys(&self) -> Vec<&'static str> {
        if self.backend() != TransferBackend::Host {
            return Vec::new();
        }
        let keys =
            [("qp_per_transfer", self.qp_per_transfer), ("post_batch_size", self.post_batch_size)];
        keys.iter().filter(|(_, value)| value.is_some()).map(|(key, _)| *key).collect()
    }
}

#[cfg(test)]
mod tests;
