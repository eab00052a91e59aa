//! The reference tells all that the language knows.

use kvferry_scenarios::{FaultKind, InvariantId, MessageName, TriggerEvent};
use std::path::Path;

const REFERENCE: &str = include_str!("../README.md");

#[track_caller]
fn has_row(cells: &[&str]) {
    let row = format!("| {} |", cells.join(" | "));
    assert!(REFERENCE.lines().any(|line| line == row), "scenarios/README.md has no row {row}");
}

fn code(name: &str) -> String {
    format!("`{name}`")
}

#[test]
fn every_entry_of_the_closed_lists_has_its_row() {
    for kind in FaultKind::ALL {
        let form = kind.schema();
        let keys: Vec<String> = form.keys.iter().map(|key| code(key)).collect();
        let keys = if keys.is_empty() { "-".to_string() } else { keys.join(", ") };
        has_row(&[kind.id(), &code(kind.name()), kind.about(), form.opportunity.name(), &keys]);
    }
    for event in TriggerEvent::ALL {
        has_row(&[&code(event.name()), event.about()]);
    }
    for message in MessageName::ALL {
        has_row(&[&code(message.name()), message.about()]);
    }
    for id in InvariantId::ALL {
        has_row(&[id.id(), &code(id.name()), id.about()]);
    }
}

/// The keys that a table knows, by asking for one that it does not.
fn keys(table: &str) -> Vec<String> {
    let text = format!("about = \"test\"\n{}", table.replace('?', "qqqqqqqqqqqq = 1"));
    let why =
        kvferry_scenarios::parse("x.toml", &text, Path::new(""), None).expect_err("unknown key");
    let (_, known) = why.remedy.split_once("known here: ").expect("it lists what it knows");
    known.split(", ").map(str::to_string).collect()
}

#[test]
fn every_key_is_in_the_reference() {
    let tables = [
        "?",
        "[model]\n?",
        "[topology]\n?",
        "[topology]\nlink = { ? }",
        "[topology]\nrouter = { ? }",
        "[topology]\nprefill = [{ ? }]",
        "[topology]\nprefill = [{ protocol = { ? } }]",
        "[topology]\nprefill = [{ fabric = { ? } }]",
        "[topology]\nhosts = [{ ? }]",
        "[topology]\nhosts = [{ pool = { ? } }]",
        "[[stream]]\n?",
        "[[stream]]\ngone = { ? }",
        "[protocol]\n?",
        "[fabric]\n?",
        "[engine]\n?",
        "[workload]\n?",
        "[workload]\nabort = { ? }",
        "[workload]\nmodels = { ? }",
        "[workload]\nprefix = { ? }",
        "[workload]\nsingle = [{ at = \"1s\", ? }]",
        "[[fault]]\nkind = \"wire.loss\"\n?",
        "[[fault]]\nkind = \"wire.loss\"\non = { event = \"op.posted\", ? }",
        "[[fault]]\nkind = \"wire.loss\"\nmatch = { ? }",
        "[expect]\n?",
        "[expect]\nrequests = { ? }",
        "[expect]\nreceivers = { ? }",
        "[expect]\noperations = { ? }",
        "[expect]\nfirst_tokens = [{ ? }]",
    ];
    for table in tables {
        for key in keys(table) {
            let words = REFERENCE.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            assert!(words.into_iter().any(|word| word == key), "`{key}` of {table}");
        }
    }
}

#[test]
fn message_names_are_those_of_the_native_dialect() {
    use kvferry_engine::core::dialect::native::MessageKind;
    use std::collections::BTreeSet;
    let language: BTreeSet<&str> = MessageName::ALL.iter().map(|name| name.name()).collect();
    let dialect: BTreeSet<&str> = MessageKind::ALL.iter().map(|kind| kind.name()).collect();
    assert_eq!(language, dialect);
}

#[test]
fn the_example_is_valid() {
    let example = REFERENCE.split("```toml\n").nth(1).and_then(|rest| rest.split("```").next());
    let scenario =
        kvferry_scenarios::parse("README", example.expect("an example"), Path::new(""), None);
    let run = scenario.and_then(|scenario| scenario.draw(7)).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(run.requests.len(), 12);
}
