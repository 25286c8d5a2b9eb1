//! `felt cleanup`: nothing of felt stays on the node.
//!
//! It goes on after a failure, tolerates what is gone already, and reports everything at the end. A running daemon is
//! not disturbed: while one holds a device lock nothing is removed.

use std::io;
use std::path::{Path, PathBuf};

use felt_hostnet::TolerateAbsence as _;
use felt_hostnet::netlink::{Handle, Link};
use felt_hostnet::subnet_env::Previous;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::Failure;
use super::args::Cleanup;
use crate::backend::{DeviceLock, LOCK_DIR};
use crate::traffic;

/// `felt cleanup -o json`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Cleaned {
    pub(super) version: u32,
    pub(super) dry_run: bool,
    pub(super) removed: Vec<Item>,
    pub(super) failed: Vec<Item>,
}

/// One thing on the node.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Item {
    /// `device`, `file`, `directory`, ...
    pub(super) kind: String,
    pub(super) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

pub(super) fn run(options: &Cleanup) -> Result<Cleaned, Failure> {
    let mut cleaner = Cleaner {
        dry_run: options.dry_run,
        done: Cleaned {
            version: crate::api::VERSION,
            dry_run: options.dry_run,
            removed: vec![],
            failed: vec![],
        },
    };
    let locked = locked_devices(Path::new(LOCK_DIR)).map_err(Failure::failed)?;
    // Held to the end, so that no daemon starts in between.
    let mut locks = Vec::new();
    for device in &locked {
        locks.push(DeviceLock::take_for_cleanup(Path::new(LOCK_DIR), device).map_err(Failure::failed)?);
    }
    cleaner.devices(&locked)?;
    cleaner.rules(&options.subnet_file);
    cleaner.file(&options.subnet_file);
    cleaner.empty_directory(options.subnet_file.parent());
    cleaner.file(&options.state_dir.join("node.json"));
    cleaner.file(&options.state_dir.join("node.json.damaged"));
    cleaner.empty_directory(Some(&options.state_dir));
    for device in &locked {
        cleaner.file(&lock_path(device));
    }
    cleaner.file(&Path::new(LOCK_DIR).join("feltd.sock"));
    cleaner.empty_directory(Some(Path::new(LOCK_DIR)));
    Ok(cleaner.done)
}

fn lock_path(device: &str) -> PathBuf {
    Path::new(LOCK_DIR).join(format!("{device}.lock"))
}

/// Devices a daemon has run on since the machine started.
fn locked_devices(dir: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut devices = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        if let Some(device) = name.to_str().and_then(|name| name.strip_suffix(".lock")) {
            devices.push(device.to_owned());
        }
    }
    devices.sort();
    Ok(devices)
}

/// Whether a link is of our making: a TUN of one of our names, or any tunnel a daemon of ours has locked.
fn is_ours(link: &Link, locked: &[String]) -> bool {
    let tunnel = ["tun", "vxlan", "ipip"].iter().any(|kind| link.is_kind(kind));
    let digits = |rest: &str| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit());
    let named = ["flannel-v6.", "flannel.", "flannel"]
        .iter()
        .any(|prefix| link.name.strip_prefix(prefix).is_some_and(digits));
    tunnel && (locked.contains(&link.name) || named && link.is_kind("tun"))
}

struct Cleaner {
    dry_run: bool,
    done: Cleaned,
}

impl Cleaner {
    fn devices(&mut self, locked: &[String]) -> Result<(), Failure> {
        let mut handle = Handle::new().map_err(Failure::failed)?;
        let links = handle.links().map_err(Failure::failed)?;
        for link in links.iter().filter(|link| is_ours(link, locked)) {
            self.remove("device", &link.name, || {
                handle.link_del(link.index).tolerate_absence().map_err(|error| error.to_string())
            });
        }
        Ok(())
    }

    /// Traffic rules of both kinds, and the blackhole routes of the subnets the file names.
    fn rules(&mut self, subnet_file: &Path) {
        let previous = Previous::read(subnet_file).unwrap_or_default();
        let subnets: Vec<IpNet> =
            previous.subnet.map(IpNet::V4).into_iter().chain(previous.ipv6_subnet.map(IpNet::V6)).collect();
        self.remove("traffic rules and blackhole routes of", "felt and flannel", || {
            let removal = traffic::remove_all(&subnets);
            let failures: Vec<_> = removal.failures.iter().map(ToString::to_string).collect();
            if failures.is_empty() { Ok(removal.found) } else { Err(failures.join("; ")) }
        });
    }

    fn file(&mut self, path: &Path) {
        if path.symlink_metadata().is_ok() {
            self.remove("file", &path.display().to_string(), || gone(std::fs::remove_file(path)));
        }
    }

    /// Removes a directory of ours that holds nothing else.
    fn empty_directory(&mut self, path: Option<&Path>) {
        let Some(path) = path else { return };
        let empty = std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        if empty {
            self.remove("directory", &path.display().to_string(), || gone(std::fs::remove_dir(path)));
        }
    }

    fn remove(&mut self, kind: &str, name: &str, work: impl FnOnce() -> Result<bool, String>) {
        let mut item = Item { kind: kind.to_owned(), name: name.to_owned(), error: None };
        if self.dry_run {
            self.done.removed.push(item);
            return;
        }
        match work() {
            Ok(true) => self.done.removed.push(item),
            Ok(false) => {}
            Err(error) => {
                item.error = Some(error);
                self.done.failed.push(item);
            }
        }
    }
}

fn gone(result: io::Result<()>) -> Result<bool, String> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.to_string()),
    }
}
