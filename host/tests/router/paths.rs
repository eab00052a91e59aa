//! Paths that are passed to instances unchanged.

use crate::backend::{Act, StubInstance, model_list};
use crate::rig::{TestRouter, pair};
use http_body_util::Full;
use hyper::Request;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// A router with named prefills and decodes.
async fn named(prefills: usize, decodes: usize) -> (TestRouter, Vec<StubInstance>) {
    let mut instances = Vec::new();
    for (role, count) in [(Role::Prefill, prefills), (Role::Decode, decodes)] {
        for _ in 0..count {
            instances.push(StubInstance::start(role).await);
        }
    }
    let router = start(&instances, &[]);
    router.ready(instances.len()).await;
    (router, instances)
}

fn start(instances: &[StubInstance], more: &[&str]) -> TestRouter {
    let options = instances.iter().flat_map(|it| match it.role {
        Role::Prefill => ["--prefill", &*it.http],
        Role::Decode => ["--decode", &*it.http],
    });
    TestRouter::start(&options.chain(more.iter().copied()).collect::<Vec<_>>())
}

/// Paths of all legs that an instance received.
fn paths(instance: &StubInstance) -> Vec<String> {
    instance.seen().into_iter().map(|leg| leg.path).collect()
}

#[tokio::test]
async fn paths_of_the_table_reach_one_instance_as_they_are() {
    let (router, all) = named(1, 1).await;
    let d = &all[1];
    d.on(|leg| {
        let answer = json!({"path": leg.path, "model": leg.body["model"]});
        let head = vec![("set-cookie", "a=b"), ("retry-after", "7")];
        Some(Act::Head(head, Box::new(Act::Json(207, answer))))
    });
    let posted = [
        "/tokenize",
        "/detokenize",
        "/v1/chat/completions/batch",
        "/v1/messages/count_tokens",
        "/v1/embeddings?x=1",
        "/pooling",
        "/score",
        "/v1/rerank",
    ];
    for path in posted {
        let request = router.request(path, json!({"model": "m", "x": 1.50}).to_string());
        let headers = [("x-request-id", "client-1"), ("x-session-id", "s"), ("cookie", "a=b")];
        let answer = router.ask_with(request, &headers).await;
        assert_eq!((answer.status, &answer.json()["path"]), (207, &json!(path)), "{answer:?}");
        assert_eq!([answer.header("set-cookie"), answer.header("retry-after")], ["", "7"]);
        assert_eq!(answer.header("x-request-id"), "client-1");
        let leg = d.seen().pop().expect("a leg");
        let names = ["x-request-id", "x-session-id", "cookie", "content-type"];
        let expected = ["client-1", "s", "", "application/json"];
        assert_eq!(names.map(|name| leg.header(name)), expected);
        assert_eq!(leg.body, json!({"model": "m", "x": 1.5}));
    }
    for path in ["/version", "/ping", "/load"] {
        let answer = router.get_of_client(path).await;
        assert_eq!((answer.status, &answer.json()["path"]), (207, &json!(path)));
    }
    assert!(all[0].seen().is_empty(), "decodes come first");
    let counted = "kvferry_router_requests_total{path=\"/tokenize\",code=\"207\"}";
    assert_eq!(router.metric(counted).await, 1);
    assert_eq!(router.metric("kvferry_router_in_flight").await, 0);
}

#[tokio::test]
async fn what_is_not_in_the_table_is_404_and_names_the_path() {
    let (router, p, d) = pair(Mode::Push, &[]).await;
    for path in
        ["/v1/fine_tuning/jobs", "/collective_rpc", "/server_info", "/v1/models/m", "/sleep"]
    {
        let answer = router.post(path, &json!({})).await;
        assert_eq!(answer.status, 404);
        assert!(answer.error().contains(path), "{answer:?}");
    }
    let answer = router.post("/sleep", &json!({})).await;
    assert!(answer.error().contains("--admin-addr"), "{answer:?}");
    let answer = router.get_of_client("/tokenize").await;
    assert_eq!(answer.status, 405, "{answer:?}");
    assert!(p.seen().is_empty() && d.seen().is_empty());
    // Clients cannot create labels of metrics.
    let page = router.get("/metrics").await.body;
    assert!(!page.contains("fine_tuning"), "{page}");
}

#[tokio::test]
async fn a_passed_request_goes_to_an_instance_that_serves_its_model() {
    let mut all = Vec::new();
    for model in ["a", "b"] {
        let instance = StubInstance::start(Role::Decode).await;
        *instance.models.lock().unwrap() = model_list(&[model]);
        all.push(instance);
    }
    let router = start(&all, &[]);
    router.ready(2).await;
    for model in ["b", "a", "b"] {
        let answer = router.post("/v1/embeddings", &json!({"model": model, "input": "x"})).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    assert_eq!(all.iter().map(|it| it.seen().len()).collect::<Vec<_>>(), [1, 2]);
    let answer = router.post("/v1/embeddings", &json!({"model": "c"})).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (404, &json!("model_not_found")));
    // Of two suitable instances, the one that does not answer is skipped.
    all[0].die();
    while TcpStream::connect(&all[0].http).await.is_ok() {}
    for _ in 0..2 {
        let answer = router.post("/tokenize", &json!({"prompt": "x"})).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    let nobody = TestRouter::start(&[]);
    assert_eq!(nobody.post("/tokenize", &json!({})).await.status, 503);
}

#[tokio::test]
async fn transfer_parameters_in_passed_bodies_reach_no_instance() {
    let (router, all) = named(1, 1).await;
    let evil = json!({"do_remote_prefill": true, "remote_host": "10.0.0.1"});
    let body = json!({"model": "m", "kv_transfer_params": evil, "request_id": "x_prefill_addr_y",
        "vllm_xargs": {"kv_transfer_params": evil, "mine": 1}});
    let answer = router.post("/v1/chat/completions/batch", &body).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let expected = json!({"model": "m", "vllm_xargs": {"mine": 1}});
    assert_eq!(all[1].seen()[0].body, expected);
}

#[tokio::test]
async fn passed_request_that_an_instance_may_have_got_goes_to_no_other() {
    let (router, all) = named(0, 2).await;
    all.iter().for_each(|it| it.always(Act::Cut));
    let sent = || all.iter().map(|it| it.seen().len()).sum::<usize>();
    let answer = router.post("/tokenize", &json!({"prompt": "x"})).await;
    assert_eq!((answer.status, sent()), (502, 1), "{answer:?}");
    let answer = router.get_of_client("/version").await;
    assert_eq!((answer.status, sent()), (502, 3), "{answer:?}");
}

#[tokio::test]
async fn passed_requests_have_the_limits_of_others() {
    let decode = [StubInstance::start(Role::Decode).await];
    let router = start(&decode, &["--open-max", "1", "--body-max", "100"]);
    router.ready(1).await;
    let long = json!({"input": "x".repeat(100)});
    assert_eq!(router.post("/v1/embeddings", &long).await.status, 413);
    decode[0].always(Act::Never);
    let body = json!({"input": "x"});
    let held = router.post("/v1/embeddings", &body);
    let shed = async {
        decode[0].arrival(1).await;
        let answer = router.post("/tokenize", &body).await;
        assert_eq!((answer.status, answer.header("retry-after")), (429, "1"), "{answer:?}");
        // An operator is not refused.
        decode[0].on(|_| None);
        let answer = router.ask_with(router.admin_request("/sleep", "{}"), &[]).await;
        assert_eq!(answer.status, 200, "{answer:?}");
    };
    tokio::select! {
        answer = held => panic!("{answer:?}"),
        () = shed => {}
    }
}

#[tokio::test]
async fn a_response_is_asked_for_at_the_instance_that_made_it() {
    let (router, all) = named(1, 2).await;
    for (nth, instance) in all.iter().enumerate().skip(1) {
        instance.on(move |leg| {
            let id = format!("resp_{nth}_{}", leg.body["input"].as_str().unwrap_or_default());
            let response = json!({"id": id, "object": "response", "made_by": nth});
            let created = json!({"response": response, "type": "response.created"});
            let stream = vec![format!("event: response.created\ndata: {created}\n\n")];
            Some(match leg.body["stream"] == true {
                true => Act::Stream(stream),
                false => Act::Json(200, response),
            })
        });
    }
    let mut ids = Vec::new();
    for (input, stream) in [("a", false), ("b", true), ("c", false), ("d", true)] {
        let body = json!({"model": "m", "input": input, "stream": stream});
        let answer = router.post("/v1/responses", &body).await;
        assert_eq!(answer.status, 200, "{answer:?}");
        let at = answer.body.find("resp_").expect("an id");
        ids.push(answer.body[at..].split('"').next().expect("a word").to_owned());
    }
    for id in &ids {
        let maker: usize = id[5..6].parse().expect("a number");
        let answer = router.get_of_client(&format!("/v1/responses/{id}?starting_after=1")).await;
        assert_eq!(answer.json()["made_by"], maker, "{answer:?}");
        let path = format!("/v1/responses/{id}?starting_after=1");
        assert_eq!(paths(&all[maker]).pop(), Some(path));
        let cancelled = format!("/v1/responses/{id}/cancel");
        assert_eq!(router.post(&cancelled, &Value::Null).await.json()["made_by"], maker);
        assert_eq!(paths(&all[maker]).pop(), Some(cancelled));
    }
    let answer = router.get_of_client("/v1/responses/resp_of_nobody").await;
    assert!(answer.status == 404 && answer.error().contains("/v1/responses/resp_of_nobody"));
    let counted = "kvferry_router_requests_total{path=\"/v1/responses/{id}\",code=\"200\"}";
    assert_eq!(router.metric(counted).await, 4);
}

#[tokio::test]
async fn what_changes_engines_goes_to_all_and_is_answered_for_each() {
    let (router, all) = named(1, 2).await;
    let body = json!({"lora_name": "sql", "lora_path": "/sql"}).to_string();
    let load = || router.admin_request("/v1/load_lora_adapter?x=1", &body);
    let answer = router.ask_with(load(), &[("authorization", "Bearer mine")]).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let listed = answer.json();
    for instance in &all {
        assert_eq!(paths(instance), ["/v1/load_lora_adapter?x=1"]);
        assert_eq!(instance.seen()[0].header("authorization"), "Bearer mine");
        let own = listed["instances"].as_array().expect("a list").iter();
        let own: Vec<_> = own.filter(|it| it["http"] == *instance.http).collect();
        assert_eq!((own.len(), &own[0]["status"]), (1, &json!(200)), "{listed}");
    }
    all[1].always(Act::Text(400, "no adapter"));
    let answer = router.ask_with(load(), &[]).await;
    assert_eq!(answer.status, 502);
    let listed = answer.json();
    let failed = listed["instances"].as_array().expect("a list").iter();
    let failed: Vec<_> = failed.filter(|it| it["status"] != 200).collect();
    let expected = json!("no adapter");
    assert_eq!((failed.len(), &failed[0]["body"]), (1, &expected), "{listed}");
    // A page of another origin cannot change engines, even if it may send requests.
    let answer = router.ask_with(load(), &[("origin", "http://localhost:3000")]).await;
    assert_eq!((answer.status, all[0].seen().len()), (403, 2), "{answer:?}");
    let uri = format!("http://{}/is_sleeping", router.admin);
    let asked = Request::get(uri).body(Full::default()).unwrap();
    let answer = TestRouter::read(router.call(asked).await).await;
    assert_eq!(answer.json()["instances"].as_array().map(Vec::len), Some(3));
    let nobody = TestRouter::start(&[]);
    let answer = nobody.ask_with(nobody.admin_request("/sleep", "{}"), &[]).await;
    assert_eq!(answer.status, 503);
}
