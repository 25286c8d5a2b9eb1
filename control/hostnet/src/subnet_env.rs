//! `subnet.env`: the file in which the daemon tells the plugins what subnet the node has.
//!
//! The format is flannel's (`pkg/subnet/subnet.go`), byte for byte, because either side may be
//! flannel's own program. There are two readers with different rules, and both live here:
//! [`SubnetEnv::for_plugin`] is the CNI plugin's, [`Previous::parse`] the daemon's, which looks for
//! the subnet it had before a restart and takes nothing for granted.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::Error;

const NETWORK: &str = "FLANNEL_NETWORK";
const SUBNET: &str = "FLANNEL_SUBNET";
const IPV6_NETWORK: &str = "FLANNEL_IPV6_NETWORK";
const IPV6_SUBNET: &str = "FLANNEL_IPV6_SUBNET";
const MTU: &str = "FLANNEL_MTU";
const IPMASQ: &str = "FLANNEL_IPMASQ";

/// The content of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubnetEnv {
    /// IPv4 overlay networks and this node's subnet; the daemon writes exactly one network.
    pub v4: Option<FamilyNets<Ipv4Net>>,
    /// The same for IPv6.
    pub v6: Option<FamilyNets<Ipv6Net>>,
    /// Largest packet of a pod, bytes.
    pub mtu: u32,
    /// Whether the daemon masquerades, so that plugins need not.
    pub ip_masq: bool,
}

/// The networks of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FamilyNets<N> {
    /// The overlay networks, masked.
    pub networks: Vec<N>,
    /// This node's subnet, masked.
    pub subnet: Option<N>,
}

/// Why a plugin cannot use the file. The texts are flannel's.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file could not be read.
    #[error("{0}")]
    Io(Error),
    /// A line's value is no network.
    #[error("line {line}: invalid CIDR address: {value}")]
    Cidr {
        /// Line number from 1.
        line: usize,
        /// What stands there.
        value: String,
    },
    /// A line's value is no number.
    #[error("line {line}: invalid number: {value:?}")]
    Number {
        /// Line number from 1.
        line: usize,
        /// What stands there.
        value: String,
    },
    /// A known key stands without `=`.
    #[error("line {line}: {key} has no value")]
    NoValue {
        /// Line number from 1.
        line: usize,
        /// The key.
        key: String,
    },
    /// Needed keys are missing.
    #[error("is missing {}", .0.join(", "))]
    Missing(Vec<&'static str>),
}

impl SubnetEnv {
    /// The file's text, as flannel writes it.
    pub fn format(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        if let Some(nets) = &self.v4 {
            let networks = join(&nets.networks);
            let _ = writeln!(text, "{NETWORK}={networks}");
            if let Some(subnet) = nets.subnet {
                let first = u32::from(subnet.network()).wrapping_add(1);
                let _ =
                    writeln!(text, "{SUBNET}={}/{}", std::net::Ipv4Addr::from(first), subnet.prefix_len());
            }
        }
        if let Some(nets) = &self.v6 {
            let networks = join(&nets.networks);
            let _ = writeln!(text, "{IPV6_NETWORK}={networks}");
            if let Some(subnet) = nets.subnet {
                let first = u128::from(subnet.network()).wrapping_add(1);
                let _ = writeln!(
                    text,
                    "{IPV6_SUBNET}={}/{}",
                    std::net::Ipv6Addr::from(first),
                    subnet.prefix_len()
                );
            }
        }
        let _ = writeln!(text, "{MTU}={}", self.mtu);
        let _ = writeln!(text, "{IPMASQ}={}", self.ip_masq);
        text
    }

    /// Writes the file so that a reader sees the old or the new content, never a part, and a crash
    /// of the machine leaves one of the two.
    ///
    /// Missing parent directories are made. An existing regular file's mode is kept, else it is 0644
    /// whatever the umask.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        write_atomically(path, self.format().as_bytes())
            .map_err(|source| Error::new(format!("write {}", path.display()), source))
    }

    /// Reads the file as the flannel CNI plugin does.
    pub fn read_for_plugin(path: &Path) -> Result<Self, ReadError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ReadError::Io(Error::new(format!("open {}", path.display()), source)))?;
        Self::for_plugin(&text)
    }

    /// The flannel CNI plugin's rules: `KEY=VALUE` lines split at the first `=`, networks are comma
    /// lists without repetition, unknown lines are ignored, only `true` is true.
    ///
    /// # Errors
    /// A needed key is missing: one network, one subnet, the MTU and the masquerade switch.
    pub fn for_plugin(text: &str) -> Result<Self, ReadError> {
        let mut v4 = FamilyNets::<Ipv4Net>::default();
        let mut v6 = FamilyNets::<Ipv6Net>::default();
        let (mut mtu, mut ip_masq) = (None, None);
        for (number, line) in text.lines().enumerate() {
            let line_number = number + 1;
            let (key, value) = match line.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (line, None),
            };
            if ![NETWORK, SUBNET, IPV6_NETWORK, IPV6_SUBNET, MTU, IPMASQ].contains(&key) {
                continue;
            }
            let value = value.ok_or_else(|| ReadError::NoValue { line: line_number, key: key.to_owned() })?;
            let cidr = || ReadError::Cidr { line: line_number, value: value.to_owned() };
            match key {
                NETWORK => v4.networks = networks(value).ok_or_else(cidr)?,
                IPV6_NETWORK => v6.networks = networks(value).ok_or_else(cidr)?,
                SUBNET => v4.subnet = Some(value.parse::<Ipv4Net>().map_err(|_| cidr())?.trunc()),
                IPV6_SUBNET => v6.subnet = Some(value.parse::<Ipv6Net>().map_err(|_| cidr())?.trunc()),
                MTU => {
                    mtu = Some(
                        value
                            .parse()
                            .map_err(|_| ReadError::Number { line: line_number, value: value.to_owned() })?,
                    );
                }
                _ => ip_masq = Some(value == "true"),
            }
        }
        let mut missing = Vec::new();
        if v4.networks.is_empty() && v6.networks.is_empty() {
            missing.extend([NETWORK, IPV6_NETWORK]);
        }
        if v4.subnet.is_none() && v6.subnet.is_none() {
            missing.extend([SUBNET, IPV6_SUBNET]);
        }
        if mtu.is_none() {
            missing.push(MTU);
        }
        if ip_masq.is_none() {
            missing.push(IPMASQ);
        }
        match (mtu, ip_masq) {
            (Some(mtu), Some(ip_masq)) if missing.is_empty() => {
                Ok(Self { v4: v4.some(), v6: v6.some(), mtu, ip_masq })
            }
            _ => Err(ReadError::Missing(missing)),
        }
    }
}

impl<N> Default for FamilyNets<N> {
    fn default() -> Self {
        Self { networks: Vec::new(), subnet: None }
    }
}

impl<N> FamilyNets<N> {
    fn some(self) -> Option<Self> {
        (!self.networks.is_empty() || self.subnet.is_some()).then_some(self)
    }
}

fn join<N: ToString>(networks: &[N]) -> String {
    networks.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
}

fn networks<N>(value: &str) -> Option<Vec<N>>
where
    N: std::str::FromStr + Truncate + PartialEq,
{
    let mut found = Vec::new();
    for part in value.split(',') {
        let net = part.parse::<N>().ok()?.truncated();
        if !found.contains(&net) {
            found.push(net);
        }
    }
    Some(found)
}

trait Truncate {
    fn truncated(self) -> Self;
}

impl Truncate for Ipv4Net {
    fn truncated(self) -> Self {
        self.trunc()
    }
}

impl Truncate for Ipv6Net {
    fn truncated(self) -> Self {
        self.trunc()
    }
}

/// What a restarted daemon finds of its earlier run. Every part may be missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Previous {
    /// The overlay network.
    pub network: Option<Ipv4Net>,
    /// The node's subnet, masked.
    pub subnet: Option<Ipv4Net>,
    /// The IPv6 overlay network.
    pub ipv6_network: Option<Ipv6Net>,
    /// The node's IPv6 subnet, masked.
    pub ipv6_subnet: Option<Ipv6Net>,
}

impl Previous {
    /// The node's subnets of both families.
    pub fn subnets(&self) -> Vec<IpNet> {
        let v4 = self.subnet.map(IpNet::V4);
        v4.into_iter().chain(self.ipv6_subnet.map(IpNet::V6)).collect()
    }

    /// The overlay networks of both families.
    pub fn networks(&self) -> Vec<IpNet> {
        let v4 = self.network.map(IpNet::V4);
        v4.into_iter().chain(self.ipv6_network.map(IpNet::V6)).collect()
    }

    /// Reads the file; a missing file is an empty answer.
    ///
    /// # Errors
    /// The file exists and cannot be read.
    pub fn read(path: &Path) -> Result<Self, Error> {
        match fs::read(path) {
            Ok(bytes) => Ok(Self::parse(&String::from_utf8_lossy(&bytes))),
            Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(Self::default()),
            Err(source) => Err(Error::new(format!("read {}", path.display()), source)),
        }
    }

    /// The daemon's rules: shell-like lines (comments, quotes, `export`); of a comma list the valid
    /// entries count, and more than one is as good as none; host bits are masked.
    pub fn parse(text: &str) -> Self {
        let mut found = Self::default();
        for line in text.lines() {
            let Some((key, value)) = assignment(line) else { continue };
            match key {
                NETWORK => found.network = only(&value).and_then(v4),
                SUBNET => found.subnet = only(&value).and_then(v4),
                IPV6_NETWORK => found.ipv6_network = only(&value).and_then(v6),
                IPV6_SUBNET => found.ipv6_subnet = only(&value).and_then(v6),
                _ => {}
            }
        }
        found
    }
}

fn v4(net: IpNet) -> Option<Ipv4Net> {
    match net {
        IpNet::V4(net) => Some(net),
        IpNet::V6(_) => None,
    }
}

fn v6(net: IpNet) -> Option<Ipv6Net> {
    match net {
        IpNet::V6(net) => Some(net),
        IpNet::V4(_) => None,
    }
}

/// The one valid network of a comma list.
fn only(value: &str) -> Option<IpNet> {
    let mut valid = value.split(',').filter_map(|part| part.trim().parse::<IpNet>().ok());
    let first = valid.next()?;
    valid.next().is_none().then(|| first.trunc())
}

/// One line of a shell-like file.
fn assignment(line: &str) -> Option<(&str, String)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let (key, value) = line.split_once('=').or_else(|| line.split_once(": "))?;
    let key = key.trim();
    let key = key
        .strip_prefix("export")
        .map_or(key, |rest| if rest.starts_with(char::is_whitespace) { rest.trim_start() } else { key });
    let value = value.trim();
    for quote in ['"', '\''] {
        if let Some(rest) = value.strip_prefix(quote) {
            // Up to the closing quote; a comment may follow.
            return rest.split_once(quote).map(|(inside, _)| (key, inside.to_owned()));
        }
    }
    let end = value
        .char_indices()
        .find(|(at, character)| {
            *character == '#' && (*at == 0 || value[..*at].ends_with(char::is_whitespace))
        })
        .map_or(value.len(), |(at, _)| at);
    Some((key, value[..end].trim_end().to_owned()))
}

/// Replaces `path` by a file with `bytes`, through a temporary file beside it and a rename.
fn write_atomically(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let directory =
        path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(directory)?;
    let mode = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.file_type().is_file() => metadata.permissions().mode() & 0o7777,
        _ => 0o644,
    };
    let base = path.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_string_lossy().into_owned();
    let mut attempt = 0u32;
    let (temporary, mut file) = loop {
        let name = format!(".{base}{}{attempt}", std::process::id());
        let temporary = directory.join(name);
        match fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary) {
            Ok(file) => break (temporary, file),
            // Left by a crash of a process with our number.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 100 => attempt += 1,
            Err(error) => return Err(error),
        }
    };
    let written = file
        .write_all(bytes)
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(mode)))
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUAL: &str = "FLANNEL_NETWORK=10.7.0.0/16\nFLANNEL_SUBNET=10.7.52.1/24\n\
                        FLANNEL_IPV6_NETWORK=fd00:7::/48\nFLANNEL_IPV6_SUBNET=fd00:7:0:58::1/64\n\
                        FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

    fn dual() -> SubnetEnv {
        SubnetEnv {
            v4: Some(FamilyNets {
                networks: vec!["10.7.0.0/16".parse().unwrap()],
                subnet: Some("10.7.52.0/24".parse().unwrap()),
            }),
            v6: Some(FamilyNets {
                networks: vec!["fd00:7::/48".parse().unwrap()],
                subnet: Some("fd00:7:0:58::/64".parse().unwrap()),
            }),
            mtu: 1450,
            ip_masq: true,
        }
    }

    #[test]
    fn writes_flannels_bytes_and_reads_them_back() {
        assert_eq!(dual().format(), DUAL);
        assert_eq!(SubnetEnv::for_plugin(DUAL).unwrap(), dual());
        assert_eq!(
            Previous::parse(DUAL),
            Previous {
                network: "10.7.0.0/16".parse().ok(),
                subnet: "10.7.52.0/24".parse().ok(),
                ipv6_network: "fd00:7::/48".parse().ok(),
                ipv6_subnet: "fd00:7:0:58::/64".parse().ok(),
            }
        );
    }

    #[test]
    fn one_family_alone_writes_only_its_lines() {
        let v4 = SubnetEnv { v6: None, ip_masq: false, ..dual() };
        assert_eq!(
            v4.format(),
            "FLANNEL_NETWORK=10.7.0.0/16\nFLANNEL_SUBNET=10.7.52.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n"
        );
        assert_eq!(SubnetEnv::for_plugin(&v4.format()).unwrap(), v4);
        let v6 = SubnetEnv { v4: None, ..dual() };
        assert_eq!(SubnetEnv::for_plugin(&v6.format()).unwrap(), v6);
    }

    #[test]
    fn plugin_names_every_missing_key() {
        let text = SubnetEnv::for_plugin("").unwrap_err().to_string();
        assert_eq!(
            text,
            "is missing FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, \
             FLANNEL_MTU, FLANNEL_IPMASQ"
        );
        assert!(SubnetEnv::for_plugin("FLANNEL_MTU\n").is_err());
        assert!(SubnetEnv::for_plugin("FLANNEL_SUBNET=10.1.2.3\n").is_err());
        assert!(SubnetEnv::for_plugin("FLANNEL_MTU=-1\n").is_err());
    }

    #[test]
    fn plugin_takes_network_lists_without_repetition() {
        let env = SubnetEnv::for_plugin(
            "# note\nFLANNEL_NETWORK=10.1.0.0/16,10.2.0.0/16,10.1.0.9/16\nFLANNEL_SUBNET=10.1.2.1/24\n\
             FLANNEL_MTU=1400\nFLANNEL_IPMASQ=yes\nOTHER=x\n",
        )
        .unwrap();
        assert_eq!(env.v4.unwrap().networks.len(), 2);
        assert!(!env.ip_masq);
    }

    #[test]
    fn daemon_reads_shell_forms_and_distrusts_lists() {
        let previous = Previous::parse(
            "# FLANNEL_SUBNET=10.9.9.1/24\nexport FLANNEL_SUBNET=\"10.5.34.1/24\" # ours\n\
             FLANNEL_NETWORK='10.5.0.0/16'\nFLANNEL_IPV6_SUBNET=fd00::1/64,fd01::1/64\n\
             FLANNEL_IPV6_NETWORK=bad,fd00::/48\n",
        );
        assert_eq!(previous.subnet, "10.5.34.0/24".parse().ok());
        assert_eq!(previous.network, "10.5.0.0/16".parse().ok());
        assert_eq!(previous.ipv6_subnet, None);
        assert_eq!(previous.ipv6_network, "fd00::/48".parse().ok());
        assert_eq!(
            Previous::parse("FLANNEL_SUBNET=fd00::/64\nexportFLANNEL_NETWORK=10.0.0.0/8"),
            Previous::default()
        );
    }

    #[test]
    fn file_is_replaced_whole_and_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("deep/er/subnet.env");
        dual().write(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), DUAL);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        SubnetEnv { mtu: 1400, ..dual() }.write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(SubnetEnv::read_for_plugin(&path).unwrap().mtu, 1400);
        let names: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "a temporary file stayed");
    }

    #[test]
    fn missing_file_is_an_empty_previous_run() {
        assert_eq!(Previous::read(Path::new("/nonexistent/subnet.env")).unwrap(), Previous::default());
    }
}
