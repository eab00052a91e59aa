//! Enums in MessagePack, as far as one side may have variants that the other does not know.
//!
//! ```
//! use kvferry_engine::core::enum_variants::{is_foreign, name_of};
//! use kvferry_engine::core::ids::Mode;
//!
//! // "Push", and what a later version may say: `a4` begins a text of four bytes.
//! assert!(!is_foreign::<Mode>(b"\xa4Push"));
//! assert!(is_foreign::<Mode>(b"\xa4Both"));
//! assert_eq!(name_of(b"\xa4Both"), Some("Both"));
//! ```

use serde::de::{Deserialize, Deserializer, Error as _, Visitor};
use serde::forward_to_deserialize_any;
use std::fmt;

/// True if these are bytes of an enum, and of a variant that this program's `T` does not have.
pub fn is_foreign<'de, T: Deserialize<'de>>(bytes: &[u8]) -> bool {
    name_of(bytes).is_some_and(|name| !variants::<T>().contains(&name))
}

/// The variant that bytes name, as enums are encoded: a map of one entry, or a text.
pub fn name_of(bytes: &[u8]) -> Option<&str> {
    let text = bytes.strip_prefix(&[0x81]).unwrap_or(bytes);
    let (head, rest) = text.split_first()?;
    let (len, rest) = match head {
        0xa0..=0xbf => (usize::from(head - 0xa0), rest),
        0xd9 => rest.split_first().map(|(len, rest)| (usize::from(*len), rest))?,
        _ => return None,
    };
    std::str::from_utf8(rest.get(..len)?).ok()
}

/// The names of an enum's variants, which it tells whoever deserializes it.
fn variants<'de, T: Deserialize<'de>>() -> &'static [&'static str] {
    match T::deserialize(VariantProbe) {
        Err(VariantNames(variants)) => variants,
        Ok(_) => &[],
    }
}

struct VariantProbe;

/// What came in place of a value.
#[derive(Debug)]
struct VariantNames(&'static [&'static str]);

impl fmt::Display for VariantNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

impl std::error::Error for VariantNames {}

impl serde::de::Error for VariantNames {
    fn custom<T: fmt::Display>(_: T) -> VariantNames {
        VariantNames(&[])
    }
}

impl<'de> Deserializer<'de> for VariantProbe {
    type Error = VariantNames;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, VariantNames> {
        Err(VariantNames::custom("no enum"))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        variants: &'static [&'static str],
        _: V,
    ) -> Result<V::Value, VariantNames> {
        Err(VariantNames(variants))
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option
        unit unit_struct newtype_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Serialize;

    #[derive(Serialize, serde::Deserialize)]
    enum CurrentVersion {
        Plain,
        Named { a: u8 },
        Wrapped(u8),
    }

    #[derive(Serialize)]
    enum LaterVersion {
        Plain,
        New,
        NewNamed { a: u8 },
        AVariantWithANameOfMoreThanThirtyOneBytes(u8),
    }

    #[test]
    fn variants_of_a_later_version_are_told_from_damage() {
        let bytes = |value: &dyn Fn() -> Vec<u8>| value();
        let known = [
            bytes(&|| rmp_serde::to_vec(&CurrentVersion::Plain).unwrap()),
            bytes(&|| rmp_serde::to_vec(&CurrentVersion::Named { a: 1 }).unwrap()),
            bytes(&|| rmp_serde::to_vec_named(&CurrentVersion::Wrapped(1)).unwrap()),
            bytes(&|| rmp_serde::to_vec(&LaterVersion::Plain).unwrap()),
        ];
        for bytes in known {
            assert!(!is_foreign::<CurrentVersion>(&bytes), "{bytes:?}");
        }
        for value in [
            LaterVersion::New,
            LaterVersion::NewNamed { a: 1 },
            LaterVersion::AVariantWithANameOfMoreThanThirtyOneBytes(1),
        ] {
            let bytes = rmp_serde::to_vec_named(&value).unwrap();
            assert!(is_foreign::<CurrentVersion>(&bytes), "{bytes:?}");
        }
        for damaged in [&[][..], &[0x81], &[0xa5, b'N'], &[0xd9], &[0x93, 1, 2, 3], &[0xa1, 0xff]] {
            assert!(!is_foreign::<CurrentVersion>(damaged), "{damaged:?}");
        }
    }
}
