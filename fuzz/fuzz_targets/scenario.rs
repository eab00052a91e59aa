#![no_main]
//! See [`kvferry_fuzz::scenario`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::scenario::run(data));
