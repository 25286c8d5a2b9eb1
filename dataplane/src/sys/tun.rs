//! `/dev/net/tun`: the ioctls of `linux/if_tun.h`, one function each.

#![expect(unsafe_code, reason = "ioctls")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::check;

/// Bytes of an interface name with its final zero, `IFNAMSIZ`.
pub(crate) const NAME_LEN: usize = libc::IFNAMSIZ;

/// What TUNSETOFFLOAD may be asked for; the values of `TUN_F_*`.
pub(crate) mod offload {
    pub(crate) const CSUM: u32 = libc::TUN_F_CSUM;
    pub(crate) const TSO4: u32 = libc::TUN_F_TSO4;
    pub(crate) const TSO6: u32 = libc::TUN_F_TSO6;
    pub(crate) const TSO_ECN: u32 = libc::TUN_F_TSO_ECN;
    pub(crate) const USO4: u32 = libc::TUN_F_USO4;
    pub(crate) const USO6: u32 = libc::TUN_F_USO6;
}

// struct ifreq of linux/if.h: name, and a union whose largest member is struct ifmap.
const _: () = assert!(size_of::<libc::ifreq>() == 40);

/// Opens the control device, nonblocking.
pub(crate) fn open() -> io::Result<OwnedFd> {
    let file: File =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun")?;
    Ok(file.into())
}

fn request(name: &[u8]) -> io::Result<libc::ifreq> {
    if name.len() >= NAME_LEN || name.contains(&0) {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: `ifreq` is plain data, for which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    Ok(request)
}

/// Attaches the descriptor to a device as one of its queues, creating the device if there is none. A name
/// with `%d` takes the first free number. Returns the device's name.
pub(crate) fn set_iff(fd: BorrowedFd<'_>, name: &str, flags: i32) -> io::Result<String> {
    let mut request = request(name.as_bytes())?;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which `request` is and which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) })?;
    name_of(&request)
}

fn name_of(request: &libc::ifreq) -> io::Result<String> {
    let name = request.ifr_name.iter().take_while(|c| **c != 0).map(|c| *c as u8).collect();
    String::from_utf8(name).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Name of the device that a descriptor is a queue of.
pub(crate) fn name(fd: BorrowedFd<'_>) -> io::Result<String> {
    let mut request = request(b"")?;
    // SAFETY: TUNGETIFF writes one `ifreq`, which `request` is and which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF as _, &raw mut request) })?;
    name_of(&request)
}

/// Whether the device outlives its last queue.
pub(crate) fn set_persist(fd: BorrowedFd<'_>, persist: bool) -> io::Result<()> {
    // SAFETY: TUNSETPERSIST takes its argument by value.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETPERSIST as _, libc::c_ulong::from(persist)) })?;
    Ok(())
}

/// Bytes of the virtio-net header in front of each packet.
pub(crate) fn set_vnet_hdr_len(fd: BorrowedFd<'_>, len: i32) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ reads one `int`, which `len` is and which outlives the call.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETVNETHDRSZ as _, &raw const len) })?;
    Ok(())
}

/// Which unfinished packets readers accept, see [`offload`]. Holds for the whole device.
pub(crate) fn set_offload(fd: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes its argument by value.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD as _, libc::c_ulong::from(offloads)) })?;
    Ok(())
}

/// Index of the interface of this name.
pub(crate) fn ifindex(name: &str) -> io::Result<u32> {
    let name = std::ffi::CString::new(name).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
    // SAFETY: the argument is a string that ends in zero and outlives the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(io::Error::last_os_error()),
        index => Ok(index),
    }
}

/// Length of the transmit queue in packets. `socket` is any socket of the network namespace.
pub(crate) fn set_txqueuelen(socket: BorrowedFd<'_>, name: &str, len: u32) -> io::Result<()> {
    let mut request = request(name.as_bytes())?;
    request.ifr_ifru.ifru_metric = i32::try_from(len).unwrap_or(i32::MAX);
    // SAFETY: SIOCSIFTXQLEN reads one `ifreq`, which `request` is and which outlives the call. Its member
    // ifr_qlen is an int at the place of ifr_metric.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFTXQLEN as _, &raw const request) })?;
    Ok(())
}
