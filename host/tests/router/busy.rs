//! Instances that answer busy: they stay in rotation, and clients learn when to retry.

use crate::backend::{Act, HeartbeatFields, StubInstance};
use crate::rig::{PATIENCE, TestRouter, completion};
use kvferry_engine::core::message::{Mode, Role};
use serde_json::json;
use std::sync::{Arc, Mutex};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Legs that the busy instance takes at a time.
const CAP: usize = 4;

/// Requests of a case.
const REQUESTS: usize = 40;

fn busy(status: u16, retry_after: &str) -> Act {
    let error = json!({"message": "the queue is full", "type": "X", "code": status});
    Act::Busy(status, retry_after.into(), json!({ "error": error }))
}

/// An instance that takes [`CAP`] legs at a time, and serves them all on command.
struct FullInstance {
    taken: Arc<Mutex<Vec<Arc<Notify>>>>,
    count: watch::Sender<usize>,
}

impl FullInstance {
    fn new(instance: &StubInstance, status: u16) -> FullInstance {
        let full = FullInstance { taken: Arc::default(), count: watch::Sender::new(0) };
        let (taken, count) = (full.taken.clone(), full.count.clone());
        let role = instance.role;
        instance.on(move |leg| {
            let mut taken = taken.lock().unwrap();
            if taken.len() == CAP {
                return Some(busy(status, "7"));
            }
            let served = Arc::new(Notify::new());
            taken.push(served.clone());
            count.send_replace(taken.len());
            Some(Act::After(served, Box::new(crate::backend::answer(role, leg))))
        });
        full
    }

    /// Waits until it has this many legs, and serves them.
    async fn serve(&self, legs: usize) {
        let mut count = self.count.subscribe();
        let is_there = count.wait_for(|count| *count == legs);
        timeout(PATIENCE, is_there).await.expect("the instance is used").unwrap();
        let mut taken = self.taken.lock().unwrap();
        taken.drain(..).for_each(|leg| leg.notify_one());
        self.count.send_replace(0);
    }
}

/// A router whose prefill or decode is full at [`CAP`] legs, with this many clients.
async fn stays_in_use(full: Role, status: u16, is_named: bool, clients: usize) {
    let what = format!("{full} named {is_named}, {status}, {clients} clients");
    let pair = [StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await];
    let at = usize::from(full == Role::Decode);
    let instance = FullInstance::new(&pair[at], status);
    let mut options = vec!["--queue-timeout", "3600"];
    if is_named {
        options.extend(["--prefill", &pair[0].http, "--decode", &pair[1].http]);
    }
    let mut router = TestRouter::start(&options);
    if !is_named {
        pair.iter().for_each(|it| router.register(it, &HeartbeatFields::of(Mode::Pull)));
    }
    router.ready(2).await;
    let router = Arc::new(router);
    let left = Arc::new(Mutex::new(REQUESTS));
    let mut asking = JoinSet::new();
    for _ in 0..clients {
        let (router, left) = (router.clone(), left.clone());
        asking.spawn(async move {
            let next = || {
                let mut left = left.lock().unwrap();
                let is_left = *left > 0;
                *left -= usize::from(is_left);
                is_left
            };
            while next() {
                let answer = router.post("/v1/completions", &completion()).await;
                assert_eq!(answer.status, 200, "{answer:?}");
            }
        });
    }
    for _ in 0..REQUESTS / CAP {
        instance.serve(CAP).await;
        let workers = router.workers().await;
        assert!(workers.iter().all(|it| it["state"] == "ready"), "{what}: {workers:?}");
    }
    while let Some(asked) = asking.join_next().await {
        asked.unwrap();
    }
    for counter in ["suspicions", "retries"] {
        let name = format!("kvferry_router_{counter}_total");
        assert_eq!(router.metric(&name).await, 0, "{what}: {name}");
    }
    let refused = router.metric("kvferry_router_busy_legs_total").await as usize;
    assert_eq!(pair[at].seen().len(), REQUESTS + refused, "{what}");
    // One for each client at first, then fewer and fewer.
    assert!(refused <= clients - CAP + 8, "{what}: {refused} legs were refused");
}

#[tokio::test]
async fn busy_instance_is_used_at_the_rate_that_it_takes() {
    for (status, is_named) in [(503, true), (429, true), (503, false), (429, false)] {
        for full in [Role::Prefill, Role::Decode] {
            for clients in [4, 5, 8] {
                stays_in_use(full, status, is_named, clients).await;
            }
        }
    }
}

#[tokio::test]
async fn client_gets_the_retry_after_of_the_instance() {
    let soon = std::time::SystemTime::now() + std::time::Duration::from_secs(3_000);
    let date = httpdate::fmt_http_date(soon);
    for (status, told, expected) in [
        (503, "7", 7..=7),
        (429, "0", 1..=1),
        (503, "999999", 3_600..=3_600),
        (503, &*date, 1_000..=3_000),
        // The router's own estimate.
        (429, "soon", 1..=60),
    ] {
        let pair =
            [StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await];
        pair[0].always(busy(status, told));
        let options = ["--queue-timeout", "0.05", "--prefill", &pair[0].http, "--decode"];
        let router = TestRouter::start(&[&options[..], &[&pair[1].http]].concat());
        router.ready(2).await;
        let answer = router.ask().await;
        assert_eq!((answer.status, &*answer.error()), (status, "the queue is full"), "{told}");
        let seconds: u64 = answer.header("retry-after").parse().unwrap();
        assert!(expected.contains(&seconds), "{told}: {seconds}");
    }
}

#[tokio::test]
async fn client_that_waited_for_room_in_vain_gets_the_estimate_of_the_router() {
    let pair = [StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await];
    pair[1].always(busy(503, "7"));
    let options = ["--queue-timeout", "0.05", "--prefill", &pair[0].http, "--decode"];
    let router = TestRouter::start(&[&options[..], &[&pair[1].http]].concat());
    router.ready(2).await;
    assert_eq!(router.ask().await.status, 503);
    let answer = router.ask().await;
    assert_eq!(answer.status, 503);
    assert!(answer.error().contains("are busy"), "{answer:?}");
    let seconds: u64 = answer.header("retry-after").parse().unwrap();
    assert!((1..=10).contains(&seconds), "the pause of the only decode: {seconds}");
}
