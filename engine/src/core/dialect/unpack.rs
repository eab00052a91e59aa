//! MessagePack bytes into types, as the native dialect writes them: structs are lists of their
//! fields, enums are names or maps from a name to its contents.
//!
//! From version 2 on, what a later version adds at the end of a struct is passed over, and a name
//! that an enum does not have becomes the variant that takes any.

use super::skim::span;
use serde::de::value::BorrowedStrDeserializer;
use serde::de::{self, DeserializeSeed, Deserializer, IntoDeserializer, Visitor};
use std::fmt;

/// Variants of one text each that take the name of a variant which this version does not have.
const ANY: [&str; 3] = ["Unknown", "Backend", "Invalid"];

/// What is wrong with the bytes.
#[derive(Debug)]
pub(super) struct UnpackError(String);

impl fmt::Display for UnpackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UnpackError {}

impl de::Error for UnpackError {
    fn custom<T: fmt::Display>(what: T) -> UnpackError {
        UnpackError(what.to_string())
    }
}

fn broken<T>(what: &str) -> Result<T, UnpackError> {
    Err(UnpackError(what.into()))
}

/// Values, one after the other. Nothing is read beyond the end, whatever the bytes say.
pub(super) struct Unpacker<'de> {
    rest: &'de [u8],
    /// Takes what a later version may have added.
    lenient: bool,
}

impl<'de> Unpacker<'de> {
    pub(super) fn new(bytes: &'de [u8], lenient: bool) -> Unpacker<'de> {
        Unpacker { rest: bytes, lenient }
    }

    pub(super) fn value<T: de::Deserialize<'de>>(&mut self) -> Result<T, UnpackError> {
        T::deserialize(self)
    }

    /// The head of a list: how many values follow.
    pub(super) fn list(&mut self) -> Result<u64, UnpackError> {
        let marker = self.byte()?;
        match marker {
            0x90..=0x9f => Ok(u64::from(marker & 0x0f)),
            0xdc => self.number(2),
            0xdd => self.number(4),
            _ => broken("no list"),
        }
    }

    /// The head of an enum: the name of the variant, and whether it has contents, which follow.
    pub(super) fn variant(&mut self) -> Result<(&'de str, bool), UnpackError> {
        let full = self.rest.first() == Some(&0x81);
        if full {
            self.byte()?;
        }
        Ok((self.value()?, full))
    }

    fn byte(&mut self) -> Result<u8, UnpackError> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, count: u64) -> Result<&'de [u8], UnpackError> {
        let head = usize::try_from(count).ok().and_then(|count| self.rest.split_at_checked(count));
        let Some((head, rest)) = head else { return broken("cut short") };
        self.rest = rest;
        Ok(head)
    }

    /// A big-endian number of this many bytes.
    fn number(&mut self, width: u64) -> Result<u64, UnpackError> {
        Ok(self.take(width)?.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    fn signed(&mut self, width: u64) -> Result<i64, UnpackError> {
        let unused = 64 - 8 * width;
        Ok(((self.number(width)? << unused) as i64) >> unused)
    }

    fn skip(&mut self) -> Result<(), UnpackError> {
        let length = span(self.rest).map_err(|rule| UnpackError(rule.into()))?;
        self.take(length as u64).map(|_| ())
    }

    fn text<V: Visitor<'de>>(&mut self, length: u64, visitor: V) -> Result<V::Value, UnpackError> {
        match std::str::from_utf8(self.take(length)?) {
            Ok(text) => visitor.visit_borrowed_str(text),
            Err(_) => broken("text that is not UTF-8"),
        }
    }

    /// A list of `left` values; of a struct there may be more than are asked for.
    fn items<V: Visitor<'de>>(
        &mut self,
        left: u64,
        grows: bool,
        visitor: V,
    ) -> Result<V::Value, UnpackError> {
        let mut items = ListItems { from: self, left };
        let value = visitor.visit_seq(&mut items)?;
        let more = items.left;
        if more > 0 && !(grows && self.lenient) {
            return broken("more values than there should be");
        }
        for _ in 0..more {
            self.skip()?;
        }
        Ok(value)
    }

    /// The fields of a struct.
    fn fields<V: Visitor<'de>>(&mut self, visitor: V) -> Result<V::Value, UnpackError> {
        let count = self.list()?;
        self.items(count, true, visitor)
    }
}

impl<'de> Deserializer<'de> for &mut Unpacker<'de> {
    type Error = UnpackError;

    fn is_human_readable(&self) -> bool {
        false
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnpackError> {
        let marker = self.byte()?;
        match marker {
            0x00..=0x7f => visitor.visit_u64(u64::from(marker)),
            0xe0..=0xff => visitor.visit_i64(i64::from(marker as i8)),
            0xcc..=0xcf => visitor.visit_u64(self.number(1 << (marker - 0xcc))?),
            0xd0..=0xd3 => visitor.visit_i64(self.signed(1 << (marker - 0xd0))?),
            0xc0 => visitor.visit_unit(),
            0xc2 | 0xc3 => visitor.visit_bool(marker == 0xc3),
            0xa0..=0xbf => self.text(u64::from(marker & 0x1f), visitor),
            0xd9..=0xdb => {
                let length = self.number(1 << (marker - 0xd9))?;
                self.text(length, visitor)
            }
            0x90..=0x9f => self.items(u64::from(marker & 0x0f), false, visitor),
            0xdc | 0xdd => {
                let count = self.number(2 << (marker - 0xdc))?;
                self.items(count, false, visitor)
            }
            _ => broken("a type that has no place here"),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnpackError> {
        if self.rest.first() == Some(&0xc0) {
            self.byte()?;
            return visitor.visit_none();
        }
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, UnpackError> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, UnpackError> {
        self.fields(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _len: usize,
        visitor: V,
    ) -> Result<V::Value, UnpackError> {
        self.fields(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, UnpackError> {
        let (name, full) = self.variant()?;
        let any = ANY.iter().find(|any| variants.contains(any));
        match any {
            Some(any) if self.lenient && !variants.contains(&name) => {
                if full {
                    self.skip()?;
                }
                visitor.visit_enum(Variant { name: any, contents: VariantContents::Name(name) })
            }
            _ => {
                let contents =
                    if full { VariantContents::Here(self) } else { VariantContents::None };
                visitor.visit_enum(Variant { name, contents })
            }
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, UnpackError> {
        self.skip()?;
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple map identifier
    }
}

/// The values of a list.
struct ListItems<'a, 'de> {
    from: &'a mut Unpacker<'de>,
    left: u64,
}

impl<'de> de::SeqAccess<'de> for &mut ListItems<'_, 'de> {
    type Error = UnpackError;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, UnpackError> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        seed.deserialize(&mut *self.from).map(Some)
    }

    fn size_hint(&self) -> Option<usize> {
        // No value takes less than a byte.
        usize::try_from(self.left).ok().map(|left| left.min(self.from.rest.len()))
    }
}

/// A variant of an enum.
struct Variant<'a, 'de> {
    name: &'de str,
    contents: VariantContents<'a, 'de>,
}

enum VariantContents<'a, 'de> {
    None,
    Here(&'a mut Unpacker<'de>),
    /// The name of a variant that this version does not have.
    Name(&'de str),
}

impl<'a, 'de> de::EnumAccess<'de> for Variant<'a, 'de> {
    type Error = UnpackError;
    type Variant = VariantContents<'a, 'de>;

    fn variant_seed<T: DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<(T::Value, Self::Variant), UnpackError> {
        let name: de::value::StrDeserializer<'_, UnpackError> = self.name.into_deserializer();
        Ok((seed.deserialize(name)?, self.contents))
    }
}

impl<'de> de::VariantAccess<'de> for VariantContents<'_, 'de> {
    type Error = UnpackError;

    fn unit_variant(self) -> Result<(), UnpackError> {
        match self {
            VariantContents::None => Ok(()),
            VariantContents::Here(from) if from.lenient => from.skip(),
            _ => broken("contents of a variant that has none"),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(
        self,
        seed: T,
    ) -> Result<T::Value, UnpackError> {
        match self {
            VariantContents::Here(from) => seed.deserialize(from),
            VariantContents::Name(name) => seed.deserialize(BorrowedStrDeserializer::new(name)),
            VariantContents::None => broken("a variant without its contents"),
        }
    }

    fn tuple_variant<V: Visitor<'de>>(
        self,
        _len: usize,
        visitor: V,
    ) -> Result<V::Value, UnpackError> {
        match self {
            VariantContents::Here(from) => from.fields(visitor),
            _ => broken("a variant without its fields"),
        }
    }

    fn struct_variant<V: Visitor<'de>>(
        self,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, UnpackError> {
        self.tuple_variant(0, visitor)
    }
}
