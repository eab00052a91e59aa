//! Compiles the C++ cases and runs them, each in a process of its own.

use std::ffi::{OsStr, OsString};
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;

/// The compiler that the double is built with.
fn compiler() -> Command {
    let words = std::env::var("CXX").unwrap_or_default();
    let mut words = words.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or("c++"));
    command.args(words).current_dir(env!("CARGO_MANIFEST_DIR"));
    command.args(["-std=c++20", "-Wall", "-Wextra", "-pthread"]);
    command
}

/// Set if it is not the double that is tested, but the MoRI that is installed.
pub(crate) static TESTED: LazyLock<Option<OsString>> =
    LazyLock::new(|| std::env::var_os("KVFERRY_TEST_MORI").filter(|which| which == "installed"));

/// A program of the name from the arguments.
pub(crate) fn compile(name: &str, args: &[impl AsRef<OsStr> + Debug]) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let output = compiler().args(args).arg("-o").arg(&program).output().expect("a compiler");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} does not compile with {args:?}:\n{said}");
    program
}

/// Runs a case, without the knobs that the environment of the tests may have, unless they are for
/// MoRI.
pub(crate) fn run(program: &Path, case: &str, set: &[(&str, &str)]) -> Output {
    let mut command = Command::new(program);
    let knob = |name: &str| name.starts_with("MORI_") && TESTED.is_none();
    for (name, _) in std::env::vars().filter(|(name, _)| knob(name)) {
        command.env_remove(name);
    }
    command.arg(case).envs(set.iter().copied()).output().expect("the cases run")
}

/// What a case said, for a message.
pub(crate) fn said(output: &Output) -> String {
    let streams = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{}\n{}{}", output.status, streams[0], streams[1])
}

/// The cases that a program has.
#[allow(dead_code, reason = "not every test program asks for them")]
pub(crate) fn cases(program: &Path) -> Vec<String> {
    let output = run(program, "", &[]);
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}
