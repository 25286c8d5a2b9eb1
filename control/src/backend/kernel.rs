//! Reading and changing the kernel state that [`crate::reconcile`] reasons about.

use std::collections::BTreeSet;
use std::net::IpAddr;

use felt_hostnet::netlink::{
    Address, Family, Handle, IfIndex, NeighbourState, Route as KernelRoute, RouteKind, RouteProtocol,
};
use felt_hostnet::{Error, TolerateAbsence, sysctl};
use ipnet::IpNet;

use crate::reconcile::{Change, Device, ROUTE_MARK, Route, Tables, changes, table_changes};

/// The main routing table, the only one felt uses.
pub(super) const MAIN_TABLE: u32 = 254;

/// What on this machine is felt's.
#[derive(Debug, Clone, Default)]
pub(super) struct Scope {
    /// Overlay networks. On a device of ours, routes inside them are ours and all others an administrator's.
    pub(super) networks: Vec<IpNet>,
    /// Subnets of this node: a route to a neighbour for one of them is a left-over that would hide the own pods.
    pub(super) own: Vec<IpNet>,
    /// Devices of ours whose tables are wanted state.
    pub(super) devices: Vec<u32>,
    /// Devices of ours that somebody else takes care of.
    pub(super) reserved: Vec<u32>,
    /// The external interface.
    pub(super) external: u32,
}

impl Scope {
    fn has_route(&self, route: &KernelRoute) -> bool {
        // A lease of an earlier network is still known by the form of its route.
        let gateway_of_subnet = route.onlink && route.gateway == Some(route.dst.addr());
        gateway_of_subnet || self.networks.iter().any(|network| network.contains(&route.dst))
    }

    fn has_device(&self, dev: IfIndex) -> bool {
        self.devices.contains(&dev.0)
    }
}

/// Reads the state of a device of ours, with the routes on it that are ours; without routes when there is no scope.
fn read_device(handle: &mut Handle, index: IfIndex, scope: Option<&Scope>) -> Result<Device, Error> {
    let link = handle.link_by_index(index)?;
    let addresses = handle
        .addrs(Some(index), None)?
        .into_iter()
        .map(|found| found.net)
        .filter(|net| !is_link_local(net.addr()))
        .collect();
    let mut routes = BTreeSet::new();
    for family in scope.iter().flat_map(|_| [Family::V4, Family::V6]) {
        let found = handle.routes(family, Some(MAIN_TABLE))?;
        let on_it = found.iter().filter(|route| route.dev == Some(index));
        let ours = on_it.filter(|route| scope.is_some_and(|scope| scope.has_route(route)));
        routes.extend(ours.filter_map(own_route));
    }
    Ok(Device { mac: link.mac, mtu: link.mtu, up: link.is_up(), addresses, routes })
}

/// Reads what in the kernel's tables is ours, or stands where something of ours is to be.
pub(super) fn read_tables(handle: &mut Handle, scope: &Scope, wanted: &Tables) -> Result<Tables, Error> {
    let mut tables = Tables::default();
    let wanted_slots: BTreeSet<_> = wanted.routes.iter().map(Route::slot).collect();
    for family in [Family::V4, Family::V6] {
        let mut seen = BTreeSet::new();
        for found in handle.routes(family, Some(MAIN_TABLE))? {
            let route = as_route(&found);
            // Of several routes in one slot the kernel uses the first.
            let in_the_way = wanted_slots.contains(&route.slot()) && seen.insert(route.slot());
            let unicast = found.kind == RouteKind::Unicast && found.protocol != RouteProtocol::KERNEL;
            let on_ours = found.dev.is_some_and(|dev| scope.has_device(dev)) && scope.has_route(&found);
            let hides_own = found.gateway.is_some()
                && found.dev == Some(IfIndex(scope.external))
                && scope.own.contains(&found.dst);
            if in_the_way || unicast && (on_ours || found.protocol == ROUTE_MARK || hides_own) {
                tables.routes.insert(route);
            }
        }
    }
    for dev in &scope.devices {
        let index = IfIndex(*dev);
        let permanent = handle
            .neighs(Some(index), None)?
            .into_iter()
            .filter(|found| found.state == NeighbourState::Permanent);
        tables.neighbours.extend(permanent.filter_map(|found| Some(((*dev, found.address), found.mac?))));
        // Entries of the bridge above a device are not the device's own.
        let own = handle.fdb(Some(index))?.into_iter().filter(|found| found.own && found.permanent);
        let unicast = own.filter(|found| found.mac.is_unicast());
        tables.fdb.extend(unicast.filter_map(|found| Some((*dev, found.mac, found.dst?))));
    }
    Ok(tables)
}

/// One change the kernel refused.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) change: Change,
    pub(super) error: Error,
}

/// Makes the tables what they should be. A refused change does not keep the others from being made.
pub(super) fn reconcile_tables(
    handle: &mut Handle,
    scope: &Scope,
    wanted: &Tables,
) -> Result<(Vec<Change>, Vec<Refusal>), Error> {
    let found = read_tables(handle, scope, wanted)?;
    Ok(apply_all(handle, table_changes(wanted, &found)))
}

/// Makes table changes one after the other; returns which were made and which were refused.
pub(super) fn apply_all(handle: &mut Handle, list: Vec<Change>) -> (Vec<Change>, Vec<Refusal>) {
    let (mut done, mut refused) = (Vec::new(), Vec::new());
    for change in list {
        match apply(handle, IfIndex(0), &change) {
            Ok(()) => done.push(change),
            Err(error) => refused.push(Refusal { change, error }),
        }
    }
    (done, refused)
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn own_route(route: &KernelRoute) -> Option<Route> {
    let made_by_kernel = route.protocol == RouteProtocol::KERNEL;
    let usual = route.kind == RouteKind::Unicast && !route.multipath;
    (usual && !made_by_kernel && route.dev.is_some()).then(|| as_route(route))
}

/// Any route of the kernel; one that is no plain unicast route has device 0 and so equals none of ours.
fn as_route(route: &KernelRoute) -> Route {
    let unset = if matches!(route.dst, IpNet::V4(_)) { 0 } else { 1024 };
    let plain = route.kind == RouteKind::Unicast && !route.multipath;
    Route {
        dst: route.dst,
        metric: route.metric.unwrap_or(unset),
        via: route.gateway,
        onlink: route.onlink,
        dev: route.dev.filter(|_| plain).map_or(0, |dev| dev.0),
        protocol: route.protocol.0,
    }
}

/// The request for a route of ours.
pub(super) fn kernel_route(route: &Route) -> KernelRoute {
    let mut request = KernelRoute::to(route.dst)
        .dev(IfIndex(route.dev))
        .metric(route.metric)
        .protocol(RouteProtocol(route.protocol));
    if let Some(via) = route.via {
        request = request.via(via);
    }
    if route.onlink { request.onlink() } else { request }
}

/// Makes the device what it should be; returns the changes that were needed. Without a scope its routes are left alone.
pub(super) fn reconcile(
    handle: &mut Handle,
    index: IfIndex,
    wanted: &Device,
    scope: Option<&Scope>,
) -> Result<Vec<Change>, Error> {
    let found = read_device(handle, index, scope)?;
    let list = changes(wanted, &found);
    for change in &list {
        apply(handle, index, change)?;
    }
    Ok(list)
}

fn apply(handle: &mut Handle, index: IfIndex, change: &Change) -> Result<(), Error> {
    match change {
        Change::SetMac(mac) => handle.link_set_mac(index, *mac),
        Change::SetMtu(mtu) => handle.link_set_mtu(index, *mtu),
        Change::SetUp => handle.link_up(index),
        Change::AddAddress(net) => handle.addr_replace(index, &Address::new(*net).nodad()),
        Change::RemoveAddress(net) => handle.addr_del(index, *net).tolerate_absence().map(drop),
        Change::SetRoute(route) => handle.route_replace(&kernel_route(route)),
        Change::RemoveRoute(route) => handle.route_del(&kernel_route(route)).tolerate_absence().map(drop),
        Change::SetNeighbour(dev, address, mac) => handle.neigh_set(IfIndex(*dev), *address, *mac),
        Change::RemoveNeighbour(dev, address) => {
            handle.neigh_del(IfIndex(*dev), *address).tolerate_absence().map(drop)
        }
        Change::SetFdb(dev, mac, to) => handle.fdb_set(IfIndex(*dev), *mac, *to),
        Change::RemoveFdb(dev, mac, to) => {
            handle.fdb_del(IfIndex(*dev), *mac, Some(*to)).tolerate_absence().map(drop)
        }
    }
}

/// Settings of a tunnel device under `/proc/sys`, before it is set up.
///
/// A container may see them read-only; so a failure is a warning that says what will not work.
pub(super) fn tune_device(name: &str, v4: bool, v6: bool) {
    if v4 {
        // Packets that come out of the tunnel are forwarded to the pods' bridge.
        want(
            &format!("net/ipv4/conf/{name}/forwarding"),
            "1",
            "packets from other nodes will not reach pods",
        );
        // Reverse path check: a peer may use the tunnel where we would not (direct routes, asymmetric networks). The
        // kernel takes the larger of "all" and the device, and 2 is the loose form.
        let strict =
            |scope: &str| sysctl::read(&format!("net/ipv4/conf/{scope}/rp_filter")).is_ok_and(|v| v == "1");
        if strict("all") || strict(name) {
            want(
                &format!("net/ipv4/conf/{name}/rp_filter"),
                "2",
                "strict reverse path filter may drop packets",
            );
        }
    }
    if v6 && sysctl::exists(&format!("net/ipv6/conf/{name}/forwarding")) {
        want(
            &format!("net/ipv6/conf/{name}/forwarding"),
            "1",
            "IPv6 packets from other nodes will not reach pods",
        );
    }
    // The tunnel carries no neighbour discovery: no router advertisements, no link-local address of its own.
    for (setting, value) in [("accept_ra", "0"), ("addr_gen_mode", "1")] {
        let key = format!("net/ipv6/conf/{name}/{setting}");
        if sysctl::exists(&key) {
            let _ = sysctl::ensure(&key, value);
        }
    }
}

fn want(key: &str, value: &str, otherwise: &str) {
    if let Err(error) = sysctl::ensure(key, value) {
        tracing::warn!("{error}: {otherwise} unless it is set to {value} already");
    }
}

/// Says once when the machine as a whole does not forward, which felt leaves to its administrator as flannel does.
pub(super) fn warn_unless_forwarding(v4: bool, v6: bool) {
    for (on, key) in [(v4, "net/ipv4/ip_forward"), (v6, "net/ipv6/conf/all/forwarding")] {
        if on && sysctl::read(key).is_ok_and(|value| value == "0") {
            tracing::warn!(
                "{key} is 0: pods reach other nodes only once it is 1 (the bridge plugin sets it)"
            );
        }
    }
}
