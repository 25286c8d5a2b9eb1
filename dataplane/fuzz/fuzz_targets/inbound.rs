//! One batch from the underlay over memory devices.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| felt_dataplane::fuzzing::inbound(data));
