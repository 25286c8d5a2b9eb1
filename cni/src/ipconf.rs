//! Addresses and routes of a container's interface: setting them after ADD, comparing them in CHECK.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use felt_hostnet::netlink::{
    Address, AddressInfo, Family, Handle, IfIndex, Link, LinkChange, Route as KernelRoute, RouteKind,
    RouteScope,
};
use felt_hostnet::netns::NetNs;
use felt_hostnet::sysctl;
use ipnet::IpNet;

use crate::skel::Call;
use crate::trace;
use crate::types::error::{Context, Error, Result};
use crate::types::result::{CniResult, Route};

/// Opens the namespace of an ADD or CHECK.
///
/// # Errors
/// The reference's text, with the path.
pub fn open_netns(call: &Call<'_>) -> Result<NetNs> {
    NetNs::open(&call.env.netns).with_context(|| format!("failed to open netns {:?}", call.env.netns))
}

/// Opens the namespace of a DEL; `None` when there is none any more.
///
/// # Errors
/// When the path is something else than a namespace.
pub fn open_netns_if_any(call: &Call<'_>) -> Result<Option<NetNs>> {
    if call.env.netns.is_empty() {
        return Ok(None);
    }
    match NetNs::open(&call.env.netns) {
        Ok(ns) => Ok(Some(ns)),
        Err(err) if err.is_not_found() => Ok(None),
        Err(err) => Err(Error::from(err).context(format!("failed to open netns {:?}", call.env.netns))),
    }
}

/// The link of this name, or the words runtimes know: `Link not found`.
///
/// # Errors
/// None of this name, or the kernel's refusal.
pub fn find_link(handle: &mut Handle, name: &str) -> Result<Link> {
    handle
        .link_by_name(name)
        .map_err(|err| if err.is_not_found() { Error::internal("Link not found") } else { err.into() })
}

/// Runs `work` inside the namespace, on this thread, and comes back.
///
/// # Errors
/// When the namespace cannot be entered, or what `work` returns.
pub fn inside<T>(ns: &NetNs, work: impl FnOnce() -> Result<T>) -> Result<T> {
    ns.with(work).context("enter network namespace")?
}

/// How a container's interface is to be configured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dad {
    /// Addresses are usable at once.
    Skip,
    /// IPv6 duplicate address detection runs and is waited for.
    Run,
}

/// Puts the result's addresses and routes on the interface `index` of the result and sets it up.
///
/// Addresses without an interface index are not for us and skipped, as in the reference.
///
/// # Errors
/// Any refusal of the kernel; the caller removes the link, which removes all of this.
pub fn configure(handle: &mut Handle, ns: &NetNs, link: &Link, result: &CniResult, dad: Dad) -> Result<()> {
    if result.interfaces.is_empty() {
        return Err(Error::internal("no interfaces to configure"));
    }
    let mine: Vec<_> = result.ips.iter().filter(|ip| ip.interface.is_some()).collect();
    for ip in &mine {
        let named = ip.interface.and_then(|i| usize::try_from(i).ok()).and_then(|i| result.interfaces.get(i));
        if named.is_none_or(|named| named.name != link.name) {
            return Err(Error::internal(format!(
                "failed to add IP addr {} to {:?}: invalid interface index",
                ip.address, link.name
            )));
        }
    }
    if mine.iter().any(|ip| ip.address.addr().is_ipv6()) {
        inside(ns, || enable_ipv6(&link.name))?;
    }
    for ip in &mine {
        let mut address = Address::new(ip.address).broadcast_of_prefix();
        if dad == Dad::Skip {
            address = address.nodad();
        }
        handle
            .addr_add(link.index, &address)
            .with_context(|| format!("failed to add IP addr {} to {:?}", ip.address, link.name))?;
    }
    handle.link_up(link.index).with_context(|| format!("failed to set {:?} UP", link.name))?;
    trace::step(|| format!("{} has its addresses and is up", link.name));
    let gateway = |v4: bool| mine.iter().filter_map(|ip| ip.gateway).find(|gw| gw.is_ipv4() == v4);
    for ip in mine.iter().filter(|ip| ip.address.addr().is_ipv6()) {
        match dad {
            Dad::Run if gateway(false).is_some() => settle(handle, link)?,
            Dad::Run => {}
            Dad::Skip => wait_until_local(handle, ip.address.addr())?,
        }
    }
    for route in &result.routes {
        // A route to what is on the link itself has no gateway.
        let on_link = route.scope.is_some_and(|scope| scope >= u64::from(RouteScope::Link.number()));
        let via = route.gw.or_else(|| gateway(route.dst.addr().is_ipv4()).filter(|_| !on_link));
        add_route(handle, link.index, route, via).map_err(|err| {
            err.context(format!("failed to add route '{} via {} dev {}'", route.dst, or_nil(via), link.name))
        })?;
    }
    Ok(())
}

fn or_nil(ip: Option<IpAddr>) -> String {
    ip.map_or_else(|| "<nil>".into(), |ip| ip.to_string())
}

/// IPv6 may be switched off in a new namespace though an address was assigned.
fn enable_ipv6(ifname: &str) -> Result<()> {
    for name in ["lo", ifname] {
        let key = format!("net/ipv6/conf/{name}/disable_ipv6");
        if sysctl::read(&key).is_ok_and(|value| value != "0") {
            sysctl::write(&key, "0")?;
        }
    }
    sysctl::write(&format!("net/ipv6/conf/{ifname}/keep_addr_on_down"), "1")?;
    Ok(())
}

/// Waits until the kernel delivers packets for an IPv6 address. It makes the local route from a work
/// queue, also without duplicate address detection, and drops what comes before.
///
/// # Errors
/// Not local after five seconds, or the kernel's refusal.
pub fn wait_until_local(handle: &mut Handle, address: IpAddr) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut pause = Duration::from_micros(50);
    loop {
        // Before there is any route the look-up itself fails.
        if handle.route_lookup(address, None).is_ok_and(|found| found.kind == RouteKind::Local) {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Error::internal(format!("address {address} is not local after 5s")));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

/// Waits for duplicate address detection.
fn settle(handle: &mut Handle, link: &Link) -> Result<()> {
    let (failed, settled) = handle.addr_wait_dad(link.index, Duration::from_secs(5))?;
    if let Some(net) = failed.first() {
        return Err(Error::internal(format!(
            "link {} has address {} in DADFAILED state",
            link.name,
            net.addr()
        )));
    }
    if !settled && handle.link_by_index(link.index)?.oper_state == felt_hostnet::netlink::OperState::Up {
        return Err(Error::internal(format!("link {} still has tentative addresses after 5s", link.name)));
    }
    Ok(())
}

fn add_route(handle: &mut Handle, link: IfIndex, route: &Route, via: Option<IpAddr>) -> Result<()> {
    let mut wanted = KernelRoute::to(route.dst).dev(link);
    let number = |n: u64, what: &str| {
        u32::try_from(n).map_err(|_| Error::internal(format!("{what} {n} is out of range")))
    };
    wanted.gateway = via;
    wanted.scope = Some(match route.scope {
        None => RouteScope::Universe,
        Some(n) => RouteScope::from_number(
            u8::try_from(n).map_err(|_| Error::internal(format!("scope {n} is out of range")))?,
        ),
    });
    if route.priority != 0 {
        wanted.metric = Some(number(route.priority, "priority")?);
    }
    if let Some(table) = route.table.filter(|t| *t != 0) {
        wanted.table = number(table, "table")?;
    }
    if route.mtu != 0 {
        wanted.mtu = Some(number(route.mtu, "mtu")?);
    }
    if route.advmss != 0 {
        wanted.advmss = Some(number(route.advmss, "advmss")?);
    }
    match handle.route_prepend(&wanted) {
        // The very same route is there: what was wanted holds.
        Err(err) if err.already_exists() => Ok(()),
        other => Ok(other?),
    }
}

/// Waits until a port of a bridge forwards. The kernel reports that from a work queue, normally
/// within a millisecond; the last attempt is after two and a half seconds, as in the reference.
///
/// # Errors
/// The link vanished or is still not up.
pub fn wait_until_up(handle: &mut Handle, index: IfIndex) -> Result<Link> {
    let deadline = Instant::now() + Duration::from_millis(2550);
    let mut pause = Duration::from_micros(100);
    loop {
        let link = handle.link_by_index(index)?;
        if link.oper_state == felt_hostnet::netlink::OperState::Up {
            return Ok(link);
        }
        if Instant::now() >= deadline {
            return Err(Error::internal(format!("bridge port in error state: {}", state_name(&link))));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}

fn state_name(link: &Link) -> String {
    format!("{:?}", link.oper_state).to_lowercase()
}

/// Switches on forwarding for a family, without writing what is there already.
///
/// A host that learns its default route from router advertisements forgets it when IPv6 forwarding
/// is switched on, unless the interface accepts them also as a router: `accept_ra` is raised from 1
/// to 2 on interfaces that hold such a route.
///
/// # Errors
/// The kernel's refusal.
pub fn enable_forwarding(host: &mut Handle, v4: bool) -> Result<()> {
    if v4 {
        sysctl::ensure("net/ipv4/ip_forward", "1")?;
        return Ok(());
    }
    const V6: &str = "net/ipv6/conf/all/forwarding";
    if sysctl::read(V6).is_ok_and(|value| value == "1") {
        return Ok(());
    }
    /// `RTPROT_RA` of linux/rtnetlink.h.
    const LEARNED: u8 = 9;
    for route in host.routes(Family::V6, Some(254))? {
        if route.dst.prefix_len() != 0 || route.protocol.0 != LEARNED {
            continue;
        }
        if let Some(index) = route.dev {
            let name = host.link_by_index(index)?.name;
            let key = format!("net/ipv6/conf/{name}/accept_ra");
            if sysctl::read(&key).is_ok_and(|value| value == "1") {
                sysctl::write(&key, "2")?;
            }
        }
    }
    sysctl::write(V6, "1")?;
    Ok(())
}

/// CHECK: the addresses of the result that belong to interface `index` are on `link`, each with a
/// route to its prefix, and the result's routes are in the main table.
///
/// # Errors
/// The first difference, in the reference's words.
pub fn check(handle: &mut Handle, link: &Link, result: &CniResult, with_routes: bool) -> Result<()> {
    let present = handle.addrs(Some(link.index), None)?;
    let tables = [Family::V4, Family::V6].map(|family| handle.routes(family, Some(254)));
    let [v4, v6] = tables;
    let routes: Vec<KernelRoute> = v4?.into_iter().chain(v6?).collect();
    for ip in &result.ips {
        let named = ip.interface.and_then(|i| usize::try_from(i).ok()).and_then(|i| result.interfaces.get(i));
        if named.is_some_and(|named| named.name != link.name) {
            continue;
        }
        if !present.iter().any(|a: &AddressInfo| a.net == ip.address) {
            return Err(Error::internal(format!(
                "Failed to match addr {} on interface {}",
                ip.address, link.name
            )));
        }
        let prefix = ip.address.trunc();
        if !routes.iter().any(|r| r.dst == prefix) && !is_host(&prefix) {
            return Err(Error::internal(format!(
                "Failed to find Gateway {} for interface {}",
                or_nil(ip.gateway),
                link.name
            )));
        }
    }
    if !with_routes {
        return Ok(());
    }
    for wanted in result.routes.iter().filter(|r| r.table.is_none_or(|t| t == 0 || t == 254)) {
        let dst = wanted.dst.trunc();
        let found = routes
            .iter()
            .any(|r| r.dst == dst && (wanted.is_default() || wanted.gw.is_none() || r.gateway == wanted.gw));
        if !found {
            return Err(Error::internal(format!("Expected Route {wanted} not found in routing table")));
        }
    }
    Ok(())
}

fn is_host(net: &IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

/// Sets the largest segmentation-offload packet of a link, for IPv4 and IPv6.
///
/// # Errors
/// The kernel's refusal.
pub fn set_gso_max_size(handle: &mut Handle, index: IfIndex, bytes: u32) -> Result<()> {
    let change =
        LinkChange { gso_max_size: Some(bytes), gso_ipv4_max_size: Some(bytes), ..LinkChange::default() };
    handle.link_set(index, &change).with_context(|| format!("set gso_max_size {bytes}"))
}
