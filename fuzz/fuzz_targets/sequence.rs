#![no_main]
//! See [`kvferry_fuzz::sequence`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::sequence::run(data));
