//! Reading MessagePack without decoding more of it than is asked for.

use crate::core::dialect::skim::span;

/// One whole MessagePack value, as bytes of the frame that it is in.
#[derive(Clone, Copy, Debug)]
pub(super) struct MsgpackValue<'a>(&'a [u8]);

impl<'a> MsgpackValue<'a> {
    /// The value at the start of the bytes, and what follows it.
    pub(super) fn first(bytes: &'a [u8]) -> Result<(MsgpackValue<'a>, &'a [u8]), &'static str> {
        let (value, rest) = bytes.split_at(span(bytes)?);
        Ok((MsgpackValue(value), rest))
    }

    /// The value that all the bytes are.
    pub(super) fn only(bytes: &'a [u8]) -> Result<MsgpackValue<'a>, &'static str> {
        let (value, rest) = MsgpackValue::first(bytes)?;
        if rest.is_empty() { Ok(value) } else { Err("bytes after the end") }
    }

    /// First byte, and what follows it: the number, or a length and the contents.
    fn split(self) -> (u8, &'a [u8]) {
        (self.0[0], &self.0[1..])
    }

    pub(super) fn is_nil(self) -> bool {
        self.0[0] == 0xc0
    }

    /// The value of any integer type.
    pub(super) fn int(self) -> Option<i128> {
        let (marker, rest) = self.split();
        let unsigned = || rest.iter().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        match marker {
            0x00..=0x7f => Some(i128::from(marker)),
            0xe0..=0xff => Some(i128::from(marker as i8)),
            0xcc..=0xcf => Some(i128::from(unsigned())),
            0xd0..=0xd3 => {
                let unused = 64 - 8 * rest.len();
                Some(i128::from(((unsigned() << unused) as i64) >> unused))
            }
            _ => None,
        }
    }

    /// The integer of type `T`, if it is one.
    pub(super) fn number<T: TryFrom<i128>>(self) -> Option<T> {
        self.int().and_then(|int| T::try_from(int).ok())
    }

    /// The value of a `float` or `bool`, cut to an integer as Python does.
    pub(super) fn cut(self) -> Option<i64> {
        match self.0 {
            [0xc2] => Some(0),
            [0xc3] => Some(1),
            [0xca, rest @ ..] => Some(f32::from_be_bytes(rest.try_into().ok()?) as i64),
            [0xcb, rest @ ..] => Some(f64::from_be_bytes(rest.try_into().ok()?) as i64),
            _ => None,
        }
    }

    /// The contents of a `str`, if they are UTF-8.
    pub(super) fn text(self) -> Option<&'a str> {
        let (marker, rest) = self.split();
        let from = match marker {
            0xa0..=0xbf => 0,
            0xd9 => 1,
            0xda => 2,
            0xdb => 4,
            _ => return None,
        };
        std::str::from_utf8(&rest[from..]).ok()
    }

    /// The contents of a `bin`.
    pub(super) fn bin(self) -> Option<&'a [u8]> {
        let (marker, rest) = self.split();
        match marker {
            0xc4 => Some(&rest[1..]),
            0xc5 => Some(&rest[2..]),
            0xc6 => Some(&rest[4..]),
            _ => None,
        }
    }

    /// The contents of a `str`, or of a `bin` that is UTF-8.
    pub(super) fn text_or_bin(self) -> Option<&'a str> {
        self.text().or_else(|| std::str::from_utf8(self.bin()?).ok())
    }

    /// The elements of an array.
    pub(super) fn items(self) -> Option<MsgpackItems<'a>> {
        let (marker, rest) = self.split();
        match marker {
            0x90..=0x9f => Some(MsgpackItems(rest)),
            0xdc => Some(MsgpackItems(&rest[2..])),
            0xdd => Some(MsgpackItems(&rest[4..])),
            _ => None,
        }
    }

    /// Keys and values of a map.
    pub(super) fn entries(
        self,
    ) -> Option<impl Iterator<Item = (MsgpackValue<'a>, MsgpackValue<'a>)>> {
        let (marker, rest) = self.split();
        let mut items = match marker {
            0x80..=0x8f => MsgpackItems(rest),
            0xde => MsgpackItems(&rest[2..]),
            0xdf => MsgpackItems(&rest[4..]),
            _ => return None,
        };
        Some(std::iter::from_fn(move || Some((items.next()?, items.next()?))))
    }
}

/// The values that lie one behind the other in whole contents.
#[derive(Clone, Debug)]
pub(super) struct MsgpackItems<'a>(&'a [u8]);

impl<'a> Iterator for MsgpackItems<'a> {
    type Item = MsgpackValue<'a>;

    fn next(&mut self) -> Option<MsgpackValue<'a>> {
        let (value, rest) = MsgpackValue::first(self.0).ok()?;
        self.0 = rest;
        Some(value)
    }
}

/// A map whose keys are texts. The last of equal keys counts, as in Python.
#[derive(Clone, Debug)]
pub(super) struct MsgpackMap<'a>(Vec<(MsgpackValue<'a>, MsgpackValue<'a>)>);

impl<'a> MsgpackMap<'a> {
    /// The map that the value is.
    pub(super) fn read(value: MsgpackValue<'a>) -> Result<MsgpackMap<'a>, &'static str> {
        let mut map = Vec::new();
        for (key, value) in value.entries().ok_or("not a map")? {
            if key.text().is_none() && key.bin().is_none() {
                return Err("key that is no text");
            }
            map.push((key, value));
        }
        Ok(MsgpackMap(map))
    }

    /// The value under a `str` key.
    pub(super) fn get(&self, name: &str) -> Option<MsgpackValue<'a>> {
        self.find(|key| key.text() == Some(name))
    }

    /// The value under a `str` or `bin` key.
    pub(super) fn get_loosely(&self, name: &str) -> Option<MsgpackValue<'a>> {
        self.find(|key| key.text_or_bin() == Some(name))
    }

    fn find(&self, is_it: impl Fn(MsgpackValue<'a>) -> bool) -> Option<MsgpackValue<'a>> {
        self.0.iter().rev().find(|(key, _)| is_it(*key)).map(|(_, value)| *value)
    }
}
