//! What becomes of packets, in numbers.
//!
//! Every inner packet that the engine takes in ends in exactly one [`Verdict`]: forwarded, answered with
//! an ICMP error, or dropped, the latter two for a [`DropReason`]. So for each direction
//!
//! ```text
//!   received = forwarded + sum over reasons (answered + dropped)
//! ```
//!
//! Packets are counted as the underlay carries them: a super-packet that is cut into 44 segments counts
//! 44. A super-packet that arrives in one datagram, as on virtual links, counts once.
//!
//! INVARIANT: each cell has one writer, the thread of its worker and direction; it loads, adds and stores
//! without atomic additions. Only the reader sums.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crossbeam_utils::CachePadded;

use crate::fib::PeerCounters;

/// What became of a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Sent on.
    Forwarded,
    /// Not sent on; its sender was told by ICMP.
    Answered(DropReason),
    /// Not sent on.
    Dropped(DropReason),
}

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Why a packet was not forwarded. Names are stable: they are metric labels and JSON keys.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[$doc])* $name,)*
        }

        impl DropReason {
            /// All reasons, in order.
            pub const ALL: &'static [DropReason] = &[$(DropReason::$name,)*];

            /// The reason in snake case.
            pub const fn name(self) -> &'static str {
                match self {
                    $(DropReason::$name => $text,)*
                }
            }
        }
    };
}

reasons! {
    /// No node has the destination.
    NoRoute = "no_route",
    /// Not a possible IP packet.
    BadIp = "bad_ip",
    /// A virtio-net header that contradicts the packet behind it.
    BadGso = "bad_gso",
    /// TTL or hop limit used up.
    Ttl = "ttl",
    /// Does not fit: the path's MTU, or a receive buffer.
    TooBig = "too_big",
    /// The socket stayed full.
    Eagain = "eagain",
    /// The kernel had no buffers for sending.
    Enobufs = "enobufs",
    /// The kernel refused a message as invalid.
    Einval = "einval",
    /// The underlay device could not send it.
    Eio = "eio",
    /// A local firewall refused to send it.
    Eperm = "eperm",
    /// No way to the node's endpoint.
    Unreachable = "unreachable",
    /// Another error of sending.
    SendError = "send_error",
    /// Datagram too short for its encapsulation, or a frame of another type.
    BadEncap = "bad_encap",
    /// VXLAN flags or reserved bits.
    BadFlags = "bad_flags",
    /// Another network's VNI.
    BadVni = "bad_vni",
    /// Frame not addressed to us, or from ourselves.
    BadMac = "bad_mac",
    /// Wrong inner checksum.
    BadCsum = "bad_csum",
    /// Congestion mark on the outside of a packet that cannot carry one (RFC 6040 4.2).
    BadEcn = "bad_ecn",
    /// Inner source in our own subnet.
    OwnSource = "own_source",
    /// Inner or outer source that the source guard does not accept.
    Spoof = "spoof",
    /// The tunnel device refused a packet as invalid.
    TunEinval = "tun_einval",
    /// The tunnel device is down or gone.
    TunEio = "tun_eio",
    /// The tunnel device was full or had no memory.
    TunFull = "tun_full",
    /// Another error of writing to the tunnel device.
    TunError = "tun_error",
}

/// Number of [`DropReason`]s.
pub const REASONS: usize = DropReason::ALL.len();

/// A number for each reason.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReasonCounts([u64; REASONS]);

impl Default for ReasonCounts {
    fn default() -> Self {
        Self([0; REASONS])
    }
}

impl fmt::Debug for ReasonCounts {
    /// Reasons that occurred.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter().filter(|(_, count)| *count > 0)).finish()
    }
}

impl ReasonCounts {
    /// The number for this reason.
    pub fn get(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }

    /// All reasons with their numbers, zeros included.
    pub fn iter(&self) -> impl Iterator<Item = (DropReason, u64)> + '_ {
        DropReason::ALL.iter().map(|reason| (*reason, self.get(*reason)))
    }

    /// The sum.
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, n| sum.wrapping_add(*n))
    }
}

/// Numbers of one direction since the engine's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DirectionCounters {
    /// Inner packets taken in.
    pub received_packets: u64,
    /// Bytes taken in: inner packets (outbound), datagrams' payload (inbound).
    pub received_bytes: u64,
    /// Inner packets sent on.
    pub forwarded_packets: u64,
    /// Bytes of those inner packets.
    pub forwarded_bytes: u64,
    /// Packets that were dropped, by reason.
    pub dropped: ReasonCounts,
    /// Packets whose sender was told by ICMP that they go no further, by reason.
    pub answered: ReasonCounts,
    /// Dropped packets of the answerable reasons about which no ICMP was sent: not allowed, or rate limit.
    pub answers_suppressed: u64,
    /// Batches: wakes that found something to do.
    pub batches: u64,
    /// What was read: packets and super-packets from the TUN, datagrams and merged datagrams from the socket.
    pub reads: u64,
    /// What was written: datagrams and segmented sends, packets and super-packets.
    pub writes: u64,
}

/// What happened besides verdicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EventCounters {
    /// Datagrams that the kernel dropped because the socket's receive buffer was full.
    pub socket_overflow: u64,
    /// Segmented sends that were refused and sent again one by one.
    pub gso_fallbacks: u64,
    /// Merged writes to the TUN that were refused and written again one by one.
    pub gro_fallbacks: u64,
    /// Packets with an unfinished checksum, as virtual links carry them.
    pub partial_checksums: u64,
    /// Errors left on the socket by earlier sends and taken off it.
    pub pending_errors: u64,
    /// Accepted packets whose outer source is no known node: what source guard `peers` would drop.
    pub would_drop_peers: u64,
    /// Accepted packets whose outer source is not the node of the inner source: what `strict` would drop.
    pub would_drop_strict: u64,
}

/// All numbers of an engine at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CountersSnapshot {
    /// TUN to underlay.
    pub outbound: DirectionCounters,
    /// Underlay to TUN.
    pub inbound: DirectionCounters,
    /// The rest.
    pub events: EventCounters,
}

/// A cell with one writer.
#[derive(Debug, Default)]
pub(crate) struct Cell(AtomicU64);

impl Cell {
    /// Adds. Only the thread that owns the cell may call this.
    #[inline]
    pub(crate) fn add(&self, amount: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(amount), Relaxed);
    }

    pub(crate) fn value(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// Cells of one direction of one worker.
#[derive(Debug, Default)]
pub(crate) struct Direction {
    pub(crate) received_packets: Cell,
    pub(crate) received_bytes: Cell,
    pub(crate) forwarded_packets: Cell,
    pub(crate) forwarded_bytes: Cell,
    pub(crate) answers_suppressed: Cell,
    pub(crate) batches: Cell,
    pub(crate) reads: Cell,
    pub(crate) writes: Cell,
    pub(crate) socket_overflow: Cell,
    pub(crate) gso_fallbacks: Cell,
    pub(crate) gro_fallbacks: Cell,
    pub(crate) partial_checksums: Cell,
    pub(crate) pending_errors: Cell,
    pub(crate) would_drop_peers: Cell,
    pub(crate) would_drop_strict: Cell,
    dropped: [Cell; REASONS],
    answered: [Cell; REASONS],
}

impl AsRef<Direction> for CachePadded<Direction> {
    fn as_ref(&self) -> &Direction {
        self
    }
}

impl Direction {
    /// `count` packets end here for this reason.
    #[inline]
    pub(crate) fn drop(&self, reason: DropReason, count: u64) {
        self.dropped[reason as usize].add(count);
    }

    /// `count` packets end here for this reason, about which an answer is made where that is allowed.
    #[inline]
    pub(crate) fn refuse(&self, reason: DropReason, answered: bool, count: u64) {
        if answered {
            self.answered[reason as usize].add(count);
        } else {
            self.dropped[reason as usize].add(count);
            self.answers_suppressed.add(count);
        }
    }

    fn add_to(&self, sum: &mut DirectionCounters, events: &mut EventCounters) {
        let fields = [
            (&mut sum.received_packets, &self.received_packets),
            (&mut sum.received_bytes, &self.received_bytes),
            (&mut sum.forwarded_packets, &self.forwarded_packets),
            (&mut sum.forwarded_bytes, &self.forwarded_bytes),
            (&mut sum.answers_suppressed, &self.answers_suppressed),
            (&mut sum.batches, &self.batches),
            (&mut sum.reads, &self.reads),
            (&mut sum.writes, &self.writes),
            (&mut events.socket_overflow, &self.socket_overflow),
            (&mut events.gso_fallbacks, &self.gso_fallbacks),
            (&mut events.gro_fallbacks, &self.gro_fallbacks),
            (&mut events.partial_checksums, &self.partial_checksums),
            (&mut events.pending_errors, &self.pending_errors),
            (&mut events.would_drop_peers, &self.would_drop_peers),
            (&mut events.would_drop_strict, &self.would_drop_strict),
        ];
        for (sum, cell) in fields {
            *sum = sum.wrapping_add(cell.value());
        }
        for (sum, cells) in [(&mut sum.dropped, &self.dropped), (&mut sum.answered, &self.answered)] {
            for (sum, cell) in sum.0.iter_mut().zip(cells) {
                *sum = sum.wrapping_add(cell.value());
            }
        }
    }
}

/// Cells of one worker.
#[derive(Debug, Default)]
pub(crate) struct WorkerCounters {
    pub(crate) outbound: CachePadded<Direction>,
    pub(crate) inbound: CachePadded<Direction>,
}

impl CountersSnapshot {
    pub(crate) fn sum<'a>(workers: impl IntoIterator<Item = &'a WorkerCounters>) -> CountersSnapshot {
        let mut sum = CountersSnapshot::default();
        for worker in workers {
            worker.outbound.add_to(&mut sum.outbound, &mut sum.events);
            worker.inbound.add_to(&mut sum.inbound, &mut sum.events);
        }
        sum
    }
}

/// Meaning of the cells of [`PeerCounters`]. Each belongs to one direction, so that the two threads of a
/// worker share a row without sharing a cell.
pub(crate) mod peer_cell {
    use super::DropReason;

    pub(crate) const TX_PACKETS: usize = 0;
    pub(crate) const TX_BYTES: usize = 1;
    pub(crate) const RX_PACKETS: usize = 2;
    pub(crate) const RX_BYTES: usize = 3;

    /// Reasons counted per peer outbound, from cell 4.
    pub(crate) const OUTBOUND: [DropReason; 7] = [
        DropReason::Ttl,
        DropReason::TooBig,
        DropReason::Eagain,
        DropReason::Enobufs,
        DropReason::Eio,
        DropReason::Eperm,
        DropReason::Unreachable,
    ];
    /// Reasons counted per peer inbound, behind those.
    pub(crate) const INBOUND: [DropReason; 4] =
        [DropReason::Ttl, DropReason::BadCsum, DropReason::BadEcn, DropReason::Spoof];

    /// Outbound drops for other reasons.
    pub(crate) const OUTBOUND_OTHER: usize = 4;
    const FIRST_OUTBOUND: usize = 5;
    const FIRST_INBOUND: usize = FIRST_OUTBOUND + OUTBOUND.len();
    const _: () = assert!(FIRST_INBOUND + INBOUND.len() <= crate::fib::PEER_COUNTERS);

    /// The cell for a packet to the peer that was dropped or answered.
    pub(crate) fn outbound(reason: DropReason) -> usize {
        match OUTBOUND.iter().position(|r| *r == reason) {
            Some(at) => FIRST_OUTBOUND + at,
            None => OUTBOUND_OTHER,
        }
    }

    /// The cell for a packet from the peer that was dropped or answered; `None` for reasons that are not
    /// the peer's doing, such as a full tunnel device.
    pub(crate) fn inbound(reason: DropReason) -> Option<usize> {
        INBOUND.iter().position(|r| *r == reason).map(|at| FIRST_INBOUND + at)
    }
}

/// Numbers of one peer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerTotals {
    /// Inner packets sent to the peer.
    pub tx_packets: u64,
    /// Bytes of those.
    pub tx_bytes: u64,
    /// Inner packets that came from the peer's subnets and were forwarded.
    pub rx_packets: u64,
    /// Bytes of those.
    pub rx_bytes: u64,
    /// Packets to the peer that were dropped or answered, by reason; those of other reasons are in
    /// `tx_dropped_other`.
    pub tx_dropped: Vec<(DropReason, u64)>,
    /// Packets to the peer that were dropped for any other reason.
    pub tx_dropped_other: u64,
    /// Packets from the peer's subnets that were dropped or answered, by reason.
    pub rx_dropped: Vec<(DropReason, u64)>,
}

impl PeerTotals {
    /// Sums a peer's rows.
    pub fn of(counters: &PeerCounters) -> PeerTotals {
        let sums = |reasons: &[DropReason], cell: fn(DropReason) -> Option<usize>| {
            let sum = |reason: &DropReason| Some((*reason, counters.sum(cell(*reason)?)));
            reasons.iter().filter_map(sum).collect()
        };
        PeerTotals {
            tx_packets: counters.sum(peer_cell::TX_PACKETS),
            tx_bytes: counters.sum(peer_cell::TX_BYTES),
            rx_packets: counters.sum(peer_cell::RX_PACKETS),
            rx_bytes: counters.sum(peer_cell::RX_BYTES),
            tx_dropped: sums(&peer_cell::OUTBOUND, |reason| Some(peer_cell::outbound(reason))),
            tx_dropped_other: counters.sum(peer_cell::OUTBOUND_OTHER),
            rx_dropped: sums(&peer_cell::INBOUND, peer_cell::inbound),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_distinct_and_in_snake_case() {
        let names: std::collections::HashSet<_> = DropReason::ALL.iter().map(|r| r.name()).collect();
        assert_eq!(names.len(), REASONS);
        assert!(names.iter().all(|name| name.bytes().all(|c| c.is_ascii_lowercase() || c == b'_')));
    }

    #[test]
    fn snapshot_sums_workers_and_reasons() {
        let workers = [WorkerCounters::default(), WorkerCounters::default()];
        for worker in &workers {
            worker.outbound.received_packets.add(3);
            worker.outbound.drop(DropReason::NoRoute, 2);
            worker.outbound.refuse(DropReason::NoRoute, true, 1);
            worker.inbound.socket_overflow.add(5);
        }
        let sum = CountersSnapshot::sum(&workers);
        assert_eq!(sum.outbound.received_packets, 6);
        assert_eq!(sum.outbound.dropped.get(DropReason::NoRoute), 4);
        assert_eq!(sum.outbound.dropped.total() + sum.outbound.answered.total(), 6);
        assert_eq!(sum.events.socket_overflow, 10);
    }

    #[test]
    fn peer_cells_of_the_two_directions_are_distinct() {
        let counters = PeerCounters::new(1);
        counters.add(0, peer_cell::outbound(DropReason::Ttl), 1);
        counters.add(0, peer_cell::inbound(DropReason::Ttl).unwrap(), 2);
        counters.add(0, peer_cell::outbound(DropReason::Einval), 4);
        let totals = PeerTotals::of(&counters);
        assert_eq!(totals.tx_dropped[0], (DropReason::Ttl, 1));
        assert_eq!(totals.rx_dropped[0], (DropReason::Ttl, 2));
        assert_eq!(totals.tx_dropped_other, 4);
    }
}
