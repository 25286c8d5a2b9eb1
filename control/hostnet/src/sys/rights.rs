//! Descriptors sent over a Unix socket, `SCM_RIGHTS` of unix(7): with a message the receiver gets descriptors of the
//! same open files.

#![expect(unsafe_code, reason = "control messages have no safe form in the standard library")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// The most descriptors the kernel passes at once, `SCM_MAX_FD`.
pub(crate) const MAX: usize = 253;
const FD_LEN: usize = size_of::<RawFd>();

/// Room for a control message with [`MAX`] descriptors, aligned as `cmsghdr` must be.
#[repr(C, align(8))]
struct Control([u8; 1040]);

const _: () = {
    // SAFETY: CMSG_SPACE is arithmetic on its argument.
    let needed = unsafe { libc::CMSG_SPACE((MAX * FD_LEN) as u32) };
    assert!(needed as usize <= size_of::<Control>());
    assert!(align_of::<Control>() >= align_of::<libc::cmsghdr>());
};

fn message(part: &mut libc::iovec, control: &mut Control, control_len: usize) -> libc::msghdr {
    // SAFETY: an all-zero msghdr is a valid value of that plain struct: no name, no parts, no control data.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control_len as _;
    message
}

/// sendmsg(2): bytes, at least one, and descriptors, at most [`MAX`]. Returns how many bytes were taken; the descriptors
/// travel with the first.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if fds.len() > MAX || bytes.is_empty() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    let mut part = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let mut control = Control([0; size_of::<Control>()]);
    let len = fds.len() * FD_LEN;
    // SAFETY: CMSG_SPACE is arithmetic on its argument.
    let space = if fds.is_empty() { 0 } else { unsafe { libc::CMSG_SPACE(len as u32) as usize } };
    let message = message(&mut part, &mut control, space);
    if !fds.is_empty() {
        // SAFETY: `message` names a control buffer of `space` bytes, which holds one header and `len` bytes of data, so
        // the first header is not null and its data has room for every descriptor.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(len as u32) as _;
            let data = libc::CMSG_DATA(header).cast::<RawFd>();
            for (at, fd) in fds.iter().enumerate() {
                data.add(at).write_unaligned(fd.as_raw_fd());
            }
        }
    }
    loop {
        // SAFETY: `message` points to `part` and `control`, which live to the end of the function; `part` points to
        // `bytes`, which the kernel only reads.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
        match usize::try_from(sent) {
            Ok(sent) => return Ok(sent),
            Err(_) => interrupted()?,
        }
    }
}

/// recvmsg(2): bytes into `buffer`, and the descriptors that came with them. 0 bytes: the other end has closed.
pub(crate) fn recv(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    let mut control = Control([0; size_of::<Control>()]);
    let mut message = message(&mut part, &mut control, size_of::<Control>());
    let received = loop {
        // SAFETY: `message` points to `part` and `control`, which live to the end of the function; `part` points to
        // `buffer`, which is ours to write.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) };
        match usize::try_from(received) {
            Ok(received) => break received,
            Err(_) => interrupted()?,
        }
    };
    let mut fds = Vec::new();
    // SAFETY: the kernel has filled `control` with whole control messages of `msg_controllen` bytes; the macros walk
    // them. The data of one of type SCM_RIGHTS is descriptors that this process owns from now on, and nobody else knows.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while !header.is_null() {
            if ((*header).cmsg_level, (*header).cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let len = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                for at in 0..len / FD_LEN {
                    fds.push(OwnedFd::from_raw_fd(data.add(at).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
    }
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::other(
            "descriptors were lost on the way: this process may open no more of them",
        ));
    }
    Ok((received, fds))
}

/// `Ok` when the last call was merely interrupted.
fn interrupted() -> io::Result<()> {
    let error = io::Error::last_os_error();
    if error.kind() == io::ErrorKind::Interrupted { Ok(()) } else { Err(error) }
}
