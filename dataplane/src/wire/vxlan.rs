//! VXLAN header, RFC 7348 5, with the group policy flag of draft-smith-vxlan-group-policy.
//!
//! ```text
//!  0               8                              24             31
//!  +-+-+-+-+-+-+-+-+-------------------------------+---------------+
//!  |G|R|R|R|I|R|R|R|  reserved, or group policy    (with G)        |
//!  +-+-+-+-+-+-+-+-+-------------------------------+---------------+
//!  |                      VNI                      |   reserved    |
//! ```

use std::fmt;

use super::{Malformed, be16, be32};

/// Bytes of the header.
pub const HEADER_LEN: usize = 8;

/// The VNI field counts; always set.
pub const FLAG_I: u8 = 0x08;
/// Bytes 2 and 3 carry a group policy tag. Bits of byte 1 then belong to the policy as well.
pub const FLAG_GBP: u8 = 0x80;

/// A VXLAN network identifier, 24 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Vni(u32);

impl Vni {
    /// Largest identifier.
    pub const MAX: u32 = 0x00ff_ffff;

    /// `None` beyond 24 bits.
    pub const fn new(value: u32) -> Option<Vni> {
        if value <= Self::MAX { Some(Vni(value)) } else { None }
    }

    /// The number.
    pub const fn value(self) -> u32 {
        self.0
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A checked view of a header with what follows. Checks the length only: what flags and VNI to
/// accept is for [`crate::encap::vxlan`] to say.
#[derive(Debug, Clone, Copy)]
pub struct VxlanPacket<T>(T);

impl<T: AsRef<[u8]>> VxlanPacket<T> {
    /// Wraps bytes that hold at least a header.
    ///
    /// # Errors
    /// [`Malformed::Truncated`] below 8 bytes.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Self, Malformed> {
        if bytes.as_ref().len() < HEADER_LEN { Err(Malformed::Truncated) } else { Ok(Self(bytes)) }
    }

    /// The flags byte.
    #[inline]
    pub fn flags(&self) -> u8 {
        self.0.as_ref()[0]
    }

    /// The 24 bits behind the flags: reserved, or policy with [`FLAG_GBP`].
    #[inline]
    pub fn policy(&self) -> u32 {
        be32(self.0.as_ref(), 0) & 0x00ff_ffff
    }

    /// The group policy tag; means something with [`FLAG_GBP`] only.
    #[inline]
    pub fn policy_tag(&self) -> u16 {
        be16(self.0.as_ref(), 2)
    }

    /// Network identifier.
    #[inline]
    pub fn vni(&self) -> Vni {
        Vni(be32(self.0.as_ref(), 4) >> 8)
    }

    /// The last byte, which must be 0.
    #[inline]
    pub fn reserved(&self) -> u8 {
        self.0.as_ref()[7]
    }

    /// The inner frame.
    #[inline]
    pub fn payload(&self) -> &[u8] {
        &self.0.as_ref()[HEADER_LEN..]
    }
}

/// Writes a header with flag I and this VNI.
#[inline]
pub fn emit(out: &mut [u8; HEADER_LEN], vni: Vni) {
    out[..4].copy_from_slice(&[FLAG_I, 0, 0, 0]);
    out[4..].copy_from_slice(&(vni.0 << 8).to_be_bytes());
}
