//! What the tests say again and again, as one-liners that panic with everything a reader needs.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use serde_json::Value;

use crate::cmd;
use crate::demo::admin;
use crate::kernel_node;
use crate::netns::{Lifetime, Place};
use crate::pod::Pod;
use crate::topology::{Lab, Spec};
use crate::traffic::{self, Ping, PingReport};

/// A lab, up and converged.
///
/// # Panics
/// When a step fails.
#[track_caller]
pub fn up(spec: Spec) -> Lab {
    match Lab::up(spec, Lifetime::Tied) {
        Ok(lab) => lab,
        Err(e) => panic!("{e:#}"),
    }
}

/// The value, or a panic with the whole chain of causes.
///
/// # Panics
/// On an error.
#[track_caller]
pub fn ok<T>(result: anyhow::Result<T>) -> T {
    match result {
        Ok(v) => v,
        Err(e) => panic!("{e:#}"),
    }
}

/// A pod by name.
///
/// # Panics
/// When there is none.
#[track_caller]
pub fn pod<'a>(lab: &'a Lab, name: &str) -> &'a Pod {
    ok(lab.pod(name))
}

/// One ping with these parameters.
///
/// # Panics
/// When `ping` cannot run.
#[track_caller]
pub fn ping(from: &Place, to: IpAddr, how: &Ping) -> PingReport {
    ok(traffic::ping(from, to, how))
}

/// Both pods reach each other by ping on every family, at full size without fragmentation too.
///
/// # Panics
/// When not.
#[track_caller]
pub fn both_ways(a: &Pod, b: &Pod, mtu: u16) {
    for (from, to) in [(a, b), (b, a)] {
        for addr in to.addresses() {
            for how in [Ping::default(), Ping::full_size(mtu, addr)] {
                let r = ping(&from.place, addr, &how);
                assert_eq!(
                    r.received, 1,
                    "{} to {} at {addr}, {} bytes: {}",
                    from.name, to.name, how.payload, r.text
                );
            }
        }
    }
}

/// Waits until a ping is answered.
///
/// # Panics
/// When none is within the deadline.
#[track_caller]
pub fn eventually_reaches(from: &Place, to: IpAddr, deadline: Duration) {
    ok(cmd::wait_for(&format!("{} to reach {to}", from.name), deadline, || {
        traffic::reaches(from, to).then_some(())
    }));
}

/// Waits until pings get an ICMP "unreachable" instead of silence, and returns its line.
///
/// # Panics
/// When none comes within the deadline.
#[track_caller]
pub fn eventually_unreachable(from: &Place, to: IpAddr, deadline: Duration) -> String {
    ok(cmd::wait_for(&format!("an ICMP answer about {to}"), deadline, || {
        let how = Ping { timeout: Duration::from_millis(400), ..Ping::default() };
        let r = traffic::ping(from, to, &how).ok()?;
        r.errors.into_iter().find(|l| l.to_ascii_lowercase().contains("unreachable"))
    }))
}

/// All counters of a node: `outbound.packets`, `inbound.drops.bad_vni`, `events.icmp_sent`, summed over its engines.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts(pub BTreeMap<String, u64>);

impl Counts {
    /// Asks a node's daemon.
    ///
    /// # Panics
    /// When it does not answer.
    #[track_caller]
    pub fn of(place: &Place) -> Counts {
        let answer = ok(admin(place, "/v1/counters"));
        let mut all = BTreeMap::new();
        for engine in answer["engines"].as_array().into_iter().flatten() {
            add("", engine, &mut all);
        }
        Counts(all)
    }

    /// A counter; 0 when it does not exist.
    pub fn get(&self, name: &str) -> u64 {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// What was added since an earlier look, without zeros.
    #[must_use]
    pub fn since(&self, earlier: &Counts) -> Counts {
        let grown = self.0.iter().map(|(k, v)| (k.clone(), v - earlier.get(k))).filter(|(_, v)| *v > 0);
        Counts(grown.collect())
    }

    /// Sum of the counters whose name begins so.
    pub fn sum(&self, prefix: &str) -> u64 {
        self.0.iter().filter(|(k, _)| k.starts_with(prefix)).map(|(_, v)| v).sum()
    }
}

fn add(path: &str, value: &Value, all: &mut BTreeMap<String, u64>) {
    match value {
        Value::Object(map) => {
            for (k, v) in map {
                let path = if path.is_empty() { k.clone() } else { format!("{path}.{k}") };
                add(&path, v, all);
            }
        }
        Value::Number(n) => {
            if let Some(n) = n.as_u64() {
                *all.entry(path.to_owned()).or_default() += n;
            }
        }
        _ => {}
    }
}

/// A node's lease in the registry, read without felt.
///
/// # Panics
/// When it has none.
#[track_caller]
pub fn lease(lab: &Lab, node: usize) -> kernel_node::FoundLease {
    let ip = lab.nodes[node].ip.to_string();
    let all = ok(kernel_node::leases(lab));
    match all.iter().find(|l| l.public_ip == ip) {
        Some(l) => l.clone(),
        None => panic!("no lease of {ip} among {all:?}"),
    }
}
