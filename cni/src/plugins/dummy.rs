//! `dummy`: a link in the container that swallows what is sent, for addresses that must exist.

use felt_hostnet::netlink::{Handle, LinkKind, NewLink};

use super::single::{self, DnsFrom, Options};
use super::{Plugin, delete_link, ipam};
use crate::ipconf;
use crate::skel::{Call, Command};
use crate::types::error::{Context, Error, Result};
use crate::types::result::CniResult;
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "dummy",
    versions: SpecVersion::ALL,
    add,
    del: |call| ipam(call, Command::Del).and_then(|()| delete_link(call)),
    check,
    gc: |call| ipam(call, Command::Gc),
    status: |call| ipam(call, Command::Status),
    may_have_no_address: false,
};

fn add(call: &Call<'_>) -> Result<CniResult> {
    if call.conf.ipam_type.is_empty() {
        return Err(Error::internal("dummy interface requires an IPAM configuration"));
    }
    let ns = ipconf::open_netns(call)?;
    let mut inside = Handle::new_in(&ns)?;
    inside.link_add(&NewLink::new(&call.env.ifname, LinkKind::Dummy)).context("failed to create dummy")?;
    let link = ipconf::find_link(&mut inside, &call.env.ifname)?;
    let options = Options { without_ipam: None, dns: DnsFrom::Ipam, notify: false };
    single::complete(call, &ns, &mut inside, &link, options)
}

fn check(call: &Call<'_>) -> Result<()> {
    let (_, _, link, _) = single::check(call, "dummy", false)?;
    if link.is_up() {
        return Ok(());
    }
    Err(Error::internal(format!("Interface {} is down", link.name)))
}
