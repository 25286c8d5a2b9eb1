//! Masquerade and forward rules of the node, and the blackhole route for its subnet.
//!
//! Which rules there are is data ([`rules`]): one list per purpose, the same for both families and for
//! both ways of writing them, [`iptables`] and [`nftables`]. [`Manager`] makes the machine hold exactly
//! what the configuration asks for, removes what an earlier run with other settings left, and on every
//! later call repairs what others broke, without writing when nothing changed.
//!
//! Chains, comments and the order of rules are flannel's, so that either program finds the other's.
//! Deliberately different from it (each is a fault there): in nftables the mark is tested under its
//! mask and traffic from the node to other nodes' pods is masqueraded as with iptables; damaged rules
//! come back in both modes; rules that are switched off, or belong to the other mode, are removed
//! completely; the jump stands before a rule that takes every packet; a host without the iptables
//! programs gets the rules in nftables.
//!
//! All calls block: run them where blocking is allowed.

mod blackhole;
pub mod iptables;
pub mod nftables;
pub mod rules;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use felt_hostnet::netlink::Family;

use rules::RuleSpec;

/// Who keeps the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The iptables programs of the host, whichever variant they are.
    Iptables,
    /// nftables, by netlink.
    Nftables,
}

/// The pods of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pods {
    /// All pods of the overlay.
    pub network: IpNet,
    /// The pods of this node.
    pub subnet: IpNet,
}

/// What the machine shall hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficConfig {
    /// Who keeps the rules.
    pub mode: Mode,
    /// IPv4 pods; none: no IPv4 rules.
    pub v4: Option<(Ipv4Net, Ipv4Net)>,
    /// IPv6 pods; none: no IPv6 rules. Both pairs are overlay network and own subnet.
    pub v6: Option<(Ipv6Net, Ipv6Net)>,
    /// Masquerade traffic between pods and the world (`--ip-masq`).
    pub masquerade: bool,
    /// Accept forwarded traffic of pods (`--iptables-forward-rules`).
    pub forward: bool,
    /// Pick source ports at random when masquerading, where the tool can.
    pub fully_random: bool,
    /// Drop packets to addresses of the own subnet that no pod has (`--ip-blackhole-route`).
    pub blackhole: bool,
    /// Subnets of an earlier run, whose blackhole routes must go.
    pub previous: Vec<IpNet>,
}

impl TrafficConfig {
    /// The pods of a family.
    pub fn pods(&self, family: Family) -> Option<Pods> {
        match family {
            Family::V4 => {
                self.v4.map(|(network, subnet)| Pods { network: network.into(), subnet: subnet.into() })
            }
            Family::V6 => {
                self.v6.map(|(network, subnet)| Pods { network: network.into(), subnet: subnet.into() })
            }
        }
    }

    fn masquerade_rules(&self, family: Family) -> Option<Vec<RuleSpec>> {
        let pods = self.pods(family).filter(|_| self.masquerade)?;
        Some(rules::masquerade(pods))
    }

    fn forward_rules(&self, family: Family) -> Option<Vec<RuleSpec>> {
        let pods = self.pods(family).filter(|_| self.forward)?;
        Some(rules::forward(pods))
    }
}

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

/// How often rules were put back, and how often that failed, since the start.
#[derive(Debug, Default)]
pub struct TrafficCounters {
    repairs: AtomicU64,
    failures: AtomicU64,
}

impl TrafficCounters {
    /// Resyncs that found something missing or wrong and repaired it.
    pub fn repairs(&self) -> u64 {
        self.repairs.load(Ordering::Relaxed)
    }

    /// Resyncs that could not look or repair.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Keeps the rules of one configuration in the calling thread's network namespace.
#[derive(Debug, Clone)]
pub struct Manager {
    config: TrafficConfig,
    counters: Arc<TrafficCounters>,
    memory: Arc<Mutex<Memory>>,
}

/// What is known from earlier calls.
#[derive(Debug, Default)]
struct Memory {
    /// Who keeps the rules in fact; decided at the start.
    mode: Option<Mode>,
    iptables: iptables::Memory,
}

impl Manager {
    /// A manager that has not touched anything yet.
    pub fn new(config: TrafficConfig) -> Self {
        Self { config, counters: Arc::default(), memory: Arc::default() }
    }

    /// The counters, for metrics.
    pub fn counters(&self) -> Arc<TrafficCounters> {
        Arc::clone(&self.counters)
    }

    /// Brings the machine to the configured state at start: removes what the other mode, switched-off
    /// features and unused families left, then installs what is wanted.
    ///
    /// # Errors
    /// The wanted rules could not be installed. Trouble with removing left-overs is logged only: they
    /// do not stop traffic that would otherwise flow.
    pub fn start(&self) -> Result<(), felt_hostnet::Error> {
        let mode = self.choose_mode();
        let leftovers = match mode {
            Mode::Iptables => nftables::remove().map(drop),
            Mode::Nftables => iptables::remove(&FAMILIES).map(drop),
        };
        if let Err(error) = leftovers {
            warn!("left-over rules of the other mode stay: {error}");
        }
        if let Err(error) = blackhole::remove_unwanted(&self.config) {
            warn!("left-over blackhole routes stay: {error}");
        }
        if mode == Mode::Iptables
            && let Err(error) = iptables::remove_unwanted(&self.config)
        {
            warn!("left-over iptables rules stay: {error}");
        }
        self.ensure().map(drop)
    }

    /// Looks at everything and repairs what differs; says whether something did. Later parts are
    /// tried even if an earlier one fails; the first error is returned.
    pub fn resync(&self) -> Result<bool, felt_hostnet::Error> {
        let outcome = self.ensure();
        match &outcome {
            Ok(true) => self.counters.repairs.fetch_add(1, Ordering::Relaxed),
            Ok(false) => 0,
            Err(_) => self.counters.failures.fetch_add(1, Ordering::Relaxed),
        };
        outcome
    }

    /// The configured mode, or nftables on a host that has no iptables programs.
    fn choose_mode(&self) -> Mode {
        let mode = match self.config.mode {
            Mode::Iptables if iptables::is_missing(&self.config) => {
                warn!("the iptables programs are not installed: traffic rules go into nftables");
                Mode::Nftables
            }
            mode => mode,
        };
        self.lock().mode = Some(mode);
        mode
    }

    fn lock(&self) -> MutexGuard<'_, Memory> {
        // Nothing in it can be half changed.
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ensure(&self) -> Result<bool, felt_hostnet::Error> {
        let mut memory = self.lock();
        let rules = match memory.mode.unwrap_or(self.config.mode) {
            Mode::Iptables => iptables::ensure(&self.config, &mut memory.iptables),
            Mode::Nftables => nftables::ensure(&self.config),
        };
        drop(memory);
        let route = blackhole::ensure(&self.config);
        Ok(rules? | route?)
    }

    /// Calls [`Manager::resync`] every `interval` until cancelled, on a thread where blocking is
    /// allowed. Says once when rules were broken or could not be kept, not on every round.
    ///
    /// # Cancel safety
    /// Dropping the future leaves a running resync to finish on its own.
    pub async fn run(self, interval: Duration, cancel: CancellationToken) {
        let interval = interval.max(Duration::from_secs(1));
        let mut failing = false;
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                () = tokio::time::sleep(interval) => {}
            }
            let manager = self.clone();
            match tokio::task::spawn_blocking(move || manager.resync()).await {
                Ok(Ok(repaired)) => {
                    if repaired {
                        info!("traffic rules were missing or changed by others; they are back");
                    }
                    failing = false;
                }
                Ok(Err(error)) => {
                    if !failing {
                        error!("cannot keep the traffic rules: {error}");
                    }
                    failing = true;
                }
                Err(panic) => error!("keeping the traffic rules stopped: {panic}"),
            }
        }
    }
}

/// What [`remove_all`] did.
#[derive(Debug, Default)]
pub struct Removal {
    /// Whether anything was there.
    pub found: bool,
    /// What could not be removed.
    pub failures: Vec<felt_hostnet::Error>,
}

/// Removes every rule of felt (and flannel) in both modes and families, and the blackhole routes of
/// these subnets. Goes on after failures.
pub fn remove_all(subnets: &[IpNet]) -> Removal {
    let mut removal = Removal::default();
    for outcome in [nftables::remove(), iptables::remove(&FAMILIES), blackhole::remove(subnets)] {
        match outcome {
            Ok(found) => removal.found |= found,
            Err(error) => removal.failures.push(error),
        }
    }
    removal
}
