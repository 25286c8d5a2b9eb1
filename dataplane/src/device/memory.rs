//! A device in memory: what is pushed is read, what is written is kept, and calls fail when told to.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Device, VNET_HDR_LEN};
use crate::buf::Piece;
use crate::sys::wait;

/// Something that can be polled: readable while raised.
#[derive(Debug)]
pub(crate) struct Flag(File);

impl Flag {
    pub(crate) fn new() -> io::Result<Flag> {
        Ok(Flag(File::from(wait::eventfd()?)))
    }

    pub(crate) fn raise(&self) {
        // It fails only when the counter would overflow; the flag is up then.
        let _ = (&self.0).write(&1u64.to_ne_bytes());
    }

    pub(crate) fn lower(&self) {
        // It fails only when the flag is down.
        let _ = (&self.0).read(&mut [0; 8]);
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Locks; what a panicking test thread has left behind is whole, since no invariant spans two locks.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Errors that calls are to give, in the order of the calls: `None` lets a call through.
#[derive(Debug, Default)]
pub struct Faults(Mutex<VecDeque<Option<i32>>>);

impl Faults {
    /// Lets `skip` calls through and fails the next `count` with this `errno`, behind what was asked before.
    pub fn fail(&self, skip: usize, count: usize, errno: i32) {
        let mut faults = lock(&self.0);
        faults.extend(std::iter::repeat_n(None, skip));
        faults.extend(std::iter::repeat_n(Some(errno), count));
    }

    pub(crate) fn check(&self) -> io::Result<()> {
        match lock(&self.0).pop_front() {
            Some(Some(errno)) => Err(io::Error::from_raw_os_error(errno)),
            _ => Ok(()),
        }
    }
}

#[derive(Debug, Default)]
struct Queues {
    /// To be read.
    incoming: VecDeque<Vec<u8>>,
    written: VecDeque<Vec<u8>>,
    /// Emptied vectors, so that a device in steady use allocates nothing.
    spare: Vec<Vec<u8>>,
}

/// A queue in memory. Clones are the same queue.
#[derive(Debug, Clone)]
pub struct MemoryDevice {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queues: Mutex<Queues>,
    readable: Flag,
    read_faults: Faults,
    write_faults: Faults,
    /// Written packets are dropped instead of kept.
    discard: bool,
}

impl MemoryDevice {
    /// An empty queue.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn new() -> io::Result<MemoryDevice> {
        Self::with(false)
    }

    /// An empty queue that forgets what is written to it, for benches.
    ///
    /// # Errors
    /// When the process has no descriptors left.
    pub fn discarding() -> io::Result<MemoryDevice> {
        Self::with(true)
    }

    fn with(discard: bool) -> io::Result<MemoryDevice> {
        let shared = Shared {
            queues: Mutex::default(),
            readable: Flag::new()?,
            read_faults: Faults::default(),
            write_faults: Faults::default(),
            discard,
        };
        Ok(MemoryDevice { shared: Arc::new(shared) })
    }

    /// Puts a packet, virtio-net header first, where reads find it.
    pub fn push(&self, packet: &[u8]) {
        let mut queues = lock(&self.shared.queues);
        let mut copy = queues.spare.pop().unwrap_or_default();
        copy.clear();
        copy.extend_from_slice(packet);
        queues.incoming.push_back(copy);
        self.shared.readable.raise();
    }

    /// Puts a packet without offloads where reads find it.
    pub fn push_packet(&self, packet: &[u8]) {
        self.push(&[&[0; VNET_HDR_LEN], packet].concat());
    }

    /// Takes the oldest written packet, virtio-net header first.
    pub fn pop(&self) -> Option<Vec<u8>> {
        lock(&self.shared.queues).written.pop_front()
    }

    /// Number of written packets that were not taken.
    pub fn written(&self) -> usize {
        lock(&self.shared.queues).written.len()
    }

    /// Errors of reads to come.
    pub fn read_faults(&self) -> &Faults {
        &self.shared.read_faults
    }

    /// Errors of writes to come.
    pub fn write_faults(&self) -> &Faults {
        &self.shared.write_faults
    }
}

impl Device for MemoryDevice {
    fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        self.shared.read_faults.check()?;
        let mut queues = lock(&self.shared.queues);
        let Some(packet) = queues.incoming.pop_front() else {
            self.shared.readable.lower();
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let len = packet.len().min(buf.len());
        buf[..len].copy_from_slice(&packet[..len]);
        queues.spare.push(packet);
        Ok(len)
    }

    fn write(&self, head: &[u8], buffer: &[u8], pieces: &[Piece]) -> io::Result<()> {
        self.shared.write_faults.check()?;
        if self.shared.discard {
            return Ok(());
        }
        let mut queues = lock(&self.shared.queues);
        let mut packet = queues.spare.pop().unwrap_or_default();
        packet.clear();
        packet.extend_from_slice(head);
        for piece in pieces {
            packet.extend_from_slice(piece.of(buffer));
        }
        queues.written.push_back(packet);
        Ok(())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.shared.readable.fd()
    }
}
