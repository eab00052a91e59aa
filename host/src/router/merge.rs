//! Makes one answer of the answers to several transfers, and puts into usage what the prefill knows
//! better. Answers keep their bytes except for what is replaced.

use super::body_chain::{BodyChain, ChainBuilder};
use super::fields::{FieldEdit, JsonFields, Splices, elements};
use super::lax;
use super::memory_budget::{ChargedBytes, MemoryCharge};
use super::sse::{SseDecoder, data_range};
use crate::needle::Needle;
use bytes::Bytes;
use hyper::header::HeaderValue;
use kvferry_engine::core::dialect::moriio::address::PREFILL_MARK;
use memchr::memmem;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Most choices of an answer that is merged with others.
const CHOICES_MAX: usize = 4096;

/// Facts about an answer that its bytes do not have.
#[derive(Clone, Debug, Default)]
pub(crate) struct PartFacts {
    /// Prompt tokens that the prefill had cached, if its answer has them.
    pub(crate) cached: Option<u64>,
    /// The leg's request id if it names addresses of instances, which clients must not see.
    pub(crate) inner_id: Option<Arc<str>>,
}

/// The answer of one decode leg.
#[derive(Debug)]
pub(crate) struct PartAnswer {
    pub(crate) body: ChargedBytes,
    /// True for the first sample of its prompt, whose usage counts the prompt.
    pub(crate) counts_prompt: bool,
    pub(crate) facts: PartFacts,
}

/// Id of a request in the form that its client sees.
#[derive(Clone, Debug)]
pub(crate) struct ShownId {
    id: HeaderValue,
    /// As it stands between quotes, made when it is needed.
    quoted: OnceLock<Bytes>,
}

impl ShownId {
    /// Makes it of any bytes; those that are not UTF-8 are replaced.
    pub(crate) fn new(id: HeaderValue) -> ShownId {
        ShownId { id, quoted: OnceLock::new() }
    }

    fn quoted(&self) -> &Bytes {
        self.quoted.get_or_init(|| {
            let quoted = serde_json::to_string(&String::from_utf8_lossy(self.id.as_bytes()));
            let quoted = quoted.expect("texts are JSON");
            let inside = quoted.len() - 1;
            Bytes::from(quoted).slice(1..inside)
        })
    }

    /// Replaces an id that names addresses with this one.
    fn replace(&self, inner: Option<&Arc<str>>, text: &[u8], splices: &mut Splices) {
        // Ids that name addresses begin with it.
        static MARK: Needle = Needle::new(PREFILL_MARK);
        let Some(inner) = inner.filter(|_| MARK.is_in(text)) else { return };
        for at in memmem::find_iter(text, inner.as_bytes()) {
            splices.replace(at..at + inner.len(), self.quoted().clone());
        }
    }
}

/// One answer of all, in the order of their parts.
///
/// # Errors
/// An answer is no JSON object.
pub(crate) fn whole(answers: Vec<PartAnswer>, shown: &ShownId) -> Result<BodyChain, String> {
    let body = match &answers[..] {
        [answer] => single(answer, shown),
        answers => joined(answers, shown)?,
    };
    Ok(body.holding(answers.into_iter().map(|answer| answer.body.memory).collect()))
}

/// The only answer; it is passed on even if it is not a JSON object.
fn single(answer: &PartAnswer, shown: &ShownId) -> BodyChain {
    let (text, mut splices) = (&answer.body.bytes, Splices::default());
    let is_edited = answer.facts.cached.is_some() || TRANSFER_KEY.is_in(text);
    if is_edited && let Ok(fields) = JsonFields::parse(text.clone()) {
        edit_facts(&fields, answer.facts.cached, &mut splices);
    }
    shown.replace(answer.facts.inner_id.as_ref(), text, &mut splices);
    splices.chain(text)
}

fn joined(answers: &[PartAnswer], shown: &ShownId) -> Result<BodyChain, String> {
    let (mut first, mut usage, mut choices) = (None, Usage::default(), ChainBuilder::default());
    let mut is_first_choice = true;
    for (part, answer) in answers.iter().enumerate() {
        let text = &answer.body.bytes;
        let fields =
            JsonFields::parse(text.clone()).map_err(|why| why.of("a decode instance's answer"))?;
        if let Some(told) = fields.object("usage") {
            usage.add(told, answer.counts_prompt, answer.facts.cached);
        }
        let mut splices = Splices::default();
        shown.replace(answer.facts.inner_id.as_ref(), text, &mut splices);
        if let Some(own) = fields.range("choices") {
            let (own, count) = elements(text, own, CHOICES_MAX).unwrap_or_default();
            if count > CHOICES_MAX {
                return Err(format!(
                    "a decode instance's answer has more than {CHOICES_MAX} choices"
                ));
            }
            for choice in &own {
                renumber(&fields, choice.clone(), part, &mut splices);
            }
            if let (Some(first), Some(last)) = (own.first(), own.last()) {
                let comma = if std::mem::take(&mut is_first_choice) { "" } else { "," };
                choices.push(Bytes::from_static(comma.as_bytes()));
                splices.clone().apply(text, first.start..last.end, &mut choices);
            }
        }
        first.get_or_insert((fields, splices));
    }
    let (first, mut splices) = first.ok_or("there is no answer")?;
    let mut edits = vec![("kv_transfer_params", FieldEdit::Drop)];
    edits.extend(usage.total().map(|usage| ("usage", FieldEdit::Put(usage))));
    match first.range("choices") {
        Some(range) => {
            splices.clear_within(&range);
            splices.replace(range.clone(), Bytes::from_static(b"["));
            for slice in choices.finish().into_slices() {
                splices.replace(range.end..range.end, slice);
            }
            splices.replace(range.end..range.end, Bytes::from_static(b"]"));
        }
        None => {
            let all = [b"[", &choices.finish().to_bytes()[..], b"]"].concat();
            edits.push(("choices", FieldEdit::Put(all.into())));
        }
    }
    first.edit(&edits, &mut splices);
    Ok(splices.chain(first.text()))
}

static TRANSFER_KEY: Needle = Needle::new("\"kv_transfer_params\"");

static USAGE_KEY: Needle = Needle::new("\"usage\"");

/// Puts the facts into an answer, and removes fields that only engines need.
fn edit_facts(fields: &JsonFields, cached: Option<u64>, splices: &mut Splices) {
    // Events of /v1/responses and /v1/messages contain the answer.
    let within = [fields.object("response"), fields.object("message")];
    for object in [Some(fields)].into_iter().chain(within.iter().map(Option::as_ref)).flatten() {
        if let Some(usage) = object.object("usage") {
            put_cached(&usage, cached, splices);
            put_cache_read(&usage, cached, splices);
        }
        if object.range("kv_transfer_params").is_some() {
            object.edit(&[("kv_transfer_params", FieldEdit::Drop)], splices);
        }
    }
}

/// Adds the number of a part to the index of a choice.
fn renumber(fields: &JsonFields, choice: Range<usize>, part: usize, splices: &mut Splices) {
    let Ok(choice) = JsonFields::within(fields.text().clone(), choice) else { return };
    let index = choice.get("index").and_then(lax::integer).and_then(|it| u64::try_from(it).ok());
    let index = index.unwrap_or(0).saturating_add(part as u64).to_string();
    choice.edit(&[("index", FieldEdit::Replace(index.into()))], splices);
}

/// The `cached_tokens` of a usage, with the object that contains them.
fn cached_tokens(usage: &JsonFields) -> Option<(JsonFields, u64)> {
    let details = usage.object("prompt_tokens_details")?;
    let cached = lax::integer(details.get("cached_tokens")?)?;
    Some((details, u64::try_from(cached).ok()?))
}

/// The prefill's count replaces the decode's, for which all of the prompt is cached.
fn put_cached(usage: &JsonFields, cached: Option<u64>, splices: &mut Splices) {
    if let (Some((details, _)), Some(cached)) = (cached_tokens(usage), cached) {
        let cached = FieldEdit::Replace(cached.to_string().into());
        details.edit(&[("cached_tokens", cached)], splices);
    }
}

/// A count in a usage.
fn count(usage: &JsonFields, key: &str) -> Option<u64> {
    u64::try_from(lax::integer(usage.get(key)?)?).ok()
}

const CACHE_READ: &str = "cache_read_input_tokens";

/// Same in the form of /v1/messages, where cached tokens do not count as input.
fn put_cache_read(usage: &JsonFields, cached: Option<u64>, splices: &mut Splices) {
    let counts = (count(usage, "input_tokens"), count(usage, CACHE_READ), cached);
    let (Some(input), Some(read), Some(cached)) = counts else { return };
    let put = |count: u64| FieldEdit::Replace(count.to_string().into());
    let input = input.saturating_add(read).saturating_sub(cached);
    usage.edit(&[("input_tokens", put(input)), (CACHE_READ, put(cached))], splices);
}

/// Prompt tokens that the prefill had cached, from its answer.
pub(crate) fn cached(body: &Bytes) -> Option<u64> {
    // Most answers say nothing of it.
    static CACHE: Needle = Needle::new("\"cache");
    CACHE.find(body)?;
    let usage = JsonFields::parse(body.clone()).ok()?.object("usage")?;
    cached_tokens(&usage).map(|(_, cached)| cached).or_else(|| count(&usage, CACHE_READ))
}

/// Usage of several transfers.
#[derive(Debug, Default)]
struct Usage {
    first: Option<JsonFields>,
    prompt: u64,
    completion: u64,
    cached: Option<u64>,
}

impl Usage {
    /// Adds the usage of a part; the prefill's `cached` counts in place of the decode's.
    fn add(&mut self, told: JsonFields, counts_prompt: bool, cached: Option<u64>) {
        let count = |key: &str| count(&told, key).unwrap_or(0);
        self.completion = self.completion.saturating_add(count("completion_tokens"));
        if counts_prompt {
            self.prompt = self.prompt.saturating_add(count("prompt_tokens"));
            if let Some((_, own)) = cached_tokens(&told) {
                let sum = self.cached.get_or_insert(0);
                *sum = sum.saturating_add(cached.unwrap_or(own));
            }
        }
        self.first.get_or_insert(told);
    }

    /// The first usage, with the sums of all.
    fn total(self) -> Option<Bytes> {
        let first = self.first?;
        let mut splices = Splices::default();
        put_cached(&first, self.cached, &mut splices);
        let put = |count: u64| FieldEdit::Put(count.to_string().into());
        let edits = [
            ("prompt_tokens", put(self.prompt)),
            ("completion_tokens", put(self.completion)),
            ("total_tokens", put(self.prompt.saturating_add(self.completion))),
        ];
        first.edit(&edits, &mut splices);
        Some(first.spliced(splices))
    }
}

/// Makes one stream of the streams of several transfers.
#[derive(Debug)]
pub(crate) struct StreamMerger {
    parts: Vec<PartStream>,
    shown: ShownId,
    /// `id` and `created` of the first event.
    name: Option<[Bytes; 2]>,
    usage: Usage,
    /// The event that carries usage alone; what it says is replaced.
    last: Option<Bytes>,
}

#[derive(Debug)]
struct PartStream {
    events: SseDecoder,
    counts_prompt: bool,
    facts: PartFacts,
}

impl StreamMerger {
    /// A merger of one stream for each part; `parts` tells whether the usage of a part counts the
    /// prompt. Incomplete events are charged to the address of `memory`.
    pub(crate) fn new(
        parts: impl Iterator<Item = bool>,
        shown: ShownId,
        memory: &MemoryCharge,
    ) -> StreamMerger {
        let parts = parts.map(|counts_prompt| PartStream {
            events: SseDecoder::new(memory.another()),
            counts_prompt,
            facts: PartFacts::default(),
        });
        let parts = parts.collect();
        StreamMerger { parts, shown, name: None, usage: Usage::default(), last: None }
    }

    /// Sets the facts of a part whose stream begins.
    pub(crate) fn begin(&mut self, part: usize, facts: PartFacts) {
        self.parts[part].facts = facts;
    }

    /// Takes bytes of a part, and appends what the client gets to `out`.
    ///
    /// # Errors
    /// An event is too long, or there is no memory for it.
    pub(crate) fn feed(
        &mut self,
        part: usize,
        bytes: Bytes,
        out: &mut VecDeque<Bytes>,
    ) -> Result<(), String> {
        self.parts[part].events.feed(bytes)?;
        while let Some(event) = self.parts[part].events.next() {
            self.event(part, event, out);
        }
        Ok(())
    }

    fn event(&mut self, part: usize, event: Bytes, out: &mut VecDeque<Bytes>) {
        let (PartStream { facts, .. }, is_split) = (&self.parts[part], self.parts.len() > 1);
        let mut splices = Splices::default();
        self.shown.replace(facts.inner_id.as_ref(), &event, &mut splices);
        let data = data_range(&event);
        if is_split && data.clone().is_some_and(|data| &event[data] == b"[DONE]") {
            return;
        }
        let is_edited = is_split
            || facts.cached.is_some() && USAGE_KEY.is_in(&event)
            || TRANSFER_KEY.is_in(&event);
        let fields = data.filter(|_| is_edited);
        let fields = fields.and_then(|data| JsonFields::within(event.clone(), data).ok());
        if let Some(fields) = &fields {
            edit_facts(fields, facts.cached, &mut splices);
            if is_split && self.is_merged(part, fields, &mut splices) {
                return;
            }
        }
        out.push_back(splices.chain(&event).to_bytes());
    }

    /// Edits an event for the merged stream; true if it is kept until the end of the stream.
    fn is_merged(&mut self, part: usize, fields: &JsonFields, splices: &mut Splices) -> bool {
        let value = |key: &str| {
            let mut value = ChainBuilder::default();
            let range = fields.range(key).unwrap_or_default();
            splices.clone().apply(fields.text(), range, &mut value);
            value.finish().to_bytes()
        };
        let name = self.name.get_or_insert_with(|| [value("id"), value("created")]);
        let [id, created] = name.clone().map(|value| match value.is_empty() {
            true => FieldEdit::Replace(Bytes::from_static(b"null")),
            false => FieldEdit::Replace(value),
        });
        fields.edit(&[("id", id), ("created", created)], splices);
        let choices = fields.range("choices");
        let choices = choices.and_then(|own| elements(fields.text(), own, CHOICES_MAX).ok());
        if let (Some((choices, _)), Some(usage)) = (&choices, fields.object("usage"))
            && choices.is_empty()
        {
            let PartStream { counts_prompt, facts, .. } = &self.parts[part];
            self.usage.add(usage, *counts_prompt, facts.cached);
            let event = splices.clone().chain(fields.text()).to_bytes();
            self.last.get_or_insert(event);
            return true;
        }
        for choice in choices.map(|(choices, _)| choices).unwrap_or_default() {
            renumber(fields, choice, part, splices);
        }
        false
    }

    /// A part's stream has ended.
    pub(crate) fn part_ended(&mut self, part: usize, out: &mut VecDeque<Bytes>) {
        if let Some(rest) = self.parts[part].events.rest() {
            self.event(part, rest, out);
        }
    }

    /// Ends the stream; a stream of several parts gets their usage and the last event.
    pub(crate) fn finish(&mut self, out: &mut VecDeque<Bytes>) {
        if let Some(last) = self.last.take()
            && let Some(usage) = std::mem::take(&mut self.usage).total()
            && let Some(data) = data_range(&last)
            && let Ok(fields) = JsonFields::within(last.clone(), data)
        {
            let mut splices = Splices::default();
            fields.edit(&[("usage", FieldEdit::Put(usage))], &mut splices);
            out.push_back(splices.chain(&last).to_bytes());
        }
        if self.parts.len() > 1 {
            out.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::memory_budget::unbounded;
    use serde_json::{Value, json};

    fn answer(body: impl ToString, counts_prompt: bool, cached: Option<u64>) -> PartAnswer {
        let body = ChargedBytes { bytes: body.to_string().into(), memory: unbounded() };
        PartAnswer { body, counts_prompt, facts: PartFacts { cached, inner_id: None } }
    }

    fn shown() -> ShownId {
        ShownId::new(HeaderValue::from_static("shown \"1\""))
    }

    fn merged(answers: Vec<PartAnswer>) -> Result<String, String> {
        let bytes = whole(answers, &shown())?.to_bytes();
        Ok(String::from_utf8(bytes.to_vec()).expect("text"))
    }

    fn decode(text: &str, cached: u64) -> Value {
        json!({
            "id": format!("id-{text}"), "created": 1, "choices": [{"index": 0, "text": text}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": cached}},
            "kv_transfer_params": {"x": 1},
        })
    }

    #[test]
    fn one_answer_keeps_its_bytes_except_for_what_the_router_knows_better() {
        let body = r#"{ "z": -1.0468965599587365, "a": 123456789012345678901234567890,
            "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 3}}, "b": 1e-7,
            "kv_transfer_params": null}"#;
        assert_eq!(merged(vec![answer(body, true, None)]).unwrap(), body);
        let edited = body.replace("\"cached_tokens\": 3", "\"cached_tokens\": 1");
        assert_eq!(merged(vec![answer(body, true, Some(1))]).unwrap(), edited);
        let text = "not json";
        assert_eq!(merged(vec![answer(text, true, Some(1))]).unwrap(), text);
    }

    #[test]
    fn addresses_of_instances_are_not_in_answers() {
        let inner: Arc<str> = "___prefill_addr_10.0.0.1:1___decode_addr_10.0.0.2:2_f".into();
        let one = || {
            let body = format!(
                r#"{{"id":"cmpl-{inner}","x":[{{"id":"{inner}-0"}}],"kv_transfer_params":{{"h":"10.0.0.1","i":"{inner}"}}}}"#
            );
            let mut answer = answer(body, true, None);
            answer.facts.inner_id = Some(inner.clone());
            answer
        };
        let shown = r#"{"id":"cmpl-shown \"1\"","x":[{"id":"shown \"1\"-0"}]}"#;
        assert_eq!(merged(vec![one()]).unwrap(), shown);
        let several = merged(vec![one(), one()]).unwrap();
        assert!(!several.contains("10.0.0"), "{several}");
        let _: Value = serde_json::from_str(&several).unwrap();

        let facts = PartFacts { cached: None, inner_id: Some(inner.clone()) };
        let mut merger = StreamMerger::new([true].into_iter(), self::shown(), &unbounded());
        merger.begin(0, facts);
        let stream = format!(
            "data: {{\"id\":\"cmpl-{inner}\"}}\n\nevent: response.completed\ndata: \
            {{\"response\":{{\"id\":\"{inner}\",\"kv_transfer_params\":{{\"h\":1}}}}}}\n\ndata: [DONE]\n\n"
        );
        for cut in 1..stream.len() {
            let mut out = VecDeque::new();
            for part in stream.as_bytes().chunks(cut) {
                merger.feed(0, Bytes::copy_from_slice(part), &mut out).unwrap();
            }
            let seen: Vec<u8> = out.into_iter().flatten().collect();
            let expected = "data: {\"id\":\"cmpl-shown \\\"1\\\"\"}\n\nevent: response.completed\ndata: \
                {\"response\":{\"id\":\"shown \\\"1\\\"\"}}\n\ndata: [DONE]\n\n";
            assert_eq!(String::from_utf8(seen).unwrap(), expected);
        }
    }

    #[test]
    fn choices_keep_their_bytes_except_for_their_numbers() {
        let one =
            r#"{"z":0.10,"choices":[ {"text":"a","index": 0, "p":-0.30000000000000004} ],"a":1E5}"#;
        let two = r#"{"choices":[{"index":0,"text":"b"},{"index":1}]}"#;
        let both = merged(vec![answer(one, true, None), answer(two, false, None)]).unwrap();
        let expected = r#"{"z":0.10,"choices":[{"text":"a","index": 0, "p":-0.30000000000000004},{"index":1,"text":"b"},{"index":2}],"a":1E5}"#;
        assert_eq!(both, expected);
        let none = merged(vec![answer("{}", true, None), answer(two, false, None)]).unwrap();
        assert_eq!(none, r#"{"choices":[{"index":1,"text":"b"},{"index":2}]}"#);
    }

    #[test]
    fn answers_are_numbered_and_their_usage_summed() {
        let answers = vec![
            answer(decode("a", 3), true, Some(1)),
            answer(decode("b", 3), false, Some(3)),
            answer(decode("c", 3), true, None),
        ];
        let all: Value = serde_json::from_str(&merged(answers).unwrap()).unwrap();
        assert_eq!(all["id"], "id-a");
        let choices: Vec<_> = all["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| (&it["index"], &it["text"]))
            .collect();
        assert_eq!(
            choices,
            [(&json!(0), &json!("a")), (&json!(1), &json!("b")), (&json!(2), &json!("c"))]
        );
        assert_eq!(
            all["usage"],
            json!({"prompt_tokens": 6, "completion_tokens": 6,
            "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}})
        );
        assert!(all.get("kv_transfer_params").is_none());
        assert!(merged(vec![answer(decode("a", 0), true, None), answer("x", true, None)]).is_err());
    }

    #[test]
    fn streams_become_one() {
        let mut merger = StreamMerger::new([true, false].into_iter(), shown(), &unbounded());
        let mut out = VecDeque::new();
        let chunk = |id: &str, text: &str| {
            format!("data: {}\n\n", json!({"id": id, "choices": [{"index": 0, "text": text}]}))
        };
        let usage = |id: &str| {
            format!(
                "data: {}\n\ndata: [DONE]\n\n",
                json!({"id": id, "choices": [],
                "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}})
            )
        };
        merger.feed(1, chunk("b", "b0").into(), &mut out).unwrap();
        merger.feed(0, chunk("a", "a0").into(), &mut out).unwrap();
        merger.feed(0, usage("a").into(), &mut out).unwrap();
        merger.part_ended(0, &mut out);
        merger.feed(1, usage("b").into(), &mut out).unwrap();
        merger.part_ended(1, &mut out);
        merger.finish(&mut out);
        let events: Vec<Value> = out
            .iter()
            .take(3)
            .map(|event| serde_json::from_slice(&event[data_range(event).unwrap()]).unwrap())
            .collect();
        assert_eq!(out.len(), 4);
        assert_eq!(&out[3][..], b"data: [DONE]\n\n");
        assert!(events.iter().all(|event| event["id"] == "b"));
        assert_eq!(
            (&events[0]["choices"][0]["index"], &events[1]["choices"][0]["index"]),
            (&json!(1), &json!(0))
        );
        assert_eq!(
            events[2]["usage"],
            json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})
        );
    }
}
