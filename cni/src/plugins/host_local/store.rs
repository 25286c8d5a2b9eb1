//! The directory of reservations, held under its lock.
//!
//! INVARIANT: a [`Store`] exists only while this process holds the lock of the file that is at
//! `lock` now. A lock whose file was removed meanwhile is given up and taken anew.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::net::IpAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::types::error::{Context, Result};

/// The open, locked directory.
#[derive(Debug)]
pub(super) struct Store {
    dir: PathBuf,
    /// Dropping it releases the lock.
    _lock: File,
}

/// Who holds an address, as its file says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Owner {
    /// Container ID.
    pub id: String,
    /// Interface name; absent in files of very old versions.
    pub ifname: Option<String>,
}

impl Owner {
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        if text.is_empty() {
            return None;
        }
        Some(match text.split_once('\n') {
            Some((id, ifname)) => Self { id: id.trim().to_owned(), ifname: Some(ifname.trim().to_owned()) },
            None => Self { id: text.to_owned(), ifname: None },
        })
    }

    fn is(&self, id: &str, ifname: &str) -> bool {
        self.id == id && self.ifname.as_deref() == Some(ifname)
    }

    fn is_old(&self, id: &str) -> bool {
        self.id == id && self.ifname.is_none()
    }
}

/// Reservation files are tiny; what does not fit here is no reservation.
const READ_LIMIT: usize = 1024;

impl Store {
    /// Makes the directory if need be and takes its lock.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let fail = |what: &str| format!("{what} {}", dir.display());
        if !dir.is_dir() {
            DirBuilder::new().recursive(true).mode(0o755).create(dir).with_context(|| fail("mkdir"))?;
        }
        let path = dir.join("lock");
        loop {
            let lock = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_CREAT)
                .mode(0o750)
                .open(&path)
                .with_context(|| fail("open lock in"))?;
            lock.lock().with_context(|| fail("lock"))?;
            let held = lock.metadata()?;
            // Another file may have taken the name while we waited.
            if fs::metadata(&path).is_ok_and(|there| (there.dev(), there.ino()) == (held.dev(), held.ino())) {
                return Ok(Self { dir: dir.to_owned(), _lock: lock });
            }
        }
    }

    /// The directory.
    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Every file below the directory with its owner, if it names one.
    fn walk(&self, visit: &mut dyn FnMut(&Path, Option<Owner>) -> Result<()>) -> Result<()> {
        let mut dirs = vec![self.dir.clone()];
        let mut buffer = [0; READ_LIMIT];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(&dir)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    dirs.push(entry.path());
                    continue;
                }
                if entry.file_name() == "lock" {
                    continue;
                }
                let path = entry.path();
                if is_abandoned(&path) {
                    remove(&path)?;
                    continue;
                }
                let len = match File::open(&path).and_then(|mut file| file.read(&mut buffer)) {
                    Ok(len) => len,
                    Err(err) if err.kind() == ErrorKind::NotFound => continue,
                    Err(err) => return Err(err.into()),
                };
                visit(&path, std::str::from_utf8(&buffer[..len]).ok().and_then(Owner::parse))?;
            }
        }
        Ok(())
    }

    /// Addresses held by this attachment; by the container as a whole where files name no interface.
    pub(super) fn owned_by(&self, id: &str, ifname: &str) -> Result<Vec<IpAddr>> {
        let mut found = Vec::new();
        self.walk(&mut |path, owner| {
            if owner.is_some_and(|o| o.is(id, ifname) || o.is_old(id))
                && let Some(ip) = address_of(path)
            {
                found.push(ip);
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Removes this attachment's files, or, where none names the interface, those of the container.
    pub(super) fn release(&self, id: &str, ifname: &str) -> Result<Vec<IpAddr>> {
        let mut exact = Vec::new();
        let mut old = Vec::new();
        self.walk(&mut |path, owner| {
            match owner {
                Some(o) if o.is(id, ifname) => exact.push(path.to_owned()),
                Some(o) if o.is_old(id) => old.push(path.to_owned()),
                _ => {}
            }
            Ok(())
        })?;
        let paths = if exact.is_empty() { old } else { exact };
        let mut freed = Vec::new();
        for path in paths {
            remove(&path)?;
            freed.extend(address_of(&path));
        }
        Ok(freed)
    }

    /// Removes every reservation whose owner `keep` refuses, and files without an owner.
    pub(super) fn retain(&self, keep: impl Fn(&Owner) -> bool) -> Result<()> {
        self.walk(&mut |path, owner| {
            let is_ours = address_of(path).is_some() || is_temporary(path);
            if is_ours && !owner.is_some_and(|o| keep(&o)) { remove(path) } else { Ok(()) }
        })
    }

    /// Who holds `ip`; `None` when free, also when its file is empty (left by a crash of a program
    /// that creates first and writes later: the lock says that it is not writing now).
    pub(super) fn holder(&self, ip: IpAddr) -> Result<Option<String>> {
        match fs::read_to_string(self.path_of(ip)) {
            Ok(text) => Ok(Owner::parse(&text).map(|o| o.id)),
            Err(err) if err.kind() == ErrorKind::NotFound => Ok(None),
            Err(err) => Err(err.into()),
        }
    }

    /// Addresses that have a file, by name alone.
    pub(super) fn taken(&self) -> Result<std::collections::HashSet<IpAddr>> {
        let mut taken = std::collections::HashSet::new();
        for entry in fs::read_dir(&self.dir)? {
            taken.extend(entry?.file_name().to_str().and_then(|name| name.parse::<IpAddr>().ok()));
        }
        Ok(taken)
    }

    /// Whether the file of `ip` is there without content.
    pub(super) fn is_empty(&self, ip: IpAddr) -> bool {
        fs::metadata(self.path_of(ip)).is_ok_and(|m| m.is_file() && m.len() == 0)
    }

    fn path_of(&self, ip: IpAddr) -> PathBuf {
        self.dir.join(ip.to_string())
    }

    /// The address handed out last from set `n`, if the file says so legibly.
    pub(super) fn last_reserved(&self, n: usize) -> Option<IpAddr> {
        fs::read_to_string(self.dir.join(format!("last_reserved_ip.{n}"))).ok()?.trim().parse().ok()
    }

    /// Notes the address handed out last from set `n`. A cut write only restarts the round.
    pub(super) fn set_last_reserved(&self, n: usize, ip: IpAddr) -> Result<()> {
        OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(self.dir.join(format!("last_reserved_ip.{n}")))
            .and_then(|mut file| file.write_all(ip.to_string().as_bytes()))
            .map_err(Into::into)
    }

    /// Gives `ip` back.
    pub(super) fn free(&self, ip: IpAddr) -> Result<()> {
        remove(&self.path_of(ip))
    }
}

/// The content of this attachment's reservations, written once under a temporary name and linked to
/// each address. The temporary name goes when this is dropped.
#[derive(Debug)]
pub(super) struct Ticket<'a> {
    store: &'a Store,
    path: PathBuf,
    written: bool,
    content: String,
}

const TEMPORARY: &str = ".felt-";

fn is_temporary(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TEMPORARY))
        && path.extension().is_some_and(|ext| ext == "new")
}

/// Whether the file is a ticket of a process that does not run any more: it was killed before it
/// could tidy up.
fn is_abandoned(path: &Path) -> bool {
    let pid = || -> Option<u32> {
        path.file_name()?.to_str()?.strip_prefix(TEMPORARY)?.split('-').next()?.parse().ok()
    };
    is_temporary(path) && pid().is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

impl<'a> Ticket<'a> {
    /// A ticket for this attachment; writes nothing yet.
    pub(super) fn new(store: &'a Store, id: &str, ifname: &str) -> Self {
        // The lock makes tickets take turns; the name is unique all the same, for two writers that
        // hold different locks because somebody removed the lock file.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = store.dir.join(format!("{TEMPORARY}{}-{number}.new", std::process::id()));
        Self { store, path, written: false, content: format!("{id}\r\n{ifname}") }
    }

    /// Reserves `ip` unless it is taken.
    pub(super) fn reserve(&mut self, ip: IpAddr) -> Result<bool> {
        if !self.written {
            self.written = true;
            let mut file =
                OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&self.path)?;
            file.write_all(self.content.as_bytes())
                .with_context(|| format!("write reservation in {}", self.store.dir.display()))?;
        }
        let target = self.store.path_of(ip);
        loop {
            match fs::hard_link(&self.path, &target) {
                Ok(()) => return Ok(true),
                Err(err) if err.kind() == ErrorKind::AlreadyExists => {
                    if fs::metadata(&target).is_ok_and(|m| m.is_file() && m.len() == 0) {
                        remove(&target)?;
                        continue;
                    }
                    return Ok(false);
                }
                Err(err) => {
                    return Err(err).with_context(|| format!("reserve {ip} in {}", self.store.dir.display()));
                }
            }
        }
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        if self.written {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(err) if err.kind() != ErrorKind::NotFound => Err(err.into()),
        _ => Ok(()),
    }
}

fn address_of(path: &Path) -> Option<IpAddr> {
    path.file_name()?.to_str()?.parse().ok()
}
