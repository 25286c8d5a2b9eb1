//! DHCP messages (RFC 2131, RFC 2132) and the IP and UDP headers around them.
//!
//! ```text
//!  op htype hlen hops | xid | secs flags | ciaddr yiaddr siaddr giaddr | chaddr[16] sname[64] file[128]
//!  99.130.83.99 | option: code, length, value ... | 255
//! ```

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use felt_hostnet::MacAddr;

/// Options by code.
pub(super) type Options = BTreeMap<u8, Vec<u8>>;

/// Codes of RFC 2132 and RFC 3442.
pub(super) mod option {
    pub(in super::super) const SUBNET_MASK: u8 = 1;
    pub(in super::super) const ROUTERS: u8 = 3;
    pub(in super::super) const DNS_SERVERS: u8 = 6;
    pub(in super::super) const HOST_NAME: u8 = 12;
    pub(in super::super) const DOMAIN_NAME: u8 = 15;
    pub(in super::super) const STATIC_ROUTES: u8 = 33;
    pub(in super::super) const REQUESTED_IP: u8 = 50;
    pub(in super::super) const LEASE_TIME: u8 = 51;
    pub(in super::super) const MESSAGE_TYPE: u8 = 53;
    pub(in super::super) const SERVER_ID: u8 = 54;
    pub(in super::super) const PARAMETERS: u8 = 55;
    pub(in super::super) const MAX_SIZE: u8 = 57;
    pub(in super::super) const RENEWAL_TIME: u8 = 58;
    pub(in super::super) const REBINDING_TIME: u8 = 59;
    pub(in super::super) const VENDOR_CLASS: u8 = 60;
    pub(in super::super) const CLIENT_ID: u8 = 61;
    pub(in super::super) const USER_CLASS: u8 = 77;
    pub(in super::super) const CLASSLESS_ROUTES: u8 = 121;
    pub(super) const PAD: u8 = 0;
    pub(super) const END: u8 = 255;
}

/// Message types of option 53.
pub(super) mod kind {
    pub(in super::super) const DISCOVER: u8 = 1;
    pub(in super::super) const OFFER: u8 = 2;
    pub(in super::super) const REQUEST: u8 = 3;
    pub(in super::super) const ACK: u8 = 5;
    pub(in super::super) const NAK: u8 = 6;
    pub(in super::super) const RELEASE: u8 = 7;
}

const COOKIE: [u8; 4] = [99, 130, 83, 99];
const FIXED_LEN: usize = 236;
/// Shortest message old relays pass on (RFC 1542, 2.1).
const MESSAGE_MIN: usize = 300;
const BROADCAST_FLAG: u16 = 0x8000;
const IP_HEADER_LEN: usize = 20;
const UDP_HEADER_LEN: usize = 8;
const PROTOCOL_UDP: u8 = 17;
const CLIENT_PORT: u16 = 68;
const SERVER_PORT: u16 = 67;

/// A message to a server, or from one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub xid: u32,
    /// Ask the server to broadcast its answers.
    pub broadcast: bool,
    /// The client's address, when it has one.
    pub ciaddr: Ipv4Addr,
    /// The address the server gives.
    pub yiaddr: Ipv4Addr,
    pub mac: MacAddr,
    pub options: Options,
}

impl Message {
    /// The message type.
    pub(super) fn kind(&self) -> Option<u8> {
        self.options.get(&option::MESSAGE_TYPE)?.first().copied()
    }

    /// An option that is one address, or begins with one.
    pub(super) fn address(&self, code: u8) -> Option<Ipv4Addr> {
        let bytes: [u8; 4] = self.options.get(&code)?.get(..4)?.try_into().ok()?;
        Some(bytes.into())
    }

    /// An option that is a number of seconds.
    pub(super) fn seconds(&self, code: u8) -> Option<u32> {
        Some(u32::from_be_bytes(self.options.get(&code)?.get(..4)?.try_into().ok()?))
    }

    /// The message as an IP packet from 0.0.0.0 (or `ciaddr`) to `destination`.
    pub(super) fn to_packet(&self, destination: Ipv4Addr) -> Vec<u8> {
        let mut body = vec![0; FIXED_LEN];
        body[0] = 1; // request
        body[1] = 1; // Ethernet
        body[2] = 6;
        body[4..8].copy_from_slice(&self.xid.to_be_bytes());
        if self.broadcast {
            body[10..12].copy_from_slice(&BROADCAST_FLAG.to_be_bytes());
        }
        body[12..16].copy_from_slice(&self.ciaddr.octets());
        body[28..34].copy_from_slice(&self.mac.octets());
        body.extend_from_slice(&COOKIE);
        for (code, value) in &self.options {
            for chunk in value.chunks(255) {
                body.push(*code);
                body.push(chunk.len() as u8);
                body.extend_from_slice(chunk);
            }
        }
        body.push(option::END);
        body.resize(body.len().max(MESSAGE_MIN), option::PAD);
        wrap(&body, destination)
    }

    /// Reads an IP packet; none when it is no answer of a DHCP server.
    pub(super) fn from_packet(packet: &[u8]) -> Option<Self> {
        let header = usize::from(packet.first()? & 0x0f) * 4;
        let total = usize::from(u16::from_be_bytes(packet.get(2..4)?.try_into().ok()?));
        let fragment = u16::from_be_bytes(packet.get(6..8)?.try_into().ok()?) & 0x3fff;
        if packet[0] >> 4 != 4 || header < IP_HEADER_LEN || *packet.get(9)? != PROTOCOL_UDP || fragment != 0 {
            return None;
        }
        let udp = packet.get(header..total.min(packet.len()))?;
        let port = |at: usize| Some(u16::from_be_bytes(udp.get(at..at + 2)?.try_into().ok()?));
        if port(0)? != SERVER_PORT || port(2)? != CLIENT_PORT {
            return None;
        }
        Self::parse(udp.get(UDP_HEADER_LEN..usize::from(port(4)?))?)
    }

    fn parse(body: &[u8]) -> Option<Self> {
        if *body.first()? != 2 || body.get(FIXED_LEN..FIXED_LEN + 4)? != COOKIE {
            return None;
        }
        let address = |at: usize| -> Ipv4Addr { [body[at], body[at + 1], body[at + 2], body[at + 3]].into() };
        let mut mac = [0; 6];
        mac.copy_from_slice(&body[28..34]);
        let mut options = Options::new();
        let mut rest = &body[FIXED_LEN + 4..];
        while let Some((code, after)) = rest.split_first() {
            match *code {
                option::END => break,
                option::PAD => rest = after,
                code => {
                    let (len, after) = after.split_first()?;
                    let value = after.get(..usize::from(*len))?;
                    // A long option comes in several parts (RFC 3396).
                    options.entry(code).or_default().extend_from_slice(value);
                    rest = &after[usize::from(*len)..];
                }
            }
        }
        Some(Self {
            xid: u32::from_be_bytes([body[4], body[5], body[6], body[7]]),
            broadcast: body[10] & 0x80 != 0,
            ciaddr: address(12),
            yiaddr: address(16),
            mac: MacAddr(mac),
            options,
        })
    }
}

/// IP and UDP headers. The source is 0.0.0.0: a client that has no address, or is about to lose it.
fn wrap(body: &[u8], destination: Ipv4Addr) -> Vec<u8> {
    let udp_len = UDP_HEADER_LEN + body.len();
    let total = IP_HEADER_LEN + udp_len;
    let mut packet = vec![0; IP_HEADER_LEN];
    packet[0] = 0x45;
    packet[2..4].copy_from_slice(&(total as u16).to_be_bytes());
    packet[8] = 64; // TTL
    packet[9] = PROTOCOL_UDP;
    packet[16..20].copy_from_slice(&destination.octets());
    let sum = checksum(&packet, 0);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
    let mut udp = Vec::with_capacity(udp_len);
    udp.extend_from_slice(&CLIENT_PORT.to_be_bytes());
    udp.extend_from_slice(&SERVER_PORT.to_be_bytes());
    udp.extend_from_slice(&(udp_len as u16).to_be_bytes());
    udp.extend_from_slice(&[0, 0]);
    udp.extend_from_slice(body);
    // Pseudo header: both addresses, protocol, length.
    let octets = destination.octets();
    let pseudo = u32::from(u16::from_be_bytes([octets[0], octets[1]]))
        + u32::from(u16::from_be_bytes([octets[2], octets[3]]))
        + u32::from(PROTOCOL_UDP)
        + udp_len as u32;
    let sum = match checksum(&udp, pseudo) {
        0 => 0xffff,
        sum => sum,
    };
    udp[6..8].copy_from_slice(&sum.to_be_bytes());
    packet.extend_from_slice(&udp);
    packet
}

/// The Internet checksum (RFC 1071).
fn checksum(bytes: &[u8], start: u32) -> u16 {
    let mut sum = start;
    for pair in bytes.chunks(2) {
        sum += u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Message {
        Message {
            xid: 0x1234_5678,
            broadcast: false,
            ciaddr: Ipv4Addr::UNSPECIFIED,
            yiaddr: Ipv4Addr::UNSPECIFIED,
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            options: Options::from([(53, vec![1]), (61, vec![7; 300])]),
        }
    }

    #[test]
    fn headers_are_whole_and_answers_are_read_back() {
        let packet = message().to_packet(Ipv4Addr::BROADCAST);
        assert_eq!(checksum(&packet[..20], 0), 0, "IP checksum");
        let udp = &packet[20..];
        let pseudo = 0xffff * 2 + 17 + udp.len() as u32;
        assert_eq!(checksum(udp, pseudo), 0, "UDP checksum");
        assert_eq!(Message::from_packet(&packet), None, "a request is no answer");
        // Turned into an answer: operation and ports.
        let mut answer = packet.clone();
        answer[28] = 2;
        answer[20..24].copy_from_slice(&[0, 67, 0, 68]);
        let read = Message::from_packet(&answer).unwrap();
        assert_eq!(read, message());
        for cut in 0..answer.len() {
            // Must not panic, whatever is missing.
            let _ = Message::from_packet(&answer[..cut]);
        }
        for at in 0..answer.len() {
            let mut broken = answer.clone();
            broken[at] ^= 0xff;
            let _ = Message::from_packet(&broken);
        }
    }
}
