//! Encodings of JSON bodies, detected as Python's `json.loads` detects them: UTF-8 with or without a
//! byte order mark, UTF-16 and UTF-32.

use bytes::Bytes;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyEncoding {
    Utf8,
    Utf16,
    Utf32,
}

/// An encoding, the length of its byte order mark, and whether its units are little-endian.
type DetectedEncoding = (BodyEncoding, usize, bool);

fn detected(body: &[u8]) -> DetectedEncoding {
    use BodyEncoding::{Utf8, Utf16, Utf32};
    match body {
        [0, 0, 0xfe, 0xff, ..] => (Utf32, 4, false),
        [0xff, 0xfe, 0, 0, ..] => (Utf32, 4, true),
        [0xfe, 0xff, ..] => (Utf16, 2, false),
        [0xff, 0xfe, ..] => (Utf16, 2, true),
        [0xef, 0xbb, 0xbf, ..] => (Utf8, 3, false),
        [0, 0, _, _, ..] => (Utf32, 0, false),
        [0, _, _, _, ..] | [0, _] => (Utf16, 0, false),
        [_, 0, 0, 0, ..] => (Utf32, 0, true),
        [_, 0, _, _, ..] | [_, 0] => (Utf16, 0, true),
        _ => (Utf8, 0, false),
    }
}

/// Bytes of memory that [`to_utf8`] takes beside the body.
pub(crate) fn extra_bytes(body: &[u8]) -> usize {
    match detected(body).0 {
        BodyEncoding::Utf8 => 0,
        // Three bytes for a unit of two at most, and four for one of four.
        BodyEncoding::Utf16 => body.len() / 2 * 3,
        BodyEncoding::Utf32 => body.len(),
    }
}

/// The text of a body in UTF-8, without a byte order mark. A body in UTF-8 is not copied.
///
/// # Errors
/// A body that is not valid in its own encoding.
pub(crate) fn to_utf8(body: Bytes) -> Result<Bytes, &'static str> {
    let (encoding, mark, is_little) = detected(&body);
    let text = body.slice(mark..);
    match encoding {
        BodyEncoding::Utf8 => Ok(text),
        BodyEncoding::Utf16 => {
            let (units, rest) = text.as_chunks::<2>();
            let units = units.iter().map(|unit| match is_little {
                true => u16::from_le_bytes(*unit),
                false => u16::from_be_bytes(*unit),
            });
            encoded(char::decode_utf16(units).map(Result::ok), rest, text.len() / 2 * 3)
                .ok_or("it is not valid UTF-16; send UTF-8")
        }
        BodyEncoding::Utf32 => {
            let (units, rest) = text.as_chunks::<4>();
            let units = units.iter().map(|unit| match is_little {
                true => u32::from_le_bytes(*unit),
                false => u32::from_be_bytes(*unit),
            });
            encoded(units.map(char::from_u32), rest, text.len())
                .ok_or("it is not valid UTF-32; send UTF-8")
        }
    }
}

fn encoded(
    mut chars: impl Iterator<Item = Option<char>>,
    rest: &[u8],
    most: usize,
) -> Option<Bytes> {
    let mut text = String::with_capacity(if rest.is_empty() { most } else { return None });
    chars.try_for_each(|char| char.map(|char| text.push(char)))?;
    Some(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_in_all_encodings_of_json_are_read() {
        let text = "{\"a\":\"ä😀\"}";
        let bytes = |is_little: bool, is_wide: bool, mark: bool| -> Vec<u8> {
            let text = format!("{}{text}", if mark { "\u{feff}" } else { "" });
            match is_wide {
                true => {
                    let to = |c: char| {
                        if is_little { (c as u32).to_le_bytes() } else { (c as u32).to_be_bytes() }
                    };
                    text.chars().flat_map(to).collect()
                }
                false => {
                    let to = |c: u16| if is_little { c.to_le_bytes() } else { c.to_be_bytes() };
                    text.encode_utf16().flat_map(to).collect()
                }
            }
        };
        for case in 0..8 {
            let body = bytes(case & 1 == 0, case & 2 == 0, case & 4 == 0);
            assert!(extra_bytes(&body) >= text.len(), "{case}");
            assert_eq!(to_utf8(body.into()).as_deref(), Ok(text.as_bytes()), "{case}");
        }
        for text in ["{}", "\u{feff}{}", "1", ""] {
            let body = Bytes::from(text.as_bytes());
            assert_eq!(extra_bytes(&body), 0);
            assert_eq!(to_utf8(body).unwrap(), text.trim_start_matches('\u{feff}'));
        }
        for bad in [&b"\xff\xfe{"[..], b"\xff\xfe\x00\xd8", b"\0\0\0{\0", b"\0\0\xd8\0"] {
            assert!(to_utf8(Bytes::from(bad)).is_err(), "{bad:?}");
        }
    }
}
