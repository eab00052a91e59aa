//! Legs of routers that name nobody, and carry what a prefill answers to a decode word for word: llm-d's nixlv2,
//! KServe, Ray Serve, production-stack.

use super::{PATIENT, ServePair, ServeProcess, metric, prompt, secret};
use serde_json::{Value, json};

pub(crate) const PATH: &str = "/v1/completions";

/// The parameters of NIXL's legs, as llm-d's sidecar sends them to a prefill.
fn nixl() -> Value {
    json!({"do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null})
}

pub(crate) fn leg(tokens: &[u32], max_tokens: u32, params: &Value) -> Value {
    json!({"prompt": tokens, "max_tokens": max_tokens, "stream": false, "kv_transfer_params": params})
}

impl ServePair {
    /// Of two instances that are set up differently.
    pub(crate) fn unequal(mode: &'static str, prefill: &[&str], decode: &[&str]) -> ServePair {
        let start = |role, more: &[&str]| {
            let args = [&["--role", role, "--mode", mode, "--set", PATIENT], more].concat();
            ServeProcess::serve(&args)
        };
        let (prefill, decode) = (start("prefill", prefill), start("decode", decode));
        ServePair { prefill, decode, mode, native: true, next: 0, tp: [1; 2] }
    }

    /// What the prefill answers a prompt with, and the parameters among it.
    pub(crate) fn prefilled(&self, id: &str, tokens: &[u32]) -> (Value, Value) {
        let (status, body) = self.prefill.post(PATH, id, &leg(tokens, 1, &nixl()));
        assert_eq!(status, 200, "{body}");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        let params = answer["kv_transfer_params"].clone();
        (answer, params)
    }

    fn carries(&self, id: &str, tokens: &[u32], change: impl Fn(&mut Value)) {
        let (prefill, mut params) = self.prefilled(id, tokens);
        change(&mut params);
        let (status, body) = self.decode.post(PATH, id, &leg(tokens, 4, &params));
        assert_eq!(status, 200, "{body}");
        let decode: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!(decode["kvferry"]["source"], "transferred", "{params}: {decode}");
        assert_eq!(decode["kvferry"]["digest"], prefill["kvferry"]["expected"]);
    }
}

#[test]
fn what_a_prefill_answers_is_enough_whoever_carries_it() {
    let known = secret("carried", "0123456789abcdef0123456789abcdef");
    let wide: &[&str] = &["--tp", "2"];
    let closed: &[&str] = &["--secret-file", &known, "--moriio-peers=false"];
    for mode in ["push", "pull"] {
        let proven: [&[&str]; 2] = [&["--tp", "2", "--verify", "sample"], &["--verify", "all"]];
        let pairs = [(&[][..], &[][..]), (wide, &[]), (closed, closed), (proven[0], proven[1])];
        for (prefill, decode) in pairs {
            let pair = ServePair::unequal(mode, prefill, decode);
            for (seed, len) in [(1, 1), (2, 33), (3, 700)] {
                pair.carries(&format!("r-{seed}"), &prompt(len, seed), |_| {});
            }
            // As production-stack does.
            pair.carries("r-4", &prompt(40, 4), |params| params["remote_host"] = json!("10.9.8.7"));
            let is_proven = decode == proven[1];
            assert_eq!(metric(&pair.decode, "kvferry_kv_blocks_verified_total") > 0, is_proven);
            assert_eq!(metric(&pair.decode, "kvferry_kv_mismatches_total"), 0);
            for process in [&pair.prefill, &pair.decode] {
                assert_eq!(metric(process, "kvferry_faults_total"), 0);
                assert_eq!(metric(process, "kvferry_violations_total"), 0);
                assert_eq!(metric(process, "kvferry_blocks_held"), 0, "{mode}");
                assert_eq!(metric(process, "kvferry_failures_remembered"), 0, "{mode}");
            }
        }
    }
}

#[test]
fn a_leg_that_no_member_of_the_fleet_has_made_is_refused() {
    let known = secret("sealed", "0123456789abcdef0123456789abcdef");
    let pair = ServePair::unequal("pull", &["--secret-file", &known], &["--secret-file", &known]);
    let (_, params) = pair.prefilled("r", &prompt(40, 1));
    let changes: [(&str, Value); 7] = [
        ("seal", json!("00")),
        ("seal", json!("é".repeat(40))),
        ("prefill", json!("10.0.0.9:1")),
        ("control", json!("tcp://10.0.0.9:1")),
        ("life", json!(7)),
        ("sibling", json!(1)),
        ("key", json!({"id": "another", "prompt": 0})),
    ];
    for (key, value) in changes {
        let mut params = params.clone();
        params["kvferry"][key] = value;
        let (status, body) = pair.decode.post(PATH, "r", &leg(&prompt(40, 1), 4, &params));
        assert!(status == 400 && body.contains("the seal of the leg"), "{key}: {status} {body}");
    }
    let mut bare = params.clone();
    bare["kvferry"].as_object_mut().expect("an object").remove("seal");
    let (status, body) = pair.decode.post(PATH, "r", &leg(&prompt(40, 1), 4, &bare));
    assert!(status == 400 && body.contains("has no seal"), "{status} {body}");
    // What is not sealed of it counts for nothing.
    let (host, blocks) = ("10.0.0.9", json!([]));
    let address = json!({"host": host, "handshake": 1, "notify": 2});
    let shape = json!({"dp_size_local": 1, "tp_size": 1});
    let peer =
        json!({"address": address, "hosts": [host], "dp_size": 1, "dp_rank": 0, "shape": shape});
    let mut params = params;
    params["kvferry"]["moriio"] = json!({"peer": peer, "blocks": blocks});
    let (status, body) = pair.decode.post(PATH, "r", &leg(&prompt(40, 1), 4, &params));
    assert!(status == 200 && body.contains("transferred"), "{status} {body}");
}

#[test]
fn a_decode_is_told_that_its_prefill_handed_nothing_over() {
    let decode = ServeProcess::serve(&["--role", "decode", "--mode", "pull"]);
    let failed = json!({"kvferry": {"failed": {"cause": "overload", "why": "too many requests"}}});
    let (status, body) = decode.post(PATH, "r", &leg(&prompt(40, 1), 4, &failed));
    assert_eq!(status, 400, "{body}");
    assert!(body.contains("the prefill handed nothing over: too many requests"), "{body}");
}
