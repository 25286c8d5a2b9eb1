//! The request and answer protocol of netlink, below any message family.
//!
//! One socket belongs to one caller: a request is sent, its answers are read until the kernel
//! acknowledges or ends the dump, and nothing is left in the queue for the next request. Messages
//! that carry another sequence number, or that do not come from the kernel, are skipped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use netlink_sys::{Socket, SocketAddr};

use crate::Error;

/// Length of `struct nlmsghdr`.
pub(crate) const HEADER_LEN: usize = 16;

pub(crate) const NLM_F_REQUEST: u16 = 0x01;
pub(crate) const NLM_F_ACK: u16 = 0x04;
pub(crate) const NLM_F_DUMP_INTR: u16 = 0x10;
pub(crate) const NLM_F_DUMP: u16 = 0x300;
pub(crate) const NLM_F_REPLACE: u16 = 0x100;
pub(crate) const NLM_F_EXCL: u16 = 0x200;
pub(crate) const NLM_F_CREATE: u16 = 0x400;
pub(crate) const NLM_F_APPEND: u16 = 0x800;
const NLM_F_CAPPED: u16 = 0x100;
const NLM_F_ACK_TLVS: u16 = 0x200;

const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLMSG_MIN_TYPE: u16 = 0x10;
const NLMSGERR_ATTR_MSG: u16 = 1;

/// How often a dump is started again because the table changed meanwhile.
const DUMP_TRIES: usize = 16;

/// Receive buffer: the kernel fills dump answers up to 32 KiB, single answers may be longer (a
/// device with many virtual functions).
const BUFFER_LEN: usize = 128 * 1024;

/// One message as received: the type, the flags and what follows the header.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    pub(crate) kind: u16,
    pub(crate) flags: u16,
    pub(crate) sequence: u32,
    pub(crate) payload: &'a [u8],
}

/// What the reader of an answer is told.
#[derive(Debug)]
pub(crate) enum Answer<'a> {
    /// The answer begins (again).
    Start,
    /// One message of it.
    Message(Message<'a>),
}

/// The reader of an answer; its error text names what could not be understood.
pub(crate) type Each<'a> = dyn FnMut(Answer<'_>) -> Result<(), String> + 'a;

/// Splits a datagram into its messages.
pub(crate) struct Messages<'a>(pub(crate) &'a [u8]);

impl<'a> Iterator for Messages<'a> {
    type Item = Message<'a>;

    fn next(&mut self) -> Option<Message<'a>> {
        let header = self.0.get(..HEADER_LEN)?;
        let length = u32::from_ne_bytes(header[0..4].try_into().ok()?) as usize;
        let payload = self.0.get(HEADER_LEN..length)?;
        let message = Message {
            kind: u16::from_ne_bytes([header[4], header[5]]),
            flags: u16::from_ne_bytes([header[6], header[7]]),
            sequence: u32::from_ne_bytes(header[8..12].try_into().ok()?),
            payload,
        };
        self.0 = self.0.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some(message)
    }
}

/// A netlink socket with its sequence counter and receive buffer.
#[derive(Debug)]
pub(crate) struct Connection {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
    request: Vec<u8>,
}

impl Connection {
    /// Opens a socket of the protocol (`NETLINK_ROUTE`, ...) in the calling thread's namespace.
    pub(crate) fn open(protocol: isize) -> io::Result<Self> {
        let mut socket = Socket::new(protocol)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Probed, not needed: kernels before 4.12, 4.3 and 4.20 know them not.
        let _ = socket.set_ext_ack(true);
        let _ = socket.set_cap_ack(true);
        let _ = socket.set_netlink_get_strict_chk(true);
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(BUFFER_LEN), request: Vec::new() })
    }

    pub(crate) fn next_sequence(&mut self) -> u32 {
        self.sequence = self.sequence.wrapping_add(1);
        self.sequence
    }

    /// Asks for `bytes` of socket receive memory; without the right for more, for what is allowed.
    pub(crate) fn set_receive_memory(&self, bytes: u32) {
        let _ = self.socket.set_rx_buf_sz(bytes);
    }

    /// Makes room for one large request; without the right, as much as is allowed.
    pub(crate) fn set_send_memory(&self, bytes: usize) {
        // The kernel doubles the value for its own bookkeeping; small requests fit the default.
        if bytes > 64 * 1024 {
            crate::sys::set_send_buffer(self.as_fd(), bytes.next_multiple_of(4096));
        }
    }

    /// Joins a multicast group.
    pub(crate) fn join(&mut self, group: u32) -> io::Result<()> {
        self.socket.add_membership(group)
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        loop {
            match self.socket.send(bytes, 0) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(sent) if sent == bytes.len() => return Ok(()),
                Ok(_) => return Err(io::ErrorKind::WriteZero.into()),
            }
        }
    }

    /// Reads one datagram from the kernel and lends it.
    pub(crate) fn receive(&mut self, flags: libc::c_int) -> io::Result<&[u8]> {
        loop {
            self.buffer.clear();
            match self.socket.recv_from(&mut self.buffer, libc::MSG_TRUNC | flags) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok((_, from)) if from.port_number() != 0 => {}
                Ok((length, _)) if length > self.buffer.len() => {
                    return Err(io::Error::from_raw_os_error(libc::EMSGSIZE));
                }
                Ok(_) => return Ok(&self.buffer),
            }
        }
    }

    /// Sends one request and hands each message of its answer to `each`.
    ///
    /// `flags` decides how the answer ends: with `NLM_F_DUMP` at the end of the dump, else at the
    /// acknowledgement, which is asked for. `each` gets [`Answer::Start`] first; and again when a
    /// dump was interrupted by a change and begins anew, so that it forgets what it collected.
    pub(crate) fn request(
        &mut self,
        kind: u16,
        flags: u16,
        what: &dyn Fn() -> String,
        emit: &dyn Fn(&mut Vec<u8>),
        each: &mut Each<'_>,
    ) -> Result<(), Error> {
        let dump = flags & NLM_F_DUMP == NLM_F_DUMP;
        for _ in 0..DUMP_TRIES {
            each(Answer::Start).map_err(|text| Error::protocol(what(), text))?;
            let sequence = self.next_sequence();
            let mut bytes = std::mem::take(&mut self.request);
            bytes.clear();
            bytes.resize(HEADER_LEN, 0);
            emit(&mut bytes);
            let wanted = NLM_F_REQUEST | flags | if dump { 0 } else { NLM_F_ACK };
            write_header(&mut bytes, 0, kind, wanted, sequence);
            let sent = self.send(&bytes);
            self.request = bytes;
            sent.map_err(|source| Error::new(what(), source))?;
            if !self.answers(sequence, dump, what, each)? {
                return Ok(());
            }
        }
        Err(Error::errno_of(what(), libc::EINTR))
    }

    /// Reads the answers to one request; true when the dump was interrupted.
    fn answers(
        &mut self,
        sequence: u32,
        dump: bool,
        what: &dyn Fn() -> String,
        each: &mut Each<'_>,
    ) -> Result<bool, Error> {
        let mut interrupted = false;
        let mut failure = None;
        loop {
            let datagram = self.receive(0).map_err(|source| Error::new(what(), source))?;
            for message in Messages(datagram) {
                if message.sequence != sequence {
                    continue;
                }
                interrupted |= message.flags & NLM_F_DUMP_INTR != 0;
                match message.kind {
                    NLMSG_ERROR => {
                        return match kernel_error(message) {
                            Some((errno, note)) => {
                                Err(Error::with_note(what(), io::Error::from_raw_os_error(errno), note))
                            }
                            None => failure.map_or(Ok(interrupted && dump), Err),
                        };
                    }
                    NLMSG_DONE => {
                        // A dump that fails half-way says so in the code of its last message.
                        if let Some(errno) = negative_code(message.payload) {
                            return Err(Error::errno_of(what(), errno));
                        }
                        return failure.map_or(Ok(interrupted), Err);
                    }
                    kind if kind < NLMSG_MIN_TYPE => {}
                    _ => {
                        if failure.is_none()
                            && let Err(text) = each(Answer::Message(message))
                        {
                            // The rest is read all the same, so that the socket stays usable.
                            failure = Some(Error::protocol(what(), text));
                        }
                    }
                }
            }
        }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        crate::sys::borrow_fd(&self.socket)
    }
}

/// Fills in the message header at `start`; the message reaches to the end of `bytes`.
pub(crate) fn write_header(bytes: &mut [u8], start: usize, kind: u16, flags: u16, sequence: u32) {
    let length = (bytes.len() - start) as u32;
    let header = &mut bytes[start..start + HEADER_LEN];
    header[0..4].copy_from_slice(&length.to_ne_bytes());
    header[4..6].copy_from_slice(&kind.to_ne_bytes());
    header[6..8].copy_from_slice(&flags.to_ne_bytes());
    header[8..12].copy_from_slice(&sequence.to_ne_bytes());
    header[12..16].fill(0);
}

fn negative_code(payload: &[u8]) -> Option<i32> {
    let code = i32::from_ne_bytes(payload.get(..4)?.try_into().ok()?);
    (code < 0).then_some(-code)
}

/// The errno and explanation of an NLMSG_ERROR; none for an acknowledgement.
pub(crate) fn kernel_error(message: Message<'_>) -> Option<(i32, Option<String>)> {
    let errno = negative_code(message.payload)?;
    if message.flags & NLM_F_ACK_TLVS == 0 {
        return Some((errno, None));
    }
    // struct nlmsgerr: the code, the request's header, and unless capped its payload; then attributes.
    let quoted = if message.flags & NLM_F_CAPPED != 0 {
        HEADER_LEN
    } else {
        let length = message.payload.get(4..8).map(|bytes| [bytes[0], bytes[1], bytes[2], bytes[3]]);
        (length.map_or(0, u32::from_ne_bytes) as usize).next_multiple_of(4)
    };
    let attributes = message.payload.get(4 + quoted..).unwrap_or_default();
    let note = super::attr::Attrs(attributes)
        .find(|attr| attr.kind == NLMSGERR_ATTR_MSG)
        .map(|attr| String::from_utf8_lossy(attr.value).trim_end_matches('\0').to_owned());
    Some((errno, note))
}
