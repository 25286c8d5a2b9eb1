//! The network configuration: flannel's JSON object, parsed into types that cannot hold a bad value.
//!
//! The text comes from the etcd key `PREFIX/config`, from `DIR/config` of a lease directory, or from
//! `--net-config-path` in Kubernetes mode. It is decoded as flannel's Go code does (see
//! [`gojson`](crate::gojson)) and then validated: with etcd or a directory this node picks its own
//! subnet, so subnet length and range are derived and checked ([`Source::Registry`]); in Kubernetes
//! the control plane has already picked one, and those keys have no meaning ([`Source::Kubernetes`]).
//!
//! Every error names the key it is about. What was accepted but corrected (host bits in `Network`) is
//! kept in [`NetworkConfig::notes`] for the log.

mod backend;
mod pool;

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde_json::value::RawValue;
use thiserror::Error;

pub use self::backend::{
    BACKENDS, Backend, BackendKind, Dataplane, Extension, Offload, SourceGuard, Udp, UnknownValue, Vxlan,
};
pub use self::pool::{Ipv4Pool, Ipv6Pool};
use crate::gojson::{Object, keys_fold_equal};

/// Where this node's subnet comes from, which decides what has to be validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// etcd or a lease directory: the node picks a free subnet of the configured size.
    Registry,
    /// Kubernetes: the node's `podCIDR`s; size and range keys are ignored.
    Kubernetes,
}

/// A network configuration that passed every check.
#[derive(Debug, Clone, PartialEq)]
pub struct NetworkConfig {
    /// The IPv4 overlay network, when `EnableIPv4` (the default).
    pub ipv4: Option<Ipv4Net>,
    /// The IPv6 overlay network, when `EnableIPv6`.
    pub ipv6: Option<Ipv6Net>,
    /// Which IPv4 subnets nodes may lease; `None` without IPv4 or in Kubernetes.
    pub ipv4_pool: Option<Ipv4Pool>,
    /// Which IPv6 subnets nodes may lease; `None` without IPv6 or in Kubernetes.
    pub ipv6_pool: Option<Ipv6Pool>,
    /// `EnableNFTables`: traffic rules go into nftables instead of iptables.
    pub nftables: bool,
    /// How nodes reach each other.
    pub backend: Backend,
    /// What was accepted with a correction, one sentence each, for the log.
    pub notes: Vec<String>,
}

/// Why a text is not a usable network configuration.
#[derive(Debug, Error)]
pub enum NetworkConfigError {
    /// There is no text at all.
    #[error("the network configuration is empty")]
    Empty,
    /// Not a JSON object, or something after it.
    #[error("not one JSON object: {0}")]
    Json(#[from] serde_json::Error),
    /// A key has a value that is not possible.
    #[error("{key}: {reason}")]
    Value {
        /// The key, as documented.
        key: String,
        /// What is wrong with its value.
        reason: String,
    },
    /// Both families are off.
    #[error("EnableIPv4 and EnableIPv6 are both false: nothing to carry")]
    NoFamily,
}

impl NetworkConfigError {
    fn value(key: impl Into<String>, reason: impl Into<String>) -> Self {
        NetworkConfigError::Value { key: key.into(), reason: reason.into() }
    }

    /// The value of `key` is not what it takes; shows the text found, shortened.
    fn of_type(key: impl Into<String>, found: &RawValue, wanted: &str) -> Self {
        let mut shown: String = found.get().chars().take(60).collect();
        if shown.len() < found.get().len() {
            shown.push_str("...");
        }
        Self::value(key, format!("{shown} where {wanted} is wanted"))
    }
}

/// The object's members with Go's defaults, before any of them is related to another.
struct Raw<'a> {
    network: Option<Ipv4Net>,
    ipv6_network: Option<Ipv6Net>,
    enable_ipv4: bool,
    enable_ipv6: bool,
    nftables: bool,
    subnet_len: u64,
    subnet_min: Option<Ipv4Addr>,
    subnet_max: Option<Ipv4Addr>,
    ipv6_subnet_len: u64,
    ipv6_subnet_min: Option<Ipv6Addr>,
    ipv6_subnet_max: Option<Ipv6Addr>,
    backend: Option<&'a RawValue>,
    notes: Vec<String>,
}

impl NetworkConfig {
    /// Parses and validates the text of a configuration.
    ///
    /// # Errors
    ///
    /// The first fault found, in the order of the document for types and then in flannel's order of
    /// checks: IPv4, IPv6, backend.
    pub fn parse(text: &[u8], source: Source) -> Result<NetworkConfig, NetworkConfigError> {
        let text = String::from_utf8_lossy(text);
        if text.trim().is_empty() {
            return Err(NetworkConfigError::Empty);
        }
        let document = Object::parse(&text)?;
        let raw = Raw::decode(&document)?;
        if !raw.enable_ipv4 && !raw.enable_ipv6 {
            return Err(NetworkConfigError::NoFamily);
        }
        let ipv4 =
            raw.enable_ipv4.then(|| raw.network.ok_or_else(|| unset("Network", "EnableIPv4"))).transpose()?;
        let ipv4_pool = match (ipv4, source) {
            (Some(network), Source::Registry) => {
                Some(Ipv4Pool::derive(network, raw.subnet_len, raw.subnet_min, raw.subnet_max)?)
            }
            _ => None,
        };
        let ipv6 = raw
            .enable_ipv6
            .then(|| raw.ipv6_network.ok_or_else(|| unset("IPv6Network", "EnableIPv6")))
            .transpose()?;
        let ipv6_pool = match (ipv6, source) {
            (Some(network), Source::Registry) => Some(Ipv6Pool::derive(
                network,
                raw.ipv6_subnet_len,
                raw.ipv6_subnet_min,
                raw.ipv6_subnet_max,
            )?),
            _ => None,
        };
        Ok(NetworkConfig {
            ipv4,
            ipv6,
            ipv4_pool,
            ipv6_pool,
            nftables: raw.nftables,
            backend: Backend::decode(raw.backend)?,
            notes: raw.notes,
        })
    }
}

impl<'a> Raw<'a> {
    fn decode(document: &'a Object) -> Result<Self, NetworkConfigError> {
        let mut raw = Raw {
            network: None,
            ipv6_network: None,
            enable_ipv4: true,
            enable_ipv6: false,
            nftables: false,
            subnet_len: 0,
            subnet_min: None,
            subnet_max: None,
            ipv6_subnet_len: 0,
            ipv6_subnet_min: None,
            ipv6_subnet_max: None,
            backend: None,
            notes: Vec::new(),
        };
        for (key, value) in document.members() {
            let is = |name| keys_fold_equal(key, name);
            if is("Network") {
                raw.network = network("Network", value, &mut raw.notes)?;
            } else if is("IPv6Network") {
                raw.ipv6_network = network("IPv6Network", value, &mut raw.notes)?;
            } else if is("EnableIPv4") {
                boolean("EnableIPv4", value, &mut raw.enable_ipv4)?;
            } else if is("EnableIPv6") {
                boolean("EnableIPv6", value, &mut raw.enable_ipv6)?;
            } else if is("EnableNFTables") {
                boolean("EnableNFTables", value, &mut raw.nftables)?;
            } else if is("SubnetLen") {
                uint("SubnetLen", value, &mut raw.subnet_len)?;
            } else if is("IPv6SubnetLen") {
                uint("IPv6SubnetLen", value, &mut raw.ipv6_subnet_len)?;
            } else if is("SubnetMin") {
                raw.subnet_min = ipv4("SubnetMin", value)?;
            } else if is("SubnetMax") {
                raw.subnet_max = ipv4("SubnetMax", value)?;
            } else if is("IPv6SubnetMin") {
                raw.ipv6_subnet_min = ipv6("IPv6SubnetMin", value)?;
            } else if is("IPv6SubnetMax") {
                raw.ipv6_subnet_max = ipv6("IPv6SubnetMax", value)?;
            } else if is("Backend") {
                raw.backend = Some(value);
            }
        }
        Ok(raw)
    }
}

fn unset(key: &str, enabled_by: &str) -> NetworkConfigError {
    NetworkConfigError::value(key, format!("missing (or all zero), although {enabled_by} is on"))
}

/// A CIDR, masked; all zero means unset. `null` is an error, as in flannel.
fn network<N: Network>(
    key: &str,
    value: &RawValue,
    notes: &mut Vec<String>,
) -> Result<Option<N>, NetworkConfigError> {
    let text = string(value);
    let net = text
        .as_deref()
        .and_then(parse_cidr::<N>)
        .ok_or_else(|| NetworkConfigError::of_type(key, value, N::WANTED))?;
    let masked = net.masked();
    if masked != net {
        notes.push(format!("{key} {net} has bits set behind its prefix length; using {masked}"));
    }
    Ok((!masked.is_unset()).then_some(masked))
}

/// Go's `net.ParseCIDR`: no leading zeros in IPv4, no zones, digits only after the slash.
fn parse_cidr<N: Network>(text: &str) -> Option<N> {
    let (addr, len) = text.split_once('/')?;
    if len.is_empty() || !len.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    N::new(addr, len.parse().ok()?)
}

trait Network: Sized + PartialEq + std::fmt::Display {
    const WANTED: &'static str;
    fn new(addr: &str, len: u8) -> Option<Self>;
    fn masked(&self) -> Self;
    fn is_unset(&self) -> bool;
}

impl Network for Ipv4Net {
    const WANTED: &'static str = "an IPv4 network such as \"10.5.0.0/16\"";

    fn new(addr: &str, len: u8) -> Option<Self> {
        Ipv4Net::new(addr.parse().ok()?, len).ok()
    }

    fn masked(&self) -> Self {
        self.trunc()
    }

    fn is_unset(&self) -> bool {
        self.prefix_len() == 0
    }
}

impl Network for Ipv6Net {
    const WANTED: &'static str = "an IPv6 network such as \"fd00:5::/48\"";

    fn new(addr: &str, len: u8) -> Option<Self> {
        Ipv6Net::new(addr.parse().ok()?, len).ok()
    }

    fn masked(&self) -> Self {
        self.trunc()
    }

    fn is_unset(&self) -> bool {
        self.prefix_len() == 0
    }
}

/// An IPv4 address; `0.0.0.0` means unset. `null` is an error, as in flannel.
fn ipv4(key: &str, value: &RawValue) -> Result<Option<Ipv4Addr>, NetworkConfigError> {
    let addr: Ipv4Addr = string(value)
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| NetworkConfigError::of_type(key, value, "an IPv4 address"))?;
    Ok((!addr.is_unspecified()).then_some(addr))
}

/// An IPv6 address; `null` and `::` mean unset, as in flannel.
fn ipv6(key: &str, value: &RawValue) -> Result<Option<Ipv6Addr>, NetworkConfigError> {
    if value.get() == "null" {
        return Ok(None);
    }
    let addr: Ipv6Addr = string(value)
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| NetworkConfigError::of_type(key, value, "an IPv6 address"))?;
    Ok((!addr.is_unspecified()).then_some(addr))
}

fn string(value: &RawValue) -> Option<String> {
    serde_json::from_str(value.get()).ok()
}

/// A boolean; `null` leaves what was there.
fn boolean(key: &str, value: &RawValue, field: &mut bool) -> Result<(), NetworkConfigError> {
    let given: Option<bool> = serde_json::from_str(value.get())
        .map_err(|_| NetworkConfigError::of_type(key, value, "true or false"))?;
    *field = given.unwrap_or(*field);
    Ok(())
}

/// A whole number, without sign, fraction, exponent or quotes; `null` leaves what was there.
fn uint(key: &str, value: &RawValue, field: &mut u64) -> Result<(), NetworkConfigError> {
    let given: Option<u64> = serde_json::from_str(value.get())
        .map_err(|_| NetworkConfigError::of_type(key, value, "a whole number"))?;
    *field = given.unwrap_or(*field);
    Ok(())
}

#[cfg(test)]
mod tests;
