//! B5, B6, B9: what becomes of requests when instances fail. The cases are the recorded ones; the
//! verdicts are ours.

use crate::backend::{Act, StubInstance};
use crate::rig::{TestResponse, TestRouter, completion, fleet, pair, streaming};
use kvferry_engine::core::message::Mode;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::task::JoinSet;

fn forced(status: u16, who: &str) -> Act {
    let message = format!("forced {status} by <{who}>");
    Act::Json(status, json!({"object": "error", "message": message, "type": "X", "code": status}))
}

/// The acts of both instances in a recorded case; none is the usual. And options of the router.
fn staged(case: &str) -> (Option<Act>, Option<Act>, Vec<&'static str>) {
    let broken = || Act::Broken(vec!["data: {\"choices\": [{\"index\": 0}]}\n\n".into()]);
    let no_params = || Act::Json(200, json!({"id": "x", "choices": []}));
    let (first, rest) = case.split_once(' ').unwrap();
    let (who, is_prefill) = if first == "prefill" { ("P", true) } else { ("D", false) };
    // Of legs without an answer; an answer that comes too late is one of them.
    let quick = vec!["--answer-timeout", "0.2"];
    let (act, options) = match rest {
        "answers 500, decode takes 1 s" => {
            return (Some(forced(500, "P")), None, vec![]);
        }
        "answers 500, prefill takes 1 s" => return (None, Some(forced(500, "D")), vec![]),
        "cuts the connection" | "cuts the connection before headers" => (Act::Cut, vec![]),
        "cuts mid-stream" => (broken(), vec![]),
        "200 with a non-JSON body" => (Act::Text(200, "not json"), vec![]),
        "200 without kv_transfer_params" => (no_params(), vec![]),
        "slower than --request-timeout-secs 2" => (Act::Never, quick),
        "stream longer than --request-timeout-secs 2" => (Act::Never, quick),
        "refuses connections, still heartbeating" => (Act::Never, vec![]),
        answers => {
            let status = answers.strip_prefix("answers ").unwrap_or_else(|| panic!("{case}"));
            (forced(status.parse().unwrap(), who), vec![])
        }
    };
    if is_prefill { (Some(act), None, options) } else { (None, Some(act), options) }
}

/// Our verdict: the status, and what the error says. `None` for an answer as usual.
fn verdict(case: &str, mode: Mode) -> Option<(u16, &'static str)> {
    let read = mode == Mode::Pull;
    match case {
        "prefill answers 400" => Some((400, "forced 400 by <P>")),
        "prefill answers 404" => Some((404, "forced 404 by <P>")),
        "prefill answers 429" => Some((429, "forced 429 by <P>")),
        "prefill answers 500" | "prefill answers 500, decode takes 1 s" => {
            Some((500, "forced 500 by <P>"))
        }
        "prefill answers 503" => Some((503, "forced 503 by <P>")),
        "decode answers 400" => Some((400, "forced 400 by <D>")),
        "decode answers 429" => Some((429, "forced 429 by <D>")),
        "decode answers 500" | "decode answers 500, prefill takes 1 s" => {
            Some((500, "forced 500 by <D>"))
        }
        "decode answers 503" => Some((503, "forced 503 by <D>")),
        "prefill 200 with a non-JSON body" if read => Some((502, "not a JSON object")),
        "prefill 200 with a non-JSON body" | "prefill 200 without kv_transfer_params" => None,
        "decode 200 with a non-JSON body" => None,
        // A decode that has answered had its KV.
        "prefill slower than --request-timeout-secs 2" if !read => None,
        "prefill slower than --request-timeout-secs 2"
        | "decode slower than --request-timeout-secs 2" => Some((502, "no answer within")),
        "decode stream longer than --request-timeout-secs 2" => Some((502, "no answer within")),
        _ if case.contains("refuses connections") => Some((502, "Connection refused")),
        _ if case.contains("cuts the connection") => Some((502, "connection closed")),
        "decode cuts mid-stream" => Some((200, "broke off")),
        _ => panic!("no verdict for {case}"),
    }
}

async fn play(case: String, mode: Mode) {
    let (on_p, on_d, mut options) = staged(&case);
    if verdict(&case, mode).is_none() {
        // The answer of the other leg is to be in time whatever time it takes.
        options.clear();
    }
    let (router, mut p, mut d) = pair(mode, &options).await;
    if case.contains("refuses") {
        if case.starts_with("prefill") { p.die() } else { d.die() }
    } else {
        on_p.into_iter().for_each(|act| p.always(act));
        on_d.into_iter().for_each(|act| d.always(act));
    }
    if mode == Mode::Push && case.starts_with("prefill") && verdict(&case, mode).is_some() {
        // As vLLM's, which waits for KV that does not come.
        d.always(Act::Never);
    }
    let body = if case.contains("stream") { streaming() } else { completion() };
    let answer = router.post("/v1/completions", &body).await;
    judge(&case, mode, &answer);
    let (ps, ds) = (p.seen().len(), d.seen().len());
    match &*case {
        // Wrong requests are not tried again; others are, twice.
        "prefill answers 400" | "prefill answers 404" => assert_eq!(ps, 1, "{case}"),
        "decode answers 400" => assert_eq!((ps, ds), (1, 1), "{case}"),
        "prefill answers 500" => assert_eq!(ps, 3, "{case}"),
        "decode answers 500" => assert_eq!(ds, 3, "{case}"),
        _ => {}
    }
    if mode == Mode::Pull && verdict(&case, mode).is_some() && case.starts_with("prefill") {
        assert_eq!(ds, 0, "{case}: nothing was sent to the decode");
    }
    if case == "prefill 200 without kv_transfer_params" && mode == Mode::Pull {
        assert_eq!(d.seen()[0].body.get("kv_transfer_params"), None);
        assert_eq!(router.metric("kvferry_router_unread_prefills_total").await, 1);
    }
    router.until(&case, |all| all.iter().all(|it| it["in_flight_legs"] == 0)).await;
}

fn judge(case: &str, mode: Mode, answer: &TestResponse) {
    match verdict(case, mode) {
        None if case.starts_with("decode 200") => assert_eq!(answer.body, "not json", "{case}"),
        None => {
            assert_eq!(answer.status, 200, "{case}: {answer:?}");
            assert_eq!(answer.json()["choices"][0]["text"], "from D", "{case}");
        }
        // B9: the stream had begun, so its last event says what happened.
        Some((200, says)) => {
            let events = answer.events();
            let [.., error, done] = &events[..] else { panic!("{events:?}") };
            assert!(error["error"]["message"].as_str().unwrap().contains(says), "{error}");
            assert_eq!(done, "[DONE]");
        }
        Some((status, says)) => {
            assert_eq!(answer.status, status, "{case} {mode}: {answer:?}");
            assert_eq!(answer.headers["content-type"].to_str().unwrap(), "application/json");
            match answer.json().get("error") {
                Some(_) => assert!(answer.error().contains(says), "{case}: {answer:?}"),
                // The instance's own error object.
                None => assert_eq!(answer.json()["message"], says, "{case}"),
            }
        }
    }
}

#[tokio::test]
async fn recorded_failures_have_our_verdicts() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/router/errors.json");
    let recorded: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut cases = BTreeSet::new();
    for case in recorded["cases"].as_array().unwrap() {
        let name = case["case"].as_str().unwrap();
        match case["transfer_mode"].as_str() {
            Some("READ") => _ = cases.insert((name.to_owned(), Mode::Pull)),
            Some(_) => _ = cases.insert((name.to_owned(), Mode::Push)),
            None => assert_eq!(name, "no instance registered"),
        }
    }
    assert_eq!(cases.len(), 44);
    let alone = TestRouter::start(&["--queue-timeout", "0.001"]).ask().await;
    assert_eq!(alone.status, 503);
    assert!(alone.error().contains("no prefill and decode instance"), "{alone:?}");
    let mut all = JoinSet::new();
    for (case, mode) in cases {
        all.spawn(play(case, mode));
        // A few at a time.
        if all.len() == 8 {
            all.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(played) = all.join_next().await {
        played.unwrap();
    }
}

// B5: when one leg fails the other is given up at once.

#[tokio::test]
async fn a_failed_leg_ends_the_other_at_once() {
    let (router, p, d) = pair(Mode::Push, &["--retries", "0"]).await;
    for (failing, other) in [(&p, &d), (&d, &p)] {
        let go = Arc::new(Notify::new());
        failing.always(Act::After(go.clone(), Box::new(forced(500, "X"))));
        other.always(Act::Never);
        let (before, others) = (failing.seen().len(), other.seen().len());
        let both_are_there = async {
            failing.arrival(before + 1).await;
            other.arrival(others + 1).await;
            go.notify_one();
        };
        let (answer, ()) = tokio::join!(router.ask(), both_are_there);
        assert_eq!(answer.status, 500);
        other.given_up(1).await;
    }
}

// B6: another instance, a new transfer.

#[tokio::test]
async fn requests_move_from_a_dead_prefill_to_another() {
    for mode in [Mode::Push, Mode::Pull] {
        let (router, mut ps, ds) = fleet(mode, 2, 1, &[]).await;
        ps[0].die();
        for _ in 0..12 {
            assert_eq!(router.ask().await.status, 200);
        }
        assert_eq!(ps[1].seen().len(), 12);
        // Each attempt has ids of its own.
        let legs = ds[0].seen();
        let ids: BTreeSet<_> =
            legs.iter().map(|leg| leg.header("x-request-id").to_owned()).collect();
        let transfers: BTreeSet<_> =
            legs.iter().map(|leg| leg.params()["transfer_id"].to_string()).collect();
        assert_eq!((ids.len(), transfers.len()), (legs.len(), legs.len()));
        assert!(router.metric("kvferry_router_retries_total").await >= 1);
        let suspect = router.metric("kvferry_router_suspicions_total").await;
        assert!(suspect >= 1, "the dead prefill became suspect");
    }
}

#[tokio::test]
async fn a_leg_that_came_to_the_other_role_goes_to_another_instance() {
    let told = || Act::Json(421, json!({"error": {"message": "m", "type": "t", "code": 421}}));
    let (router, ps, ds) = fleet(Mode::Pull, 2, 2, &[]).await;
    ps[0].always(told());
    ds[1].always(told());
    for _ in 0..12 {
        assert_eq!(router.ask().await.status, 200);
    }
    assert!(!ps[0].seen().is_empty() && !ds[1].seen().is_empty());
    let (router, p, _d) = pair(Mode::Pull, &[]).await;
    p.always(told());
    let answer = router.ask().await;
    assert_eq!((answer.status, &*answer.error()), (502, "the instance takes no such leg: m"));
}

#[tokio::test]
async fn tries_are_bounded() {
    let (router, p, d) = pair(Mode::Push, &["--retries", "4"]).await;
    d.always(Act::Never);
    p.always(Act::Json(500, json!({"error": {"message": "m", "type": "t", "code": 500}})));
    let answer = router.ask().await;
    assert_eq!((answer.status, answer.error().as_str()), (500, "m"));
    // Three strikes make it suspect between the tries.
    assert!((3..=5).contains(&p.seen().len()), "{}", p.seen().len());
}

#[tokio::test]
async fn failures_are_remembered_until_a_request_is_served() {
    for mode in [Mode::Push, Mode::Pull] {
        let (router, p, d) = pair(mode, &["--retries", "0"]).await;
        let remembered = || router.metric("kvferry_router_failures_remembered");
        for failing in [&p, &d] {
            failing.always(forced(500, "X"));
            assert_eq!(router.ask().await.status, 500);
            assert!(remembered().await > 0, "{mode} {:?}", failing.role);
            failing.on(|_| None);
            assert_eq!(router.ask().await.status, 200);
            assert_eq!(remembered().await, 0, "{mode} {:?}", failing.role);
        }
    }
}

async fn dies_in_request(router: &TestRouter, dying: &mut StubInstance, on: usize) -> TestResponse {
    let asked = router.ask();
    let die = async {
        dying.arrival(on).await;
        dying.die();
    };
    tokio::join!(asked, die).0
}

/// As `kill -9`: all connections break.
#[tokio::test]
async fn a_prefill_that_dies_in_a_request_is_replaced_or_named() {
    for mode in [Mode::Push, Mode::Pull] {
        let (router, mut ps, ds) = fleet(mode, 2, 1, &[]).await;
        // A decode waits for its KV, as vLLM's does.
        if mode == Mode::Push {
            let first = std::sync::atomic::AtomicBool::new(true);
            let waits = move || first.swap(false, std::sync::atomic::Ordering::SeqCst);
            ds[0].on(move |_| waits().then_some(Act::Never));
        }
        for p in &ps {
            p.always(Act::Never);
        }
        let (answer, ()) = tokio::join!(router.ask(), async {
            let chosen = tokio::select! {
                () = ps[0].arrival(1) => 0,
                () = ps[1].arrival(1) => 1,
            };
            if mode == Mode::Push {
                // Otherwise it may be the leg of the second try that waits.
                ds[0].arrival(1).await;
            }
            ps[1 - chosen].on(|_| None);
            ps[chosen].die();
        });
        assert_eq!(answer.status, 200, "{mode}: {answer:?}");
    }
    let (router, mut p, d) = pair(Mode::Push, &[]).await;
    p.always(Act::Never);
    d.always(Act::Never);
    let answer = dies_in_request(&router, &mut p, 1).await;
    assert_eq!(answer.status, 502);
    let error = answer.error();
    assert!(error.starts_with("the prefill instance: ") && !error.contains(&p.http), "{error}");
}
