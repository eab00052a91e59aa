//! B13: several samples and several prompts are transfers of their own.

use crate::backend::Act;
use crate::rig::{fleet, pair};
use kvferry_engine::core::message::Mode;
use serde_json::{Value, json};
use std::collections::BTreeSet;

#[tokio::test]
async fn samples_are_transfers_of_their_own() {
    for mode in [Mode::Push, Mode::Pull] {
        let (router, ps, ds) = fleet(mode, 2, 2, &[]).await;
        let body =
            json!({"model": "m", "prompt": ["one", "two"], "n": 2, "seed": 40, "max_tokens": 5});
        let answer = router.post("/v1/completions", &body).await.json();
        let choices = answer["choices"].as_array().unwrap();
        let indices: Vec<_> = choices.iter().map(|it| it["index"].as_u64().unwrap()).collect();
        assert_eq!(indices, [0, 1, 2, 3]);
        assert_eq!(
            answer["usage"],
            json!({"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10})
        );
        for side in [&ps, &ds] {
            let legs: Vec<_> = side.iter().flat_map(|it| it.seen()).collect();
            assert_eq!(legs.len(), 4);
            let ids: BTreeSet<_> =
                legs.iter().map(|it| it.params()["transfer_id"].to_string()).collect();
            let names: BTreeSet<_> =
                legs.iter().map(|it| it.header("x-request-id").to_owned()).collect();
            assert_eq!((ids.len(), names.len()), (4, 4));
            let mut asked: Vec<_> = legs
                .iter()
                .map(|it| (it.body["prompt"].to_string(), it.body["seed"].as_u64()))
                .collect();
            asked.sort();
            let expected = [("\"one\"", 40), ("\"one\"", 41), ("\"two\"", 40), ("\"two\"", 41)];
            assert_eq!(asked, expected.map(|(prompt, seed)| (prompt.to_owned(), Some(seed))));
            assert!(legs.iter().all(|it| it.body["n"] == 1));
        }
    }
}

#[tokio::test]
async fn streams_of_samples_are_one_stream() {
    let (router, _p, d) = pair(Mode::Push, &[]).await;
    let body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 3,
        "stream": true, "stream_options": {"include_usage": true}});
    let answer = router.post("/v1/chat/completions", &body).await;
    let events = answer.events();
    assert_eq!(events.len(), 3 * 3 + 2, "{events:?}");
    let ids: BTreeSet<_> = events[..10].iter().map(|it| it["id"].to_string()).collect();
    assert_eq!(ids.len(), 1);
    for sample in 0..3 {
        let own = events.iter().filter(|it| it["choices"][0]["index"] == sample);
        let texts: Vec<&Value> = own.map(|it| &it["choices"][0]["text"]).collect();
        assert_eq!(texts, ["t0", "t1", "t2"]);
    }
    assert_eq!(
        events[9]["usage"],
        json!({"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12})
    );
    assert_eq!(events[10], "[DONE]");
    assert_eq!(d.seen().len(), 3);
}

#[tokio::test]
async fn one_sample_that_fails_ends_the_answer_with_its_error() {
    let (router, _p, d) = pair(Mode::Push, &["--retries", "0"]).await;
    let bad = |leg: &crate::backend::ReceivedLeg| {
        let error = json!({"error": {"message": "no", "type": "t", "code": 400}});
        (leg.body["prompt"] == "bad").then(|| Act::Json(400, error))
    };
    d.on(bad);
    let body = json!({"model": "m", "prompt": ["good", "bad"]});
    let answer = router.post("/v1/completions", &body).await;
    assert_eq!((answer.status, answer.error().as_str()), (400, "no"));
    d.on(|leg| {
        Some(if leg.body["prompt"] == "bad" {
            Act::Text(200, "text")
        } else {
            Act::Json(200, json!({}))
        })
    });
    let answer = router.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 502);
    assert!(answer.error().contains("not a JSON object"), "{answer:?}");
}

#[tokio::test]
async fn what_cannot_be_merged_is_refused() {
    let (router, p, _d) = pair(Mode::Push, &["--parts-max", "4"]).await;
    for (path, body, param) in [
        ("/v1/completions", json!({"prompt": "a", "n": 5}), "n"),
        ("/v1/completions", json!({"prompt": "a", "n": 2, "best_of": 3}), "best_of"),
        ("/v1/completions", json!({"prompt": "a", "use_beam_search": true}), "use_beam_search"),
        ("/v1/responses", json!({"input": "a", "n": 2}), "n"),
        (
            "/inference/v1/generate",
            json!({"token_ids": [1], "sampling_params": {"n": 2}}),
            "sampling_params.n",
        ),
    ] {
        let answer = router.post(path, &body).await;
        assert_eq!(answer.status, 400, "{body}");
        assert_eq!(answer.json()["error"]["param"], param);
        assert!(!answer.error().is_empty());
    }
    assert!(p.seen().is_empty());
}
