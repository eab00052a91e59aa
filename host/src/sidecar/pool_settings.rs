//! What a host is told of its pool of payloads. Without a pool none of it means anything: given on the
//! command line that is a mistake, and from a file or an environment that hosts share it is ignored.

use super::config::{number, pool_address};
use super::mori_settings::{MoriGiven, MoriStageSettings};
use super::pool_peers::PoolAddress;
use clap::Args;
use kvferry_engine::core::payload::PayloadConfig;
use kvferry_engine::core::time::Nanos;
use std::time::Duration;

/// What one source says of it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(super) struct PoolGiven {
    /// Bytes of a pool for payloads of vLLM-Omni's stages, which the host then serves in place of an
    /// engine; see docs/omni.md
    #[arg(long, value_name = "BYTES", value_parser = payload_pool)]
    payload_pool: Option<u64>,
    /// Milliseconds for which a payload waits for its receivers, 0 for ever; 300000 by default
    #[arg(long, value_name = "N", value_parser = payload_hold_ms)]
    payload_hold_ms: Option<u64>,
    #[command(flatten)]
    mori: MoriGiven,
    /// End when no process of a stage has been there for so many seconds; if not given, with SIGTERM
    #[arg(long, value_name = "N", value_parser = idle_s)]
    idle_s: Option<u64>,
    /// Where other hosts with a pool reach this one, as they call it; port 0 takes a free one, which
    /// is logged; nowhere if not given
    #[arg(long, value_name = "HOST:PORT", value_parser = payload_listen)]
    payload_listen: Option<PoolAddress>,
    /// Where this host finds others that put payloads, as their payload_listen says, with commas
    /// between; besides, those that a stage names
    #[arg(long, value_name = "HOST:PORT,...", value_parser = payload_hosts)]
    payload_hosts: Option<PoolAddresses>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct PoolAddresses(Vec<PoolAddress>);

/// What a host for the payloads of stages is to be.
#[derive(Clone, Debug)]
pub(crate) struct PayloadSettings {
    /// Bytes of its pool.
    pub(crate) pool: u64,
    /// How long a payload waits for its receivers; zero: for ever.
    pub(crate) hold: Nanos,
    /// It ends when no process has been there for so long, if that is given.
    pub(crate) idle: Option<Duration>,
    /// Where other hosts reach it, if they do, and where it finds them.
    pub(crate) peers: Option<(PoolAddress, Vec<PoolAddress>)>,
    /// Stages whose connector is vLLM-Omni's for MoRI, if they are served.
    pub(crate) mori: Option<MoriStageSettings>,
}

/// A pool, if there is to be one, or the keys that say something of a pool that there is not.
#[derive(Clone, Debug)]
pub(super) struct PoolResolved {
    pub(super) payloads: Option<PayloadSettings>,
    pub(super) ignored: Vec<&'static str>,
}

fn payload_pool(text: &str) -> Result<u64, String> {
    match number("payload_pool", text)? {
        0 => Err("payload_pool = \"0\": it has to have bytes".into()),
        bytes => Ok(bytes),
    }
}

fn payload_hold_ms(text: &str) -> Result<u64, String> {
    number("payload_hold_ms", text)
}

fn idle_s(text: &str) -> Result<u64, String> {
    number("idle_s", text)
}

fn payload_listen(text: &str) -> Result<PoolAddress, String> {
    pool_address("payload_listen", text)
}

fn payload_hosts(text: &str) -> Result<PoolAddresses, String> {
    let hosts = text.split(',').map(str::trim).filter(|host| !host.is_empty());
    let hosts = hosts.map(|host| pool_address("payload_hosts", host));
    hosts.collect::<Result<_, _>>().map(PoolAddresses)
}

impl PoolGiven {
    /// Takes a key; false if it is none of these.
    pub(super) fn set(&mut self, key: &str, text: &str) -> Result<bool, String> {
        match key {
            "payload_pool" => self.payload_pool = Some(payload_pool(text)?),
            "payload_hold_ms" => self.payload_hold_ms = Some(payload_hold_ms(text)?),
            "idle_s" => self.idle_s = Some(idle_s(text)?),
            "payload_listen" => self.payload_listen = Some(payload_listen(text)?),
            "payload_hosts" => self.payload_hosts = Some(payload_hosts(text)?),
            key => return self.mori.set(key, text),
        }
        Ok(true)
    }

    pub(super) fn or(self, other: PoolGiven) -> PoolGiven {
        PoolGiven {
            payload_pool: self.payload_pool.or(other.payload_pool),
            payload_hold_ms: self.payload_hold_ms.or(other.payload_hold_ms),
            mori: self.mori.or(other.mori),
            idle_s: self.idle_s.or(other.idle_s),
            payload_listen: self.payload_listen.or(other.payload_listen),
            payload_hosts: self.payload_hosts.or(other.payload_hosts),
        }
    }

    /// The keys that are given of those that say how a pool is to be.
    fn about_a_pool(&self) -> Vec<&'static str> {
        let own = [
            ("payload_hold_ms", self.payload_hold_ms.is_some()),
            ("idle_s", self.idle_s.is_some()),
            ("payload_listen", self.payload_listen.is_some()),
            ("payload_hosts", self.payload_hosts.is_some()),
        ];
        let all = own.into_iter().chain(self.mori.are_given());
        all.filter_map(|(key, is_given)| is_given.then_some(key)).collect()
    }

    /// What all sources say together; `flags` is what the command line says of it.
    ///
    /// # Errors
    /// What does not go together, and what the command line says of a pool that there is not.
    pub(super) fn resolve(&self, flags: &PoolGiven) -> Result<PoolResolved, String> {
        let Some(pool) = self.payload_pool else {
            let on_the_line = flags.about_a_pool();
            if on_the_line.is_empty() {
                return Ok(PoolResolved { payloads: None, ignored: self.about_a_pool() });
            }
            let option = |key: &str| format!("--{}", key.replace('_', "-"));
            let options: Vec<_> = on_the_line.into_iter().map(option).collect();
            return Err(format!(
                "{}: of a pool of payloads, and this host has none: give --payload-pool BYTES, \
                or leave it away",
                options.join(", ")
            ));
        };
        let hosts = self.payload_hosts.as_ref().map_or(Vec::new(), |hosts| hosts.0.clone());
        let peers = match (&self.payload_listen, hosts) {
            (Some(listen), hosts) => Some((listen.clone(), hosts)),
            (None, hosts) if hosts.is_empty() => None,
            (None, _) => {
                return Err(
                    "payload_hosts is given without payload_listen: give an address of this \
                    machine, with port 0 if no other host looks for it"
                        .into(),
                );
            }
        };
        let hold = self.payload_hold_ms.map_or(PayloadConfig::default().hold, Nanos::from_ms);
        let idle = self.idle_s.map(Duration::from_secs);
        let mori = self.mori.settings()?;
        let payloads = Some(PayloadSettings { pool, hold, idle, peers, mori });
        Ok(PoolResolved { payloads, ignored: Vec::new() })
    }
}
