//! `mori.io`'s descriptors.

use crate::raise;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Where an engine is reached.
#[pyclass(frozen, module = "mori.io", name = "EngineDesc")]
pub struct PyEngineDesc(pub(crate) kvferry_mori_compat::CompatEngineDesc);

#[pymethods]
impl PyEngineDesc {
    /// The bytes that a peer unpacks.
    fn pack<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.pack())
    }

    /// Reads the bytes of a peer; raises ValueError if they are no descriptor.
    #[staticmethod]
    fn unpack(bytes: &[u8]) -> PyResult<PyEngineDesc> {
        kvferry_mori_compat::CompatEngineDesc::unpack(bytes).map(PyEngineDesc).map_err(raise)
    }

    /// The unique name of the engine.
    #[getter]
    fn key(&self) -> &str {
        self.0.key()
    }

    /// Host or address that it listens at.
    #[getter]
    fn host(&self) -> &str {
        self.0.host()
    }

    /// Port that it listens at.
    #[getter]
    fn port(&self) -> i32 {
        self.0.port()
    }

    fn __repr__(&self) -> String {
        format!("EngineDesc({} at {}:{})", self.0.key(), self.0.host(), self.0.port())
    }

    fn __eq__(&self, other: &PyEngineDesc) -> bool {
        self.0 == other.0
    }
}

#[pyclass(frozen, module = "mori.io", name = "MemoryDesc")]
pub struct PyMemoryDesc(pub(crate) kvferry_mori_compat::CompatMemoryDesc);

#[pymethods]
impl PyMemoryDesc {
    /// The bytes that a peer unpacks.
    fn pack<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.pack())
    }

    /// Reads the bytes of a peer; raises ValueError if they are no descriptor.
    #[staticmethod]
    fn unpack(bytes: &[u8]) -> PyResult<PyMemoryDesc> {
        kvferry_mori_compat::CompatMemoryDesc::unpack(bytes).map(PyMemoryDesc).map_err(raise)
    }

    /// The engine that it is registered with.
    #[getter]
    fn engine_key(&self) -> &str {
        self.0.engine_key()
    }

    /// Number within its engine.
    #[getter]
    fn id(&self) -> u32 {
        self.0.id()
    }

    /// Address of its first byte in its owner's process.
    #[getter]
    fn data(&self) -> u64 {
        self.0.data()
    }

    /// Its length in bytes.
    #[getter]
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn __repr__(&self) -> String {
        let (id, size, data) = (self.0.id(), self.0.size(), self.0.data());
        format!("MemoryDesc({id} of {}, {size} B at {data:#x})", self.0.engine_key())
    }

    fn __eq__(&self, other: &PyMemoryDesc) -> bool {
        self.0 == other.0
    }
}
