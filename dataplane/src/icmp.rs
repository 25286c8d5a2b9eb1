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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{Icmpv4Packet, Icmpv6Packet};

    const OWN_V4: Ipv4Addr = Ipv4Addr::new(10, 50, 1, 0);
    const POD_V4: Ipv4Addr = Ipv4Addr::new(10, 50, 1, 5);
    const OWN_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x50, 0, 1, 0, 0, 0, 0);
    const POD_V6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x50, 0, 1, 0, 0, 0, 5);

    fn unlimited() -> Answerer {
        Answerer::new(Some(OWN_V4), Some(OWN_V6), TokenBucket::new(1, Duration::ZERO))
    }

    fn v4(src: Ipv4Addr, dst: Ipv4Addr, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let repr = Ipv4Repr {
            src,
            dst,
            protocol,
            ttl: 64,
            tos: 0,
            ident: 7,
            dont_fragment: true,
            payload_len: payload.len() as u16,
        };
        let mut header = [0; 20];
        repr.emit(&mut header);
        [&header[..], payload].concat()
    }

    fn v6(src: Ipv6Addr, dst: Ipv6Addr, next_header: u8, payload: &[u8]) -> Vec<u8> {
        let repr = Ipv6Repr {
            src,
            dst,
            next_header,
            hop_limit: 64,
            traffic_class: 0,
            flow_label: 0,
            payload_len: payload.len() as u16,
        };
        let mut header = [0; 40];
        repr.emit(&mut header);
        [&header[..], payload].concat()
    }

    fn answer(packet: &[u8], trouble: Trouble) -> Result<Vec<u8>, Silence> {
        let mut out = [0; MAX_ANSWER_LEN];
        let inner = Inner::parse(packet).unwrap();
        unlimited().answer(&inner, trouble, Instant::now(), &mut out).map(|len| out[..len].to_vec())
    }

    fn pod_to(dst: [u8; 4], protocol: u8, payload: &[u8]) -> Vec<u8> {
        v4(POD_V4, dst.into(), protocol, payload)
    }

    #[test]
    fn unroutable_datagram_gets_net_unreachable_with_header_and_eight_bytes() {
        let packet = pod_to([10, 50, 77, 1], protocol::UDP, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        let bytes = answer(&packet, Trouble::NoRoute).unwrap();
        let ip = Ipv4Packet::new_checked(&bytes[..]).unwrap();
        assert_eq!((ip.src(), ip.dst(), ip.protocol(), ip.tos()), (OWN_V4, POD_V4, protocol::ICMP, 0xc0));
        assert!(ip.verify_checksum());
        let message = Icmpv4Packet::new_checked(ip.payload()).unwrap();
        assert!(message.verify_checksum());
        assert_eq!((message.icmp_type(), message.code(), message.rest()), (3, 0, 0));
        assert_eq!(message.body(), &packet[..28]);
    }

    #[test]
    fn options_of_sixty_bytes_are_quoted_whole() {
        let mut packet = pod_to([10, 50, 77, 1], protocol::UDP, &[0; 60]);
        packet[0] = 0x4f;
        let bytes = answer(&packet, Trouble::NoRoute).unwrap();
        assert_eq!(bytes[28..], packet[..68]);
    }

    #[test]
    fn short_packet_is_quoted_as_far_as_it_goes() {
        let packet = pod_to([10, 50, 77, 1], protocol::TCP, &[0, 80]);
        assert_eq!(answer(&packet, Trouble::NoRoute).unwrap()[28..], packet);
    }

    #[test]
    fn troubles_have_their_types_codes_and_mtu() {
        let four = pod_to([10, 50, 77, 1], protocol::UDP, &[0; 8]);
        let six = v6(POD_V6, "fd00:50:0:77::1".parse().unwrap(), protocol::UDP, &[0; 8]);
        for (trouble, v4_expected, v6_expected) in [
            (Trouble::NoRoute, (3, 0, 0), (1, 0, 0)),
            (Trouble::TimeExceeded, (11, 0, 0), (3, 0, 0)),
            (Trouble::TooBig { mtu: 1450 }, (3, 4, 1450), (2, 0, 1450)),
        ] {
            let bytes = answer(&four, trouble).unwrap();
            let message = Icmpv4Packet::new_checked(&bytes[20..]).unwrap();
            assert_eq!((message.icmp_type(), message.code(), message.rest()), v4_expected);
            let bytes = answer(&six, trouble).unwrap();
            let message = Icmpv6Packet::new_checked(&bytes[40..]).unwrap();
            assert_eq!((message.icmp_type(), message.code(), message.rest()), v6_expected);
        }
    }

    #[test]
    fn ipv6_answers_quote_as_much_as_the_minimum_mtu_holds() {
        let packet = v6(POD_V6, "fd00:50:0:77::1".parse().unwrap(), protocol::UDP, &[7; 1400]);
        let bytes = answer(&packet, Trouble::TooBig { mtu: 1430 }).unwrap();
        assert_eq!(bytes.len(), 1280);
        assert_eq!(bytes[48..], packet[..1232]);
        let ip = Ipv6Packet::new_checked(&bytes[..]).unwrap();
        assert_eq!((ip.src(), ip.dst(), ip.next_header()), (OWN_V6, POD_V6, protocol::ICMPV6));
        let message = Icmpv6Packet::new_checked(ip.payload()).unwrap();
        assert!(message.verify_checksum(ip.pseudo_header(protocol::ICMPV6, ip.payload_len())));
    }

    #[test]
    fn echo_requests_are_answered_and_icmp_errors_are_not() {
        let echo = [8, 0, 0, 0, 0, 0, 0, 0];
        assert!(answer(&pod_to([10, 50, 77, 1], protocol::ICMP, &echo), Trouble::NoRoute).is_ok());
        for icmp_type in [3, 4, 5, 11, 12, 99] {
            let error = [icmp_type, 0, 0, 0, 0, 0, 0, 0];
            let packet = pod_to([10, 50, 77, 1], protocol::ICMP, &error);
            assert_eq!(answer(&packet, Trouble::NoRoute), Err(Silence::Forbidden), "type {icmp_type}");
        }
        assert!(answer(&pod_to([10, 50, 77, 1], protocol::ICMP, &[]), Trouble::NoRoute).is_err(), "no type");

        let dst = "fd00:50:0:77::1".parse().unwrap();
        assert!(answer(&v6(POD_V6, dst, protocol::ICMPV6, &[128, 0, 0, 0]), Trouble::NoRoute).is_ok());
        for icmp_type in [1, 2, 3, 4, 100, 127, 137] {
            let packet = v6(POD_V6, dst, protocol::ICMPV6, &[icmp_type, 0, 0, 0]);
            assert_eq!(answer(&packet, Trouble::NoRoute), Err(Silence::Forbidden), "type {icmp_type}");
        }
        // Behind an extension header too.
        let packet = v6(POD_V6, dst, protocol::DEST_OPTIONS, &[58, 0, 1, 4, 0, 0, 0, 0, 1, 0, 0, 0]);
        assert_eq!(answer(&packet, Trouble::NoRoute), Err(Silence::Forbidden));
    }

    #[test]
    fn only_first_fragments_are_answered() {
        let mut packet = pod_to([10, 50, 77, 1], protocol::UDP, &[0; 16]);
        packet[6..8].copy_from_slice(&[0x20, 0x00]);
        assert!(answer(&packet, Trouble::NoRoute).is_ok());
        packet[6..8].copy_from_slice(&[0x20, 0x01]);
        assert_eq!(answer(&packet, Trouble::NoRoute), Err(Silence::Forbidden));

        let dst = "fd00:50:0:77::1".parse().unwrap();
        let mut fragment = [17, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(answer(&v6(POD_V6, dst, protocol::FRAGMENT, &fragment), Trouble::NoRoute).is_ok());
        fragment[3] = 9;
        assert_eq!(
            answer(&v6(POD_V6, dst, protocol::FRAGMENT, &fragment), Trouble::NoRoute),
            Err(Silence::Forbidden)
        );
    }

    #[test]
    fn group_and_impossible_addresses_are_not_answered() {
        for dst in [
            [224, 0, 0, 1],
            [239, 1, 2, 3],
            [255, 255, 255, 255],
            [0, 0, 0, 0],
            [127, 0, 0, 1],
            [240, 0, 0, 1],
        ] {
            assert!(answer(&pod_to(dst, protocol::UDP, &[0; 8]), Trouble::NoRoute).is_err(), "to {dst:?}");
        }
        for src in [[0, 0, 0, 0], [0, 1, 2, 3], [127, 0, 0, 1], [224, 0, 0, 1], [255, 255, 255, 255]] {
            let packet = v4(src.into(), [10, 50, 77, 1].into(), protocol::UDP, &[0; 8]);
            assert!(answer(&packet, Trouble::NoRoute).is_err(), "from {src:?}");
        }
        for dst in ["ff02::2", "ff0e::1", "::", "::1", "fe80::1"] {
            let packet = v6(POD_V6, dst.parse().unwrap(), protocol::UDP, &[0; 8]);
            assert!(answer(&packet, Trouble::NoRoute).is_err(), "to {dst}");
        }
        for src in ["ff02::2", "::", "::1"] {
            let packet = v6(src.parse().unwrap(), "fd00:50:0:77::1".parse().unwrap(), protocol::UDP, &[0; 8]);
            assert!(answer(&packet, Trouble::NoRoute).is_err(), "from {src}");
        }
    }

    #[test]
    fn without_an_address_of_the_family_there_is_no_answer() {
        let packet = pod_to([10, 50, 77, 1], protocol::UDP, &[0; 8]);
        let mut answerer = Answerer::new(None, Some(OWN_V6), TokenBucket::new(1, Duration::ZERO));
        let inner = Inner::parse(&packet).unwrap();
        let outcome = answerer.answer(&inner, Trouble::NoRoute, Instant::now(), &mut [0; MAX_ANSWER_LEN]);
        assert_eq!(outcome, Err(Silence::Forbidden));
    }

    #[test]
    fn answers_stop_at_the_limit_and_resume_with_time() {
        let start = Instant::now();
        let packet = pod_to([10, 50, 77, 1], protocol::UDP, &[0; 8]);
        let inner = Inner::parse(&packet).unwrap();
        let mut answerer = Answerer::new(Some(OWN_V4), None, TokenBucket::new(3, Duration::from_millis(10)));
        let mut at = |ms| {
            let now = start + Duration::from_millis(ms);
            answerer.answer(&inner, Trouble::NoRoute, now, &mut [0; MAX_ANSWER_LEN])
        };
        assert_eq!([at(0), at(0), at(0), at(0)], [Ok(56), Ok(56), Ok(56), Err(Silence::Limited)]);
        assert_eq!(
            [at(9), at(10), at(19), at(20)],
            [Err(Silence::Limited), Ok(56), Err(Silence::Limited), Ok(56)]
        );
        assert_eq!(at(5), Err(Silence::Limited), "time that goes back refills nothing");
        // A long pause fills the bucket to the brim and no further.
        assert_eq!(
            [at(99_999), at(99_999), at(99_999), at(99_999)],
            [Ok(56), Ok(56), Ok(56), Err(Silence::Limited)]
        );
    }

    #[test]
    fn a_forbidden_answer_takes_no_token() {
        let mut answerer = Answerer::new(Some(OWN_V4), None, TokenBucket::new(1, Duration::from_secs(1)));
        let now = Instant::now();
        let group = pod_to([224, 0, 0, 1], protocol::UDP, &[0; 8]);
        let packet = pod_to([10, 50, 77, 1], protocol::UDP, &[0; 8]);
        let mut out = [0; MAX_ANSWER_LEN];
        for _ in 0..5 {
            assert!(
                answerer.answer(&Inner::parse(&group).unwrap(), Trouble::NoRoute, now, &mut out).is_err()
            );
        }
        assert!(answerer.answer(&Inner::parse(&packet).unwrap(), Trouble::NoRoute, now, &mut out).is_ok());
    }

    #[test]
    fn a_chain_that_cannot_be_walked_is_not_answered() {
        let packet = v6(
            POD_V6,
            "fd00:50:0:77::1".parse().unwrap(),
            protocol::HOP_BY_HOP,
            &[17, 255, 0, 0, 0, 0, 0, 0],
        );
        let inner = Ipv6Packet::new_checked(&packet[..]).unwrap();
        assert!(inner.upper_layer().is_err() && answer(&packet, Trouble::NoRoute).is_err());
    }
}
