//! OpenAI's bodies, as far as an instance without a model has use for them.

use crate::instance::FailureNotice;
use kvferry_engine::core::ids::EngineId;
use kvferry_engine::core::message::Role;
use kvferry_engine::core::router::LegFailure;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Tokens that are generated where a request does not say how many.
const MAX_TOKENS: u32 = 16;

/// Status of a leg that is for an instance of the other role (RFC 9110, 15.5.20).
pub(super) const MISDIRECTED: u16 = 421;

/// A request; unknown keys are ignored.
#[derive(Deserialize)]
pub(super) struct CompletionRequest {
    prompt: Option<PromptInput>,
    messages: Option<Vec<ChatMessage>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    #[serde(default)]
    pub(super) stream: Option<bool>,
    n: Option<u32>,
    pub(super) model: Option<String>,
    pub(super) kv_transfer_params: Option<Box<RawValue>>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Many(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
struct ChatMessage {
    role: String,
    content: Value,
}

impl CompletionRequest {
    /// The body in these bytes.
    ///
    /// # Errors
    /// What is wrong, for the client.
    pub(super) fn parse(bytes: &[u8]) -> Result<CompletionRequest, String> {
        let body: CompletionRequest = serde_json::from_slice(bytes)
            .map_err(|why| format!("the body cannot be used: {why}"))?;
        match body.n {
            None | Some(1) => Ok(body),
            Some(n) => Err(format!("n is {n}; one sample is served per request")),
        }
    }

    pub(super) fn output(&self) -> u32 {
        self.max_completion_tokens.or(self.max_tokens).unwrap_or(MAX_TOKENS)
    }

    /// The ids of the prompt; a byte of text is a token.
    ///
    /// # Errors
    /// There is no prompt, or more than one.
    pub(super) fn tokens(&self, chat: bool) -> Result<Vec<u32>, String> {
        let bytes = |text: &str| text.bytes().map(u32::from).collect();
        match (&self.prompt, &self.messages) {
            (_, Some(messages)) if chat => Ok(bytes(&transcript(messages))),
            (None, _) if chat => Err("messages are missing".into()),
            (Some(PromptInput::Text(text)), _) if !chat => Ok(bytes(text)),
            (Some(PromptInput::Tokens(tokens)), _) if !chat => Ok(tokens.clone()),
            (Some(PromptInput::Texts(texts)), _) if !chat => match &texts[..] {
                [text] => Ok(bytes(text)),
                texts => Err(format!("{} prompts; one is served per request", texts.len())),
            },
            (Some(PromptInput::Many(prompts)), _) if !chat => match &prompts[..] {
                [tokens] => Ok(tokens.clone()),
                prompts => Err(format!("{} prompts; one is served per request", prompts.len())),
            },
            _ => Err("prompt is missing".into()),
        }
    }
}

fn transcript(messages: &[ChatMessage]) -> String {
    let line = |message: &ChatMessage| match &message.content {
        Value::String(text) => format!("{}: {text}\n", message.role),
        other => format!("{}: {other}\n", message.role),
    };
    messages.iter().map(line).collect()
}

/// What became of the KV, beside the answer.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct KvReport {
    /// Digest of the KV that the instance has.
    pub(super) digest: String,
    /// Digest of what a prefill without a model computes for the prompt.
    pub(super) expected: String,
    /// `transferred` or `computed`.
    pub(super) source: &'static str,
    /// Why the instance computed the prompt itself, if it had to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) failed: Option<FailureNotice>,
}

/// What an answer is made of.
pub(super) struct CompletionResponse<'a> {
    pub(super) id: &'a str,
    pub(super) model: &'a str,
    pub(super) chat: bool,
    pub(super) created: u64,
    pub(super) prompt_tokens: u32,
    pub(super) completion_tokens: u32,
}

impl CompletionResponse<'_> {
    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        })
    }

    fn frame(&self, object: &str, choice: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        })
    }

    pub(super) fn whole(&self, text: &str, kv: &KvReport, params: Option<Value>) -> Value {
        let (object, choice) = if self.chat {
            let message = json!({"role": "assistant", "content": text});
            ("chat.completion", json!({"index": 0, "message": message, "finish_reason": "length"}))
        } else {
            (
                "text_completion",
                json!({"index": 0, "text": text, "logprobs": null,
                "finish_reason": "length"}),
            )
        };
        let mut answer = self.frame(object, choice);
        answer["usage"] = self.usage();
        answer["kvferry"] = json!(kv);
        if let Some(params) = params {
            answer["kv_transfer_params"] = params;
        }
        answer
    }

    /// One event of a stream; the last one has a finish reason.
    pub(super) fn chunk(&self, text: &str, kv: Option<&KvReport>, last: bool) -> Value {
        let finish = if last { json!("length") } else { Value::Null };
        let (object, choice) = if self.chat {
            let delta = json!({"role": "assistant", "content": text});
            ("chat.completion.chunk", json!({"index": 0, "delta": delta, "finish_reason": finish}))
        } else {
            ("text_completion", json!({"index": 0, "text": text, "finish_reason": finish}))
        };
        let mut chunk = self.frame(object, choice);
        if let Some(kv) = kv {
            chunk["kvferry"] = json!(kv);
        }
        if last {
            chunk["usage"] = self.usage();
        }
        chunk
    }
}

/// Which of the two legs parameters are of.
#[derive(Deserialize)]
struct LegDirection {
    #[serde(default)]
    do_remote_decode: bool,
    #[serde(default)]
    do_remote_prefill: bool,
}

/// True for the leg of an instance of the other role: whoever sent it takes this one for what it is
/// not, or is not any more.
pub(super) fn is_misdirected(role: Role, params: Option<&RawValue>) -> bool {
    let Some(json) = params else { return role == Role::Prefill };
    let direction = serde_json::from_str(json.get()).ok();
    direction.is_some_and(|LegDirection { do_remote_decode, do_remote_prefill }| {
        do_remote_decode != do_remote_prefill && do_remote_prefill != (role == Role::Decode)
    })
}

/// What a leg is told that finds no place.
const OVERLOAD: &str = "overload: the instance has as many legs as it takes; try again";

/// Status and error object of a failure; `peer` is the other instance of the leg.
pub(super) fn failed(failure: &LegFailure, peer: Option<&EngineId>) -> (u16, Value) {
    match failure {
        LegFailure::Request(why) => error(400, "invalid_request_error", why),
        LegFailure::Answer(MISDIRECTED) => {
            let why = "the request is no leg for an instance of this role: kv_transfer_params with \
                 do_remote_decode are for a prefill, those with do_remote_prefill and requests \
                 without any for a decode; a router knows which is which";
            error(MISDIRECTED, "misdirected_request_error", why)
        }
        LegFailure::Busy { .. } => error(503, "overloaded_error", OVERLOAD),
        LegFailure::Instance(why) => {
            let (status, mut body) = error(500, "server_error", &failure.to_string());
            body["error"]["kvferry"] = FailureNotice::new(why, peer).object();
            (status, body)
        }
        other => error(500, "server_error", &other.to_string()),
    }
}

/// An error object of OpenAI's API.
pub(super) fn error(status: u16, kind: &str, message: &str) -> (u16, Value) {
    (status, json!({"error": {"message": message, "type": kind, "code": status}}))
}
