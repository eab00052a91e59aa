//! What `kf_mori.h` promises, over a double of MoRI.

mod end;
mod error;
mod rig;
mod transfer;
