//! `subnet.env`, as flannel's plugin reads it.

use std::path::Path;

use ipnet::IpNet;

use crate::types::error::{Error, Result, go_text};
use crate::types::result::parse_cidr;

/// What the daemon tells the plugin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SubnetEnv {
    /// The overlay networks, IPv4 first.
    pub networks: Vec<IpNet>,
    /// This node's subnets, IPv4 first, as written (the daemon writes the first host address).
    pub subnets: Vec<IpNet>,
    /// MTU for pods.
    pub mtu: u32,
    /// Whether the daemon masquerades.
    pub ip_masq: bool,
}

impl SubnetEnv {
    /// Nothing known: enough to take an attachment down.
    pub(super) fn unknown() -> Self {
        Self { networks: Vec::new(), subnets: Vec::new(), mtu: 0, ip_masq: false }
    }

    /// Reads the file.
    pub(super) fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|err| {
            wrap(&format!("open {}: {}. Is the daemon running?", path.display(), go_text(&err)), path)
        })?;
        Self::parse(&text, path)
    }

    /// Parses the text; `path` is for messages.
    pub(super) fn parse(text: &str, path: &Path) -> Result<Self> {
        let (mut net4, mut net6, mut sub4, mut sub6) = (Vec::new(), Vec::new(), None, None);
        let (mut mtu, mut ip_masq) = (None, None);
        for line in text.lines() {
            let (key, value) = line.split_once('=').unwrap_or((line, ""));
            let cidr = |text: &str| parse_cidr(text).map_err(|err| wrap(&err.msg, path));
            let cidrs = |into: &mut Vec<IpNet>| -> Result<()> {
                for part in value.split(',') {
                    let net = cidr(part)?;
                    if !into.contains(&net) {
                        into.push(net);
                    }
                }
                Ok(())
            };
            match key {
                "FLANNEL_NETWORK" => cidrs(&mut net4)?,
                "FLANNEL_IPV6_NETWORK" => cidrs(&mut net6)?,
                "FLANNEL_SUBNET" => sub4 = Some(cidr(value)?),
                "FLANNEL_IPV6_SUBNET" => sub6 = Some(cidr(value)?),
                "FLANNEL_MTU" => {
                    mtu = Some(value.parse().map_err(|_| {
                        wrap(&format!("strconv.ParseUint: parsing \"{value}\": invalid syntax"), path)
                    })?);
                }
                "FLANNEL_IPMASQ" => ip_masq = Some(value == "true"),
                _ => {}
            }
        }
        let mut missing = Vec::new();
        if net4.is_empty() && net6.is_empty() {
            missing.extend(["FLANNEL_NETWORK", "FLANNEL_IPV6_NETWORK"]);
        }
        if sub4.is_none() && sub6.is_none() {
            missing.extend(["FLANNEL_SUBNET", "FLANNEL_IPV6_SUBNET"]);
        }
        if mtu.is_none() {
            missing.push("FLANNEL_MTU");
        }
        if ip_masq.is_none() {
            missing.push("FLANNEL_IPMASQ");
        }
        let (Some(mtu), Some(ip_masq), true) = (mtu, ip_masq, missing.is_empty()) else {
            return Err(wrap(&format!("{} is missing {}", path.display(), missing.join(", ")), path));
        };
        net4.extend(net6);
        Ok(Self { networks: net4, subnets: sub4.into_iter().chain(sub6).collect(), mtu, ip_masq })
    }
}

fn wrap(text: &str, _path: &Path) -> Error {
    Error::internal(format!(
        "failed to load flannel 'subnet.env' file: {text}. Check the flannel pod log for this node."
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<SubnetEnv> {
        SubnetEnv::parse(text, Path::new("/run/flannel/subnet.env"))
    }

    #[test]
    fn reads_both_families_and_lists() {
        let env = parse(concat!(
            "FLANNEL_NETWORK=10.1.0.0/16,10.2.0.0/16,10.1.0.0/16\n",
            "FLANNEL_SUBNET=10.1.17.1/24\nFLANNEL_IPV6_NETWORK=fc00::/48\nFLANNEL_IPV6_SUBNET=fc00:0:0:1::1/64\n",
            "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\nOTHER\n"
        ))
        .unwrap();
        let nets: Vec<String> = env.networks.iter().map(ToString::to_string).collect();
        assert_eq!(nets, ["10.1.0.0/16", "10.2.0.0/16", "fc00::/48"]);
        assert_eq!(env.subnets.len(), 2);
        assert!(!env.ip_masq);
    }

    #[test]
    fn names_everything_that_is_missing() {
        let err = parse("").unwrap_err();
        assert_eq!(
            err.msg,
            concat!(
                "failed to load flannel 'subnet.env' file: /run/flannel/subnet.env is missing FLANNEL_NETWORK, ",
                "FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET, FLANNEL_MTU, FLANNEL_IPMASQ. ",
                "Check the flannel pod log for this node."
            )
        );
        assert!(
            parse("FLANNEL_MTU").unwrap_err().msg.contains("invalid syntax"),
            "a key without = is an error"
        );
        assert!(parse("FLANNEL_SUBNET=x").unwrap_err().msg.contains("invalid CIDR address: x"));
    }

    #[test]
    fn a_missing_file_says_that_the_daemon_may_not_run() {
        let err = SubnetEnv::load(Path::new("/nonexistent/subnet.env")).unwrap_err();
        assert!(err.msg.contains("open /nonexistent/subnet.env: no such file or directory"), "{}", err.msg);
        assert!(err.msg.contains("Is the daemon running?"));
    }
}
