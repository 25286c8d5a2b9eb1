//! flannel's `udp` encapsulation: the datagram's payload is the bare inner packet, nothing else.
//!
//! COMPAT: flannel's proxy checks nothing but a length of 20; here the inner header must be possible. It
//! carries IPv4 only; here IPv6 too, told apart by the version.

use super::{DecapError, Inner, OUTER_V4, OUTER_V6};

/// Bytes in front of the inner packet in the datagram.
pub const HEADERS_LEN: usize = 0;
/// What a packet grows by over an IPv4 underlay.
pub const OVERHEAD_V4: usize = OUTER_V4 + HEADERS_LEN;
/// What a packet grows by over an IPv6 underlay.
pub const OVERHEAD_V6: usize = OUTER_V6 + HEADERS_LEN;

/// The inner packet of a datagram.
///
/// # Errors
/// [`DecapError::Ip`].
#[inline]
pub fn pop(datagram: &[u8]) -> Result<Inner<'_>, DecapError> {
    Ok(Inner::parse(datagram)?)
}
