//! TCP, UDP and ICMP views against etherparse.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_fuzz::transport(data));
