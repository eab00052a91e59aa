//! Scenario files as text.

use std::fmt::Write;
use toml::{Table, Value};

/// Keys in the order in which files have them; others come before the tables.
const ORDER: [&str; 13] = [
    "about", "seed", "verify", "memory", "liveness", "model", "topology", "protocol", "fabric",
    "engine", "workload", "stream", "fault",
];

/// A scenario as text: each section has a heading, each key of it a line, each instance and request
/// a line of its own.
///
/// ```
/// let file = "seed = 1\nabout = 'x'\nfault = [{ times = 1, kind = 'wire.loss' }]".parse().unwrap();
/// let text = "about = \"x\"\nseed = 1\n\n[[fault]]\nkind = \"wire.loss\"\ntimes = 1\n";
/// assert_eq!(kvferry_scenarios::written(&file), text);
/// ```
pub fn written(file: &Table) -> String {
    let mut entries: Vec<(&String, &Value)> = file.iter().collect();
    let rank = |key: &str| ORDER.iter().position(|known| *known == key).unwrap_or(ORDER.len());
    entries.sort_by_key(|(key, value)| (is_section(value), rank(key)));
    let mut text = String::new();
    for (key, value) in entries {
        match value {
            Value::Table(section) => section_text(&mut text, &format!("[{key}]"), section),
            Value::Array(tables) if is_section(value) => {
                for table in tables.iter().filter_map(Value::as_table) {
                    section_text(&mut text, &format!("[[{key}]]"), table);
                }
            }
            value => line(&mut text, key, value),
        }
    }
    text
}

/// True for a table, and for a list of tables.
fn is_section(value: &Value) -> bool {
    value.is_table() || value.as_array().is_some_and(|list| list.iter().all(Value::is_table))
}

fn section_text(text: &mut String, heading: &str, section: &Table) {
    let _ = write!(text, "\n{heading}\n");
    // The kind of a fault says what the rest is about.
    let mut entries: Vec<(&String, &Value)> = section.iter().collect();
    entries.sort_by_key(|(key, _)| *key != "kind");
    for (key, value) in entries {
        line(text, key, value);
    }
}

fn line(text: &mut String, key: &str, value: &Value) {
    match value {
        Value::Array(tables) if is_section(value) && !tables.is_empty() => {
            let _ = writeln!(text, "{key} = [");
            for table in tables {
                let _ = writeln!(text, "    {table},");
            }
            text.push_str("]\n");
        }
        value => {
            let _ = writeln!(text, "{key} = {value}");
        }
    }
}
