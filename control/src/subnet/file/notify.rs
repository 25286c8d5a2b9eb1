//! Waiting for changes of a directory by inotify, which may be missing.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use inotify::{EventMask, EventStream, Inotify, WatchMask};

/// What may have changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// The files of these names.
    Names(BTreeSet<OsString>),
    /// Time is up, or events were lost: anything.
    Unknown,
}

/// Watches one directory, which may come and go.
#[derive(Debug)]
pub(super) struct DirWatch {
    dir: PathBuf,
    armed: Option<Armed>,
}

#[derive(Debug)]
struct Armed {
    events: EventStream<Vec<u8>>,
    /// Device and inode of the directory.
    identity: (u64, u64),
}

impl DirWatch {
    pub(super) fn new(dir: &Path) -> Self {
        DirWatch { dir: dir.to_owned(), armed: None }
    }

    /// Starts watching unless that is so already. What cannot be watched is noticed by the caller's own regular
    /// look.
    pub(super) fn arm(&mut self) {
        let identity = std::fs::metadata(&self.dir).map(|meta| (meta.dev(), meta.ino())).ok();
        if self.armed.as_ref().map(|armed| armed.identity) != identity {
            self.armed = identity.and_then(|identity| {
                let events = start(&self.dir).ok()?;
                Some(Armed { events, identity })
            });
        }
    }

    /// Waits until something changes, at most for `limit`.
    ///
    /// # Cancel safety
    ///
    /// Events already taken are lost; the caller looks at everything when it starts again.
    pub(super) async fn changed(&mut self, limit: Duration) -> Change {
        let Some(armed) = &mut self.armed else {
            tokio::time::sleep(limit.min(Duration::from_secs(1))).await;
            return Change::Unknown;
        };
        let mut names = BTreeSet::new();
        let mut next = tokio::time::timeout(limit, armed.events.next()).await.ok().flatten();
        while let Some(event) = next {
            let lost = EventMask::Q_OVERFLOW
                | EventMask::IGNORED
                | EventMask::DELETE_SELF
                | EventMask::MOVE_SELF
                | EventMask::UNMOUNT;
            match event {
                Ok(event) if !event.mask.intersects(lost) => names.extend(event.name),
                _ => {
                    self.armed = None;
                    return Change::Unknown;
                }
            }
            next = armed.events.next().now_or_never().flatten();
        }
        if names.is_empty() { Change::Unknown } else { Change::Names(names) }
    }
}

fn start(dir: &Path) -> io::Result<EventStream<Vec<u8>>> {
    let inotify = Inotify::init()?;
    let mask = WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MOVE
        | WatchMask::CLOSE_WRITE
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR;
    inotify.watches().add(dir, mask)?;
    inotify.into_event_stream(vec![0; 16 * 1024])
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn names_what_changed_and_follows_a_recreated_directory() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("d");
        let mut watch = DirWatch::new(&dir);
        watch.arm();
        assert_eq!(watch.changed(Duration::from_millis(5)).await, Change::Unknown);

        std::fs::create_dir(&dir).unwrap();
        watch.arm();
        std::fs::write(dir.join(".tmp"), "x").unwrap();
        std::fs::hard_link(dir.join(".tmp"), dir.join("a")).unwrap();
        let Change::Names(names) = watch.changed(LONG).await else { panic!("lost") };
        assert!(names.contains(&OsString::from("a")), "{names:?}");

        std::fs::rename(&dir, temp.path().join("e")).unwrap();
        assert_eq!(watch.changed(LONG).await, Change::Unknown);
        std::fs::create_dir(&dir).unwrap();
        watch.arm();
        std::fs::write(dir.join("b"), "x").unwrap();
        let Change::Names(names) = watch.changed(LONG).await else { panic!("lost") };
        assert_eq!(names, BTreeSet::from([OsString::from("b")]));
        assert_eq!(watch.changed(Duration::from_millis(5)).await, Change::Unknown);
    }
}
