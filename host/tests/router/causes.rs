//! Why KV did not come, in the words of a decode's host, in the errors that clients get.

use crate::backend::{Act, BackendHeartbeat, HeartbeatFields, StubInstance, frame};
use crate::headers::log;
use crate::rig::{TestResponse, TestRouter, completion, streaming};
use kvferry_engine::core::error::{Failure, PeerViolation};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::layout::Mismatch;
use kvferry_engine::core::message::{DecodeLeg, FailedLeg, Mode, Registration, Role, ServedModels};
use kvferry_engine::core::prompt_hash::PromptHash;
use serde_json::{Value, json};
use std::pin::pin;
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tokio::sync::Notify;

fn worded(status: u16, message: &str) -> Value {
    json!({"error": {"message": message, "type": "T", "param": null, "code": status}})
}

/// What vLLM answers where KV did not come.
fn bare() -> Value {
    worded(500, "Internal server error")
}

fn native(instance: &StubInstance, name: &str, mode: Mode) -> Registration {
    Registration::new(
        name.into(),
        Incarnation(9),
        instance.role,
        mode,
        instance.http.as_str().into(),
        "tcp://127.0.0.1:6301".into(),
    )
}

/// A router with a log, and a native prefill and decode of a mode.
struct NativePair {
    router: TestRouter,
    p: StubInstance,
    d: StubInstance,
    /// A decode that has not registered yet.
    other: StubInstance,
    mode: Mode,
    /// Sequence of the last registration.
    told: AtomicU64,
    heartbeats: Mutex<Vec<BackendHeartbeat>>,
}

impl NativePair {
    async fn start(mode: Mode, options: &[&str]) -> NativePair {
        let p = StubInstance::start(Role::Prefill).await;
        let d = StubInstance::start(Role::Decode).await;
        let other = StubInstance::start(Role::Decode).await;
        let options = [&["--log-level", "warn"], options].concat();
        let mut router = TestRouter::start_with(&options, |command| {
            command.stderr(Stdio::piped());
        });
        for (instance, name) in [(&p, "p0"), (&d, "d0")] {
            let native = Some(native(instance, name, mode));
            router.register(instance, &HeartbeatFields { native, ..HeartbeatFields::of(mode) });
        }
        router.ready(2).await;
        NativePair {
            router,
            p,
            d,
            other,
            mode,
            told: AtomicU64::new(1),
            heartbeats: Mutex::default(),
        }
    }

    /// Has an instance tell why a leg failed, and waits until the router has heard it.
    async fn tell(&self, by: &str, leg: &DecodeLeg, failure: &Failure) {
        let sequence = self.told.fetch_add(1, Ordering::Relaxed) + 1;
        let instance = match by {
            "p0" => &self.p,
            "d0" => &self.d,
            _ => &self.other,
        };
        let DecodeLeg { key, sibling, .. } = leg.clone();
        let mark = format!("told-{sequence}");
        let model = completion()["model"].as_str().expect("it names one").into();
        let models = ServedModels { names: vec![model], adapters: vec![mark.as_str().into()] };
        let native = Some(Registration {
            sequence,
            models: Some(Arc::new(models)),
            failed: vec![FailedLeg { key, sibling, failure: failure.clone() }],
            ..native(instance, by, self.mode)
        });
        let form = HeartbeatFields { native, ..HeartbeatFields::of(self.mode) };
        let message = frame(instance.role, &instance.http, &form);
        let heartbeat = BackendHeartbeat::beat(&self.router.discovery, vec![vec![message]]);
        // The end of its connection would be the end of the instance's host.
        self.heartbeats.lock().unwrap().push(heartbeat);
        let is_marked = |it: &Value| it["models"].to_string().contains(&mark);
        self.router.until("it is heard", |all| all.iter().any(is_marked)).await;
    }

    /// The last leg of the decode.
    fn leg(&self) -> DecodeLeg {
        let leg = self.d.seen().pop().expect("a leg");
        serde_json::from_value(leg.params()["kvferry"].clone()).expect("a native leg")
    }

    /// The answer of a request whose leg the decode fails after `by` has told the cause.
    async fn ask(&self, by: &str, body: &Value, failure: &Failure) -> TestResponse {
        let go = Arc::new(Notify::new());
        let act = match body["stream"] == true {
            // A chat's stream opens with the role, before the error.
            true => Act::Stream(vec![
                format!(
                    "data: {}\n\n",
                    json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                ),
                format!("data: {}\n\n", bare()),
                "data: [DONE]\n\n".into(),
            ]),
            false => Act::Json(500, bare()),
        };
        self.d.always(Act::After(go.clone(), Box::new(act)));
        let arrival = self.d.seen().len() + 1;
        let told = async {
            self.d.arrival(arrival).await;
            self.tell(by, &self.leg(), failure).await;
            go.notify_one();
        };
        let mut answer = pin!(self.router.post("/v1/completions", body));
        tokio::select! {
            early = &mut answer => panic!("before the cause was told: {early:?}"),
            () = told => {}
        }
        answer.await
    }
}

#[tokio::test]
async fn cause_that_a_decode_told_is_in_the_error_and_in_the_log() {
    let violation = PeerViolation {
        peer: "10.1.2.3:6301".into(),
        frame: "Grant".into(),
        rule: "\u{1b}[31mblocks are missing".into(),
    };
    let mismatch = Mismatch("block size of group 0: source has 16, receiver has 32".into());
    for mode in [Mode::Push, Mode::Pull] {
        let pair = NativePair::start(mode, &["--retries", "0"]).await;
        for (body, failure, says) in [
            (completion(), Failure::Mismatch(mismatch.clone()), "source has 16, receiver has 32"),
            (streaming(), Failure::PeerSilent, "(peer-silent): peer does not answer; check that"),
            (completion(), Failure::Violation(violation.clone()), "peer (address) broke the"),
        ] {
            let answer = pair.ask("d0", &body, &failure).await;
            assert_eq!(answer.status, 500, "{answer:?}");
            assert!(answer.error().contains(says), "{answer:?}");
            let shown = !answer.body.contains("10.1.2.3") && !answer.body.contains('\u{1b}');
            assert!(shown && !answer.body.contains("127.0.0.1"), "{answer:?}");
        }
        let lines = log(pair.router);
        for part in ["receiver has 32", "peer does not answer", "10.1.2.3:6301"] {
            let told = lines.iter().filter(|it| it.contains("leg failed") && it.contains(part));
            assert_eq!(told.count(), 1, "{part}: {lines:?}");
        }
    }
}

#[tokio::test]
async fn only_the_decode_of_a_leg_tells_its_cause() {
    let pair = NativePair::start(Mode::Pull, &["--retries", "0"]).await;
    pair.d.always(Act::Json(500, worded(500, "words of its own")));
    assert_eq!(pair.router.ask().await.error(), "words of its own");
    let answer = pair.ask("p0", &completion(), &Failure::PeerSilent).await;
    assert!(answer.error().contains("gave none within 300 ms"), "{answer:?}");
    // Another decode names the leg.
    let answer = pair.ask("d1", &completion(), &Failure::PeerSilent).await;
    assert!(answer.error().contains("status 500 and no reason"), "{answer:?}");
    assert_eq!(answer.status, 500);
}

/// On a busy machine the cause may come too late, but not each time.
#[tokio::test]
async fn error_without_a_reason_waits_for_the_cause_of_its_decode() {
    let pair = NativePair::start(Mode::Pull, &["--retries", "0"]).await;
    pair.d.always(Act::Json(500, bare()));
    let mut errors = Vec::new();
    for _ in 0..20 {
        let arrival = pair.d.seen().len() + 1;
        let told = async {
            pair.d.arrival(arrival).await;
            pair.tell("d0", &pair.leg(), &Failure::Stalled).await;
        };
        errors.push(tokio::join!(pair.router.ask(), told).0.error());
        if errors.last().is_some_and(|it| it.contains("(stalled)")) {
            return;
        }
    }
    panic!("{errors:?}");
}

#[tokio::test]
async fn prompts_that_differ_are_not_tried_again() {
    let pair = NativePair::start(Mode::Push, &[]).await;
    let [decode, prefill] = [[7; 4], [8; 4]].map(|tokens| PromptHash::of_tokens(&tokens));
    let failure = Failure::PromptMismatch { decode, prefill };
    let answer = pair.ask("d0", &completion(), &failure).await;
    assert_eq!(pair.d.seen().len(), 1);
    for part in [decode.to_string(), prefill.to_string(), "send the prompt as token ids".into()] {
        assert!(answer.error().contains(&part), "{part}: {answer:?}");
    }
}

#[tokio::test]
async fn request_that_an_instance_refuses_is_no_failed_leg() {
    let pair = NativePair::start(Mode::Pull, &[]).await;
    for (status, refuses) in [(400, &pair.p), (422, &pair.d)] {
        refuses.always(Act::Json(status, worded(status, "max_tokens is wrong")));
        let answer = pair.router.ask().await;
        assert_eq!((answer.status, &*answer.error()), (status, "max_tokens is wrong"));
        refuses.on(|_| None);
    }
    let legs = |role: &str, outcome: &str| {
        format!("kvferry_router_legs_total{{role=\"{role}\",outcome=\"{outcome}\"}}")
    };
    for role in ["prefill", "decode"] {
        assert_eq!(pair.router.metric(&legs(role, "refused")).await, 1, "{role}");
        assert_eq!(pair.router.metric(&legs(role, "failed")).await, 0, "{role}");
    }
    let lines = log(pair.router);
    assert!(lines.iter().all(|it| !it.contains("leg failed")), "{lines:?}");
}
