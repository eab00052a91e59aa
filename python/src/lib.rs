//! Python classes over [`kvferry_mori_compat`]: descriptors, engine, session and status.
//!
//! Whatever waits or copies does so without the interpreter's lock, so no thread holds it while it
//! waits for a lock of the engine.

mod desc;
mod engine;
mod link;
mod payloads;
mod session;
mod status;
mod transfers;

use kvferry_engine::core::prompt_hash::PromptHasher;
use kvferry_mori_compat::{CompatError, CompatSettings};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::pybacked::PyBackedBytes;
use pyo3::{PyErr, PyResult, pyfunction, pymodule};

/// Wrong arguments and settings are a `ValueError`, what the fabric does not do a `RuntimeError`.
fn raise(error: CompatError) -> PyErr {
    match error {
        CompatError::Plane(text) => PyRuntimeError::new_err(text),
        error => PyValueError::new_err(error.to_string()),
    }
}

/// Raises ValueError if an environment variable, or a file that it names, is wrong.
#[pyfunction]
fn check_settings() -> PyResult<()> {
    CompatSettings::from_env().and_then(|settings| settings.check()).map_err(raise)
}

/// Returns the hash of a prompt's parts, in this order.
#[pyfunction]
fn prompt_hash(parts: Vec<(String, PyBackedBytes)>) -> [u8; 16] {
    let mut hasher = PromptHasher::default();
    parts.iter().for_each(|(name, content)| hasher.part(name, content));
    hasher.finish().to_bytes()
}

/// The native half of the package `kvferry`.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::{check_settings, prompt_hash};
    #[pymodule_export]
    use crate::desc::{PyEngineDesc, PyMemoryDesc};
    #[pymodule_export]
    use crate::engine::PyEngine;
    #[pymodule_export]
    use crate::link::{
        PyLink, answered, check_address, check_socket, layer_order, main, settings, socket_folder,
    };
    #[pymodule_export]
    use crate::payloads::PyPayloadLink;
    #[pymodule_export]
    use crate::session::PySession;
    #[pymodule_export]
    use crate::status::{PyTransferStatus, wait_all};
    #[pymodule_export]
    use crate::transfers::PyTransfers;
}
