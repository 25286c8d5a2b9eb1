//! Super-packets: what the virtio-net header in front of a packet says, cutting, and merging.

pub(crate) mod gro;
pub(crate) mod gso;
#[cfg(test)]
mod tests;
pub(crate) mod vnet_hdr;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use vnet_hdr::VnetHdr;

use crate::wire::checksum;

/// Completes a checksum that the kernel has left unfinished: sums from `csum_start` to the end of the
/// packet over the pseudo-header sum that the field holds. False when the header points outside.
#[inline]
pub(crate) fn finish_checksum(packet: &mut [u8], header: &VnetHdr, is_udp: bool) -> bool {
    let start = usize::from(header.csum_start);
    let field: Range<usize> = match start.checked_add(usize::from(header.csum_offset)) {
        Some(at) if at + 2 <= packet.len() => at..at + 2,
        _ => return false,
    };
    let sum = checksum::sum(&packet[start..]);
    let value = if is_udp { checksum::finish_udp(sum) } else { checksum::finish(sum) };
    packet[field].copy_from_slice(&value.to_be_bytes());
    true
}

/// Which offloads are in use. Set at start from what the kernel offers; a thread turns one off when the
/// kernel refuses it after all.
#[derive(Debug, Default)]
pub(crate) struct SharedOffloads {
    pub(crate) tun_tso: AtomicBool,
    pub(crate) tun_uso: AtomicBool,
    pub(crate) tun_gro_tcp: AtomicBool,
    pub(crate) tun_gro_udp: AtomicBool,
    pub(crate) udp_gso: AtomicBool,
    pub(crate) udp_gro: AtomicBool,
    /// Segments that a send may have.
    pub(crate) udp_gso_segments: AtomicUsize,
}

impl SharedOffloads {
    pub(crate) fn max_segments(&self) -> usize {
        self.udp_gso_segments.load(Relaxed).max(1)
    }
}
