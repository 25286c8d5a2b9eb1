//! Raw IP sockets for ICMP answers.
//!
//! An answer comes from the tunnel's own address. The kernel takes such a packet from a local socket, but not
//! from the TUN, where a packet with a local source is a martian.

use std::io;
use std::net::{IpAddr, SocketAddr};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::Answers;

/// One socket per family that the tunnel has an address of.
#[derive(Debug)]
pub(crate) struct RawSockets {
    v4: Option<Socket>,
    v6: Option<Socket>,
}

impl RawSockets {
    /// Sockets that take whole packets with their IP header (`raw(7)`: IPPROTO_RAW implies that) and
    /// receive nothing.
    pub(crate) fn open(v4: bool, v6: bool) -> io::Result<RawSockets> {
        let raw = Protocol::from(libc::IPPROTO_RAW);
        let open = |domain| {
            let socket = Socket::new(domain, Type::RAW, Some(raw))?;
            socket.set_nonblocking(true)?;
            io::Result::Ok(socket)
        };
        Ok(RawSockets {
            v4: v4.then(|| open(Domain::IPV4)).transpose()?,
            v6: v6.then(|| open(Domain::IPV6)).transpose()?,
        })
    }
}

impl Answers for RawSockets {
    fn send(&mut self, packet: &[u8], dst: IpAddr) -> io::Result<()> {
        let socket = if dst.is_ipv4() { &self.v4 } else { &self.v6 };
        let socket = socket.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        socket.send_to(packet, &SockAddr::from(SocketAddr::new(dst, 0)))?;
        Ok(())
    }
}
