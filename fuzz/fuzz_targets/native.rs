#![no_main]
//! See [`kvferry_fuzz::native`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::native::run(data));
