//! One batch from the TUN over memory devices.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_dataplane::fuzzing::outbound(data));
