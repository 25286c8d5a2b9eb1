//! Push and pop of what lies between the UDP header and the inner IP packet, one file per encapsulation.
//!
//! ```text
//!  vxlan   outer IP | UDP | VXLAN 8 | Ethernet 14 | inner IP packet
//!  udp     outer IP | UDP |                         inner IP packet
//! ```
//!
//! `pop` makes every check that needs the datagram alone, in a fixed order, and names the first that
//! fails. Whether the source may send it (source guard) and whether the inner destination is ours is for
//! the inbound path.

pub mod udp;
pub mod vxlan;

use std::net::IpAddr;

use crate::wire::{Ipv4Packet, Ipv6Packet, Malformed};

/// Bytes of the headers around an inner packet that the kernel makes: IPv4 and UDP.
pub const OUTER_V4: usize = 20 + 8;
/// Bytes of the headers around an inner packet that the kernel makes: IPv6 and UDP.
pub const OUTER_V6: usize = 40 + 8;

/// Why a datagram from the underlay is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecapError {
    /// Cut headers, or a frame that carries neither IPv4 nor IPv6.
    #[error("cut or foreign encapsulation")]
    Encap,
    /// Flag I missing, or reserved bits set.
    #[error("bad VXLAN flags")]
    Flags,
    /// Another network's VNI.
    #[error("wrong VNI")]
    Vni,
    /// Not addressed to our VTEP, or sent with our own address.
    #[error("wrong inner Ethernet address")]
    Mac,
    /// No possible IP packet, or of another version than the ethertype says.
    #[error("malformed inner IP packet")]
    Ip,
}

impl From<Malformed> for DecapError {
    fn from(_: Malformed) -> Self {
        DecapError::Ip
    }
}

/// An inner packet whose header has been checked.
#[derive(Debug, Clone, Copy)]
pub enum Inner<'a> {
    /// IPv4.
    V4(Ipv4Packet<&'a [u8]>),
    /// IPv6.
    V6(Ipv6Packet<&'a [u8]>),
}

impl<'a> Inner<'a> {
    /// Checks the header that `bytes` start with. Bytes may follow the packet.
    ///
    /// # Errors
    /// As [`Ipv4Packet::new_checked`] and [`Ipv6Packet::new_checked`]; other versions are
    /// [`Malformed::Version`], no bytes [`Malformed::Truncated`].
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        match bytes.first().map(|first| first >> 4) {
            Some(4) => Ipv4Packet::new_checked(bytes).map(Inner::V4),
            Some(6) => Ipv6Packet::new_checked(bytes).map(Inner::V6),
            Some(_) => Err(Malformed::Version),
            None => Err(Malformed::Truncated),
        }
    }

    /// The packet, without what may follow it.
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Inner::V4(packet) => &packet.into_inner()[..packet.total_len()],
            Inner::V6(packet) => &packet.into_inner()[..packet.total_len()],
        }
    }

    /// Bytes of header and payload.
    #[inline]
    pub fn total_len(&self) -> usize {
        match self {
            Inner::V4(packet) => packet.total_len(),
            Inner::V6(packet) => packet.total_len(),
        }
    }

    /// Source address.
    #[inline]
    pub fn src(&self) -> IpAddr {
        match self {
            Inner::V4(packet) => packet.src().into(),
            Inner::V6(packet) => packet.src().into(),
        }
    }

    /// Destination address.
    #[inline]
    pub fn dst(&self) -> IpAddr {
        match self {
            Inner::V4(packet) => packet.dst().into(),
            Inner::V6(packet) => packet.dst().into(),
        }
    }

    /// TTL or hop limit.
    #[inline]
    pub fn ttl(&self) -> u8 {
        match self {
            Inner::V4(packet) => packet.ttl(),
            Inner::V6(packet) => packet.hop_limit(),
        }
    }

    /// DSCP and ECN.
    #[inline]
    pub fn tos(&self) -> u8 {
        match self {
            Inner::V4(packet) => packet.tos(),
            Inner::V6(packet) => packet.traffic_class(),
        }
    }

    /// IPv6.
    #[inline]
    pub fn is_v6(&self) -> bool {
        matches!(self, Inner::V6(_))
    }
}
