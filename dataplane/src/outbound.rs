//! One batch from the TUN to the underlay.
//!
//! ```text
//!  TUN queue -> read until empty -> virtio-net and IP header -> table -> TTL -> encap, cut -> runs -> send
//! ```
//!
//! Tiers, fastest first, each packet in one of them:
//!
//! 1. super-packets of TCP and UDP: headers of each segment in a slab, payload sent from where it was read;
//! 2. packets: encapsulation written into the bytes in front of them;
//! 3. packets that cannot go on: an ICMP answer, or a drop.
//!
//! Segments of 1 and 2 that go to one peer with one outer ToS and have one length form a run, across packets
//! of the whole batch; a shorter segment ends it. A run leaves as few segmented sends of even size, all runs of
//! the batch in one system call.
//!
//! INVARIANT: packets to one peer leave in the order in which they were read. Nothing is kept for later.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use crate::answering::Answering;
use crate::buf::{Message, Piece, SendBatch};
use crate::config::{Encap, EngineConfig};
use crate::device::Device;
use crate::encap::Inner;
use crate::encap::vxlan::{self, Vtep};
use crate::fib::{Cursor, NextHop, Peer};
use crate::icmp::Trouble;
use crate::offload::gso::{Cutter, MAX_HEADERS};
use crate::offload::vnet_hdr::{self, NEEDS_CSUM, VnetHdr, gso};
use crate::offload::{SharedOffloads, finish_checksum};
use crate::socket::{Answers, Socket};
use crate::stats::{Direction, DropReason, WorkerCounters, peer_cell};
use crate::table::Table;
use crate::wire::{Ipv4Packet, Ipv6Packet, ipv6, protocol};

/// Bytes of packets in one batch: small enough to stay in a core's L2, large enough for four super-packets.
const BATCH_LEN: usize = 256 << 10;
/// Packets in one batch.
const MAX_PACKETS: usize = 64;
/// Longest read: virtio-net header and the longest packet.
const MAX_READ: usize = vnet_hdr::LEN + 65_535;
/// Bytes in front of a read, so that packet and encapsulation fit, and the packet starts a cache line.
const HEADROOM: usize = 64 - vnet_hdr::LEN;

/// Headers of one segment: encapsulation and the inner headers.
const SLOT_LEN: usize = 192;
/// Super-packets' segments in one send.
const SLOTS: usize = 256;
const SLAB_LEN: usize = SLOTS * SLOT_LEN;
const _: () = assert!(vxlan::HEADERS_LEN + MAX_HEADERS <= SLOT_LEN && HEADROOM >= vxlan::HEADERS_LEN);

/// Segments in one send: those of super-packets, and packets.
const MAX_SEGMENTS: usize = SLOTS + MAX_PACKETS;
/// Payload of a segmented send: below 65,507, the limit of UDP over IPv4.
const MAX_SEND: usize = 65_000;
/// How long a full socket may hold us up.
const FULL_WAIT: Duration = Duration::from_millis(1);
/// Sends that a path is spared segmented sends for after it had refused one for its size.
const SIZE_PENALTY: u32 = 4096;

const NONE: u16 = u16::MAX;

/// The peers of one send, by their place.
struct Peers<'t> {
    peers: [Option<&'t NextHop>; MAX_PACKETS],
    count: usize,
}

impl<'t> Peers<'t> {
    fn new() -> Self {
        Peers { peers: [None; MAX_PACKETS], count: 0 }
    }

    /// INVARIANT: a send has at most `MAX_PACKETS` packets, so there always is a place.
    #[inline]
    fn place(&mut self, peer: &'t NextHop) -> u16 {
        let same = |known: &Option<&NextHop>| known.is_some_and(|known| known.same_peer(peer));
        if let Some(at) = self.peers[..self.count].iter().rposition(same) {
            return at as u16;
        }
        self.peers[self.count] = Some(peer);
        self.count += 1;
        (self.count - 1) as u16
    }
}

/// A datagram to be: its headers, then payload if that lies elsewhere.
#[derive(Debug, Clone, Copy)]
struct Segment {
    headers: Piece,
    payload: Piece,
    /// Next of its run.
    next: u16,
}

/// Segments that can go in one send.
#[derive(Debug, Clone, Copy)]
struct Run {
    dst: SocketAddr,
    peer: u16,
    tos: u8,
    /// A shorter segment has ended it.
    closed: bool,
    /// Bytes of each segment but the last.
    segment: u16,
    count: u16,
    first: u16,
    last: u16,
}

/// What to do about an error of sending.
enum Remedy {
    /// Try the message again.
    Retry,
    /// Send its segments one by one.
    Singly,
    /// Give up this message.
    Skip(DropReason),
    /// Give up this and all others.
    SkipAll(DropReason),
}

/// The outbound half of a worker.
#[derive(Debug)]
pub(crate) struct Outbound<A> {
    vtep: Option<Vtep>,
    headers_len: usize,
    mtu: usize,
    offloads: Arc<SharedOffloads>,
    /// Segments in one send.
    max_segments: usize,
    /// Where segmented sends are too large for, from which length on, for how many sends more.
    size_penalty: Option<(SocketAddr, u16, u32)>,
    /// Slab, then packets.
    buffer: Box<[u8]>,
    slots_used: usize,
    packets: usize,
    segments: Vec<Segment>,
    runs: Vec<Run>,
    /// The run of each peer that is not closed.
    open: [u16; MAX_PACKETS],
    batch: SendBatch,
    singles: SendBatch,
    /// A packet in one piece, for answers about segments.
    whole: Vec<u8>,
    answering: Answering<A>,
    counters: Arc<WorkerCounters>,
    row: usize,
}

impl<A: Answers> Outbound<A> {
    pub(crate) fn new(
        config: &EngineConfig,
        offloads: Arc<SharedOffloads>,
        answering: Answering<A>,
        counters: Arc<WorkerCounters>,
        row: usize,
    ) -> Outbound<A> {
        let vtep = match config.encap {
            Encap::Vxlan { vni, local_mac } => {
                Some(Vtep { vni, mac: local_mac, accept_gbp: config.accept_gbp })
            }
            Encap::Udp => None,
        };
        Outbound {
            vtep,
            headers_len: config.encap.headers_len(),
            mtu: usize::from(config.mtu),
            max_segments: offloads.max_segments(),
            offloads,
            size_penalty: None,
            buffer: vec![0; SLAB_LEN + BATCH_LEN + HEADROOM + MAX_READ].into_boxed_slice(),
            slots_used: 0,
            packets: 0,
            segments: Vec::with_capacity(MAX_SEGMENTS),
            runs: Vec::with_capacity(MAX_SEGMENTS),
            open: [NONE; MAX_PACKETS],
            batch: SendBatch::with_capacity(MAX_SEGMENTS, 2 * MAX_SEGMENTS),
            singles: SendBatch::with_capacity(MAX_SEGMENTS, 2 * MAX_SEGMENTS),
            whole: Vec::with_capacity(1 << 16),
            answering,
            counters,
            row,
        }
    }

    /// Reads what the device has, up to a full batch, and sends it on. Returns how many reads gave something.
    ///
    /// # Errors
    /// Of reading, other than that there is nothing; what was read before is sent on.
    pub(crate) fn run<D: Device, S: Socket>(
        &mut self,
        device: &D,
        socket: &S,
        table: &Table,
    ) -> io::Result<usize> {
        let mut peers = Peers::new();
        let mut cursor = table.fib.cursor();
        let mut at = SLAB_LEN;
        let mut reads = 0;
        let mut result = Ok(());
        while self.packets < MAX_PACKETS && at < SLAB_LEN + BATCH_LEN {
            let start = at + HEADROOM;
            match device.read(&mut self.buffer[start..start + MAX_READ]) {
                Ok(len) => {
                    reads += 1;
                    self.packets += 1;
                    self.take(start, len, socket, &mut peers, &mut cursor);
                    at = (start + len).next_multiple_of(64);
                }
                Err(error) => {
                    match error.kind() {
                        io::ErrorKind::WouldBlock => {}
                        io::ErrorKind::Interrupted => continue,
                        _ => result = Err(error),
                    }
                    break;
                }
            }
        }
        if reads > 0 {
            self.flush(socket, &mut peers);
            let counters = &self.counters.outbound;
            counters.batches.add(1);
            counters.reads.add(reads as u64);
        }
        self.packets = 0;
        result.map(|()| reads)
    }

    fn counters(&self) -> &Direction {
        &self.counters.outbound
    }

    fn drop(&self, reason: DropReason, count: u64, peer: Option<&Peer>) {
        self.counters().drop(reason, count);
        if let Some(peer) = peer {
            peer.counters.add(self.row, peer_cell::outbound(reason), count);
        }
    }

    /// Takes one read: `len` bytes at `start`, virtio-net header first.
    fn take<'t, S: Socket>(
        &mut self,
        start: usize,
        len: usize,
        socket: &S,
        peers: &mut Peers<'t>,
        cursor: &mut Cursor<'t>,
    ) {
        let at = start + vnet_hdr::LEN;
        let end = (start + len).max(at);
        let Some(header) = self.buffer[start..start + len].first_chunk() else {
            self.counters().received_packets.add(1);
            return self.drop(DropReason::BadIp, 1, None);
        };
        let header = VnetHdr::parse(header);
        let Ok(inner) = Inner::parse(&self.buffer[at..end]) else {
            self.counters().received_packets.add(1);
            self.counters().received_bytes.add((end - at) as u64);
            return self.drop(DropReason::BadIp, 1, None);
        };
        let end = at + inner.total_len();
        let cutter = match header.gso_type {
            gso::NONE => None,
            _ => Some(Cutter::new(&inner, &header)),
        };
        let count = match &cutter {
            Some(Ok(cutter)) => cutter.segment_count(),
            _ => 1,
        };
        self.counters().received_packets.add(count as u64);
        self.counters().received_bytes.add((end - at) as u64);

        let peer = match &inner {
            Inner::V4(v4) => cursor.v4(v4.dst()),
            Inner::V6(v6) => cursor.v6(v6.dst()),
        };
        let Some(peer) = peer else {
            return self.refuse(at, end, Trouble::NoRoute, count as u64, None);
        };
        let mac = match (self.vtep, peer.mac()) {
            (Some(_), None) => return self.drop(DropReason::Unreachable, count as u64, Some(peer)),
            (Some(_), Some(mac)) => mac,
            (None, _) => crate::wire::MacAddr::default(),
        };
        let endpoint = peer.endpoint();
        if endpoint.is_ipv6() != socket.is_v6() {
            return self.drop(DropReason::Unreachable, count as u64, Some(peer));
        }
        let ttl = inner.ttl();
        if self.vtep.is_none() && ttl <= 1 {
            return self.refuse(at, end, Trouble::TimeExceeded, count as u64, Some(peer));
        }
        let whole = end - at;
        let is_v6 = inner.is_v6();
        let (may_fragment, ip_len) = match &inner {
            Inner::V4(v4) => (!v4.dont_fragment(), v4.header_len()),
            Inner::V6(_) => (false, ipv6::HEADER_LEN),
        };
        if cutter.is_none() && whole > self.mtu && !may_fragment {
            return self.refuse(at, end, self.too_big(), 1, Some(peer));
        }
        // RFC 6040 4.1 for vxlan. COMPAT: flannel's udp proxy would ignore marks on the outer header, so they
        // must not be invited there ("compatibility mode").
        let tos = if self.vtep.is_some() { inner.tos() & 0b11 } else { 0 };
        let is_udp = match &inner {
            Inner::V4(v4) => v4.protocol() == protocol::UDP,
            Inner::V6(v6) => v6.upper_layer().is_ok_and(|upper| upper.protocol == protocol::UDP),
        };
        // COMPAT: flannel's udp proxy counts as a hop at both ends; the kernel's vxlan device does not.
        if self.vtep.is_none() {
            set_ttl(&mut self.buffer[at..end], ttl - 1);
        }
        let cutter = match cutter {
            None => {
                let packet = &mut self.buffer[at..end];
                // Of layer 4 only: a start inside the IP header would have that overwritten.
                if header.flags & NEEDS_CSUM != 0
                    && (usize::from(header.csum_start) < ip_len || !finish_checksum(packet, &header, is_udp))
                {
                    return self.drop(DropReason::BadGso, 1, Some(peer));
                }
                if self.segments.len() == MAX_SEGMENTS {
                    self.flush(socket, peers);
                }
                let first = at - self.headers_len;
                if let (Some(vtep), Some(out)) =
                    (&self.vtep, self.buffer[first..at].first_chunk_mut::<{ vxlan::HEADERS_LEN }>())
                {
                    vtep.push(mac, is_v6, out);
                }
                let headers = Piece { at: first as u32, len: (end - first) as u32 };
                let peer_at = peers.place(peer);
                return self.push(peer_at, endpoint, tos, headers, Piece::default());
            }
            Some(Ok(mut cutter)) => {
                if self.vtep.is_none() {
                    cutter.lower_ttl();
                }
                cutter
            }
            Some(Err(_)) => return self.drop(DropReason::BadGso, 1, Some(peer)),
        };
        let headers_len = self.headers_len + cutter.headers_len();
        for index in 0..cutter.segment_count() {
            if self.slots_used == SLOTS || self.segments.len() == MAX_SEGMENTS {
                self.flush(socket, peers);
            }
            let slot = self.slots_used * SLOT_LEN;
            self.slots_used += 1;
            let (slab, packets) = self.buffer.split_at_mut(SLAB_LEN);
            let headers = &mut slab[slot..slot + headers_len];
            let (encap, inner) = headers.split_at_mut(self.headers_len);
            if let (Some(vtep), Some(out)) = (&self.vtep, encap.first_chunk_mut()) {
                vtep.push(mac, is_v6, out);
            }
            let payload = cutter.cut(&packets[at - SLAB_LEN..end - SLAB_LEN], index, inner);
            let headers = Piece { at: slot as u32, len: headers_len as u32 };
            let payload = Piece { at: (at + payload.start) as u32, len: payload.len() as u32 };
            let peer_at = peers.place(peer);
            self.push(peer_at, endpoint, tos, headers, payload);
        }
    }

    fn too_big(&self) -> Trouble {
        Trouble::TooBig { mtu: self.mtu as u16 }
    }

    /// Answers about the packet at this place, or drops it silently where no answer may be made.
    #[cold]
    fn refuse(&mut self, at: usize, end: usize, trouble: Trouble, count: u64, peer: Option<&Peer>) {
        let answered =
            Inner::parse(&self.buffer[at..end]).is_ok_and(|inner| self.answering.tell(&inner, trouble));
        self.refused(trouble, answered, count, peer);
    }

    fn refused(&self, trouble: Trouble, answered: bool, count: u64, peer: Option<&Peer>) {
        let reason = match trouble {
            Trouble::NoRoute => DropReason::NoRoute,
            Trouble::TimeExceeded => DropReason::Ttl,
            Trouble::TooBig { .. } => DropReason::TooBig,
        };
        self.counters().refuse(reason, answered, count);
        if let Some(peer) = peer {
            peer.counters.add(self.row, peer_cell::outbound(reason), count);
        }
    }

    /// Appends a segment to its peer's run, or starts a new one.
    #[inline]
    fn push(&mut self, peer: u16, dst: SocketAddr, tos: u8, headers: Piece, payload: Piece) {
        let at = self.segments.len() as u16;
        let len = headers.len + payload.len;
        self.segments.push(Segment { headers, payload, next: NONE });
        // Longer than 16 bits, a segment cannot be sent anyhow; alone it gets the kernel's own answer.
        let segment = u16::try_from(len).unwrap_or(u16::MAX);
        if let Some(run) = self.runs.get_mut(self.open[peer as usize] as usize)
            && run.tos == tos
            && !run.closed
            && segment <= run.segment
        {
            run.closed = segment < run.segment;
            run.count += 1;
            self.segments[run.last as usize].next = at;
            run.last = at;
            return;
        }
        self.open[peer as usize] = self.runs.len() as u16;
        self.runs.push(Run { dst, peer, tos, closed: false, segment, count: 1, first: at, last: at });
    }

    /// Sends all runs and forgets them, with slab and peers. Packets stay where they are.
    fn flush<S: Socket>(&mut self, socket: &S, peers: &mut Peers<'_>) {
        if !self.runs.is_empty() {
            self.plan();
            let mut batch = std::mem::take(&mut self.batch);
            self.transmit(socket, &mut batch, peers);
            self.batch = batch;
            self.segments.clear();
            self.runs.clear();
            self.slots_used = 0;
        }
        self.open[..peers.count].fill(NONE);
        *peers = Peers::new();
    }

    /// Makes messages of the runs.
    fn plan(&mut self) {
        self.batch.clear();
        let gso = self.offloads.udp_gso.load(Relaxed);
        if let Some((_, _, sends)) = &mut self.size_penalty {
            *sends -= 1;
            if *sends == 0 {
                self.size_penalty = None;
            }
        }
        for run in &self.runs {
            let too_large =
                self.size_penalty.is_some_and(|(dst, len, _)| dst == run.dst && run.segment >= len);
            let count = usize::from(run.count);
            let most = if gso && !too_large {
                self.max_segments.min(MAX_SEND / usize::from(run.segment.max(1))).max(1)
            } else {
                1
            };
            let messages = count.div_ceil(most);
            let mut at = run.first;
            for i in 0..messages {
                let segments = count / messages + usize::from(i < count % messages);
                at = append(&mut self.batch, &self.segments, run, at, segments, self.headers_len);
            }
        }
    }

    /// Sends a batch. What the kernel does not take is tried again as its error asks for, or dropped.
    fn transmit<S: Socket>(&mut self, socket: &S, batch: &mut SendBatch, peers: &Peers<'_>) {
        let (mut next, mut tries, mut waited) = (0, 0, false);
        while next < batch.messages.len() {
            let error = match socket.send(&self.buffer, batch, next) {
                Ok(0) => io::ErrorKind::WouldBlock.into(),
                Ok(sent) => {
                    self.sent(&batch.messages[next..next + sent], peers);
                    next += sent;
                    (tries, waited) = (0, false);
                    continue;
                }
                Err(error) => error,
            };
            let message = batch.messages[next];
            tries += 1;
            match self.remedy(&error, &message, tries) {
                Remedy::Retry => continue,
                Remedy::Singly => self.send_singly(socket, &message, peers),
                Remedy::Skip(DropReason::TooBig) => self.refuse_message(batch, &message, peers),
                Remedy::Skip(reason) => self.drop_message(&message, reason, peers),
                Remedy::SkipAll(_) if !waited => {
                    waited = true;
                    tries = 0;
                    socket.wait_writable(FULL_WAIT);
                    continue;
                }
                Remedy::SkipAll(reason) => {
                    for message in &batch.messages[next..] {
                        self.drop_message(message, reason, peers);
                    }
                    return;
                }
            }
            next += 1;
            tries = 0;
        }
    }

    #[inline]
    fn sent(&self, messages: &[Message], peers: &Peers<'_>) {
        let counters = self.counters();
        counters.writes.add(messages.len() as u64);
        for message in messages {
            let (packets, bytes) = (u64::from(message.packets), u64::from(message.inner_bytes));
            counters.forwarded_packets.add(packets);
            counters.forwarded_bytes.add(bytes);
            if let Some(peer) = peers.peers[message.peer as usize] {
                peer.counters.add(self.row, peer_cell::TX_PACKETS, packets);
                peer.counters.add(self.row, peer_cell::TX_BYTES, bytes);
            }
        }
    }

    fn drop_message(&self, message: &Message, reason: DropReason, peers: &Peers<'_>) {
        let peer = peers.peers[message.peer as usize];
        self.drop(reason, u64::from(message.packets), peer.map(|peer| &**peer));
    }

    #[cold]
    fn remedy(&mut self, error: &io::Error, message: &Message, tries: u32) -> Remedy {
        let segmented = message.segment != 0;
        match error.raw_os_error().unwrap_or(0) {
            libc::EINTR => Remedy::Retry,
            _ if error.kind() == io::ErrorKind::WouldBlock => Remedy::SkipAll(DropReason::Eagain),
            libc::ENOBUFS | libc::ENOMEM if tries <= 2 => Remedy::Retry,
            libc::ENOBUFS | libc::ENOMEM => Remedy::Skip(DropReason::Enobufs),
            // No checksum offload on the way (before 6.11), or IPsec: segmented sends will never work.
            libc::EIO if segmented => {
                self.offloads.udp_gso.store(false, Relaxed);
                Remedy::Singly
            }
            libc::EIO => Remedy::Skip(DropReason::Eio),
            // Too many segments for this kernel, or segments that do not fit the path: EINVAL or EMSGSIZE
            // depending on the version. One by one they are fragmented.
            libc::EINVAL | libc::EMSGSIZE if segmented => {
                if message.packets as usize > OLD_MAX_SEGMENTS {
                    self.max_segments = OLD_MAX_SEGMENTS;
                } else {
                    self.size_penalty = Some((message.dst, message.segment, SIZE_PENALTY));
                }
                Remedy::Singly
            }
            libc::EINVAL => Remedy::Skip(DropReason::Einval),
            libc::EMSGSIZE => Remedy::Skip(DropReason::TooBig),
            // These may be left over from an earlier send to anyone: the first one is taken off the socket
            // by reporting it.
            libc::ECONNREFUSED
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::EPROTO
            | libc::ENOPROTOOPT
            | libc::EACCES
            | libc::EPERM
            | libc::EHOSTDOWN
            | libc::ENETDOWN
                if tries <= 1 =>
            {
                self.counters().pending_errors.add(1);
                Remedy::Retry
            }
            libc::EPERM | libc::EACCES => Remedy::Skip(DropReason::Eperm),
            libc::ECONNREFUSED
            | libc::EHOSTUNREACH
            | libc::ENETUNREACH
            | libc::EHOSTDOWN
            | libc::ENETDOWN
            | libc::ENODEV
            | libc::EADDRNOTAVAIL => Remedy::Skip(DropReason::Unreachable),
            _ => Remedy::Skip(DropReason::SendError),
        }
    }

    /// Sends the segments of a message as messages of their own.
    #[cold]
    fn send_singly<S: Socket>(&mut self, socket: &S, message: &Message, peers: &Peers<'_>) {
        self.counters().gso_fallbacks.add(1);
        let mut singles = std::mem::take(&mut self.singles);
        singles.clear();
        let run = Run {
            dst: message.dst,
            peer: message.peer,
            tos: message.tos,
            closed: true,
            segment: message.segment,
            count: message.packets as u16,
            first: message.first_segment,
            last: NONE,
        };
        let mut at = run.first;
        for _ in 0..run.count {
            at = append(&mut singles, &self.segments, &run, at, 1, self.headers_len);
        }
        self.transmit(socket, &mut singles, peers);
        self.singles = singles;
    }

    /// Answers that a message does not fit.
    #[cold]
    fn refuse_message(&mut self, batch: &SendBatch, message: &Message, peers: &Peers<'_>) {
        self.whole.clear();
        for piece in batch.pieces_of(message) {
            self.whole.extend_from_slice(piece.of(&self.buffer));
        }
        let trouble = self.too_big();
        let answered = self
            .whole
            .get(self.headers_len..)
            .and_then(|bytes| Inner::parse(bytes).ok())
            .is_some_and(|inner| self.answering.tell(&inner, trouble));
        let peer = peers.peers[message.peer as usize];
        self.refused(trouble, answered, u64::from(message.packets), peer.map(|peer| &**peer));
    }
}

/// Segments that kernels before 6.9 take in one send, less one: some counted the headers as well.
pub(crate) const OLD_MAX_SEGMENTS: usize = 63;

/// Appends a message of `count` segments from `first` on; returns the one behind them.
fn append(
    batch: &mut SendBatch,
    segments: &[Segment],
    run: &Run,
    first: u16,
    count: usize,
    headers_len: usize,
) -> u16 {
    let first_piece = batch.pieces.len();
    let mut bytes = 0;
    let mut at = first;
    for _ in 0..count {
        let segment = &segments[at as usize];
        batch.pieces.push(segment.headers);
        if segment.payload.len > 0 {
            batch.pieces.push(segment.payload);
        }
        bytes += segment.headers.len + segment.payload.len;
        at = segment.next;
    }
    batch.messages.push(Message {
        dst: run.dst,
        first_piece: first_piece as u32,
        piece_count: (batch.pieces.len() - first_piece) as u32,
        // One segment goes plain: old kernels and drivers take a lone one ill.
        segment: if count > 1 { run.segment } else { 0 },
        tos: run.tos,
        packets: count as u32,
        inner_bytes: bytes - (count * headers_len) as u32,
        peer: run.peer,
        first_segment: first,
    });
    at
}

/// Sets TTL or hop limit of a packet that has been parsed.
#[inline]
pub(crate) fn set_ttl(packet: &mut [u8], ttl: u8) {
    if packet[0] >> 4 == 4 {
        if let Ok(mut v4) = Ipv4Packet::new_checked(packet) {
            v4.set_ttl(ttl);
        }
    } else if let Ok(mut v6) = Ipv6Packet::new_checked(packet) {
        v6.set_hop_limit(ttl);
    }
}
