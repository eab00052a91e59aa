//! Makes one answer of the answers to several transfers, and puts into usage what the prefill knows
//! better.

use super::sse::{SseDecoder, data};
use bytes::Bytes;
use serde_json::{Map, Value};
use std::collections::VecDeque;

/// The answer of one decode leg.
#[derive(Debug)]
pub(crate) struct PartAnswer {
    pub(crate) body: Bytes,
    /// True for the first sample of its prompt, whose usage counts the prompt.
    pub(crate) counts_prompt: bool,
    /// Prompt tokens that the prefill had cached, if it says so.
    pub(crate) cached: Option<u64>,
}

/// One answer of all, in the order of their parts.
///
/// # Errors
/// An answer is no JSON object.
pub(crate) fn whole(answers: &[PartAnswer]) -> Result<Bytes, String> {
    if let [answer] = answers {
        return Ok(single(answer));
    }
    let (mut merged, mut usage) = (None, Usage::default());
    let mut choices = Vec::new();
    for (part, answer) in answers.iter().enumerate() {
        let object: Result<Map<String, Value>, _> = serde_json::from_slice(&answer.body);
        let mut object =
            object.map_err(|why| format!("a decode instance's answer is no JSON object: {why}"))?;
        if let Some(told) = object.get_mut("usage") {
            put_cached(told, answer.cached);
            usage.add(told, answer.counts_prompt);
        }
        if let Some(Value::Array(own)) = object.get_mut("choices") {
            choices.extend(own.drain(..).map(|choice| renumbered(choice, part)));
        }
        merged.get_or_insert(object);
    }
    let mut merged = merged.unwrap_or_default();
    merged.insert("choices".into(), choices.into());
    // Of one transfer only.
    merged.remove("kv_transfer_params");
    if let Some(usage) = usage.total() {
        merged.insert("usage".into(), usage);
    }
    serde_json::to_vec(&merged).map(Bytes::from).map_err(|why| why.to_string())
}

/// The only answer; if it is no JSON that is the client's business.
fn single(answer: &PartAnswer) -> Bytes {
    let edited = || {
        let mut object: Map<String, Value> = serde_json::from_slice(&answer.body).ok()?;
        put_cached(object.get_mut("usage")?, answer.cached);
        serde_json::to_vec(&object).ok()
    };
    let edited = answer.cached.and_then(|_| edited());
    edited.map_or_else(|| answer.body.clone(), Bytes::from)
}

fn renumbered(mut choice: Value, part: usize) -> Value {
    if let Some(index) = choice.get_mut("index") {
        *index = (index.as_u64().unwrap_or(0) + part as u64).into();
    }
    choice
}

/// The prefill's count replaces the decode's, for which all of the prompt is cached.
fn put_cached(usage: &mut Value, cached: Option<u64>) {
    let told = usage.get_mut("prompt_tokens_details").and_then(|it| it.get_mut("cached_tokens"));
    if let (Some(told), Some(cached)) = (told, cached)
        && !told.is_null()
    {
        *told = cached.into();
    }
}

/// The `cached_tokens` of a prefill's answer.
pub(crate) fn cached(body: &[u8]) -> Option<u64> {
    // Most answers say nothing of it.
    memchr::memmem::find(body, b"cached_tokens")?;
    let object: Value = serde_json::from_slice(body).ok()?;
    object["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
}

/// Usage of several transfers.
#[derive(Debug, Default)]
struct Usage {
    first: Option<Value>,
    prompt: u64,
    completion: u64,
    cached: Option<u64>,
}

impl Usage {
    fn add(&mut self, told: &Value, counts_prompt: bool) {
        let count = |key: &str| told[key].as_u64().unwrap_or(0);
        self.completion += count("completion_tokens");
        if counts_prompt {
            self.prompt += count("prompt_tokens");
            if let Some(cached) = told["prompt_tokens_details"]["cached_tokens"].as_u64() {
                *self.cached.get_or_insert(0) += cached;
            }
        }
        if self.first.is_none() && told.is_object() {
            self.first = Some(told.clone());
        }
    }

    fn total(self) -> Option<Value> {
        let mut usage = self.first?;
        usage["prompt_tokens"] = self.prompt.into();
        usage["completion_tokens"] = self.completion.into();
        usage["total_tokens"] = (self.prompt + self.completion).into();
        put_cached(&mut usage, self.cached);
        Some(usage)
    }
}

/// Makes one stream of the streams of several transfers.
#[derive(Debug)]
pub(crate) struct StreamMerger {
    parts: Vec<PartStream>,
    /// `id` and `created` of the first event.
    name: Option<(Value, Value)>,
    usage: Usage,
    /// The event that carries usage alone; what it says is replaced.
    last: Option<Map<String, Value>>,
}

#[derive(Debug, Default)]
struct PartStream {
    events: SseDecoder,
    counts_prompt: bool,
    cached: Option<u64>,
}

impl StreamMerger {
    /// A merger of streams; for each whether it counts its prompt.
    pub(crate) fn new(counts_prompt: impl Iterator<Item = bool>) -> StreamMerger {
        let part = |counts_prompt| PartStream { counts_prompt, ..PartStream::default() };
        let parts = counts_prompt.map(part).collect();
        StreamMerger { parts, name: None, usage: Usage::default(), last: None }
    }

    /// What the prefill of a part had cached.
    pub(crate) fn cached(&mut self, part: usize, cached: Option<u64>) {
        self.parts[part].cached = cached;
    }

    /// Takes bytes of a part's stream in; events go to `out`.
    ///
    /// # Errors
    /// An event is too long.
    pub(crate) fn feed(
        &mut self,
        part: usize,
        bytes: &[u8],
        out: &mut VecDeque<Bytes>,
    ) -> Result<(), &'static str> {
        self.parts[part].events.feed(bytes)?;
        while let Some(event) = self.parts[part].events.next() {
            self.event(part, event, out);
        }
        Ok(())
    }

    fn event(&mut self, part: usize, event: Bytes, out: &mut VecDeque<Bytes>) {
        let Some(data) = data(&event) else { return out.push_back(event) };
        if data == b"[DONE]" {
            return;
        }
        let Ok(Value::Object(mut object)) = serde_json::from_slice(data) else {
            return out.push_back(event);
        };
        let PartStream { counts_prompt, cached, .. } = self.parts[part];
        if let Some(usage) = object.get_mut("usage") {
            put_cached(usage, cached);
        }
        if self.parts.len() > 1 {
            self.rename(&mut object);
            let alone = matches!(object.get("choices"), Some(Value::Array(own)) if own.is_empty());
            if let (true, Some(usage)) = (alone, object.get("usage").filter(|it| it.is_object())) {
                self.usage.add(usage, counts_prompt);
                self.last.get_or_insert(object);
                return;
            }
            if let Some(Value::Array(own)) = object.get_mut("choices") {
                own.iter_mut().for_each(|choice| *choice = renumbered(choice.take(), part));
            }
        }
        out.push_back(written(&object));
    }

    fn rename(&mut self, object: &mut Map<String, Value>) {
        let get = |key: &str| object.get(key).cloned().unwrap_or(Value::Null);
        let (id, created) = self.name.get_or_insert_with(|| (get("id"), get("created")));
        for (key, value) in [("id", id), ("created", created)] {
            if object.contains_key(key) {
                object.insert(key.into(), value.clone());
            }
        }
    }

    /// A part's stream has ended.
    pub(crate) fn part_ended(&mut self, part: usize, out: &mut VecDeque<Bytes>) {
        out.extend(self.parts[part].events.rest());
    }

    pub(crate) fn finish(&mut self, out: &mut VecDeque<Bytes>) {
        if let Some(mut last) = self.last.take()
            && let Some(usage) = std::mem::take(&mut self.usage).total()
        {
            last.insert("usage".into(), usage);
            out.push_back(written(&last));
        }
        out.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }
}

fn written(object: &Map<String, Value>) -> Bytes {
    let mut event = b"data: ".to_vec();
    serde_json::to_writer(&mut event, object).expect("a Vec takes every value");
    event.extend_from_slice(b"\n\n");
    event.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn answer(body: Value, counts_prompt: bool, cached: Option<u64>) -> PartAnswer {
        PartAnswer { body: body.to_string().into(), counts_prompt, cached }
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
    fn one_answer_stays_as_it_is_but_for_what_the_prefill_had_cached() {
        let body = decode("a", 3);
        let same = whole(&[answer(body.clone(), true, None)]).unwrap();
        assert_eq!(same, body.to_string());
        let merged: Value =
            serde_json::from_slice(&whole(&[answer(body, true, Some(1))]).unwrap()).unwrap();
        assert_eq!(merged["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
        assert_eq!(merged["kv_transfer_params"]["x"], 1);
        let text = PartAnswer { body: "not json".into(), counts_prompt: true, cached: Some(1) };
        assert_eq!(whole(&[text]).unwrap(), "not json");
    }

    #[test]
    fn answers_are_numbered_and_their_usage_summed() {
        let answers = [
            answer(decode("a", 3), true, Some(1)),
            answer(decode("b", 3), false, Some(3)),
            answer(decode("c", 3), true, None),
        ];
        let merged: Value = serde_json::from_slice(&whole(&answers).unwrap()).unwrap();
        assert_eq!(merged["id"], "id-a");
        let choices: Vec<_> = merged["choices"]
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
            merged["usage"],
            json!({"prompt_tokens": 6, "completion_tokens": 6,
            "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 4}})
        );
        assert!(merged.get("kv_transfer_params").is_none());
        let bad = PartAnswer { body: "x".into(), counts_prompt: true, cached: None };
        assert!(whole(&[answer(decode("a", 0), true, None), bad]).is_err());
    }

    #[test]
    fn streams_become_one() {
        let mut merger = StreamMerger::new([true, false].into_iter());
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
        merger.feed(1, chunk("b", "b0").as_bytes(), &mut out).unwrap();
        merger.feed(0, chunk("a", "a0").as_bytes(), &mut out).unwrap();
        merger.feed(0, usage("a").as_bytes(), &mut out).unwrap();
        merger.part_ended(0, &mut out);
        merger.feed(1, usage("b").as_bytes(), &mut out).unwrap();
        merger.part_ended(1, &mut out);
        merger.finish(&mut out);
        let events: Vec<Value> = out
            .iter()
            .take(3)
            .map(|event| serde_json::from_slice(data(event).unwrap()).unwrap())
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
