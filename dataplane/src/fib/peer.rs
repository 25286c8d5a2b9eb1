//! Peers: what a table entry points to.

use std::net::SocketAddr;
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
