//! Values of a body as vLLM's API server reads them, by pydantic's lax types: `1.0` and `"1"` are
//! integers, `0` and `"off"` are booleans. Instances get the values unchanged.

use std::borrow::Cow;

/// Characters of a JSON string.
pub(crate) fn string(value: &[u8]) -> Option<Cow<'_, str>> {
    let inner = value.strip_prefix(b"\"")?.strip_suffix(b"\"")?;
    if inner.contains(&b'\\') {
        return serde_json::from_slice::<String>(value).ok().map(Cow::Owned);
    }
    std::str::from_utf8(inner).ok().map(Cow::Borrowed)
}

/// Reads a value as an integer.
pub(crate) fn integer(value: &[u8]) -> Option<i64> {
    match value {
        b"true" => return Some(1),
        b"false" => return Some(0),
        _ => {}
    }
    let Some(text) = string(value) else {
        let text = std::str::from_utf8(value).ok()?;
        return text.parse().ok().or_else(|| whole(text.parse().ok()?));
    };
    let text = text.trim();
    // A fraction may have zeros only; underscores are allowed between digits.
    let (number, fraction) = text.split_once('.').unwrap_or((text, "0"));
    if fraction.is_empty() || !fraction.bytes().all(|digit| digit == b'0') {
        return None;
    }
    let digits = number.trim_start_matches(['+', '-']);
    let is_odd = digits.starts_with('_') || digits.ends_with('_') || digits.contains("__");
    if is_odd { None } else { number.replace('_', "").parse().ok() }
}

/// A float without a fraction that an integer holds exactly.
fn whole(float: f64) -> Option<i64> {
    let is_whole = float.fract() == 0.0 && float.abs() < 9.0e18;
    is_whole.then_some(float as i64)
}

/// Reads a value as a boolean.
pub(crate) fn boolean(value: &[u8]) -> Option<bool> {
    let Some(text) = string(value) else {
        return match integer(value)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        };
    };
    match &*text.to_ascii_lowercase() {
        "0" | "off" | "f" | "false" | "n" | "no" => Some(false),
        "1" | "on" | "t" | "true" | "y" | "yes" => Some(true),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Verdicts of pydantic 2.14.
    #[test]
    fn values_are_read_as_by_pydantic() {
        for (value, expected) in [
            ("2", Some(2)),
            ("2.0", Some(2)),
            ("2e1", Some(20)),
            ("-0.0", Some(0)),
            ("true", Some(1)),
            ("\"2\"", Some(2)),
            ("\" 2 \"", Some(2)),
            ("\"+2\"", Some(2)),
            ("\"2.00\"", Some(2)),
            ("\"1_0\"", Some(10)),
            ("\"\\u0032\"", Some(2)),
            ("2.5", None),
            ("\"2.5\"", None),
            ("\"2e1\"", None),
            ("\"\"", None),
            ("\"a\"", None),
            ("NaN", None),
            ("-Infinity", None),
            ("1e400", None),
            ("[1]", None),
            ("{}", None),
            ("\"1__0\"", None),
            ("\"_1\"", None),
            ("\"0x1\"", None),
            ("\"-_1\"", None),
            ("\"2.\"", None),
            ("\".0\"", None),
            ("\"--2\"", None),
            ("\"1_0.0\"", Some(10)),
            ("\"2.0_0\"", None),
        ] {
            assert_eq!(integer(value.as_bytes()), expected, "{value}");
        }
        for (value, expected) in [
            ("true", Some(true)),
            ("false", Some(false)),
            ("0", Some(false)),
            ("1", Some(true)),
            ("1.0", Some(true)),
            ("0.0", Some(false)),
            ("\"false\"", Some(false)),
            ("\"TRUE\"", Some(true)),
            ("\"On\"", Some(true)),
            ("\"n\"", Some(false)),
            ("2", None),
            ("0.5", None),
            ("\"\"", None),
            ("\" true\"", None),
            ("[]", None),
            ("NaN", None),
            ("\"2\"", None),
        ] {
            assert_eq!(boolean(value.as_bytes()), expected, "{value}");
        }
    }
}
