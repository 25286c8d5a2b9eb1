//! From what should be to what is: the kernel state of felt's devices.
//!
//! [`changes`] is a pure function of wanted and found state; the caller reads the kernel, applies the changes and counts
//! them. It runs at start, on every change and as a periodic check, so a device that somebody flushed, or a run that was
//! killed half way, ends in the same state as a clean start.
//!
//! Invariant: applying the changes in order to the found state gives the wanted state, and a second run gives none. What
//! is added comes before what is removed, so that traffic in flight keeps a route while one is replaced.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

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
}

impl Route {
    /// `dst` straight out of `dev` with the kernel's default metric.
    pub fn direct(dst: IpNet, dev: u32) -> Self {
        let metric = if matches!(dst, IpNet::V4(_)) { 0 } else { 1024 };
        Self { dst, metric, via: None, onlink: false, dev }
    }

    /// Two routes of one slot exclude each other: setting one replaces the other.
    fn slot(&self) -> (IpNet, u32) {
        (self.dst, self.metric)
    }
}

/// State of one device with the routes that are felt's.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Device {
    /// MTU in bytes.
    pub mtu: u32,
    /// Administratively up.
    pub up: bool,
    /// Addresses, without the link-local ones the kernel makes.
    pub addresses: BTreeSet<IpNet>,
    /// Routes; at most one per destination and metric.
    pub routes: BTreeSet<Route>,
}

/// One step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
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
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SetMtu(mtu) => write!(f, "set MTU {mtu}"),
            Self::SetUp => f.write_str("set up"),
            Self::AddAddress(net) => write!(f, "add address {net}"),
            Self::RemoveAddress(net) => write!(f, "remove address {net}"),
            Self::SetRoute(route) => write!(f, "set route {}", route.dst),
            Self::RemoveRoute(route) => write!(f, "remove route {}", route.dst),
        }
    }
}

/// What has to be done to a device, in order.
pub fn changes(wanted: &Device, found: &Device) -> Vec<Change> {
    let mut list = Vec::new();
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The kernel's behaviour, as far as it matters here.
    fn apply(device: &mut Device, change: Change) {
        match change {
            Change::SetMtu(mtu) => device.mtu = mtu,
            Change::SetUp => device.up = true,
            Change::AddAddress(net) => assert!(device.addresses.insert(net), "{net} is there already"),
            Change::RemoveAddress(net) => assert!(device.addresses.remove(&net), "{net} is not there"),
            Change::SetRoute(route) => {
                device.routes.retain(|old| old.slot() != route.slot());
                device.routes.insert(route);
            }
            Change::RemoveRoute(route) => assert!(device.routes.remove(&route), "{route:?} is not there"),
        }
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
            },
        )
    }

    fn device() -> impl Strategy<Value = Device> {
        let addresses = proptest::collection::btree_set(net(), 0..5);
        let routes = proptest::collection::vec(route(), 0..8);
        (1400u32..1403, any::<bool>(), addresses, routes).prop_map(|(mtu, up, addresses, list)| {
            let mut device = Device { mtu, up, addresses, routes: BTreeSet::new() };
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
