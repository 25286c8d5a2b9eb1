//! Routing netlink: links, addresses, routes, neighbours and rules of one network namespace.
//!
//! [`Handle`] is one socket. It talks to the namespace it was opened in, for ever, wherever its
//! thread goes later. All calls are methods of [`Handle`]; what they take and return lives in one
//! file per object.

mod addr;
pub(crate) mod attr;
mod events;
mod link;
mod neigh;
mod route;
mod rule;
pub(crate) mod socket;
mod tc;

use std::fmt;

use netlink_packet_core::{Emitable, ParseableParametrized};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

pub use addr::{Address, AddressFlags, AddressInfo};
pub use events::{Event, Group, Monitor};
pub use link::{
    BridgeConfig, BridgePort, BridgePortChange, IpTunnelConfig, IpvlanMode, Link, LinkChange, LinkDetail,
    LinkKind, LinkStats, MacvlanMode, NewLink, OperState, TunDetail, VethPeer, VlanFlags, VxlanConfig,
    VxlanDetail,
};
pub use neigh::{FdbEntry, Neighbour, NeighbourState};
pub use route::{Lookup, Route, RouteKind, RouteProtocol, RouteScope};
pub use rule::Rule;
pub use tc::{Filter, NewQdisc, Qdisc, Tbf, TcHandle};

use crate::Error;
use crate::netns::NetNs;
use socket::{Answer, Connection, NLM_F_DUMP};

const NETLINK_ROUTE: isize = libc::NETLINK_ROUTE as isize;

/// The kernel's number of an interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IfIndex(pub u32);

impl fmt::Display for IfIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl From<IfIndex> for u32 {
    fn from(index: IfIndex) -> Self {
        index.0
    }
}

impl From<u32> for IfIndex {
    fn from(index: u32) -> Self {
        Self(index)
    }
}

/// Which address family a list or a change is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// The family of an address.
    pub fn of(address: std::net::IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    fn raw(self) -> AddressFamily {
        match self {
            Self::V4 => AddressFamily::Inet,
            Self::V6 => AddressFamily::Inet6,
        }
    }
}

/// One routing netlink socket.
#[derive(Debug)]
pub struct Handle {
    connection: Connection,
}

impl Handle {
    /// Opens a socket in the calling thread's network namespace.
    pub fn new() -> Result<Self, Error> {
        Connection::open(NETLINK_ROUTE)
            .map(|connection| Self { connection })
            .map_err(|source| Error::new("open routing netlink socket", source))
    }

    /// Opens a socket in `netns`; the calling thread is back in its own namespace on return.
    pub fn new_in(netns: &NetNs) -> Result<Self, Error> {
        netns.with(Self::new).map_err(|source| Error::new("enter network namespace", source))?
    }

    /// Sends a change and waits for the acknowledgement.
    fn change(
        &mut self,
        message: &RouteNetlinkMessage,
        flags: u16,
        what: &dyn Fn() -> String,
    ) -> Result<(), Error> {
        self.answers(message, flags, what).map(drop)
    }

    /// Sends a request and collects the messages of its answer.
    fn answers(
        &mut self,
        message: &RouteNetlinkMessage,
        flags: u16,
        what: &dyn Fn() -> String,
    ) -> Result<Vec<RouteNetlinkMessage>, Error> {
        let mut found = Vec::new();
        self.connection.request(
            message.message_type(),
            flags,
            what,
            &|bytes| {
                let start = bytes.len();
                bytes.resize(start + Emitable::buffer_len(message), 0);
                message.emit(&mut bytes[start..]);
            },
            &mut |answer| match answer {
                Answer::Start => {
                    found.clear();
                    Ok(())
                }
                Answer::Message(received) => {
                    parse(received.kind, received.payload).map(|message| found.push(message))
                }
            },
        )?;
        Ok(found)
    }

    fn dump(
        &mut self,
        message: &RouteNetlinkMessage,
        what: &dyn Fn() -> String,
    ) -> Result<Vec<RouteNetlinkMessage>, Error> {
        self.answers(message, NLM_F_DUMP, what)
    }
}

/// Reads a routing message.
///
/// An attribute that this crate's parser does not understand (a newer kernel, a vendor's driver) costs
/// that attribute, not the message: else one odd device would hide all.
fn parse(kind: u16, payload: &[u8]) -> Result<RouteNetlinkMessage, String> {
    let whole = match RouteNetlinkMessage::parse_with_param(payload, kind) {
        Ok(message) => return Ok(message),
        Err(error) => error,
    };
    let fail = |error: &dyn fmt::Display| format!("kernel message {kind}: {error}");
    // Messages come in groups of four kinds: links, addresses, routes, neighbours, rules.
    let header_len = match kind & !3 {
        16 => 16,
        20 => 8,
        _ => 12,
    };
    let (Some(header), Some(attributes)) = (payload.get(..header_len), payload.get(header_len..)) else {
        return Err(fail(&whole));
    };
    let mut kept = header.to_vec();
    for raw in attr::raw(attributes) {
        let mut alone = header.to_vec();
        alone.extend_from_slice(raw);
        if RouteNetlinkMessage::parse_with_param(&alone[..], kind).is_ok() {
            kept.extend_from_slice(raw);
            kept.resize(kept.len().next_multiple_of(4), 0);
        }
    }
    RouteNetlinkMessage::parse_with_param(&kept[..], kind).map_err(|error| fail(&error))
}

impl std::os::fd::AsFd for Handle {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_odd_attribute_costs_only_itself() {
        // A link named eth9 whose MTU (attribute 4) has two bytes instead of four.
        let mut payload = vec![0; 16];
        payload[4] = 7;
        let mut writer = attr::Writer(&mut payload);
        writer.string(3, "eth9");
        writer.bytes(4, &[1, 2]);
        writer.ne32(13, 1000);
        const RTM_NEWLINK: u16 = 16;
        assert!(RouteNetlinkMessage::parse_with_param(&payload[..], RTM_NEWLINK).is_err());
        let link = Link::from_message(&parse(RTM_NEWLINK, &payload).unwrap()).unwrap();
        assert_eq!((link.index, link.name.as_str(), link.tx_queue_len), (IfIndex(7), "eth9", 1000));
        for end in 0..payload.len() {
            // Truncated messages are refused or read in part, without panic.
            let _ = parse(RTM_NEWLINK, &payload[..end]);
        }
    }
}
