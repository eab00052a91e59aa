//! A JSON object in a text, and edits of it. Its values are ranges of the text. Values without
//! edits keep their bytes and are not copied.

use super::body_chain::{BodyChain, ChainBuilder, SHARED_MIN};
use super::json_scan::{self, JsonError, JsonMember};
use bytes::{Bytes, BytesMut};
use std::borrow::Borrow;
use std::collections::HashMap;
use std::ops::Range;

/// Most members of an object that the router reads or edits. Nested objects are bounded only by the
/// length of the text.
pub(crate) const MEMBERS_MAX: usize = 1024;

/// Longest key that is kept, in bytes with its escapes. The router reads and edits no key that is as
/// long: members with a longer one stay as they are, also if their keys come again.
const KEY_MAX: usize = 256;

/// Most members that are looked at one by one for a key, which is faster than a table for so few.
const SCANNED_MAX: usize = 32;

/// Most edits at a time; all lists of them are in this program.
const EDITS_MAX: usize = 32;

/// Error of a text that is not an object the router can edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldsError {
    Json(JsonError),
    /// More than [`MEMBERS_MAX`] members.
    Members,
    /// Bytes that are not UTF-8, at this offset.
    Encoding(usize),
}

impl FieldsError {
    /// Message for an error in the object that `subject` names.
    pub(crate) fn of(self, subject: &str) -> String {
        match self {
            FieldsError::Json(why) => format!("{subject} is not a JSON object: {why}"),
            FieldsError::Members => {
                format!("{subject} has more than {MEMBERS_MAX} fields; send at most {MEMBERS_MAX}")
            }
            FieldsError::Encoding(at) => format!("{subject} is not valid UTF-8 at byte {at}"),
        }
    }
}

impl From<JsonError> for FieldsError {
    fn from(why: JsonError) -> FieldsError {
        FieldsError::Json(why)
    }
}

/// A JSON object; the last of several members with equal keys counts.
#[derive(Clone, Debug)]
pub(crate) struct JsonFields {
    text: Bytes,
    /// Range of the object in the text.
    range: Range<usize>,
    members: Vec<MemberRanges>,
    /// The last member of each key; empty if there are at most [`SCANNED_MAX`] members.
    by_key: HashMap<Box<[u8]>, usize>,
    /// Offset of the closing bracket.
    close: usize,
}

#[derive(Clone, Debug)]
struct MemberRanges {
    key: MemberKey,
    /// Mark of the key.
    mark: u32,
    /// Offset of the opening quote of the key.
    start: usize,
    value: Range<usize>,
    /// A later member has the same key.
    is_superseded: bool,
}

#[derive(Clone, Debug)]
enum MemberKey {
    /// Its bytes in the text.
    Plain(Range<usize>),
    /// Without its escapes.
    Unescaped(Box<[u8]>),
    /// Longer than [`KEY_MAX`].
    Long,
}

impl MemberKey {
    fn of(text: &[u8], key: Range<usize>, is_escaped: bool) -> MemberKey {
        match is_escaped {
            _ if key.len() > KEY_MAX => MemberKey::Long,
            true => MemberKey::Unescaped(unescaped(&text[key])),
            false => MemberKey::Plain(key),
        }
    }

    /// The bytes of the key, unless it is too long.
    fn bytes<'a>(&'a self, text: &'a [u8]) -> Option<&'a [u8]> {
        match self {
            MemberKey::Plain(range) => Some(&text[range.clone()]),
            MemberKey::Unescaped(key) => Some(key),
            MemberKey::Long => None,
        }
    }
}

/// A number by which nearly all keys differ, so that few are compared.
fn mark(key: &[u8]) -> u32 {
    let [first, last] = [key.first(), key.last()].map(|end| u32::from(*end.unwrap_or(&0)));
    (first << 8 | last) << 16 | key.len() as u32
}

/// An edit of the member under a key.
#[derive(Clone, Debug)]
pub(crate) enum FieldEdit {
    /// Sets the JSON value, and adds the member if it is missing.
    Put(Bytes),
    /// Sets the JSON value if the member is there.
    Replace(Bytes),
    /// Adds the member with this JSON value if it is missing.
    Default(Bytes),
    /// Removes the member.
    Drop,
}

impl JsonFields {
    /// Parses a text that is one object: UTF-8, with surrogates as Python accepts them.
    ///
    /// # Errors
    /// A text that is not one JSON object, or has too many members.
    pub(crate) fn parse(text: Bytes) -> Result<JsonFields, FieldsError> {
        check_utf8(&text)?;
        let all = 0..text.len();
        JsonFields::within(text, all)
    }

    /// Parses a range of a checked text as one object; offsets are those of the text.
    ///
    /// # Errors
    /// A text that is not one JSON object, or has too many members.
    pub(crate) fn within(text: Bytes, range: Range<usize>) -> Result<JsonFields, FieldsError> {
        let mut members = Vec::<MemberRanges>::with_capacity(16);
        let close =
            json_scan::members(&text, range.clone(), |JsonMember { key, is_escaped, value }| {
                if members.len() == MEMBERS_MAX {
                    return Err(FieldsError::Members);
                }
                let start = key.start - 1;
                let key = MemberKey::of(&text, key, is_escaped);
                let mark = mark(key.bytes(&text).unwrap_or_default());
                members.push(MemberRanges { key, mark, start, value, is_superseded: false });
                Ok(())
            })?;
        let by_key = HashMap::new();
        let mut fields = JsonFields { text, range, members, by_key, close };
        fields.index();
        Ok(fields)
    }

    /// Finds members whose keys come again: few by looking at all, many by a table.
    fn index(&mut self) {
        let JsonFields { text, members, by_key, .. } = self;
        let is_scanned = members.len() <= SCANNED_MAX;
        for at in 0..members.len() {
            let (known, rest) = members.split_at_mut(at);
            let Some(key) = rest[0].key.bytes(text) else { continue };
            let before = match is_scanned {
                true => position(known, text, (rest[0].mark, key)),
                false => by_key.insert(key.into(), at),
            };
            if let Some(before) = before {
                known[before].is_superseded = true;
            }
        }
    }

    /// Index of the last member with a key.
    fn position(&self, key: &str) -> Option<usize> {
        let key = key.as_bytes();
        if self.members.len() > SCANNED_MAX {
            return self.by_key.get(key).copied();
        }
        position(&self.members, &self.text, (mark(key), key))
    }

    fn member(&self, key: &str) -> Option<&MemberRanges> {
        self.position(key).map(|at| &self.members[at])
    }

    /// The value under a key, as JSON; none also if it is null.
    pub(crate) fn get(&self, key: &str) -> Option<&[u8]> {
        self.range(key).map(|range| &self.text[range])
    }

    /// Range of the value under a key; `None` also if the value is null.
    pub(crate) fn range(&self, key: &str) -> Option<Range<usize>> {
        let range = self.member(key)?.value.clone();
        Some(range).filter(|range| &self.text[range.clone()] != b"null")
    }

    /// The object under a key; none if the value is missing or is not an object.
    ///
    /// # Errors
    /// An object with too many members.
    pub(crate) fn checked_object(&self, key: &str) -> Result<Option<JsonFields>, FieldsError> {
        let range = self.range(key).filter(|range| self.text[range.start] == b'{');
        range.map(|range| JsonFields::within(self.text.clone(), range)).transpose()
    }

    /// The object under a key; none if there is none, or it cannot be edited.
    pub(crate) fn object(&self, key: &str) -> Option<JsonFields> {
        JsonFields::within(self.text.clone(), self.range(key)?).ok()
    }

    pub(crate) fn text(&self) -> &Bytes {
        &self.text
    }

    /// The object with these edits, without the text around it.
    pub(crate) fn edited(&self, edits: &[(&str, FieldEdit)]) -> Bytes {
        let mut splices = Splices::default();
        self.edit(edits, &mut splices);
        self.spliced(splices)
    }

    /// The object with the changes within it, without the text around it.
    pub(crate) fn spliced(&self, splices: Splices) -> Bytes {
        let mut out = splices.builder(self.range.len());
        splices.apply(&self.text, self.range.clone(), &mut out);
        out.finish().to_bytes()
    }

    /// Adds these edits, at most [`EDITS_MAX`]; the first of several for one key counts. Duplicate
    /// members are removed, so that every parser reads the same value.
    pub(crate) fn edit<E: Borrow<FieldEdit>>(&self, edits: &[(&str, E)], splices: &mut Splices) {
        let mut dropped: Vec<usize> = Vec::new();
        dropped.extend((0..self.members.len()).filter(|at| self.members[*at].is_superseded));
        let mut added: Vec<(&str, &Bytes)> = Vec::with_capacity(edits.len());
        splices.0.reserve(edits.len() + 2);
        let mut marks = [0; EDITS_MAX];
        for (nth, (key, edit)) in edits.iter().enumerate() {
            let own = mark(key.as_bytes());
            let has_mark = marks[..nth].contains(&own);
            marks[nth] = own;
            if has_mark && edits[..nth].iter().any(|(before, _)| before == key) {
                continue;
            }
            match (edit.borrow(), self.position(key)) {
                (FieldEdit::Put(with) | FieldEdit::Replace(with), Some(at)) => {
                    splices.replace(self.members[at].value.clone(), with.clone());
                }
                (FieldEdit::Put(with) | FieldEdit::Default(with), None) => added.push((key, with)),
                (FieldEdit::Drop, Some(at)) => dropped.push(at),
                (FieldEdit::Replace(_) | FieldEdit::Drop, None) | (FieldEdit::Default(_), _) => {}
            }
        }
        dropped.sort_unstable();
        let is_empty = self.drop_members(&dropped, splices);
        self.add_members(&added, is_empty, splices);
    }

    /// Adds members behind those that are left; their keys need no escapes.
    fn add_members(&self, added: &[(&str, &Bytes)], is_empty: bool, splices: &mut Splices) {
        let end = self.close..self.close;
        let short = |value: &Bytes| if value.len() < SHARED_MIN { value.len() } else { 0 };
        let length = added.iter().map(|(key, value)| key.len() + 4 + short(value)).sum();
        let mut texts = BytesMut::with_capacity(length);
        for (nth, (key, value)) in added.iter().enumerate() {
            if nth > 0 || !is_empty {
                texts.extend_from_slice(b",");
            }
            for part in ["\"", key, "\":"] {
                texts.extend_from_slice(part.as_bytes());
            }
            if value.len() < SHARED_MIN {
                texts.extend_from_slice(value);
            } else {
                splices.replace(end.clone(), texts.split().freeze());
                splices.replace(end.clone(), (*value).clone());
            }
        }
        if !texts.is_empty() {
            splices.replace(end, texts.freeze());
        }
    }

    /// Removes members, given in order, with their commas; true if none is left.
    fn drop_members(&self, dropped: &[usize], splices: &mut Splices) -> bool {
        let mut kept = self.members.len();
        // Members at the end are removed with the comma before them.
        let at_end = dropped.iter().rev().take_while(|at| {
            let is_last = **at + 1 == kept;
            kept -= usize::from(is_last);
            is_last
        });
        let others = dropped.len() - at_end.count();
        for at in &dropped[..others] {
            splices.cut(self.members[*at].start..self.members[*at + 1].start);
        }
        if let Some(last) = self.members.last().filter(|_| kept < self.members.len()) {
            let from = match kept.checked_sub(1) {
                Some(last_kept) => self.members[last_kept].value.end,
                None => self.members[0].start,
            };
            splices.cut(from..last.value.end);
        }
        kept == 0
    }
}

/// References to edits, for [`JsonFields::edit`].
pub(crate) fn by_key<'a>(
    edits: &'a [(&'static str, FieldEdit)],
) -> impl Iterator<Item = (&'static str, &'a FieldEdit)> {
    edits.iter().map(|(key, edit)| (*key, edit))
}

/// Index of the last of these members with a key, whose mark is given, too.
fn position(members: &[MemberRanges], text: &[u8], (mark, key): (u32, &[u8])) -> Option<usize> {
    let has_key = |it: &MemberRanges| it.mark == mark && it.key.bytes(text) == Some(key);
    members.iter().rposition(has_key)
}

/// Changes of a text that are applied at once.
#[derive(Clone, Debug, Default)]
pub(crate) struct Splices(Vec<(Range<usize>, Bytes)>);

impl Splices {
    /// Replaces a range; replacements at one place keep their order.
    pub(crate) fn replace(&mut self, range: Range<usize>, with: Bytes) {
        self.0.push((range, with));
    }

    pub(crate) fn cut(&mut self, range: Range<usize>) {
        self.replace(range, Bytes::new());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes the changes within a range.
    pub(crate) fn clear_within(&mut self, range: &Range<usize>) {
        self.0.retain(|(at, _)| at.start < range.start || at.end > range.end);
    }

    /// Returns a range of the text with the changes in it. Of overlapping changes the first counts.
    pub(crate) fn apply(mut self, text: &Bytes, range: Range<usize>, out: &mut ChainBuilder) {
        self.0.sort_by_key(|(at, _)| at.start);
        let mut from = range.start;
        for (at, with) in self.0 {
            if at.start < from || at.end > range.end {
                continue;
            }
            out.push_part(text, from..at.start);
            out.push(with);
            from = at.end;
        }
        out.push_part(text, from..range.end);
    }

    /// A builder with room for a range of this length and the changes in it.
    fn builder(&self, length: usize) -> ChainBuilder {
        ChainBuilder::with_capacity(
            length + self.0.iter().map(|(_, with)| with.len()).sum::<usize>(),
        )
    }

    /// The text with the changes.
    pub(crate) fn chain(self, text: &Bytes) -> BodyChain {
        let mut out = self.builder(text.len());
        self.apply(text, 0..text.len(), &mut out);
        out.finish()
    }
}

/// Decodes the escapes of a key. A key with lone surrogates stays as it is; no edit has such a key.
fn unescaped(key: &[u8]) -> Box<[u8]> {
    let quoted = [b"\"", key, b"\""].concat();
    match serde_json::from_slice::<String>(&quoted) {
        Ok(key) => key.into_bytes().into(),
        Err(_) => key.into(),
    }
}

/// Checks for UTF-8 that may contain surrogates, as Python decodes bodies (`surrogatepass`).
fn check_utf8(text: &[u8]) -> Result<(), FieldsError> {
    let mut from = 0;
    while let Err(why) = std::str::from_utf8(&text[from..]) {
        from += why.valid_up_to();
        match text[from..] {
            [0xed, 0xa0..=0xbf, 0x80..=0xbf, ..] => from += 3,
            _ => return Err(FieldsError::Encoding(from)),
        }
    }
    Ok(())
}

/// Returns the first `most` elements of the array in a range, and the number of all.
///
/// # Errors
/// A text that is not one JSON array.
pub(crate) fn elements(
    text: &[u8],
    range: Range<usize>,
    most: usize,
) -> Result<(Vec<Range<usize>>, usize), JsonError> {
    let (mut found, mut count) = (Vec::new(), 0);
    json_scan::elements(text, range, |element| {
        if count < most {
            found.push(element);
        }
        count += 1;
    })?;
    Ok((found, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Map, Value};

    fn parsed(text: &str) -> Result<JsonFields, FieldsError> {
        JsonFields::parse(Bytes::copy_from_slice(text.as_bytes()))
    }

    fn edited(text: &str, edits: &[(&str, FieldEdit)]) -> String {
        String::from_utf8(parsed(text).unwrap().edited(edits).to_vec()).unwrap()
    }

    /// Text of this many members with other keys than those of the tests, each with a comma.
    fn members(count: usize) -> String {
        (0..count).map(|nth| format!("\"m{nth}\":0,")).collect()
    }

    fn put(value: &'static str) -> FieldEdit {
        FieldEdit::Put(Bytes::from_static(value.as_bytes()))
    }

    #[test]
    fn a_text_without_edits_stays_as_it_is() {
        let text = r#" {"a" : 1.50, "b\n":{"x":[1, 2]},"c":"\u00e4","d":null} "#;
        assert_eq!(edited(text, &[]), text);
    }

    #[test]
    fn edits_change_their_members_alone() {
        let one = || Bytes::from_static(b"1");
        let edits = [
            ("a", FieldEdit::Put(one())),
            ("b", FieldEdit::Replace(one())),
            ("c", FieldEdit::Default(one())),
            ("d", FieldEdit::Drop),
            ("a", FieldEdit::Drop),
        ];
        assert_eq!(edited("{}", &edits), r#"{"a":1,"c":1}"#);
        assert_eq!(edited(r#"{"d":0, "c":0,"b":0 ,"a":0}"#, &edits), r#"{"c":0,"b":1 ,"a":1}"#);
        assert_eq!(edited(r#"{ "d":0 }"#, &edits), r#"{  "a":1,"c":1}"#);
        assert_eq!(edited(r#"{"x":0,"d":0}"#, &edits), r#"{"x":0,"a":1,"c":1}"#);
        assert_eq!(edited(r#"{"\u0061":0,"c":2}"#, &edits), r#"{"\u0061":1,"c":2}"#);
    }

    #[test]
    fn of_equal_keys_the_last_counts_and_the_others_are_removed() {
        for more in [0, SCANNED_MAX] {
            let others = members(more);
            let text = format!(r#"{{{others}"a":1,"\u0061":2,"b":null,"a":3}}"#);
            let fields = parsed(&text).unwrap();
            assert_eq!(
                (fields.get("a"), fields.get("b"), fields.get("c")),
                (Some(&b"3"[..]), None, None)
            );
            assert_eq!(edited(&text, &[]), format!(r#"{{{others}"b":null,"a":3}}"#));
            let without = format!(r#"{{{others}"b":null}}"#);
            assert_eq!(edited(&text, &[("a", FieldEdit::Drop)]), without);
        }
        assert_eq!(edited(r#"{"a":1,"a":2}"#, &[("a", FieldEdit::Drop)]), "{}");
    }

    #[test]
    fn objects_in_objects_are_edited_in_place() {
        let text = Bytes::from_static(br#"{"a":{"b":{"c":1,"d":2}},"e":3}"#);
        let outer = JsonFields::parse(text.clone()).unwrap();
        let inner = outer.object("a").and_then(|a| a.object("b")).unwrap();
        let mut splices = Splices::default();
        inner.edit(&[("d", FieldEdit::Drop), ("f", put("4"))], &mut splices);
        outer.edit(&[("e", put("5"))], &mut splices);
        assert_eq!(splices.chain(&text).to_bytes(), r#"{"a":{"b":{"c":1,"f":4}},"e":5}"#);
        assert!(outer.object("e").is_none() && outer.object("x").is_none());
    }

    #[test]
    fn more_members_than_the_limit_are_refused() {
        let object = |count: usize| {
            let members: Vec<_> = (0..count).map(|n| format!("\"k{n}\":0")).collect();
            format!("{{{}}}", members.join(","))
        };
        assert!(parsed(&object(MEMBERS_MAX)).is_ok());
        assert_eq!(parsed(&object(MEMBERS_MAX + 1)).err(), Some(FieldsError::Members));
        // Only objects that the router edits have the limit.
        assert!(parsed(&format!("{{\"logit_bias\":{}}}", object(40_000))).is_ok());
    }

    #[test]
    fn longer_keys_than_any_that_is_read_are_not_kept() {
        let key = "k".repeat(KEY_MAX + 1);
        for more in [0, SCANNED_MAX] {
            let before = members(more) + &format!("\"{key}\":1,\"{key}\":2");
            let text = format!("{{{before},\"a\":3}}");
            assert_eq!(parsed(&text).unwrap().by_key.len(), if more == 0 { 0 } else { more + 1 });
            assert_eq!(edited(&text, &[]), text);
            let without = format!("{{{before}}}");
            assert_eq!(edited(&text, &[("a", FieldEdit::Drop)]), without);
        }
        let escaped: String = "kv_transfer_params".bytes().map(|c| format!("\\u{c:04x}")).collect();
        let text = format!("{{\"{escaped}\":1}}");
        assert_eq!(edited(&text, &[("kv_transfer_params", FieldEdit::Drop)]), "{}");
    }

    #[test]
    fn surrogates_are_taken_and_other_bytes_are_not() {
        let bytes = |inner: &[u8]| Bytes::from([b"{\"a\":\"", inner, b"\"}"].concat());
        assert!(JsonFields::parse(bytes(b"x\xed\xa0\x80y\xc3\xa4")).is_ok());
        for bad in [&b"\xff"[..], b"\xc3", b"\xed\xa0", b"\xc0\x80"] {
            let refused = JsonFields::parse(bytes(bad)).err();
            assert_eq!(refused, Some(FieldsError::Encoding(6)), "{bad:?}");
        }
    }

    #[test]
    fn time_per_member_is_flat() {
        let time = |count: usize| {
            let members: Vec<_> = (0..count).map(|n| format!("\"key{n}\":0")).collect();
            let text = Bytes::from(format!("{{{}}}", members.join(",")));
            let once = || {
                let start = std::time::Instant::now();
                for _ in 0..MEMBERS_MAX / count {
                    let mut splices = Splices::default();
                    let fields = JsonFields::parse(text.clone()).unwrap();
                    fields.edit(&[("key1", FieldEdit::Drop), ("n", put("1"))], &mut splices);
                    assert!(!splices.is_empty());
                }
                start.elapsed()
            };
            (0..20).map(|_| once()).min().unwrap()
        };
        // The same members in objects of 16, and in one: quadratic time would be 64 times as much.
        let (small, large) = (time(16), time(MEMBERS_MAX));
        assert!(large < small * 12, "{small:?} {large:?}");
    }

    proptest! {
        #[test]
        fn edits_are_those_of_a_map(
            given in prop::collection::vec(("[a-e]", 0..9u8), 0..9),
            edits in prop::collection::vec(("[a-f]", 0..4u8), 0..6),
            space in "[ \n]{0,2}",
        ) {
            let members: Vec<_> = given.iter().map(|(key, value)| format!("{space}\"{key}\":{space}{value}{space}")).collect();
            let text = format!("{{{}}}", members.join(","));
            let mut expected: Map<String, Value> = serde_json::from_str(&text).unwrap();
            let nine = Bytes::from_static(b"99");
            let made: Vec<_> = edits.iter().map(|(key, kind)| (key.as_str(), match kind {
                0 => FieldEdit::Put(nine.clone()),
                1 => FieldEdit::Replace(nine.clone()),
                2 => FieldEdit::Default(nine.clone()),
                _ => FieldEdit::Drop,
            })).collect();
            for (nth, (key, kind)) in edits.iter().enumerate() {
                let is_there = expected.contains_key(key);
                match kind {
                    _ if edits[..nth].iter().any(|(before, _)| before == key) => {}
                    0 => drop(expected.insert(key.clone(), 99.into())),
                    1 if is_there => drop(expected.insert(key.clone(), 99.into())),
                    2 if !is_there => drop(expected.insert(key.clone(), 99.into())),
                    3 => drop(expected.remove(key)),
                    _ => {}
                }
            }
            let out: Map<String, Value> = serde_json::from_str(&edited(&text, &made)).unwrap();
            prop_assert_eq!(out, expected);
        }
    }
}
