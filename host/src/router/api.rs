//! The paths that are served by a prefill and a decode, and the bodies of their legs.

use super::body_chain::BodyChain;
use super::error::HttpError;
use super::fields::{FieldEdit, JsonFields, Splices, by_key};
use super::headers::is_usable;
use super::lax;
use super::prompts::{PromptRange, check_parts, estimate, prompts};
use bytes::Bytes;
use kvferry_engine::core::router::RoutedPrompt;
use std::sync::Arc;

/// A way to ask for tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Api {
    Completions,
    Chat,
    Responses,
    Generate,
    /// Anthropic's form.
    Messages,
}

pub(crate) const APIS: [Api; 5] =
    [Api::Completions, Api::Chat, Api::Responses, Api::Generate, Api::Messages];

const fn put(value: &'static [u8]) -> FieldEdit {
    FieldEdit::Put(Bytes::from_static(value))
}

const fn replace(value: &'static [u8]) -> FieldEdit {
    FieldEdit::Replace(Bytes::from_static(value))
}

const fn default(value: &'static [u8]) -> FieldEdit {
    FieldEdit::Default(Bytes::from_static(value))
}

/// What vllm-router 0.1.17 adds to bodies of completions.
static COMPLETIONS: [(&str, FieldEdit); 6] = [
    ("stream", default(b"false")),
    ("echo", default(b"false")),
    ("no_stop_trim", default(b"false")),
    ("ignore_eos", default(b"false")),
    ("skip_special_tokens", default(b"true")),
    ("return_hidden_states", default(b"false")),
];

/// The same for chats.
static CHAT: [(&str, FieldEdit); 10] = [
    ("stream", default(b"false")),
    ("logprobs", default(b"false")),
    ("no_stop_trim", default(b"false")),
    ("ignore_eos", default(b"false")),
    ("continue_final_message", default(b"false")),
    ("skip_special_tokens", default(b"true")),
    ("separate_reasoning", default(b"true")),
    ("stream_reasoning", default(b"true")),
    ("return_hidden_states", default(b"false")),
    ("include_reasoning", default(b"true")),
];

/// What makes a prefill compute the prompt and stop, length-capped, so that it keeps the KV.
static ONE_TOKEN: [(&str, FieldEdit); 5] = [
    ("max_tokens", put(b"1")),
    ("max_completion_tokens", replace(b"1")),
    ("min_tokens", put(b"1")),
    ("stream", put(b"false")),
    ("stream_options", FieldEdit::Drop),
];

/// Edits of a prefill leg of the responses API.
static ONE_OUTPUT_TOKEN: [(&str, FieldEdit); 3] = [
    ("max_output_tokens", put(b"1")),
    ("stream", put(b"false")),
    ("stream_options", FieldEdit::Drop),
];

/// Edits of a prefill leg of the messages API.
static ONE_MESSAGE_TOKEN: [(&str, FieldEdit); 2] =
    [("max_tokens", put(b"1")), ("stream", put(b"false"))];

/// Tokens that a request without a limit is taken to generate.
const OUTPUT: u32 = 256;

impl Api {
    pub(crate) fn path(self) -> &'static str {
        match self {
            Api::Completions => "/v1/completions",
            Api::Chat => "/v1/chat/completions",
            Api::Responses => "/v1/responses",
            Api::Generate => "/inference/v1/generate",
            Api::Messages => "/v1/messages",
        }
    }

    /// First part of the ids of requests that came without one.
    pub(crate) fn id_prefix(self) -> &'static str {
        match self {
            Api::Completions => "cmpl-",
            Api::Chat => "chatcmpl-",
            Api::Responses => "req-",
            Api::Generate => "gnt-",
            Api::Messages => "msg-",
        }
    }

    pub(super) fn prompt_key(self) -> &'static str {
        match self {
            Api::Completions => "prompt",
            Api::Chat | Api::Messages => "messages",
            Api::Responses => "input",
            Api::Generate => "token_ids",
        }
    }

    /// Edits of both legs, weaker than all others.
    pub(crate) fn defaults(self) -> &'static [(&'static str, FieldEdit)] {
        match self {
            Api::Completions => &COMPLETIONS,
            Api::Chat => &CHAT,
            Api::Responses | Api::Messages => &[],
            Api::Generate => &COMPLETIONS[..1],
        }
    }

    /// Edits of the prefill leg.
    pub(crate) fn one_token(self) -> &'static [(&'static str, FieldEdit)] {
        match self {
            Api::Completions | Api::Chat => &ONE_TOKEN,
            Api::Responses => &ONE_OUTPUT_TOKEN,
            Api::Generate => &ONE_TOKEN[3..],
            // This path has no `min_tokens`.
            Api::Messages => &ONE_MESSAGE_TOKEN,
        }
    }
}

/// One transfer of a request: one sample of one prompt.
#[derive(Clone, Debug)]
pub(crate) struct RequestPart {
    /// The prompt, if the request has several.
    pub(crate) prompt: Option<PromptRange>,
    /// Which sample of it.
    pub(crate) sample: u32,
}

/// What a body asks for.
#[derive(Clone, Debug)]
pub(crate) struct GenerationRequest {
    pub(crate) api: Api,
    fields: JsonFields,
    /// The parameters' own object, on the path that has one.
    sampling_params: Option<JsonFields>,
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
        let fields = cleaned(api, fields)?;
        let stream = boolean(&fields, "stream")?;
        let sampling_params = sampling_params(api, &fields)?;
        let samples = samples(api, &fields, sampling_params.as_ref())?;
        let prompts = prompts(api, &fields, parts_max as usize)?;
        check_parts(&prompts, samples, parts_max)?;
        let several = prompts.ranges.len() > 1;
        let (mut parts, mut known) = (Vec::new(), Vec::new());
        for prompt in prompts.ranges {
            let estimated = estimate(&fields.text()[prompt.value.clone()], prefix_tokens);
            for sample in 0..samples {
                parts.push(RequestPart { prompt: several.then(|| prompt.clone()), sample });
                known.push(estimated.clone());
            }
        }
        let seed = fields.get("seed").filter(|_| samples > 1).and_then(lax::integer);
        let output = output(&fields);
        let model = model_name(&fields).map(Arc::from);
        let asked = GenerationRequest {
            api,
            fields,
            sampling_params,
            stream,
            samples,
            seed,
            parts,
            output,
            model,
        };
        Ok((asked, known))
    }

    /// The body of a leg of one part, with this `kv_transfer_params`.
    pub(crate) fn leg(&self, part: usize, prefill: bool, transfer: Option<Bytes>) -> BodyChain {
        let part = &self.parts[part];
        let mut splices = Splices::default();
        let transfer = transfer.map_or(FieldEdit::Drop, FieldEdit::Put);
        let seed = self.seed.filter(|_| self.samples > 1);
        let seed = seed.map(|seed| seed.wrapping_add(i64::from(part.sample)).to_string());
        let seed = seed.map(|seed| FieldEdit::Put(seed.into()));
        let prompt = part.prompt.as_ref().map(|prompt| {
            let value = self.fields.text().slice(prompt.value.clone());
            (prompt.field, FieldEdit::Put(value))
        });
        let mut edits: Vec<(&str, &FieldEdit)> = Vec::with_capacity(16);
        let is_sampled = prefill && self.api == Api::Generate;
        if prefill {
            edits.extend(by_key(self.api.one_token()));
        }
        edits.push(("kv_transfer_params", &transfer));
        if self.samples > 1 {
            edits.extend(by_key(&ONE_SAMPLE));
            edits.extend(seed.iter().map(|seed| ("seed", seed)));
        }
        if let Some((field, value)) = &prompt {
            edits.push((field, value));
            edits.extend(by_key(&NO_PROMPT));
        }
        match &self.sampling_params {
            Some(given) if is_sampled => given.edit(&ONE_SAMPLED, &mut splices),
            None if is_sampled => edits.extend(by_key(&ALL_SAMPLED)),
            _ => {}
        }
        let defaults = by_key(self.api.defaults());
        edits.extend(defaults.filter(|(key, _)| !prefill || *key != "stream"));
        self.fields.edit(&edits, &mut splices);
        splices.chain(self.fields.text())
    }

    /// True if the answer is put together from several.
    pub(crate) fn is_split(&self) -> bool {
        self.parts.len() > 1
    }
}

/// Edits of a leg with one of several samples.
static ONE_SAMPLE: [(&str, FieldEdit); 2] = [("n", put(b"1")), ("best_of", FieldEdit::Drop)];

/// Edits of a leg with one of several prompts, behind that of its own one.
static NO_PROMPT: [(&str, FieldEdit); 2] =
    [("prompt", FieldEdit::Drop), ("prompt_embeds", FieldEdit::Drop)];

/// Edit of a prefill leg without `sampling_params`.
static ALL_SAMPLED: [(&str, FieldEdit); 1] =
    [("sampling_params", put(b"{\"max_tokens\":1,\"min_tokens\":1}"))];

/// Edits of the `sampling_params` of a prefill leg.
static ONE_SAMPLED: [(&str, FieldEdit); 2] = [("max_tokens", put(b"1")), ("min_tokens", put(b"1"))];

/// Longest beginning of a model's name that is kept, in characters: more than of any model that an
/// instance serves, so that a longer name is none of these.
const MODEL_KEPT: usize = 1024;

/// The model that a body names, if it names one. A value that is not a string is left to the
/// instance, which refuses it.
pub(crate) fn model_name(fields: &JsonFields) -> Option<String> {
    let name = fields.get("model").and_then(lax::string)?;
    let kept: String = name.chars().take(MODEL_KEPT).collect();
    (!kept.is_empty()).then_some(kept)
}

/// The object that the body of a passed request is, without the client's `kv_transfer_params`, and
/// without a `request_id` that is not usable.
///
/// # Errors
/// A body that is not a JSON object, or has too many members.
pub(crate) fn passed_fields(body: Bytes) -> Result<JsonFields, HttpError> {
    let fields = JsonFields::parse(body).map_err(|why| HttpError::bad(&why.of("the body"), ""))?;
    let mut splices = Splices::default();
    clean_members(&fields, &[("kv_transfer_params", FieldEdit::Drop)], &mut splices)?;
    spliced(fields, splices)
}

/// The body without members whose keys come again, so that legs have few changes, and without the
/// client's `kv_transfer_params` where engines read them beside the member of that name: vLLM makes
/// both of these its `extra_args`.
fn cleaned(api: Api, fields: JsonFields) -> Result<JsonFields, HttpError> {
    let mut splices = Splices::default();
    clean_members(&fields, &[], &mut splices)?;
    if let Some(params) = sampling_params(api, &fields)? {
        params.edit::<FieldEdit>(&[], &mut splices);
        drop_transfer(&params, "extra_args", "sampling_params.extra_args", &mut splices)?;
    }
    spliced(fields, splices)
}

/// Adds these edits of a body, and those that remove what engines do not get of clients: an id of
/// the request that is not usable, and transfer parameters in `vllm_xargs`.
fn clean_members(
    fields: &JsonFields,
    edits: &[(&str, FieldEdit)],
    splices: &mut Splices,
) -> Result<(), HttpError> {
    let mut edits = edits.to_vec();
    // vLLM takes the id of a response from it, whatever the header is.
    let id = fields.get("request_id").map(lax::string);
    if id.is_some_and(|id| !id.is_some_and(|id| is_usable(id.as_bytes()))) {
        edits.push(("request_id", FieldEdit::Drop));
    }
    fields.edit(&edits, splices);
    drop_transfer(fields, "vllm_xargs", "vllm_xargs", splices)
}

/// Removes `kv_transfer_params` of the object under a key, which errors call `param`.
fn drop_transfer(
    fields: &JsonFields,
    key: &str,
    param: &str,
    splices: &mut Splices,
) -> Result<(), HttpError> {
    let object = fields.checked_object(key);
    let object = object.map_err(|why| HttpError::bad(&why.of(param), param))?;
    if let Some(object) = object {
        object.edit(&[("kv_transfer_params", FieldEdit::Drop)], splices);
    }
    Ok(())
}

/// The object with these changes.
fn spliced(fields: JsonFields, splices: Splices) -> Result<JsonFields, HttpError> {
    if splices.is_empty() {
        return Ok(fields);
    }
    let text = splices.chain(fields.text()).to_bytes();
    JsonFields::parse(text).map_err(|why| HttpError::bad(&why.of("the body"), ""))
}

/// The `sampling_params` of the body, on the path that has them.
fn sampling_params(api: Api, fields: &JsonFields) -> Result<Option<JsonFields>, HttpError> {
    let range = fields.range("sampling_params").filter(|_| api == Api::Generate);
    let given = range.map(|range| JsonFields::within(fields.text().clone(), range)).transpose();
    given.map_err(|why| HttpError::bad(&why.of("sampling_params"), "sampling_params"))
}

/// A boolean of the body, false if it is missing.
fn boolean(fields: &JsonFields, key: &'static str) -> Result<bool, HttpError> {
    let value = fields.get(key).map_or(Some(false), lax::boolean);
    value.ok_or_else(|| HttpError::bad(&format!("{key} is not a boolean; send true or false"), key))
}

fn output(fields: &JsonFields) -> u32 {
    let keys = ["max_completion_tokens", "max_tokens", "max_output_tokens"];
    let told = keys.iter().find_map(|key| fields.get(key)).and_then(lax::integer);
    told.and_then(|told| u32::try_from(told).ok()).unwrap_or(OUTPUT).max(1)
}

/// Samples per prompt. Each is a transfer of its own, so what needs them in one request of one
/// engine is refused.
fn samples(
    api: Api,
    fields: &JsonFields,
    sampling_params: Option<&JsonFields>,
) -> Result<u32, HttpError> {
    // This path has no such fields; engines ignore them.
    if api == Api::Messages {
        return Ok(1);
    }
    if boolean(fields, "use_beam_search")? {
        let message = "beam search cannot be served by prefill and decode instances";
        return Err(HttpError::bad(message, "use_beam_search"));
    }
    let one = |n: Option<&[u8]>, param: &str| match n.map_or(Some(1), lax::integer) {
        Some(1) => Ok(1),
        _ => Err(HttpError::bad(
            "n above 1 cannot be merged on this path; send one request per sample",
            param,
        )),
    };
    match api {
        Api::Generate => {
            return one(sampling_params.and_then(|params| params.get("n")), "sampling_params.n");
        }
        Api::Responses => return one(fields.get("n"), "n"),
        Api::Completions | Api::Chat | Api::Messages => {}
    }
    let n = fields.get("n").map_or(Some(1), lax::integer).and_then(|n| u32::try_from(n).ok());
    let n = n.filter(|n| *n > 0);
    let n = n.ok_or_else(|| HttpError::bad("n is not a whole number from 1 on", "n"))?;
    match fields.get("best_of").map(lax::integer) {
        None => Ok(n),
        Some(Some(best)) if best == i64::from(n) => Ok(n),
        Some(_) => Err(HttpError::bad(
            "best_of other than n cannot be served by separate transfers",
            "best_of",
        )),
    }
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
        for one in ["\"a\"", "[1,2]", "[ 1 ]", "\"\"", "[true]", "[-1.0]"] {
            assert_eq!(count(one), Some(1), "{one}");
        }
        assert_eq!((count("[\"a\",\"b\"]"), count("[[1],[2,3]]")), (Some(2), Some(2)));
        for bad in ["[]", "{}", "1", "[{}]", "null", "[NaN]"] {
            assert_eq!(count(bad), None, "{bad}");
        }
    }

    #[test]
    fn passed_bodies_lose_transfer_parameters_and_unusable_ids() {
        let passed = |text: &str| {
            let fields = passed_fields(Bytes::copy_from_slice(text.as_bytes()));
            fields.map(|fields| String::from_utf8(fields.text().to_vec()).unwrap())
        };
        let kept = r#"{"model": "m", "request_id": "mine", "vllm_xargs": {"a": 1}}"#;
        assert_eq!(passed(kept).unwrap(), kept);
        for given in [
            r#"{"a":1,"kv_transfer_params":{"x":1}}"#,
            r#"{"kv_transfer_params":{},"a":1,"kv_transfer_params":{}}"#,
            r#"{"a":1,"\u006bv_transfer_params":{}}"#,
            r#"{"a":1,"request_id":"x___decode_addr_y"}"#,
            r#"{"a":1,"request_id":"x_\u005fdecode_addr_y"}"#,
            r#"{"a":1,"request_id":"a b"}"#,
        ] {
            assert_eq!(passed(given).unwrap(), r#"{"a":1}"#, "{given}");
        }
        let inner = r#"{"vllm_xargs":{"kv_transfer_params":{"x":1},"b":2}}"#;
        assert_eq!(passed(inner).unwrap(), r#"{"vllm_xargs":{"b":2}}"#);
        assert_eq!(passed("{").unwrap_err().status, 400);
    }

    #[test]
    fn long_model_names_are_cut_behind_all_that_are_served() {
        let name = |name: &str| {
            let text = format!("{{\"model\":{name}}}");
            model_name(&JsonFields::parse(text.into()).unwrap())
        };
        assert_eq!(name("\"m\""), Some("m".to_owned()));
        assert_eq!((name("\"\""), name("null"), name("3")), (None, None, None));
        let long = name(&format!("\"{}\"", "\u{e4}".repeat(MODEL_KEPT))).unwrap();
        assert_eq!(long.chars().count(), MODEL_KEPT);
    }

    #[test]
    fn samples_are_parts_of_their_own() {
        let (asked, known) =
            read(Api::Completions, r#"{"prompt":["a","b"],"n":3,"seed":7}"#).unwrap();
        assert_eq!((asked.parts.len(), known.len(), asked.seed), (6, 6, Some(7)));
        let samples: Vec<_> = asked.parts.iter().map(|part| part.sample).collect();
        assert_eq!(samples, [0, 1, 2, 0, 1, 2]);
        let prompt = asked.parts[3].prompt.clone().unwrap();
        assert_eq!(&asked.fields.text()[prompt.value], b"\"b\"");
    }

    #[test]
    fn what_cannot_be_served_is_refused() {
        let refused = |api, text| read(api, text).is_err_and(|it| it.status == 400);
        for text in [
            r#"{"prompt":"a","n":0}"#,
            r#"{"prompt":"a","n":"two"}"#,
            r#"{"prompt":"a","n":1.5}"#,
            r#"{"prompt":"a","n":9}"#,
            r#"{"prompt":"a","n":2,"best_of":3}"#,
            r#"{"prompt":"a","use_beam_search":true}"#,
            r#"{"prompt":"a","stream":2}"#,
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

    fn leg(api: Api, text: &str, part: usize, prefill: bool) -> String {
        let (asked, _) = read(api, text).unwrap();
        let body = asked.leg(part, prefill, Some(Bytes::from_static(b"{}")));
        String::from_utf8(body.to_bytes().to_vec()).unwrap()
    }

    #[test]
    fn values_are_read_as_vllm_reads_them_and_pass_as_they_came() {
        let text =
            r#"{"prompt":"a","n":"2.0","stream":"on","seed":7.0,"logit_bias":{"5":-Infinity}}"#;
        let (asked, _) = read(Api::Completions, text).unwrap();
        assert_eq!((asked.samples, asked.stream, asked.seed), (2, true, Some(7)));
        let decode = leg(Api::Completions, text, 1, false);
        assert!(
            decode.contains(r#""stream":"on","seed":8,"logit_bias":{"5":-Infinity}"#),
            "{decode}"
        );
        let off = r#"{"messages":[],"n":1.0,"stream":0,"use_beam_search":"no"}"#;
        assert!(!read(Api::Chat, off).unwrap().0.stream);
        assert!(leg(Api::Chat, off, 0, false).contains(r#""n":1.0,"stream":0"#));
    }

    #[test]
    fn each_embedded_prompt_is_a_transfer_before_those_of_text() {
        let text = r#"{"prompt":["t"],"prompt_embeds":["QQ","Qg"]}"#;
        let (asked, _) = read(Api::Completions, text).unwrap();
        assert_eq!(asked.parts.len(), 3);
        let prompts: Vec<_> = (0..3).map(|part| leg(Api::Completions, text, part, false)).collect();
        assert!(prompts[0].starts_with(r#"{"prompt_embeds":"QQ""#), "{prompts:?}");
        assert!(prompts[1].starts_with(r#"{"prompt_embeds":"Qg""#), "{prompts:?}");
        assert!(prompts[2].starts_with(r#"{"prompt":"t","kv_transfer"#), "{prompts:?}");
        assert_eq!(read(Api::Completions, r#"{"prompt_embeds":"QQ"}"#).unwrap().0.parts.len(), 1);
        assert!(read(Api::Completions, r#"{"prompt_embeds":[1]}"#).is_err());
    }

    #[test]
    fn the_field_with_too_many_transfers_is_named() {
        let param = |text: String| {
            let error = read(Api::Completions, &text).unwrap_err();
            let body: serde_json::Value = serde_json::from_slice(&error.body).unwrap();
            assert!(body["error"]["message"].as_str().unwrap().contains("--parts-max"));
            body["error"]["param"].as_str().unwrap().to_owned()
        };
        let list = |count: usize| vec!["\"p\""; count].join(",");
        assert_eq!(param(format!("{{\"prompt\":[{}]}}", list(9))), "prompt");
        assert_eq!(param(format!("{{\"prompt\":[{}],\"n\":2}}", list(9))), "prompt");
        assert_eq!(param(format!("{{\"prompt_embeds\":[{}]}}", list(9))), "prompt_embeds");
        assert_eq!(param(format!("{{\"prompt\":[{}],\"n\":5}}", list(2))), "n");
        assert_eq!(param("{\"prompt\":\"p\",\"n\":9}".into()), "n");
    }

    #[test]
    fn transfer_parameters_of_clients_reach_no_engine() {
        let text = r#"{"token_ids":[1],"kv_transfer_params":{"x":1},"vllm_xargs":{"kv_transfer_params":"x"},
            "sampling_params":{"extra_args":{"a":1,"kv_transfer_params":{"x":1}},"max_tokens":9}}"#;
        for prefill in [true, false] {
            let body = leg(Api::Generate, text, 0, prefill);
            let body: serde_json::Value = serde_json::from_str(&body).unwrap();
            let tokens = if prefill { 1 } else { 9 };
            assert_eq!(body["sampling_params"]["max_tokens"], tokens);
            assert_eq!(body["sampling_params"]["extra_args"], serde_json::json!({"a": 1}));
            assert_eq!(body["vllm_xargs"], serde_json::json!({}));
            assert_eq!(body["kv_transfer_params"], serde_json::json!({}));
        }
        let without = leg(Api::Generate, r#"{"token_ids":[1]}"#, 0, true);
        assert!(
            without.contains(r#""sampling_params":{"max_tokens":1,"min_tokens":1}"#),
            "{without}"
        );
    }

    #[test]
    fn legs_of_messages_have_the_fields_of_their_path() {
        let text = r#"{"model":"m","messages":[],"max_tokens":9,"stream":true,"n":3}"#;
        let prefill = r#"{"model":"m","messages":[],"max_tokens":1,"stream":false,"n":3,"kv_transfer_params":{}}"#;
        assert_eq!(leg(Api::Messages, text, 0, true), prefill);
        let decode = r#"{"model":"m","messages":[],"max_tokens":9,"stream":true,"n":3,"kv_transfer_params":{}}"#;
        assert_eq!(leg(Api::Messages, text, 0, false), decode);
        assert!(read(Api::Messages, r#"{"max_tokens":9}"#).is_err());
    }

    #[test]
    fn legs_share_the_bytes_of_the_body() {
        let prompt = "p".repeat(1 << 20);
        let again = |n: u32| format!("\"again\":0,\"k{n}\":\"{}\",", "x".repeat(200));
        let again: String = (0..500).map(again).collect();
        let (asked, _) =
            read(Api::Completions, &format!("{{{again}\"prompt\":\"{prompt}\",\"n\":8}}")).unwrap();
        let within = asked.fields.text().as_ptr_range();
        for part in 0..8 {
            for prefill in [true, false] {
                let body = asked.leg(part, prefill, None);
                let copied = body.slices().filter(|it| !within.contains(&it.as_ptr()));
                assert!(copied.map(|it| it.len()).sum::<usize>() < 1024);
            }
        }
    }
}
