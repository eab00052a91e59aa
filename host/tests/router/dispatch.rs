//! What legs look like: field by field those of vllm-router 0.1.17, but for what is listed here.

use crate::backend::{Act, HeartbeatFields, StubInstance, prefill_params};
use crate::rig::TestRouter;
use hyper::header::HeaderName;
use kvferry_engine::core::message::{Mode, Role};
use serde_json::{Map, Value, json};

fn load(name: &str) -> Value {
    let path = format!("{}/tests/fixtures/router/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Ids differ with every request.
fn masked(mut params: Value, transfer: &str) -> Value {
    if params["transfer_id"].is_string() {
        params["transfer_id"] = transfer.into();
    }
    params
}

/// What the recorded leg would be with the deviations.
fn expected(recorded: &Value, peer: &Value, prefill: bool, mode: Mode) -> Value {
    let mut params = masked(recorded["body"]["kv_transfer_params"].clone(), "tx");
    let read_answer = mode == Mode::Pull && !prefill;
    // B8: the TP size of the peer in both modes.
    params["remote_tp_size"] = peer["tp_size"].clone();
    if !read_answer {
        // B8: its DP rank on both legs in both modes, and that it counts.
        params["remote_dp_rank_override"] = true.into();
        params.as_object_mut().unwrap().entry("remote_dp_rank").or_insert(json!("rank"));
        if !prefill {
            // With the override alone the decode rank of the prefill's number would have to act.
            params["is_request_leader"] = true.into();
        }
    }
    // Which rank is chosen is each router's own (B7).
    params["remote_dp_rank"] = json!("rank");
    let mut body = recorded["body"].clone();
    body["kv_transfer_params"] = params;
    body
}

fn actual(leg: &crate::backend::ReceivedLeg) -> Value {
    let mut body = leg.body.clone();
    let params = masked(leg.params().clone(), "tx");
    body["kv_transfer_params"] = params;
    assert!(body["kv_transfer_params"]["remote_dp_rank"].is_u64(), "{body}");
    body["kv_transfer_params"]["remote_dp_rank"] = json!("rank");
    body
}

/// Names of headers of a leg, without those of each connection.
fn names(recorded: &Value) -> Vec<String> {
    let names = recorded["headers"].as_array().unwrap().iter();
    let mut names: Vec<_> = names.map(|pair| pair[0].as_str().unwrap().to_lowercase()).collect();
    // Accept: hyper sends none. Authorization: the reference sends an empty bearer (B11).
    names.retain(|name| !matches!(&**name, "accept" | "authorization"));
    names.sort();
    names
}

async fn replay(file: &str) {
    let recorded = load(file);
    let meta = &recorded["meta"];
    let mode = if meta["transfer_mode"] == "READ" { Mode::Pull } else { Mode::Push };
    let (p, d) =
        (StubInstance::start(Role::Prefill).await, StubInstance::start(Role::Decode).await);
    let size = |role: &str, key: &str| meta[role][key].as_u64().unwrap() as u16;
    // The recorded stand-in says of itself what it says without data parallelism.
    p.on(|leg| {
        let params = prefill_params(&leg.params()["transfer_id"]);
        Some(Act::Json(200, json!({"id": "x", "choices": [], "kv_transfer_params": params})))
    });
    if mode == Mode::Push {
        d.waits_for([&p]);
    }
    let mut router = TestRouter::start(&[]);
    for (backend, role) in [(&p, "prefill"), (&d, "decode")] {
        let (dp, tp) = (size(role, "dp_size"), size(role, "tp_size"));
        router.register(backend, &HeartbeatFields { dp, tp, ..HeartbeatFields::of(mode) });
    }
    router.ready(usize::from(size("prefill", "dp_size") + size("decode", "dp_size"))).await;
    for (nth, request) in recorded["requests"].as_array().unwrap().iter().enumerate() {
        let client = &request["client_request"];
        let mut body = client["body"].clone();
        let mut legs = [request["prefill_leg"][0].clone(), request["decode_leg"][0].clone()];
        if body["n"] == 2 {
            // B13: a transfer for each sample; `samples_are_transfers_of_their_own` has them.
            body["n"] = 1.into();
            legs.iter_mut().for_each(|leg| leg["body"]["n"] = 1.into());
        }
        let mut asked = router.request(client["path"].as_str().unwrap(), body.to_string());
        for (name, value) in client["headers"].as_object().unwrap_or(&Map::new()) {
            let name = HeaderName::try_from(&**name).unwrap();
            asked.headers_mut().insert(name, value.as_str().unwrap().try_into().unwrap());
        }
        let id = asked.headers().get("x-request-id").cloned();
        let answer = TestRouter::read(router.call(asked).await).await;
        let name = request["name"].as_str().unwrap();
        assert_eq!(answer.status, 200, "{name}: {}", answer.body);
        let told = answer.headers["x-request-id"].to_str().unwrap();
        match id {
            Some(id) => assert_eq!(told, id),
            None => {
                let recorded = request["client_response"]["headers"].as_array().unwrap();
                let it = recorded.iter().find(|it| it[0] == "X-Request-ID").unwrap()[1].as_str();
                let prefix = it.unwrap().split_once('-').unwrap().0;
                assert_eq!(told.split_once('-').unwrap().0, prefix, "{name}");
                assert_eq!(told.len(), it.unwrap().len());
            }
        }
        let [p_leg, d_leg] = [&p.seen()[nth], &d.seen()[nth]];
        assert_eq!(p_leg.header("x-request-id"), d_leg.header("x-request-id"));
        assert_eq!(p_leg.params()["transfer_id"], d_leg.params()["transfer_id"]);
        for (leg, recorded, prefill) in [(p_leg, &legs[0], true), (d_leg, &legs[1], false)] {
            let (own, peer) = if prefill { ("prefill", "decode") } else { ("decode", "prefill") };
            assert_eq!(leg.path, recorded["path"].as_str().unwrap());
            let expected = expected(recorded, &meta[peer], prefill, mode);
            assert_eq!(actual(leg), expected, "{file} {name} {own}");
            let mut headers: Vec<_> = leg.headers.keys().map(ToString::to_string).collect();
            // The router passes on headers that vllm-router does not, and adds its own.
            let others = ["accept", "authorization", "x-custom", "x-kvferry-router"];
            headers.retain(|name| !others.contains(&&**name));
            headers.sort();
            assert_eq!(headers, names(recorded), "{file} {name} {own}");
            check_id(leg.header("x-request-id"), &recorded["headers"]);
        }
        check_ranks(p_leg, d_leg, mode);
    }
}

/// The request id is the recorded one but for its last part.
fn check_id(id: &str, recorded: &Value) {
    let headers = recorded.as_array().unwrap();
    let recorded = headers.iter().find(|it| it[0] == "X-Request-ID").unwrap()[1].as_str().unwrap();
    assert_eq!(id.rsplit_once('_').unwrap().0, recorded.rsplit_once('_').unwrap().0);
    let unique = id.rsplit_once('_').unwrap().1;
    assert!(unique.len() == 32 && unique.bytes().all(|c| matches!(c, b'0'..=b'9' | b'a'..=b'f')));
}

/// The rank that a leg is pinned to is the one that its peer is told.
fn check_ranks(p: &crate::backend::ReceivedLeg, d: &crate::backend::ReceivedLeg, mode: Mode) {
    let told = |leg: &crate::backend::ReceivedLeg| leg.params()["remote_dp_rank"].to_string();
    // Its own rank a prefill in READ mode tells by its answer.
    let by_answer = mode == Mode::Pull;
    for (leg, peer, told_by_us) in [(d, p, true), (p, d, !by_answer)] {
        let pinned = leg.header("x-data-parallel-rank");
        if told_by_us && !pinned.is_empty() {
            assert_eq!(told(peer), pinned);
        }
    }
}

#[tokio::test]
async fn legs_in_write_mode_are_as_recorded() {
    replay("dispatch_write").await;
    replay("dispatch_write_dp").await;
}

#[tokio::test]
async fn legs_in_read_mode_are_as_recorded() {
    replay("dispatch_read").await;
    replay("dispatch_read_dp").await;
}
