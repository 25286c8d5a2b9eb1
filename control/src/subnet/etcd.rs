//! The etcd v3 registry: flannel's keys and values, without its faults.
//!
//! `PREFIX/config` holds the network configuration, `PREFIX/subnets/10.5.34.0-24` one lease each, attached to an etcd
//! lease that ends when nobody renews it. A key without etcd lease is a reservation: its owner uses it and leaves it
//! so. A network without IPv4 uses the form `0.0.0.0-0&fd00:7:0:58::-64`.
//!
//! Invariants: a key appears only by a transaction that requires its absence and changes only by one that requires
//! the revision seen, so two nodes never hold one subnet; a foreign or unreadable key is logged once, occupies its
//! subnet, and disturbs nothing else; every request has a time limit.

mod config;
mod connection;
mod follow;
mod keep;
mod keys;
mod store;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::info;

pub use self::config::{EtcdConfig, EtcdConfigError};
use self::connection::Connection;
use self::keys::Keys;
use self::store::{Listing, Store, Stored};
use super::alloc::{self, Step, same_node};
use super::published::Published;
use super::term::Term;
use super::{AcquireError, ConfigError, KeepError, KeepState, SubnetError, SubnetManager};
use crate::lease::{Lease, LeaseAttrs, SubnetKey, WatchResult};
use crate::netconfig::{NetworkConfig, Source};

/// How often a subnet lost to another node is tried again with a new choice.
const TRIES: u32 = 100;
/// Longest pause between two such tries; it grows from nothing, so that few nodes lose no time and many spread out.
const RACE_PAUSE: Duration = Duration::from_millis(500);

/// Leases in etcd.
#[derive(Debug, Clone)]
pub struct EtcdManager {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    store: Store,
    term: Term,
    published: Published,
}

impl EtcdManager {
    /// A registry; nothing is connected yet.
    ///
    /// # Errors
    ///
    /// When the flags contradict each other.
    pub fn new(config: EtcdConfig, term: Term) -> Result<Self, EtcdConfigError> {
        let keys = Keys::new(&config.prefix);
        let connection = Connection::new(config, keys.config.clone())?;
        let store = Store { connection, keys };
        Ok(EtcdManager { shared: Arc::new(Shared { store, term, published: Published::default() }) })
    }
}

/// What a try to create a lease came to.
enum Created {
    Ours(Lease),
    /// Another node was faster with this subnet or one that overlaps it.
    Raced,
}

/// An etcd lease that is revoked unless it is used.
struct Grant<'a> {
    store: &'a Store,
    ttl: Duration,
    current: Option<(i64, SystemTime)>,
}

impl Grant<'_> {
    /// The id and end of a lease nothing is attached to yet.
    async fn id(&mut self) -> Result<(i64, SystemTime), SubnetError> {
        if let Some(current) = self.current {
            return Ok(current);
        }
        let begin = SystemTime::now();
        let (id, ttl) = self.store.grant(self.ttl).await?;
        Ok(*self.current.insert((id, begin + ttl)))
    }

    /// Something is attached to it now.
    fn used(&mut self) {
        self.current = None;
    }

    async fn give_up(&mut self) {
        if let Some((id, _)) = self.current.take() {
            self.store.revoke(id).await;
        }
    }
}

impl Shared {
    fn grant(&self) -> Grant<'_> {
        Grant { store: &self.store, ttl: self.term.ttl(), current: None }
    }

    /// Readable leases and the keys of unreadable ones. The end of a lease is not asked for: all but reservations
    /// seem to end one term from now.
    fn split(&self, listing: &Listing) -> (Vec<Lease>, Vec<SubnetKey>) {
        let end = SystemTime::now() + self.term.ttl();
        let (mut leases, mut unreadable) = (Vec::new(), Vec::new());
        for stored in &listing.entries {
            match stored.attrs() {
                Ok(attrs) => {
                    let expiration = (stored.etcd_lease != 0).then_some(end);
                    leases.push(Lease { key: stored.key, attrs, expiration });
                }
                Err(_) => unreadable.push(stored.key),
            }
        }
        (leases, unreadable)
    }

    async fn acquire(
        &self,
        net: &NetworkConfig,
        attrs: &LeaseAttrs,
        previous: Option<SubnetKey>,
    ) -> Result<Lease, AcquireError> {
        let mut grant = self.grant();
        let result = self.acquire_with(&mut grant, net, attrs, previous).await;
        grant.give_up().await;
        result
    }

    async fn acquire_with(
        &self,
        grant: &mut Grant<'_>,
        net: &NetworkConfig,
        attrs: &LeaseAttrs,
        previous: Option<SubnetKey>,
    ) -> Result<Lease, AcquireError> {
        for attempt in 0..TRIES {
            let listing = self.store.list().await?;
            let (leases, unreadable) = self.split(&listing);
            let plan = alloc::plan(net, attrs, previous, &leases, &unreadable, attempt, &mut rand::rng());
            for lease in &plan.discard {
                if let Some(stored) = listing.find(&lease.key) {
                    info!("giving up lease {}, which does not fit the network configuration", lease.key);
                    self.store.delete(&lease.key, stored.mod_revision).await?;
                }
            }
            match plan.step {
                Step::Reuse(lease) => {
                    // Known before it is written: the task that keeps the lease must not write older ones back.
                    self.published.set(&Lease { attrs: attrs.clone(), ..lease.clone() });
                    if let Some(stored) = listing.find(&lease.key)
                        && let Some(expiration) = self.take_over(grant, stored, attrs).await?
                    {
                        return Ok(Lease { key: lease.key, attrs: attrs.clone(), expiration });
                    }
                }
                Step::Create(key) => {
                    if let Created::Ours(lease) = self.create(grant, key, attrs, listing.revision).await? {
                        self.published.set(&lease);
                        return Ok(lease);
                    }
                }
                Step::Exhausted => {
                    let (network, leases) = (alloc::describe(net), leases.len());
                    return Err(AcquireError::OutOfSubnets { network, leases });
                }
            }
            let most = RACE_PAUSE.min(Duration::from_millis(4) * attempt);
            tokio::time::sleep(most.mul_f64(rand::random())).await;
        }
        Err(AcquireError::Raced { tries: TRIES })
    }

    /// Writes the attributes into a key of ours under a new etcd lease; a reservation stays without one. Returns
    /// the expiration, or `None` when the key changed meanwhile.
    async fn take_over(
        &self,
        grant: &mut Grant<'_>,
        stored: &Stored,
        attrs: &LeaseAttrs,
    ) -> Result<Option<Option<SystemTime>>, SubnetError> {
        let value = attrs.encode();
        if stored.etcd_lease == 0 {
            let same = stored.value == value.as_bytes();
            let done = same || self.store.replace(stored, &value, 0).await?;
            return Ok(done.then_some(None));
        }
        let (id, end) = grant.id().await?;
        if !self.store.replace(stored, &value, id).await? {
            // Also when the etcd lease was lost; then the next try needs another.
            grant.give_up().await;
            return Ok(None);
        }
        grant.used();
        Ok(Some(Some(end)))
    }

    /// Creates the lease of a subnet that was free at revision `seen`.
    ///
    /// The transaction excludes equal keys only; pairs of subnets that overlap in one family, or subnets of
    /// another size, have other keys. So the keys created since are looked at: of two that overlap, the one
    /// created later is withdrawn, by its own creator.
    async fn create(
        &self,
        grant: &mut Grant<'_>,
        key: SubnetKey,
        attrs: &LeaseAttrs,
        seen: i64,
    ) -> Result<Created, SubnetError> {
        let (id, end) = grant.id().await?;
        let Some(revision) = self.store.create(&key, &attrs.encode(), id).await? else {
            return Ok(Created::Raced);
        };
        let rivals = self.store.created_since(seen).await?;
        if rivals.iter().any(|(rival, created)| *created < revision && rival.overlaps(&key)) {
            self.store.delete(&key, revision).await?;
            return Ok(Created::Raced);
        }
        grant.used();
        Ok(Created::Ours(Lease { key, attrs: attrs.clone(), expiration: Some(end) }))
    }
}

impl Listing {
    fn find(&self, key: &SubnetKey) -> Option<&Stored> {
        self.entries.iter().find(|stored| stored.key == *key)
    }
}

#[async_trait]
impl SubnetManager for EtcdManager {
    fn name(&self) -> String {
        self.shared.store.connection.name()
    }

    async fn network_config(&self) -> Result<NetworkConfig, ConfigError> {
        let place = self.shared.store.keys.config.clone();
        let Some(text) = self.shared.store.value(&place).await? else {
            let hint = format!(
                "write it with the v3 API (the v2 API keeps its keys apart): ETCDCTL_API=3 etcdctl put {place} '{{\"Network\":\"10.244.0.0/16\",\"Backend\":{{\"Type\":\"vxlan\"}}}}'"
            );
            return Err(ConfigError::Missing { place, hint });
        };
        NetworkConfig::parse(&text, Source::Registry)
            .map_err(|e| ConfigError::Invalid { place, reason: e.to_string() })
    }

    async fn own_lease(&self, attrs: &LeaseAttrs) -> Result<Option<Lease>, SubnetError> {
        let listing = self.shared.store.list().await?;
        let own = listing
            .entries
            .into_iter()
            .filter(|stored| stored.attrs().is_ok_and(|theirs| same_node(attrs, &theirs)))
            // A reservation is what the operator wants the node to have.
            .min_by_key(|stored| stored.etcd_lease != 0);
        Ok(self.shared.store.leases(own.into_iter().collect()).await?.pop())
    }

    async fn acquire(
        &self,
        net: &NetworkConfig,
        attrs: &LeaseAttrs,
        previous: Option<SubnetKey>,
    ) -> Result<Lease, AcquireError> {
        self.shared.acquire(net, attrs, previous).await
    }

    async fn watch(&self, tx: mpsc::Sender<WatchResult>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = tx.closed() => {}
            () = self.shared.follow(&tx) => {}
        }
    }

    async fn keep(
        &self,
        lease: Lease,
        cancel: CancellationToken,
        state: watch::Sender<KeepState>,
    ) -> Result<(), KeepError> {
        tokio::select! {
            () = cancel.cancelled() => Ok(()),
            error = self.shared.renew(lease, &state) => Err(error),
        }
    }

    async fn list(&self) -> Result<Vec<Lease>, SubnetError> {
        let listing = self.shared.store.list().await?;
        self.shared.store.leases(listing.entries).await
    }

    async fn remove(&self, key: &SubnetKey) -> Result<bool, SubnetError> {
        self.shared.store.delete_any(key).await
    }
}
