//! What is refused because of a limit is refused by name.

use kvferry_sim::world::{RunReport, RunVerdict, SimOptions, run};
use std::path::Path;

fn reports(file: &str) -> impl Iterator<Item = RunReport> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scenarios/faults").join(file);
    let scenario = kvferry_scenarios::load(path).expect("it can be read");
    (1..=8).map(move |seed| {
        let report = run(&scenario.draw(seed).expect("it can be drawn"), SimOptions::default());
        assert_eq!(report.verdict, RunVerdict::Held, "seed {seed}: {:?}", report.violations);
        report
    })
}

#[test]
fn requests_above_the_limit_of_a_core_fail_because_its_table_is_full() {
    for report in reports("requests-above-the-limit.toml") {
        let causes = &report.failure_causes;
        assert!(causes.contains_key("table full"), "{causes:?}");
    }
}

#[test]
fn what_the_router_cannot_hold_is_its_overload() {
    for report in reports("router-queue-full.toml") {
        let causes: Vec<_> = report.failure_causes.keys().collect();
        assert_eq!(causes, ["overload of the router"]);
    }
}

#[test]
fn loads_that_find_a_table_full_are_recomputed_because_of_overload() {
    for file in ["queue-above-the-limit.toml", "receivers-above-the-limit.toml"] {
        for report in reports(file) {
            let causes = &report.recompute_causes;
            assert!(causes.contains_key("overload"), "{file}: {causes:?}");
        }
    }
}
