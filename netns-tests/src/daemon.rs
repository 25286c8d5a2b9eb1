//! A node's `feltd` as a process: start, readiness, signals, and what it costs.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::cmd;
use crate::netns::{NODE_BIN, Place, Process};

/// Where flannel's users expect the lease, inside the node.
pub const SUBNET_ENV: &str = "/run/flannel/subnet.env";
/// The daemon's admin socket, inside the node.
pub const ADMIN_SOCKET: &str = "/run/felt/feltd.sock";

/// A running daemon. Dropping it kills it (with SIGKILL) unless it was detached.
#[derive(Debug)]
pub struct Daemon {
    place: Place,
    process: Process,
    log: PathBuf,
    started: Instant,
    ready_after: Option<Duration>,
    /// The file of an earlier run, by inode and time: each run renames a new one into place.
    earlier: Option<(u64, i64, i64)>,
}

impl Daemon {
    /// Starts `feltd ARGS` in the node. A subnet.env of an earlier run is left in place (the daemon reads it), and
    /// readiness is judged by its being written anew.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(place: &Place, args: &[String], log: &Path) -> Result<Daemon> {
        let mut command = place.command(&format!("{NODE_BIN}/feltd"));
        command.args(args);
        let earlier = identity(&place.path(SUBNET_ENV));
        let started = Instant::now();
        let process = place.spawn(command, log)?;
        Ok(Daemon {
            place: place.clone(),
            process,
            log: log.to_path_buf(),
            started,
            ready_after: None,
            earlier,
        })
    }

    /// Waits until the daemon has written subnet.env.
    ///
    /// # Errors
    /// When it ends before, or at the deadline; with the end of its log.
    pub fn wait_ready(&mut self, deadline: Duration) -> Result<()> {
        let file = self.place.path(SUBNET_ENV);
        let end = self.started + deadline;
        loop {
            let now = identity(&file);
            if now.is_some() && now != self.earlier {
                self.ready_after = Some(self.started.elapsed());
                return Ok(());
            }
            if !self.process.alive() {
                bail!(
                    "feltd on {} ended before it was ready; its log ends:\n{}",
                    self.place.name,
                    self.log_tail(20)
                );
            }
            if Instant::now() > end {
                bail!(
                    "feltd on {} was not ready after {deadline:?}; its log ends:\n{}",
                    self.place.name,
                    self.log_tail(20)
                );
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Time from start to readiness, once ready.
    pub fn ready_after(&self) -> Option<Duration> {
        self.ready_after
    }

    /// The daemon's process id as the host sees it.
    pub fn pid(&self) -> u32 {
        self.process.pid().pid
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        self.process.signal(name);
    }

    /// Whether it runs.
    pub fn alive(&self) -> bool {
        self.process.alive()
    }

    /// SIGTERM and wait.
    ///
    /// # Errors
    /// When it does not end within five seconds.
    pub fn stop(mut self) -> Result<ExitStatus> {
        self.process.signal("TERM");
        self.process
            .wait(Duration::from_secs(5))
            .with_context(|| format!("feltd on {} after SIGTERM", self.place.name))
    }

    /// `kill -9` and wait.
    ///
    /// # Errors
    /// When it does not end.
    pub fn kill(mut self) -> Result<()> {
        self.process.signal("KILL");
        self.process.wait(Duration::from_secs(5)).map(drop)
    }

    /// Waits for the daemon to end by itself.
    ///
    /// # Errors
    /// At the deadline.
    pub fn wait_end(&mut self, deadline: Duration) -> Result<ExitStatus> {
        self.process.wait(deadline)
    }

    /// Lets it outlive this value.
    pub fn detach(&mut self) {
        self.process.detach();
    }

    /// Everything it has written so far (standard output and error).
    pub fn log_text(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The last lines it has written.
    pub fn log_tail(&self, lines: usize) -> String {
        let text = self.log_text();
        let all: Vec<&str> = text.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// CPU time used so far (user and system, all threads).
    ///
    /// # Errors
    /// When it has ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        cpu_time(self.pid())
    }

    /// Peak resident memory in bytes (`VmHWM`).
    ///
    /// # Errors
    /// When it has ended.
    pub fn peak_memory(&self) -> Result<u64> {
        peak_memory(self.pid())
    }

    /// `felt ARGS -o json` asked on this daemon's node.
    ///
    /// # Errors
    /// When it fails or does not answer with JSON.
    pub fn felt_json(&self, args: &[&str]) -> Result<serde_json::Value> {
        felt_json(&self.place, args)
    }
}

/// Peak resident memory of a process in bytes (`VmHWM`).
///
/// # Errors
/// When it has ended.
pub fn peak_memory(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).context("read the process's status")?;
    let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")).context("no VmHWM")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().context("VmHWM is no number")?;
    Ok(kib * 1024)
}

/// Inode and modification time of a file.
fn identity(file: &Path) -> Option<(u64, i64, i64)> {
    let meta = fs::metadata(file).ok()?;
    Some((meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

/// CPU time of a process, from its scheduler statistics (nanoseconds; `/proc/PID/stat` has only ticks).
///
/// # Errors
/// When it has ended.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let mut sum = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task")).context("read the process's threads")?.flatten() {
        let text = fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
        sum += text.split(' ').next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(Duration::from_nanos(sum))
}

/// `felt ARGS -o json` on a node.
///
/// # Errors
/// When it fails or does not answer with JSON.
pub fn felt_json(place: &Place, args: &[&str]) -> Result<serde_json::Value> {
    let mut c = place.command(&format!("{NODE_BIN}/felt"));
    c.args(args).args(["-o", "json"]);
    let text = cmd::run(c).with_context(|| format!("on {}", place.name))?;
    serde_json::from_str(&text).with_context(|| format!("felt {}: not JSON: {text}", args.join(" ")))
}
