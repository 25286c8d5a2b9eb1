//! Registries of leases behind one trait.
//!
//! A registry stores the network configuration and one lease per node. The daemon asks it for the configuration, takes
//! a lease, keeps it alive and follows everybody's leases. Three implementations share the types of [`crate::lease`]:
//! `file` (a directory), `etcd` (flannel's keys and values) and `kube` (flannel's node annotations).
//!
//! Invariant: nothing here touches the kernel's network state, and no call blocks for ever: every request to a server has
//! a time limit, and long-running calls end when their token is cancelled.

pub mod alloc;
mod backoff;
pub mod etcd;
pub mod file;
pub mod kube;
mod published;
pub mod term;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::lease::{Lease, LeaseAttrs, SubnetKey, WatchResult};
use crate::netconfig::NetworkConfig;

/// A registry, as the daemon and the operator's command use it.
#[async_trait]
pub trait SubnetManager: Send + Sync {
    /// What an operator would call it: `etcd v3 at http://127.0.0.1:2379`, `directory /etc/felt`.
    fn name(&self) -> String;

    /// Reads the network configuration once; the caller retries with back-off.
    ///
    /// # Errors
    /// The error names the key or file and, when it is missing, what to do.
    async fn network_config(&self) -> Result<NetworkConfig, ConfigError>;

    /// Public addresses stored in the registry for this node, which win over flags.
    ///
    /// # Errors
    /// When the registry cannot be asked.
    async fn stored_public_ips(&self) -> Result<(Option<Ipv4Addr>, Option<Ipv6Addr>), SubnetError> {
        Ok((None, None))
    }

    /// A lease that already belongs to the public address in `attrs`, so that its VTEP MAC can be used again.
    ///
    /// # Errors
    /// When the registry cannot be asked.
    async fn own_lease(&self, attrs: &LeaseAttrs) -> Result<Option<Lease>, SubnetError>;

    /// Takes a lease: the one this node holds, else `previous` when it is free and fits, else a free one.
    /// Calling it again with changed `attrs` publishes the change.
    ///
    /// # Errors
    /// See [`AcquireError`].
    async fn acquire(
        &self,
        net: &NetworkConfig,
        attrs: &LeaseAttrs,
        previous: Option<SubnetKey>,
    ) -> Result<Lease, AcquireError>;

    /// Follows all leases: first a snapshot, then events, and a snapshot again after every gap. Reconnects by itself and
    /// returns only when `cancel` fires or the receiver is gone.
    async fn watch(&self, tx: mpsc::Sender<WatchResult>, cancel: CancellationToken);

    /// Keeps `lease` alive until `cancel` fires: renews it, and takes it again with the same subnet when somebody
    /// deleted it. Reports every change through `state`.
    ///
    /// # Errors
    /// Only when another node holds the subnet now.
    async fn keep(
        &self,
        lease: Lease,
        cancel: CancellationToken,
        state: watch::Sender<KeepState>,
    ) -> Result<(), KeepError>;

    /// All leases, this node's own included.
    ///
    /// # Errors
    /// When the registry cannot be asked.
    async fn list(&self) -> Result<Vec<Lease>, SubnetError>;

    /// Gives a lease up, whoever holds it. `false` when there was none.
    ///
    /// # Errors
    /// When the registry cannot be asked or refuses.
    async fn remove(&self, key: &SubnetKey) -> Result<bool, SubnetError>;
}

/// How the own lease fares, for readiness and metrics.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KeepState {
    /// When the lease ends unless renewed; `None` while it never ends.
    pub expiration: Option<SystemTime>,
    /// When it was last written with success.
    pub renewed_at: Option<SystemTime>,
    /// Failed attempts since then.
    pub failures: u32,
    /// Text of the last failure, kept until the next success.
    pub last_error: Option<String>,
}

/// A registry could not be asked, or its answer made no sense.
#[derive(Debug, thiserror::Error)]
pub enum SubnetError {
    /// No answer in time.
    #[error("{what}: no answer from {registry} within {after:?}")]
    TimedOut {
        /// What was being done, as in "list leases".
        what: String,
        /// [`SubnetManager::name`].
        registry: String,
        /// The limit.
        after: Duration,
    },
    /// The request failed.
    #[error("{what}: {source}")]
    Failed {
        /// What was being done and on which key or file.
        what: String,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The registry answered, and the answer cannot be used.
    #[error("{what}: {reason}")]
    Invalid {
        /// What was being done and on which key or file.
        what: String,
        /// What is wrong with the answer.
        reason: String,
    },
}

/// The network configuration is not usable (yet).
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Nobody has written it.
    #[error("no network configuration at {place}: {hint}")]
    Missing {
        /// Full key or path.
        place: String,
        /// What the operator can do about it.
        hint: String,
    },
    /// It is there and wrong.
    #[error("network configuration at {place} is invalid: {reason}")]
    Invalid {
        /// Full key or path.
        place: String,
        /// The rule it breaks.
        reason: String,
    },
    /// The registry could not be asked.
    #[error(transparent)]
    Registry(#[from] SubnetError),
}

/// No lease could be taken.
#[derive(Debug, thiserror::Error)]
pub enum AcquireError {
    /// Every subnet between SubnetMin and SubnetMax is taken.
    #[error(
        "out of subnets: every subnet of {network} between SubnetMin and SubnetMax is taken ({leases} leases)"
    )]
    OutOfSubnets {
        /// The overlay network.
        network: String,
        /// How many leases there are.
        leases: usize,
    },
    /// Other nodes were faster each time.
    #[error("lost the race for a free subnet {tries} times")]
    Raced {
        /// How often it was tried.
        tries: u32,
    },
    /// The subnet given to this node from outside is missing or does not fit the network.
    #[error("{0}")]
    Unassigned(String),
    /// The configuration or our own attributes do not allow a lease.
    #[error("{0}")]
    Unusable(String),
    /// The registry could not be asked.
    #[error(transparent)]
    Registry(#[from] SubnetError),
}

/// The own lease is lost for good.
#[derive(Debug, thiserror::Error)]
pub enum KeepError {
    /// Another node holds the subnet.
    #[error("lease {key} is held by {holder} now; stop one of the two nodes or give this one another subnet")]
    TakenByOther {
        /// Our subnet.
        key: SubnetKey,
        /// The other node's public address.
        holder: String,
    },
    /// Who assigns the subnets gave this node another one.
    #[error("this node was assigned {now} instead of {key}; a restart takes the new subnet")]
    Reassigned {
        /// Our subnet.
        key: SubnetKey,
        /// What the node has now.
        now: SubnetKey,
    },
}
