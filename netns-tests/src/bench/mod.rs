//! `felt-lab bench`: felt beside the kernel's vxlan, plain routing and others, end to end, in one run.
//!
//! | Module | What it is |
//! |---|---|
//! | [`system`] | what is compared, each in a lab of its own |
//! | [`figure`] | what is measured |
//! | [`iperf`], [`flood`], [`latency`] | the load: iperf3 for TCP, own generators for UDP and latency |
//! | [`quiet`] | what other programs on the machine used meanwhile |
//! | [`report`] | medians, ratios, targets; table and JSON |
//! | [`plot`] | the plots |
//! | [`args`] | the command line |
//!
//! All labs are up at the same time and each measurement goes round them before the next begins, so that what changes
//! in the machine's minutes changes all systems alike; ratios are taken within a round. Every system carries a hashed
//! payload before anything is timed.

pub mod args;
pub mod figure;
pub mod flood;
pub mod iperf;
pub mod latency;
pub mod plot;
pub mod quiet;
pub mod report;
mod svg;
pub mod system;

use std::fs;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::bench::figure::{FULL_DATAGRAM, Probe, Value};
use crate::bench::report::{Machine, Report, Settings};
use crate::bench::system::{Bed, POD_MTU, System, UNDERLAY_MTU, Underlay};
use crate::traffic::{self, Tcp};

/// Takes of one measurement, when others disturb it.
const TAKES: usize = 3;

/// How to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Which systems.
    pub systems: Vec<System>,
    /// Over which underlays.
    pub underlays: Vec<Underlay>,
    /// Which measurements.
    pub probes: Vec<Probe>,
    /// Rounds.
    pub rounds: usize,
    /// Seconds of each measurement.
    pub seconds: u32,
    /// Nodes of each lab.
    pub nodes: usize,
    /// Share of the machine that other programs may use during a measurement, in percent.
    pub disturbed_percent: f64,
    /// Leave out what no target needs: the plain loop but for one figure, the wire-like underlay but for TCP.
    pub brief: bool,
    /// How long to wait for a quiet moment; zero takes what comes.
    pub patience: Duration,
    /// The flanneld to compare with.
    pub flanneld: Option<PathBuf>,
    /// Where the report goes as JSON.
    pub json: Option<PathBuf>,
    /// Directory for the plots.
    pub plots: Option<PathBuf>,
}

impl Options {
    /// Everything: five rounds, both underlays.
    pub fn full(streams: &[u32], nodes: usize, flanneld: Option<PathBuf>) -> Options {
        let mut probes: Vec<Probe> = streams.iter().map(|s| Probe::Tcp { streams: *s }).collect();
        probes.push(Probe::Both);
        if nodes > 2 {
            probes.push(Probe::FanOut);
        }
        let rates = [
            (64, [25_000, 50_000, 100_000, 200_000, 0]),
            (FULL_DATAGRAM, [10_000, 25_000, 50_000, 100_000, 0]),
        ];
        probes.extend(rates.into_iter().flat_map(|(size, r)| r.map(|rate| Probe::Udp { size, rate })));
        probes.extend([Probe::Latency, Probe::LoadedLatency]);
        let with_flannel = |s: &System| *s != System::FlannelUdp || flanneld.is_some();
        Options {
            systems: System::ALL.into_iter().filter(with_flannel).collect(),
            underlays: vec![Underlay::Veth, Underlay::Wire],
            probes,
            rounds: 5,
            seconds: 2,
            nodes,
            disturbed_percent: 5.0,
            brief: false,
            patience: Duration::from_secs(60),
            flanneld,
            json: None,
            plots: None,
        }
    }

    /// The figures with targets, in less than a minute, on a machine that need not be quiet.
    pub fn quick() -> Options {
        Options {
            systems: vec![System::KernelVxlan, System::FeltVxlan, System::FeltUdp, System::PlainLoop],
            probes: vec![
                Probe::Tcp { streams: 1 },
                Probe::Tcp { streams: 4 },
                Probe::Udp { size: 64, rate: 0 },
                Probe::Latency,
            ],
            underlays: vec![Underlay::Veth, Underlay::Wire],
            brief: true,
            rounds: 2,
            seconds: 1,
            patience: Duration::ZERO,
            ..Options::full(&[1, 4], 2, None)
        }
    }

    fn wants(&self, system: System, underlay: Underlay, probe: Probe) -> bool {
        let tcp = matches!(probe, Probe::Tcp { .. });
        let needed = match (system, underlay) {
            (System::PlainLoop, Underlay::Veth) => probe == Probe::Tcp { streams: 1 },
            (System::PlainLoop, _) => false,
            (_, Underlay::Veth) => true,
            _ => tcp,
        };
        needed || !self.brief
    }
}

fn note(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Runs, writes JSON and plots where asked, returns the report.
///
/// # Errors
/// When a lab cannot be built or a file not written. A measurement that fails is a problem in the report.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(options.nodes >= 2, "a bench needs two nodes");
    ensure!(options.rounds >= 1 && options.seconds >= 1, "a bench needs a round of a second");
    let mut beds = Vec::new();
    for system in &options.systems {
        note(&format!("building the lab of {}", system.label()));
        let bed = Bed::up(*system, options.nodes, options.flanneld.as_deref());
        beds.push(bed.with_context(|| format!("build the lab of {}", system.label()))?);
    }
    let mut run = Run {
        options,
        meter: quiet::Meter::default(),
        report: Report {
            version: 1,
            machine: Machine::here()?,
            settings: Settings {
                rounds: options.rounds,
                seconds: options.seconds,
                nodes: options.nodes,
                pod_mtu: POD_MTU,
                underlay_mtu: UNDERLAY_MTU,
                disturbed_percent: 0.0,
            },
            ..Report::default()
        },
    };
    for bed in &beds {
        run.meter.own(&bed.lab);
    }
    for underlay in &options.underlays {
        if *underlay == options.underlays[0] {
            run.idle(*underlay, &beds);
        }
        for bed in &beds {
            underlay.apply(&bed.lab)?;
            run.hash(*underlay, bed);
        }
        for round in 0..options.rounds {
            for probe in &options.probes {
                run.round(*underlay, round, *probe, &mut beds);
            }
        }
        run.memory(*underlay, &beds);
    }
    let mut report = run.report;
    report.finish();
    if let Some(file) = &options.json {
        let text = serde_json::to_string_pretty(&report).context("format the report")?;
        fs::write(file, text + "\n").with_context(|| format!("write {}", file.display()))?;
    }
    if let Some(dir) = &options.plots {
        plot::write_all(&report, dir)?;
    }
    Ok(report)
}

struct Run<'a> {
    options: &'a Options,
    meter: quiet::Meter,
    report: Report,
}

impl Run<'_> {
    /// Processors that strangers may use.
    #[expect(clippy::cast_precision_loss, reason = "a count of processors")]
    fn limit(&self) -> f64 {
        self.options.disturbed_percent / 100.0 * self.report.machine.cores as f64
    }

    /// One probe on every lab, each round beginning with another one.
    fn round(&mut self, underlay: Underlay, round: usize, probe: Probe, beds: &mut [Bed]) {
        let mut line =
            format!("{} round {}/{} {}:", underlay.id(), round + 1, self.options.rounds, probe.name());
        let count = beds.len();
        for i in 0..count {
            let bed = &mut beds[(i + round) % count];
            if !self.options.wants(bed.system, underlay, probe) {
                continue;
            }
            match self.quietly(bed, probe) {
                Ok(values) => {
                    if let Some(first) = values.first() {
                        line += &format!("  {} {}", bed.system, report::number(first.value));
                    }
                    self.report.add(underlay, bed.system, round, &values);
                }
                Err(e) => {
                    line += &format!("  {} FAILED", bed.system);
                    self.problem(&format!("{} {} {}: {e:#}", underlay.id(), probe.name(), bed.system));
                    if let Err(e) = bed.restart_servers() {
                        self.problem(&format!("{}: {e:#}", bed.system));
                    }
                }
            }
        }
        if line.ends_with(':') {
            return;
        }
        note(&line);
    }

    fn problem(&mut self, text: &str) {
        note(&format!("PROBLEM: {text}"));
        self.report.problems.push(text.to_owned());
    }

    /// Takes a measurement in a quiet moment, or the quietest of several.
    #[expect(clippy::cast_precision_loss, reason = "a count of processors")]
    fn quietly(&mut self, bed: &Bed, probe: Probe) -> Result<Vec<Value>> {
        let patient = !self.options.patience.is_zero();
        let mut best: Option<(f64, Vec<Value>)> = None;
        for _ in 0..if patient { TAKES } else { 1 } {
            if patient {
                self.meter.wait(self.limit(), self.options.patience);
            }
            let before = self.meter.read();
            let values = probe.take(bed, self.options.seconds)?;
            let disturbed = self.meter.since(before);
            if best.as_ref().is_none_or(|(least, _)| disturbed < *least) {
                best = Some((disturbed, values));
            }
            if disturbed <= self.limit() {
                break;
            }
        }
        let (disturbed, values) = best.context("no take")?;
        let percent = disturbed / self.report.machine.cores as f64 * 100.0;
        let worst = &mut self.report.settings.disturbed_percent;
        *worst = worst.max(percent);
        Ok(values)
    }

    /// What the daemons use while nothing happens.
    fn idle(&mut self, underlay: Underlay, beds: &[Bed]) {
        let before: Vec<_> = beds.iter().map(Bed::daemon_time).collect();
        let time = Duration::from_secs(if self.options.patience.is_zero() { 3 } else { 10 });
        std::thread::sleep(time);
        for (bed, before) in beds.iter().zip(before) {
            let count = bed.daemons().len();
            if count == 0 {
                continue;
            }
            let used = before.and_then(|b| Ok(bed.daemon_time()?.saturating_sub(b)));
            #[expect(clippy::cast_precision_loss, reason = "a count of daemons")]
            let percent = used.map(|u| u.as_secs_f64() / time.as_secs_f64() * 100.0 / count as f64);
            let title = "idle daemon's CPU, of one core";
            self.single(underlay, bed, "idle-cpu", title, "%", percent);
        }
    }

    /// What the daemons have needed at most.
    fn memory(&mut self, underlay: Underlay, beds: &[Bed]) {
        for bed in beds {
            #[expect(clippy::cast_precision_loss, reason = "a size for people")]
            if let Some(peak) = bed.peak_memory().transpose() {
                let mib = peak.map(|b| b as f64 / f64::from(1 << 20));
                self.single(underlay, bed, "memory", "peak memory of a daemon (VmHWM)", "MiB", mib);
            }
        }
    }

    fn single(
        &mut self,
        underlay: Underlay,
        bed: &Bed,
        figure: &str,
        title: &str,
        unit: &'static str,
        value: Result<f64>,
    ) {
        match value {
            Ok(value) => {
                let v = Value {
                    figure: figure.to_owned(),
                    title: title.to_owned(),
                    unit,
                    more_is_better: false,
                    value,
                };
                self.report.add(underlay, bed.system, 0, &[v]);
            }
            Err(e) => self.problem(&format!("{} {figure} {}: {e:#}", underlay.id(), bed.system)),
        }
    }

    /// What arrives is what was sent.
    fn hash(&mut self, underlay: Underlay, bed: &Bed) {
        let sent = bed.pair(0).and_then(|(from, to)| {
            let how = Tcp { bytes: 16 << 20, streams: 2, hash: true, ..Tcp::default() };
            traffic::tcp(&from.place, &to.place, to.v4()?, &how)
        });
        if let Err(e) = sent {
            self.problem(&format!("{} payload of {}: {e:#}", underlay.id(), bed.system));
        }
    }
}
