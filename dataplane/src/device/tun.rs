//! A TUN device with several queues and a virtio-net header in front of each packet.
//!
//! The device is persistent when asked to be: it stays, with addresses and routes, when the process ends
//! in whatever way, and the next one attaches its queues to it, before the old one leaves if need be.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use socket2::{Domain, Socket, Type};

use super::Device;
use crate::buf::Piece;
use crate::offload::vnet_hdr;
use crate::sys::tun as sys;

/// How to open a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TunOptions {
    /// The device outlives the process.
    pub persist: bool,
    /// Packets that the kernel keeps for us when we are late. `None` leaves the kernel's default, 500,
    /// which is short for bursts of small packets.
    pub txqueuelen: Option<u32>,
}

impl Default for TunOptions {
    fn default() -> Self {
        Self { persist: true, txqueuelen: Some(1000) }
    }
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum TunError {
    /// The module is not there, or access to it is not allowed.
    #[error("open /dev/net/tun: {0} (is the tun module loaded, and is this process allowed to use it?)")]
    Open(#[source] io::Error),
    /// The name belongs to a device of another kind, or to a TUN device with other settings.
    #[error("attach to {name}: {source} (a device of that name may exist that is no multi-queue TUN)")]
    Attach {
        /// Name asked for.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A setting was refused.
    #[error("{what} on {name}: {source}")]
    Set {
        /// The setting.
        what: &'static str,
        /// Name of the device.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// An open TUN device: one descriptor per queue. Dropping it detaches the queues.
#[derive(Debug)]
pub struct TunDevice {
    name: String,
    ifindex: u32,
    queues: Vec<OwnedFd>,
}

impl TunDevice {
    /// Creates the device, or attaches to the one of this name that is there, with this many queues, at
    /// least one. A name with `%d` takes the first free number. The device is left down and without
    /// addresses: those are the caller's.
    ///
    /// # Errors
    /// See [`TunError`]. A device that was created is gone again.
    pub fn open(name: &str, queues: usize, options: &TunOptions) -> Result<TunDevice, TunError> {
        let flags = libc::IFF_TUN | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_MULTI_QUEUE;
        let mut device = TunDevice { name: name.to_owned(), ifindex: 0, queues: Vec::new() };
        for _ in 0..queues.max(1) {
            let fd = sys::open().map_err(TunError::Open)?;
            device.name = sys::set_iff(fd.as_fd(), &device.name, flags)
                .map_err(|source| TunError::Attach { name: device.name.clone(), source })?;
            sys::set_vnet_hdr_len(fd.as_fd(), vnet_hdr::LEN as i32)
                .map_err(|e| device.refused("set the length of the virtio-net header", e))?;
            device.queues.push(fd);
        }
        device.ifindex = sys::ifindex(&device.name).map_err(|e| device.refused("look up the index", e))?;
        if let Some(len) = options.txqueuelen {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None);
            socket
                .and_then(|socket| sys::set_txqueuelen(socket.as_fd(), &device.name, len))
                .map_err(|e| device.refused("set the length of the transmit queue", e))?;
        }
        // Last, so that a failure above leaves nothing behind.
        sys::set_persist(device.queues[0].as_fd(), options.persist)
            .map_err(|e| device.refused("set persistence", e))?;
        Ok(device)
    }

    /// Goes on with queues that another process has opened and set up, and with the packets that wait in them.
    ///
    /// # Errors
    /// When a descriptor is no queue of the device `name`.
    pub fn adopt(name: &str, queues: Vec<OwnedFd>) -> Result<TunDevice, TunError> {
        let foreign = |source| TunError::Attach { name: name.to_owned(), source };
        for queue in &queues {
            if sys::name(queue.as_fd()).map_err(foreign)? != name {
                return Err(foreign(io::Error::from_raw_os_error(libc::ENODEV)));
            }
        }
        let ifindex = sys::ifindex(name).map_err(foreign)?;
        Ok(TunDevice { name: name.to_owned(), ifindex, queues })
    }

    fn refused(&self, what: &'static str, source: io::Error) -> TunError {
        TunError::Set { what, name: self.name.clone(), source }
    }

    /// Name of the device.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Index of the device.
    pub fn ifindex(&self) -> u32 {
        self.ifindex
    }

    /// Number of queues.
    pub fn queue_count(&self) -> usize {
        self.queues.len()
    }

    /// Tells the kernel which unfinished packets we take: everything it knows, or nothing.
    /// Returns whether TCP and UDP super-packets will come.
    pub(crate) fn negotiate(&self, wanted: bool) -> Result<(bool, bool), TunError> {
        use sys::offload::{CSUM, TSO_ECN, TSO4, TSO6, USO4, USO6};
        let tso = CSUM | TSO4 | TSO6 | TSO_ECN;
        // The mask is the device's, so what a former process asked for is replaced in any case.
        let set = |mask| sys::set_offload(self.queues[0].as_fd(), mask);
        if wanted && set(tso | USO4 | USO6).is_ok() {
            return Ok((true, true));
        }
        if wanted && set(tso).is_ok() {
            return Ok((true, false));
        }
        set(0).map_err(|e| self.refused("turn offloads off", e))?;
        Ok((false, false))
    }

    /// The queues.
    pub(crate) fn into_queues(self) -> Vec<TunQueue> {
        self.queues.into_iter().map(TunQueue::from).collect()
    }
}

/// One queue of a TUN device.
#[derive(Debug)]
pub struct TunQueue(File);

impl From<OwnedFd> for TunQueue {
    fn from(fd: OwnedFd) -> Self {
        Self(File::from(fd))
    }
}

/// Pieces of one write at most: the longest chain that merging makes.
const MAX_PIECES: usize = 65;

impl Device for TunQueue {
    #[inline]
    fn read(&self, buf: &mut [u8]) -> io::Result<usize> {
        (&self.0).read(buf)
    }

    #[inline]
    fn write(&self, head: &[u8], buffer: &[u8], pieces: &[Piece]) -> io::Result<()> {
        if let [piece] = pieces {
            // A TUN takes a packet whole or not at all.
            let slices = [IoSlice::new(head), IoSlice::new(piece.of(buffer))];
            return (&self.0).write_vectored(&slices).map(|_| ());
        }
        let mut slices = [IoSlice::new(&[]); MAX_PIECES + 1];
        if pieces.len() > MAX_PIECES {
            return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
        }
        slices[0] = IoSlice::new(head);
        for (slice, piece) in slices[1..].iter_mut().zip(pieces) {
            *slice = IoSlice::new(piece.of(buffer));
        }
        (&self.0).write_vectored(&slices[..=pieces.len()]).map(|_| ())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
