//! MoRIIO's bytes: equal to what vLLM 0.32.0 writes, and read as it reads them.

mod address;
mod blocks;
mod descriptor;
mod fixture;
mod handshake;
mod notify;
mod params;
mod ports;
mod registration;
