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
                    RouteNetlinkMessage::parse_with_param(received.payload, received.kind)
                        .map(|message| found.push(message))
                        .map_err(|error| format!("kernel message {}: {error}", received.kind))
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

impl std::os::fd::AsFd for Handle {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.connection.as_fd()
    }
}
