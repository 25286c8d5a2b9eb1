//! `felt-lab bench` on the command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use crate::bench::Options;
use crate::bench::figure::Probe;
use crate::bench::system::{System, Underlay};

/// The arguments.
#[derive(Args, Clone, Debug)]
pub struct Bench {
    /// The figures with targets only, in less than a minute, without waiting for quiet
    #[arg(long)]
    pub quick: bool,
    /// The report as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Plots as SVG files
    #[arg(long, value_name = "DIR")]
    pub plots: Option<PathBuf>,
    /// Draw the plots of an earlier run's JSON and print its table, measure nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["quick", "json"])]
    pub redraw: Option<PathBuf>,
    /// A flanneld to compare with (etcd is started for it)
    #[arg(long, value_name = "PATH")]
    pub flanneld: Option<PathBuf>,
    /// Numbers of parallel TCP connections
    #[arg(long, value_delimiter = ',', default_values_t = [1, 4])]
    pub streams: Vec<u32>,
    /// Nodes; with more than two also TCP to all others at once
    #[arg(long, default_value_t = 2)]
    pub nodes: usize,
    /// Rounds (5; quick: 2)
    #[arg(long)]
    pub rounds: Option<usize>,
    /// Seconds of each measurement (2; quick: 1)
    #[arg(long)]
    pub seconds: Option<u32>,
    /// Only these systems: plain, kernel-vxlan, felt-vxlan, felt-udp, felt-vxlan-off, felt-udp-off, plain-loop, flannel-udp
    #[arg(long, value_delimiter = ',', value_parser = system)]
    pub systems: Vec<System>,
    /// Only these underlays: veth, wire, wire-gro
    #[arg(long, value_delimiter = ',', value_parser = underlay)]
    pub underlays: Vec<Underlay>,
    /// Only measurements whose name begins with one of these: tcp, tcp1, tcp-both, udp64, udpfull, latency
    #[arg(long, value_delimiter = ',')]
    pub figures: Vec<String>,
    /// Share of the machine that other programs may use during a measurement
    #[arg(long, value_name = "PERCENT")]
    pub disturbed: Option<f64>,
    /// Seconds to wait for a quiet moment before each measurement, 0 = take what comes
    #[arg(long)]
    pub patience: Option<u64>,
    /// Fail when a figure is less than half as good as it must be
    #[arg(long)]
    pub check: bool,
}

fn system(id: &str) -> Result<System> {
    System::by_id(id).context("no such system")
}

fn underlay(id: &str) -> Result<Underlay> {
    Underlay::by_id(id).context("no such underlay")
}

impl Bench {
    /// What they ask for.
    pub fn options(&self) -> Options {
        let mut o = if self.quick {
            Options::quick()
        } else {
            Options::full(&self.streams, self.nodes, self.flanneld.clone())
        };
        o.json.clone_from(&self.json);
        o.plots.clone_from(&self.plots);
        o.rounds = self.rounds.unwrap_or(o.rounds);
        o.seconds = self.seconds.unwrap_or(o.seconds);
        o.disturbed_percent = self.disturbed.unwrap_or(o.disturbed_percent);
        o.patience = self.patience.map_or(o.patience, Duration::from_secs);
        if !self.systems.is_empty() {
            o.systems.clone_from(&self.systems);
        }
        if !self.underlays.is_empty() {
            o.underlays.clone_from(&self.underlays);
        }
        if !self.figures.is_empty() {
            o.probes.retain(|p: &Probe| self.figures.iter().any(|f| p.name().starts_with(f)));
        }
        o
    }
}
