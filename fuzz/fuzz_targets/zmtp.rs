#![no_main]
//! See [`kvferry_fuzz::zmtp`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::zmtp::run(data));
