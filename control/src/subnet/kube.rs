//! The Kubernetes registry: leases as node annotations, exactly flannel's.
//!
//! Kubernetes has already given each node its pod networks; a node's lease is those plus what the node publishes about
//! itself in annotations. The network configuration is a file, mounted from a ConfigMap. The rights flannel's role
//! grants are enough: get, list and watch nodes, patch the status of nodes, get the own pod.
//!
//! Invariants: the own pod networks are checked before anything is published; a node that cannot be read is logged
//! once and disturbs no other; nothing is forgotten while the API is away.

mod annotations;
mod api;
mod follow;
mod keep;
mod node;

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use thiserror::Error;
use tokio::sync::{OnceCell, mpsc, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use self::annotations::PrefixError;
use self::annotations::{Prefix, changed};
pub use self::api::Limits;
use self::api::{Api, ApiError, Source};
use self::node::Node;
use super::published::Published;
use super::{AcquireError, ConfigError, KeepError, KeepState, SubnetError, SubnetManager};
use crate::lease::{Lease, LeaseAttrs, SubnetKey, WatchResult};
use crate::netconfig::{NetworkConfig, Source as ConfigSource};

/// Pause between tries to read or patch the own node, as in flannel.
const RETRY_PAUSE: Duration = Duration::from_secs(3);
/// How often that is tried: half a minute.
const TRIES: u32 = 10;
/// How often a node without pod network is looked at again.
const CIDR_PAUSE: Duration = Duration::from_secs(2);
/// How often it is said that the node has no pod network yet.
const CIDR_REMINDER: u32 = 60;

/// What the `--kube-*` flags and the environment say.
#[derive(Debug, Clone)]
pub struct KubeConfig {
    /// `--kube-api-url`; wins over the server in the kubeconfig, alone it means no credentials.
    pub api_url: Option<String>,
    /// `--kubeconfig-file`; with neither the in-cluster service account is used.
    pub kubeconfig: Option<PathBuf>,
    /// `--kube-annotation-prefix`
    pub annotation_prefix: String,
    /// `--net-config-path`
    pub net_config: PathBuf,
    /// `--set-node-network-unavailable`: tell Kubernetes when the network is there.
    pub set_node_network_unavailable: bool,
    /// `NODE_NAME`
    pub node_name: Option<String>,
    /// `POD_NAMESPACE` and `POD_NAME`, to ask for the node's name.
    pub pod: Option<(String, String)>,
    /// How long the API may keep us waiting.
    pub limits: Limits,
}

/// The flags or the environment do not do.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum KubeConfigError {
    /// The annotation prefix.
    #[error(transparent)]
    Prefix(#[from] PrefixError),
    /// Nothing tells which node this is.
    #[error(
        "the name of this node is unknown: set the environment variable NODE_NAME, or both POD_NAME and POD_NAMESPACE"
    )]
    NoNodeName,
    /// `EVENT_QUEUE_DEPTH` is not a number.
    #[error("EVENT_QUEUE_DEPTH is {0:?}, not a whole number")]
    QueueDepth(String),
}

impl KubeConfig {
    /// Fills in what the environment says, by `var`.
    ///
    /// # Errors
    ///
    /// When `EVENT_QUEUE_DEPTH` is no number. A number has no effect: no events are queued here.
    pub fn with_environment(mut self, var: impl Fn(&str) -> Option<String>) -> Result<Self, KubeConfigError> {
        let var = |name| var(name).filter(|value| !value.is_empty());
        self.node_name = var("NODE_NAME");
        self.pod = var("POD_NAMESPACE").zip(var("POD_NAME"));
        if let Some(depth) = var("EVENT_QUEUE_DEPTH")
            && depth.parse::<i64>().is_err()
        {
            return Err(KubeConfigError::QueueDepth(depth));
        }
        Ok(self)
    }
}

/// Leases as node annotations.
#[derive(Debug, Clone)]
pub struct KubeManager {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    api: Api,
    prefix: Prefix,
    config: KubeConfig,
    node_name: OnceCell<String>,
    published: Published,
}

impl KubeManager {
    /// A registry; nothing is connected yet.
    ///
    /// # Errors
    ///
    /// When the prefix is none or nothing tells which node this is.
    pub fn new(config: KubeConfig) -> Result<Self, KubeConfigError> {
        let prefix = config.annotation_prefix.parse()?;
        let node_name = match (&config.node_name, &config.pod) {
            (Some(name), _) => OnceCell::new_with(Some(name.clone())),
            (None, Some(_)) => OnceCell::new(),
            (None, None) => return Err(KubeConfigError::NoNodeName),
        };
        let source = Source { url: config.api_url.clone(), kubeconfig: config.kubeconfig.clone() };
        let api = Api::new(source, config.limits);
        let shared = Shared { api, prefix, config, node_name, published: Published::default() };
        Ok(KubeManager { shared: Arc::new(shared) })
    }
}

impl Shared {
    /// The name of this node, asked for once.
    async fn node_name(&self) -> Result<&str, SubnetError> {
        let name = self.node_name.get_or_try_init(|| async {
            let (namespace, pod) = self.config.pod.as_ref().ok_or_else(|| SubnetError::Invalid {
                what: "find the name of this node".to_owned(),
                reason: KubeConfigError::NoNodeName.to_string(),
            })?;
            let what = format!("pods ({pod} in namespace {namespace})");
            let found = self.api.node_of_pod(namespace, pod).await;
            let name = found.map_err(|error| error.during("get", &what))?;
            if name.is_empty() {
                let reason = format!("pod {pod} in namespace {namespace} has no spec.nodeName");
                return Err(SubnetError::Invalid { what: "find the name of this node".to_owned(), reason });
            }
            Ok(name)
        });
        name.await.map(String::as_str)
    }

    async fn own_node(&self) -> Result<Node, SubnetError> {
        let name = self.node_name().await?;
        self.api.node(name).await.map_err(|error| error.during("get", &format!("nodes ({name})")))
    }

    /// As [`Shared::own_node`], for half a minute: at a node's start its API server may start, too.
    async fn own_node_patiently(&self) -> Result<Node, SubnetError> {
        let mut tries = 1;
        loop {
            match self.own_node().await {
                Err(error) if tries < TRIES && !is_forbidden(&error) => {
                    warn!("{error}; trying again in {RETRY_PAUSE:?}");
                    tries += 1;
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                result => return result,
            }
        }
    }

    fn network_config(&self) -> Result<NetworkConfig, ConfigError> {
        let path = &self.config.net_config;
        let place = path.display().to_string();
        let text = match std::fs::read(path) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let hint =
                    "mount the ConfigMap kube-flannel-cfg there, or name another file with --net-config-path";
                return Err(ConfigError::Missing { place, hint: hint.to_owned() });
            }
            Err(e) => {
                let what = format!("read {place}");
                return Err(SubnetError::Failed { what, source: Box::new(e) }.into());
            }
        };
        NetworkConfig::parse(&text, ConfigSource::Kubernetes)
            .map_err(|e| ConfigError::Invalid { place, reason: e.to_string() })
    }

    async fn acquire(&self, net: &NetworkConfig, attrs: &LeaseAttrs) -> Result<Lease, AcquireError> {
        let mut tries = 0;
        let mut waited = 0;
        loop {
            match self.publish(net, attrs).await {
                Ok(Some(lease)) => return Ok(lease),
                Ok(None) => {
                    if waited % CIDR_REMINDER == 0 {
                        warn!(
                            "node {} has no podCIDR yet; waiting for kube-controller-manager to assign one (--allocate-node-cidrs, --cluster-cidr), which it cannot when the cluster network is used up",
                            self.node_name().await?
                        );
                    }
                    waited += 1;
                    tokio::time::sleep(CIDR_PAUSE).await;
                }
                Err(AcquireError::Registry(error)) => {
                    tries += 1;
                    if tries >= TRIES || is_forbidden(&error) {
                        return Err(error.into());
                    }
                    warn!("cannot publish this node: {error}; trying again in {RETRY_PAUSE:?}");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Checks the own node's pod networks and publishes `attrs`. `None` while there are none.
    async fn publish(&self, net: &NetworkConfig, attrs: &LeaseAttrs) -> Result<Option<Lease>, AcquireError> {
        let node = self.own_node().await?;
        let cidrs = node.pod_cidrs().map_err(AcquireError::Unassigned)?;
        if cidrs == node::PodCidrs::default() {
            return Ok(None);
        }
        let name = &node.metadata.name;
        let v4 = match net.ipv4 {
            None => None,
            Some(network) => {
                let cidr = cidrs.v4.ok_or_else(|| missing(name, "IPv4"))?;
                if !network.contains(&cidr) {
                    return Err(outside(name, &cidr, "Network", &network));
                }
                Some(cidr)
            }
        };
        let v6 = match net.ipv6 {
            None => None,
            Some(network) => {
                let cidr = cidrs.v6.ok_or_else(|| missing(name, "IPv6"))?;
                if !network.contains(&cidr) {
                    return Err(outside(name, &cidr, "IPv6Network", &network));
                }
                Some(cidr)
            }
        };
        let Some(key) = SubnetKey::new(v4, v6) else { return Ok(None) };
        let lease = Lease { key, attrs: attrs.clone(), expiration: None };
        // Known before it is written, so that the task that keeps the lease does not write older ones back.
        self.published.set(&lease);
        self.patch_annotations(&node, attrs).await?;
        Ok(Some(lease))
    }

    /// Writes the annotations that differ. Returns whether any did.
    async fn patch_annotations(&self, node: &Node, attrs: &LeaseAttrs) -> Result<bool, SubnetError> {
        let present = node.annotations();
        let patch = changed(&self.prefix.published(attrs, present), present);
        if patch.is_empty() {
            return Ok(false);
        }
        let name = &node.metadata.name;
        let done = self.api.patch_annotations(name, &patch).await;
        done.map_err(|error| error.during("patch", &format!("nodes/status ({name})")))?;
        info!("published this node's address and backend data in the annotations of node {name}");
        Ok(true)
    }
}

fn missing(node: &str, family: &str) -> AcquireError {
    AcquireError::Unassigned(format!(
        "node {node} has no {family} podCIDR, although the network configuration enables {family}"
    ))
}

fn outside(
    node: &str,
    cidr: &dyn std::fmt::Display,
    key: &str,
    network: &dyn std::fmt::Display,
) -> AcquireError {
    AcquireError::Unassigned(format!(
        "podCIDR {cidr} of node {node} is outside {key} {network} of the network configuration; it must equal the cluster's --cluster-cidr"
    ))
}

/// Whether the API refuses what was asked, which time does not heal.
fn is_forbidden(error: &SubnetError) -> bool {
    let SubnetError::Failed { source, .. } = error else { return false };
    source.downcast_ref().is_some_and(|error: &ApiError| error.code() == 403)
}

#[async_trait]
impl SubnetManager for KubeManager {
    fn name(&self) -> String {
        self.shared.api.name()
    }

    async fn network_config(&self) -> Result<NetworkConfig, ConfigError> {
        self.shared.network_config()
    }

    async fn stored_public_ips(&self) -> Result<(Option<Ipv4Addr>, Option<Ipv6Addr>), SubnetError> {
        let node = self.shared.own_node_patiently().await?;
        let ips = self.shared.prefix.node_public_ips(node.annotations());
        let what = format!("read the public address set for node {}", node.metadata.name);
        ips.map_err(|reason| SubnetError::Invalid { what, reason })
    }

    /// What this node published in an earlier life, if readable.
    async fn own_lease(&self, _attrs: &LeaseAttrs) -> Result<Option<Lease>, SubnetError> {
        let node = self.shared.own_node_patiently().await?;
        Ok(node.lease(&self.shared.prefix, true, true).ok().flatten())
    }

    /// Waits for the node's pod networks, checks them, and publishes `attrs`; `previous` has no meaning here.
    ///
    /// # Cancel safety
    ///
    /// May be dropped at any time, which is the way to end the wait for a pod network.
    async fn acquire(
        &self,
        net: &NetworkConfig,
        attrs: &LeaseAttrs,
        _previous: Option<SubnetKey>,
    ) -> Result<Lease, AcquireError> {
        self.shared.acquire(net, attrs).await
    }

    async fn watch(&self, tx: mpsc::Sender<WatchResult>, cancel: CancellationToken) {
        tokio::select! {
            () = cancel.cancelled() => {}
            () = tx.closed() => {}
            () = self.shared.follow(&tx) => {}
        }
    }

    /// Tells Kubernetes that the network is there, and keeps the annotations as published.
    async fn keep(
        &self,
        lease: Lease,
        cancel: CancellationToken,
        state: watch::Sender<KeepState>,
    ) -> Result<(), KeepError> {
        tokio::select! {
            () = cancel.cancelled() => Ok(()),
            error = self.shared.keep_published(lease, &state) => Err(error),
        }
    }

    async fn list(&self) -> Result<Vec<Lease>, SubnetError> {
        let mut leases = Vec::new();
        let (v4, v6) = self.shared.families();
        let listed = self.shared.api.list_nodes(None, |node| {
            leases.extend(node.lease(&self.shared.prefix, v4, v6).ok().flatten());
        });
        listed.await.map_err(|error| error.during("list", "nodes"))?;
        leases.sort_by_key(|lease| lease.key);
        Ok(leases)
    }

    /// Always fails: Kubernetes gives and takes the subnets.
    async fn remove(&self, key: &SubnetKey) -> Result<bool, SubnetError> {
        Err(SubnetError::Invalid {
            what: format!("remove lease {key}"),
            reason: "Kubernetes assigns the subnets; delete the Node object to free one".to_owned(),
        })
    }
}
