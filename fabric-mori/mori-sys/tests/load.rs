//! Shims that are not there, are none, or are for another MoRI.

use kvferry_mori_build::MoriInstallation;
use mori_sys::{
    CompiledShim, Functions, Kind, MORI_ABI, Shim, ShimCache, ShimOrigin, ShimSearchPath,
    ShimUnavailable, Text,
};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

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
    let beside = folder("nothing").join("bin");
    let places = ShimSearchPath { beside: Some(beside.clone()), ..ShimSearchPath::default() };
    let none = Shim::load(&places).expect_err("nothing");
    let said = none.to_string();
    assert!(said.contains(&format!("{}: not there", beside.join(FILE).display())), "{said}");
    assert!(said.starts_with("no usable shim for MoRI") && said.contains("KVFERRY_MORI_SHIM"));
    assert_eq!(none.not_compiled, None);
}

#[test]
fn what_is_asked_for_is_the_only_one() {
    let dir = folder("asked");
    let places =
        ShimSearchPath { asked: Some(dir.join("a.so")), beside: Some(dir), compiles: true };
    let none = Shim::load(&places).expect_err("nothing");
    assert_eq!(none.tried.len(), 1);
    assert_eq!(none.not_compiled, None);
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
    in_environment(test, Vec::new, run);
}

/// The same, with variables.
fn in_environment(
    test: &str,
    set: impl FnOnce() -> Vec<(&'static str, PathBuf)>,
    run: impl FnOnce(),
) {
    if std::env::var_os("KF_OWN_PROCESS").is_some() {
        return run();
    }
    let mut child = Command::new(std::env::current_exe().expect("a path"));
    child.args([test, "--exact"]).env("KF_OWN_PROCESS", "1").envs(set());
    let output = child.output().expect("it runs");
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

/// A MoRI to compile for: the stand-in.
fn double() -> MoriInstallation {
    let newest = mori_double::INSTALLS[1];
    MoriInstallation::explicit(newest.include, newest.lib).expect("the stand-in")
}

fn cache(folder: &Path) -> ShimCache {
    ShimCache::of(&|name| (name == "KVFERRY_CACHE").then(|| folder.into())).expect("a folder")
}

/// A compiler that does what the script says, with where the library is to be in `$out`.
fn compiler(dir: &Path, script: &str) -> PathBuf {
    let path = dir.join("compiler");
    let out = "while [ \"$1\" != -o ]; do shift; done; out=$2";
    fs::write(&path, format!("#!/bin/sh\n{out}\n{script}\n")).expect("a script");
    fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("a mode");
    path
}

#[test]
fn the_shim_is_compiled_when_it_is_first_used_and_kept() {
    let test = "the_shim_is_compiled_when_it_is_first_used_and_kept";
    let installed = mori_double::INSTALLS[1];
    let set = || {
        vec![
            ("KVFERRY_CACHE", folder("first-use")),
            ("MORI_INCLUDE_DIR", installed.include.into()),
            ("MORI_LIB_DIR", installed.lib.into()),
            ("KVFERRY_MORI_SHIM", PathBuf::new()),
        ]
    };
    in_environment(test, set, || {
        let load = || Shim::load(&ShimSearchPath::of_process()).expect("the compiler is there");
        let first = load();
        assert!(matches!(first.origin, ShimOrigin::Compiled(_)), "{:?}", first.origin);
        assert_eq!(first.info.layout, installed.class);
        let of_cache = Path::new(&std::env::var_os("KVFERRY_CACHE").expect("set")).join("shim");
        assert!(first.path.starts_with(of_cache), "{}", first.path.display());
        let again = load();
        assert_eq!((again.origin, &again.path), (ShimOrigin::Kept, &first.path));
    });
}

#[test]
fn those_that_start_at_once_compile_one_shim() {
    let test = "those_that_start_at_once_compile_one_shim";
    let dir = || Path::new(env!("CARGO_TARGET_TMPDIR")).join("at-once");
    let script =
        "echo run >> \"$(dirname \"$0\")/runs\"; printf half > \"$out\"; printf whole >> \"$out\"";
    let set = || vec![("CXX", compiler(&folder("at-once"), script))];
    in_environment(test, set, || {
        let (cache, mori) = (cache(&dir()), double());
        let made: Vec<CompiledShim> = thread::scope(|scope| {
            let ask = || cache.shim(&mori).expect("a shim");
            let asked: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
            asked.into_iter().map(|asked| asked.join().expect("no panic")).collect()
        });
        assert_eq!(made.iter().filter(|made| made.took.is_some()).count(), 1, "{made:?}");
        assert!(made.iter().all(|one| one.path == made[0].path), "{made:?}");
        assert_eq!(fs::read_to_string(&made[0].path).expect("it is there"), "halfwhole");
        // One that was ended meanwhile has left something; a shim that is there is compiled on demand.
        let work = made[0].path.with_file_name("work");
        assert!(!work.exists());
        fs::create_dir_all(work.join("kf_mori_shim")).expect("a folder");
        assert!(cache.compile(&mori).expect("a shim").took.is_some() && !work.exists());
        let runs = fs::read_to_string(dir().join("runs")).expect("it ran");
        assert_eq!(runs.lines().count(), 2);
        // Another MoRI has another one.
        let other = mori_double::INSTALLS[0];
        let other = MoriInstallation::explicit(other.include, other.lib).expect("the stand-in");
        assert_ne!(cache.shim(&other).expect("a shim").path, made[0].path);
    });
}

#[test]
fn a_compiler_that_fails_is_one_error_and_leaves_no_shim() {
    let test = "a_compiler_that_fails_is_one_error_and_leaves_no_shim";
    let script = "printf half > \"$out\"; seq -f 'line %g.' 1 29 >&2; echo an error >&2
        seq -f 'line %g.' 31 100 >&2; exit 1";
    let set = || vec![("CXX", compiler(&folder("fails"), script))];
    in_environment(test, set, || {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fails");
        let why = cache(&dir).shim(&double()).expect_err("it fails");
        assert!(why.contains("does not compile") && why.contains("fails/compiler -std"), "{why}");
        // The first error, which says most, and the end.
        assert!(why.contains("\nan error\nline 31.\n") && why.ends_with("line 100."), "{why}");
        assert!(["line 29.", "line 40.", "line 90."].iter().all(|out| !why.contains(out)), "{why}");
        let key = fs::read_dir(dir.join("shim")).expect("a folder").next().expect("one");
        let left = fs::read_dir(key.expect("an entry").path()).expect("a folder");
        let left: Vec<_> = left.map(|entry| entry.expect("an entry").file_name()).collect();
        assert_eq!(left, ["lock"]);
    });
}

#[test]
fn without_a_compiler_the_remedy_is_said() {
    let set = || vec![("CXX", "/nonexistent/c++".into())];
    in_environment("without_a_compiler_the_remedy_is_said", set, || {
        let why = cache(&folder("no-compiler")).shim(&double()).expect_err("there is none");
        assert!(why.contains("/nonexistent/c++: cannot be started: "), "{why}");
        assert!(why.ends_with("install a C++ compiler, or name one by CXX"), "{why}");
    });
}

#[test]
fn a_shim_that_others_can_change_is_refused() {
    let test = "a_shim_that_others_can_change_is_refused";
    let set = || vec![("CXX", compiler(&folder("trust"), "printf whole > \"$out\""))];
    in_environment(test, set, || {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("trust").canonicalize();
        let dir = dir.expect("its path");
        let (cache, mori) = (cache(&dir), double());
        let shim = cache.shim(&mori).expect("a shim").path;
        let key = shim.parent().expect("a folder");
        let of_all = key.parent().expect("a folder");
        let mode = |path: &Path, mode| {
            fs::set_permissions(path, Permissions::from_mode(mode)).expect("it is ours");
        };
        for (path, bad) in
            [(&*shim, 0o775), (&shim, 0o757), (key, 0o775), (of_all, 0o1777), (&dir, 0o777)]
        {
            mode(path, bad);
            // One that is compiled anew is put in the place of a bad one.
            let anew = (path != shim).then(|| cache.compile(&mori));
            for asked in [Some(cache.shim(&mori)), anew].into_iter().flatten() {
                let why = asked.expect_err("others can write");
                let says = format!("{} belongs to user ", path.display());
                assert!(why.contains(&says) && why.contains(&format!("mode {bad:04o}")), "{why}");
                assert!(
                    why.contains("KVFERRY_CACHE") && why.contains("KVFERRY_MORI_SHIM"),
                    "{why}"
                );
            }
            mode(path, 0o755);
        }
        // A folder above may be as /tmp is, or its group's.
        for good in [0o1777, 0o775] {
            mode(&dir, good);
            assert_eq!(cache.shim(&mori).expect("a shim").took, None);
        }
        fs::rename(&shim, dir.join("elsewhere.so")).expect("it moves");
        std::os::unix::fs::symlink(dir.join("elsewhere.so"), &shim).expect("a link");
        assert!(cache.shim(&mori).expect_err("a link").contains("with mode"));
    });
}

#[test]
fn a_folder_that_cannot_be_made_is_named_with_what_to_do() {
    let why = cache(Path::new("/dev/null")).shim(&double()).expect_err("no folder");
    assert!(why.starts_with("/dev/null/shim/build-id-"), "{why}");
    let says = ["cannot", "KVFERRY_CACHE", "KVFERRY_MORI_SHIM"];
    assert!(says.iter().all(|says| why.contains(says)), "{why}");
}
