//! The header in front of each packet on the TUN: `struct virtio_net_hdr` of `linux/virtio_net.h`.
//!
//! ```text
//!  0       1        2         4          6             8            10
//!  +-------+--------+---------+----------+-------------+-------------+
//!  | flags |gso type| hdr len | gso size | csum start  | csum offset |   native byte order
//! ```

/// Bytes of the header.
pub(crate) const LEN: usize = 10;

/// The checksum is unfinished: to be summed from `csum_start` and stored at `csum_offset` behind it.
pub(crate) const NEEDS_CSUM: u8 = 1;

/// Values of `gso_type`.
pub(crate) mod gso {
    /// One packet.
    pub(crate) const NONE: u8 = 0;
    /// TCP over IPv4.
    pub(crate) const TCPV4: u8 = 1;
    /// TCP over IPv6.
    pub(crate) const TCPV6: u8 = 4;
    /// UDP, to be cut into datagrams.
    pub(crate) const UDP_L4: u8 = 5;
    /// A bit beside the type: the first segment carries CWR.
    pub(crate) const ECN: u8 = 0x80;
}

/// The header as values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct VnetHdr {
    pub(crate) flags: u8,
    /// See [`gso`].
    pub(crate) gso_type: u8,
    /// Bytes of all headers. From the kernel not to be relied on: forwarded packets carry more.
    pub(crate) hdr_len: u16,
    /// Payload bytes of each segment but the last.
    pub(crate) gso_size: u16,
    /// From the start of the packet.
    pub(crate) csum_start: u16,
    /// From `csum_start`.
    pub(crate) csum_offset: u16,
}

impl VnetHdr {
    #[inline]
    pub(crate) fn parse(bytes: &[u8; LEN]) -> Self {
        let word = |at: usize| u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
        Self {
            flags: bytes[0],
            gso_type: bytes[1],
            hdr_len: word(2),
            gso_size: word(4),
            csum_start: word(6),
            csum_offset: word(8),
        }
    }

    #[inline]
    pub(crate) fn emit(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        out[0] = self.flags;
        out[1] = self.gso_type;
        for (at, word) in [(2, self.hdr_len), (4, self.gso_size), (6, self.csum_start), (8, self.csum_offset)]
        {
            out[at..at + 2].copy_from_slice(&word.to_ne_bytes());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_round_trips() {
        let header = VnetHdr {
            flags: NEEDS_CSUM,
            gso_type: gso::TCPV6 | gso::ECN,
            hdr_len: 72,
            gso_size: 1398,
            csum_start: 40,
            csum_offset: 16,
        };
        let bytes = header.emit();
        assert_eq!(bytes[..2], [1, 0x84]);
        assert_eq!(bytes[4..6], 1398u16.to_ne_bytes());
        assert_eq!(VnetHdr::parse(&bytes), header);
        assert_eq!(VnetHdr::parse(&[0; LEN]), VnetHdr::default());
    }
}
