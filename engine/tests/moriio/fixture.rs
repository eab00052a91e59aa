//! Captures of vLLM 0.32.0, and what tests make of them.

use proptest::collection::vec;
use proptest::prelude::*;
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::sync::Arc;

/// The capture of this name.
pub(crate) fn load(name: &str) -> Value {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/moriio/fixtures");
    let text = std::fs::read_to_string(format!("{folder}/{name}.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The bytes of hex digits.
pub(crate) fn unhex(hex: &Value) -> Vec<u8> {
    let hex = hex.as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// The parts of a frame, each in hex.
pub(crate) fn parts(list: &Value) -> Vec<Vec<u8>> {
    list.as_array().unwrap().iter().map(unhex).collect()
}

/// The elements of a list.
pub(crate) fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

pub(crate) fn number<T: TryFrom<i64>>(value: &Value) -> T {
    T::try_from(value.as_i64().unwrap()).ok().unwrap()
}

/// A map with its entries in this order.
#[derive(Clone, Debug)]
pub(crate) struct FixtureEntries(pub(crate) Vec<(String, Value)>);

impl Serialize for FixtureEntries {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(key, value)| (key, value)))
    }
}

impl FixtureEntries {
    /// The MessagePack bytes.
    pub(crate) fn pack(&self) -> Vec<u8> {
        rmp_serde::to_vec(self).unwrap()
    }
}

/// The entries of a map in any order, with others between them.
pub(crate) fn shuffled(known: Value) -> impl Strategy<Value = FixtureEntries> {
    let known: Vec<_> = known.as_object().unwrap().clone().into_iter().collect();
    let junk = prop_oneof![
        any::<i64>().prop_map(Value::from),
        "[a-z]{0,40}".prop_map(Value::from),
        vec(any::<u8>(), 0..20).prop_map(Value::from),
        Just(serde_json::json!({"type": "x", "transfer_id": [null, {}]})),
    ];
    vec(("x_[a-z]{0,9}", junk), 0..4).prop_flat_map(move |others| {
        let all = known.iter().cloned().chain(others).collect::<Vec<_>>();
        Just(all).prop_shuffle().prop_map(FixtureEntries)
    })
}

pub(crate) fn any_text() -> impl Strategy<Value = Arc<str>> {
    vec(any::<char>(), 0..40).prop_map(|text| String::from_iter(text).into())
}

/// A host name or an address.
pub(crate) fn any_host() -> impl Strategy<Value = String> {
    let name = "[a-z][a-z0-9-]{0,8}[a-z](\\.[a-z]{1,5}){0,2}";
    prop_oneof![
        2 => name,
        1 => any::<std::net::Ipv4Addr>().prop_map(|it| it.to_string()),
        1 => any::<std::net::Ipv6Addr>().prop_map(|it| it.to_string()),
    ]
}

pub(crate) fn any_bytes() -> impl Strategy<Value = Arc<[u8]>> {
    vec(any::<u8>(), 0..80).prop_map(Into::into)
}

/// Bytes that decoders have to survive: at random, or one of the frames with hits and a cut.
pub(crate) fn hostile(frames: Vec<Vec<u8>>) -> impl Strategy<Value = Vec<u8>> {
    let hits = vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    let hurt = (prop::sample::select(frames), hits, any::<prop::sample::Index>(), any::<bool>())
        .prop_map(|(mut bytes, hits, cut, cuts)| {
            for (at, value) in hits.into_iter().filter(|_| !bytes.is_empty()).collect::<Vec<_>>() {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if cuts {
                bytes.truncate(cut.index(bytes.len() + 1));
            }
            bytes
        });
    prop_oneof![1 => vec(any::<u8>(), 0..300), 3 => hurt]
}
