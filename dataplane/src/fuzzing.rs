//! One batch of either direction over devices in memory, made of any bytes: what the fuzz targets `inbound`
//! and `outbound` drive, and a test over golden packets.
//!
//! Whatever comes in, nothing panics, every packet is counted once, and what goes out is a possible packet
//! whose virtio-net header fits it, or a datagram that its receiver accepts.

use std::cell::RefCell;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use crate::config::{Encap, EngineConfig, OffloadMode, SourceGuard};
use crate::device::memory::MemoryDevice;
use crate::encap::vxlan::Vtep;
use crate::encap::{Inner, udp};
use crate::fib::{Fib, Peer, PeerCounters, PeerId, Prefix};
use crate::offload::gso::Cutter;
use crate::offload::vnet_hdr::{self, NEEDS_CSUM, VnetHdr, gso};
use crate::socket::Socket;
use crate::socket::memory::{MemoryNetwork, MemorySocket, Weather};
use crate::stage::Stage;
use crate::stats::DirectionCounters;
use crate::wire::{MacAddr, Vni};

const OUR_MAC: MacAddr = MacAddr([0x3a, 0, 0, 0, 0, 0x0a]);
const PEER_MAC: MacAddr = MacAddr([0x3a, 0, 0, 0, 0, 0x0b]);
const MTU: u16 = 1450;

fn endpoint(last: u8) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(198, 18, 0, last), 8472))
}

fn vtep(mac: MacAddr) -> Vtep {
    Vtep { vni: Vni::new(1).expect("24 bits"), mac, accept_gbp: false }
}

/// One node with everything in memory, and the socket of its only peer.
struct Node {
    device: MemoryDevice,
    network: MemoryNetwork,
    socket: MemorySocket,
    peer: MemorySocket,
    stage: Stage,
    is_vxlan: bool,
}

impl Node {
    fn new(is_vxlan: bool, offload: OffloadMode) -> Node {
        let encap =
            if is_vxlan { Encap::Vxlan { vni: vtep(OUR_MAC).vni, local_mac: OUR_MAC } } else { Encap::Udp };
        let mut config = EngineConfig::new(encap, endpoint(1), MTU);
        config.tunnel_v4 = Some(Ipv4Addr::new(10, 50, 1, 0));
        config.tunnel_v6 = "fd00:50:0:1::".parse().ok();
        config.own_subnets = subnets(1).into();
        config.source_guard = SourceGuard::Inner;
        config.offload = offload;
        let merged = offload == OffloadMode::Auto;
        let network = MemoryNetwork::new(Weather { merged, ..Weather::default() });
        let peer = Arc::new(Peer {
            id: PeerId(2),
            endpoint: endpoint(2),
            mac: Some(PEER_MAC),
            counters: Arc::new(PeerCounters::new(1)),
        });
        let entries = subnets(2).into_iter().map(|prefix| (prefix, peer.clone()));
        Node {
            device: MemoryDevice::new().expect("a descriptor"),
            socket: network.bind(endpoint(1)).expect("a descriptor"),
            peer: network.bind(endpoint(2)).expect("a descriptor"),
            stage: Stage::new(&config, Fib::from_entries(entries)),
            network,
            is_vxlan,
        }
    }

    fn drain_answers(&self) {
        while let Some((dst, packet)) = self.stage.answers().pop() {
            let answer = Inner::parse(&packet).expect("an answer is a packet");
            assert!(answer.dst() == dst && answer.total_len() == packet.len());
        }
    }
}

fn subnets(node: u8) -> [Prefix; 2] {
    let v6 = (0xfd00_0050 << 96) | (u128::from(node) << 64);
    [Prefix::v4(Ipv4Addr::new(10, 50, node, 0), 24).expect("fits"), Prefix::v6(v6.into(), 64).expect("fits")]
}

thread_local! {
    /// Kept between runs, as a worker keeps its batches: vxlan and udp, each without and with offloads.
    static NODES: RefCell<[Node; 4]> =
        RefCell::new([
            Node::new(true, OffloadMode::Off),
            Node::new(true, OffloadMode::Auto),
            Node::new(false, OffloadMode::Off),
            Node::new(false, OffloadMode::Auto),
        ]);
}

/// Cuts `data` into pieces: a length of two bytes, two bytes of choices, the piece.
fn pieces(mut data: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (head, rest) = data.split_first_chunk::<4>()?;
        let len = usize::from(u16::from_le_bytes([head[0], head[1]])).min(rest.len());
        let (piece, rest) = rest.split_at(len);
        data = rest;
        Some((u16::from_le_bytes([head[2], head[3]]), piece))
    })
}

fn assert_all_counted(direction: &DirectionCounters) {
    let ended = direction.forwarded_packets + direction.dropped.total() + direction.answered.total();
    assert_eq!(direction.received_packets, ended, "{direction:?}");
}

/// Messages from the underlay. The choices of a piece are ToS (2 bits), whether it comes from the peer (1 bit)
/// and the size of merged datagrams (the rest; 0: one).
pub fn inbound(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    NODES.with_borrow_mut(|nodes| {
        let node = &mut nodes[usize::from(choice % 4)];
        for (choices, bytes) in pieces(data) {
            let from = if choices & 4 != 0 { endpoint(2) } else { endpoint(77) };
            let segment = Some(choices >> 3).filter(|size| *size != 0);
            node.network.inject(from, endpoint(1), (choices & 3) as u8, segment, bytes);
        }
        while node.stage.inbound(&node.device, &node.socket).is_ok_and(|count| count > 0) {}
        assert_eq!(node.socket.pending(), 0);
        while let Some(written) = node.device.pop() {
            check_written(&written);
        }
        node.drain_answers();
        assert_all_counted(&node.stage.counters().inbound);
    });
}

/// What the kernel's TUN would want of a write.
fn check_written(written: &[u8]) {
    let (header, bytes) = written.split_first_chunk::<{ vnet_hdr::LEN }>().expect("a header");
    let header = VnetHdr::parse(header);
    let packet = Inner::parse(bytes).expect("a possible packet");
    assert_eq!(packet.total_len(), bytes.len());
    if header.flags & NEEDS_CSUM != 0 {
        assert!(usize::from(header.csum_start) + usize::from(header.csum_offset) + 2 <= bytes.len());
    }
    if header.gso_type == gso::NONE {
        return;
    }
    assert_eq!(header.flags, NEEDS_CSUM);
    let headers = usize::from(header.hdr_len);
    assert!(headers < bytes.len() && usize::from(header.gso_size) < bytes.len() - headers);
    let cutter = Cutter::new(&packet, &header).expect("it can be cut again");
    assert!(cutter.segment_count() >= 2);
    let mut segment = vec![0; cutter.headers_len()];
    for index in 0..cutter.segment_count() {
        let payload = cutter.cut(bytes, index, &mut segment);
        let whole = [&segment[..], &bytes[payload]].concat();
        assert_eq!(Inner::parse(&whole).expect("a possible packet").total_len(), whole.len());
    }
}

/// Reads from the TUN, virtio-net header first.
pub fn outbound(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    NODES.with_borrow_mut(|nodes| {
        let node = &mut nodes[usize::from(choice % 4)];
        for (_, bytes) in pieces(data) {
            node.device.push(bytes);
        }
        while node.stage.outbound(&node.device, &node.socket).is_ok_and(|count| count > 0) {}
        drain_peer(node);
        node.drain_answers();
        assert_all_counted(&node.stage.counters().outbound);
    });
}

/// What was sent is what the peer accepts.
fn drain_peer(node: &Node) {
    let mut batch = crate::buf::RecvBatch::new(4);
    while node.peer.recv(&mut batch, 4).is_ok() {
        for message in &batch.received {
            let bytes = &batch.buffer[message.at..][..message.len];
            let stride = message.segment.map_or(bytes.len(), usize::from).max(1);
            for datagram in bytes.chunks(stride) {
                let inner = if node.is_vxlan { vtep(PEER_MAC).pop(datagram) } else { udp::pop(datagram) };
                let inner = inner.unwrap_or_else(|error| panic!("{error}: {datagram:02x?}"));
                assert!(subnets(2).iter().any(|subnet| subnet.contains(inner.dst())));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;

    fn golden() -> Vec<Vec<u8>> {
        let mut packets = Vec::new();
        for folder in ["vxlan", "hostile"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(folder);
            for entry in std::fs::read_dir(folder).unwrap() {
                let text = std::fs::read_to_string(entry.unwrap().path()).unwrap();
                let lines = text.lines().filter(|line| !line.starts_with('#'));
                let digits: String = lines.collect();
                let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
                packets.push((0..digits.len()).step_by(2).map(byte).collect());
            }
        }
        packets
    }

    /// Pieces of golden packets, changed here and there, some of them several times in a row.
    fn input() -> impl Strategy<Value = Vec<u8>> {
        let changes = prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3);
        let header = prop_oneof![
            3 => Just(vec![]),
            3 => Just(vec![0; 10]),
            1 => prop::collection::vec(prop_oneof![2 => 0u8..8, 1 => any::<u8>()], 10),
        ];
        let piece = (prop::sample::select(golden()), 0usize..3, header, any::<u16>(), changes, 1usize..4)
            .prop_map(|(packet, cut, header, choices, changes, times)| {
                let mut bytes = header;
                bytes.extend(&packet[(cut * 22).min(packet.len())..]);
                for (at, value) in changes {
                    let len = bytes.len().min(80);
                    if len > 0 {
                        bytes[at.index(len)] = value;
                    }
                }
                let head = [(bytes.len() as u16).to_le_bytes(), choices.to_le_bytes()].concat();
                [head, bytes].concat().repeat(times)
            });
        (any::<u8>(), prop::collection::vec(piece, 0..8))
            .prop_map(|(choice, pieces)| [vec![choice], pieces.concat()].concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn any_messages_from_the_underlay_are_survived(data in input()) {
            inbound(&data);
        }

        #[test]
        fn any_reads_from_the_tun_are_survived(data in input()) {
            outbound(&data);
        }
    }

    #[test]
    fn golden_packets_pass_in_both_directions() {
        for packet in golden() {
            if packet.get(13) != Some(&0x0a) {
                continue;
            }
            let head = |bytes: &[u8]| [(bytes.len() as u16).to_le_bytes(), 4u16.to_le_bytes()].concat();
            inbound(&[vec![0], head(&packet), packet].concat());
        }
        NODES.with_borrow(|nodes| {
            let sum = nodes[0].stage.counters().inbound;
            assert!(sum.received_packets >= 6, "{sum:?}");
            assert_eq!(sum.forwarded_packets, sum.received_packets, "{sum:?}");
        });
    }
}
