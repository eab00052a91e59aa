//! An instance that registers anew in another role.

use crate::backend::{Act, StubInstance};
use crate::rig::{PATIENCE, TestRouter, streaming};
use crate::streams::{event, feed};
use http_body_util::BodyExt;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use serde_json::{Value, json};
use std::time::Instant;
use tokio::time::timeout;

/// What a host says whose port, and so whose name, stays the same.
fn says(instance: &StubInstance, role: Role, incarnation: u64) -> Vec<Vec<Vec<u8>>> {
    let registration = Registration::new(
        format!("engine-of-{}", instance.http).as_str().into(),
        Incarnation(incarnation),
        role,
        Mode::Push,
        instance.http.as_str().into(),
        "tcp://127.0.0.1:1".into(),
    );
    vec![vec![native::encode(&Frame::Register(registration))]]
}

fn states<'a>(workers: &'a [Value], instance: &StubInstance) -> Vec<(&'a str, &'a str)> {
    let text = |value: &'a Value| value.as_str().expect("text");
    let here = workers.iter().filter(|it| it["http"] == instance.http);
    here.map(|it| (text(&it["role"]), text(&it["state"]))).collect()
}

#[tokio::test]
async fn streams_of_the_former_role_end_before_the_new_role_is_served() {
    let mut router = TestRouter::start(&[]);
    let prefill = StubInstance::start(Role::Prefill).await;
    let (switches, decode) =
        (StubInstance::start(Role::Decode).await, StubInstance::start(Role::Decode).await);
    router.send(says(&prefill, Role::Prefill, 1));
    router.send(says(&switches, Role::Decode, 1));
    router.ready(2).await;
    let (tokens, fed) = feed();
    switches.always(fed);
    tokens.send(event("before")).unwrap();
    let mut answer = router.call(router.request("/v1/completions", streaming().to_string())).await;
    router.send(says(&decode, Role::Decode, 1));
    router.ready(3).await;
    // What is left of its last incarnation goes on saying that it decodes, and is not listened to.
    router.send(says(&switches, Role::Prefill, 2));
    let both = [("decode", "draining"), ("prefill", "switching")];
    router.until("it switches", |workers| states(workers, &switches) == both).await;
    for _ in 0..6 {
        assert_eq!(router.ask().await.status, 200);
    }
    assert_eq!((switches.seen().len(), decode.seen().len()), (1, 6));
    tokens.send(event("after")).unwrap();
    for text in ["before", "after"] {
        let frame = timeout(PATIENCE, answer.body_mut().frame()).await.unwrap().unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), event(text));
    }
    switches.always(Act::Json(200, json!({"id": "x"})));
    drop(tokens);
    assert!(timeout(PATIENCE, answer.body_mut().frame()).await.unwrap().is_none());
    let ready = [("prefill", "ready")];
    router.until("it has switched", |workers| states(workers, &switches) == ready).await;
    let start = Instant::now();
    while switches.seen().len() == 1 {
        assert_eq!(router.ask().await.status, 200);
        assert!(start.elapsed() < PATIENCE, "it gets no prefill");
    }
    assert_eq!(switches.seen()[1].params()["do_remote_decode"], true);
    assert_eq!(router.metric("kvferry_router_role_switches_total").await, 1);
}
