//! Where MoRI is looked for, and which ones are refused.

use crate::support::{ENGINE, GOOD, RESOLVE, TestEnv, WAIT_ALL, folder, headers, library};
use kvferry_mori_build::{MoriInstallation, MoriSearchError, MoriSearchRule, search};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

fn find(vars: &[(&'static str, &Path)]) -> Result<MoriInstallation, MoriSearchError> {
    let env = TestEnv::new(vars);
    search(&|name| env.get(name))
}

fn refusal(test: &str, exports: &[&str]) -> String {
    let dir = folder(test);
    headers(&dir);
    library(&dir, exports, &[]);
    let missing = MoriInstallation::explicit(&dir, &dir).expect_err("it is refused");
    assert!(
        matches!(missing, MoriSearchError::Refused { .. }) && !missing.is_nowhere(),
        "{missing}"
    );
    missing.to_string()
}

#[test]
fn one_of_two_variables_is_an_error() {
    let dir = folder("unpaired");
    let both = ["MORI_INCLUDE_DIR", "MORI_LIB_DIR"];
    for (set, unset) in [(both[0], both[1]), (both[1], both[0])] {
        let missing = find(&[(set, &dir)]).expect_err("one is too few");
        assert_eq!(missing, MoriSearchError::Unpaired { set, unset });
        let said = format!("{set} is set and {unset} is not: set both or neither");
        assert_eq!(missing.to_string(), said);
    }
}

#[test]
fn an_empty_variable_is_not_set() {
    let missing = find(&[("MORI_INCLUDE_DIR", Path::new(""))]).expect_err("nothing");
    assert!(missing.is_nowhere(), "{missing}");
}

#[test]
fn the_variables_come_before_the_home() {
    let dir = folder("variables");
    let home = dir.join("home");
    let (include, lib) = (dir.join("i"), dir.join("l"));
    for (include, lib) in [(&include, &lib), (&home.join("include"), &home.join("lib"))] {
        headers(include);
        library(lib, GOOD, &[]);
    }
    let vars = [("MORI_HOME", &*home), ("MORI_INCLUDE_DIR", &*include), ("MORI_LIB_DIR", &*lib)];
    let found = find(&vars).expect("both");
    assert_eq!((found.rule, &found.includes[0]), (MoriSearchRule::Variables, &include));
    assert_eq!(found.library, lib.join("libmori_io.so"));
    fs::remove_file(lib.join("libmori_io.so")).expect("it goes");
    assert_eq!(find(&vars).expect("the home").rule, MoriSearchRule::Home);
}

#[test]
fn a_home_is_an_installation_or_a_source_tree() {
    let dir = folder("home");
    headers(&dir.join("include"));
    let msgpack = dir.join("3rdparty/msgpack-c/include");
    fs::create_dir_all(&msgpack).expect("a folder");
    fs::write(msgpack.join("msgpack.hpp"), "").expect("a header");
    library(&dir.join("build/src/io"), GOOD, &[]);
    let application = dir.join("build/src/application");
    fs::create_dir_all(&application).expect("a folder");
    fs::write(application.join("libmori_application.so"), "").expect("a library");
    let tree = find(&[("MORI_HOME", &dir)]).expect("a source tree");
    assert_eq!(tree.rule, MoriSearchRule::Home);
    assert_eq!(tree.includes[..2], [dir.join("include"), msgpack]);
    assert_eq!(tree.library_dirs, [dir.join("build/src/io"), application]);
    assert!(tree.application);

    library(&dir.join("lib"), GOOD, &[]);
    let installed = find(&[("MORI_HOME", &dir)]).expect("an installation");
    assert_eq!(installed.library_dirs, [dir.join("lib")]);
    assert!(!installed.application);
}

#[test]
fn rocm_is_where_rocm_path_says() {
    let dir = folder("rocm");
    headers(&dir.join("include"));
    library(&dir.join("lib"), GOOD, &[]);
    let hip = dir.join("rocm/include");
    fs::create_dir_all(hip.join("hip")).expect("a folder");
    fs::write(hip.join("hip/hip_runtime_api.h"), "").expect("a header");
    let found = find(&[("MORI_HOME", &dir), ("ROCM_PATH", &dir.join("rocm"))]).expect("found");
    assert_eq!(found.includes.last(), Some(&hip));
}

/// A Python that has the modules of `dir`.
fn python(dir: &Path) -> PathBuf {
    let path = dir.join("python");
    let script = format!("#!/bin/sh\nPYTHONPATH='{}' exec python3 -S \"$@\"\n", dir.display());
    fs::write(&path, script).expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("permissions");
    path
}

fn find_by(python: &Path) -> Result<MoriInstallation, MoriSearchError> {
    let python = python.as_os_str().to_owned();
    search(&|name| (name == "MORI_PYTHON").then(|| python.clone()))
}

#[test]
fn a_package_is_found_without_being_imported() {
    let dir = folder("package");
    let package = dir.join("mori");
    headers(&package.join("_jit-sources/include"));
    library(&package, GOOD, &[]);
    fs::write(package.join("__init__.py"), "raise SystemExit('imported')").expect("a module");
    let found = find_by(&python(&dir)).expect("found");
    assert_eq!((found.rule, found.library_dirs), (MoriSearchRule::Python, vec![package]));
}

#[test]
fn a_package_without_the_library_is_listed() {
    let dir = folder("drop-in");
    fs::create_dir_all(dir.join("mori")).expect("a folder");
    fs::write(dir.join("mori/__init__.py"), "raise SystemExit('imported')").expect("a module");
    let missing = find_by(&python(&dir)).expect_err("no library");
    let place = format!("{}/mori/libmori_io.so: not there", dir.display());
    assert!(missing.is_nowhere() && missing.to_string().contains(&place), "{missing}");
}

#[test]
fn nothing_lists_every_place_and_the_remedy() {
    let dir = folder("nothing");
    let said = find(&[("MORI_HOME", &dir)]).expect_err("nothing").to_string();
    let parts = [
        "mori/io/engine.hpp and libmori_io.so were not found",
        "MORI_INCLUDE_DIR and MORI_LIB_DIR: not set",
        &format!("{}/include/mori/io/engine.hpp: not there", dir.display()),
        &format!("{}/lib/libmori_io.so: not there", dir.display()),
        &format!("{}/build/src/io/libmori_io.so: not there", dir.display()),
        "/nonexistent/python3: No such file",
        "set MORI_INCLUDE_DIR and MORI_LIB_DIR",
    ];
    for part in parts {
        assert!(said.contains(part), "{part}: {said}");
    }
    let without = find_by(&python(&dir)).expect_err("nothing").to_string();
    assert!(without.contains("python: has no package mori"), "{without}");
}

#[test]
fn unsupported_versions_are_named() {
    let old = refusal("v1.1", &[ENGINE]);
    assert!(old.contains("libmori_io.so: this is MoRI v1.1 or older"), "{old}");
    assert!(old.contains("install v1.2.1 or later"), "{old}");
    let middle = refusal("v1.2.0", &[ENGINE, WAIT_ALL, RESOLVE]);
    assert!(middle.contains("this is MoRI v1.2.0"), "{middle}");
    assert!(middle.contains("install v1.2.1 or later"), "{middle}");
    let other = refusal("other", &["kf_other"]);
    assert!(other.contains("it has no mori::io::IOEngine"), "{other}");
}

#[test]
fn what_is_no_library_is_refused() {
    let dir = folder("text");
    headers(&dir);
    fs::write(dir.join("libmori_io.so"), "a text").expect("a text");
    let missing = MoriInstallation::explicit(&dir, &dir).expect_err("a text");
    assert!(missing.to_string().contains("no ELF library"), "{missing}");
}

#[test]
fn identity_and_layout_are_the_library_s() {
    let dir = folder("identity");
    headers(&dir);
    library(&dir, &[ENGINE, WAIT_ALL], &["-Wl,--build-id=0x00c0ffee"]);
    let found = MoriInstallation::explicit(&dir, &dir).expect("found");
    assert_eq!((&*found.identity, found.layout), ("build-id:00c0ffee", 9));
    library(&dir, GOOD, &["-Wl,--build-id=none"]);
    let found = MoriInstallation::explicit(&dir, &dir).expect("found");
    assert_eq!(found.identity.len(), "sha256:".len() + 64);
    assert!(found.identity.starts_with("sha256:"));
    assert_eq!(found.layout, 15);
}
