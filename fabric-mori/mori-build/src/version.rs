//! Which MoRI a library is, by what it exports: there is no version in it.

use crate::elf::Elf;
use std::path::Path;

/// Methods of `mori::io::IOEngine`, mangled up to their arguments. A private one of v1.2.0 and
/// older tells v1.2.1, which has the same public ones, from it.
const ENGINE: &str = "_ZN4mori2io8IOEngine13CreateBackend";
const WAIT_ALL: &str = "_ZN4mori2io8IOEngine7WaitAll";
const RESOLVE: &str = "_ZNK4mori2io8IOEngine13ResolveNodeId";
const FABRIC: &str = "_ZN4mori2io8IOEngine20LoadFabricCopyModule";

/// What a library is told by.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InspectedLibrary {
    /// Fields of a packed `MemoryDesc`: 9 for v1.2.1, 15 from v1.2.2 on.
    pub(crate) layout: u32,
    /// `build-id:` or `sha256:` and hexadecimal digits.
    pub(crate) identity: String,
}

/// Reads a library; an error says why it cannot be used.
pub(crate) fn inspect(path: &Path) -> Result<InspectedLibrary, String> {
    let elf = Elf::open(path)?;
    let names = elf.exports().ok_or("it has no table of exported names")?;
    let has = |start: &str| names.iter().any(|name| name.starts_with(start));
    if !has(ENGINE) {
        return Err("it has no mori::io::IOEngine".into());
    }
    if !has(WAIT_ALL) {
        return Err(
            "this is MoRI v1.1 or older: it ends the process where it finds no NIC, and has \
                    no bounded wait; install v1.2.1 or later"
                .into(),
        );
    }
    if has(RESOLVE) {
        return Err("this is MoRI v1.2.0: its headers only compile with those of ROCm's driver \
                    library (hsakmt); install v1.2.1 or later"
            .into());
    }
    Ok(InspectedLibrary { layout: if has(FABRIC) { 15 } else { 9 }, identity: identity(&elf) })
}

fn identity(elf: &Elf) -> String {
    use sha2::{Digest, Sha256};
    if let Some(id) = elf.build_id() {
        return format!("build-id:{id}");
    }
    let digest = Sha256::digest(elf.bytes());
    let digits: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}
