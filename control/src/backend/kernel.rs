//! Reading and changing the kernel state that [`crate::reconcile`] reasons about.

use std::collections::BTreeSet;
use std::net::IpAddr;

use felt_hostnet::netlink::{
    Address, Family, Handle, IfIndex, Route as KernelRoute, RouteKind, RouteProtocol,
};
use felt_hostnet::{Error, TolerateAbsence, sysctl};
use ipnet::IpNet;

use crate::reconcile::{Change, Device, Route, changes};

/// The main routing table, the only one felt uses.
pub(super) const MAIN_TABLE: u32 = 254;

/// Reads the state of a device of ours. Every route on it is ours but those the kernel makes for addresses.
pub(super) fn read_device(handle: &mut Handle, index: IfIndex) -> Result<Device, Error> {
    let link = handle.link_by_index(index)?;
    let addresses = handle
        .addrs(Some(index), None)?
        .into_iter()
        .map(|found| found.net)
        .filter(|net| !is_link_local(net.addr()))
        .collect();
    let mut routes = BTreeSet::new();
    for family in [Family::V4, Family::V6] {
        let found = handle.routes(family, Some(MAIN_TABLE))?;
        routes.extend(found.iter().filter(|route| route.dev == Some(index)).filter_map(own_route));
    }
    Ok(Device { mtu: link.mtu, up: link.is_up(), addresses, routes })
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn own_route(route: &KernelRoute) -> Option<Route> {
    let made_by_kernel = route.protocol == RouteProtocol::KERNEL;
    let usual = route.kind == RouteKind::Unicast && !route.multipath;
    if made_by_kernel || !usual {
        return None;
    }
    let unset = if matches!(route.dst, IpNet::V4(_)) { 0 } else { 1024 };
    Some(Route {
        dst: route.dst,
        metric: route.metric.unwrap_or(unset),
        via: route.gateway,
        onlink: route.onlink,
        dev: route.dev?.0,
    })
}

/// The request for a route of ours.
pub(super) fn kernel_route(route: &Route) -> KernelRoute {
    let mut request = KernelRoute::to(route.dst).dev(IfIndex(route.dev)).metric(route.metric);
    if let Some(via) = route.via {
        request = request.via(via);
    }
    if route.onlink { request.onlink() } else { request }
}

/// Makes the device what it should be; returns the changes that were needed.
pub(super) fn reconcile(handle: &mut Handle, index: IfIndex, wanted: &Device) -> Result<Vec<Change>, Error> {
    let found = read_device(handle, index)?;
    let list = changes(wanted, &found);
    for change in &list {
        apply(handle, index, change)?;
    }
    Ok(list)
}

fn apply(handle: &mut Handle, index: IfIndex, change: &Change) -> Result<(), Error> {
    match change {
        Change::SetMtu(mtu) => handle.link_set_mtu(index, *mtu),
        Change::SetUp => handle.link_up(index),
        Change::AddAddress(net) => handle.addr_replace(index, &Address::new(*net).nodad()),
        Change::RemoveAddress(net) => handle.addr_del(index, *net).tolerate_absence().map(drop),
        Change::SetRoute(route) => handle.route_replace(&kernel_route(route)),
        Change::RemoveRoute(route) => handle.route_del(&kernel_route(route)).tolerate_absence().map(drop),
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
