//! Installations of a MoRI that is only names.

use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What all versions export,
pub(crate) const ENGINE: &str =
    "_ZN4mori2io8IOEngine13CreateBackendENS0_11BackendTypeERKNS0_6ConfigE";
/// those from v1.2.0 on,
pub(crate) const WAIT_ALL: &str =
    "_ZN4mori2io8IOEngine7WaitAllERKSt6vectorIPNS0_14TransferStatusEEi";
/// those up to v1.2.0,
pub(crate) const RESOLVE: &str = "_ZNK4mori2io8IOEngine13ResolveNodeIdERKSs";
/// and those from v1.2.2 on.
pub(crate) const FABRIC: &str = "_ZN4mori2io8IOEngine20LoadFabricCopyModuleERKSs";

/// Of a supported one.
pub(crate) const GOOD: &[&str] = &[ENGINE, WAIT_ALL, FABRIC];

/// An empty folder of this test.
pub(crate) fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    if path.exists() {
        fs::remove_dir_all(&path).expect("an old folder goes");
    }
    fs::create_dir_all(&path).expect("a folder");
    path.canonicalize().expect("its path")
}

/// The header by which an installation is known.
pub(crate) fn headers(include: &Path) {
    let header = include.join("mori/io/engine.hpp");
    fs::create_dir_all(header.parent().expect("a parent")).expect("a folder");
    fs::write(header, "").expect("a header");
}

/// A library with these exports.
pub(crate) fn library(dir: &Path, exports: &[&str], flags: &[&str]) {
    fs::create_dir_all(dir).expect("a folder");
    let mut text = String::new();
    for (i, name) in exports.iter().enumerate() {
        writeln!(text, "void f{i}(void) __asm__(\"{name}\");\nvoid f{i}(void) {{}}").expect("text");
    }
    let source = dir.join("stub.c");
    fs::write(&source, text).expect("a source");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-nostdlib", "-o"]).arg(dir.join("libmori_io.so"));
    assert!(compiler.arg(source).args(flags).status().expect("a compiler").success());
}

pub(crate) struct TestEnv(Vec<(&'static str, OsString)>);

impl TestEnv {
    /// Without a Python.
    pub(crate) fn new(vars: &[(&'static str, &Path)]) -> TestEnv {
        let none: (&str, OsString) = ("MORI_PYTHON", "/nonexistent/python3".into());
        let vars = vars.iter().map(|(name, value)| (*name, value.as_os_str().to_owned()));
        TestEnv(vars.chain([none]).collect())
    }

    /// The value of a variable.
    pub(crate) fn get(&self, name: &str) -> Option<OsString> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    }
}
