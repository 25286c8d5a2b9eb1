//! TCP header, RFC 9293 3.1.
//!
//! ```text
//!  0               4               8               12  13  14      16      18      20
//!  +-------+-------+---------------+---------------+---+---+-------+-------+-------+----
//!  |src prt|dst prt|   sequence    |acknowledgment |off|flg|window |checksm|urgent |options
//! ```

use super::checksum::{self, Checksum};
use super::{Malformed, be16, be32};

/// Bytes of a header without options.
pub const MIN_HEADER_LEN: usize = 20;
/// Offset of the checksum field; `csum_offset` of a virtio-net header.
pub const CHECKSUM_OFFSET: usize = 16;

const SEQ: usize = 4;
const ACK: usize = 8;
const DATA_OFFSET: usize = 12;
const FLAGS: usize = 13;
const WINDOW: usize = 14;
const URGENT: usize = 18;

/// Flag bits of byte 13.
pub mod flags {
    /// No more data from the sender.
    pub const FIN: u8 = 0x01;
    /// Synchronize sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset.
    pub const RST: u8 = 0x04;
    /// Push.
    pub const PSH: u8 = 0x08;
    /// The acknowledgment field counts.
    pub const ACK: u8 = 0x10;
    /// The urgent pointer counts.
    pub const URG: u8 = 0x20;
    /// ECN echo, RFC 3168.
    pub const ECE: u8 = 0x40;
    /// Congestion window reduced, RFC 3168.
    pub const CWR: u8 = 0x80;
}

/// A checked view of a segment: header, options and payload.
#[derive(Debug, Clone, Copy)]
pub struct TcpSegment<T>(T);

impl<T: AsRef<[u8]>> TcpSegment<T> {
    /// Wraps bytes that hold a header whose data offset lies between 20 and the bytes.
    ///
    /// # Errors
    /// What of this does not hold.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Self, Malformed> {
        let b = bytes.as_ref();
        if b.len() < MIN_HEADER_LEN {
            return Err(Malformed::Truncated);
        }
        let header_len = usize::from(b[DATA_OFFSET] >> 4) * 4;
        if header_len < MIN_HEADER_LEN || header_len > b.len() {
            return Err(Malformed::HeaderLen);
        }
        Ok(Self(bytes))
    }

    /// Source port.
    #[inline]
    pub fn src_port(&self) -> u16 {
        be16(self.0.as_ref(), 0)
    }

    /// Destination port.
    #[inline]
    pub fn dst_port(&self) -> u16 {
        be16(self.0.as_ref(), 2)
    }

    /// Sequence number.
    #[inline]
    pub fn seq(&self) -> u32 {
        be32(self.0.as_ref(), SEQ)
    }

    /// Acknowledgment number.
    #[inline]
    pub fn ack(&self) -> u32 {
        be32(self.0.as_ref(), ACK)
    }

    /// Bytes of the header with its options, 20 to 60.
    #[inline]
    pub fn header_len(&self) -> usize {
        usize::from(self.0.as_ref()[DATA_OFFSET] >> 4) * 4
    }

    /// Flags, see [`flags`].
    #[inline]
    pub fn flags(&self) -> u8 {
        self.0.as_ref()[FLAGS]
    }

    /// Window.
    #[inline]
    pub fn window(&self) -> u16 {
        be16(self.0.as_ref(), WINDOW)
    }

    /// The checksum field.
    #[inline]
    pub fn checksum(&self) -> u16 {
        be16(self.0.as_ref(), CHECKSUM_OFFSET)
    }

    /// Urgent pointer.
    #[inline]
    pub fn urgent(&self) -> u16 {
        be16(self.0.as_ref(), URGENT)
    }

    /// Options, possibly empty.
    #[inline]
    pub fn options(&self) -> &[u8] {
        &self.0.as_ref()[MIN_HEADER_LEN..self.header_len()]
    }

    /// All bytes behind the header.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.0.as_ref()[self.header_len()..]
    }

    /// Whether the checksum over all bytes is right with this pseudo header.
    #[inline]
    pub fn verify_checksum(&self, pseudo_header: Checksum) -> bool {
        checksum::fold(pseudo_header + checksum::sum(self.0.as_ref())) == 0xffff
    }
}

impl<T: AsRef<[u8]> + AsMut<[u8]>> TcpSegment<T> {
    /// Sets the sequence number. The checksum is left stale.
    #[inline]
    pub fn set_seq(&mut self, seq: u32) {
        self.0.as_mut()[SEQ..ACK].copy_from_slice(&seq.to_be_bytes());
    }

    /// Sets the flags. The checksum is left stale.
    #[inline]
    pub fn set_flags(&mut self, flags: u8) {
        self.0.as_mut()[FLAGS] = flags;
    }

    /// Sets the checksum field.
    #[inline]
    pub fn set_checksum(&mut self, field: u16) {
        self.0.as_mut()[CHECKSUM_OFFSET..URGENT].copy_from_slice(&field.to_be_bytes());
    }

    /// Computes the checksum over all bytes.
    #[inline]
    pub fn fill_checksum(&mut self, pseudo_header: Checksum) {
        self.set_checksum(0);
        let field = checksum::finish(pseudo_header + checksum::sum(self.0.as_ref()));
        self.set_checksum(field);
    }
}
