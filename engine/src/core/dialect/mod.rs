//! Typed frames and their bytes.

mod error;
mod kind;
pub mod moriio;
pub mod native;
mod skim;
mod unpack;
