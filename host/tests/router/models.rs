//! Requests go to instances that serve their model.

use crate::backend::{HeartbeatFields, StubInstance, model_list};
use crate::rig::{PATIENCE, TestRouter, completion};
use kvferry_engine::core::ids::Incarnation;
use kvferry_engine::core::message::{Mode, Registration, Role, ServedModels};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Instant;

/// A prefill and a decode that list these models.
async fn pair_of(models: &[&str]) -> [StubInstance; 2] {
    let pair = [StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await];
    pair.iter().for_each(|it| *it.models.lock().unwrap() = model_list(models));
    pair
}

fn ask_for(model: &str) -> Value {
    let mut body = completion();
    body["model"] = model.into();
    body
}

fn ids(list: &Value) -> Vec<String> {
    let cards = list["data"].as_array().unwrap_or_else(|| panic!("{list}"));
    cards.iter().map(|card| card["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn a_request_goes_to_a_pair_that_serves_its_model() {
    let (one, two) = (pair_of(&["a", "a-lora"]).await, pair_of(&["b"]).await);
    // Who registers with MoRIIO says nothing of models, nor does who is named.
    let named = ["--prefill", &one[0].http, "--decode", &one[1].http].map(String::from);
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let mut router = TestRouter::start(&named);
    two.iter().for_each(|it| router.register(it, &HeartbeatFields::of(Mode::Pull)));
    router.ready(4).await;
    for (nth, model) in ["a", "b", "a-lora", "b", "b"].iter().enumerate() {
        assert_eq!(router.post("/v1/completions", &ask_for(model)).await.status, 200, "{nth}");
    }
    for (pair, expected) in [(&one, &["a", "a-lora"][..]), (&two, &["b", "b", "b"])] {
        for instance in pair {
            let legs = instance.seen();
            let models = legs.iter().map(|leg| leg.body["model"].clone());
            assert_eq!(models.collect::<Vec<_>>(), expected, "{:?}", instance.role);
        }
    }
    let refused = router.post("/v1/completions", &ask_for("c")).await;
    assert_eq!(refused.status, 404);
    let error = &refused.json()["error"];
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("`c`") && message.contains("a, a-lora, b"), "{message}");
    assert_eq!(router.metric("kvferry_router_unknown_models_total").await, 1);
    // In the order in which the router met them.
    let mut listed = ids(&router.get("/v1/models").await.json());
    listed.sort();
    assert_eq!(listed, ["a", "a-lora", "b"]);
    let mut all = router.workers().await;
    all.sort_by_key(|it| it["models"].to_string());
    assert_eq!(all[0]["models"], json!(["a", "a-lora"]));
    // A request without a model goes anywhere.
    let mut any = completion();
    any.as_object_mut().unwrap().remove("model");
    assert_eq!(router.post("/v1/completions", &any).await.status, 200);
}

#[tokio::test]
async fn model_that_only_decodes_serve_is_refused_with_the_role_that_lacks_it() {
    let pair = [StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await];
    for (instance, models) in pair.iter().zip([&["a"][..], &["a", "lora"]]) {
        *instance.models.lock().unwrap() = model_list(models);
    }
    // A request that waited would time out after an hour.
    let named = ["--prefill", &pair[0].http, "--decode", &pair[1].http, "--queue-timeout", "3600"];
    let router = TestRouter::start(&named);
    router.ready(2).await;
    let refused = router.post("/v1/completions", &ask_for("lora")).await;
    assert_eq!(refused.status, 404);
    let error = &refused.json()["error"];
    assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("`lora`, and no prefill instance does"), "{message}");
    assert_eq!(router.post("/v1/completions", &ask_for("a")).await.status, 200);
}

#[tokio::test]
async fn what_an_instance_lists_later_counts_from_then_on() {
    let pair = pair_of(&["a"]).await;
    let named = ["--prefill", &pair[0].http, "--decode", &pair[1].http, "--models-period", "0.05"]
        .map(String::from);
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let router = TestRouter::start(&named);
    router.ready(2).await;
    assert_eq!(router.post("/v1/completions", &ask_for("lora")).await.status, 404);
    // What is no list changes nothing.
    pair.iter().for_each(|it| *it.models.lock().unwrap() = json!({"data": "none"}));
    assert_eq!(router.post("/v1/completions", &ask_for("a")).await.status, 200);
    pair.iter().for_each(|it| *it.models.lock().unwrap() = model_list(&["a", "lora"]));
    let start = Instant::now();
    while router.post("/v1/completions", &ask_for("lora")).await.status != 200 {
        assert!(start.elapsed() < PATIENCE, "the adapter is not found");
    }
}

#[tokio::test]
async fn instances_whose_models_are_not_known_take_any() {
    for (list, options) in [
        (json!({}), &[][..]),
        (model_list(&[]), &[]),
        (json!({"data": [{"id": "a"}], "any_model": true}), &[]),
        (model_list(&["a"]), &["--models-period", "0"]),
    ] {
        let pair = pair_of(&[]).await;
        pair.iter().for_each(|it| *it.models.lock().unwrap() = list.clone());
        let named = ["--prefill", &pair[0].http, "--decode", &pair[1].http];
        let router = TestRouter::start(&[&named[..], options].concat());
        router.ready(2).await;
        assert_eq!(router.post("/v1/completions", &ask_for("c")).await.status, 200, "{list}");
        assert!(router.workers().await.iter().all(|it| it["models"].is_null()), "{list}");
    }
}

#[tokio::test]
async fn what_a_registration_says_is_not_asked_for() {
    let pair = pair_of(&["other"]).await;
    let mut router = TestRouter::start(&[]);
    for (instance, name) in pair.iter().zip(["p0", "d0"]) {
        let models = ServedModels { names: vec!["a".into()], adapters: vec!["lora".into()] };
        let native = Registration {
            models: Some(Arc::new(models)),
            ..Registration::new(
                name.into(),
                Incarnation(9),
                instance.role,
                Mode::Pull,
                instance.http.as_str().into(),
                "tcp://127.0.0.1:6301".into(),
            )
        };
        let form = HeartbeatFields { native: Some(native), ..HeartbeatFields::of(Mode::Pull) };
        router.register(instance, &form);
    }
    router.ready(2).await;
    for (model, status) in [("a", 200), ("lora", 200), ("other", 404)] {
        assert_eq!(router.post("/v1/completions", &ask_for(model)).await.status, status, "{model}");
    }
    // In the words of who lists it; what nobody lists is named all the same.
    assert_eq!(ids(&router.get("/v1/models").await.json()), ["other", "a", "lora"]);
}
