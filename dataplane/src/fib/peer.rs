//! Peers: what a table entry points to.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crossbeam_utils::CachePadded;

use crate::wire::MacAddr;

/// A peer's number, given by who fills the table. Two live peers never share one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u32);

/// A remote node. Never changed once in a table: a node whose endpoint or MAC changes gets a new
/// `Peer` with the same counters.
#[derive(Debug)]
pub struct Peer {
    /// Number of the peer.
    pub id: PeerId,
    /// Where its packets go.
    pub endpoint: SocketAddr,
    /// Destination of the inner frame; `None` with an encapsulation that has no frame.
    pub mac: Option<MacAddr>,
    /// What went to this peer and came from it.
    pub counters: Arc<PeerCounters>,
}

/// A table entry: the peer, with a copy of what sending a packet needs beside the pointer to it.
///
/// PERF: 32 bytes, so that a lookup ends in one cache line. Following the pointer for endpoint and MAC
/// would be a second miss in a table larger than the caches (bench `fib/dependent`).
#[derive(Debug, Clone)]
#[repr(C, align(32))]
pub struct NextHop {
    /// IPv4 in its mapped form.
    addr: [u8; 16],
    port: u16,
    /// A group address when the peer has none.
    mac: MacAddr,
    peer: Arc<Peer>,
}

const _: () = assert!(size_of::<Option<NextHop>>() == 32);

impl NextHop {
    pub(super) fn new(peer: Arc<Peer>) -> NextHop {
        let addr = match peer.endpoint.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        NextHop {
            addr: addr.octets(),
            port: peer.endpoint.port(),
            mac: peer.mac.unwrap_or(MacAddr::BROADCAST),
            peer,
        }
    }

    /// Address and port of the peer's endpoint. A scope or flow label of IPv6 stays with
    /// [`Peer::endpoint`].
    #[inline]
    pub fn endpoint(&self) -> SocketAddr {
        SocketAddr::new(Ipv6Addr::from(self.addr).to_canonical(), self.port)
    }

    /// Address of the peer's VTEP; `None` when it has none, or one that no single station can have.
    #[inline]
    pub fn mac(&self) -> Option<MacAddr> {
        if self.mac.is_multicast() { None } else { Some(self.mac) }
    }

    /// The peer.
    #[inline]
    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Both lead to the same peer; does not look into it.
    #[inline]
    pub fn same_peer(&self, other: &NextHop) -> bool {
        Arc::ptr_eq(&self.peer, &other.peer)
    }
}

impl Deref for NextHop {
    type Target = Peer;

    /// The peer, at the price of following the pointer.
    #[inline]
    fn deref(&self) -> &Peer {
        &self.peer
    }
}

/// Number of counters that a peer has for each worker. Their meaning is given by the statistics.
pub const PEER_COUNTERS: usize = 16;

/// Counters of one peer: a row of numbers per worker, so that each has a single writer.
#[derive(Debug)]
pub struct PeerCounters {
    rows: Box<[CachePadded<[AtomicU64; PEER_COUNTERS]>]>,
}

impl PeerCounters {
    /// Zeroed rows for this many workers, at least one.
    pub fn new(workers: usize) -> PeerCounters {
        PeerCounters { rows: (0..workers.max(1)).map(|_| CachePadded::default()).collect() }
    }

    /// Adds to a counter. Only the worker that owns the row may call this: it is a load and a store, not
    /// an atomic addition. Indexes beyond rows or counters wrap around.
    #[inline]
    pub fn add(&self, worker: usize, counter: usize, amount: u64) {
        let cell = &self.rows[worker % self.rows.len()][counter % PEER_COUNTERS];
        cell.store(cell.load(Relaxed).wrapping_add(amount), Relaxed);
    }

    /// Sum over the workers.
    pub fn sum(&self, counter: usize) -> u64 {
        self.rows.iter().fold(0, |sum, row| sum.wrapping_add(row[counter % PEER_COUNTERS].load(Relaxed)))
    }
}
