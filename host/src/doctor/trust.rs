//! What is between the network and who is to listen.

use super::{Check, DoctorArgs};
use crate::instance::{FabricArg, InstanceTrust, TrustSettings};
use crate::sidecar::config::SidecarConfig;
use kvferry_engine::core::verify::Verify;
use kvferry_engine::fabric::unbracketed;
use kvferry_trust::{NetworkTrust, SecretFile, are_loopback};
use std::net::ToSocketAddrs;
use std::path::PathBuf;

const NAME: &str = "trust";

/// Whether a server with these arguments, and a host with this configuration, would listen, and who
/// could reach it.
pub(super) fn trust(args: &DoctorArgs, config: &Result<SidecarConfig, String>) -> Check {
    let Ok(config) = config else {
        return Check::skip(NAME, "the configuration cannot be used");
    };
    let mut peers = config.operator.fabric.trust.clone();
    peers.secret_file = secret_file(args, Some(config));
    peers.insecure_network |= args.insecure_network;
    let (host, settings) =
        (&*args.host_ip, TrustSettings { peers, moriio_peers: None, verify: Verify::Off });
    let trust = match InstanceTrust::of(("host_ip", host), &settings) {
        Ok(trust) => trust,
        Err(why) => {
            let found = format!("the server would be refused: {}", why.found);
            return Check::fail(NAME, found, why.remedy);
        }
    };
    match trust.network {
        NetworkTrust::Loopback => {
            Check::ok(NAME, format!("loopback: only this machine reaches {host}"))
        }
        NetworkTrust::Insecure => Check::warn(
            NAME,
            format!("insecure network: who reaches {host} is believed, and reads and writes KV"),
            "give all hosts of the fleet the same secret_file in place of insecure_network",
        ),
        NetworkTrust::Secret => {
            let file = settings.peers.secret_file.unwrap_or_default();
            match SecretFile::open(&file) {
                Ok(_) => Check::ok(
                    NAME,
                    format!(
                        "secret: who connects to {host} has to know what {} says",
                        file.display()
                    ),
                ),
                Err(why) => Check::fail(NAME, why, "as it says; the server would not start"),
            }
        }
    }
}

/// Checks whether KV that leaves this machine is encrypted with this configuration.
pub(super) fn encryption(args: &DoctorArgs, config: &Result<SidecarConfig, String>) -> Check {
    const NAME: &str = "encrypt";
    let Ok(config) = config else {
        return Check::skip(NAME, "the configuration cannot be used");
    };
    let host = &*args.host_ip;
    let found = (unbracketed(host), 0).to_socket_addrs();
    if found.is_ok_and(|found| are_loopback(found.map(|at| at.ip()))) {
        return Check::ok(NAME, format!("{host} is loopback: no KV leaves this machine"));
    }
    if args.fabric == FabricArg::Mori {
        return Check::skip(NAME, "nothing encrypts what MoRI moves");
    }
    if secret_file(args, Some(config)).is_none() {
        return Check::skip(NAME, "KV is not encrypted without a secret: see trust");
    }
    if config.operator.fabric.trust.encrypt {
        return Check::ok(NAME, "KV goes between hosts by TLS 1.3");
    }
    Check::warn(
        NAME,
        "KV goes between hosts by plain TCP: whoever can insert bytes into a connection of the data plane \
         reads and writes all KV of the server, though both ends have proven the secret",
        "set encrypt on all hosts of the fleet (KVFERRY_HOST_ENCRYPT=true), or give its hosts a network of \
         their own",
    )
}

/// The file of the fleet's secret that the server would have.
pub(super) fn secret_file(args: &DoctorArgs, config: Option<&SidecarConfig>) -> Option<PathBuf> {
    let configured = config.and_then(|config| config.operator.fabric.trust.secret_file.clone());
    args.secret_file.clone().or(configured)
}
