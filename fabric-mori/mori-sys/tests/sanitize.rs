//! The shim and the double under the sanitizers, for each of which they are compiled anew.

use kvferry_mori_build::{MoriInstallation, compile};
use mori_double::INSTALLS;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn folder(name: &str) -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&dir).expect("a folder");
    dir.canonicalize().expect("its path")
}

/// The program over a shim and a double that were compiled with `flags`.
fn sanitized(name: &str, flags: &[&str]) -> PathBuf {
    let dir = folder(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../double/src/all.cpp");
    let include = INSTALLS[1].include;
    let mut double = Command::new("c++");
    double.args(["-O1", "-g", "-std=c++20", "-fPIC", "-shared", "-pthread", "-I", include]);
    double.args(["-Wl,--build-id", "-Wl,-soname,libmori_io.so"]).args(flags);
    double.arg(source).arg("-o").arg(dir.join("libmori_io.so"));
    assert!(double.status().expect("a compiler").success());
    let found = MoriInstallation::explicit(include, &dir).expect("the double");
    let shim = compile(&found, &dir, flags).expect("the shim");
    linked(&dir, &dir, &shim, flags)
}

fn linked(dir: &Path, lib: &Path, shim: &Path, flags: &[&str]) -> PathBuf {
    let (root, program) = (Path::new(env!("CARGO_MANIFEST_DIR")), dir.join("stress"));
    let mut compiler = Command::new("c++");
    compiler.args(["-O1", "-g", "-std=c++20", "-pthread", "-I"]).arg(root.join("shim"));
    compiler.args(flags).arg(root.join("tests/stress.cpp")).arg(shim);
    compiler.arg(lib.join("libmori_io.so"));
    for dir in [lib, shim.parent().expect("a folder")] {
        compiler.arg(format!("-Wl,-rpath,{}", dir.display()));
    }
    assert!(compiler.arg("-o").arg(&program).status().expect("a compiler").success());
    program
}

fn held(output: &Output) {
    let said = String::from_utf8_lossy(&output.stderr);
    let held = output.status.success() && output.stdout.ends_with(b"held\n");
    assert!(held, "{:?}\n{said}", output.status);
    assert!(!said.contains("kvferry:"), "{said}");
}

#[test]
fn addresses() {
    let program = sanitized("address", &["-fsanitize=address,undefined", "-fno-sanitize-recover"]);
    held(&Command::new(program).output().expect("it runs"));
}

#[test]
fn threads() {
    let mut program = Command::new(sanitized("thread", &["-fsanitize=thread"]));
    held(&program.env("TSAN_OPTIONS", "halt_on_error=1").output().expect("it runs"));
}

#[test]
fn an_exception_of_another_thread_is_named() {
    let install = INSTALLS[0];
    let (lib, shim) = (Path::new(install.lib), Path::new(install.shim));
    let program = linked(&folder("plain"), lib, shim, &[]);
    let output = Command::new(program).arg("terminate").output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let line = "kvferry: std::terminate: from a thread of MoRI with 1 MoRI engine(s) up; last call \
                into MoRI: IOEngine, returned\n";
    assert!(!output.status.success() && said.contains(line), "{said}");
}
