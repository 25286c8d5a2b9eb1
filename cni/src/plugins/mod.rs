//! The plugins, one file or folder each, and the table that names them.

mod bandwidth;
mod bridge;
mod dhcp;
mod dummy;
mod firewall;
mod flannel;
mod host_device;
mod host_local;
mod ipvlan;
mod loopback;
mod macvlan;
mod masquerade;
mod portmap;
mod ptp;
mod sbr;
mod single;
mod spoof;
mod static_ipam;
mod tuning;
mod veth;
mod vlan;

use felt_hostnet::TolerateAbsence;
use felt_hostnet::netlink::{Family, Handle, Link};

use crate::skel::{Call, Command};
use crate::types::error::{Error, Result};
use crate::types::result::{CniResult, Interface};
use crate::types::version::SpecVersion;
use crate::{delegate, ipconf, names, trace};

/// A plugin: its name, the versions it speaks, one handler per command.
pub struct Plugin {
    /// The file name runtimes look for.
    pub name: &'static str,
    /// Versions in the answer to VERSION, oldest first.
    pub versions: &'static [SpecVersion],
    /// ADD
    pub add: fn(&Call<'_>) -> Result<CniResult>,
    /// DEL
    pub del: fn(&Call<'_>) -> Result<()>,
    /// CHECK
    pub check: fn(&Call<'_>) -> Result<()>,
    /// GC
    pub gc: fn(&Call<'_>) -> Result<()>,
    /// STATUS
    pub status: fn(&Call<'_>) -> Result<()>,
    /// Whether a result without addresses is printed in 0.1.0 and 0.2.0 rather than refused.
    pub may_have_no_address: bool,
}

/// Every plugin in this binary.
pub static ALL: &[&Plugin] = &[
    &bandwidth::PLUGIN,
    &bridge::PLUGIN,
    &dhcp::PLUGIN,
    &dummy::PLUGIN,
    &firewall::PLUGIN,
    &flannel::PLUGIN,
    &host_device::PLUGIN,
    &host_local::PLUGIN,
    &ipvlan::PLUGIN,
    &loopback::PLUGIN,
    &macvlan::PLUGIN,
    &portmap::PLUGIN,
    &ptp::PLUGIN,
    &sbr::PLUGIN,
    &static_ipam::PLUGIN,
    &tuning::PLUGIN,
    &vlan::PLUGIN,
];

/// The plugin of this name.
pub fn find(name: &str) -> Option<&'static Plugin> {
    ALL.iter().copied().find(|plugin| plugin.name == name)
}

/// Runs `dhcp daemon`.
pub fn dhcp_daemon(args: &[String]) -> std::process::ExitCode {
    dhcp::daemon_main(args)
}

/// Names of the chains and tables in which an attachment has masquerade or port map rules.
pub fn rules_of(family: Family, network: &str, id: &str) -> Vec<String> {
    let mut found = Vec::new();
    if masquerade::iptables_ids(family, network).iter().any(|other| other == id) {
        found.push(names::masquerade_chain(network, id));
    }
    if portmap::containers(family, network).iter().any(|other| other == id) {
        found.push(names::portmap_chain(network, id));
    }
    if portmap::has_nft_rules(family, id) {
        found.push(format!("{family:?} rules of table cni_hostport"));
    }
    if family == Family::V4 && masquerade::has_nft_rules(network, id) {
        found.push("rules of table cni_plugins_masquerade".into());
    }
    found
}

/// Removes these rules.
///
/// # Errors
/// What the kernel or the programs refuse.
pub fn remove_rules(family: Family, network: &str, id: &str) -> Result<()> {
    masquerade::remove(family, network, id)?;
    portmap::remove_of(family, network, id)
}

/// Attachments with MAC spoof rules whose host end is gone; with `remove`, the rules go.
///
/// # Errors
/// What the kernel refuses.
pub fn orphaned_spoof_rules(remove: bool) -> Result<Vec<String>> {
    spoof::orphans(&|_| false, remove)
}

/// Takes the lock of a directory of reservations; dropping the value gives it back.
///
/// # Errors
/// When the directory cannot be opened.
pub fn lock_reservations(dir: &std::path::Path) -> Result<impl Sized + use<>> {
    host_local::lock(dir)
}

/// Handler of a command the plugin has nothing to do for.
fn nothing(_: &Call<'_>) -> Result<()> {
    Ok(())
}

/// Calls the configured IPAM plugin with this call's own input.
fn ipam(call: &Call<'_>, command: Command) -> Result<()> {
    delegate::call(call, command, &call.conf.ipam_type, call.stdin)
}

/// As [`ipam`], when one is configured.
fn ipam_if_any(call: &Call<'_>, command: Command) -> Result<()> {
    if call.conf.ipam_type.is_empty() { Ok(()) } else { ipam(call, command) }
}

/// The result's entry for the container's interface, with its index.
fn container_interface<'r>(call: &Call<'_>, result: &'r CniResult) -> Result<(usize, &'r Interface)> {
    let (index, named) = result
        .interfaces
        .iter()
        .enumerate()
        .find(|(_, i)| i.name == call.env.ifname && !i.sandbox.is_empty())
        .or_else(|| result.interfaces.iter().enumerate().find(|(_, i)| i.name == call.env.ifname))
        .ok_or_else(|| {
            Error::internal(format!("Container Interface {} not found in prevResult", call.env.ifname))
        })?;
    if named.sandbox != call.env.netns {
        return Err(Error::internal(format!(
            "Sandbox in prevResult {} doesn't match configured netns: {}",
            named.sandbox, call.env.netns
        )));
    }
    Ok((index, named))
}

/// The container's interface as the result names it: name, sandbox, kind, MAC.
fn container_link(call: &Call<'_>, inside: &mut Handle, result: &CniResult, kind: &str) -> Result<Link> {
    let (_, named) = container_interface(call, result)?;
    let link = ipconf::find_link(inside, &named.name).map_err(|err| {
        err.context(format!("Container Interface name in prevResult: {} not found", named.name))
    })?;
    if !link.is_kind(kind) {
        return Err(Error::internal(format!("Error: Container interface {} not of type {kind}", named.name)));
    }
    if !named.mac.is_empty() && !named.mac.eq_ignore_ascii_case(&mac_text(&link)) {
        return Err(Error::internal(format!(
            "Interface {} Mac {} doesn't match container Mac: {}",
            named.name,
            named.mac,
            mac_text(&link)
        )));
    }
    Ok(link)
}

/// The result a CHECK compares with.
fn required_result(call: &Call<'_>, text: &str) -> Result<CniResult> {
    call.conf.prev_result()?.ok_or_else(|| Error::internal(text))
}

/// Has the kernel tell the neighbours of the addresses, so that nobody keeps an old owner's MAC.
///
/// The kernel announces by itself when the link goes up (`arp_notify`, `ndisc_notify`), but a bridge's
/// port does not forward yet at that moment. It announces again when the link's MAC is set, be it to
/// what it was. A packet socket would do as well, but closing one waits for a grace period, which is
/// longer than the rest of an ADD. Best effort: peers ask by themselves if they must.
fn announce_again(inside: &mut Handle, link: &Link, result: &CniResult) {
    if let Some(mac) = link.mac.filter(|_| !result.ips.is_empty()) {
        let _ = inside.link_set_mac(link.index, mac);
        trace::step(|| "addresses announced".into());
    }
}

/// A link's MAC as results write it.
fn mac_text(link: &Link) -> String {
    link.mac.map(|mac| mac.to_string()).unwrap_or_default()
}

/// Deletes the container's interface, if there is one in a namespace that exists.
fn delete_link(call: &Call<'_>) -> Result<()> {
    if let Some(ns) = ipconf::open_netns_if_any(call)? {
        Handle::new_in(&ns)?.link_del_by_name(&call.env.ifname).tolerate_absence()?;
        trace::step(|| "link deleted".into());
    }
    Ok(())
}
