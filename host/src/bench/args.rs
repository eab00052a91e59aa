//! What `bench` is told on the command line.

use crate::instance::{BackendArg, FabricArg, PlaneConfig, mori_settings};
use crate::process::{CommandError, address, name, seconds};
use crate::sidecar::config::{Paths, paths};
use clap::{Args, ValueEnum};
use kvferry_engine::fabric::Direction;
use kvferry_fabric_host::{HostConfig, PeerTrust};
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use std::net::IpAddr;
use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DirectionArg {
    /// From this side to the other
    Write,
    /// From the other side to this one
    Read,
    Both,
}

/// Arguments of `bench`.
#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    /// What moves the bytes
    #[arg(long, value_name = "FABRIC", default_value = "host")]
    pub(super) fabric: FabricArg,
    /// Backend of MoRI; rdma if not given
    #[arg(long, value_name = "BACKEND")]
    pub(super) backend: Option<BackendArg>,
    /// Settings of MoRI, an object with the keys of `mori` in kv_connector_extra_config, e.g.
    /// {"qp_per_transfer": 4}
    #[arg(long, value_name = "JSON")]
    pub(super) mori: Option<String>,
    /// Ways that the bytes may go with --fabric host, of shared-memory, cross-memory, tcp; on both
    /// sides. All if not given
    #[arg(long, value_name = "PATHS", value_parser = paths)]
    pub(super) paths: Option<Paths>,
    /// Memory of this GPU in place of memory of the host
    #[arg(long, value_name = "N")]
    pub(super) device: Option<u32>,
    /// Be the other side: wait here for benches that are given this address with --to, until
    /// SIGTERM or SIGINT. Port 0 takes a free one; a line of JSON says which
    #[arg(long, value_name = "ADDR:PORT", value_parser = address::listened, conflicts_with_all =
        ["to", "direction", "sizes", "batches", "seconds", "inflight", "json"])]
    pub(super) serve: Option<String>,
    /// Measure with the other side that waits there; otherwise with a process of this host, which
    /// is started for that
    #[arg(long, value_name = "ADDR:PORT", value_parser = address::dialled)]
    pub(super) to: Option<String>,
    /// End with the process that started this one; a side that waits also when its input ends
    #[arg(long, hide = true)]
    pub(super) child: bool,
    /// End when the first one was served
    #[arg(long, hide = true, requires = "serve")]
    pub(super) once: bool,
    /// Address that the data plane of this side listens at; if not given, the one of this side's
    /// end of --serve or --to
    #[arg(long, value_name = "HOST")]
    pub(super) host_ip: Option<String>,
    /// Which way the bytes go, seen from this side
    #[arg(long, value_name = "DIRECTION", default_value = "both")]
    pub(super) direction: DirectionArg,
    /// Sizes of a range in bytes; K, M and G are 1024 and its powers
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = bytes,
        default_value = "1K,16K,64K,1M,16M,64M")]
    pub(super) sizes: Vec<u64>,
    /// Ranges that are posted together
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,128",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) batches: Vec<u32>,
    /// Seconds per row: half for one batch at a time, half for several
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub(super) seconds: Duration,
    /// Batches in flight at a time, where there are several
    #[arg(long, value_name = "N", default_value = "8",
        value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) inflight: u32,
    /// Bytes of memory on this side; rows that need more are left out
    #[arg(long, value_name = "BYTES", default_value = "256M", value_parser = bytes)]
    pub(super) memory: u64,
    /// Longest wait for anything: an answer of the other side, one batch
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(super) timeout: Duration,
    /// Print one JSON object per row and line, and what else there is to say on stderr
    #[arg(long)]
    pub(super) json: bool,
}

/// A side as it is to be.
#[derive(Clone, Debug)]
pub(super) struct BenchPlan {
    pub(super) plane: PlaneConfig,
    /// The GPU whose memory is used; none for memory of the host.
    pub(super) device: Option<u32>,
    /// Bytes of memory.
    pub(super) memory: u64,
    pub(super) patience: Duration,
}

impl BenchArgs {
    /// # Errors
    /// Arguments that do not go together, or settings that cannot be.
    pub(super) fn plan(&self) -> Result<BenchPlan, CommandError> {
        let plane = match self.fabric {
            FabricArg::Host => self.host_plane(),
            FabricArg::Mori => self.mori_plane(),
        };
        let plane = plane.map_err(CommandError::Input)?;
        Ok(BenchPlan { plane, device: self.device, memory: self.memory, patience: self.timeout })
    }

    fn host_plane(&self) -> Result<PlaneConfig, String> {
        let given = [
            ("--backend", self.backend.is_some()),
            ("--mori", self.mori.is_some()),
            ("--device", self.device.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(format!("{name} is for --fabric mori; this is --fabric host")),
            // There is nothing in its memory but patterns.
            None => {
                let trust = PeerTrust { insecure_network: true, ..PeerTrust::default() };
                let mut config = HostConfig { trust, ..HostConfig::default() };
                if let Some(Paths(paths)) = &self.paths {
                    config.paths = paths.clone();
                }
                Ok(PlaneConfig::Host(config))
            }
        }
    }

    fn mori_plane(&self) -> Result<PlaneConfig, String> {
        if self.paths.is_some() {
            return Err("--paths is for --fabric host; this is --fabric mori".into());
        }
        let backend = self.backend.map_or(MoriBackend::Rdma, MoriBackend::from);
        if backend == MoriBackend::Xgmi && self.device.is_none() {
            return Err(
                "--backend xgmi copies between GPUs and takes no memory of the host: give \
                        --device N, the GPU whose memory is to be used"
                    .into(),
            );
        }
        let config = match &self.mori {
            Some(text) => mori_settings(text).map_err(|why| format!("--mori {text}: {why}"))?,
            None => MoriConfig::default(),
        };
        config.check().map_err(|why| format!("--mori: {why}"))?;
        Ok(PlaneConfig::Mori(MoriConfig { backend, insecure_network: true, ..config }))
    }

    /// The address that the plane listens at, if this side's end of the connection is at `local`.
    ///
    /// # Errors
    /// That is no address that the other side can be told.
    pub(super) fn host(&self, local: IpAddr) -> Result<String, CommandError> {
        match &self.host_ip {
            Some(host) => Ok(host.clone()),
            None if local.is_unspecified() => Err(CommandError::Input(format!(
                "--serve {}: give --host-ip, too, the address of this host that the others reach",
                self.serve.as_deref().unwrap_or_default()
            ))),
            None => Ok(local.to_canonical().to_string()),
        }
    }

    pub(super) fn directions(&self) -> &'static [Direction] {
        match self.direction {
            DirectionArg::Write => &[Direction::Write],
            DirectionArg::Read => &[Direction::Read],
            DirectionArg::Both => &[Direction::Write, Direction::Read],
        }
    }

    /// The arguments of a process that is the other side.
    pub(super) fn of_child(&self) -> Vec<String> {
        let mut args = vec!["bench".into(), "--serve".into(), "127.0.0.1:0".into()];
        args.extend(["--child".into(), "--fabric".into(), name(&self.fabric)]);
        let given = [
            ("--backend", self.backend.as_ref().map(name)),
            ("--mori", self.mori.clone()),
            ("--paths", self.paths.as_ref().map(Paths::names)),
            ("--device", self.device.map(|device| device.to_string())),
            ("--host-ip", self.host_ip.clone()),
            ("--memory", Some(self.memory.to_string())),
            ("--timeout", Some(self.timeout.as_secs_f64().to_string())),
        ];
        for (name, value) in given {
            // With "=", as values may start with a dash.
            args.extend(value.map(|value| format!("{name}={value}")));
        }
        args
    }
}

/// Bytes of an argument such as 64K.
fn bytes(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("{text:?} is no number of bytes; give one from 1, with K, M or G after it");
    let text = text.trim();
    let (digits, shift) = match text.char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text[..at], 10),
        Some((at, 'M' | 'm')) => (&text[..at], 20),
        Some((at, 'G' | 'g')) => (&text[..at], 30),
        _ => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).filter(|bytes| *bytes > 0).ok_or_else(wrong)
}

/// Bytes as the arguments have them, see [`bytes`].
pub(super) fn brief(bytes: u64) -> String {
    let units = [(30, "G"), (20, "M"), (10, "K")];
    let whole = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    match whole {
        Some((shift, unit)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        assert_eq!(bytes("1"), Ok(1));
        assert_eq!(bytes("1000"), Ok(1_000));
        assert_eq!(bytes("64K"), Ok(65_536));
        assert_eq!(bytes("3m"), Ok(3 << 20));
        assert_eq!(bytes("2G"), Ok(2 << 30));
        for wrong in ["", "0", "0K", "K", "1.5M", "-1", "64KB", "99999999999G", "1\u{e9}"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
        let texts = [0, 1000, 1 << 10, 3 << 20, 64 << 30].map(brief);
        assert_eq!(texts, ["0", "1000", "1K", "3M", "64G"]);
    }
}
