//! What is left of a killed server registers on beside the one that took its address.

use crate::fleet::{FleetHeartbeat, PATIENT, TestCluster, metric, registration};
use crate::process::ServeProcess;
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::json;

#[test]
fn the_newer_server_gets_all_requests() {
    let fleet = TestCluster::new(&[]);
    let _d = fleet.serve("decode", "push", &["--set", PATIENT]);
    let new = ServeProcess::serve(&["--role", "prefill", "--mode", "push", "--set", PATIENT]);
    // The ghost has ports of its own, where nobody knows of the prompts.
    let ghost = ServeProcess::serve(&["--role", "prefill", "--mode", "push"]);
    let mut told = registration(&ghost, Role::Prefill, Mode::Push, ghost.text("handshake"));
    told.http = new.text("http").into();
    told.incarnation = Incarnation(told.incarnation.0 - 3_600_000_000);
    let _ghost = FleetHeartbeat::beat(fleet.discovery(), told);
    fleet.ready(2);
    let told = registration(&new, Role::Prefill, Mode::Push, new.text("handshake"));
    let name = told.engine.to_string();
    let _new = FleetHeartbeat::beat(fleet.discovery(), told);
    fleet.until("the new one is there", |workers| workers.iter().any(|it| it["engine"] == *name));
    fleet.ready(2);
    for seed in 0..20 {
        let (status, body) = fleet.ask(seed, &[]);
        assert_eq!(status, 200, "{body}");
    }
    assert_eq!(fleet.metric("kvferry_router_retries_total"), 0);
    // With its next registration.
    fleet.until("the old one is refused", |_| {
        let rejected = fleet.page("/registrations/rejected").to_string();
        rejected.contains("a newer engine serves at its HTTP address")
    });
}

/// Before the new one has registered its legs carry the incarnation of the old one. Both sides know
/// better.
#[test]
fn a_leg_for_another_incarnation_fails_at_once() {
    let fleet = TestCluster::new(&["--retries", "0"]);
    let _d = fleet.serve("decode", "push", &["--set", PATIENT]);
    let new = ServeProcess::serve(&["--role", "prefill", "--mode", "push", "--set", PATIENT]);
    let mut told = registration(&new, Role::Prefill, Mode::Push, new.text("handshake"));
    told.incarnation = Incarnation(told.incarnation.0 - 1);
    let incarnation = told.incarnation.0;
    let _old = FleetHeartbeat::beat(fleet.discovery(), told);
    fleet.ready(2);
    let cause = |body: &str| {
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        body["error"]["kvferry"]["failed"]["cause"].as_str().unwrap_or_default().to_owned()
    };
    let (status, body) = fleet.ask(1, &[]);
    assert_eq!(status, 500, "{body}");
    assert!(["other-life", "peer-restarted"].contains(&&*cause(&body)), "{body}");
    let leg = json!({"key": {"id": "t", "prompt": 0}, "siblings": 1, "mode": "Push", "life": incarnation});
    let body = json!({"prompt": [1, 2], "kv_transfer_params": {"kvferry": leg}});
    let (status, body) = new.post("/v1/completions", "r", &body);
    assert_eq!((status, &*cause(&body)), (500, "other-life"), "{body}");
    assert!(metric(&new, "kvferry_legs_failed_total") >= 1);
}
