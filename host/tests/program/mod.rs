//! Runs the program, and keeps its files.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How the program ended.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

/// Runs the program to its end.
pub(crate) fn kvferry<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> ProgramOutput {
    let mut program = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    let output = program.args(args).output().expect("the program starts");
    ProgramOutput {
        code: output.status.code().expect("the program ends by itself"),
        out: String::from_utf8(output.stdout).expect("output is UTF-8"),
        err: String::from_utf8(output.stderr).expect("output is UTF-8"),
    }
}

/// The folder with the scenarios of the repository.
pub(crate) fn scenarios() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios")
}

/// A folder of one test, empty at first.
pub(crate) struct ProgramFolder(PathBuf);

impl ProgramFolder {
    /// `name` is the test's own; an absolute path stays what it is.
    pub(crate) fn new(name: &str) -> ProgramFolder {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        // It is there if the test ran before.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder for files");
        ProgramFolder(folder)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }

    /// Writes a file; returns its path.
    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        fs::write(self.0.join(name), text).expect("a file can be written");
        self.path(name)
    }
}
