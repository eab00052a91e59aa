//! Declaring what a table of a file can hold: each key once, with its type, default and bounds.

use crate::doc::TomlSection;
use crate::error::ScenarioError;
use crate::value::{Distribution, ScenarioValue};
use std::fmt::Display;

/// Makes a struct that is read from a table: a field is the value of the key of its name. Behind
/// the type of a field come, as far as it has them:
///
/// - `= value`, what stands for a key that is not there,
/// - `in (min, max)`, which every possible outcome has to be within,
/// - `else (what, remedy)`, the error for a key that is not there.
///
/// Fields that are no keys stand behind `with`. They and the defaults can use the fields before
/// them, and the table under the name in parentheses. `checked by` names a function that looks at
/// the whole.
#[macro_export]
macro_rules! section {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident $(($section:ident))? $(checked by $check:path)? {
            $(
                $(#[$about:meta])*
                $field_vis:vis $field:ident: $type:ty
                    $(= $default:expr)? $(, in $bounds:expr)? $(, else $missing:expr)?;
            )*
        }
        $(with {
            $($(#[$with_about:meta])* $with_vis:vis $with:ident: $with_type:ty = $value:expr;)*
        })?
    ) => {
        $(#[$meta])*
        $vis struct $name {
            $($(#[$about])* $field_vis $field: $type,)*
            $($($(#[$with_about])* $with_vis $with: $with_type,)*)?
        }

        impl $crate::doc::FromSection for $name {
            fn from_section(
                section: &$crate::doc::TomlSection<'_>,
            ) -> Result<$name, $crate::ScenarioError> {
                $(let $section = section;)?
                $(
                    let key = $crate::section::key(stringify!($field));
                    let $field: Option<$type> = section.read(key)?;
                    $($crate::section::check_bounds(section, key, &$field, $bounds)?;)?
                )*
                section.finish()?;
                $(
                    $(let $field = $field.or_else(|| Some(<$type>::from($default)));)?
                    let $field: $type = match $field {
                        Some(value) => value,
                        None => {
                            let key = $crate::section::key(stringify!($field));
                            let error: &[(&str, &str)] = &[$($missing)?];
                            section.absent(key, error.first())?
                        }
                    };
                )*
                $($(let $with: $with_type = $value;)*)?
                let read = $name { $($field,)* $($($with,)*)? };
                $($check(&read, section)?;)?
                Ok(read)
            }
        }

        impl $crate::doc::FromKey for $name {
            fn from_field(
                field: &$crate::doc::TomlField<'_>,
            ) -> Result<$name, $crate::ScenarioError> {
                field.section()
            }

            fn from_list(
                field: &$crate::doc::TomlField<'_>,
            ) -> Result<Vec<$name>, $crate::ScenarioError> {
                field.sections()
            }

            fn absent(
                section: &$crate::doc::TomlSection<'_>,
                key: &'static str,
            ) -> Result<Option<$name>, $crate::ScenarioError> {
                $crate::doc::FromSection::from_section(&section.nothing(key)).map(Some)
            }
        }
    };
}

/// Makes a [`section!`] of keys that all may be left out, and `draw`, which sets
/// what is written. A key sets the field of its name, or the one behind `=>`.
#[macro_export]
macro_rules! settings {
    (
        $(#[$meta:meta])*
        $vis:vis struct $name:ident sets $target:ty {
            $($field:ident: $type:ty $(, in $bounds:expr)? $(=> $($place:ident).+)?;)*
        }
    ) => {
        $crate::section! {
            $(#[$meta])*
            #[derive(Debug)]
            $vis struct $name {
                $($field: Option<$crate::value::Distribution<$type>> $(, in $bounds)?;)*
            }
        }

        impl $name {
            /// What is written here, and `base` for the rest.
            $vis fn draw(&self, key: &$crate::decide::DecisionKey, base: $target) -> $target {
                let mut drawn = base;
                $(
                    if let Some(draw) = &self.$field {
                        let value = draw.draw(&key.part(stringify!($field))).into();
                        $crate::settings!(@set drawn value $field $($($place).+)?);
                    }
                )*
                drawn
            }
        }
    };
    (@set $drawn:ident $value:ident $field:ident) => {
        $drawn.$field = $value;
    };
    (@set $drawn:ident $value:ident $field:ident $($place:ident).+) => {
        $drawn.$($place).+ = $value;
    };
}

/// The key that a field is read from, which can be a word of Rust.
pub fn key(field: &'static str) -> &'static str {
    field.trim_start_matches("r#")
}

/// A value of which every outcome can be looked at, if it is there.
pub trait Outcomes<T> {
    fn distribution(&self) -> Option<&Distribution<T>>;
}

impl<T> Outcomes<T> for Distribution<T> {
    fn distribution(&self) -> Option<&Distribution<T>> {
        Some(self)
    }
}

impl<T, D: Outcomes<T>> Outcomes<T> for Option<D> {
    fn distribution(&self) -> Option<&Distribution<T>> {
        self.as_ref()?.distribution()
    }
}

/// Refuses a value with an outcome that is not from `min` to `max`.
pub fn check_bounds<T: ScenarioValue + Display>(
    section: &TomlSection<'_>,
    key: &str,
    value: &impl Outcomes<T>,
    (min, max): (T, T),
) -> Result<(), ScenarioError> {
    let Some(draw) = value.distribution() else { return Ok(()) };
    match draw.ends().find(|end| **end < min || **end > max) {
        None => Ok(()),
        Some(wrong) => {
            let what = format!("`{}` is {wrong}", section.path(key));
            Err(section.error_at(draw.line, what, format!("give {min} to {max}")))
        }
    }
}
