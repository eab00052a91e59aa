//! What is between the network and who is to listen.

use super::{Check, DoctorArgs};
use crate::sidecar::config::{ConfigLayer, HostArgs};
use kvferry_trust::{NetworkTrust, SecretFile};

const NAME: &str = "trust";

/// Whether a server with these arguments, and a host with this configuration, would listen, and who
/// could reach it.
pub(super) fn trust(args: &DoctorArgs) -> Check {
    let host = HostArgs { config: args.config.clone(), given: ConfigLayer::default() };
    let Ok(config) = host.resolve(std::env::vars_os()) else {
        return Check::skip(NAME, "the configuration cannot be used");
    };
    let told = config.operator.fabric.trust;
    let secret_file = args.secret_file.clone().or(told.secret_file);
    let is_insecure = args.insecure_network || told.insecure_network;
    let host = &*args.host_ip;
    match NetworkTrust::of(("host_ip", host), secret_file.as_deref(), is_insecure) {
        Ok(NetworkTrust::Loopback) => {
            Check::ok(NAME, format!("loopback: only this machine reaches {host}"))
        }
        Ok(NetworkTrust::Insecure) => Check::warn(
            NAME,
            format!("insecure network: who reaches {host} is believed, and reads and writes KV"),
            "give all hosts of the fleet the same secret_file in place of insecure_network",
        ),
        Ok(NetworkTrust::Secret) => {
            let file = secret_file.unwrap_or_default();
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
        Err(why) => match why.split_once(": give ") {
            Some((found, remedy)) => Check::fail(
                NAME,
                format!("the server would be refused: {found}"),
                format!("give {remedy}"),
            ),
            None => Check::fail(NAME, why, "give an address, or a name that resolves"),
        },
    }
}
