//! Telling the neighbours about an address: gratuitous ARP and unsolicited neighbour advertisement.
//!
//! A pod often gets an address that another one had a moment before; without an announcement its
//! neighbours send to the old MAC until their entry times out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::netlink::IfIndex;
use crate::{Error, MacAddr, sys};

const ETH_P_ARP: u16 = 0x0806;
const ETH_P_IPV6: u16 = 0x86dd;
const IPPROTO_ICMPV6: u8 = 58;
const ND_NEIGHBOR_ADVERT: u8 = 136;

/// Sends one announcement of `address` at `mac` out of a link of the calling thread's namespace.
///
/// The link must be up. For IPv4 it is an ARP announcement (RFC 5227, 2.3), for IPv6 an unsolicited
/// neighbour advertisement with the override flag to all nodes (RFC 4861, 7.2.6).
pub fn announce(index: IfIndex, mac: MacAddr, address: IpAddr) -> Result<(), Error> {
    let sent = match address {
        IpAddr::V4(address) => {
            sys::send_frame(index.0, ETH_P_ARP, MacAddr::BROADCAST.octets(), &arp_announcement(mac, address))
        }
        IpAddr::V6(address) => sys::send_frame(
            index.0,
            ETH_P_IPV6,
            // The Ethernet form of ff02::1 (RFC 2464, 7).
            [0x33, 0x33, 0, 0, 0, 1],
            &neighbour_advertisement(mac, address),
        ),
    };
    sent.map_err(|source| Error::new(format!("announce {address} at {mac} on link {index}"), source))
}

/// An ARP request of an address by its owner (RFC 826).
fn arp_announcement(mac: MacAddr, address: Ipv4Addr) -> [u8; 28] {
    let mut packet = [0; 28];
    packet[0..2].copy_from_slice(&1u16.to_be_bytes()); // Ethernet
    packet[2..4].copy_from_slice(&0x0800u16.to_be_bytes()); // IPv4
    packet[4] = 6;
    packet[5] = 4;
    packet[6..8].copy_from_slice(&1u16.to_be_bytes()); // request
    packet[8..14].copy_from_slice(&mac.octets());
    packet[14..18].copy_from_slice(&address.octets());
    packet[24..28].copy_from_slice(&address.octets());
    packet
}

/// IPv6 header and neighbour advertisement with the target's link-layer address (RFC 4861, 4.4).
fn neighbour_advertisement(mac: MacAddr, address: Ipv6Addr) -> [u8; 72] {
    const HEADER: usize = 40;
    const OVERRIDE: u8 = 0x20;
    let all_nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let mut packet = [0; 72];
    packet[0] = 0x60;
    packet[4..6].copy_from_slice(&32u16.to_be_bytes());
    packet[6] = IPPROTO_ICMPV6;
    packet[7] = 255; // hop limit: receivers drop anything else
    packet[8..24].copy_from_slice(&address.octets());
    packet[24..40].copy_from_slice(&all_nodes.octets());
    packet[HEADER] = ND_NEIGHBOR_ADVERT;
    packet[HEADER + 4] = OVERRIDE;
    packet[HEADER + 8..HEADER + 24].copy_from_slice(&address.octets());
    packet[HEADER + 24] = 2; // option: target link-layer address
    packet[HEADER + 25] = 1; // in units of eight bytes
    packet[HEADER + 26..].copy_from_slice(&mac.octets());
    // Checksum over the pseudo header (RFC 8200, 8.1): both addresses, length, protocol.
    let words = packet[8..].chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let mut sum: u32 = words.sum::<u32>() + 32 + u32::from(IPPROTO_ICMPV6);
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    packet[HEADER + 2..HEADER + 4].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    packet
}
