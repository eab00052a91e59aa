//! What is known of an engine's host before there is one, for errors at the start of vLLM.

use super::config::HostArgs;
use super::settings::{ConnectorSettings, HostStart};
use crate::instance::InstanceTrust;

impl ConnectorSettings {
    /// Whether a host that the connector starts, with what this environment says to it, would
    /// listen at the address of the engine, and with `ports` whether it could at those that were
    /// given. What one that is there was told is not known here.
    ///
    /// # Errors
    /// The key and its value, why not, and what to do.
    pub fn try_listen(&self, ports: bool) -> Result<(), String> {
        if self.trust_of_host()?.is_some() && ports {
            let tried = self.places([self.handshake_port, self.notify_port], 1).check_all();
            return tried.map_err(|why| format!("kv_connector_extra_config: {why}"));
        }
        Ok(())
    }

    /// Who such a host answers: `loopback`, `secret` or `insecure`, and whether it does peers that
    /// speak MoRIIO; none where the connector does not start it.
    ///
    /// # Errors
    /// As above.
    pub fn answered(&self) -> Result<Option<(&'static str, bool)>, String> {
        let trust = self.trust_of_host()?;
        Ok(trust.map(|trust| (trust.network.name(), trust.moriio_peers)))
    }

    fn trust_of_host(&self) -> Result<Option<InstanceTrust>, String> {
        if self.host == HostStart::Connect {
            return Ok(None);
        }
        let host = HostArgs::default().resolve(std::env::vars_os())?;
        let fabric = &host.operator.fabric;
        self.plane(fabric)?;
        let trust = InstanceTrust::of(("host_ip", &self.host_ip), &self.trust(fabric));
        trust.map(Some).map_err(|why| format!("kv_connector_extra_config: {why}"))
    }
}
