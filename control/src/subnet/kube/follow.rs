//! Following all nodes: a list in pages, then a watch from its resource version on, for ever.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use futures::StreamExt;
use tokio::sync::mpsc;
use tracing::{info, warn};

use super::Shared;
use super::api::{ApiError, NodeEvent};
use super::node::Node;
use crate::lease::{Event, Lease, WatchResult};
use crate::subnet::backoff::Backoff;

/// Leases by the names of their nodes.
#[derive(Debug, Default)]
struct Known {
    leases: HashMap<String, Lease>,
    warned: HashSet<String>,
    families: (bool, bool),
}

/// Why a watch ended.
enum End {
    /// The receiver is gone.
    Closed,
    /// The server ended it in order; go on from where it was.
    Over,
    /// Everything must be listed again.
    Gone,
    Broken(ApiError),
}

impl Shared {
    /// Which families are on; both while the configuration cannot be read.
    pub(super) fn families(&self) -> (bool, bool) {
        self.network_config().map_or((true, true), |net| (net.ipv4.is_some(), net.ipv6.is_some()))
    }

    /// Reports the leases and every change of them; returns when nobody listens any more.
    pub(super) async fn follow(&self, tx: &mpsc::Sender<WatchResult>) {
        let mut known = Known { families: self.families(), ..Known::default() };
        let mut backoff = Backoff::default();
        let mut version: Option<String> = None;
        let mut trouble: Option<Instant> = None;
        loop {
            let end = match version.take() {
                None => match self.snapshot(tx, &mut known).await {
                    Ok(Some(at)) => {
                        recovered(&mut trouble);
                        version = Some(at);
                        continue;
                    }
                    Ok(None) => End::Closed,
                    Err(error) => End::Broken(error),
                },
                Some(mut at) => {
                    let before = at.clone();
                    let end = self.watch_from(&mut at, tx, &mut known, &mut trouble).await;
                    if at != before {
                        backoff.reset();
                    }
                    version = Some(at);
                    end
                }
            };
            match end {
                End::Closed => return,
                End::Over => backoff.reset(),
                End::Gone => {
                    info!("the history of the nodes is not available any more; listing them again");
                    version = None;
                }
                End::Broken(error) => {
                    if trouble.is_none() {
                        let error = error.during("list and watch", "nodes");
                        warn!("cannot follow the nodes: {error}; keeping what is known and trying again");
                        trouble = Some(Instant::now());
                    }
                }
            }
            backoff.pause().await;
        }
    }

    /// Lists all nodes and delivers their leases. `None` when nobody listens.
    async fn snapshot(
        &self,
        tx: &mpsc::Sender<WatchResult>,
        known: &mut Known,
    ) -> Result<Option<String>, ApiError> {
        let (mut found, mut unreadable) = (HashMap::new(), HashSet::new());
        let listed = self.api.list_nodes(None, |node| {
            let name = node.metadata.name.clone();
            match known.read(self, &node) {
                Some(Some(lease)) => drop(found.insert(name, lease)),
                Some(None) => {}
                None => {
                    // What it was before still holds.
                    found.extend(known.leases.get(&name).map(|lease| (name.clone(), lease.clone())));
                    unreadable.insert(name);
                }
            }
        });
        let version = match listed.await {
            Err(error) if error.is_gone() => {
                return Err(ApiError::Broken("the list took longer than its history is kept".to_owned()));
            }
            result => result?,
        };
        // What is left are names of nodes deleted meanwhile.
        known.warned.retain(|name| unreadable.contains(name));
        known.leases = found;
        let leases = known.leases.values().cloned().collect();
        Ok(tx.send(WatchResult::Snapshot(leases)).await.ok().map(|()| version))
    }

    /// Delivers the changes after `version` and moves it on, until the watch ends.
    async fn watch_from(
        &self,
        version: &mut String,
        tx: &mpsc::Sender<WatchResult>,
        known: &mut Known,
        trouble: &mut Option<Instant>,
    ) -> End {
        let stream = match self.api.watch_nodes(None, version).await {
            Ok(stream) => stream,
            Err(error) if error.is_gone() => return End::Gone,
            Err(error) => return End::Broken(error),
        };
        // A burst of events becomes one delivery.
        let mut stream = std::pin::pin!(stream.ready_chunks(256));
        recovered(trouble);
        while let Some(chunk) = stream.next().await {
            let mut events = Vec::new();
            let mut end = None;
            for event in chunk {
                let deleted = matches!(event, Ok(NodeEvent::Deleted(_)));
                let at = match event {
                    Ok(NodeEvent::Put(node)) => {
                        known.update(self, &node, &mut events);
                        node.metadata.resource_version
                    }
                    Ok(NodeEvent::Deleted(node)) => {
                        known.warned.remove(&node.metadata.name);
                        events.extend(known.leases.remove(&node.metadata.name).map(Event::Removed));
                        node.metadata.resource_version
                    }
                    Ok(NodeEvent::Bookmark(version)) => version,
                    Err(error) if error.is_gone() => {
                        end = Some(End::Gone);
                        break;
                    }
                    Err(error) => {
                        end = Some(End::Broken(error));
                        break;
                    }
                };
                if is_before(&at, version) {
                    if deleted {
                        // Older servers show a deleted node with the version of its last change.
                        continue;
                    }
                    // The API server was restored from a backup: what happened before is not known any more.
                    end = Some(End::Gone);
                    break;
                }
                if !at.is_empty() {
                    *version = at;
                }
            }
            if !events.is_empty() && tx.send(WatchResult::Events(events)).await.is_err() {
                return End::Closed;
            }
            if let Some(end) = end {
                return end;
            }
        }
        End::Over
    }
}

/// Whether a resource version is older than another. They are numbers in the order of the changes to one resource
/// (Kubernetes, "Resource versions"); what is no number is not compared.
fn is_before(version: &str, other: &str) -> bool {
    let number = |text: &str| text.parse::<u128>().ok();
    number(version).zip(number(other)).is_some_and(|(version, other)| version < other)
}

fn recovered(trouble: &mut Option<Instant>) {
    if let Some(since) = trouble.take() {
        info!("following the nodes again after {:.1} s", since.elapsed().as_secs_f64());
    }
}

impl Known {
    /// The lease of a node, `Some(None)` when it is none of ours, `None` when it cannot be read.
    fn read(&mut self, shared: &Shared, node: &Node) -> Option<Option<Lease>> {
        let (v4, v6) = self.families;
        match node.lease(&shared.prefix, v4, v6) {
            Ok(lease) => {
                self.warned.remove(&node.metadata.name);
                Some(lease)
            }
            Err(reason) => {
                if self.warned.insert(node.metadata.name.clone()) {
                    warn!("ignoring node {}: {reason}", node.metadata.name);
                }
                None
            }
        }
    }

    /// Adds to `events` what changed with a node.
    fn update(&mut self, shared: &Shared, node: &Node, events: &mut Vec<Event>) {
        // COMPAT: as in flannel, a node that lost its annotations keeps its lease until it is deleted.
        let Some(Some(lease)) = self.read(shared, node) else { return };
        let old = self.leases.insert(node.metadata.name.clone(), lease.clone());
        if old.as_ref() == Some(&lease) {
            return;
        }
        events.extend(old.filter(|old| old.key != lease.key).map(Event::Removed));
        events.push(Event::Added(lease));
    }
}
