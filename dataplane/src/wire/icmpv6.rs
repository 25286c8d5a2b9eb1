//! ICMPv6, RFC 4443: type, code, checksum (with pseudo header), four bytes by type, body.

use super::checksum::{self, Checksum};
use super::{Malformed, be16, be32};

/// Bytes in front of the body.
pub const HEADER_LEN: usize = 8;

/// Destination unreachable.
pub const UNREACHABLE: u8 = 1;
/// Packet too big; the last four header bytes are the MTU.
pub const PACKET_TOO_BIG: u8 = 2;
/// Time exceeded.
pub const TIME_EXCEEDED: u8 = 3;
/// Echo request.
pub const ECHO_REQUEST: u8 = 128;
/// Echo reply.
pub const ECHO_REPLY: u8 = 129;
/// Redirect: not an error by number, but no error may be sent about it (RFC 4443 2.4 e.2).
pub const REDIRECT: u8 = 137;

/// Code of [`UNREACHABLE`]: no route to destination.
pub const CODE_NO_ROUTE: u8 = 0;
/// Code of [`TIME_EXCEEDED`]: in transit.
pub const CODE_HOP_LIMIT_EXCEEDED: u8 = 0;

const CHECKSUM: usize = 2;
const REST: usize = 4;

/// Whether no error may be sent about a message of this type: errors (below 128) and redirects.
#[inline]
pub fn is_error(icmp_type: u8) -> bool {
    icmp_type < 128 || icmp_type == REDIRECT
}

/// A checked view of a message.
#[derive(Debug, Clone, Copy)]
pub struct Icmpv6Packet<T>(T);

impl<T: AsRef<[u8]>> Icmpv6Packet<T> {
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

    /// Whether the checksum over all bytes is right with this pseudo header.
    pub fn verify_checksum(&self, pseudo_header: Checksum) -> bool {
        checksum::fold(pseudo_header + checksum::sum(self.0.as_ref())) == 0xffff
    }
}

/// Writes the header in front of the body that already is in `out`, and the checksum over both.
///
/// # Errors
/// [`Malformed::Length`] when `out` is below 8 bytes.
pub fn emit(
    out: &mut [u8],
    icmp_type: u8,
    code: u8,
    rest: u32,
    pseudo_header: Checksum,
) -> Result<(), Malformed> {
    let Some(header) = out.first_chunk_mut::<HEADER_LEN>() else { return Err(Malformed::Length) };
    header[0] = icmp_type;
    header[1] = code;
    header[CHECKSUM..REST].fill(0);
    header[REST..].copy_from_slice(&rest.to_be_bytes());
    let field = checksum::finish(pseudo_header + checksum::sum(out));
    out[CHECKSUM..REST].copy_from_slice(&field.to_be_bytes());
    Ok(())
}
