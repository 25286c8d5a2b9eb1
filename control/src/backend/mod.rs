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

mod kernel;
mod lock;
mod mtu;
mod peers;
mod userspace;
mod vtep;

use std::sync::Arc;

pub use lock::{DeviceLock, LOCK_DIR, LockError};
pub use mtu::MtuError;

use crate::api;
use crate::cli::Options;
use crate::handover::{Handed, PlaneWish};
use crate::iface::External;
use crate::lease::{Event, Lease, LeaseAttrs};
use crate::netconfig::{BackendKind, NetworkConfig};
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
        BackendKind::Vxlan(_) | BackendKind::Udp(_) => Ok(Box::new(userspace::Userspace::new(context)?)),
        other => Err(BackendError::Unsupported(format!("backend {} is not there yet", other.name()))),
    }
}
