//! The shim over the double of MoRI v1.2.2.

mod behaviour;

const CLASS: usize = 1;
