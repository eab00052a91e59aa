#![no_main]
//! See [`kvferry_fuzz::omni_mori`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::omni_mori::run(data));
