//! Cutting and merging against packets built and checked independently.

use proptest::prelude::*;

use super::finish_checksum;
use super::gro::{Added, Coalescer, HEAD_LEN, Layout, Packet, is_partial};
use super::gso::{BadGso, Cutter};
use super::vnet_hdr::{LEN as VNET_LEN, NEEDS_CSUM, VnetHdr, gso};
use crate::encap::Inner;
use crate::testing::{self, ACK, CWR, ECE, FIN, PSH, RST, SYN, Spec, TCP, UDP, URG};

/// Cuts a super-packet as the outbound path does.
fn cut(spec: &Spec, gso_size: u16) -> Result<Vec<Vec<u8>>, BadGso> {
    let packet = spec.build_partial();
    let header = VnetHdr::parse(&spec.vnet_gso(gso_size));
    let inner = Inner::parse(&packet).expect("a packet");
    let cutter = Cutter::new(&inner, &header)?;
    Ok((0..cutter.segment_count())
        .map(|index| {
            let mut out = vec![0; cutter.headers_len()];
            let payload = cutter.cut(&packet, index, &mut out);
            out.extend_from_slice(&packet[payload]);
            out
        })
        .collect())
}

/// What one write to the TUN would be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Written {
    header: VnetHdr,
    packet: Vec<u8>,
}

impl Written {
    /// The packet with its checksum finished.
    fn finished(&self) -> Vec<u8> {
        let mut packet = self.packet.clone();
        if self.header.flags & NEEDS_CSUM != 0 {
            assert!(finish_checksum(&mut packet, &self.header, self.header.csum_offset == 6));
        }
        packet
    }
}

/// Merges packets as the inbound path does; damaged ones are left out.
fn merge(packets: &[Vec<u8>]) -> Vec<Written> {
    merge_with(&mut Coalescer::new(true, true), packets)
}

fn merge_with(coalescer: &mut Coalescer, packets: &[Vec<u8>]) -> Vec<Written> {
    let buffer = packets.concat();
    let mut at = 0;
    for packet in packets {
        let inner = Inner::parse(packet).expect("a packet");
        let layout = Layout::of(&inner);
        let partial = is_partial(packet, inner.is_v6(), &layout);
        let entry = Packet {
            at: at as u32,
            len: packet.len() as u32,
            is_v6: inner.is_v6(),
            layout,
            partial,
            gso_size: 0,
        };
        assert!(!coalescer.is_full());
        coalescer.add(&buffer, entry);
        at += packet.len();
    }
    let written = written(coalescer, &buffer);
    coalescer.clear();
    written
}

fn written(coalescer: &Coalescer, buffer: &[u8]) -> Vec<Written> {
    let mut pieces = Vec::new();
    let mut head = [0; HEAD_LEN];
    let chains = coalescer.chains().iter().filter(|chain| !chain.is_damaged());
    chains
        .map(|chain| {
            let len = coalescer.emit(chain, buffer, &mut head, &mut pieces);
            let mut packet = head[VNET_LEN..len].to_vec();
            pieces.iter().for_each(|piece| packet.extend_from_slice(piece.of(buffer)));
            assert_eq!(chain.bytes(), bytes_of(coalescer, chain, buffer));
            Written { header: VnetHdr::parse(head.first_chunk().expect("a header")), packet }
        })
        .collect()
}

fn bytes_of(coalescer: &Coalescer, chain: &super::gro::Chain, buffer: &[u8]) -> u64 {
    coalescer.singles(chain, buffer).map(|(_, piece)| u64::from(piece.len)).sum()
}

#[test]
fn every_segment_size_gives_right_packets_that_join_to_the_payload() {
    for base in [
        Spec::tcp(testing::payload(3001)),
        Spec::tcp(testing::payload(3001)).v6(),
        Spec::udp(testing::payload(3001)),
        Spec::udp(testing::payload(3001)).v6(),
    ] {
        for size in 1..=1460 {
            let segments = cut(&base, size).unwrap();
            assert_eq!(segments.len(), 3001usize.div_ceil(usize::from(size)));
            let mut joined = Vec::new();
            for (i, segment) in segments.iter().enumerate() {
                let got = testing::parse(segment);
                if base.protocol == TCP {
                    assert_eq!(got.seq, base.seq.wrapping_add(joined.len() as u32));
                }
                if !base.is_v6() {
                    assert_eq!(got.ident, base.ident.wrapping_add(i as u16));
                }
                joined.extend_from_slice(&got.payload);
                let expected =
                    Spec { payload: got.payload.clone(), seq: got.seq, ident: got.ident, ..base.clone() };
                assert_eq!(got, expected);
            }
            assert_eq!(joined, base.payload);
        }
    }
}

#[test]
fn flags_go_where_the_kernel_puts_them() {
    for flags in [ACK | PSH, ACK | FIN, ACK | PSH | FIN | CWR | ECE, ACK | URG] {
        let segments = cut(&Spec { flags, ..Spec::tcp(testing::payload(3000)) }, 1000).unwrap();
        let got: Vec<u8> = segments.iter().map(|segment| testing::parse(segment).flags).collect();
        let middle = flags & !(CWR | FIN | PSH);
        assert_eq!(got, [flags & !(FIN | PSH), middle, flags & !CWR]);
    }
}

#[test]
fn options_and_long_headers_are_copied_to_each_segment() {
    let base = Spec {
        ip_options: vec![148, 4, 0, 0, 1, 1, 1, 0],
        tcp_options: [[1, 1, 8, 10, 9, 9, 9, 9, 8, 8, 8, 8].to_vec(), vec![1; 28]].concat(),
        ..Spec::tcp(testing::payload(5000))
    };
    for segment in cut(&base, 1399).unwrap() {
        let got = testing::parse(&segment);
        assert_eq!((got.ip_options, got.tcp_options), (base.ip_options.clone(), base.tcp_options.clone()));
    }
}

#[test]
fn identification_and_sequence_wrap() {
    let base = Spec { ident: 0xfffe, seq: u32::MAX - 500, ..Spec::tcp(testing::payload(4000)) };
    let got: Vec<_> = cut(&base, 1000).unwrap().iter().map(|s| testing::parse(s)).collect();
    assert_eq!(got.iter().map(|s| s.ident).collect::<Vec<_>>(), [0xfffe, 0xffff, 0, 1]);
    assert_eq!(got[1].seq, (u32::MAX - 500).wrapping_add(1000));
}

#[test]
fn lowered_ttl_keeps_the_header_checksum_right() {
    for ttl in [2, 64, 255] {
        let base = Spec { ttl, ..Spec::tcp(testing::payload(2000)) };
        let mut packet = base.build_partial();
        let header = VnetHdr::parse(&base.vnet_gso(1000));
        let mut cutter = Cutter::new(&Inner::parse(&packet).unwrap(), &header).unwrap();
        crate::outbound::set_ttl(&mut packet, ttl - 1);
        cutter.lower_ttl();
        let mut out = vec![0; cutter.headers_len()];
        let payload = cutter.cut(&packet, 1, &mut out);
        out.extend_from_slice(&packet[payload]);
        assert_eq!(testing::parse(&out).ttl, ttl - 1);
    }
}

#[test]
fn udp_checksum_that_comes_out_zero_is_sent_as_all_ones() {
    // Two bytes of payload that bring the sum to 0xffff.
    let mut base = Spec::udp(vec![0; 2]);
    let field = u16::from_be_bytes(base.build()[26..28].try_into().unwrap());
    base.payload = field.to_be_bytes().to_vec();
    let segments = cut(&base, 2).unwrap();
    assert_eq!(segments[0][26..28], [0xff, 0xff]);
    let mut packet = base.build_partial();
    assert!(finish_checksum(&mut packet, &VnetHdr::parse(&base.vnet_partial()), true));
    assert_eq!(packet[26..28], [0xff, 0xff]);
}

#[test]
fn contradicting_headers_are_refused() {
    let base = Spec::tcp(testing::payload(3000));
    let packet = base.build_partial();
    let good = VnetHdr::parse(&base.vnet_gso(1000));
    let bad = [
        VnetHdr { gso_type: 2, ..good },
        VnetHdr { gso_type: 3, ..good },
        VnetHdr { gso_type: gso::TCPV6, ..good },
        VnetHdr { gso_type: gso::UDP_L4, ..good },
        VnetHdr { gso_type: 0x7f, ..good },
        VnetHdr { gso_size: 0, ..good },
    ];
    for header in bad {
        assert!(Cutter::new(&Inner::parse(&packet).unwrap(), &header).is_err(), "{header:?}");
    }
    // The length of the headers is never relied on.
    for hdr_len in [0, 1, 5000, u16::MAX] {
        assert!(Cutter::new(&Inner::parse(&packet).unwrap(), &VnetHdr { hdr_len, ..good }).is_ok());
    }
    let mut fragment = packet.clone();
    fragment[6] = 0x20;
    assert!(Cutter::new(&Inner::parse(&fragment).unwrap(), &good).is_err(), "fragment");
    let mut offset = packet.clone();
    for (value, what) in [(0x40, "below 20"), (0xf0, "beyond the packet")] {
        offset[32] = value;
        let len = if value == 0xf0 { 70u16 } else { 3052 };
        offset[2..4].copy_from_slice(&len.to_be_bytes());
        assert!(Cutter::new(&Inner::parse(&offset).unwrap(), &good).is_err(), "data offset {what}");
    }
}

#[test]
fn a_super_packet_without_payload_is_one_segment() {
    let base = Spec::tcp(Vec::new());
    let segments = cut(&base, 1000).unwrap();
    assert_eq!(testing::parse(&segments[0]), base);
}

#[test]
fn checksum_outside_the_packet_is_refused() {
    let base = Spec::udp(testing::payload(10));
    let packet = base.build_partial();
    for (start, offset) in [(37, 0), (20, 17), (u16::MAX, u16::MAX), (0, 38)] {
        let header =
            VnetHdr { csum_start: start, csum_offset: offset, flags: NEEDS_CSUM, ..VnetHdr::default() };
        assert!(!finish_checksum(&mut packet.clone(), &header, true), "{start} {offset}");
    }
}

/// Segments of a super-packet with this payload.
fn segments(spec: &Spec, size: u16) -> Vec<Vec<u8>> {
    cut(spec, size).unwrap()
}

#[test]
fn merging_is_the_inverse_of_cutting() {
    for base in [
        Spec { flags: ACK | PSH, ..Spec::tcp(testing::payload(30_000)) },
        Spec { flags: ACK | ECE, ..Spec::tcp(testing::payload(30_001)).v6() },
        Spec::udp(testing::payload(30_000)),
        Spec::udp(testing::payload(30_001)).v6(),
        Spec {
            tcp_options: Vec::new(),
            ident: 0xfff0,
            dont_fragment: false,
            ..Spec::tcp(testing::payload(30_003))
        },
    ] {
        for size in [500, 1000, 1398, 1447] {
            let merged = merge(&segments(&base, size));
            assert_eq!(merged.len(), 1, "{size}");
            assert_eq!(merged[0].finished(), base.build(), "{size}");
            assert_eq!(merged[0].packet, base.build_partial(), "the field holds the pseudo header's sum");
            assert_eq!(merged[0].header, VnetHdr::parse(&base.vnet_gso(size)));
        }
    }
}

#[test]
fn what_differs_is_not_merged() {
    let first = Spec::tcp(testing::payload(100));
    let next = Spec { seq: first.seq.wrapping_add(100), ident: first.ident + 1, ..first.clone() };
    assert_eq!(merge(&[first.build(), next.build()]).len(), 1, "the pair as such merges");
    type Change = fn(&mut Spec);
    let differences: [(&str, Change); 17] = [
        ("source", |s| s.src = "10.50.1.6".parse().unwrap()),
        ("destination", |s| s.dst = "10.50.2.6".parse().unwrap()),
        ("source port", |s| s.ports.0 += 1),
        ("destination port", |s| s.ports.1 += 1),
        ("DSCP", |s| s.tos = 0xb8),
        ("ECN", |s| s.tos = 3),
        ("TTL", |s| s.ttl -= 1),
        ("may be fragmented", |s| s.dont_fragment = false),
        ("gap", |s| s.seq = s.seq.wrapping_add(1)),
        ("again", |s| s.seq = s.seq.wrapping_sub(100)),
        ("acknowledgment", |s| s.ack += 1),
        ("window", |s| s.window += 1),
        ("options", |s| s.tcp_options[5] += 1),
        ("fewer options", |s| s.tcp_options.clear()),
        ("ECE", |s| s.flags |= ECE),
        ("longer", |s| s.payload.push(0)),
        ("IP options", |s| s.ip_options = vec![1, 1, 1, 0]),
    ];
    for (what, change) in differences {
        let mut other = next.clone();
        change(&mut other);
        let merged = merge(&[first.build(), other.build()]);
        assert_eq!(merged.len(), 2, "{what}");
        assert_eq!(merged[0].packet, first.build(), "{what}: untouched");
        assert_eq!(merged[1].packet, other.build(), "{what}: untouched");
        assert_eq!(merged[0].header, VnetHdr::default(), "{what}");
    }
}

#[test]
fn packets_with_special_flags_stay_alone_and_close_the_chain() {
    let data = |i: u32| Spec { seq: 1000 + i * 100, ..Spec::tcp(testing::payload(100)) };
    for flags in [ACK | SYN, ACK | FIN, ACK | RST, ACK | URG, ACK | CWR, SYN, 0] {
        let special = Spec { flags, ..data(2) };
        let merged =
            merge(&[data(0).build(), data(1).build(), special.build(), data(3).build(), data(4).build()]);
        let lens: Vec<_> = merged.iter().map(|w| testing::parse(&w.finished()).payload.len()).collect();
        assert_eq!(lens, [200, 100, 200], "{flags:#x}");
        assert_eq!(merged[1].packet, special.build(), "{flags:#x}");
    }
    let pure_ack = Spec { payload: Vec::new(), seq: 1200, ..data(0) };
    let merged = merge(&[data(0).build(), data(1).build(), pure_ack.build(), data(2).build()]);
    assert_eq!(merged.len(), 3, "an acknowledgment without data keeps its place");
}

#[test]
fn push_and_a_shorter_packet_end_a_chain() {
    let data = |i: u32, len: usize, flags: u8| Spec { seq: i, flags, ..Spec::tcp(testing::payload(len)) };
    let merged = merge(&[
        data(0, 100, ACK).build(),
        data(100, 100, ACK | PSH).build(),
        data(200, 100, ACK).build(),
        data(300, 40, ACK).build(),
        data(340, 40, ACK).build(),
        data(380, 40, ACK | PSH).build(),
    ]);
    let got: Vec<_> = merged.iter().map(|w| testing::parse(&w.finished())).collect();
    assert_eq!(got.iter().map(|s| s.payload.len()).collect::<Vec<_>>(), [200, 140, 80]);
    assert_eq!(got.iter().map(|s| s.flags).collect::<Vec<_>>(), [ACK | PSH, ACK, ACK | PSH]);
}

#[test]
fn identification_must_count_up_unless_fragments_are_ruled_out() {
    let data = |i: u32, ident: u16, dont_fragment: bool| Spec {
        seq: i * 100,
        ident,
        dont_fragment,
        ..Spec::tcp(testing::payload(100))
    };
    let count = |df, idents: [u16; 3]| {
        let packets: Vec<_> =
            idents.into_iter().enumerate().map(|(i, ident)| data(i as u32, ident, df).build()).collect();
        merge(&packets).len()
    };
    assert_eq!(count(false, [0xfffe, 0xffff, 0]), 1, "wraps");
    assert_eq!(count(false, [7, 7, 7]), 3);
    assert_eq!(count(false, [7, 8, 10]), 2);
    assert_eq!(count(true, [0, 0, 0]), 1, "means nothing with DF");
}

#[test]
fn reordered_packets_keep_their_order() {
    let all = segments(&Spec::tcp(testing::payload(1000)), 100);
    let mut shuffled = all.clone();
    shuffled.swap(3, 4);
    shuffled.swap(7, 9);
    let merged = merge(&shuffled);
    let mut at = 0;
    for written in &merged {
        let got = testing::parse(&written.finished());
        for part in got.payload.chunks(100) {
            assert_eq!(part, testing::parse(&shuffled[at]).payload);
            at += 1;
        }
    }
    assert_eq!(at, 10);
}

#[test]
fn interleaved_flows_merge_and_leave_in_the_order_of_their_first_packets() {
    let flow = |port: u16| Spec { ports: (port, 80), ..Spec::tcp(testing::payload(1000)) };
    let flows: Vec<Vec<_>> = (1..=20).map(|port| segments(&flow(port), 100)).collect();
    let mixed: Vec<_> = (0..10).flat_map(|i| flows.iter().map(move |flow| flow[i].clone())).collect();
    let merged = merge(&mixed);
    assert_eq!(merged.len(), 20);
    for (i, written) in merged.iter().enumerate() {
        assert_eq!(written.finished(), flow(i as u16 + 1).build());
    }
}

#[test]
fn many_flows_are_all_written_in_order_even_where_the_table_is_too_small() {
    let packets: Vec<_> = (0..500u16)
        .map(|i| {
            let flow = i % 250;
            let half = u32::from(i / 250);
            Spec { ports: (flow, 80), seq: half * 10, ..Spec::tcp(vec![flow as u8; 10]) }.build()
        })
        .collect();
    let merged = merge(&packets);
    let mut next = vec![0; 250];
    for written in &merged {
        let got = testing::parse(&written.finished());
        let flow = usize::from(got.ports.0);
        assert_eq!(got.seq, next[flow], "flow {flow}");
        next[flow] += got.payload.len() as u32;
    }
    assert!(next.iter().all(|n| *n == 20));
    assert!(merged.len() < 400, "most flows find a place: {}", merged.len());
}

#[test]
fn fragments_close_all_chains_and_stay_as_they_are() {
    let whole = segments(&Spec::udp(testing::payload(400)), 100);
    let mut fragment = Spec::udp(testing::payload(100)).build();
    fragment[6] = 0x20;
    let fragment_sum = {
        fragment[10..12].fill(0);
        !crate::wire::checksum::fold(crate::wire::checksum::sum(&fragment[..20]))
    };
    fragment[10..12].copy_from_slice(&fragment_sum.to_be_bytes());
    let packets = [&whole[..2], &[fragment.clone()], &whole[2..]].concat();
    let merged = merge(&packets);
    assert_eq!(merged.len(), 3);
    assert_eq!((merged[1].packet.clone(), merged[1].header), (fragment, VnetHdr::default()));
}

#[test]
fn every_flipped_bit_keeps_a_packet_out_of_a_merge() {
    let all = segments(&Spec::tcp(testing::payload(300)), 100);
    let good = merge(&all);
    for packet in 0..all.len() {
        for bit in 0..all[packet].len() * 8 {
            // Version, lengths and fragment bits make another packet of it.
            if bit / 8 < 8 {
                continue;
            }
            let mut damaged = all.clone();
            damaged[packet][bit / 8] ^= 0x80 >> (bit % 8);
            for written in merge(&damaged) {
                assert_ne!(written, good[0]);
                if written.header.flags == 0 {
                    assert!(damaged.contains(&written.packet), "written as it came");
                } else {
                    let payload = testing::parse(&written.finished()).payload;
                    let start = payload.len() <= 200;
                    assert!(start, "no damaged payload gets a new checksum: packet {packet} bit {bit}");
                    let clean = all.iter().map(|p| testing::parse(p).payload).collect::<Vec<_>>();
                    assert!(payload.chunks(100).all(|part| clean.iter().any(|c| c == part)));
                }
            }
        }
    }
}

#[test]
fn damaged_packets_are_reported() {
    let all = segments(&Spec::tcp(testing::payload(300)), 100);
    let mut second = all.clone();
    second[1][60] ^= 1;
    let buffer = second.concat();
    let mut coalescer = Coalescer::new(true, true);
    let added: Vec<_> = (0..3)
        .map(|i| {
            let packet = &second[i];
            let inner = Inner::parse(packet).unwrap();
            let at = (i * packet.len()) as u32;
            let layout = Layout::of(&inner);
            coalescer.add(
                &buffer,
                Packet { at, len: packet.len() as u32, is_v6: false, layout, partial: false, gso_size: 0 },
            )
        })
        .collect();
    assert_eq!(added, [Added::Taken, Added::Damaged, Added::Taken]);

    let mut first = all.clone();
    first[0][60] ^= 1;
    let mut coalescer = Coalescer::new(true, true);
    let written = merge_with(&mut coalescer, &first);
    assert_eq!(written.len(), 1, "the damaged head is left out, the others merge");
    assert_eq!(testing::parse(&written[0].finished()).payload.len(), 200);
}

#[test]
fn unfinished_checksums_are_recognised_and_passed_on_as_such() {
    for base in [
        Spec::tcp(testing::payload(100)),
        Spec::tcp(testing::payload(101)).v6(),
        Spec::udp(testing::payload(100)),
        Spec::udp(testing::payload(101)).v6(),
    ] {
        let packet = base.build_partial();
        let merged = merge(std::slice::from_ref(&packet));
        assert_eq!(merged[0].header, VnetHdr::parse(&base.vnet_partial()));
        assert_eq!((merged[0].packet.clone(), merged[0].finished()), (packet, base.build()));
        let merged = merge(&[base.build()]);
        assert_eq!(merged[0].header, VnetHdr::default(), "a finished one is not touched");
    }
}

#[test]
fn datagrams_without_checksum_and_those_of_tunnels_are_not_merged() {
    let mut all = segments(&Spec::udp(testing::payload(400)), 100);
    all.iter_mut().for_each(|packet| packet[26..28].fill(0));
    assert_eq!(merge(&all).len(), 4);
    for port in [4789, 8472, 6081] {
        let tunnel = Spec { ports: (1, port), ..Spec::udp(testing::payload(400)) };
        assert_eq!(merge(&segments(&tunnel, 100)).len(), 4, "{port}");
    }
}

#[test]
fn chains_end_at_the_largest_packet_and_at_64() {
    let lens = |payload: usize, size: u16| {
        let flow = Spec::udp(testing::payload(payload));
        let merged = merge(&segments(&flow, size));
        merged.iter().map(|w| testing::parse(&w.finished()).payload.len()).collect::<Vec<_>>()
    };
    assert_eq!(lens(200, 1), [64, 64, 64, 8]);
    assert_eq!(lens(65_507, 8000), [65_507], "the largest datagram there is");
    let first = Spec::tcp(testing::payload(56_000));
    let second = Spec { seq: first.seq.wrapping_add(56_000), ..first.clone() };
    let merged = merge(&[segments(&first, 1400), segments(&second, 1400)].concat());
    let lens: Vec<_> = merged.iter().map(|w| testing::parse(&w.finished()).payload.len()).collect();
    assert_eq!(lens, [46 * 1400, 34 * 1400], "one more would not fit a packet");
}

#[test]
fn merging_that_is_off_is_off() {
    let tcp = segments(&Spec::tcp(testing::payload(300)), 100);
    let udp = segments(&Spec::udp(testing::payload(300)), 100);
    let both = [tcp, udp].concat();
    assert_eq!(merge_with(&mut Coalescer::new(false, false), &both).len(), 6);
    assert_eq!(merge_with(&mut Coalescer::new(true, false), &both).len(), 4);
    assert_eq!(merge_with(&mut Coalescer::new(false, true), &both).len(), 4);
}

#[test]
fn cut_headers_stay_alone() {
    for (proto, lens) in [(TCP, 0..20), (UDP, 0..8)] {
        for len in lens {
            let mut packet = Spec { protocol: proto, ..Spec::udp(Vec::new()) }.build()[..20].to_vec();
            packet.extend(vec![0xff; len]);
            packet[2..4].copy_from_slice(&(20 + len as u16).to_be_bytes());
            assert_eq!(merge(&[packet.clone(), packet.clone()]).len(), 2, "{proto} {len}");
        }
    }
}

/// A stream of packets of a few flows with random lengths, flags and gaps.
fn arbitrary_packets() -> impl Strategy<Value = Vec<Spec>> {
    let one = (0..4u16, any::<bool>(), any::<bool>(), 0..400usize, 0..20u8, any::<bool>());
    proptest::collection::vec(one, 1..60).prop_map(|all| {
        let mut seqs = [0u32; 16];
        let mut ident = 0;
        all.into_iter()
            .map(|(port, tcp, v6, len, odd, same_len)| {
                let len = if same_len { 100 } else { len };
                let spec =
                    if tcp { Spec::tcp(testing::payload(len)) } else { Spec::udp(testing::payload(len)) };
                let spec = if v6 { spec.v6() } else { spec };
                let seq = &mut seqs[usize::from(port) * 4 + usize::from(tcp) * 2 + usize::from(v6)];
                ident += 1;
                let flags = match odd {
                    0 => ACK | FIN,
                    1 => ACK | PSH,
                    2 => ACK | CWR,
                    _ => ACK,
                };
                let gap = if odd == 3 { 5 } else { 0 };
                let spec = Spec { ports: (port, 80), seq: *seq + gap, ident, flags, ..spec };
                *seq += len as u32 + gap;
                spec
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Cutting what was merged gives every packet back, in the order of its flow.
    #[test]
    fn merged_then_cut_is_the_identity(specs in arbitrary_packets()) {
        let packets: Vec<_> = specs.iter().map(Spec::build).collect();
        let mut back = Vec::new();
        for written in merge(&packets) {
            if written.header.gso_type == gso::NONE {
                back.push(written.packet);
                continue;
            }
            let inner = Inner::parse(&written.packet).unwrap();
            let cutter = Cutter::new(&inner, &written.header).unwrap();
            for index in 0..cutter.segment_count() {
                let mut out = vec![0; cutter.headers_len()];
                let payload = cutter.cut(&written.packet, index, &mut out);
                out.extend_from_slice(&written.packet[payload]);
                back.push(out);
            }
        }
        let key = |packet: &Vec<u8>| {
            let spec = testing::parse(packet);
            (spec.src, spec.protocol, spec.ports)
        };
        // A stable sort by flow keeps the order inside each. Identifications of a packet that may not be
        // fragmented may change.
        let normal = |mut packet: Vec<u8>| {
            if packet[0] >> 4 == 4 {
                packet[4..6].fill(0);
                packet[10..12].fill(0);
            }
            packet
        };
        let mut expected = packets.clone();
        expected.sort_by_key(key);
        back.sort_by_key(key);
        let expected: Vec<_> = expected.into_iter().map(normal).collect();
        let back: Vec<_> = back.into_iter().map(normal).collect();
        prop_assert_eq!(back, expected);
    }

    /// No bytes make cutting or merging panic.
    #[test]
    fn any_bytes_are_survived(
        bytes in proptest::collection::vec(any::<u8>(), 0..200),
        first in prop_oneof![Just(0x45u8), Just(0x46), Just(0x60), any::<u8>()],
        proto in prop_oneof![Just(TCP), Just(UDP), Just(44), Just(0)],
        header in any::<[u8; 10]>(),
    ) {
        let mut bytes = bytes;
        if let Some(byte) = bytes.first_mut() {
            *byte = first;
        }
        let at = if first >> 4 == 4 { 9 } else { 6 };
        if let Some(byte) = bytes.get_mut(at) {
            *byte = proto;
        }
        if first >> 4 == 4 && bytes.len() >= 20 {
            let len = (bytes.len() as u16).to_be_bytes();
            bytes[2..4].copy_from_slice(&len);
        }
        if first >> 4 == 6 && bytes.len() >= 40 {
            let len = (bytes.len() as u16 - 40).to_be_bytes();
            bytes[4..6].copy_from_slice(&len);
        }
        let header = VnetHdr::parse(&header);
        let _ = finish_checksum(&mut bytes.clone(), &header, true);
        if let Ok(inner) = Inner::parse(&bytes) {
            for gso_type in [header.gso_type, gso::TCPV4, gso::TCPV6, gso::UDP_L4] {
                if let Ok(cutter) = Cutter::new(&inner, &VnetHdr { gso_type, ..header }) {
                    let mut out = vec![0; cutter.headers_len()];
                    for index in 0..cutter.segment_count().min(300) {
                        cutter.cut(inner.bytes(), index, &mut out);
                    }
                }
            }
            let packet = inner.bytes().to_vec();
            let written = merge(&[packet.clone(), packet.clone(), packet.clone()]);
            prop_assert!(!written.is_empty() && written.len() <= 3);
        }
    }
}
