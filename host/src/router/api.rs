//! The paths that are served by a prefill and a decode, and what they make of a body.

use super::error::HttpError;
use super::fields::{FieldEdit, JsonFields, elements};
use kvferry_engine::core::router::RoutedPrompt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// A way to ask for tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Api {
    Completions,
    Chat,
    Responses,
    Generate,
}

pub(crate) const APIS: [Api; 4] = [Api::Completions, Api::Chat, Api::Responses, Api::Generate];

/// What vllm-router 0.1.17 adds to bodies of completions.
const COMPLETIONS: [(&str, FieldEdit<'_>); 6] = [
    ("stream", FieldEdit::Default("false")),
    ("echo", FieldEdit::Default("false")),
    ("no_stop_trim", FieldEdit::Default("false")),
    ("ignore_eos", FieldEdit::Default("false")),
    ("skip_special_tokens", FieldEdit::Default("true")),
    ("return_hidden_states", FieldEdit::Default("false")),
];

/// The same for chats.
const CHAT: [(&str, FieldEdit<'_>); 10] = [
    ("stream", FieldEdit::Default("false")),
    ("logprobs", FieldEdit::Default("false")),
    ("no_stop_trim", FieldEdit::Default("false")),
    ("ignore_eos", FieldEdit::Default("false")),
    ("continue_final_message", FieldEdit::Default("false")),
    ("skip_special_tokens", FieldEdit::Default("true")),
    ("separate_reasoning", FieldEdit::Default("true")),
    ("stream_reasoning", FieldEdit::Default("true")),
    ("return_hidden_states", FieldEdit::Default("false")),
    ("include_reasoning", FieldEdit::Default("true")),
];

/// What makes a prefill compute the prompt and stop, length-capped, so that it keeps the KV.
const ONE_TOKEN: [(&str, FieldEdit<'_>); 5] = [
    ("max_tokens", FieldEdit::Put("1")),
    ("max_completion_tokens", FieldEdit::Replace("1")),
    ("min_tokens", FieldEdit::Put("1")),
    ("stream", FieldEdit::Put("false")),
    ("stream_options", FieldEdit::Drop),
];

/// Bytes of text that are taken for a token where only the load is concerned.
const TOKEN_BYTES: usize = 4;

/// Tokens that a request without a limit is taken to generate.
const OUTPUT: u32 = 256;

impl Api {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Api::Completions => "/v1/completions",
            Api::Chat => "/v1/chat/completions",
            Api::Responses => "/v1/responses",
            Api::Generate => "/inference/v1/generate",
        }
    }

    /// First part of the ids of requests that came without one.
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            Api::Completions => "cmpl-",
            Api::Chat => "chatcmpl-",
            Api::Responses => "req-",
            Api::Generate => "gnt-",
        }
    }

    fn prompt_key(self) -> &'static str {
        match self {
            Api::Completions => "prompt",
            Api::Chat => "messages",
            Api::Responses => "input",
            Api::Generate => "token_ids",
        }
    }

    /// Edits of both legs, weaker than all others.
    pub(crate) fn defaults(self) -> &'static [(&'static str, FieldEdit<'static>)] {
        match self {
            Api::Completions => &COMPLETIONS,
            Api::Chat => &CHAT,
            Api::Responses => &[],
            Api::Generate => &COMPLETIONS[..1],
        }
    }

    /// Edits of the prefill leg.
    pub(crate) fn one_token(self) -> &'static [(&'static str, FieldEdit<'static>)] {
        match self {
            Api::Completions | Api::Chat => &ONE_TOKEN,
            Api::Responses => &[
                ("max_output_tokens", FieldEdit::Put("1")),
                ("stream", FieldEdit::Put("false")),
                ("stream_options", FieldEdit::Drop),
            ],
            Api::Generate => &ONE_TOKEN[3..],
        }
    }
}

/// One transfer of a request: one sample of one prompt.
#[derive(Clone, Debug)]
pub(crate) struct RequestPart {
    /// The prompt where the request has several, as JSON.
    pub(crate) prompt: Option<Box<str>>,
    /// Which sample of it.
    pub(crate) sample: u32,
}

/// What a body asks for.
#[derive(Clone, Debug)]
pub(crate) struct GenerationRequest {
    pub(crate) api: Api,
    pub(crate) fields: JsonFields,
    pub(crate) stream: bool,
    /// Samples per prompt.
    pub(crate) samples: u32,
    /// First seed, if there are several samples and one is given.
    pub(crate) seed: Option<i64>,
    /// By prompt, then by sample.
    pub(crate) parts: Vec<RequestPart>,
    /// Tokens to generate, as far as can be told.
    pub(crate) output: u32,
    /// The model that it is for, if it names one.
    pub(crate) model: Option<Arc<str>>,
}

impl GenerationRequest {
    /// What is asked for, and the prompt of each part as the router core sees it.
    ///
    /// # Errors
    /// What the router has to know and cannot read, or cannot serve by transfers.
    pub(crate) fn read(
        api: Api,
        fields: JsonFields,
        prefix_tokens: u32,
        parts_max: u32,
    ) -> Result<(GenerationRequest, Vec<RoutedPrompt>), HttpError> {
        let stream = match fields.get("stream") {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return Err(HttpError::bad("stream is neither true nor false", "stream")),
        };
        let samples = samples(api, &fields)?;
        let prompts = prompts(api, &fields)?;
        if prompts.len() as u64 * u64::from(samples) > u64::from(parts_max) {
            let message = format!(
                "{} prompts with {samples} samples each: at most {parts_max} in all; split the request",
                prompts.len()
            );
            return Err(HttpError::bad(&message, "n"));
        }
        let several = prompts.len() > 1;
        let (mut parts, mut known) = (Vec::new(), Vec::new());
        for prompt in &prompts {
            let estimated = estimate(prompt, prefix_tokens);
            for sample in 0..samples {
                parts.push(RequestPart { prompt: several.then(|| (*prompt).into()), sample });
                known.push(estimated.clone());
            }
        }
        let seed = fields.get("seed").filter(|_| samples > 1).and_then(|seed| seed.parse().ok());
        let output = output(&fields);
        // What is no name the instance refuses in its own words.
        let model =
            fields.get("model").and_then(|model| serde_json::from_str::<String>(model).ok());
        let model = model.filter(|model| !model.is_empty()).map(Arc::from);
        Ok((GenerationRequest { api, fields, stream, samples, seed, parts, output, model }, known))
    }

    /// The body of a leg of one part, with this `kv_transfer_params`.
    pub(crate) fn leg(&self, part: usize, prefill: bool, transfer: Option<&str>) -> Vec<u8> {
        let part = &self.parts[part];
        let seed = self.seed.map(|seed| seed.wrapping_add(i64::from(part.sample)).to_string());
        let nested = (self.api == Api::Generate && prefill).then(|| self.sampling_params());
        let mut edits: Vec<(&str, FieldEdit<'_>)> = Vec::with_capacity(20);
        if prefill {
            edits.extend_from_slice(self.api.one_token());
        }
        edits.push(("kv_transfer_params", transfer.map_or(FieldEdit::Drop, FieldEdit::Put)));
        if self.samples > 1 {
            edits.extend([("n", FieldEdit::Put("1")), ("best_of", FieldEdit::Drop)]);
        }
        edits.extend(seed.as_deref().map(|seed| ("seed", FieldEdit::Put(seed))));
        edits.extend(part.prompt.as_deref().map(|prompt| ("prompt", FieldEdit::Put(prompt))));
        edits.extend(nested.as_deref().map(|nested| ("sampling_params", FieldEdit::Put(nested))));
        let defaults = self.api.defaults().iter();
        edits.extend(defaults.filter(|(key, _)| !prefill || *key != "stream"));
        let mut body = Vec::with_capacity(self.fields.len() + 640);
        self.fields.write(&edits, &mut body);
        body
    }

    /// Those of a prefill leg on the path that has them in an object of their own.
    fn sampling_params(&self) -> String {
        let given = self.fields.get("sampling_params").unwrap_or("{}").to_owned();
        let mut out = Vec::new();
        if let Ok(given) = JsonFields::parse(given.into()) {
            let edits = [("max_tokens", FieldEdit::Put("1")), ("min_tokens", FieldEdit::Put("1"))];
            given.write(&edits, &mut out);
        }
        String::from_utf8(out).expect("made of texts")
    }

    /// True if the answer is put together from several.
    pub(crate) fn is_split(&self) -> bool {
        self.parts.len() > 1
    }
}

fn number<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.parse().ok()
}

fn output(fields: &JsonFields) -> u32 {
    let keys = ["max_completion_tokens", "max_tokens", "max_output_tokens"];
    let told = keys.iter().find_map(|key| fields.get(key)).and_then(number);
    told.unwrap_or(OUTPUT).max(1)
}

/// Samples per prompt. Each is a transfer of its own, so what needs them in one request of one
/// engine is refused.
fn samples(api: Api, fields: &JsonFields) -> Result<u32, HttpError> {
    if fields.get("use_beam_search").is_some_and(|it| it == "true") {
        let message = "beam search cannot be served by prefill and decode instances";
        return Err(HttpError::bad(message, "use_beam_search"));
    }
    if api == Api::Generate {
        let nested = fields.get("sampling_params").unwrap_or("{}").to_owned();
        let nested = JsonFields::parse(nested.into())
            .map_err(|_| HttpError::bad("sampling_params is no object", "sampling_params"))?;
        return match nested.get("n").map_or(Some(1), number) {
            Some(1) => Ok(1),
            _ => Err(HttpError::bad(
                "n above 1 cannot be merged on this path; send one request per sample",
                "sampling_params.n",
            )),
        };
    }
    let n = fields.get("n").map_or(Some(1), number::<u32>).filter(|n| *n > 0);
    let n = n.ok_or_else(|| HttpError::bad("n is no number from 1 on", "n"))?;
    if api == Api::Responses && n > 1 {
        return Err(HttpError::bad("n above 1 cannot be merged on this path", "n"));
    }
    match fields.get("best_of").map(number::<u32>) {
        None => Ok(n),
        Some(Some(best)) if best == n => Ok(n),
        Some(_) => Err(HttpError::bad(
            "best_of other than n cannot be served by separate transfers",
            "best_of",
        )),
    }
}

/// The prompts as JSON, at least one.
fn prompts(api: Api, fields: &JsonFields) -> Result<Vec<&str>, HttpError> {
    let key = api.prompt_key();
    let missing = || HttpError::bad(&format!("{key} is missing"), key);
    let Some(value) = fields.get(key) else {
        // Prompts of other kinds are the instances' business.
        let other =
            fields.get("prompt_embeds").filter(|it| api == Api::Completions && it.starts_with('"'));
        return other.map(|embeds| vec![embeds]).ok_or_else(missing);
    };
    if api != Api::Completions || value.starts_with('"') {
        return Ok(vec![value]);
    }
    let inner = value.strip_prefix('[').map(str::trim_start);
    match inner.and_then(|inner| inner.bytes().next()) {
        Some(b'0'..=b'9') => Ok(vec![value]),
        Some(b'"' | b'[') => elements(value).map_err(|why| HttpError::bad(&why, key)),
        Some(b']') => Err(HttpError::bad("prompt is an empty list", key)),
        _ => Err(HttpError::bad(
            "prompt is no text, no list of token ids, and no list of those",
            key,
        )),
    }
}

/// A prompt as far as its load is concerned: its text is not tokenised, and prefixes are runs of
/// text.
fn estimate(prompt: &str, prefix_tokens: u32) -> RoutedPrompt {
    let bytes = prompt.as_bytes();
    let is_ids = prompt.starts_with('[') && bytes.iter().all(|c| !matches!(c, b'"' | b'{'));
    let tokens = match is_ids {
        true => memchr::memchr_iter(b',', bytes).count() + 1,
        false => bytes.len() / TOKEN_BYTES,
    };
    let run = (prefix_tokens as usize).saturating_mul(TOKEN_BYTES).max(1);
    let mut hasher = DefaultHasher::new();
    let runs = bytes.chunks_exact(run).map(|run| {
        run.hash(&mut hasher);
        hasher.finish()
    });
    let prefix: Vec<u64> = runs.collect();
    RoutedPrompt { tokens: u32::try_from(tokens).unwrap_or(u32::MAX).max(1), prefix: prefix.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(api: Api, text: &str) -> Result<(GenerationRequest, Vec<RoutedPrompt>), HttpError> {
        let fields = JsonFields::parse(bytes::Bytes::copy_from_slice(text.as_bytes())).unwrap();
        GenerationRequest::read(api, fields, 2, 8)
    }

    #[test]
    fn prompts_of_all_kinds_are_told_apart() {
        let count = |prompt: &str| {
            let text = format!("{{\"prompt\":{prompt}}}");
            read(Api::Completions, &text).map(|(asked, _)| asked.parts.len()).ok()
        };
        for one in ["\"a\"", "[1,2]", "[ 1 ]", "\"\""] {
            assert_eq!(count(one), Some(1), "{one}");
        }
        assert_eq!((count("[\"a\",\"b\"]"), count("[[1],[2,3]]")), (Some(2), Some(2)));
        for bad in ["[]", "{}", "1", "[{}]", "null", "[true]"] {
            assert_eq!(count(bad), None, "{bad}");
        }
    }

    #[test]
    fn samples_are_parts_of_their_own() {
        let (asked, known) =
            read(Api::Completions, r#"{"prompt":["a","b"],"n":3,"seed":7}"#).unwrap();
        assert_eq!((asked.parts.len(), known.len(), asked.seed), (6, 6, Some(7)));
        let samples: Vec<_> = asked.parts.iter().map(|part| part.sample).collect();
        assert_eq!(samples, [0, 1, 2, 0, 1, 2]);
        assert_eq!(asked.parts[3].prompt.as_deref(), Some("\"b\""));
    }

    #[test]
    fn what_cannot_be_served_is_refused() {
        let refused = |api, text| read(api, text).is_err_and(|it| it.status == 400);
        for text in [
            r#"{"prompt":"a","n":0}"#,
            r#"{"prompt":"a","n":"2"}"#,
            r#"{"prompt":"a","n":9}"#,
            r#"{"prompt":"a","n":2,"best_of":3}"#,
            r#"{"prompt":"a","use_beam_search":true}"#,
            r#"{"prompt":"a","stream":1}"#,
            r#"{"messages":[]}"#,
        ] {
            assert!(refused(Api::Completions, text), "{text}");
        }
        assert!(refused(Api::Generate, r#"{"token_ids":[1],"sampling_params":{"n":2}}"#));
        assert!(refused(Api::Generate, r#"{"token_ids":[1],"sampling_params":3}"#));
        assert!(refused(Api::Responses, r#"{"input":"a","n":2}"#));
        assert!(
            read(Api::Completions, r#"{"prompt":"a","n":2,"best_of":2,"stream":null}"#).is_ok()
        );
    }

    #[test]
    fn equal_beginnings_have_equal_prefixes() {
        let ids = estimate("[1,2,3,4]", 2);
        assert_eq!(ids.tokens, 4);
        let (one, two) =
            (estimate("\"abcdefghijklmnopq\"", 2), estimate("\"abcdefghijklmn_pq\"", 2));
        assert_eq!((one.tokens, one.prefix.len()), (4, 2));
        assert_eq!(one.prefix[0], two.prefix[0]);
        assert_ne!(one.prefix[1], two.prefix[1]);
    }
}
