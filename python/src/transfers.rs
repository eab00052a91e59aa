//! The transfer actor inside the worker.

use kvferry::sidecar::DeviceEvent;
use kvferry_engine::core::ids::{Incarnation, StepId};
use pyo3::prelude::*;
use std::path::PathBuf;

/// Moves the KV of this process for its host, on threads of its own that need no interpreter.
#[pyclass(frozen, module = "kvferry._native", name = "Transfers")]
pub(crate) struct PyTransfers(kvferry::sidecar::TransferAgent);

#[pymethods]
impl PyTransfers {
    /// Looks for the host at `path` from now on, as the transfer actor of a rank.
    #[new]
    fn new(path: PathBuf, rank: u16) -> PyResult<PyTransfers> {
        // SAFETY: The connector in Python is who tells the host of this process's memory: of the
        // tensors of its KV cache, which vLLM keeps until the process ends and which no Rust has a
        // reference to. The socket is in a folder of this user alone.
        let agent = unsafe { kvferry::sidecar::TransferAgent::start(path, rank) };
        Ok(PyTransfers(agent?))
    }

    /// The first `layers` layers of a step are computed, or will be when the event of a GPU is
    /// done: a `hipEvent_t`, which has to stay until it is seen.
    #[pyo3(signature = (step, layers, event=None))]
    fn layers(&self, step: u64, layers: u16, event: Option<u64>) {
        // SAFETY: The connector keeps each event that it made until it is seen.
        let event = event.map(|event| unsafe { DeviceEvent::new(event) });
        self.0.layers(StepId(step), layers, event);
    }

    /// How many events nobody looks at any more, in the order in which they were given.
    #[getter]
    fn seen(&self) -> u64 {
        self.0.seen()
    }

    /// The host of this incarnation has ended: returns when nothing lands here any more that it
    /// began.
    fn end(&self, py: Python<'_>, incarnation: u64) {
        py.detach(|| self.0.end(Incarnation(incarnation)));
    }
}
