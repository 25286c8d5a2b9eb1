//! Tables and destinations with fixed seeds.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use felt_dataplane::fib::{Fib, Peer, PeerCounters, PeerId, Prefix};
use felt_dataplane::wire::MacAddr;

/// First address of the overlay network.
pub const NETWORK: u32 = 0x0a00_0000;
/// Endpoint of peer 0; the others follow.
pub const UNDERLAY: u32 = 0xc612_0000;

/// A generator that is good enough to scatter things and always gives the same row (splitmix64).
#[derive(Debug, Clone)]
pub struct Noise(pub u64);

impl Iterator for Noise {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some(z ^ (z >> 31))
    }
}

/// A peer with this number, at an address of its own.
pub fn peer(id: u32) -> Arc<Peer> {
    let mac = MacAddr([0x3a, 0, 0, (id >> 16) as u8, (id >> 8) as u8, id as u8]);
    peer_of(PeerId(id), Ipv4Addr::from(UNDERLAY + id), mac)
}

fn peer_of(id: PeerId, addr: Ipv4Addr, mac: MacAddr) -> Arc<Peer> {
    let counters = Arc::new(PeerCounters::new(2));
    Arc::new(Peer { id, endpoint: SocketAddr::from((addr, 8472)), mac: Some(mac), counters })
}

/// The `i`th /24 of the network.
pub fn subnet(i: u32) -> Prefix {
    Prefix::v4(Ipv4Addr::from(NETWORK + (i << 8)), 24).expect("24 bits fit")
}

/// The numbers below `count` in a random order.
fn shuffled(count: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    let mut noise = Noise(1);
    for i in (1..order.len()).rev() {
        order.swap(i, noise.next().unwrap_or(0) as usize % (i + 1));
    }
    order
}

/// A table of this many /24 side by side, each with a peer of its own. The peers lie in memory in another
/// order than the subnets, as they do after a while of nodes coming and going.
pub fn fib(subnets: u32) -> Fib {
    Fib::from_entries(shuffled(subnets).into_iter().map(|i| (subnet(i), peer(i))))
}

/// Like [`fib`], but the endpoint of each subnet's peer is [`UNDERLAY`] plus the index of another subnet, so
/// that following them visits every subnet once, in random order. Numbers and last MAC bytes are 0.
pub fn ring(subnets: u32) -> Fib {
    let order = shuffled(subnets);
    let next = order.iter().cycle().skip(1);
    let mut links: Vec<(u32, u32)> = order.iter().copied().zip(next.copied()).collect();
    // Not in the order of the ring, or memory would be in the order of the walk.
    links.sort_by_key(|(at, _)| at.wrapping_mul(0x9e37_79b1));
    Fib::from_entries(links.into_iter().map(|(at, next)| {
        (subnet(at), peer_of(PeerId(0), Ipv4Addr::from(UNDERLAY ^ next), MacAddr([0x3a, 0, 0, 0, 0, 0])))
    }))
}

/// Uniformly random hosts in the first `subnets` /24.
pub fn destinations(subnets: u32, count: usize) -> Vec<Ipv4Addr> {
    Noise(2)
        .take(count)
        .map(|noise| Ipv4Addr::from(NETWORK + (noise % (u64::from(subnets) << 8)) as u32))
        .collect()
}
