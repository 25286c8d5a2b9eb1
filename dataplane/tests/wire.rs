//! Headers and encapsulations over golden packets, their truncations and mutations, and random bytes.

#[expect(unreachable_pub, reason = "the fuzz crate is its other user")]
#[path = "../fuzz/src/lib.rs"]
mod exercise;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;

use etherparse::PacketBuilder;
use felt_dataplane::encap::{self, DecapError, Inner};
use felt_dataplane::wire::{
    Icmpv4Packet, Icmpv6Packet, Ipv4Packet, Ipv4Repr, Ipv6Packet, Ipv6Repr, MacAddr, Malformed, TcpSegment,
    UdpDatagram, UdpRepr, Vni, checksum, protocol,
};
use proptest::prelude::*;

/// Reads `testdata/FOLDER/*.hex`, sorted by name.
fn golden(folder: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(folder);
    let mut packets: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let text = std::fs::read_to_string(&path).unwrap();
            let digits: String = text
                .lines()
                .filter(|line| !line.starts_with('#'))
                .flat_map(|line| line.chars().filter(|c| !c.is_whitespace()))
                .collect();
            let bytes =
                (0..digits.len()).step_by(2).map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap());
            (path.file_stem().unwrap().to_str().unwrap().to_owned(), bytes.collect())
        })
        .collect();
    packets.sort();
    assert!(!packets.is_empty(), "nothing in {}", folder.display());
    packets
}

fn exercise_all(bytes: &[u8]) {
    exercise::ipv4(bytes);
    exercise::ipv6(bytes);
    exercise::transport(bytes);
    exercise::vxlan(bytes);
    exercise::udp(bytes);
    exercise::icmp_answer(bytes);
    exercise::checksum(bytes);
}

fn vtep(last: u8) -> encap::vxlan::Vtep {
    encap::vxlan::Vtep {
        vni: Vni::new(1).unwrap(),
        mac: MacAddr([0x3a, 0, 0, 0, 0, last]),
        accept_gbp: false,
    }
}

/// Whether layer 4 of a whole packet has the right checksum.
fn transport_checksum_holds(inner: &Inner<'_>) -> bool {
    let (protocol, payload, pseudo) = match inner {
        Inner::V4(packet) => {
            let payload = packet.payload();
            (packet.protocol(), payload.to_vec(), packet.pseudo_header(packet.protocol(), payload.len()))
        }
        Inner::V6(packet) => {
            let upper = packet.upper_layer().unwrap();
            let payload = inner.bytes()[upper.offset..].to_vec();
            let pseudo = packet.pseudo_header(upper.protocol, payload.len());
            (upper.protocol, payload, pseudo)
        }
    };
    match protocol {
        protocol::ICMP => Icmpv4Packet::new_checked(&payload[..]).unwrap().verify_checksum(),
        protocol::ICMPV6 => Icmpv6Packet::new_checked(&payload[..]).unwrap().verify_checksum(pseudo),
        protocol::UDP => UdpDatagram::new_checked(&payload[..]).unwrap().verify_checksum(pseudo),
        protocol::TCP => TcpSegment::new_checked(&payload[..]).unwrap().verify_checksum(pseudo),
        other => panic!("no golden packet has protocol {other}"),
    }
}

#[test]
fn golden_packets_of_kernel_peers_are_accepted_and_their_checksums_hold() {
    for (name, bytes) in golden("vxlan") {
        // One of the two nodes is the receiver.
        let mine = if bytes[13] == 0x0b { vtep(0x0b) } else { vtep(0x0a) };
        let inner = mine.pop(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(inner.bytes().len(), bytes.len() - encap::vxlan::HEADERS_LEN, "{name}");
        assert_eq!(inner.is_v6(), name.starts_with("v6"), "{name}");
        let is_fragment = match &inner {
            Inner::V4(packet) => {
                assert!(packet.verify_checksum(), "{name}");
                packet.is_fragment()
            }
            Inner::V6(packet) => packet.upper_layer().unwrap().is_fragment(),
        };
        assert_eq!(is_fragment, name.contains("fragment"), "{name}");
        if !is_fragment {
            assert!(transport_checksum_holds(&inner), "{name}");
        }
        assert!(encap::udp::pop(inner.bytes()).is_ok(), "{name}");
    }
}

#[test]
fn golden_headers_are_emitted_again_byte_for_byte() {
    for (name, bytes) in golden("vxlan") {
        let inner = Inner::parse(&bytes[encap::vxlan::HEADERS_LEN..]).unwrap();
        match inner {
            Inner::V4(packet) if packet.options().is_empty() && !packet.is_fragment() => {
                let mut out = [0; 20];
                Ipv4Repr::parse(&packet).emit(&mut out);
                assert_eq!(out, packet.header(), "{name}");
                if packet.protocol() == protocol::UDP {
                    let mut out = packet.payload().to_vec();
                    let repr = UdpRepr::parse(&UdpDatagram::new_checked(packet.payload()).unwrap());
                    repr.emit(&mut out, packet.pseudo_header(protocol::UDP, packet.payload().len())).unwrap();
                    assert_eq!(out, packet.payload(), "{name}");
                }
            }
            Inner::V4(_) => (),
            Inner::V6(packet) => {
                let mut out = [0; 40];
                Ipv6Repr::parse(&packet).emit(&mut out);
                assert_eq!(out, inner.bytes()[..40], "{name}");
            }
        }
    }
}

#[test]
fn fragments_of_one_datagram_carry_their_offsets() {
    let find = |name: &str| golden("vxlan").into_iter().find(|(n, _)| n == name).unwrap().1;
    for (name, offset, more) in [("first", 0, true), ("middle", 1424, true), ("last", 2848, false)] {
        let bytes = find(&format!("v4-fragment-{name}"));
        let packet = Ipv4Packet::new_checked(&bytes[22..]).unwrap();
        assert_eq!((packet.fragment_offset(), packet.more_fragments()), (offset, more), "{name}");
    }
    for (name, offset, more) in [("first", 0, true), ("middle", 1376, true), ("last", 2752, false)] {
        let bytes = find(&format!("v6-fragment-{name}"));
        let upper = Ipv6Packet::new_checked(&bytes[22..]).unwrap().upper_layer().unwrap();
        assert_eq!(upper.fragment, Some((offset, more)), "{name}");
        assert_eq!((upper.offset, upper.is_later_fragment()), (48, offset != 0), "{name}");
    }
}

#[test]
fn hostile_packets_are_refused_or_left_to_the_receiver() {
    let expected = [
        ("cut-header", Err(Malformed::Truncated)),
        ("long-total-length", Err(Malformed::Length)),
        ("short-header-length", Err(Malformed::HeaderLen)),
        ("tcp-of-two-bytes", Ok(64)),
        ("ttl-one", Ok(1)),
        ("v6-extension-too-long", Ok(64)),
        ("v6-long-chain", Ok(64)),
        ("v6-long-payload-length", Err(Malformed::Length)),
        ("v6-two-fragment-headers", Ok(64)),
    ];
    let packets = golden("hostile");
    assert_eq!(packets.len(), expected.len());
    for ((name, bytes), (expected_name, outcome)) in packets.iter().zip(expected) {
        assert_eq!(name, expected_name);
        assert_eq!(Inner::parse(bytes).map(|inner| inner.ttl()), outcome, "{name}");
        assert_eq!(encap::udp::pop(bytes).is_ok(), outcome.is_ok(), "{name}");
        match Inner::parse(bytes) {
            Ok(Inner::V6(packet)) if name == "v6-two-fragment-headers" => {
                assert_eq!(packet.upper_layer().unwrap().fragment, Some((0, true)));
            }
            Ok(Inner::V6(packet)) => assert_eq!(packet.upper_layer(), Err(Malformed::HeaderLen), "{name}"),
            _ => (),
        }
        let mut headers = [0; encap::vxlan::HEADERS_LEN];
        vtep(0x0b).push(vtep(0x0a).mac, name.starts_with("v6"), &mut headers);
        let framed = [&headers[..], bytes].concat();
        let expected = if outcome.is_ok() { None } else { Some(DecapError::Ip) };
        assert_eq!(vtep(0x0a).pop(&framed).err(), expected, "{name}");
    }
}

#[test]
fn every_truncation_of_every_golden_packet_is_survived() {
    for (_, bytes) in golden("vxlan").into_iter().chain(golden("hostile")) {
        for len in 0..=bytes.len().min(160) {
            exercise_all(&bytes[..len]);
            if let Some(inner) = bytes.get(22..22 + len) {
                exercise_all(inner);
            }
        }
        for cut in [22, 42, 62] {
            if let Some(rest) = bytes.get(cut..) {
                exercise_all(rest);
            }
        }
    }
}

fn mutated_golden() -> impl Strategy<Value = Vec<u8>> {
    let packets: Vec<Vec<u8>> =
        golden("vxlan").into_iter().chain(golden("hostile")).map(|(_, bytes)| bytes).collect();
    let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6);
    (prop::sample::select(packets), 0usize..3, changes, any::<prop::sample::Index>()).prop_map(
        |(mut bytes, cut, changes, len)| {
            bytes.drain(..(cut * 22).min(bytes.len()));
            for (at, value) in changes {
                if !bytes.is_empty() {
                    // Most of what matters is in the first bytes.
                    let at = at.index(bytes.len().min(72));
                    bytes[at] = value;
                }
            }
            if len.index(4) == 0 {
                bytes.truncate(len.index(bytes.len() + 1));
            }
            bytes
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn random_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        exercise_all(&bytes);
    }

    #[test]
    fn mutated_packets_are_survived(bytes in mutated_golden()) {
        exercise_all(&bytes);
    }

    #[test]
    fn ipv4_header_round_trips_and_etherparse_agrees(
        src: u32, dst: u32, protocol: u8, ttl: u8, tos: u8, ident: u16, dont_fragment: bool,
        payload in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let repr = Ipv4Repr {
            src: Ipv4Addr::from(src), dst: Ipv4Addr::from(dst), protocol, ttl, tos, ident, dont_fragment,
            payload_len: payload.len() as u16,
        };
        let mut bytes = vec![0; 20];
        repr.emit((&mut bytes[..]).try_into().unwrap());
        bytes.extend(&payload);
        let packet = Ipv4Packet::new_checked(&bytes[..]).unwrap();
        prop_assert!(packet.verify_checksum());
        prop_assert_eq!(Ipv4Repr::parse(&packet), repr);
        prop_assert_eq!(packet.payload(), &payload[..]);
        let theirs = etherparse::Ipv4HeaderSlice::from_slice(&bytes).unwrap();
        prop_assert_eq!(theirs.header_checksum(), theirs.to_header().calc_header_checksum());
    }

    #[test]
    fn ipv6_header_round_trips(
        src: u128, dst: u128, next_header: u8, hop_limit: u8, traffic_class: u8, label in 0u32..1 << 20,
        payload in prop::collection::vec(any::<u8>(), 0..64),
    ) {
        let repr = Ipv6Repr {
            src: Ipv6Addr::from(src), dst: Ipv6Addr::from(dst), next_header, hop_limit, traffic_class,
            flow_label: label, payload_len: payload.len() as u16,
        };
        let mut bytes = vec![0; 40];
        repr.emit((&mut bytes[..]).try_into().unwrap());
        bytes.extend(&payload);
        let packet = Ipv6Packet::new_checked(&bytes[..]).unwrap();
        prop_assert_eq!(Ipv6Repr::parse(&packet), repr);
        prop_assert_eq!(packet.payload(), &payload[..]);
    }

    #[test]
    fn checksums_of_packets_built_by_etherparse_hold(
        v6: bool, tcp: bool, src: u128, dst: u128, ports: (u16, u16), payload in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let builder = if v6 {
            PacketBuilder::ipv6(src.to_be_bytes(), dst.to_be_bytes(), 64)
        } else {
            PacketBuilder::ipv4((src as u32).to_be_bytes(), (dst as u32).to_be_bytes(), 64)
        };
        let mut bytes = Vec::new();
        if tcp {
            let builder = builder.tcp(ports.0, ports.1, src as u32, 4000).ack(7).psh();
            let options = [etherparse::TcpOptionElement::Noop, etherparse::TcpOptionElement::Timestamp(1, dst as u32)];
            builder.options(&options).unwrap().write(&mut bytes, &payload).unwrap();
        } else {
            builder.udp(ports.0, ports.1).write(&mut bytes, &payload).unwrap();
        }
        let inner = Inner::parse(&bytes).unwrap();
        prop_assert!(transport_checksum_holds(&inner));
        // One flipped bit of layer 4 is found, unless it is the one that says "no checksum".
        let mut broken = bytes.clone();
        let header_len = if v6 { 40 } else { 20 };
        let at = header_len + (src as usize) % 4;
        broken[at] ^= 1 << (dst as u32 % 8);
        prop_assert!(!transport_checksum_holds(&Inner::parse(&broken).unwrap()));
    }

    #[test]
    fn incremental_update_equals_a_new_sum(mut words in prop::collection::vec(any::<u16>(), 2..40), at: prop::sample::Index, new: u16) {
        let field = |words: &[u16]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
            checksum::finish(checksum::sum(&bytes))
        };
        // A sum of zero words alone has two forms; headers never are all zero.
        words.push(0x4500);
        let before = field(&words);
        let at = at.index(words.len() - 1);
        let updated = checksum::update(before, words[at], new);
        words[at] = new;
        prop_assert_eq!(updated, field(&words));
    }
}
