//! Two engines, or one, over devices and sockets in memory.
#![allow(dead_code, reason = "each test binary uses its part of this")]

pub(crate) mod packets;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use felt_dataplane::config::{Encap, EngineConfig, OffloadMode, SourceGuard};
use felt_dataplane::device::VNET_HDR_LEN;
use felt_dataplane::device::memory::MemoryDevice;
use felt_dataplane::engine::{Engine, Handle, Port};
use felt_dataplane::fib::{Fib, Peer, PeerCounters, PeerId};
use felt_dataplane::socket::memory::{MemoryAnswers, MemoryNetwork, MemorySocket};
use felt_dataplane::stats::CountersSnapshot;
use felt_dataplane::wire::{MacAddr, Vni};

use packets::Spec;

pub(crate) const MTU: u16 = 1450;

pub(crate) fn mac(node: u8) -> MacAddr {
    MacAddr([0x3a, 0, 0, 0, 0, node])
}

pub(crate) fn vxlan(node: u8) -> Encap {
    Encap::Vxlan { vni: Vni::new(1).unwrap(), local_mac: mac(node) }
}

/// Endpoint of a node over this family.
pub(crate) fn endpoint(node: u8, outer_v6: bool) -> SocketAddr {
    let text = if outer_v6 { format!("[fd18::{node}]:8472") } else { format!("198.18.0.{node}:8472") };
    text.parse().unwrap()
}

/// A node's engine with its ends in the test's hands.
pub(crate) struct Node {
    pub(crate) engine: Option<Handle>,
    pub(crate) device: MemoryDevice,
    pub(crate) socket: MemorySocket,
    pub(crate) answers: MemoryAnswers,
    pub(crate) endpoint: SocketAddr,
}

/// What nodes of a test have in common.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) is_vxlan: bool,
    pub(crate) outer_v6: bool,
    pub(crate) offload: OffloadMode,
    pub(crate) guard: SourceGuard,
}

impl Default for Setup {
    fn default() -> Self {
        Setup { is_vxlan: true, outer_v6: false, offload: OffloadMode::Auto, guard: SourceGuard::Inner }
    }
}

impl Setup {
    /// All combinations of encapsulation, outer family and offload mode.
    pub(crate) fn all() -> impl Iterator<Item = Setup> {
        (0..8).map(|bits| Setup {
            is_vxlan: bits & 1 == 0,
            outer_v6: bits & 2 != 0,
            offload: if bits & 4 == 0 { OffloadMode::Auto } else { OffloadMode::Off },
            guard: SourceGuard::Strict,
        })
    }

    pub(crate) fn node(self, number: u8, network: &MemoryNetwork) -> Node {
        let endpoint = endpoint(number, self.outer_v6);
        let encap = if self.is_vxlan { vxlan(number) } else { Encap::Udp };
        let mut config = EngineConfig::new(encap, endpoint, MTU);
        config.tunnel_v4 = Some(format!("10.50.{number}.0").parse().unwrap());
        config.tunnel_v6 = Some(format!("fd00:50:0:{number}::").parse().unwrap());
        config.own_subnets = subnets(number).iter().map(|text| text.parse().unwrap()).collect();
        config.offload = self.offload;
        config.source_guard = self.guard;
        let device = MemoryDevice::new().unwrap();
        let socket = network.bind(endpoint).unwrap();
        let answers = MemoryAnswers::default();
        let port = Port {
            device: device.clone(),
            socket: socket.clone(),
            answers: Some([answers.clone(), answers.clone()]),
        };
        let engine = Engine::start_on(config, vec![port]).unwrap();
        Node { engine: Some(engine), device, socket, answers, endpoint }
    }

    /// Nodes 1 to `count` that know each other.
    pub(crate) fn nodes(self, count: u8, network: &MemoryNetwork) -> Vec<Node> {
        let nodes: Vec<_> = (1..=count).map(|number| self.node(number, network)).collect();
        for (i, node) in nodes.iter().enumerate() {
            let others: Vec<_> = (1..=count).filter(|number| usize::from(*number) != i + 1).collect();
            node.engine().publish(fib(&others, self.outer_v6));
        }
        nodes
    }
}

fn subnets(number: u8) -> [String; 2] {
    [format!("10.50.{number}.0/24"), format!("fd00:50:0:{number}::/64")]
}

/// A table of these nodes.
pub(crate) fn fib(nodes: &[u8], outer_v6: bool) -> Fib {
    Fib::from_entries(nodes.iter().flat_map(|number| {
        let peer = peer(*number, endpoint(*number, outer_v6));
        subnets(*number).map(|text| (text.parse().unwrap(), peer.clone()))
    }))
}

pub(crate) fn peer(number: u8, endpoint: SocketAddr) -> Arc<Peer> {
    let counters = Arc::new(PeerCounters::new(1));
    Arc::new(Peer { id: PeerId(number.into()), endpoint, mac: Some(mac(number)), counters })
}

impl Node {
    pub(crate) fn engine(&self) -> &Handle {
        self.engine.as_ref().expect("a running engine")
    }

    pub(crate) fn counters(&self) -> CountersSnapshot {
        self.engine().counters()
    }

    /// Waits for the next packet written to the device.
    #[track_caller]
    pub(crate) fn receive(&self) -> Written {
        let bytes = wait_for("a packet", || self.device.pop());
        let (header, packet) = bytes.split_at(VNET_HDR_LEN);
        Written { header: header.try_into().unwrap(), packet: packet.to_vec() }
    }

    #[track_caller]
    pub(crate) fn answer(&self) -> (IpAddr, Vec<u8>) {
        wait_for("an answer", || self.answers.pop())
    }

    /// Waits until counters look as wanted.
    #[track_caller]
    pub(crate) fn wait_counters(&self, what: &str, wanted: impl Fn(&CountersSnapshot) -> bool) {
        wait_for(what, || wanted(&self.counters()).then_some(()));
        self.check_sums();
    }

    /// Every packet that was received has its verdict once all is done.
    #[track_caller]
    pub(crate) fn check_sums(&self) {
        let balanced = |c: &CountersSnapshot| {
            [&c.outbound, &c.inbound]
                .iter()
                .all(|d| d.received_packets == d.forwarded_packets + d.dropped.total() + d.answered.total())
        };
        let deadline = Instant::now() + LIMIT;
        while !balanced(&self.counters()) {
            assert!(Instant::now() < deadline, "packets without verdict: {:#?}", self.counters());
            std::thread::yield_now();
        }
    }
}

/// A packet that was written to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) header: [u8; VNET_HDR_LEN],
    pub(crate) packet: Vec<u8>,
}

impl Written {
    fn word(&self, at: usize) -> usize {
        usize::from(u16::from_ne_bytes([self.header[at], self.header[at + 1]]))
    }

    pub(crate) fn gso_size(&self) -> usize {
        self.word(4)
    }

    /// The packet with its checksum finished, as values.
    #[track_caller]
    pub(crate) fn parse(&self) -> Spec {
        let mut packet = self.packet.clone();
        if self.header[0] & 1 != 0 {
            let (start, at) = (self.word(6), self.word(6) + self.word(8));
            let sum: u32 = packet[start..]
                .chunks(2)
                .map(|w| u32::from(u16::from_be_bytes([w[0], *w.get(1).unwrap_or(&0)])))
                .sum();
            let sum = (sum >> 16) + (sum & 0xffff);
            let mut field = !((sum >> 16) as u16).wrapping_add(sum as u16);
            if field == 0 && self.word(8) == 6 {
                field = 0xffff;
            }
            packet[at..at + 2].copy_from_slice(&field.to_be_bytes());
        }
        packets::parse(&packet)
    }
}

const LIMIT: Duration = Duration::from_secs(20);

/// Waits for something.
///
/// # Panics
/// When it does not come in time.
#[track_caller]
pub(crate) fn wait_for<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + LIMIT;
    loop {
        if let Some(got) = get() {
            return got;
        }
        assert!(Instant::now() < deadline, "no {what} in time");
        std::thread::yield_now();
    }
}
