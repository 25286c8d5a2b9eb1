//! What runs inside a pod for [`crate::traffic`]: plain programs on plain sockets, one JSON report line each.
//!
//! A receiver binds a free port, prints its address, and ends when its standard input closes (or, for TCP, when all
//! connections have). Payloads come from fixed seeds, so that the receiver can tell damage without being sent a copy.

use std::io::{Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use sha2::{Digest, Sha256};

use crate::traffic::{LatencyReport, TcpReport, UdpReport};

/// A stalled connection is an error after this long.
const STALL: Duration = Duration::from_secs(20);
/// Bytes per write and read.
const CHUNK: usize = 128 * 1024;

/// SplitMix64 (Steele, Lea, Flood 2014): a well-mixed function of a counter, good enough for payloads.
fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn fill(buf: &mut [u8], stream: u64, counter: &mut u64) {
    for word in buf.chunks_mut(8) {
        let bytes = mix((stream << 48) ^ *counter).to_le_bytes();
        word.copy_from_slice(&bytes[..word.len()]);
        *counter += 1;
    }
}

pub(crate) fn say(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).context("write to standard output")
}

pub(crate) fn report(value: &impl serde::Serialize) -> Result<()> {
    say(&serde_json::to_string(value).context("format the report")?)
}

/// Set when standard input closes.
pub(crate) fn input_closed() -> Arc<AtomicBool> {
    let closed = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&closed);
    thread::spawn(move || {
        let mut sink = [0; 64];
        while matches!(std::io::stdin().read(&mut sink), Ok(n) if n > 0) {}
        flag.store(true, Ordering::Release);
    });
    closed
}

/// Accepts `streams` connections, reads them to their ends, reports.
///
/// # Errors
/// When a connection breaks or stalls.
pub fn tcp_serve(bind: IpAddr, streams: u32, hash: bool) -> Result<()> {
    let listener = TcpListener::bind((bind, 0)).with_context(|| format!("listen on {bind}"))?;
    say(&listener.local_addr().context("own address")?.to_string())?;
    let mut readers = Vec::new();
    for _ in 0..streams {
        let (stream, _) = listener.accept().context("accept")?;
        readers.push(thread::spawn(move || tcp_read(stream, hash)));
    }
    let mut all = Vec::new();
    for r in readers {
        all.push(r.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??);
    }
    all.sort_by_key(|r| r.stream);
    let begun = all.iter().map(|r| r.begun).min().context("no streams")?;
    let ended = all.iter().map(|r| r.ended).max().context("no streams")?;
    report(&TcpReport {
        bytes: all.iter().map(|r| r.bytes).sum(),
        seconds: (ended - begun).as_secs_f64(),
        hashes: all.into_iter().filter_map(|r| r.hash).collect(),
    })
}

struct Received {
    stream: u64,
    bytes: u64,
    hash: Option<String>,
    begun: Instant,
    ended: Instant,
}

fn tcp_read(mut stream: TcpStream, hash: bool) -> Result<Received> {
    stream.set_read_timeout(Some(STALL)).context("set a timeout")?;
    let mut number = [0; 8];
    stream.read_exact(&mut number).context("read the stream's number")?;
    let begun = Instant::now();
    let mut buf = vec![0; CHUNK];
    let mut hasher = hash.then(Sha256::new);
    let mut bytes = 0;
    loop {
        let n = stream.read(&mut buf).context("receive")?;
        if n == 0 {
            break;
        }
        bytes += n as u64;
        if let Some(h) = &mut hasher {
            h.update(&buf[..n]);
        }
    }
    let hash = hasher.map(|h| hex(&h.finalize()));
    Ok(Received { stream: u64::from_le_bytes(number), bytes, hash, begun, ended: Instant::now() })
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Opens `streams` connections and sends on each `bytes` (or for `seconds`), waits until all is acknowledged,
/// reports.
///
/// # Errors
/// When a connection fails, breaks or stalls.
pub fn tcp_send(to: SocketAddr, streams: u32, bytes: u64, seconds: f64, hash: bool) -> Result<()> {
    let begun = Instant::now();
    let mut writers = Vec::new();
    for number in 0..u64::from(streams) {
        let mut stream =
            TcpStream::connect_timeout(&to, STALL).with_context(|| format!("connect to {to}"))?;
        stream.set_write_timeout(Some(STALL)).context("set a timeout")?;
        stream.set_read_timeout(Some(STALL)).context("set a timeout")?;
        writers.push(thread::spawn(move || -> Result<(u64, Option<String>)> {
            stream.write_all(&number.to_le_bytes()).context("send")?;
            let mut buf = vec![0; CHUNK];
            let mut counter = 0;
            fill(&mut buf, number, &mut counter);
            let mut hasher = hash.then(Sha256::new);
            let end = begun + Duration::from_secs_f64(seconds);
            let mut sent = 0_u64;
            loop {
                let left = if bytes == 0 { u64::MAX } else { bytes - sent };
                if left == 0 || (bytes == 0 && Instant::now() >= end) {
                    break;
                }
                let n = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
                if let Some(h) = &mut hasher {
                    fill(&mut buf[..n], number, &mut counter);
                    h.update(&buf[..n]);
                }
                stream.write_all(&buf[..n]).context("send")?;
                sent += n as u64;
            }
            stream.shutdown(Shutdown::Write).context("finish")?;
            // The receiver closes when it has read everything.
            let _ = stream.read(&mut [0]).context("wait for the receiver")?;
            Ok((sent, hasher.map(|h| hex(&h.finalize()))))
        }));
    }
    let mut total = 0;
    let mut hashes = Vec::new();
    for w in writers {
        let (sent, hash) = w.join().map_err(|_| anyhow::anyhow!("a writer panicked"))??;
        total += sent;
        hashes.extend(hash);
    }
    report(&TcpReport { bytes: total, seconds: begun.elapsed().as_secs_f64(), hashes })
}

/// The 16 bytes in front of each datagram: its number and a function of it.
pub(crate) fn stamp(number: u64) -> [u8; 16] {
    let mut s = [0; 16];
    s[..8].copy_from_slice(&number.to_le_bytes());
    s[8..].copy_from_slice(&mix(number).to_le_bytes());
    s
}

/// Which numbers have arrived.
#[derive(Default)]
pub(crate) struct Seen {
    words: Vec<u64>,
}

impl Seen {
    /// Marks a number; tells whether it was new.
    pub(crate) fn insert(&mut self, number: u64) -> bool {
        let Ok(at) = usize::try_from(number / 64) else { return false };
        if at >= self.words.len() {
            self.words.resize(at + 1, 0);
        }
        let bit = 1 << (number % 64);
        let new = self.words[at] & bit == 0;
        self.words[at] |= bit;
        new
    }
}

/// Receives numbered datagrams until standard input closes, reports.
///
/// # Errors
/// When the socket cannot be made or fails.
pub fn udp_serve(bind: IpAddr, size: usize) -> Result<()> {
    let socket = UdpSocket::bind((bind, 0)).with_context(|| format!("bind {bind}"))?;
    // As much as the administrator allows: losses should be the network's, not this socket's.
    let _ = socket2::SockRef::from(&socket).set_recv_buffer_size(8 << 20);
    socket.set_read_timeout(Some(Duration::from_millis(50))).context("set a timeout")?;
    say(&socket.local_addr().context("own address")?.to_string())?;
    let closed = input_closed();
    let mut buf = vec![0; 65_536];
    let mut r = UdpReport::default();
    let mut seen = Seen::default();
    let (mut first, mut last, mut highest) = (None, None::<Instant>, None::<u64>);
    while !closed.load(Ordering::Acquire) {
        let Ok(n) = socket.recv(&mut buf) else { continue };
        let now = Instant::now();
        if let Some(last) = last {
            r.longest_gap = r.longest_gap.max((now - last).as_secs_f64());
        }
        first.get_or_insert(now);
        last = Some(now);
        let number = u64::from_le_bytes(buf[..8].try_into().context("eight bytes")?);
        let rest = number.to_le_bytes()[0];
        // 2^32 datagrams are more than any run sends; a higher number is damage.
        if n != size
            || number >> 32 != 0
            || buf[..16] != stamp(number)
            || buf[16..n].iter().any(|b| *b != rest)
        {
            r.damaged += 1;
            continue;
        }
        if !seen.insert(number) {
            r.duplicates += 1;
            continue;
        }
        r.received += 1;
        if highest.is_some_and(|h| number < h) {
            r.reordered += 1;
        } else {
            highest = Some(number);
        }
    }
    r.seconds = first.zip(last).map_or(0.0, |(a, b)| (b - a).as_secs_f64());
    report(&r)
}

/// Sends numbered datagrams at a rate (0 = without pause), reports.
///
/// # Errors
/// When the socket cannot be made. Failed sends are counted, not errors.
pub fn udp_send(to: SocketAddr, size: usize, rate: u32, seconds: f64) -> Result<()> {
    ensure!((16..=65_507).contains(&size), "a datagram has 16 to 65507 bytes");
    let any: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).context("bind")?;
    socket.connect(to).with_context(|| format!("connect to {to}"))?;
    let mut buf = vec![0; size];
    let mut r = UdpReport::default();
    let begun = Instant::now();
    let mut number = 0_u64;
    loop {
        let elapsed = begun.elapsed().as_secs_f64();
        if elapsed >= seconds {
            break;
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "elapsed and rate are not negative"
        )]
        let due = if rate == 0 { number + 64 } else { (elapsed * f64::from(rate)) as u64 + 1 };
        if number >= due {
            thread::sleep(
                Duration::from_micros(200).min(Duration::from_secs_f64(1.0 / f64::from(rate.max(1)))),
            );
            continue;
        }
        while number < due {
            buf[..16].copy_from_slice(&stamp(number));
            let rest = number.to_le_bytes()[0];
            buf[16..].fill(rest);
            match socket.send(&buf) {
                Ok(_) => r.sent += 1,
                Err(_) => r.send_errors += 1,
            }
            number += 1;
        }
    }
    r.seconds = begun.elapsed().as_secs_f64();
    report(&r)
}

/// Sends every datagram back until standard input closes.
///
/// # Errors
/// When the socket cannot be made.
pub fn echo_serve(bind: IpAddr) -> Result<()> {
    let socket = UdpSocket::bind((bind, 0)).with_context(|| format!("bind {bind}"))?;
    socket.set_read_timeout(Some(Duration::from_millis(200))).context("set a timeout")?;
    say(&socket.local_addr().context("own address")?.to_string())?;
    let closed = input_closed();
    let mut buf = [0; 2048];
    while !closed.load(Ordering::Acquire) {
        if let Ok((n, from)) = socket.recv_from(&mut buf) {
            let _ = socket.send_to(&buf[..n], from);
        }
    }
    Ok(())
}

/// Asks and waits for the answer, again and again, reports the distribution of the round trips.
///
/// # Errors
/// When no answer comes for a second.
pub fn echo_ask(to: SocketAddr, seconds: f64) -> Result<()> {
    let any: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).context("bind")?;
    socket.connect(to).with_context(|| format!("connect to {to}"))?;
    socket.set_read_timeout(Some(Duration::from_secs(1))).context("set a timeout")?;
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let mut times = Vec::new();
    let mut buf = [0; 64];
    while Instant::now() < end {
        let asked = Instant::now();
        socket.send(&[0x5a; 64]).context("send")?;
        socket.recv(&mut buf).context("wait for the answer")?;
        times.push(asked.elapsed());
    }
    times.sort_unstable();
    let at = |share: usize| {
        let i = (times.len() * share / 1000).min(times.len().saturating_sub(1));
        times.get(i).map_or(0.0, |t| t.as_secs_f64() * 1e6)
    };
    report(&LatencyReport { count: times.len() as u64, p50_us: at(500), p99_us: at(990) })
}

/// Bytes written as hexadecimal digits.
fn unhex(text: &str) -> Result<Vec<u8>> {
    let digits: Vec<u8> = text
        .trim()
        .chars()
        .map(|c| {
            c.to_digit(16).and_then(|d| u8::try_from(d).ok()).with_context(|| format!("bad hex {text:?}"))
        })
        .collect::<Result<_>>()?;
    ensure!(digits.len().is_multiple_of(2), "an odd number of hex digits: {text:?}");
    Ok(digits.chunks(2).map(|d| d[0] << 4 | d[1]).collect())
}

/// Sends each line of standard input, hexadecimal, as one datagram (an empty line as an empty one).
///
/// # Errors
/// When a line is not hexadecimal or a send fails.
pub fn send_hex(to: SocketAddr) -> Result<()> {
    let any: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).context("bind")?;
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("read standard input")?;
    for line in text.split('\n') {
        socket.send_to(&unhex(line)?, to).with_context(|| format!("send to {to}"))?;
    }
    Ok(())
}

/// Sends `count` datagrams nobody should send: half of them the golden ones of standard input (hexadecimal lines) with
/// bytes changed, cut or added, half of them noise. Prints how many the kernel took.
///
/// # Errors
/// When the input is not hexadecimal or the socket cannot be made.
pub fn hostile(to: SocketAddr, count: u64, seed: u64) -> Result<()> {
    let mut text = String::new();
    std::io::stdin().read_to_string(&mut text).context("read standard input")?;
    let golden: Vec<Vec<u8>> = text.lines().map(unhex).collect::<Result<_>>()?;
    ensure!(!golden.is_empty(), "no golden datagram on standard input");
    let any: IpAddr = if to.is_ipv4() { [0, 0, 0, 0].into() } else { [0_u16; 8].into() };
    let socket = UdpSocket::bind((any, 0)).context("bind")?;
    socket.connect(to).with_context(|| format!("connect to {to}"))?;
    let mut state = seed;
    let mut random = move |below: u64| {
        state = state.wrapping_add(1);
        mix(state) % below.max(1)
    };
    let byte = |n: u64| n.to_le_bytes()[0];
    let mut sent = 0_u64;
    for n in 0..count {
        let mut datagram;
        if n % 2 == 0 {
            let which = usize::try_from(random(golden.len() as u64)).unwrap_or(0);
            datagram = golden[which].clone();
            for _ in 0..=random(4) {
                let at = usize::try_from(random(datagram.len() as u64)).unwrap_or(0);
                match random(8) {
                    0 => datagram.truncate(at),
                    1 => datagram.extend((0..random(64)).map(byte)),
                    2 => datagram.insert(at, byte(random(256))),
                    _ => {
                        if let Some(b) = datagram.get_mut(at) {
                            *b ^= 1 << random(8);
                        }
                    }
                }
            }
        } else {
            let len = if random(50) == 0 { random(9000) } else { random(120) };
            datagram = (0..len).map(|_| byte(random(256))).collect();
        }
        if socket.send(&datagram).is_ok() {
            sent += 1;
        }
        // The receiver shall see them, not only its socket's overflow counter.
        if n % 64 == 63 {
            thread::sleep(Duration::from_micros(50));
        }
    }
    say(&sent.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_is_a_function_of_stream_and_position() {
        let (mut a, mut b, mut c) = ([0; 64], [0; 64], [0; 64]);
        fill(&mut a, 1, &mut 0);
        fill(&mut b, 1, &mut 0);
        fill(&mut c, 2, &mut 0);
        assert_eq!(a, b);
        assert_ne!(a, c);
    }

    #[test]
    fn seen_tells_new_from_old() {
        let mut seen = Seen::default();
        assert!(seen.insert(70) && seen.insert(0) && seen.insert(69));
        assert!(!seen.insert(70));
    }
}
