//! IPv4 header, RFC 791.
//!
//! ```text
//!  0       4       8              16                              31
//!  +-------+-------+---------------+-------------------------------+
//!  |version|  IHL  | ToS (DSCP,ECN)|         total length          |
//!  +-------+-------+---------------+-----+-------------------------+
//!  |        identification         |0 D M|     fragment offset     |
//!  +---------------+---------------+-----+-------------------------+
//!  |      TTL      |   protocol    |        header checksum        |
//!  +---------------+---------------+-------------------------------+
//!  |                            source                             |
//!  |                          destination                          |
//!  |                    options, 0 to 40 bytes                     |
//! ```

use std::net::Ipv4Addr;

use super::checksum::{self, Checksum};
use super::{Malformed, array, be16};

/// Bytes of a header without options.
pub const MIN_HEADER_LEN: usize = 20;

const TOS: usize = 1;
const TOTAL_LEN: usize = 2;
const IDENT: usize = 4;
const FRAG: usize = 6;
const TTL: usize = 8;
const PROTOCOL: usize = 9;
const CHECKSUM: usize = 10;
const SRC: usize = 12;
const DST: usize = 16;

const DONT_FRAGMENT: u16 = 0x4000;
const MORE_FRAGMENTS: u16 = 0x2000;
const FRAGMENT_OFFSET: u16 = 0x1fff;

/// A checked view of a packet. Bytes behind the total length (padding) may follow.
#[derive(Debug, Clone, Copy)]
pub struct Ipv4Packet<T>(T);

impl<T: AsRef<[u8]>> Ipv4Packet<T> {
    /// Wraps bytes that start with a possible header.
    ///
    /// Holds afterwards: version 4, 20 <= header length <= total length <= bytes. The header
    /// checksum is not looked at.
    ///
    /// # Errors
    /// What of this does not hold.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Self, Malformed> {
        let b = bytes.as_ref();
        if b.len() < MIN_HEADER_LEN {
            return Err(Malformed::Truncated);
        }
        if b[0] >> 4 != 4 {
            return Err(Malformed::Version);
        }
        let header_len = usize::from(b[0] & 0x0f) * 4;
        if header_len < MIN_HEADER_LEN {
            return Err(Malformed::HeaderLen);
        }
        let total_len = usize::from(be16(b, TOTAL_LEN));
        if total_len < header_len || total_len > b.len() {
            return Err(Malformed::Length);
        }
        Ok(Self(bytes))
    }

    /// Bytes of the header with its options, 20 to 60.
    #[inline]
    pub fn header_len(&self) -> usize {
        usize::from(self.0.as_ref()[0] & 0x0f) * 4
    }

    /// Bytes of header and payload by the length field.
    #[inline]
    pub fn total_len(&self) -> usize {
        usize::from(be16(self.0.as_ref(), TOTAL_LEN))
    }

    /// DSCP and ECN.
    #[inline]
    pub fn tos(&self) -> u8 {
        self.0.as_ref()[TOS]
    }

    /// Identification.
    #[inline]
    pub fn ident(&self) -> u16 {
        be16(self.0.as_ref(), IDENT)
    }

    /// The "don't fragment" bit.
    #[inline]
    pub fn dont_fragment(&self) -> bool {
        be16(self.0.as_ref(), FRAG) & DONT_FRAGMENT != 0
    }

    /// A fragment of any place, the first included.
    #[inline]
    pub fn is_fragment(&self) -> bool {
        be16(self.0.as_ref(), FRAG) & (MORE_FRAGMENTS | FRAGMENT_OFFSET) != 0
    }

    /// Offset of this fragment in bytes; 0 for the first one and for whole packets.
    #[inline]
    pub fn fragment_offset(&self) -> usize {
        usize::from(be16(self.0.as_ref(), FRAG) & FRAGMENT_OFFSET) * 8
    }

    /// The "more fragments" bit.
    #[inline]
    pub fn more_fragments(&self) -> bool {
        be16(self.0.as_ref(), FRAG) & MORE_FRAGMENTS != 0
    }

    /// Time to live.
    #[inline]
    pub fn ttl(&self) -> u8 {
        self.0.as_ref()[TTL]
    }

    /// Protocol of the payload, see [`super::protocol`].
    #[inline]
    pub fn protocol(&self) -> u8 {
        self.0.as_ref()[PROTOCOL]
    }

    /// The checksum field.
    #[inline]
    pub fn header_checksum(&self) -> u16 {
        be16(self.0.as_ref(), CHECKSUM)
    }

    /// Source address.
    #[inline]
    pub fn src(&self) -> Ipv4Addr {
        Ipv4Addr::from(array::<4>(self.0.as_ref(), SRC))
    }

    /// Destination address.
    #[inline]
    pub fn dst(&self) -> Ipv4Addr {
        Ipv4Addr::from(array::<4>(self.0.as_ref(), DST))
    }

    /// The header with its options.
    #[inline]
    pub fn header(&self) -> &[u8] {
        &self.0.as_ref()[..self.header_len()]
    }

    /// Options, possibly empty.
    #[inline]
    pub fn options(&self) -> &[u8] {
        &self.0.as_ref()[MIN_HEADER_LEN..self.header_len()]
    }

    /// Bytes behind the header up to the total length.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.0.as_ref()[self.header_len()..self.total_len()]
    }

    /// Whether the header's own checksum is right.
    #[inline]
    pub fn verify_checksum(&self) -> bool {
        checksum::fold(checksum::sum(self.header())) == 0xffff
    }

    /// The pseudo-header sum for a layer-4 length of `len` bytes.
    #[inline]
    pub fn pseudo_header(&self, protocol: u8, len: usize) -> Checksum {
        checksum::pseudo_header_v4(self.src(), self.dst(), protocol, len)
    }

    /// Gives the bytes back.
    pub fn into_inner(self) -> T {
        self.0
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> Ipv4Packet<T> {
    /// Sets the time to live and mends the checksum incrementally (RFC 1624).
    #[inline]
    pub fn set_ttl(&mut self, ttl: u8) {
        let protocol = self.protocol();
        let old = u16::from_be_bytes([self.ttl(), protocol]);
        let sum = checksum::update(self.header_checksum(), old, u16::from_be_bytes([ttl, protocol]));
        let b = self.0.as_mut();
        b[TTL] = ttl;
        b[CHECKSUM..SRC].copy_from_slice(&sum.to_be_bytes());
    }

    /// Sets DSCP and ECN and mends the checksum incrementally.
    #[inline]
    pub fn set_tos(&mut self, tos: u8) {
        let first = self.0.as_ref()[0];
        let old = u16::from_be_bytes([first, self.tos()]);
        let sum = checksum::update(self.header_checksum(), old, u16::from_be_bytes([first, tos]));
        let b = self.0.as_mut();
        b[TOS] = tos;
        b[CHECKSUM..SRC].copy_from_slice(&sum.to_be_bytes());
    }

    /// Sets the total length field; the caller keeps it between the header length and the bytes.
    /// The checksum is left stale.
    #[inline]
    pub fn set_total_len(&mut self, len: u16) {
        self.0.as_mut()[TOTAL_LEN..IDENT].copy_from_slice(&len.to_be_bytes());
    }

    /// Sets the identification. The checksum is left stale.
    #[inline]
    pub fn set_ident(&mut self, ident: u16) {
        self.0.as_mut()[IDENT..FRAG].copy_from_slice(&ident.to_be_bytes());
    }

    /// Computes the header checksum anew.
    #[inline]
    pub fn fill_checksum(&mut self) {
        let header_len = self.header_len();
        let b = self.0.as_mut();
        b[CHECKSUM..SRC].fill(0);
        let sum = !checksum::fold(checksum::sum(&b[..header_len]));
        b[CHECKSUM..SRC].copy_from_slice(&sum.to_be_bytes());
    }

    /// Bytes behind the header up to the total length.
    #[inline]
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let range = self.header_len()..self.total_len();
        &mut self.0.as_mut()[range]
    }
}

/// A header without options as values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4Repr {
    /// Source address.
    pub src: Ipv4Addr,
    /// Destination address.
    pub dst: Ipv4Addr,
    /// Protocol of the payload.
    pub protocol: u8,
    /// Time to live.
    pub ttl: u8,
    /// DSCP and ECN.
    pub tos: u8,
    /// Identification.
    pub ident: u16,
    /// The "don't fragment" bit.
    pub dont_fragment: bool,
    /// Bytes behind the header.
    pub payload_len: u16,
}

impl Ipv4Repr {
    /// Reads a header; options are left out.
    pub fn parse<T: AsRef<[u8]>>(packet: &Ipv4Packet<T>) -> Self {
        Self {
            src: packet.src(),
            dst: packet.dst(),
            protocol: packet.protocol(),
            ttl: packet.ttl(),
            tos: packet.tos(),
            ident: packet.ident(),
            dont_fragment: packet.dont_fragment(),
            // Both come from a 16-bit field.
            payload_len: (packet.total_len() - packet.header_len()) as u16,
        }
    }

    /// Writes a header of 20 bytes, checksum included. A payload length beyond 65,515 is cut to it.
    pub fn emit(&self, out: &mut [u8; MIN_HEADER_LEN]) {
        let total_len = self.payload_len.saturating_add(MIN_HEADER_LEN as u16);
        out[0] = 0x45;
        out[TOS] = self.tos;
        out[TOTAL_LEN..IDENT].copy_from_slice(&total_len.to_be_bytes());
        out[IDENT..FRAG].copy_from_slice(&self.ident.to_be_bytes());
        let flags = if self.dont_fragment { DONT_FRAGMENT } else { 0 };
        out[FRAG..TTL].copy_from_slice(&flags.to_be_bytes());
        out[TTL] = self.ttl;
        out[PROTOCOL] = self.protocol;
        out[CHECKSUM..SRC].fill(0);
        out[SRC..DST].copy_from_slice(&self.src.octets());
        out[DST..].copy_from_slice(&self.dst.octets());
        let sum = !checksum::fold(checksum::sum(&out[..]));
        out[CHECKSUM..SRC].copy_from_slice(&sum.to_be_bytes());
    }
}
