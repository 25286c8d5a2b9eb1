//! The error of a kernel request: what was tried, on what, and the errno the kernel gave.

use std::io;

/// A request to the kernel that failed.
///
/// Displays as `add route 10.5.0.0/16 dev flannel.1: File exists (os error 17)`; where the kernel
/// explained itself, its words follow in parentheses.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {cause}{}", in_brackets(.note))]
pub struct Error {
    what: String,
    // Not `source`: the message holds it already, and error chains would print it twice.
    cause: io::Error,
    note: Option<String>,
}

fn in_brackets(note: &Option<String>) -> String {
    note.as_ref().map(|text| format!(" ({text})")).unwrap_or_default()
}

impl Error {
    /// An error of the operation `what` (with its object: `set MTU 1450 on eth0`).
    pub fn new(what: impl Into<String>, cause: io::Error) -> Self {
        Self { what: what.into(), cause, note: None }
    }

    pub(crate) fn with_note(what: impl Into<String>, cause: io::Error, note: Option<String>) -> Self {
        Self { what: what.into(), cause, note: note.filter(|text| !text.is_empty()) }
    }

    pub(crate) fn errno_of(what: impl Into<String>, errno: i32) -> Self {
        Self::new(what, io::Error::from_raw_os_error(errno))
    }

    pub(crate) fn protocol(what: impl Into<String>, text: impl Into<String>) -> Self {
        Self::new(what, io::Error::new(io::ErrorKind::InvalidData, text.into()))
    }

    /// The kernel's error number, where the failure came from the kernel.
    pub fn errno(&self) -> Option<i32> {
        self.cause.raw_os_error()
    }

    /// Whether the error number is `errno` (a `libc` constant).
    pub fn is(&self, errno: i32) -> bool {
        self.errno() == Some(errno)
    }

    /// Whether the object did not exist: ENODEV, ENOENT, ESRCH, or EADDRNOTAVAIL for an address.
    pub fn is_not_found(&self) -> bool {
        matches!(self.errno(), Some(libc::ENODEV | libc::ENOENT | libc::ESRCH | libc::EADDRNOTAVAIL))
            || (self.errno().is_none() && self.cause.kind() == io::ErrorKind::NotFound)
    }

    /// Whether the object was there already (EEXIST).
    pub fn already_exists(&self) -> bool {
        self.is(libc::EEXIST)
    }

    /// Whether the kernel lacks the feature: EOPNOTSUPP, ENOTSUP, EAFNOSUPPORT, EPROTONOSUPPORT.
    pub fn is_unsupported(&self) -> bool {
        matches!(self.errno(), Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT))
    }

    /// Whether a right is missing (EPERM, EACCES).
    pub fn is_permission(&self) -> bool {
        matches!(self.errno(), Some(libc::EPERM | libc::EACCES))
    }

    /// The kernel's own explanation, where it gave one.
    pub fn kernel_note(&self) -> Option<&str> {
        self.note.as_deref()
    }

    /// The underlying I/O error.
    pub fn io(&self) -> &io::Error {
        &self.cause
    }
}

/// Turns "it was not there" into success, for deletions that may be repeated.
pub trait TolerateAbsence {
    /// `Ok(true)` when done, `Ok(false)` when there was nothing to do.
    fn tolerate_absence(self) -> Result<bool, Error>;
}

impl TolerateAbsence for Result<(), Error> {
    fn tolerate_absence(self) -> Result<bool, Error> {
        match self {
            Ok(()) => Ok(true),
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }
}
