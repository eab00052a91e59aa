//! Lists of models of several instances, made one.

use bytes::Bytes;
use hyper::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeSet;
use std::sync::Arc;

/// What instances answered that were asked for their models.
#[derive(Default)]
pub(super) struct ModelLists {
    /// The answers that are a list.
    lists: Vec<Bytes>,
    /// The first answer that is none.
    refusal: Option<(StatusCode, Bytes)>,
    /// Names of the models of all lists.
    listed: BTreeSet<Arc<str>>,
    /// The others that are known to be served.
    named: BTreeSet<Arc<str>>,
}

#[derive(Deserialize)]
struct ModelList<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct ModelName {
    id: Arc<str>,
}

fn name(card: &RawValue) -> Option<Arc<str>> {
    serde_json::from_str::<ModelName>(card.get()).ok().map(|it| it.id)
}

impl ModelLists {
    /// True if an instance may list models that are in no list yet.
    pub(super) fn misses(&self, models: Option<&[Arc<str>]>) -> bool {
        models.is_none_or(|models| models.iter().any(|it| !self.listed.contains(it)))
    }

    /// Takes the answer of an instance.
    pub(super) fn add(&mut self, status: StatusCode, body: Bytes) {
        let list = serde_json::from_slice::<ModelList<'_>>(&body).ok();
        match list.filter(|_| status.is_success()) {
            Some(list) => {
                let names: Vec<_> = list.data.into_iter().filter_map(name).collect();
                self.listed.extend(names);
                self.lists.push(body);
            }
            None => {
                self.refusal.get_or_insert((status, body));
            }
        }
    }

    /// Names models that are served, whoever lists them.
    pub(super) fn name(&mut self, models: Option<&[Arc<str>]>) {
        let names = models.unwrap_or_default().iter();
        self.named.extend(names.filter(|it| !self.listed.contains(*it)).cloned());
    }

    /// The list of all, in the words of those who listed them; that of one instance as it is.
    pub(super) fn into_answer(self) -> Option<(StatusCode, Bytes)> {
        #[derive(Serialize)]
        struct Union<'a> {
            object: &'static str,
            data: Vec<&'a RawValue>,
        }
        if let ([one], true) = (&self.lists[..], self.named.is_empty()) {
            return Some((StatusCode::OK, one.clone()));
        }
        let named = self.named.iter().map(|id| {
            let card = serde_json::json!({"id": id, "object": "model", "owned_by": "kvferry"});
            serde_json::value::to_raw_value(&card).expect("texts are JSON")
        });
        let named: Vec<_> = named.collect();
        let lists = self.lists.iter().filter_map(|it| serde_json::from_slice(it).ok());
        let lists: Vec<ModelList<'_>> = lists.collect();
        let mut seen = BTreeSet::new();
        let cards = lists.iter().flat_map(|list| list.data.iter().copied());
        let mut data: Vec<&RawValue> =
            cards.filter(|card| name(card).is_some_and(|id| seen.insert(id))).collect();
        data.extend(named.iter().map(|card| &**card));
        if data.is_empty() {
            return self.refusal;
        }
        let union = Union { object: "list", data };
        Some((StatusCode::OK, serde_json::to_vec(&union).expect("JSON is JSON").into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(lists: &[&'static str], named: &[&str]) -> Option<(u16, String)> {
        let mut all = ModelLists::default();
        for list in lists {
            let status =
                if list.starts_with("{\"data") { StatusCode::OK } else { StatusCode::FORBIDDEN };
            all.add(status, Bytes::from_static(list.as_bytes()));
        }
        let named: Vec<Arc<str>> = named.iter().map(|it| (*it).into()).collect();
        all.name(Some(&named));
        let (status, body) = all.into_answer()?;
        Some((status.as_u16(), String::from_utf8(body.to_vec()).expect("text")))
    }

    #[test]
    fn lists_become_one_without_doubles() {
        let (one, two) =
            (r#"{"data":[{"id":"a","x":1.50}],"y":0}"#, r#"{"data":[{"id":"a"},{"id":"b"}]}"#);
        assert_eq!(answer(&[one], &["a"]), Some((200, one.into())));
        let union = r#"{"object":"list","data":[{"id":"a","x":1.50},{"id":"b"}]}"#;
        assert_eq!(answer(&[one, "no", two], &[]), Some((200, union.into())));
        let named =
            r#"{"object":"list","data":[{"id":"c","object":"model","owned_by":"kvferry"}]}"#;
        assert_eq!(answer(&["no"], &["c"]), Some((200, named.into())));
        assert_eq!(answer(&["no", "neither"], &[]), Some((403, "no".into())));
        assert_eq!(answer(&[], &[]), None);
    }
}
