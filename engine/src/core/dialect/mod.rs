//! Typed frames and their bytes.

mod error;
#[cfg(test)]
mod golden;
mod kind;
pub mod moriio;
pub mod native;
mod skim;
mod unpack;
