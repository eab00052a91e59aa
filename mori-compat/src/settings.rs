//! What the environment says.

use crate::error::CompatError;
use kvferry_fabric_host::HostConfig;
use kvferry_faults::{FaultInjector, VARIABLE};
use kvferry_trust::{SecretFile, insecure_of_environment};
use std::env;
use std::path::PathBuf;
use std::time::Duration;

/// File to which a line of JSON is appended for each finished transfer.
const AUDIT: &str = "KVFERRY_AUDIT";
/// TOML file of settings of the fabric.
const FABRIC: &str = "KVFERRY_FABRIC";
/// MoRI's own name for how long a post waits for room in the queue.
const BACKOFF_US: &str = "MORI_IO_SQ_BACKOFF_TIMEOUT_US";

/// What `KVFERRY_FABRIC` may not say, because the caller does.
const CALLERS: [&str; 5] = ["key", "host", "port", "workers", "open_door"];

/// Settings that are not arguments of MoRI's calls.
#[derive(Clone, Debug)]
pub struct CompatSettings {
    /// Faults to inject, `KVFERRY_FAULTS`; see [`kvferry_faults::FaultFile`].
    pub faults: Option<PathBuf>,
    /// Where to log what was moved, `KVFERRY_AUDIT`.
    pub audit: Option<PathBuf>,
    /// How the fabric is set up, `KVFERRY_FABRIC`; key, host, port and workers come with the calls.
    /// Where it names no `secret_file`, `KVFERRY_SECRET_FILE` does, and `KVFERRY_INSECURE_NETWORK`
    /// says `insecure_network`, too.
    pub fabric: HostConfig,
    /// How long a post waits for room in a full queue before it fails with "SQ full",
    /// `MORI_IO_SQ_BACKOFF_TIMEOUT_US`; 5 s as in MoRI.
    pub backoff: Duration,
}

impl Default for CompatSettings {
    fn default() -> Self {
        CompatSettings {
            faults: None,
            audit: None,
            fabric: HostConfig::default(),
            backoff: Duration::from_secs(5),
        }
    }
}

impl CompatSettings {
    /// What the environment variables say.
    ///
    /// # Errors
    /// `Setting` with the variable, what is wrong with it and what it may be.
    pub fn from_env() -> Result<CompatSettings, CompatError> {
        let mut settings = CompatSettings {
            faults: env::var_os(VARIABLE).map(PathBuf::from),
            audit: env::var_os(AUDIT).map(PathBuf::from),
            ..CompatSettings::default()
        };
        if let Some(path) = env::var_os(FABRIC).map(PathBuf::from) {
            let text = std::fs::read_to_string(&path).map_err(|why| {
                let path = path.display();
                CompatError::Setting(format!("{FABRIC}={path}: cannot read it: {why}"))
            })?;
            settings.fabric = fabric(&text).map_err(|why| {
                CompatError::Setting(format!("{FABRIC}={}: {why}", path.display()))
            })?;
        }
        if settings.fabric.trust.secret_file.is_none() {
            settings.fabric.trust.secret_file = SecretFile::of_environment();
        }
        let insecure = insecure_of_environment().map_err(CompatError::Setting)?;
        settings.fabric.trust.insecure_network |= insecure;
        if let Some(text) = env::var_os(BACKOFF_US) {
            let us = text.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
                CompatError::Setting(format!(
                    "{BACKOFF_US}={text:?}: give a number of microseconds"
                ))
            })?;
            settings.backoff = Duration::from_micros(us);
        }
        Ok(settings)
    }

    /// Reads what the settings name, without an engine.
    ///
    /// # Errors
    /// `Setting` for faults that cannot be read or injected.
    pub fn check(&self) -> Result<(), CompatError> {
        self.faults().map(drop)
    }

    pub(crate) fn faults(&self) -> Result<FaultInjector, CompatError> {
        let Some(path) = &self.faults else { return Ok(FaultInjector::default()) };
        FaultInjector::load(path, &FaultInjector::KINDS)
            .map_err(|why| CompatError::Setting(why.to_string()))
    }
}

fn fabric(text: &str) -> Result<HostConfig, String> {
    let table: toml::Table = text.parse().map_err(|why| format!("not TOML: {why}"))?;
    if let Some(key) = CALLERS.iter().find(|key| table.contains_key(**key)) {
        return Err(format!("`{key}` is set by the caller of mori.io: remove it"));
    }
    table.try_into().map_err(|why: toml::de::Error| why.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_fabric_host::DataPath;

    #[test]
    fn a_fabric_file_sets_what_the_caller_does_not() {
        let read = fabric("paths = [\"tcp\"]\nslower = true").expect("valid");
        assert_eq!((read.paths, read.slower), (vec![DataPath::Tcp], true));
        let key = fabric("key = \"me\"").expect_err("the caller's");
        assert!(key.contains("`key`") && key.contains("remove it"), "{key}");
        let unknown = fabric("pahts = []").expect_err("unknown");
        assert!(unknown.contains("pahts") && unknown.contains("paths"), "{unknown}");
    }
}
