//! Promises of documentation: `engine/promises.toml` has each with the tests that fail without it.

use super::{files, functions, read, root};
use std::collections::{BTreeMap, BTreeSet};

/// Files and folders whose documentation is held.
const WHOLE: [&str; 6] = [
    "engine/src/fabric.rs",
    "engine/src/fabric",
    "engine/src/effects.rs",
    "engine/src/core/limits.rs",
    "wire/src",
    "engine/CONTRACT.md",
];

/// Files and folders of which the documentation of constants is held.
const CONSTANTS: [&str; 9] = [
    "engine/src/core/channel.rs",
    "engine/src/core/dialect",
    "engine/src/core/heartbeat.rs",
    "engine/src/core/ids.rs",
    "engine/src/core/layout/check.rs",
    "engine/src/core/omni_mori/io.rs",
    "engine/src/core/payload/io.rs",
    "engine/src/core/payload/note.rs",
    "engine/src/core/registration.rs",
];

/// Words of which a promise has one.
const WORDS: [&str; 22] = [
    "always", "before", "cannot", "every", "exactly", "fewest", "follows", "largest", "least",
    "limit", "longest", "most", "must", "never", "newest", "nobody", "nothing", "oldest", "once",
    "only", "refused", "until",
];

/// Phrases of which a promise has one.
const PHRASES: [&str; 9] = [
    "answered by",
    "any more",
    "at once",
    "in order",
    "no longer",
    "`busy`",
    "`gone`",
    "`invalid`",
    "`unsupported`",
];

/// What else a sentence may be than a promise that tests hold.
const KINDS: [&str; 3] = ["definition: ", "duty: ", "intent: "];

fn is_promise(sentence: &str) -> bool {
    let text = sentence.to_lowercase();
    let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
    PHRASES.iter().any(|phrase| text.contains(phrase)) || words.any(|word| WORDS.contains(&word))
}

/// Paragraphs of comments, headings, examples and tests left out.
fn of_source(text: &str, only_constants: bool) -> Vec<String> {
    let (mut all, mut block, mut is_code) = (Vec::new(), vec![String::new()], false);
    for line in text.split("#[cfg(test)]").next().unwrap_or_default().lines() {
        let line = line.trim_start();
        let Some(comment) = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")) else {
            let is_constant = line
                .split("const ")
                .nth(1)
                .is_some_and(|it| it.starts_with(|c: char| c.is_uppercase()));
            let block = std::mem::replace(&mut block, vec![String::new()]);
            if is_constant || !only_constants {
                all.extend(block);
            }
            continue;
        };
        let comment = comment.trim();
        let is_fence = comment.starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence || comment.is_empty() || comment.starts_with("# ") {
            block.push(String::new());
        } else if let Some(item) = comment.strip_prefix("- ") {
            block.push(item.to_owned());
        } else if let Some(last) = block.last_mut() {
            *last = format!("{last} {comment}");
        }
    }
    all
}

/// Paragraphs of a document, headings left out, and cells of its tables but for those of promises and
/// hazards, which name their tests themselves.
fn of_document(text: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    for line in text.lines() {
        if line.is_empty()
            || line.starts_with('#')
            || ["| P", "| H"].iter().any(|row| line.starts_with(row))
        {
            all.push(String::new());
        } else if line.starts_with('|') {
            all.extend(line.split(" | ").map(|cell| cell.trim_matches(['|', ' ']).to_owned()));
        } else if let Some(item) = line.strip_prefix("- ") {
            all.push(item.to_owned());
        } else if let Some(last) = all.last_mut() {
            *last = format!("{last} {}", line.trim());
        }
    }
    all
}

fn sentences(paragraph: &str) -> Vec<String> {
    let mut all = vec![String::new()];
    for word in paragraph.split_whitespace() {
        let is_begun =
            all.last().is_some_and(|last| last.ends_with('.') && !last.ends_with("e.g."));
        if is_begun && word.starts_with(|c: char| c.is_uppercase() || c == '`' || c == '[') {
            all.push(String::new());
        }
        let last = all.last_mut().expect("there is one");
        *last = if last.is_empty() { word.to_owned() } else { format!("{last} {word}") };
    }
    all
}

/// The sentences of each held file.
fn held() -> BTreeMap<String, BTreeSet<String>> {
    let of = |path: &str, is_whole: bool| {
        let found = if path.contains('.') { vec![root().join(path)] } else { files(path, ".rs") };
        let name = |file: &std::path::Path| {
            file.strip_prefix(root()).expect("below the root").to_string_lossy().into_owned()
        };
        let one = |file: std::path::PathBuf| {
            let text = read(&file);
            let name = name(&file);
            let paragraphs = match name.ends_with(".md") {
                true => of_document(&text),
                false => of_source(&text, !is_whole),
            };
            (name, paragraphs.iter().flat_map(|it| sentences(it)).collect())
        };
        let is_held = |file: &std::path::PathBuf| !file.ends_with("tests.rs");
        found.into_iter().filter(is_held).map(one).collect::<Vec<_>>()
    };
    let whole = WHOLE.into_iter().flat_map(|path| of(path, true));
    whole.chain(CONSTANTS.into_iter().flat_map(|path| of(path, false))).collect()
}

/// The list: file, sentence, and the text of its value.
fn listed() -> Vec<(String, String, String)> {
    let (mut file, mut all) = (String::new(), Vec::new());
    for line in read(&root().join("engine/promises.toml")).lines() {
        if let Some(name) = line.strip_prefix("[\"").and_then(|rest| rest.strip_suffix("\"]")) {
            file = name.to_owned();
        } else if let Some(rest) = line.strip_prefix('"') {
            let (sentence, value) =
                rest.split_once("\" = ").unwrap_or_else(|| panic!("no value: {line}"));
            all.push((file.clone(), sentence.to_owned(), value.to_owned()));
        } else {
            assert!(
                line.is_empty() || line.starts_with('#'),
                "neither a file nor a sentence: {line}"
            );
        }
    }
    all
}

#[test]
fn each_promise_is_in_the_list_and_names_tests_that_exist() {
    let (held, functions) = (held(), functions(".rs", "fn "));
    let mut known: BTreeSet<(&str, &str)> = BTreeSet::new();
    let all = listed();
    for (file, sentence, value) in &all {
        let there = held.get(file).is_some_and(|sentences| sentences.contains(sentence));
        assert!(there, "promises.toml: {file} does not say: {sentence}");
        assert!(known.insert((file, sentence)), "promises.toml: twice in {file}: {sentence}");
        let names: Vec<&str> = value.split('"').skip(1).step_by(2).collect();
        match value.starts_with('[') {
            true => assert!(!names.is_empty(), "promises.toml: no test of {file}: {sentence}"),
            false => assert!(
                KINDS.iter().any(|kind| names[0].starts_with(kind)),
                "{value}: none of {KINDS:?}"
            ),
        }
        for name in names.into_iter().filter(|_| value.starts_with('[')) {
            let exists = if name.contains('/') {
                root().join(name).exists()
            } else {
                functions.contains(name)
            };
            assert!(exists, "promises.toml names {name}: not found");
        }
    }
    let missing: Vec<_> = held
        .iter()
        .flat_map(|(file, sentences)| sentences.iter().map(move |it| (file.as_str(), it.as_str())))
        .filter(|(file, sentence)| is_promise(sentence) && !known.contains(&(*file, *sentence)))
        .map(|(file, sentence)| format!("{file}: {sentence}"))
        .collect();
    assert!(missing.is_empty(), "not in engine/promises.toml:\n{}", missing.join("\n"));
    assert!(all.len() >= 150, "only {} sentences are listed", all.len());
}

#[test]
fn each_promise_and_each_hazard_of_the_contract_names_its_tests() {
    let contract = read(&root().join("engine/CONTRACT.md"));
    let rows: Vec<&str> = contract
        .lines()
        .filter(|line| line.starts_with("| P") || line.starts_with("| H"))
        .collect();
    assert!(rows.len() >= 100, "only {} rows", rows.len());
    for row in rows.into_iter().filter(|row| !row.starts_with("| Hazard")) {
        let names = ["`fn ", "`scenarios/"].iter().any(|name| row.contains(name));
        // A hazard may be answered by promises.
        let last = row.split(" | ").last().unwrap_or_default();
        let by_promise = row.starts_with("| H") && last.starts_with('P');
        assert!(names || by_promise, "no test: {row}");
    }
}
