//! Hosts that end or fall silent, beside servers that go on.

use crate::backend::{Act, StubInstance};
use crate::rig::{PATIENCE, TestRouter, streaming};
use crate::streams::{event, feed};
use http_body_util::BodyExt;
use kvferry_engine::core::dialect::native::{self, Frame};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::timeout;

/// A host, as far as the router knows it: what registers an instance, over a connection of its own.
struct StubHost {
    socket: zmq::Socket,
    registration: Registration,
}

impl StubHost {
    /// A host that has registered once.
    fn start(router: &TestRouter, instance: &StubInstance, incarnation: u64) -> StubHost {
        let socket = zmq::Context::new().socket(zmq::DEALER).expect("a socket");
        socket.set_linger(0).expect("an option of sockets");
        socket.connect(&router.discovery).expect("an address");
        let registration = Registration::new(
            format!("engine-of-{}", instance.http).as_str().into(),
            Incarnation(incarnation),
            instance.role,
            Mode::Push,
            instance.http.as_str().into(),
            "tcp://127.0.0.1:1".into(),
        );
        let mut host = StubHost { socket, registration };
        host.beat();
        host
    }

    fn beat(&mut self) {
        self.registration.sequence += 1;
        let frame = native::encode(&Frame::Register(self.registration.clone()));
        self.socket.send(frame, 0).expect("room for a message");
    }
}

fn state_of(workers: &[Value], instance: &StubInstance) -> Vec<String> {
    let here = workers.iter().filter(|it| it["http"] == instance.http);
    here.map(|it| it["state"].as_str().expect("text").to_owned()).collect()
}

async fn instances() -> (StubInstance, [StubInstance; 2]) {
    let decodes =
        [StubInstance::start(Role::Decode).await, StubInstance::start(Role::Decode).await];
    (StubInstance::start(Role::Prefill).await, decodes)
}

#[tokio::test]
async fn stream_goes_on_when_the_host_of_its_decode_begins_anew() {
    let router = TestRouter::start(&[]);
    let (prefill, [decode, _]) = instances().await;
    let _of_prefill = StubHost::start(&router, &prefill, 1);
    let host = StubHost::start(&router, &decode, 1);
    router.ready(2).await;
    let (tokens, fed) = feed();
    decode.always(fed);
    tokens.send(event("before")).unwrap();
    let mut answer = router.call(router.request("/v1/completions", streaming().to_string())).await;
    drop(host);
    router.until("cut off", |workers| state_of(workers, &decode) == ["disconnected"]).await;
    let _next = StubHost::start(&router, &decode, 2);
    router.until("anew", |workers| state_of(workers, &decode) == ["lost", "ready"]).await;
    tokens.send(event("after")).unwrap();
    for text in ["before", "after"] {
        let frame = timeout(PATIENCE, answer.body_mut().frame()).await.unwrap().unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), event(text));
    }
    drop(tokens);
    assert!(timeout(PATIENCE, answer.body_mut().frame()).await.unwrap().is_none());
    router.until("over", |workers| state_of(workers, &decode) == ["ready"]).await;
    assert_eq!(router.metric("kvferry_router_cancelled_legs_total").await, 0);
}

#[tokio::test]
async fn spare_takes_all_requests_while_a_host_is_gone() {
    // A leg without a host would fail its request.
    let router = TestRouter::start(&["--retries", "0"]);
    let (prefill, [decode, spare]) = instances().await;
    let _of_prefill = StubHost::start(&router, &prefill, 1);
    let (host, _of_spare) =
        (StubHost::start(&router, &decode, 1), StubHost::start(&router, &spare, 1));
    router.ready(3).await;
    decode.always(Act::Json(500, json!({"error": {"message": "no KV", "code": 500}})));
    drop(host);
    router.until("cut off", |workers| state_of(workers, &decode) == ["disconnected"]).await;
    for _ in 0..20 {
        assert_eq!(router.ask().await.status, 200);
    }
    assert_eq!((decode.seen().len(), spare.seen().len()), (0, 20));
    assert_eq!(router.metric("kvferry_router_hosts_lost_total").await, 1);
}

#[tokio::test]
async fn request_waits_for_the_next_host_of_the_only_decode() {
    let router = TestRouter::start(&["--queue-timeout", "0.1", "--host-wait", "600"]);
    let (prefill, [decode, _]) = instances().await;
    let _of_prefill = StubHost::start(&router, &prefill, 1);
    let host = StubHost::start(&router, &decode, 1);
    router.ready(2).await;
    drop(host);
    router.until("cut off", |workers| state_of(workers, &decode) == ["disconnected"]).await;
    let (answer, _next) = tokio::join!(router.ask(), async {
        // Its time in the queue is over several times.
        while router.metric("kvferry_router_waiting").await == 0 {}
        tokio::time::sleep(Duration::from_millis(400)).await;
        StubHost::start(&router, &decode, 2)
    });
    assert_eq!(answer.status, 200, "{answer:?}");
}

#[tokio::test]
async fn request_of_an_instance_that_is_late_ends_with_its_answer() {
    let router = TestRouter::start(&["--expiry", "1", "--host-wait", "600", "--retries", "0"]);
    let (prefill, [decode, _]) = instances().await;
    let go = Arc::new(Notify::new());
    decode.always(Act::After(go.clone(), Box::new(Act::Json(200, json!({"id": "x"})))));
    let mut hosts = [&prefill, &decode].map(|it| StubHost::start(&router, it, 1));
    let mut arrived = decode.arrived.subscribe();
    let (answer, ()) = tokio::join!(router.ask(), async {
        while *arrived.borrow_and_update() == 0 {
            hosts.iter_mut().for_each(StubHost::beat);
            let _again = timeout(Duration::from_millis(200), arrived.changed()).await;
        }
        // The hosts stand still from now on.
        router.until("late", |workers| state_of(workers, &decode) == ["late"]).await;
        go.notify_one();
    });
    assert_eq!(answer.status, 200, "{answer:?}");
    drop(hosts);
}
