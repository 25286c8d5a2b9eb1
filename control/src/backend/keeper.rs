//! Keeps the kernel's routes, neighbours and forwarding entries as the leases want them.
//!
//! ```text
//!   apply    events -> wanted; what differs from the last wanted state is changed          (each lease event)
//!   repair   the kernel is read; what differs from the wanted state is changed             (start, netlink events, period)
//! ```
//!
//! Until the registry's first full answer has come nothing is changed, so that what an earlier run left keeps working
//! while this one starts. A change that the kernel refuses is reported once, does not hold up the others, and is tried
//! again by the next repair.

use std::collections::BTreeMap;
use std::net::IpAddr;

use felt_hostnet::Error;
use felt_hostnet::netlink::{Handle as Netlink, RouteKind};
use ipnet::IpNet;

use super::kernel::{self, Refusal, Scope};
use super::leases::{Method, Peers, Way};
use crate::api;
use crate::lease::{Event, Lease};
use crate::reconcile::{Change, Tables, table_changes};

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Keeper {
    peers: Peers,
    installed: Tables,
    synced: bool,
    refused: BTreeMap<Change, String>,
}

impl Keeper {
    /// Takes in changes of other nodes' leases.
    pub(super) fn apply(&mut self, netlink: &mut Netlink, method: Method, scope: &Scope, events: Vec<Event>) {
        for event in events {
            self.peers.apply(event);
        }
        if self.synced {
            let wanted = self.wanted(netlink, method, scope);
            let (_, refused) = kernel::apply_all(netlink, table_changes(&wanted, &self.installed));
            self.installed = wanted;
            self.note(refused, false);
        }
    }

    /// All leases there are have been told: from now on what belongs to none of them is removed.
    pub(super) fn synced(&mut self) {
        self.synced = true;
    }

    /// Makes the kernel hold what is wanted; returns what had to be changed.
    pub(super) fn repair(
        &mut self,
        netlink: &mut Netlink,
        method: Method,
        scope: &Scope,
    ) -> Result<Vec<Change>, Error> {
        if !self.synced {
            return Ok(Vec::new());
        }
        let wanted = self.wanted(netlink, method, scope);
        let (done, refused) = kernel::reconcile_tables(netlink, scope, &wanted)?;
        self.installed = wanted;
        self.note(refused, true);
        Ok(done)
    }

    fn wanted(&mut self, netlink: &mut Netlink, method: Method, scope: &Scope) -> Tables {
        self.peers.wanted(method, &mut |ip| on_link(netlink, scope, ip))
    }

    /// Remembers what was refused and says what is new; `all` when these are all there are.
    fn note(&mut self, refused: Vec<Refusal>, all: bool) {
        let known = if all { std::mem::take(&mut self.refused) } else { BTreeMap::new() };
        for Refusal { change, error } in refused {
            let text = error.to_string();
            if known.get(&change).or_else(|| self.refused.get(&change)) != Some(&text) {
                tracing::error!("{change}: {text}; it is tried again");
            }
            self.refused.insert(change, text);
        }
    }

    /// How the packets of a node go, for the packet loop's report.
    pub(super) fn way(&self, lease: &Lease) -> Way {
        self.peers.get(&lease.key).map_or(Way::Tunnel, |peer| peer.way)
    }

    /// What the kernel refused for a node.
    fn refusal(&self, lease: &Lease) -> Option<String> {
        let prefixes = [lease.key.v4.map(IpNet::V4), lease.key.v6.map(IpNet::V6)];
        let mut prefixes = prefixes.into_iter().flatten();
        prefixes.find_map(|prefix| {
            self.refused.iter().find_map(|(change, text)| match change {
                Change::SetRoute(route) if route.dst == prefix => Some(text.clone()),
                Change::SetNeighbour(_, address, _) if *address == prefix.network() => Some(text.clone()),
                _ => None,
            })
        })
    }

    /// Other nodes in key order.
    pub(super) fn report(&self) -> Vec<api::Peer> {
        let report = self.peers.iter().map(|peer| {
            let state = match (&peer.ignored, peer.way) {
                (Some(_), _) => api::PeerState::Ignored,
                (None, Way::Tunnel) => api::PeerState::Tunnel,
                (None, Way::Direct) => api::PeerState::Direct,
            };
            let reason = peer.ignored.clone().or_else(|| self.refusal(&peer.lease));
            api::Peer { state, reason, ..super::peer_of(&peer.lease) }
        });
        report.collect()
    }
}

/// The device by which a node is a direct neighbour: the kernel would send to it without a gateway, and not by a tunnel
/// of ours.
fn on_link(netlink: &mut Netlink, scope: &Scope, ip: IpAddr) -> Option<u32> {
    let found = netlink.route_lookup(ip, None).ok()?;
    let plain = found.kind == RouteKind::Unicast && found.gateway.is_none();
    let tunnel = |dev: &u32| scope.devices.contains(dev) || scope.reserved.contains(dev);
    found.dev.map(|dev| dev.0).filter(|dev| plain && !tunnel(dev))
}
