//! Table of the instances that made the responses of `/v1/responses`, by response id.

use super::api::Api;
use crate::needle::Needle;
use crate::process::lock;
use bytes::Bytes;
use kvferry_engine::fabric::Endpoint;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex};

/// Most ids in the table; the oldest is forgotten first.
const IDS_MAX: usize = 65_536;

/// Longest id in the table, in bytes.
const ID_BYTES: usize = 128;

/// Bytes at the beginning in which an id is searched: vLLM sends it in the first key.
const BEGINNING: usize = 4 << 10;

/// The instance of each response, for a bounded number of ids; clones share the table.
#[derive(Clone, Debug, Default)]
pub(crate) struct ResponseMakers(Arc<Mutex<KnownMakers>>);

#[derive(Debug, Default)]
struct KnownMakers {
    makers: HashMap<Arc<str>, Endpoint>,
    /// The ids, oldest first.
    ids: VecDeque<Arc<str>>,
}

impl ResponseMakers {
    /// Notes the instance if the beginning of its answer, or of its first event, is a response.
    pub(crate) fn note(&self, api: Api, answer: &Bytes, maker: &Endpoint) {
        let id = if api == Api::Responses { response_id(answer) } else { None };
        let Some(id) = id else { return };
        let mut known = lock(&self.0);
        if let Some(known) = known.makers.get_mut(id) {
            return known.clone_from(maker);
        }
        if known.ids.len() >= IDS_MAX
            && let Some(oldest) = known.ids.pop_front()
        {
            known.makers.remove(&oldest);
        }
        let id: Arc<str> = id.into();
        known.ids.push_back(id.clone());
        known.makers.insert(id, maker.clone());
    }

    pub(crate) fn maker(&self, id: &str) -> Option<Endpoint> {
        lock(&self.0).makers.get(id).cloned()
    }
}

/// First value of a key `id`, if it is an id. Text that a client put into its request follows
/// later, or is escaped.
fn response_id(answer: &[u8]) -> Option<&str> {
    static KEY: Needle = Needle::new("\"id\"");
    let beginning = &answer[..answer.len().min(BEGINNING)];
    let rest = &beginning[KEY.find(beginning)? + KEY.len()..];
    let value = rest.trim_ascii_start().strip_prefix(b":")?.trim_ascii_start();
    let value = value.strip_prefix(b"\"")?;
    let id = &value[..memchr::memchr(b'"', value)?];
    let is_id = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.".contains(byte);
    let is_kept = (1..=ID_BYTES).contains(&id.len()) && id.iter().all(is_id);
    is_kept.then(|| std::str::from_utf8(id).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_read_of_answers_and_first_events() {
        for (answer, id) in [
            (r#"{"id":"resp_1","output":[{"id":"msg_1"}]}"#, Some("resp_1")),
            ("data: {\"response\": {\"id\" : \"resp_2\"}}\n\n", Some("resp_2")),
            (r#"{"instructions":"\"id\":\"x\"","id":"resp_3"}"#, Some("resp_3")),
            (r#"{"id":"../../sleep"}"#, None),
            (r#"{"id":7}"#, None),
            (r#"{"id":"resp"#, None),
            (r#"{"object":"response"}"#, None),
        ] {
            assert_eq!(response_id(answer.as_bytes()), id, "{answer}");
        }
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(ID_BYTES + 1));
        assert_eq!(response_id(long.as_bytes()), None);
    }

    #[test]
    fn the_oldest_id_is_forgotten_first() {
        let makers = ResponseMakers::default();
        let [one, two] = ["h:1", "h:2"].map(Endpoint::from);
        for n in 0..=IDS_MAX {
            makers.note(Api::Responses, &format!(r#"{{"id":"r{n}"}}"#).into(), &one);
        }
        makers.note(Api::Responses, &Bytes::from_static(br#"{"id":"r7"}"#), &two);
        let makers_of = ["r0", "r1", "r7"].map(|id| makers.maker(id));
        assert_eq!(makers_of, [None, Some(one), Some(two)]);
        let known = lock(&makers.0);
        assert_eq!((known.ids.len(), known.makers.len()), (IDS_MAX, IDS_MAX));
    }
}
