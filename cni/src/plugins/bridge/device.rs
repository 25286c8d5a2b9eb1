//! The bridge device: made when absent, its addresses, its VLANs.

use felt_hostnet::netlink::{
    Address, BridgeConfig, Family, Handle, IfIndex, Link, LinkChange, LinkKind, NewLink, VlanFlags,
};
use felt_hostnet::{MacAddr, TolerateAbsence, sysctl};
use ipnet::IpNet;

use super::conf::Conf;
use crate::ipconf;
use crate::plugins::veth;
use crate::types::error::{Context, Error, Result};

/// Finds the bridge or makes it. Of several callers at once, all find the same one.
pub(super) fn ensure(host: &mut Handle, conf: &Conf) -> Result<Link> {
    let name = &conf.bridge;
    let fail = || format!("failed to create bridge {name:?}");
    let mut link = match host.link_by_name(name) {
        Ok(link) => link,
        Err(err) if err.is_not_found() => {
            match host.link_add(&new_bridge(conf)) {
                Err(err) if !err.already_exists() => return Err(err).with_context(fail),
                _ => {}
            }
            host.link_by_name(name).with_context(fail)?
        }
        Err(err) => return Err(err).with_context(fail),
    };
    if !link.is_kind("bridge") {
        return Err(Error::internal(format!("{}: {name:?} already exists but is not a bridge", fail())));
    }
    if conf.promisc && !link.is_promisc() {
        let change = LinkChange { promisc: Some(true), ..LinkChange::default() };
        host.link_set(link.index, &change).with_context(fail)?;
    }
    let _ = sysctl::ensure(&format!("net/ipv6/conf/{name}/accept_ra"), "0");
    if !link.is_up() {
        host.link_up(link.index).with_context(fail)?;
        link = host.link_by_index(link.index).with_context(fail)?;
    }
    Ok(link)
}

fn new_bridge(conf: &Conf) -> NewLink<'static> {
    let config =
        BridgeConfig { vlan_filtering: conf.uses_vlans().then_some(true), ..BridgeConfig::default() };
    let mut link = NewLink::new(&conf.bridge, LinkKind::Bridge(config));
    link.mtu = conf.mtu;
    if conf.is_gateway {
        // With an address of its own the bridge does not take over that of its lowest port, which
        // would change under the pods that know the gateway's MAC.
        let bytes = veth::random().to_ne_bytes();
        link.mac = Some(MacAddr::local_from([bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]]));
    }
    link
}

/// Puts `net` on the bridge, unless it is there; another address in its way is an error, or goes with
/// `force`.
pub(super) fn ensure_address(host: &mut Handle, link: &Link, net: IpNet, force: bool) -> Result<()> {
    let family = Family::of(net.addr());
    let present = host.addrs(Some(link.index), Some(family))?;
    if present.iter().any(|a| a.net == net) {
        // Another ADD may have put it there this very moment.
        return if net.addr().is_ipv6() { ipconf::wait_until_local(host, net.addr()) } else { Ok(()) };
    }
    for other in present {
        let conflicts =
            net.addr().is_ipv4() || other.net.contains(&net.addr()) || net.contains(&other.net.addr());
        if !conflicts {
            continue;
        }
        if !force {
            return Err(Error::internal(format!(
                "{:?} already has an IP address different from {net}",
                link.name
            )));
        }
        host.addr_del(link.index, other.net)
            .tolerate_absence()
            .with_context(|| format!("could not remove IP address from {:?}", link.name))?;
    }
    // Usable by the next packet: nobody else can hold the gateway's address on our own bridge.
    match host.addr_add(link.index, &Address::new(net).broadcast_of_prefix().nodad()) {
        Ok(()) => {
            if net.addr().is_ipv6() {
                ipconf::wait_until_local(host, net.addr())?;
            }
            pin_mac(host, link.index)
        }
        // Another ADD was faster.
        Err(err) if err.already_exists() => Ok(()),
        Err(err) => Err(err).with_context(|| format!("could not add IP address {net} to {:?}", link.name)),
    }
}

/// Sets the MAC the bridge has: from now on it stays, whatever ports come and go.
fn pin_mac(host: &mut Handle, index: IfIndex) -> Result<()> {
    match host.link_by_index(index)?.mac {
        Some(mac) => host.link_set_mac(index, mac).context("could not set bridge's mac"),
        None => Ok(()),
    }
}

/// The VLANs of a port.
pub(super) fn set_port_vlans(host: &mut Handle, port: IfIndex, conf: &Conf) -> Result<()> {
    if !conf.uses_vlans() {
        return Ok(());
    }
    let access = VlanFlags { pvid: true, untagged: true, bridge_self: false };
    if !conf.preserve_default_vlan {
        for (index, vid, flags) in host.bridge_vlans()? {
            if index == port {
                host.bridge_vlan_del(port, vid, flags).tolerate_absence()?;
            }
        }
    }
    if conf.vlan != 0 {
        host.bridge_vlan_add(port, conf.vlan, access)
            .with_context(|| format!("failed to setup vlan {}", conf.vlan))?;
    } else if conf.trunk.is_some() {
        host.bridge_vlan_add(port, 1, access).context("failed to setup vlan 1")?;
    }
    for vid in conf.trunk.iter().flatten() {
        host.bridge_vlan_add(port, *vid, VlanFlags::default())
            .with_context(|| format!("failed to setup vlan {vid}"))?;
    }
    Ok(())
}

/// `<bridge>.<vlan>`: the host's own leg in the VLAN, a veth whose other end is a port of the bridge.
/// One that another ADD left half made, or is making now, is completed.
pub(super) fn ensure_vlan_interface(host: &mut Handle, bridge: &Link, conf: &Conf) -> Result<Link> {
    let name = format!("{}.{}", bridge.name, conf.vlan);
    let fail = || format!("failed to create vlan gateway {name:?}");
    let port = veth::random_name();
    let mut link = NewLink::new(&port, LinkKind::veth(&name).into()).up().master(bridge.index);
    link.mtu = Some(bridge.mtu);
    match host.link_by_name(&name) {
        Ok(leg) if leg.is_up() => return Ok(leg),
        Ok(leg) => return complete_vlan_interface(host, &leg, conf).with_context(fail),
        Err(err) if err.is_not_found() => {}
        Err(err) => return Err(err.into()),
    }
    match host.link_add(&link) {
        Err(err) if !err.already_exists() => return Err(err).with_context(fail),
        // Made now, by this ADD or a faster one.
        _ => {}
    }
    let leg = host.link_by_name(&name).with_context(fail)?;
    complete_vlan_interface(host, &leg, conf)
        .inspect_err(|_| {
            let _ = host.link_del_by_name(&port);
        })
        .with_context(fail)
}

/// Gives the port of a leg its VLAN, then sets the leg up: a leg that is up is whole.
fn complete_vlan_interface(host: &mut Handle, leg: &Link, conf: &Conf) -> Result<Link> {
    let port = leg
        .peer
        .ok_or_else(|| Error::internal(format!("{:?} is there and no end of a veth pair", leg.name)))?;
    set_port_vlans(host, port, &Conf { trunk: None, ..conf.clone() })?;
    host.link_up(leg.index)?;
    Ok(host.link_by_index(leg.index)?)
}
