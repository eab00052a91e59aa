//! MoRIIO's bytes: equal to what vLLM 0.32.0 and 0.33.0 write, and read as they read them.

mod address;
mod blocks;
mod descriptor;
mod fixture;
mod handshake;
mod notify;
mod params;
mod ports;
mod registration;
mod v0_33;
