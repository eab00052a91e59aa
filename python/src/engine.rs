//! The engine behind `mori.io.IOEngine`.

use crate::desc::{PyEngineDesc, PyMemoryDesc};
use crate::raise;
use crate::session::PySession;
use crate::status::PyTransferStatus;
use kvferry_engine::fabric::{Direction, OwnMemory};
use kvferry_mori_compat::{CompatRequest, CompatSettings, check_host_memory};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An engine that listens at `host:port`; `workers` threads copy. Settings come from the
/// environment. Lives as long as it or one of its sessions is referenced.
#[pyclass(frozen, module = "kvferry._native", name = "Engine")]
pub struct PyEngine {
    engine: kvferry_mori_compat::CompatEngine,
    /// Owners of registered memory, by the number of the region.
    kept: Mutex<HashMap<u32, Py<PyAny>>>,
}

impl PyEngine {
    fn kept(&self) -> MutexGuard<'_, HashMap<u32, Py<PyAny>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
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

    /// Makes `len` bytes at address `base` reachable; keeps `owner` until they are deregistered, or
    /// as long as the engine is there. What is said to be of a GPU has to be host memory all the same.
    fn register_memory(
        &self,
        py: Python<'_>,
        base: u64,
        len: u64,
        owner: Py<PyAny>,
        of_gpu: bool,
    ) -> PyResult<PyMemoryDesc> {
        if of_gpu {
            check_host_memory(base, len).map_err(raise)?;
        }
        // SAFETY: Python says what is the address of what; `owner` is what keeps it mapped, and is
        // held until the plane has deregistered it or is gone. No Rust has a reference to it.
        let memory = unsafe { OwnMemory::new(base, len) };
        let desc = py.detach(|| self.engine.register_memory(memory)).map_err(raise)?;
        self.kept().insert(desc.id(), owner);
        Ok(PyMemoryDesc(desc))
    }

    /// Returns when nothing lands in the memory any more; its owner is let go.
    fn deregister_memory(&self, py: Python<'_>, memory: &PyMemoryDesc) -> PyResult<()> {
        py.detach(|| self.engine.deregister_memory(&memory.0)).map_err(raise)?;
        let _owner = self.kept().remove(&memory.0.id());
        Ok(())
    }

    fn register_remote_engine(&self, py: Python<'_>, desc: &PyEngineDesc) -> PyResult<()> {
        py.detach(|| self.engine.register_remote_engine(&desc.0)).map_err(raise)
    }

    fn deregister_remote_engine(&self, py: Python<'_>, desc: &PyEngineDesc) -> PyResult<()> {
        py.detach(|| self.engine.deregister_remote_engine(&desc.0)).map_err(raise)
    }

    /// Posts one batch for each pair of a local and a remote region, as reads or as writes.
    #[expect(clippy::too_many_arguments, reason = "MoRI's")]
    fn post(
        &self,
        py: Python<'_>,
        is_read: bool,
        local: Vec<PyRef<'_, PyMemoryDesc>>,
        local_offsets: Vec<Vec<u64>>,
        remote: Vec<PyRef<'_, PyMemoryDesc>>,
        remote_offsets: Vec<Vec<u64>>,
        sizes: Vec<Vec<u64>>,
        uids: Vec<u64>,
    ) -> PyResult<Vec<PyTransferStatus>> {
        let lens =
            [local_offsets.len(), remote.len(), remote_offsets.len(), sizes.len(), uids.len()];
        if lens.iter().any(|len| *len != local.len()) {
            let [ours, theirs, to, sizes, uids] = lens;
            return Err(PyValueError::new_err(format!(
                "{} local regions, {ours} lists of local offsets, {theirs} remote regions, {to} lists \
                 of remote offsets, {sizes} lists of sizes and {uids} numbers: give one of each for \
                 each transfer",
                local.len()
            )));
        }
        let lists = local_offsets.into_iter().zip(remote_offsets).zip(sizes).zip(uids);
        let requests: Vec<CompatRequest> = local
            .iter()
            .zip(&remote)
            .zip(lists)
            .map(|((local, remote), (((local_offsets, remote_offsets), sizes), uid))| {
                let (local, remote) = (local.0.clone(), remote.0.clone());
                CompatRequest { local, remote, local_offsets, remote_offsets, sizes, uid }
            })
            .collect();
        let direction = if is_read { Direction::Read } else { Direction::Write };
        let statuses = py.detach(|| self.engine.post(direction, requests)).map_err(raise)?;
        Ok(statuses.into_iter().map(PyTransferStatus).collect())
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
