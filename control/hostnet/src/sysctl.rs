//! Kernel parameters below `/proc/sys`.
//!
//! Names use slashes (`net/ipv4/ip_forward`), because interface names may hold dots. The values are
//! those of the calling thread's network namespace.

use std::fs;
use std::io;
use std::path::PathBuf;

use crate::Error;

fn path(name: &str) -> Result<PathBuf, io::Error> {
    // A name of dots alone would be looked up as one file and be "missing" for ever.
    let clean = name.contains('/')
        && !name.starts_with('/')
        && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if clean {
        Ok(PathBuf::from("/proc/sys").join(name))
    } else {
        Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a parameter name (its parts are separated by slashes)",
        ))
    }
}

/// Reads a parameter, without the line end.
pub fn read(name: &str) -> Result<String, Error> {
    path(name)
        .and_then(fs::read_to_string)
        .map(|text| text.trim_end().to_owned())
        .map_err(|source| Error::new(format!("read sysctl {name}"), source))
}

/// Writes a parameter.
pub fn write(name: &str, value: &str) -> Result<(), Error> {
    path(name)
        .and_then(|path| {
            // Opened without O_CREAT and O_TRUNC: a missing parameter must stay ENOENT.
            let mut file = fs::OpenOptions::new().write(true).open(path)?;
            io::Write::write_all(&mut file, value.as_bytes())
        })
        .map_err(|source| Error::new(format!("set sysctl {name} to {value}"), source))
}

/// Writes a parameter unless it holds the value already; says whether it wrote.
///
/// Works where `/proc/sys` is mounted read-only and the value is right already.
pub fn ensure(name: &str, value: &str) -> Result<bool, Error> {
    if read(name).is_ok_and(|current| current == value) {
        return Ok(false);
    }
    write(name, value).map(|()| true)
}

/// Whether the parameter exists.
pub fn exists(name: &str) -> bool {
    path(name).is_ok_and(|path| path.exists())
}
