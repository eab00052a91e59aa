//! The stand-in engine: properties under random legs, cancels, preemptions and answers, and
//! examples of what it tells the cores.

mod bench;
mod examples;
mod properties;
