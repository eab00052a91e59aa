//! Compiles the shim if there is a MoRI, and leaves the reason for the run time if there is none.

// A build script speaks to cargo on its standard output, and to people on the other one.
#![allow(clippy::print_stdout, clippy::print_stderr)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

fn main() -> ExitCode {
    match build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("mori-sys: {why}");
            ExitCode::FAILURE
        }
    }
}

fn build() -> Result<(), String> {
    println!("cargo:rerun-if-changed=build.rs");
    for name in kvferry_mori_build::WATCHED {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let (shim, note) = match shim(&out) {
        Ok((shim, note)) => (shim.to_string_lossy().into_owned(), note),
        Err(none) if env::var_os("CARGO_FEATURE_MORI").is_some() => {
            let why = none.why;
            return Err(format!("feature `mori` is on, but {why}; or build without the feature"));
        }
        Err(none) => {
            if none.unexpected {
                warn(&none.why);
            }
            (String::new(), none.why)
        }
    };
    // By a file: values that go through cargo have one line.
    fs::write(out.join("note.txt"), note).map_err(|why| why.to_string())?;
    println!("cargo:rustc-env=KF_MORI_SHIM_BUILT={shim}");
    Ok(())
}

struct ShimBuildError {
    why: String,
    /// Something was there that should have worked.
    unexpected: bool,
}

fn shim(out: &Path) -> Result<(PathBuf, String), ShimBuildError> {
    if env::var_os("HOST") != env::var_os("TARGET") {
        let why = "the shim is only compiled by the machine's own compiler".to_owned();
        return Err(ShimBuildError { why, unexpected: false });
    }
    let found = kvferry_mori_build::search(&|name| env::var_os(name))
        .map_err(|why| ShimBuildError { why: why.to_string(), unexpected: !why.is_nowhere() })?;
    for file in found.watched() {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    let shim = kvferry_mori_build::compile(&found, out, &[])
        .map_err(|why| ShimBuildError { why: why.to_string(), unexpected: true })?;
    Ok((shim, found.to_string()))
}

fn warn(text: &str) {
    for line in text.lines() {
        println!("cargo:warning={line}");
    }
}
