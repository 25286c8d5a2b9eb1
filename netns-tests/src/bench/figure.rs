//! What is measured: probes, and the figures each of them yields.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::bench::flood::{self, Flood};
use crate::bench::iperf;
use crate::bench::latency;
use crate::bench::quiet;
use crate::bench::system::{Bed, POD_MTU};

/// Payload of a datagram that fills the pods' MTU: without IPv4 and UDP headers.
pub const FULL_DATAGRAM: u16 = POD_MTU - 28;

/// A measurement that is taken as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Probe {
    /// TCP from the first pod to the second.
    Tcp {
        /// Connections.
        streams: u32,
    },
    /// TCP both ways at once, one connection each.
    Both,
    /// TCP from the first pod to every other node's pod at once, one connection each.
    FanOut,
    /// UDP at a rate.
    Udp {
        /// Payload bytes.
        size: u16,
        /// Datagrams a second offered; 0 = as many as the sender can.
        rate: u32,
    },
    /// Request and response, one at a time, nothing else.
    Latency,
    /// The same beside one TCP connection in the same direction.
    LoadedLatency,
}

/// One figure of one probe.
#[derive(Clone, Debug, PartialEq)]
pub struct Value {
    /// Which figure: `tcp1`.
    pub figure: String,
    /// For people: `TCP, 1 stream`.
    pub title: String,
    /// `Gbit/s`.
    pub unit: &'static str,
    /// Whether more is better.
    pub more_is_better: bool,
    /// The number.
    pub value: f64,
}

impl Value {
    fn new(figure: &str, title: &str, unit: &'static str, more_is_better: bool, value: f64) -> Value {
        Value { figure: figure.to_owned(), title: title.to_owned(), unit, more_is_better, value }
    }
}

/// `64 B`, or `full size`.
fn size_name(size: u16) -> String {
    if size == FULL_DATAGRAM { "full size".to_owned() } else { format!("{size} B") }
}

/// Name of the delivered-rate figure of an offered rate.
pub fn udp_figure(size: u16, rate: u32) -> String {
    let size = if size == FULL_DATAGRAM { "full".to_owned() } else { size.to_string() };
    if rate == 0 { format!("udp{size}-max") } else { format!("udp{size}-{rate}") }
}

impl Probe {
    /// For progress lines.
    pub fn name(self) -> String {
        match self {
            Probe::Tcp { streams } => format!("tcp{streams}"),
            Probe::Both => "tcp-both".to_owned(),
            Probe::FanOut => "tcp-fan-out".to_owned(),
            Probe::Udp { size, rate } => udp_figure(size, rate),
            Probe::Latency => "latency".to_owned(),
            Probe::LoadedLatency => "latency-loaded".to_owned(),
        }
    }

    /// Takes the measurement.
    ///
    /// # Errors
    /// When a generator or a daemon fails.
    pub fn take(self, bed: &Bed, seconds: u32) -> Result<Vec<Value>> {
        match self {
            Probe::Tcp { streams } => {
                let plural = if streams == 1 { "" } else { "s" };
                tcp(bed, &format!("tcp{streams}"), &format!("TCP, {streams} stream{plural}"), || {
                    let (from, to) = bed.pair(0)?;
                    iperf::tcp(&from.place, &to.v4()?.to_string(), streams, seconds, false)
                })
            }
            Probe::Both => tcp(bed, "tcp-both", "TCP, both ways at once", || {
                let (from, to) = bed.pair(0)?;
                iperf::tcp(&from.place, &to.v4()?.to_string(), 1, seconds, true)
            }),
            Probe::FanOut => tcp(bed, "tcp-fan-out", "TCP, to every node at once", || fan_out(bed, seconds)),
            Probe::Udp { size, rate } => udp(bed, size, rate, f64::from(seconds)),
            Probe::Latency => latency(bed, "idle", f64::from(seconds)),
            Probe::LoadedLatency => {
                let (from, to) = bed.pair(0)?;
                let to = to.v4()?.to_string();
                thread::scope(|scope| {
                    let load = scope.spawn(|| iperf::tcp(&from.place, &to, 1, seconds + 1, false));
                    thread::sleep(Duration::from_millis(300));
                    let values = latency(bed, "loaded", f64::from(seconds));
                    load.join().map_err(|_| anyhow::anyhow!("the load panicked"))?.context("the load")?;
                    values
                })
            }
        }
    }
}

/// A bulk transfer, and what it cost.
fn tcp(
    bed: &Bed,
    figure: &str,
    title: &str,
    transfer: impl FnOnce() -> Result<iperf::Transfer>,
) -> Result<Vec<Value>> {
    let (daemons, machine) = (bed.daemon_time()?, quiet::machine_busy()?);
    let done = transfer()?;
    let daemons = bed.daemon_time()? - daemons;
    let machine = quiet::machine_busy()?.saturating_sub(machine);
    let gigabytes = (done.bytes / 1e9).max(1e-9);
    Ok(vec![
        Value::new(figure, title, "Gbit/s", true, done.bits_per_second / 1e9),
        Value::new(
            &format!("{figure}-daemon-cpu"),
            "  CPU of the daemons",
            "s/GB",
            false,
            daemons.as_secs_f64() / gigabytes,
        ),
        Value::new(
            &format!("{figure}-machine-cpu"),
            "  CPU of the machine",
            "s/GB",
            false,
            machine.as_secs_f64() / gigabytes,
        ),
    ])
}

fn fan_out(bed: &Bed, seconds: u32) -> Result<iperf::Transfer> {
    let receivers = bed.lab.nodes.len() - 1;
    thread::scope(|scope| {
        let runs: Vec<_> = (0..receivers)
            .map(|r| {
                scope.spawn(move || {
                    let (from, to) = bed.pair(r)?;
                    iperf::tcp(&from.place, &to.v4()?.to_string(), 1, seconds, false)
                })
            })
            .collect();
        let mut sum = iperf::Transfer { bytes: 0.0, bits_per_second: 0.0 };
        for run in runs {
            let one = run.join().map_err(|_| anyhow::anyhow!("a sender panicked"))??;
            sum.bytes += one.bytes;
            sum.bits_per_second += one.bits_per_second;
        }
        Ok(sum)
    })
}

fn udp(bed: &Bed, size: u16, rate: u32, seconds: f64) -> Result<Vec<Value>> {
    let (from, to) = bed.pair(0)?;
    let r = flood::run(&from.place, &to.place, to.v4()?, Flood { size, rate, seconds })?;
    anyhow::ensure!(r.damaged == 0, "{} damaged datagrams arrived", r.damaged);
    let figure = udp_figure(size, rate);
    let offered = if rate == 0 { "all that can be sent".to_owned() } else { format!("{}k/s", rate / 1000) };
    let title = format!("UDP {}, offered {offered}", size_name(size));
    Ok(vec![
        Value::new(&figure, &title, "packets/s", true, r.delivered()),
        Value::new(
            &format!("{figure}-offered"),
            &format!("{title}: offered"),
            "packets/s",
            true,
            r.offered(),
        ),
        Value::new(&format!("{figure}-loss"), "  of these lost", "%", false, r.loss() * 100.0),
    ])
}

#[expect(clippy::cast_precision_loss, reason = "a share for people")]
fn latency(bed: &Bed, when: &str, seconds: f64) -> Result<Vec<Value>> {
    let (from, to) = bed.pair(0)?;
    let r = latency::run(&from.place, &to.place, to.v4()?, seconds)?;
    let lost = r.lost as f64 / (r.answered + r.lost) as f64 * 100.0;
    let when_title = if when == "idle" { "idle" } else { "beside TCP" };
    let value = |what: &str, title: &str, unit, value| {
        Value::new(
            &format!("latency-{when}-{what}"),
            &format!("round trip, {when_title}, {title}"),
            unit,
            false,
            value,
        )
    };
    let mut values = vec![value("p50", "p50", "us", r.p50_us), value("p99", "p99", "us", r.p99_us)];
    if when != "idle" {
        values.push(value("lost", "lost", "%", lost));
    }
    Ok(values)
}
