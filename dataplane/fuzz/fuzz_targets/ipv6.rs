//! IPv6 view and extension headers against etherparse.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_fuzz::ipv6(data));
