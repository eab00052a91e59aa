//! Edits of a scenario, each of which leaves less of it.

use kvferry_faults::lists::FaultKind;
use toml::{Table, Value};

/// Keys and indices, from the file to a value.
pub(super) type Path = Vec<PathStep>;

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PathStep {
    Key(String),
    Index(usize),
}

/// Lists of which elements can go: instances before what happens there.
pub(super) const LISTS: [&[&str]; 6] = [
    &["topology", "prefill"],
    &["topology", "decode"],
    &["topology", "hosts"],
    &["workload", "single"],
    &["stream"],
    &["fault"],
];

/// Values that say less than the defaults.
pub(super) const FLOORS: [(&[&str], &str); 4] = [
    (&["probes"], "false"),
    (&["model", "layers"], "1"),
    (&["model", "kv_heads"], "1"),
    (&["workload", "prompt_tokens"], "16"),
];

/// Keys that are no settings, or without which a run takes longer.
const KEPT: [&str; 8] = ["about", "seed", "name", "kind", "expect", "requests", "probes", "memory"];

/// A list at these keys; empty if there is none.
pub(super) fn list<'a>(file: &'a Table, keys: &[&str]) -> &'a [Value] {
    let (last, before) = keys.split_last().expect("a path has keys");
    let table = before.iter().try_fold(file, |table, key| table.get(*key)?.as_table());
    let list = table.and_then(|table| table.get(*last)).and_then(Value::as_array);
    list.map_or(&[], Vec::as_slice)
}

fn table_at<'a>(file: &'a mut Table, keys: &[&str]) -> &'a mut Table {
    keys.iter().fold(file, |table, key| {
        let value = table.entry(*key).or_insert_with(|| Value::Table(Table::new()));
        value.as_table_mut().expect("a section is a table")
    })
}

/// The file without these elements of a list, and without faults and streams of instances that it
/// no longer has; none if nothing is left where something has to be.
pub(super) fn without(file: &Table, keys: &[&str], gone: &[usize]) -> Option<Table> {
    let old = list(file, keys);
    if keys[0] == "topology" && gone.len() >= old.len() {
        return None;
    }
    let is_gone = |at: &usize| gone.contains(at);
    let left = (0..).zip(old).filter(|(at, _)| !is_gone(at)).map(|(_, one)| one.clone());
    let left: Vec<Value> = left.collect();
    let names = gone.iter().filter_map(|at| old.get(*at)?.get("name")?.as_str());
    let names: Vec<&str> = names.collect();
    let mut file = file.clone();
    let (last, before) = keys.split_last().expect("a path has keys");
    let table = table_at(&mut file, before);
    match left.is_empty() {
        true => table.remove(*last),
        false => table.insert((*last).into(), Value::Array(left)),
    };
    for key in ["fault", "stream"] {
        if let Some(Value::Array(tables)) = file.get_mut(key) {
            tables.retain(|table| !is_about(table, &names));
        }
    }
    Some(file)
}

/// True if a table names one of these instances, or a DP rank of one.
fn is_about(table: &Value, names: &[&str]) -> bool {
    let is_named = |value: &Value| {
        let name = value.as_str().unwrap_or_default();
        names.iter().any(|gone| {
            name.strip_prefix(gone).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        })
    };
    let on = table.get("on");
    let named = [table.get("target"), table.get("from"), table.get("to")];
    let named = named.into_iter().chain(["from", "to"].map(|key| on?.get(key)));
    named.flatten().any(is_named)
}

/// Kinds of the faults of a file, each once.
pub(super) fn kinds(file: &Table) -> Vec<String> {
    let mut kinds: Vec<String> = list(file, &["fault"]).iter().map(kind).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

fn kind(fault: &Value) -> String {
    fault.get("kind").and_then(Value::as_str).unwrap_or_default().into()
}

/// The file without faults of these kinds.
pub(super) fn without_kinds(file: &Table, gone: &[String]) -> Option<Table> {
    let faults = list(file, &["fault"]).iter().enumerate();
    let gone: Vec<usize> =
        faults.filter(|(_, fault)| gone.contains(&kind(fault))).map(|(at, _)| at).collect();
    without(file, &["fault"], &gone)
}

/// Keys with a value that is no table and no list of tables, deepest tables last.
pub(super) fn leaves(file: &Table) -> Vec<Path> {
    let mut found = Vec::new();
    for (key, value) in file {
        if !KEPT.contains(&key.as_str()) {
            walk(value, &mut vec![PathStep::Key(key.clone())], &mut found);
        }
    }
    found.retain(|path| FLOORS.iter().all(|(floor, _)| !is_at(path, floor)));
    found
}

fn is_at(path: &Path, keys: &[&str]) -> bool {
    let same = |(step, key): (&PathStep, &&str)| matches!(step, PathStep::Key(own) if own == key);
    path.len() == keys.len() && path.iter().zip(keys).all(same)
}

fn walk(value: &Value, at: &mut Path, found: &mut Vec<Path>) {
    match value {
        Value::Table(table) => {
            for (key, value) in table.iter().filter(|(key, _)| !KEPT.contains(&key.as_str())) {
                at.push(PathStep::Key(key.clone()));
                walk(value, at, found);
                at.pop();
            }
        }
        Value::Array(list) if list.iter().any(Value::is_table) => {
            for (index, value) in list.iter().enumerate() {
                at.push(PathStep::Index(index));
                walk(value, at, found);
                at.pop();
            }
        }
        _ => found.push(at.clone()),
    }
}

/// The value at a path.
pub(super) fn value<'a>(file: &'a Table, path: &Path) -> Option<&'a Value> {
    let (first, rest) = path.split_first()?;
    let PathStep::Key(first) = first else { return None };
    rest.iter().try_fold(file.get(first)?, |value, step| match step {
        PathStep::Key(key) => value.get(key),
        PathStep::Index(index) => value.get(*index),
    })
}

fn value_mut<'a>(file: &'a mut Table, path: &[PathStep]) -> Option<&'a mut Value> {
    let (first, rest) = path.split_first()?;
    let PathStep::Key(first) = first else { return None };
    rest.iter().try_fold(file.get_mut(first)?, |value, step| match step {
        PathStep::Key(key) => value.get_mut(key),
        PathStep::Index(index) => value.get_mut(*index),
    })
}

/// The file with another value at a path.
pub(super) fn with(file: &Table, path: &Path, value: Value) -> Option<Table> {
    let mut file = file.clone();
    *value_mut(&mut file, path)? = value;
    Some(file)
}

/// The file without these keys, and without tables that are empty then.
pub(super) fn without_keys(file: &Table, gone: &[Path]) -> Option<Table> {
    let mut file = file.clone();
    for path in gone {
        let mut path = path.as_slice();
        while let Some((PathStep::Key(last), before)) = path.split_last() {
            let table = match before {
                [] => Some(&mut file),
                before => value_mut(&mut file, before).and_then(Value::as_table_mut),
            };
            let Some(table) = table else { break };
            table.remove(last);
            if !table.is_empty() {
                break;
            }
            path = before;
        }
    }
    Some(file)
}

/// The file with a value of [`FLOORS`] that it does not have; of requests that are alike only where
/// they have another one.
pub(super) fn floored(file: &Table, (keys, text): (&[&str], &str)) -> Option<Table> {
    let new: Value = text.parse::<i64>().map_or(Value::Boolean(text == "true"), Value::Integer);
    let (last, before) = keys.split_last()?;
    let mut file = file.clone();
    let old = table_at(&mut file, before).insert((*last).into(), new.clone());
    let is_of_none = old.is_none() && before == ["workload"];
    (old != Some(new) && !is_of_none).then_some(file)
}

/// Simpler values in place of one, the simplest first: what a range or a choice begins with, and
/// numbers between a neutral one and this one.
pub(super) fn simpler(value: &Value) -> Vec<Value> {
    match value {
        Value::Integer(number) => smaller(*number as f64, "")
            .into_iter()
            .filter_map(|text| text.parse().ok().map(Value::Integer))
            .collect(),
        Value::Float(number) => smaller(*number, "")
            .into_iter()
            .filter_map(|text| text.parse().ok().map(Value::Float))
            .collect(),
        Value::String(text) => simpler_text(text).into_iter().map(Value::String).collect(),
        Value::Boolean(_) | Value::Datetime(_) | Value::Array(_) | Value::Table(_) => Vec::new(),
    }
}

fn simpler_text(text: &str) -> Vec<String> {
    if text.contains('|') {
        return text.split('|').map(|part| part.trim().into()).collect();
    }
    if let Some((min, max)) = text.split_once("..") {
        return [min, max].map(|end| end.trim().into()).to_vec();
    }
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    // A slower link is not a simpler one.
    if unit.ends_with("/s") {
        return Vec::new();
    }
    number.parse().map_or(Vec::new(), |number| smaller(number, unit))
}

/// Units of time, each a thousand of the one before.
const UNITS: [&str; 4] = ["ns", "us", "ms", "s"];

/// A time of at most three digits in the unit in which it is from 1 to 1000; 0 is in seconds. Other
/// numbers as they are.
fn in_fit_unit(number: f64, unit: &str) -> String {
    let Some(at) = UNITS.iter().position(|own| *own == unit) else {
        return format!("{number}{unit}");
    };
    let (mut number, mut at) = (number, at);
    while number >= 1_000.0 && at + 1 < UNITS.len() {
        (number, at) = (number / 1_000.0, at + 1);
    }
    while number > 0.0 && number < 1.0 && at > 0 {
        (number, at) = (number * 1_000.0, at - 1);
    }
    let unit = if number == 0.0 { "s" } else { UNITS[at] };
    format!("{}{unit}", (number * 100.0).round() / 100.0)
}

/// Numbers of at most two digits that count between 0 or 1 and this one, ascending.
fn smaller(number: f64, unit: &str) -> Vec<String> {
    let shares = [1.0 / 16.0, 0.25, 0.5, 0.75, 0.9].map(|share| number * share);
    let mut steps = [[0.0, 1.0].as_slice(), &shares].concat();
    steps.sort_by(f64::total_cmp);
    let mut texts: Vec<String> = Vec::new();
    let mut last = -1.0;
    for step in steps {
        let scale = if step > 0.0 { 10_f64.powi(1 - step.log10().floor() as i32) } else { 1.0 };
        let scale = if unit.is_empty() && number.fract() == 0.0 { scale.min(1.0) } else { scale };
        let rounded = (step * scale).round() / scale;
        if rounded < number && rounded > last {
            last = rounded;
            texts.push(in_fit_unit(rounded, unit));
        }
    }
    texts
}

/// The file with each of its elements and keys away, one at a time.
pub(super) fn one_away(file: &Table) -> Vec<Table> {
    let elements = LISTS
        .iter()
        .flat_map(|keys| (0..list(file, keys).len()).filter_map(|at| without(file, keys, &[at])));
    let keys = leaves(file);
    let keys = keys.iter().filter_map(|path| without_keys(file, std::slice::from_ref(path)));
    elements.chain(keys).collect()
}

/// The file with another seed.
pub(super) fn reseeded(mut file: Table, seed: u64) -> Table {
    file.insert("seed".into(), Value::Integer(seed as i64));
    file
}

/// A hit of a fault with `chance`, as a file says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PinnedHit {
    /// Value of `decisions` of the fault.
    pub(super) key: String,
    pub(super) event: &'static str,
    pub(super) from: String,
    pub(super) nth: u32,
    pub(super) lasts: Option<String>,
    pub(super) delay: Option<String>,
}

/// The fault of this index, once for each of these hits of it.
pub(super) fn pinned(file: &Table, index: usize, hits: &[PinnedHit]) -> Option<Table> {
    let fault = list(file, &["fault"]).get(index)?.as_table()?;
    fault.get("chance")?;
    let key = fault.get("decisions")?.as_str()?;
    let keys = FaultKind::ALL
        .iter()
        .find(|kind| Some(kind.name()) == fault.get("kind").and_then(Value::as_str))?
        .schema()
        .keys;
    let one = |hit: &PinnedHit| {
        let mut one = fault.clone();
        ["chance", "times"].iter().for_each(|key| {
            one.remove(*key);
        });
        let mut on = Table::new();
        on.insert("event".into(), hit.event.into());
        on.insert("from".into(), hit.from.as_str().into());
        on.insert("nth".into(), Value::Integer(hit.nth.into()));
        one.insert("on".into(), Value::Table(on));
        for (key, drawn) in [("lasts", &hit.lasts), ("delay", &hit.delay)] {
            let drawn = drawn.as_ref().filter(|_| keys.contains(&key));
            one.extend(drawn.map(|drawn| (key.into(), Value::String(drawn.clone()))));
        }
        Value::Table(one)
    };
    let hits: Vec<Value> = hits.iter().filter(|hit| hit.key == key).map(one).collect();
    let mut file = file.clone();
    let Some(Value::Array(faults)) = file.get_mut("fault") else { return None };
    faults.splice(index..=index, hits);
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "
        seed = 1
        liveness = 'core'
        [model]
        layers = 3
        [topology]
        prefill = [{ name = 'p0', tp = 2 }, { name = 'p1', protocol = { lease = '1s' } }]
        router = { expiry = '3s' }
        [[fault]]
        kind = 'wire.loss'
        chance = 0.5
        decisions = '7'
        [[fault]]
        kind = 'process.crash'
        target = 'p1.0'
        at = '3ms'
        [[fault]]
        kind = 'wire.loss'
        on = { event = 'frame.sent', from = 'p1' }
    ";

    fn file() -> Table {
        FILE.parse().expect("TOML")
    }

    #[test]
    fn an_instance_goes_with_the_faults_that_name_it() {
        let left = without(&file(), &["topology", "prefill"], &[1]).expect("one is left");
        assert_eq!(list(&left, &["topology", "prefill"]).len(), 1);
        assert_eq!(kinds(&left), ["wire.loss"]);
        assert_eq!(list(&left, &["fault"]).len(), 1);
        assert_eq!(without(&file(), &["topology", "prefill"], &[0, 1]), None);
        let left = without(&file(), &["topology", "prefill"], &[0]).expect("one is left");
        assert_eq!(list(&left, &["fault"]).len(), 3);
    }

    #[test]
    fn a_kind_goes_with_all_its_faults() {
        assert_eq!(kinds(&file()), ["process.crash", "wire.loss"]);
        let left = without_kinds(&file(), &["wire.loss".into()]).expect("faults can all go");
        assert_eq!(kinds(&left), ["process.crash"]);
        let none = without_kinds(&left, &["process.crash".into()]).expect("faults can all go");
        assert_eq!(none.get("fault"), None);
    }

    #[test]
    fn a_key_goes_with_the_tables_that_are_empty_then() {
        let found = leaves(&file());
        let path = |of: &[&str]| found.iter().any(|path| is_at(path, of));
        assert!(path(&["liveness"]) && path(&["topology", "router", "expiry"]));
        assert!(!path(&["seed"]) && !path(&["model", "layers"]), "{found:?}");
        let left = without_keys(&file(), &found).expect("keys can go");
        let prefill = list(&left, &["topology", "prefill"]);
        assert_eq!(prefill[1].as_table().map(Table::len), Some(1), "{left}");
        assert_eq!(left["topology"].get("router"), None);
        assert_eq!(left.get("liveness"), None);
    }

    #[test]
    fn what_says_less_than_a_default_is_set_once() {
        let floored_once = floored(&file(), FLOORS[1]).expect("three layers are more");
        assert_eq!(floored_once["model"]["layers"], Value::Integer(1));
        assert_eq!(floored(&floored_once, FLOORS[1]), None);
        let quiet = floored(&file(), FLOORS[0]).expect("it was not set");
        assert_eq!(quiet["probes"], Value::Boolean(false));
    }

    #[test]
    fn simpler_values_ascend_from_a_neutral_one() {
        let texts = |value: Value| -> Vec<String> {
            simpler(&value).into_iter().map(|value| value.to_string()).collect()
        };
        assert_eq!(texts(300.into()), ["0", "1", "19", "75", "150", "230", "270"]);
        assert_eq!(texts(2.into()), ["0", "1"]);
        assert_eq!(texts(0.into()), [""; 0]);
        assert_eq!(
            texts("3.2ms".into()),
            ["\"0s\"", "\"200us\"", "\"800us\"", "\"1ms\"", "\"1.6ms\"", "\"2.4ms\"", "\"2.9ms\""]
        );
        assert_eq!(texts("2200000ns".into())[..3], ["\"0s\"", "\"1ns\"", "\"140us\""]);
        assert_eq!(texts("10us..2ms".into()), ["\"10us\"", "\"2ms\""]);
        assert_eq!(texts("1|4..8".into()), ["\"1\"", "\"4..8\""]);
        assert_eq!(texts("push".into()), [""; 0]);
        assert_eq!(texts("40GB/s".into()), [""; 0]);
    }

    #[test]
    fn each_hit_of_a_chance_gets_a_table() {
        let hit = |key: &str, nth| PinnedHit {
            key: key.into(),
            event: "frame.sent",
            from: "p0".into(),
            nth,
            lasts: Some("1ms".into()),
            delay: None,
        };
        let left = pinned(&file(), 0, &[hit("7", 4), hit("8", 5), hit("7", 9)]).expect("a chance");
        let faults = list(&left, &["fault"]);
        assert_eq!(faults.len(), 4);
        let on = |at: usize| faults[at]["on"]["nth"].as_integer();
        assert_eq!((on(0), on(1)), (Some(4), Some(9)));
        assert_eq!((faults[0].get("chance"), faults[0].get("lasts")), (None, None));
        assert_eq!(faults[0]["decisions"].as_str(), Some("7"));
        assert_eq!(pinned(&file(), 1, &[hit("7", 4)]), None);
    }
}
