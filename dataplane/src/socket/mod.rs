//! The outer side: the underlay socket, and the raw sockets that carry ICMP answers.
//!
//! [`Socket`] moves batches of datagrams. `udp` is the kernel's, [`memory`] one for tests without
//! privileges.

pub(crate) mod answers;
pub mod memory;
pub(crate) mod udp;

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::time::Duration;

pub use udp::UdpSocket;

use crate::buf::{RecvBatch, SendBatch};

/// A datagram socket. Used by two threads at a time: one sends, one receives.
pub trait Socket: Send + Sync + 'static {
    /// Sends the messages from `first` on, whose pieces lie in `buffer`, without blocking. Returns how many
    /// were taken, at least one.
    ///
    /// # Errors
    /// About message `first`, or left over from an earlier send (then the message may be tried again).
    fn send(&self, buffer: &[u8], batch: &mut SendBatch, first: usize) -> io::Result<usize>;

    /// Replaces what is in the batch by up to `limit` received messages, without blocking.
    ///
    /// # Errors
    /// `WouldBlock` when there is none, or an error left over from an earlier send.
    fn recv(&self, batch: &mut RecvBatch, limit: usize) -> io::Result<()>;

    /// Waits until the socket may take messages again, at most this long.
    fn wait_writable(&self, limit: Duration);

    /// Whether it sends to IPv6 addresses, else to IPv4 ones. Never to both.
    fn is_v6(&self) -> bool;

    /// Readable when there may be a message.
    fn fd(&self) -> BorrowedFd<'_>;
}

/// Sends ICMP answers.
pub trait Answers: Send + 'static {
    /// Sends a whole IP packet.
    ///
    /// # Errors
    /// As the kernel gives them.
    fn send(&mut self, packet: &[u8], dst: IpAddr) -> io::Result<()>;
}
