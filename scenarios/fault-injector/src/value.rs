//! Values of the language and their three forms: literal, range, choice.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//! use kvferry_faults::decide::DecisionKey;
//! use kvferry_faults::value::Distribution;
//!
//! let key = DecisionKey::new(1, "pause");
//! let drawn = Distribution::from((Nanos(10), Nanos(20))).draw(&key);
//! assert!((Nanos(10)..=Nanos(20)).contains(&drawn));
//! assert_eq!(Distribution::from(Nanos(7)).draw(&key), Nanos(7));
//! ```

use crate::decide::{DecisionKey, below, within};
use crate::doc::{FromKey, TomlField};
use crate::draw_log;
use crate::error::ScenarioError;
use crate::fault::DurationRange;
use kvferry_engine::core::Nanos;
use kvferry_engine::core::message::Mode;
use kvferry_engine::core::verify::Verify;
use std::ops::Range;
use std::sync::Arc;

/// A type that scenario files can hold.
pub trait ScenarioValue: Clone + PartialOrd {
    /// What to write, e.g. `a duration such as "2ms"`.
    fn form() -> String;

    fn parse(text: &str) -> Option<Self>;

    /// The text that is read as this value.
    fn spelled(&self) -> String;

    /// The value at `uniform` of the way from `min` to `max`; `None` if the type has no ranges.
    fn between(_min: &Self, _max: &Self, _uniform: u64) -> Option<Self> {
        None
    }

    /// What is wrong with a literal that has no meaning, and what to do.
    fn refused(&self) -> Option<(&'static str, &'static str)> {
        None
    }
}

/// A value that is drawn per seed: one of some ranges, both ends included. A literal is a single
/// range of one value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Distribution<T> {
    ranges: Vec<(T, T)>,
    /// Where it stands; 0 for a default.
    pub line: u32,
    /// The bytes of the file that hold it; none for a default.
    pub bytes: Range<usize>,
}

/// Why a text is no [`Distribution`].
pub enum MalformedValue {
    /// This part cannot be read.
    Part(String),
    /// This range starts behind its end.
    Backward(String),
    /// This range is of a type that has none.
    NoRange(String),
}

/// The same for every seed.
impl<T: ScenarioValue> From<T> for Distribution<T> {
    fn from(value: T) -> Distribution<T> {
        Distribution::from((value.clone(), value))
    }
}

/// Anything from the first to the second.
impl<T> From<(T, T)> for Distribution<T> {
    fn from(range: (T, T)) -> Distribution<T> {
        Distribution { ranges: vec![range], line: 0, bytes: 0..0 }
    }
}

impl<T: ScenarioValue> Distribution<T> {
    /// Reads `"a"`, `"a..b"` and `"a|b..c|d"`.
    pub fn parse(text: &str, line: u32) -> Result<Distribution<T>, MalformedValue> {
        let mut ranges = Vec::new();
        for part in text.split('|') {
            let part = part.trim();
            let read = |text: &str| {
                T::parse(text.trim()).ok_or_else(|| MalformedValue::Part(text.trim().into()))
            };
            let range = match part.split_once("..") {
                None => {
                    let value = read(part)?;
                    (value.clone(), value)
                }
                Some((min, max)) => (read(min)?, read(max)?),
            };
            if range.0 != range.1 && T::between(&range.0, &range.0, 0).is_none() {
                return Err(MalformedValue::NoRange(part.into()));
            }
            if range.0 > range.1 {
                return Err(MalformedValue::Backward(part.into()));
            }
            ranges.push(range);
        }
        Ok(Distribution { ranges, line, bytes: 0..0 })
    }

    fn pick(&self, key: &DecisionKey) -> &(T, T) {
        let choice = key.part("choice").get();
        &self.ranges[below(choice, self.ranges.len() as u64) as usize]
    }

    /// The value for a key. Every choice is equally likely, and every value of a range.
    pub fn draw(&self, key: &DecisionKey) -> T {
        let (min, max) = self.pick(key);
        let drawn = match min == max {
            true => min.clone(),
            false => T::between(min, max, key.get()).expect("ranges are refused when parsed"),
        };
        draw_log::add(&self.bytes, || drawn.spelled());
        drawn
    }

    /// The only value, if there is only one.
    pub fn literal(&self) -> Option<&T> {
        match self.ranges.as_slice() {
            [(min, max)] if min == max => Some(min),
            _ => None,
        }
    }

    /// The only range, if there is only one.
    pub fn single(&self) -> Option<&(T, T)> {
        match self.ranges.as_slice() {
            [range] => Some(range),
            _ => None,
        }
    }

    /// Both ends of every range.
    pub fn ends(&self) -> impl Iterator<Item = &T> {
        self.ranges.iter().flat_map(|(min, max)| [min, max])
    }

    /// The largest possible value.
    pub fn largest(&self) -> T {
        let largest = self.ranges.iter().map(|(_, max)| max);
        largest.reduce(|a, b| if b > a { b } else { a }).expect("a draw has a range").clone()
    }
}

/// What was written, or else the default.
pub fn or<T: ScenarioValue>(draw: &Option<Distribution<T>>, default: T, key: &DecisionKey) -> T {
    draw.as_ref().map_or(default, |draw| draw.draw(key))
}

impl Distribution<Nanos> {
    /// Decides the choice and keeps the range, to be drawn at each use.
    pub fn span(&self, key: &DecisionKey) -> DurationRange {
        let (min, max) = *self.pick(key);
        draw_log::add(&self.bytes, || match min == max {
            true => min.spelled(),
            false => format!("{}..{}", min.spelled(), max.spelled()),
        });
        DurationRange { min, max }
    }
}

macro_rules! whole_number {
    ($($type:ty)*) => {$(
        impl ScenarioValue for $type {
            fn form() -> String {
                format!("a whole number up to {}", <$type>::MAX)
            }

            fn parse(text: &str) -> Option<Self> {
                if text.starts_with('+') { None } else { text.replace('_', "").parse().ok() }
            }

            fn spelled(&self) -> String {
                self.to_string()
            }

            fn between(min: &Self, max: &Self, uniform: u64) -> Option<Self> {
                let drawn = within(uniform, u64::from(*min), u64::from(*max));
                Some(drawn as $type)
            }
        }
    )*};
}

whole_number!(u8 u16 u32 u64);

macro_rules! measured {
    ($(
        $type:ident($inner:ty) $form:literal [
            $($unit:literal $factor:expr),* $(; $wrong:expr => $is:literal, $remedy:literal)?
        ]
    )*) => {$(
        impl ScenarioValue for $type {
            fn form() -> String {
                $form.into()
            }

            fn parse(text: &str) -> Option<Self> {
                let value = scaled(text, &[$(($unit, $factor)),*])?;
                Some($type(<$inner>::try_from(value).ok()?))
            }

            fn spelled(&self) -> String {
                spelled(self.0.into(), &[$(($unit, $factor)),*])
            }

            fn between(min: &Self, max: &Self, uniform: u64) -> Option<Self> {
                let drawn = within(uniform, u64::from(min.0), u64::from(max.0));
                Some($type(drawn as $inner))
            }

            $(fn refused(&self) -> Option<(&'static str, &'static str)> {
                $wrong(self.0).then_some(($is, $remedy))
            })?
        }
    )*};
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteSize(pub u32);

/// A size in bytes that may exceed what one request moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ByteVolume(pub u64);

/// A bandwidth in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Bandwidth(pub u64);

/// A very short time in femtoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Femtoseconds(pub u64);

/// A probability in a million.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Probability(pub u32);

/// A factor in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ScaleFactor(pub u32);

measured! {
    Nanos(u64) "a duration such as \"2us\", \"1.5s\" or \"10min\"" [
        "ns" 1, "us" 1_000, "ms" 1_000_000, "s" 1_000_000_000, "min" 60_000_000_000,
        "h" 3_600_000_000_000
    ]
    Femtoseconds(u64) "a time such as \"500fs\", \"30ps\" or \"20ns\"" [
        "fs" 1, "ps" 1_000, "ns" 1_000_000, "us" 1_000_000_000
    ]
    ByteSize(u32) "a size such as 8192, \"8KiB\" or \"1MiB\"" [
        "" 1, "B" 1, "KiB" 1 << 10, "MiB" 1 << 20, "GiB" 1 << 30
    ]
    ByteVolume(u64) "a size such as 8192, \"8KiB\" or \"2GiB\"" [
        "" 1, "B" 1, "KiB" 1 << 10, "MiB" 1 << 20, "GiB" 1 << 30
        ; |bytes| bytes == 0 => "0", "give at least 1"
    ]
    Bandwidth(u64) "a bandwidth such as \"40GB/s\" or \"400Gb/s\"" [
        "B/s" 1, "KB/s" 1_000, "MB/s" 1_000_000, "GB/s" 1_000_000_000, "TB/s" 1_000_000_000_000,
        "Mb/s" 125_000, "Gb/s" 125_000_000
        ; |rate| rate == 0 => "0", "give at least \"1B/s\""
    ]
    Probability(u32) "a probability such as 0.25, in steps of 0.000001" [
        "" 1_000_000; |ppm| ppm > 1_000_000 => "above 1", "give a probability from 0 to 1"
    ]
    ScaleFactor(u32) "a factor such as 2 or 0.5, in steps of 0.001" [
        "" 1_000; |thousandths| thousandths == 0 => "0", "give at least 0.001"
    ]
}

impl From<ByteVolume> for u64 {
    fn from(volume: ByteVolume) -> u64 {
        volume.0
    }
}

impl From<ByteVolume> for Option<u64> {
    fn from(volume: ByteVolume) -> Option<u64> {
        Some(volume.0)
    }
}

impl From<Femtoseconds> for u64 {
    fn from(time: Femtoseconds) -> u64 {
        time.0
    }
}

/// `12.5ms` with the units of `units`, exactly: `None` if digits are lost or the unit is unknown.
fn scaled(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_');
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let factor = units.iter().find(|(name, _)| *name == unit)?.1;
    let number = number.replace('_', "");
    let (whole, fraction) = number.split_once('.').unwrap_or((&number, "0"));
    if fraction.is_empty() || fraction.len() > 18 {
        return None;
    }
    let denominator = 10_u128.pow(fraction.len() as u32);
    let value =
        u128::from(whole.parse::<u64>().ok()?) * denominator + fraction.parse::<u128>().ok()?;
    let value = value.checked_mul(factor.into())?;
    (value % denominator == 0).then(|| u64::try_from(value / denominator).ok())?
}

/// A number in the largest unit of which it is a whole number, or in decimals of the only unit.
fn spelled(value: u64, units: &[(&str, u64)]) -> String {
    let whole = units.iter().filter(|(_, factor)| value.is_multiple_of(*factor));
    let largest =
        whole.max_by_key(|(_, factor)| if value == 0 { u64::MAX - factor } else { *factor });
    match (largest, units) {
        (Some((unit, factor)), _) => format!("{}{unit}", value / factor),
        (None, [(unit, factor), ..]) => {
            let digits = factor.ilog10() as usize;
            let fraction = format!("{:0digits$}", value % factor);
            format!("{}.{}{unit}", value / factor, fraction.trim_end_matches('0'))
        }
        (None, []) => unreachable!("a measure has units"),
    }
}

/// A name of an instance or of a group of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct InstanceName(pub Arc<str>);

impl ScenarioValue for InstanceName {
    fn form() -> String {
        "a name of letters, digits, '-', '_' and '.'".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        (!text.is_empty() && text.chars().all(legal)).then(|| InstanceName(text.into()))
    }

    fn spelled(&self) -> String {
        self.0.to_string()
    }
}

/// Makes values readable that are the same for every seed.
macro_rules! literal_keys {
    ($($type:ty)*) => {$(
        impl FromKey for $type {
            fn from_field(field: &TomlField<'_>) -> Result<$type, ScenarioError> {
                field.literal()
            }
        }
    )*};
}

literal_keys!(u8 u32 u64 Nanos Probability InstanceName);

/// Makes types with named values readable.
#[macro_export]
macro_rules! named_values {
    ($($type:ty: $($name:literal = $value:expr),* ;)*) => {$(
        impl $crate::value::ScenarioValue for $type {
            fn form() -> String {
                let names: &[&str] = &[$($name),*];
                $crate::value::one_of(names)
            }

            fn parse(text: &str) -> Option<Self> {
                match text {
                    $($name => Some($value),)*
                    _ => None,
                }
            }

            fn spelled(&self) -> String {
                let values = [$(($name, $value)),*];
                let named = values.into_iter().find(|(_, value)| value == self);
                named.map(|(name, _)| name.into()).expect("every value has a name")
            }
        }
    )*};
}

/// `one of "a", "b"`.
pub fn one_of(names: &[&str]) -> String {
    let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
    format!("one of {}", quoted.join(", "))
}

named_values! {
    bool: "true" = true, "false" = false;
    Mode: "push" = Mode::Push, "pull" = Mode::Pull;
    Verify: "off" = Verify::Off, "sample" = Verify::Sample, "all" = Verify::All;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_exact() {
        let nanos = |text| Nanos::parse(text).map(|nanos| nanos.0);
        assert_eq!(nanos("2us"), Some(2_000));
        assert_eq!(nanos("1.5s"), Some(1_500_000_000));
        assert_eq!(nanos("10min"), Some(600_000_000_000));
        assert_eq!(nanos("0.000_001ms"), Some(1));
        assert_eq!(ByteSize::parse("8KiB"), Some(ByteSize(8192)));
        assert_eq!(ByteSize::parse("8192"), Some(ByteSize(8192)));
        assert_eq!(Bandwidth::parse("40GB/s"), Some(Bandwidth(40_000_000_000)));
        assert_eq!(Bandwidth::parse("400Gb/s"), Some(Bandwidth(50_000_000_000)));
        assert_eq!(Probability::parse("0.25"), Some(Probability(250_000)));
        assert_eq!(Femtoseconds::parse("30ps"), Some(Femtoseconds(30_000)));
    }

    #[test]
    fn what_is_spelled_is_read_as_the_same() {
        fn holds<T: ScenarioValue + std::fmt::Debug>(value: T, text: &str) {
            assert_eq!(value.spelled(), text);
            assert_eq!(T::parse(text), Some(value));
        }
        holds(Nanos(0), "0ns");
        holds(Nanos(1_500), "1500ns");
        holds(Nanos(2_000_000), "2ms");
        holds(ByteVolume(64 << 10), "64KiB");
        holds(ByteSize(4097), "4097B");
        holds(Bandwidth(50_000_000_000), "50GB/s");
        holds(Probability(1_000_000), "1");
        holds(Probability(2_500), "0.0025");
        holds(ScaleFactor(1_500), "1.5");
        holds(Verify::Sample, "sample");
        holds(InstanceName("p0".into()), "p0");
    }

    #[test]
    fn what_is_no_exact_value_is_refused() {
        for text in ["", "5", "s", ".5s", "5.s", "1..2s", "-1s", "1e3s", "0.5ns", "5 s", "5sec"] {
            assert_eq!(Nanos::parse(text), None, "{text}");
        }
        for text in ["99999999999h", "18446744073709551616ns"] {
            assert_eq!(Nanos::parse(text), None, "{text}");
        }
        assert_eq!(Probability::parse("0.0000001"), None);
        assert_eq!(ByteSize::parse("4GiB"), None);
        assert_eq!(u16::parse("65536"), None);
        assert_eq!(u16::parse("+1"), None);
    }

    #[test]
    fn every_choice_and_both_ends_of_a_range_are_drawn() {
        let Ok(draw) = Distribution::<u32>::parse("1|5..7|9", 1) else { panic!("it is a draw") };
        let drawn: std::collections::BTreeSet<u32> =
            (0..200).map(|seed| draw.draw(&DecisionKey::new(seed, "test"))).collect();
        assert_eq!(drawn.into_iter().collect::<Vec<_>>(), [1, 5, 6, 7, 9]);
    }
}
