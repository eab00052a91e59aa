//! Python classes over [`mori_compat`]: descriptors, engine, session and status.
//!
//! Whatever waits or copies does so without the interpreter's lock, so no thread holds it while it
//! waits for a lock of the engine.

mod desc;
mod engine;
mod link;
mod session;
mod transfers;

use mori_compat::{Error, Settings};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::{PyErr, PyResult, pyfunction, pymodule};

/// Wrong arguments and settings are a `ValueError`, what the fabric does not do a `RuntimeError`.
fn raise(error: Error) -> PyErr {
    match error {
        Error::Plane(text) => PyRuntimeError::new_err(text),
        error => PyValueError::new_err(error.to_string()),
    }
}

/// Raises ValueError if an environment variable, or a file that it names, is wrong.
#[pyfunction]
fn check_settings() -> PyResult<()> {
    Settings::from_env().and_then(|settings| settings.check()).map_err(raise)
}

/// The native half of the package `kvferry`.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use super::check_settings;
    #[pymodule_export]
    use crate::desc::{EngineDesc, MemoryDesc};
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::link::{Link, check_ports, main, settings};
    #[pymodule_export]
    use crate::session::{Session, TransferStatus};
    #[pymodule_export]
    use crate::transfers::Transfers;
}
