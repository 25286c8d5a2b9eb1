//! From what should be to what is: the kernel state of felt's devices.
//!
//! [`changes`] (a device) and [`table_changes`] (routes, neighbours and FDB entries) are pure functions of wanted and
//! found state; the caller reads the kernel, applies the changes and counts them. It runs at start, on every change and as a periodic check, so a device that somebody flushed, or a run that was
//! killed half way, ends in the same state as a clean start.
//!
//! Invariant: applying the changes in order to the found state gives the wanted state, and a second run gives none. What
//! is added comes before what is removed, so that traffic in flight keeps a route while one is replaced.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::RouteProtocol;
use ipnet::IpNet;

/// Protocol number (`rtm_protocol`) of routes felt sets on devices that are not its own. The kernel does not look at it; it
/// tells them from everybody else's, after a restart too. No number of linux/rtnetlink.h.
pub const ROUTE_MARK: RouteProtocol = RouteProtocol(70);

/// A route as far as felt sets it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    /// Destination.
    pub dst: IpNet,
    /// Metric as the kernel shows it: 0 for IPv4, 1024 for IPv6 unless set.
    pub metric: u32,
    /// Next hop, `None` for the link itself.
    pub via: Option<IpAddr>,
    /// The next hop counts as reachable whatever the routes say.
    pub onlink: bool,
    /// Interface index of the device; 0 for a blackhole.
    pub dev: u32,
    /// Who made it: [`RouteProtocol::BOOT`] on felt's own devices, as flannel's are; [`ROUTE_MARK`] elsewhere.
    pub protocol: u8,
}

impl Route {
    /// `dst` straight out of `dev` with the kernel's default metric.
    pub fn direct(dst: IpNet, dev: u32) -> Self {
        let metric = if matches!(dst, IpNet::V4(_)) { 0 } else { 1024 };
        Self { dst, metric, via: None, onlink: false, dev, protocol: RouteProtocol::BOOT.0 }
    }

    /// `dst` through a gateway on a tunnel device, which is reachable whatever the routes say.
    pub fn onlink(dst: IpNet, via: IpAddr, dev: u32) -> Self {
        Self { via: Some(via), onlink: true, ..Self::direct(dst, dev) }
    }

    /// `dst` through a node on the same link, by a device that is not felt's.
    pub fn via_node(dst: IpNet, via: IpAddr, dev: u32) -> Self {
        Self { via: Some(via), protocol: ROUTE_MARK.0, ..Self::direct(dst, dev) }
    }

    /// Two routes of one slot exclude each other: setting one replaces the other.
    pub fn slot(&self) -> (IpNet, u32) {
        (self.dst, self.metric)
    }
}

/// State of one device with the routes that are felt's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// Hardware address, where peers know the device by it.
    pub mac: Option<MacAddr>,
    /// MTU in bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// Addresses, without the link-local ones the kernel makes.
    pub addresses: BTreeSet<IpNet>,
    /// Routes; at most one per destination and metric.
    pub routes: BTreeSet<Route>,
}

/// What the kernel needs to reach other nodes' pods. Devices are interface indices.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tables {
    /// Permanent neighbours of tunnel devices.
    pub neighbours: BTreeMap<(u32, IpAddr), MacAddr>,
    /// Forwarding database of VXLAN devices: frames to the MAC go to the address. One address per MAC is wanted; more may
    /// be found, since the kernel takes several.
    pub fdb: BTreeSet<(u32, MacAddr, IpAddr)>,
    /// Routes; at most one per destination and metric.
    pub routes: BTreeSet<Route>,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// Give the device its hardware address.
    SetMac(MacAddr),
    /// Set the MTU.
    SetMtu(u32),
    /// Set the device up.
    SetUp,
    /// Add an address.
    AddAddress(IpNet),
    /// Remove an address.
    RemoveAddress(IpNet),
    /// Add a route, or replace the one with the same destination and metric.
    SetRoute(Route),
    /// Remove a route.
    RemoveRoute(Route),
    /// Set a permanent neighbour.
    SetNeighbour(u32, IpAddr, MacAddr),
    /// Remove a neighbour.
    RemoveNeighbour(u32, IpAddr),
    /// Add a forwarding entry, or replace the only one of the MAC.
    SetFdb(u32, MacAddr, IpAddr),
    /// Remove a forwarding entry.
    RemoveFdb(u32, MacAddr, IpAddr),
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SetMac(mac) => write!(f, "set hardware address {mac}"),
            Self::SetMtu(mtu) => write!(f, "set MTU {mtu}"),
            Self::SetUp => f.write_str("set up"),
            Self::AddAddress(net) => write!(f, "add address {net}"),
            Self::RemoveAddress(net) => write!(f, "remove address {net}"),
            Self::SetRoute(route) => write!(f, "set route {}", route.dst),
            Self::RemoveRoute(route) => write!(f, "remove route {}", route.dst),
            Self::SetNeighbour(_, address, mac) => write!(f, "set neighbour {address} at {mac}"),
            Self::RemoveNeighbour(_, address) => write!(f, "remove neighbour {address}"),
            Self::SetFdb(_, mac, to) => write!(f, "set forwarding of {mac} to {to}"),
            Self::RemoveFdb(_, mac, to) => write!(f, "remove forwarding of {mac} to {to}"),
        }
    }
}

/// What has to be done to a device, in order.
pub fn changes(wanted: &Device, found: &Device) -> Vec<Change> {
    let mut list = Vec::new();
    list.extend(wanted.mac.filter(|_| wanted.mac != found.mac).map(Change::SetMac));
    if wanted.mtu != found.mtu {
        list.push(Change::SetMtu(wanted.mtu));
    }
    list.extend(wanted.addresses.difference(&found.addresses).map(|net| Change::AddAddress(*net)));
    if wanted.up && !found.up {
        list.push(Change::SetUp);
    }
    list.extend(route_changes(&wanted.routes, &found.routes));
    list.extend(found.addresses.difference(&wanted.addresses).map(|net| Change::RemoveAddress(*net)));
    list
}

/// The part of [`changes`] for routes that lie on devices of others.
pub fn route_changes(wanted: &BTreeSet<Route>, found: &BTreeSet<Route>) -> Vec<Change> {
    let taken: BTreeSet<_> = wanted.iter().map(Route::slot).collect();
    let set = wanted.difference(found).map(|route| Change::SetRoute(*route));
    let remove = found
        .difference(wanted)
        // A route in a wanted slot is replaced by the one set there.
        .filter(|route| !taken.contains(&route.slot()))
        .map(|route| Change::RemoveRoute(*route));
    set.chain(remove).collect()
}

/// What has to be done to the tables, in order: what a packet needs last is set last and removed first, so that no route
/// leads to a neighbour that is not there and the kernel never asks for one.
pub fn table_changes(wanted: &Tables, found: &Tables) -> Vec<Change> {
    let mut list = Vec::new();
    let neighbours = wanted.neighbours.iter().filter(|(key, mac)| found.neighbours.get(key) != Some(mac));
    list.extend(neighbours.map(|((dev, address), mac)| Change::SetNeighbour(*dev, *address, *mac)));
    let mut there: BTreeMap<(u32, MacAddr), Vec<IpAddr>> = BTreeMap::new();
    for (dev, mac, to) in &found.fdb {
        there.entry((*dev, *mac)).or_default().push(*to);
    }
    for (dev, mac, to) in &wanted.fdb {
        let found = there.remove(&(*dev, *mac)).unwrap_or_default();
        let right = found.contains(to);
        // Setting replaces one; the others of the MAC have to go before.
        let spared = if right { *to } else { found.first().copied().unwrap_or(*to) };
        let extra = found.iter().filter(|other| **other != spared);
        list.extend(extra.map(|other| Change::RemoveFdb(*dev, *mac, *other)));
        if !right {
            list.push(Change::SetFdb(*dev, *mac, *to));
        }
    }
    list.extend(route_changes(&wanted.routes, &found.routes));
    let gone = found.neighbours.keys().filter(|key| !wanted.neighbours.contains_key(key));
    list.extend(gone.map(|(dev, address)| Change::RemoveNeighbour(*dev, *address)));
    for ((dev, mac), all) in there {
        list.extend(all.into_iter().map(|to| Change::RemoveFdb(dev, mac, to)));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The kernel's behaviour, as far as it matters here.
    fn apply(device: &mut Device, change: Change) {
        match change {
            Change::SetMac(mac) => device.mac = Some(mac),
            Change::SetMtu(mtu) => device.mtu = mtu,
            Change::SetUp => device.up = true,
            Change::AddAddress(net) => assert!(device.addresses.insert(net), "{net} is there already"),
            Change::RemoveAddress(net) => assert!(device.addresses.remove(&net), "{net} is not there"),
            Change::SetRoute(route) => {
                device.routes.retain(|old| old.slot() != route.slot());
                device.routes.insert(route);
            }
            Change::RemoveRoute(route) => assert!(device.routes.remove(&route), "{route:?} is not there"),
            other => panic!("{other} is nothing for a device"),
        }
    }

    /// The kernel's tables, as far as they matter here.
    fn apply_to_tables(tables: &mut Tables, change: Change) {
        match change {
            Change::SetRoute(route) => {
                tables.routes.retain(|old| old.slot() != route.slot());
                tables.routes.insert(route);
            }
            Change::RemoveRoute(route) => assert!(tables.routes.remove(&route), "{route:?} is not there"),
            Change::SetNeighbour(dev, address, mac) => {
                tables.neighbours.insert((dev, address), mac);
            }
            Change::RemoveNeighbour(dev, address) => {
                assert!(tables.neighbours.remove(&(dev, address)).is_some(), "{address} is not there");
            }
            Change::SetFdb(dev, mac, to) => {
                let old: Vec<_> =
                    tables.fdb.iter().filter(|entry| (entry.0, entry.1) == (dev, mac)).copied().collect();
                assert!(old.len() < 2, "replacing one of several leaves the others");
                tables.fdb.retain(|entry| (entry.0, entry.1) != (dev, mac));
                tables.fdb.insert((dev, mac, to));
            }
            Change::RemoveFdb(dev, mac, to) => {
                assert!(tables.fdb.remove(&(dev, mac, to)), "{mac} is not there")
            }
            other => panic!("{other} is nothing for the tables"),
        }
    }

    fn mac() -> impl Strategy<Value = MacAddr> {
        (0u8..4).prop_map(|last| MacAddr([2, 0, 0, 0, 0, last]))
    }

    fn node() -> impl Strategy<Value = IpAddr> {
        (0u8..4).prop_map(|last| IpAddr::from([198, 18, 0, last]))
    }

    fn tables(one_address_per_mac: bool) -> impl Strategy<Value = Tables> {
        let neighbours = proptest::collection::btree_map((1u32..3, node()), mac(), 0..6);
        let fdb = proptest::collection::vec((1u32..3, mac(), node()), 0..8);
        let routes = proptest::collection::vec(route(), 0..8);
        (neighbours, fdb, routes).prop_map(move |(neighbours, fdb, routes)| {
            let mut tables = Tables { neighbours, ..Tables::default() };
            for entry in fdb {
                if one_address_per_mac {
                    tables.fdb.retain(|old| (old.0, old.1) != (entry.0, entry.1));
                }
                tables.fdb.insert(entry);
            }
            for route in routes {
                apply_to_tables(&mut tables, Change::SetRoute(route));
            }
            tables
        })
    }

    fn net() -> impl Strategy<Value = IpNet> {
        prop_oneof![
            (0u8..5, 24u8..=32).prop_map(|(n, len)| IpNet::new(IpAddr::from([10, 5, n, 0]), len).unwrap()),
            (0u16..4).prop_map(|n| IpNet::new(IpAddr::from([0xfd00, 0, 0, n, 0, 0, 0, 0]), 64).unwrap()),
        ]
    }

    fn route() -> impl Strategy<Value = Route> {
        (net(), 0u32..2, proptest::option::of(0u8..3), any::<bool>()).prop_map(
            |(dst, metric, via, onlink)| Route {
                dst,
                metric,
                via: via.map(|n| IpAddr::from([198, 18, 0, n])),
                onlink,
                dev: 7,
                protocol: 3,
            },
        )
    }

    fn device() -> impl Strategy<Value = Device> {
        let addresses = proptest::collection::btree_set(net(), 0..5);
        let routes = proptest::collection::vec(route(), 0..8);
        (1400u32..1403, any::<bool>(), addresses, routes).prop_map(|(mtu, up, addresses, list)| {
            let mut device = Device { mac: None, mtu, up, addresses, routes: BTreeSet::new() };
            for route in list {
                apply(&mut device, Change::SetRoute(route));
            }
            device
        })
    }

    proptest! {
        #[test]
        fn changes_lead_to_the_wanted_state_and_then_end(wanted in device(), found in device()) {
            let mut state = found;
            for change in changes(&wanted, &state.clone()) {
                apply(&mut state, change);
            }
            let wanted_up = Device { up: wanted.up || state.up, ..wanted.clone() };
            prop_assert_eq!(&state, &wanted_up);
            prop_assert_eq!(changes(&wanted, &state), vec![]);
        }

        #[test]
        fn table_changes_lead_to_the_wanted_tables_and_then_end(wanted in tables(true), found in tables(false)) {
            let mut state = found;
            for change in table_changes(&wanted, &state.clone()) {
                apply_to_tables(&mut state, change);
            }
            prop_assert_eq!(&state, &wanted);
            prop_assert_eq!(table_changes(&wanted, &state), vec![]);
        }

        #[test]
        fn routes_are_set_after_and_removed_before_what_they_need(wanted in tables(true), found in tables(false)) {
            let list = table_changes(&wanted, &found);
            let set_route = list.iter().position(|change| matches!(change, Change::SetRoute(_)));
            let set_other = list.iter().rposition(|change| matches!(change, Change::SetNeighbour(..) | Change::SetFdb(..)));
            prop_assert!(set_route.zip(set_other).is_none_or(|(route, other)| other < route));
            let remove_route = list.iter().rposition(|change| matches!(change, Change::RemoveRoute(_)));
            let remove_other = list.iter().position(|change| matches!(change, Change::RemoveNeighbour(..)));
            prop_assert!(remove_route.zip(remove_other).is_none_or(|(route, other)| route < other));
        }

        #[test]
        fn nothing_is_removed_before_everything_is_added(wanted in device(), found in device()) {
            let list = route_changes(&wanted.routes, &found.routes);
            let first_removal = list.iter().position(|change| matches!(change, Change::RemoveRoute(_)));
            let last_set = list.iter().rposition(|change| matches!(change, Change::SetRoute(_)));
            if let (Some(removal), Some(set)) = (first_removal, last_set) {
                prop_assert!(set < removal);
            }
        }
    }

    #[test]
    fn replaced_route_is_not_removed_as_well() {
        let old = Route {
            via: Some(IpAddr::from([198, 18, 0, 2])),
            ..Route::direct("10.5.2.0/24".parse().unwrap(), 3)
        };
        let new = Route { via: Some(IpAddr::from([198, 18, 0, 3])), ..old };
        assert_eq!(route_changes(&[new].into(), &[old].into()), [Change::SetRoute(new)]);
    }
}
