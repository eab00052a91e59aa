//! Names, kinds and values of the fields of a settings struct, as it serializes them.

use kvferry_engine::core::time::Nanos;
use serde::de::value::Error;
use serde::ser::{Error as _, Impossible, SerializeStruct};
use serde::{Serialize, Serializer};

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

/// The fields of a struct of times, numbers and flags, in their order.
///
/// # Panics
/// If it is no struct, or has a field of another kind, which then needs a kind here.
pub(super) fn fields(settings: &impl Serialize) -> Vec<(&'static str, FieldKind)> {
    settings.serialize(StructSerializer(Vec::new())).expect("a struct of times, numbers and flags")
}

/// What a serializer refuses: all types of no argument but `self`, and those with a value.
macro_rules! refuse {
    ($($name:ident($($argument:ty),*);)*) => {
        $(fn $name(self $(, _: $argument)*) -> Result<Self::Ok, Error> {
            Err(Error::custom(stringify!($name)))
        })*
    };
}

macro_rules! refuse_compounds {
    () => {
        type Error = Error;
        type SerializeSeq = Impossible<Self::Ok, Error>;
        type SerializeTuple = Impossible<Self::Ok, Error>;
        type SerializeTupleStruct = Impossible<Self::Ok, Error>;
        type SerializeTupleVariant = Impossible<Self::Ok, Error>;
        type SerializeMap = Impossible<Self::Ok, Error>;
        type SerializeStructVariant = Impossible<Self::Ok, Error>;

        refuse! {
            serialize_i8(i8);
            serialize_i16(i16);
            serialize_i32(i32);
            serialize_i64(i64);
            serialize_f32(f32);
            serialize_f64(f64);
            serialize_char(char);
            serialize_str(&str);
            serialize_bytes(&[u8]);
            serialize_none();
            serialize_unit();
            serialize_unit_struct(&'static str);
            serialize_unit_variant(&'static str, u32, &'static str);
        }

        fn serialize_some<T: Serialize + ?Sized>(self, _: &T) -> Result<Self::Ok, Error> {
            Err(Error::custom("some"))
        }

        fn serialize_newtype_variant<T: Serialize + ?Sized>(
            self,
            _: &'static str,
            _: u32,
            _: &'static str,
            _: &T,
        ) -> Result<Self::Ok, Error> {
            Err(Error::custom("a variant"))
        }

        fn serialize_seq(self, _: Option<usize>) -> Result<Self::SerializeSeq, Error> {
            Err(Error::custom("a sequence"))
        }

        fn serialize_tuple(self, _: usize) -> Result<Self::SerializeTuple, Error> {
            Err(Error::custom("a tuple"))
        }

        fn serialize_tuple_struct(
            self,
            _: &'static str,
            _: usize,
        ) -> Result<Self::SerializeTupleStruct, Error> {
            Err(Error::custom("a tuple"))
        }

        fn serialize_tuple_variant(
            self,
            _: &'static str,
            _: u32,
            _: &'static str,
            _: usize,
        ) -> Result<Self::SerializeTupleVariant, Error> {
            Err(Error::custom("a variant"))
        }

        fn serialize_map(self, _: Option<usize>) -> Result<Self::SerializeMap, Error> {
            Err(Error::custom("a map"))
        }

        fn serialize_struct_variant(
            self,
            _: &'static str,
            _: u32,
            _: &'static str,
            _: usize,
        ) -> Result<Self::SerializeStructVariant, Error> {
            Err(Error::custom("a variant"))
        }
    };
}

struct StructSerializer(Vec<(&'static str, FieldKind)>);

impl Serializer for StructSerializer {
    type Ok = Vec<(&'static str, FieldKind)>;
    type SerializeStruct = StructSerializer;

    refuse_compounds!();

    refuse! {
        serialize_bool(bool);
        serialize_u8(u8);
        serialize_u16(u16);
        serialize_u32(u32);
        serialize_u64(u64);
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<Self::Ok, Error> {
        value.serialize(self)
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<StructSerializer, Error> {
        Ok(self)
    }
}

impl SerializeStruct for StructSerializer {
    type Ok = Vec<(&'static str, FieldKind)>;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        self.0.push((name, value.serialize(FieldSerializer)?));
        Ok(())
    }

    fn end(self) -> Result<Self::Ok, Error> {
        Ok(self.0)
    }
}

struct FieldSerializer;

fn number<T: Into<u64>>(value: T, most: T) -> Result<FieldKind, Error> {
    Ok(FieldKind::Number { value: value.into(), most: most.into() })
}

impl Serializer for FieldSerializer {
    type Ok = FieldKind;
    type SerializeStruct = Impossible<FieldKind, Error>;

    refuse_compounds!();

    fn serialize_bool(self, flag: bool) -> Result<FieldKind, Error> {
        Ok(FieldKind::Flag(flag))
    }

    fn serialize_u8(self, value: u8) -> Result<FieldKind, Error> {
        number(value, u8::MAX)
    }

    fn serialize_u16(self, value: u16) -> Result<FieldKind, Error> {
        number(value, u16::MAX)
    }

    fn serialize_u32(self, value: u32) -> Result<FieldKind, Error> {
        number(value, u32::MAX)
    }

    fn serialize_u64(self, value: u64) -> Result<FieldKind, Error> {
        number(value, u64::MAX)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        value: &T,
    ) -> Result<FieldKind, Error> {
        match (name, value.serialize(FieldSerializer)?) {
            ("Nanos", FieldKind::Number { value, .. }) => Ok(FieldKind::Time(Nanos(value))),
            (_, kind) => Ok(kind),
        }
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Self::SerializeStruct, Error> {
        Err(Error::custom("a struct"))
    }
}
