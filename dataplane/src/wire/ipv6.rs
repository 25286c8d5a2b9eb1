//! IPv6 header and the chain of extension headers, RFC 8200.
//!
//! ```text
//!  0       4              12                      31
//!  +-------+---------------+----------------------+
//!  |version| traffic class |      flow label      |
//!  +-------+---------------+---+----------+-------+
//!  |      payload length       |next head.|hop lim|
//!  +---------------------------+----------+-------+
//!  |         source, 16 bytes; destination        |
//! ```

use std::net::Ipv6Addr;

use super::checksum::{self, Checksum};
use super::{Malformed, array, be16, protocol};

/// Bytes of the fixed header.
pub const HEADER_LEN: usize = 40;

const PAYLOAD_LEN: usize = 4;
const NEXT_HEADER: usize = 6;
const HOP_LIMIT: usize = 7;
const SRC: usize = 8;
const DST: usize = 24;

/// Longest chain that [`Ipv6Packet::upper_layer`] follows. Real chains have one or two links.
const MAX_EXTENSIONS: usize = 8;

/// Where the extension headers end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UpperLayer {
    /// Protocol of the bytes at `offset`.
    pub protocol: u8,
    /// Offset from the start of the packet.
    pub offset: usize,
    /// Fragment offset in bytes and "more fragments", when a fragment header was passed.
    pub fragment: Option<(usize, bool)>,
}

impl UpperLayer {
    /// A fragment other than the first: what is at `offset` is not a layer-4 header.
    #[inline]
    pub fn is_later_fragment(&self) -> bool {
        matches!(self.fragment, Some((offset, _)) if offset != 0)
    }

    /// A fragment of any place. An "atomic" fragment (RFC 6946: offset 0, no more to come) is one too:
    /// it must not be merged or cut.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        self.fragment.is_some()
    }
}

/// A checked view of a packet. Bytes behind the payload length (padding) may follow.
#[derive(Debug, Clone, Copy)]
pub struct Ipv6Packet<T>(T);

impl<T: AsRef<[u8]>> Ipv6Packet<T> {
    /// Wraps bytes that start with a possible header.
    ///
    /// Holds afterwards: version 6, header and payload length within the bytes.
    ///
    /// # Errors
    /// What of this does not hold.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Self, Malformed> {
        let b = bytes.as_ref();
        if b.len() < HEADER_LEN {
            return Err(Malformed::Truncated);
        }
        if b[0] >> 4 != 6 {
            return Err(Malformed::Version);
        }
        if HEADER_LEN + usize::from(be16(b, PAYLOAD_LEN)) > b.len() {
            return Err(Malformed::Length);
        }
        Ok(Self(bytes))
    }

    /// Traffic class: DSCP and ECN.
    #[inline]
    pub fn traffic_class(&self) -> u8 {
        (be16(self.0.as_ref(), 0) >> 4) as u8
    }

    /// Flow label, 20 bits.
    #[inline]
    pub fn flow_label(&self) -> u32 {
        super::be32(self.0.as_ref(), 0) & 0x000f_ffff
    }

    /// Bytes behind the fixed header by the length field, extension headers included.
    #[inline]
    pub fn payload_len(&self) -> usize {
        usize::from(be16(self.0.as_ref(), PAYLOAD_LEN))
    }

    /// Bytes of header and payload.
    #[inline]
    pub fn total_len(&self) -> usize {
        HEADER_LEN + self.payload_len()
    }

    /// Protocol of what follows the fixed header.
    #[inline]
    pub fn next_header(&self) -> u8 {
        self.0.as_ref()[NEXT_HEADER]
    }

    /// Hop limit.
    #[inline]
    pub fn hop_limit(&self) -> u8 {
        self.0.as_ref()[HOP_LIMIT]
    }

    /// Source address.
    #[inline]
    pub fn src(&self) -> Ipv6Addr {
        Ipv6Addr::from(array::<16>(self.0.as_ref(), SRC))
    }

    /// Destination address.
    #[inline]
    pub fn dst(&self) -> Ipv6Addr {
        Ipv6Addr::from(array::<16>(self.0.as_ref(), DST))
    }

    /// Bytes behind the fixed header up to the payload length.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.0.as_ref()[HEADER_LEN..self.total_len()]
    }

    /// Walks the extension headers.
    ///
    /// Stops at the first protocol that is not an extension header, and behind the fragment header of
    /// a later fragment. The offset may equal the packet's length: an empty upper layer.
    ///
    /// # Errors
    /// [`Malformed::HeaderLen`] when a header runs beyond the packet or the chain is longer than
    /// eight headers.
    #[inline]
    pub fn upper_layer(&self) -> Result<UpperLayer, Malformed> {
        let next = self.next_header();
        if matches!(next, protocol::TCP | protocol::UDP | protocol::ICMPV6) {
            return Ok(UpperLayer { protocol: next, offset: HEADER_LEN, fragment: None });
        }
        self.walk_extensions(next)
    }

    fn walk_extensions(&self, mut next: u8) -> Result<UpperLayer, Malformed> {
        let bytes = &self.0.as_ref()[..self.total_len()];
        let mut offset = HEADER_LEN;
        let mut fragment = None;
        for _ in 0..=MAX_EXTENSIONS {
            let len = match next {
                protocol::HOP_BY_HOP | protocol::ROUTING | protocol::DEST_OPTIONS => {
                    let head = bytes.get(offset..offset + 2).ok_or(Malformed::HeaderLen)?;
                    8 + usize::from(head[1]) * 8
                }
                protocol::AH => {
                    let head = bytes.get(offset..offset + 2).ok_or(Malformed::HeaderLen)?;
                    8 + usize::from(head[1]) * 4
                }
                protocol::FRAGMENT => {
                    let head = bytes.get(offset..offset + 8).ok_or(Malformed::HeaderLen)?;
                    let field = be16(head, 2);
                    // A second fragment header must not hide what the first one said.
                    let more = field & 1 != 0 || matches!(fragment, Some((_, true)));
                    fragment = Some((usize::from(field & 0xfff8), more));
                    8
                }
                _ => return Ok(UpperLayer { protocol: next, offset, fragment }),
            };
            if bytes.len() - offset < len {
                return Err(Malformed::HeaderLen);
            }
            next = bytes[offset];
            offset += len;
            if matches!(fragment, Some((at, _)) if at != 0) {
                return Ok(UpperLayer { protocol: next, offset, fragment });
            }
        }
        Err(Malformed::HeaderLen)
    }

    /// The pseudo-header sum for a layer-4 length of `len` bytes.
    #[inline]
    pub fn pseudo_header(&self, protocol: u8, len: usize) -> Checksum {
        checksum::pseudo_header_v6(self.src(), self.dst(), protocol, len)
    }

    /// Gives the bytes back.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Ipv6Packet<T> {
    /// Sets the hop limit.
    #[inline]
    pub fn set_hop_limit(&mut self, hop_limit: u8) {
        self.0.as_mut()[HOP_LIMIT] = hop_limit;
    }

    /// Sets DSCP and ECN.
    #[inline]
    pub fn set_traffic_class(&mut self, class: u8) {
        let b = self.0.as_mut();
        b[0] = 0x60 | (class >> 4);
        b[1] = (class << 4) | (b[1] & 0x0f);
    }

    /// Sets the payload length; the caller keeps it within the bytes.
    #[inline]
    pub fn set_payload_len(&mut self, len: u16) {
        self.0.as_mut()[PAYLOAD_LEN..NEXT_HEADER].copy_from_slice(&len.to_be_bytes());
    }

    /// Bytes behind the fixed header up to the payload length.
    #[inline]
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let range = HEADER_LEN..self.total_len();
        &mut self.0.as_mut()[range]
    }
}

/// The fixed header as values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Repr {
    /// Source address.
    pub src: Ipv6Addr,
    /// Destination address.
    pub dst: Ipv6Addr,
    /// Protocol of what follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label; the upper 12 bits are ignored.
    pub flow_label: u32,
    /// Bytes behind the header.
    pub payload_len: u16,
}

impl Ipv6Repr {
    /// Reads the fixed header.
    pub fn parse<T: AsRef<[u8]>>(packet: &Ipv6Packet<T>) -> Self {
        Self {
            src: packet.src(),
            dst: packet.dst(),
            next_header: packet.next_header(),
            hop_limit: packet.hop_limit(),
            traffic_class: packet.traffic_class(),
            flow_label: packet.flow_label(),
            payload_len: packet.payload_len() as u16,
        }
    }

    /// Writes the fixed header.
    pub fn emit(&self, out: &mut [u8; HEADER_LEN]) {
        let first = 0x6000_0000 | (u32::from(self.traffic_class) << 20) | (self.flow_label & 0x000f_ffff);
        out[..PAYLOAD_LEN].copy_from_slice(&first.to_be_bytes());
        out[PAYLOAD_LEN..NEXT_HEADER].copy_from_slice(&self.payload_len.to_be_bytes());
        out[NEXT_HEADER] = self.next_header;
        out[HOP_LIMIT] = self.hop_limit;
        out[SRC..DST].copy_from_slice(&self.src.octets());
        out[DST..].copy_from_slice(&self.dst.octets());
    }
}
