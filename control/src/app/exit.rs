//! Why the daemon ends, and with which code; the codes are flanneld's.

use std::fmt;
use std::process::ExitCode;

/// An end that is no success.
#[derive(Debug)]
pub struct Exit {
    code: u8,
    reason: String,
}

impl Exit {
    /// The usual failure, code 1.
    pub fn failure(reason: impl fmt::Display) -> Self {
        Self { code: 1, reason: reason.to_string() }
    }

    /// The health server cannot listen, code 2 as after flanneld's panic.
    pub fn health(reason: impl fmt::Display) -> Self {
        Self { code: 2, reason: reason.to_string() }
    }

    /// The process's exit code.
    pub fn code(&self) -> ExitCode {
        self.code.into()
    }
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}
