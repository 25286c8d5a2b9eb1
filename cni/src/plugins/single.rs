//! What macvlan, ipvlan, vlan, dummy and tap share: one link that lives in the container, with
//! addresses from IPAM, and nothing on the host's side.

use felt_hostnet::netlink::{Family, Handle, Link};
use felt_hostnet::netns::NetNs;
use felt_hostnet::sysctl;

use super::{container_link, ipam, mac_text, required_result};
use crate::delegate;
use crate::ipconf::{self, Dad, find_link};
use crate::json::Fields;
use crate::skel::{Call, Command};
use crate::types::error::{Error, Result};
use crate::types::result::{CniResult, Interface};
use crate::types::version::Shape;

/// Where the result's `dns` comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum DnsFrom {
    /// The plugin's own `dns` key, whatever IPAM says.
    Config,
    /// IPAM.
    Ipam,
}

/// How an attachment of one link is completed.
pub(super) struct Options {
    /// Where addresses come from when there is no IPAM.
    pub without_ipam: Option<CniResult>,
    pub dns: DnsFrom,
    /// Write `arp_notify` and `ndisc_notify`.
    pub notify: bool,
}

/// Gives the link its addresses and routes and says so. On failure the link and the lease go.
pub(super) fn complete(
    call: &Call<'_>,
    ns: &NetNs,
    inside: &mut Handle,
    link: &Link,
    options: Options,
) -> Result<CniResult> {
    let mut leased = false;
    fill(call, ns, inside, link, options, &mut leased).inspect_err(|_| {
        let _ = inside.link_del(link.index);
        if leased {
            let _ = ipam(call, Command::Del);
        }
    })
}

fn fill(
    call: &Call<'_>,
    ns: &NetNs,
    inside: &mut Handle,
    link: &Link,
    options: Options,
    leased: &mut bool,
) -> Result<CniResult> {
    let mut result = if !call.conf.ipam_type.is_empty() {
        let result = delegate::add(call, &call.conf.ipam_type, call.stdin)?;
        *leased = true;
        if result.ips.is_empty() {
            return Err(Error::internal("IPAM plugin returned missing IP config"));
        }
        result
    } else {
        options.without_ipam.unwrap_or_default()
    };
    result.interfaces = vec![Interface {
        name: call.env.ifname.clone(),
        mac: mac_text(link),
        sandbox: call.env.netns.clone(),
        ..Interface::default()
    }];
    for ip in &mut result.ips {
        ip.interface = Some(0);
    }
    if result.ips.is_empty() {
        inside.link_up(link.index)?;
    } else {
        if options.notify {
            ipconf::inside(ns, || {
                let ifname = &call.env.ifname;
                let _ = sysctl::write(&format!("net/ipv4/conf/{ifname}/arp_notify"), "1");
                let _ = sysctl::write(&format!("net/ipv6/conf/{ifname}/ndisc_notify"), "1");
                Ok(())
            })?;
        }
        ipconf::configure(inside, ns, link, &result, Dad::Skip)?;
    }
    if options.dns == DnsFrom::Config {
        result.dns = call.conf.dns.clone();
    }
    Ok(result)
}

/// Versions 0.1.0 and 0.2.0 cannot say "no address": refuse a layer 2 attachment before it is made.
pub(super) fn refuse_unspeakable(call: &Call<'_>, has_addresses: bool) -> Result<()> {
    if !has_addresses && call.conf.version.shape() == Shape::Legacy {
        return Err(Error::internal("cannot convert: no valid IP addresses"));
    }
    Ok(())
}

/// The text of a name that is taken, as the reference's rename reports it.
pub(super) fn name_error(kind: &str, call: &Call<'_>, err: felt_hostnet::Error) -> Error {
    if err.already_exists() {
        return Error::internal(format!("failed to rename {kind} to {:?}: file exists", call.env.ifname));
    }
    Error::from(err).context(format!("failed to create {kind}"))
}

/// The link the container's link sits on, and where it was found.
pub(super) struct Master {
    pub link: Link,
    /// The master is in the container's namespace itself.
    pub in_container: bool,
}

/// Finds the master named by the config, or the device of the first default route.
pub(super) fn master(
    f: &Fields<'_>,
    host: &mut Handle,
    inside: &mut Handle,
    fallback: Option<String>,
) -> Result<Master> {
    let in_container = f.flag("linkInContainer")?;
    let place = if in_container { inside } else { host };
    let named = f.string("master")?.filter(|s| !s.is_empty()).map(str::to_owned).or(fallback);
    let link = match named {
        Some(name) => find_link(place, &name)?,
        None => default_route_link(place)?,
    };
    Ok(Master { link, in_container })
}

fn default_route_link(handle: &mut Handle) -> Result<Link> {
    for family in [Family::V4, Family::V6] {
        let routes = handle.routes(family, Some(254))?;
        if let Some(dev) = routes.iter().find(|r| r.dst.prefix_len() == 0).and_then(|r| r.dev) {
            return Ok(handle.link_by_index(dev)?);
        }
    }
    Err(Error::internal("no default route interface found"))
}

/// `mtu`: between 0 (the master's) and the master's.
pub(super) fn mtu_on(f: &Fields<'_>, master: &Link) -> Result<Option<u32>> {
    let mtu = f.int("mtu")?.unwrap_or(0);
    match u32::try_from(mtu) {
        Ok(0) => Ok(None),
        Ok(mtu) if mtu <= master.mtu => Ok(Some(mtu)),
        _ => Err(Error::internal(format!("invalid MTU {mtu}, must be [0, master MTU({})]", master.mtu))),
    }
}

/// The common part of CHECK: the link of this kind, its addresses and routes.
pub(super) fn check(
    call: &Call<'_>,
    kind: &str,
    with_routes: bool,
) -> Result<(NetNs, Handle, Link, CniResult)> {
    let ns = ipconf::open_netns(call)?;
    super::ipam_if_any(call, Command::Check)?;
    let result = required_result(call, "Required prevResult missing")?;
    let mut inside = Handle::new_in(&ns)?;
    let link = container_link(call, &mut inside, &result, kind)?;
    ipconf::check(&mut inside, &link, &result, with_routes)?;
    Ok((ns, inside, link, result))
}
