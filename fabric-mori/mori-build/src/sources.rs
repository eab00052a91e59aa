//! The shim's sources, which are in mori-sys.

use crate::installation::MoriInstallation;
use sha2::{Digest, Sha256};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

macro_rules! sources {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_str!(concat!("../shim/", $name)))),*]
    };
}

/// Where the sources have the header that stands in for HIP's.
pub(crate) const STAND_IN: &str = "hip-stand-in";

/// The source that includes the others.
const ALL: &str = "all.cpp";

const SOURCES: &[(&str, &str)] = sources![
    "all.cpp",
    "device.cpp",
    "engine.cpp",
    "engine.hpp",
    "header.hpp",
    "hip-stand-in/hip/hip_runtime_api.h",
    "identity.cpp",
    "identity.hpp",
    "kf_mori.h",
    "last.cpp",
    "last.hpp",
    "mori.hpp",
    "pool.hpp",
    "post.cpp",
    "sha256.hpp",
    "text.hpp",
];

/// Writes the sources into a folder; the one that is compiled.
pub(crate) fn write(folder: &Path) -> io::Result<PathBuf> {
    for (name, text) in SOURCES {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(path, text)?;
    }
    Ok(folder.join(ALL))
}

/// Digits that differ wherever the sources do, or what they are compiled for: headers and libraries
/// in other places, whatever is in them.
pub fn sources_digest(mori: &MoriInstallation) -> String {
    let mut digest = Sha256::new();
    // Lengths keep apart what would run together.
    let mut add = |bytes: &[u8]| {
        digest.update((bytes.len() as u64).to_le_bytes());
        digest.update(bytes);
    };
    for (name, text) in SOURCES {
        add(name.as_bytes());
        add(text.as_bytes());
    }
    for path in [&mori.library].into_iter().chain(&mori.includes).chain(&mori.library_dirs) {
        add(path.as_os_str().as_bytes());
    }
    digest.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_of_the_folder_is_embedded() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("shim");
        for entry in fs::read_dir(folder).expect("shim") {
            let name = entry.expect("entry").file_name().into_string().expect("name");
            let embedded = SOURCES.iter().any(|(known, _)| known.split('/').next() == Some(&name));
            assert!(embedded, "{name}");
        }
    }
}
