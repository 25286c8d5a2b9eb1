//! The Internet checksum: RFC 1071 sums, RFC 1624 updates, pseudo headers.
//!
//! A [`Checksum`] is an unfolded one's-complement sum of big-endian 16-bit words. Sums of pieces may
//! be added when every piece but the last has an even length. [`fold`] brings a sum to 16 bits; what
//! goes on the wire is its complement (for UDP with 0 written as 0xffff, see [`finish_udp`]).

use std::net::{Ipv4Addr, Ipv6Addr};

/// An unfolded sum. Has room for 2^48 words before it could overflow.
pub type Checksum = u64;

/// Sum of `bytes` as big-endian words; an odd last byte counts as the high byte of a word.
#[inline]
pub fn sum(bytes: &[u8]) -> Checksum {
    sum_scalar(bytes)
}

/// [`sum`] in plain code.
#[inline]
pub fn sum_scalar(bytes: &[u8]) -> Checksum {
    // The sum does not depend on byte order but for a swap of the result (RFC 1071 2B), so words are
    // added as the machine reads them, four 16-bit lanes at a time with 32-bit halves kept apart.
    let mut acc: u64 = 0;
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        let word = u64::from_ne_bytes(chunk.try_into().expect("chunks of 8"));
        acc += (word & 0xffff_ffff) + (word >> 32);
    }
    let mut rest = chunks.remainder();
    if rest.len() >= 4 {
        acc += u64::from(u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]));
        rest = &rest[4..];
    }
    if rest.len() >= 2 {
        acc += u64::from(u16::from_ne_bytes([rest[0], rest[1]]));
        rest = &rest[2..];
    }
    if let [last] = rest {
        acc += u64::from(u16::from_ne_bytes([*last, 0]));
    }
    u64::from(u16::from_be(fold(acc)))
}

/// Brings a sum to 16 bits, carries added back in.
#[inline]
pub fn fold(sum: Checksum) -> u16 {
    let sum = (sum >> 32) + (sum & 0xffff_ffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    let sum = (sum >> 16) + (sum & 0xffff);
    sum as u16
}

/// The checksum field after one 16-bit word changed from `old` to `new`: RFC 1624, equation 3.
#[inline]
pub fn update(field: u16, old: u16, new: u16) -> u16 {
    !fold(u64::from(!field) + u64::from(!old) + u64::from(new))
}

/// Sum of the IPv4 pseudo header (RFC 9293 3.1) for `len` bytes of layer 4.
#[inline]
pub fn pseudo_header_v4(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, len: usize) -> Checksum {
    let (src, dst) = (u64::from(u32::from(src)), u64::from(u32::from(dst)));
    (src >> 16) + (src & 0xffff) + (dst >> 16) + (dst & 0xffff) + u64::from(protocol) + len as u64
}

/// Sum of the IPv6 pseudo header (RFC 8200 8.1) for `len` bytes of layer 4.
#[inline]
pub fn pseudo_header_v6(src: Ipv6Addr, dst: Ipv6Addr, protocol: u8, len: usize) -> Checksum {
    sum(&src.octets()) + sum(&dst.octets()) + u64::from(protocol) + (len as u64 >> 16) + (len as u64 & 0xffff)
}

/// The field value for a complete sum of TCP or ICMP.
#[inline]
pub fn finish(sum: Checksum) -> u16 {
    !fold(sum)
}

/// The field value for a complete sum of UDP: 0 means "none" there, so 0xffff stands for it (RFC 768).
#[inline]
pub fn finish_udp(sum: Checksum) -> u16 {
    match !fold(sum) {
        0 => 0xffff,
        field => field,
    }
}
