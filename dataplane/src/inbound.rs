//! One batch from the underlay to the TUN.
//!
//! ```text
//!  UDP socket -> receive what is there -> split -> decap, checks -> source guard -> ECN, TTL -> merge -> TUN
//! ```
//!
//! Tiers, fastest first, each packet in one of them:
//!
//! 1. datagrams that the kernel merged (UDP_GRO) or the sender had sent in one: packets of a flow become one
//!    super-packet again, written from where they were received;
//! 2. datagrams that hold a super-packet with unfinished checksum, as virtual links carry them: written as such;
//! 3. single packets.
//!
//! INVARIANT: packets of one flow are written in the order in which they came. Nothing is kept for later.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::answering::Answering;
use crate::buf::{Piece, Received, RecvBatch};
use crate::config::{Encap, EngineConfig, SourceGuard};
use crate::device::Device;
use crate::encap::vxlan::Vtep;
use crate::encap::{DecapError, Inner, udp};
use crate::fib::{Cursor, NextHop, Prefix};
use crate::icmp::Trouble;
use crate::offload::SharedOffloads;
use crate::offload::gro::{self, Added, Chain, Coalescer, HEAD_LEN, Layout, Packet, Shape};
use crate::outbound::set_ttl;
use crate::socket::{Answers, Socket};
use crate::stats::{Direction, DropReason, WorkerCounters, peer_cell};
use crate::table::Table;
use crate::wire::{Ipv4Packet, Ipv6Packet, be16, protocol, tcp, udp as udp_header};

/// Slots of a receive call while datagrams are small, and while they are merged ones of up to 64 KiB: then as
/// many as stay in the cache until they are written.
const SMALL_SLOTS: usize = 32;
const LARGE_SLOTS: usize = 4;
/// Average bytes per message from which on they count as large.
const LARGE: usize = 8 << 10;

/// The inbound half of a worker.
#[derive(Debug)]
pub(crate) struct Inbound<A> {
    vtep: Option<Vtep>,
    headers_len: usize,
    mtu: usize,
    guard: SourceGuard,
    own_subnets: Vec<Prefix>,
    offloads: Arc<SharedOffloads>,
    rx: RecvBatch,
    slots: usize,
    coalescer: Coalescer,
    pieces: Vec<Piece>,
    overflow: u32,
    answering: Answering<A>,
    counters: Arc<WorkerCounters>,
    row: usize,
}

/// The peer whose subnet holds the inner source, if there is one.
type Origin<'t> = Option<&'t NextHop>;

/// Packets from one peer in a row, counted when another one's come.
struct Tally<'t> {
    peer: Option<&'t NextHop>,
    packets: u64,
    bytes: u64,
}

impl<'t> Tally<'t> {
    #[inline]
    fn add(&mut self, peer: Option<&'t NextHop>, bytes: usize, row: usize) {
        let same = match (peer, self.peer) {
            (Some(a), Some(b)) => a.same_peer(b),
            (None, None) => true,
            _ => false,
        };
        if !same {
            self.flush(row);
            self.peer = peer;
        }
        self.packets += 1;
        self.bytes += bytes as u64;
    }

    fn flush(&mut self, row: usize) {
        if let Some(peer) = self.peer.take() {
            peer.counters.add(row, peer_cell::RX_PACKETS, self.packets);
            peer.counters.add(row, peer_cell::RX_BYTES, self.bytes);
        }
        (self.packets, self.bytes) = (0, 0);
    }
}

impl<A: Answers> Inbound<A> {
    pub(crate) fn new(
        config: &EngineConfig,
        offloads: Arc<SharedOffloads>,
        answering: Answering<A>,
        counters: Arc<WorkerCounters>,
        row: usize,
    ) -> Inbound<A> {
        let vtep = match config.encap {
            Encap::Vxlan { vni, local_mac } => {
                Some(Vtep { vni, mac: local_mac, accept_gbp: config.accept_gbp })
            }
            Encap::Udp => None,
        };
        let coalescer =
            Coalescer::new(offloads.tun_gro_tcp.load(Relaxed), offloads.tun_gro_udp.load(Relaxed));
        Inbound {
            vtep,
            headers_len: config.encap.headers_len(),
            mtu: usize::from(config.mtu),
            guard: config.source_guard,
            own_subnets: config.own_subnets.clone(),
            offloads,
            rx: RecvBatch::new(SMALL_SLOTS),
            slots: SMALL_SLOTS,
            coalescer,
            pieces: Vec::with_capacity(128),
            overflow: 0,
            answering,
            counters,
            row,
        }
    }

    fn counters(&self) -> &Direction {
        &self.counters.inbound
    }

    /// Receives once and writes what came. Returns how many messages that were.
    ///
    /// # Errors
    /// Of receiving, other than that there is nothing.
    pub(crate) fn run<D: Device, S: Socket>(
        &mut self,
        device: &D,
        socket: &S,
        table: &Table,
    ) -> io::Result<usize> {
        match socket.recv(&mut self.rx, self.slots) {
            Ok(()) => {}
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(0);
            }
            Err(error) => return Err(error),
        }
        let count = self.rx.received.len();
        let mut cursor = table.fib.cursor();
        let mut tally = Tally { peer: None, packets: 0, bytes: 0 };
        let mut bytes = 0;
        for i in 0..count {
            let message = self.rx.received[i];
            bytes += message.len;
            self.take(&message, device, table, &mut cursor, &mut tally);
        }
        tally.flush(self.row);
        self.flush(device);
        let counters = self.counters();
        counters.batches.add(1);
        counters.reads.add(count as u64);
        counters.received_bytes.add(bytes as u64);
        self.slots = if count > 0 && bytes / count > LARGE { LARGE_SLOTS } else { SMALL_SLOTS };
        Ok(count)
    }

    /// Takes one message apart.
    fn take<'t, D: Device>(
        &mut self,
        message: &Received,
        device: &D,
        table: &'t Table,
        cursor: &mut Cursor<'t>,
        tally: &mut Tally<'t>,
    ) {
        if let Some(overflow) = message.overflow {
            // The kernel's count is the socket's, of 32 bits, and wraps.
            self.counters().socket_overflow.add(u64::from(overflow.wrapping_sub(self.overflow)));
            self.overflow = overflow;
        }
        if message.truncated || message.len == 0 {
            self.counters().received_packets.add(1);
            let reason = if message.truncated { DropReason::TooBig } else { DropReason::BadEncap };
            return self.counters().drop(reason, 1);
        }
        // A packet that fills the message is one packet, whatever the kernel says: the size is then that of
        // the segments of an inner super-packet.
        let (stride, inner_segment) = match message.segment.map(usize::from) {
            Some(size) if size > 0 && size < message.len => {
                if self.fills(&self.rx.buffer[message.at..][..message.len]) {
                    (message.len, size as u16)
                } else {
                    (size, 0)
                }
            }
            _ => (message.len, 0),
        };
        let mut at = message.at;
        let end = message.at + message.len;
        while at < end {
            let len = stride.min(end - at);
            self.counters().received_packets.add(1);
            if self.coalescer.is_full() {
                self.flush(device);
            }
            self.datagram(at, len, message, inner_segment, table, cursor, tally);
            at += len;
        }
    }

    fn pop<'a>(&self, datagram: &'a [u8]) -> Result<Inner<'a>, DecapError> {
        match &self.vtep {
            Some(vtep) => vtep.pop(datagram),
            None => udp::pop(datagram),
        }
    }

    fn fills(&self, message: &[u8]) -> bool {
        self.pop(message).is_ok_and(|inner| self.headers_len + inner.total_len() == message.len())
    }

    /// Checks one datagram and adds its packet to the chains.
    #[expect(
        clippy::too_many_arguments,
        reason = "the state of one batch, kept out of self for its lifetimes"
    )]
    #[inline]
    fn datagram<'t>(
        &mut self,
        at: usize,
        len: usize,
        message: &Received,
        inner_segment: u16,
        table: &'t Table,
        cursor: &mut Cursor<'t>,
        tally: &mut Tally<'t>,
    ) {
        let inner = match self.pop(&self.rx.buffer[at..][..len]) {
            Ok(inner) => inner,
            Err(error) => return self.counters().drop(reason_of(error), 1),
        };
        let at = at + self.headers_len;
        let packet_len = inner.total_len();
        let peer = match self.source(&inner, message.from, table, cursor) {
            Ok(peer) => peer,
            Err((reason, peer)) => return self.drop(reason, peer),
        };
        let layout = Layout::of(&inner);
        let is_v6 = inner.is_v6();
        let (tos, ttl) = (inner.tos(), inner.ttl());

        if message.tos & 0b11 != 0 {
            match merged_ecn(message.tos, tos) {
                None => return self.drop(DropReason::BadEcn, peer),
                Some(merged) if merged != tos => set_tos(&mut self.rx.buffer[at..][..packet_len], merged),
                Some(_) => {}
            }
        }
        // COMPAT: flannel's udp proxy counts as a hop at both ends.
        if self.vtep.is_none() {
            if ttl <= 1 {
                return self.expired(at, packet_len, peer);
            }
            set_ttl(&mut self.rx.buffer[at..][..packet_len], ttl - 1);
        }

        let bytes = &self.rx.buffer[at..][..packet_len];
        let partial = gro::is_partial(bytes, is_v6, &layout);
        let mut packet =
            Packet { at: at as u32, len: packet_len as u32, is_v6, layout, partial, gso_size: 0 };
        if partial {
            self.counters().partial_checksums.add(1);
            packet.gso_size = unsegmented(bytes, &layout, inner_segment, self.mtu);
        }
        match self.coalescer.add(&self.rx.buffer, packet) {
            Added::Taken => tally.add(peer, packet_len, self.row),
            Added::Damaged => self.drop(DropReason::BadCsum, peer),
        }
    }

    fn drop(&self, reason: DropReason, peer: Option<&NextHop>) {
        self.counters().drop(reason, 1);
        if let (Some(peer), Some(cell)) = (peer, peer_cell::inbound(reason)) {
            peer.counters.add(self.row, cell, 1);
        }
    }

    #[cold]
    fn expired(&mut self, at: usize, len: usize, peer: Option<&NextHop>) {
        let answered = Inner::parse(&self.rx.buffer[at..][..len])
            .is_ok_and(|inner| self.answering.tell(&inner, Trouble::TimeExceeded));
        self.counters().refuse(DropReason::Ttl, answered, 1);
        if let (Some(peer), Some(cell)) = (peer, peer_cell::inbound(DropReason::Ttl)) {
            peer.counters.add(self.row, cell, 1);
        }
    }

    /// The peer that the inner source belongs to, if the source guard lets the packet in.
    #[inline]
    fn source<'t>(
        &self,
        inner: &Inner<'_>,
        from: SocketAddr,
        table: &'t Table,
        cursor: &mut Cursor<'t>,
    ) -> Result<Origin<'t>, (DropReason, Origin<'t>)> {
        let src = inner.src();
        let peer = match src {
            IpAddr::V4(addr) => cursor.v4(addr),
            IpAddr::V6(addr) => cursor.v6(addr),
        };
        if self.guard >= SourceGuard::Inner {
            if self.own_subnets.iter().any(|own| own.contains(src)) {
                return Err((DropReason::OwnSource, None));
            }
            if peer.is_none() {
                return Err((DropReason::Spoof, None));
            }
        }
        let from = from.ip();
        if peer.is_some_and(|peer| peer.endpoint().ip() == from) {
            return Ok(peer);
        }
        let known = table.knows_endpoint(from);
        let accepted = match self.guard {
            SourceGuard::Off | SourceGuard::Inner => true,
            SourceGuard::Peers => known,
            SourceGuard::Strict => false,
        };
        if !accepted {
            return Err((DropReason::Spoof, peer));
        }
        self.counters().would_drop_strict.add(1);
        if !known {
            self.counters().would_drop_peers.add(1);
        }
        Ok(peer)
    }

    /// Writes all chains and forgets them.
    fn flush<D: Device>(&mut self, device: &D) {
        let mut head = [0; HEAD_LEN];
        for i in 0..self.coalescer.chains().len() {
            let chain = self.coalescer.chains()[i];
            if chain.is_damaged() {
                self.counters().drop(DropReason::BadCsum, 1);
                continue;
            }
            let head_len = self.coalescer.emit(&chain, &self.rx.buffer, &mut head, &mut self.pieces);
            match device.write(&head[..head_len], &self.rx.buffer, &self.pieces) {
                Ok(()) => {
                    let counters = self.counters();
                    counters.writes.add(1);
                    counters.forwarded_packets.add(chain.count());
                    counters.forwarded_bytes.add(chain.bytes());
                }
                Err(error) => self.refused(&chain, &error, device),
            }
        }
        self.coalescer.clear();
    }

    /// The device did not take a chain.
    #[cold]
    fn refused<D: Device>(&mut self, chain: &Chain, error: &io::Error, device: &D) {
        let merged = chain.count() > 1;
        // Some kernels (6.1.103, 6.6.44, 6.10.3 and their kin) refuse good super-packets.
        if merged && error.raw_os_error() == Some(libc::EINVAL) {
            self.counters().gro_fallbacks.add(1);
            if chain.is_tcp() {
                self.offloads.tun_gro_tcp.store(false, Relaxed);
                self.coalescer.tcp = false;
            } else {
                self.offloads.tun_gro_udp.store(false, Relaxed);
                self.coalescer.udp = false;
            }
            for (head, piece) in self.coalescer.singles(chain, &self.rx.buffer) {
                match device.write(&head, &self.rx.buffer, &[piece]) {
                    Ok(()) => {
                        let counters = self.counters();
                        counters.writes.add(1);
                        counters.forwarded_packets.add(1);
                        counters.forwarded_bytes.add(u64::from(piece.len));
                    }
                    Err(error) => self.counters().drop(reason_of_write(&error), 1),
                }
            }
            return;
        }
        self.counters().drop(reason_of_write(error), chain.count());
    }
}

fn reason_of(error: DecapError) -> DropReason {
    match error {
        DecapError::Encap => DropReason::BadEncap,
        DecapError::Flags => DropReason::BadFlags,
        DecapError::Vni => DropReason::BadVni,
        DecapError::Mac => DropReason::BadMac,
        DecapError::Ip => DropReason::BadIp,
    }
}

fn reason_of_write(error: &io::Error) -> DropReason {
    match error.raw_os_error() {
        Some(libc::EINVAL) => DropReason::TunEinval,
        Some(libc::EIO | libc::EBADFD | libc::ENETDOWN) => DropReason::TunEio,
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => DropReason::TunFull,
        _ => DropReason::TunError,
    }
}

/// The inner ToS after decapsulation, RFC 6040 4.2, or `None` if the packet must be dropped: it carries no
/// congestion marks, and was marked.
fn merged_ecn(outer: u8, inner: u8) -> Option<u8> {
    const NOT_ECT: u8 = 0b00;
    const ECT_1: u8 = 0b01;
    const ECT_0: u8 = 0b10;
    const CE: u8 = 0b11;
    match (inner & 0b11, outer & 0b11) {
        (NOT_ECT, CE) => None,
        (NOT_ECT, _) => Some(inner),
        (_, CE) => Some(inner | CE),
        (ECT_0, ECT_1) => Some(inner & !0b11 | ECT_1),
        _ => Some(inner),
    }
}

/// Sets DSCP and ECN of a packet that has been parsed.
fn set_tos(packet: &mut [u8], tos: u8) {
    if packet[0] >> 4 == 4 {
        if let Ok(mut v4) = Ipv4Packet::new_checked(packet) {
            v4.set_tos(tos);
        }
    } else if let Ok(mut v6) = Ipv6Packet::new_checked(packet) {
        v6.set_traffic_class(tos);
    }
}

/// Payload bytes per segment of a packet with unfinished checksum that is a super-packet; 0 if it is not.
fn unsegmented(bytes: &[u8], layout: &Layout, inner_segment: u16, mtu: usize) -> u16 {
    if layout.shape == Shape::Opaque {
        return 0;
    }
    let body = &bytes[layout.l4..];
    match layout.protocol {
        protocol::UDP => {
            let payload = usize::from(be16(body, 4)).saturating_sub(udp_header::HEADER_LEN);
            if usize::from(inner_segment) < payload { inner_segment } else { 0 }
        }
        // Its segment size is not in it: as large as fits the tunnel.
        protocol::TCP if bytes.len() > mtu => {
            let headers = layout.l4 + usize::from(body[12] >> 4).max(5) * 4;
            let fits = headers < bytes.len() && body.len() >= tcp::MIN_HEADER_LEN;
            if fits { mtu.saturating_sub(headers) as u16 } else { 0 }
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ecn_is_merged_as_rfc_6040_says() {
        // Rows: inner Not-ECT, ECT(0), ECT(1), CE. Columns: outer Not-ECT, ECT(0), ECT(1), CE.
        let (not, ect1, ect0, ce) = (0xb8, 0xb9, 0xba, 0xbb);
        let table = [
            (not, [Some(not), Some(not), Some(not), None]),
            (ect0, [Some(ect0), Some(ect0), Some(ect1), Some(ce)]),
            (ect1, [Some(ect1), Some(ect1), Some(ect1), Some(ce)]),
            (ce, [Some(ce); 4]),
        ];
        for (inner, row) in table {
            for (outer, expected) in [0b00, 0b10, 0b01, 0b11].into_iter().zip(row) {
                assert_eq!(merged_ecn(outer, inner), expected, "inner {inner:#x}, outer {outer:#b}");
            }
        }
    }
}
