//! What the fuzz targets do with their bytes. The tests of the data plane run the same functions over
//! golden and mutated packets, so they need no fuzzer.
//!
//! A function must not panic for any input; it asserts what holds for every input, with `etherparse` as
//! the second opinion wherever that reads the same thing.

use std::time::{Duration, Instant};

use etherparse::{Ipv4HeaderSlice, Ipv6HeaderSlice, SlicedPacket, TcpHeaderSlice, UdpHeaderSlice};
use felt_dataplane::encap::{self, DecapError, Inner};
use felt_dataplane::icmp::{Answerer, MAX_ANSWER_LEN, TokenBucket, Trouble};
use felt_dataplane::wire::{
    self, EthernetFrame, Icmpv4Packet, Icmpv6Packet, Ipv4Packet, Ipv6Packet, MacAddr, TcpSegment,
    UdpDatagram, Vni, VxlanPacket, checksum, protocol,
};

/// Every accessor of an IPv4 header against etherparse, and the setters.
pub fn ipv4(data: &[u8]) {
    let theirs = Ipv4HeaderSlice::from_slice(data);
    let Ok(packet) = Ipv4Packet::new_checked(data) else {
        // We refuse more: lengths that do not fit.
        if let Ok(header) = theirs {
            let (total, header_len) = (usize::from(header.total_len()), usize::from(header.ihl()) * 4);
            assert!(total < header_len || total > data.len());
        }
        return;
    };
    let header = theirs.expect("etherparse takes what we take");
    assert_eq!(packet.header_len(), usize::from(header.ihl()) * 4);
    assert_eq!(packet.total_len(), usize::from(header.total_len()));
    assert_eq!(packet.tos(), header.dcp().value() << 2 | header.ecn().value());
    assert_eq!(packet.ident(), header.identification());
    assert_eq!(packet.dont_fragment(), header.dont_fragment());
    assert_eq!(packet.more_fragments(), header.more_fragments());
    assert_eq!(packet.fragment_offset(), usize::from(header.fragments_offset().value()) * 8);
    assert_eq!(packet.is_fragment(), header.is_fragmenting_payload());
    assert_eq!(packet.ttl(), header.ttl());
    assert_eq!(packet.protocol(), header.protocol().0);
    assert_eq!(packet.header_checksum(), header.header_checksum());
    assert_eq!(packet.src(), header.source_addr());
    assert_eq!(packet.dst(), header.destination_addr());
    assert_eq!(packet.options(), header.options());
    assert_eq!(packet.header(), header.slice());
    assert_eq!(packet.header().len() + packet.payload().len(), packet.total_len());
    // etherparse's header has no place for the reserved bit, and its sum is never 0xffff, which in the field
    // means the same as 0.
    if data[6] & 0x80 == 0 && header.header_checksum() != 0xffff {
        let good = header.to_header().calc_header_checksum() == header.header_checksum();
        assert_eq!(packet.verify_checksum(), good);
    }

    let mut copy = data.to_vec();
    let mut packet = Ipv4Packet::new_checked(&mut copy[..]).expect("the same bytes");
    packet.fill_checksum();
    assert!(packet.verify_checksum());
    packet.set_ttl(packet.ttl().wrapping_sub(1));
    assert!(packet.verify_checksum());
    packet.set_tos(!packet.tos());
    assert!(packet.verify_checksum());
}

/// Every accessor of an IPv6 header against etherparse, and the walk over extension headers.
pub fn ipv6(data: &[u8]) {
    let theirs = Ipv6HeaderSlice::from_slice(data);
    let Ok(packet) = Ipv6Packet::new_checked(data) else {
        if let Ok(header) = theirs {
            assert!(wire::ipv6::HEADER_LEN + usize::from(header.payload_length()) > data.len());
        }
        return;
    };
    let header = theirs.expect("etherparse takes what we take");
    assert_eq!(packet.traffic_class(), header.traffic_class());
    assert_eq!(packet.flow_label(), header.flow_label().value());
    assert_eq!(packet.payload_len(), usize::from(header.payload_length()));
    assert_eq!(packet.next_header(), header.next_header().0);
    assert_eq!(packet.hop_limit(), header.hop_limit());
    assert_eq!(packet.src(), header.source_addr());
    assert_eq!(packet.dst(), header.destination_addr());
    assert_eq!(packet.payload().len(), packet.payload_len());

    if let Ok(upper) = packet.upper_layer() {
        assert!(upper.offset >= wire::ipv6::HEADER_LEN && upper.offset <= packet.total_len());
        assert!(!upper.is_later_fragment() || upper.is_fragment());
        if let Ok(ip) = etherparse::Ipv6Slice::from_slice(&data[..packet.total_len()])
            && packet.payload_len() > 0
            // etherparse follows authentication headers of any length and knows more headers than we do.
            && ip.payload().ip_number.0 == upper.protocol
        {
            assert_eq!(packet.total_len() - upper.offset, ip.payload().payload.len());
            assert_eq!(upper.is_fragment() && upper.fragment != Some((0, false)), ip.is_payload_fragmented());
        }
    }

    let mut copy = data.to_vec();
    let mut packet = Ipv6Packet::new_checked(&mut copy[..]).expect("the same bytes");
    let label = packet.flow_label();
    packet.set_traffic_class(0xa5);
    packet.set_hop_limit(7);
    assert_eq!((packet.traffic_class(), packet.hop_limit(), packet.flow_label()), (0xa5, 7, label));
    assert!(Ipv6Packet::new_checked(&copy[..]).is_ok());
}

/// TCP, UDP, ICMP and ICMPv6 views over the same bytes.
pub fn transport(data: &[u8]) {
    let theirs = TcpHeaderSlice::from_slice(data);
    if let Ok(segment) = TcpSegment::new_checked(data) {
        let header = theirs.expect("etherparse takes what we take");
        assert_eq!(segment.header_len(), usize::from(header.data_offset()) * 4);
        assert_eq!(
            (segment.src_port(), segment.dst_port()),
            (header.source_port(), header.destination_port())
        );
        assert_eq!(
            (segment.seq(), segment.ack()),
            (header.sequence_number(), header.acknowledgment_number())
        );
        assert_eq!((segment.window(), segment.urgent()), (header.window_size(), header.urgent_pointer()));
        assert_eq!(segment.checksum(), header.checksum());
        assert_eq!(segment.options(), header.options());
        assert_eq!(segment.flags() & wire::tcp::flags::SYN != 0, header.syn());
        assert_eq!(segment.flags() & wire::tcp::flags::CWR != 0, header.cwr());
        assert_eq!(segment.header_len() + segment.payload().len(), data.len());
        let mut copy = data.to_vec();
        let mut segment = TcpSegment::new_checked(&mut copy[..]).expect("the same bytes");
        segment.set_seq(7);
        segment.set_flags(wire::tcp::flags::ACK);
        segment.fill_checksum(0x1234);
        assert!(segment.verify_checksum(0x1234));
    } else {
        assert!(theirs.is_err());
    }

    let theirs = UdpHeaderSlice::from_slice(data);
    if let Ok(datagram) = UdpDatagram::new_checked(data) {
        let header = theirs.expect("etherparse takes what we take");
        assert_eq!(
            (datagram.src_port(), datagram.dst_port()),
            (header.source_port(), header.destination_port())
        );
        assert_eq!((datagram.len(), datagram.checksum()), (usize::from(header.length()), header.checksum()));
        assert_eq!(datagram.is_empty(), datagram.payload().is_empty());
        let mut copy = data[..datagram.len()].to_vec();
        wire::UdpRepr::parse(&datagram).emit(&mut copy, 0x4321).expect("as long as it says");
        let emitted = UdpDatagram::new_checked(&copy[..]).expect("just written");
        assert!(emitted.verify_checksum(0x4321) && emitted.checksum() != 0);
        assert_eq!(emitted.payload(), datagram.payload());
    }

    if let Ok(message) = Icmpv4Packet::new_checked(data) {
        let mut copy = data.to_vec();
        wire::icmpv4::emit(&mut copy, message.icmp_type(), message.code(), message.rest())
            .expect("long enough");
        let emitted = Icmpv4Packet::new_checked(&copy[..]).expect("just written");
        assert!(emitted.verify_checksum());
        assert_eq!((emitted.body(), emitted.rest()), (message.body(), message.rest()));
    }
    if let Ok(message) = Icmpv6Packet::new_checked(data) {
        let mut copy = data.to_vec();
        wire::icmpv6::emit(&mut copy, message.icmp_type(), message.code(), message.rest(), 0x1111)
            .expect("long enough");
        let emitted = Icmpv6Packet::new_checked(&copy[..]).expect("just written");
        assert!(emitted.verify_checksum(0x1111));
        assert_eq!((emitted.body(), emitted.rest()), (message.body(), message.rest()));
    }
}

/// VTEP addresses and network of the golden packets.
const VTEPS: [MacAddr; 2] = [MacAddr([0x3a, 0, 0, 0, 0, 0x0a]), MacAddr([0x3a, 0, 0, 0, 0, 0x0b])];

/// Decapsulation of VXLAN: what comes out was checked, and pushing it again gives the same headers.
pub fn vxlan(data: &[u8]) {
    let vni = Vni::new(1).expect("24 bits");
    for (ours, theirs) in [(VTEPS[0], VTEPS[1]), (VTEPS[1], VTEPS[0])] {
        for accept_gbp in [false, true] {
            let vtep = encap::vxlan::Vtep { vni, mac: ours, accept_gbp };
            let inner = match vtep.pop(data) {
                Ok(inner) => inner,
                Err(DecapError::Encap) if data.len() < encap::vxlan::HEADERS_LEN => continue,
                Err(_) => continue,
            };
            inner_packet(&inner);
            let header = VxlanPacket::new_checked(data).expect("popped");
            let frame = EthernetFrame::new_checked(header.payload()).expect("popped");
            assert!(frame.payload().starts_with(inner.bytes()));
            if !accept_gbp && frame.src() == theirs {
                let mut headers = [0; encap::vxlan::HEADERS_LEN];
                encap::vxlan::Vtep { vni, mac: theirs, accept_gbp }.push(ours, inner.is_v6(), &mut headers);
                assert_eq!(headers, data[..encap::vxlan::HEADERS_LEN]);
            }
        }
    }
}

/// Decapsulation of flannel's `udp`.
pub fn udp(data: &[u8]) {
    if let Ok(inner) = encap::udp::pop(data) {
        inner_packet(&inner);
        assert!(data.starts_with(inner.bytes()));
    }
}

fn inner_packet(inner: &Inner<'_>) {
    assert_eq!(inner.bytes().len(), inner.total_len());
    assert_eq!(inner.is_v6(), inner.dst().is_ipv6());
    assert_eq!(inner.is_v6(), inner.src().is_ipv6());
    let _ = (inner.ttl(), inner.tos());
}

/// Answers to any packet: when there is one, it is a whole and right packet about this one, to its source.
pub fn icmp_answer(data: &[u8]) {
    let Ok(inner) = Inner::parse(data) else { return };
    let (v4, v6) = ("10.50.1.0".parse().ok(), "fd00:50:0:1::".parse().ok());
    let mut answerer = Answerer::new(v4, v6, TokenBucket::new(1, Duration::ZERO));
    let mut out = [0u8; MAX_ANSWER_LEN];
    for trouble in [Trouble::NoRoute, Trouble::TimeExceeded, Trouble::TooBig { mtu: 1450 }] {
        let Ok(len) = answerer.answer(&inner, trouble, Instant::now(), &mut out) else { continue };
        let answer = Inner::parse(&out[..len]).expect("a possible packet");
        assert_eq!((answer.total_len(), answer.dst(), answer.is_v6()), (len, inner.src(), inner.is_v6()));
        assert!(!answer.dst().is_multicast() && !answer.dst().is_unspecified());
        let quote = match &answer {
            Inner::V4(packet) => {
                assert!(packet.verify_checksum());
                let message = Icmpv4Packet::new_checked(packet.payload()).expect("a message");
                assert!(message.verify_checksum() && wire::icmpv4::is_error(message.icmp_type()));
                packet.payload()[wire::icmpv4::HEADER_LEN..].to_vec()
            }
            Inner::V6(packet) => {
                let message = Icmpv6Packet::new_checked(packet.payload()).expect("a message");
                let pseudo = packet.pseudo_header(protocol::ICMPV6, packet.payload_len());
                assert!(message.verify_checksum(pseudo) && wire::icmpv6::is_error(message.icmp_type()));
                packet.payload()[wire::icmpv6::HEADER_LEN..].to_vec()
            }
        };
        assert!(!quote.is_empty() && inner.bytes().starts_with(&quote));
        SlicedPacket::from_ip(&out[..len]).expect("etherparse reads it");
        // No answer about an answer.
        let mut again = [0u8; MAX_ANSWER_LEN];
        assert!(answerer.answer(&answer, trouble, Instant::now(), &mut again).is_err());
    }
}

/// All sums agree: the one in use, plain code, pieces, and RFC 1071 word by word.
pub fn checksum(data: &[u8]) {
    let by_word: u64 = data
        .chunks(2)
        .map(|pair| u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)])))
        .sum();
    let expected = checksum::fold(by_word);
    assert_eq!(checksum::fold(checksum::sum(data)), expected);
    assert_eq!(checksum::fold(checksum::sum_scalar(data)), expected);
    let half = (data.len() / 2) & !1;
    assert_eq!(checksum::fold(checksum::sum(&data[..half]) + checksum::sum(&data[half..])), expected);
}
