//! The only unsafe code of the crate: system calls, SIMD, and the publication of snapshots.
//!
//! A file wraps one thing each; policy, logging and retries belong to the callers.

pub mod snapshot;
