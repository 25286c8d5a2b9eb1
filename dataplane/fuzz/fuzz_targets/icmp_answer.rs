//! ICMP answers to any packet.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_fuzz::icmp_answer(data));
