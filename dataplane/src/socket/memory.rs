//! Sockets in memory, joined by a network that may lose, reorder and cut, and calls that fail when told to.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::{Answers, Socket};
use crate::buf::{Received, RecvBatch, SLOT_LEN, SendBatch};
use crate::device::memory::{Faults, Flag, lock};

/// What the network does to the datagrams sent through it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Weather {
    /// Segmented sends arrive as one message, as on a virtual link; else as single datagrams, as on a wire.
    pub merged: bool,
    /// Loses every n-th message; 0 loses none.
    pub lose_every: u32,
    /// Delivers every n-th message behind its successor; 0 reorders none.
    pub swap_every: u32,
    /// Flips a bit in every n-th message; 0 flips none.
    pub damage_every: u32,
    /// Messages that a socket holds before it drops more; 0 for no limit.
    pub room: usize,
}

/// A datagram on its way.
#[derive(Debug, Clone)]
struct Datagram {
    from: SocketAddr,
    bytes: Vec<u8>,
    segment: Option<u16>,
    tos: u8,
}

#[derive(Debug)]
struct Inbox {
    queue: Mutex<VecDeque<Datagram>>,
    overflow: Mutex<u32>,
    readable: Flag,
}

#[derive(Debug, Default)]
struct Network {
    inboxes: HashMap<SocketAddr, Arc<Inbox>>,
    weather: Weather,
    sent: u32,
    held_back: Option<(SocketAddr, Datagram)>,
    spare: Vec<Vec<u8>>,
}

/// A network. Clones are the same network.
#[derive(Debug, Clone, Default)]
pub struct MemoryNetwork(Arc<Mutex<Network>>);

impl MemoryNetwork {
    /// A network without sockets.
    pub fn new(weather: Weather) -> MemoryNetwork {
        MemoryNetwork(Arc::new(Mutex::new(Network { weather, ..Network::default() })))
    }

    /// Changes the weather.
    pub fn set_weather(&self, weather: Weather) {
        lock(&self.0).weather = weather;
    }

    /// A socket with this address.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn bind(&self, addr: SocketAddr) -> io::Result<MemorySocket> {
        let inbox =
            Arc::new(Inbox { queue: Mutex::default(), overflow: Mutex::default(), readable: Flag::new()? });
        lock(&self.0).inboxes.insert(addr, inbox.clone());
        let shared = Shared { network: self.clone(), addr, inbox, send_faults: Faults::default() };
        Ok(MemorySocket { shared: Arc::new(shared) })
    }

    /// Sends one message from any address, as it is.
    pub fn inject(&self, from: SocketAddr, to: SocketAddr, tos: u8, segment: Option<u16>, bytes: &[u8]) {
        lock(&self.0).deliver(to, Datagram { from, bytes: bytes.to_vec(), segment, tos });
    }
}

impl Network {
    /// Takes a message through the weather.
    fn carry(&mut self, to: SocketAddr, mut datagram: Datagram) {
        self.sent = self.sent.wrapping_add(1);
        let nth = |every: u32| every != 0 && self.sent.is_multiple_of(every);
        if nth(self.weather.lose_every) {
            return;
        }
        if nth(self.weather.damage_every)
            && let Some(at) = datagram.bytes.len().checked_sub(1)
        {
            datagram.bytes[at] ^= 0x10;
        }
        if nth(self.weather.swap_every) && self.held_back.is_none() {
            self.held_back = Some((to, datagram));
            return;
        }
        self.deliver(to, datagram);
        if let Some((to, datagram)) = self.held_back.take() {
            self.deliver(to, datagram);
        }
    }

    fn deliver(&mut self, to: SocketAddr, datagram: Datagram) {
        let Some(inbox) = self.inboxes.get(&to) else { return };
        let mut queue = lock(&inbox.queue);
        if self.weather.room != 0 && queue.len() >= self.weather.room {
            *lock(&inbox.overflow) += 1;
            return;
        }
        queue.push_back(datagram);
        inbox.readable.raise();
    }
}

#[derive(Debug)]
struct Shared {
    network: MemoryNetwork,
    addr: SocketAddr,
    inbox: Arc<Inbox>,
    send_faults: Faults,
}

/// A socket in memory. Clones are the same socket.
#[derive(Debug, Clone)]
pub struct MemorySocket {
    shared: Arc<Shared>,
}

impl MemorySocket {
    /// Errors of sends to come.
    pub fn send_faults(&self) -> &Faults {
        &self.shared.send_faults
    }

    /// Number of messages that were not received yet.
    pub fn pending(&self) -> usize {
        lock(&self.shared.inbox.queue).len()
    }
}

impl Socket for MemorySocket {
    /// Takes one message per call when a fault may come, so that each counts as a call.
    fn send(&self, buffer: &[u8], batch: &mut SendBatch, first: usize) -> io::Result<usize> {
        self.shared.send_faults.check()?;
        let message = batch.messages[first];
        let pieces = batch.pieces_of(&message);
        let mut network = lock(&self.shared.network.0);
        let mut bytes = network.spare.pop().unwrap_or_default();
        bytes.clear();
        for piece in pieces {
            bytes.extend_from_slice(piece.of(buffer));
        }
        let (from, tos) = (self.shared.addr, message.tos);
        if message.segment != 0 && !network.weather.merged {
            for datagram in bytes.chunks(usize::from(message.segment)) {
                let bytes = datagram.to_vec();
                network.carry(message.dst, Datagram { from, bytes, segment: None, tos });
            }
            network.spare.push(bytes);
        } else {
            let segment = (message.segment != 0).then_some(message.segment);
            network.carry(message.dst, Datagram { from, bytes, segment, tos });
        }
        Ok(1)
    }

    fn recv(&self, batch: &mut RecvBatch, limit: usize) -> io::Result<()> {
        batch.received.clear();
        let overflow = *lock(&self.shared.inbox.overflow);
        for slot in 0..limit.min(batch.slots()) {
            let mut queue = lock(&self.shared.inbox.queue);
            let Some(datagram) = queue.pop_front() else {
                self.shared.inbox.readable.lower();
                break;
            };
            drop(queue);
            let at = slot * SLOT_LEN;
            let len = datagram.bytes.len().min(SLOT_LEN);
            batch.buffer[at..at + len].copy_from_slice(&datagram.bytes[..len]);
            batch.received.push(Received {
                from: datagram.from,
                at,
                len,
                segment: datagram.segment,
                tos: datagram.tos,
                overflow: Some(overflow),
                truncated: datagram.bytes.len() > SLOT_LEN,
            });
            lock(&self.shared.network.0).spare.push(datagram.bytes);
        }
        if batch.received.is_empty() { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(()) }
    }

    fn wait_writable(&self, _limit: Duration) {}

    fn is_v6(&self) -> bool {
        self.shared.addr.is_ipv6()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.shared.inbox.readable.fd()
    }
}

/// ICMP answers kept in memory. Clones are the same.
#[derive(Debug, Clone, Default)]
pub struct MemoryAnswers(Arc<Mutex<VecDeque<Answer>>>);

/// Where an answer was sent, and the packet.
pub type Answer = (IpAddr, Vec<u8>);

impl MemoryAnswers {
    /// Takes the oldest answer: where it was sent, and the packet.
    pub fn pop(&self) -> Option<Answer> {
        lock(&self.0).pop_front()
    }
}

impl Answers for MemoryAnswers {
    fn send(&mut self, packet: &[u8], dst: IpAddr) -> io::Result<()> {
        lock(&self.0).push_back((dst, packet.to_vec()));
        Ok(())
    }
}
