//! What a host plane is told at its start.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How bytes get from one process to another, fastest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataPath {
    /// The source is a memory file that the owner of the destination maps.
    SharedMemory,
    /// The kernel copies between the address spaces of two processes of one host.
    CrossMemory,
    /// A connection that carries the bytes; the only path between hosts.
    Tcp,
}

impl DataPath {
    /// All paths, fastest first.
    pub const ALL: [DataPath; 3] = [DataPath::SharedMemory, DataPath::CrossMemory, DataPath::Tcp];

    /// `shared-memory`, `cross-memory` or `tcp`.
    pub const fn name(self) -> &'static str {
        match self {
            DataPath::SharedMemory => "shared-memory",
            DataPath::CrossMemory => "cross-memory",
            DataPath::Tcp => "tcp",
        }
    }
}

impl fmt::Display for DataPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whom a plane greets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PeerTrust {
    /// Users beside the own one whose processes are greeted at the local socket.
    pub uids: Vec<u32>,
    /// File of the fleet's secret, which peers have to prove that they know, and this plane to them.
    /// None asks nobody, and is refused by planes that have one.
    pub secret_file: Option<PathBuf>,
    /// Encrypt what goes by TCP, which peers have to do, too. It needs a secret.
    // Who knows fewer settings refuses others, so it is said only if it was set, as what follows.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub encrypt: bool,
    /// Listen where others reach this plane though there is no secret.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub insecure_network: bool,
}

impl PeerTrust {
    fn is_default(&self) -> bool {
        *self == PeerTrust::default()
    }
}

/// Settings of a [`HostPlane`](crate::HostPlane). Times in milliseconds unless the name says
/// otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HostConfig {
    /// Name of this engine, in its address and in its regions' descriptors.
    pub key: String,
    /// Host name or address to listen at; IPv6 with or without brackets.
    pub host: String,
    /// Port to listen at; 0 for a free one.
    pub port: u16,
    /// The host that peers are told, where `host` is a wildcard or not what they can reach.
    pub advertised: Option<String>,
    /// Threads that copy, at least as many as `streams`. Each connection belongs to one of them.
    pub workers: u32,
    /// Threads that share one long copy by cross-memory attach, who it belongs to among them.
    pub copiers: u32,
    /// Most operations in flight.
    pub operations_max: u32,
    /// Most slices in one operation.
    pub slices_max: u32,
    /// Most connections of peers that are served at a time.
    pub links_max: u32,
    /// A connection, and then its greeting, that takes longer has failed.
    pub connect_ms: u32,
    /// A session that takes longer to open has failed.
    pub open_ms: u32,
    /// A host that is silent for longer is dead; with processes of this host it takes no time.
    pub dead_ms: u32,
    /// Bytes of reads that are copied by the thread that submits them, between two polls, where the
    /// memory of the peer can be reached: it would take longer to wake another one. 0 for none; the
    /// default takes below a millisecond.
    pub inline_max: u32,
    /// How long a thread looks for work before it sleeps.
    pub spin_us: u32,
    /// The paths that may be taken.
    pub paths: Vec<DataPath>,
    /// Take a slower path of `paths` where the one that memory and hosts call for cannot be had.
    /// Otherwise that fails the session.
    pub slower: bool,
    /// Serve sessions under fence key 0 of peers that were never connected to, until they are fenced.
    pub open_door: bool,
    /// Who is greeted.
    // Said only if it was set, for the same reason.
    #[serde(skip_serializing_if = "PeerTrust::is_default")]
    pub trust: PeerTrust,
    /// Connections by TCP to each peer, which share its longer operations.
    // Here and not among its kin: settings were said as a list once, and the older are read so.
    #[serde(skip_serializing_if = "is_default_streams")]
    pub streams: u32,
}

/// One makes a thread of each side the limit; on two cores, which is what this was measured on, four
/// were no faster than two.
const STREAMS: u32 = 2;

fn is_default_streams(streams: &u32) -> bool {
    *streams == STREAMS
}

impl Default for HostConfig {
    fn default() -> Self {
        HostConfig {
            key: "kvferry".into(),
            host: "127.0.0.1".into(),
            port: 0,
            advertised: None,
            workers: 1,
            streams: STREAMS,
            copiers: 2,
            operations_max: 4_096,
            slices_max: 65_536,
            links_max: 1_024,
            connect_ms: 2_000,
            open_ms: 5_000,
            dead_ms: 5_000,
            inline_max: 8 << 20,
            spin_us: 50,
            paths: DataPath::ALL.into(),
            slower: false,
            open_door: false,
            trust: PeerTrust::default(),
        }
    }
}

impl HostConfig {
    pub(crate) fn connect(&self) -> Duration {
        Duration::from_millis(self.connect_ms.into())
    }

    /// Threads that copy.
    pub(crate) fn threads(&self) -> u32 {
        self.workers.max(self.streams)
    }

    pub(crate) fn allows(&self, path: DataPath) -> bool {
        self.paths.contains(&path)
    }

    /// Whether a plane would take these settings.
    ///
    /// # Errors
    /// The setting, its value and what it may be.
    pub fn check(&self) -> Result<(), String> {
        for (name, value, most) in [
            ("workers", self.workers, 256),
            ("streams", self.streams, 64),
            ("copiers", self.copiers, 256),
            ("operations_max", self.operations_max, 1 << 20),
            ("slices_max", self.slices_max, 1 << 20),
            ("links_max", self.links_max, u32::MAX),
            ("connect_ms", self.connect_ms, u32::MAX),
            ("open_ms", self.open_ms, u32::MAX),
            ("dead_ms", self.dead_ms, u32::MAX),
        ] {
            if value == 0 {
                return Err(format!("{name} = 0: it has to be 1 or more"));
            }
            if value > most {
                return Err(format!("{name} = {value}: it may be {most} at most"));
            }
        }
        if self.trust.encrypt && self.trust.secret_file.is_none() {
            let why = "encrypt = true: it needs a secret, which both sides prove: name its file by \
                secret_file";
            return Err(why.into());
        }
        if self.paths.is_empty() {
            return Err("paths = []: name at least one of shared-memory, cross-memory, tcp".into());
        }
        Ok(())
    }
}
