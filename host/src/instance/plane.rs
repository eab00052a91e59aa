//! The data planes that there are, by what is configured.

use crate::instance::PlaneMeter;
use kvferry_engine::core::config::CoreConfig;
use kvferry_engine::fabric::DataPlane;
use kvferry_fabric_host::{HostConfig, HostPlane, PeerTrust};
use kvferry_fabric_mori::{DeviceEvents, MoriConfig, MoriMixedPlane, MoriPlane};
use serde::{Deserialize, Serialize};
use std::ffi::OsString;

/// Set where MoRI is not looked for GPU and network card before it is called: for a stand-in.
const WITHOUT_DEVICES: &str = "KVFERRY_MORI_WITHOUT_DEVICES";

/// What moves the bytes, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlaneConfig {
    Host(HostConfig),
    Mori(MoriConfig),
    /// Both backends of MoRI, chosen peer by peer.
    MoriMixed(MoriConfig),
}

/// A data plane that was started.
pub(crate) struct StartedPlane {
    pub(crate) plane: Box<dyn DataPlane>,
    /// What tells what it did.
    pub(crate) meter: PlaneMeter,
    /// What tells when kernels are done, if it moves memory of a GPU.
    pub(crate) events: Option<DeviceEvents>,
}

impl PlaneConfig {
    /// `host`, `mori-rdma`, `mori-xgmi` or `mori`, as configurations have it.
    pub fn backend(&self) -> &'static str {
        match self {
            PlaneConfig::Host(_) => "host",
            PlaneConfig::Mori(config) => config.backend.name(),
            PlaneConfig::MoriMixed(_) => MoriMixedPlane::NAME,
        }
    }

    /// A plane over one backend of MoRI for peers that are trusted like this.
    ///
    /// # Errors
    /// What MoRI moves is to be encrypted.
    pub(crate) fn mori(config: MoriConfig, trust: PeerTrust) -> Result<PlaneConfig, String> {
        trusting(config.backend.name(), config, trust).map(PlaneConfig::Mori)
    }

    /// The same over both.
    ///
    /// # Errors
    /// What MoRI moves is to be encrypted.
    pub(crate) fn mori_mixed(config: MoriConfig, trust: PeerTrust) -> Result<PlaneConfig, String> {
        trusting(MoriMixedPlane::NAME, config, trust).map(PlaneConfig::MoriMixed)
    }

    /// The plane of a TP rank, which listens at `host`. What makes it one of an instance is set
    /// here, the rest is as configured.
    ///
    /// # Errors
    /// What it cannot have, and why.
    pub(crate) fn start(
        self,
        core: &CoreConfig,
        rank: u16,
        host: &str,
    ) -> Result<StartedPlane, String> {
        let key = format!("{}-{:x}-tp{rank}", core.engine, core.incarnation.0);
        // Peers that speak MoRIIO have no hello in which a key could be agreed on.
        let open_door = core.moriio.as_ref().is_some_and(|moriio| moriio.closed.is_none());
        self.start_as(key, host, open_door)
    }

    /// The plane with a name, which listens at `host`. An open door lets in peers that it was never
    /// connected to.
    ///
    /// # Errors
    /// What it cannot have, and why.
    pub(crate) fn start_as(
        self,
        key: String,
        host: &str,
        open_door: bool,
    ) -> Result<StartedPlane, String> {
        let of_mori = |config: MoriConfig| {
            let variables = mori_variables(std::env::vars_os());
            if !variables.is_empty() {
                tracing::info!(variables, "the environment wins over settings of MoRI");
            }
            let devices = config.devices && std::env::var_os(WITHOUT_DEVICES).is_none();
            MoriConfig { key: key.clone(), host: host.into(), devices, open_door, ..config }
        };
        match self {
            PlaneConfig::Host(config) => {
                let config = HostConfig { key, host: host.into(), open_door, ..config };
                let plane = HostPlane::new(config).map_err(|why| why.to_string())?;
                let meter = PlaneMeter::Host(plane.meter());
                Ok(StartedPlane { plane: Box::new(plane), meter, events: None })
            }
            PlaneConfig::Mori(config) => {
                let plane = MoriPlane::new(of_mori(config)).map_err(|why| why.to_string())?;
                let meter = PlaneMeter::Mori(vec![plane.meter()]);
                let events = Some(plane.device_events());
                Ok(StartedPlane { plane: Box::new(plane), meter, events })
            }
            PlaneConfig::MoriMixed(config) => {
                let plane = MoriMixedPlane::new(of_mori(config)).map_err(|why| why.to_string())?;
                let meter = PlaneMeter::Mori(plane.meters().into());
                let events = Some(plane.device_events());
                Ok(StartedPlane { plane: Box::new(plane), meter, events })
            }
        }
    }
}

/// Settings of MoRI for peers that are trusted like this.
fn trusting(backend: &str, config: MoriConfig, trust: PeerTrust) -> Result<MoriConfig, String> {
    let PeerTrust { secret_file, insecure_network, encrypt, .. } = trust;
    if encrypt {
        return Err(format!(
            "encrypt: nothing encrypts what is moved by {backend}: leave it out, also of the \
             host's configuration, or take host in its place"
        ));
    }
    Ok(MoriConfig { secret_file, insecure_network, ..config })
}

/// What of an environment MoRI reads itself, in order.
fn mori_variables(all: impl Iterator<Item = (OsString, OsString)>) -> String {
    let told = |(name, value): (OsString, OsString)| {
        let is_ours = |name: &&str| kvferry_fabric_mori::timeouts_set().contains(name);
        let name = name.to_str().filter(|name| name.starts_with("MORI_") && !is_ours(name))?;
        Some(format!("{name}={}", value.display()))
    };
    let mut told: Vec<String> = all.filter_map(told).collect();
    told.sort();
    told.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_mori_reads_is_told() {
        let all = [("MORI_RDMA_TC", "3"), ("KVFERRY_MORI_SHIM", "x"), ("MORI_IO_SL", "1")];
        let all = all.into_iter().map(|(name, value)| (name.into(), value.into()));
        assert_eq!(mori_variables(all), "MORI_IO_SL=1 MORI_RDMA_TC=3");
    }
}
