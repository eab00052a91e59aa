//! Two legs with prompts of equal length but other tokens: no KV is handed over.

use super::{PATIENT, ServePair, ServeProcess, metric, prompt};
use kvferry_engine::core::prompt_hash::PromptHash;
use serde_json::{Value, json};

/// Parameters of a leg that names no peer, as llm-d's nixlv2 and Ray Serve send them.
fn nobody() -> Value {
    json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null,
    })
}

/// The same prompt with one other token, and a prompt without any common token.
fn others(tokens: &[u32]) -> [Vec<u32>; 2] {
    let (mut one, mut all) = (tokens.to_vec(), tokens.to_vec());
    one[tokens.len() / 2] += 1;
    all.iter_mut().for_each(|id| *id += 1_000);
    [one, all]
}

/// Asserts that the text contains the hashes of both prompts.
fn names_both(why: &str, prefill: &[u32], decode: &[u32]) {
    for (side, tokens) in [("the decode's has hash", decode), ("the prefill's", prefill)] {
        let named = format!("{side} {}", PromptHash::of_tokens(tokens));
        assert!(why.contains(&named), "{named}: {why}");
    }
}

/// Serves both legs with a decode that has other tokens; returns status and body of its answer.
fn other_prompt(pair: &mut ServePair, tokens: &[u32], other: &[u32]) -> (u16, String) {
    let (id, mut prefill, mut decode) = pair.legs(tokens);
    decode["prompt"] = json!(other);
    let path = "/v1/completions";
    if pair.mode == "pull" {
        prefill["kv_transfer_params"] = nobody();
        let (status, body) = pair.prefill.post(path, &id, &prefill);
        assert_eq!(status, 200, "{body}");
        let answer: Value = serde_json::from_str(&body).expect("JSON");
        decode["kv_transfer_params"] = answer["kv_transfer_params"].clone();
        return pair.decode.post(path, &id, &decode);
    }
    std::thread::scope(|scope| {
        let first = scope.spawn(|| pair.prefill.post(path, &id, &prefill));
        let second = pair.decode.post(path, &id, &decode);
        let (status, body) = first.join().expect("no panic");
        assert_eq!(status, 200, "{body}");
        second
    })
}

#[test]
fn other_prompt_of_equal_length_is_an_error_with_both_hashes() {
    let tokens = prompt(100, 1);
    for (mode, more) in [("push", "off"), ("pull", "off"), ("push", "sample"), ("pull", "all")] {
        let mut pair = ServePair::start(mode, true, &["--verify", more]);
        for other in others(&tokens) {
            let (status, body) = other_prompt(&mut pair, &tokens, &other);
            assert_eq!(status, 500, "{mode} {body}");
            names_both(&body, &tokens, &other);
            let body: Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!(body["error"]["kvferry"]["failed"]["cause"], "prompt-mismatch", "{body}");
        }
        let (prefill, decode) = pair.request(&tokens);
        assert_eq!(decode["kvferry"]["source"], "transferred", "{decode}");
        assert_eq!(decode["kvferry"]["digest"], prefill["kvferry"]["expected"]);
        assert_eq!(metric(&pair.decode, "kvferry_kv_transferred_total"), 1, "{mode}");
    }
}

#[test]
fn decode_that_recomputes_answers_its_own_prompt_and_says_why() {
    let tokens = prompt(100, 2);
    for mode in ["push", "pull"] {
        let start = |role| {
            let args = ["--role", role, "--mode", mode, "--on-load-failure", "recompute"];
            ServeProcess::serve(&[&args[..], &["--set", PATIENT]].concat())
        };
        let (prefill, decode) = (start("prefill"), start("decode"));
        let mut pair = ServePair { prefill, decode, mode, native: true, next: 0, tp: [1; 2] };
        for other in others(&tokens) {
            let (status, body) = other_prompt(&mut pair, &tokens, &other);
            assert_eq!(status, 200, "{mode} {body}");
            let body: Value = serde_json::from_str(&body).expect("JSON");
            let kv = &body["kvferry"];
            assert_eq!(kv["source"], "computed", "{body}");
            assert_eq!(kv["digest"], kv["expected"], "{body}");
            names_both(kv["failed"]["why"].as_str().expect("a text"), &tokens, &other);
        }
    }
}
