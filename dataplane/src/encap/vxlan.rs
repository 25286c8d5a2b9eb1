//! VXLAN as flannel nodes speak it: flag I, one VNI, inner Ethernet from VTEP to VTEP.
//!
//! COMPAT: accepts what the kernel's vxlan device of a flannel node accepts and hands on to the pods
//! (`drivers/net/vxlan/vxlan_core.c`, `vxlan_rcv`): reserved bits and the reserved byte must be 0, frames
//! to another unicast address and those with our own source address are dropped. Two kinds the kernel
//! takes but no flannel node sends are dropped as well: frames to a group address, and ARP.

use super::{DecapError, Inner, OUTER_V4, OUTER_V6};
use crate::wire::{EthernetFrame, EthernetRepr, MacAddr, Vni, VxlanPacket, ethernet, ethertype, vxlan};

/// Bytes in front of the inner packet in the datagram: VXLAN and Ethernet.
pub const HEADERS_LEN: usize = vxlan::HEADER_LEN + ethernet::HEADER_LEN;
/// What a packet grows by over an IPv4 underlay.
pub const OVERHEAD_V4: usize = OUTER_V4 + HEADERS_LEN;
/// What a packet grows by over an IPv6 underlay.
pub const OVERHEAD_V6: usize = OUTER_V6 + HEADERS_LEN;

/// This node's end of the tunnel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vtep {
    /// The network.
    pub vni: Vni,
    /// Our address: source of what we send, destination of what we accept.
    pub mac: MacAddr,
    /// Accept the group policy flag; the tag is ignored.
    pub accept_gbp: bool,
}

impl Vtep {
    /// Writes the headers in front of an inner packet for the peer with this address.
    #[inline]
    pub fn push(&self, peer: MacAddr, inner_is_v6: bool, out: &mut [u8; HEADERS_LEN]) {
        let (header, frame) = out.split_at_mut(vxlan::HEADER_LEN);
        let (Some(header), Some(frame)) = (header.first_chunk_mut(), frame.first_chunk_mut()) else { return };
        vxlan::emit(header, self.vni);
        let ethertype = if inner_is_v6 { ethertype::IPV6 } else { ethertype::IPV4 };
        EthernetRepr { dst: peer, src: self.mac, ethertype }.emit(frame);
    }

    /// The inner packet of a datagram. Bytes may follow it in the datagram.
    ///
    /// # Errors
    /// The first of these that fails: length and flags of the VXLAN header, VNI, length of the frame, its
    /// addresses, its type, the inner header.
    #[inline]
    pub fn pop<'a>(&self, datagram: &'a [u8]) -> Result<Inner<'a>, DecapError> {
        let packet = VxlanPacket::new_checked(datagram).map_err(|_| DecapError::Encap)?;
        // With group policy accepted, its flag and all 24 bits behind the flags are its business.
        let (flags, policy) = if self.accept_gbp {
            (packet.flags() & !vxlan::FLAG_GBP, 0)
        } else {
            (packet.flags(), packet.policy())
        };
        if flags != vxlan::FLAG_I || policy != 0 || packet.reserved() != 0 {
            return Err(DecapError::Flags);
        }
        if packet.vni() != self.vni {
            return Err(DecapError::Vni);
        }
        let frame =
            EthernetFrame::new_checked(&datagram[vxlan::HEADER_LEN..]).map_err(|_| DecapError::Encap)?;
        if frame.dst() != self.mac || frame.src() == self.mac {
            return Err(DecapError::Mac);
        }
        let inner_is_v6 = match frame.ethertype() {
            ethertype::IPV4 => false,
            ethertype::IPV6 => true,
            _ => return Err(DecapError::Encap),
        };
        let inner = Inner::parse(&datagram[HEADERS_LEN..])?;
        if inner.is_v6() != inner_is_v6 {
            return Err(DecapError::Ip);
        }
        Ok(inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: MacAddr = MacAddr([0x3a, 1, 2, 3, 4, 5]);
    const THEIRS: MacAddr = MacAddr([0x3a, 9, 8, 7, 6, 5]);
    const VTEP: Vtep = Vtep { vni: Vni::new(1).unwrap(), mac: OURS, accept_gbp: false };
    /// An ICMP packet of 28 bytes, TTL 1.
    const INNER: [u8; 28] = [
        0x45, 0, 0, 0x1c, 0, 1, 0, 0, 1, 0x11, 0xa2, 0x63, 10, 50, 2, 5, 10, 50, 1, 5, 4, 0xd2, 0x16, 0x2e,
        0, 8, 0, 0,
    ];

    fn datagram() -> Vec<u8> {
        let mut headers = [0; HEADERS_LEN];
        Vtep { mac: THEIRS, ..VTEP }.push(OURS, false, &mut headers);
        [&headers[..], &INNER].concat()
    }

    #[test]
    fn overhead_is_that_of_the_kernel_device() {
        assert_eq!((OVERHEAD_V4, OVERHEAD_V6), (50, 70));
    }

    #[test]
    fn pushed_bytes_are_those_of_a_flannel_node() {
        let expected = [
            0x08, 0, 0, 0, 0, 0, 1, 0, // flag I, VNI 1
            0x3a, 1, 2, 3, 4, 5, 0x3a, 9, 8, 7, 6, 5, 0x08, 0x00, // to us, from them, IPv4
        ];
        assert_eq!(datagram()[..HEADERS_LEN], expected);
    }

    #[test]
    fn pushed_packet_pops_out_again_without_what_follows() {
        let mut bytes = datagram();
        assert_eq!(VTEP.pop(&bytes).unwrap().bytes(), INNER);
        bytes.extend([0; 18]);
        assert_eq!(VTEP.pop(&bytes).unwrap().bytes(), INNER);
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = datagram();
        for len in 0..bytes.len() {
            let expected = if len < HEADERS_LEN { DecapError::Encap } else { DecapError::Ip };
            assert_eq!(VTEP.pop(&bytes[..len]).unwrap_err(), expected, "{len} bytes");
        }
    }

    #[test]
    fn each_wrong_field_has_its_own_reason() {
        let cases: [(&str, usize, u8, DecapError); 13] = [
            ("flag I missing", 0, 0x00, DecapError::Flags),
            ("reserved flag", 0, 0x09, DecapError::Flags),
            ("group policy flag", 0, 0x88, DecapError::Flags),
            ("reserved byte 1", 1, 1, DecapError::Flags),
            ("reserved byte 3", 3, 1, DecapError::Flags),
            ("reserved byte 7", 7, 1, DecapError::Flags),
            ("VNI 257", 5, 1, DecapError::Vni),
            ("destination of another node", 13, 6, DecapError::Mac),
            ("ARP", 21, 0x06, DecapError::Encap),
            ("tagged", 20, 0x81, DecapError::Encap),
            ("LLDP", 20, 0x88, DecapError::Encap),
            ("version 5", 22, 0x55, DecapError::Ip),
            ("header length 16", 22, 0x44, DecapError::Ip),
        ];
        for (what, at, value, reason) in cases {
            let mut bytes = datagram();
            bytes[at] = value;
            assert_eq!(VTEP.pop(&bytes).unwrap_err(), reason, "{what}");
        }
    }

    #[test]
    fn our_own_source_address_and_broadcast_are_refused() {
        let mut bytes = datagram();
        bytes[14..20].copy_from_slice(&OURS.0);
        assert_eq!(VTEP.pop(&bytes).unwrap_err(), DecapError::Mac);
        let mut bytes = datagram();
        bytes[8..14].fill(0xff);
        assert_eq!(VTEP.pop(&bytes).unwrap_err(), DecapError::Mac);
        let mut bytes = datagram();
        bytes[14..20].fill(0);
        assert!(VTEP.pop(&bytes).is_ok(), "any other source is accepted, as by the kernel");
    }

    #[test]
    fn ethertype_must_match_the_inner_version() {
        let mut bytes = datagram();
        bytes[20..22].copy_from_slice(&[0x86, 0xdd]);
        assert_eq!(VTEP.pop(&bytes).unwrap_err(), DecapError::Ip);
    }

    #[test]
    fn group_policy_is_accepted_when_allowed_and_its_tag_ignored() {
        let vtep = Vtep { accept_gbp: true, ..VTEP };
        let mut bytes = datagram();
        bytes[..4].copy_from_slice(&[0x88, 0x48, 0x12, 0x34]);
        assert_eq!(vtep.pop(&bytes).unwrap().bytes(), INNER);
        assert!(vtep.pop(&datagram()).is_ok(), "the flag is not required");
        bytes[0] = 0x80;
        assert_eq!(vtep.pop(&bytes).unwrap_err(), DecapError::Flags, "flag I is");
        bytes[0] = 0x8c;
        assert_eq!(vtep.pop(&bytes).unwrap_err(), DecapError::Flags, "reserved flags stay reserved");
        bytes[..8].copy_from_slice(&[0x88, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(vtep.pop(&bytes).unwrap_err(), DecapError::Flags, "and so does the last byte");
    }
}
