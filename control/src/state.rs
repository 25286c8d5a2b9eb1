//! The node's own memory across restarts: `node.json` in the state directory.
//!
//! It holds the node id, by which a node with a new address is told from a stranger, and the VTEP MAC of each device,
//! which peers have in their tables. Written through a temporary file and a rename; a damaged file is set aside, since a
//! node without memory still works.

use std::collections::BTreeMap;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use felt_hostnet::MacAddr;
use serde::{Deserialize, Serialize};

/// Content of `node.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Content {
    version: u32,
    node_id: String,
    #[serde(default)]
    vtep_macs: BTreeMap<String, String>,
}

/// The state file, loaded.
#[derive(Debug, Clone)]
pub struct NodeState {
    /// `None` for a memory that ends with the process.
    path: Option<PathBuf>,
    content: Content,
}

/// The state file could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("{what} {}: {source}", path.display())]
pub struct StateError {
    what: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl NodeState {
    /// Loads the file of `dir`, or makes it with a new node id.
    ///
    /// # Errors
    /// When the directory cannot be made or the file not be read or written. A file with unusable content is renamed to
    /// `node.json.damaged` and replaced.
    pub fn load(dir: &Path) -> Result<Self, StateError> {
        let path = dir.join("node.json");
        let fail = |what| {
            let path = path.clone();
            move |source| StateError { what, path, source }
        };
        std::fs::create_dir_all(dir).map_err(fail("create directory of"))?;
        match std::fs::read(&path) {
            Ok(bytes) => match serde_json::from_slice::<Content>(&bytes) {
                Ok(content) if !content.node_id.is_empty() => return Ok(Self { path: Some(path), content }),
                _ => {
                    let damaged = dir.join("node.json.damaged");
                    tracing::warn!("{} is damaged, set aside as {}", path.display(), damaged.display());
                    std::fs::rename(&path, &damaged).map_err(fail("set aside"))?;
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(fail("read")(error)),
        }
        let state = Self { path: Some(path), ..Self::in_memory() };
        state.save()?;
        Ok(state)
    }

    /// A new state that is never written, for a node whose state directory cannot be used.
    pub fn in_memory() -> Self {
        let node_id = format!("{:032x}", rand::random::<u128>());
        Self { path: None, content: Content { version: 1, node_id, vtep_macs: BTreeMap::new() } }
    }

    /// The node id, 32 hex digits.
    pub fn node_id(&self) -> &str {
        &self.content.node_id
    }

    /// The VTEP MAC last used on `device`.
    pub fn vtep_mac(&self, device: &str) -> Option<MacAddr> {
        self.content.vtep_macs.get(device)?.parse().ok().filter(|mac: &MacAddr| mac.is_unicast())
    }

    /// Remembers the VTEP MAC of `device`; writes only when it changed.
    ///
    /// # Errors
    /// When the file cannot be written; the memory in this process keeps the value.
    pub fn set_vtep_mac(&mut self, device: &str, mac: MacAddr) -> Result<(), StateError> {
        let text = mac.to_string();
        if self.content.vtep_macs.get(device) == Some(&text) {
            return Ok(());
        }
        self.content.vtep_macs.insert(device.to_owned(), text);
        self.save()
    }

    fn save(&self) -> Result<(), StateError> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut text = serde_json::to_vec_pretty(&self.content).unwrap_or_default();
        text.push(b'\n');
        write_atomically(path, &text, 0o600).map_err(|source| StateError {
            what: "write",
            path: path.clone(),
            source,
        })
    }
}

/// Replaces `path` by `content` so that a reader, or a crash, sees the old text or the new one.
///
/// # Errors
/// Those of the file system; no temporary file is left behind then.
pub fn write_atomically(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{:08x}", rand::random::<u32>()));
    let written = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)
        .and_then(|mut file| file.write_all(content).and_then(|()| file.sync_all()))
        .and_then(|()| std::fs::rename(&temporary, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_and_macs_survive_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("deep/er");
        let mac: MacAddr = "02:00:00:00:00:07".parse().unwrap();
        let mut state = NodeState::load(&dir).unwrap();
        assert_eq!(state.node_id().len(), 32);
        state.set_vtep_mac("flannel.1", mac).unwrap();
        let again = NodeState::load(&dir).unwrap();
        assert_eq!((again.node_id(), again.vtep_mac("flannel.1")), (state.node_id(), Some(mac)));
        assert_eq!(again.vtep_mac("flannel-v6.1"), None);
        let names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["node.json"], "temporary files are left");
    }

    #[test]
    fn damaged_file_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        for text in ["", "{", "null", r#"{"version":1,"node_id":""}"#] {
            std::fs::write(dir.path().join("node.json"), text).unwrap();
            let state = NodeState::load(dir.path()).unwrap();
            assert_eq!(NodeState::load(dir.path()).unwrap().node_id(), state.node_id());
            assert_eq!(std::fs::read_to_string(dir.path().join("node.json.damaged")).unwrap(), text);
        }
    }

    #[test]
    fn multicast_or_zero_mac_is_not_taken_over() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"version":1,"node_id":"x","vtep_macs":{"a":"00:00:00:00:00:00","b":"01:00:00:00:00:00","c":"zz"}}"#;
        std::fs::write(dir.path().join("node.json"), text).unwrap();
        let state = NodeState::load(dir.path()).unwrap();
        assert!(["a", "b", "c"].iter().all(|device| state.vtep_mac(device).is_none()));
    }
}
