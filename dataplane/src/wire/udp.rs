//! UDP header, RFC 768: source port, destination port, length, checksum, two bytes each.

use super::checksum::Checksum;
use super::{Malformed, be16, checksum};

/// Bytes of the header.
pub const HEADER_LEN: usize = 8;
/// Offset of the checksum field; `csum_offset` of a virtio-net header.
pub const CHECKSUM_OFFSET: usize = 6;

const LEN: usize = 4;

/// A checked view of a datagram.
#[derive(Debug, Clone, Copy)]
pub struct UdpDatagram<T>(T);

impl<T: AsRef<[u8]>> UdpDatagram<T> {
    /// Wraps bytes that hold a header whose length field lies between 8 and the bytes.
    ///
    /// # Errors
    /// What of this does not hold.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Self, Malformed> {
        let b = bytes.as_ref();
        if b.len() < HEADER_LEN {
            return Err(Malformed::Truncated);
        }
        let len = usize::from(be16(b, LEN));
        if len < HEADER_LEN || len > b.len() {
            return Err(Malformed::Length);
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

    /// Bytes of header and payload by the length field.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(be16(self.0.as_ref(), LEN))
    }

    /// No payload.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == HEADER_LEN
    }

    /// The checksum field; 0 means that the sender computed none.
    #[inline]
    pub fn checksum(&self) -> u16 {
        be16(self.0.as_ref(), CHECKSUM_OFFSET)
    }

    /// Bytes behind the header up to the length field.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.0.as_ref()[HEADER_LEN..self.len()]
    }

    /// Whether the checksum is right with this pseudo header; true when there is none.
    #[inline]
    pub fn verify_checksum(&self, pseudo_header: Checksum) -> bool {
        self.checksum() == 0
            || checksum::fold(pseudo_header + checksum::sum(&self.0.as_ref()[..self.len()])) == 0xffff
    }
}

/// The header as values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UdpRepr {
    /// Source port.
    pub src_port: u16,
    /// Destination port.
    pub dst_port: u16,
}

impl UdpRepr {
    /// Reads the ports.
    pub fn parse<T: AsRef<[u8]>>(datagram: &UdpDatagram<T>) -> Self {
        Self { src_port: datagram.src_port(), dst_port: datagram.dst_port() }
    }

    /// Writes the header in front of the payload that already is in `out`, and the checksum over both.
    ///
    /// # Errors
    /// [`Malformed::Length`] when `out` is below 8 or above 65,535 bytes.
    pub fn emit(&self, out: &mut [u8], pseudo_header: Checksum) -> Result<(), Malformed> {
        let len = u16::try_from(out.len()).map_err(|_| Malformed::Length)?;
        let Some(header) = out.first_chunk_mut::<HEADER_LEN>() else { return Err(Malformed::Length) };
        header[..2].copy_from_slice(&self.src_port.to_be_bytes());
        header[2..LEN].copy_from_slice(&self.dst_port.to_be_bytes());
        header[LEN..CHECKSUM_OFFSET].copy_from_slice(&len.to_be_bytes());
        header[CHECKSUM_OFFSET..].fill(0);
        let field = checksum::finish_udp(pseudo_header + checksum::sum(out));
        out[CHECKSUM_OFFSET..HEADER_LEN].copy_from_slice(&field.to_be_bytes());
        Ok(())
    }
}
