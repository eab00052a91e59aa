//! Results of former runs, which hold as long as the function, its change and the tests are the same.

use crate::site::{MutationSite, hash};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// What became of a mutant.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MutantResult {
    /// This test program found it, by this test or by not ending.
    Found { program: String, by: String },
    /// All test programs that reach it passed.
    Survived,
    /// No test program reaches it.
    Unreached,
}

/// Versions of the test programs: hashes of what their tests are written in.
#[derive(Clone, Debug, Default)]
pub(crate) struct TestVersions(pub(crate) BTreeMap<String, String>);

impl TestVersions {
    /// Reads the tests among these files: those of each package, and the scenarios with the
    /// simulator that plays them.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(crate) fn read(root: &Path, files: &[String]) -> Result<TestVersions, String> {
        let mut parts: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        for file in files {
            let Some(package) = package_of(file) else { continue };
            let text = fs::read(root.join(file)).map_err(|why| format!("{file}: {why}"))?;
            let all = parts.entry(package).or_default();
            all.extend_from_slice(hash(&[file.as_bytes(), &text]).as_bytes());
        }
        Ok(TestVersions(parts.into_iter().map(|(name, all)| (name, hash(&[&all]))).collect()))
    }

    fn of(&self, program: &str) -> String {
        let package = program.split(' ').next().unwrap_or_default();
        self.0.get(package).cloned().unwrap_or_default()
    }

    fn all(&self) -> String {
        let all: String = self.0.values().map(String::as_str).collect();
        hash(&[all.as_bytes()])
    }
}

/// Folder of the package whose tests a file is part of.
fn package_of(file: &str) -> Option<String> {
    let is_simulator = ["scenarios/", "fabric-sim/"].iter().any(|it| file.starts_with(it));
    if is_simulator && (file.ends_with(".toml") || file.ends_with(".rs")) {
        return Some("fabric-sim".into());
    }
    let (package, inner) = match file.split_once("/tests/") {
        Some(parts) => parts,
        None => {
            let (package, inner) = file.split_once("/src/")?;
            let tests = ["conformance/", "tests.rs", "testing.rs"];
            tests.iter().any(|it| inner.contains(it)).then_some((package, inner))?
        }
    };
    (!inner.ends_with(".md")).then(|| package.rsplit('/').next().unwrap_or(package).to_owned())
}

/// Folder of the results.
#[derive(Clone, Debug)]
pub(crate) struct ResultCache {
    pub(crate) folder: PathBuf,
    pub(crate) versions: TestVersions,
}

/// A result, and the versions of the tests that it is of.
#[derive(Serialize, Deserialize)]
struct CachedResult {
    version: String,
    result: MutantResult,
}

impl ResultCache {
    fn path(&self, site: &MutationSite) -> PathBuf {
        self.folder.join(site.hash()).with_extension("json")
    }

    /// What is found stays found while the tests of the finder's package are the same; what
    /// survived is run again when any test has changed.
    fn version(&self, result: &MutantResult) -> String {
        match result {
            MutantResult::Found { program, .. } => self.versions.of(program),
            MutantResult::Survived | MutantResult::Unreached => self.versions.all(),
        }
    }

    /// The result of a former run, if it still holds.
    pub(crate) fn get(&self, site: &MutationSite) -> Option<MutantResult> {
        let text = fs::read_to_string(self.path(site)).ok()?;
        let cached: CachedResult = serde_json::from_str(&text).ok()?;
        (cached.version == self.version(&cached.result)).then_some(cached.result)
    }

    /// Keeps a result.
    ///
    /// # Errors
    /// It cannot be written.
    pub(crate) fn put(&self, site: &MutationSite, result: &MutantResult) -> Result<(), String> {
        let cached = CachedResult { version: self.version(result), result: result.clone() };
        let text = serde_json::to_string(&cached).map_err(|why| why.to_string())?;
        let path = self.path(site);
        let told = |why: std::io::Error| format!("{}: {why}", path.display());
        fs::create_dir_all(&self.folder).map_err(told)?;
        fs::write(&path, text).map_err(told)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::find::find;

    fn cache(versions: &[(&str, &str)]) -> ResultCache {
        let folder = std::env::temp_dir().join(format!("kvferry-cache-{}", std::process::id()));
        let versions = versions.iter().map(|(name, it)| (name.to_string(), it.to_string()));
        ResultCache { folder, versions: TestVersions(versions.collect()) }
    }

    #[test]
    fn result_holds_while_the_function_and_its_tests_are_the_same() {
        let site = |text: &str| find("a.rs", text).expect("it parses").sites.remove(0);
        let (one, other) = (site("fn f() { g(1); }"), site("fn f() { g(1); h(); }"));
        let found = MutantResult::Found { program: "engine pair".into(), by: "a_test".into() };
        let before = cache(&[("engine", "1"), ("wire", "1")]);
        before.put(&one, &found).expect("it is kept");
        assert_eq!(before.get(&one), Some(found.clone()));
        assert_eq!(before.get(&other), None, "another text");
        assert_eq!(cache(&[("engine", "1"), ("wire", "2")]).get(&one), Some(found));
        assert_eq!(cache(&[("engine", "2"), ("wire", "1")]).get(&one), None);
        before.put(&one, &MutantResult::Survived).expect("it is kept");
        assert_eq!(before.get(&one), Some(MutantResult::Survived));
        assert_eq!(cache(&[("engine", "1"), ("wire", "2")]).get(&one), None);
        fs::remove_dir_all(&before.folder).expect("it can be removed");
    }

    #[test]
    fn tests_are_of_their_package() {
        let of = |file| package_of(file);
        assert_eq!(of("engine/tests/pair/main.rs"), Some("engine".into()));
        assert_eq!(of("engine/src/core/peers/tests.rs"), Some("engine".into()));
        assert_eq!(of("engine/src/core/peers/mod.rs"), None);
        assert_eq!(of("fabric-host/common/src/tests.rs"), Some("common".into()));
        assert_eq!(of("scenarios/faults/a.toml"), Some("fabric-sim".into()));
    }
}
