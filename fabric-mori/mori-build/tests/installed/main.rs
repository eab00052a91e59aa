//! How a MoRI is found, and what is compiled against it.

mod compile;
mod search;
mod support;
