//! Whether a process may listen where others reach it.

use std::io;
use std::net::{IpAddr, ToSocketAddrs};
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

impl NetworkTrust {
    /// `loopback`, `secret` or `insecure`.
    pub const fn name(self) -> &'static str {
        match self {
            NetworkTrust::Loopback => "loopback",
            NetworkTrust::Secret => "secret",
            NetworkTrust::Insecure => "insecure",
        }
    }

    /// Of who listens at `host`, which was given by `setting`.
    ///
    /// # Errors
    /// An address that others reach, with nothing between; with the remedies. A name without an
    /// address.
    pub fn of(
        (setting, host): (&str, &str),
        secret_file: Option<&Path>,
        is_insecure: bool,
    ) -> Result<NetworkTrust, String> {
        if secret_file.is_some() {
            return Ok(NetworkTrust::Secret);
        }
        let is_loopback = is_loopback(host).map_err(|why| {
            format!("{setting} = {host}: no address of that name: {why}; give one of this machine")
        })?;
        match (is_loopback, is_insecure) {
            (true, _) => Ok(NetworkTrust::Loopback),
            (false, true) => Ok(NetworkTrust::Insecure),
            (false, false) => Err(format!(
                "{setting} = {host}: others reach this address, and without the fleet's secret whoever \
                 does is believed: give secret_file (--secret-file, {}), or listen at 127.0.0.1; \
                 insecure_network (--insecure-network, {INSECURE_VARIABLE}=1) does without",
                crate::VARIABLE
            )),
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

/// True if nobody but this machine reaches a host, given by name or address.
///
/// # Errors
/// A name without an address.
pub fn is_loopback(host: &str) -> io::Result<bool> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let local = |address: IpAddr| address.to_canonical().is_loopback();
    Ok((bare, 0).to_socket_addrs()?.all(|at| local(at.ip())))
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
