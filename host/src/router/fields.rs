//! A JSON object whose values are left as they are: what nobody looks at survives byte by byte, and
//! a long prompt is passed over, not parsed.

use bytes::Bytes;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::fmt;
use std::ops::Range;

/// The object; of equal keys the last counts.
#[derive(Clone, Debug)]
pub(crate) struct JsonFields {
    text: Bytes,
    entries: Vec<(Box<str>, Range<usize>)>,
}

/// What is to become of a field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FieldEdit<'a> {
    /// It gets this JSON value, and is added if it is missing.
    Put(&'a str),
    /// It gets this JSON value if it is there.
    Replace(&'a str),
    /// It gets this JSON value if it is missing.
    Default(&'a str),
    /// It is left out.
    Drop,
}

struct FieldsVisitor<'a>(&'a str);

impl<'de> Visitor<'de> for FieldsVisitor<'de> {
    type Value = Vec<(Box<str>, Range<usize>)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries: Self::Value = Vec::with_capacity(16);
        while let Some(key) = map.next_key::<Box<str>>()? {
            let value: &RawValue = map.next_value()?;
            let start = (value.get().as_ptr() as usize)
                .checked_sub(self.0.as_ptr() as usize)
                .ok_or_else(|| A::Error::custom("a value outside the text"))?;
            let range = start..start + value.get().len();
            match entries.iter_mut().find(|(known, _)| *known == key) {
                Some(entry) => entry.1 = range,
                None => entries.push((key, range)),
            }
        }
        Ok(entries)
    }
}

impl JsonFields {
    /// The object that the bytes are.
    ///
    /// # Errors
    /// What is wrong with them, and where.
    pub(crate) fn parse(text: Bytes) -> Result<JsonFields, String> {
        let entries = {
            let text = std::str::from_utf8(&text).map_err(|why| why.to_string())?;
            let mut json = serde_json::Deserializer::from_str(text);
            let entries =
                json.deserialize_map(FieldsVisitor(text)).map_err(|why| why.to_string())?;
            json.end().map_err(|why| why.to_string())?;
            entries
        };
        Ok(JsonFields { text, entries })
    }

    /// The value under a key, as JSON; none also if it is null.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let (_, range) = self.entries.iter().find(|(known, _)| **known == *key)?;
        Some(self.slice(range)).filter(|value| *value != "null")
    }

    fn slice(&self, range: &Range<usize>) -> &str {
        std::str::from_utf8(&self.text[range.clone()]).expect("was UTF-8, cut at values")
    }

    /// Appends the object with these edits.
    pub(crate) fn write(&self, edits: &[(&str, FieldEdit<'_>)], out: &mut Vec<u8>) {
        let edit_of = |key: &str| edits.iter().find(|(edited, _)| *edited == key).map(|(_, e)| e);
        out.push(b'{');
        let mut first = true;
        let mut field = |key: &str, value: &[u8], out: &mut Vec<u8>| {
            if !std::mem::take(&mut first) {
                out.push(b',');
            }
            serde_json::to_writer(&mut *out, key).expect("a Vec takes every text");
            out.push(b':');
            out.extend_from_slice(value);
        };
        for (key, range) in &self.entries {
            match edit_of(key) {
                Some(FieldEdit::Put(value) | FieldEdit::Replace(value)) => {
                    field(key, value.as_bytes(), out)
                }
                Some(FieldEdit::Drop) => {}
                Some(FieldEdit::Default(_)) | None => field(key, &self.text[range.clone()], out),
            }
        }
        for (key, edit) in edits {
            if let FieldEdit::Put(value) | FieldEdit::Default(value) = edit
                && !self.entries.iter().any(|(known, _)| **known == **key)
            {
                field(key, value.as_bytes(), out);
            }
        }
        out.push(b'}');
    }

    /// Length of the text that it came from, in bytes.
    pub(crate) fn len(&self) -> usize {
        self.text.len()
    }
}

/// The elements of a JSON array, as JSON.
pub(crate) fn elements(array: &str) -> Result<Vec<&str>, String> {
    let elements: Vec<&RawValue> = serde_json::from_str(array).map_err(|why| why.to_string())?;
    Ok(elements.into_iter().map(RawValue::get).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edited(text: &str, edits: &[(&str, FieldEdit<'_>)]) -> String {
        let mut out = Vec::new();
        JsonFields::parse(Bytes::copy_from_slice(text.as_bytes())).unwrap().write(edits, &mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_is_not_edited_stays_as_it_is() {
        let text = r#" {"a" : 1.50, "b\n":{"x":[1, 2]},"c":"\u00e4","d":null} "#;
        assert_eq!(edited(text, &[]), r#"{"a":1.50,"b\n":{"x":[1, 2]},"c":"\u00e4","d":null}"#);
    }

    #[test]
    fn edits_do_what_they_say() {
        let edits = [
            ("a", FieldEdit::Put("1")),
            ("b", FieldEdit::Replace("2")),
            ("c", FieldEdit::Default("3")),
            ("d", FieldEdit::Drop),
        ];
        assert_eq!(edited("{}", &edits), r#"{"a":1,"c":3}"#);
        assert_eq!(edited(r#"{"d":0,"c":0,"b":0,"a":0}"#, &edits), r#"{"c":0,"b":2,"a":1}"#);
    }

    #[test]
    fn of_equal_keys_the_last_counts_and_null_is_nothing() {
        let fields = JsonFields::parse(Bytes::from_static(br#"{"a":1,"a":2,"b":null}"#)).unwrap();
        assert_eq!((fields.get("a"), fields.get("b"), fields.get("c")), (Some("2"), None, None));
    }

    #[test]
    fn other_texts_are_refused() {
        for bad in ["", "[]", "1", "{", r#"{"a":}"#, "{} x", r#"{"a":1}{"#, "\u{0}"] {
            assert!(JsonFields::parse(Bytes::copy_from_slice(bad.as_bytes())).is_err(), "{bad}");
        }
        assert!(JsonFields::parse(Bytes::from_static(b"{\"a\":\"\xff\"}")).is_err());
    }
}
