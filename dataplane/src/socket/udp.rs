//! The kernel's UDP socket, with segmented sends (UDP_SEGMENT) and merged receives (UDP_GRO).

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use socket2::{Domain, Protocol, Type};

use super::Socket;
use crate::buf::{RecvBatch, SendBatch};
use crate::sys::{mmsg, sockopt, wait};

/// Room for datagrams in the kernel, each way. Forced where allowed, since limits are often lower.
const BUFFER: i32 = 8 << 20;

/// An underlay socket.
#[derive(Debug)]
pub struct UdpSocket {
    socket: socket2::Socket,
    is_v6: bool,
    /// Segmented sends work as far as the kernel says.
    pub(crate) can_segment: bool,
    /// Merged receives are on.
    pub(crate) merges: bool,
}

impl UdpSocket {
    /// Binds to the address, beside other sockets of this user on it (SO_REUSEPORT).
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn bind(addr: SocketAddr, offload: bool) -> io::Result<UdpSocket> {
        let is_v6 = addr.is_ipv6();
        let domain = if is_v6 { Domain::IPV6 } else { Domain::IPV4 };
        let socket = socket2::Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        socket.set_nonblocking(true)?;
        socket.set_reuse_port(true)?;
        let fd = socket.as_fd();
        // No outer packet says "don't fragment": like the kernel's vxlan device, which leaves it to routers
        // (and to us, on a smaller device) to fragment what is too large.
        if is_v6 {
            socket.set_only_v6(true)?;
            sockopt::set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DONT)?;
            sockopt::set_int(fd, libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1)?;
        } else {
            sockopt::set_int(fd, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)?;
            sockopt::set_int(fd, libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        }
        for (forced, plain) in
            [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)]
        {
            sockopt::set_int(fd, libc::SOL_SOCKET, forced, BUFFER)
                .or_else(|_| sockopt::set_int(fd, libc::SOL_SOCKET, plain, BUFFER))?;
        }
        sockopt::set_int(fd, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1)?;
        let (can_segment, merges) = offloads(fd, offload);
        socket.bind(&addr.into())?;
        Ok(UdpSocket { socket, is_v6, can_segment, merges })
    }

    /// Goes on with a socket that another process has bound and set up, and with the datagrams that wait in it.
    ///
    /// # Errors
    /// When the descriptor is no bound IP socket.
    pub fn adopt(fd: OwnedFd, offload: bool) -> io::Result<UdpSocket> {
        let socket = socket2::Socket::from(fd);
        let is_v6 = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::InvalidInput)?.is_ipv6();
        let (can_segment, merges) = offloads(socket.as_fd(), offload);
        Ok(UdpSocket { socket, is_v6, can_segment, merges })
    }

    /// The address it is bound to.
    ///
    /// # Errors
    /// As the kernel gives them.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()?.as_socket().ok_or_else(|| io::ErrorKind::InvalidData.into())
    }
}

/// Whether segmented sends and merged receives work; sets the latter as wanted.
fn offloads(fd: BorrowedFd<'_>, wanted: bool) -> (bool, bool) {
    // UDP_SEGMENT 0 asks for nothing, but is refused where it is not known (before 4.18).
    let can_segment = wanted && sockopt::set_int(fd, libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok();
    // Reading UDP_GRO back is possible since 5.12; before, merging had faults. What a former owner of the socket chose
    // is replaced in any case.
    let known = sockopt::int(fd, libc::SOL_UDP, libc::UDP_GRO).is_ok();
    let set = known && sockopt::set_int(fd, libc::SOL_UDP, libc::UDP_GRO, i32::from(wanted)).is_ok();
    (can_segment, wanted && set)
}

impl Socket for UdpSocket {
    #[inline]
    fn send(&self, buffer: &[u8], batch: &mut SendBatch, first: usize) -> io::Result<usize> {
        let SendBatch { messages, pieces, scratch } = batch;
        mmsg::sendmmsg(self.socket.as_fd(), buffer, pieces, &messages[first..], scratch)
    }

    #[inline]
    fn recv(&self, batch: &mut RecvBatch, limit: usize) -> io::Result<()> {
        mmsg::recvmmsg(self.socket.as_fd(), &mut batch.buffer, limit, &mut batch.scratch, &mut batch.received)
    }

    fn wait_writable(&self, limit: Duration) {
        // What comes of it shows when the send is tried again.
        let _ = wait::poll([(self.socket.as_fd(), wait::Event::Writable)], Some(limit));
    }

    fn is_v6(&self) -> bool {
        self.is_v6
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
