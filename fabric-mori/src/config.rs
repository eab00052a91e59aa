//! What a MoRI plane is told at its start.

use kvferry_engine::core::time::Nanos;
use kvferry_engine::fabric::PlaneTimeouts;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;

/// Which of MoRI's backends moves the bytes. There is no fallback from one to another.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum MoriBackend {
    /// Network cards, between hosts or in one.
    #[default]
    Rdma,
    /// Links between the GPUs of one host.
    Xgmi,
}

impl MoriBackend {
    /// `mori-rdma` or `mori-xgmi`, as configurations and metrics have it.
    pub const fn name(self) -> &'static str {
        match self {
            MoriBackend::Rdma => "mori-rdma",
            MoriBackend::Xgmi => "mori-xgmi",
        }
    }
}

impl fmt::Display for MoriBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Settings of a [`MoriPlane`](crate::MoriPlane). Times in milliseconds unless the name says
/// otherwise; those of MoRI's own have its names. MoRI's environment variables `MORI_IO_*` win over
/// what is here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MoriConfig {
    /// Name of this engine; an incarnation is added to it.
    pub key: String,
    /// IPv4 address of this host at which MoRI's control plane and the acceptor listen. MoRI takes no
    /// names.
    pub host: String,
    /// Port of MoRI's control plane; 0 for a free one.
    pub port: u16,
    /// Port of the acceptor, at which peers ask for regions; 0 for a free one.
    pub door_port: u16,
    /// What moves the bytes.
    pub backend: MoriBackend,
    /// Queue pairs per pair of engines.
    pub qp_per_transfer: u32,
    /// Work requests per post; 0 lets MoRI choose.
    pub post_batch_size: u32,
    /// Threads of MoRI that post; it takes `qp_per_transfer` of them at most.
    pub num_workers: u32,
    /// MoRI's completion thread waits for events in place of polling. It spins in both modes.
    pub poll_events: bool,
    /// Split long ranges into pieces of `chunk_bytes`.
    pub chunking: bool,
    /// Bytes of a piece, 4,096 or more.
    pub chunk_bytes: u64,
    /// Most pieces of one range.
    pub chunks_max: u32,
    /// Network cards that share one transfer.
    pub nics_per_transfer: u32,
    /// Work requests that a queue pair has room for; 0 for MoRI's 8,192.
    pub send_wr_max: u32,
    /// Entries of a completion queue; 0 for MoRI's 16,384.
    pub cqe_max: u32,
    /// Ranges that one work request gathers; 0 for what the card can do, 4 at most.
    pub sge_max: u32,
    /// Streams, and as many events, of xGMI.
    pub streams: u32,
    /// Most operations in flight.
    pub operations_max: u32,
    /// Most slices in one operation.
    pub slices_max: u32,
    /// An acceptor that takes longer to answer, or a session to open, has failed. Who uses the plane
    /// waits for as long, whatever its own limit. A step of MoRI's control plane has as long, as
    /// the first plane of a process has it (`MORI_IO_CP_TIMEOUT_MS`).
    pub open_ms: u32,
    /// An operation that takes longer has failed; MoRI has no limit of its own. Who uses the plane
    /// waits for as long, as above. A post has as long to find room in a send queue, as the first
    /// plane of a process has it (`MORI_IO_SQ_BACKOFF_TIMEOUT_US`).
    pub operation_ms: u32,
    /// How long a rebuild waits for the operations with other peers, before it retries them.
    pub drain_ms: u32,
    /// A host that is silent for longer is dead; with processes of this host it takes no time.
    pub dead_ms: u32,
    /// How long the thread that watches statuses looks without a pause, in microseconds.
    pub spin_us: u32,
    /// Look for GPU and network card before MoRI is called, which ends the process without them.
    pub devices: bool,
    /// Open sessions with peers that have no acceptor, such as those of vLLM's own connector, and let
    /// peers in under fence key 0 that were never connected to, until they are fenced.
    pub open_door: bool,
    /// Queue pairs of peers that have ended, after which the backend is replaced while nothing is
    /// under way: MoRI polls them, and drops them in no other way. At so many if no peer is
    /// connected, at twice as many all the same; 0 is never. RDMA only.
    // Who knows fewer settings refuses others, so it is said only if it was set. Later ones as
    // well.
    #[serde(skip_serializing_if = "is_dead_pairs_max")]
    pub dead_pairs_max: u32,
    /// File of the fleet's secret, which peers have to prove to the acceptor that they know, and it
    /// to them. None asks nobody, and is refused by planes that have one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_file: Option<PathBuf>,
    /// Listen where others reach this plane though there is no secret.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub insecure_network: bool,
}

/// Default of [`MoriConfig::dead_pairs_max`].
const DEAD_PAIRS_MAX: u32 = 64;

fn is_dead_pairs_max(value: &u32) -> bool {
    *value == DEAD_PAIRS_MAX
}

impl Default for MoriConfig {
    fn default() -> Self {
        MoriConfig {
            key: "kvferry".into(),
            host: "127.0.0.1".into(),
            port: 0,
            door_port: 0,
            backend: MoriBackend::Rdma,
            qp_per_transfer: 1,
            post_batch_size: 0,
            num_workers: 1,
            poll_events: false,
            chunking: false,
            chunk_bytes: 65_536,
            chunks_max: 64,
            nics_per_transfer: 1,
            send_wr_max: 0,
            cqe_max: 0,
            sge_max: 0,
            streams: 64,
            operations_max: 256,
            slices_max: 8_192,
            open_ms: 10_000,
            operation_ms: 2_000,
            drain_ms: 1_000,
            dead_ms: 5_000,
            spin_us: 50,
            devices: true,
            open_door: false,
            secret_file: None,
            insecure_network: false,
            dead_pairs_max: DEAD_PAIRS_MAX,
        }
    }
}

/// MoRI's room for work requests per queue pair, where `send_wr_max` leaves it the choice.
const SEND_WR: u32 = 8_192;

impl MoriConfig {
    /// Ranges that may be in flight to one peer, so that its send queues have room for them.
    pub(crate) fn ranges_max(&self) -> u64 {
        let each = if self.send_wr_max == 0 { SEND_WR } else { self.send_wr_max };
        u64::from(each) * u64::from(self.qp_per_transfer)
    }

    /// How long a plane with these settings takes to say that something has failed. Its owner waits
    /// a little longer, so that it is the plane that says it.
    pub(crate) fn patience(&self) -> PlaneTimeouts {
        let and_more = |ms: u32| Nanos::from_ms(u64::from(ms) + u64::from(ms) / 8 + 100);
        PlaneTimeouts { open: and_more(self.open_ms), operation: and_more(self.operation_ms) }
    }

    /// Whether a plane would take these settings.
    ///
    /// # Errors
    /// The setting, its value and what it may be.
    pub fn check(&self) -> Result<(), String> {
        let ranges = [
            ("qp_per_transfer", self.qp_per_transfer, 1, 1_024),
            ("post_batch_size", self.post_batch_size, 0, 65_536),
            ("num_workers", self.num_workers, 1, 256),
            ("chunks_max", self.chunks_max, 1, 65_536),
            ("nics_per_transfer", self.nics_per_transfer, 1, 64),
            ("send_wr_max", self.send_wr_max, 0, 1 << 20),
            ("cqe_max", self.cqe_max, 0, 1 << 22),
            ("sge_max", self.sge_max, 0, 64),
            ("streams", self.streams, 1, 4_096),
            ("operations_max", self.operations_max, 1, 1 << 20),
            ("slices_max", self.slices_max, 1, 1 << 20),
            ("open_ms", self.open_ms, 1, u32::MAX),
            ("operation_ms", self.operation_ms, 1, u32::MAX),
            ("dead_ms", self.dead_ms, 1, u32::MAX),
        ];
        for (name, value, least, most) in ranges {
            if !(least..=most).contains(&value) {
                return Err(format!("{name} = {value}: it may be {least} to {most}"));
            }
        }
        if !(4_096..=1 << 32).contains(&self.chunk_bytes) {
            return Err(format!("chunk_bytes = {}: it may be 4096 to 2^32", self.chunk_bytes));
        }
        if self.port == 1 {
            return Err("port = 1: MoRI means by it that there is no RDMA; name another".into());
        }
        if u64::from(self.slices_max) > self.ranges_max() {
            return Err(format!(
                "slices_max = {}: the send queues have room for {}; raise send_wr_max or qp_per_transfer",
                self.slices_max,
                self.ranges_max()
            ));
        }
        match self.host.parse::<Ipv4Addr>() {
            Ok(host) if !host.is_unspecified() => Ok(()),
            _ => Err(format!("host = \"{}\": MoRI needs an IPv4 address of this host", self.host)),
        }
    }
}
