//! `sbr`: answers leave by the interface whose address was asked (source based routing).
//!
//! Each address of the interface gets a rule `from ADDRESS lookup TABLE` and a table with the default
//! route over its gateway and the interface's own routes; the main table loses the interface's routes.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;

use felt_hostnet::TolerateAbsence;
use felt_hostnet::netlink::{Family, Handle, Link, Route, Rule};
use ipnet::IpNet;

use super::{Plugin, nothing};
use crate::ipconf::{self, find_link};
use crate::json::Fields;
use crate::skel::Call;
use crate::types::error::{Context, Error, Result};
use crate::types::result::{CniResult, IpConfig};
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "sbr",
    versions: SpecVersion::ALL,
    add,
    del,
    check: nothing,
    gc: nothing,
    status: nothing,
    may_have_no_address: true,
};

/// The first table tried.
const FIRST_TABLE: u32 = 100;
const MAIN: u32 = 254;

fn table_key(call: &Call<'_>) -> Result<Option<u32>> {
    let value = call.value();
    let f = Fields::of("PluginConf", &value)?;
    f.int("table")?
        .map(|n| u32::try_from(n).map_err(|_| Error::internal(format!("table {n} is out of range"))))
        .transpose()
}

/// Two calls for one namespace must not pick the same table: they take turns at its file. The file is
/// only opened, never made.
fn lock(call: &Call<'_>) -> Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC)
        .open(&call.env.netns)
        .with_context(|| format!("failed to open netns {:?}", call.env.netns))?;
    // Some file systems cannot lock a namespace file; the reference goes on then, too.
    let _ = file.lock();
    Ok(file)
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let table = table_key(call)?;
    let result = call
        .conf
        .prev_result()?
        .ok_or_else(|| Error::internal("This plugin must be called as chained plugin"))?;
    let named = |ip: &&IpConfig| {
        ip.interface.is_none_or(|i| {
            usize::try_from(i)
                .ok()
                .and_then(|i| result.interfaces.get(i))
                .is_some_and(|i| i.name == call.env.ifname)
        })
    };
    let ips: Vec<&IpConfig> = result.ips.iter().filter(named).collect();
    if ips.is_empty() {
        return Err(Error::internal(format!("No IP addresses supplied on interface: {}", call.env.ifname)));
    }
    let ns = ipconf::open_netns(call)?;
    let _turn = lock(call)?;
    let mut inside = Handle::new_in(&ns)?;
    let mut undo = Undo::default();
    let done = set(call, &mut inside, &ips, table, &mut undo);
    if done.is_err() {
        undo.run(&mut inside);
    }
    done.map(|()| result.clone())
}

/// What an ADD did, newest last.
#[derive(Default)]
struct Undo {
    rules: Vec<Rule>,
    added: Vec<Route>,
    removed: Vec<Route>,
}

impl Undo {
    fn run(&self, inside: &mut Handle) {
        for rule in &self.rules {
            let _ = inside.rule_del(rule);
        }
        for route in &self.added {
            let _ = inside.route_del(route);
        }
        for route in &self.removed {
            let _ = inside.route_replace(route);
        }
    }
}

fn set(
    call: &Call<'_>,
    inside: &mut Handle,
    ips: &[&IpConfig],
    table: Option<u32>,
    undo: &mut Undo,
) -> Result<()> {
    let link = find_link(inside, &call.env.ifname)?;
    let mut rule_for = |inside: &mut Handle, ip: &IpConfig, table: u32| -> Result<()> {
        let rule = Rule::from_prefix(IpNet::from(ip.address.addr()), table);
        match inside.rule_add(&rule) {
            Err(err) if err.already_exists() => Ok(()),
            Err(err) => Err(err).context("failed to add rule"),
            Ok(()) => {
                undo.rules.push(rule);
                Ok(())
            }
        }
    };
    if let Some(table) = table {
        return ips.iter().try_for_each(|ip| rule_for(inside, ip, table));
    }
    let own = routes_of(inside, &link)?;
    let mut used = used_tables(inside)?;
    for ip in ips {
        let table = (FIRST_TABLE..).find(|t| !used.contains(t) && *t != MAIN).unwrap_or(FIRST_TABLE);
        used.push(table);
        rule_for(inside, ip, table)?;
        let mut wanted: Vec<Route> = own
            .iter()
            .filter(|r| {
                let family = r.dst.addr().is_ipv4() == ip.address.addr().is_ipv4();
                let near = |a: Option<std::net::IpAddr>| a.is_some_and(|a| ip.address.contains(&a));
                family && (near(r.src) || near(r.gateway) || (r.src.is_none() && r.gateway.is_none()))
            })
            .map(|r| Route { table, ..r.clone() })
            .collect();
        wanted.sort_by_key(|r| r.gateway.is_some());
        // Without a gateway there is no default route to make.
        if let Some(gateway) = ip.gateway {
            let all = match gateway {
                std::net::IpAddr::V4(_) => IpNet::V4(ipnet::Ipv4Net::default()),
                std::net::IpAddr::V6(_) => IpNet::V6(ipnet::Ipv6Net::default()),
            };
            wanted.push(Route::to(all).via(gateway).dev(link.index).table(table));
        }
        for route in wanted {
            inside.route_replace(&route).context("failed to add route")?;
            undo.added.push(route);
        }
    }
    for route in own {
        inside.route_del(&route).tolerate_absence().context("failed to delete route")?;
        undo.removed.push(route);
    }
    Ok(())
}

/// The link's routes in the main table, but for those of link-local addresses and multicast.
fn routes_of(inside: &mut Handle, link: &Link) -> Result<Vec<Route>> {
    let mut found = Vec::new();
    for family in [Family::V4, Family::V6] {
        found.extend(inside.routes(family, Some(MAIN))?.into_iter().filter(|r| r.dev == Some(link.index)));
    }
    Ok(found)
}

/// Tables that a rule names or that hold routes.
fn used_tables(inside: &mut Handle) -> Result<Vec<u32>> {
    let mut used = Vec::new();
    for family in [Family::V4, Family::V6] {
        used.extend(inside.rules(family)?.iter().map(|r| r.table));
        used.extend(inside.routes(family, None)?.iter().map(|r| r.table));
    }
    used.sort_unstable();
    used.dedup();
    Ok(used)
}

fn del(call: &Call<'_>) -> Result<()> {
    let table = table_key(call)?;
    // Rules live in the namespace: without it there are none.
    let Some(ns) = ipconf::open_netns_if_any(call)? else { return Ok(()) };
    let mut inside = Handle::new_in(&ns)?;
    let link = match inside.link_by_name(&call.env.ifname) {
        Ok(link) => link,
        Err(err) if err.is_not_found() => return Ok(()),
        Err(err) => return Err(err.into()),
    };
    let addresses: Vec<IpNet> =
        inside.addrs(Some(link.index), None)?.into_iter().map(|a| IpNet::from(a.net.addr())).collect();
    for family in [Family::V4, Family::V6] {
        for rule in inside.rules(family)? {
            let ours = rule.from.is_some_and(|from| addresses.contains(&from));
            if ours && table.is_none_or(|table| table == rule.table) {
                inside.rule_del(&rule).tolerate_absence().context("failed to delete rule")?;
            }
        }
    }
    Ok(())
}
