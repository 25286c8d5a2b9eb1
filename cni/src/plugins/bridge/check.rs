//! CHECK: the container's interface, its cable and its addresses are as ADD said.
//!
//! The host end's MAC is not compared: udev and others change it, and nothing depends on it.

use felt_hostnet::netlink::Handle;

use super::conf::Conf;
use crate::ipconf;
use crate::plugins::{container_link, ipam_if_any, mac_text};
use crate::skel::{Call, Command};
use crate::types::error::{Error, Result};

pub(super) fn check(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    let ns = ipconf::open_netns(call)?;
    ipam_if_any(call, Command::Check)?;
    let result = call.conf.prev_result()?.ok_or_else(|| Error::internal("Required prevResult missing"))?;
    let of_host = |name: &str| result.interfaces.iter().find(|i| i.sandbox.is_empty() && i.name == name);
    let named = of_host(&conf.bridge).ok_or_else(|| {
        Error::internal(format!("Interface name missing {}", conf.bridge).trim_end().to_owned())
    })?;
    let mut host = Handle::new()?;
    let bridge = ipconf::find_link(&mut host, &named.name)
        .map_err(|err| err.context(format!("Interface {} not found", named.name)))?;
    if !bridge.is_kind("bridge") {
        return Err(Error::internal(format!(
            "Bridge interface {} does not have link type of bridge",
            named.name
        )));
    }
    if !named.mac.is_empty() && named.mac != mac_text(&bridge) {
        return Err(Error::internal(format!(
            "Bridge interface {} Mac doesn't match: {}",
            named.name, named.mac
        )));
    }
    if conf.promisc != (bridge.promiscuity > 0) && conf.promisc != bridge.is_promisc() {
        return Err(Error::internal(format!(
            "Bridge interface {} configured promisc Mode {} does not match",
            named.name, conf.promisc
        )));
    }

    let mut inside = Handle::new_in(&ns)?;
    let link = container_link(call, &mut inside, &result, "veth")?;
    let peer = link.peer.ok_or_else(|| Error::internal("container interface has no peer"))?;
    let cable = host.link_by_index(peer).ok().filter(|l| l.is_kind("veth") && l.master == Some(bridge.index));
    if cable.is_none() {
        return Err(Error::internal(format!("CNI veth created for bridge {} was not found", conf.bridge)));
    }
    ipconf::check(&mut inside, &link, &result, true)
}
