//! `vlan`: an 802.1Q link in the container on a link of the host.

use felt_hostnet::netlink::{Handle, LinkDetail, LinkKind, NewLink};

use super::single::{self, DnsFrom, Options};
use super::{Plugin, delete_link, ipam};
use crate::ipconf;
use crate::json::Fields;
use crate::skel::{Call, Command};
use crate::types::error::{Error, Result};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "vlan",
    versions: SpecVersion::ALL,
    add,
    // The master may be gone already: the address is released all the same.
    del: |call| ipam(call, Command::Del).and_then(|()| delete_link(call)),
    check,
    gc: |call| ipam(call, Command::Gc),
    status: |call| ipam(call, Command::Status),
    may_have_no_address: false,
};

fn vlan_id(f: &Fields<'_>) -> Result<u16> {
    let id = f.int("vlanId")?.unwrap_or(0);
    u16::try_from(id).ok().filter(|id| *id <= 4094).ok_or_else(|| {
        Error::internal(format!("invalid VLAN ID {id} (must be between 0 and 4095 inclusive)"))
    })
}

fn load<'a>(f: &Fields<'a>) -> Result<(&'a str, u16)> {
    f.int("mtu")?;
    let master = f.string("master")?.filter(|s| !s.is_empty()).ok_or_else(|| {
        Error::internal(
            "\"master\" field is required. It specifies the host interface name to create the VLAN for",
        )
    })?;
    Ok((master, vlan_id(f)?))
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    let (_, id) = load(&f)?;
    if call.conf.ipam_type.is_empty() {
        return Err(Error::internal("failed to execute IPAM delegate: no plugin name provided"));
    }
    let mut host = Handle::new()?;
    let ns = ipconf::open_netns(call)?;
    let mut inside = Handle::new_in(&ns)?;
    let master = single::master(&f, &mut host, &mut inside, None)?;
    let mut wanted = NewLink::new(&call.env.ifname, LinkKind::Vlan(id)).lower(master.link.index);
    wanted.mtu = single::mtu_on(&f, &master.link)?;
    if master.in_container { inside.link_add(&wanted) } else { host.link_add(&wanted.netns(&ns)) }
        .map_err(|err| match inside.link_by_name(&call.env.ifname) {
            // The kernel has one link per id of a device, whatever namespace it is in.
            Err(_) if err.already_exists() => Error::internal(format!(
                "failed to create vlan: VLAN {id} of {:?} is in use by another link, maybe in another container",
                master.link.name
            )),
            _ => single::name_error("vlan", call, err),
        })?;
    let link = ipconf::find_link(&mut inside, &call.env.ifname)?;
    let options = Options { without_ipam: None, dns: DnsFrom::Config, notify: false };
    single::complete(call, &ns, &mut inside, &link, options)
        .map_err(|err| err.recoded("failed to execute IPAM delegate"))
}

fn check(call: &Call<'_>) -> Result<()> {
    let value = call.value();
    let f = Fields::of("NetConf", &value)?;
    let (_, id) = load(&f)?;
    let (_, _, link, _) = single::check(call, "vlan", true)?;
    if link.detail != LinkDetail::Vlan(id) {
        return Err(Error::internal(format!(
            "Error: Tuning link {} configured promisc is {id}, current value is {:?}",
            link.name, link.detail
        )));
    }
    match f.int("mtu")?.filter(|mtu| *mtu != 0) {
        Some(mtu) if mtu != i64::from(link.mtu) => Err(Error::internal(format!(
            "Error: Tuning configured MTU of {} is {mtu}, current value is {}",
            link.name, link.mtu
        ))),
        _ => Ok(()),
    }
}
