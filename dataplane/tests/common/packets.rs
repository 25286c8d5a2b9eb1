//! Builds packets byte by byte, with a plain checksum of its own, and checks packets with `etherparse`:
//! both independent of the code under test.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use etherparse::{NetSlice, SlicedPacket, TransportSlice};

pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;

pub(crate) const FIN: u8 = 0x01;
pub(crate) const SYN: u8 = 0x02;
pub(crate) const RST: u8 = 0x04;
pub(crate) const PSH: u8 = 0x08;
pub(crate) const ACK: u8 = 0x10;
pub(crate) const URG: u8 = 0x20;
pub(crate) const ECE: u8 = 0x40;
pub(crate) const CWR: u8 = 0x80;

/// A packet of TCP or UDP as values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Spec {
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) protocol: u8,
    pub(crate) ports: (u16, u16),
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    pub(crate) ident: u16,
    pub(crate) dont_fragment: bool,
    /// IPv4 only; a multiple of 4 bytes.
    pub(crate) ip_options: Vec<u8>,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
    pub(crate) window: u16,
    /// TCP only; a multiple of 4 bytes.
    pub(crate) tcp_options: Vec<u8>,
    pub(crate) payload: Vec<u8>,
}

impl Spec {
    pub(crate) fn tcp(payload: Vec<u8>) -> Spec {
        Spec {
            src: Ipv4Addr::new(10, 50, 1, 5).into(),
            dst: Ipv4Addr::new(10, 50, 2, 5).into(),
            protocol: TCP,
            ports: (40_000, 5201),
            tos: 0,
            ttl: 63,
            ident: 0x1234,
            dont_fragment: true,
            ip_options: Vec::new(),
            seq: 0x8000_0000,
            ack: 77,
            flags: ACK,
            window: 501,
            // NOP, NOP, timestamps.
            tcp_options: vec![1, 1, 8, 10, 1, 2, 3, 4, 5, 6, 7, 8],
            payload,
        }
    }

    pub(crate) fn udp(payload: Vec<u8>) -> Spec {
        Spec { protocol: UDP, tcp_options: Vec::new(), ..Spec::tcp(payload) }
    }

    pub(crate) fn v6(self) -> Spec {
        Spec {
            src: Ipv6Addr::new(0xfd00, 0x50, 0, 1, 0, 0, 0, 5).into(),
            dst: Ipv6Addr::new(0xfd00, 0x50, 0, 2, 0, 0, 0, 5).into(),
            ..self
        }
    }

    pub(crate) fn is_v6(&self) -> bool {
        self.src.is_ipv6()
    }

    fn ip_len(&self) -> usize {
        if self.is_v6() { 40 } else { 20 + self.ip_options.len() }
    }

    /// Bytes in front of the payload.
    pub(crate) fn headers_len(&self) -> usize {
        self.ip_len() + if self.protocol == TCP { 20 + self.tcp_options.len() } else { 8 }
    }

    /// Offset of layer 4.
    pub(crate) fn l4(&self) -> usize {
        self.ip_len()
    }

    fn pseudo(&self, len: usize) -> u32 {
        let mut sum = u32::from(self.protocol) + len as u32;
        match (self.src, self.dst) {
            (IpAddr::V4(a), IpAddr::V4(b)) => sum += words(&a.octets()) + words(&b.octets()),
            (IpAddr::V6(a), IpAddr::V6(b)) => sum += words(&a.octets()) + words(&b.octets()),
            _ => panic!("addresses of two families"),
        }
        sum
    }

    /// The packet with right checksums.
    pub(crate) fn build(&self) -> Vec<u8> {
        self.emit(false)
    }

    /// The packet as a kernel leaves it to a network card: the layer-4 checksum field holds the folded sum of
    /// the pseudo header.
    pub(crate) fn build_partial(&self) -> Vec<u8> {
        self.emit(true)
    }

    fn emit(&self, partial: bool) -> Vec<u8> {
        let mut l4 = Vec::new();
        l4.extend(self.ports.0.to_be_bytes());
        l4.extend(self.ports.1.to_be_bytes());
        let checksum_at = if self.protocol == TCP {
            l4.extend(self.seq.to_be_bytes());
            l4.extend(self.ack.to_be_bytes());
            l4.push(((20 + self.tcp_options.len()) / 4 * 16) as u8);
            l4.push(self.flags);
            l4.extend(self.window.to_be_bytes());
            l4.extend([0; 4]);
            l4.extend(&self.tcp_options);
            16
        } else {
            l4.extend(((8 + self.payload.len()) as u16).to_be_bytes());
            l4.extend([0; 2]);
            6
        };
        l4.extend(&self.payload);
        let pseudo = self.pseudo(l4.len());
        let mut field = if partial { fold(pseudo) } else { !fold(pseudo + words(&l4)) };
        if self.protocol == UDP && field == 0 {
            field = 0xffff;
        }
        l4[checksum_at..checksum_at + 2].copy_from_slice(&field.to_be_bytes());

        let mut out = Vec::new();
        match (self.src, self.dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                out.extend([0x40 | (self.ip_len() / 4) as u8, self.tos]);
                out.extend(((self.ip_len() + l4.len()) as u16).to_be_bytes());
                out.extend(self.ident.to_be_bytes());
                out.extend(if self.dont_fragment { [0x40, 0] } else { [0, 0] });
                out.extend([self.ttl, self.protocol, 0, 0]);
                out.extend(src.octets());
                out.extend(dst.octets());
                out.extend(&self.ip_options);
                let sum = !fold(words(&out));
                out[10..12].copy_from_slice(&sum.to_be_bytes());
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                out.extend((0x6000_0000 | u32::from(self.tos) << 20 | 0x4_2042).to_be_bytes());
                out.extend((l4.len() as u16).to_be_bytes());
                out.extend([self.protocol, self.ttl]);
                out.extend(src.octets());
                out.extend(dst.octets());
            }
            _ => panic!("addresses of two families"),
        }
        out.extend(l4);
        out
    }

    /// The virtio-net header of this packet as a super-packet with this segment size.
    pub(crate) fn vnet_gso(&self, gso_size: u16) -> [u8; 10] {
        let gso_type = match (self.protocol, self.is_v6()) {
            (TCP, false) => 1,
            (TCP, true) => 4,
            _ => 5,
        };
        vnet(1, gso_type, self.headers_len() as u16, gso_size, self.l4() as u16, self.checksum_offset())
    }

    /// The virtio-net header of this packet with unfinished checksum.
    pub(crate) fn vnet_partial(&self) -> [u8; 10] {
        vnet(1, 0, 0, 0, self.l4() as u16, self.checksum_offset())
    }

    fn checksum_offset(&self) -> u16 {
        if self.protocol == TCP { 16 } else { 6 }
    }
}

pub(crate) fn vnet(flags: u8, gso_type: u8, hdr_len: u16, size: u16, start: u16, offset: u16) -> [u8; 10] {
    let mut out = [flags, gso_type, 0, 0, 0, 0, 0, 0, 0, 0];
    for (at, word) in [(2, hdr_len), (4, size), (6, start), (8, offset)] {
        out[at..at + 2].copy_from_slice(&word.to_ne_bytes());
    }
    out
}

/// Payload whose every position can be told.
pub(crate) fn payload(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 256) as u8).collect()
}

fn words(bytes: &[u8]) -> u32 {
    bytes.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], *w.get(1).unwrap_or(&0)]))).sum()
}

fn fold(sum: u32) -> u16 {
    let sum = (sum >> 16) + (sum & 0xffff);
    ((sum >> 16) + (sum & 0xffff)) as u16
}

/// Parses a whole packet of TCP or UDP and checks lengths and checksums.
///
/// # Panics
/// When anything is wrong with it.
#[track_caller]
pub(crate) fn parse(packet: &[u8]) -> Spec {
    let sliced = SlicedPacket::from_ip(packet).expect("a packet");
    let (src, dst, tos, ttl, ident, dont_fragment, ip_options) = match &sliced.net {
        Some(NetSlice::Ipv4(v4)) => {
            let header = v4.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum(), "header checksum");
            assert_eq!(usize::from(header.total_len), packet.len(), "total length");
            (
                IpAddr::from(header.source),
                IpAddr::from(header.destination),
                header.dscp.value() << 2 | header.ecn.value(),
                header.time_to_live,
                header.identification,
                header.dont_fragment,
                header.options.to_vec(),
            )
        }
        Some(NetSlice::Ipv6(v6)) => {
            let header = v6.header().to_header();
            assert_eq!(usize::from(header.payload_length) + 40, packet.len(), "payload length");
            (
                IpAddr::from(header.source),
                IpAddr::from(header.destination),
                header.traffic_class,
                header.hop_limit,
                0x1234,
                true,
                Vec::new(),
            )
        }
        _ => panic!("no IP packet"),
    };
    let base = Spec { src, dst, tos, ttl, ident, dont_fragment, ip_options, ..Spec::tcp(Vec::new()) };
    match &sliced.transport {
        Some(TransportSlice::Tcp(tcp)) => {
            let header = tcp.to_header();
            let payload = tcp.payload().to_vec();
            let sum = match (src, dst) {
                (IpAddr::V4(a), IpAddr::V4(b)) => {
                    header.calc_checksum_ipv4_raw(a.octets(), b.octets(), &payload)
                }
                (IpAddr::V6(a), IpAddr::V6(b)) => {
                    header.calc_checksum_ipv6_raw(a.octets(), b.octets(), &payload)
                }
                _ => panic!("addresses of two families"),
            };
            assert_eq!(Ok(header.checksum), sum, "TCP checksum");
            Spec {
                protocol: TCP,
                ports: (header.source_port, header.destination_port),
                seq: header.sequence_number,
                ack: header.acknowledgment_number,
                flags: tcp.slice()[13],
                window: header.window_size,
                tcp_options: header.options.as_slice().to_vec(),
                payload,
                ..base
            }
        }
        Some(TransportSlice::Udp(udp)) => {
            let header = udp.to_header();
            let payload = udp.payload().to_vec();
            assert_eq!(usize::from(header.length), payload.len() + 8, "UDP length");
            let sum = match (src, dst) {
                (IpAddr::V4(a), IpAddr::V4(b)) => {
                    header.calc_checksum_ipv4_raw(a.octets(), b.octets(), &payload)
                }
                (IpAddr::V6(a), IpAddr::V6(b)) => {
                    header.calc_checksum_ipv6_raw(a.octets(), b.octets(), &payload)
                }
                _ => panic!("addresses of two families"),
            };
            assert_eq!(Ok(header.checksum), sum, "UDP checksum");
            Spec {
                protocol: UDP,
                ports: (header.source_port, header.destination_port),
                seq: base.seq,
                ack: base.ack,
                flags: base.flags,
                window: base.window,
                tcp_options: Vec::new(),
                payload,
                ..base
            }
        }
        _ => panic!("neither TCP nor UDP"),
    }
}
