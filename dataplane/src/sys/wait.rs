//! Waiting: `poll`, and `eventfd` to end a wait.

#![expect(unsafe_code, reason = "system calls")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::check;

/// Something to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Readable,
    Writable,
}

/// Waits until one of the descriptors is ready or in error, a signal comes, or time is up. Whether there is
/// something to do is for the caller to find out by trying.
pub(crate) fn poll<const N: usize>(
    fds: [(BorrowedFd<'_>, Event); N],
    timeout: Option<Duration>,
) -> io::Result<bool> {
    let mut polled = fds.map(|(fd, event)| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: match event {
            Event::Readable => libc::POLLIN,
            Event::Writable => libc::POLLOUT,
        },
        revents: 0,
    });
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(timeout.subsec_nanos()),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the kernel reads and writes `N` entries of `polled` and reads `timeout` unless it is null; both
    // outlive the call. A null signal mask leaves the mask alone.
    let ready = check(unsafe { libc::ppoll(polled.as_mut_ptr(), N as _, timeout, std::ptr::null()) });
    match ready {
        Ok(count) => Ok(count > 0),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(true),
        Err(error) => Err(error),
    }
}

/// A counter that can be polled: readable once something was added.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no pointers are passed.
    let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
    // SAFETY: the kernel has just given us this descriptor; nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
