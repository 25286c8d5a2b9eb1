//! The file in which an ADD keeps what it overwrites of an interface.

use std::fs::{DirBuilder, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::{Link, LinkChange};

use super::Conf;
use crate::json::{Fields, Object, Value};
use crate::types::error::{Context, Result};

/// Attributes before an ADD, only those it changes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Backup {
    mac: Option<MacAddr>,
    promisc: Option<bool>,
    mtu: Option<u32>,
    allmulti: Option<bool>,
    tx_queue_len: Option<u32>,
}

impl Backup {
    /// What `conf` would overwrite of `link`.
    pub(super) fn of(link: &Link, conf: &Conf) -> Self {
        Self {
            mac: link.mac.filter(|_| conf.mac.is_some()),
            promisc: conf.promisc.then(|| link.is_promisc()),
            mtu: conf.mtu.map(|_| link.mtu),
            allmulti: conf.allmulti.map(|_| link.flags & libc::IFF_ALLMULTI as u32 != 0),
            tx_queue_len: conf.tx_queue_len.map(|_| link.tx_queue_len),
        }
    }

    /// The change that gives it back.
    pub(super) fn change(&self) -> LinkChange<'static> {
        LinkChange {
            mac: self.mac,
            promisc: self.promisc,
            mtu: self.mtu,
            allmulti: self.allmulti,
            tx_queue_len: self.tx_queue_len,
            ..LinkChange::default()
        }
    }

    fn to_json(&self) -> Value {
        let mut o = Object::new();
        if let Some(mac) = self.mac {
            o.push("mac", mac.to_string());
        }
        if let Some(promisc) = self.promisc {
            o.push("promisc", promisc);
        }
        if let Some(mtu) = self.mtu {
            o.push("mtu", mtu);
        }
        if let Some(allmulti) = self.allmulti {
            o.push("allmulti", allmulti);
        }
        if let Some(len) = self.tx_queue_len {
            o.push("txQLen", len);
        }
        o.into()
    }

    fn from_json(value: &Value) -> Result<Self> {
        let f = Fields::of("configToRestore", value)?;
        let number = |key| -> Result<Option<u32>> { Ok(f.int(key)?.and_then(|n| u32::try_from(n).ok())) };
        Ok(Self {
            mac: f.string("mac")?.and_then(|text| text.parse().ok()),
            promisc: f.bool("promisc")?,
            mtu: number("mtu")?,
            allmulti: f.bool("allmulti")?,
            tx_queue_len: number("txQLen")?,
        })
    }

    /// Writes the file.
    pub(super) fn write(&self, path: &Path) -> Result<()> {
        if let Some(dir) = path.parent() {
            DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .with_context(|| format!("mkdir {}", dir.display()))?;
        }
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
        Ok(file.write_all(self.to_json().to_indented_by(1).as_bytes())?)
    }

    /// Reads the file; `None` when there is none or it is damaged.
    pub(super) fn read(path: &Path) -> Option<Self> {
        let value = Value::parse(&std::fs::read(path).ok()?).unwrap_or(Value::Null);
        Some(Self::from_json(&value).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_written_as_the_reference_writes_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/cid_eth0.json");
        let backup = Backup {
            mac: Some("02:00:00:00:00:01".parse().unwrap()),
            promisc: Some(false),
            mtu: Some(1500),
            ..Backup::default()
        };
        backup.write(&path).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\n \"mac\": \"02:00:00:00:00:01\",\n \"promisc\": false,\n \"mtu\": 1500\n}");
        assert_eq!(Backup::read(&path), Some(backup));
        std::fs::write(&path, "{").unwrap();
        assert_eq!(Backup::read(&path), Some(Backup::default()));
        assert_eq!(Backup::read(&dir.path().join("none")), None);
    }
}
