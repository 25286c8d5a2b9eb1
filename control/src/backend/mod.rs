//! Backends: how an own lease becomes a tunnel and a peer's lease becomes a way to it.
//!
//! ```text
//!   app: attrs() -> acquire lease -> start(lease) -> apply(events)* , repair()* -> stop()
//! ```
//!
//! A backend is driven by one thread of its own ([`crate::app`]), so its calls may block for a moment and need no locks
//! among themselves. What others want to know about it goes through its [`Report`], which may be asked at any time.
//!
//! Invariant: every call leaves the machine in the state the known leases ask for or says what is missing; an operation that
//! fails is tried again by [`Backend::repair`] and never holds up the events behind it.

mod alloc;
mod device;
mod keeper;
mod kernel;
mod leases;
mod lock;
mod mtu;
mod peers;
mod routed;
mod userspace;
mod vtep;

use std::sync::Arc;

pub use lock::{DeviceLock, LOCK_DIR, LockError};
pub use mtu::MtuError;

use felt_hostnet::netlink::Link;
use ipnet::IpNet;
use serde_json::value::RawValue;

use self::vtep::VtepData;
use crate::api;
use crate::cli::Options;
use crate::handover::{Handed, PlaneWish};
use crate::iface::External;
use crate::lease::{Event, Lease, LeaseAttrs};
use crate::netconfig::{BackendKind, Dataplane, NetworkConfig};
use crate::reconcile::Change;
use crate::state::NodeState;

/// What a backend is made from.
#[derive(Debug)]
pub struct Context {
    /// Flags.
    pub options: Arc<Options>,
    /// Network configuration.
    pub net: NetworkConfig,
    /// External interface.
    pub external: External,
    /// The node's memory.
    pub state: NodeState,
    /// A running daemon has the devices and is going to hand them over.
    pub succeeds: bool,
    /// Overlay networks of the run before, whose routes may still be there.
    pub previous_networks: Vec<IpNet>,
}

impl Context {
    /// The addresses by which this node is known, with the backend's type.
    fn public_attrs(&self) -> LeaseAttrs {
        LeaseAttrs {
            public_ip: self.external.public_v4,
            public_ipv6: self.external.public_v6,
            backend_type: self.net.backend.kind.lease_type().into(),
            ..LeaseAttrs::default()
        }
    }

    /// Overlay networks of this run and the one before.
    fn networks(&self) -> Vec<IpNet> {
        let now = self.net.ipv4.map(IpNet::V4).into_iter().chain(self.net.ipv6.map(IpNet::V6));
        now.chain(self.previous_networks.iter().copied()).collect()
    }
}

/// A backend could not be made, started or kept.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The configuration asks for what is not there.
    #[error("{0}")]
    Unsupported(String),
    /// Another daemon has the device.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The tunnel's MTU would be too small.
    #[error(transparent)]
    Mtu(#[from] MtuError),
    /// The kernel refused.
    #[error(transparent)]
    Kernel(#[from] felt_hostnet::Error),
    /// The packet engine did not start.
    #[error("start the packet engine on {device}: {reason}")]
    Engine {
        /// Device name.
        device: String,
        /// Its own words.
        reason: String,
    },
}

/// See the module.
pub trait Backend: Send {
    /// The addresses by which this node is known, for finding a lease it holds already.
    fn public_attrs(&self) -> LeaseAttrs;

    /// What to publish, given the lease this node holds already.
    ///
    /// # Errors
    /// When the node cannot take part.
    fn attrs(&mut self, existing: Option<&Lease>) -> Result<LeaseAttrs, BackendError>;

    /// Makes the devices for the own lease and starts to move packets.
    ///
    /// # Errors
    /// What could not be made; left as it is, for the next start to go on from.
    fn start(&mut self, lease: &Lease) -> Result<(), BackendError>;

    /// Takes in leases known before [`Backend::start`], so that the first packet finds them. Returns those that have to
    /// be applied after it: all, unless the backend can do better.
    fn prepare(&mut self, events: Vec<Event>) -> Vec<Event> {
        events
    }

    /// What can be handed over to another daemon, or taken over from one: nothing, for a backend without packet loop.
    fn planes(&self) -> Vec<PlaneWish> {
        Vec::new()
    }

    /// As [`Backend::start`], with what another daemon has handed over.
    ///
    /// # Errors
    /// See [`Backend::start`].
    fn take_over(&mut self, lease: &Lease, handed: Handed) -> Result<(), BackendError> {
        drop(handed);
        self.start(lease)
    }

    /// Stops moving packets and gives away what they wait in. Then comes either the end, or
    /// [`Backend::take_back`].
    fn release(&mut self) -> Handed {
        Handed::default()
    }

    /// Goes on with what [`Backend::release`] gave away. What cannot be is for [`Backend::repair`].
    fn take_back(&mut self, handed: Handed) {
        drop(handed);
    }

    /// Takes in changes of other nodes' leases.
    fn apply(&mut self, events: Vec<Event>);

    /// All leases there are have been applied: what an earlier run left for others may go.
    fn synced(&mut self) {}

    /// Looks at the machine and restores what is missing; returns what it had to do, for the log.
    fn repair(&mut self) -> Vec<String>;

    /// The MTU for the subnet file, valid after [`Backend::start`].
    fn mtu(&self) -> u32;

    /// The view for the admin socket, metrics and readiness.
    fn report(&self) -> Arc<dyn Report>;

    /// Stops moving packets. Devices, addresses and routes stay, so that a restart is short.
    fn stop(&mut self);
}

/// A backend seen from outside.
pub trait Report: Send + Sync {
    /// Type, devices and their state.
    fn backend(&self) -> api::Backend;
    /// Other nodes in key order.
    fn peers(&self) -> Vec<api::Peer>;
    /// Counters of the packet engines.
    fn engines(&self) -> Vec<api::Engine>;
    /// Whether packets can move.
    ///
    /// # Errors
    /// What does not make progress.
    fn alive(&self) -> Result<(), String>;
}

/// Makes the backend the configuration names.
///
/// # Errors
/// When the configuration asks for what this version does not have, or the device is taken.
pub fn create(context: Context) -> Result<Box<dyn Backend>, BackendError> {
    match &context.net.backend.kind {
        BackendKind::Vxlan(_) => match dataplane(&context) {
            Dataplane::Kernel => Ok(Box::new(routed::Routed::new(context)?)),
            _ => Ok(Box::new(userspace::Userspace::new(context)?)),
        },
        BackendKind::Udp(_) => Ok(Box::new(userspace::Userspace::new(context)?)),
        BackendKind::HostGw | BackendKind::Ipip { .. } => Ok(Box::new(routed::Routed::new(context)?)),
        BackendKind::Alloc => Ok(Box::new(alloc::Alloc::new(context))),
        other => Err(BackendError::Unsupported(format!("backend {} is not there yet", other.name()))),
    }
}

/// Who moves the packets of a vxlan network on this node. Says so once.
fn dataplane(context: &Context) -> Dataplane {
    const TUN: &str = "/dev/net/tun";
    let asked = context.options.dataplane.unwrap_or(context.net.backend.dataplane);
    if asked != Dataplane::Auto {
        tracing::info!("data plane: {asked}, as configured");
        return asked;
    }
    match std::fs::File::options().read(true).write(true).open(TUN) {
        Ok(_) => {
            tracing::info!("data plane: userspace ({TUN} opens)");
            Dataplane::Userspace
        }
        Err(error) => {
            tracing::warn!("data plane: kernel ({TUN}: {error})");
            Dataplane::Kernel
        }
    }
}

/// A peer as its lease has it; how it is reached is for the backend to say.
fn peer_of(lease: &Lease) -> api::Peer {
    let attrs = &lease.attrs;
    let vxlan = attrs.backend_type == "vxlan";
    let mac = |data: &Option<Box<RawValue>>| {
        VtepData::decode(data.as_deref()).ok().filter(|_| vxlan).map(|data| data.mac.to_string())
    };
    api::Peer {
        key: lease.key.to_string(),
        ipv4: lease.key.v4,
        ipv6: lease.key.v6,
        public_ip: attrs.public_ip,
        public_ipv6: attrs.public_ipv6,
        backend_type: attrs.backend_type.clone(),
        vtep_mac: mac(&attrs.backend_data),
        vtep_mac_v6: mac(&attrs.backend_v6_data),
        ..api::Peer::default()
    }
}

/// Changes in words; of many only their number.
fn summary(changes: &[Change]) -> Vec<String> {
    match changes {
        [] => Vec::new(),
        few @ ([_] | [_, _] | [_, _, _]) => few.iter().map(ToString::to_string).collect(),
        many => vec![format!(
            "{} entries of routes, neighbours and forwarding, the first: {}",
            many.len(),
            many[0]
        )],
    }
}

/// Why a link of the name we want cannot be replaced.
fn foreign(link: &Link) -> String {
    let kind = link.kind.as_deref().unwrap_or("physical");
    format!("{} exists and is a {kind} device; remove or rename it", link.name)
}
