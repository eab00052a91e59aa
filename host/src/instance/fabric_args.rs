//! What moves the bytes, as several commands are told.

use clap::ValueEnum;
use kvferry_fabric_mori::{MoriBackend, MoriConfig};
use serde::Deserialize;
use serde_json::Value;

/// What moves the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FabricArg {
    /// Memory of this host, TCP between hosts
    Host,
    /// RDMA by ROCm's MoRI-IO, or xGMI where a backend can be chosen
    Mori,
}

/// A backend of MoRI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendArg {
    /// Network cards; what `backend` mori has for peers of other nodes
    Rdma,
    /// Links between GPUs; what `backend` mori has for peers of the node
    Xgmi,
}

impl From<BackendArg> for MoriBackend {
    fn from(backend: BackendArg) -> MoriBackend {
        match backend {
            BackendArg::Rdma => MoriBackend::Rdma,
            BackendArg::Xgmi => MoriBackend::Xgmi,
        }
    }
}

/// Settings of MoRI that are those of a command, and the arguments that give them.
const OTHERWISE: [(&str, &str); 4] = [
    ("backend", "--backend"),
    ("host", "--host-ip"),
    ("key", "nothing, it is `kvferry-bench`"),
    ("devices", "the environment, by KVFERRY_MORI_WITHOUT_DEVICES"),
];

/// Settings of MoRI that are not given otherwise.
pub(crate) fn mori_settings(text: &str) -> Result<MoriConfig, String> {
    let value: Value = serde_json::from_str(text).map_err(|why| why.to_string())?;
    if !value.is_object() {
        return Err("it is no object, such as {\"qp_per_transfer\": 4}".into());
    }
    let known = OTHERWISE.iter().find(|(key, _)| value.get(key).is_some());
    if let Some((key, by)) = known {
        return Err(format!("{key} is given by {by}"));
    }
    MoriConfig::deserialize(&value).map_err(|why| why.to_string())
}
