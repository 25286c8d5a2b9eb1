//! Waiting for the request to end, for daemons without a runtime.

use std::io;

use crate::sys;

/// Keeps SIGINT and SIGTERM from ending the process. Call it before any thread is made: threads
/// inherit it, and [`wait_for_termination`] then is the only place where the signals arrive.
pub fn hold_termination() -> io::Result<()> {
    sys::block_signals(&[libc::SIGINT, libc::SIGTERM])
}

/// Waits until SIGINT or SIGTERM arrives.
pub fn wait_for_termination() -> io::Result<()> {
    sys::wait_for_signal(&[libc::SIGINT, libc::SIGTERM])
}
