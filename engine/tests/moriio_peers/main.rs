//! Cores towards peers that speak MoRIIO: each test is one side of a connection with vLLM.

mod decode;
mod prefill;
mod ranks;
mod world;
