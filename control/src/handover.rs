//! Handover: a new daemon takes the packets over from the one that runs, without losing one.
//!
//! ```text
//!   successor                                     predecessor
//!   lease, table, all prepared
//!   POST /v1/handover, its wish            -->    409 why not, or 101
//!   "go"                                   -->    stops its packet threads; packets wait in the kernel
//!                                          <--    TUN queues, sockets and locks, as open files
//!   starts its threads on them
//!   "running"                              -->    leaves; without it, goes on itself
//! ```
//!
//! The open files themselves change hands, rather than new queues and sockets taking their place: what the kernel has
//! put into a queue or a socket stays there and is read by the successor, flows keep their queue and their socket, and
//! so nothing is lost or reordered. With a second set beside the first, the kernel would throw away what waits in the
//! first when that is closed.
//!
//! Invariant: one of the two holds every open file at any moment, and until the successor has said that it runs, the
//! predecessor is ready to go on. Called by [`crate::admin`] and [`crate::app`].

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use felt_dataplane::engine::Ends;
use felt_hostnet::rights::{recv_line, send_line};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

use crate::api;

/// The protocol's name in the `Upgrade` header.
pub const PROTOCOL: &str = "felt-handover";
/// Longest wait of either side for a step of the other.
const STEP_LIMIT: Duration = Duration::from_secs(5);
/// Longest line of the protocol in bytes.
const LINE_LIMIT: usize = 64 << 10;

/// What the successor would serve: must equal what the predecessor serves.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// [`api::VERSION`].
    pub version: u32,
    /// The successor's process, as it sees itself.
    pub pid: u32,
    /// Its subnet file.
    pub subnet_file: String,
    /// The lease it holds, `10.244.1.0-24`.
    pub lease: String,
    /// Its planes.
    pub planes: Vec<PlaneWish>,
}

/// One device with its packet engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaneWish {
    /// Device name.
    pub device: String,
    /// Address of the underlay sockets.
    pub bind: SocketAddr,
    /// Number of TUN queues and of sockets.
    pub workers: usize,
}

impl Wish {
    /// Why a daemon that serves `self` cannot be followed by one that wants `wish`.
    ///
    /// # Errors
    /// The first difference, in words.
    pub fn admit(&self, wish: &Self) -> Result<(), String> {
        let differs = |what: &str, here: &str, there: &str| {
            Err(format!("the running feltd has {what} {here} and its successor {there}; stop it first"))
        };
        if self.planes.is_empty() {
            return Err(
                "the running feltd moves no packets itself; stop it first, which interrupts nothing".into()
            );
        }
        if self.subnet_file != wish.subnet_file {
            return differs("subnet file", &self.subnet_file, &wish.subnet_file);
        }
        if self.lease != wish.lease {
            return differs("lease", &self.lease, &wish.lease);
        }
        let text = |planes: &[PlaneWish]| {
            let words = planes.iter().map(|p| format!("{} on {} (workers: {})", p.device, p.bind, p.workers));
            words.collect::<Vec<_>>().join(", ")
        };
        if self.planes != wish.planes {
            return differs("devices", &text(&self.planes), &text(&wish.planes));
        }
        Ok(())
    }
}

/// What changes hands.
#[derive(Debug, Default)]
pub struct Handed {
    /// The kernel's ends of each plane.
    pub planes: Vec<HandedPlane>,
    /// The device locks.
    pub locks: Vec<File>,
}

/// The ends of one device's workers.
#[derive(Debug)]
pub struct HandedPlane {
    /// Device name.
    pub device: String,
    /// One per worker.
    pub ends: Vec<Ends>,
}

/// The line that goes with the open files and says what is what, in their order: per plane and worker the TUN queue and
/// the socket, then the locks.
#[derive(Debug, Serialize, Deserialize)]
struct Inventory {
    planes: Vec<(String, usize)>,
    locks: usize,
}

impl Handed {
    fn send(&self, stream: &UnixStream) -> io::Result<()> {
        let planes = self.planes.iter().map(|plane| (plane.device.clone(), plane.ends.len())).collect();
        let line = serde_json::to_string(&Inventory { planes, locks: self.locks.len() })?;
        let ends = self.planes.iter().flat_map(|plane| &plane.ends);
        let mut fds: Vec<BorrowedFd<'_>> =
            ends.flat_map(|end| [end.queue.as_fd(), end.socket.as_fd()]).collect();
        fds.extend(self.locks.iter().map(|lock| lock.as_fd()));
        send_line(stream, &line, &fds)
    }

    fn receive(stream: &UnixStream) -> io::Result<Self> {
        let (line, fds) = recv_line(stream, LINE_LIMIT)?;
        let invalid =
            || io::Error::new(io::ErrorKind::InvalidData, format!("{line:?} with {} files", fds.len()));
        let inventory: Inventory = serde_json::from_str(&line).map_err(|_| invalid())?;
        let workers = inventory.planes.iter().map(|(_, workers)| *workers).sum::<usize>();
        if workers.checked_mul(2).and_then(|n| n.checked_add(inventory.locks)) != Some(fds.len()) {
            return Err(invalid());
        }
        let mut fds = fds.into_iter();
        let mut handed = Self::default();
        for (device, workers) in inventory.planes {
            let mut next = || fds.next().zip(fds.next()).map(|(queue, socket)| Ends { queue, socket });
            let ends = (0..workers).filter_map(|_| next()).collect();
            handed.planes.push(HandedPlane { device, ends });
        }
        handed.locks = fds.map(|fd: OwnedFd| File::from(fd)).collect();
        Ok(handed)
    }
}

/// A successor at the admin socket, on its way to the thread that owns the backend.
#[derive(Debug)]
pub struct Offer {
    /// What it would serve.
    pub wish: Wish,
    /// Whether it may, or why not.
    pub verdict: oneshot::Sender<Result<(), String>>,
    /// The connection, once the HTTP part is over.
    pub stream: oneshot::Receiver<UnixStream>,
}

/// Waits for "go", calls `release`, sends what it gave, waits for "running". Blocks for at most some seconds.
///
/// # Errors
/// What went wrong, with what was released, if it was: the caller goes on with it.
pub fn hand_over(
    stream: &UnixStream,
    release: impl FnOnce() -> Handed,
) -> Result<(), (io::Error, Option<Handed>)> {
    let begin = || {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(STEP_LIMIT))?;
        stream.set_write_timeout(Some(STEP_LIMIT))?;
        expect(stream, "go")
    };
    begin().map_err(|error| (error, None))?;
    let handed = release();
    match handed.send(stream).and_then(|()| expect(stream, "running")) {
        Ok(()) => Ok(()),
        Err(error) => Err((error, Some(handed))),
    }
}

fn expect(stream: &UnixStream, word: &str) -> io::Result<()> {
    let (line, _) = recv_line(stream, LINE_LIMIT)?;
    if line == word { Ok(()) } else { Err(io::Error::new(io::ErrorKind::InvalidData, format!("{line:?}"))) }
}

/// Why a successor could not take over.
#[derive(Debug, thiserror::Error)]
pub enum TakeOverError {
    /// The running daemon is of no use as a predecessor.
    #[error("take over from the running feltd: {0}")]
    Refused(String),
    /// The conversation broke; the running daemon goes on.
    #[error("take over from the running feltd: {0}")]
    Broken(#[from] io::Error),
}

/// The running daemon's end of the conversation, after it has agreed.
#[derive(Debug)]
pub struct Agreed {
    stream: UnixStream,
}

/// Asks the daemon at `socket` to hand over to one that serves `wish`. Blocks.
///
/// # Errors
/// See [`TakeOverError`].
pub fn ask(socket: &Path, wish: &Wish) -> Result<Agreed, TakeOverError> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(STEP_LIMIT))?;
    stream.set_write_timeout(Some(STEP_LIMIT))?;
    let body = serde_json::to_string(wish).map_err(io::Error::from)?;
    write!(
        stream,
        "POST /v1/handover HTTP/1.1\r\nHost: feltd\r\nConnection: upgrade\r\nUpgrade: {PROTOCOL}\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let head = read_head(&mut stream)?;
    let status = head.split(' ').nth(1).unwrap_or_default();
    if status == "101" {
        return Ok(Agreed { stream });
    }
    // A refusal is short and ends with the connection or the time-out.
    let mut body = Vec::new();
    let _ = (&stream).take(LINE_LIMIT as u64).read_to_end(&mut body);
    let reason = serde_json::from_slice::<api::Failure>(&body).map(|failure| failure.error);
    Err(TakeOverError::Refused(reason.unwrap_or_else(|_| format!("its answer is {status}"))))
}

/// Byte by byte, since a byte too many would be one of the handover's, and its open files lost with it.
fn read_head(stream: &mut UnixStream) -> io::Result<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
        if head.len() > LINE_LIMIT {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "an endless header"));
        }
    }
    Ok(String::from_utf8_lossy(&head).into_owned())
}

impl Agreed {
    /// From now on packets wait in the kernel: start soon.
    ///
    /// # Errors
    /// When the other end breaks off.
    pub fn go(&self) -> io::Result<Handed> {
        send_line(&self.stream, "go", &[])?;
        Handed::receive(&self.stream)
    }

    /// Packets flow here; the predecessor leaves.
    ///
    /// # Errors
    /// When it has taken the packets back.
    pub fn running(&self) -> io::Result<()> {
        send_line(&self.stream, "running", &[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish() -> Wish {
        Wish {
            version: api::VERSION,
            pid: 7,
            subnet_file: "/run/flannel/subnet.env".into(),
            lease: "10.244.1.0-24".into(),
            planes: vec![PlaneWish {
                device: "flannel.1".into(),
                bind: "0.0.0.0:8472".parse().unwrap(),
                workers: 1,
            }],
        }
    }

    fn handed() -> Handed {
        let file = || tempfile::tempfile().unwrap();
        let end = || Ends { queue: file().into(), socket: file().into() };
        Handed {
            planes: vec![
                HandedPlane { device: "flannel.1".into(), ends: vec![end(), end()] },
                HandedPlane { device: "flannel-v6.1".into(), ends: vec![end()] },
            ],
            locks: vec![file()],
        }
    }

    #[test]
    fn a_successor_must_serve_the_same() {
        wish().admit(&Wish { pid: 8, ..wish() }).unwrap();
        let mut other = wish();
        other.planes[0].workers = 2;
        assert!(wish().admit(&other).unwrap_err().contains("workers"));
        let other = Wish { lease: "10.244.2.0-24".into(), ..wish() };
        assert!(wish().admit(&other).unwrap_err().contains("10.244.2.0-24"));
        let other = Wish { subnet_file: "/run/b.env".into(), ..wish() };
        assert!(wish().admit(&other).unwrap_err().contains("/run/b.env"));
        assert!(Wish { planes: vec![], ..wish() }.admit(&wish()).is_err());
    }

    #[test]
    fn open_files_change_hands_in_order() {
        let (new, old) = UnixStream::pair().unwrap();
        let predecessor = std::thread::spawn(move || hand_over(&old, handed).map_err(|(error, _)| error));
        let agreed = Agreed { stream: new };
        let got = agreed.go().unwrap();
        let shape: Vec<_> =
            got.planes.iter().map(|plane| (plane.device.as_str(), plane.ends.len())).collect();
        assert_eq!((shape, got.locks.len()), (vec![("flannel.1", 2), ("flannel-v6.1", 1)], 1));
        agreed.running().unwrap();
        predecessor.join().unwrap().unwrap();
    }

    #[test]
    fn a_successor_that_dies_leaves_the_predecessor_with_everything() {
        let (new, old) = UnixStream::pair().unwrap();
        let predecessor = std::thread::spawn(move || hand_over(&old, handed));
        let agreed = Agreed { stream: new };
        drop(agreed.go().unwrap());
        drop(agreed);
        let (_, kept) = predecessor.join().unwrap().unwrap_err();
        assert_eq!(kept.unwrap().planes.len(), 2);

        // One that never says "go" has stopped nothing.
        let (new, old) = UnixStream::pair().unwrap();
        drop(new);
        let (_, kept) = hand_over(&old, || panic!("released for nothing")).unwrap_err();
        assert!(kept.is_none());
    }

    #[test]
    fn files_that_do_not_match_the_inventory_are_refused() {
        let (new, old) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        for line in [
            r#"{"planes":[["flannel.1",9223372036854775808]],"locks":1}"#,
            "{}",
            r#"{"planes":[],"locks":2}"#,
        ] {
            send_line(&old, line, &[file.as_fd()]).unwrap();
            assert!(Handed::receive(&new).is_err(), "{line}");
        }
    }
}
