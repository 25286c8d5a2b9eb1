//! ICMP for IPv4, RFC 792: type, code, checksum, four bytes by type, body.

use super::{Malformed, be16, be32, checksum};

/// Bytes in front of the body.
pub const HEADER_LEN: usize = 8;

/// Echo reply.
pub const ECHO_REPLY: u8 = 0;
/// Destination unreachable.
pub const UNREACHABLE: u8 = 3;
/// Echo request.
pub const ECHO_REQUEST: u8 = 8;
/// Time exceeded.
pub const TIME_EXCEEDED: u8 = 11;

/// Code of [`UNREACHABLE`]: network unreachable.
pub const CODE_NET_UNREACHABLE: u8 = 0;
/// Code of [`UNREACHABLE`]: fragmentation needed; the last two header bytes are the MTU (RFC 1191).
pub const CODE_FRAG_NEEDED: u8 = 4;
/// Code of [`TIME_EXCEEDED`]: in transit.
pub const CODE_TTL_EXCEEDED: u8 = 0;

const CHECKSUM: usize = 2;
const REST: usize = 4;

/// Whether a message of this type speaks about another packet (RFC 1122 3.2.2). Unknown types
/// count as errors: no answer may be made about them.
#[inline]
pub fn is_error(icmp_type: u8) -> bool {
    // The query types of IANA's list: echo, router discovery, timestamp, information, mask, extended echo.
    !matches!(icmp_type, 0 | 8..=10 | 13..=18 | 42 | 43)
}

/// A checked view of a message.
#[derive(Debug, Clone, Copy)]
pub struct Icmpv4Packet<T>(T);

impl<T: AsRef<[u8]>> Icmpv4Packet<T> {
    /// Wraps bytes that hold at least a header.
    ///
    /// # Errors
    /// [`Malformed::Truncated`] below 8 bytes.
    #[inline]
    pub fn new_checked(bytes: T) -> Result<Self, Malformed> {
        if bytes.as_ref().len() < HEADER_LEN { Err(Malformed::Truncated) } else { Ok(Self(bytes)) }
    }

    /// Type.
    #[inline]
    pub fn icmp_type(&self) -> u8 {
        self.0.as_ref()[0]
    }

    /// Code.
    #[inline]
    pub fn code(&self) -> u8 {
        self.0.as_ref()[1]
    }

    /// The checksum field.
    #[inline]
    pub fn checksum(&self) -> u16 {
        be16(self.0.as_ref(), CHECKSUM)
    }

    /// The four bytes whose meaning depends on the type.
    #[inline]
    pub fn rest(&self) -> u32 {
        be32(self.0.as_ref(), REST)
    }

    /// Bytes behind the header: of errors, the packet they speak about.
    #[inline]
    pub fn body(&self) -> &[u8] {
        &self.0.as_ref()[HEADER_LEN..]
    }

    /// Whether the checksum over all bytes is right.
    pub fn verify_checksum(&self) -> bool {
        checksum::fold(checksum::sum(self.0.as_ref())) == 0xffff
    }
}

/// Writes the header in front of the body that already is in `out`, and the checksum over both.
///
/// # Errors
/// [`Malformed::Length`] when `out` is below 8 bytes.
pub fn emit(out: &mut [u8], icmp_type: u8, code: u8, rest: u32) -> Result<(), Malformed> {
    let Some(header) = out.first_chunk_mut::<HEADER_LEN>() else { return Err(Malformed::Length) };
    header[0] = icmp_type;
    header[1] = code;
    header[CHECKSUM..REST].fill(0);
    header[REST..].copy_from_slice(&rest.to_be_bytes());
    let field = checksum::finish(checksum::sum(out));
    out[CHECKSUM..REST].copy_from_slice(&field.to_be_bytes());
    Ok(())
}
