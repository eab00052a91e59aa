//! Captures of vLLM 0.32.0, and what tests make of them.

use serde_json::Value;

/// The capture of this name.
pub(crate) fn load(name: &str) -> Value {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/moriio/fixtures");
    let text = std::fs::read_to_string(format!("{folder}/{name}.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// The elements of a list.
pub(crate) fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap()
}

/// The text.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

/// The number.
pub(crate) fn number<T: TryFrom<i64>>(value: &Value) -> T {
    T::try_from(value.as_i64().unwrap()).ok().unwrap()
}
