//! `alloc`: a lease and nothing else. Somebody else carries the packets, or nobody.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Backend, BackendError, Context, Report};
use crate::api;
use crate::lease::{Event, Lease, LeaseAttrs};

/// The backend.
pub(super) struct Alloc {
    context: Context,
    shared: Arc<Shared>,
}

/// What the report sees.
struct Shared {
    mtu: u32,
    peers: Mutex<super::leases::Peers>,
}

impl Alloc {
    /// Needs nothing of the machine.
    pub(super) fn new(context: Context) -> Self {
        let mtu = context.external.mtu;
        Self { context, shared: Arc::new(Shared { mtu, peers: Mutex::default() }) }
    }
}

impl Backend for Alloc {
    fn public_attrs(&self) -> LeaseAttrs {
        self.context.public_attrs()
    }

    fn attrs(&mut self, _: Option<&Lease>) -> Result<LeaseAttrs, BackendError> {
        Ok(self.public_attrs())
    }

    fn start(&mut self, _: &Lease) -> Result<(), BackendError> {
        Ok(())
    }

    fn apply(&mut self, events: Vec<Event>) {
        let mut peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        events.into_iter().for_each(|event| peers.apply(event));
    }

    fn repair(&mut self) -> Vec<String> {
        Vec::new()
    }

    fn mtu(&self) -> u32 {
        self.shared.mtu
    }

    fn report(&self) -> Arc<dyn Report> {
        Arc::clone(&self.shared) as Arc<dyn Report>
    }

    fn stop(&mut self) {}
}

impl Report for Shared {
    fn backend(&self) -> api::Backend {
        api::Backend { kind: "alloc".into(), dataplane: "none".into(), mtu: self.mtu, devices: Vec::new() }
    }

    fn peers(&self) -> Vec<api::Peer> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let reason = "the alloc backend moves no packets";
        let ignored = |peer: &super::leases::Peer| api::Peer {
            state: api::PeerState::Ignored,
            reason: Some(reason.into()),
            ..super::peer_of(&peer.lease)
        };
        peers.iter().map(ignored).collect()
    }

    fn engines(&self) -> Vec<api::Engine> {
        Vec::new()
    }

    fn alive(&self) -> Result<(), String> {
        Ok(())
    }
}
