//! Copy of the workspace in which the sites have switches.

use crate::rewrite::{RewrittenFile, rewrite};
use crate::scope::{PACKAGES, Sources};
use crate::site::MutationSite;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder of the package of the switch in a copy.
const SWITCH: &str = "mutant-switch";

const MANIFEST: &str = "[package]\nname = \"kvferry_mutant_switch\"\nversion = \"0.0.0\"\n\
                        edition = \"2024\"\npublish = false\n";

/// Files that Git knows, and those that it does not ignore.
///
/// # Errors
/// This is not a checkout.
pub(crate) fn tracked(root: &Path) -> Result<Vec<String>, String> {
    let output = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "-z"])
        .current_dir(root)
        .output()
        .map_err(|why| format!("git: {why}"))?;
    if !output.status.success() {
        return Err(format!("git ls-files: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let text = String::from_utf8(output.stdout).map_err(|why| format!("git ls-files: {why}"))?;
    let mut files: Vec<String> =
        text.split('\0').filter(|file| !file.is_empty()).map(str::to_owned).collect();
    files.retain(|file| root.join(file).symlink_metadata().is_ok());
    files.sort();
    files.dedup();
    Ok(files)
}

/// Writes a file unless it has this text, so that nothing is built again that is the same.
fn write(path: &Path, text: &[u8]) -> Result<(), String> {
    let told = |why: std::io::Error| format!("{}: {why}", path.display());
    if fs::read(path).is_ok_and(|there| there == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(told)?;
    }
    fs::write(path, text).map_err(told)
}

/// The copy, with the sites that are built.
#[derive(Debug)]
pub(crate) struct MutantTree {
    pub(crate) folder: PathBuf,
    /// Sites by their number in the build.
    pub(crate) sites: BTreeMap<u32, MutationSite>,
    sources: Sources,
    written: BTreeMap<String, RewrittenFile>,
}

impl MutantTree {
    /// Copies the workspace.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub(crate) fn copy(
        root: &Path,
        folder: PathBuf,
        files: &[String],
        sources: Sources,
        sites: BTreeMap<u32, MutationSite>,
    ) -> Result<MutantTree, String> {
        for file in files.iter().filter(|file| !sources.contains_key(*file)) {
            copy_file(&root.join(file), &folder.join(file), file)?;
        }
        let known: BTreeSet<&String> = files.iter().collect();
        remove_others(&folder, &folder, &known)?;
        write(&folder.join(SWITCH).join("Cargo.toml"), MANIFEST.as_bytes())?;
        write(&folder.join(SWITCH).join("src/lib.rs"), include_bytes!("switch.rs"))?;
        Ok(MutantTree { folder, sites, sources, written: BTreeMap::new() })
    }

    /// Writes the sources with a switch at each site.
    ///
    /// # Errors
    /// A file cannot be written.
    pub(crate) fn write_sources(&mut self) -> Result<(), String> {
        for (file, text) in &self.sources {
            let sites: Vec<(u32, &MutationSite)> = self
                .sites
                .iter()
                .filter(|(_, site)| site.file == *file)
                .map(|(id, site)| (*id, site))
                .collect();
            let rewritten = rewrite(text, &sites);
            write(&self.folder.join(file), rewritten.text.as_bytes())?;
            self.written.insert(file.clone(), rewritten);
        }
        Ok(())
    }

    /// A source file as it was written.
    pub(crate) fn written(&self, file: &str) -> Option<&RewrittenFile> {
        self.written.get(file)
    }
}

fn copy_file(from: &Path, to: &Path, file: &str) -> Result<(), String> {
    let told = |why: std::io::Error| format!("{file}: {why}");
    if let Ok(target) = fs::read_link(from) {
        if fs::read_link(to).is_ok_and(|there| there == target) {
            return Ok(());
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder).map_err(told)?;
        }
        let _ = fs::remove_file(to);
        return symlink(target, to).map_err(told);
    }
    let mut text = fs::read(from).map_err(told)?;
    if let Some(package) = PACKAGES.iter().find(|it| *file == format!("{it}/Cargo.toml")) {
        text = with_switch(&String::from_utf8_lossy(&text), package).into_bytes();
    }
    // Cargo adds the switch to the lock of the copy.
    if file == "Cargo.lock" && to.exists() {
        return Ok(());
    }
    write(to, &text)?;
    let mode = fs::metadata(from).map_err(told)?.permissions();
    fs::set_permissions(to, mode).map_err(told)
}

/// A manifest with the switch as a dependency.
fn with_switch(manifest: &str, package: &str) -> String {
    let up = "../".repeat(package.split('/').count());
    let line = format!("[dependencies]\nkvferry_mutant_switch = {{ path = \"{up}{SWITCH}\" }}\n");
    manifest.replacen("[dependencies]\n", &line, 1)
}

/// Removes the sources of a former copy that are gone.
fn remove_others(root: &Path, folder: &Path, known: &BTreeSet<&String>) -> Result<(), String> {
    let told = |why: std::io::Error| format!("{}: {why}", folder.display());
    for entry in fs::read_dir(folder).map_err(told)? {
        let path = entry.map_err(told)?.path();
        let name = path.strip_prefix(root).unwrap_or(&path).to_string_lossy().into_owned();
        if path.is_dir() && !path.is_symlink() {
            if name != SWITCH && name != "target" {
                remove_others(root, &path, known)?;
            }
        } else if !known.contains(&name) {
            fs::remove_file(&path).map_err(told)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_of_a_package_gets_the_switch_once() {
        let text = "[package]\nname = \"a\"\n\n[dependencies]\nb = \"1\"\n\n[dev-dependencies]\n";
        let out = with_switch(text, "fabric-host/common");
        assert!(out.contains("[dependencies]\nkvferry_mutant_switch = { path = \"../../mutant-"));
        assert_eq!(out.matches("kvferry_mutant_switch").count(), 1);
    }
}
