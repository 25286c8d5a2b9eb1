//! Packets with fixed contents, checksums right.

use std::net::{Ipv4Addr, Ipv6Addr};

use felt_dataplane::wire::{Ipv4Repr, Ipv6Repr, TcpSegment, UdpRepr, checksum, protocol, tcp};

use crate::table::Noise;

/// Bytes of a TCP header with a timestamp, as bulk transfers have it.
const TCP_HEADER_LEN: usize = 32;

/// An IPv4 UDP packet of `len` bytes in all, 28 at least.
pub fn udp_v4(src: Ipv4Addr, dst: Ipv4Addr, len: usize, ident: u16) -> Vec<u8> {
    let mut packet = noise(len.max(28));
    let (header, datagram) = packet.split_at_mut(20);
    let pseudo = checksum::pseudo_header_v4(src, dst, protocol::UDP, datagram.len());
    UdpRepr { src_port: 4000, dst_port: 5000 }.emit(datagram, pseudo).expect("below 64 KiB");
    ipv4(src, dst, protocol::UDP, ident, datagram.len()).emit(header.try_into().expect("20 bytes"));
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

/// An IPv4 TCP segment with a timestamp and this much payload.
pub fn tcp_v4(src: Ipv4Addr, dst: Ipv4Addr, seq: u32, payload: usize, ident: u16) -> Vec<u8> {
    let mut packet = noise(20 + TCP_HEADER_LEN + payload);
    let (header, segment) = packet.split_at_mut(20);
    tcp_header(segment, seq);
    let pseudo = checksum::pseudo_header_v4(src, dst, protocol::TCP, segment.len());
    TcpSegment::new_checked(segment).expect("a header").fill_checksum(pseudo);
    ipv4(src, dst, protocol::TCP, ident, TCP_HEADER_LEN + payload).emit(header.try_into().expect("20 bytes"));
    packet
}

/// An IPv4 TCP super-packet of `count` segments as a TUN gives it: virtio-net header first, its checksum field
/// holding the pseudo-header sum.
pub fn tcp_super(src: Ipv4Addr, dst: Ipv4Addr, seq: u32, mss: usize, count: usize) -> Vec<u8> {
    let mut packet = tcp_v4(src, dst, seq, mss * count, 1);
    let l4_len = packet.len() - 20;
    let pseudo = checksum::fold(checksum::pseudo_header_v4(src, dst, protocol::TCP, l4_len));
    packet[20 + tcp::CHECKSUM_OFFSET..][..2].copy_from_slice(&pseudo.to_be_bytes());
    // NEEDS_CSUM, TCP over IPv4.
    let mut header = vec![1, 1];
    let words = [20 + TCP_HEADER_LEN as u16, mss as u16, 20, tcp::CHECKSUM_OFFSET as u16];
    header.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
    header.extend(packet);
    header
}

fn tcp_header(segment: &mut [u8], seq: u32) {
    segment[..TCP_HEADER_LEN].fill(0);
    segment[..4].copy_from_slice(&[0x0f, 0xa0, 0x13, 0x88]);
    segment[4..8].copy_from_slice(&seq.to_be_bytes());
    segment[12] = (TCP_HEADER_LEN as u8 / 4) << 4;
    segment[13] = tcp::flags::ACK;
    segment[14] = 0x10;
    // Two no-operations and a timestamp.
    segment[20..24].copy_from_slice(&[1, 1, 8, 10]);
}

fn ipv4(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, ident: u16, payload_len: usize) -> Ipv4Repr {
    Ipv4Repr {
        src,
        dst,
        protocol,
        ttl: 64,
        tos: 0,
        ident,
        dont_fragment: true,
        payload_len: payload_len as u16,
    }
}

/// Bytes without a pattern.
pub fn noise(len: usize) -> Vec<u8> {
    Noise(5).flat_map(u64::to_le_bytes).take(len).collect()
}
