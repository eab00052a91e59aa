#![no_main]
//! See [`kvferry_fuzz::request_id`].

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvferry_fuzz::request_id::run(data));
