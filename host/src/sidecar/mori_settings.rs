//! What a host is told of stages whose connector is vLLM-Omni's `MoriTransferEngineConnector`.

use super::config::{filled, pool_address};
use super::pool_peers::PoolAddress;
use clap::Args;
use kvferry_engine::fabric::bracketed;
use kvferry_trust::are_loopback;
use std::net::ToSocketAddrs;
use std::sync::Arc;

/// What one source says of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Args)]
pub(super) struct MoriGiven {
    /// Where stages of vLLM-Omni 0.30.0 whose connector is the one for MoRI pull payloads; theirs are
    /// pulled then, too. Port 0 takes a free one, which is logged; nowhere if not given. They prove nothing
    #[arg(long, value_name = "HOST:PORT", value_parser = payload_mori_listen)]
    payload_mori_listen: Option<PoolAddress>,
    /// The deployment of those stages, as `deployment` of the connectors here
    #[arg(long, value_name = "NAME", value_parser = payload_mori_deployment)]
    payload_mori_deployment: Option<String>,
    /// What moves payloads to and from them: host (the default) if their module `mori` is kvferry's,
    /// mori-rdma if it is MoRI's
    #[arg(long, value_name = "BACKEND", value_parser = payload_mori_backend)]
    payload_mori_backend: Option<StageFabric>,
}

/// Where stages with a connector of MoRI are served, and which.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MoriStageSettings {
    /// Port 0 is a free one.
    pub(crate) listen: PoolAddress,
    pub(crate) deployment: Arc<str>,
    /// What moves the bytes.
    pub(crate) fabric: StageFabric,
}

/// What moves payloads to and from stages with a connector of MoRI.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StageFabric {
    /// Theirs is kvferry's module `mori`.
    #[default]
    Host,
    /// Theirs is MoRI, over RDMA.
    MoriRdma,
}

fn payload_mori_listen(text: &str) -> Result<PoolAddress, String> {
    pool_address("payload_mori_listen", text)
}

fn payload_mori_deployment(text: &str) -> Result<String, String> {
    filled("payload_mori_deployment", "the name of a deployment", text)
}

fn payload_mori_backend(text: &str) -> Result<StageFabric, String> {
    match text {
        "host" => Ok(StageFabric::Host),
        "mori-rdma" => Ok(StageFabric::MoriRdma),
        _ => Err(format!("payload_mori_backend = {text:?}: it has to be host or mori-rdma")),
    }
}

impl MoriGiven {
    /// Takes a key; false if it is none of these.
    pub(super) fn set(&mut self, key: &str, text: &str) -> Result<bool, String> {
        match key {
            "payload_mori_listen" => self.payload_mori_listen = Some(payload_mori_listen(text)?),
            "payload_mori_deployment" => {
                self.payload_mori_deployment = Some(payload_mori_deployment(text)?);
            }
            "payload_mori_backend" => self.payload_mori_backend = Some(payload_mori_backend(text)?),
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn or(self, other: MoriGiven) -> MoriGiven {
        MoriGiven {
            payload_mori_listen: self.payload_mori_listen.or(other.payload_mori_listen),
            payload_mori_deployment: self.payload_mori_deployment.or(other.payload_mori_deployment),
            payload_mori_backend: self.payload_mori_backend.or(other.payload_mori_backend),
        }
    }

    /// Each key, and whether it is given.
    pub(super) fn are_given(&self) -> [(&'static str, bool); 3] {
        [
            ("payload_mori_listen", self.payload_mori_listen.is_some()),
            ("payload_mori_deployment", self.payload_mori_deployment.is_some()),
            ("payload_mori_backend", self.payload_mori_backend.is_some()),
        ]
    }

    /// Of a host with a pool.
    ///
    /// # Errors
    /// What they need beside, or what says nothing without them.
    pub(super) fn settings(&self) -> Result<Option<MoriStageSettings>, String> {
        let (deployment, fabric) = (&self.payload_mori_deployment, self.payload_mori_backend);
        let Some(listen) = &self.payload_mori_listen else {
            let alone = self.are_given().into_iter().find(|(_, is_given)| *is_given);
            return alone.map_or(Ok(None), |(key, _)| {
                Err(format!("{key} says nothing without payload_mori_listen: give both"))
            });
        };
        let deployment = deployment.as_deref().ok_or(
            "payload_mori_listen needs payload_mori_deployment: give the `deployment` of the \
            connectors whose payloads are served",
        )?;
        Ok(Some(MoriStageSettings {
            listen: listen.clone(),
            deployment: deployment.into(),
            fabric: fabric.unwrap_or_default(),
        }))
    }
}

impl MoriStageSettings {
    /// Who reaches the address is believed, so it has to be said on purpose that others do.
    ///
    /// # Errors
    /// They do, and it was not said.
    pub(super) fn check_trust(&self, is_insecure: bool) -> Result<(), String> {
        let PoolAddress { host, port } = &self.listen;
        let said = |why: &str| format!("payload_mori_listen = {}:{port}: {why}", bracketed(host));
        let found = (host.as_str(), *port).to_socket_addrs();
        let found = found.map_err(|why| {
            said(&format!("no address of that name: {why}; give one of this machine"))
        })?;
        let addresses: Vec<_> = found.map(|at| at.ip()).collect();
        if addresses.iter().any(|at| at.is_unspecified()) {
            return Err(said(
                "peers are told it; give the address of this machine that they reach",
            ));
        }
        match (are_loopback(addresses), is_insecure) {
            (true, _) => Ok(()),
            (false, true) => {
                tracing::warn!(
                    "payload_mori_listen: who reaches it is believed, takes payloads of this \
                     deployment and says where they are written; no secret changes that"
                );
                Ok(())
            }
            (false, false) => Err(said(
                "others reach this address, and connectors of MoRI prove nothing, whatever the \
                 secret: listen at 127.0.0.1; insecure_network (--insecure-network) does without",
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_listens_where_others_reach_it_on_purpose_only() {
        let settings = |host: &str| MoriStageSettings {
            listen: PoolAddress { host: host.into(), port: 50_051 },
            deployment: "a".into(),
            fabric: StageFabric::Host,
        };
        assert_eq!(settings("127.0.0.1").check_trust(false), Ok(()));
        assert_eq!(settings("192.0.2.1").check_trust(true), Ok(()));
        let why = settings("192.0.2.1").check_trust(false).expect_err("others reach it");
        assert!(why.contains("payload_mori_listen = 192.0.2.1:50051"), "{why}");
        assert!(why.contains("insecure_network"), "{why}");
        let why = settings("0.0.0.0").check_trust(true).expect_err("nobody can be told");
        assert!(why.contains("peers are told it"), "{why}");
    }

    #[test]
    fn what_does_not_go_together_is_said() {
        let given = |keys: &[(&str, &str)]| {
            let mut given = MoriGiven::default();
            for (key, text) in keys {
                assert_eq!(given.set(key, text), Ok(true));
            }
            given
        };
        let listen = ("payload_mori_listen", "[::1]:0");
        let deployment = ("payload_mori_deployment", "a");
        assert_eq!(given(&[]).settings(), Ok(None));
        let settings = given(&[listen, deployment]).settings().expect("valid");
        let settings = settings.expect("they are served");
        assert_eq!(settings.listen, PoolAddress { host: "::1".into(), port: 0 });
        for (key, why) in [
            (deployment, "says nothing without payload_mori_listen"),
            (listen, "needs payload_mori_deployment"),
        ] {
            let said = given(&[key]).settings().expect_err("not together");
            assert!(said.contains(why), "{said}");
        }
        for bad in ["50051", ":1", "h:", "h:65536"] {
            assert!(MoriGiven::default().set("payload_mori_listen", bad).is_err(), "{bad}");
        }
    }
}
