//! The double's own sources and the cases in one program, under the compiler's sanitizers.

mod support;

use mori_double::INSTALLS;
use std::path::Path;
use std::process::Command;
use support::{cases, compile, run, said};

/// Ends the test if the compiler lacks it: a check that is skipped would look like one that passed.
fn demand(sanitizer: &str) {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{sanitizer}.cpp"));
    std::fs::write(&source, "int main() { return 0; }\n").expect("a file");
    let flag = format!("-fsanitize={sanitizer}");
    let path = source.to_str().expect("a path in UTF-8");
    let program = compile(&format!("has-{sanitizer}"), &[&flag, path]);
    let status = Command::new(program).status().expect("a program that runs");
    assert!(status.success(), "programs with {flag} do not run here: {status}");
}

fn clean(sanitizer: &str, without: &[&str]) {
    demand(sanitizer);
    let flag = format!("-fsanitize={sanitizer}");
    let include = INSTALLS[1].include;
    let sources = ["src/all.cpp", "tests/cpp/main.cpp"];
    let args = [&["-O1", "-g1", &flag, "-I", include][..], &sources].concat();
    let program = compile(&format!("cases-{sanitizer}"), &args);
    let options = [("ASAN_OPTIONS", "detect_leaks=1"), ("TSAN_OPTIONS", "halt_on_error=1")];
    for case in cases(&program) {
        // Those that are to end the process would end it before the sanitizer has its say.
        if case.starts_with("ends_") || without.contains(&case.as_str()) {
            continue;
        }
        let output = run(&program, &case, &options);
        assert!(output.status.success(), "{case} with {flag}: {}", said(&output));
    }
}

#[test]
fn addresses() {
    clean("address", &["a_status_at_a_recycled_address"]);
}

#[test]
fn threads() {
    clean("thread", &["a_status_at_a_recycled_address"]);
}
