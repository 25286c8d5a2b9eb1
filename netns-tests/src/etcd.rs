//! A real etcd (Debian's `etcd-server`) in a lab's underlay namespace, and `etcdctl` beside it.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::cmd;
use crate::netns::{Place, Process};

/// A running etcd. Its data is on the namespace's own tmpfs and outlives a restart, not the lab.
#[derive(Debug)]
pub struct Etcd {
    place: Place,
    endpoint: String,
    log: std::path::PathBuf,
    process: Option<Process>,
}

impl Etcd {
    /// Starts etcd listening on `address`:2379 and waits until it answers.
    ///
    /// # Errors
    /// When it is not installed or does not answer within ten seconds.
    pub fn start(place: &Place, address: &str, log: &Path) -> Result<Etcd> {
        for (tool, package) in [("etcd", "etcd-server"), ("etcdctl", "etcd-client")] {
            ensure!(cmd::have(tool), "{tool} is missing (package {package})");
        }
        let endpoint = format!("http://{address}:2379");
        let mut etcd = Etcd { place: place.clone(), endpoint, log: log.to_path_buf(), process: None };
        etcd.resume()?;
        Ok(etcd)
    }

    /// Starts it again on the same data after [`Etcd::kill`].
    ///
    /// # Errors
    /// When it does not answer within ten seconds.
    pub fn resume(&mut self) -> Result<()> {
        let mut c = self.place.command("etcd");
        c.args(["--name", "lab", "--data-dir", "/var/lib/etcd"]);
        c.args(["--listen-client-urls", &format!("{},http://127.0.0.1:2379", self.endpoint)]);
        c.args(["--advertise-client-urls", &self.endpoint]);
        c.args([
            "--listen-peer-urls",
            "http://127.0.0.1:2380",
            "--initial-advertise-peer-urls",
            "http://127.0.0.1:2380",
        ]);
        c.args([
            "--initial-cluster",
            "lab=http://127.0.0.1:2380",
            "--heartbeat-interval",
            "50",
            "--election-timeout",
            "500",
        ]);
        self.process = Some(self.place.spawn(c, &self.log)?);
        cmd::wait_for("etcd to answer", Duration::from_secs(10), || {
            self.ctl(&["endpoint", "health", "--dial-timeout=200ms", "--command-timeout=300ms"]).ok()
        })
        .with_context(|| format!("its log is {}", self.log.display()))?;
        Ok(())
    }

    /// The URL clients in the lab use.
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    fn etcdctl(&self) -> Command {
        let mut c = self.place.command("etcdctl");
        c.env("ETCDCTL_API", "3").args(["--endpoints", "http://127.0.0.1:2379"]);
        c
    }

    /// Runs `etcdctl ARGS`.
    ///
    /// # Errors
    /// When it fails.
    pub fn ctl(&self, args: &[&str]) -> Result<String> {
        let mut c = self.etcdctl();
        c.args(args);
        cmd::run(c)
    }

    /// Writes a key without a lease.
    ///
    /// # Errors
    /// When etcd refuses.
    pub fn put(&self, key: &str, value: &str) -> Result<()> {
        self.ctl(&["put", "--", key, value]).map(drop)
    }

    /// Reads a key.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn get(&self, key: &str) -> Result<Option<String>> {
        let text = self.ctl(&["get", "--print-value-only", "--", key])?;
        Ok((!text.is_empty()).then(|| text.trim_end_matches('\n').to_owned()))
    }

    /// The keys that begin with `prefix`, in order.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn keys(&self, prefix: &str) -> Result<Vec<String>> {
        let text = self.ctl(&["get", "--prefix", "--keys-only", "--", prefix])?;
        Ok(text.lines().filter(|l| !l.is_empty()).map(str::to_owned).collect())
    }

    /// Deletes a key; tells whether it was there.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.ctl(&["del", "--", key])?.trim() == "1")
    }

    /// The store's revision.
    ///
    /// # Errors
    /// When etcd does not answer.
    pub fn revision(&self) -> Result<i64> {
        let text = self.ctl(&["get", "-w", "json", "--", "/no-such-key"])?;
        let json: serde_json::Value = serde_json::from_str(&text).context("etcdctl -w json")?;
        json["header"]["revision"].as_i64().context("no revision in the answer")
    }

    /// Forgets everything older than the store's revision.
    ///
    /// # Errors
    /// When etcd refuses.
    pub fn compact(&self) -> Result<()> {
        let revision = self.revision()?.to_string();
        self.ctl(&["compact", "--physical", &revision]).map(drop)
    }

    /// Writes `count` keys `prefix`0, `prefix`1, ... each in its own revision.
    ///
    /// # Errors
    /// When etcd refuses.
    pub fn churn(&self, prefix: &str, count: usize) -> Result<()> {
        // One process for all of them: etcdctl's start is dearer than its work.
        let body: String = (0..count).map(|i| format!("etcdctl put '{prefix}{i}' x >/dev/null\n")).collect();
        let mut c = self.place.command("sh");
        c.env("ETCDCTL_API", "3").env("ETCDCTL_ENDPOINTS", "http://127.0.0.1:2379").args(["-e"]);
        cmd::run_with(c, body.as_bytes(), Duration::from_secs(120)).map(drop)
    }

    /// Sends a signal by name.
    pub fn signal(&self, name: &str) {
        if let Some(p) = &self.process {
            p.signal(name);
        }
    }

    /// `kill -9`; the data stays.
    pub fn kill(&mut self) {
        self.process = None;
    }

    /// Lets it outlive this value.
    pub fn detach(&mut self) {
        if let Some(p) = &mut self.process {
            p.detach();
        }
    }
}
