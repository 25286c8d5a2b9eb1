//! The plain loop: what a tunnel is when nothing has been done about speed. It is the yardstick and stays as it is.
//!
//! One packet per read and per send, a table searched from its beginning, no offloads, no batches, one thread for each
//! direction. Packets travel bare in UDP, as in the udp encapsulation, without a change of TTL. The functions take
//! closures for both ends, so that the same loop runs over a TUN device and over memory.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;

/// The largest packet the loop takes.
pub const MAX_PACKET: usize = 65_535;

/// Where one subnet's packets go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    network: u32,
    mask: u32,
    to: SocketAddr,
}

/// A text that is no route.
#[derive(Debug, PartialEq, Eq)]
pub struct BadRoute(String);

impl fmt::Display for BadRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not SUBNET/LENGTH=ADDRESS:PORT", self.0)
    }
}

impl std::error::Error for BadRoute {}

impl Route {
    /// A route for an IPv4 subnet. Bits behind the prefix length, at most 32, do not matter.
    pub fn new(network: Ipv4Addr, len: u32, to: SocketAddr) -> Self {
        let mask = u32::MAX.checked_shl(32 - len.min(32)).unwrap_or(0);
        Self { network: network.to_bits() & mask, mask, to }
    }
}

impl FromStr for Route {
    type Err = BadRoute;

    fn from_str(text: &str) -> Result<Self, BadRoute> {
        let parts = || {
            let (subnet, to) = text.split_once('=')?;
            let (network, len) = subnet.split_once('/')?;
            let len = len.parse().ok().filter(|l| *l <= 32)?;
            Some(Self::new(network.parse().ok()?, len, to.parse().ok()?))
        };
        parts().ok_or_else(|| BadRoute(text.to_owned()))
    }
}

/// Routes in the order they were given; the first that matches is taken.
#[derive(Debug, Default)]
pub struct LinearTable(Vec<Route>);

impl LinearTable {
    /// A table of these routes.
    pub fn new(routes: Vec<Route>) -> Self {
        Self(routes)
    }

    /// Where packets for this address go.
    pub fn lookup(&self, to: Ipv4Addr) -> Option<SocketAddr> {
        self.0.iter().find(|r| to.to_bits() & r.mask == r.network).map(|r| r.to)
    }
}

/// The destination of an IPv4 packet, `None` when it is none.
fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let header = packet.first_chunk::<20>().filter(|h| h[0] >> 4 == 4)?;
    Some(Ipv4Addr::new(header[16], header[17], header[18], header[19]))
}

/// Takes packets from the device one by one and sends each to the node of its destination; a packet without a
/// route, or that cannot be sent, is dropped.
///
/// # Errors
/// When the device fails.
pub fn outbound(
    mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    table: &LinearTable,
    mut send: impl FnMut(&[u8], SocketAddr) -> io::Result<usize>,
) -> io::Result<()> {
    let mut buf = vec![0; MAX_PACKET];
    loop {
        let len = read(&mut buf)?;
        if len == 0 {
            return Ok(());
        }
        let packet = &buf[..len];
        if let Some(to) = destination(packet).and_then(|d| table.lookup(d)) {
            let _ = send(packet, to);
        }
    }
}

/// Takes datagrams from the socket one by one and gives each to the device; one that the device refuses is dropped.
///
/// # Errors
/// When the socket fails.
pub fn inbound(
    mut receive: impl FnMut(&mut [u8]) -> io::Result<usize>,
    mut write: impl FnMut(&[u8]) -> io::Result<usize>,
) -> io::Result<()> {
    let mut buf = vec![0; MAX_PACKET];
    loop {
        let len = receive(&mut buf)?;
        if len == 0 {
            return Ok(());
        }
        if destination(&buf[..len]).is_some() {
            let _ = write(&buf[..len]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> LinearTable {
        let routes = ["10.244.2.0/24=198.18.0.2:8285", "10.244.0.0/16=198.18.0.3:8285"];
        LinearTable::new(routes.iter().map(|r| r.parse().expect("a route")).collect())
    }

    #[test]
    fn first_matching_route_is_taken() {
        let to = |a: [u8; 4]| table().lookup(a.into()).map(|s| s.to_string());
        assert_eq!(to([10, 244, 2, 9]).as_deref(), Some("198.18.0.2:8285"));
        assert_eq!(to([10, 244, 3, 9]).as_deref(), Some("198.18.0.3:8285"));
        assert_eq!(to([10, 245, 2, 9]), None);
    }

    #[test]
    fn text_that_is_no_route_is_refused() {
        for text in ["", "10.0.0.0/24", "10.0.0.0/33=1.2.3.4:5", "10.0.0.0/8=1.2.3.4", "::/0=1.2.3.4:5"] {
            assert_eq!(text.parse::<Route>(), Err(BadRoute(text.to_owned())));
        }
        let all: Route = "1.2.3.4/0=1.2.3.4:5".parse().expect("a route for everything");
        assert!(LinearTable::new(vec![all]).lookup([255, 0, 0, 1].into()).is_some());
    }

    #[test]
    fn packets_go_where_the_table_says() {
        let mut packet = vec![0x45; 40];
        packet[16..20].copy_from_slice(&[10, 244, 2, 7]);
        let mut input = vec![packet.clone(), vec![0x60; 40], vec![0x45; 10], packet.clone()];
        input[3][18] = 9;
        let mut input = input.into_iter();
        let read = |buf: &mut [u8]| {
            Ok(input.next().map_or(0, |p: Vec<u8>| {
                buf[..p.len()].copy_from_slice(&p);
                p.len()
            }))
        };
        let mut sent = Vec::new();
        let send = |p: &[u8], to: SocketAddr| {
            sent.push((p.len(), to.to_string()));
            Ok(p.len())
        };
        outbound(read, &table(), send).expect("the input ends");
        assert_eq!(sent, [(40, "198.18.0.2:8285".to_owned()), (40, "198.18.0.3:8285".to_owned())]);
    }
}
