//! Shims that are not there, are none, or are for another MoRI.

use kvferry_mori_build::MoriInstallation;
use mori_sys::{Functions, Kind, MORI_ABI, Shim, ShimSearchPath, ShimUnavailable, Text};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE: &str = "libkf_mori_shim.so";

fn folder(test: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(test);
    if path.exists() {
        fs::remove_dir_all(&path).expect("an old folder goes");
    }
    fs::create_dir_all(&path).expect("a folder");
    path.canonicalize().expect("its path")
}

fn refusal(path: &Path) -> ShimUnavailable {
    let places = ShimSearchPath { asked: Some(path.to_owned()), ..ShimSearchPath::default() };
    Shim::load(&places).expect_err("it is unusable")
}

#[test]
fn nothing_lists_the_places() {
    let dir = folder("nothing");
    let (beside, built) = (Some(dir.join("bin")), Some(dir.join("built.so")));
    let places = ShimSearchPath { asked: None, beside: beside.clone(), built };
    let none = Shim::load(&places).expect_err("nothing");
    let said = none.to_string();
    for path in [dir.join("bin").join(FILE), dir.join("built.so")] {
        assert!(said.contains(&format!("{}: not there", path.display())), "{said}");
    }
    assert!(said.starts_with("no usable shim for MoRI") && said.contains("KVFERRY_MORI_SHIM"));
    assert_eq!(none.not_built, None);

    let unbuilt =
        Shim::load(&ShimSearchPath { asked: None, beside, built: None }).expect_err("nothing");
    assert!(
        unbuilt
            .to_string()
            .contains(ShimSearchPath::compiled_note().lines().next().expect("a line"))
    );
}

#[test]
fn what_is_asked_for_is_the_only_one() {
    let dir = folder("asked");
    let places = ShimSearchPath {
        asked: Some(dir.join("a.so")),
        beside: Some(dir.clone()),
        built: Some(dir),
    };
    let none = Shim::load(&places).expect_err("nothing");
    assert_eq!(none.tried.len(), 1);
    assert_eq!(none.not_built, None);
}

#[test]
fn a_folder_stands_for_the_shim_in_it() {
    let dir = folder("folder");
    assert_eq!(refusal(&dir).tried[0].path, dir.join(FILE));
}

#[test]
fn what_is_no_library_is_no_shim() {
    let file = folder("text").join(FILE);
    fs::write(&file, "a text").expect("a text");
    let why = refusal(&file).tried.remove(0).why;
    assert!(why.contains(FILE) && why != "not there", "{why}");
}

#[test]
fn another_library_is_no_shim() {
    let file = folder("other").join(FILE);
    compile(&file, &source("stub_mori.cpp"), &[]);
    let why = refusal(&file).tried.remove(0).why;
    assert!(why.contains("kf_mori_info"), "{why}");
}

fn compile(out: &Path, source: &Path, flags: &[&str]) {
    let mut compiler = Command::new("c++");
    compiler.args(["-shared", "-fPIC", "-std=c++20"]).arg(source).args(flags).arg("-o").arg(out);
    assert!(compiler.status().expect("a compiler").success());
}

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// A MoRI of nothing.
fn mori(dir: &Path, build_id: &str) {
    let flag = format!("-Wl,--build-id={build_id},-soname,libmori_io.so");
    compile(&dir.join("libmori_io.so"), &source("stub_mori.cpp"), &[&flag]);
}

/// One with a shim for it.
fn pair(dir: &Path, build_id: &str, (abi, layout): (u32, u32)) -> PathBuf {
    mori(dir, build_id);
    fs::create_dir_all(dir.join("mori/io")).expect("a folder");
    fs::write(dir.join("mori/io/engine.hpp"), "").expect("a header");
    let names = Functions::NAMES.iter().filter(|name| !REAL.contains(name));
    let names: String = names.map(|name| format!("STUB(\"{name}\")\n")).collect();
    fs::write(dir.join("names.inc"), names).expect("a source");
    let found = MoriInstallation::explicit(dir, dir).expect("found");
    let folder = dir.display();
    let flags = [
        format!("-DKF_MORI_IDENTITY=\"{}\"", found.identity),
        format!("-DKF_MORI_PATH=\"{}\"", found.library.display()),
        format!("-DSTUB_ABI={abi}"),
        format!("-DSTUB_LAYOUT={layout}"),
        format!("-I{}/shim", env!("CARGO_MANIFEST_DIR")),
        format!("-I{folder}"),
        format!("-L{folder}"),
        format!("-Wl,-rpath,{folder}"),
        "-l:libmori_io.so".to_owned(),
    ];
    compile(&dir.join(FILE), &source("stub.cpp"), &flags.each_ref().map(String::as_str));
    dir.join(FILE)
}

/// Those that the stub has itself.
const REAL: [&str; 5] =
    ["kf_mori_info", "kf_mori_check", "kf_device_alloc", "kf_device_free", "kf_event_done"];

/// Each in a process of its own: a process has one library of a name.
fn in_own_process(test: &str, run: impl FnOnce()) {
    if std::env::var_os("KF_OWN_PROCESS").is_some() {
        return run();
    }
    let mut child = Command::new(std::env::current_exe().expect("a path"));
    let output =
        child.args([test, "--exact"]).env("KF_OWN_PROCESS", "1").output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
fn a_shim_with_its_library_is_loaded() {
    in_own_process("a_shim_with_its_library_is_loaded", || {
        let shim = pair(&folder("good"), "0x00c0ffee", (MORI_ABI, 9));
        let places = ShimSearchPath { asked: Some(shim.clone()), ..ShimSearchPath::default() };
        let loaded = Shim::load(&places).expect("a shim");
        assert_eq!(loaded.path, shim);
        assert_eq!((loaded.info.layout, loaded.info.sizes), (9, [1, 2, 3, 4, 5]));
        assert_eq!(loaded.info.compiled_for, "build-id:00c0ffee");
        assert_eq!(Path::new(&loaded.info.compiled_at), shim.with_file_name("libmori_io.so"));

        let (mut bytes, mut done) = ([0u8; 256], 7);
        let mut text = Text { data: bytes.as_mut_ptr().cast(), room: bytes.len() };
        // SAFETY: Without HIP the event is not looked at.
        let kind = unsafe { (loaded.functions.kf_event_done)(8, &raw mut done, &raw mut text) };
        assert_eq!((kind, done), (Kind::MISSING, 7));
        assert!(bytes.starts_with(b"no library of this process has hipEventQuery\0"));
    });
}

#[test]
fn a_library_without_build_id_is_known_by_its_hash() {
    in_own_process("a_library_without_build_id_is_known_by_its_hash", || {
        let shim = pair(&folder("hash"), "none", (MORI_ABI, 15));
        let places = ShimSearchPath { asked: Some(shim), ..ShimSearchPath::default() };
        let loaded = Shim::load(&places).expect("a shim");
        assert!(loaded.info.compiled_for.starts_with("sha256:"));
    });
}

#[test]
fn a_shim_of_another_library_is_refused() {
    in_own_process("a_shim_of_another_library_is_refused", || {
        let dir = folder("skewed");
        let shim = pair(&dir, "0x00c0ffee", (MORI_ABI, 9));
        mori(&dir, "0xdeadbeef");
        let why = refusal(&shim).tried.remove(0).why;
        let library = dir.join("libmori_io.so");
        assert!(why.contains(&format!("MoRI build-id:deadbeef ({})", library.display())), "{why}");
        assert!(why.contains("compiled for build-id:00c0ffee"), "{why}");
    });
}

#[test]
fn a_library_that_is_gone_is_named() {
    in_own_process("a_library_that_is_gone_is_named", || {
        let dir = folder("gone");
        let shim = pair(&dir, "0x00c0ffee", (MORI_ABI, 9));
        fs::remove_file(dir.join("libmori_io.so")).expect("it goes");
        let why = refusal(&shim).tried.remove(0).why;
        assert!(why.contains("libmori_io.so: cannot open shared object file"), "{why}");
    });
}

#[test]
fn other_interfaces_and_layouts_are_refused() {
    in_own_process("other_interfaces_and_layouts_are_refused", || {
        let why =
            refusal(&pair(&folder("interface"), "0x01", (MORI_ABI + 1, 9))).tried.remove(0).why;
        assert_eq!(why, format!("it has interface {} and not {MORI_ABI}", MORI_ABI + 1));
        let why = refusal(&pair(&folder("layout"), "0x02", (MORI_ABI, 14))).tried.remove(0).why;
        assert_eq!(why, "its MoRI packs 14 fields, and not [9, 15]");
    });
}
