//! Who is answered at the ports of an instance, for the start, the log and the metrics.

use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::verify::Verify;
use kvferry_engine::fabric::unbracketed;
use kvferry_fabric_host::PeerTrust;
use kvferry_trust::{NetworkRefusal, NetworkTrust, are_loopback};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use std::net::ToSocketAddrs;
use std::sync::{Arc, Once};

/// Who is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InstanceTrust {
    /// What is between the ports and the network.
    pub(crate) network: NetworkTrust,
    /// Peers that speak MoRIIO, and can prove nothing.
    pub(crate) moriio_peers: bool,
    /// KV is verified, which those cannot do either.
    pub(crate) is_verifying: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TrustLabels {
    network: &'static str,
    moriio_peers: &'static str,
}

/// What an instance is told of who is answered.
#[derive(Clone, Debug)]
pub(crate) struct TrustSettings {
    pub(crate) peers: PeerTrust,
    /// Whether there are peers that speak MoRIIO. If it is not said there are, unless others are to
    /// prove a secret there.
    pub(crate) moriio_peers: Option<bool>,
    /// How much of the KV is verified.
    pub(crate) verify: Verify,
}

impl InstanceTrust {
    /// Of who is to listen there.
    ///
    /// # Errors
    /// An address that others reach with nothing between, or a name without one; peers that are to
    /// be dealt with and cannot do what they have to.
    pub(crate) fn of(
        host @ (setting, name): (&str, &str),
        TrustSettings { peers, moriio_peers, verify }: &TrustSettings,
    ) -> Result<InstanceTrust, NetworkRefusal> {
        let found = (unbracketed(name), 0).to_socket_addrs().map_err(|why| NetworkRefusal {
            found: format!("{setting} = {name}: no address of that name: {why}"),
            remedy: "give one of this machine".into(),
        })?;
        let addresses: Vec<_> = found.map(|at| at.ip()).collect();
        let (secret, at) = (peers.secret_file.as_deref(), addresses.iter().copied());
        let network = NetworkTrust::of((host, at), secret, peers.insecure_network)?;
        let is_open = network != NetworkTrust::Secret || are_loopback(addresses);
        let is_verifying = !verify.is_off();
        if is_verifying && *moriio_peers == Some(true) {
            return Err(NetworkRefusal {
                found: format!(
                    "verify = {verify} with moriio_peers: peers that speak MoRIIO cannot prove any KV"
                ),
                remedy: "leave one of them out".into(),
            });
        }
        let moriio_peers = moriio_peers.unwrap_or(is_open && !is_verifying);
        Ok(InstanceTrust { network, moriio_peers, is_verifying })
    }

    /// Why peers that speak MoRIIO are not dealt with by the engine at an address, if they are not.
    pub(crate) fn moriio_closed(self, engine: &EngineId) -> Option<Arc<str>> {
        let why = || {
            format!(
                "{engine} deals with no peers that speak MoRIIO, which cannot prove the fleet's \
                 secret: its moriio_peers true lets them in"
            )
        };
        // Who verifies says itself why there are none.
        (!self.moriio_peers && !self.is_verifying).then(|| why().into())
    }

    /// Logs what is not proven though there is a secret or because there is none, each once in a
    /// process.
    pub(crate) fn announce(self) {
        static ONCE: Once = Once::new();
        self.network.announce();
        if self.network == NetworkTrust::Secret && self.moriio_peers {
            ONCE.call_once(|| {
                tracing::warn!("peers that speak MoRIIO are answered, and prove no secret");
            });
        }
    }

    /// Adds the series that says it.
    pub(crate) fn register(self, registry: &mut Registry) {
        let trust: Family<TrustLabels, Gauge> = Family::default();
        let moriio_peers = if self.moriio_peers { "true" } else { "false" };
        trust.get_or_create(&TrustLabels { network: self.network.name(), moriio_peers }).set(1);
        registry.register("trust", "Who is answered at the ports of this process", trust);
    }
}
