//! Where things are in etcd: flannel's keys.

use crate::lease::SubnetKey;

/// The keys below one prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Keys {
    /// The network configuration.
    pub(super) config: String,
    /// What every lease key starts with, a slash at its end.
    ///
    /// COMPAT: flannel reads without that slash, so `PREFIX/subnets-old` counts for it as well.
    pub(super) subnets: String,
}

impl Keys {
    pub(super) fn new(prefix: &str) -> Self {
        Keys { config: join(prefix, "config"), subnets: join(prefix, "subnets") + "/" }
    }

    pub(super) fn lease(&self, key: &SubnetKey) -> String {
        format!("{}{key}", self.subnets)
    }

    /// The subnet a key stands for, if it is a lease.
    pub(super) fn subnet(&self, key: &[u8]) -> Option<SubnetKey> {
        std::str::from_utf8(key).ok()?.strip_prefix(&self.subnets)?.parse().ok()
    }
}

/// Go's `path.Join`: empty elements and `.` vanish, `..` takes the element before it away.
fn join(prefix: &str, name: &str) -> String {
    let rooted = prefix.starts_with('/');
    let mut parts: Vec<&str> = Vec::new();
    for part in prefix.split('/').chain([name]) {
        match part {
            "" | "." => {}
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            ".." if rooted => {}
            part => parts.push(part),
        }
    }
    format!("{}{}", if rooted { "/" } else { "" }, parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_are_cleaned_as_in_go() {
        for (prefix, config) in [
            ("/coreos.com/network", "/coreos.com/network/config"),
            ("/coreos.com/network/", "/coreos.com/network/config"),
            ("//a///b/./c/../", "/a/b/config"),
            ("coreos.com", "coreos.com/config"),
            ("/../a", "/a/config"),
            ("../a", "../a/config"),
            ("/", "/config"),
            ("", "config"),
        ] {
            assert_eq!(Keys::new(prefix).config, config, "{prefix:?}");
        }
    }

    #[test]
    fn only_lease_keys_are_subnets() {
        let keys = Keys::new("/n");
        let subnet = "10.5.34.0-24".parse().unwrap();
        assert_eq!(keys.lease(&subnet), "/n/subnets/10.5.34.0-24");
        assert_eq!(keys.subnet(b"/n/subnets/10.5.34.0-24"), Some(subnet));
        for foreign in
            ["/n/subnets/foo", "/n/subnets/", "/n/subnets/a/10.5.34.0-24", "/m/subnets/10.5.34.0-24"]
        {
            assert_eq!(keys.subnet(foreign.as_bytes()), None, "{foreign}");
        }
        assert_eq!(keys.subnet(b"/n/subnets/10.5.34.0-24\xff"), None);
    }
}
