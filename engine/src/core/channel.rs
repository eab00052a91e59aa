//! Reliable, ordered delivery between two incarnations.
