//! `ipvlan`: a link in the container that shares the MAC of a link of the host.

use felt_hostnet::netlink::{Handle, IpvlanMode, LinkDetail, LinkKind, NewLink};

use super::single::{self, DnsFrom, Options};
use super::{Plugin, delete_link, ipam_if_any};
use crate::ipconf;
use crate::json::Fields;
use crate::skel::{Call, Command};
use crate::types::error::{Error, Result};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "ipvlan",
    versions: SpecVersion::ALL,
    add,
    // Neither the master nor a default route is needed to take the link away.
    del: |call| ipam_if_any(call, Command::Del).and_then(|()| delete_link(call)),
    check,
    gc: |call| ipam_if_any(call, Command::Gc),
    status: |call| ipam_if_any(call, Command::Status),
    may_have_no_address: false,
};

fn mode(f: &Fields<'_>) -> Result<IpvlanMode> {
    Ok(match f.string("mode")?.unwrap_or_default() {
        "" | "l2" => IpvlanMode::L2,
        "l3" => IpvlanMode::L3,
        "l3s" => IpvlanMode::L3s,
        other => return Err(Error::internal(format!("unknown ipvlan mode: {other:?}"))),
    })
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    f.int("mtu")?;
    let mode = mode(&f)?;
    let previous = call.conf.prev_result()?;
    let fallback = match (&previous, f.string("master")?.filter(|s| !s.is_empty())) {
        (Some(previous), None) => match previous.interfaces.as_slice() {
            [only] if !only.name.is_empty() => Some(only.name.clone()),
            _ => {
                return Err(Error::internal(
                    "chained master failure. PrevResult lacks a single named interface",
                ));
            }
        },
        _ => None,
    };
    let without_ipam = previous.filter(|p| !p.ips.is_empty());
    single::refuse_unspeakable(call, !call.conf.ipam_type.is_empty() || without_ipam.is_some())?;
    let mut host = Handle::new()?;
    let ns = ipconf::open_netns(call)?;
    let mut inside = Handle::new_in(&ns)?;
    let named = f.string("master")?.filter(|s| !s.is_empty()).map(str::to_owned).or_else(|| fallback.clone());
    let master = single::master(&f, &mut host, &mut inside, fallback).map_err(|err| match named {
        Some(name) => err.recoded(format!("failed to lookup master {name:?}")),
        None => err,
    })?;
    let mut wanted = NewLink::new(&call.env.ifname, LinkKind::Ipvlan(mode)).lower(master.link.index);
    wanted.mtu = single::mtu_on(&f, &master.link)?;
    if master.in_container { inside.link_add(&wanted) } else { host.link_add(&wanted.netns(&ns)) }
        .map_err(|err| single::name_error("ipvlan", call, err))?;
    let link = ipconf::find_link(&mut inside, &call.env.ifname)?;
    let options = Options { without_ipam, dns: DnsFrom::Config, notify: true };
    single::complete(call, &ns, &mut inside, &link, options)
}

fn check(call: &Call<'_>) -> Result<()> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    let wanted = mode(&f)?;
    let (_, mut inside, link, _) = single::check(call, "ipvlan", true)?;
    if link.detail != LinkDetail::Ipvlan(Some(wanted)) {
        return Err(Error::internal(format!(
            "Container ipvlan mode {:?} does not match expected value: {wanted:?}",
            link.detail
        )));
    }
    if f.string("master")?.is_some_and(|s| !s.is_empty()) {
        single::master(&f, &mut Handle::new()?, &mut inside, None)?;
    }
    Ok(())
}
