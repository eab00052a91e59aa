//! `mori.io`'s sessions and statuses.

use crate::engine::PyEngine;
use kvferry_engine::fabric::Direction;
use kvferry_mori_compat::CompatTransferStatus;
use pyo3::prelude::*;
use std::sync::Arc;

/// Transfers between one local and one remote region; offsets and sizes in bytes.
#[pyclass(frozen, module = "mori.io", name = "IOEngineSession")]
pub struct PySession {
    pub(crate) session: kvferry_mori_compat::CompatSession,
    /// Has to live as long.
    pub(crate) _engine: Py<PyEngine>,
}

#[pymethods]
impl PySession {
    /// How written and how read bytes go, e.g. `("cross-memory", "cross-memory")`; None if dead.
    #[getter]
    fn paths(&self, py: Python<'_>) -> Option<(&'static str, &'static str)> {
        let paths = py.detach(|| self.session.paths())?;
        Some((paths.write.name(), paths.read.name()))
    }

    fn __repr__(&self) -> String {
        format!("IOEngineSession(with {})", self.session.peer())
    }

    /// Copies ranges of the remote region into the local one.
    fn batch_read(
        &self,
        py: Python<'_>,
        local_offsets: Vec<u64>,
        remote_offsets: Vec<u64>,
        sizes: Vec<u64>,
        uid: u64,
    ) -> PyTransferStatus {
        self.post(py, Direction::Read, [local_offsets, remote_offsets, sizes], uid)
    }

    /// Copies ranges of the local region into the remote one.
    fn batch_write(
        &self,
        py: Python<'_>,
        local_offsets: Vec<u64>,
        remote_offsets: Vec<u64>,
        sizes: Vec<u64>,
        uid: u64,
    ) -> PyTransferStatus {
        self.post(py, Direction::Write, [local_offsets, remote_offsets, sizes], uid)
    }

    /// Copies one range of the remote region into the local one.
    fn read(
        &self,
        py: Python<'_>,
        local_offset: u64,
        remote_offset: u64,
        size: u64,
        uid: u64,
    ) -> PyTransferStatus {
        let lists = [local_offset, remote_offset, size].map(|one| vec![one]);
        self.post(py, Direction::Read, lists, uid)
    }

    /// Copies one range of the local region into the remote one.
    fn write(
        &self,
        py: Python<'_>,
        local_offset: u64,
        remote_offset: u64,
        size: u64,
        uid: u64,
    ) -> PyTransferStatus {
        let lists = [local_offset, remote_offset, size].map(|one| vec![one]);
        self.post(py, Direction::Write, lists, uid)
    }
}

impl PySession {
    fn post(
        &self,
        py: Python<'_>,
        direction: Direction,
        [local, remote, len]: [Vec<u64>; 3],
        uid: u64,
    ) -> PyTransferStatus {
        PyTransferStatus(py.detach(|| self.session.post(direction, local, remote, len, uid)))
    }
}

/// How a transfer stands; MoRI's names.
#[pyclass(frozen, module = "mori.io", name = "TransferStatus")]
pub struct PyTransferStatus(Arc<CompatTransferStatus>);

#[pymethods]
#[allow(non_snake_case, reason = "MoRI's names")]
impl PyTransferStatus {
    /// True once all bytes are in place.
    fn Succeeded(&self) -> bool {
        self.0.succeeded()
    }

    /// True once it has failed; nothing of it lands any more.
    fn Failed(&self) -> bool {
        self.0.failed()
    }

    /// Why it failed; "SQ full..." if it was only the queue and can be tried again.
    fn Message(&self) -> &str {
        self.0.message()
    }

    /// MoRI's status code: 0 success, 2 in progress, above 10 failed.
    fn Code(&self) -> u32 {
        self.0.code() as u32
    }

    fn __repr__(&self) -> String {
        format!("TransferStatus({:?} {})", self.0.code(), self.0.message())
    }
}
