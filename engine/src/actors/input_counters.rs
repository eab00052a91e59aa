//! Which kinds of input the machines of this process have taken, and how often.

use crate::core::decode::DecodeInput;
use crate::core::input_kinds::InputKinds;
use crate::core::instance;
use crate::core::prefill::PrefillInput;
use crate::core::router::RouterInput;
use crate::core::transfer::TransferInput;
use std::sync::atomic::{AtomicU64, Ordering};

/// An input that is counted by its kind, for all machines of the process together.
pub trait CountedInput: InputKinds {
    /// The counters, one per kind.
    fn counters() -> &'static [AtomicU64];

    /// A machine is about to take it.
    fn count(&self) {
        // Nobody orders anything by it.
        Self::counters()[self.kind()].fetch_add(1, Ordering::Relaxed);
    }
}

macro_rules! counted {
    ($($input:ty),+) => {
        $(impl CountedInput for $input {
            fn counters() -> &'static [AtomicU64] {
                static COUNTERS: [AtomicU64; <$input as InputKinds>::KINDS.len()] =
                    [const { AtomicU64::new(0) }; <$input as InputKinds>::KINDS.len()];
                &COUNTERS
            }
        })+

        /// Machine, kind, and how many inputs of it there were in this process.
        pub fn input_counts() -> impl Iterator<Item = (&'static str, &'static str, u64)> {
            let all = [$(
                (<$input as InputKinds>::MACHINE, <$input as InputKinds>::KINDS, <$input as CountedInput>::counters())
            ),+];
            all.into_iter().flat_map(|(machine, kinds, counters)| {
                let counts = counters.iter().map(|count| count.load(Ordering::Relaxed));
                kinds.iter().zip(counts).map(move |(kind, count)| (machine, *kind, count))
            })
        }
    };
}

counted!(RouterInput, PrefillInput, DecodeInput, TransferInput);

/// Counts what the machines of an instance hear.
pub const COUNT_INPUTS: instance::InputObserver = instance::InputObserver {
    prefill: CountedInput::count,
    decode: CountedInput::count,
    transfer: CountedInput::count,
};
