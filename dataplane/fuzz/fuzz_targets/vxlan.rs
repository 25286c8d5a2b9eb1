//! VXLAN decapsulation.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_fuzz::vxlan(data));
