#![no_main]
//! See [`kvferry_fuzz::moriio`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::moriio::run(data));
