//! The only unsafe code of the crate: system calls, SIMD, and the publication of snapshots.
//!
//! A file wraps one thing each; policy, logging and retries belong to the callers.

use std::io;

pub(crate) mod simd;
pub mod snapshot;
pub(crate) mod tun;

/// The result of a call that says -1 on error.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
