#![no_main]
//! See [`kvferry_fuzz::admitted`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::admitted::run(data));
