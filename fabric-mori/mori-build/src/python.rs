//! Where a Python has the package `mori`.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Finds the package without importing it, which would need a GPU. The working directory is no
/// place to find it in.
const SCRIPT: &str = "
import importlib.util, os, sys
sys.path[:] = [path for path in sys.path if path]
spec = importlib.util.find_spec('mori')
if spec is not None:
    places = spec.submodule_search_locations
    if places is None:
        places = [os.path.dirname(spec.origin or '')]
    for place in places:
        print(place)
";

/// The folders of the package, of which there is more than one if it has no `__init__.py`.
pub(crate) fn packages(python: &OsStr) -> Result<Vec<PathBuf>, String> {
    let output = Command::new(python)
        .args(["-c", SCRIPT])
        .env("PYTHONIOENCODING", "utf-8:surrogateescape")
        // Has the effect of `-P`, which Python before 3.11 rejects.
        .env("PYTHONSAFEPATH", "1")
        .stdin(Stdio::null())
        .output()
        .map_err(|why| why.to_string())?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        return Err(error.lines().last().unwrap_or("it failed and said nothing").to_owned());
    }
    let text = String::from_utf8(output.stdout).map_err(|why| why.to_string())?;
    Ok(text.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect())
}
