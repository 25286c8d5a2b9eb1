//! Other nodes' leases turned into what the kernel shall hold: a pure function.
//!
//! ```text
//!   Peers (leases in order of arrival) --wanted(Method, reach)--> Tables --reconcile--> kernel
//! ```
//!
//! Two leases may claim one prefix for a while; the later one is in force and the earlier comes back when it goes. So the
//! tables depend on the leases there are, and on nothing that happened before. [`Peers::wanted`] asks `reach` by which
//! device a node is a direct neighbour, so that it needs no kernel itself.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::vtep::VtepData;
use crate::lease::{Event, Lease, SubnetKey};
use crate::reconcile::{Route, Tables};

/// How packets get to another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    /// Kernel vxlan devices by interface index, one per family.
    Vxlan {
        /// Carries IPv4 over IPv4.
        v4: Option<u32>,
        /// Carries IPv6 over IPv6.
        v6: Option<u32>,
        /// Plain routes to direct neighbours.
        direct: bool,
    },
    /// Plain routes out of the external interface.
    HostGw {
        /// Interface index.
        external: u32,
    },
    /// A kernel ipip device by interface index.
    Ipip {
        /// Carries IPv4.
        device: u32,
        /// Plain routes to direct neighbours.
        direct: bool,
    },
    /// Plain routes to direct neighbours only; the rest is somebody else's, the packet loop's.
    DirectOnly {
        /// What leases of the network have as backend type.
        backend_type: &'static str,
    },
}

/// How a peer's packets go, for the report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Tunnel,
    Direct,
}

/// What a lease asks for, per family it has.
type Hops = Vec<(IpNet, Hop)>;

/// One prefix of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hop {
    /// Through a vxlan device: neighbour, forwarding entry and route.
    Vxlan { dev: u32, mac: felt_hostnet::MacAddr, to: IpAddr },
    /// Through a tunnel device that takes the outer destination from the route.
    Tunnel { dev: u32, to: IpAddr },
    /// Without a tunnel.
    Link { dev: u32, to: IpAddr },
}

impl Hop {
    fn way(self) -> Way {
        match self {
            Self::Link { .. } => Way::Direct,
            _ => Way::Tunnel,
        }
    }

    fn add_to(self, prefix: IpNet, tables: &mut Tables) {
        match self {
            Self::Vxlan { dev, mac, to } => {
                // The subnet's network address stands for the node, as its own device has it.
                let gateway = prefix.network();
                tables.neighbours.insert((dev, gateway), mac);
                tables.fdb.retain(|(on, known, _)| (*on, *known) != (dev, mac));
                tables.fdb.insert((dev, mac, to));
                tables.routes.insert(Route::onlink(prefix, gateway, dev));
            }
            Self::Tunnel { dev, to } => drop(tables.routes.insert(Route::onlink(prefix, to, dev))),
            Self::Link { dev, to } => drop(tables.routes.insert(Route::via_node(prefix, to, dev))),
        }
    }
}

impl Method {
    fn backend_type(self) -> &'static str {
        match self {
            Self::Vxlan { .. } => "vxlan",
            Self::HostGw { .. } => "host-gw",
            Self::Ipip { .. } => "ipip",
            Self::DirectOnly { backend_type } => backend_type,
        }
    }

    /// What `lease` asks for, or why it is of no use here.
    fn hops(self, lease: &Lease, reach: &mut dyn FnMut(IpAddr) -> Option<u32>) -> Result<Hops, String> {
        let attrs = &lease.attrs;
        let wanted = self.backend_type();
        if attrs.backend_type != wanted {
            let wanted = if wanted.is_empty() { "udp" } else { wanted };
            return Err(format!("backend type is {:?}, not {wanted}", attrs.backend_type));
        }
        let families = [
            (lease.key.v4.map(IpNet::V4), attrs.public_ip.map(IpAddr::V4), &attrs.backend_data),
            (lease.key.v6.map(IpNet::V6), attrs.public_ipv6.map(IpAddr::V6), &attrs.backend_v6_data),
        ];
        let mut hops = Vec::new();
        for (prefix, to, data) in families {
            let Some(prefix) = prefix else { continue };
            let version = if prefix.addr().is_ipv4() { "IPv4" } else { "IPv6" };
            let to = || to.ok_or_else(|| format!("lease has no public {version} address"));
            let hop = match self {
                Self::Vxlan { v4, v6, direct } => {
                    let Some(dev) = (if prefix.addr().is_ipv4() { v4 } else { v6 }) else { continue };
                    let to = to()?;
                    let data = VtepData::decode(data.as_deref())
                        .map_err(|reason| format!("{version} backend data: {reason}"))?;
                    match direct.then(|| reach(to)).flatten() {
                        Some(dev) => Hop::Link { dev, to },
                        None => Hop::Vxlan { dev, mac: data.mac, to },
                    }
                }
                Self::HostGw { external } => Hop::Link { dev: external, to: to()? },
                Self::Ipip { device, direct } => {
                    if !prefix.addr().is_ipv4() {
                        continue;
                    }
                    let to = to()?;
                    match direct.then(|| reach(to)).flatten() {
                        Some(dev) => Hop::Link { dev, to },
                        None => Hop::Tunnel { dev: device, to },
                    }
                }
                Self::DirectOnly { .. } => {
                    let Ok(to) = to() else { continue };
                    match reach(to) {
                        Some(dev) => Hop::Link { dev, to },
                        None => continue,
                    }
                }
            };
            hops.push((prefix, hop));
        }
        Ok(hops)
    }
}

/// Another node.
#[derive(Debug, Clone)]
pub(super) struct Peer {
    pub(super) lease: Lease,
    /// How its packets went when the tables were last computed.
    pub(super) way: Way,
    /// Why it is ignored.
    pub(super) ignored: Option<String>,
    /// Place in the order of arrival.
    arrival: u64,
}

/// All other nodes.
#[derive(Debug, Default)]
pub(super) struct Peers {
    peers: BTreeMap<SubnetKey, Peer>,
    arrivals: u64,
}

impl Peers {
    /// In key order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.peers.values()
    }

    pub(super) fn get(&self, key: &SubnetKey) -> Option<&Peer> {
        self.peers.get(key)
    }

    /// Takes in one change.
    pub(super) fn apply(&mut self, event: Event) {
        match event {
            Event::Added(lease) => {
                self.arrivals += 1;
                let peer = Peer { lease, way: Way::Tunnel, ignored: None, arrival: self.arrivals };
                self.peers.insert(peer.lease.key, peer);
            }
            Event::Removed(lease) => drop(self.peers.remove(&lease.key)),
        }
    }

    /// What the kernel shall hold for them; notes for each how its packets go.
    pub(super) fn wanted(&mut self, method: Method, reach: &mut dyn FnMut(IpAddr) -> Option<u32>) -> Tables {
        let mut in_force: BTreeMap<IpNet, (u64, Hop)> = BTreeMap::new();
        for peer in self.peers.values_mut() {
            let hops = match method.hops(&peer.lease, reach) {
                Ok(hops) => {
                    peer.ignored = None;
                    hops
                }
                Err(reason) => {
                    peer.ignored = Some(reason);
                    Vec::new()
                }
            };
            peer.way = hops.first().map_or(Way::Tunnel, |(_, hop)| hop.way());
            for (prefix, hop) in hops {
                let claim = in_force.entry(prefix).or_insert((peer.arrival, hop));
                if claim.0 < peer.arrival {
                    *claim = (peer.arrival, hop);
                }
            }
        }
        let mut tables = Tables::default();
        // In order of arrival, since two nodes may publish one MAC.
        let mut claims: Vec<_> = in_force.into_iter().collect();
        claims.sort_by_key(|(_, (arrival, _))| *arrival);
        for (prefix, (_, hop)) in claims {
            hop.add_to(prefix, &mut tables);
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::LeaseAttrs;
    use crate::reconcile::{Change, table_changes};
    use proptest::prelude::*;
    use serde_json::value::RawValue;

    const VXLAN: Method = Method::Vxlan { v4: Some(4), v6: Some(6), direct: true };

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

    /// Nodes with even numbers are on the same link as this one, on device 2.
    fn even_nodes(ip: IpAddr) -> Option<u32> {
        let last = match ip {
            IpAddr::V4(ip) => ip.octets()[3],
            IpAddr::V6(ip) => ip.octets()[15],
        };
        (last % 2 == 0).then_some(2)
    }

    fn lines(tables: &Tables) -> Vec<String> {
        let neighbours =
            tables.neighbours.iter().map(|((dev, ip), mac)| format!("neigh {ip} {mac} dev {dev}"));
        let fdb = tables.fdb.iter().map(|(dev, mac, to)| format!("fdb {mac} dst {to} dev {dev}"));
        let routes = tables.routes.iter().map(|route| {
            let onlink = if route.onlink { " onlink" } else { "" };
            let mark = if route.protocol == 3 { "" } else { " marked" };
            format!("route {} via {} dev {}{onlink}{mark}", route.dst, route.via.unwrap(), route.dev)
        });
        neighbours.chain(fdb).chain(routes).collect()
    }

    #[test]
    fn tunnelled_nodes_get_neighbour_fdb_and_route_direct_ones_a_route() {
        let mut peers = Peers::default();
        peers.apply(Event::Added(lease("10.5.1.0-24&fd00:5:0:1::-64", 1, 1)));
        peers.apply(Event::Added(lease("10.5.2.0-24", 2, 2)));
        let tables = peers.wanted(VXLAN, &mut even_nodes);
        assert_eq!(
            lines(&tables),
            [
                "neigh 10.5.1.0 02:00:00:00:04:01 dev 4",
                "neigh fd00:5:0:1:: 02:00:00:00:06:01 dev 6",
                "fdb 02:00:00:00:04:01 dst 198.18.0.1 dev 4",
                "fdb 02:00:00:00:06:01 dst fd00:18::1 dev 6",
                "route 10.5.1.0/24 via 10.5.1.0 dev 4 onlink",
                "route 10.5.2.0/24 via 198.18.0.2 dev 2 marked",
                "route fd00:5:0:1::/64 via fd00:5:0:1:: dev 6 onlink",
            ]
        );
        assert_eq!(peers.get(&"10.5.2.0-24".parse().unwrap()).unwrap().way, Way::Direct);
        let mut tunnel_only = |_| None;
        let without = peers.wanted(Method::Vxlan { v4: Some(4), v6: None, direct: false }, &mut tunnel_only);
        assert!(lines(&without).contains(&"route 10.5.2.0/24 via 10.5.2.0 dev 4 onlink".to_owned()));
    }

    #[test]
    fn foreign_types_and_broken_data_are_ignored_with_a_reason() {
        let mut peers = Peers::default();
        let mut foreign = lease("10.5.1.0-24", 1, 1);
        foreign.attrs.backend_type = "host-gw".into();
        let mut broken = lease("10.5.3.0-24", 3, 3);
        broken.attrs.backend_data = None;
        peers.apply(Event::Added(foreign));
        peers.apply(Event::Added(broken));
        assert_eq!(peers.wanted(VXLAN, &mut even_nodes), Tables::default());
        assert!(peers.iter().all(|peer| peer.ignored.is_some()));
        let gateways = peers.wanted(Method::HostGw { external: 2 }, &mut even_nodes);
        assert_eq!(lines(&gateways), ["route 10.5.1.0/24 via 198.18.0.1 dev 2 marked"]);
    }

    /// Two nodes exchange subnet and MAC, and the old holder's removal comes last.
    #[test]
    fn removal_of_the_old_holder_does_not_touch_the_new_one() {
        let mut peers = Peers::default();
        let old = lease("10.5.2.0-24", 1, 1);
        peers.apply(Event::Added(old.clone()));
        peers.apply(Event::Added(lease("10.5.3.0-24", 3, 2)));
        peers.apply(Event::Added(lease("10.5.3.0-24", 5, 1)));
        peers.apply(Event::Removed(old.clone()));
        peers.apply(Event::Removed(old));
        let tables = peers.wanted(VXLAN, &mut even_nodes);
        assert_eq!(
            lines(&tables),
            [
                "neigh 10.5.3.0 02:00:00:00:04:01 dev 4",
                "fdb 02:00:00:00:04:01 dst 198.18.0.5 dev 4",
                "route 10.5.3.0/24 via 10.5.3.0 dev 4 onlink",
            ]
        );
    }

    fn event() -> impl Strategy<Value = Event> {
        let keys = prop_oneof![
            (1u8..7).prop_map(|n| format!("10.5.{n}.0-24")),
            (1u8..7).prop_map(|n| format!("10.5.{n}.0-24&fd00:5:0:{n:x}::-64")),
        ];
        (keys, 1u8..8, 1u8..5, any::<bool>()).prop_map(|(key, node, mac, added)| {
            let lease = lease(&key, node, mac);
            if added { Event::Added(lease) } else { Event::Removed(lease) }
        })
    }

    fn apply(state: &mut Tables, change: Change) {
        match change {
            Change::SetNeighbour(dev, ip, mac) => drop(state.neighbours.insert((dev, ip), mac)),
            Change::RemoveNeighbour(dev, ip) => drop(state.neighbours.remove(&(dev, ip))),
            Change::SetFdb(dev, mac, to) => {
                state.fdb.retain(|old| (old.0, old.1) != (dev, mac));
                state.fdb.insert((dev, mac, to));
            }
            Change::RemoveFdb(dev, mac, to) => drop(state.fdb.remove(&(dev, mac, to))),
            Change::SetRoute(route) => {
                state.routes.retain(|old| old.slot() != route.slot());
                state.routes.insert(route);
            }
            Change::RemoveRoute(route) => drop(state.routes.remove(&route)),
            other => panic!("{other}"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_thousand_lease_events_end_in_the_computed_state(
            events in proptest::collection::vec(event(), 1000),
            batch in 1usize..40,
        ) {
            let mut peers = Peers::default();
            let (mut kernel, mut last) = (Tables::default(), Tables::default());
            for some in events.chunks(batch) {
                some.iter().cloned().for_each(|event| peers.apply(event));
                let wanted = peers.wanted(VXLAN, &mut even_nodes);
                table_changes(&wanted, &last).into_iter().for_each(|change| apply(&mut kernel, change));
                prop_assert_eq!(&kernel, &wanted);
                last = wanted;
            }
            // A node that knows only what is left, told in the order of arrival, wants the same.
            let mut left: Vec<Peer> = peers.iter().cloned().collect();
            left.sort_by_key(|peer| peer.arrival);
            let mut fresh = Peers::default();
            left.into_iter().for_each(|peer| fresh.apply(Event::Added(peer.lease)));
            prop_assert_eq!(fresh.wanted(VXLAN, &mut even_nodes), kernel);
        }
    }
}
