//! Rules of the tree that no compiler checks.

#[path = "tidy/promises.rs"]
mod promises;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Longest source file, in lines.
const FILE_LINES_MAX: usize = 600;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files below `folder` (relative to the root) that end in `ending`, build output left out.
fn files(folder: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root().join(folder)];
    while let Some(folder) = open.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && !name.starts_with("target") {
                    open.push(path);
                }
            } else if name.ends_with(ending) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words of a text that could be names.
fn words(text: &str) -> BTreeSet<&str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).collect()
}

#[test]
fn files_are_small_rooms() {
    let long: Vec<_> = files("", ".rs")
        .into_iter()
        .map(|path| (read(&path).lines().count(), path))
        .filter(|(lines, _)| *lines > FILE_LINES_MAX)
        .collect();
    assert!(long.is_empty(), "longer than {FILE_LINES_MAX} lines: {long:?}");
}

#[test]
fn the_core_and_the_simulator_know_no_clock_no_chance_and_no_async() {
    let core = ["tokio", "actix", "rand", "HashMap", "HashSet", "Instant", "SystemTime", "async"];
    let simulator = ["tokio", "actix", "HashMap", "HashSet", "Instant", "SystemTime", "async"];
    for (folder, banned) in [("engine/src/core", &core[..]), ("fabric-sim/src", &simulator[..])] {
        for path in files(folder, ".rs") {
            let text = read(&path);
            let code: String = text
                .lines()
                .filter(|line| !line.trim_start().starts_with("//"))
                .flat_map(|line| [line, "\n"])
                .collect();
            let used: Vec<_> = banned.iter().filter(|word| words(&code).contains(**word)).collect();
            assert!(used.is_empty(), "{} uses {used:?}", path.display());
        }
    }
}

#[test]
fn every_invariant_fault_event_and_message_is_documented() {
    let reference = read(&root().join("scenarios/README.md"));
    let lists = ["scenarios/src/lists.rs", "scenarios/fault-injector/src/lists.rs"];
    let lists = lists.map(|path| read(&root().join(path)));
    // Entries read `Variant "id" "name" "about"`.
    let lines = lists.iter().flat_map(|text| text.lines());
    let names = lines.filter_map(|line| {
        let mut parts = line.split('"');
        let (variant, _id, _gap, name) =
            (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let entry = variant.trim().chars().all(|c| c.is_ascii_alphanumeric());
        (entry && !variant.trim().is_empty() && parts.count() >= 2).then_some(name)
    });
    let missing: Vec<_> = names.filter(|name| !reference.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "not in scenarios/README.md: {missing:?}");
}

/// Names of the functions in all files that end so, of which each is begun with this word. Checks of the
/// conformance suite are visible to their module.
fn functions(ending: &str, word: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for path in files("", ending) {
        let text = read(&path);
        let lines = text.lines().map(str::trim_start);
        let begun = lines.filter_map(|line| {
            let plain = ["async ", "pub(super) "].iter().find_map(|it| line.strip_prefix(it));
            plain.unwrap_or(line).strip_prefix(word)
        });
        let names = begun.filter_map(|rest| rest.split(['(', '<']).next());
        found.extend(names.map(str::to_owned));
    }
    found
}

#[test]
fn every_test_and_scenario_that_the_contract_names_exists() {
    let contract = read(&root().join("engine/CONTRACT.md"));
    let functions = functions(".rs", "fn ");
    let quoted: Vec<&str> = contract.split('`').skip(1).step_by(2).collect();
    let mut named = 0;
    for name in quoted {
        if let Some(file) = name.strip_prefix("scenarios/") {
            assert!(root().join("scenarios").join(file).exists(), "no scenario file {name}");
            named += 1;
        } else if let Some(test) = name.strip_prefix("fn ") {
            assert!(functions.contains(test), "CONTRACT.md names the test {test}: not found");
            named += 1;
        }
    }
    assert!(named >= 60, "CONTRACT.md pins only {named} things");
}

#[test]
fn every_line_of_what_holds_names_tests_that_exist() {
    let security = read(&root().join("SECURITY.md"));
    let (_, holds) = security.split_once("\n## What holds\n").expect("the section");
    let (holds, _) = holds.split_once("\n## ").expect("the section behind it");
    let functions = functions(".rs", "fn ");
    let lines: Vec<&str> = holds.split("\n- ").skip(1).collect();
    assert!(lines.len() >= 15, "only {} lines", lines.len());
    for line in lines {
        let begin = line.lines().next().unwrap_or_default();
        let (_, tests) = line.split_once("Tests: ").unwrap_or_else(|| panic!("no tests: {begin}"));
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "no test: {begin}");
        for name in named {
            let test = name.strip_prefix("fn ").unwrap_or_else(|| panic!("{name}: no test"));
            assert!(functions.contains(test), "SECURITY.md names the test {test}: not found");
        }
    }
}

#[test]
fn every_hazard_has_a_line_in_the_contract() {
    let contract = read(&root().join("engine/CONTRACT.md"));
    let words = words(&contract);
    let missing: Vec<_> =
        (1..=84).map(|n| format!("H{n}")).filter(|id| !words.contains(id.as_str())).collect();
    assert!(missing.is_empty(), "hazards without a line: {missing:?}");
}

#[test]
fn every_hazard_of_payloads_names_tests_that_exist() {
    let document = read(&root().join("docs/testing.md"));
    let (tests, of_python) = (functions(".rs", "fn "), functions(".py", "def "));
    let rows: Vec<_> = document.lines().filter(|line| line.starts_with("| O")).collect();
    assert_eq!(rows.len(), 36, "a row for each");
    for (row, number) in rows.into_iter().zip(1..) {
        assert!(row.starts_with(&format!("| O{number} | ")), "not O{number}: {row}");
        let names: Vec<_> = row.split('`').skip(1).step_by(2).collect();
        let (files, named): (Vec<&str>, Vec<&str>) =
            names.into_iter().partition(|name| name.starts_with("scenarios/"));
        assert!(!named.is_empty(), "no test: {row}");
        for name in named {
            let known = if name.starts_with("test_") { &of_python } else { &tests };
            assert!(known.contains(name), "O{number} names {name}: not found");
        }
        for file in files.into_iter().filter(|file| file.ends_with(".toml")) {
            assert!(root().join(file).exists(), "O{number} names {file}: not found");
        }
    }
}

#[test]
fn the_readme_names_every_crate() {
    let readme = read(&root().join("README.md"));
    let crates = [
        "engine",
        "scenarios",
        "fabric-sim",
        "fabric-host/common",
        "fabric-host",
        "fabric-mori",
        "trust",
        "wire",
        "host",
        "mori-compat",
        "python",
        "benches",
    ];
    for crate_name in crates {
        assert!(readme.contains(&format!("`{crate_name}")), "README.md does not name {crate_name}");
    }
}

/// The name of the type that a line at the margin defines.
fn defined(line: &str) -> Option<&str> {
    let line = match line.strip_prefix("pub") {
        Some(rest) => rest.trim_start_matches(|c| c != ' ').trim_start(),
        None => line,
    };
    let kinds = ["struct ", "enum ", "union ", "trait ", "type "];
    let name = kinds.iter().find_map(|kind| line.strip_prefix(kind))?;
    name.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

/// Macros in which a type is written as at the margin.
const DECLARING: [&str; 2] = ["section! {", "settings! {"];

/// The types that are defined in the workspace outside of functions, and where.
fn types() -> Vec<(String, PathBuf)> {
    let of_file = |path: PathBuf| {
        let text = read(&path);
        let mut declares = false;
        let lines = text.lines().map(|line| {
            if line.starts_with(|c: char| !c.is_whitespace()) {
                declares = DECLARING.contains(&line);
            }
            if declares { line.strip_prefix("    ").unwrap_or(line) } else { line }
        });
        let names: Vec<_> = lines.filter_map(defined).map(str::to_owned).collect();
        names.into_iter().map(move |name| (name, path.clone()))
    };
    files("", ".rs").into_iter().flat_map(of_file).collect()
}

#[test]
fn the_name_of_a_type_stands_for_one_thing() {
    let mut all: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for (name, path) in types() {
        all.entry(name).or_default().push(path);
    }
    assert!(all.len() > 1000, "only {} types were found", all.len());
    all.retain(|_, paths| paths.len() > 1);
    assert!(all.is_empty(), "several types have one name: {all:#?}");
}

#[test]
fn public_enums_of_errors_may_grow() {
    let mut found = 0;
    for path in files("", ".rs") {
        let text = read(&path);
        let lines: Vec<&str> = text.lines().collect();
        for (at, line) in lines.iter().enumerate() {
            let Some(name) = line.strip_prefix("pub enum ").and_then(|rest| rest.split(' ').next())
            else {
                continue;
            };
            if ["Error", "Failure", "Refused", "Refusal"].iter().any(|end| name.ends_with(end)) {
                let mut above = lines[..at].iter().rev().take_while(|line| line.starts_with("#["));
                let grows = above.any(|line| *line == "#[non_exhaustive]");
                assert!(grows, "{}: {name} is not #[non_exhaustive]", path.display());
                found += 1;
            }
        }
    }
    assert!(found >= 10, "only {found} enums of errors were found");
}

#[test]
fn the_glossary_names_types_that_exist() {
    let all: BTreeSet<String> = types().into_iter().map(|(name, _)| name).collect();
    let glossary = read(&root().join("docs/glossary.md"));
    // The names of types that the term of a row is.
    let terms = glossary.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let names: Vec<&str> = terms
        .flat_map(|term| term.split('`').skip(1).step_by(2))
        .filter(|name| name.starts_with(|c: char| c.is_uppercase()))
        .collect();
    assert!(names.len() > 50, "only {} types are named", names.len());
    let missing: Vec<_> = names.iter().filter(|name| !all.contains(**name)).collect();
    assert!(missing.is_empty(), "docs/glossary.md: no such types: {missing:?}");
}

#[test]
fn the_architecture_names_files_and_functions_that_exist() {
    let mut named = 0;
    for line in read(&root().join("docs/architecture.md")).lines() {
        // Functions are named behind their file.
        let mut file: Option<(&str, String)> = None;
        for word in line.split('`').skip(1).step_by(2) {
            if word.contains('/') && !word.contains(' ') {
                let path = root().join(word);
                assert!(path.exists(), "docs/architecture.md: there is no {word}");
                file = path.is_file().then(|| (word, read(&path)));
            } else if word.chars().all(|c| c.is_ascii_lowercase() || c == '_')
                && let Some((file, text)) = &file
            {
                let is_there =
                    ["fn ", "def "].iter().any(|kind| text.contains(&format!("{kind}{word}(")));
                assert!(is_there, "docs/architecture.md: {file} has no function {word}");
                named += 1;
            }
        }
    }
    assert!(named >= 20, "docs/architecture.md names only {named} functions");
}

/// The entries of `engine/planted.toml`, each of three lines: its name, what the bug does, and what
/// finds it or why nothing does.
fn planted() -> Vec<[String; 3]> {
    let list = read(&root().join("engine/planted.toml"));
    let lines: Vec<&str> =
        list.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let entry = |lines: &[&str]| {
        let value = |line: &str, keys: &[&str]| {
            let (key, value) = line.split_once(" = ").unwrap_or_else(|| panic!("no value: {line}"));
            assert!(keys.contains(&key), "{key} in place of {keys:?}: {line}");
            value.to_owned()
        };
        let text = |line: &str, key| value(line, &[key]).trim_matches('"').to_owned();
        let [head, name, does, found] = lines else { panic!("not four lines: {lines:?}") };
        let keys: &[&str] = if *head == "[[bug]]" { &["found"] } else { &["why"] };
        assert!(["[[bug]]", "[[harmless]]"].contains(head), "{head}");
        [text(name, "name"), text(does, "does"), value(found, keys)]
    };
    lines.chunks(4).map(entry).collect()
}

#[test]
fn each_planted_bug_is_in_the_source_and_in_the_list() {
    let call = concat!("planted", "!(\"");
    let mut there = BTreeSet::new();
    for path in files("engine/src/core", ".rs") {
        for rest in read(&path).split(call).skip(1) {
            there.extend(rest.split_once('"').map(|(name, _)| name.to_owned()));
        }
    }
    let listed: Vec<String> = planted().into_iter().map(|[name, ..]| name).collect();
    let names: BTreeSet<String> = listed.iter().cloned().collect();
    assert_eq!(names.len(), listed.len(), "a bug is listed twice");
    assert_eq!(names, there, "engine/planted.toml and the source differ");
}

#[test]
fn the_table_of_planted_bugs_is_their_list() {
    let table = read(&root().join("engine/PLANTED.md"));
    let mut rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| `")).collect();
    let mut expected: Vec<String> = planted().iter().map(row).collect();
    rows.sort_unstable();
    expected.sort_unstable();
    assert_eq!(rows, expected, "engine/PLANTED.md is not what engine/planted.toml says");
}

/// A line of the table.
fn row([name, does, found]: &[String; 3]) -> String {
    let quoted: Vec<&str> = found.split('"').skip(1).step_by(2).collect();
    let found = match (found.trim_start_matches("{ ").split(' ').next(), &quoted[..]) {
        (Some("file"), [file, by]) => format!("`{file}`: {by}"),
        (Some("sweep"), [swarm, by]) => {
            let seeds = found.split("seeds = ").nth(1).and_then(|rest| rest.split(',').next());
            format!("{} seeds of `{swarm}`: {by}", seeds.expect("a number of seeds"))
        }
        (Some("event"), [event, fleet, by]) => {
            format!("`{event}` at each input, `{fleet}` of `sweep --products`: {by}")
        }
        (Some("in"), [place, test]) => format!("`{test}` of `engine/tests/{place}`"),
        (_, [why]) => (*why).to_owned(),
        _ => panic!("{name}: {found}"),
    };
    format!("| `{name}` | {does} | {found} |")
}

/// Bugs can be planted in a build that asks for it, and in no other.
#[test]
fn no_crate_plants_bugs_by_default() {
    let feature = "planted";
    for path in files("", "Cargo.toml") {
        for line in read(&path).lines().filter(|line| !line.trim_start().starts_with('#')) {
            let allowed = [
                "planted = []",
                "planted = [\"kvferry-engine/planted\"]",
                "name = \"planted\"",
                "required-features = [\"full\", \"planted\"]",
            ];
            let fine = !line.contains(feature) || allowed.contains(&line);
            assert!(fine, "{}: {line}", path.display());
        }
    }
}

/// Files of the modules that a file declares as public.
fn public_modules(file: &Path) -> Vec<PathBuf> {
    let stem = file.file_stem().unwrap().to_string_lossy().into_owned();
    let folder = match stem.as_str() {
        "mod" | "lib" => file.parent().unwrap().to_path_buf(),
        _ => file.with_extension(""),
    };
    let named = |name: &str| {
        let flat = folder.join(format!("{name}.rs"));
        if flat.is_file() { flat } else { folder.join(name).join("mod.rs") }
    };
    let text = read(file);
    let names = text.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'));
    names.map(named).collect()
}

#[test]
fn each_public_module_shows_its_use() {
    // Planted bugs are public for the tests alone.
    let is_shown = |path: &PathBuf| !path.ends_with("engine/src/planted.rs");
    let folders = ["engine/src", "fabric-host/src", "wire/src"];
    let sources = folders.iter().flat_map(|folder| files(folder, ".rs"));
    let mut shown: Vec<_> =
        sources.flat_map(|file| public_modules(&file)).filter(is_shown).collect();
    shown.extend(folders.map(|folder| root().join(folder).join("lib.rs")));
    assert!(shown.len() > 30, "{shown:?}");
    let without: Vec<_> =
        shown.iter().filter(|path| !read(path).lines().any(|line| line == "//! ```")).collect();
    assert!(without.is_empty(), "no example in the module documentation: {without:?}");
}

/// What the check of a release says of a tree with this version, these versions that crates ask for, and
/// this changelog.
fn release_check(tag: &str, version: &str, asked: &str, changelog: &str) -> Result<String, String> {
    let tree = Path::new(env!("CARGO_TARGET_TMPDIR")).join("release");
    fs::create_dir_all(&tree).unwrap();
    let crates = format!(
        "[workspace.package]\nversion = \"{version}\"\n\n[workspace.dependencies]\n\
         one = {{ path = \"one\", version = \"{asked}\" }}\nserde = {{ version = \"1\" }}\n"
    );
    fs::write(tree.join("Cargo.toml"), crates).unwrap();
    fs::write(tree.join("CHANGELOG.md"), changelog).unwrap();
    let script = root().join(".github/release-check");
    let ended = Command::new(script).arg(tag).arg(tree).output().expect("a shell");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    if ended.status.success() { Ok(text(ended.stdout)) } else { Err(text(ended.stderr)) }
}

#[test]
fn a_release_has_one_version() {
    let log = "# Changelog\n\n## Unreleased\n\n- later\n\n## 1.2.3 - 2030-01-01\n\n### Added\n\n- this\n\n## 1.2.2\n\n- before\n";
    let notes = release_check("v1.2.3", "1.2.3", "1.2.3", log).expect("all say the same");
    assert_eq!(notes.trim(), "### Added\n\n- this");
    for (tag, version, asked, log, says) in [
        ("1.2.3", "1.2.3", "1.2.3", log, "a tag is v and a version"),
        ("v1.2.4", "1.2.3", "1.2.3", log, "[workspace.package] in Cargo.toml is 1.2.3"),
        ("v1.2.3", "1.2.3", "1.2.2", log, "Cargo.toml asks for one 1.2.2"),
        ("v1.2.3", "1.2.3", "1.2.3", "## Unreleased\n\n- this\n", "has no heading \"## 1.2.3\""),
        ("v1.2.3", "1.2.3", "1.2.3", "## 1.2.3\n\n## 1.2.2\n\n- this\n", "with entries below it"),
        ("v1.2.3", "1.2.3", "1.2.3", "## 1.2.30\n\n- this\n", "has no heading"),
    ] {
        let why = release_check(tag, version, asked, log).expect_err(says);
        assert!(why.contains(says) && why.contains(tag), "{why}");
    }
}

#[test]
fn the_tree_has_the_version_that_its_next_tag_needs() {
    let crates = read(&root().join("Cargo.toml"));
    let own = format!("version = \"{}\"", env!("CARGO_PKG_VERSION"));
    let paths =
        crates.lines().filter(|line| line.contains("path = \"") && line.contains("version"));
    let other: Vec<_> = paths.filter(|line| !line.contains(&own)).collect();
    assert!(other.is_empty(), "of another version than the workspace: {other:?}");
}
