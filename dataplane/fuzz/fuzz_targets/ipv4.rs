//! IPv4 view against etherparse.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_fuzz::ipv4(data));
