//! `loopback`: sets `lo` of the container up on ADD and down on DEL.

use std::net::IpAddr;

use felt_hostnet::netlink::Handle;
use felt_hostnet::netns::NetNs;

use super::Plugin;
use crate::skel::Call;
use crate::types::error::{Context, Error, Result};
use crate::types::result::{CniResult, Interface, IpConfig};
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "loopback",
    versions: SpecVersion::ALL,
    add,
    del,
    check,
    gc: super::nothing,
    status: super::nothing,
    may_have_no_address: true,
};

fn add(call: &Call<'_>) -> Result<CniResult> {
    let previous = call.conf.prev_result()?;
    let mut inside = open(call)?;
    let lo = inside.link_by_name("lo")?;
    if !lo.is_up() {
        inside.link_up(lo.index)?;
    }
    let addresses = inside.addrs(Some(lo.index), None)?;
    if let Some(result) = previous {
        return Ok(result);
    }
    let mut result = CniResult {
        interfaces: vec![Interface {
            name: "lo".into(),
            mac: "00:00:00:00:00:00".into(),
            sandbox: call.env.netns.clone(),
            ..Interface::default()
        }],
        ..CniResult::default()
    };
    for v4 in [true, false] {
        if let Some(found) = addresses.iter().find(|a| a.net.addr().is_ipv4() == v4) {
            let ip: IpAddr = found.net.addr();
            if !ip.is_loopback() {
                return Err(Error::internal(format!(
                    "loopback interface found with non-loopback address {:?}",
                    found.net.to_string()
                )));
            }
            result.ips.push(IpConfig { interface: Some(0), address: found.net, gateway: None });
        }
    }
    Ok(result)
}

fn del(call: &Call<'_>) -> Result<()> {
    if call.env.netns.is_empty() {
        return Ok(());
    }
    let ns = match NetNs::open(&call.env.netns) {
        Err(err) if err.is_not_found() => return Ok(()),
        other => other?,
    };
    let mut inside = Handle::new_in(&ns)?;
    let lo = inside.link_by_name("lo")?;
    inside.link_down(lo.index)?;
    Ok(())
}

fn check(call: &Call<'_>) -> Result<()> {
    let mut inside = open(call)?;
    if inside.link_by_name("lo")?.is_up() {
        return Ok(());
    }
    Err(Error::internal("loopback interface is down"))
}

fn open(call: &Call<'_>) -> Result<Handle> {
    let ns =
        NetNs::open(&call.env.netns).with_context(|| format!("failed to open netns {:?}", call.env.netns))?;
    Ok(Handle::new_in(&ns)?)
}
