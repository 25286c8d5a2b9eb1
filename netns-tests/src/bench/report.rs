//! What a run found: the model behind table, JSON and plots, and the comparison with the targets.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::bench::figure::Value;
use crate::bench::system::{System, Underlay};

/// A whole run.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Version of this form.
    pub version: u32,
    /// Where it ran.
    pub machine: Machine,
    /// How it ran.
    pub settings: Settings,
    /// Every figure of every system, in the order they were first taken.
    pub rows: Vec<Row>,
    /// Figures with a target.
    pub targets: Vec<Target>,
    /// What went wrong.
    pub problems: Vec<String>,
}

/// The machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Machine {
    /// `uname -r`.
    pub kernel: String,
    /// Processor's name.
    pub cpu: String,
    /// Processors.
    pub cores: usize,
    /// Memory.
    pub memory_mib: u64,
}

/// The settings.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Settings {
    /// Rounds; each takes every figure of every system once.
    pub rounds: usize,
    /// Seconds of each measurement.
    pub seconds: u32,
    /// Nodes of each lab.
    pub nodes: usize,
    /// MTU of the pods, the same for all systems.
    pub pod_mtu: u16,
    /// MTU of the underlay.
    pub underlay_mtu: u16,
    /// The largest share of the machine's processors that other programs used during a kept measurement, in percent.
    pub disturbed_percent: f64,
}

/// One figure of one system over one underlay.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// `veth`, `wire` or `wire-gro`.
    pub underlay: String,
    /// `tcp1`.
    pub figure: String,
    /// For people.
    pub title: String,
    /// `Gbit/s`.
    pub unit: String,
    /// Whether more is better.
    pub more_is_better: bool,
    /// `felt-vxlan`.
    pub system: String,
    /// One number a round; a round that failed left none.
    pub values: Vec<Option<f64>>,
    /// Their median.
    pub median: f64,
    /// Median of the rounds' ratios to the kernel's vxlan.
    pub ratio: Option<f64>,
}

/// A figure with what it must and should reach.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Target {
    /// What.
    pub what: String,
    /// `felt-vxlan`.
    pub system: String,
    /// Found.
    pub value: f64,
    /// The bound.
    pub must: f64,
    /// What it should be.
    pub aim: f64,
    /// Whether more is better.
    pub more_is_better: bool,
    /// `x` for ratios, else a unit.
    pub unit: String,
}

impl Target {
    /// Whether `value` reaches `bound`.
    fn reaches(&self, bound: f64) -> bool {
        if self.more_is_better { self.value >= bound } else { self.value <= bound }
    }

    /// Whether it is what it must be.
    pub fn met(&self) -> bool {
        self.reaches(self.must)
    }

    /// Whether it is at least half as good as it must be: the bound of tests on machines that are not quiet.
    pub fn half_met(&self) -> bool {
        self.reaches(if self.more_is_better { self.must / 2.0 } else { self.must * 2.0 })
    }

    /// `aim`, `must` or `short`.
    pub fn verdict(&self) -> &'static str {
        match (self.reaches(self.aim), self.met()) {
            (true, _) => "aim",
            (false, true) => "must",
            (false, false) => "SHORT",
        }
    }
}

/// The middle of the numbers; the mean of the middle two when their count is even.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = sorted[(sorted.len() - 1) / 2];
    Some(f64::midpoint(lower, upper))
}

impl Report {
    /// Adds one round's values of one probe.
    pub fn add(&mut self, underlay: Underlay, system: System, round: usize, values: &[Value]) {
        for v in values {
            let at = self
                .rows
                .iter()
                .position(|r| r.underlay == underlay.id() && r.figure == v.figure && r.system == system.id());
            let at = at.unwrap_or_else(|| {
                self.rows.push(Row {
                    underlay: underlay.id().to_owned(),
                    figure: v.figure.clone(),
                    title: v.title.clone(),
                    unit: v.unit.to_owned(),
                    more_is_better: v.more_is_better,
                    system: system.id().to_owned(),
                    values: Vec::new(),
                    median: 0.0,
                    ratio: None,
                });
                self.rows.len() - 1
            });
            let values = &mut self.rows[at].values;
            values.resize(values.len().max(round + 1), None);
            values[round] = Some(v.value);
        }
    }

    /// Computes medians, ratios and targets from the values.
    pub fn finish(&mut self) {
        for i in 0..self.rows.len() {
            let row = &self.rows[i];
            let kernel = self.row(&row.underlay, &row.figure, System::KernelVxlan);
            let ratio = kernel.and_then(|k| ratio(row, k));
            let middle = median(row.values.iter().copied().flatten()).unwrap_or(0.0);
            self.rows[i].ratio = ratio;
            self.rows[i].median = middle;
        }
        self.targets = targets(self);
    }

    /// A row.
    pub fn row(&self, underlay: &str, figure: &str, system: System) -> Option<&Row> {
        self.rows.iter().find(|r| r.underlay == underlay && r.figure == figure && r.system == system.id())
    }

    /// Systems that have rows, in their usual order.
    pub fn systems(&self) -> Vec<System> {
        System::ALL.into_iter().filter(|s| self.rows.iter().any(|r| r.system == s.id())).collect()
    }

    /// Underlays that have rows, in their usual order.
    pub fn underlays(&self) -> Vec<Underlay> {
        Underlay::ALL.into_iter().filter(|u| self.rows.iter().any(|r| r.underlay == u.id())).collect()
    }

    /// Figures of an underlay in the order they were first taken: name, title and unit.
    fn figures(&self, underlay: Underlay) -> Vec<(String, String, String)> {
        let mut found: Vec<(String, String, String)> = Vec::new();
        // The offered rate is in the title; where it matters how much it was, the loss says it.
        let shown = |r: &&Row| r.underlay == underlay.id() && !r.figure.ends_with("-offered");
        for r in self.rows.iter().filter(shown) {
            if !found.iter().any(|(f, _, _)| *f == r.figure) {
                found.push((r.figure.clone(), r.title.clone(), r.unit.clone()));
            }
        }
        found
    }

    /// One line: where and how.
    pub fn headline(&self) -> String {
        let (m, s) = (&self.machine, &self.settings);
        format!(
            "Linux {}, {} x {}, {} MiB; {} nodes, {} rounds of {} s, medians; MTU {} in pods, {} on the underlay; other programs used at most {:.0} % of the machine",
            m.kernel,
            m.cores,
            m.cpu,
            m.memory_mib,
            s.nodes,
            s.rounds,
            s.seconds,
            s.pod_mtu,
            s.underlay_mtu,
            s.disturbed_percent
        )
    }

    /// The tables: a row for each figure, a column for each system, ratios to kernel vxlan in brackets.
    pub fn table(&self) -> String {
        let mut text = format!("{}\n", self.headline());
        let systems = self.systems();
        for underlay in self.underlays() {
            let mut lines = vec![vec![underlay.label().to_owned(), String::new()]];
            lines[0].extend(systems.iter().map(|s| s.label().to_owned()));
            for (figure, title, unit) in self.figures(underlay) {
                let mut cells = vec![title, unit];
                for s in &systems {
                    cells.push(self.row(underlay.id(), &figure, *s).map_or_else(|| "-".to_owned(), cell));
                }
                lines.push(cells);
            }
            text.push('\n');
            text.push_str(&columns(&lines));
        }
        if !self.targets.is_empty() {
            text.push('\n');
            text.push_str(&self.target_table());
        }
        for p in &self.problems {
            let _ = writeln!(text, "PROBLEM: {p}");
        }
        text
    }

    fn target_table(&self) -> String {
        let mut lines = vec![["target", "system", "found", "must", "aim", ""].map(str::to_owned).to_vec()];
        for t in &self.targets {
            let sign = if t.more_is_better { ">=" } else { "<=" };
            lines.push(vec![
                t.what.clone(),
                t.system.clone(),
                format!("{} {}", number(t.value), t.unit),
                format!("{sign} {}", number(t.must)),
                format!("{sign} {}", number(t.aim)),
                t.verdict().to_owned(),
            ]);
        }
        columns(&lines)
    }
}

/// Median of the rounds' ratios: what changes from round to round changes both alike.
fn ratio(row: &Row, base: &Row) -> Option<f64> {
    let pairs = row.values.iter().zip(&base.values);
    median(pairs.filter_map(|(a, b)| Some(a.as_ref()? / b.filter(|b| *b > 0.0)?)))
}

fn cell(row: &Row) -> String {
    let middle = number(row.median);
    match row.ratio {
        Some(r) if row.system != System::KernelVxlan.id() => format!("{middle} ({r:.2})"),
        _ => middle,
    }
}

/// Three figures that mean something, thousands as `k`.
pub fn number(v: f64) -> String {
    match v.abs() {
        a if a >= 10_000.0 => format!("{:.0}k", v / 1000.0),
        a if a >= 100.0 => format!("{v:.0}"),
        a if a >= 10.0 => format!("{v:.1}"),
        _ => format!("{v:.2}"),
    }
}

/// Text columns: the first left, the others right.
fn columns(lines: &[Vec<String>]) -> String {
    let count = lines.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count)
        .map(|c| lines.iter().filter_map(|l| l.get(c)).map(|s| s.chars().count()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for line in lines {
        let mut row = String::new();
        for (i, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let _ = if i == 0 { write!(row, "{cell:<width$}") } else { write!(row, "  {cell:>width$}") };
        }
        text.push_str(row.trim_end());
        text.push('\n');
    }
    text
}

/// The targets of a two-node run on two processors, where the figures for them were taken.
fn targets(report: &Report) -> Vec<Target> {
    const FELT: [System; 2] = [System::FeltVxlan, System::FeltUdp];
    let mut found = Vec::new();
    let mut ratio_target = |underlay: &str, figure: &str, what: &str, more, must, aim| {
        for system in FELT {
            if let Some(value) = report.row(underlay, figure, system).and_then(|r| r.ratio) {
                found.push(Target {
                    what: format!("{what}, {underlay}"),
                    system: system.id().to_owned(),
                    value,
                    must,
                    aim,
                    more_is_better: more,
                    unit: "x kernel vxlan".to_owned(),
                });
            }
        }
    };
    ratio_target("veth", "tcp1", "TCP, 1 stream", true, 0.65, 1.0);
    ratio_target("veth", "tcp4", "TCP, 4 streams", true, 0.50, 0.8);
    ratio_target("wire", "tcp1", "TCP, 1 stream", true, 0.80, 1.3);
    ratio_target("wire", "tcp4", "TCP, 4 streams", true, 0.75, 1.3);
    ratio_target("veth", "udp64-max", "UDP 64 B above capacity", true, 1.0, 2.0);
    ratio_target("veth", "latency-idle-p50", "round trip p50, idle", false, 4.0, 2.0);
    ratio_target("veth", "latency-idle-p99", "round trip p99, idle", false, 4.0, 2.0);
    for system in FELT {
        let pair = report.row("veth", "tcp1", system).zip(report.row("veth", "tcp1", System::PlainLoop));
        if let Some(value) = pair.and_then(|(felt, plain)| ratio(felt, plain)) {
            found.push(Target {
                what: "TCP, 1 stream, veth, against the plain loop".to_owned(),
                system: system.id().to_owned(),
                value,
                must: 15.0,
                aim: 30.0,
                more_is_better: true,
                unit: "x plain loop".to_owned(),
            });
        }
        for (figure, what, must, aim, unit) in
            [("memory", "peak memory under load", 30.0, 16.0, "MiB"), ("idle-cpu", "idle CPU", 0.3, 0.1, "%")]
        {
            let worst: BTreeMap<&str, f64> = report
                .rows
                .iter()
                .filter(|r| r.figure == figure && r.system == system.id())
                .map(|r| (r.underlay.as_str(), r.median))
                .collect();
            if let Some(value) = worst.into_values().max_by(f64::total_cmp) {
                found.push(Target {
                    what: what.to_owned(),
                    system: system.id().to_owned(),
                    value,
                    must,
                    aim,
                    more_is_better: false,
                    unit: unit.to_owned(),
                });
            }
        }
    }
    found
}

impl Machine {
    /// This machine.
    ///
    /// # Errors
    /// When /proc cannot be read.
    pub fn here() -> Result<Machine> {
        let read = |file: &str| fs::read_to_string(file).with_context(|| format!("read {file}"));
        let cpus = read("/proc/cpuinfo")?;
        let name = cpus.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
        let memory = read("/proc/meminfo")?;
        let kib =
            memory.lines().find_map(|l| l.strip_prefix("MemTotal:")?.trim().split(' ').next()?.parse().ok());
        Ok(Machine {
            kernel: read("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            cpu: name.map_or("unknown processor", |(_, n)| n.trim()).to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: kib.unwrap_or(0_u64) / 1024,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(figure: &str, value: f64) -> Value {
        Value { figure: figure.to_owned(), title: figure.to_owned(), unit: "x", more_is_better: true, value }
    }

    #[test]
    fn median_is_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([]), None);
    }

    #[test]
    fn ratio_is_taken_round_by_round() {
        let mut r = Report::default();
        for (round, kernel, felt) in [(0, 10.0, 5.0), (1, 2.0, 1.0), (2, 8.0, 8.0)] {
            r.add(Underlay::Veth, System::KernelVxlan, round, &[value("tcp1", kernel)]);
            r.add(Underlay::Veth, System::FeltVxlan, round, &[value("tcp1", felt)]);
        }
        r.finish();
        let row = r.row("veth", "tcp1", System::FeltVxlan).expect("a row");
        assert_eq!((row.median, row.ratio), (5.0, Some(0.5)));
        let target = r.targets.iter().find(|t| t.system == "felt-vxlan").expect("a target");
        assert_eq!((target.verdict(), target.met(), target.half_met()), ("SHORT", false, true));
    }

    #[test]
    fn failed_round_leaves_a_gap() {
        let mut r = Report::default();
        r.add(Underlay::Veth, System::KernelVxlan, 0, &[value("tcp1", 10.0)]);
        r.add(Underlay::Veth, System::KernelVxlan, 1, &[value("tcp1", 20.0)]);
        r.add(Underlay::Veth, System::FeltVxlan, 1, &[value("tcp1", 5.0)]);
        r.finish();
        let row = r.row("veth", "tcp1", System::FeltVxlan).expect("a row");
        assert_eq!((row.values.as_slice(), row.ratio), ([None, Some(5.0)].as_slice(), Some(0.25)));
    }

    #[test]
    fn numbers_have_three_digits() {
        let texts: Vec<String> = [0.1234, 12.34, 123.4, 64_000.0].into_iter().map(number).collect();
        assert_eq!(texts, ["0.12", "12.3", "123", "64k"]);
    }
}
