//! A device and a socket that always have the same batch and forget what they are given.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use felt_dataplane::buf::{Piece, Received, RecvBatch, SLOT_LEN, SendBatch};
use felt_dataplane::device::Device;
use felt_dataplane::socket::Socket;

/// Gives each of its packets once, then nothing, then the same again. Reading copies, as the kernel would.
/// Counts what it is given and forgets it.
#[derive(Debug)]
pub struct BenchDevice {
    packets: Vec<Vec<u8>>,
    at: AtomicUsize,
    /// Packets and super-packets that were written.
    pub writes: AtomicUsize,
    fd: UdpSocket,
}

impl BenchDevice {
    /// With these packets, virtio-net header first.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(packets: Vec<Vec<u8>>) -> io::Result<BenchDevice> {
        let fd = UdpSocket::bind("127.0.0.1:0")?;
        Ok(BenchDevice { packets, at: AtomicUsize::new(0), writes: AtomicUsize::new(0), fd })
    }
}

impl Device for BenchDevice {
    fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        let at = self.at.load(Relaxed);
        let Some(packet) = self.packets.get(at) else {
            self.at.store(0, Relaxed);
            return Err(io::ErrorKind::WouldBlock.into());
        };
        self.at.store(at + 1, Relaxed);
        buf[..packet.len()].copy_from_slice(packet);
        Ok(packet.len())
    }

    fn write(&self, _head: &[u8], _buffer: &[u8], _pieces: &[Piece]) -> io::Result<()> {
        self.writes.fetch_add(1, Relaxed);
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// A message as it is received.
#[derive(Debug, Clone)]
pub struct BenchMessage {
    /// Source.
    pub from: SocketAddr,
    /// Payload.
    pub bytes: Vec<u8>,
    /// Bytes of each merged datagram.
    pub segment: Option<u16>,
}

/// Gives all its messages in each receive call and forgets what it is to send.
#[derive(Debug)]
pub struct BenchSocket {
    messages: Vec<BenchMessage>,
    /// Messages that were sent.
    pub sends: AtomicUsize,
    fd: UdpSocket,
}

impl BenchSocket {
    /// With these messages.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new(messages: Vec<BenchMessage>) -> io::Result<BenchSocket> {
        Ok(BenchSocket { messages, sends: AtomicUsize::new(0), fd: UdpSocket::bind("127.0.0.1:0")? })
    }
}

impl Socket for BenchSocket {
    fn send(&self, _buffer: &[u8], batch: &mut SendBatch, first: usize) -> io::Result<usize> {
        let count = batch.messages.len() - first;
        self.sends.fetch_add(count, Relaxed);
        Ok(count)
    }

    fn recv(&self, batch: &mut RecvBatch, _limit: usize) -> io::Result<()> {
        batch.received.clear();
        for (slot, message) in self.messages.iter().enumerate().take(batch.slots()) {
            let at = slot * SLOT_LEN;
            batch.buffer[at..at + message.bytes.len()].copy_from_slice(&message.bytes);
            batch.received.push(Received {
                from: message.from,
                at,
                len: message.bytes.len(),
                segment: message.segment,
                ..Received::default()
            });
        }
        if batch.received.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    fn wait_writable(&self, _limit: Duration) {}

    fn is_v6(&self) -> bool {
        false
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
