//! Ethernet II header, as carried inside VXLAN: no tag, no FCS.
//!
//! ```text
//!  0                 6                 12    14
//!  +-----------------+-----------------+-----+---------
//!  |   destination   |     source      |type | payload
//! ```

use super::{MacAddr, Malformed, array, be16};

/// Bytes of the header.
pub const HEADER_LEN: usize = 14;

const DST: usize = 0;
const SRC: usize = 6;
const TYPE: usize = 12;

/// A checked view of a frame.
#[derive(Debug, Clone, Copy)]
pub struct EthernetFrame<T>(T);

impl<T: AsRef<[u8]>> EthernetFrame<T> {
    /// Wraps bytes that hold at least a header.
    ///
    /// # Errors
    /// [`Malformed::Truncated`] below 14 bytes.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Self, Malformed> {
        if bytes.as_ref().len() < HEADER_LEN { Err(Malformed::Truncated) } else { Ok(Self(bytes)) }
    }

    /// Destination address.
    #[inline]
    pub fn dst(&self) -> MacAddr {
        MacAddr(array(self.0.as_ref(), DST))
    }

    /// Source address.
    #[inline]
    pub fn src(&self) -> MacAddr {
        MacAddr(array(self.0.as_ref(), SRC))
    }

    /// Ethertype; 0x8100 and the like for tagged frames, which the overlay does not carry.
    #[inline]
    pub fn ethertype(&self) -> u16 {
        be16(self.0.as_ref(), TYPE)
    }

    /// All bytes behind the header.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.0.as_ref()[HEADER_LEN..]
    }
}

/// The header as values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EthernetRepr {
    /// Destination address.
    pub dst: MacAddr,
    /// Source address.
    pub src: MacAddr,
    /// Ethertype.
    pub ethertype: u16,
}

impl EthernetRepr {
    /// Reads the header.
    pub fn parse<T: AsRef<[u8]>>(frame: &EthernetFrame<T>) -> Self {
        Self { dst: frame.dst(), src: frame.src(), ethertype: frame.ethertype() }
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self, out: &mut [u8; HEADER_LEN]) {
        out[DST..SRC].copy_from_slice(&self.dst.0);
        out[SRC..TYPE].copy_from_slice(&self.src.0);
        out[TYPE..].copy_from_slice(&self.ethertype.to_be_bytes());
    }
}
