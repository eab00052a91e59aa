//! Faults for tests of a deployment, injected by [`VARIABLE`].

use kvferry_engine::fabric::DataPlane;
use kvferry_faults::{FaultyDataPlane, VARIABLE};
use std::path::Path;

/// The plane, with the faults that the environment names, if any.
///
/// # Errors
/// A file that cannot be read, or faults that cannot be injected.
pub(super) fn with_faults(plane: Box<dyn DataPlane>) -> Result<Box<dyn DataPlane>, String> {
    let Some(path) = std::env::var_os(VARIABLE) else { return Ok(plane) };
    let plane = FaultyDataPlane::load(plane, Path::new(&path)).map_err(|why| why.to_string())?;
    tracing::warn!(file = %Path::new(&path).display(), "faults are injected into transfers");
    Ok(Box::new(plane))
}
