//! Cores towards peers that speak MoRIIO: each test is one side of a conversation with vLLM.

mod decode;
mod prefill;
mod world;
