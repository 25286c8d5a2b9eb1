//! The daemon seen from outside: one place where its parts leave what the admin socket, health checks and metrics show.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use crate::api::{self, Phase};
use crate::backend::Report;
use crate::cli::Options;
use crate::handover::Offer;
use crate::iface::External;
use crate::lease::{Event, Lease, LeaseSet, WatchResult};
use crate::netconfig::NetworkConfig;
use crate::subnet::KeepState;
use crate::traffic::TrafficCounters;

/// Failed renewals in a row after which the node no longer counts as ready.
const FAILURES_UNTIL_UNREADY: u32 = 3;
/// Longest silence of the backend's loop that counts as progress.
const STALL: Duration = Duration::from_secs(30);

/// Shared by all parts of one daemon.
pub struct View {
    options: Arc<Options>,
    started_at: SystemTime,
    started: Instant,
    /// Milliseconds since `started` at which the backend's loop last came round; 0 before it runs.
    heartbeat: AtomicU64,
    inner: Mutex<Inner>,
}

/// What is known so far.
#[derive(Default)]
pub struct Inner {
    /// How far the daemon is, `None` while starting.
    pub phase: Option<Phase>,
    /// Registry's name.
    pub registry: String,
    /// Node id.
    pub node_id: String,
    /// Network configuration.
    pub net: Option<NetworkConfig>,
    /// External interface.
    pub external: Option<External>,
    /// Own lease.
    pub lease: Option<Lease>,
    /// How it fares.
    pub keep: KeepState,
    /// Leases of the others.
    pub leases: LeaseSet,
    /// Whether a first snapshot has come.
    pub synced: bool,
    /// Time of the last delivery.
    pub last_delivery: Option<Instant>,
    /// Number of deliveries.
    pub deliveries: u64,
    /// The backend.
    pub report: Option<Arc<dyn Report>>,
    /// Whether the subnet file is written.
    pub subnet_file_written: bool,
    /// Restorations so far.
    pub repairs: u64,
    /// Counters of the traffic rules.
    pub rules: Option<Arc<TrafficCounters>>,
    /// Why the traffic rules are not in.
    pub rules_missing: Option<String>,
    /// Where a successor's offers go, once packets flow.
    pub handover: Option<tokio::sync::mpsc::Sender<Offer>>,
    /// A successor has the packets.
    pub handed_over: bool,
}

impl View {
    /// The view of a daemon that starts now.
    pub fn new(options: Arc<Options>) -> Self {
        Self {
            options,
            started_at: SystemTime::now(),
            started: Instant::now(),
            heartbeat: AtomicU64::new(0),
            inner: Mutex::new(Inner::default()),
        }
    }

    /// The parts, for a short look or change; never held across a wait.
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Time since the start.
    pub fn uptime(&self) -> Duration {
        self.started.elapsed()
    }

    /// The flags.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The backend's loop came round.
    pub fn beat(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heartbeat.store(now.max(1), Ordering::Relaxed);
    }

    /// Takes in a delivery of the watch; returns what the backend has to apply.
    pub fn deliver(&self, result: WatchResult) -> Vec<Event> {
        let mut inner = self.lock();
        inner.deliveries += 1;
        inner.last_delivery = Some(Instant::now());
        inner.synced |= matches!(result, WatchResult::Snapshot(_));
        inner.leases.apply(result)
    }

    fn report(&self) -> Option<Arc<dyn Report>> {
        self.lock().report.clone()
    }

    /// Whether the loops make progress.
    ///
    /// # Errors
    /// What stands still.
    pub fn alive(&self) -> Result<(), String> {
        let last = self.heartbeat.load(Ordering::Relaxed);
        let silence = self.started.elapsed().saturating_sub(Duration::from_millis(last));
        if last > 0 && silence > STALL {
            return Err(format!("the backend's loop has not come round for {} s", silence.as_secs()));
        }
        self.report().map_or(Ok(()), |report| report.alive())
    }

    /// Everything that keeps the node from being ready; empty when it is.
    pub fn not_ready(&self) -> Vec<String> {
        let mut reasons = Vec::new();
        {
            let inner = self.lock();
            if inner.phase == Some(Phase::Stopping) {
                reasons.push("the daemon is stopping".to_owned());
            }
            match &inner.lease {
                None => reasons.push("no lease is held yet".to_owned()),
                Some(_) if inner.keep.expiration.is_some_and(|end| end < SystemTime::now()) => {
                    reasons.push("the lease has expired".to_owned());
                }
                Some(_) => {}
            }
            if inner.keep.failures >= FAILURES_UNTIL_UNREADY {
                let error = inner.keep.last_error.as_deref().unwrap_or("unknown reason");
                reasons.push(format!("the lease was not renewed {} times: {error}", inner.keep.failures));
            }
            if !inner.subnet_file_written {
                reasons.push(format!("{} is not written yet", self.options.subnet_file.display()));
            }
            if let Some(error) = &inner.rules_missing {
                reasons.push(format!("traffic rules are not in: {error}"));
            }
            if !inner.synced {
                reasons.push("the registry has not told the other nodes' leases yet".to_owned());
            }
        }
        reasons.extend(self.alive().err());
        reasons
    }

    /// `GET /v1/status`.
    pub fn status(&self) -> api::Status {
        let not_ready = self.not_ready();
        let backend = self.report().map(|report| report.backend());
        let inner = self.lock();
        api::Status {
            version: api::VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started_at: api::time_text(self.started_at),
            phase: inner.phase.unwrap_or(Phase::Starting),
            ready: not_ready.is_empty(),
            not_ready,
            registry: inner.registry.clone(),
            node_id: inner.node_id.clone(),
            network: inner.net.as_ref().map(|net| api::Network { ipv4: net.ipv4, ipv6: net.ipv6 }),
            interface: inner.external.as_ref().map(|external| api::Interface {
                name: external.name.clone(),
                index: external.index,
                mtu: external.mtu,
                ipv4: external.v4,
                ipv6: external.v6,
            }),
            lease: inner.lease.as_ref().map(|lease| api::OwnLease {
                key: lease.key.to_string(),
                ipv4: lease.key.v4,
                ipv6: lease.key.v6,
                public_ip: lease.attrs.public_ip,
                public_ipv6: lease.attrs.public_ipv6,
                expires_at: inner.keep.expiration.map(api::time_text),
                renewed_at: inner.keep.renewed_at.map(api::time_text),
                failures: inner.keep.failures,
                last_error: inner.keep.last_error.clone(),
            }),
            backend,
            watch: api::Watch {
                synced: inner.synced,
                last_event_age_seconds: inner.last_delivery.map(|at| at.elapsed().as_secs()),
                deliveries: inner.deliveries,
            },
            peers: inner.leases.len(),
            subnet_file: self.options.subnet_file.display().to_string(),
            repairs: inner.repairs,
        }
    }

    /// `GET /v1/peers`.
    pub fn peers(&self) -> api::Peers {
        let mut peers = self.report().map(|report| report.peers()).unwrap_or_default();
        let inner = self.lock();
        for peer in &mut peers {
            let lease = peer.key.parse().ok().and_then(|key| inner.leases.get(&key));
            peer.expires_at = lease.and_then(|lease| lease.expiration).map(api::time_text);
        }
        api::Peers { version: api::VERSION, peers }
    }

    /// `GET /v1/counters`.
    pub fn counters(&self) -> api::Counters {
        let engines = self.report().map(|report| report.engines()).unwrap_or_default();
        api::Counters { version: api::VERSION, engines }
    }

    /// `GET /v1/config`.
    pub fn config(&self) -> api::Config {
        let network = self.lock().net.as_ref().map(network_json);
        api::Config { version: api::VERSION, flags: self.options.shown(), network }
    }
}

/// The configuration in force, in the spelling of its source.
fn network_json(net: &NetworkConfig) -> serde_json::Value {
    let mut object = serde_json::Map::new();
    if let Some(network) = net.ipv4 {
        object.insert("Network".into(), network.to_string().into());
    }
    if let Some(network) = net.ipv6 {
        object.insert("IPv6Network".into(), network.to_string().into());
    }
    object.insert("EnableIPv4".into(), net.ipv4.is_some().into());
    object.insert("EnableIPv6".into(), net.ipv6.is_some().into());
    object.insert("EnableNFTables".into(), net.nftables.into());
    let backend = &net.backend;
    object.insert(
        "Backend".into(),
        serde_json::json!({
            "Type": backend.kind.name(),
            "Dataplane": backend.dataplane.as_str(),
            "Offload": backend.offload.as_str(),
            "Workers": backend.workers,
            "SourceGuard": backend.source_guard.as_str(),
        }),
    );
    object.into()
}
