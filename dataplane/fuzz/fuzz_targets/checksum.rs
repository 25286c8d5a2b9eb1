//! All checksum routines against the definition.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_fuzz::checksum(data));
