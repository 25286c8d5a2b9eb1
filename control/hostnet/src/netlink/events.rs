//! What changes in a namespace, as the kernel reports it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::time::Duration;

use netlink_packet_route::RouteNetlinkMessage;

use super::neigh::FdbEntry;
use super::socket::{Connection, Messages};
use super::{AddressInfo, Link, NETLINK_ROUTE, Neighbour, Route};
use crate::netns::NetNs;
use crate::{Error, sys};

/// Receive memory asked for, so that a burst does not overrun the socket.
const RECEIVE_MEMORY: u32 = 4 << 20;

/// What to hear about (`RTNLGRP_*` of linux/rtnetlink.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// Links.
    Links,
    /// IPv4 addresses.
    AddressesV4,
    /// IPv6 addresses.
    AddressesV6,
    /// IPv4 routes.
    RoutesV4,
    /// IPv6 routes.
    RoutesV6,
    /// Neighbours of both families and FDB entries.
    Neighbours,
}

impl Group {
    fn number(self) -> u32 {
        match self {
            Self::Links => 1,
            Self::Neighbours => 3,
            Self::AddressesV4 => 5,
            Self::RoutesV4 => 7,
            Self::AddressesV6 => 9,
            Self::RoutesV6 => 11,
        }
    }
}

/// One change.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// A link is new or changed.
    LinkSet(Box<Link>),
    /// A link is gone (or went to another namespace).
    LinkGone(Box<Link>),
    /// An address is new or changed.
    AddressSet(AddressInfo),
    /// An address is gone.
    AddressGone(AddressInfo),
    /// A route is new or changed. The kernel sends no event for IPv4 routes that vanish with their
    /// device or address.
    RouteSet(Box<Route>),
    /// A route was removed.
    RouteGone(Box<Route>),
    /// A neighbour is new or changed.
    NeighbourSet(Neighbour),
    /// A neighbour is gone.
    NeighbourGone(Neighbour),
    /// A forwarding database entry is new or changed.
    FdbSet(FdbEntry),
    /// A forwarding database entry is gone.
    FdbGone(FdbEntry),
    /// Events were lost: read the state anew.
    Overrun,
}

/// A subscription to changes in one namespace.
///
/// Subscribe first and read the state after, so that nothing falls in between.
#[derive(Debug)]
pub struct Monitor {
    connection: Connection,
}

impl Monitor {
    /// Subscribes in the calling thread's network namespace.
    pub fn new(groups: &[Group]) -> Result<Self, Error> {
        let fail = |source| Error::new("subscribe to network changes", source);
        let mut connection = Connection::open(NETLINK_ROUTE).map_err(fail)?;
        connection.set_receive_memory(RECEIVE_MEMORY);
        for group in groups {
            connection.join(group.number()).map_err(fail)?;
        }
        Ok(Self { connection })
    }

    /// Subscribes in `netns`; the calling thread is back in its own namespace on return.
    pub fn new_in(netns: &NetNs, groups: &[Group]) -> Result<Self, Error> {
        netns.with(|| Self::new(groups)).map_err(|source| Error::new("enter network namespace", source))?
    }

    /// Waits for changes, at most for `timeout` (`None`: for ever). Empty when the time passed, or
    /// when a signal came.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<Vec<Event>, Error> {
        let fail = |source| Error::new("wait for network changes", source);
        let milliseconds = timeout.map_or(-1, |timeout| {
            // Rounded up, so that a short time is not a busy loop.
            i32::try_from(timeout.as_micros().div_ceil(1000)).unwrap_or(i32::MAX)
        });
        match sys::poll_in(self.connection.as_fd(), milliseconds) {
            Ok(true) => self.ready(),
            Ok(false) => Ok(Vec::new()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Vec::new()),
            Err(error) => Err(fail(error)),
        }
    }

    /// Reads what is there without waiting; for callers that poll the descriptor themselves.
    pub fn ready(&mut self) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        loop {
            match self.connection.receive(libc::MSG_DONTWAIT) {
                Ok(datagram) => {
                    events.extend(Messages(datagram).filter_map(|message| {
                        Event::from_message(&super::parse(message.kind, message.payload).ok()?)
                    }));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(events),
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => events.push(Event::Overrun),
                Err(error) => return Err(Error::new("read network changes", error)),
            }
        }
    }
}

impl AsFd for Monitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }
}

impl AsRawFd for Monitor {
    /// For event loops that want the number; readable means [`Monitor::ready`] has something.
    fn as_raw_fd(&self) -> RawFd {
        self.connection.as_fd().as_raw_fd()
    }
}

impl Event {
    fn from_message(message: &RouteNetlinkMessage) -> Option<Self> {
        use RouteNetlinkMessage as M;
        match message {
            M::NewLink(_) => Link::from_message(message).map(|link| Self::LinkSet(Box::new(link))),
            M::DelLink(_) => Link::from_message(message).map(|link| Self::LinkGone(Box::new(link))),
            M::NewAddress(_) => AddressInfo::from_message(message).map(Self::AddressSet),
            M::DelAddress(_) => AddressInfo::from_message(message).map(Self::AddressGone),
            M::NewRoute(_) => Route::from_message(message).map(|route| Self::RouteSet(Box::new(route))),
            M::DelRoute(_) => Route::from_message(message).map(|route| Self::RouteGone(Box::new(route))),
            M::NewNeighbour(_) => Neighbour::from_message(message)
                .map(Self::NeighbourSet)
                .or_else(|| FdbEntry::from_message(message).map(Self::FdbSet)),
            M::DelNeighbour(_) => Neighbour::from_message(message)
                .map(Self::NeighbourGone)
                .or_else(|| FdbEntry::from_message(message).map(Self::FdbGone)),
            _ => None,
        }
    }
}
