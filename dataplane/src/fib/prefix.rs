//! Address prefixes: the keys of the table.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

/// An IPv4 or IPv6 prefix.
///
/// INVARIANT: the length fits the family and no host bit is set, so equal prefixes compare equal.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    addr: IpAddr,
    len: u8,
}

/// Why something is not a [`Prefix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    /// Longer than 32 bits (IPv4) or 128 bits (IPv6).
    #[error("prefix length {0} is too long for the address family")]
    Len(u8),
    /// Text that is not `ADDRESS/LENGTH`.
    #[error("not a prefix of the form ADDRESS/LENGTH")]
    Syntax,
}

impl Prefix {
    /// A prefix from any address in it; host bits are cleared.
    ///
    /// # Errors
    /// [`PrefixError::Len`] when the length does not fit the family.
    pub fn new(addr: IpAddr, len: u8) -> Result<Prefix, PrefixError> {
        match addr {
            IpAddr::V4(v4) => Self::v4(v4, len),
            IpAddr::V6(v6) => Self::v6(v6, len),
        }
    }

    /// [`Prefix::new`] for IPv4.
    ///
    /// # Errors
    /// [`PrefixError::Len`] above 32.
    pub fn v4(addr: Ipv4Addr, len: u8) -> Result<Prefix, PrefixError> {
        let mask = match len {
            0 => 0,
            1..=32 => u32::MAX << (32 - len),
            _ => return Err(PrefixError::Len(len)),
        };
        Ok(Prefix { addr: Ipv4Addr::from(u32::from(addr) & mask).into(), len })
    }

    /// [`Prefix::new`] for IPv6.
    ///
    /// # Errors
    /// [`PrefixError::Len`] above 128.
    pub fn v6(addr: Ipv6Addr, len: u8) -> Result<Prefix, PrefixError> {
        let mask = match len {
            0 => 0,
            1..=128 => u128::MAX << (128 - len),
            _ => return Err(PrefixError::Len(len)),
        };
        Ok(Prefix { addr: Ipv6Addr::from(u128::from(addr) & mask).into(), len })
    }

    /// The first address.
    pub fn addr(self) -> IpAddr {
        self.addr
    }

    /// Bits that are fixed.
    pub fn prefix_len(self) -> u8 {
        self.len
    }

    /// Whether the address lies in the prefix; never across families.
    pub fn contains(self, addr: IpAddr) -> bool {
        Prefix::new(addr, self.len).is_ok_and(|p| p == self)
    }

    /// Whether every address of `other` lies in this prefix; never across families.
    pub fn contains_prefix(self, other: Prefix) -> bool {
        self.len <= other.len && self.contains(other.addr)
    }

    /// Whether the two have an address in common.
    pub fn overlaps(self, other: Prefix) -> bool {
        self.contains_prefix(other) || other.contains_prefix(self)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.addr, self.len)
    }
}

impl fmt::Debug for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Prefix {
    type Err = PrefixError;

    /// Accepts host bits and clears them.
    fn from_str(text: &str) -> Result<Prefix, PrefixError> {
        let (addr, len) = text.split_once('/').ok_or(PrefixError::Syntax)?;
        if !len.bytes().all(|c| c.is_ascii_digit()) {
            return Err(PrefixError::Syntax);
        }
        let addr: IpAddr = addr.parse().map_err(|_| PrefixError::Syntax)?;
        Prefix::new(addr, len.parse().map_err(|_| PrefixError::Syntax)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefix(text: &str) -> Prefix {
        text.parse().unwrap()
    }

    #[test]
    fn host_bits_are_cleared() {
        assert_eq!(prefix("10.5.34.77/24"), prefix("10.5.34.0/24"));
        assert_eq!(prefix("10.5.34.77/0").to_string(), "0.0.0.0/0");
        assert_eq!(prefix("fd00:7:0:58::1/64").to_string(), "fd00:7:0:58::/64");
        assert_eq!(prefix("ffff::1/0").to_string(), "::/0");
        assert_eq!(prefix("fd00::1/128").to_string(), "fd00::1/128");
    }

    #[test]
    fn bad_text_and_lengths_are_refused() {
        assert_eq!("10.0.0.0/33".parse::<Prefix>(), Err(PrefixError::Len(33)));
        assert_eq!("::/129".parse::<Prefix>(), Err(PrefixError::Len(129)));
        for bad in
            ["", "10.0.0.0", "10.0.0/8", "10.0.0.0/", "10.0.0.0/+8", "10.0.0.0/ 8", "10.0.0.0/256", "a/8"]
        {
            assert_eq!(bad.parse::<Prefix>(), Err(PrefixError::Syntax), "{bad}");
        }
    }

    #[test]
    fn containment_never_crosses_families() {
        assert!(prefix("10.0.0.0/8").contains("10.255.0.1".parse().unwrap()));
        assert!(!prefix("0.0.0.0/0").contains("::".parse().unwrap()));
        assert!(!prefix("::/0").contains("10.0.0.1".parse().unwrap()));
        assert!(prefix("10.0.0.0/8").contains_prefix(prefix("10.1.0.0/16")));
        assert!(!prefix("10.1.0.0/16").contains_prefix(prefix("10.0.0.0/8")));
        assert!(prefix("10.1.0.0/16").overlaps(prefix("10.0.0.0/8")));
        assert!(!prefix("10.1.0.0/16").overlaps(prefix("10.2.0.0/16")));
    }
}
