//! UDP at rates where one system call per datagram would make the generator the bottleneck.
//!
//! The sender hands its kernel up to [`BATCH`] datagrams per call (`sendmmsg`), the receiver takes as many
//! (`recvmmsg`). They are separate datagrams all the way: no segmentation offload is asked for, so that the network
//! sees what a program with many small messages makes of it. Each datagram carries its number and a function of it.

use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, MultiHeaders, SockaddrStorage, recvmmsg, sendmmsg, setsockopt, sockopt};
use serde::{Deserialize, Serialize};

use crate::generator::{Seen, input_closed, report, say, stamp};
use crate::netns::Place;
use crate::traffic::{Server, run_sender};

/// Datagrams per call.
pub const BATCH: usize = 64;
/// Receive buffer: losses should be the network's, not this socket's.
const RECEIVE_BUFFER: usize = 8 << 20;
/// The sender sleeps when fewer than this many datagrams are due, unless the rate is so low that this takes long.
const LEAST_BURST: u64 = 16;

/// What to send.
#[derive(Clone, Copy, Debug)]
pub struct Flood {
    /// Payload bytes, at least 16.
    pub size: u16,
    /// Datagrams a second; 0 = as fast as the sender can.
    pub rate: u32,
    /// For how long.
    pub seconds: f64,
}

/// What became of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct FloodReport {
    /// Datagrams the sender's kernel accepted.
    pub sent: u64,
    /// Datagrams the sender's kernel refused.
    pub refused: u64,
    /// Datagrams that arrived, each counted once.
    pub received: u64,
    /// Arrived twice.
    pub duplicates: u64,
    /// Arrived after one with a higher number.
    pub reordered: u64,
    /// Wrong length, number or check value.
    pub damaged: u64,
    /// Time of sending.
    pub seconds: f64,
}

impl FloodReport {
    /// Datagrams a second that were offered.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn offered(&self) -> f64 {
        (self.sent + self.refused) as f64 / self.seconds.max(1e-9)
    }

    /// Datagrams a second that arrived.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn delivered(&self) -> f64 {
        self.received as f64 / self.seconds.max(1e-9)
    }

    /// Share of the offered datagrams that did not arrive.
    pub fn loss(&self) -> f64 {
        if self.offered() > 0.0 { 1.0 - self.delivered() / self.offered() } else { 0.0 }
    }
}

/// Sends from one pod to another's address and returns both ends' counts.
///
/// # Errors
/// When a generator fails.
pub fn run(from: &Place, to: &Place, addr: IpAddr, how: Flood) -> Result<FloodReport> {
    let size = how.size.to_string();
    let mut server = Server::start(to, "flood-serve", addr, &["--size".to_owned(), size.clone()])?;
    let address = server.address().to_string();
    let words = [
        "flood-send",
        "--to",
        &address,
        "--size",
        &size,
        "--rate",
        &how.rate.to_string(),
        "--seconds",
        &how.seconds.to_string(),
    ];
    let sent: FloodReport =
        run_sender(from, &words, Duration::from_secs_f64(how.seconds) + Duration::from_secs(20))?;
    // Let what is still in queues arrive.
    thread::sleep(Duration::from_millis(100));
    server.end_of_input();
    let got: FloodReport = server.report(Duration::from_secs(10))?;
    Ok(FloodReport { sent: sent.sent, refused: sent.refused, seconds: sent.seconds, ..got })
}

/// Receives numbered datagrams until standard input closes, reports. Runs in a pod.
///
/// # Errors
/// When the socket cannot be made or fails.
pub fn serve(bind: IpAddr, size: usize) -> Result<()> {
    let socket = UdpSocket::bind((bind, 0)).with_context(|| format!("bind {bind}"))?;
    if setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER).is_err() {
        let _ = setsockopt(&socket, sockopt::RcvBuf, &RECEIVE_BUFFER);
    }
    socket.set_read_timeout(Some(Duration::from_millis(50))).context("set a timeout")?;
    say(&socket.local_addr().context("own address")?.to_string())?;
    let closed = input_closed();
    let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(BATCH, None);
    let mut buffers = vec![vec![0_u8; size + 1]; BATCH];
    let mut lengths = Vec::with_capacity(BATCH);
    let mut count = FloodReport::default();
    let mut seen = Seen::default();
    let mut highest = None;
    while !closed.load(Ordering::Acquire) {
        lengths.clear();
        {
            let mut slices: Vec<[IoSliceMut<'_>; 1]> =
                buffers.iter_mut().map(|b| [IoSliceMut::new(b)]).collect();
            let flags = MsgFlags::MSG_WAITFORONE;
            match recvmmsg(socket.as_raw_fd(), &mut headers, slices.iter_mut(), flags, None) {
                Ok(messages) => lengths.extend(messages.map(|m| m.bytes)),
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(e) => return Err(e).context("receive"),
            }
        }
        for (buf, len) in buffers.iter().zip(&lengths) {
            let number = u64::from_le_bytes(*buf.first_chunk().context("eight bytes")?);
            // 2^32 datagrams are more than any run sends; a higher number is damage.
            if *len != size || number >> 32 != 0 || buf[..16] != stamp(number) {
                count.damaged += 1;
            } else if !seen.insert(number) {
                count.duplicates += 1;
            } else {
                count.received += 1;
                if highest.is_some_and(|h| number < h) {
                    count.reordered += 1;
                } else {
                    highest = Some(number);
                }
            }
        }
    }
    report(&count)
}

/// Sends numbered datagrams at a rate (0 = without pause), reports. Runs in a pod.
///
/// # Errors
/// When the socket cannot be made. Refused datagrams are counted, not errors.
pub fn send(to: SocketAddr, size: usize, rate: u32, seconds: f64) -> Result<()> {
    ensure!((16..=65_507).contains(&size), "a datagram has 16 to 65507 bytes");
    let any: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).context("bind")?;
    socket.connect(to).with_context(|| format!("connect to {to}"))?;
    let mut headers = MultiHeaders::<SockaddrStorage>::preallocate(BATCH, None);
    let addresses = [None::<SockaddrStorage>; BATCH];
    let mut buffers = vec![vec![0x5a_u8; size]; BATCH];
    let mut count = FloodReport::default();
    let begun = Instant::now();
    let mut number = 0_u64;
    loop {
        let elapsed = begun.elapsed().as_secs_f64();
        if elapsed >= seconds {
            break;
        }
        let due = due(elapsed, rate, number);
        if due < LEAST_BURST.min(u64::from(rate / 1000).max(1)) {
            thread::sleep(Duration::from_micros(100));
            continue;
        }
        let burst = usize::try_from(due).unwrap_or(BATCH).min(BATCH);
        for (buf, n) in buffers.iter_mut().zip(number..).take(burst) {
            buf[..16].copy_from_slice(&stamp(n));
        }
        let slices: Vec<[IoSlice<'_>; 1]> = buffers.iter().take(burst).map(|b| [IoSlice::new(b)]).collect();
        match sendmmsg(
            socket.as_raw_fd(),
            &mut headers,
            slices.iter(),
            &addresses[..burst],
            [],
            MsgFlags::empty(),
        ) {
            Ok(sent) => {
                let sent = sent.count() as u64;
                count.sent += sent;
                number += sent;
            }
            Err(_) => {
                count.refused += 1;
                number += 1;
            }
        }
    }
    count.seconds = begun.elapsed().as_secs_f64();
    report(&count)
}

/// Datagrams that should have gone by now and have not.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "elapsed and rate are not negative"
)]
fn due(elapsed: f64, rate: u32, sent: u64) -> u64 {
    if rate == 0 { BATCH as u64 } else { ((elapsed * f64::from(rate)) as u64 + 1).saturating_sub(sent) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_decides_what_is_due() {
        assert_eq!(due(0.5, 1000, 0), 501);
        assert_eq!(due(0.5, 1000, 500), 1);
        assert_eq!(due(0.5, 1000, 501), 0);
        assert_eq!(due(0.5, 0, 1 << 40), BATCH as u64);
    }

    #[test]
    fn loss_is_what_was_offered_and_did_not_arrive() {
        let r =
            FloodReport { sent: 900, refused: 100, received: 500, seconds: 2.0, ..FloodReport::default() };
        assert!((r.offered() - 500.0).abs() < 1e-9 && (r.delivered() - 250.0).abs() < 1e-9);
        assert!((r.loss() - 0.5).abs() < 1e-9);
    }
}
