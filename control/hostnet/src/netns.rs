//! Network namespaces.
//!
//! [`NetNs`] is an open descriptor of a namespace. [`NetNs::with`] runs a closure inside it on the
//! calling thread and always comes back, also when the closure panics; if the kernel refuses the way
//! back the process aborts, because code that believes to be elsewhere would do harm silently.
//!
//! A [`crate::netlink::Handle`] opened inside keeps talking to that namespace after the return, so
//! that most callers need no more than [`crate::netlink::Handle::new_in`].

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::sys;

/// `NSFS_MAGIC` of linux/magic.h.
const NSFS_MAGIC: i64 = 0x6e73_6673;
/// `PROC_SUPER_MAGIC`: what the files were on before Linux 3.19, still the type of `/proc/PID/ns` links.
const PROC_SUPER_MAGIC: i64 = 0x9fa0;

/// Why a path could not be opened as a network namespace.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Nothing is at that path.
    #[error("failed to Statfs {0:?}: no such file or directory")]
    NotFound(PathBuf),
    /// The path could not be examined or opened.
    #[error("failed to open network namespace {path:?}: {source}")]
    Io {
        /// The path asked for.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The file is no namespace.
    #[error("unknown FS magic on {path:?}: {magic:x}")]
    NotANamespace {
        /// The path asked for.
        path: PathBuf,
        /// The magic number of its file system.
        magic: i64,
    },
}

impl OpenError {
    /// Whether the path does not exist (and a deletion thus has nothing to do inside).
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound(_))
    }

    /// Whether the path exists but is no namespace (an unmounted mount point, for example).
    pub fn is_not_a_namespace(&self) -> bool {
        matches!(self, Self::NotANamespace { .. })
    }
}

/// Which namespace a descriptor refers to; equal for two descriptors of one namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NetNsId {
    device: u64,
    inode: u64,
}

/// An open network namespace. It lives as long as this value, even without a name or a process.
#[derive(Debug)]
pub struct NetNs {
    fd: OwnedFd,
    path: Option<PathBuf>,
}

impl NetNs {
    /// Opens the namespace at a path such as `/run/netns/blue` or `/proc/1234/ns/net`.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, OpenError> {
        let path = path.as_ref();
        let fail = |source: io::Error| match source.raw_os_error() {
            Some(libc::ENOENT) => OpenError::NotFound(path.to_owned()),
            _ => OpenError::Io { path: path.to_owned(), source },
        };
        let magic = sys::fs_magic(path).map_err(fail)?;
        if magic != NSFS_MAGIC && magic != PROC_SUPER_MAGIC {
            return Err(OpenError::NotANamespace { path: path.to_owned(), magic });
        }
        let file = File::open(path).map_err(fail)?;
        Ok(Self { fd: file.into(), path: Some(path.to_owned()) })
    }

    /// The calling thread's namespace.
    pub fn current() -> io::Result<Self> {
        let file = File::open("/proc/thread-self/ns/net")?;
        Ok(Self { fd: file.into(), path: None })
    }

    /// Makes a namespace without a name. The calling thread stays where it is.
    pub fn create() -> io::Result<Self> {
        // A short-lived thread is moved into the new namespace, so that the caller's own thread never is.
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("netns-create".into())
                .spawn_scoped(scope, || {
                    sys::unshare_net()?;
                    Self::current()
                })?
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Makes a namespace and binds it to `path`, as `ip netns add` does below `/run/netns`.
    ///
    /// # Errors
    /// EEXIST when something is at `path`. Nothing is left behind on failure.
    pub fn create_at(path: impl AsRef<Path>) -> io::Result<Self> {
        let path = path.as_ref();
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::OpenOptions::new().write(true).create_new(true).open(path)?;
        let undo = |source: io::Error| {
            // Best effort: the first error is the one to report.
            let _ = fs::remove_file(path);
            source
        };
        std::thread::scope(|scope| {
            std::thread::Builder::new()
                .name("netns-create".into())
                .spawn_scoped(scope, || {
                    sys::unshare_net()?;
                    sys::bind_mount(Path::new("/proc/thread-self/ns/net"), path)?;
                    Self::current()
                })?
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
        .map(|ns| Self { path: Some(path.to_owned()), ..ns })
        .map_err(undo)
    }

    /// Removes the name at `path`. The namespace itself goes with its last process and descriptor.
    ///
    /// A missing path is success; a plain file left behind by a crash is removed.
    pub fn delete_at(path: impl AsRef<Path>) -> io::Result<()> {
        let path = path.as_ref();
        loop {
            match sys::unmount(path) {
                // One more mount may lie below.
                Ok(()) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => break,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// The path it was opened from, if it was opened from one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Which namespace this is.
    pub fn id(&self) -> io::Result<NetNsId> {
        let file = File::from(self.fd.try_clone()?);
        let metadata = file.metadata()?;
        Ok(NetNsId { device: metadata.dev(), inode: metadata.ino() })
    }

    /// Whether both refer to the same namespace.
    pub fn is_same(&self, other: &Self) -> io::Result<bool> {
        Ok(self.id()? == other.id()?)
    }

    /// Another descriptor of the same namespace.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, path: self.path.clone() })
    }

    /// Moves the calling thread into the namespace until the guard is dropped.
    pub fn enter(&self) -> io::Result<NetNsGuard> {
        let home = Self::current()?;
        sys::setns_net(self.fd.as_fd())?;
        Ok(NetNsGuard { home, _not_send: std::marker::PhantomData })
    }

    /// Moves the calling thread into the namespace for good (a child process or a thread of its own).
    pub fn enter_for_good(&self) -> io::Result<()> {
        sys::setns_net(self.fd.as_fd())
    }

    /// Runs `work` inside the namespace on the calling thread.
    pub fn with<T>(&self, work: impl FnOnce() -> T) -> io::Result<T> {
        let guard = self.enter()?;
        let value = work();
        drop(guard);
        Ok(value)
    }
}

impl AsFd for NetNs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Brings the thread back to the namespace it came from. Bound to its thread.
#[derive(Debug)]
#[must_use = "the thread returns when the guard is dropped"]
pub struct NetNsGuard {
    home: NetNs,
    /// A namespace is a property of a thread: the guard must be dropped on the thread that made it.
    _not_send: std::marker::PhantomData<*const ()>,
}

impl Drop for NetNsGuard {
    fn drop(&mut self) {
        if sys::setns_net(self.home.as_fd()).is_err() {
            // INVARIANT: no code of the caller runs in a namespace it does not expect.
            std::process::abort();
        }
    }
}
