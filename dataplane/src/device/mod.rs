//! The inner side: where packets of the pods come from and go to.
//!
//! [`Device`] is one queue. `tun` is the kernel's, [`memory`] one for tests without privileges.

pub mod memory;
pub(crate) mod tun;

use std::io;
use std::os::fd::BorrowedFd;

pub use tun::{TunDevice, TunError, TunOptions, TunQueue};

use crate::buf::Piece;

/// Bytes of the virtio-net header in front of each packet.
pub const VNET_HDR_LEN: usize = crate::offload::vnet_hdr::LEN;

/// One queue of a device that carries whole IP packets, each with a virtio-net header in front. Used by two
/// threads at a time: one reads, one writes.
pub trait Device: Send + Sync + 'static {
    /// Reads the next packet with its header. Never blocks.
    ///
    /// # Errors
    /// `WouldBlock` when there is none; others as the kernel gives them.
    fn read(&self, buf: &mut [u8]) -> io::Result<usize>;

    /// Writes one packet: `head`, which starts with a virtio-net header, and then the pieces of `buffer`.
    /// Never blocks.
    ///
    /// # Errors
    /// As the kernel gives them; nothing was written then.
    fn write(&self, head: &[u8], buffer: &[u8], pieces: &[Piece]) -> io::Result<()>;

    /// Readable when there may be a packet.
    fn fd(&self) -> BorrowedFd<'_>;
}
