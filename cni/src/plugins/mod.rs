//! The plugins, one file or folder each, and the table that names them.

mod bridge;
mod flannel;
mod host_local;
mod loopback;
mod masquerade;
mod veth;

use crate::delegate;
use crate::skel::{Call, Command};
use crate::types::error::{Error, Result};
use crate::types::result::{CniResult, Interface};
use crate::types::version::SpecVersion;
use felt_hostnet::netlink::Link;
use felt_hostnet::netns::NetNs;

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
pub static ALL: &[&Plugin] = &[&bridge::PLUGIN, &flannel::PLUGIN, &host_local::PLUGIN, &loopback::PLUGIN];

/// The plugin of this name.
pub fn find(name: &str) -> Option<&'static Plugin> {
    ALL.iter().copied().find(|plugin| plugin.name == name)
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

/// Tells the neighbours of a new address, so that nobody keeps an old owner's MAC: once the port
/// forwards, for what was sent before is lost. Best effort: peers ask by themselves if they must.
fn announce(ns: &NetNs, link: &Link, result: &CniResult) {
    let _ = (ns, link, result);
}
