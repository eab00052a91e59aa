//! What an instance tells a router of a leg beside its answer: that KV did not come, or was not
//! handed over, and why. It is the key `failed` of an object `kvferry`, which is in the answer, in
//! its `kv_transfer_params` (all that a connector of vLLM can add to), or in its error object.

use crate::needle::Needle;
use kvferry_engine::core::error::Failure;
use kvferry_engine::core::ids::EngineId;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// Longest such object that is read, in bytes.
const TOLD_MAX: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct FailureNotice {
    /// The kind of failure, for people; `unusable` if the leg itself was.
    pub(crate) cause: &'static str,
    /// What happened, for people.
    pub(crate) why: String,
    /// The same for routers, in the form that the native dialect has for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) failure: Option<Failure>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) peer: Option<EngineId>,
}

impl FailureNotice {
    /// Of a leg that failed, or went without KV of `peer`.
    pub(crate) fn new(failure: &Failure, peer: Option<&EngineId>) -> FailureNotice {
        let (cause, why) = (failure.kind(), failure.to_string());
        FailureNotice { cause, why, failure: Some(failure.clone()), peer: peer.cloned() }
    }

    /// Of a leg that cannot be used.
    pub(crate) fn unusable(why: &str) -> FailureNotice {
        FailureNotice { cause: "unusable", why: why.into(), failure: None, peer: None }
    }

    /// The object that it is in.
    pub(crate) fn object(&self) -> Value {
        json!({ "failed": self })
    }
}

/// What was read of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportedFailure {
    /// [`Failure::Unknown`] with its cause if it cannot be read, as of a kind that this version
    /// does not know; none if none was told, as of a leg that cannot be used.
    pub(crate) failure: Option<Failure>,
    /// What happened, for people.
    pub(crate) why: String,
}

#[derive(Deserialize)]
struct AnswerExtras<'a> {
    #[serde(borrow, default)]
    kvferry: Option<&'a RawValue>,
    #[serde(borrow, default)]
    kv_transfer_params: Option<&'a RawValue>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct NestedExtras<'a> {
    #[serde(borrow, default)]
    kvferry: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct ExtrasObject<'a> {
    #[serde(borrow, default)]
    failed: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct NoticeFields<'a> {
    #[serde(default)]
    cause: String,
    #[serde(default)]
    why: String,
    #[serde(borrow, default)]
    failure: Option<&'a RawValue>,
}

fn read<'a, T: Deserialize<'a>>(value: &'a RawValue) -> Option<T> {
    serde_json::from_str(value.get()).ok()
}

/// What an answer or an event of a stream tells, if it tells anything. Instances may say what they
/// like; what cannot be read is as if it were not there.
pub(crate) fn find_failure(body: &[u8]) -> Option<ReportedFailure> {
    // Most answers have none, and nearly all do not fail.
    static KEYS: [Needle; 2] = [Needle::new("\"kvferry\""), Needle::new("\"failed\"")];
    if !KEYS.iter().all(|key| key.is_in(body)) {
        return None;
    }
    let AnswerExtras { kvferry, kv_transfer_params, error } = serde_json::from_slice(body).ok()?;
    let found = [kvferry, kv_transfer_params.and_then(inner), error.and_then(inner)];
    found.into_iter().flatten().find_map(failure_in)
}

fn inner(value: &RawValue) -> Option<&RawValue> {
    let NestedExtras { kvferry } = read(value)?;
    kvferry
}

/// What an object `kvferry` tells.
pub(super) fn failure_in(object: &RawValue) -> Option<ReportedFailure> {
    let ExtrasObject { failed } = read(object)?;
    let failed = failed.filter(|failed| failed.get().len() <= TOLD_MAX)?;
    let NoticeFields { cause, why, failure } = read(failed)?;
    let unknown = || Failure::Unknown(cause.into());
    let failure = failure.map(|failure| read(failure).unwrap_or_else(unknown));
    Some(ReportedFailure { failure, why })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_engine::core::layout::Mismatch;

    #[test]
    fn what_is_told_is_heard_wherever_it_is() {
        let failure = Failure::Mismatch(Mismatch("block sizes".into()));
        let told = FailureNotice::new(&failure, Some(&"p0".into()));
        assert_eq!((told.cause, &*told.why), ("mismatch", "engines do not fit: block sizes"));
        let expected = Some(ReportedFailure { failure: Some(failure), why: told.why.clone() });
        for body in [
            json!({"choices": [], "kvferry": told.object()}),
            json!({"kv_transfer_params": {"transfer_id": "t", "kvferry": told.object()}}),
            json!({"error": {"message": "m", "kvferry": told.object()}}),
        ] {
            assert_eq!(find_failure(body.to_string().as_bytes()), expected, "{body}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_not_there() {
        let told = |failed: Value| json!({"kvferry": {"failed": failed}}).to_string();
        for (other, cause) in [
            (json!({"cause": "c", "why": "w", "failure": "NextYears", "more": 1}), "c"),
            (json!({"cause": "c", "why": "w", "failure": {"NextYears": [7]}}), "c"),
            (json!({"why": "w", "failure": "NextYears"}), ""),
        ] {
            let unknown =
                ReportedFailure { failure: Some(Failure::Unknown(cause.into())), why: "w".into() };
            assert_eq!(find_failure(told(other).as_bytes()), Some(unknown));
        }
        let unusable = json!({"kvferry": FailureNotice::unusable("no key").object()}).to_string();
        let none = ReportedFailure { failure: None, why: "no key".into() };
        assert_eq!(find_failure(unusable.as_bytes()), Some(none));
        for body in [
            told(json!(7)),
            told(json!({"why": "x".repeat(TOLD_MAX)})),
            json!({"kvferry": {"digest": "failed"}}).to_string(),
            json!({"choices": [{"text": "\"kvferry\": {\"failed\": {}}"}]}).to_string(),
            "data: \"kvferry\" \"failed\"".into(),
        ] {
            assert_eq!(find_failure(body.as_bytes()), None, "{body}");
        }
    }
}
