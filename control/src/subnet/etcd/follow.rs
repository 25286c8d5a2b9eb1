//! Following all leases: a list, then a watch from its revision on, for ever.

use std::collections::HashSet;
use std::time::{Instant, SystemTime};

use etcd_client::{Event as EtcdEvent, EventType, WatchOptions, WatchResponse, WatchStream};
use tokio::sync::mpsc;
use tokio::time::timeout;
use tracing::{info, warn};

use super::Shared;
use super::connection::{Live, REQUEST, failed};
use super::store::decode;
use crate::lease::{Event, Lease, LeaseAttrs, WatchResult};
use crate::subnet::SubnetError;
use crate::subnet::backoff::Backoff;

/// Largest answer of a watch; a burst of changes comes as one message.
const MAX_MESSAGE: usize = 64 << 20;

/// Keys without a lease that one list complains about by name.
const SHOWN: usize = 5;

/// How far the leases are known.
#[derive(Debug, Clone, Copy)]
struct Position {
    /// All changes up to this revision have been delivered.
    revision: i64,
    /// A restored or another cluster counts anew.
    cluster: u64,
}

/// Why a watch ended.
enum End {
    /// The receiver is gone.
    Closed,
    /// Changes may be missing: everything must be read again.
    Gap,
    /// It can go on where it was.
    Broken(SubnetError),
}

/// Keys that were complained about.
#[derive(Debug, Default)]
struct Warned(HashSet<String>);

impl Warned {
    fn warn(&mut self, key: &str, reason: &str) {
        if self.0.insert(key.to_owned()) {
            warn!("ignoring key {key}: {reason}");
        }
    }

    /// Complains about the first few of many.
    fn warn_all(&mut self, keys: impl Iterator<Item = (String, String)>) {
        let new: Vec<_> = keys.filter(|(key, _)| !self.0.contains(key)).collect();
        for (key, reason) in new.iter().take(SHOWN) {
            self.warn(key, reason);
        }
        if new.len() > SHOWN {
            warn!("ignoring {} more keys that are no leases", new.len() - SHOWN);
            self.0.extend(new.into_iter().map(|(key, _)| key));
        }
    }
}

impl Shared {
    /// Reports the leases and every change of them; returns when nobody listens any more.
    pub(super) async fn follow(&self, tx: &mpsc::Sender<WatchResult>) {
        let mut warned = Warned::default();
        let mut backoff = Backoff::default();
        let mut position = None;
        let mut trouble: Option<Instant> = None;
        loop {
            let end = match position {
                None => match self.snapshot(tx, &mut warned).await {
                    Ok(Some(at)) => {
                        position = Some(at);
                        continue;
                    }
                    Ok(None) => End::Closed,
                    Err(error) => End::Broken(error),
                },
                Some(mut at) => {
                    let begin = at;
                    let end = self.watch_from(&mut at, tx, &mut warned, &mut trouble).await;
                    if at.revision != begin.revision {
                        backoff.reset();
                    }
                    position = Some(at);
                    end
                }
            };
            match end {
                End::Closed => return,
                End::Gap => {
                    info!("the history of the leases is not available any more; reading them again");
                    position = None;
                }
                End::Broken(error) => {
                    if trouble.is_none() {
                        warn!("cannot follow the leases: {error}; keeping what is known and trying again");
                        trouble = Some(Instant::now());
                    }
                }
            }
            backoff.pause().await;
        }
    }

    /// Reads all leases and delivers them. `None` when nobody listens.
    async fn snapshot(
        &self,
        tx: &mpsc::Sender<WatchResult>,
        warned: &mut Warned,
    ) -> Result<Option<Position>, SubnetError> {
        let listing = self.store.list().await?;
        let foreign = listing.foreign.iter().map(|key| (key.clone(), "its name is no subnet".to_owned()));
        let unreadable = listing.entries.iter().filter_map(|stored| {
            let reason = stored.attrs().err()?;
            Some((self.store.keys.lease(&stored.key), reason))
        });
        warned.warn_all(foreign.chain(unreadable));
        let (leases, _) = self.split(&listing);
        let position = Position { revision: listing.revision, cluster: listing.cluster };
        Ok(tx.send(WatchResult::Snapshot(leases)).await.ok().map(|()| position))
    }

    /// Delivers the changes after `position` and moves it on, until the watch ends.
    async fn watch_from(
        &self,
        position: &mut Position,
        tx: &mpsc::Sender<WatchResult>,
        warned: &mut Warned,
        trouble: &mut Option<Instant>,
    ) -> End {
        let live = match self.store.connection.live().await {
            Ok(live) => live,
            Err(error) => return End::Broken(error),
        };
        let options = WatchOptions::new().with_prefix().with_prev_key().with_progress_notify();
        let stream = open(&live, &self.store.keys.subnets, options, position.revision + 1).await;
        let mut stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                self.store.connection.discard(&live).await;
                return End::Broken(error);
            }
        };
        loop {
            let response = match stream.message().await {
                Ok(Some(response)) => response,
                result => {
                    self.store.connection.discard(&live).await;
                    return End::Broken(ended("follow leases", result.err()));
                }
            };
            let (revision, cluster) =
                response.header().map_or((0, 0), |header| (header.revision(), header.cluster_id()));
            // A revision behind ours is that of a restored cluster, or of a member that lags; reading all again
            // is right for both.
            if cluster != position.cluster || revision < position.revision {
                return End::Gap;
            }
            if response.canceled() {
                if is_gap(&response) {
                    return End::Gap;
                }
                self.store.connection.discard(&live).await;
                return End::Broken(canceled("follow leases", &response));
            }
            if let Some(since) = trouble.take() {
                info!("following the leases again after {:.1} s", since.elapsed().as_secs_f64());
            }
            let events: Vec<Event> =
                response.events().iter().filter_map(|event| self.event(event, warned)).collect();
            if !events.is_empty() && tx.send(WatchResult::Events(events)).await.is_err() {
                return End::Closed;
            }
            let seen = response.events().iter().filter_map(|event| Some(event.kv()?.mod_revision())).max();
            // Without events it is the answer to our request, which promises nothing, or a sign of progress.
            let seen = seen.or_else(|| (!response.created()).then_some(revision));
            position.revision = position.revision.max(seen.unwrap_or_default());
        }
    }

    /// The lease event in a change of a key; `None` for what is no lease.
    fn event(&self, event: &EtcdEvent, warned: &mut Warned) -> Option<Event> {
        let kv = event.kv()?;
        let name = String::from_utf8_lossy(kv.key());
        let Some(key) = self.store.keys.subnet(kv.key()) else {
            match event.event_type() {
                EventType::Put => warned.warn(&name, "its name is no subnet"),
                EventType::Delete => drop(warned.0.remove(name.as_ref())),
            }
            return None;
        };
        match event.event_type() {
            EventType::Put => match decode(kv.value()) {
                Ok(attrs) => {
                    warned.0.remove(name.as_ref());
                    let end = SystemTime::now() + self.term.ttl();
                    Some(Event::Added(Lease { key, attrs, expiration: (kv.lease() != 0).then_some(end) }))
                }
                Err(reason) => {
                    warned.warn(&name, &reason);
                    None
                }
            },
            EventType::Delete => {
                warned.0.remove(name.as_ref());
                let attrs = event.prev_kv().and_then(|kv| decode(kv.value()).ok());
                let attrs: LeaseAttrs = attrs.unwrap_or_default();
                Some(Event::Removed(Lease { key, attrs, expiration: None }))
            }
        }
    }
}

/// Opens a watch and waits for the server's consent to open the stream.
pub(super) async fn open(
    live: &Live,
    key: &str,
    options: WatchOptions,
    from: i64,
) -> Result<WatchStream, SubnetError> {
    let mut client = live.client.watch_client().max_decoding_message_size(MAX_MESSAGE);
    let options = options.with_start_revision(from);
    match timeout(REQUEST, client.watch(key, Some(options))).await {
        Ok(result) => result.map_err(|error| failed(&format!("watch {key}"), error)),
        Err(_) => Err(SubnetError::TimedOut {
            what: format!("watch {key}"),
            registry: "etcd".to_owned(),
            after: REQUEST,
        }),
    }
}

/// Whether the revision to go on from is not there any more.
pub(super) fn is_gap(response: &WatchResponse) -> bool {
    response.compact_revision() > 0 || response.cancel_reason().contains("compacted")
}

pub(super) fn ended(what: &str, error: Option<etcd_client::Error>) -> SubnetError {
    match error {
        Some(error) => failed(what, error),
        None => SubnetError::Invalid { what: what.to_owned(), reason: "etcd closed the watch".to_owned() },
    }
}

pub(super) fn canceled(what: &str, response: &WatchResponse) -> SubnetError {
    let reason = match response.cancel_reason() {
        "" => "etcd ended the watch".to_owned(),
        reason => format!("etcd ended the watch: {reason}"),
    };
    SubnetError::Invalid { what: what.to_owned(), reason }
}
