//! What the directory held at the last look, and the difference to now.
//!
//! A full look costs one `stat` per file; only files whose inode, size or time changed are read. A file that was a
//! lease and is unreadable now keeps its last value, since its writer may be half way; it disturbs nobody.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, SystemTime};

use tracing::warn;

use super::dir::{Content, Directory, is_abandoned, key_of};
use crate::lease::{Event, Lease, SubnetKey};

/// A file younger than this may still be written; it is not called unreadable yet.
const SETTLED: Duration = Duration::from_secs(2);

/// The leases known so far.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    known: BTreeMap<SubnetKey, Known>,
    warned: HashSet<OsString>,
}

#[derive(Debug)]
struct Known {
    stamp: Stamp,
    lease: Option<Lease>,
}

/// What tells a changed file from an unchanged one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Scanner {
    /// Number of files with a lease's name.
    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    /// The leases at the last look, but those that anyone may remove.
    pub(super) fn leases(&self) -> Vec<Lease> {
        let now = SystemTime::now();
        let leases = self.known.values().filter_map(|known| known.lease.as_ref());
        leases.filter(|lease| !is_abandoned(lease, now)).cloned().collect()
    }

    /// Leases that anyone may remove now.
    pub(super) fn abandoned(&self) -> BTreeSet<SubnetKey> {
        let now = SystemTime::now();
        let leases = self.known.values().filter_map(|known| known.lease.as_ref());
        leases.filter(|lease| is_abandoned(lease, now)).map(|lease| lease.key).collect()
    }

    /// Looks at every file.
    pub(super) fn look_at_all(&mut self, dir: &Directory) -> io::Result<Vec<Event>> {
        let names = dir.names()?;
        let present: HashSet<&OsStr> = names.iter().map(OsString::as_os_str).collect();
        self.warned.retain(|name| present.contains(name.as_os_str()));
        let mut events = Vec::new();
        let keys: BTreeSet<SubnetKey> = names.iter().filter_map(|name| key_of(name)).collect();
        let gone: Vec<SubnetKey> = self.known.keys().filter(|key| !keys.contains(key)).copied().collect();
        for key in gone {
            self.look(dir, key, false, &mut events)?;
        }
        for name in &names {
            match key_of(name) {
                Some(key) => self.look(dir, key, false, &mut events)?,
                None => self.warn(name, "its name is no subnet"),
            }
        }
        Ok(events)
    }

    /// Looks at the files of these names.
    pub(super) fn look_at(&mut self, dir: &Directory, names: BTreeSet<OsString>) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        for key in names.iter().filter_map(|name| key_of(name)) {
            self.look(dir, key, true, &mut events)?;
        }
        Ok(events)
    }

    fn look(
        &mut self,
        dir: &Directory,
        key: SubnetKey,
        even_if_unchanged: bool,
        events: &mut Vec<Event>,
    ) -> io::Result<()> {
        let name = OsString::from(key.to_string());
        let meta = match std::fs::metadata(dir.path().join(&name)) {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                if let Some(Known { lease: Some(lease), .. }) = self.known.remove(&key) {
                    events.push(Event::Removed(lease));
                }
                self.warned.remove(&name);
                return Ok(());
            }
            Err(e) => return Err(e),
        };
        let stamp =
            Stamp { inode: meta.ino(), size: meta.size(), modified: (meta.mtime(), meta.mtime_nsec()) };
        let known = self.known.get(&key);
        if !even_if_unchanged && known.is_some_and(|known| known.stamp == stamp) {
            return Ok(());
        }
        match dir.read(&key)? {
            Content::Lease(lease) => {
                let unchanged = known.is_some_and(|known| known.lease.as_ref() == Some(&lease));
                if !unchanged {
                    events.push(Event::Added(lease.clone()));
                }
                self.warned.remove(&name);
                self.known.insert(key, Known { stamp, lease: Some(lease) });
            }
            Content::Unreadable(reason) => {
                let age = meta.modified().ok().and_then(|at| at.elapsed().ok());
                if age.is_none_or(|age| age >= SETTLED) {
                    self.warn(&name, &reason);
                    let lease = self.known.remove(&key).and_then(|known| known.lease);
                    self.known.insert(key, Known { stamp, lease });
                }
            }
            // Gone since; its event is on the way.
            Content::Missing => {}
        }
        Ok(())
    }

    fn warn(&mut self, name: &OsStr, reason: &str) {
        if self.warned.insert(name.to_owned()) {
            warn!("ignoring lease file {name:?}: {reason}");
        }
    }
}
