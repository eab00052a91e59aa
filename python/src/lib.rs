//! Python classes over [`mori_compat`]: descriptors, engine, session and status.
//!
//! Whatever waits or copies does so without the interpreter's lock, so no thread holds it while it
//! waits for a lock of the engine.

mod desc;
mod engine;
mod session;

use mori_compat::Error;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::pymodule;

/// Wrong arguments and settings are a `ValueError`, what the fabric does not do a `RuntimeError`.
fn raise(error: Error) -> PyErr {
    match error {
        Error::Plane(text) => PyRuntimeError::new_err(text),
        error => PyValueError::new_err(error.to_string()),
    }
}

/// The native half of the package `kvferry`.
#[pymodule(gil_used = false)]
mod _native {
    #[pymodule_export]
    use crate::desc::{EngineDesc, MemoryDesc};
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::session::{Session, TransferStatus};
}
