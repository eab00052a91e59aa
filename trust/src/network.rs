//! Whether a process may listen where others reach it.

use std::fmt;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Once;

/// The variable of the environment by which processes do without a secret.
pub const INSECURE_VARIABLE: &str = "KVFERRY_INSECURE_NETWORK";

/// What is between the network and who listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NetworkTrust {
    /// Only processes of this machine reach the address.
    Loopback,
    /// Who connects has to prove that they know the fleet's secret.
    Secret,
    /// Nothing, as was asked for by name.
    Insecure,
}

/// Why nobody may listen at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkRefusal {
    /// The setting, the address, and what is wrong with it.
    pub found: String,
    /// What to do.
    pub remedy: String,
}

impl fmt::Display for NetworkRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.found, self.remedy)
    }
}

impl NetworkTrust {
    /// `loopback`, `secret` or `insecure`.
    pub const fn name(self) -> &'static str {
        match self {
            NetworkTrust::Loopback => "loopback",
            NetworkTrust::Secret => "secret",
            NetworkTrust::Insecure => "insecure",
        }
    }

    /// Of who listens at `addresses`, those of the `host` that was given by a setting.
    ///
    /// # Errors
    /// Others reach one of them, and nothing is between.
    pub fn of(
        ((setting, host), addresses): ((&str, &str), impl IntoIterator<Item = IpAddr>),
        secret_file: Option<&Path>,
        is_insecure: bool,
    ) -> Result<NetworkTrust, NetworkRefusal> {
        match (secret_file, are_loopback(addresses), is_insecure) {
            (Some(_), _, _) => Ok(NetworkTrust::Secret),
            (None, true, _) => Ok(NetworkTrust::Loopback),
            (None, false, true) => Ok(NetworkTrust::Insecure),
            (None, false, false) => Err(NetworkRefusal {
                found: format!(
                    "{setting} = {host}: others reach this address, and without the fleet's secret \
                     whoever does is believed"
                ),
                remedy: format!(
                    "give secret_file (--secret-file, {}), or listen at 127.0.0.1; \
                     insecure_network (--insecure-network, {INSECURE_VARIABLE}=1) does without",
                    crate::VARIABLE
                ),
            }),
        }
    }

    /// Warns of an insecure network, once in a process.
    pub fn announce(self) {
        static ONCE: Once = Once::new();
        if self == NetworkTrust::Insecure {
            ONCE.call_once(|| {
                tracing::warn!(
                    "insecure network: who reaches a port of this process is believed, and reads and \
                     writes KV; secret_file in place of insecure_network ends that"
                );
            });
        }
    }
}

/// True if nobody but this machine reaches the addresses of a host.
pub fn are_loopback(addresses: impl IntoIterator<Item = IpAddr>) -> bool {
    let mut addresses = addresses.into_iter().peekable();
    addresses.peek().is_some() && addresses.all(|address| address.to_canonical().is_loopback())
}

/// Whether a value of [`INSECURE_VARIABLE`] says so; none and an empty one do not.
///
/// # Errors
/// A value that is neither true nor false.
pub fn is_insecure(value: Option<&str>) -> Result<bool, String> {
    match value.unwrap_or_default() {
        "1" | "true" => Ok(true),
        "" | "0" | "false" => Ok(false),
        other => Err(format!("{INSECURE_VARIABLE} = {other:?}: it has to be true or false")),
    }
}

/// The same of the environment.
///
/// # Errors
/// As above.
pub fn insecure_of_environment() -> Result<bool, String> {
    let value = std::env::var_os(INSECURE_VARIABLE).unwrap_or_default();
    is_insecure(Some(&value.to_string_lossy()))
}
