//! The only unsafe code of this crate: one function per system call, borrowed descriptors and
//! slices in, `io::Result` out. No policy and no retry beyond EINTR.

#![expect(unsafe_code, reason = "system calls without a safe wrapper in the standard library")]

pub(crate) mod rights;

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// statfs(2): the magic number of the file system that holds `path`.
pub(crate) fn fs_magic(path: &Path) -> io::Result<i64> {
    let path = c_path(path)?;
    // SAFETY: an all-zero statfs is a valid value of that plain struct of integers.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `path` is NUL-terminated and `stat` is writable; both outlive the call.
    check(unsafe { libc::statfs(path.as_ptr(), &mut stat) })?;
    #[allow(clippy::unnecessary_cast, reason = "the field's type differs between libc targets")]
    Ok(stat.f_type as i64)
}

/// setns(2) into a network namespace, for the calling thread.
pub(crate) fn setns_net(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the descriptor is open for the duration of the borrow; no memory is passed.
    check(unsafe { libc::setns(fd.as_raw_fd(), libc::CLONE_NEWNET) })
}

/// unshare(2) of the network namespace, for the calling thread.
pub(crate) fn unshare_net() -> io::Result<()> {
    // SAFETY: no memory is passed; only the calling thread's namespace changes.
    check(unsafe { libc::unshare(libc::CLONE_NEWNET) })
}

/// mount(2) with MS_BIND.
pub(crate) fn bind_mount(source: &Path, target: &Path) -> io::Result<()> {
    let (source, target) = (c_path(source)?, c_path(target)?);
    // SAFETY: both paths are NUL-terminated and outlive the call; a bind mount reads no type and no data.
    check(unsafe {
        libc::mount(source.as_ptr(), target.as_ptr(), std::ptr::null(), libc::MS_BIND, std::ptr::null())
    })
}

/// umount2(2) with MNT_DETACH.
pub(crate) fn unmount(target: &Path) -> io::Result<()> {
    let target = c_path(target)?;
    // SAFETY: the path is NUL-terminated and outlives the call.
    check(unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) })
}

/// poll(2) for input; `Ok(false)` when `timeout_ms` passed (negative: wait for ever).
pub(crate) fn poll_in(fd: BorrowedFd<'_>, timeout_ms: i32) -> io::Result<bool> {
    let mut entry = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: `entry` is one initialised pollfd and the count says one.
    let ready = unsafe { libc::poll(&mut entry, 1, timeout_ms) };
    check(ready)?;
    Ok(ready > 0)
}

/// Lends the descriptor of a value that owns one but knows only the raw interface.
pub(crate) fn borrow_fd<T: AsRawFd>(owner: &T) -> BorrowedFd<'_> {
    // SAFETY: the lifetime of the result is that of the borrow of `owner`, which keeps its
    // descriptor open; the callers pass `netlink_sys::Socket`, which owns it until dropped.
    unsafe { BorrowedFd::borrow_raw(owner.as_raw_fd()) }
}

/// setsockopt(2) of the send buffer, beyond the system's limit where the right is there.
pub(crate) fn set_send_buffer(fd: BorrowedFd<'_>, bytes: usize) {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    for option in [libc::SO_SNDBUFFORCE, libc::SO_SNDBUF] {
        // SAFETY: the option's value is an int, and the length says so; the descriptor is open.
        let result = unsafe {
            libc::setsockopt(
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                std::ptr::from_ref(&value).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if result == 0 {
            return;
        }
    }
}

/// Sends one packet of an Ethernet protocol out of a link, through a packet socket that receives
/// nothing (protocol 0).
pub(crate) fn send_frame(ifindex: u32, ethertype: u16, to: [u8; 6], packet: &[u8]) -> io::Result<()> {
    let socket = open_packet_socket()?;
    send_packet(socket.as_fd(), ifindex, ethertype, to, packet)
}

/// socket(2) for packets without their Ethernet header, receiving nothing yet.
fn open_packet_socket() -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check(fd)?;
    // SAFETY: the call succeeded, so `fd` is open and nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn packet_address(ifindex: u32, ethertype: u16, to: [u8; 6]) -> io::Result<libc::sockaddr_ll> {
    // SAFETY: an all-zero sockaddr_ll is a valid value of that plain struct of integers.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as libc::c_ushort;
    address.sll_protocol = ethertype.to_be();
    address.sll_ifindex =
        libc::c_int::try_from(ifindex).map_err(|_| io::Error::from_raw_os_error(libc::ENODEV))?;
    address.sll_halen = 6;
    address.sll_addr[..6].copy_from_slice(&to);
    Ok(address)
}

/// socket(2) and bind(2) for packets of an Ethernet protocol on one link.
pub(crate) fn packet_socket(ifindex: u32, ethertype: u16) -> io::Result<OwnedFd> {
    let socket = open_packet_socket()?;
    let address = packet_address(ifindex, ethertype, [0; 6])?;
    // SAFETY: `address` is readable for the length of its type.
    check(unsafe {
        libc::bind(
            socket.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    })?;
    Ok(socket)
}

/// sendto(2) on a packet socket.
pub(crate) fn send_packet(
    socket: BorrowedFd<'_>,
    ifindex: u32,
    ethertype: u16,
    to: [u8; 6],
    packet: &[u8],
) -> io::Result<()> {
    let address = packet_address(ifindex, ethertype, to)?;
    // SAFETY: `packet` is readable for its length, `address` for the length of its type.
    let sent = unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            0,
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn signal_set(signals: &[libc::c_int]) -> libc::sigset_t {
    // SAFETY: an all-zero sigset_t is a valid (empty) value of that plain struct of integers.
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    for signal in signals {
        // SAFETY: `set` is initialised and writable.
        unsafe { libc::sigaddset(&mut set, *signal) };
    }
    set
}

/// pthread_sigmask(3): the calling thread, and threads made by it, no longer take the signals.
pub(crate) fn block_signals(signals: &[libc::c_int]) -> io::Result<()> {
    let set = signal_set(signals);
    // SAFETY: `set` is readable; the old mask is not asked for.
    match unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// sigwait(3) for one of the signals, which must be blocked.
pub(crate) fn wait_for_signal(signals: &[libc::c_int]) -> io::Result<()> {
    let set = signal_set(signals);
    let mut arrived = 0;
    // SAFETY: `set` is readable and `arrived` writable.
    match unsafe { libc::sigwait(&set, &mut arrived) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
