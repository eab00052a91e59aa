//! Scanner of JSON texts. It finds the members of an object and the elements of an array in one
//! pass over the bytes, and does not parse values.
//!
//! It accepts what Python's `json.loads` accepts, with which all engines parse bodies: `NaN`,
//! `Infinity` and `-Infinity`, escapes of lone surrogates, and duplicate keys. Nesting deeper than
//! [`DEPTH_MAX`] is rejected.

use memchr::memchr2;
use std::fmt;
use std::ops::Range;

/// Most objects and arrays around a value. Python's own limit is near 1,000.
pub(crate) const DEPTH_MAX: usize = 512;

/// A fault of a text, and the offset in bytes at which it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JsonError {
    why: &'static str,
    at: usize,
}

impl fmt::Display for JsonError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.why, self.at)
    }
}

/// A member of an object.
#[derive(Clone, Debug)]
pub(crate) struct JsonMember {
    /// The key without its quotes, with its escapes.
    pub(crate) key: Range<usize>,
    /// True if the key has escapes.
    pub(crate) is_escaped: bool,
    pub(crate) value: Range<usize>,
}

/// Reports the members of the object that `text[range]` is, and returns the offset of its closing
/// bracket.
///
/// # Errors
/// A text that is not one JSON object, or the error of `visit`.
pub(crate) fn members<E: From<JsonError>>(
    text: &[u8],
    range: Range<usize>,
    mut visit: impl FnMut(JsonMember) -> Result<(), E>,
) -> Result<usize, E> {
    let mut scanner = JsonScanner { text: &text[..range.end], at: range.start };
    scanner.space();
    scanner.expect(b'{', "expected an object")?;
    scanner.space();
    let mut close = scanner.at;
    if !scanner.take(b'}') {
        loop {
            let (key, is_escaped) = scanner.key()?;
            let start = scanner.at;
            scanner.value()?;
            visit(JsonMember { key, is_escaped, value: start..scanner.at })?;
            scanner.space();
            close = scanner.at;
            if scanner.take(b'}') {
                break;
            }
            scanner.expect(b',', "expected `,` or `}`")?;
            scanner.space();
        }
    }
    scanner.end()?;
    Ok(close)
}

/// Reports the elements of the array that `text[range]` is.
///
/// # Errors
/// A text that is not one JSON array.
pub(crate) fn elements(
    text: &[u8],
    range: Range<usize>,
    mut visit: impl FnMut(Range<usize>),
) -> Result<(), JsonError> {
    let mut scanner = JsonScanner { text: &text[..range.end], at: range.start };
    scanner.space();
    scanner.expect(b'[', "expected an array")?;
    scanner.space();
    if !scanner.take(b']') {
        loop {
            let start = scanner.at;
            scanner.value()?;
            visit(start..scanner.at);
            scanner.space();
            if scanner.take(b']') {
                break;
            }
            scanner.expect(b',', "expected `,` or `]`")?;
            scanner.space();
        }
    }
    scanner.end()
}

/// Stack of the open brackets, one bit for each, so that no recursion is needed.
#[derive(Default)]
struct OpenBrackets {
    objects: [u64; DEPTH_MAX / 64],
    depth: usize,
}

impl OpenBrackets {
    /// Pushes a bracket; false if there is no room.
    fn push(&mut self, is_object: bool) -> bool {
        let Some(word) = self.objects.get_mut(self.depth / 64) else { return false };
        let bit = 1 << (self.depth % 64);
        *word = if is_object { *word | bit } else { *word & !bit };
        self.depth += 1;
        true
    }

    /// True if the innermost bracket is an object's.
    fn last(&self) -> Option<bool> {
        let at = self.depth.checked_sub(1)?;
        Some(self.objects[at / 64] >> (at % 64) & 1 == 1)
    }
}

struct JsonScanner<'a> {
    text: &'a [u8],
    at: usize,
}

impl JsonScanner<'_> {
    fn fault(&self, why: &'static str) -> JsonError {
        JsonError { why, at: self.at }
    }

    fn peek(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.peek() {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> bool {
        let is_there = self.peek() == Some(byte);
        self.at += usize::from(is_there);
        is_there
    }

    fn expect(&mut self, byte: u8, why: &'static str) -> Result<(), JsonError> {
        if self.take(byte) { Ok(()) } else { Err(self.fault(why)) }
    }

    fn end(&mut self) -> Result<(), JsonError> {
        self.space();
        if self.at == self.text.len() { Ok(()) } else { Err(self.fault("unexpected data")) }
    }

    /// Skips a key and its colon; returns the range between the quotes, and whether it has escapes.
    fn key(&mut self) -> Result<(Range<usize>, bool), JsonError> {
        let start = self.at + 1;
        self.expect(b'"', "expected a key in double quotes")?;
        let is_escaped = self.string()?;
        let key = start..self.at - 1;
        self.space();
        self.expect(b':', "expected `:`")?;
        self.space();
        Ok((key, is_escaped))
    }

    /// Skips a value.
    fn value(&mut self) -> Result<(), JsonError> {
        if !matches!(self.peek(), Some(b'{' | b'[')) {
            return self.scalar();
        }
        let mut open = OpenBrackets::default();
        loop {
            if self.begin(&mut open)? {
                continue;
            }
            // After a value.
            loop {
                let Some(is_object) = open.last() else { return Ok(()) };
                self.space();
                if self.take(b',') {
                    self.space();
                    if is_object {
                        self.key()?;
                    }
                    break;
                }
                match is_object {
                    true => self.expect(b'}', "expected `,` or `}`")?,
                    false => self.expect(b']', "expected `,` or `]`")?,
                }
                open.depth -= 1;
            }
        }
    }

    /// Skips a value, or the beginning of one up to its first inner value; true for the latter.
    fn begin(&mut self, open: &mut OpenBrackets) -> Result<bool, JsonError> {
        let (is_object, close) = match self.peek() {
            Some(b'{') => (true, b'}'),
            Some(b'[') => (false, b']'),
            _ => return self.scalar().map(|()| false),
        };
        if open.depth + 1 >= DEPTH_MAX || !open.push(is_object) {
            return Err(self.fault("more than 512 objects and arrays in each other"));
        }
        self.at += 1;
        self.space();
        if self.take(close) {
            open.depth -= 1;
            return Ok(false);
        }
        if is_object {
            self.key()?;
        }
        Ok(true)
    }

    fn scalar(&mut self) -> Result<(), JsonError> {
        match self.peek() {
            Some(b'"') => {
                self.at += 1;
                self.string().map(|_| ())
            }
            Some(b'-' | b'0'..=b'9') => self.number(),
            Some(b't') => self.word(b"true"),
            Some(b'f') => self.word(b"false"),
            Some(b'n') => self.word(b"null"),
            Some(b'N') => self.word(b"NaN"),
            Some(b'I') => self.word(b"Infinity"),
            _ => Err(self.fault("expected a value")),
        }
    }

    fn word(&mut self, word: &[u8]) -> Result<(), JsonError> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.fault("expected a value"));
        }
        self.at += word.len();
        Ok(())
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.peek() {
            self.at += 1;
        }
        if self.at == start { Err(self.fault("expected a digit")) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<(), JsonError> {
        if self.take(b'-') && self.peek() == Some(b'I') {
            return self.word(b"Infinity");
        }
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            let _ = self.take(b'+') || self.take(b'-');
            self.digits()?;
        }
        Ok(())
    }

    /// Skips the rest of a string, up to and with its closing quote; true if it has escapes.
    fn string(&mut self) -> Result<bool, JsonError> {
        let mut is_escaped = false;
        loop {
            self.at += plain_bytes(&self.text[self.at..]);
            match self.peek() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(is_escaped);
                }
                Some(b'\\') => self.escape()?,
                Some(_) => return Err(self.fault("control character in a string")),
                None => return Err(self.fault("string without end")),
            }
            is_escaped = true;
        }
    }

    fn escape(&mut self) -> Result<(), JsonError> {
        let length = match self.text.get(self.at + 1) {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
            Some(b'u') => {
                let hex = self.text.get(self.at + 2..self.at + 6);
                if !hex.is_some_and(|hex| hex.iter().all(u8::is_ascii_hexdigit)) {
                    return Err(self.fault("invalid \\u escape"));
                }
                6
            }
            _ => return Err(self.fault("invalid escape")),
        };
        self.at += length;
        Ok(())
    }
}

/// Bytes of a string that are searched in words; what is longer is searched by vectors.
const WORDS_MAX: usize = 64;

/// Number of bytes before the first quote, backslash or control character.
fn plain_bytes(text: &[u8]) -> usize {
    const ONES: u64 = u64::MAX / 0xff;
    // A byte that is zero, or the first one that is below what is subtracted, has its high bit set.
    let below = |word: u64, least: u8| word.wrapping_sub(ONES * u64::from(least)) & !word;
    let is_special = |byte: &u8| matches!(byte, b'"' | b'\\' | ..0x20);
    let (words, last) = text[..text.len().min(WORDS_MAX)].as_chunks::<8>();
    for (nth, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let is = |byte: u8| below(word ^ (ONES * u64::from(byte)), 1);
        let special = (below(word, 0x20) | is(b'"') | is(b'\\')) & (ONES << 7);
        if special != 0 {
            return nth * 8 + special.trailing_zeros() as usize / 8;
        }
    }
    if let Some(at) = last.iter().position(is_special) {
        return words.len() * 8 + at;
    }
    let Some(rest) = text.get(WORDS_MAX..) else { return text.len() };
    let stop = memchr2(b'"', b'\\', rest).unwrap_or(rest.len());
    // Looking at all of them is faster than ending at the first one.
    let has_control = rest[..stop].iter().fold(false, |has, byte| has | (*byte < 0x20));
    let control = if has_control { rest.iter().position(is_special) } else { None };
    WORDS_MAX + control.unwrap_or(stop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    fn scan(text: &str) -> Result<Vec<(String, String)>, JsonError> {
        let mut found = Vec::new();
        members(text.as_bytes(), 0..text.len(), |JsonMember { key, value, .. }| {
            found.push((text[key].to_owned(), text[value].to_owned()));
            Ok(())
        })
        .map(|close| assert_eq!(text.as_bytes()[close], b'}'))
        .map(|()| found)
    }

    proptest! {
        #[test]
        fn plain_bytes_end_at_the_first_special_one(
            plain in prop::collection::vec(prop_oneof![Just(0x20u8), Just(0x7f), 0x23..=0x5bu8, 0x80..=0xffu8], 0..200),
            special in prop::option::of(prop_oneof![Just(b'"'), Just(b'\\'), ..0x20u8]),
            after in prop::collection::vec(any::<u8>(), 0..20),
        ) {
            let mut text = plain.clone();
            if let Some(special) = special {
                text.push(special);
                text.extend(after);
            }
            prop_assert_eq!(plain_bytes(&text), plain.len());
        }
    }

    /// Texts with the verdict of Python 3.11's `json.loads`.
    #[test]
    fn texts_are_accepted_as_by_json_loads() {
        for good in [
            "NaN",
            "Infinity",
            "-Infinity",
            "-0",
            "0.5e-7",
            "1E+2",
            "12345678901234567890123",
            r#""\ud800""#,
            r#""\u00E4\/\b""#,
            "\"\u{7f}\"",
            "[ ]",
            "{ }",
            "[[],{}]",
            "true",
            r#"{"a":{"b":[1,{"c":null}]},"a":2}"#,
            "\t\r\n 1 ",
        ] {
            let text = format!("{{\"k\":{good}}}");
            assert_eq!(scan(&text).map(|found| found.len()), Ok(1), "{good}");
        }
        for bad in [
            "",
            "nan",
            "+Infinity",
            "-NaN",
            "-",
            "01",
            "1.",
            ".5",
            "1e",
            "0x1",
            "'a'",
            "\"a",
            r#""\x""#,
            r#""\u12g4""#,
            r#""\u12""#,
            "\"\u{1}\"",
            "\"\n\"",
            "[1,]",
            "{\"a\":1,}",
            "{a:1}",
            "{\"a\" 1}",
            "[1 2]",
            "[1}",
            "{\"a\":1]",
            "tru",
            "1 1",
            "/**/1",
            "\u{feff}1",
        ] {
            assert!(scan(&format!("{{\"k\":{bad}}}")).is_err(), "{bad}");
        }
        for bad in ["", "[]", "1", "{", "{} x", "{}{", "\u{0}", "{\"a\":1"] {
            assert!(scan(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn nesting_has_a_limit() {
        for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
            let nested =
                |depth: usize| format!("{{\"k\":{}1{}}}", open.repeat(depth), close.repeat(depth));
            assert!(scan(&nested(DEPTH_MAX - 1)).is_ok());
            let refused = scan(&nested(DEPTH_MAX)).expect_err("too deep");
            assert!(refused.to_string().contains("512"), "{refused}");
            assert!(scan(&nested(100_000)).is_err());
        }
    }

    fn json() -> impl Strategy<Value = Value> {
        let scalar = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        scalar.prop_recursive(5, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(".{0,4}", inner, 0..6)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn members_are_those_that_serde_json_finds(object in prop::collection::btree_map("[a-z\"\\\\\u{1}-\u{1f}é]{0,4}", json(), 0..8), pretty: bool) {
            let object = Value::Object(object.into_iter().collect());
            let text = if pretty { format!("{object:#}") } else { object.to_string() };
            // Floats as they are read.
            let object: Value = serde_json::from_str(&text).unwrap();
            let found = scan(&text).unwrap();
            let found = found.iter().map(|(key, value)| {
                let key: String = serde_json::from_str(&format!("\"{key}\"")).unwrap();
                (key, serde_json::from_str(value).unwrap())
            });
            prop_assert_eq!(Value::Object(found.collect()), object);
        }

        #[test]
        fn verdicts_are_those_of_serde_json(text in "[\\[\\]{}:,\"\\\\ntrue0-9.eE+u \u{1}-]{0,24}") {
            let text = format!("{{\"k\":{text}}}");
            let strict = serde_json::from_str::<serde_json::Map<String, Value>>(&text);
            // Python has numbers of any size.
            let beyond = strict.as_ref().is_err_and(|why| why.to_string().contains("out of range"));
            prop_assert!(beyond || strict.is_ok() == scan(&text).is_ok(), "{text}: {strict:?}");
        }

        #[test]
        fn any_bytes_are_survived(text in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = members::<JsonError>(&text, 0..text.len(), |_| Ok(()));
            let _ = elements(&text, 0..text.len(), |_| ());
        }
    }
}
