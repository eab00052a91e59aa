//! Pages and texts of recorded runs, and the run of a seed as a file.

mod program;

use program::{ProgramFolder, ProgramOutput, kvferry, scenarios};
use serde_json::Value;
use std::fs;

/// Places in an event of a page, see `event_data`.
const LANE: usize = 1;
const KIND: usize = 2;
const CAUSE: usize = 3;
const FLAGS: usize = 7;
const TRANSFERS: usize = 8;
const LABEL: usize = 9;

/// A file of the repository's scenarios.
fn bundled(name: &str) -> String {
    scenarios().join(name).display().to_string()
}

/// The text of a page, and its data.
fn page(path: &str) -> (String, Value) {
    let text = fs::read_to_string(path).expect("the page was written");
    let begin = r#"<script id="data" type="application/json">"#;
    let (_, rest) = text.split_once(begin).expect("a page has data");
    let (data, _) = rest.split_once("</script>").expect("the data ends");
    let data = serde_json::from_str(data).expect("the data is JSON");
    (text, data)
}

fn run_page(folder: &ProgramFolder, file: &str) -> (ProgramOutput, String, Value) {
    let html = folder.path("run.html");
    let ended = kvferry(["run", file, "--html", &html]);
    let (text, data) = page(&html);
    (ended, text, data)
}

fn events(data: &Value) -> &Vec<Value> {
    data["events"].as_array().expect("events are a list")
}

fn word<'a>(data: &'a Value, list: &str, event: &Value, place: usize) -> &'a str {
    let index = event[place].as_u64().expect("an index") as usize;
    data[list][index].as_str().expect("a word")
}

#[test]
fn the_page_of_a_failing_run_opens_at_its_violation() {
    let folder = ProgramFolder::new("pictures-failing");
    let (ended, text, data) = run_page(&folder, &bundled("faults/no-copy.toml"));
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.out.contains("hit once"), "{}", ended.out);
    assert_eq!(data["verdict"], "correctness");
    let focus = data["focus"].as_u64().unwrap() as usize;
    let events = events(&data);
    let kind = |event| word(&data, "kinds", event, KIND);
    assert_eq!(kind(&events[focus]), "violation");
    assert!(events[..focus].iter().all(|event| kind(event) != "violation"));
    assert!(events[..focus].iter().any(|event| kind(event) == "fault"));
    // Nothing from elsewhere.
    let (before, rest) = text.split_once("application/json\">").unwrap();
    let (_, behind) = rest.split_once("</script>").unwrap();
    let foreign = format!("{before}{behind}").replace("http://www.w3.org/2000/svg", "");
    for word in ["http:", "https:", "src=", "href=", "@import", "url("] {
        assert!(!foreign.contains(word), "{word}");
    }
}

#[test]
fn events_of_a_page_have_their_causes_before_them_and_messages_both_ends() {
    let folder = ProgramFolder::new("pictures-causes");
    let (_, _, data) = run_page(&folder, &bundled("faults/mixed.toml"));
    let events = events(&data);
    let (mut gets, mut caused, mut lost, mut lands) = (0, 0, 0, 0);
    for (at, event) in events.iter().enumerate() {
        let cause = event[CAUSE].as_i64().unwrap();
        assert!(cause < at as i64, "event {at} comes of {cause}");
        let label = word(&data, "labels", event, LABEL);
        lost += u32::from(event[FLAGS].as_u64().unwrap() & 1 == 1);
        match word(&data, "kinds", event, KIND) {
            "input" if label.starts_with("gets ") => {
                gets += 1;
                if cause >= 0 {
                    caused += 1;
                    let sent = &events[cause as usize];
                    let sends = word(&data, "labels", sent, LABEL);
                    assert_eq!(sends.replacen("sends", "gets", 1), label);
                    assert_ne!(sent[LANE], event[LANE]);
                }
            }
            "landing" => {
                lands += 1;
                let submit = word(&data, "labels", &events[cause as usize], LABEL);
                assert_eq!(submit, "Data Submit");
                assert_eq!(event[TRANSFERS].as_array().unwrap().len(), 1, "{event}");
            }
            _ => {}
        }
    }
    assert!(gets > 100 && caused == gets, "{caused} of {gets} messages have a sender");
    assert!(lost >= 10 && lands > 50, "{lost} lost, {lands} landings");
    assert_eq!(data["left"], "");
    assert!(!data["changes"].as_array().unwrap().is_empty());
}

/// Places in a request of an overview, see `request` in `overview.rs`.
const ASKED: usize = 1;
const ENDED: usize = 6;
const WELL: usize = 7;
const EVENT: usize = 8;
const TRANSFER: usize = 9;

#[test]
fn overview_has_the_stages_of_each_request_and_the_use_of_each_link() {
    let folder = ProgramFolder::new("pictures-overview");
    let (html, file) = (folder.path("run.html"), bundled("smoke/push.toml"));
    let ended = kvferry(["run", &file, "--html", &html, "--json"]);
    let outcome: Value = serde_json::from_str(ended.out.trim()).expect("one object");
    let (_, data) = page(&html);
    assert_eq!(data["opens"], "overview");
    let overview = &data["overview"];
    let requests = overview["requests"].as_array().expect("a list");
    assert_eq!(requests.len() as u64, outcome["requests"].as_u64().unwrap());
    for request in requests {
        let at = |place: usize| request[place].as_i64().unwrap();
        let times: Vec<i64> = (ASKED..=ENDED).map(at).collect();
        assert!(times.is_sorted() && times[0] >= 0, "stages follow each other: {request}");
        assert_eq!(request[WELL], true, "{request}");
        // One click leads to its messages.
        let event = &events(&data)[at(EVENT) as usize];
        assert_eq!(word(&data, "labels", event, LABEL), format!("client {} asks", request[0]));
        assert!(event[TRANSFERS].as_array().unwrap().contains(&request[TRANSFER]), "{request}");
    }
    let (from, to) = (overview["from"].as_u64().unwrap(), overview["to"].as_u64().unwrap());
    assert!(from < to && to >= requests.last().unwrap()[ENDED].as_u64().unwrap());
    let mut moved = 0;
    for link in overview["links"]["rows"].as_array().unwrap() {
        let bins = link["bins"].as_array().unwrap().iter().map(|bytes| bytes.as_u64().unwrap());
        assert_eq!(bins.sum::<u64>(), link["bytes"].as_u64().unwrap());
        assert!(link["from"].as_str().unwrap().starts_with('p'), "push: {link}");
        moved += link["bytes"].as_u64().unwrap();
    }
    assert_eq!(moved, outcome["bytes_moved"].as_u64().unwrap());
    let waits: Vec<u64> =
        overview["ttft"].as_array().unwrap().iter().map(|wait| wait.as_u64().unwrap()).collect();
    assert_eq!(waits.len(), requests.len());
    // The router gets a token later than the decode does.
    let median = waits[waits.len().div_ceil(2) - 1] as f64 / 1e9;
    let at_decode = outcome["ttft"]["p50"].as_f64().unwrap();
    assert!(median > at_decode && median < 2.0 * at_decode, "{median} {at_decode}");
    assert!(overview["marks"].as_array().unwrap().is_empty());
}

#[test]
fn sequence_of_a_run_that_held_begins_at_its_first_fault_or_transfer() {
    let folder = ProgramFolder::new("pictures-focus");
    let (_, _, data) = run_page(&folder, &bundled("faults/mixed.toml"));
    let kind = |event| word(&data, "kinds", event, KIND);
    let focus = data["focus"].as_u64().unwrap() as usize;
    let first = events(&data).iter().position(|event| kind(event) == "fault");
    assert_eq!(Some(focus), first);
    let overview = &data["overview"];
    assert_eq!(
        overview["marks"].as_array().unwrap().len() as u64,
        data["faults"].as_u64().unwrap()
    );
    assert!(overview["own_requests"].as_u64().unwrap() > 0, "those after the faults are not drawn");
    assert!(overview["requests"].as_array().unwrap().iter().any(|it| it[WELL] == false));

    let folder = ProgramFolder::new("pictures-focus-smoke");
    let (_, _, data) = run_page(&folder, &bundled("smoke/pull.toml"));
    let event = &events(&data)[data["focus"].as_u64().unwrap() as usize];
    assert_eq!(word(&data, "labels", event, LABEL), "Dispatch");
    assert!(!event[TRANSFERS].as_array().unwrap().is_empty());
}

#[test]
fn label_of_each_event_is_explained() {
    let folder = ProgramFolder::new("pictures-labels");
    let files = [
        "smoke/push.toml",
        "smoke/pull.toml",
        "smoke/preempt-decode.toml",
        "faults/mixed.toml",
        "faults/no-copy.toml",
        "faults/port-flaps.toml",
        "faults/rank-crash.toml",
        "swarm.toml",
    ];
    for name in files {
        let html = folder.path("run.html");
        let ended = kvferry(["run", &bundled(name), "--seed", "3", "--html", &html, "--force"]);
        assert!(ended.err.is_empty(), "{name}: {ended:?}");
        let (_, data) = page(&html);
        let labels = data["labels"].as_array().unwrap();
        for (label, meaning) in labels.iter().zip(data["meanings"].as_array().unwrap()) {
            let label = label.as_str().unwrap();
            let is_name = label.starts_with(|first: char| first.is_uppercase())
                || label.starts_with("sends ") && !label.contains("a frame")
                || label.starts_with("gets ") && !label.contains("a frame");
            assert!(!is_name || meaning.is_string(), "{name}: {label} is not explained");
        }
    }
}

#[test]
fn a_page_says_what_it_leaves_out_of_a_long_run() {
    let folder = ProgramFolder::new("pictures-long");
    let (recording, html) = (folder.path("run.rec"), folder.path("run.html"));
    let file = bundled("faults/mixed.toml");
    let text = fs::read_to_string(&file).unwrap().replacen("requests = ", "requests = 3", 1);
    // Ten times as many requests end otherwise than that file expects.
    let (text, _) = text.split_once("[expect]").unwrap();
    let file = folder.write("long.toml", text);
    let ended = kvferry(["run", &file, "--record", &recording, "--html", &html]);
    let (_, data) = page(&html);
    let all = data["total"].as_u64().unwrap();
    assert!(all > 10_000, "{all} events: {ended:?}");
    assert_eq!(events(&data).len(), 10_000);
    let left = data["left"].as_str().unwrap();
    assert!(
        left.contains(&format!("10000 of {all} events")) && left.contains("0 before"),
        "{left}"
    );
    let ended = kvferry(["export", &recording, "--html", &html, "--at", "1h", "--force"]);
    assert_eq!((ended.code, ended.err.as_str()), (0, ""), "{ended:?}");
    let (_, data) = page(&html);
    assert_eq!(data["opens"], "sequence");
    let left = data["left"].as_str().unwrap();
    assert!(left.contains(" 0 after"), "{left}");
    assert!(!data["base"].as_array().unwrap().is_empty() || data["focus"] == 9_999);
}

#[test]
fn what_a_page_is_told_cannot_leave_its_place() {
    let folder = ProgramFolder::new("pictures-<b><!--");
    let file =
        folder.write("<script>.toml", &fs::read_to_string(bundled("faults/loss.toml")).unwrap());
    let (_, text, data) = run_page(&folder, &file);
    assert_eq!(data["scenario"].as_str(), Some(file.as_str()));
    assert_eq!(text.matches("<script").count(), 2, "the data and the code");
    assert!(!text.contains("<b>") && !text.contains("<!--"));
}

#[test]
fn a_recording_is_shown_around_a_time_and_of_a_transfer() {
    let folder = ProgramFolder::new("pictures-show");
    let recording = folder.path("run.rec");
    let file = bundled("faults/mixed.toml");
    assert_eq!(kvferry(["run", &file, "--record", &recording]).code, 0);
    let shown = |args: &[&str]| kvferry([&["show", &recording], args].concat());
    let all = shown(&[]).out;
    assert!(all.contains("fault wire.loss (to ") && all.contains("transfers: tx-"), "{all}");
    let (_, rest) = all.split_once("transfers: ").unwrap();
    let first = rest.split(' ').next().unwrap();
    let of_one = shown(&["--transfer", first]).out;
    for told in ["Dispatch", "blocks land from p", "Answer Loaded"] {
        assert!(of_one.contains(told), "{told}: {of_one}");
    }
    assert!(of_one.lines().all(|line| line.contains(first)), "{of_one}");
    let short = shown(&["--transfer", first, "--most", "3"]).out;
    assert_eq!(short.lines().count(), 4, "{short}");
    assert!(short.contains("more; ask for less time"), "{short}");
    let near = shown(&["--at", "910ms", "--around", "2ms", "--all"]).out;
    let times =
        near.lines().filter_map(|line| line.split_once(" ms")?.0.trim().parse::<f64>().ok());
    let times: Vec<_> = times.collect();
    assert!(times.len() > 5 && times.iter().all(|at| (908.0..=912.0).contains(at)), "{near}");

    let ended = shown(&["--transfer", "tx-none"]);
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(ended.err.contains("has no such transfer"), "{}", ended.err);
    let ended = kvferry(["show", &file]);
    assert_eq!(ended.code, 2, "{ended:?}");
    assert!(ended.err.contains("not a recording"), "{}", ended.err);
    let ended = shown(&["--at", "soon"]);
    assert!(ended.code == 2 && ended.err.contains("a duration such as"), "{ended:?}");
    let ended = kvferry(["export", &recording]);
    assert!(ended.code == 2 && ended.err.contains("--html"), "{ended:?}");
}

#[test]
fn a_run_tells_of_each_fault_of_its_file_how_often_it_hit() {
    let folder = ProgramFolder::new("pictures-faults");
    let text = fs::read_to_string(bundled("faults/loss.toml")).unwrap();
    let lines = text.lines().count() + 2;
    let never =
        "[[fault]]\nkind = \"fabric.partial\"\non = { event = \"op.posted\", nth = 1000000 }\n";
    let file = folder.write("one.toml", &format!("{text}{never}"));
    let table = kvferry(["run", &file, "--seed", "1"]).out;
    let row = |name: &str| table.lines().find(|line| line.trim().starts_with(name));
    let partial =
        row(&format!("fabric.partial, line {lines}")).unwrap_or_else(|| panic!("{table}"));
    assert!(partial.trim_end().ends_with("never hit"), "{partial}");
    let loss = row("wire.loss, line ").unwrap_or_else(|| panic!("{table}"));
    assert!(loss.contains(" times") && loss.contains("hit "), "{loss}");
}

#[test]
fn what_a_seed_draws_is_a_file_with_the_same_trace() {
    let folder = ProgramFolder::new("pictures-draw");
    let outcome = |file: &str, seed: &str| {
        let ended = kvferry(["run", file, "--seed", seed, "--json"]);
        let line = ended.out.lines().next().unwrap_or_else(|| panic!("{ended:?}"));
        let outcome: Value = serde_json::from_str(line).expect("one object");
        (outcome["trace_hash"].clone(), outcome["verdict"].clone(), outcome["faults"].clone())
    };
    for (file, seeds) in
        [("swarm.toml", 1..9), ("swarm-load.toml", 1..3), ("trace/push.toml", 1..2)]
    {
        let source = bundled(file);
        for seed in seeds.map(|seed: u64| seed.to_string()) {
            let drawn = folder.path("drawn.toml");
            let ended = kvferry(["draw", &source, "--seed", &seed, "--out", &drawn, "--force"]);
            assert_eq!((ended.code, ended.err.as_str()), (0, ""), "{file} {seed}: {ended:?}");
            // The file has its own seed.
            let ended = kvferry(["run", &drawn, "--json"]);
            let line: Value = serde_json::from_str(ended.out.lines().next().unwrap()).unwrap();
            assert_eq!(line["seed"].to_string(), seed);
            assert_eq!(outcome(&drawn, &seed), outcome(&source, &seed), "{file} {seed}");
        }
    }
    let drawn = fs::read_to_string(folder.path("drawn.toml")).unwrap();
    assert!(drawn.starts_with("# What seed 1 draws of "), "{drawn}");
    let swarm = kvferry(["draw", &bundled("swarm.toml"), "--seed", "1"]).out;
    assert!(!swarm.contains("seed = \"any\"") && !swarm.contains("enabled = 0."), "{swarm}");
    assert!(swarm.contains("decisions = \""), "{swarm}");
}
