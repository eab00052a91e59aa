//! Typed frames and their bytes.

mod error;
mod kind;
pub mod native;
mod skim;
