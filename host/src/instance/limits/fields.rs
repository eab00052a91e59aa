//! Names, kinds and values of the fields of a settings struct, as it deserializes them.

use kvferry_engine::core::time::Nanos;
use serde::de::value::Error;
use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, IntoDeserializer, MapAccess,
    Visitor,
};
use serde::{Serialize, forward_to_deserialize_any};
use serde_json::Value;

/// What a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FieldKind {
    /// A span of time.
    Time(Nanos),
    /// A number, and the largest one that it has room for.
    Number { value: u64, most: u64 },
    /// True or false.
    Flag(bool),
}

type Fields = Vec<(&'static str, FieldKind)>;

/// The fields of a struct of times, numbers and flags, in their order.
///
/// # Panics
/// If it is no struct, or has a field of another kind, which then needs a kind here.
pub(super) fn fields<T: Serialize + DeserializeOwned>(settings: &T) -> Fields {
    let values = serde_json::to_value(settings).expect("times, numbers and flags");
    let mut found = Fields::new();
    let reader = StructReader { names: &[], values: &values, found: &mut found };
    T::deserialize(reader).expect("a struct of times, numbers and flags");
    found
}

/// Reads a struct from its own values, and notes what it asks for.
struct StructReader<'a> {
    /// Fields that it has not read yet.
    names: &'static [&'static str],
    values: &'a Value,
    found: &'a mut Fields,
}

impl<'de> Deserializer<'de> for StructReader<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom("it is no struct"))
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        names: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_map(StructReader { names, ..self })
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit
        unit_struct newtype_struct seq tuple tuple_struct map enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for StructReader<'_> {
    type Error = Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        key: K,
    ) -> Result<Option<K::Value>, Error> {
        let next = self.names.first().map(|name| key.deserialize(name.into_deserializer()));
        next.transpose()
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, value: V) -> Result<V::Value, Error> {
        let (name, rest) = self.names.split_first().expect("its key was read");
        self.names = rest;
        let given = &self.values[*name];
        value.deserialize(FieldReader { name, given, is_time: false, found: self.found })
    }
}

struct FieldReader<'a> {
    name: &'static str,
    given: &'a Value,
    /// It is inside of a [`Nanos`].
    is_time: bool,
    found: &'a mut Fields,
}

macro_rules! read_numbers {
    ($($read:ident: $number:ty, $visit:ident;)*) => {$(
        fn $read<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
            let value = self.given.as_u64().ok_or_else(|| Error::custom(self.name))?;
            let kind = match self.is_time {
                true => FieldKind::Time(Nanos(value)),
                false => FieldKind::Number { value, most: <$number>::MAX.into() },
            };
            self.found.push((self.name, kind));
            visitor.$visit(value as $number)
        }
    )*};
}

impl<'de> Deserializer<'de> for FieldReader<'_> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, _: V) -> Result<V::Value, Error> {
        Err(Error::custom(format_args!("{} is no time, number or flag", self.name)))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let flag = self.given.as_bool().ok_or_else(|| Error::custom(self.name))?;
        self.found.push((self.name, FieldKind::Flag(flag)));
        visitor.visit_bool(flag)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(FieldReader { is_time: name == "Nanos", ..self })
    }

    read_numbers! {
        deserialize_u8: u8, visit_u8;
        deserialize_u16: u16, visit_u16;
        deserialize_u32: u32, visit_u32;
        deserialize_u64: u64, visit_u64;
    }

    forward_to_deserialize_any! {
        i8 i16 i32 i64 i128 u128 f32 f64 char str string bytes byte_buf option unit unit_struct seq
        tuple tuple_struct map struct enum identifier ignored_any
    }
}
