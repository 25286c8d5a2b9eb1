//! How much of the machine others used while something was measured.
//!
//! A figure taken while a compiler runs beside it says little. [`Meter`] adds up the processor time of every process
//! that is neither this one, nor its child, nor in one of its labs; the bench waits for quiet moments and keeps, of
//! several takes, the quietest.
//!
//! Invariant: the kernel's own threads (`ksoftirqd`) are nobody's, since they do the measured work. Time of processes
//! that have ended is found in their parents' sums.

use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::topology::Lab;

/// Clock ticks a second of `/proc/PID/stat` (`USER_HZ`, 100 on every architecture Linux still has).
const TICKS: f64 = 100.0;

/// Adds up what strangers use.
#[derive(Debug, Default)]
pub struct Meter {
    own: HashSet<PathBuf>,
}

/// A reading of the clock and of the strangers' sum.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    at: Instant,
    ticks: u64,
}

impl Meter {
    /// Counts the processes of this lab as ours.
    pub fn own(&mut self, lab: &Lab) {
        let holders = lab.nodes.iter().map(|n| n.place.holder.pid);
        self.own.extend(holders.filter_map(|pid| fs::read_link(format!("/proc/{pid}/ns/pid")).ok()));
    }

    /// A reading to compare a later one with.
    pub fn read(&self) -> Reading {
        Reading { at: Instant::now(), ticks: self.ticks() }
    }

    /// Processors that strangers kept busy since `from`, on average.
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn since(&self, from: Reading) -> f64 {
        let ticks = self.ticks().saturating_sub(from.ticks) as f64;
        ticks / TICKS / from.at.elapsed().as_secs_f64().max(1e-3)
    }

    /// Waits until strangers use less than `limit` processors, at most `patience`; whether they do.
    pub fn wait(&self, limit: f64, patience: Duration) -> bool {
        let end = Instant::now() + patience;
        loop {
            let before = self.read();
            thread::sleep(Duration::from_millis(200));
            if self.since(before) <= limit {
                return true;
            }
            if Instant::now() >= end {
                return false;
            }
        }
    }

    fn ticks(&self) -> u64 {
        let me = std::process::id();
        let Ok(dir) = fs::read_dir("/proc") else { return 0 };
        let pids = dir.flatten().filter_map(|e| e.file_name().to_str()?.parse::<u32>().ok());
        let strangers = pids.filter(|pid| *pid != me).filter_map(|pid| {
            let (parent, ticks) = stat(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
            // 2 is kthreadd, the parent of the kernel's threads.
            if parent == me || parent == 2 || pid == 2 {
                return None;
            }
            let ours = fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|ns| self.own.contains(&ns));
            (!ours).then_some(ticks)
        });
        strangers.sum()
    }
}

/// Parent, and user, system and waited-for children's ticks, of a line of `/proc/PID/stat`.
fn stat(line: &str) -> Option<(u32, u64)> {
    // The name in parentheses may hold anything; fields count from behind its end.
    let fields: Vec<&str> = line.get(line.rfind(')')? + 2..)?.split(' ').collect();
    let ticks = fields.get(11..15)?.iter().map(|f| f.parse::<u64>().unwrap_or(0)).sum();
    Some((fields.get(1)?.parse().ok()?, ticks))
}

/// Processor time that all processors together were not idle since boot, interrupts included.
///
/// # Errors
/// When `/proc/stat` cannot be read.
pub fn machine_busy() -> Result<Duration> {
    let text = fs::read_to_string("/proc/stat").context("read /proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let fields: Vec<u64> = line.split_whitespace().skip(1).filter_map(|f| f.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let busy: u64 =
        fields.iter().take(8).enumerate().filter(|(i, _)| *i != 3 && *i != 4).map(|(_, t)| t).sum();
    Ok(Duration::from_millis(busy * 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_line_with_an_odd_name_is_read() {
        let line = "12 (a) b (c) S 7 1 1 0 -1 4194560 100 200 0 0 3 4 5 6 20 0 1 0 99 1000 10";
        assert_eq!(stat(line), Some((7, 18)));
        assert_eq!(stat("nonsense"), None);
    }

    #[test]
    fn a_stranger_is_seen_and_a_child_is_not() {
        let meter = Meter::default();
        let before = meter.read();
        // The shell's child burns: its parent is not this process.
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sh -c 'while :; do :; done' & b=$!; sleep 0.5; kill $b; wait"])
            .spawn()
            .expect("sh starts");
        thread::sleep(Duration::from_millis(400));
        let seen = meter.since(before);
        let _ = child.wait();
        assert!(seen > 0.1, "{seen} processors");
    }
}
