//! Socket options with an `int` value that `socket2` has no name for.

#![expect(unsafe_code, reason = "setsockopt and getsockopt")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

/// Sets an option.
pub(crate) fn set_int(fd: BorrowedFd<'_>, level: i32, name: i32, value: i32) -> io::Result<()> {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel reads `len` bytes at `value`, which is an `int` of that size and outlives the call.
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, (&raw const value).cast(), len) })?;
    Ok(())
}

/// The value of an option.
pub(crate) fn int(fd: BorrowedFd<'_>, level: i32, name: i32) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `len` bytes at `value`, which is an `int` of that size; both
    // outlive the call.
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, (&raw mut value).cast(), &raw mut len) })?;
    Ok(value)
}
