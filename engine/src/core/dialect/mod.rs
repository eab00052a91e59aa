//! Typed frames and their bytes.

mod kind;
pub mod native;
mod skim;
