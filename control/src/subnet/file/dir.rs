//! One directory of lease files: reading, creating, replacing, removing, locking. Synchronous.
//!
//! Every write goes to a temporary file first (a name with a leading dot), reaches the disk, and then appears under
//! its name by `link` or `rename`; the directory is synced after. A crash leaves at most a temporary file, which is
//! removed by whoever lists the directory [`STALE`] later.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use jiff::Timestamp;

use super::GRACE;
use crate::gojson::Object;
use crate::lease::{Lease, LeaseAttrs, SubnetKey};

/// A temporary file this old was left by a crash.
const STALE: Duration = Duration::from_secs(60);
/// A lease value is a few hundred bytes; what is longer is none.
const MAX_VALUE: u64 = 64 * 1024;
/// How long to wait for the lock before going on without. Its holder may be a stopped process; create-only and
/// rename keep every single file right without it.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// The directory `subnets`.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
}

/// What is under a lease's name.
#[derive(Debug)]
pub(super) enum Content {
    Missing,
    /// A lease by name whose content is none, and why.
    Unreadable(String),
    Lease(Lease),
}

/// All lease files.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Readable leases in the order of their names.
    pub(super) leases: Vec<Lease>,
    /// Names of leases without a readable content.
    pub(super) unreadable: Vec<SubnetKey>,
}

impl Directory {
    pub(super) fn new(path: PathBuf) -> Self {
        Directory { path }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Takes the lock that all daemons of the directory share, until the file is dropped. `None` when its
    /// holder did not let go in time.
    pub(super) fn lock(&self) -> io::Result<Option<File>> {
        fs::create_dir_all(&self.path)?;
        let dir = File::open(&self.path)?;
        let deadline = Instant::now() + LOCK_PATIENCE;
        loop {
            match dir.try_lock() {
                Ok(()) => return Ok(Some(dir)),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => return Ok(None),
                Err(TryLockError::Error(e)) => return Err(e),
            }
        }
    }

    /// The names in the directory that are no temporary files; empty when there is no directory.
    pub(super) fn names(&self) -> io::Result<Vec<std::ffi::OsString>> {
        let mut names = Vec::new();
        let entries = match fs::read_dir(&self.path) {
            Ok(entries) => entries,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(names),
            Err(e) => return Err(e),
        };
        for entry in entries {
            let entry = entry?;
            let name = entry.file_name();
            if is_temporary(&name) {
                let age = entry.metadata().and_then(|meta| meta.modified()).map(|at| at.elapsed());
                if matches!(age, Ok(Ok(age)) if age > STALE) {
                    // Somebody else may be cleaning as well.
                    let _ = fs::remove_file(entry.path());
                }
                continue;
            }
            names.push(name);
        }
        names.sort_unstable();
        Ok(names)
    }

    /// All leases but those that anyone may remove.
    pub(super) fn list(&self) -> io::Result<Listing> {
        let mut listing = self.list_with_abandoned()?;
        let now = SystemTime::now();
        listing.leases.retain(|lease| !is_abandoned(lease, now));
        Ok(listing)
    }

    /// All leases.
    pub(super) fn list_with_abandoned(&self) -> io::Result<Listing> {
        let mut listing = Listing::default();
        for name in self.names()? {
            let Some(key) = key_of(&name) else { continue };
            match self.read(&key)? {
                Content::Lease(lease) => listing.leases.push(lease),
                Content::Unreadable(_) => listing.unreadable.push(key),
                Content::Missing => {}
            }
        }
        Ok(listing)
    }

    /// What is under the name of `key`.
    pub(super) fn read(&self, key: &SubnetKey) -> io::Result<Content> {
        let mut text = String::new();
        let file = match File::open(self.path_of(key)) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Content::Missing),
            Err(e) => return Ok(Content::Unreadable(e.to_string())),
        };
        match file.take(MAX_VALUE + 1).read_to_string(&mut text) {
            Ok(_) if text.len() as u64 > MAX_VALUE => {
                return Ok(Content::Unreadable(format!("longer than {MAX_VALUE} bytes")));
            }
            Ok(_) => {}
            Err(e) => return Ok(Content::Unreadable(e.to_string())),
        }
        Ok(match decode(&text) {
            Ok((attrs, expiration)) => Content::Lease(Lease { key: *key, attrs, expiration }),
            Err(reason) => Content::Unreadable(reason),
        })
    }

    /// Creates the lease. `false` when its name exists already.
    pub(super) fn create(&self, lease: &Lease) -> io::Result<bool> {
        self.write(lease, |temporary, path| match fs::hard_link(temporary, path) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
            Err(e) => Err(e),
        })
    }

    /// Writes the lease over what is there.
    pub(super) fn replace(&self, lease: &Lease) -> io::Result<()> {
        self.write(lease, |temporary, path| fs::rename(temporary, path).map(|()| true)).map(drop)
    }

    /// Removes the lease. `false` when there was none.
    pub(super) fn remove(&self, key: &SubnetKey) -> io::Result<bool> {
        match fs::remove_file(self.path_of(key)) {
            Ok(()) => self.sync().map(|()| true),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }

    fn path_of(&self, key: &SubnetKey) -> PathBuf {
        self.path.join(key.to_string())
    }

    /// Writes a temporary file and gives it its name by `place`.
    fn write(&self, lease: &Lease, place: impl FnOnce(&Path, &Path) -> io::Result<bool>) -> io::Result<bool> {
        fs::create_dir_all(&self.path)?;
        let unique: u64 = rand::random();
        let temporary = self.path.join(format!(".{}.{unique:016x}", lease.key));
        let result = (|| {
            let mut file = OpenOptions::new().write(true).create_new(true).open(&temporary)?;
            file.write_all(encode(lease).as_bytes())?;
            file.sync_all()?;
            place(&temporary, &self.path_of(&lease.key))
        })();
        // Gone already after a rename.
        let _ = fs::remove_file(&temporary);
        let placed = result?;
        self.sync()?;
        Ok(placed)
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

fn is_temporary(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".")
}

/// The key a file name stands for, if any.
pub(super) fn key_of(name: &OsStr) -> Option<SubnetKey> {
    name.to_str()?.parse().ok()
}

/// Whether anyone may remove the lease.
pub(super) fn is_abandoned(lease: &Lease, now: SystemTime) -> bool {
    lease.expiration.and_then(|end| now.duration_since(end).ok()).is_some_and(|past| past > GRACE)
}

/// A time as it is written in files and messages, in whole seconds.
pub(super) fn rfc3339(time: Option<SystemTime>) -> String {
    time.and_then(|time| Timestamp::try_from(time).ok())
        .and_then(|time| Timestamp::from_second(time.as_second()).ok())
        .map_or_else(|| "never".to_owned(), |time| time.to_string())
}

/// flannel's JSON with the expiration as one more member.
fn encode(lease: &Lease) -> String {
    let mut text = lease.attrs.encode();
    if let Some(end) = lease.expiration {
        // Rounded up: a lease must not end earlier than its owner thinks.
        let end = end + Duration::from_nanos(999_999_999);
        text.pop();
        text.push_str(",\"Expiration\":\"");
        text.push_str(&rfc3339(Some(end)));
        text.push_str("\"}");
    }
    text.push('\n');
    text
}

fn decode(text: &str) -> Result<(LeaseAttrs, Option<SystemTime>), String> {
    let object = Object::parse(text).map_err(|e| e.to_string())?;
    let attrs = LeaseAttrs::from_object(&object).map_err(|e| e.to_string())?;
    let expiration: Option<String> = object.field("Expiration").map_err(|e| format!("Expiration: {e}"))?;
    let expiration = expiration
        .map(|text| {
            let time: Timestamp = text.parse().map_err(|e| format!("Expiration {text:?}: {e}"))?;
            Ok::<_, String>(SystemTime::from(time))
        })
        .transpose()?;
    Ok((attrs, expiration))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease() -> Lease {
        Lease {
            key: "10.244.1.0-24".parse().unwrap(),
            attrs: LeaseAttrs {
                public_ip: Some([198, 18, 0, 1].into()),
                backend_type: "vxlan".to_owned(),
                backend_data: Some(
                    serde_json::value::RawValue::from_string("{\"VNI\":1}".to_owned()).unwrap(),
                ),
                ..LeaseAttrs::default()
            },
            expiration: Some(SystemTime::UNIX_EPOCH + Duration::from_millis(1_800_000_000_400)),
        }
    }

    #[test]
    fn value_is_flannels_with_an_expiration() {
        assert_eq!(
            encode(&lease()),
            "{\"PublicIP\":\"198.18.0.1\",\"PublicIPv6\":null,\"BackendType\":\"vxlan\",\"BackendData\":{\"VNI\":1},\"Expiration\":\"2027-01-15T08:00:01Z\"}\n"
        );
        let reservation = Lease { expiration: None, ..lease() };
        assert_eq!(encode(&reservation), reservation.attrs.encode() + "\n");
    }

    #[test]
    fn value_is_read_back_and_other_forms_of_time_too() {
        let (attrs, end) = decode(&encode(&lease())).unwrap();
        assert_eq!(attrs, lease().attrs);
        assert_eq!(end, Some(SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_001)));
        let (_, same) = decode(r#"{"expiration":"2027-01-15T10:00:01.0+02:00"}"#).unwrap();
        assert_eq!(same, end);
        assert_eq!(decode("{}").unwrap().1, None);
        for bad in ["", "{", "{\"Expiration\":\"soon\"}", "{\"Expiration\":5}", "{\"PublicIP\":\"x\"}"] {
            decode(bad).unwrap_err();
        }
    }

    #[test]
    fn create_never_replaces_and_leaves_no_temporary_file() {
        let temp = tempfile::tempdir().unwrap();
        let dir = Directory::new(temp.path().join("subnets"));
        assert!(dir.create(&lease()).unwrap());
        let other = Lease { attrs: LeaseAttrs::default(), ..lease() };
        assert!(!dir.create(&other).unwrap());
        let Content::Lease(found) = dir.read(&lease().key).unwrap() else { panic!("no lease") };
        assert_eq!(found.attrs, lease().attrs);
        dir.replace(&other).unwrap();
        let Content::Lease(found) = dir.read(&lease().key).unwrap() else { panic!("no lease") };
        assert_eq!(found.attrs, other.attrs);
        let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["10.244.1.0-24"]);
        assert!(dir.remove(&lease().key).unwrap());
        assert!(!dir.remove(&lease().key).unwrap());
    }

    #[test]
    fn left_over_temporary_files_are_cleaned_when_old() {
        let temp = tempfile::tempdir().unwrap();
        let dir = Directory::new(temp.path().to_owned());
        for (name, age) in [(".old", 120), (".new", 1)] {
            let file = File::create(temp.path().join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        }
        assert!(dir.names().unwrap().is_empty());
        assert!(!temp.path().join(".old").exists());
        assert!(temp.path().join(".new").exists());
    }

    #[test]
    fn files_that_are_no_leases_are_told_apart() {
        let temp = tempfile::tempdir().unwrap();
        let dir = Directory::new(temp.path().to_owned());
        for (name, text) in [
            ("README", "hello"),
            ("10.244.9.0-24", "{"),
            ("10.244.8.0-24", "\u{0}\u{1}"),
            ("10.244.7.7-24", "{}"),
            ("10.244.6.0-24", "{\"PublicIP\":\"198.18.0.6\"}"),
        ] {
            fs::write(temp.path().join(name), text).unwrap();
        }
        fs::create_dir(temp.path().join("10.244.5.0-24")).unwrap();
        let listing = dir.list().unwrap();
        let texts = |keys: &[SubnetKey]| keys.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(
            texts(&listing.leases.iter().map(|lease| lease.key).collect::<Vec<_>>()),
            ["10.244.6.0-24"]
        );
        assert_eq!(texts(&listing.unreadable), ["10.244.5.0-24", "10.244.8.0-24", "10.244.9.0-24"]);
    }

    #[test]
    fn lock_is_exclusive_and_ends_with_its_file() {
        let temp = tempfile::tempdir().unwrap();
        let dir = Directory::new(temp.path().join("a/b"));
        let lock = dir.lock().unwrap().expect("free");
        assert!(dir.lock().unwrap().is_none());
        drop(lock);
        assert!(dir.lock().unwrap().is_some());
    }
}
