//! Passing open files to another process over a Unix socket.
//!
//! The receiver gets descriptors of the same open files: queues with what waits in them, bound sockets, held locks.

use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::sys::rights;

/// The most descriptors of one message.
pub const MAX: usize = rights::MAX;

/// Sends a line of text, without line feeds in it, and descriptors, at most [`MAX`].
///
/// # Errors
/// As the kernel gives them; the other end may have got the descriptors and not the whole line.
pub fn send_line(socket: &UnixStream, line: &str, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = format!("{line}\n").into_bytes();
    let sent = rights::send(socket.as_fd(), &bytes, fds)?;
    (&*socket).write_all(&bytes[sent..])
}

/// Receives a line sent by [`send_line`], at most `limit` bytes, with its descriptors. Nothing beyond the line may be
/// under way. The socket's read time-out holds for each part.
///
/// # Errors
/// `UnexpectedEof` when the other end closed before the line's end, `InvalidData` when the line is longer than `limit` or
/// is no UTF-8, others as the kernel gives them.
pub fn recv_line(socket: &UnixStream, limit: usize) -> io::Result<(String, Vec<OwnedFd>)> {
    let (mut text, mut fds) = (Vec::new(), Vec::new());
    let mut buffer = [0; 4096];
    loop {
        let (received, more) = rights::recv(socket.as_fd(), &mut buffer)?;
        fds.extend(more);
        if received == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        text.extend_from_slice(&buffer[..received]);
        if text.last() == Some(&b'\n') {
            text.pop();
            return match String::from_utf8(text) {
                Ok(text) => Ok((text, fds)),
                Err(error) => Err(io::Error::new(io::ErrorKind::InvalidData, error)),
            };
        }
        if text.len() > limit {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a line beyond {limit} bytes")));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read as _, Seek as _};

    use super::*;

    #[test]
    fn a_line_arrives_with_descriptors_of_the_same_open_files() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut first = tempfile::tempfile().unwrap();
        let second = tempfile::tempfile().unwrap();
        second.try_lock().unwrap();
        first.write_all(b"waiting").unwrap();
        let long = "x".repeat(10_000);
        send_line(&here, &long, &[first.as_fd(), second.as_fd()]).unwrap();
        drop(second);
        let (text, fds) = recv_line(&there, 20_000).unwrap();
        assert_eq!((text == long, fds.len()), (true, 2));
        let mut got = File::from(fds.into_iter().next().unwrap());
        got.rewind().unwrap();
        let mut content = String::new();
        got.read_to_string(&mut content).unwrap();
        assert_eq!(content, "waiting");
    }

    #[test]
    fn a_line_without_descriptors_and_lines_that_never_end() {
        let (here, there) = UnixStream::pair().unwrap();
        send_line(&here, "go", &[]).unwrap();
        let (text, fds) = recv_line(&there, 10).unwrap();
        assert_eq!((text.as_str(), fds.len()), ("go", 0));
        (&here).write_all(&[b'x'; 100]).unwrap();
        assert_eq!(recv_line(&there, 10).unwrap_err().kind(), io::ErrorKind::InvalidData);
        drop(here);
        assert_eq!(recv_line(&there, 10).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn more_descriptors_than_the_kernel_passes_are_refused() {
        let (here, _there) = UnixStream::pair().unwrap();
        let too_many = vec![here.as_fd(); MAX + 1];
        assert!(send_line(&here, "many", &too_many).is_err());
        send_line(&here, "enough", &too_many[..MAX]).unwrap();
    }
}
