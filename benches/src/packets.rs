//! Packets with fixed contents, checksums right.

use std::net::{Ipv4Addr, Ipv6Addr};

use felt_dataplane::wire::{Ipv4Repr, Ipv6Repr, UdpRepr, checksum, protocol};

use crate::table::Noise;

/// An IPv4 UDP packet of `len` bytes in all, 28 at least.
pub fn udp_v4(src: Ipv4Addr, dst: Ipv4Addr, len: usize) -> Vec<u8> {
    let mut packet = noise(len.max(28));
    let (header, datagram) = packet.split_at_mut(20);
    let pseudo = checksum::pseudo_header_v4(src, dst, protocol::UDP, datagram.len());
    UdpRepr { src_port: 4000, dst_port: 5000 }.emit(datagram, pseudo).expect("below 64 KiB");
    let repr = Ipv4Repr {
        src,
        dst,
        protocol: protocol::UDP,
        ttl: 64,
        tos: 0,
        ident: 1,
        dont_fragment: true,
        payload_len: datagram.len() as u16,
    };
    repr.emit(header.try_into().expect("20 bytes"));
    packet
}

/// An IPv6 UDP packet of `len` bytes in all, 48 at least.
pub fn udp_v6(src: Ipv6Addr, dst: Ipv6Addr, len: usize) -> Vec<u8> {
    let mut packet = noise(len.max(48));
    let (header, datagram) = packet.split_at_mut(40);
    let pseudo = checksum::pseudo_header_v6(src, dst, protocol::UDP, datagram.len());
    UdpRepr { src_port: 4000, dst_port: 5000 }.emit(datagram, pseudo).expect("below 64 KiB");
    let repr = Ipv6Repr {
        src,
        dst,
        next_header: protocol::UDP,
        hop_limit: 64,
        traffic_class: 0,
        flow_label: 0,
        payload_len: datagram.len() as u16,
    };
    repr.emit(header.try_into().expect("40 bytes"));
    packet
}

/// Bytes without a pattern.
pub fn noise(len: usize) -> Vec<u8> {
    Noise(5).flat_map(u64::to_le_bytes).take(len).collect()
}
