//! `sendmmsg` and `recvmmsg` with the control messages of `linux/udp.h`, `ip(7)` and `ipv6(7)`.

#![expect(unsafe_code, reason = "system calls that take arrays of pointers")]

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::check;
use crate::buf::{Message, Piece, Received, SLOT_LEN};

// The layouts of linux/socket.h that the code below fills in.
const _: () = assert!(size_of::<libc::iovec>() == 16);
const _: () = assert!(size_of::<libc::msghdr>() == 56);
const _: () = assert!(size_of::<libc::mmsghdr>() == 64);
const _: () = assert!(size_of::<libc::cmsghdr>() == CMSG_HEADER_LEN);
const _: () = assert!(size_of::<libc::sockaddr_in>() == NAME_V4_LEN);
const _: () = assert!(size_of::<libc::sockaddr_in6>() == NAME_V6_LEN);

const NAME_V4_LEN: usize = 16;
const NAME_V6_LEN: usize = 28;
const CMSG_HEADER_LEN: usize = 16;

/// A socket address as the kernel reads and writes it.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
struct Name([u8; 32]);

impl Name {
    /// The bytes and how many of them count.
    fn emit(&mut self, addr: &SocketAddr) -> usize {
        let b = &mut self.0;
        b[2..4].copy_from_slice(&addr.port().to_be_bytes());
        match addr {
            SocketAddr::V4(v4) => {
                b[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
                b[4..8].copy_from_slice(&v4.ip().octets());
                b[8..16].fill(0);
                NAME_V4_LEN
            }
            SocketAddr::V6(v6) => {
                b[..2].copy_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
                b[4..8].fill(0);
                b[8..24].copy_from_slice(&v6.ip().octets());
                b[24..28].copy_from_slice(&v6.scope_id().to_ne_bytes());
                NAME_V6_LEN
            }
        }
    }

    fn parse(&self) -> Option<SocketAddr> {
        let b = &self.0;
        let port = u16::from_be_bytes([b[2], b[3]]);
        match i32::from(u16::from_ne_bytes([b[0], b[1]])) {
            libc::AF_INET => Some(SocketAddrV4::new(Ipv4Addr::new(b[4], b[5], b[6], b[7]), port).into()),
            libc::AF_INET6 => {
                let ip: [u8; 16] = b[8..24].try_into().ok()?;
                let scope = u32::from_ne_bytes([b[24], b[25], b[26], b[27]]);
                Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into())
            }
            _ => None,
        }
    }
}

/// Room for control messages, aligned as `struct cmsghdr`. Sending needs at most two with an `int`.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

/// Receiving: UDP_GRO, SO_RXQ_OVFL and IP_TOS or IPV6_TCLASS, 24 bytes each, and some to spare.
const CONTROL_LEN: usize = 128;

/// Bytes that a control message with this payload takes, padding included: `CMSG_SPACE`.
const fn space(payload: usize) -> usize {
    CMSG_HEADER_LEN + payload.next_multiple_of(8)
}

impl Control {
    /// Appends a control message behind `used` bytes and returns how many are used then.
    fn push(&mut self, used: usize, level: i32, kind: i32, payload: &[u8]) -> usize {
        let b = &mut self.0[used..];
        b[..8].copy_from_slice(&(CMSG_HEADER_LEN + payload.len()).to_ne_bytes());
        b[8..12].copy_from_slice(&level.to_ne_bytes());
        b[12..16].copy_from_slice(&kind.to_ne_bytes());
        b[16..16 + payload.len()].copy_from_slice(payload);
        used + space(payload.len())
    }
}

/// The control messages in a buffer: level, type, payload.
fn control_messages(mut bytes: &[u8]) -> impl Iterator<Item = (i32, i32, &[u8])> {
    std::iter::from_fn(move || {
        let header: &[u8; CMSG_HEADER_LEN] = bytes.first_chunk()?;
        let word =
            |at: usize| i32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let len = usize::try_from(u64::from_ne_bytes(*header.first_chunk::<8>()?)).ok()?;
        let payload = bytes.get(CMSG_HEADER_LEN..len)?;
        bytes = bytes.get(space(len - CMSG_HEADER_LEN)..).unwrap_or_default();
        Some((word(8), word(12), payload))
    })
}

fn int_of(payload: &[u8]) -> Option<i32> {
    payload.first_chunk::<4>().map(|bytes| i32::from_ne_bytes(*bytes))
}

/// Arrays that one `sendmmsg` reads, kept between calls. Their pointers are set before each call.
#[derive(Default)]
pub(crate) struct SendScratch {
    headers: Vec<libc::mmsghdr>,
    iovecs: Vec<libc::iovec>,
    names: Vec<Name>,
    controls: Vec<Control>,
}

// SAFETY: the pointers in the arrays are followed during a call only, and set anew before it.
unsafe impl Send for SendScratch {}
// SAFETY: as above; nothing is done through a shared reference.
unsafe impl Sync for SendScratch {}

impl std::fmt::Debug for SendScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendScratch").field("messages", &self.headers.len()).finish_non_exhaustive()
    }
}

impl SendScratch {
    pub(crate) fn with_capacity(messages: usize, pieces: usize) -> SendScratch {
        SendScratch {
            headers: Vec::with_capacity(messages),
            iovecs: Vec::with_capacity(pieces),
            names: Vec::with_capacity(messages),
            controls: Vec::with_capacity(messages),
        }
    }
}

fn empty_header() -> libc::mmsghdr {
    // SAFETY: `mmsghdr` is plain data, for which zeros are a value: null pointers with lengths 0.
    unsafe { std::mem::zeroed() }
}

/// Sends messages without blocking and returns how many the kernel took, at least one.
///
/// # Errors
/// About the first message; none was taken then.
///
/// # Panics
/// When a piece is not one of `buffer`, or a message names pieces that are not there.
pub(crate) fn sendmmsg(
    fd: BorrowedFd<'_>,
    buffer: &[u8],
    pieces: &[Piece],
    messages: &[Message],
    scratch: &mut SendScratch,
) -> io::Result<usize> {
    let SendScratch { headers, iovecs, names, controls } = scratch;
    headers.clear();
    iovecs.clear();
    names.resize(messages.len().max(names.len()), Name([0; 32]));
    controls.resize(messages.len().max(controls.len()), Control([0; CONTROL_LEN]));
    for message in messages {
        for piece in &pieces[message.first_piece as usize..][..message.piece_count as usize] {
            let bytes = piece.of(buffer);
            // The kernel only reads through this pointer when sending.
            iovecs.push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
        }
    }
    for (i, message) in messages.iter().enumerate() {
        let mut control_len = 0;
        if message.segment != 0 {
            let segment = message.segment.to_ne_bytes();
            control_len = controls[i].push(control_len, libc::SOL_UDP, libc::UDP_SEGMENT, &segment);
        }
        if message.tos != 0 {
            let (level, kind) = match message.dst {
                SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS),
                SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
            };
            let tos = i32::from(message.tos).to_ne_bytes();
            control_len = controls[i].push(control_len, level, kind, &tos);
        }
        let mut header = empty_header();
        header.msg_hdr.msg_namelen = names[i].emit(&message.dst) as libc::socklen_t;
        header.msg_hdr.msg_iovlen = message.piece_count as usize;
        header.msg_hdr.msg_controllen = control_len;
        headers.push(header);
    }
    // Pointers last: from here on nothing else touches what they point to.
    let (name, control) = (names.as_mut_ptr(), controls.as_mut_ptr());
    let mut iovec = iovecs.as_mut_ptr();
    for (i, header) in headers.iter_mut().enumerate() {
        header.msg_hdr.msg_name = name.wrapping_add(i).cast();
        header.msg_hdr.msg_iov = iovec;
        iovec = iovec.wrapping_add(header.msg_hdr.msg_iovlen);
        if header.msg_hdr.msg_controllen > 0 {
            header.msg_hdr.msg_control = control.wrapping_add(i).cast();
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `headers` holds `messages.len()` headers. `names` and `controls` have at least as many entries,
    // and the first loop pushed as many iovecs as the headers count in sum, in the same order, so each
    // pointer is to an entry that is there. Lengths are those of what was written. The iovecs point into
    // `buffer`, whose borrow covers the call.
    let sent = check(unsafe {
        libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), headers.len() as libc::c_uint, flags)
    })?;
    Ok(sent as usize)
}

/// Arrays that one `recvmmsg` fills, kept between calls. Their pointers are set before each call.
pub(crate) struct RecvScratch {
    headers: Vec<libc::mmsghdr>,
    iovecs: Vec<libc::iovec>,
    names: Vec<Name>,
    controls: Vec<Control>,
}

// SAFETY: the pointers in the arrays are followed during a call only, and set anew before it.
unsafe impl Send for RecvScratch {}
// SAFETY: as above; nothing is done through a shared reference.
unsafe impl Sync for RecvScratch {}

impl std::fmt::Debug for RecvScratch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecvScratch").field("slots", &self.names.len()).finish_non_exhaustive()
    }
}

impl RecvScratch {
    pub(crate) fn with_capacity(slots: usize) -> RecvScratch {
        RecvScratch {
            headers: Vec::with_capacity(slots),
            iovecs: Vec::with_capacity(slots),
            names: vec![Name([0; 32]); slots],
            controls: vec![Control([0; CONTROL_LEN]); slots],
        }
    }
}

/// Receives into up to `limit` slots of `SLOT_LEN` bytes, without blocking, and describes what came.
///
/// # Errors
/// When nothing was received.
pub(crate) fn recvmmsg(
    fd: BorrowedFd<'_>,
    buffer: &mut [u8],
    limit: usize,
    scratch: &mut RecvScratch,
    received: &mut Vec<Received>,
) -> io::Result<()> {
    let RecvScratch { headers, iovecs, names, controls } = scratch;
    headers.clear();
    iovecs.clear();
    received.clear();
    for slot in buffer.chunks_exact_mut(SLOT_LEN).take(limit.min(names.len())) {
        iovecs.push(libc::iovec { iov_base: slot.as_mut_ptr().cast(), iov_len: slot.len() });
    }
    let (name, iovec, control) = (names.as_mut_ptr(), iovecs.as_mut_ptr(), controls.as_mut_ptr());
    for i in 0..iovecs.len() {
        let mut header = empty_header();
        header.msg_hdr.msg_name = name.wrapping_add(i).cast();
        header.msg_hdr.msg_namelen = size_of::<Name>() as libc::socklen_t;
        header.msg_hdr.msg_iov = iovec.wrapping_add(i);
        header.msg_hdr.msg_iovlen = 1;
        header.msg_hdr.msg_control = control.wrapping_add(i).cast();
        header.msg_hdr.msg_controllen = CONTROL_LEN;
        headers.push(header);
    }
    // SAFETY: `headers` holds as many headers as are passed, no more than there are iovecs, names and controls
    // (`limit` was cut to that). Nothing else touches those until the call returns, and their lengths are
    // true; each iovec points to a slot of `buffer` of its own, which is borrowed mutably for the call.
    let count = check(unsafe {
        libc::recvmmsg(
            fd.as_raw_fd(),
            headers.as_mut_ptr(),
            headers.len() as libc::c_uint,
            libc::MSG_DONTWAIT,
            ptr::null_mut(),
        )
    })?;
    for (i, header) in headers[..count as usize].iter().enumerate() {
        let Some(from) = names[i].parse() else { continue };
        let mut message = Received {
            from,
            at: i * SLOT_LEN,
            len: (header.msg_len as usize).min(SLOT_LEN),
            truncated: header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
            ..Received::default()
        };
        let control = &controls[i].0[..header.msg_hdr.msg_controllen.min(CONTROL_LEN)];
        for (level, kind, payload) in control_messages(control) {
            match (level, kind) {
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    message.segment = int_of(payload).and_then(|size| u16::try_from(size).ok());
                }
                (libc::IPPROTO_IP, libc::IP_TOS) => message.tos = payload.first().copied().unwrap_or(0),
                (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                    message.tos = int_of(payload).map_or(0, |class| class as u8);
                }
                (libc::SOL_SOCKET, libc::SO_RXQ_OVFL) => {
                    message.overflow = int_of(payload).map(|count| count as u32);
                }
                _ => {}
            }
        }
        received.push(message);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_addresses_round_trip() {
        for text in ["198.18.0.1:8472", "[fd00::1]:8285", "[fe80::1%7]:1"] {
            let addr: SocketAddr = text.parse().unwrap();
            let mut name = Name([0xff; 32]);
            let len = name.emit(&addr);
            assert_eq!(len, if addr.is_ipv4() { NAME_V4_LEN } else { NAME_V6_LEN });
            assert_eq!(name.parse(), Some(addr));
        }
        assert_eq!(Name([0; 32]).parse(), None);
    }

    #[test]
    fn control_messages_are_found_in_any_order_and_cut_ones_end_the_walk() {
        let mut control = Control([0; CONTROL_LEN]);
        let used = control.push(0, 1, 40, &7u32.to_ne_bytes());
        let used = control.push(used, 17, 103, &1472u16.to_ne_bytes());
        assert_eq!(used, 48);
        let found: Vec<_> = control_messages(&control.0[..used]).collect();
        assert_eq!(found, [(1, 40, &7u32.to_ne_bytes()[..]), (17, 103, &1472u16.to_ne_bytes()[..])]);
        assert_eq!(control_messages(&control.0[..41]).count(), 1);
        assert_eq!(control_messages(&[0; 64]).count(), 0);
        assert_eq!(control_messages(&[0xff; 64]).count(), 0);
    }
}
