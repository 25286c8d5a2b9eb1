//! The only unsafe code of the crate: system calls, SIMD, and the publication of snapshots.
//!
//! A file wraps one thing each; policy, logging and retries belong to the callers.

use std::io;

pub(crate) mod mmsg;
pub(crate) mod simd;
pub mod snapshot;
pub(crate) mod sockopt;
pub(crate) mod tun;
pub(crate) mod wait;

/// The result of a call that says -1 on error.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Major and minor version of the kernel.
pub(crate) fn kernel_version() -> Option<(u32, u32)> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}
