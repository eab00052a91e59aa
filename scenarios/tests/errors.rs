//! Wrong input gets one error: file, line, what is wrong, what to do.

use kvferry_engine::core::dialect::native::{VERSION, VERSION_MIN};
use std::path::Path;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/smoke");

fn error(text: &str) -> String {
    let scenario = match kvferry_scenarios::parse("x.toml", text, Path::new(FOLDER), None) {
        Err(why) => return why.to_string(),
        Ok(scenario) => scenario,
    };
    scenario.draw(1).expect_err("something is wrong").to_string()
}

/// Checks the error of a file with `about` in line 1 and `text` from line 2 on.
#[track_caller]
fn check(text: &str, expected: &str) {
    assert_eq!(error(&format!("about = \"test\"\n{text}")), format!("x.toml:{expected}"));
}

#[test]
fn unknown_keys_are_named_with_the_nearest_known_one() {
    check("[model]\nlayer = 4", "3: unknown key `layer` in model; did you mean `layers`?");
    check(
        "[topology]\nprefill = [{ name = \"p0\" },\n  { nam = \"p1\" }]",
        "4: unknown key `nam` in topology.prefill[1]; did you mean `name`?",
    );
    check("[workloads]\n", "2: unknown key `workloads` in the file; did you mean `workload`?");
    check(
        "[expect]\nzzzzzzzz = 1",
        "3: unknown key `zzzzzzzz` in expect; known here: hold, exit, requests, receivers, operations, first_tokens, within",
    );
    check(
        "[[fault]]\nkind = \"wire.loss\"\nchance = 0.1\n[[fault]]\nkind = \"wire.loss\"\nchanse = 0.1",
        "7: unknown key `chanse` in fault[1]; did you mean `chance`?",
    );
}

#[test]
fn syntax_errors_have_a_line() {
    let text = error("about = \"test\"\n[model\nlayers = 4");
    assert!(text.starts_with("x.toml:2: not TOML: "), "{text}");
    assert!(text.ends_with("; see https://toml.io for the syntax"), "{text}");
    assert_eq!(error("seed = 1"), "x.toml:1: the scenario has no `about`; say what it shows");
}

#[test]
fn models_have_names() {
    check(
        "[topology]\nprefill = [{ models = \"base,\" }]",
        "3: `topology.prefill[0].models` cannot be `base,`; write names with commas between them, or \"any\"",
    );
    check(
        "[workload]\nmodels = { chance = 0.5 }",
        "3: `models` has no `names`; say which model requests name",
    );
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    check(
        "[topology]\ndecode = [{ blocks = 0 }]",
        "3: `topology.decode[0].blocks` is 0; give 1 to 268435456",
    );
    check(
        "[topology]\ndecode = [{ tp = \"1|0\" }]",
        "3: `topology.decode[0].tp` is 0; give 1 to 64",
    );
    check(
        "[topology]\nprefill = [{ tp = 3 }]",
        "3: `tp` 3 does not fit 8 KV heads; use a divisor or multiple: 1, 2, 4, 8, 16, 24",
    );
    check(
        "[model]\nblock_bytes = 1000",
        "3: `model.block_bytes` is 1000; give a multiple of 512 (16 tokens x 8 KV heads per rank x K and V x 2 bytes)",
    );
    check(
        "[model]\nlayers = 2\nwindow_layers = 2",
        "4: 2 window and 0 state layers of 2; leave at least one layer with full attention",
    );
    check(
        "[topology]\ndecode = [{ name = \"d0\", blocks = 4 }]\n[workload]\nprompt_tokens = 100\noutput_tokens = 10",
        "5: a request of 110 tokens never fits the 4 blocks of d0; give it at least 7 blocks, or shorten the requests",
    );
    check(
        "[model]\npreset = \"deepseek-r1\"\n[topology]\nhardware = \"mi300x\"\nprefill = [{ tp = 2 }]",
        "6: the weights of deepseek-r1 do not fit into 2 x mi300x with TP 2; use a larger `tp`, or set `blocks`",
    );
}

#[test]
fn payloads_need_hosts_that_can_have_them() {
    check(
        "[topology]\nserves = \"payloads\"",
        "3: payloads are served and there are no hosts; add `hosts`",
    );
    check(
        "[topology]\nhosts = [{ count = 2 }]\n[[stream]]\nto = \"h2\"",
        "5: no host is named `h2`; use any, or one of h0, h1",
    );
    check(
        "[topology]\nhosts = [{ pool = { bytes = \"8KiB\" } }]\n[[stream]]\nbytes = 10000",
        "4: a payload of 10000 B fits no pool of 8192 B; give the hosts larger pools",
    );
    check(
        "[topology]\nhosts = [{ name = \"p0\" }]",
        "3: two instances are named `p0`; give each `name` once",
    );
}

#[test]
fn limits_of_the_protocol_have_bounds() {
    let protocol = |text: &str, expected: &str| check(&format!("[protocol]\n{text}"), expected);
    let later = VERSION + 1;
    protocol(
        &format!("version = \"{VERSION}|{later}\""),
        &format!("3: `protocol.version` is {later}; give {VERSION_MIN} to {VERSION}"),
    );
    protocol(
        "version = 0",
        &format!("3: `protocol.version` is 0; give {VERSION_MIN} to {VERSION}"),
    );
    protocol(
        "version = 70000",
        "3: `protocol.version` cannot be `70000`; write a whole number up to 65535",
    );
    protocol("operations_max = 0", "3: `protocol.operations_max` is 0; give 1 to 4294967295");
    protocol("\nrequests_max = \"0..4\"", "4: `protocol.requests_max` is 0; give 1 to 4294967295");
    protocol("drift_percent = 91", "3: `protocol.drift_percent` is 91; give 0 to 90");
}

#[test]
fn values_say_what_they_should_be() {
    check(
        "[workload]\narrival = 5",
        "3: `workload.arrival` cannot be `5`; write a duration such as \"2us\", \"1.5s\" or \"10min\"",
    );
    check(
        "[workload]\narrival = \"4ms..2ms\"",
        "3: range `4ms..2ms` of `workload.arrival` starts behind its end; put the smaller value first",
    );
    check(
        "[workload]\nmode = \"shove\"",
        "3: `workload.mode` cannot be `shove`; write one of \"push\", \"pull\"",
    );
    check(
        "[workload]\nmode = \"pull..push\"",
        "3: `workload.mode` cannot be the range `pull..push`; list the values as a choice, \"a|b\"",
    );
    check(
        "[workload]\nabort = { chance = 1.5 }",
        "3: `workload.abort.chance` is above 1; give a probability from 0 to 1",
    );
    check(
        "[topology]\nlink = { bandwidth = \"0GB/s\" }",
        "3: `topology.link.bandwidth` is 0; give at least \"1B/s\"",
    );
    check("seed = \"some\"", "2: `seed` is a text; give a number or \"any\"");
    check("model = 3", "2: `model` cannot be a number; write a table");
    check(
        "[expect]\nhold = [\n  \"I1-no-foreign-bytes\",\n  \"I3-no-leaks\",\n]",
        "5: `expect.hold` is \"I3-no-leaks\", which does not exist; did you mean \"I3-no-leak\"?",
    );
    check(
        "[expect]\nexit = 1",
        "3: `expect.exit` is 1; give 0 (held), 3 (liveness), 4 (correctness), 5 (not deterministic) or 6 (panic)",
    );
}

#[test]
fn faults_must_make_sense() {
    let fault = |text: &str, expected: &str| check(&format!("[[fault]]\n{text}"), expected);
    fault(
        "kind = \"fabric.ack_loss\"\nchance = 0.1",
        "3: `fault[0].kind` is \"fabric.ack_loss\", which does not exist; did you mean \"fabric.ack_lost\"?",
    );
    fault("chance = 0.1", "2: a fault has no `kind`; see `kvferry list faults`");
    fault("kind = \"wire.loss\"", "3: wire.loss never fires; add one of `on`, `at` and `chance`");
    fault(
        "kind = \"wire.loss\"\nat = \"1s\"\nchance = 0.1",
        "2: a fault has more than one of `on`, `at` and `chance`; keep one, or write two faults",
    );
    fault(
        "kind = \"wire.loss\"\nchance = 0.1\nfactor = 3",
        "5: `factor` has no meaning for wire.loss; remove it; this kind takes from, to, match",
    );
    fault(
        "kind = \"client.abort\"\nat = \"1s\"\ntarget = \"p0\"",
        "5: `target` has no meaning for client.abort; remove it; this kind takes delay",
    );
    fault(
        "kind = \"process.pause\"\nat = \"1s\"",
        "3: process.pause has no `target`; name an instance",
    );
    fault(
        "kind = \"process.pause\"\nat = \"1s\"\ntarget = \"p1\"",
        "5: no instance is named `p1`; did you mean \"p0\"?",
    );
    fault(
        "kind = \"process.pause\"\nat = \"1s\"\ntarget = \"router\"",
        "5: process.pause cannot happen to the router; name an instance",
    );
    fault(
        "kind = \"wire.loss\"\non = { event = \"transfer.write\" }",
        "4: `fault[0].on.event` is \"transfer.write\", which does not exist; did you mean \"transfer.writing\"?",
    );
    fault(
        "kind = \"wire.loss\"\nchance = 0.1\nmatch = { message = \"Anounce\" }",
        "5: `fault[0].match.message` is \"Anounce\", which does not exist; did you mean \"Announce\"?",
    );
    fault(
        "kind = \"wire.partition\"\nat = \"1s\"\ntimes = 3",
        "3: `times` with `at` needs `every`; add the time between",
    );
    fault(
        "kind = \"memory.small_pool\"\nchance = 0.5",
        "3: `chance` has no meaning for memory.small_pool; use `enabled` for a probability per seed",
    );
    fault(
        "kind = \"process.restart_other_geometry\"\nat = \"1s\"\ntarget = \"p0\"\ntp = 3",
        "3: `tp` 3 does not fit 8 KV heads; use a divisor or multiple: 1, 2, 4, 8, 16, 24",
    );
}

#[test]
fn instances_have_one_name_each() {
    check(
        "[topology]\nprefill = [{ name = \"a\" }]\ndecode = [{ name = \"a\" }]",
        "4: two instances are named `a`; give each `name` once",
    );
    check(
        "[topology]\nprefill = [{ name = \"any\" }]",
        "3: an instance cannot be named `any`; choose another name",
    );
}

#[test]
fn a_missing_scenario_is_named() {
    let why = kvferry_scenarios::load("no/such.toml").expect_err("there is none").to_string();
    assert!(why.starts_with("no/such.toml: cannot read the scenario: "), "{why}");
}

#[test]
fn a_missing_trace_is_named_at_the_line_that_names_it() {
    let why = error("about = \"test\"\n[workload]\n\ntrace = \"none.jsonl\"");
    assert!(why.starts_with("x.toml:4: cannot read the trace "), "{why}");
    assert!(why.ends_with("; paths are relative to the scenario file"), "{why}");
    check(
        "[workload]\ntrace = \"../traces/chat.jsonl\"\nrequests = 5",
        "4: `workload.requests` has no meaning with `trace`; remove one of them",
    );
    check(
        "[workload]\nspeed = 5",
        "3: `workload.speed` has no meaning without `trace`; remove one of them",
    );
}

mod traces {
    use kvferry_scenarios::trace::TraceReader;

    const GOOD: &str =
        r#"{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}"#;

    #[track_caller]
    fn check(line: &str, expected: &str) {
        let text = format!("{GOOD}\n{line}\n");
        let mut reader = TraceReader::new(text.as_bytes(), "t.jsonl");
        assert!(reader.next().is_some_and(|first| first.is_ok()));
        let why = reader.next().expect("there is a second line").expect_err("it is wrong");
        assert_eq!(why.to_string(), format!("t.jsonl:{expected}"));
    }

    #[test]
    fn a_line_cut_in_half_is_found() {
        for end in 1..GOOD.len() {
            let cut = GOOD[..end].trim_end();
            let expected = format!(
                "2: the line is cut off after {} bytes; restore or remove the line",
                cut.len()
            );
            check(cut, &expected);
        }
    }

    #[test]
    fn records_must_be_consistent() {
        let form =
            "give one object with `timestamp`, `input_length`, `output_length` and `hash_ids`";
        check(
            r#"{"timestamp": 5, "input_length": 600, "hash_ids": [0, 1]}"#,
            &format!("2: not a trace record: missing field `output_length`; {form}"),
        );
        check(
            r#"{"timestamp": 5.5, "input_length": 1, "output_length": 3, "hash_ids": [0]}"#,
            &format!(
                "2: not a trace record: invalid type: floating point `5.5`, expected u64; {form}"
            ),
        );
        check(&GOOD.replace("5,", "4,"), "2: timestamp 4 is before 5; sort the trace by timestamp");
        check(
            &GOOD.replace("600", "512"),
            "2: 2 hash_ids for an input_length of 512; give 1, one per 512 tokens",
        );
        check(&GOOD.replace("3,", "0,"), "2: a length is 0; give at least one token");
    }
}

#[test]
fn what_cells_cannot_express_is_refused() {
    let cells = "memory = \"cells\"\n";
    let layouts = "[topology]\nprefill = [{ name = \"p0\", layout = \"head-split\" }]\n\
                   decode = [{ name = \"d0\", layout = \"token\" }]";
    check(
        &format!("{cells}{layouts}"),
        "2: cells cannot follow K and V between the layouts of p0 and d0; use \"head-split\" for both \
         or for none, or set `memory` to \"bytes\"",
    );
    let restart = "[[fault]]\nkind = \"process.restart_other_geometry\"\nat = \"1ms\"\n\
                   target = \"d0\"\nlayout = \"head-split\"";
    let text = error(&format!("about = \"test\"\n{cells}{restart}"));
    assert!(text.starts_with("x.toml:2: cells cannot follow K and V"), "{text}");
    check(
        &format!("{cells}[model]\nlayers = 97"),
        "2: cells cannot tell 97 layers apart; use at most 96, or set `memory` to \"bytes\"",
    );
    let draws = |text: &str| {
        let text = format!("about = \"test\"\n{text}");
        kvferry_scenarios::parse("x.toml", &text, Path::new(FOLDER), None).unwrap().draw(1).is_ok()
    };
    assert!(draws(layouts) && draws(&format!("{cells}[model]\nlayout = \"head-split\"")));
    // The latent is one slot in any layout.
    assert!(draws(&format!("{cells}[model]\nlatent = 64\n{layouts}")));
}
