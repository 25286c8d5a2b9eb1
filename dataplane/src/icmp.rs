//! ICMP and ICMPv6 answers to packets that cannot be forwarded.
//!
//! [`Answerer::answer`] is pure: packet in, whole IP packet out, from the tunnel's own address to the
//! packet's source. How it is sent (a raw socket: written to the TUN it would be dropped as martian) and
//! the clock are the caller's.
//!
//! No answer is made (RFC 1122 3.2.2, RFC 4443 2.4 e) about ICMP errors and redirects, fragments other than
//! the first, packets to group, broadcast and unspecified addresses, packets from addresses that are no
//! single host, and when the rate limit is used up.
//!
//! Echo requests are answered like any other packet. COMPAT: flannel's udp proxy stays silent about all
//! ICMP, so a `ping` to a pod that has no node times out there; an error is what a router owes it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use crate::encap::Inner;
use crate::wire::{Ipv4Packet, Ipv4Repr, Ipv6Packet, Ipv6Repr, icmpv4, icmpv6, ipv4, ipv6, protocol};

/// Why the packet cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// No peer has the destination.
    NoRoute,
    /// TTL or hop limit used up.
    TimeExceeded,
    /// Larger than the tunnel's MTU (of the inner packet) and not to be fragmented.
    TooBig {
        /// What would fit, in bytes.
        mtu: u16,
    },
}

/// Longest answer to IPv4: RFC 1812 4.3.2.3 lets a router quote as much as fits into 576 bytes. We quote
/// the header and 8 bytes, which is what senders rely on and flannel's proxy sends.
const QUOTE_V4: usize = 8;
/// Longest answer to IPv6: the minimum MTU, RFC 4443 2.4 c.
const MAX_V6: usize = 1280;
/// TTL and hop limit of answers.
const TTL: u8 = 64;

/// Bytes that an answer can have at most.
pub const MAX_ANSWER_LEN: usize = MAX_V6;

/// Why there is no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// The rules forbid one, or the tunnel has no address of the family.
    Forbidden,
    /// The rate limit is used up.
    Limited,
}

/// Makes answers; one per worker.
#[derive(Debug)]
pub struct Answerer {
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
    limit: TokenBucket,
}

impl Answerer {
    /// Answers come from these addresses, at most as `limit` allows.
    pub fn new(v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>, limit: TokenBucket) -> Answerer {
        Answerer { v4, v6, limit }
    }

    /// Writes the answer about `packet` into `out` and returns its length.
    ///
    /// # Errors
    /// Why there is none.
    pub fn answer(
        &mut self,
        packet: &Inner<'_>,
        trouble: Trouble,
        now: Instant,
        out: &mut [u8; MAX_ANSWER_LEN],
    ) -> Result<usize, Silence> {
        let allowed = match packet {
            Inner::V4(v4) => self.v4.filter(|_| deserves_answer_v4(v4)).map(IpAddr::V4),
            Inner::V6(v6) => self.v6.filter(|_| deserves_answer_v6(v6, trouble)).map(IpAddr::V6),
        };
        let source = allowed.ok_or(Silence::Forbidden)?;
        if !self.limit.take(now) {
            return Err(Silence::Limited);
        }
        match (packet, source) {
            (Inner::V4(v4), IpAddr::V4(source)) => Ok(write_v4(v4, source, trouble, out)),
            (Inner::V6(v6), IpAddr::V6(source)) => Ok(write_v6(v6, source, trouble, out)),
            _ => Err(Silence::Forbidden),
        }
    }
}

/// A single host's address that an answer may go to.
fn is_host_v4(addr: Ipv4Addr) -> bool {
    // 0.0.0.0/8 is "this network", 240.0.0.0/4 is reserved and holds the limited broadcast.
    let first = addr.octets()[0];
    !(first == 0 || addr.is_loopback() || addr.is_multicast() || first >= 240)
}

fn deserves_answer_v4(packet: &Ipv4Packet<&[u8]>) -> bool {
    if packet.fragment_offset() != 0 || !is_host_v4(packet.src()) || !is_host_v4(packet.dst()) {
        return false;
    }
    match packet.protocol() {
        // A message without its type byte may be an error.
        protocol::ICMP => packet.payload().first().is_some_and(|icmp_type| !icmpv4::is_error(*icmp_type)),
        _ => true,
    }
}

fn deserves_answer_v6(packet: &Ipv6Packet<&[u8]>, trouble: Trouble) -> bool {
    let (src, dst) = (packet.src(), packet.dst());
    if src.is_unspecified() || src.is_loopback() || src.is_multicast() {
        return false;
    }
    // RFC 4443 2.4 e.3 lets "packet too big" through about group destinations, for their path MTU. The
    // overlay forwards none of them, so there is no such path.
    if dst.is_unspecified() || dst.is_loopback() || dst.is_multicast() {
        return false;
    }
    // Link-local addresses do not leave their link: an answer would claim a router on the tunnel that
    // forwards them.
    if dst.is_unicast_link_local() && trouble == Trouble::NoRoute {
        return false;
    }
    let Ok(upper) = packet.upper_layer() else { return false };
    if upper.is_later_fragment() {
        return false;
    }
    match upper.protocol {
        protocol::ICMPV6 => packet.into_inner()[upper.offset..packet.total_len()]
            .first()
            .is_some_and(|icmp_type| !icmpv6::is_error(*icmp_type)),
        _ => true,
    }
}

fn write_v4(
    packet: &Ipv4Packet<&[u8]>,
    source: Ipv4Addr,
    trouble: Trouble,
    out: &mut [u8; MAX_ANSWER_LEN],
) -> usize {
    let (icmp_type, code, rest) = match trouble {
        Trouble::NoRoute => (icmpv4::UNREACHABLE, icmpv4::CODE_NET_UNREACHABLE, 0),
        Trouble::TimeExceeded => (icmpv4::TIME_EXCEEDED, icmpv4::CODE_TTL_EXCEEDED, 0),
        Trouble::TooBig { mtu } => (icmpv4::UNREACHABLE, icmpv4::CODE_FRAG_NEEDED, u32::from(mtu)),
    };
    let quote = &packet.into_inner()[..packet.total_len().min(packet.header_len() + QUOTE_V4)];
    let message_len = icmpv4::HEADER_LEN + quote.len();
    let (header, message) = out.split_at_mut(ipv4::MIN_HEADER_LEN);
    let message = &mut message[..message_len];
    message[icmpv4::HEADER_LEN..].copy_from_slice(quote);
    let header: &mut [u8; ipv4::MIN_HEADER_LEN] = header.try_into().expect("split at its length");
    icmpv4::emit(message, icmp_type, code, rest).expect("longer than its header");
    let repr = Ipv4Repr {
        src: source,
        dst: packet.src(),
        protocol: protocol::ICMP,
        ttl: TTL,
        // RFC 1812 4.3.2.5: precedence "internetwork control".
        tos: 0xc0,
        ident: 0,
        dont_fragment: false,
        payload_len: message_len as u16,
    };
    repr.emit(header);
    ipv4::MIN_HEADER_LEN + message_len
}

fn write_v6(
    packet: &Ipv6Packet<&[u8]>,
    source: Ipv6Addr,
    trouble: Trouble,
    out: &mut [u8; MAX_ANSWER_LEN],
) -> usize {
    let (icmp_type, code, rest) = match trouble {
        Trouble::NoRoute => (icmpv6::UNREACHABLE, icmpv6::CODE_NO_ROUTE, 0),
        Trouble::TimeExceeded => (icmpv6::TIME_EXCEEDED, icmpv6::CODE_HOP_LIMIT_EXCEEDED, 0),
        Trouble::TooBig { mtu } => (icmpv6::PACKET_TOO_BIG, 0, u32::from(mtu)),
    };
    let room = MAX_V6 - ipv6::HEADER_LEN - icmpv6::HEADER_LEN;
    let quote = &packet.into_inner()[..packet.total_len().min(room)];
    let message_len = icmpv6::HEADER_LEN + quote.len();
    let (header, message) = out.split_at_mut(ipv6::HEADER_LEN);
    let message = &mut message[..message_len];
    message[icmpv6::HEADER_LEN..].copy_from_slice(quote);
    let header: &mut [u8; ipv6::HEADER_LEN] = header.try_into().expect("split at its length");
    let repr = Ipv6Repr {
        src: source,
        dst: packet.src(),
        next_header: protocol::ICMPV6,
        hop_limit: TTL,
        traffic_class: 0,
        flow_label: 0,
        payload_len: message_len as u16,
    };
    repr.emit(header);
    let pseudo = crate::wire::checksum::pseudo_header_v6(source, packet.src(), protocol::ICMPV6, message_len);
    icmpv6::emit(message, icmp_type, code, rest, pseudo).expect("longer than its header");
    ipv6::HEADER_LEN + message_len
}

/// A rate limit: `burst` at once, refilled one per `interval`.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    interval: Duration,
    burst: u32,
    tokens: u32,
    /// When the last refill was due.
    filled: Option<Instant>,
}

impl TokenBucket {
    /// A full bucket. An interval of zero means no limit.
    pub fn new(burst: u32, interval: Duration) -> TokenBucket {
        TokenBucket { interval, burst, tokens: burst, filled: None }
    }

    /// Takes one token, if there is one. Time that goes backwards refills nothing.
    pub fn take(&mut self, now: Instant) -> bool {
        if self.interval.is_zero() {
            return true;
        }
        let filled = *self.filled.get_or_insert(now);
        let due = now.saturating_duration_since(filled).as_nanos() / self.interval.as_nanos();
        if due > 0 {
            let missing = self.burst - self.tokens;
            if due >= u128::from(missing) {
                self.tokens = self.burst;
                self.filled = Some(now);
            } else {
                // Below `missing`, so it fits.
                self.tokens += due as u32;
                self.filled = Some(filled + self.interval * due as u32);
            }
        }
        if self.tokens == 0 {
            return false;
        }
        self.tokens -= 1;
        true
    }
}
