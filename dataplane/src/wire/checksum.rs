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
    crate::sys::simd::sum(bytes)
}

/// [`sum`] in plain code, which `sys::simd` compiles again for wider registers.
#[inline(always)]
pub fn sum_scalar(bytes: &[u8]) -> Checksum {
    // The sum does not depend on byte order but for a swap of the result (RFC 1071 2B), so words are
    // added as the machine reads them: 32-bit halves into 64 bits, where no carry gets lost.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 1071 by the letter.
    fn by_definition(bytes: &[u8]) -> u16 {
        let mut sum = 0u32;
        for pair in bytes.chunks(2) {
            sum += u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum as u16
    }

    #[test]
    fn the_example_of_rfc_1071_comes_out() {
        assert_eq!(fold(sum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7])), 0xddf2);
    }

    #[test]
    fn every_length_and_alignment_agrees_with_the_definition() {
        let bytes: Vec<u8> = (0..2100u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
        for start in 0..9 {
            for len in (0..300).chain(1990..2090) {
                let piece = &bytes[start..start + len];
                assert_eq!(fold(sum(piece)), by_definition(piece), "{len} bytes from {start}");
                assert_eq!(fold(sum_scalar(piece)), by_definition(piece), "{len} bytes from {start}");
            }
        }
    }

    #[test]
    fn the_largest_sum_loses_no_carry() {
        let bytes = vec![0xff; 65_536];
        assert_eq!(fold(sum(&bytes)), 0xffff);
        assert_eq!(fold(sum_scalar(&bytes[1..])), by_definition(&bytes[1..]));
        assert_eq!(fold(u64::MAX), 0xffff);
    }

    #[test]
    fn pseudo_headers_are_those_of_the_bytes() {
        let (src, dst) = (Ipv4Addr::new(10, 50, 1, 5), Ipv4Addr::new(255, 254, 253, 252));
        let bytes = [10, 50, 1, 5, 255, 254, 253, 252, 0, 17, 0x12, 0x34];
        assert_eq!(fold(pseudo_header_v4(src, dst, 17, 0x1234)), by_definition(&bytes));
        let (src, dst) = (Ipv6Addr::from(0xfd00_0050 << 96 | 5), Ipv6Addr::from(u128::MAX - 77));
        let mut bytes = [src.octets(), dst.octets()].concat();
        bytes.extend([0, 1, 0x12, 0x34, 0, 0, 0, 6]);
        assert_eq!(fold(pseudo_header_v6(src, dst, 6, 0x1_1234)), by_definition(&bytes));
    }

    #[test]
    fn a_udp_sum_of_zero_is_written_as_all_ones() {
        assert_eq!(finish_udp(0xffff), 0xffff);
        assert_eq!(finish(0xffff), 0);
        assert_eq!(finish_udp(0x1234), !0x1234);
    }
}
