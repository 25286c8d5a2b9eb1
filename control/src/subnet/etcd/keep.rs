//! Keeping the own lease: look at its key, put right what is wrong, wait for a change or the next renewal.
//!
//! Renewing begins the time of the key's etcd lease anew and touches no key, so that peers hear nothing of it. A
//! deleted key, or a revoked or expired etcd lease, means the subnet is taken again, unless another node holds it.

use std::time::{Duration, Instant, SystemTime};

use etcd_client::WatchOptions;
use tokio::sync::watch;
use tracing::{info, warn};

use super::follow::{canceled, ended, is_gap, open};
use super::store::Stored;
use super::{Created, Shared};
use crate::lease::{Lease, LeaseAttrs, SubnetKey};
use crate::subnet::alloc::{self, same_node};
use crate::subnet::backoff::Backoff;
use crate::subnet::{KeepError, KeepState, SubnetError};

/// Shortest time between two repairs of a key that somebody else keeps writing.
const REPAIR_PAUSE: Duration = Duration::from_secs(10);
/// The wall clock is looked at this often, since it may be set while a timer runs.
const CLOCK_CHECK: Duration = Duration::from_secs(60);

/// The etcd lease of the own key, as last seen.
#[derive(Debug, Clone, Copy)]
struct Held {
    etcd_lease: i64,
    /// `None` for a reservation.
    expiration: Option<SystemTime>,
    /// Changes after this revision are news.
    revision: i64,
}

/// What a look at the own key found.
enum Look {
    Ours(Held, Written),
    /// Somebody was faster, or the key changed meanwhile: look again.
    Again,
    Other(LeaseAttrs),
}

/// Whether the look wrote or renewed something.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Written {
    Nothing,
    Renewed,
    Repaired,
}

impl Shared {
    /// Keeps the lease until another node holds it.
    pub(super) async fn renew(&self, lease: Lease, state: &watch::Sender<KeepState>) -> KeepError {
        let mut backoff = Backoff::default();
        let mut held: Option<Held> = None;
        let mut repaired: Option<Instant> = None;
        let mut trouble: Option<Instant> = None;
        state.send_modify(|state| {
            state.expiration = lease.expiration;
            state.renewed_at = Some(SystemTime::now());
        });
        loop {
            let may_repair = repaired.is_none_or(|at| at.elapsed() >= REPAIR_PAUSE);
            let result = match self.look(&lease, held, may_repair).await {
                Ok(Look::Other(attrs)) => {
                    return KeepError::TakenByOther { key: lease.key, holder: alloc::holder(&attrs) };
                }
                Ok(Look::Again) => Ok(()),
                Ok(Look::Ours(now, written)) => {
                    if let Some(since) = trouble.take() {
                        let seconds = since.elapsed().as_secs_f64();
                        info!("lease {} is kept again after {seconds:.1} s", lease.key);
                    }
                    if written == Written::Repaired {
                        repaired = Some(Instant::now());
                    }
                    report(state, now.expiration, written);
                    held = Some(now);
                    let until = if may_repair { None } else { repaired.map(|at| at + REPAIR_PAUSE) };
                    let result = self.wait(&lease.key, now, until).await;
                    if result.is_ok() {
                        backoff.reset();
                    }
                    result
                }
                Err(error) => Err(error),
            };
            if let Err(error) = result {
                let text = error.to_string();
                if trouble.is_none() {
                    trouble = Some(Instant::now());
                    warn!("cannot keep lease {}: {text}; trying again", lease.key);
                }
                state.send_modify(|state| {
                    state.failures += 1;
                    state.last_error = Some(text);
                });
            }
            backoff.pause().await;
        }
    }

    /// Looks at the own key, and renews, repairs or takes it again as needed.
    async fn look(&self, lease: &Lease, held: Option<Held>, may_repair: bool) -> Result<Look, SubnetError> {
        let key = lease.key;
        let (stored, revision) = self.store.read(&key).await?;
        let attrs = self.published.attrs(lease);
        let Some(stored) = stored else {
            return self.take_again(key, &attrs).await;
        };
        match stored.attrs() {
            Ok(theirs) if !same_node(&attrs, &theirs) => return Ok(Look::Other(theirs)),
            _ if stored.value == attrs.encode().as_bytes() => {}
            _ if !may_repair => {}
            _ => return self.repair(&stored, &attrs).await,
        }
        if stored.etcd_lease == 0 {
            let held = Held { etcd_lease: 0, expiration: None, revision };
            return Ok(Look::Ours(held, Written::Nothing));
        }
        // Only an etcd lease seen before has a known end.
        let known = held.filter(|held| held.etcd_lease == stored.etcd_lease);
        let end = match known.and_then(|held| held.expiration) {
            Some(end) => end,
            None => self.store.expiration(stored.etcd_lease).await?.unwrap_or_else(SystemTime::now),
        };
        if !self.term.until_renewal(end, SystemTime::now()).is_zero() {
            let held = Held { etcd_lease: stored.etcd_lease, expiration: Some(end), revision };
            return Ok(Look::Ours(held, Written::Nothing));
        }
        let begin = SystemTime::now();
        match self.store.refresh(stored.etcd_lease).await? {
            Some(ttl) if ttl > self.term.margin() => {
                let held = Held { etcd_lease: stored.etcd_lease, expiration: Some(begin + ttl), revision };
                Ok(Look::Ours(held, Written::Renewed))
            }
            // Somebody attached the key to an etcd lease too short for our term: give it one that fits.
            Some(_) => self.repair(&stored, &attrs).await,
            // It ended just now, and the key with it.
            None => Ok(Look::Again),
        }
    }

    /// Writes our attributes into a key that is ours or unreadable, under a new etcd lease.
    async fn repair(&self, stored: &Stored, attrs: &LeaseAttrs) -> Result<Look, SubnetError> {
        info!("writing lease {} anew, since its key was changed", stored.key);
        let mut grant = self.grant();
        let result = self.take_over(&mut grant, stored, attrs).await;
        grant.give_up().await;
        let Some(expiration) = result? else { return Ok(Look::Again) };
        let (stored, revision) = self.store.read(&stored.key).await?;
        let Some(stored) = stored else { return Ok(Look::Again) };
        let held = Held { etcd_lease: stored.etcd_lease, expiration, revision };
        Ok(Look::Ours(held, Written::Repaired))
    }

    /// Creates the own key again, unless another node's lease overlaps it.
    async fn take_again(&self, key: SubnetKey, attrs: &LeaseAttrs) -> Result<Look, SubnetError> {
        let listing = self.store.list().await?;
        let (leases, _) = self.split(&listing);
        let taken = leases.iter().find(|lease| lease.key.overlaps(&key) && !same_node(attrs, &lease.attrs));
        if let Some(lease) = taken {
            return Ok(Look::Other(lease.attrs.clone()));
        }
        warn!("lease {key} was deleted or has ended; taking it again");
        let mut grant = self.grant();
        let result = self.create(&mut grant, key, attrs, listing.revision).await;
        grant.give_up().await;
        let Created::Ours(lease) = result? else { return Ok(Look::Again) };
        let (stored, revision) = self.store.read(&key).await?;
        let Some(stored) = stored else { return Ok(Look::Again) };
        let held = Held { etcd_lease: stored.etcd_lease, expiration: lease.expiration, revision };
        Ok(Look::Ours(held, Written::Repaired))
    }

    /// Waits until the own key changes, or it is time to renew it, or `until`.
    async fn wait(&self, key: &SubnetKey, held: Held, until: Option<Instant>) -> Result<(), SubnetError> {
        let name = self.store.keys.lease(key);
        let what = format!("watch {name}");
        let live = self.store.connection.live().await?;
        let watching = async {
            let mut stream = open(&live, &name, WatchOptions::new(), held.revision + 1).await?;
            loop {
                match stream.message().await {
                    Ok(Some(response)) if is_gap(&response) => return Ok(()),
                    Ok(Some(response)) if response.canceled() => return Err(canceled(&what, &response)),
                    Ok(Some(response)) if response.events().is_empty() => {}
                    Ok(Some(_)) => return Ok(()),
                    result => return Err(ended(&what, result.err())),
                }
            }
        };
        let result = tokio::select! {
            result = watching => result,
            () = self.until_due(held.expiration, until) => return Ok(()),
        };
        if result.is_err() {
            self.store.connection.discard(&live).await;
        }
        result
    }

    async fn until_due(&self, expiration: Option<SystemTime>, until: Option<Instant>) {
        loop {
            let now = SystemTime::now();
            let renewal = expiration.map(|end| self.term.until_renewal(end, now));
            let other = until.map(|at| at.saturating_duration_since(Instant::now()));
            let left = [renewal, other].into_iter().flatten().min().unwrap_or(CLOCK_CHECK);
            if left.is_zero() {
                return;
            }
            tokio::time::sleep(left.min(CLOCK_CHECK)).await;
        }
    }
}

fn report(state: &watch::Sender<KeepState>, expiration: Option<SystemTime>, written: Written) {
    state.send_if_modified(|state| {
        let before = state.clone();
        state.expiration = expiration;
        state.failures = 0;
        state.last_error = None;
        if written != Written::Nothing {
            state.renewed_at = Some(SystemTime::now());
        }
        *state != before
    });
}
