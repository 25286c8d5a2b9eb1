//! Values the engine starts from, checked before they get here, and the arithmetic of MTU and overhead.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::thread;

use crate::encap::{self, vxlan};
use crate::fib::Prefix;
use crate::wire::{MacAddr, Vni};

/// How inner packets travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encap {
    /// VXLAN with an inner Ethernet frame from VTEP to VTEP.
    Vxlan {
        /// The network.
        vni: Vni,
        /// Our VTEP's address, as published in our lease.
        local_mac: MacAddr,
    },
    /// The bare inner packet is the datagram's payload.
    Udp,
}

impl Encap {
    /// Bytes in front of the inner packet in the datagram.
    pub fn headers_len(self) -> usize {
        match self {
            Encap::Vxlan { .. } => vxlan::HEADERS_LEN,
            Encap::Udp => encap::udp::HEADERS_LEN,
        }
    }

    /// What an inner packet grows by, outer IP and UDP headers included.
    pub fn overhead(self, outer_is_v6: bool) -> usize {
        self.headers_len() + if outer_is_v6 { encap::OUTER_V6 } else { encap::OUTER_V4 }
    }
}

/// Whether to use segmentation offloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OffloadMode {
    /// What the kernel offers, probed at start.
    #[default]
    Auto,
    /// None: one packet per read, datagram and write; system calls still take several at a time.
    Off,
}

/// Which inner and outer sources a received packet may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum SourceGuard {
    /// Any, as flannel.
    Off,
    /// The inner source lies in a known node's subnet and not in ours.
    #[default]
    Inner,
    /// Also, the outer source is the endpoint of a known node.
    Peers,
    /// Also, the inner source belongs to the node with that endpoint.
    Strict,
}

/// What an engine is started with. One engine serves one TUN device and one UDP socket address.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Encapsulation.
    pub encap: Encap,
    /// Address of the underlay socket. An unspecified IPv6 address takes IPv6 only.
    pub bind: SocketAddr,
    /// MTU of the tunnel device: bytes of the largest inner packet.
    pub mtu: u16,
    /// The tunnel device's own IPv4 address: source of ICMP answers. None, no answers.
    pub tunnel_v4: Option<Ipv4Addr>,
    /// The tunnel device's own IPv6 address: source of ICMPv6 answers.
    pub tunnel_v6: Option<Ipv6Addr>,
    /// Subnets leased to this node: inner sources that cannot come from outside.
    pub own_subnets: Vec<Prefix>,
    /// Segmentation offloads.
    pub offload: OffloadMode,
    /// Packet workers; 0 chooses by the number of cores. Each has a TUN queue, a socket and two threads.
    pub workers: usize,
    /// Which sources are accepted.
    pub source_guard: SourceGuard,
    /// Accept VXLAN frames with a group policy tag; the tag is ignored.
    pub accept_gbp: bool,
    /// Prefix of the thread names; the kernel shows 15 bytes in all.
    pub thread_name: String,
}

impl EngineConfig {
    /// A configuration with defaults for everything that has one.
    pub fn new(encap: Encap, bind: SocketAddr, mtu: u16) -> EngineConfig {
        EngineConfig {
            encap,
            bind,
            mtu,
            tunnel_v4: None,
            tunnel_v6: None,
            own_subnets: Vec::new(),
            offload: OffloadMode::default(),
            workers: 0,
            source_guard: SourceGuard::default(),
            accept_gbp: false,
            thread_name: "felt".to_owned(),
        }
    }

    /// Number of workers that an engine will have: `workers`, or one on up to three cores, else half as
    /// many as there are cores, at most eight. The number of TUN queues to open and of
    /// [`PeerCounters`](crate::fib::PeerCounters) rows to make.
    pub fn worker_count(&self) -> usize {
        match self.workers {
            0 => match thread::available_parallelism().map_or(1, usize::from) {
                0..=3 => 1,
                cores => (cores / 2).min(MAX_WORKERS),
            },
            some => some.min(MAX_WORKERS),
        }
    }
}

/// More workers than this do not help one TUN device.
pub const MAX_WORKERS: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overhead_is_what_flannel_subtracts_from_the_mtu() {
        let vxlan = Encap::Vxlan { vni: Vni::new(1).unwrap(), local_mac: MacAddr::default() };
        assert_eq!((vxlan.overhead(false), vxlan.overhead(true)), (50, 70));
        assert_eq!((Encap::Udp.overhead(false), Encap::Udp.overhead(true)), (28, 48));
    }

    #[test]
    fn worker_count_is_bounded() {
        let mut config = EngineConfig::new(Encap::Udp, "0.0.0.0:8285".parse().unwrap(), 1472);
        assert!((1..=MAX_WORKERS).contains(&config.worker_count()));
        config.workers = 3;
        assert_eq!(config.worker_count(), 3);
        config.workers = 1000;
        assert_eq!(config.worker_count(), MAX_WORKERS);
    }
}
