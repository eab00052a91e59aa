//! Spans of transfers within a serving engine.

use crate::collector::{CollectorActs, StubCollector};
use crate::rig::{PARENT, SidecarFixture, SidecarProcess, transfer};
use kvferry_engine::core::message::{Mode, Role};

const VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";

/// Hands a prompt over between hosts that have the variable; they end well.
fn hand_over(name: &str, mode: Mode, url: &str) {
    let hosts = ["p", "d"]
        .map(|side| SidecarProcess::with(&format!("{name}-{mode}-{side}"), Some((VARIABLE, url))));
    let mut p = SidecarFixture::start(&hosts[0], Role::Prefill, mode);
    let mut d = SidecarFixture::start(&hosts[1], Role::Decode, mode);
    transfer(&mut p, &mut d, mode);
    drop((p, d));
    for mut host in hosts {
        assert!(host.child.wait().expect("a child").success());
    }
}

#[test]
fn transfers_have_spans_below_those_that_the_parameters_name() {
    for mode in [Mode::Push, Mode::Pull] {
        let collector = StubCollector::start(CollectorActs::Takes);
        hand_over("spans", mode, &collector.url);
        let spans = collector.spans(2);
        let mut roles: Vec<_> = spans.iter().map(|it| it.attribute("kvferry.role")).collect();
        roles.sort_unstable();
        assert_eq!(roles, ["decode", "prefill"]);
        for span in &spans {
            let parent = format!("00-{}-{}-01", span.trace, span.parent);
            assert_eq!(
                (&*parent, &*span.name, &*span.service),
                (PARENT, "transfer", "kvferry-host")
            );
            assert_eq!((span.outcome(), span.attribute("kvferry.transfer_id")), ("done", "tx-1"));
            assert_eq!(span.attribute("kvferry.tokens"), "40");
            let moves = (mode == Mode::Push) == (span.attribute("kvferry.role") == "prefill");
            assert_eq!(!span.attribute("kvferry.bytes").is_empty(), moves, "{span:?}");
        }
    }
}

#[test]
fn a_setting_of_the_servers_own_spans_does_not_keep_it_from_its_start() {
    hand_over("no-spans", Mode::Push, "collector:4317");
}
