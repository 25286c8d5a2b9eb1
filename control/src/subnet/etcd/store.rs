//! Lease keys in etcd: reading all or one, writing under conditions.
//!
//! Invariant: no write overwrites what was not read before; each is a transaction on the revision seen.

use std::time::{Duration, SystemTime};

use etcd_client::{Compare, CompareOp, GetOptions, GetResponse, KeyValue, PutOptions, Txn, TxnOp};
use futures::StreamExt;

use super::connection::{Connection, Described, is_compacted, is_not_found};
use super::keys::Keys;
use crate::lease::{Lease, LeaseAttrs, SubnetKey};
use crate::subnet::SubnetError;

/// Keys read per request: a few hundred bytes each stay far below gRPC's limit of 4 MiB.
const PAGE: i64 = 1000;
/// How often a list is begun again because its revision was compacted while it was read.
const LIST_TRIES: u32 = 5;
/// Requests for the remaining time of leases in flight.
const LOOKUPS: usize = 32;

/// A lease key as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) key: SubnetKey,
    pub(super) value: Vec<u8>,
    /// etcd lease of the key, 0 for none.
    pub(super) etcd_lease: i64,
    pub(super) mod_revision: i64,
}

/// All lease keys at one revision.
#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) entries: Vec<Stored>,
    /// Keys below `subnets/` that are no leases.
    pub(super) foreign: Vec<String>,
    pub(super) revision: i64,
    pub(super) cluster: u64,
}

impl Stored {
    pub(super) fn attrs(&self) -> Result<LeaseAttrs, String> {
        decode(&self.value)
    }
}

/// Decodes a lease value.
pub(super) fn decode(value: &[u8]) -> Result<LeaseAttrs, String> {
    LeaseAttrs::decode(&String::from_utf8_lossy(value)).map_err(|e| e.to_string())
}

/// Leases and conditions on top of a connection.
#[derive(Debug)]
pub(super) struct Store {
    pub(super) connection: Connection,
    pub(super) keys: Keys,
}

impl Store {
    /// All lease keys; a list longer than a page is read at one revision.
    pub(super) async fn list(&self) -> Result<Listing, SubnetError> {
        let mut tries = 0;
        loop {
            match self.list_once().await {
                Err(SubnetError::Failed { source, .. })
                    if tries < LIST_TRIES
                        && source.downcast_ref().is_some_and(|Described(error)| is_compacted(error)) =>
                {
                    tries += 1;
                }
                result => return result,
            }
        }
    }

    async fn list_once(&self) -> Result<Listing, SubnetError> {
        let end = prefix_end(&self.keys.subnets);
        let mut listing = Listing::default();
        let mut from: Vec<u8> = self.keys.subnets.clone().into();
        loop {
            let mut options = GetOptions::new().with_range(end.clone()).with_limit(PAGE);
            if listing.revision > 0 {
                options = options.with_revision(listing.revision);
            }
            let mut page = self.get("list leases", &from, options).await?;
            if listing.revision == 0 {
                let header = page.header();
                listing.revision = header.map_or(0, |header| header.revision());
                listing.cluster = header.map_or(0, |header| header.cluster_id());
            }
            for kv in page.kvs() {
                match self.stored(kv) {
                    Some(stored) => listing.entries.push(stored),
                    None => listing.foreign.push(String::from_utf8_lossy(kv.key()).into_owned()),
                }
            }
            let more = page.more();
            match page.take_kvs().pop() {
                Some(last) if more => {
                    from = last.into_key_value().0;
                    from.push(0);
                }
                _ => return Ok(listing),
            }
        }
    }

    /// One lease key, if it exists, and the revision of the answer.
    pub(super) async fn read(&self, key: &SubnetKey) -> Result<(Option<Stored>, i64), SubnetError> {
        let name = self.keys.lease(key);
        let answer = self.get(&format!("read {name}"), name.as_bytes(), GetOptions::new()).await?;
        let revision = answer.header().map_or(0, |header| header.revision());
        Ok((answer.kvs().first().and_then(|kv| self.stored(kv)), revision))
    }

    async fn get(&self, what: &str, key: &[u8], options: GetOptions) -> Result<GetResponse, SubnetError> {
        self.connection
            .call(what, |mut client| {
                let (key, options) = (key.to_owned(), options.clone());
                async move { client.get(key, Some(options)).await }
            })
            .await
    }

    /// Reads one key as it is.
    pub(super) async fn value(&self, name: &str) -> Result<Option<Vec<u8>>, SubnetError> {
        let answer = self.get(&format!("read {name}"), name.as_bytes(), GetOptions::new()).await?;
        Ok(answer.kvs().first().map(|kv| kv.value().to_owned()))
    }

    /// Lease keys created after `revision`.
    pub(super) async fn created_since(&self, revision: i64) -> Result<Vec<(SubnetKey, i64)>, SubnetError> {
        let options = GetOptions::new().with_prefix().with_keys_only().with_min_create_revision(revision + 1);
        let answer = self.get("list new leases", self.keys.subnets.as_bytes(), options).await?;
        let kvs = answer.kvs().iter();
        Ok(kvs.filter_map(|kv| Some((self.keys.subnet(kv.key())?, kv.create_revision()))).collect())
    }

    /// Asks for a new etcd lease. Returns its id and its time to live.
    pub(super) async fn grant(&self, ttl: Duration) -> Result<(i64, Duration), SubnetError> {
        let seconds = i64::try_from(ttl.as_secs().max(1)).unwrap_or(i64::MAX);
        let answer = self
            .connection
            .call("grant a lease", |mut client| async move { client.lease_grant(seconds, None).await })
            .await?;
        Ok((answer.id(), seconds_of(answer.ttl())))
    }

    /// Gives up an etcd lease this process was granted. What fails here ends by itself in time.
    pub(super) async fn revoke(&self, etcd_lease: i64) {
        let revoke = self.connection.call("revoke a lease", |mut client| async move {
            client.lease_revoke(etcd_lease).await.map(drop)
        });
        if let Err(error) = revoke.await {
            tracing::debug!("{error}");
        }
    }

    /// Begins the time of an etcd lease anew and returns its length. `None` when it does not exist any more.
    pub(super) async fn refresh(&self, etcd_lease: i64) -> Result<Option<Duration>, SubnetError> {
        self.connection
            .call("refresh the lease", |mut client| async move {
                match client.lease_keep_alive(etcd_lease).await {
                    Ok(_) => {}
                    Err(error) if is_not_found(&error) => return Ok(None),
                    Err(error) => return Err(error),
                }
                let answer = client.lease_time_to_live(etcd_lease, None).await?;
                Ok(Some(answer)
                    .filter(|answer| answer.ttl() >= 0)
                    .map(|answer| seconds_of(answer.granted_ttl())))
            })
            .await
    }

    /// Remaining time of an etcd lease, in whole seconds; nothing when it does not exist.
    pub(super) async fn remaining(&self, etcd_lease: i64) -> Result<Duration, SubnetError> {
        let answer = self
            .connection
            .call("read the time of a lease", |mut client| async move {
                client.lease_time_to_live(etcd_lease, None).await
            })
            .await?;
        Ok(seconds_of(answer.ttl()))
    }

    /// Creates the key unless it exists. Returns the revision at which it was created.
    pub(super) async fn create(
        &self,
        key: &SubnetKey,
        value: &str,
        etcd_lease: i64,
    ) -> Result<Option<i64>, SubnetError> {
        let name = self.keys.lease(key);
        let when = Compare::version(name.as_str(), CompareOp::Equal, 0);
        self.write(&format!("create {name}"), when, &put(&name, value, etcd_lease)).await
    }

    /// Replaces the key's value unless it changed since it was read.
    pub(super) async fn replace(
        &self,
        seen: &Stored,
        value: &str,
        etcd_lease: i64,
    ) -> Result<bool, SubnetError> {
        let name = self.keys.lease(&seen.key);
        let when = Compare::mod_revision(name.as_str(), CompareOp::Equal, seen.mod_revision);
        let done = self.write(&format!("write {name}"), when, &put(&name, value, etcd_lease)).await?;
        Ok(done.is_some())
    }

    /// Deletes the key unless it changed since `mod_revision`.
    pub(super) async fn delete(&self, key: &SubnetKey, mod_revision: i64) -> Result<bool, SubnetError> {
        let name = self.keys.lease(key);
        let when = Compare::mod_revision(name.as_str(), CompareOp::Equal, mod_revision);
        let done = self.write(&format!("delete {name}"), when, &TxnOp::delete(name.as_str(), None)).await?;
        Ok(done.is_some())
    }

    /// Deletes the key whatever it holds. `false` when there was none.
    pub(super) async fn delete_any(&self, key: &SubnetKey) -> Result<bool, SubnetError> {
        let name = &self.keys.lease(key);
        let answer =
            self.connection
                .call(&format!("delete {name}"), |mut client| async move {
                    client.delete(name.as_str(), None).await
                })
                .await?;
        Ok(answer.deleted() > 0)
    }

    /// Carries out `operation` on a condition. Returns the revision, or `None` when the condition was not met.
    ///
    /// An answer lost with its connection is asked for again, and then the condition may fail because of
    /// our own first try; callers look at the key in that case.
    async fn write(&self, what: &str, when: Compare, operation: &TxnOp) -> Result<Option<i64>, SubnetError> {
        let answer = self
            .connection
            .call(what, |mut client| {
                let txn = Txn::new().when([when.clone()]).and_then([operation.clone()]);
                async move {
                    match client.txn(txn).await {
                        // The etcd lease is gone: the caller asks for a new one.
                        Err(error) if is_not_found(&error) => Ok(None),
                        result => result.map(Some),
                    }
                }
            })
            .await?;
        Ok(answer
            .filter(|answer| answer.succeeded())
            .map(|answer| answer.header().map_or(0, |header| header.revision())))
    }

    /// The readable ones as leases, each with its remaining time.
    pub(super) async fn leases(&self, entries: Vec<Stored>) -> Result<Vec<Lease>, SubnetError> {
        let lookups: Vec<_> = entries
            .into_iter()
            .filter_map(|stored| {
                let attrs = stored.attrs().ok()?;
                Some(async move {
                    let expiration = self.expiration(stored.etcd_lease).await?;
                    Ok(Lease { key: stored.key, attrs, expiration })
                })
            })
            .collect();
        let results: Vec<_> = futures::stream::iter(lookups).buffered(LOOKUPS).collect().await;
        results.into_iter().collect()
    }

    /// When the key of an etcd lease ends.
    pub(super) async fn expiration(&self, etcd_lease: i64) -> Result<Option<SystemTime>, SubnetError> {
        if etcd_lease == 0 {
            return Ok(None);
        }
        Ok(Some(SystemTime::now() + self.remaining(etcd_lease).await?))
    }

    /// A key-value pair as a lease key; `None` when its name is none.
    pub(super) fn stored(&self, kv: &KeyValue) -> Option<Stored> {
        Some(Stored {
            key: self.keys.subnet(kv.key())?,
            value: kv.value().to_owned(),
            etcd_lease: kv.lease(),
            mod_revision: kv.mod_revision(),
        })
    }
}

fn put(name: &str, value: &str, etcd_lease: i64) -> TxnOp {
    let options = (etcd_lease != 0).then(|| PutOptions::new().with_lease(etcd_lease));
    TxnOp::put(name, value, options)
}

fn seconds_of(ttl: i64) -> Duration {
    Duration::from_secs(u64::try_from(ttl).unwrap_or_default())
}

/// The end of the range of all keys that start with `prefix`, which ends with a slash.
fn prefix_end(prefix: &str) -> Vec<u8> {
    let mut end: Vec<u8> = prefix.into();
    if let Some(last) = end.last_mut() {
        // '/' + 1, no overflow.
        *last += 1;
    }
    end
}
