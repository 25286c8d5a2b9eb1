//! Cutting: a super-packet of TCP or UDP becomes packets that fit the tunnel.
//!
//! Payload is not copied: [`Cutter::cut`] writes the headers of one segment and says which bytes of the
//! super-packet follow them. Sums over the headers are made once; each segment adds its lengths, numbers
//! and the sum of its payload. Follows what the kernel's software segmentation does
//! (`net/ipv4/tcp_offload.c`, `net/ipv4/udp_offload.c`): identification and sequence count up, CWR stays on
//! the first segment only, FIN and PSH on the last.

use std::ops::Range;

use super::vnet_hdr::{VnetHdr, gso};
use crate::encap::Inner;
use crate::wire::checksum::{self, Checksum};
use crate::wire::{TcpSegment, ipv4, ipv6, protocol, tcp, udp};

/// Longest headers of a super-packet: IPv4 with options, or IPv6 with some extension headers, and TCP.
pub(crate) const MAX_HEADERS: usize = 160;

/// The virtio-net header contradicts the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BadGso;

/// What is the same for all segments of a super-packet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cutter {
    is_v6: bool,
    is_tcp: bool,
    l4: usize,
    headers_len: usize,
    payload_len: usize,
    gso_size: usize,
    /// IPv4 header with length, identification and checksum 0.
    ip_sum: Checksum,
    /// Pseudo header without length, and layer-4 header with sequence, flags, length and checksum 0.
    l4_sum: Checksum,
    ident: u16,
    seq: u32,
    /// TCP data offset and flags.
    offset_flags: u16,
    /// A UDP super-packet without checksum stays without.
    no_checksum: bool,
}

impl Cutter {
    /// Looks at the headers of a packet whose virtio-net header names a GSO type.
    ///
    /// # Errors
    /// [`BadGso`] for unknown types, types that are not the packet's protocol, fragments, cut or too
    /// long headers, and a segment size of 0.
    pub(crate) fn new(packet: &Inner<'_>, header: &VnetHdr) -> Result<Cutter, BadGso> {
        let bytes = packet.bytes();
        let (l4, proto) = match packet {
            Inner::V4(v4) if !v4.is_fragment() => (v4.header_len(), v4.protocol()),
            Inner::V6(v6) => match v6.upper_layer() {
                Ok(upper) if !upper.is_fragment() => (upper.offset, upper.protocol),
                _ => return Err(BadGso),
            },
            Inner::V4(_) => return Err(BadGso),
        };
        let is_tcp = match (header.gso_type & !gso::ECN, packet, proto) {
            (gso::TCPV4, Inner::V4(_), protocol::TCP) | (gso::TCPV6, Inner::V6(_), protocol::TCP) => true,
            (gso::UDP_L4, _, protocol::UDP) => false,
            _ => return Err(BadGso),
        };
        let body = &bytes[l4..];
        let l4_len = if is_tcp {
            TcpSegment::new_checked(body).map_err(|_| BadGso)?.header_len()
        } else if body.len() >= udp::HEADER_LEN {
            udp::HEADER_LEN
        } else {
            return Err(BadGso);
        };
        let headers_len = l4 + l4_len;
        if headers_len > MAX_HEADERS || header.gso_size == 0 {
            return Err(BadGso);
        }
        let mut l4_header = [0; 60];
        let l4_header = &mut l4_header[..l4_len];
        l4_header.copy_from_slice(&body[..l4_len]);
        let (mut seq, mut offset_flags, mut no_checksum) = (0, 0, false);
        if is_tcp {
            seq = u32::from_be_bytes([l4_header[4], l4_header[5], l4_header[6], l4_header[7]]);
            offset_flags = u16::from_be_bytes([l4_header[12], l4_header[13]]);
            l4_header[4..8].fill(0);
            l4_header[12..14].fill(0);
            l4_header[16..18].fill(0);
        } else {
            no_checksum = l4_header[6..8] == [0, 0];
            l4_header[4..8].fill(0);
        }
        let (mut ip_sum, mut ident) = (0, 0);
        let pseudo = match packet {
            Inner::V4(v4) => {
                let mut ip_header = [0; 60];
                let ip_header = &mut ip_header[..l4];
                ip_header.copy_from_slice(v4.header());
                ip_header[2..6].fill(0);
                ip_header[10..12].fill(0);
                ip_sum = checksum::sum(ip_header);
                ident = v4.ident();
                v4.pseudo_header(proto, 0)
            }
            Inner::V6(v6) => v6.pseudo_header(proto, 0),
        };
        Ok(Cutter {
            is_v6: packet.is_v6(),
            is_tcp,
            l4,
            headers_len,
            payload_len: bytes.len() - headers_len,
            gso_size: usize::from(header.gso_size),
            ip_sum,
            l4_sum: pseudo + checksum::sum(l4_header),
            ident,
            seq,
            offset_flags,
            no_checksum,
        })
    }

    /// The packet's TTL has been lowered by one since.
    pub(crate) fn lower_ttl(&mut self) {
        // One's complement of 0x0100: the TTL is the high byte of its word.
        self.ip_sum += 0xfeff;
    }

    /// Number of segments, at least one.
    pub(crate) fn segment_count(&self) -> usize {
        self.payload_len.div_ceil(self.gso_size).max(1)
    }

    /// Bytes that [`Cutter::cut`] writes.
    pub(crate) fn headers_len(&self) -> usize {
        self.headers_len
    }

    /// Writes the headers of segment `index` into `out` and returns the place of its payload in the packet.
    ///
    /// # Panics
    /// When `out` is not [`Cutter::headers_len`] long or `packet` is another one.
    #[inline]
    pub(crate) fn cut(&self, packet: &[u8], index: usize, out: &mut [u8]) -> Range<usize> {
        let count = self.segment_count();
        debug_assert!(index < count);
        let start = index * self.gso_size;
        let len = self.gso_size.min(self.payload_len - start);
        let payload = self.headers_len + start..self.headers_len + start + len;
        out.copy_from_slice(&packet[..self.headers_len]);
        let total = self.headers_len + len;
        if self.is_v6 {
            out[4..6].copy_from_slice(&((total - ipv6::HEADER_LEN) as u16).to_be_bytes());
        } else {
            let ident = self.ident.wrapping_add(index as u16);
            let sum = self.ip_sum + total as u64 + u64::from(ident);
            out[2..4].copy_from_slice(&(total as u16).to_be_bytes());
            out[4..6].copy_from_slice(&ident.to_be_bytes());
            out[10..12].copy_from_slice(&checksum::finish(sum).to_be_bytes());
        }
        let l4_len = total - self.l4;
        let l4 = &mut out[self.l4..];
        let sum = self.l4_sum + l4_len as u64 + checksum::sum(&packet[payload.clone()]);
        if self.is_tcp {
            let seq = self.seq.wrapping_add(start as u32);
            let mut offset_flags = self.offset_flags;
            if index > 0 {
                offset_flags &= !u16::from(tcp::flags::CWR);
            }
            if index + 1 < count {
                offset_flags &= !u16::from(tcp::flags::FIN | tcp::flags::PSH);
            }
            l4[4..8].copy_from_slice(&seq.to_be_bytes());
            l4[12..14].copy_from_slice(&offset_flags.to_be_bytes());
            let sum = sum + u64::from(seq >> 16) + u64::from(seq & 0xffff) + u64::from(offset_flags);
            l4[16..18].copy_from_slice(&checksum::finish(sum).to_be_bytes());
        } else {
            l4[4..6].copy_from_slice(&(l4_len as u16).to_be_bytes());
            // The length stands in the pseudo header and in the header.
            let field = if self.no_checksum { 0 } else { checksum::finish_udp(sum + l4_len as u64) };
            l4[6..8].copy_from_slice(&field.to_be_bytes());
        }
        payload
    }
}

const _: () = assert!(MAX_HEADERS >= 60 + 60 && MAX_HEADERS >= ipv6::HEADER_LEN + 60);
const _: () = assert!(ipv4::MIN_HEADER_LEN == 20 && tcp::MIN_HEADER_LEN == 20);
