//! Packet headers as bytes: checked views for reading and changing them in place, and `emit` for
//! writing them. No I/O, no clock, no logging, nothing else of the crate.
//!
//! Each protocol file has the same order: field offsets, a view (`Ipv4Packet<T>` and so on) whose
//! constructor makes every check that its accessors rely on, and a `Repr` of plain values with
//! `parse` and `emit`.
//!
//! INVARIANT: once `new_checked` has returned `Ok`, no accessor of the view panics, for any bytes.
//! Byte order ends at the accessor.

pub mod checksum;
pub mod ethernet;
pub mod icmpv4;
pub mod icmpv6;
pub mod ipv4;
pub mod ipv6;
pub mod tcp;
pub mod udp;
pub mod vxlan;

use std::fmt;
use std::str::FromStr;

pub use ethernet::{EthernetFrame, EthernetRepr};
pub use icmpv4::Icmpv4Packet;
pub use icmpv6::Icmpv6Packet;
pub use ipv4::{Ipv4Packet, Ipv4Repr};
pub use ipv6::{Ipv6Packet, Ipv6Repr, UpperLayer};
pub use tcp::TcpSegment;
pub use udp::{UdpDatagram, UdpRepr};
pub use vxlan::{Vni, VxlanPacket};

/// IANA protocol numbers (IPv4 "protocol", IPv6 "next header") that the data plane tells apart.
pub mod protocol {
    /// IPv6 hop-by-hop options, RFC 8200 4.3.
    pub const HOP_BY_HOP: u8 = 0;
    /// ICMP, RFC 792.
    pub const ICMP: u8 = 1;
    /// TCP, RFC 9293.
    pub const TCP: u8 = 6;
    /// UDP, RFC 768.
    pub const UDP: u8 = 17;
    /// IPv6 routing header, RFC 8200 4.4.
    pub const ROUTING: u8 = 43;
    /// IPv6 fragment header, RFC 8200 4.5.
    pub const FRAGMENT: u8 = 44;
    /// Authentication header, RFC 4302.
    pub const AH: u8 = 51;
    /// ICMPv6, RFC 4443.
    pub const ICMPV6: u8 = 58;
    /// No next header, RFC 8200 4.7.
    pub const NO_NEXT: u8 = 59;
    /// IPv6 destination options, RFC 8200 4.6.
    pub const DEST_OPTIONS: u8 = 60;
}

/// Ethertypes of the frames inside VXLAN.
pub mod ethertype {
    /// IPv4.
    pub const IPV4: u16 = 0x0800;
    /// IPv6.
    pub const IPV6: u16 = 0x86dd;
}

/// Why bytes are not a packet of the kind asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Fewer bytes than the fixed header has.
    #[error("shorter than its header")]
    Truncated,
    /// Another version in the first nibble.
    #[error("wrong version")]
    Version,
    /// A header length field below the minimum or beyond the bytes.
    #[error("impossible header length")]
    HeaderLen,
    /// A total or payload length field that does not fit the header or the bytes.
    #[error("impossible length")]
    Length,
    /// A flag, type or reserved field with a value that must not be.
    #[error("impossible field value")]
    Field,
}

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// ff:ff:ff:ff:ff:ff
    pub const BROADCAST: MacAddr = MacAddr([0xff; 6]);

    /// The group bit is set (multicast and broadcast).
    pub fn is_multicast(self) -> bool {
        self.0[0] & 0x01 != 0
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Text that is not six hexadecimal bytes with colons or dashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not an Ethernet address")]
pub struct ParseMacError;

impl FromStr for MacAddr {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let mut bytes = [0u8; 6];
        let mut parts = text.split([':', '-']);
        for byte in &mut bytes {
            let part = parts.next().ok_or(ParseMacError)?;
            if part.len() != 2 || !part.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(ParseMacError);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| ParseMacError)?;
        }
        if parts.next().is_some() { Err(ParseMacError) } else { Ok(MacAddr(bytes)) }
    }
}

/// Big-endian `u16` at `at`; callers have checked the length.
#[inline]
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// Big-endian `u32` at `at`; callers have checked the length.
#[inline]
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// `N` bytes at `at`; callers have checked the length.
#[inline]
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0u8; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_address_text_round_trips_and_rejects_other_text() {
        let mac: MacAddr = "3a:00:FF:0c:1d:9e".parse().unwrap();
        assert_eq!(mac, MacAddr([0x3a, 0, 0xff, 0x0c, 0x1d, 0x9e]));
        assert_eq!(mac.to_string(), "3a:00:ff:0c:1d:9e");
        for bad in ["", "3a:00:ff:0c:1d", "3a:00:ff:0c:1d:9e:00", "3a:0:ff:0c:1d:9e", "+a:00:ff:0c:1d:9e"] {
            assert_eq!(bad.parse::<MacAddr>(), Err(ParseMacError), "{bad}");
        }
    }
}
