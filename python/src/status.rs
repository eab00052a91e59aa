//! `mori.io`'s statuses.

use kvferry_mori_compat::{CompatStatusCode, CompatTransferStatus};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Signals are handled as often while somebody waits.
const SIGNALS: Duration = Duration::from_millis(100);

/// How a transfer stands; MoRI's names.
#[pyclass(frozen, module = "mori.io", name = "TransferStatus")]
pub struct PyTransferStatus(pub(crate) Arc<CompatTransferStatus>);

#[pymethods]
#[allow(non_snake_case, reason = "MoRI's names")]
impl PyTransferStatus {
    /// Of no transfer: its code is INIT.
    #[new]
    fn new() -> PyTransferStatus {
        PyTransferStatus(Arc::default())
    }

    /// True as long as nothing was posted on it.
    fn Init(&self) -> bool {
        self.0.code() == CompatStatusCode::Init
    }

    /// True until it has succeeded or failed.
    fn InProgress(&self) -> bool {
        self.0.code() == CompatStatusCode::InProgress
    }

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

    fn Code<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        code(py, self.0.code())
    }

    /// Waits until it has succeeded or failed.
    fn Wait(&self, py: Python<'_>) -> PyResult<()> {
        wait(py, &self.0, None).map(drop)
    }

    /// Waits for so many milliseconds, or for as long as it takes; tells the code then.
    #[pyo3(signature = (timeout_ms=-1))]
    fn WaitFor<'py>(&self, py: Python<'py>, timeout_ms: i64) -> PyResult<Bound<'py, PyAny>> {
        let ends = wait(py, &self.0, deadline(timeout_ms))?;
        code(py, ends)
    }

    fn __repr__(&self) -> String {
        format!("TransferStatus({:?} {})", self.0.code(), self.0.message())
    }
}

/// Waits for all of some transfers, or for so many milliseconds. The code is that of the first in the
/// list that did not succeed; one that is under way counts only where none of those waited for failed.
#[pyfunction]
pub(crate) fn wait_all<'py>(
    py: Python<'py>,
    statuses: Vec<Option<PyRef<'py, PyTransferStatus>>>,
    timeout_ms: i64,
) -> PyResult<Bound<'py, PyAny>> {
    let until = deadline(timeout_ms);
    let mut first = None;
    let mut in_progress = false;
    for status in statuses.iter().flatten() {
        match wait(py, &status.0, until)? {
            CompatStatusCode::Success => {}
            CompatStatusCode::InProgress => in_progress = true,
            failed => first = first.or(Some(failed)),
        }
    }
    let under_way = in_progress.then_some(CompatStatusCode::InProgress);
    code(py, first.or(under_way).unwrap_or(CompatStatusCode::Success))
}

fn deadline(timeout_ms: i64) -> Option<Instant> {
    let timeout = Duration::from_millis(timeout_ms.try_into().ok()?);
    Instant::now().checked_add(timeout)
}

/// Waits without the interpreter's lock, and lets signals through.
fn wait(
    py: Python<'_>,
    status: &CompatTransferStatus,
    until: Option<Instant>,
) -> PyResult<CompatStatusCode> {
    loop {
        let now = Instant::now();
        let slice = until.map_or(now + SIGNALS, |until| until.min(now + SIGNALS));
        let code = py.detach(|| status.wait_until(slice));
        if code != CompatStatusCode::InProgress || until.is_some_and(|until| until <= now) {
            return Ok(code);
        }
        py.check_signals()?;
    }
}

/// A code as MoRI's enumeration.
fn code(py: Python<'_>, code: CompatStatusCode) -> PyResult<Bound<'_, PyAny>> {
    static CODES: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CODES.import(py, "kvferry.codes", "StatusCode")?.call1((code as u32,))
}
