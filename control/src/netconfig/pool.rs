//! Which subnets of the network a node may lease: flannel's size and range rules for both families.
//!
//! Invariant: in a pool `first` and `last` are multiples of the subnet size, lie inside the network
//! and `first <= last`. Arithmetic is done on `u128` without overflow for every prefix length.

use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};

use super::NetworkConfigError;

/// The IPv4 subnets that may be leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4Pool {
    subnet_len: u8,
    first: Ipv4Addr,
    last: Ipv4Addr,
}

/// The IPv6 subnets that may be leased.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Pool {
    subnet_len: u8,
    first: Ipv6Addr,
    last: Ipv6Addr,
}

/// What differs between the two families.
struct Family {
    bits: u32,
    /// Longest subnet: still room for two hosts.
    max_len: u64,
    /// The usual subnet length.
    usual_len: u32,
    /// Prepended to the keys in messages.
    key_prefix: &'static str,
    show: fn(u128) -> String,
}

const IPV4: Family = Family {
    bits: 32,
    max_len: 30,
    usual_len: 24,
    key_prefix: "",
    show: |bits| Ipv4Addr::from_bits(bits as u32).to_string(),
};

const IPV6: Family = Family {
    bits: 128,
    max_len: 126,
    usual_len: 64,
    key_prefix: "IPv6",
    show: |bits| Ipv6Addr::from_bits(bits).to_string(),
};

impl Family {
    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.key_prefix)
    }

    /// The network's own bits for a prefix length: `low_mask(0)` is everything.
    fn low_mask(&self, prefix: u32) -> u128 {
        match self.bits - prefix {
            128 => u128::MAX,
            host_bits => (1 << host_bits) - 1,
        }
    }

    /// Subnet length, first and last subnet, by flannel's rules and in its order of checks.
    fn derive(
        &self,
        network: u128,
        prefix: u32,
        subnet_len: u64,
        min: Option<u128>,
        max: Option<u128>,
    ) -> Result<(u8, u128, u128), NetworkConfigError> {
        let error = |name: &str, reason: String| NetworkConfigError::value(self.key(name), reason);
        let len = if subnet_len > self.max_len {
            let reason =
                format!("{subnet_len} leaves no room for hosts; the longest subnet is /{}", self.max_len);
            return Err(error("SubnetLen", reason));
        } else if subnet_len > 0 {
            // At most 126, so nothing is cut off.
            let len = subnet_len as u32;
            if len < prefix + 2 {
                let reason =
                    format!("{len} is too short: a /{prefix} network must hold at least four subnets");
                return Err(error("SubnetLen", reason));
            }
            len
        } else if u64::from(prefix) > self.max_len - 2 {
            let reason = format!(
                "a /{prefix} network is too small; the smallest useful one is a /{}",
                self.max_len - 2
            );
            return Err(error("Network", reason));
        } else {
            self.usual_len.max(prefix + 2)
        };

        let end = network | self.low_mask(prefix);
        // `len` is at least 2, so this is at most 2^126, and the network holds four of it.
        let size = self.low_mask(len) + 1;
        let place = |name: &str, given: Option<u128>, default: u128| {
            let addr = given.unwrap_or(default);
            if !(network..=end).contains(&addr) {
                let (addr, network) = ((self.show)(addr), (self.show)(network));
                let reason = format!("{addr} is outside {} {network}/{prefix}", self.key("Network"));
                return Err(error(name, reason));
            }
            Ok(addr)
        };
        // flannel leaves the first subnet of the network out unless it is asked for.
        let first = place("SubnetMin", min, network + size)?;
        let last = place("SubnetMax", max, end - (size - 1))?;
        for (name, addr) in [("SubnetMin", first), ("SubnetMax", last)] {
            if addr % size != 0 {
                let addr = (self.show)(addr);
                let reason = format!("{addr} is not the first address of a /{len} subnet");
                return Err(error(name, reason));
            }
        }
        if first > last {
            let (first, last) = ((self.show)(first), (self.show)(last));
            let reason =
                format!("{first} is above {} {last}, which leaves no subnet to lease", self.key("SubnetMax"));
            return Err(error("SubnetMin", reason));
        }
        Ok((len as u8, first, last))
    }
}

impl Ipv4Pool {
    /// Applies flannel's rules to `SubnetLen` (0 = unset), `SubnetMin` and `SubnetMax`.
    ///
    /// # Errors
    ///
    /// Names the key that breaks a rule.
    pub fn derive(
        network: Ipv4Net,
        subnet_len: u64,
        min: Option<Ipv4Addr>,
        max: Option<Ipv4Addr>,
    ) -> Result<Self, NetworkConfigError> {
        let bits = |addr: Ipv4Addr| u128::from(addr.to_bits());
        let (subnet_len, first, last) = IPV4.derive(
            bits(network.network()),
            network.prefix_len().into(),
            subnet_len,
            min.map(bits),
            max.map(bits),
        )?;
        Ok(Ipv4Pool {
            subnet_len,
            first: Ipv4Addr::from_bits(first as u32),
            last: Ipv4Addr::from_bits(last as u32),
        })
    }

    /// Prefix length of a leased subnet, 2 to 30.
    pub fn subnet_len(&self) -> u8 {
        self.subnet_len
    }

    /// Network address of the first subnet that may be leased.
    pub fn first(&self) -> Ipv4Addr {
        self.first
    }

    /// Network address of the last subnet that may be leased.
    pub fn last(&self) -> Ipv4Addr {
        self.last
    }

    /// Whether `subnet` is one this pool would lease: the right size, in range, no host bits.
    pub fn contains(&self, subnet: Ipv4Net) -> bool {
        subnet.prefix_len() == self.subnet_len
            && subnet.addr() == subnet.network()
            && (self.first..=self.last).contains(&subnet.addr())
    }
}

impl Ipv6Pool {
    /// Applies flannel's rules to `IPv6SubnetLen` (0 = unset), `IPv6SubnetMin` and `IPv6SubnetMax`.
    ///
    /// # Errors
    ///
    /// Names the key that breaks a rule.
    pub fn derive(
        network: Ipv6Net,
        subnet_len: u64,
        min: Option<Ipv6Addr>,
        max: Option<Ipv6Addr>,
    ) -> Result<Self, NetworkConfigError> {
        let (subnet_len, first, last) = IPV6.derive(
            network.network().to_bits(),
            network.prefix_len().into(),
            subnet_len,
            min.map(Ipv6Addr::to_bits),
            max.map(Ipv6Addr::to_bits),
        )?;
        Ok(Ipv6Pool { subnet_len, first: Ipv6Addr::from_bits(first), last: Ipv6Addr::from_bits(last) })
    }

    /// Prefix length of a leased subnet, 2 to 126.
    pub fn subnet_len(&self) -> u8 {
        self.subnet_len
    }

    /// Network address of the first subnet that may be leased.
    pub fn first(&self) -> Ipv6Addr {
        self.first
    }

    /// Network address of the last subnet that may be leased.
    pub fn last(&self) -> Ipv6Addr {
        self.last
    }

    /// Whether `subnet` is one this pool would lease: the right size, in range, no host bits.
    pub fn contains(&self, subnet: Ipv6Net) -> bool {
        subnet.prefix_len() == self.subnet_len
            && subnet.addr() == subnet.network()
            && (self.first..=self.last).contains(&subnet.addr())
    }
}
