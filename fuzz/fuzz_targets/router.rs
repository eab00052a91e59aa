#![no_main]
//! See [`kvferry_fuzz::router`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::router::run(data));
