//! iperf3 as a load generator: the figure everybody can take again.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::cmd;
use crate::netns::{Place, Process};

/// A server in a pod, for one client at a time.
#[derive(Debug)]
pub struct Server {
    _process: Process,
}

impl Server {
    /// Starts it and waits until it listens.
    ///
    /// # Errors
    /// When iperf3 is missing or does not listen within five seconds.
    pub fn start(at: &Place, log: &std::path::Path) -> Result<Server> {
        ensure!(cmd::have("iperf3"), "iperf3 is missing (package iperf3)");
        let mut c = at.command("iperf3");
        c.args(["-s", "--forceflush"]);
        let process = at.spawn(c, log)?;
        cmd::wait_for("iperf3 to listen", Duration::from_secs(5), || {
            std::fs::read_to_string(log).ok()?.contains("listening").then_some(())
        })?;
        Ok(Server { _process: process })
    }
}

/// What arrived.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// Bytes received, both directions together.
    pub bytes: f64,
    /// Bits a second received.
    pub bits_per_second: f64,
}

/// Sends TCP to the server at `to`, with `bidirectional` also the other way at the same time.
///
/// # Errors
/// When iperf3 fails; with its own words.
pub fn tcp(from: &Place, to: &str, streams: u32, seconds: u32, bidirectional: bool) -> Result<Transfer> {
    let mut c = from.command("iperf3");
    c.args(["-J", "-c", to, "-t", &seconds.to_string(), "-P", &streams.to_string()]);
    if bidirectional {
        c.arg("--bidir");
    }
    let out = cmd::output(c, b"", Duration::from_secs(u64::from(seconds) + 15))?;
    let report: Value = serde_json::from_str(&out.stdout)
        .with_context(|| format!("iperf3 said {:?} {:?}", out.stdout, out.stderr))?;
    if let Some(error) = report["error"].as_str() {
        bail!("iperf3 from {} to {to}: {error}", from.name);
    }
    received(&report, bidirectional)
}

fn received(report: &Value, bidirectional: bool) -> Result<Transfer> {
    let sum = |name: &str| -> Result<Transfer> {
        let s = &report["end"][name];
        let number =
            |key: &str| s[key].as_f64().with_context(|| format!("iperf3 reported no end.{name}.{key}"));
        Ok(Transfer { bytes: number("bytes")?, bits_per_second: number("bits_per_second")? })
    };
    let mut all = sum("sum_received")?;
    if bidirectional {
        let back = sum("sum_received_bidir_reverse")?;
        all.bytes += back.bytes;
        all.bits_per_second += back.bits_per_second;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_directions_are_added() {
        let report = serde_json::json!({"end": {
            "sum_received": {"bytes": 100, "bits_per_second": 800.0},
            "sum_received_bidir_reverse": {"bytes": 50, "bits_per_second": 400.0},
        }});
        let one = received(&report, false).expect("a sum");
        assert_eq!(one, Transfer { bytes: 100.0, bits_per_second: 800.0 });
        let both = received(&report, true).expect("two sums");
        assert_eq!(both, Transfer { bytes: 150.0, bits_per_second: 1200.0 });
        assert!(received(&serde_json::json!({"end": {}}), false).is_err());
    }
}
