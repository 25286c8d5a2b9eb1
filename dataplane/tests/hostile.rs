//! A million hostile datagrams through real sockets: nothing panics, every datagram gets its verdict, every
//! reason for dropping a received packet is reached, and good packets among them get through.
//!
//! Half are golden packets with mutations, the rest random bytes and packets made wrong on purpose. The number
//! comes from `FELT_HOSTILE_DATAGRAMS`, a million by default.

mod common;

use std::net::{SocketAddr, UdpSocket as StdSocket};
use std::time::Duration;

use common::packets::{self, Spec};
use felt_dataplane::config::{Encap, EngineConfig, SourceGuard};
use felt_dataplane::device::memory::MemoryDevice;
use felt_dataplane::engine::{Engine, Handle, Port};
use felt_dataplane::fib::Fib;
use felt_dataplane::socket::UdpSocket;
use felt_dataplane::socket::memory::MemoryAnswers;
use felt_dataplane::stats::DropReason;
use felt_dataplane::wire::Vni;

/// xorshift64*: the same datagrams in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() >> 11) as usize % limit.max(1)
    }
}

/// UDP payloads of vxlan in `testdata/`.
fn golden() -> Vec<Vec<u8>> {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/vxlan");
    let mut files: Vec<_> = std::fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let datagrams: Vec<Vec<u8>> = files
        .iter()
        .map(|path| {
            let text = std::fs::read_to_string(path).unwrap();
            let digits: String = text.lines().filter(|line| !line.starts_with('#')).collect();
            (0..digits.len() / 2)
                .map(|i| u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).unwrap())
                .collect()
        })
        .collect();
    assert!(datagrams.len() > 20);
    datagrams
}

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        match random.below(7) {
            0 => bytes.truncate(at),
            1 => bytes.extend((0..random.below(64)).map(|i| i as u8)),
            2 if !bytes.is_empty() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][random.below(5)],
            3 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            4 if bytes.len() > 30 => bytes[22 + at % 8] = random.next() as u8,
            5 => {
                let end = (at + random.below(8)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
            _ => {
                let extra: Vec<u8> = bytes[at.min(bytes.len())..].to_vec();
                bytes.extend(&extra[..extra.len().min(40)]);
            }
        }
    }
}

struct Target {
    engine: Handle,
    addr: SocketAddr,
    answers: MemoryAnswers,
    is_vxlan: bool,
}

fn target(is_vxlan: bool) -> Target {
    // The MACs of the golden packets' nodes.
    let local_mac = "3a:00:00:00:00:0a".parse().unwrap();
    let encap = if is_vxlan { Encap::Vxlan { vni: Vni::new(1).unwrap(), local_mac } } else { Encap::Udp };
    let socket = UdpSocket::bind("127.0.0.1:0".parse().unwrap(), true).unwrap();
    let addr = socket.local_addr().unwrap();
    let mut config = EngineConfig::new(encap, addr, 1450);
    config.tunnel_v4 = Some("10.50.1.0".parse().unwrap());
    config.own_subnets = vec!["10.50.1.0/24".parse().unwrap(), "fd00:50:0:1::/64".parse().unwrap()];
    config.source_guard = SourceGuard::Inner;
    let answers = MemoryAnswers::default();
    let port = Port {
        device: MemoryDevice::discarding().unwrap(),
        socket,
        answers: Some([answers.clone(), answers.clone()]),
    };
    let engine = Engine::start_on(config, vec![port]).unwrap();
    let peer = common::peer(11, addr);
    engine.publish(Fib::from_entries([
        ("10.50.2.0/24".parse().unwrap(), peer.clone()),
        ("fd00:50:0:2::/64".parse().unwrap(), peer),
    ]));
    Target { engine, addr, answers, is_vxlan }
}

/// A packet from the peer's pod to ours.
fn good() -> Spec {
    let spec = Spec::tcp(packets::payload(64));
    Spec { src: "10.50.2.5".parse().unwrap(), dst: "10.50.1.5".parse().unwrap(), ..spec }
}

fn encapsulate(target: &Target, packet: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    if target.is_vxlan {
        bytes.extend([8, 0, 0, 0, 0, 0, 1, 0, 0x3a, 0, 0, 0, 0, 0x0a, 0x3a, 0, 0, 0, 0, 0x0b]);
        bytes.extend(if packet[0] >> 4 == 6 { [0x86, 0xdd] } else { [8, 0] });
    }
    bytes.extend(packet);
    bytes
}

/// Packets made wrong on purpose, a number of datagrams that belong together.
fn crafted(target: &Target, random: &mut Random) -> Vec<Vec<u8>> {
    let base = good();
    let one = |spec: &Spec| vec![encapsulate(target, &spec.build())];
    match random.below(8) {
        0 => one(&Spec { src: "10.50.1.77".parse().unwrap(), ..base }),
        1 => one(&Spec { src: "192.0.2.1".parse().unwrap(), ..base }),
        2 => one(&Spec { ttl: random.below(3) as u8, ..base }),
        3 => {
            // A flow whose second packet is damaged: found when they are merged.
            let next = Spec { seq: base.seq.wrapping_add(64), ident: base.ident + 1, ..base.clone() };
            let mut damaged = encapsulate(target, &next.build());
            let last = damaged.len() - 1;
            damaged[last] ^= 0x40;
            vec![encapsulate(target, &base.build()), damaged]
        }
        4 => vec![vec![]],
        5 => {
            let mut bytes = encapsulate(target, &base.build());
            bytes.truncate(random.below(bytes.len()));
            vec![bytes]
        }
        6 => {
            let mut bytes = encapsulate(target, &base.build());
            bytes[random.below(22)] ^= 1 << random.below(8);
            vec![bytes]
        }
        _ => {
            let len = random.below(20_000);
            vec![encapsulate(
                target,
                &Spec { dont_fragment: false, ..Spec::udp(vec![0xaa; len]) }.build_partial(),
            )]
        }
    }
}

fn received(engine: &Handle) -> u64 {
    let counters = engine.counters();
    counters.inbound.received_packets + counters.events.socket_overflow
}

fn assault(target: &Target, count: u64, seed: u64) {
    let golden = golden();
    let mut random = Random(seed);
    let plain = StdSocket::bind("127.0.0.1:0").unwrap();
    let marked = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::DGRAM, None).unwrap();
    // Congestion experienced.
    marked.set_tos_v4(3).unwrap();
    let marked = StdSocket::from(marked);
    let (mut sent, mut good_sent) = (0, 0);
    let good = encapsulate(target, &good().build());
    while sent < count {
        let datagrams = match random.below(4) {
            0 | 1 => {
                let at = random.below(golden.len());
                let mut bytes = golden[at][if target.is_vxlan { 0 } else { 22 }..].to_vec();
                mutate(&mut bytes, &mut random);
                vec![bytes]
            }
            2 => crafted(target, &mut random),
            _ => {
                let len = random.below(200);
                vec![(0..len).map(|_| random.next() as u8).collect()]
            }
        };
        let socket = if random.below(16) == 0 { &marked } else { &plain };
        for datagram in &datagrams {
            socket.send_to(datagram, target.addr).unwrap();
            sent += 1;
        }
        if sent % 64 < 2 {
            plain.send_to(&good, target.addr).unwrap();
            (sent, good_sent) = (sent + 1, good_sent + 1);
        }
        // Not faster than they are taken, so that none of the good ones is lost in the socket.
        if sent % 512 < 2 {
            common::wait_for("progress", || (received(&target.engine) + 2000 > sent).then_some(()));
        }
        while target.answers.pop().is_some() {}
    }
    common::wait_for("all datagrams", || (received(&target.engine) == sent).then_some(()));
    let counters = target.engine.counters();
    assert_eq!(counters.events.socket_overflow, 0);
    assert!(counters.inbound.forwarded_packets >= good_sent, "{good_sent} good ones in {counters:#?}");
    let inbound = counters.inbound;
    let verdicts = inbound.forwarded_packets + inbound.dropped.total() + inbound.answered.total();
    assert_eq!(verdicts, sent, "{counters:#?}");
    assert!(target.engine.is_alive());
}

#[test]
fn hostile_datagrams_are_all_counted_and_harm_nothing() {
    let count = std::env::var("FELT_HOSTILE_DATAGRAMS").map_or(1_000_000, |text| text.parse().unwrap());
    let mut reached = Vec::new();
    for is_vxlan in [true, false] {
        let target = target(is_vxlan);
        assault(&target, count / 2, if is_vxlan { 0x1234_5678 } else { 0x8765_4321 });
        let inbound = target.engine.counters().inbound;
        for (reason, _) in inbound.dropped.iter() {
            if inbound.dropped.get(reason) + inbound.answered.get(reason) > 0 {
                reached.push(reason);
            }
        }
    }
    for reason in [
        DropReason::BadEncap,
        DropReason::BadFlags,
        DropReason::BadVni,
        DropReason::BadMac,
        DropReason::BadIp,
        DropReason::BadCsum,
        DropReason::BadEcn,
        DropReason::OwnSource,
        DropReason::Spoof,
        DropReason::Ttl,
    ] {
        assert!(reached.contains(&reason), "{} was never reached", reason.name());
    }
}

#[test]
fn a_flood_is_counted_by_the_engine_or_by_the_socket() {
    let target = target(true);
    let socket = StdSocket::bind("127.0.0.1:0").unwrap();
    let datagram = encapsulate(&target, &good().build());
    let mut sent = 0;
    // As fast as it goes, in large datagrams that fill the socket's buffer, until something is lost.
    let filler = vec![0xff; 40_000];
    for _ in 0..200_000 {
        socket.send_to(&filler, target.addr).unwrap();
        sent += 1;
        if sent % 1000 == 0 && target.engine.counters().events.socket_overflow > 0 {
            break;
        }
    }
    // What the socket has dropped is told with the next datagram that it takes.
    common::wait_for("the count", || {
        socket.send_to(&datagram, target.addr).unwrap();
        sent += 1;
        std::thread::sleep(Duration::from_millis(20));
        (received(&target.engine) == sent).then_some(())
    });
}
