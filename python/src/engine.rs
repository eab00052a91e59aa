//! The engine behind `mori.io.IOEngine`.

use crate::desc::{PyEngineDesc, PyMemoryDesc};
use crate::raise;
use crate::session::PySession;
use kvferry_engine::fabric::OwnMemory;
use kvferry_mori_compat::CompatSettings;
use pyo3::prelude::*;
use std::sync::{Mutex, PoisonError};

/// An engine that listens at `host:port`; `workers` threads copy. Settings come from the
/// environment. Lives as long as it or one of its sessions is referenced.
#[pyclass(frozen, module = "kvferry._native", name = "Engine")]
pub struct PyEngine {
    engine: kvferry_mori_compat::CompatEngine,
    /// Owners of registered memory.
    kept: Mutex<Vec<Py<PyAny>>>,
}

#[pymethods]
impl PyEngine {
    #[new]
    fn new(py: Python<'_>, key: &str, host: &str, port: u16, workers: u32) -> PyResult<PyEngine> {
        py.detach(|| {
            kvferry::sidecar::log_to_stderr();
            let settings = CompatSettings::from_env()?;
            kvferry_mori_compat::CompatEngine::start(key, host, port, workers, &settings)
        })
        .map(|engine| PyEngine { engine, kept: Mutex::default() })
        .map_err(raise)
    }

    /// What peers need to reach it.
    fn desc(&self) -> PyEngineDesc {
        PyEngineDesc(self.engine.desc().clone())
    }

    /// Makes `len` bytes at address `base` reachable; keeps `owner` as long as the engine is there.
    fn register_memory(
        &self,
        py: Python<'_>,
        base: u64,
        len: u64,
        owner: Py<PyAny>,
    ) -> PyResult<PyMemoryDesc> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).push(owner);
        // SAFETY: Python says what is the address of what; `owner` is what keeps it mapped, and is
        // held for longer than the engine has a plane. No Rust has a reference to it.
        let memory = unsafe { OwnMemory::new(base, len) };
        py.detach(|| self.engine.register_memory(memory)).map(PyMemoryDesc).map_err(raise)
    }

    fn register_remote_engine(&self, py: Python<'_>, desc: &PyEngineDesc) -> PyResult<()> {
        py.detach(|| self.engine.register_remote_engine(&desc.0)).map_err(raise)
    }

    /// Prepares transfers between a region of this engine and one of a peer.
    fn create_session(
        slf: Bound<'_, PyEngine>,
        local: &PyMemoryDesc,
        remote: &PyMemoryDesc,
    ) -> PyResult<PySession> {
        let engine = &slf.get().engine;
        let session = slf.py().detach(|| engine.create_session(&local.0, &remote.0));
        Ok(PySession { session: session.map_err(raise)?, _engine: slf.unbind() })
    }

    /// A number that no transfer of this engine had.
    fn allocate_transfer_uid(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.engine.allocate_transfer_uid())
    }
}
