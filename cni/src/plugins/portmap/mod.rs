//! `portmap`: ports of the host lead to ports of the container.
//!
//! With iptables there is a chain per attachment, entered from `CNI-HOSTPORT-DNAT` by a match on its
//! ports; with nftables a rule per port in the table `cni_hostport`, known by its comment. Names,
//! comments and places are the reference's, except that a new attachment's entry goes before older
//! ones: where a dead pod's rule was left behind, the port leads to the new pod.

mod conf;
mod iptables;
mod nftables;

use std::net::IpAddr;

use felt_hostnet::conntrack::Conntrack;
use felt_hostnet::netlink::{Family, Handle};
use felt_hostnet::nft::Nft;
use felt_hostnet::sysctl;
use ipnet::IpNet;

use super::{Plugin, nothing};
use crate::names;
use crate::skel::Call;
use crate::trace;
use crate::types::error::{Context, Error, Result};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;
use crate::xtables::{self, Tool};
use conf::{Backend, Conf, Mapping};

pub(super) static PLUGIN: Plugin = Plugin {
    name: "portmap",
    versions: SpecVersion::ALL,
    add,
    del,
    check,
    gc,
    status: nothing,
    may_have_no_address: true,
};

fn add(call: &Call<'_>) -> Result<CniResult> {
    let conf = Conf::load(call).map_err(|err| err.recoded("failed to parse config"))?;
    let result =
        call.conf.prev_result()?.ok_or_else(|| Error::internal("must be called as chained plugin"))?;
    if conf.mappings.is_empty() {
        return Ok(result);
    }
    for address in container_addresses(call, &result)? {
        forward(call, &conf, address).inspect_err(|_| {
            let _ = remove(call, &conf);
        })?;
    }
    Ok(result)
}

fn forward(call: &Call<'_>, conf: &Conf, address: IpNet) -> Result<()> {
    match backend(conf) {
        Backend::Iptables => iptables::set(call, conf, address)?,
        Backend::Nftables => nftables::set(call, conf, address)?,
    }
    trace::step(|| format!("ports forwarded to {}", address.addr()));
    forget_udp_flows(conf, Family::of(address.addr()));
    if conf.snat && address.addr().is_ipv4() {
        let mut host = Handle::new()?;
        let lookup = host.route_lookup(address.addr(), None);
        if let Some(dev) = lookup.ok().and_then(|l| l.dev) {
            let name = host.link_by_index(dev)?.name;
            sysctl::ensure(&format!("net/ipv4/conf/{name}/route_localnet"), "1")
                .with_context(|| format!("unable to enable route_localnet on {name}"))?;
        }
    }
    Ok(())
}

/// As the reference chooses: what is asked for, else iptables unless only nftables works.
fn backend(conf: &Conf) -> Backend {
    conf.backend.unwrap_or_else(|| {
        let iptables = Tool::find(Family::V4).is_some();
        if iptables || !Nft::new().is_ok_and(|mut nft| nft.is_supported().unwrap_or(false)) {
            Backend::Iptables
        } else {
            Backend::Nftables
        }
    })
}

/// A flow the kernel remembers goes on to the container it went to before: such entries of our UDP
/// ports are forgotten. Best effort, as there may be no connection tracking at all.
fn forget_udp_flows(conf: &Conf, family: Family) {
    let mut ports = conf.mappings.iter().filter(|m| m.protocol.eq_ignore_ascii_case("udp")).peekable();
    if ports.peek().is_none() {
        return;
    }
    let Ok(mut conntrack) = Conntrack::new() else { return };
    for mapping in ports {
        let _ = conntrack.delete_udp_to_port(family, mapping.host_port);
    }
    trace::step(|| "UDP flows forgotten".into());
}

/// The first address of each family that belongs to the container's interface.
fn container_addresses(call: &Call<'_>, result: &CniResult) -> Result<Vec<IpNet>> {
    let mut found: Vec<IpNet> = Vec::new();
    for ip in &result.ips {
        if let Some(index) = ip.interface {
            let named = usize::try_from(index).ok().and_then(|i| result.interfaces.get(i));
            let Some(named) = named else {
                return Err(Error::internal(format!(
                    "failed to parse config: interface index {index} is invalid"
                )));
            };
            if named.sandbox.is_empty() || named.name != call.env.ifname {
                continue;
            }
        }
        if !found.iter().any(|other| other.addr().is_ipv4() == ip.address.addr().is_ipv4()) {
            found.push(ip.address);
        }
    }
    Ok(found)
}

fn del(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call).map_err(|err| err.recoded("failed to parse config"))?;
    remove(call, &conf)
}

fn remove(call: &Call<'_>, conf: &Conf) -> Result<()> {
    let mut outcomes = Vec::new();
    for family in [Family::V4, Family::V6] {
        outcomes.push(iptables::remove(family, &call.conf.name, &call.env.container_id));
        outcomes.push(nftables::remove(family, |id| id == call.env.container_id));
        // After the rules: a flow must not be set up anew by a packet in between.
        forget_udp_flows(conf, family);
    }
    trace::step(|| "port maps removed".into());
    outcomes.into_iter().collect()
}

/// Containers of a network that have port maps in iptables.
pub(super) fn containers(family: Family, network: &str) -> Vec<String> {
    iptables::containers(family, network)
}

/// Removes the port maps of one container of a network.
pub(super) fn remove_of(family: Family, network: &str, id: &str) -> Result<()> {
    iptables::remove(family, network, id)?;
    nftables::remove(family, |other| other == id)
}

/// Whether a container has port maps in nftables.
pub(super) fn has_nft_rules(family: Family, id: &str) -> bool {
    nftables::has(family, id)
}

fn check(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    let result =
        call.conf.prev_result()?.ok_or_else(|| Error::internal("must be called as chained plugin"))?;
    if conf.mappings.is_empty() {
        return Ok(());
    }
    for address in container_addresses(call, &result)? {
        let family = if address.addr().is_ipv4() { "ipv4" } else { "ipv6" };
        match backend(&conf) {
            Backend::Iptables => iptables::check(call, &conf, address),
            Backend::Nftables => nftables::check(call, &conf, address),
        }
        .map_err(|err| err.context(format!("could not check {family} dnat")))?;
    }
    Ok(())
}

fn gc(call: &Call<'_>) -> Result<()> {
    let valid = call.conf.valid_attachments()?;
    let keep: Vec<&str> = valid.iter().map(|(id, _)| id.as_str()).collect();
    for family in [Family::V4, Family::V6] {
        for id in iptables::containers(family, &call.conf.name) {
            if !keep.contains(&id.as_str()) {
                iptables::remove(family, &call.conf.name, &id)?;
            }
        }
    }
    // nftables comments name the container alone: whose network it is cannot be told, so nothing of
    // it is removed here.
    Ok(())
}

/// `address:port`, in brackets for IPv6.
fn endpoint(address: IpAddr, port: u16) -> String {
    match address {
        IpAddr::V4(v4) => format!("{v4}:{port}"),
        IpAddr::V6(v6) => format!("[{v6}]:{port}"),
    }
}

/// The host address a mapping is restricted to; `Err(())` when it is of the other family.
fn host_ip(mapping: &Mapping, v4: bool) -> std::result::Result<Option<IpAddr>, ()> {
    match mapping.host_ip {
        None => Ok(None),
        Some(ip) if ip.is_ipv4() != v4 => Err(()),
        Some(ip) if ip.is_unspecified() => Ok(None),
        Some(ip) => Ok(Some(ip)),
    }
}

/// Names of an attachment's chains: its own and the one very old versions made.
fn chains(network: &str, id: &str) -> [(String, &'static str); 2] {
    [
        (names::portmap_chain(network, id), "CNI-HOSTPORT-DNAT"),
        (names::old_portmap_chain(network, id), "CNI-HOSTPORT-SNAT"),
    ]
}

/// Removes one chain with its entries.
fn remove_chain(family: Family, chain: &str, holder: &str) -> Result<()> {
    xtables::remove_chain(family, "nat", chain, &[holder])
}
