//! Batches: what goes into and comes out of one system call, as plain data over one flat buffer.
//!
//! A packet is a list of [`Piece`]s of its worker's buffer: a header that was made, payload where it was
//! read. Nothing is copied and nothing is allocated once the batches exist; turning pieces into `iovec`s
//! is for `sys`, gathering them into a vector is for the in-memory socket.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::sys::mmsg::{RecvScratch, SendScratch};

/// A range of the buffer that belongs to the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Piece {
    /// Offset of the first byte.
    pub at: u32,
    /// Number of bytes.
    pub len: u32,
}

impl Piece {
    /// The bytes.
    ///
    /// # Panics
    /// When the piece is not one of this buffer.
    #[inline]
    pub fn of(self, buffer: &[u8]) -> &[u8] {
        &buffer[self.at as usize..][..self.len as usize]
    }
}

/// A datagram to send, or several of equal length in one.
#[derive(Debug, Clone, Copy)]
pub struct Message {
    /// Destination.
    pub dst: SocketAddr,
    /// First of its pieces in [`SendBatch::pieces`].
    pub first_piece: u32,
    /// Number of its pieces.
    pub piece_count: u32,
    /// Bytes of each datagram but the last, which may be shorter; 0 for one datagram.
    pub segment: u16,
    /// ToS or traffic class of the outer header.
    pub tos: u8,
    /// Inner packets in it.
    pub(crate) packets: u32,
    /// Bytes of those.
    pub(crate) inner_bytes: u32,
    /// The peer by its place in the batch.
    pub(crate) peer: u16,
    /// The first of its segments by its place in the batch.
    pub(crate) first_segment: u16,
}

/// Messages for one `sendmmsg`.
#[derive(Debug, Default)]
pub struct SendBatch {
    /// The messages, in order.
    pub messages: Vec<Message>,
    /// Pieces of all messages.
    pub pieces: Vec<Piece>,
    pub(crate) scratch: SendScratch,
}

impl SendBatch {
    /// With room for this many.
    pub fn with_capacity(messages: usize, pieces: usize) -> SendBatch {
        SendBatch {
            messages: Vec::with_capacity(messages),
            pieces: Vec::with_capacity(pieces),
            scratch: SendScratch::with_capacity(messages, pieces),
        }
    }

    /// Empties it.
    #[inline]
    pub fn clear(&mut self) {
        self.messages.clear();
        self.pieces.clear();
    }

    /// The pieces of a message.
    #[inline]
    pub fn pieces_of(&self, message: &Message) -> &[Piece] {
        &self.pieces[message.first_piece as usize..][..message.piece_count as usize]
    }
}

/// A datagram that was received, or several of equal length in one.
#[derive(Debug, Clone, Copy)]
pub struct Received {
    /// Source.
    pub from: SocketAddr,
    /// Offset of the bytes in [`RecvBatch::buffer`].
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
    /// Bytes of each datagram but the last, if the kernel says that there are several. It also says so
    /// about one datagram with an inner super-packet of UDP.
    pub segment: Option<u16>,
    /// ToS or traffic class of the outer header.
    pub tos: u8,
    /// How many datagrams the socket had dropped so far because it was full, if the kernel says so.
    pub overflow: Option<u32>,
    /// The datagram was longer than its slot.
    pub truncated: bool,
}

impl Default for Received {
    fn default() -> Self {
        Self {
            from: SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
            at: 0,
            len: 0,
            segment: None,
            tos: 0,
            overflow: None,
            truncated: false,
        }
    }
}

/// Longest datagram: what fits a 16-bit length, rounded up.
pub const SLOT_LEN: usize = 1 << 16;

/// Slots for one `recvmmsg`.
#[derive(Debug)]
pub struct RecvBatch {
    /// Memory of all slots. Pages that no datagram has reached yet cost nothing.
    pub buffer: Box<[u8]>,
    /// What was received, as many as there are slots at most.
    pub received: Vec<Received>,
    slots: usize,
    pub(crate) scratch: RecvScratch,
}

impl RecvBatch {
    /// With this many slots of [`SLOT_LEN`] bytes.
    pub fn new(slots: usize) -> RecvBatch {
        RecvBatch {
            buffer: vec![0; slots * SLOT_LEN].into_boxed_slice(),
            received: Vec::with_capacity(slots),
            slots,
            scratch: RecvScratch::with_capacity(slots),
        }
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.slots
    }
}
