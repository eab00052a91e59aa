//! Typed frames and their bytes.

pub mod native;
