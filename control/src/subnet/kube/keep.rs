//! Keeping the own node as published: its annotations and its condition.

use std::time::{Duration, Instant, SystemTime};

use futures::StreamExt;
use jiff::Timestamp;
use tokio::sync::watch;
use tracing::{info, warn};

use super::Shared;
use super::api::{ApiError, NodeEvent};
use super::node::Node;
use crate::lease::{Lease, SubnetKey};
use crate::subnet::backoff::Backoff;
use crate::subnet::{KeepError, KeepState, SubnetError};

/// Shortest time between two repairs, should somebody else write the same annotations all the time.
const REPAIR_PAUSE: Duration = Duration::from_secs(10);
/// A refused condition is tried again this much later: somebody may grant the right.
const REFUSED_PAUSE: Duration = Duration::from_secs(300);

/// What has been done for the node so far.
#[derive(Debug, Default)]
struct Progress {
    /// The node object the condition was set for.
    announced: Option<String>,
    /// No try to set the condition before this.
    not_before: Option<Instant>,
    repaired: Option<Instant>,
}

/// How a round with the own node ended.
enum Round {
    /// The watch ended in order.
    Over,
    /// The node's pod network is another one now.
    Changed(KeepError),
}

impl Shared {
    /// Keeps the own node as published until its pod network changes.
    pub(super) async fn keep_published(&self, lease: Lease, state: &watch::Sender<KeepState>) -> KeepError {
        let mut progress = Progress::default();
        let mut backoff = Backoff::default();
        let mut trouble: Option<Instant> = None;
        state.send_modify(|state| {
            state.expiration = None;
            state.renewed_at = Some(SystemTime::now());
        });
        loop {
            let mut reached = || {
                if let Some(since) = trouble.take() {
                    info!("the own node is watched again after {:.1} s", since.elapsed().as_secs_f64());
                }
                backoff.reset();
            };
            match self.round(&lease, state, &mut progress, &mut reached).await {
                Ok(Round::Over) => {}
                Ok(Round::Changed(error)) => return error,
                Err(error) => {
                    let text = error.to_string();
                    if trouble.is_none() {
                        trouble = Some(Instant::now());
                        warn!("cannot keep the own node as published: {text}; trying again");
                    }
                    state.send_modify(|state| {
                        state.failures += 1;
                        state.last_error = Some(text);
                    });
                }
            }
            backoff.pause().await;
        }
    }

    /// Reads the own node, puts it right, and watches it.
    async fn round(
        &self,
        lease: &Lease,
        state: &watch::Sender<KeepState>,
        progress: &mut Progress,
        reached: &mut impl FnMut(),
    ) -> Result<Round, SubnetError> {
        // What is due is tried now, or has no object any more.
        progress.not_before.take_if(|at| *at <= Instant::now());
        let name = self.node_name().await?;
        let selector = format!("metadata.name={name}");
        let during = |error: ApiError| error.during("list and watch", &format!("nodes ({name})"));
        let mut node = None;
        let listed = self.api.list_nodes(Some(&selector), |found| node = Some(found)).await;
        let version = listed.map_err(during)?;
        if let Some(node) = node {
            if let Some(changed) = self.put_right(&node, lease, state, progress).await? {
                return Ok(Round::Changed(changed));
            }
        } else {
            warn!("node {name} does not exist in Kubernetes; waiting for it to be registered again");
        }
        reached();
        state.send_if_modified(|state| {
            let troubled = state.failures > 0;
            state.failures = 0;
            state.last_error = None;
            troubled
        });
        let stream = self.api.watch_nodes(Some(&selector), &version).await.map_err(during)?;
        let mut stream = std::pin::pin!(stream);
        loop {
            let event = tokio::select! {
                event = stream.next() => event,
                // A condition that was refused is due again: read the node anew.
                () = until(progress.not_before) => return Ok(Round::Over),
            };
            match event {
                None => return Ok(Round::Over),
                Some(Ok(NodeEvent::Put(node))) => {
                    if let Some(changed) = self.put_right(&node, lease, state, progress).await? {
                        return Ok(Round::Changed(changed));
                    }
                }
                Some(Ok(NodeEvent::Deleted(_))) => {
                    warn!("node {name} was deleted from Kubernetes; waiting for it to be registered again");
                }
                Some(Ok(NodeEvent::Bookmark(_))) => {}
                Some(Err(error)) if error.is_gone() => return Ok(Round::Over),
                Some(Err(error)) => return Err(during(error)),
            }
        }
    }

    /// Publishes again what is missing on the node. Returns the error that ends the lease, if its pod network
    /// changed.
    async fn put_right(
        &self,
        node: &Node,
        lease: &Lease,
        state: &watch::Sender<KeepState>,
        progress: &mut Progress,
    ) -> Result<Option<KeepError>, SubnetError> {
        // Families the network configuration leaves off do not matter.
        let cidrs = node.pod_cidrs().unwrap_or_default();
        let v4 = cidrs.v4.filter(|_| lease.key.v4.is_some());
        let v6 = cidrs.v6.filter(|_| lease.key.v6.is_some());
        match SubnetKey::new(v4, v6) {
            // A node just registered again gets its pod network later.
            None => return Ok(None),
            Some(now) if now != lease.key => {
                return Ok(Some(KeepError::Reassigned { key: lease.key, now }));
            }
            Some(_) => {}
        }
        if let Some(at) = progress.repaired
            && at.elapsed() < REPAIR_PAUSE
            && !self.is_as_published(node, lease)
        {
            tokio::time::sleep(REPAIR_PAUSE.saturating_sub(at.elapsed())).await;
        }
        if self.patch_annotations(node, &self.published.attrs(lease)).await? {
            progress.repaired = Some(Instant::now());
            state.send_modify(|state| state.renewed_at = Some(SystemTime::now()));
        }
        self.announce(node, progress).await?;
        Ok(None)
    }

    fn is_as_published(&self, node: &Node, lease: &Lease) -> bool {
        let present = node.annotations();
        let wanted = self.prefix.published(&self.published.attrs(lease), present);
        super::changed(&wanted, present).is_empty()
    }

    /// Tells Kubernetes once per node object, and when somebody says otherwise, that the network is there.
    async fn announce(&self, node: &Node, progress: &mut Progress) -> Result<(), SubnetError> {
        let announced = progress.announced.as_deref() == Some(&node.metadata.uid);
        let wanted = self.config.set_node_network_unavailable && (!announced || node.network_unavailable());
        if !wanted || progress.not_before.is_some_and(|at| at > Instant::now()) {
            return Ok(());
        }
        progress.not_before = None;
        let name = &node.metadata.name;
        let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string();
        match self.api.patch_network_available(name, &now).await {
            Ok(()) => {
                progress.announced = Some(node.metadata.uid.clone());
                Ok(())
            }
            Err(error) if error.code() == 403 => {
                let error = error.during("patch", &format!("nodes/status ({name})"));
                warn!(
                    "cannot set the condition NetworkUnavailable: {error}; grant it, or start with --set-node-network-unavailable=false"
                );
                progress.not_before = Some(Instant::now() + REFUSED_PAUSE);
                Ok(())
            }
            Err(error) => Err(error.during("patch", &format!("nodes/status ({name})"))),
        }
    }
}

/// Waits for a moment, for ever if there is none.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
