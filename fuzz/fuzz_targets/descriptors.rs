#![no_main]
//! See [`kvferry_fuzz::descriptors`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::descriptors::run(data));
