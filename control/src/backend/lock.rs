//! One daemon per device: an advisory lock on `/run/felt/<device>.lock` that names its owner.
//!
//! The lock belongs to the open file, so a killed daemon leaves none. The file itself stays; removing it would let two
//! daemons hold locks on two files of one name.

use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// Where lock files lie.
pub const LOCK_DIR: &str = "/run/felt";

/// Who holds a lock; the content of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Process id.
    pub pid: u32,
    /// Its admin socket.
    pub admin_socket: String,
    /// Its subnet file.
    pub subnet_file: String,
}

/// A held lock.
#[derive(Debug)]
pub struct DeviceLock {
    file: File,
}

/// The lock was not taken.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another daemon has it.
    #[error(
        "device {device} belongs to another running feltd ({owner}); give one of the two another VNI or port, or stop it"
    )]
    Taken {
        /// Device name.
        device: String,
        /// What is known about the other.
        owner: String,
    },
    /// The file could not be used.
    #[error("lock {}: {source}", path.display())]
    Io {
        /// The lock file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

impl DeviceLock {
    /// Takes the lock of `device` in `dir`, without waiting.
    ///
    /// # Errors
    /// See [`LockError`].
    pub fn take(dir: &Path, device: &str, owner: &Owner) -> Result<Self, LockError> {
        let fail = |source| LockError::Io { path: path(dir, device), source };
        Self::of(Self::lock(dir, device)?, owner).map_err(fail)
    }

    /// The lock that was handed over with its open file.
    ///
    /// # Errors
    /// When the new owner cannot be noted in it.
    pub fn of(mut file: File, owner: &Owner) -> io::Result<Self> {
        let text = serde_json::to_string(owner).unwrap_or_default();
        file.set_len(0)?;
        file.rewind()?;
        file.write_all(text.as_bytes())?;
        Ok(Self { file })
    }

    /// The open file that holds the lock, once more: the lock is held until the last one is closed.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn share(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Takes the lock to make sure that nobody uses the device; leaves the owner's name alone.
    ///
    /// # Errors
    /// See [`LockError`].
    pub fn take_for_cleanup(dir: &Path, device: &str) -> Result<Self, LockError> {
        Self::lock(dir, device).map(|file| Self { file })
    }

    fn lock(dir: &Path, device: &str) -> Result<File, LockError> {
        let path = path(dir, device);
        let fail = |source| LockError::Io { path: path.clone(), source };
        std::fs::create_dir_all(dir).map_err(fail)?;
        let mut file =
            File::options().read(true).write(true).create(true).truncate(false).open(&path).map_err(fail)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut text = String::new();
                let _ = file.read_to_string(&mut text);
                let owner = match serde_json::from_str::<Owner>(&text) {
                    Ok(owner) => format!("pid {}, admin socket {}", owner.pid, owner.admin_socket),
                    Err(_) => "owner unknown".to_owned(),
                };
                return Err(LockError::Taken { device: device.to_owned(), owner });
            }
            Err(TryLockError::Error(source)) => return Err(fail(source)),
        }
        Ok(file)
    }
}

fn path(dir: &Path, device: &str) -> PathBuf {
    dir.join(format!("{device}.lock"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_daemon_is_told_who_has_the_device() {
        let dir = tempfile::tempdir().unwrap();
        let owner = Owner { pid: 77, admin_socket: "/run/a.sock".into(), subnet_file: "/run/a.env".into() };
        let first = DeviceLock::take(dir.path(), "flannel.1", &owner).unwrap();
        let error = DeviceLock::take(dir.path(), "flannel.1", &owner).unwrap_err().to_string();
        assert!(
            error.contains("flannel.1") && error.contains("pid 77") && error.contains("/run/a.sock"),
            "{error}"
        );
        DeviceLock::take(dir.path(), "flannel.2", &owner).unwrap();
        // Handed over, it is held without interruption.
        let second = DeviceLock::of(first.share().unwrap(), &Owner { pid: 78, ..owner.clone() }).unwrap();
        drop(first);
        let error = DeviceLock::take(dir.path(), "flannel.1", &owner).unwrap_err().to_string();
        assert!(error.contains("pid 78"), "{error}");
        drop(second);
        DeviceLock::take(dir.path(), "flannel.1", &owner).unwrap();
    }
}
