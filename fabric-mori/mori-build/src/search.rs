//! Where MoRI is looked for.

use crate::installation::{MoriInstallation, MoriSearchRule};
use crate::{MoriSearchError, python};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

type EnvLookup<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The first complete MoRI: by `MORI_INCLUDE_DIR` and `MORI_LIB_DIR`, by `MORI_HOME`, or the
/// package of `MORI_PYTHON`, else `python3`, that is found without being imported. `env` is asked
/// for variables; empty ones count as unset.
pub fn search(env: &dyn Fn(&str) -> Option<OsString>) -> Result<MoriInstallation, MoriSearchError> {
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    let mut tried = Vec::new();
    let mut found = by_variables(&set, &mut tried)?;
    if found.is_none() {
        found = by_home(&set, &mut tried)?;
    }
    if found.is_none() {
        found = by_python(&set, &mut tried)?;
    }
    let mut found = found.ok_or(MoriSearchError::Nowhere { tried })?;
    found.includes.extend(hip(&set));
    Ok(found)
}

fn by_variables(
    set: EnvLookup<'_>,
    tried: &mut Vec<String>,
) -> Result<Option<MoriInstallation>, MoriSearchError> {
    const NAMES: [&str; 2] = ["MORI_INCLUDE_DIR", "MORI_LIB_DIR"];
    match NAMES.map(set) {
        [Some(include), Some(lib)] => MoriInstallation::pair(
            MoriSearchRule::Variables,
            Path::new(&include),
            &[Path::new(&lib)],
            tried,
        ),
        [Some(_), None] => Err(MoriSearchError::Unpaired { set: NAMES[0], unset: NAMES[1] }),
        [None, Some(_)] => Err(MoriSearchError::Unpaired { set: NAMES[1], unset: NAMES[0] }),
        [None, None] => {
            tried.push("MORI_INCLUDE_DIR and MORI_LIB_DIR: not set".into());
            Ok(None)
        }
    }
}

fn by_home(
    set: EnvLookup<'_>,
    tried: &mut Vec<String>,
) -> Result<Option<MoriInstallation>, MoriSearchError> {
    let Some(home) = set("MORI_HOME").map(PathBuf::from) else {
        tried.push("MORI_HOME: not set".into());
        return Ok(None);
    };
    let libs = ["lib", "lib64", "build/src/io"].map(|dir| home.join(dir));
    MoriInstallation::pair(
        MoriSearchRule::Home,
        &home.join("include"),
        &libs.each_ref().map(PathBuf::as_path),
        tried,
    )
}

fn by_python(
    set: EnvLookup<'_>,
    tried: &mut Vec<String>,
) -> Result<Option<MoriInstallation>, MoriSearchError> {
    let python = set("MORI_PYTHON").unwrap_or_else(|| "python3".into());
    let name = python.to_string_lossy().into_owned();
    let packages = match python::packages(&python) {
        Ok(packages) if packages.is_empty() => {
            tried.push(format!("{name}: has no package mori"));
            return Ok(None);
        }
        Ok(packages) => packages,
        Err(why) => {
            tried.push(format!("{name}: {why}"));
            return Ok(None);
        }
    };
    for package in packages {
        let include = package.join("_jit-sources/include");
        if let Some(found) =
            MoriInstallation::pair(MoriSearchRule::Python, &include, &[&package], tried)?
        {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// ROCm's headers, if it is where ROCm is; the compiler looks at the system's by itself, and then
/// at the stand-in.
fn hip(set: EnvLookup<'_>) -> Option<PathBuf> {
    [set("ROCM_PATH").map(PathBuf::from), Some("/opt/rocm".into())]
        .into_iter()
        .flatten()
        .map(|root| root.join("include"))
        .find(|include| include.join("hip/hip_runtime_api.h").is_file())
}
