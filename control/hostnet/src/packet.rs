//! Packets of one Ethernet protocol on one link, below any address: what a client needs before it has
//! one (DHCP).

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::Duration;

use crate::netlink::IfIndex;
use crate::{MacAddr, sys};

/// A packet socket bound to a link of the calling thread's namespace. Packets come and go without
/// their Ethernet header.
#[derive(Debug)]
pub struct PacketSocket {
    file: File,
    index: IfIndex,
    ethertype: u16,
}

impl PacketSocket {
    /// Opens a socket for packets of `ethertype` (0x0800 for IPv4) on a link.
    pub fn open(index: IfIndex, ethertype: u16) -> io::Result<Self> {
        let file = File::from(sys::packet_socket(index.0, ethertype)?);
        Ok(Self { file, index, ethertype })
    }

    /// Sends one packet to an Ethernet address.
    pub fn send(&self, to: MacAddr, packet: &[u8]) -> io::Result<()> {
        sys::send_packet(self.file.as_fd(), self.index.0, self.ethertype, to.octets(), packet)
    }

    /// Receives one packet; none when the time has passed.
    pub fn receive(&mut self, buffer: &mut [u8], at_most: Duration) -> io::Result<Option<usize>> {
        let milliseconds = i32::try_from(at_most.as_millis()).unwrap_or(i32::MAX);
        if sys::poll_in(self.file.as_fd(), milliseconds)? {
            self.file.read(buffer).map(Some)
        } else {
            Ok(None)
        }
    }
}
