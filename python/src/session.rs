//! `mori.io`'s sessions.

use crate::engine::PyEngine;
use crate::status::PyTransferStatus;
use kvferry_engine::fabric::Direction;
use pyo3::prelude::*;

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
