//! The engine behind `mori.io.IOEngine`.

use crate::desc::{EngineDesc, MemoryDesc};
use crate::raise;
use crate::session::Session;
use mori_compat::Settings;
use pyo3::prelude::*;

/// An engine that listens at `host:port`; `workers` threads copy. Settings come from the
/// environment.
#[pyclass(frozen, module = "kvferry._native")]
pub struct Engine(mori_compat::Engine);

#[pymethods]
impl Engine {
    #[new]
    fn new(py: Python<'_>, key: &str, host: &str, port: u16, workers: u32) -> PyResult<Engine> {
        py.detach(|| {
            let settings = Settings::from_env()?;
            mori_compat::Engine::start(key, host, port, workers, &settings)
        })
        .map(Engine)
        .map_err(raise)
    }

    /// What peers need to reach it.
    fn desc(&self) -> EngineDesc {
        EngineDesc(self.0.desc().clone())
    }

    /// Makes `len` bytes at address `base` reachable.
    fn register_memory(&self, py: Python<'_>, base: u64, len: u64) -> PyResult<MemoryDesc> {
        py.detach(|| self.0.register_memory(base, len)).map(MemoryDesc).map_err(raise)
    }

    /// Names a peer.
    fn register_remote_engine(&self, py: Python<'_>, desc: &EngineDesc) -> PyResult<()> {
        py.detach(|| self.0.register_remote_engine(&desc.0)).map_err(raise)
    }

    /// Prepares transfers between a region of this engine and one of a peer.
    fn create_session(
        &self,
        py: Python<'_>,
        local: &MemoryDesc,
        remote: &MemoryDesc,
    ) -> PyResult<Session> {
        py.detach(|| self.0.create_session(&local.0, &remote.0)).map(Session).map_err(raise)
    }

    /// A number that no transfer of this engine had.
    fn allocate_transfer_uid(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.0.allocate_transfer_uid())
    }
}
