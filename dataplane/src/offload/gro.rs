//! Merging: packets of one flow that follow each other become one super-packet for the TUN.
//!
//! Packets are added in the order of their arrival, over a whole receive batch, and leave in the order in
//! which the first of each chain came:
//!
//! ```text
//!  received  A1 B1 A2 C1 A3 A4(short)  A5 ..          one letter per flow
//!  chains    [A1 A2 A3 A4] [B1] [C1] [A5 ..]          A is closed by its short packet
//! ```
//!
//! INVARIANT: no packet overtakes another of its flow. Whatever cannot join the open chain of its flow closes
//! it; fragments and packets with options, whose flow is not looked up, close all chains.
//!
//! What may join is what cutting the result would give back, as in the kernel's own merging
//! (`net/ipv4/tcp_offload.c`, `net/ipv4/udp_offload.c`): same addresses, ports, ToS, TTL, "don't
//! fragment", options, acknowledgment, window; the next sequence number; an identification that counts up
//! unless fragments are ruled out. A shorter packet, or one with PSH, ends the chain. Packets with other flags
//! than ACK, PSH and ECE, without payload, or without UDP checksum stay alone.
//!
//! Checksums are verified before two packets become one, since the super-packet's checksum is computed
//! anew. Packets that stay alone are left to the receiver's own check.

use super::vnet_hdr::{self, NEEDS_CSUM, VnetHdr, gso};
use crate::buf::Piece;
use crate::encap::Inner;
use crate::wire::checksum;
use crate::wire::{be16, be32, ipv4, ipv6, protocol, tcp, udp};

/// Chains of one batch.
const MAX_CHAINS: usize = 512;
/// Packets of one batch that joined a chain.
const MAX_LINKS: usize = 1024;
/// Packets in one chain: what kernels before 6.9 take in a UDP super-packet.
const MAX_COUNT: u16 = 64;
/// Slots of the flow table, a power of two.
const SLOTS: usize = 256;
/// Slots that a flow may be away from its own.
const PROBES: usize = 8;
/// Largest packet.
const MAX_LEN: u32 = 65_535;
/// Longest head of a write: virtio-net header and the headers of a merged packet.
pub(crate) const HEAD_LEN: usize = vnet_hdr::LEN + ipv6::HEADER_LEN + 60;

const NONE: u16 = u16::MAX;

/// How much of a packet's inside is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// IP header without options, then all of layer 4.
    Plain,
    /// Options or extension headers, then all of layer 4.
    Optioned,
    /// A fragment, or a chain of headers that cannot be followed.
    Opaque,
}

/// Where layer 4 is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: Shape,
    pub(crate) l4: usize,
    pub(crate) protocol: u8,
}

impl Layout {
    #[inline]
    pub(crate) fn of(packet: &Inner<'_>) -> Layout {
        match packet {
            Inner::V4(v4) => {
                let l4 = v4.header_len();
                let shape = match (v4.is_fragment(), l4) {
                    (true, _) => Shape::Opaque,
                    (false, ipv4::MIN_HEADER_LEN) => Shape::Plain,
                    (false, _) => Shape::Optioned,
                };
                Layout { shape, l4, protocol: v4.protocol() }
            }
            Inner::V6(v6) => match v6.upper_layer() {
                Ok(upper) => {
                    let shape = match (upper.is_fragment(), upper.offset) {
                        (true, _) => Shape::Opaque,
                        (false, ipv6::HEADER_LEN) => Shape::Plain,
                        (false, _) => Shape::Optioned,
                    };
                    Layout { shape, l4: upper.offset, protocol: upper.protocol }
                }
                Err(_) => Layout { shape: Shape::Opaque, l4: v6.total_len(), protocol: protocol::NO_NEXT },
            },
        }
    }
}

/// A packet in the receive buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet {
    /// Its first byte in the buffer.
    pub(crate) at: u32,
    /// Its bytes by its own length field.
    pub(crate) len: u32,
    pub(crate) is_v6: bool,
    pub(crate) layout: Layout,
    /// The checksum field holds the pseudo-header sum only.
    pub(crate) partial: bool,
    /// A super-packet already: payload bytes per segment; 0 for one packet.
    pub(crate) gso_size: u16,
}

/// One write to the TUN.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chain {
    head: Packet,
    /// Headers of the first packet, layer 4 included; meaningful for packets that may merge.
    headers_len: u16,
    /// Payload of the first packet.
    gso_size: u16,
    count: u16,
    /// Payload of all packets.
    payload: u32,
    next_seq: u32,
    last_ident: u16,
    verified: bool,
    /// The first packet was found to be damaged when the second came.
    damaged: bool,
    psh: bool,
    first_link: u16,
    last_link: u16,
}

impl Chain {
    /// Packets in it.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.count)
    }

    /// The only packet, not to be written for its wrong checksum.
    pub(crate) fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// Its packets are of TCP, else of UDP. Meaningful for more than one packet.
    pub(crate) fn is_tcp(&self) -> bool {
        self.head.layout.protocol == protocol::TCP
    }

    /// Bytes of all its packets.
    pub(crate) fn bytes(&self) -> u64 {
        let headers = u64::from(self.head.len) + u64::from(self.headers_len) * (self.count() - 1);
        headers + u64::from(self.payload - u32::from(self.gso_size))
    }
}

/// A packet that joined: where it is, and the next one of its chain.
#[derive(Debug, Clone, Copy)]
struct Link {
    at: u32,
    len: u32,
    next: u16,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// The slot counts in this generation only.
    generation: u32,
    chain: u16,
}

/// What became of an added packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Added {
    /// It is in a chain.
    Taken,
    /// Its checksum is wrong; it is in none.
    Damaged,
}

enum Found {
    /// The flow's slot, with or without an open chain.
    At(usize),
    /// A slot that the flow may take.
    Free(usize),
    /// None within reach.
    Full,
}

/// The chains of one batch.
#[derive(Debug)]
pub(crate) struct Coalescer {
    chains: Vec<Chain>,
    links: Vec<Link>,
    table: Box<[Slot; SLOTS]>,
    generation: u32,
    /// Merging is allowed for TCP and UDP.
    pub(crate) tcp: bool,
    pub(crate) udp: bool,
}

impl Coalescer {
    pub(crate) fn new(tcp: bool, udp: bool) -> Coalescer {
        Coalescer {
            chains: Vec::with_capacity(MAX_CHAINS),
            links: Vec::with_capacity(MAX_LINKS),
            table: Box::new([Slot { generation: 0, chain: NONE }; SLOTS]),
            generation: 1,
            tcp,
            udp,
        }
    }

    /// No room for one more packet.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.chains.len() == MAX_CHAINS || self.links.len() == MAX_LINKS
    }

    /// The chains in the order in which they are to be written.
    #[inline]
    pub(crate) fn chains(&self) -> &[Chain] {
        &self.chains
    }

    /// Empties it for the next batch.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.chains.clear();
        self.links.clear();
        self.close_all();
    }

    fn close_all(&mut self) {
        self.generation = self.generation.wrapping_add(1);
        if self.generation == 0 {
            self.table.fill(Slot { generation: 0, chain: NONE });
            self.generation = 1;
        }
    }

    /// Adds a packet behind all others. The caller has made sure that there is room.
    #[inline]
    pub(crate) fn add(&mut self, buffer: &[u8], packet: Packet) -> Added {
        let bytes = &buffer[packet.at as usize..][..packet.len as usize];
        let enabled = match packet.layout.protocol {
            protocol::TCP => self.tcp,
            protocol::UDP => self.udp,
            _ => packet.layout.shape == Shape::Opaque && (self.tcp || self.udp),
        };
        if !enabled {
            self.push(packet, None);
            return Added::Taken;
        }
        if packet.layout.shape != Shape::Plain || bytes.len() < packet.layout.l4 + udp::HEADER_LEN {
            self.close_all();
            self.push(packet, None);
            return Added::Taken;
        }
        let candidate = Candidate::new(bytes, &packet);
        let slot = match self.find(buffer, bytes, &packet) {
            Found::Full => {
                self.push(packet, None);
                return Added::Taken;
            }
            Found::At(slot) => {
                let open = self.table[slot].chain;
                if let Some(candidate) = &candidate
                    && open != NONE
                    && self.accepts(open, buffer, bytes, &packet, candidate)
                {
                    if !verify(bytes, &packet) {
                        return Added::Damaged;
                    }
                    if self.head_is_sound(open, buffer) {
                        self.join(open, slot, &packet, candidate, bytes);
                        return Added::Taken;
                    }
                }
                slot
            }
            Found::Free(slot) => slot,
        };
        let chain = self.push(packet, candidate.as_ref());
        let stays_open = candidate.is_some_and(|c| !c.psh);
        self.table[slot] = Slot { generation: self.generation, chain: if stays_open { chain } else { NONE } };
        Added::Taken
    }

    fn push(&mut self, packet: Packet, candidate: Option<&Candidate>) -> u16 {
        let at = self.chains.len() as u16;
        let (headers_len, payload) = candidate.map_or((0, 0), |c| (c.headers_len, c.payload));
        self.chains.push(Chain {
            head: packet,
            headers_len,
            gso_size: payload,
            count: 1,
            payload: u32::from(payload),
            next_seq: candidate.map_or(0, |c| c.seq.wrapping_add(u32::from(payload))),
            last_ident: candidate.map_or(0, |c| c.ident),
            verified: false,
            damaged: false,
            psh: false,
            first_link: NONE,
            last_link: NONE,
        });
        at
    }

    #[inline]
    fn find(&self, buffer: &[u8], bytes: &[u8], packet: &Packet) -> Found {
        let start = flow_hash(bytes, packet);
        let mut closed = None;
        for probe in 0..PROBES {
            let at = (start + probe) % SLOTS;
            let slot = self.table[at];
            if slot.generation != self.generation {
                return closed.map_or(Found::Free(at), Found::At);
            }
            // Whose the closed chain was is not known any more: any flow may have its slot, but one that
            // has an open chain further on must find that first.
            if slot.chain == NONE {
                closed = closed.or(Some(at));
                continue;
            }
            let head = &self.chains[slot.chain as usize].head;
            if head.is_v6 == packet.is_v6
                && head.layout.protocol == packet.layout.protocol
                && same_flow(&buffer[head.at as usize..], bytes, packet)
            {
                return Found::At(at);
            }
        }
        closed.map_or(Found::Full, Found::At)
    }

    #[inline]
    fn accepts(
        &self,
        open: u16,
        buffer: &[u8],
        bytes: &[u8],
        packet: &Packet,
        candidate: &Candidate,
    ) -> bool {
        let chain = &self.chains[open as usize];
        let head = &buffer[chain.head.at as usize..][..chain.headers_len as usize];
        let l4 = packet.layout.l4;
        let total = u32::from(chain.headers_len) + chain.payload + u32::from(candidate.payload);
        if candidate.headers_len != chain.headers_len
            || candidate.payload > chain.gso_size
            || chain.count == MAX_COUNT
            || total > MAX_LEN
        {
            return false;
        }
        let same_ip = if packet.is_v6 {
            head[..4] == bytes[..4] && head[7] == bytes[7]
        } else {
            let dont_fragment = bytes[6] & 0x40 != 0;
            head[1] == bytes[1]
                && head[6..9] == bytes[6..9]
                && (dont_fragment || candidate.ident == chain.last_ident.wrapping_add(1))
        };
        let same_l4 = if packet.layout.protocol == protocol::TCP {
            candidate.seq == chain.next_seq
                && head[l4 + 8..l4 + 13] == bytes[l4 + 8..l4 + 13]
                && (head[l4 + 13] ^ bytes[l4 + 13]) & !tcp::flags::PSH == 0
                && head[l4 + 14..l4 + 16] == bytes[l4 + 14..l4 + 16]
                && head[l4 + 18..] == bytes[l4 + 18..usize::from(candidate.headers_len)]
        } else {
            true
        };
        same_ip && same_l4
    }

    /// Verifies the first packet of a chain when it gets company. A damaged one ends its chain.
    #[inline]
    fn head_is_sound(&mut self, open: u16, buffer: &[u8]) -> bool {
        let chain = &mut self.chains[open as usize];
        if !chain.verified {
            let head = &buffer[chain.head.at as usize..][..chain.head.len as usize];
            chain.damaged = !verify(head, &chain.head);
            chain.verified = true;
        }
        !chain.damaged
    }

    #[inline]
    fn join(&mut self, open: u16, slot: usize, packet: &Packet, candidate: &Candidate, bytes: &[u8]) {
        let link = self.links.len() as u16;
        let headers = u32::from(candidate.headers_len);
        // INVARIANT: `bytes` may be longer than headers and payload only if the UDP length said so, which
        // `Candidate::new` has ruled out.
        debug_assert_eq!(bytes.len() as u32, headers + u32::from(candidate.payload));
        self.links.push(Link { at: packet.at, len: packet.len, next: NONE });
        let chain = &mut self.chains[open as usize];
        match chain.last_link {
            NONE => chain.first_link = link,
            last => self.links[last as usize].next = link,
        }
        chain.last_link = link;
        chain.count += 1;
        chain.payload += u32::from(candidate.payload);
        chain.next_seq = chain.next_seq.wrapping_add(u32::from(candidate.payload));
        chain.last_ident = candidate.ident;
        chain.psh |= candidate.psh;
        if candidate.payload < chain.gso_size || candidate.psh || chain.count == MAX_COUNT {
            self.table[slot].chain = NONE;
        }
    }

    /// Makes the write of a chain: `head` gets the virtio-net header and, of merged packets, the mended
    /// headers; `pieces` what follows them in the buffer. Returns the length of the head.
    pub(crate) fn emit(
        &self,
        chain: &Chain,
        buffer: &[u8],
        head: &mut [u8; HEAD_LEN],
        pieces: &mut Vec<Piece>,
    ) -> usize {
        pieces.clear();
        let packet = &chain.head;
        if chain.count == 1 {
            head[..vnet_hdr::LEN].copy_from_slice(&alone(packet, buffer).emit());
            pieces.push(Piece { at: packet.at, len: packet.len });
            return vnet_hdr::LEN;
        }
        let (l4, headers_len) = (packet.layout.l4, usize::from(chain.headers_len));
        let is_tcp = packet.layout.protocol == protocol::TCP;
        let header = VnetHdr {
            flags: NEEDS_CSUM,
            gso_type: match (is_tcp, packet.is_v6) {
                (true, false) => gso::TCPV4,
                (true, true) => gso::TCPV6,
                (false, _) => gso::UDP_L4,
            },
            hdr_len: chain.headers_len,
            gso_size: chain.gso_size,
            csum_start: l4 as u16,
            csum_offset: csum_offset(packet.layout.protocol),
        };
        head[..vnet_hdr::LEN].copy_from_slice(&header.emit());
        let mended = &mut head[vnet_hdr::LEN..][..headers_len];
        mended.copy_from_slice(&buffer[packet.at as usize..][..headers_len]);
        let total = headers_len + chain.payload as usize;
        let l4_len = total - l4;
        let pseudo = if packet.is_v6 {
            mended[4..6].copy_from_slice(&((total - ipv6::HEADER_LEN) as u16).to_be_bytes());
            sum_of_addresses(&mended[8..40], packet.layout.protocol, l4_len)
        } else {
            mended[2..4].copy_from_slice(&(total as u16).to_be_bytes());
            mended[10..12].fill(0);
            let sum = checksum::finish(checksum::sum(&mended[..l4]));
            mended[10..12].copy_from_slice(&sum.to_be_bytes());
            sum_of_addresses(&mended[12..20], packet.layout.protocol, l4_len)
        };
        let field = pseudo.to_be_bytes();
        if is_tcp {
            if chain.psh {
                mended[l4 + 13] |= tcp::flags::PSH;
            }
            mended[l4 + 16..l4 + 18].copy_from_slice(&field);
        } else {
            mended[l4 + 4..l4 + 6].copy_from_slice(&(l4_len as u16).to_be_bytes());
            mended[l4 + 6..l4 + 8].copy_from_slice(&field);
        }
        let headers = u32::from(chain.headers_len);
        pieces.push(Piece { at: packet.at + headers, len: packet.len - headers });
        self.links_of(chain)
            .for_each(|link| pieces.push(Piece { at: link.at + headers, len: link.len - headers }));
        vnet_hdr::LEN + headers_len
    }

    /// The packets of a chain one by one, for a TUN that does not take them merged: what to write as
    /// virtio-net header, and the packet.
    pub(crate) fn singles<'a>(
        &'a self,
        chain: &'a Chain,
        buffer: &'a [u8],
    ) -> impl Iterator<Item = ([u8; vnet_hdr::LEN], Piece)> + 'a {
        let head = std::iter::once((chain.head.at, chain.head.len));
        head.chain(self.links_of(chain).map(|link| (link.at, link.len))).map(move |(at, len)| {
            // Whether a later packet's checksum was unfinished was not kept, but can be seen.
            let packet = Packet { at, len, gso_size: 0, ..chain.head };
            let bytes = &buffer[at as usize..][..len as usize];
            let packet = Packet { partial: is_partial(bytes, packet.is_v6, &packet.layout), ..packet };
            (alone(&packet, buffer).emit(), Piece { at, len })
        })
    }

    fn links_of<'a>(&'a self, chain: &Chain) -> impl Iterator<Item = &'a Link> + 'a {
        let mut at = chain.first_link;
        std::iter::from_fn(move || {
            let link = self.links.get(at as usize)?;
            at = link.next;
            Some(link)
        })
    }
}

/// What joining needs to know of a packet that may merge.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    headers_len: u16,
    payload: u16,
    seq: u32,
    ident: u16,
    psh: bool,
}

impl Candidate {
    /// `None` for packets that stay alone.
    #[inline]
    fn new(bytes: &[u8], packet: &Packet) -> Option<Candidate> {
        if packet.gso_size != 0 {
            return None;
        }
        let l4 = packet.layout.l4;
        let body = &bytes[l4..];
        let (l4_len, seq, psh) = if packet.layout.protocol == protocol::TCP {
            if body.len() < tcp::MIN_HEADER_LEN {
                return None;
            }
            let flags = body[13];
            let allowed = tcp::flags::ACK | tcp::flags::PSH | tcp::flags::ECE;
            if flags & !allowed != 0 || flags & tcp::flags::ACK == 0 {
                return None;
            }
            let len = usize::from(body[12] >> 4) * 4;
            if len < tcp::MIN_HEADER_LEN {
                return None;
            }
            (len, be32(body, 4), flags & tcp::flags::PSH != 0)
        } else {
            if usize::from(be16(body, 4)) != body.len() || be16(body, 6) == 0 {
                return None;
            }
            // COMPAT: kernels before 6.8.5 lose merged datagrams that end in a tunnel's socket.
            if matches!(be16(body, 2), 4789 | 8472 | 6081) {
                return None;
            }
            (udp::HEADER_LEN, 0, false)
        };
        let payload = body.len().checked_sub(l4_len).filter(|len| *len > 0)?;
        let ident = if packet.is_v6 { 0 } else { be16(bytes, 4) };
        Some(Candidate {
            headers_len: (l4 + l4_len) as u16,
            payload: u16::try_from(payload).ok()?,
            seq,
            ident,
            psh,
        })
    }
}

fn csum_offset(proto: u8) -> u16 {
    if proto == protocol::TCP { tcp::CHECKSUM_OFFSET as u16 } else { udp::CHECKSUM_OFFSET as u16 }
}

/// The virtio-net header of a packet that is written as it came.
fn alone(packet: &Packet, buffer: &[u8]) -> VnetHdr {
    if !packet.partial {
        return VnetHdr::default();
    }
    let l4 = packet.layout.l4;
    let mut header = VnetHdr {
        flags: NEEDS_CSUM,
        csum_start: l4 as u16,
        csum_offset: csum_offset(packet.layout.protocol),
        ..VnetHdr::default()
    };
    if packet.gso_size != 0 {
        let body = &buffer[packet.at as usize + l4..];
        let (gso_type, l4_len) = match (packet.layout.protocol, packet.is_v6) {
            (protocol::UDP, _) => (gso::UDP_L4, udp::HEADER_LEN),
            (_, is_v6) => {
                let ecn = if body[13] & tcp::flags::CWR != 0 { gso::ECN } else { 0 };
                (ecn | if is_v6 { gso::TCPV6 } else { gso::TCPV4 }, usize::from(body[12] >> 4).max(5) * 4)
            }
        };
        header.gso_type = gso_type;
        header.gso_size = packet.gso_size;
        header.hdr_len = (l4 + l4_len) as u16;
    }
    header
}

/// Folded sum of a pseudo header whose two addresses are these bytes.
#[inline]
fn sum_of_addresses(addresses: &[u8], proto: u8, l4_len: usize) -> u16 {
    let words: u64 = addresses.chunks_exact(2).map(|w| u64::from(u16::from_be_bytes([w[0], w[1]]))).sum();
    checksum::fold(words + u64::from(proto) + l4_len as u64)
}

#[inline]
fn addresses(bytes: &[u8], is_v6: bool) -> &[u8] {
    if is_v6 { &bytes[8..40] } else { &bytes[12..20] }
}

/// Whether the checksum field of a packet of TCP or UDP holds the pseudo-header sum: the sender's kernel left
/// the rest to its network card, and there was none on the way (a virtual link).
#[inline]
pub(crate) fn is_partial(bytes: &[u8], is_v6: bool, layout: &Layout) -> bool {
    if layout.shape == Shape::Opaque {
        return false;
    }
    let (at, min) = match layout.protocol {
        protocol::TCP => (tcp::CHECKSUM_OFFSET, tcp::MIN_HEADER_LEN),
        protocol::UDP => (udp::CHECKSUM_OFFSET, udp::HEADER_LEN),
        _ => return false,
    };
    let body = &bytes[layout.l4..];
    body.len() >= min
        && be16(body, at) == sum_of_addresses(addresses(bytes, is_v6), layout.protocol, body.len())
}

/// Whether the checksums of a packet that may merge are right.
#[inline]
fn verify(bytes: &[u8], packet: &Packet) -> bool {
    let l4 = packet.layout.l4;
    if !packet.is_v6 && checksum::fold(checksum::sum(&bytes[..l4])) != 0xffff {
        return false;
    }
    if packet.partial {
        return true;
    }
    let body = &bytes[l4..];
    let pseudo = sum_of_addresses(addresses(bytes, packet.is_v6), packet.layout.protocol, body.len());
    checksum::fold(u64::from(pseudo) + checksum::sum(body)) == 0xffff
}

#[inline]
fn same_flow(a: &[u8], b: &[u8], packet: &Packet) -> bool {
    let l4 = packet.layout.l4;
    addresses(a, packet.is_v6) == addresses(b, packet.is_v6) && a[l4..l4 + 4] == b[l4..l4 + 4]
}

#[inline]
fn flow_hash(bytes: &[u8], packet: &Packet) -> usize {
    let mut mix = u64::from(be32(bytes, packet.layout.l4)) | u64::from(packet.layout.protocol) << 32;
    for word in addresses(bytes, packet.is_v6).chunks_exact(8) {
        mix = (mix ^ u64::from_ne_bytes(word.try_into().expect("chunks of 8")))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29);
    }
    (mix.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as usize
}
