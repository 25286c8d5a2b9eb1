//! Decapsulation of flannel's udp.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_fuzz::udp(data));
