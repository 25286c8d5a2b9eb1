//! Engines over memory: both directions, both encapsulations, all families, without privileges.

mod common;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use common::packets::{self, ACK, PSH, Spec, UDP};
use common::{MTU, Setup, endpoint, fib, peer};
use felt_dataplane::config::{OffloadMode, SourceGuard};
use felt_dataplane::fib::{Fib, FibChange};
use felt_dataplane::socket::memory::{MemoryNetwork, Weather};
use felt_dataplane::stats::{DropReason, PeerTotals};

fn merged() -> MemoryNetwork {
    MemoryNetwork::new(Weather { merged: true, ..Weather::default() })
}

/// TTL that a packet arrives with.
fn after(setup: Setup, spec: &Spec) -> Spec {
    Spec { ttl: if setup.is_vxlan { spec.ttl } else { spec.ttl - 2 }, ..spec.clone() }
}

#[test]
fn packets_cross_in_every_combination_with_right_checksums() {
    for setup in Setup::all() {
        let network = MemoryNetwork::new(Weather::default());
        let nodes = setup.nodes(2, &network);
        for spec in [
            Spec::tcp(packets::payload(1)),
            Spec::tcp(packets::payload(1000)),
            Spec::udp(packets::payload(0)),
            Spec::udp(packets::payload(1001)),
        ] {
            for spec in [spec.clone(), spec.v6()] {
                nodes[0].device.push_packet(&spec.build());
                assert_eq!(nodes[1].receive().parse(), after(setup, &spec), "{setup:?}");
                // With the checksum left to us, as packets from pods have it.
                nodes[0].device.push(&[&spec.vnet_partial()[..], &spec.build_partial()].concat());
                assert_eq!(nodes[1].receive().parse(), after(setup, &spec), "{setup:?}");
            }
        }
        for node in &nodes {
            node.check_sums();
        }
        let counters = nodes[0].counters();
        assert_eq!((counters.outbound.received_packets, counters.outbound.forwarded_packets), (16, 16));
        assert_eq!(nodes[1].counters().events.would_drop_strict, 0);
    }
}

#[test]
fn super_packets_cross_a_virtual_link_and_a_wire() {
    for setup in Setup::all().filter(|setup| setup.offload == OffloadMode::Auto) {
        for on_wire in [false, true] {
            let network = MemoryNetwork::new(Weather { merged: !on_wire, ..Weather::default() });
            let nodes = setup.nodes(2, &network);
            for spec in [
                Spec { flags: ACK | PSH, ..Spec::tcp(packets::payload(60_001)) },
                Spec { flags: ACK | PSH, ..Spec::tcp(packets::payload(60_001)).v6() },
                Spec::udp(packets::payload(60_001)),
                Spec::udp(packets::payload(60_001)).v6(),
            ] {
                let size = MTU - spec.headers_len() as u16;
                nodes[0].device.push(&[&spec.vnet_gso(size)[..], &spec.build_partial()].concat());
                let expected = after(setup, &spec);
                let mut got: Vec<u8> = Vec::new();
                let mut writes = 0;
                while got.len() < expected.payload.len() {
                    let written = nodes[1].receive();
                    let part = written.parse();
                    assert!(part.payload.len() <= usize::from(size) || written.gso_size() == size.into());
                    assert_eq!((part.ports, part.ttl), (expected.ports, expected.ttl));
                    got.extend(part.payload);
                    writes += 1;
                }
                assert_eq!(got, expected.payload, "{setup:?}");
                assert!(on_wire || writes == 1, "one packet again: {writes} writes, {setup:?}");
            }
            nodes[0].check_sums();
            nodes[1].check_sums();
            let sent = nodes[0].counters().outbound;
            assert_eq!(sent.forwarded_packets, nodes[1].counters().inbound.forwarded_packets);
            assert_eq!(sent.forwarded_bytes, nodes[1].counters().inbound.forwarded_bytes);
        }
    }
}

#[test]
fn a_run_that_must_break_is_split_evenly() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let size = MTU - Spec::tcp(Vec::new()).headers_len() as u16;
    // 46 segments: two more than fit one datagram's 65,507 bytes.
    let spec = Spec::tcp(packets::payload(46 * usize::from(size)));
    nodes[0].device.push(&[&spec.vnet_gso(size)[..], &spec.build_partial()].concat());
    let mut got = Vec::new();
    while got.len() < spec.payload.len() {
        let part = nodes[1].receive().parse().payload;
        // Merged again, unless the second message came in another batch.
        assert!([23, 46].contains(&(part.len() / usize::from(size))), "{}", part.len());
        got.extend(part);
    }
    assert_eq!(got, spec.payload);
    nodes[0].wait_counters("two sends", |c| {
        (c.outbound.reads, c.outbound.writes, c.outbound.forwarded_packets) == (1, 2, 46)
    });
}

#[test]
fn an_unknown_destination_is_answered_from_the_tunnels_address() {
    for setup in Setup::all() {
        let network = merged();
        let nodes = setup.nodes(2, &network);
        let spec = Spec { dst: "10.50.77.1".parse().unwrap(), ..Spec::udp(packets::payload(100)) };
        nodes[0].device.push_packet(&spec.build());
        let (to, answer) = nodes[0].answer();
        assert_eq!(to, spec.src);
        assert_eq!(answer[12..16], [10, 50, 1, 0]);
        assert_eq!(answer[20..22], [3, 0]);
        assert_eq!(answer[28..56], spec.build()[..28]);
        let spec = Spec { dst: "fd00:50:0:77::1".parse().unwrap(), ..Spec::udp(packets::payload(100)).v6() };
        nodes[0].device.push_packet(&spec.build());
        let (to, answer) = nodes[0].answer();
        assert_eq!(to, spec.src);
        assert_eq!(answer[40..42], [1, 0]);
        nodes[0].wait_counters("answers", |c| c.outbound.answered.get(DropReason::NoRoute) == 2);
    }
}

#[test]
fn a_super_packet_without_route_gets_one_answer_and_counts_its_segments() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let spec = Spec { dst: "10.50.77.1".parse().unwrap(), ..Spec::tcp(packets::payload(10_000)) };
    nodes[0].device.push(&[&spec.vnet_gso(1000)[..], &spec.build_partial()].concat());
    nodes[0].answer();
    nodes[0].wait_counters("ten refused", |c| c.outbound.answered.get(DropReason::NoRoute) == 10);
    assert!(nodes[0].answers.pop().is_none());
}

#[test]
fn ttl_ends_in_udp_mode_at_either_end_and_never_in_vxlan() {
    for setup in Setup::all() {
        let network = merged();
        let nodes = setup.nodes(2, &network);
        for base in [Spec::udp(packets::payload(10)), Spec::udp(packets::payload(10)).v6()] {
            for ttl in 1..=2 {
                let spec = Spec { ttl, ..base.clone() };
                nodes[0].device.push_packet(&spec.build());
                if setup.is_vxlan {
                    assert_eq!(nodes[1].receive().parse().ttl, ttl);
                    continue;
                }
                let (node, from) = if ttl == 1 { (&nodes[0], 1) } else { (&nodes[1], 2) };
                let (to, answer) = node.answer();
                assert_eq!(to, spec.src);
                let (at, source): (usize, IpAddr) = if base.is_v6() {
                    (40, format!("fd00:50:0:{from}::").parse().unwrap())
                } else {
                    (20, format!("10.50.{from}.0").parse().unwrap())
                };
                assert_eq!(answer[at..at + 2], if base.is_v6() { [3, 0] } else { [11, 0] });
                match source {
                    IpAddr::V4(addr) => assert_eq!(answer[12..16], addr.octets()),
                    IpAddr::V6(addr) => assert_eq!(answer[8..24], addr.octets()),
                }
            }
        }
        nodes.iter().for_each(|node| node.check_sums());
    }
}

#[test]
fn what_does_not_fit_and_may_not_be_fragmented_is_answered() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let large = Spec::udp(packets::payload(1423));
    assert_eq!(large.build().len(), usize::from(MTU) + 1);
    nodes[0].device.push_packet(&large.build());
    let (_, answer) = nodes[0].answer();
    assert_eq!((&answer[20..22], &answer[26..28]), (&[3, 4][..], &MTU.to_be_bytes()[..]));
    let may = Spec { dont_fragment: false, ..large.clone() };
    nodes[0].device.push_packet(&may.build());
    assert_eq!(nodes[1].receive().parse(), may);
    let v6 = Spec::udp(packets::payload(1403)).v6();
    nodes[0].device.push_packet(&v6.build());
    let (_, answer) = nodes[0].answer();
    assert_eq!((answer[40], &answer[44..48]), (2, &u32::from(MTU).to_be_bytes()[..]));
    nodes[0].wait_counters("two too big", |c| c.outbound.answered.get(DropReason::TooBig) == 2);
}

#[test]
fn answers_are_limited_and_the_rest_is_counted_as_dropped() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let spec = Spec { dst: "10.50.77.1".parse().unwrap(), ..Spec::udp(packets::payload(10)) };
    for _ in 0..2000 {
        nodes[0].device.push_packet(&spec.build());
    }
    nodes[0].wait_counters("2000 verdicts", |c| {
        c.outbound.answered.get(DropReason::NoRoute) + c.outbound.dropped.get(DropReason::NoRoute) == 2000
    });
    let counters = nodes[0].counters().outbound;
    assert!((100..1500).contains(&counters.answered.total()), "{counters:?}");
    assert_eq!(counters.answers_suppressed, counters.dropped.total());
}

#[test]
fn a_new_table_is_used_from_the_next_batch_on() {
    let network = merged();
    let setup = Setup::default();
    let nodes = setup.nodes(3, &network);
    let spec = Spec::udp(packets::payload(10));
    nodes[0].device.push_packet(&spec.build());
    assert_eq!(nodes[1].receive().parse(), spec);
    // Node 2's subnet moves to node 3, which has the frames addressed to itself now.
    let moved = fib(&[2, 3], false)
        .with_changes(&[FibChange::Set("10.50.2.0/24".parse().unwrap(), peer(3, endpoint(3, false)))]);
    nodes[0].engine().publish(moved);
    nodes[0].device.push_packet(&spec.build());
    assert_eq!(nodes[2].receive().parse(), spec);
    nodes[0].engine().publish(Fib::new());
    nodes[0].device.push_packet(&spec.build());
    nodes[0].answer();
    assert_eq!(nodes[1].device.written(), 0);
}

#[test]
fn tables_that_change_under_traffic_lose_nothing() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let spec = Spec::udp(packets::payload(10));
    let table = fib(&[2], false);
    let mut received = 0;
    for i in 0..5000 {
        nodes[0].device.push_packet(&Spec { ident: i, ..spec.clone() }.build());
        if i % 5 == 0 {
            nodes[0].engine().publish(table.clone());
        }
        while let Some(written) = nodes[1].device.pop() {
            received += packets_in(&written);
        }
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while received < 5000 && Instant::now() < deadline {
        if let Some(written) = nodes[1].device.pop() {
            received += packets_in(&written);
        }
    }
    assert_eq!(received, 5000);
}

/// Datagrams of 10 bytes in a written super-packet.
fn packets_in(written: &[u8]) -> usize {
    (written.len() - 10 - 28) / 10
}

#[test]
fn a_stop_takes_milliseconds_and_leaves_nothing_running() {
    let network = merged();
    let mut nodes = Setup::default().nodes(2, &network);
    let engine = nodes[0].engine.take().unwrap();
    common::wait_for("idle threads", || (engine.heartbeat().waiting == 2).then_some(()));
    assert!(engine.is_alive());
    let heartbeat = engine.heartbeat();
    assert_eq!(heartbeat.threads, 2);
    let start = Instant::now();
    engine.stop();
    assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
    nodes[0].device.push_packet(&Spec::udp(Vec::new()).build());
    assert_eq!(nodes[1].device.written(), 0);
}

#[test]
fn a_deleted_device_ends_the_thread_and_is_seen() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    nodes[0].device.read_faults().fail(0, 1, 77); // EBADFD
    nodes[0].device.push_packet(&Spec::udp(Vec::new()).build());
    common::wait_for("a dead thread", || (!nodes[0].engine().is_alive()).then_some(()));
}

#[test]
fn other_errors_of_reading_do_not_end_the_loop() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    nodes[0].device.read_faults().fail(0, 2, 22); // EINVAL
    let spec = Spec::udp(packets::payload(5));
    nodes[0].device.push_packet(&spec.build());
    assert_eq!(nodes[1].receive().parse(), spec);
    assert!(nodes[0].engine().is_alive());
}

/// Lets one send fail and returns what became of the packets: errno, how often, and the reason of the drop or
/// `None` if it still gets through.
fn send_fault(errno: i32, count: usize, segmented: bool) -> (Option<DropReason>, bool) {
    let network = merged();
    let nodes = Setup::default().nodes(3, &network);
    let spec = Spec::tcp(packets::payload(if segmented { 5000 } else { 500 }));
    nodes[0].socket.send_faults().fail(0, count, errno);
    nodes[0].device.push(&[&spec.vnet_gso(1000)[..], &spec.build_partial()].concat());
    let packets = if segmented { 5 } else { 1 };
    nodes[0].wait_counters("verdicts", |c| {
        c.outbound.received_packets == packets
            && c.outbound.forwarded_packets + c.outbound.dropped.total() + c.outbound.answered.total()
                == packets
    });
    let counters = nodes[0].counters();
    // Others are not disturbed.
    let other = Spec { dst: "10.50.3.9".parse().unwrap(), ..Spec::udp(packets::payload(7)) };
    nodes[0].device.push_packet(&other.build());
    assert_eq!(nodes[2].receive().parse(), other);
    let reason = DropReason::ALL.iter().find(|reason| {
        counters.outbound.dropped.get(**reason) + counters.outbound.answered.get(**reason) > 0
    });
    if reason.is_none() {
        let mut got = Vec::new();
        while got.len() < spec.payload.len() {
            got.extend(nodes[1].receive().parse().payload);
        }
        assert_eq!(got, spec.payload);
    }
    (reason.copied(), nodes[0].engine().offload_state().udp_gso)
}

#[test]
fn each_error_of_sending_has_its_remedy() {
    // Numbers of asm-generic/errno.h.
    let (eperm, eintr, eio, eagain, einval, eproto) = (1, 4, 5, 11, 22, 71);
    let (emsgsize, enetunreach, enobufs, econnrefused, ehostunreach) = (90, 101, 105, 111, 113);
    for segmented in [false, true] {
        // Once: tried again.
        for errno in [eperm, eintr, eagain, eproto, enetunreach, enobufs, econnrefused, ehostunreach] {
            assert_eq!(send_fault(errno, 1, segmented), (None, true), "errno {errno} once");
        }
        assert_eq!(send_fault(enobufs, 2, segmented).0, None);
        // For good: dropped for its reason.
        for (errno, reason) in [
            (eperm, DropReason::Eperm),
            (eagain, DropReason::Eagain),
            (enetunreach, DropReason::Unreachable),
            (ehostunreach, DropReason::Unreachable),
            (econnrefused, DropReason::Unreachable),
            (enobufs, DropReason::Enobufs),
        ] {
            let tries = if errno == enobufs { 3 } else { 2 };
            assert_eq!(send_fault(errno, tries, segmented).0, Some(reason), "errno {errno} for good");
        }
    }
    assert_eq!(send_fault(eio, 1, false).0, Some(DropReason::Eio));
    assert_eq!(send_fault(einval, 1, false).0, Some(DropReason::Einval));
    assert_eq!(send_fault(emsgsize, 1, false).0, Some(DropReason::TooBig));
    // A segmented send that is refused is sent again in single datagrams; only EIO is for ever.
    assert_eq!(send_fault(eio, 1, true), (None, false));
    assert_eq!(send_fault(einval, 1, true), (None, true));
    assert_eq!(send_fault(emsgsize, 1, true), (None, true));
}

#[test]
fn a_path_that_is_too_small_for_segments_gets_single_datagrams_for_a_while() {
    let network = merged();
    let nodes = Setup::default().nodes(3, &network);
    let spec = Spec::tcp(packets::payload(5000));
    nodes[0].socket.send_faults().fail(0, 1, 90);
    for dst in ["10.50.2.5", "10.50.2.5", "10.50.3.5"] {
        let spec = Spec { dst: dst.parse().unwrap(), ..spec.clone() };
        nodes[0].device.push(&[&spec.vnet_gso(1000)[..], &spec.build_partial()].concat());
        let node = if dst == "10.50.2.5" { &nodes[1] } else { &nodes[2] };
        let mut got = 0;
        while got < 5000 {
            got += node.receive().parse().payload.len();
        }
    }
    let counters = nodes[0].counters();
    assert_eq!(counters.events.gso_fallbacks, 1);
    assert_eq!(counters.outbound.writes, 5 + 5 + 1, "the other peer is still sent to in one");
}

#[test]
fn refused_merged_writes_are_written_singly_and_merging_ends() {
    for is_tcp in [true, false] {
        let network = merged();
        let nodes = Setup::default().nodes(2, &network);
        let payload = packets::payload(3000);
        let spec = if is_tcp { Spec::tcp(payload) } else { Spec::udp(payload) };
        nodes[1].device.write_faults().fail(0, 1, 22);
        for _ in 0..2 {
            nodes[0].device.push(&[&spec.vnet_gso(1000)[..], &spec.build_partial()].concat());
            let got: Vec<_> = (0..3).flat_map(|_| nodes[1].receive().parse().payload).collect();
            assert_eq!(got, spec.payload);
        }
        let state = nodes[1].engine().offload_state();
        assert_eq!((state.tun_gro_tcp, state.tun_gro_udp), (!is_tcp, is_tcp));
        assert_eq!(nodes[1].counters().events.gro_fallbacks, 1);
        nodes[1].check_sums();
    }
}

#[test]
fn errors_of_writing_are_counted_by_reason() {
    for (errno, reason) in [
        (22, DropReason::TunEinval),
        (5, DropReason::TunEio),
        (77, DropReason::TunEio),
        (11, DropReason::TunFull),
        (12, DropReason::TunFull),
        (14, DropReason::TunError),
    ] {
        let network = merged();
        let nodes = Setup::default().nodes(2, &network);
        nodes[1].device.write_faults().fail(0, 1, errno);
        let spec = Spec::udp(packets::payload(5));
        nodes[0].device.push_packet(&spec.build());
        nodes[1].wait_counters("a drop", |c| c.inbound.dropped.get(reason) == 1);
        nodes[0].device.push_packet(&spec.build());
        assert_eq!(nodes[1].receive().parse(), spec);
    }
}

#[test]
fn loss_reordering_and_damage_harm_no_other_packet() {
    for (weather, exact) in [
        (Weather { lose_every: 7, ..Weather::default() }, false),
        (Weather { swap_every: 5, ..Weather::default() }, true),
        (Weather { damage_every: 6, ..Weather::default() }, false),
    ] {
        let network = MemoryNetwork::new(weather);
        let nodes = Setup::default().nodes(2, &network);
        let total = 300;
        for i in 0..total {
            // Each packet tells its number in all its bytes.
            let spec = Spec { seq: i * 100, ..Spec::tcp(vec![i as u8; 100]) };
            nodes[0].device.push_packet(&spec.build());
        }
        // One more in case the last one was held back.
        nodes[0].device.push_packet(&Spec { ports: (1, 1), ..Spec::tcp(vec![0; 100]) }.build());
        nodes[0].wait_counters("all sent", |c| c.outbound.forwarded_packets == u64::from(total) + 1);
        common::wait_for("an idle receiver", || {
            (nodes[1].socket.pending() == 0 && nodes[1].engine().heartbeat().waiting == 2).then_some(())
        });
        nodes[1].check_sums();
        let mut seen = vec![0; total as usize];
        while let Some(bytes) = nodes[1].device.pop() {
            let written =
                common::Written { header: bytes[..10].try_into().unwrap(), packet: bytes[10..].to_vec() };
            // A damaged packet that stayed alone is left to the receiver's own check.
            if written.header[0] == 0 && weather.damage_every != 0 {
                let last = written.packet.len() - 1;
                if written.packet[last] != written.packet[last - 1] {
                    continue;
                }
            }
            let got = written.parse();
            if got.ports == (1, 1) {
                continue;
            }
            for (i, part) in got.payload.chunks(100).enumerate() {
                let number = got.seq as usize / 100 + i;
                assert!(part.iter().all(|byte| *byte == number as u8), "packet {number} is whole");
                seen[number] += 1;
            }
        }
        assert!(seen.iter().all(|count| *count <= 1));
        let lost = seen.iter().filter(|count| **count == 0).count();
        assert!(if exact { lost == 0 } else { (30..80).contains(&lost) }, "{weather:?}: {lost} lost");
    }
}

#[test]
fn fragments_and_odd_packets_pass_as_they_are() {
    for setup in Setup::all() {
        let network = merged();
        let nodes = setup.nodes(2, &network);
        let mut first = Spec { dont_fragment: false, ..Spec::udp(packets::payload(800)) }.build();
        first[6] = 0x20;
        fix_header(&mut first);
        let mut second = first.clone();
        second[6..8].copy_from_slice(&[0, 101]);
        fix_header(&mut second);
        let options = Spec { ip_options: vec![1, 1, 1, 0], ..Spec::udp(packets::payload(10)) }.build();
        let mut icmp = Spec::udp(packets::payload(56)).build();
        icmp[9] = 1;
        fix_header(&mut icmp);
        for packet in [&first, &second, &options, &icmp] {
            nodes[0].device.push_packet(packet);
        }
        for packet in [&first, &second, &options, &icmp] {
            let mut expected = packet.clone();
            if !setup.is_vxlan {
                expected[8] -= 2;
                fix_header(&mut expected);
            }
            let written = nodes[1].receive();
            assert_eq!((written.packet, written.header), (expected, [0; 10]), "{setup:?}");
        }
    }
}

fn fix_header(packet: &mut [u8]) {
    let len = usize::from(packet[0] & 15) * 4;
    packet[10..12].fill(0);
    let sum: u32 = packet[..len].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    let sum = !((sum >> 16) + (sum & 0xffff)) as u16;
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
}

#[test]
fn impossible_packets_from_the_device_are_counted_and_survived() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let good = Spec::udp(packets::payload(20)).build();
    let mut pushed = 0;
    // Length lies that no kernel tells, every truncation, impossible offsets.
    for len in 0..10 + good.len() {
        nodes[0].device.push(&[&[0; 10][..], &good].concat()[..len]);
        pushed += 1;
    }
    for header in [
        packets::vnet(1, 0, 0, 0, 60_000, 6),
        packets::vnet(1, 0, 0, 0, 20, 60_000),
        packets::vnet(1, 9, 0, 1, 20, 6),
        packets::vnet(0, 5, 0, 0, 0, 0),
    ] {
        nodes[0].device.push(&[&header[..], &good].concat());
        pushed += 1;
    }
    for (at, value) in [(0, 0x55), (0, 0x44), (2, 0xff), (3, 19)] {
        let mut bad = good.clone();
        bad[at] = value;
        nodes[0].device.push_packet(&bad);
        pushed += 1;
    }
    nodes[0].wait_counters("drops", |c| {
        c.outbound.dropped.get(DropReason::BadIp) + c.outbound.dropped.get(DropReason::BadGso) == pushed
    });
    assert_eq!(nodes[0].counters().outbound.dropped.get(DropReason::BadGso), 4);
    nodes[0].device.push_packet(&good);
    assert_eq!(nodes[1].receive().packet, good);
}

#[test]
fn tiny_segments_of_a_large_packet_are_all_sent() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let spec = Spec::tcp(packets::payload(9000));
    nodes[0].device.push(&[&spec.vnet_gso(8)[..], &spec.build_partial()].concat());
    let mut got = Vec::new();
    while got.len() < 9000 {
        got.extend(nodes[1].receive().parse().payload);
    }
    assert_eq!(got, spec.payload);
    assert_eq!(nodes[0].counters().outbound.forwarded_packets, 1125);
    nodes[0].check_sums();
}

#[test]
fn unsegmented_packets_of_virtual_links_are_written_as_super_packets() {
    let network = merged();
    let setup = Setup { guard: SourceGuard::Inner, ..Setup::default() };
    let nodes = setup.nodes(2, &network);
    let encap = |spec: &Spec, packet: Vec<u8>| {
        let mut bytes = vec![8, 0, 0, 0, 0, 0, 1, 0];
        bytes.extend([common::mac(2).0, common::mac(1).0].concat());
        bytes.extend(if spec.is_v6() { [0x86, 0xdd] } else { [8, 0] });
        bytes.extend(packet);
        bytes
    };
    for spec in [Spec::tcp(packets::payload(20_000)), Spec::tcp(packets::payload(20_000)).v6()] {
        let bytes = encap(&spec, spec.build_partial());
        network.inject(nodes[0].endpoint, nodes[1].endpoint, 0, None, &bytes);
        let written = nodes[1].receive();
        assert_eq!(written.parse(), spec);
        assert_eq!(written.gso_size(), usize::from(MTU) - spec.headers_len());
        assert_eq!(written.header[1], if spec.is_v6() { 4 } else { 1 });
    }
    for spec in [Spec::udp(packets::payload(1000)), Spec::udp(packets::payload(20_000)).v6()] {
        // The size that the kernel reports is that of the inner datagrams.
        let bytes = encap(&spec, spec.build_partial());
        network.inject(nodes[0].endpoint, nodes[1].endpoint, 0, Some(100), &bytes);
        let written = nodes[1].receive();
        assert_eq!(written.parse(), spec);
        assert_eq!((written.gso_size(), written.header[1]), (100, 5));
    }
    assert_eq!(nodes[1].counters().events.partial_checksums, 4);
    assert_eq!(nodes[1].counters().inbound.forwarded_packets, 4);
}

#[test]
fn congestion_marks_cross_the_tunnel() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    // Inner CE is copied outside and comes out as it was.
    for tos in [0xb8, 0xb9, 0xba, 0xbb] {
        let spec = Spec { tos, ..Spec::udp(packets::payload(5)) };
        nodes[0].device.push_packet(&spec.build());
        assert_eq!(nodes[1].receive().parse(), spec);
    }
    let mut bytes = vec![8, 0, 0, 0, 0, 0, 1, 0];
    bytes.extend([common::mac(2).0, common::mac(1).0].concat());
    bytes.extend([8, 0]);
    let marked = |inner: u8| {
        let spec = Spec { tos: inner, ..Spec::udp(packets::payload(5)) };
        network.inject(nodes[0].endpoint, nodes[1].endpoint, 3, None, &[&bytes[..], &spec.build()].concat());
    };
    marked(0xb9);
    assert_eq!(nodes[1].receive().parse().tos, 0xbb, "marked on the way");
    marked(0xb8);
    nodes[1].wait_counters("a drop", |c| c.inbound.dropped.get(DropReason::BadEcn) == 1);
}

#[test]
fn marks_split_runs_and_are_sent_outside_in_vxlan_only() {
    for is_vxlan in [true, false] {
        let network = merged();
        let nodes = Setup { is_vxlan, ..Setup::default() }.nodes(2, &network);
        let packets = [0, 0, 1, 1, 0].map(|tos| Spec { tos, ..Spec::udp(packets::payload(50)) });
        // One batch: the engine is asleep until the first is pushed, so push while it cannot read.
        nodes[0].device.read_faults().fail(0, 1, 4);
        for spec in &packets {
            nodes[0].device.push_packet(&spec.build());
        }
        let mut got = Vec::new();
        while got.len() < 5 {
            let part = nodes[1].receive().parse();
            got.extend(std::iter::repeat_n(part.tos, part.payload.len() / 50));
        }
        assert_eq!(got, [0, 0, 1, 1, 0]);
    }
}

#[test]
fn source_guards_let_in_what_they_say() {
    let own: IpAddr = "10.50.2.9".parse().unwrap();
    let stranger: IpAddr = "10.50.9.9".parse().unwrap();
    let third: IpAddr = "10.50.3.9".parse().unwrap();
    let foreign = "203.0.113.9:1".parse().unwrap();
    for guard in [SourceGuard::Off, SourceGuard::Inner, SourceGuard::Peers, SourceGuard::Strict] {
        let network = merged();
        let nodes = Setup { is_vxlan: false, guard, ..Setup::default() }.nodes(3, &network);
        let good: IpAddr = "10.50.1.5".parse().unwrap();
        let node1 = nodes[0].endpoint;
        for (inner, outer, accepted) in [
            (good, node1, true),
            (own, node1, guard == SourceGuard::Off),
            (stranger, node1, guard == SourceGuard::Off),
            (good, foreign, guard <= SourceGuard::Inner),
            (third, node1, guard <= SourceGuard::Peers),
        ] {
            let spec = Spec { src: inner, ..Spec::udp(packets::payload(5)) };
            let before = nodes[1].counters().inbound;
            network.inject(outer, nodes[1].endpoint, 0, None, &spec.build());
            nodes[1]
                .wait_counters("a verdict", |c| c.inbound.received_packets == before.received_packets + 1);
            let after = nodes[1].counters().inbound;
            let got = after.forwarded_packets - before.forwarded_packets == 1;
            assert_eq!(got, accepted, "{guard:?} inner {inner} outer {outer}");
            if !accepted {
                let reason = if inner == own { DropReason::OwnSource } else { DropReason::Spoof };
                assert_eq!(after.dropped.get(reason), before.dropped.get(reason) + 1);
            }
        }
        let events = nodes[1].counters().events;
        if guard == SourceGuard::Inner {
            assert_eq!((events.would_drop_peers, events.would_drop_strict), (1, 2));
        }
    }
}

#[test]
fn peers_have_their_own_numbers() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let to = peer(2, endpoint(2, false));
    nodes[0].engine().publish(Fib::from_entries([("10.50.2.0/24".parse().unwrap(), to.clone())]));
    let spec = Spec::udp(packets::payload(72));
    for _ in 0..10 {
        nodes[0].device.push_packet(&spec.build());
    }
    common::wait_for("ten packets", || (to.counters.sum(0) == 10).then_some(()));
    nodes[0].socket.send_faults().fail(0, 2, 1);
    nodes[0].device.push_packet(&spec.build());
    nodes[0].wait_counters("a drop", |c| c.outbound.dropped.get(DropReason::Eperm) == 1);
    let back = Spec { src: spec.dst, dst: spec.src, ..spec.clone() };
    nodes[1].device.push_packet(&back.build());
    nodes[0].receive();
    nodes[0].check_sums();
    let totals = common::wait_for("counters", || {
        let totals = PeerTotals::of(&to.counters);
        (totals.rx_packets == 1).then_some(totals)
    });
    assert_eq!((totals.tx_packets, totals.tx_bytes), (10, 1000));
    assert_eq!((totals.rx_packets, totals.rx_bytes), (1, 100));
    assert!(totals.tx_dropped.contains(&(DropReason::Eperm, 1)));
}

#[test]
fn a_peer_of_the_other_family_or_without_mac_is_unreachable() {
    let network = merged();
    let nodes = Setup::default().nodes(2, &network);
    let spec = Spec::udp(packets::payload(5));
    let other_family = peer(2, endpoint(2, true));
    nodes[0].engine().publish(Fib::from_entries([("10.50.2.0/24".parse().unwrap(), other_family)]));
    nodes[0].device.push_packet(&spec.build());
    nodes[0].wait_counters("a drop", |c| c.outbound.dropped.get(DropReason::Unreachable) == 1);
}

#[test]
fn an_overflowing_socket_is_counted() {
    let network = MemoryNetwork::new(Weather { room: 10, ..Weather::default() });
    let setup = Setup { is_vxlan: false, ..Setup::default() };
    let nodes = setup.nodes(2, &network);
    let spec = Spec::udp(packets::payload(5)).build();
    let sent = 20_000;
    for _ in 0..sent {
        network.inject(nodes[0].endpoint, nodes[1].endpoint, 0, None, &spec);
    }
    // The count comes with the next datagram.
    common::wait_for("an empty socket", || (nodes[1].socket.pending() == 0).then_some(()));
    network.inject(nodes[0].endpoint, nodes[1].endpoint, 0, None, &spec);
    nodes[1].wait_counters("all", |c| c.inbound.received_packets + c.events.socket_overflow == sent + 1);
}

#[test]
fn mixed_peers_in_one_batch_each_get_their_packets_in_order() {
    let network = merged();
    let nodes = Setup::default().nodes(4, &network);
    nodes[0].device.read_faults().fail(0, 1, 4);
    let count = 600u32;
    for i in 0..count {
        let node = 2 + i % 3;
        let spec = Spec {
            dst: format!("10.50.{node}.9").parse().unwrap(),
            ident: (i / 3) as u16,
            payload: vec![i as u8; if i % 7 == 0 { 30 } else { 100 }],
            protocol: UDP,
            ..Spec::udp(Vec::new())
        };
        nodes[0].device.push_packet(&spec.build());
    }
    for (n, node) in nodes[1..].iter().enumerate() {
        let mut expected: Vec<u8> = Vec::new();
        for i in (0..count).filter(|i| (i % 3) as usize == n) {
            expected.extend(vec![i as u8; if i % 7 == 0 { 30 } else { 100 }]);
        }
        let mut got = Vec::new();
        while got.len() < expected.len() {
            got.extend(node.receive().parse().payload);
        }
        assert_eq!(got, expected, "node {}", n + 2);
    }
    nodes[0].check_sums();
}
