//! The shim over the double of MoRI v1.2.1.

mod behaviour;

const CLASS: usize = 0;
