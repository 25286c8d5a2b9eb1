//! Traffic between pods: ping, TCP with a payload hash, paced and numbered UDP, request and response.
//!
//! The generators are `felt-lab gen ...` processes inside the pods' namespaces, so that senders and receivers are
//! ordinary programs on ordinary sockets; they report one JSON line. This module starts them and reads the reports;
//! what runs inside the pods is in [`crate::generator`].

use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::cmd;
use crate::netns::{NODE_BIN, Place, Process};

/// Whether one ping is answered within a second.
pub fn reaches(from: &Place, to: IpAddr) -> bool {
    ping(from, to, &Ping { timeout: Duration::from_secs(1), ..Ping::default() }).is_ok_and(|r| r.received > 0)
}

/// How to ping.
#[derive(Clone, Debug)]
pub struct Ping {
    /// Echo requests to send.
    pub count: u32,
    /// Between two of them.
    pub interval: Duration,
    /// ICMP payload bytes (`ping -s`); the IP packet is 28 (IPv6: 48) longer.
    pub payload: u16,
    /// May not be fragmented (`-M do`).
    pub dont_fragment: bool,
    /// For each answer.
    pub timeout: Duration,
}

impl Default for Ping {
    fn default() -> Ping {
        Ping {
            count: 1,
            interval: Duration::from_millis(20),
            payload: 56,
            dont_fragment: false,
            timeout: Duration::from_secs(1),
        }
    }
}

impl Ping {
    /// A single packet of exactly `mtu` bytes that may not be fragmented.
    pub fn full_size(mtu: u16, to: IpAddr) -> Ping {
        let headers = if to.is_ipv4() { 28 } else { 48 };
        Ping { payload: mtu - headers, dont_fragment: true, ..Ping::default() }
    }
}

/// What `ping` reported.
#[derive(Clone, Debug, Default)]
pub struct PingReport {
    /// Requests sent.
    pub sent: u32,
    /// Answers.
    pub received: u32,
    /// Round trips, shortest first.
    pub round_trips: Vec<Duration>,
    /// ICMP error lines: `From 10.244.1.0 icmp_seq=1 Destination Net Unreachable`.
    pub errors: Vec<String>,
    /// Everything it printed.
    pub text: String,
}

/// Runs `ping`. No answer is a report, not an error.
///
/// # Errors
/// When `ping` cannot run.
pub fn ping(from: &Place, to: IpAddr, how: &Ping) -> Result<PingReport> {
    let mut c = from.net_command("ping");
    c.args(["-n", "-c", &how.count.to_string()]);
    c.args(["-i", &format!("{:.3}", how.interval.as_secs_f64())]);
    c.args(["-W", &format!("{:.3}", how.timeout.as_secs_f64()), "-s", &how.payload.to_string()]);
    if how.dont_fragment {
        c.args(["-M", "do"]);
    }
    c.arg(to.to_string());
    let deadline = how.interval * how.count + how.timeout * 2 + Duration::from_secs(10);
    let out = cmd::output(c, b"", deadline).with_context(|| format!("ping from {}", from.name))?;
    let mut report = PingReport { text: format!("{}{}", out.stdout, out.stderr), ..PingReport::default() };
    for line in out.stdout.lines().chain(out.stderr.lines()) {
        if let Some(at) = line.find(" time=") {
            let number = line[at + 6..].split(' ').next().unwrap_or_default();
            if let Ok(ms) = number.parse::<f64>() {
                report.round_trips.push(Duration::from_secs_f64(ms / 1000.0));
            }
        }
        if line.contains(" packets transmitted") {
            let mut numbers = line.split([' ', ',']).filter_map(|w| w.parse::<u32>().ok());
            report.sent = numbers.next().unwrap_or(0);
            report.received = numbers.next().unwrap_or(0);
        }
        if line.starts_with("From ") || line.contains("Message too long") || line.contains("message too long")
        {
            report.errors.push(line.to_owned());
        }
    }
    ensure!(line_count_ok(&report), "ping from {} to {to} said: {}", from.name, report.text);
    report.round_trips.sort();
    Ok(report)
}

/// `ping` printed its summary (it does unless it could not run at all).
fn line_count_ok(report: &PingReport) -> bool {
    report.sent > 0 || !report.errors.is_empty() || report.text.contains("packets transmitted")
}

/// A bulk transfer's request.
#[derive(Clone, Debug)]
pub struct Tcp {
    /// Parallel connections.
    pub streams: u32,
    /// Bytes per connection; 0 = until `seconds` are over.
    pub bytes: u64,
    /// Duration when `bytes` is 0.
    pub seconds: f64,
    /// Hash what was sent and what arrived.
    pub hash: bool,
    /// Fail after this long.
    pub deadline: Duration,
}

impl Default for Tcp {
    fn default() -> Tcp {
        Tcp { streams: 1, bytes: 0, seconds: 1.0, hash: false, deadline: Duration::from_secs(60) }
    }
}

/// What arrived.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TcpReport {
    /// Bytes received on all connections.
    pub bytes: u64,
    /// From first byte to last, at the receiver.
    pub seconds: f64,
    /// SHA-256 of the stream, per connection in the order of their numbers, when asked for.
    pub hashes: Vec<String>,
}

impl TcpReport {
    /// Payload rate.
    pub fn gbit_per_second(&self) -> f64 {
        // Bytes fit f64's 53 bits for anything a lab moves.
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let bits = self.bytes as f64 * 8.0;
        bits / self.seconds.max(1e-9) / 1e9
    }
}

/// Sends TCP from one pod to another's address. With `hash`, both ends' hashes are compared.
///
/// # Errors
/// When a connection fails or breaks, hashes differ, or the deadline passes.
pub fn tcp(from: &Place, to: &Place, addr: IpAddr, how: &Tcp) -> Result<TcpReport> {
    let mut args = vec!["--streams".to_owned(), how.streams.to_string()];
    if how.hash {
        args.push("--hash".to_owned());
    }
    let server = Server::start(to, "tcp-serve", addr, &args)?;
    let mut c = from.command(&format!("{NODE_BIN}/felt-lab"));
    c.args(["gen", "tcp-send", "--to", &server.address.to_string(), "--bytes", &how.bytes.to_string()]);
    c.args(["--seconds", &how.seconds.to_string()]).args(&args);
    let sent =
        cmd::run_with(c, b"", how.deadline).with_context(|| format!("from {} to {}", from.name, to.name))?;
    let sent: TcpReport = serde_json::from_str(&sent).with_context(|| format!("sender's report {sent:?}"))?;
    let got: TcpReport = server.report(how.deadline)?;
    ensure!(got.bytes == sent.bytes, "{} bytes sent, {} arrived", sent.bytes, got.bytes);
    ensure!(
        got.hashes == sent.hashes,
        "the payload's hash differs: {:?} sent, {:?} arrived",
        sent.hashes,
        got.hashes
    );
    Ok(got)
}

/// A paced stream of numbered datagrams.
#[derive(Clone, Debug)]
pub struct Udp {
    /// Payload bytes, at least 16.
    pub size: u16,
    /// Datagrams a second; 0 = as fast as the sender can.
    pub rate: u32,
    /// For how long.
    pub seconds: f64,
}

impl Default for Udp {
    fn default() -> Udp {
        Udp { size: 64, rate: 1000, seconds: 1.0 }
    }
}

/// What became of them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct UdpReport {
    /// Datagrams the sender's kernel accepted.
    pub sent: u64,
    /// Datagrams that arrived, each counted once.
    pub received: u64,
    /// Arrived after one with a higher number.
    pub reordered: u64,
    /// Arrived twice.
    pub duplicates: u64,
    /// Wrong length or payload.
    pub damaged: u64,
    /// Sender's `send` calls that failed (an ICMP error, for example).
    pub send_errors: u64,
    /// From the first to the last arrival.
    pub seconds: f64,
    /// The longest time without an arrival, in seconds.
    pub longest_gap: f64,
}

impl UdpReport {
    /// Share of sent datagrams that did not arrive.
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    pub fn loss(&self) -> f64 {
        if self.sent == 0 { 0.0 } else { 1.0 - self.received as f64 / self.sent as f64 }
    }

    /// Arrivals a second.
    #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
    pub fn per_second(&self) -> f64 {
        self.received as f64 / self.seconds.max(1e-9)
    }
}

/// Sends UDP from one pod to another's address.
///
/// # Errors
/// When a generator fails.
pub fn udp(from: &Place, to: &Place, addr: IpAddr, how: &Udp) -> Result<UdpReport> {
    UdpFlow::start(from, to, addr, how)?.finish()
}

/// A UDP stream under way.
#[derive(Debug)]
pub struct UdpFlow {
    server: Server,
    sender: Process,
    lines: mpsc::Receiver<String>,
    seconds: f64,
}

impl UdpFlow {
    /// Starts receiver and sender.
    ///
    /// # Errors
    /// When one cannot be started.
    pub fn start(from: &Place, to: &Place, addr: IpAddr, how: &Udp) -> Result<UdpFlow> {
        let server = Server::start(to, "udp-serve", addr, &["--size".to_owned(), how.size.to_string()])?;
        let mut c = from.command(&format!("{NODE_BIN}/felt-lab"));
        c.args(["gen", "udp-send", "--to", &server.address.to_string(), "--size", &how.size.to_string()]);
        c.args(["--rate", &how.rate.to_string(), "--seconds", &how.seconds.to_string()]);
        c.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut sender = Process::start(c).with_context(|| format!("start the sender on {}", from.name))?;
        let lines = read_lines(&mut sender)?;
        Ok(UdpFlow { server, sender, lines, seconds: how.seconds })
    }

    /// Waits for the sender, tells the receiver that all was sent, returns both ends' counts.
    ///
    /// # Errors
    /// When an end fails.
    pub fn finish(mut self) -> Result<UdpReport> {
        let deadline = Duration::from_secs_f64(self.seconds) + Duration::from_secs(20);
        let sent: UdpReport = parse_report(&self.lines, deadline)?;
        self.sender.wait(Duration::from_secs(5))?;
        // Let what is still in queues arrive.
        std::thread::sleep(Duration::from_millis(100));
        self.server.end_of_input();
        let got: UdpReport = self.server.report(Duration::from_secs(10))?;
        Ok(UdpReport { sent: sent.sent, send_errors: sent.send_errors, ..got })
    }
}

/// Round-trip times of small requests over one connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LatencyReport {
    /// Round trips made.
    pub count: u64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
}

/// Measures request-response latency over UDP (64-byte messages, one at a time).
///
/// # Errors
/// When a generator fails or an answer does not come for a second.
pub fn latency(from: &Place, to: &Place, addr: IpAddr, seconds: f64) -> Result<LatencyReport> {
    let server = Server::start(to, "echo-serve", addr, &[])?;
    let mut c = from.command(&format!("{NODE_BIN}/felt-lab"));
    c.args(["gen", "echo-ask", "--to", &server.address.to_string(), "--seconds", &seconds.to_string()]);
    let text = cmd::run_with(c, b"", Duration::from_secs_f64(seconds) + Duration::from_secs(20))
        .with_context(|| format!("from {} to {}", from.name, to.name))?;
    serde_json::from_str(&text).with_context(|| format!("report {text:?}"))
}

/// A receiving generator.
#[derive(Debug)]
pub(crate) struct Server {
    process: Process,
    address: SocketAddr,
    lines: mpsc::Receiver<String>,
}

impl Server {
    pub(crate) fn start(at: &Place, what: &str, addr: IpAddr, args: &[String]) -> Result<Server> {
        let mut c = at.command(&format!("{NODE_BIN}/felt-lab"));
        c.args(["gen", what, "--bind", &addr.to_string()]).args(args);
        // The receiver ends when this pipe closes.
        c.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::start(c).with_context(|| format!("start {what} on {}", at.name))?;
        let lines = read_lines(&mut process)?;
        let first = lines
            .recv_timeout(Duration::from_secs(10))
            .with_context(|| format!("{what} on {} did not start", at.name))?;
        let address =
            first.trim().parse().with_context(|| format!("{what} on {} said {first:?}", at.name))?;
        Ok(Server { process, address, lines })
    }

    /// The address it receives on.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Closes its standard input: all was sent.
    pub(crate) fn end_of_input(&mut self) {
        drop(self.process.front().stdin.take());
    }

    pub(crate) fn report<T: for<'de> Deserialize<'de>>(&self, deadline: Duration) -> Result<T> {
        parse_report(&self.lines, deadline)
    }
}

/// Runs `felt-lab gen WORDS` to its end, returns its report.
pub(crate) fn run_sender<T: for<'de> Deserialize<'de>>(
    from: &Place,
    words: &[&str],
    deadline: Duration,
) -> Result<T> {
    let mut c = from.command(&format!("{NODE_BIN}/felt-lab"));
    c.arg("gen").args(words);
    let text = cmd::run_with(c, b"", deadline).with_context(|| format!("from {}", from.name))?;
    serde_json::from_str(&text).with_context(|| format!("report {text:?}"))
}

fn read_lines(process: &mut Process) -> Result<mpsc::Receiver<String>> {
    let out = process.front().stdout.take().context("no pipe")?;
    let (tx, rx) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(out).lines().map_while(std::result::Result::ok) {
            if tx.send(line).is_err() {
                break;
            }
        }
    });
    Ok(rx)
}

fn parse_report<T: for<'de> Deserialize<'de>>(
    lines: &mpsc::Receiver<String>,
    deadline: Duration,
) -> Result<T> {
    match lines.recv_timeout(deadline) {
        Ok(line) => serde_json::from_str(&line).with_context(|| format!("report {line:?}")),
        Err(mpsc::RecvTimeoutError::Timeout) => bail!("no report within {deadline:?}"),
        Err(mpsc::RecvTimeoutError::Disconnected) => bail!("the generator ended without a report"),
    }
}
