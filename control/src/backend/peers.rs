//! Leases turned into table entries of the userspace data plane.
//!
//! [`Table::apply`] takes one lease event and returns the changes of each plane's forwarding table. A plane is one packet
//! engine: VXLAN in dual stack has two, the others have one.
//!
//! Two leases may claim the same prefix for a while (a node that became dual-stack leaves its old IPv4-only key behind
//! until that expires). The later claim is in force; when it goes, the earlier one comes back. So after any order of
//! events the tables hold exactly what the current leases ask for, which the tests check against a rebuilt table.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use felt_dataplane::fib::{FibChange, Peer, PeerCounters, PeerId, Prefix};
use felt_dataplane::wire::MacAddr;
use ipnet::IpNet;

use super::vtep::VtepData;
use crate::lease::{Event, Lease, SubnetKey};

/// How leases map to planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapping {
    /// IPv4 subnets over IPv4, IPv6 subnets over IPv6, each to its plane when there is one.
    Vxlan {
        /// UDP port of every node.
        port: u16,
        /// Index of the IPv4 plane.
        v4: Option<usize>,
        /// Index of the IPv6 plane.
        v6: Option<usize>,
    },
    /// Both families in plane 0 over one outer family.
    Udp {
        /// UDP port of every node.
        port: u16,
        /// Whether the outer packets are IPv6.
        outer_v6: bool,
    },
}

/// One entry a lease asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) plane: usize,
    pub(super) prefix: IpNet,
    pub(super) endpoint: SocketAddr,
    pub(super) mac: Option<MacAddr>,
}

impl Mapping {
    /// What `lease` asks for, or why it is of no use here.
    pub(super) fn targets(&self, lease: &Lease) -> Result<Vec<Target>, String> {
        let attrs = &lease.attrs;
        match *self {
            Self::Vxlan { port, v4, v6 } => {
                if attrs.backend_type != "vxlan" {
                    return Err(format!("backend type is {:?}, not vxlan", attrs.backend_type));
                }
                let family = |plane: Option<usize>,
                              prefix: Option<IpNet>,
                              ip: Option<IpAddr>,
                              data|
                 -> Result<_, String> {
                    let (Some(plane), Some(prefix)) = (plane, prefix) else { return Ok(None) };
                    let version = if prefix.addr().is_ipv4() { "IPv4" } else { "IPv6" };
                    let ip = ip.ok_or_else(|| format!("lease has no public {version} address"))?;
                    let data = VtepData::decode(data)
                        .map_err(|reason| format!("{version} backend data: {reason}"))?;
                    let endpoint = SocketAddr::new(ip, port);
                    Ok(Some(Target { plane, prefix, endpoint, mac: Some(MacAddr(data.mac.octets())) }))
                };
                let first = family(
                    v4,
                    lease.key.v4.map(IpNet::V4),
                    attrs.public_ip.map(IpAddr::V4),
                    attrs.backend_data.as_deref(),
                )?;
                let second = family(
                    v6,
                    lease.key.v6.map(IpNet::V6),
                    attrs.public_ipv6.map(IpAddr::V6),
                    attrs.backend_v6_data.as_deref(),
                )?;
                Ok(first.into_iter().chain(second).collect())
            }
            Self::Udp { port, outer_v6 } => {
                if !attrs.backend_type.is_empty() {
                    return Err(format!("backend type is {:?}, not udp", attrs.backend_type));
                }
                let ip = match outer_v6 {
                    false => attrs.public_ip.map(IpAddr::V4),
                    true => attrs.public_ipv6.map(IpAddr::V6),
                };
                let endpoint =
                    SocketAddr::new(ip.ok_or("lease has no public address of the tunnel's family")?, port);
                let prefixes = lease.key.v4.map(IpNet::V4).into_iter().chain(lease.key.v6.map(IpNet::V6));
                Ok(prefixes.map(|prefix| Target { plane: 0, prefix, endpoint, mac: None }).collect())
            }
        }
    }
}

/// What is known about one other node.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) lease: Lease,
    /// Per plane the peer in its table; empty when the lease is ignored.
    pub(super) peers: BTreeMap<usize, Arc<Peer>>,
    /// Why it is ignored.
    pub(super) ignored: Option<String>,
    targets: Vec<Target>,
}

/// All other nodes, and who holds each prefix.
#[derive(Debug)]
pub(super) struct Table {
    mapping: Mapping,
    workers: usize,
    next_id: u32,
    entries: BTreeMap<SubnetKey, Entry>,
    claims: HashMap<(usize, IpNet), Vec<SubnetKey>>,
}

impl Table {
    pub(super) fn new(mapping: Mapping, workers: usize) -> Self {
        Self { mapping, workers, next_id: 0, entries: BTreeMap::new(), claims: HashMap::new() }
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.entries.values()
    }

    /// Takes in one event; returns what changes in which plane.
    pub(super) fn apply(&mut self, event: Event) -> Vec<(usize, FibChange)> {
        match event {
            Event::Added(lease) => self.add(lease),
            Event::Removed(lease) => match self.entries.remove(&lease.key) {
                Some(entry) => self.withdraw(lease.key, &entry.targets),
                None => Vec::new(),
            },
        }
    }

    fn add(&mut self, lease: Lease) -> Vec<(usize, FibChange)> {
        let key = lease.key;
        let (targets, ignored) = match self.mapping.targets(&lease) {
            Ok(targets) => (targets, None),
            Err(reason) => (Vec::new(), Some(reason)),
        };
        let previous = self.entries.remove(&key);
        let mut peers: BTreeMap<usize, Arc<Peer>> = BTreeMap::new();
        for target in &targets {
            let old = previous.as_ref().and_then(|entry| entry.peers.get(&target.plane));
            let peer = match old {
                Some(old) if old.endpoint == target.endpoint && old.mac == target.mac => Arc::clone(old),
                // A node that changes its address or MAC keeps its number and its counters.
                Some(old) => self.peer(target, old.id, Arc::clone(&old.counters)),
                None => {
                    let id = PeerId(self.next_id);
                    self.next_id = self.next_id.wrapping_add(1);
                    self.peer(target, id, Arc::new(PeerCounters::new(self.workers)))
                }
            };
            peers.entry(target.plane).or_insert(peer);
        }
        let gone: Vec<_> = previous
            .map(|entry| entry.targets)
            .unwrap_or_default()
            .into_iter()
            .filter(|old| !targets.iter().any(|new| (new.plane, new.prefix) == (old.plane, old.prefix)))
            .collect();
        self.entries.insert(key, Entry { lease, peers, ignored, targets: targets.clone() });
        let mut changes = self.withdraw(key, &gone);
        for target in &targets {
            let claims = self.claims.entry((target.plane, target.prefix)).or_default();
            claims.retain(|claim| *claim != key);
            claims.push(key);
            changes.extend(self.in_force(target.plane, target.prefix));
        }
        changes
    }

    fn peer(&self, target: &Target, id: PeerId, counters: Arc<PeerCounters>) -> Arc<Peer> {
        Arc::new(Peer { id, endpoint: target.endpoint, mac: target.mac, counters })
    }

    /// Ends the claims of `key` on `targets`.
    fn withdraw(&mut self, key: SubnetKey, targets: &[Target]) -> Vec<(usize, FibChange)> {
        let mut changes = Vec::new();
        for target in targets {
            let place = (target.plane, target.prefix);
            let Some(claims) = self.claims.get_mut(&place) else { continue };
            claims.retain(|claim| *claim != key);
            if claims.is_empty() {
                self.claims.remove(&place);
            }
            changes.extend(self.in_force(target.plane, target.prefix));
        }
        changes
    }

    /// The change that puts the last claim on a prefix in force.
    fn in_force(&self, plane: usize, prefix: IpNet) -> Option<(usize, FibChange)> {
        let key = Prefix::new(prefix.addr(), prefix.prefix_len()).ok()?;
        let holder = self.claims.get(&(plane, prefix)).and_then(|claims| claims.last());
        let peer = holder.and_then(|holder| self.entries.get(holder)?.peers.get(&plane));
        Some((plane, peer.map_or(FibChange::Remove(key), |peer| FibChange::Set(key, Arc::clone(peer)))))
    }

    /// Every entry in force, for an engine that starts again.
    pub(super) fn all_in_force(&self, plane: usize) -> Vec<FibChange> {
        let places: Vec<IpNet> =
            self.claims.keys().filter(|(of, _)| *of == plane).map(|(_, prefix)| *prefix).collect();
        places
            .into_iter()
            .filter_map(|prefix| self.in_force(plane, prefix))
            .map(|(_, change)| change)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::LeaseAttrs;
    use felt_dataplane::fib::Fib;
    use proptest::prelude::*;
    use serde_json::value::RawValue;

    const DUAL: Mapping = Mapping::Vxlan { port: 8472, v4: Some(0), v6: Some(1) };

    fn lease(key: &str, node: u8, mac: u8) -> Lease {
        let data = |last: u8| {
            RawValue::from_string(format!(r#"{{"VNI":1,"VtepMAC":"02:00:00:00:{last:02x}:{mac:02x}"}}"#))
                .unwrap()
        };
        let attrs = LeaseAttrs {
            public_ip: Some([198, 18, 0, node].into()),
            public_ipv6: Some(format!("fd00:18::{node}").parse().unwrap()),
            backend_type: "vxlan".into(),
            backend_data: Some(data(4)),
            backend_v6_data: Some(data(6)),
        };
        Lease { key: key.parse().unwrap(), attrs, expiration: None }
    }

    #[test]
    fn dual_stack_lease_gives_one_entry_per_plane() {
        let targets = DUAL.targets(&lease("10.5.2.0-24&fd00:5:0:2::-64", 2, 9)).unwrap();
        let shown: Vec<_> = targets
            .iter()
            .map(|t| format!("{} {} {} {:?}", t.plane, t.prefix, t.endpoint, t.mac.unwrap().0[5]))
            .collect();
        assert_eq!(shown, ["0 10.5.2.0/24 198.18.0.2:8472 9", "1 fd00:5:0:2::/64 [fd00:18::2]:8472 9"]);
    }

    #[test]
    fn leases_of_other_backends_and_with_bad_data_are_ignored_with_a_reason() {
        let mut foreign = lease("10.5.2.0-24", 2, 9);
        foreign.attrs.backend_type = "host-gw".into();
        let mut bare = lease("10.5.2.0-24", 2, 9);
        bare.attrs.backend_data = None;
        let mut homeless = lease("10.5.2.0-24", 2, 9);
        homeless.attrs.public_ip = None;
        for (lease, word) in [(foreign, "host-gw"), (bare, "backend data"), (homeless, "public IPv4")] {
            let mut table = Table::new(DUAL, 1);
            assert!(table.apply(Event::Added(lease)).is_empty());
            let reason = table.entries().next().unwrap().ignored.clone().unwrap();
            assert!(reason.contains(word), "{reason}");
        }
        let udp = Mapping::Udp { port: 8285, outer_v6: false };
        assert!(udp.targets(&lease("10.5.2.0-24", 2, 9)).unwrap_err().contains("not udp"));
    }

    #[test]
    fn udp_carries_both_families_to_one_peer() {
        let mut lease = lease("10.5.2.0-24&fd00:5:0:2::-64", 2, 9);
        lease.attrs.backend_type.clear();
        let mut table = Table::new(Mapping::Udp { port: 8285, outer_v6: false }, 1);
        let changes = table.apply(Event::Added(lease));
        let peers: Vec<_> = changes
            .iter()
            .map(|(plane, change)| match change {
                FibChange::Set(_, peer) => (*plane, peer.id, peer.endpoint.to_string()),
                FibChange::Remove(_) => panic!(),
            })
            .collect();
        assert_eq!(peers, vec![(0, PeerId(0), "198.18.0.2:8285".to_owned()); 2]);
    }

    #[test]
    fn changed_attributes_keep_number_and_counters() {
        let mut table = Table::new(DUAL, 1);
        table.apply(Event::Added(lease("10.5.2.0-24", 2, 9)));
        let before = Arc::clone(&table.entries().next().unwrap().peers[&0]);
        table.apply(Event::Added(lease("10.5.2.0-24", 3, 9)));
        let after = Arc::clone(&table.entries().next().unwrap().peers[&0]);
        assert_eq!((before.id, after.endpoint.ip().to_string()), (after.id, "198.18.0.3".into()));
        assert!(Arc::ptr_eq(&before.counters, &after.counters));
    }

    #[test]
    fn earlier_claim_comes_back_when_the_later_goes() {
        let mut table = Table::new(DUAL, 1);
        table.apply(Event::Added(lease("10.5.2.0-24", 2, 1)));
        table.apply(Event::Added(lease("10.5.2.0-24&fd00:5:0:2::-64", 3, 1)));
        let changes = table.apply(Event::Removed(lease("10.5.2.0-24&fd00:5:0:2::-64", 3, 1)));
        let shown: Vec<_> = changes
            .iter()
            .map(|(plane, change)| match change {
                FibChange::Set(prefix, peer) => format!("{plane} {prefix} {}", peer.endpoint),
                FibChange::Remove(prefix) => format!("{plane} {prefix} -"),
            })
            .collect();
        assert_eq!(shown, ["0 10.5.2.0/24 198.18.0.2:8472", "1 fd00:5:0:2::/64 -"]);
    }

    fn table_text(fib: &Fib) -> Vec<String> {
        let mut text: Vec<_> =
            fib.iter().map(|(prefix, peer)| format!("{prefix} {} {:?}", peer.endpoint, peer.mac)).collect();
        text.sort();
        text
    }

    proptest! {
        /// Whatever the order of events, the tables equal those built from the surviving leases alone.
        #[test]
        fn tables_equal_the_current_leases(
            events in proptest::collection::vec((1u8..7, 1u8..4, 0u8..3, any::<bool>(), any::<bool>()), 0..60)
        ) {
            let mut table = Table::new(DUAL, 1);
            let mut fibs = [Fib::new(), Fib::new()];
            let mut alive: Vec<Lease> = Vec::new();
            for (net, node, mac, dual, add) in events {
                let key = if dual { format!("10.5.{net}.0-24&fd00:5:0:{net}::-64") } else { format!("10.5.{net}.0-24") };
                let lease = lease(&key, node, mac);
                alive.retain(|other| other.key != lease.key);
                let event = if add {
                    alive.push(lease.clone());
                    Event::Added(lease)
                } else {
                    Event::Removed(lease)
                };
                for (plane, change) in table.apply(event) {
                    fibs[plane] = fibs[plane].with_changes(&[change]);
                }
            }
            let mut fresh = Table::new(DUAL, 1);
            let mut wanted = [Fib::new(), Fib::new()];
            for lease in alive {
                for (plane, change) in fresh.apply(Event::Added(lease)) {
                    wanted[plane] = wanted[plane].with_changes(&[change]);
                }
            }
            for plane in 0..2 {
                prop_assert_eq!(table_text(&fibs[plane]), table_text(&wanted[plane]));
                let restarted = Fib::new().with_changes(&table.all_in_force(plane));
                prop_assert_eq!(table_text(&restarted), table_text(&wanted[plane]));
            }
        }
    }
}
