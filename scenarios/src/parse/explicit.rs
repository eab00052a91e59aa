//! Scenarios in which each instance, stream and request has a table of its own.

use super::{Scenario, drawn_text, parse};
use crate::ScenarioError;
use crate::lists::FaultKind;
use crate::run::{AllocationOrder, Run, Served, WorkloadRequest};
use crate::value::ScenarioValue;
use crate::written::written;
use kvferry_engine::core::message::Role;
use std::path::Path;
use toml::{Table, Value};

/// Faults that are worked into requests and settings, which then say the same without them.
const WORKED_IN: [FaultKind; 6] = [
    FaultKind::SmallPool,
    FaultKind::ImmediateReuse,
    FaultKind::Siblings,
    FaultKind::IdsDiffer,
    FaultKind::Burst,
    FaultKind::DegeneratePrompts,
];

/// Tables of a workload that stands in `single` alone, and keys that have no meaning there.
const OF_ALL: [&str; 11] = [
    "requests",
    "prompt_tokens",
    "output_tokens",
    "prompts",
    "arrival",
    "start",
    "samples",
    "stop",
    "abort",
    "models",
    "single",
];

/// A file with this name and text as [`super::drawn`] writes it, with a table for each instance,
/// host and stream, and without what the seed does not serve. It is the same run.
///
/// # Errors
/// As [`super::drawn`].
pub fn explicit(
    (name, text): (&str, &str),
    folder: &Path,
    seed: u64,
) -> Result<String, ScenarioError> {
    let (scenario, run, mut file) = read((name, text), folder, seed)?;
    match run.served {
        Served::Requests => {
            file.remove("stream");
            for (role, key) in [(Role::Prefill, "prefill"), (Role::Decode, "decode")] {
                let named = scenario.topology.instance_names(seed);
                let named = named.into_iter().filter(|(of, ..)| *of == role);
                name_each(&mut file, key, named.map(|(_, table, name)| (table, name)));
            }
            section(&mut file, "topology").remove("hosts");
            layouts(&run, &mut file);
        }
        Served::Payloads => {
            streams(&scenario, &run, seed, &mut file);
            let named = scenario.topology.host_names(seed);
            name_each(&mut file, "hosts", named.into_iter());
            section(&mut file, "workload").retain(|key, _| ["mode", "prefix"].contains(&key));
            for key in ["prefill", "decode"] {
                section(&mut file, "topology").remove(key);
            }
        }
    }
    section(&mut file, "topology").remove("serves");
    faults(&mut file).iter_mut().filter_map(Value::as_table_mut).for_each(|fault| {
        fault.remove("enabled");
    });
    drawn_text((name, &written(&file)), folder, seed)
}

/// A file that [`explicit`] has written, with a table for each request, in which faults that shape requests and pools are
/// worked in; `None` for a trace, for requests that have tables already, and for payloads.
///
/// # Errors
/// As [`super::drawn`].
pub fn explicit_requests(
    (name, text): (&str, &str),
    folder: &Path,
    seed: u64,
) -> Result<Option<String>, ScenarioError> {
    let (_, run, mut file) = read((name, text), folder, seed)?;
    let workload = section(&mut file, "workload").clone();
    let is_generated = !workload.contains_key("trace") && !workload.contains_key("single");
    if run.served != Served::Requests || !is_generated {
        return Ok(None);
    }
    let lengths = workload.get("prompt_tokens").cloned();
    let single = |(n, request): (usize, &WorkloadRequest)| {
        Value::Table(request_table(n, request, lengths.as_ref()))
    };
    let singles: Vec<Value> = run.requests.iter().enumerate().map(single).collect();
    let kept = section(&mut file, "workload");
    OF_ALL.iter().for_each(|key| {
        kept.remove(*key);
    });
    kept.insert("requests".into(), Value::Integer(0));
    kept.insert("single".into(), Value::Array(singles));
    work_in(&run, &mut file);
    drawn_text((name, &written(&file)), folder, seed).map(Some)
}

fn read(
    (name, text): (&str, &str),
    folder: &Path,
    seed: u64,
) -> Result<(Scenario, Run, Table), ScenarioError> {
    let scenario = parse(name, text, folder, None)?;
    let run = scenario.draw(seed)?;
    Ok((scenario, run, text.parse().expect("a scenario is TOML")))
}

/// A table of the file; an empty one if there is none.
fn section<'a>(file: &'a mut Table, key: &str) -> &'a mut Table {
    let value = file.entry(key).or_insert_with(|| Value::Table(Table::new()));
    value.as_table_mut().expect("a section is a table")
}

fn faults(file: &mut Table) -> &mut Vec<Value> {
    let value = file.entry("fault").or_insert_with(|| Value::Array(Vec::new()));
    value.as_array_mut().expect("faults are a list")
}

/// Makes a table of `[topology]` for each of these names of what the table of a number stands for.
fn name_each(file: &mut Table, key: &str, named: impl Iterator<Item = (usize, String)>) {
    let topology = section(file, "topology");
    let tables = topology.get(key).and_then(Value::as_array).cloned().unwrap_or_default();
    let each = named.map(|(table, name)| {
        let table = tables.get(table).and_then(Value::as_table);
        let mut table = table.cloned().unwrap_or_default();
        table.remove("count");
        table.insert("name".into(), Value::String(name));
        Value::Table(table)
    });
    let each: Vec<Value> = each.collect();
    topology.insert(key.into(), Value::Array(each));
}

/// Says the layout of each instance in its table.
fn layouts(run: &Run, file: &mut Table) {
    let Some(layout) = section(file, "model").remove("layout") else { return };
    for_each_instance(file, |name, table| {
        let own = run.named(name).next().map(|at| run.instances[at].layout.spelled());
        if !table.contains_key("layout") {
            table.insert("layout".into(), own.map_or_else(|| layout.clone(), Value::String));
        }
    });
}

/// Calls `change` with the name and the table of each instance.
fn for_each_instance(file: &mut Table, mut change: impl FnMut(&str, &mut Table)) {
    for key in ["prefill", "decode"] {
        let tables = section(file, "topology").get_mut(key).and_then(Value::as_array_mut);
        for table in tables.into_iter().flatten().filter_map(Value::as_table_mut) {
            let name = table.get("name").and_then(Value::as_str).unwrap_or_default().to_string();
            change(&name, table);
        }
    }
}

/// Makes a table for each stream that is not made of another one.
fn streams(scenario: &Scenario, run: &Run, seed: u64, file: &mut Table) {
    let tables = file.remove("stream");
    let tables = tables.as_ref().and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    // A stream is followed by those that use its id again.
    let mut groups = run.streams.chunk_by(|_, next| next.of.is_some());
    let mut each = Vec::new();
    for (n, (spec, table)) in (0..).zip(scenario.stream.iter().zip(tables)) {
        for ((decisions, begins), group) in spec.begins(n, seed).into_iter().zip(&mut groups) {
            let mut table = table.as_table().cloned().unwrap_or_default();
            ["count", "every"].iter().for_each(|key| {
                table.remove(*key);
            });
            table.insert("decisions".into(), Value::String(decisions.to_string()));
            table.insert("begins".into(), Value::String(begins.spelled()));
            let from: Vec<u16> = group.iter().map(|stream| stream.from).collect();
            let receivers = group.iter().flat_map(|stream| &stream.receivers);
            let to: Vec<u16> = receivers.map(|receiver| receiver.host).collect();
            for (key, hosts) in [("from", from), ("to", to)] {
                if let Some(host) = hosts.first()
                    && hosts.iter().all(|other| other == host)
                {
                    let name = run.hosts[usize::from(*host)].name.clone();
                    table.insert(key.into(), Value::String(name));
                }
            }
            each.push(Value::Table(table));
        }
    }
    file.insert("stream".into(), Value::Array(each));
}

/// The table of a request; `lengths` is what the file says of prompts that differ.
fn request_table(n: usize, request: &WorkloadRequest, lengths: Option<&Value>) -> Table {
    let mut table = Table::new();
    let mut set = |key: &str, value: Value| table.insert(key.into(), value);
    let number = |number: u32| Value::Integer(number.into());
    set("at", Value::String(request.arrival.spelled()));
    set("decisions", Value::String(n.to_string()));
    set("output_tokens", number(request.output));
    let mut tokens = request.prompts.iter().map(|prompt| prompt.tokens);
    match tokens.next().filter(|first| tokens.all(|other| other == *first)) {
        Some(all) => set("prompt_tokens", number(all)),
        None => set("prompt_tokens", lengths.cloned().unwrap_or("16..256".into())),
    };
    if request.prompts.len() > 1 {
        set("prompts", number(request.prompts.len() as u32));
    }
    if request.samples > 1 {
        set("samples", number(request.samples));
    }
    if request.stop {
        set("stop", Value::Boolean(true));
    }
    if let Some(after) = request.abort {
        set("abort", Value::String(after.spelled()));
    }
    if let Some(model) = &request.model {
        set("model", Value::String(model.to_string()));
    }
    table
}

/// Takes faults away that the settings of the run say as well.
fn work_in(run: &Run, file: &mut Table) {
    let names: Vec<&str> = WORKED_IN.iter().map(|kind| kind.name()).collect();
    faults(file).retain(|fault| {
        let kind = fault.get("kind").and_then(Value::as_str);
        !kind.is_some_and(|kind| names.contains(&kind))
    });
    if run.shaped.contains(&FaultKind::IdsDiffer) {
        let topology = section(file, "topology");
        section(topology, "router").insert("ids_differ".into(), Value::Boolean(true));
    }
    if run.engine.allocator == AllocationOrder::Lifo {
        section(file, "engine").insert("allocator".into(), Value::String("lifo".into()));
    }
    if run.shaped.contains(&FaultKind::SmallPool) {
        for_each_instance(file, |name, table| {
            // The DP ranks of one table have equal pools.
            let own = run.named(name).map(|at| run.instances[at].blocks).max();
            table.extend(own.map(|blocks| ("blocks".into(), Value::Integer(blocks.into()))));
        });
    }
}
