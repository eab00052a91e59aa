//! Files of faults alone.

use kvferry_faults::{FaultFile, FaultKind, FaultTrigger, TriggerEvent};

fn error(text: &str) -> String {
    FaultFile::parse("f.toml", text).expect_err("refused").to_string()
}

#[test]
fn faults_are_drawn_as_in_a_scenario() {
    let text = r#"
        about = "the first four move nothing"
        seed = 3
        [[fault]]
        kind = "fabric.no_copy"
        on = { event = "op.posted" }
        times = 4
        [[fault]]
        kind = "fabric.reorder"
        chance = 0.5
        delay = "3ms"
        [[fault]]
        kind = "fabric.ack_lost"
        enabled = 0
        chance = 1
    "#;
    let file = FaultFile::parse("f.toml", text).unwrap_or_else(|why| panic!("{why}"));
    assert_eq!(file.seed(), 3);
    let faults = file.faults();
    let kinds: Vec<_> = faults.iter().map(|fault| (fault.line, fault.kind)).collect();
    assert_eq!(kinds, [(5, FaultKind::NoCopy), (9, FaultKind::CompletionReorder)]);
    assert_eq!(faults[0].times, 4);
    let FaultTrigger::On { event, nth, .. } = &faults[0].trigger else { panic!("on") };
    assert_eq!((*event, *nth), (TriggerEvent::OpPosted, 1));
    assert_eq!(faults[1].trigger, FaultTrigger::Chance(500_000));
}

#[test]
fn what_needs_a_scenario_is_refused_with_its_line() {
    let unknown = error("[[fault]]\nkind = \"fabric.no_cpy\"\nchance = 1\n");
    assert!(unknown.contains("f.toml:2") && unknown.contains("fabric.no_copy"), "{unknown}");
    let named = error("[[fault]]\nkind = \"fabric.no_copy\"\nchance = 1\nfrom = \"prefill\"\n");
    assert!(named.contains("f.toml:4") && named.contains("no topology"), "{named}");
    let on = error(
        "[[fault]]\nkind = \"fabric.no_copy\"\non = { event = \"op.posted\", to = \"any\" }\n",
    );
    assert!(on.contains("f.toml:3") && on.contains("no topology"), "{on}");
    let table = error("[model]\nlayers = 3\n");
    assert!(table.contains("f.toml:1") && table.contains("model"), "{table}");
    let any = error("seed = \"any\"\n");
    assert!(any.contains("give a number"), "{any}");
    let missing = FaultFile::load("/nonexistent/f.toml").expect_err("no file").to_string();
    assert!(missing.contains("cannot read the faults"), "{missing}");
}
