//! Round trips of small requests, one at a time, where an answer may be lost: under load some are, and that is a
//! finding, not a failure.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::generator::report;
use crate::netns::Place;
use crate::traffic::{Server, run_sender};

/// Bytes of a request and of its answer.
const SIZE: usize = 64;
/// An answer that takes longer is lost.
const LOST_AFTER: Duration = Duration::from_millis(200);

/// The distribution of the round trips.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RoundTrips {
    /// Answers.
    pub answered: u64,
    /// Requests without an answer.
    pub lost: u64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
}

/// Asks from one pod at another's address.
///
/// # Errors
/// When a generator fails or nothing is answered.
pub fn run(from: &Place, to: &Place, addr: IpAddr, seconds: f64) -> Result<RoundTrips> {
    let server = Server::start(to, "echo-serve", addr, &[])?;
    let words = ["ask", "--to", &server.address().to_string(), "--seconds", &seconds.to_string()];
    let found: RoundTrips =
        run_sender(from, &words, Duration::from_secs_f64(seconds) + Duration::from_secs(20))?;
    ensure!(found.answered > 0, "none of {} requests was answered", found.lost);
    Ok(found)
}

/// Asks for some time, reports. Runs in a pod.
///
/// # Errors
/// When the socket fails.
pub fn ask(to: SocketAddr, seconds: f64) -> Result<()> {
    let any: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).context("bind")?;
    socket.connect(to).with_context(|| format!("connect to {to}"))?;
    socket.set_read_timeout(Some(LOST_AFTER)).context("set a timeout")?;
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut times = Vec::new();
    let (mut message, mut answer) = ([0x5a; SIZE], [0; SIZE]);
    let mut lost = 0;
    for number in 0_u64.. {
        if Instant::now() >= end {
            break;
        }
        message[..8].copy_from_slice(&number.to_le_bytes());
        let asked = Instant::now();
        socket.send(&message).context("send")?;
        loop {
            match socket.recv(&mut answer) {
                Ok(_) if answer == message => times.push(asked.elapsed()),
                // A late answer to an earlier request.
                Ok(_) => continue,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    lost += 1
                }
                Err(e) => return Err(e).context("receive"),
            }
            break;
        }
    }
    times.sort_unstable();
    let at = |share: usize| times.get(times.len() * share / 1000).map_or(0.0, |t| t.as_secs_f64() * 1e6);
    report(&RoundTrips { answered: times.len() as u64, lost, p50_us: at(500), p99_us: at(990) })
}
