//! What the compiler says reaches the one who builds.

use crate::support::{ENGINE, GOOD, WAIT_ALL, folder, headers, library};
use kvferry_mori_build::{MoriInstallation, compile};
use std::fs;

#[test]
fn an_error_has_the_command_and_what_it_said() {
    let dir = folder("broken");
    headers(&dir);
    fs::write(dir.join("mori/io/engine.hpp"), "#include <no/msgpack.hpp>\n").expect("a header");
    library(&dir, GOOD, &[]);
    let found = MoriInstallation::explicit(&dir, &dir).expect("found");
    let error = compile(&found, &dir, &["-DONE_MORE=1"]).expect_err("no header");
    assert!(error.command.contains("-std=c++20") && error.command.contains("-DONE_MORE=1"));
    assert!(error.command.contains(&format!("-I {}", dir.display())), "{}", error.command);
    assert!(error.output.contains("no/msgpack.hpp"), "{}", error.output);
    let said = error.to_string();
    assert!(said.contains("install msgpack-c's C++ headers"), "{said}");
    assert!(!said.contains("libibverbs"), "{said}");
}

/// As much of v1.2.2 as the shim asks for before anything else.
const NEW: &str = "
namespace mori::io {
struct TransferStatus { void WaitFor(int); };
struct RdmaBackendConfig {
  int notifPerQp, enableTransferChunking, numNicsPerTransfer, maxMsgSge;
};
struct MemoryDesc { int numaNode, ipcOffset, fabricHandle, fabricAllocSize; };
}
";

#[test]
fn headers_of_another_version_than_the_library_s_are_an_error() {
    let dir = folder("mixed");
    headers(&dir);
    fs::write(dir.join("mori/io/engine.hpp"), NEW).expect("a header");
    library(&dir, &[ENGINE, WAIT_ALL], &[]);
    let found = MoriInstallation::explicit(&dir, &dir).expect("found");
    let error = compile(&found, &dir, &[]).expect_err("two versions").to_string();
    assert!(error.contains("headers and its library are of different versions"), "{error}");
}
