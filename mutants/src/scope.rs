//! Sources that are changed, and the sites in them.

use crate::find::find;
use crate::site::MutationSite;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Folders whose sources are changed, below the root of the workspace.
pub(crate) const FOLDERS: [&str; 5] = [
    "engine/src/core",
    "wire/src",
    "fabric-host/src",
    "fabric-host/common/src",
    "host/src/sidecar",
];

/// Folders of the packages that these are in.
pub(crate) const PACKAGES: [&str; 5] =
    ["engine", "wire", "fabric-host", "fabric-host/common", "host"];

/// Sources of the workspace by path, of these folders.
pub(crate) type Sources = BTreeMap<String, String>;

/// Reads the sources among these files.
///
/// # Errors
/// A file cannot be read.
pub(crate) fn sources(root: &Path, files: &[String]) -> Result<Sources, String> {
    let below = |file: &String| {
        file.ends_with(".rs") && FOLDERS.iter().any(|it| file.starts_with(&format!("{it}/")))
    };
    let read = |file: &String| {
        let text = fs::read_to_string(root.join(file)).map_err(|why| format!("{file}: {why}"))?;
        Ok((file.clone(), text))
    };
    files.iter().filter(|file| below(file)).map(read).collect()
}

/// Paths of a module that a file declares, without what they end in.
fn module_path(file: &str, module: &str) -> String {
    let (folder, name) = file.rsplit_once('/').unwrap_or(("", file));
    match name {
        "mod.rs" | "lib.rs" | "main.rs" => format!("{folder}/{module}"),
        name => format!("{folder}/{}/{module}", name.trim_end_matches(".rs")),
    }
}

/// Finds all sites, but in modules that only tests have.
///
/// # Errors
/// A file is not Rust.
pub(crate) fn sites(sources: &Sources) -> Result<Vec<MutationSite>, String> {
    let mut sites = Vec::new();
    let mut tests = Vec::new();
    for (file, text) in sources {
        let found = find(file, text).map_err(|why| format!("{file}: {why}"))?;
        sites.extend(found.sites);
        tests.extend(found.test_modules.iter().map(|module| module_path(file, module)));
    }
    let is_test = |file: &str| {
        let path = file.trim_end_matches(".rs");
        tests.iter().any(|test| path == test || file.starts_with(&format!("{test}/")))
    };
    sites.retain(|site| !is_test(&site.file));
    Ok(sites)
}

/// Puts the sites in the order in which a seed draws them. Each has its place by itself, so that a
/// change of one function draws no other sites elsewhere.
pub(crate) fn draw(mut sites: Vec<MutationSite>, seed: u64) -> Vec<MutationSite> {
    sites.sort_by_cached_key(|site| {
        let hash = Sha256::new().chain_update(seed.to_le_bytes()).chain_update(site.key());
        hash.finalize().to_vec()
    });
    sites
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace(files: &[(&str, &str)]) -> Sources {
        files.iter().map(|(file, text)| (file.to_string(), text.to_string())).collect()
    }

    #[test]
    fn modules_of_tests_have_no_sites() {
        let found = sites(&workspace(&[
            ("a/lib.rs", "#[cfg(test)]\nmod helpers;\nmod b;"),
            ("a/helpers.rs", "fn f() { g(1); }"),
            ("a/helpers/more.rs", "fn f() { g(1); }"),
            ("a/b.rs", "#[cfg(test)]\nmod tests;\nfn f() { g(1); }"),
            ("a/b/tests.rs", "fn f() { g(1); }"),
        ]));
        let found = found.expect("they parse");
        assert!(!found.is_empty());
        assert!(found.iter().all(|site| site.file == "a/b.rs"), "{found:?}");
    }

    #[test]
    fn change_of_one_function_moves_no_other_site() {
        let keys = |text: &str| {
            let found = sites(&workspace(&[("a.rs", text)])).expect("it parses");
            let drawn = draw(found, 7);
            drawn.iter().filter(|site| site.function == "f").map(|it| it.key()).collect::<Vec<_>>()
        };
        let before = keys("fn f() { g(1 + a); h(b < c); }");
        let after = keys("fn g() { k(2, 3); }\n\nfn f() { g(1 + a); h(b < c); }");
        assert!(before.len() >= 7, "{before:?}");
        assert_eq!(before, after);
    }
}
