//! Time as the core sees it: a number handed in with every input.
//!
//! ```
//! use kvferry_engine::core::Nanos;
//!
//! let deadline = Nanos::from_secs(2) + Nanos::from_ms(500);
//! assert_eq!((deadline, deadline.as_secs_f64()), (Nanos::from_us(2_500_000), 2.5));
//! // It stays within its range, so that a peer's numbers cannot overflow it.
//! assert_eq!(Nanos::MAX + deadline, Nanos::MAX);
//! assert_eq!(Nanos::ZERO - deadline, Nanos::ZERO);
//! ```

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Add, Sub};

/// Nanoseconds: a point in time since the process (or the simulation) started, or a span.
///
/// Monotonic and never related to the wall clock. Arithmetic saturates, so a deadline computed
/// from a huge setting is "never" and not a wrap-around.
///
/// Serialized as its number, under its name where a format has names of newtypes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The start of time, and the empty span.
    pub const ZERO: Nanos = Nanos(0);
    /// Later than every other point.
    pub const MAX: Nanos = Nanos(u64::MAX);

    /// A span of whole microseconds.
    pub const fn from_us(us: u64) -> Nanos {
        Nanos(us.saturating_mul(1_000))
    }

    /// A span of whole milliseconds.
    pub const fn from_ms(ms: u64) -> Nanos {
        Nanos(ms.saturating_mul(1_000_000))
    }

    /// A span of whole seconds.
    pub const fn from_secs(secs: u64) -> Nanos {
        Nanos(secs.saturating_mul(1_000_000_000))
    }

    /// Seconds as a float, for reports only.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// `self * num / den` without overflow.
    pub const fn scale(self, num: u64, den: u64) -> Nanos {
        let wide = self.0 as u128 * num as u128 / den as u128;
        Nanos(if wide > u64::MAX as u128 { u64::MAX } else { wide as u64 })
    }
}

impl Add for Nanos {
    type Output = Nanos;
    fn add(self, rhs: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(rhs.0))
    }
}

impl Sub for Nanos {
    type Output = Nanos;
    fn sub(self, rhs: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(rhs.0))
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            n if n < 10_000 => write!(f, "{n}ns"),
            n if n < 10_000_000 => write!(f, "{}.{:03}us", n / 1_000, n % 1_000),
            n if n < 10_000_000_000 => write!(f, "{}.{:03}ms", n / 1_000_000, n / 1_000 % 1_000),
            n => write!(f, "{}.{:03}s", n / 1_000_000_000, n / 1_000_000 % 1_000),
        }
    }
}
