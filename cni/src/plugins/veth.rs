//! Making the two ends of a container's cable.

use std::hash::{BuildHasher, Hasher};

use felt_hostnet::MacAddr;
use felt_hostnet::netlink::{Handle, IfIndex, Link, LinkKind, NewLink};
use felt_hostnet::netns::NetNs;
use felt_hostnet::sysctl;

use crate::ipconf::find_link;
use crate::types::error::{Context, Error, Result};

/// What the pair is to be.
pub(super) struct Wanted<'a> {
    pub ifname: &'a str,
    pub mtu: Option<u32>,
    pub mac: Option<MacAddr>,
    /// The bridge the host end joins.
    pub master: Option<IfIndex>,
}

/// Both ends as the kernel made them.
pub(super) struct Pair {
    pub host: Link,
    pub container: Link,
}

/// Tries when another link has the random name already.
const NAME_TRIES: usize = 10;

/// Makes the pair in one request: the host end up and in its bridge, the container end in `ns`, down.
///
/// # Errors
/// The reference's texts when the container has a link of this name, or the kernel's refusal. Nothing
/// is left behind.
pub(super) fn make(host: &mut Handle, inside: &mut Handle, ns: &NetNs, wanted: &Wanted<'_>) -> Result<Pair> {
    let fail = "failed to make veth pair";
    let mut tries = 0;
    let name = loop {
        tries += 1;
        let name = random_name();
        let mut peer = LinkKind::veth(wanted.ifname).peer_netns(ns);
        if let Some(mac) = wanted.mac {
            peer = peer.peer_mac(mac);
        }
        if let Some(mtu) = wanted.mtu {
            peer = peer.peer_mtu(mtu);
        }
        // COMPAT: the reference leaves the host end without a transmit queue.
        let mut link = NewLink::new(&name, peer.into()).tx_queue_len(0).up();
        link.mtu = wanted.mtu;
        link.master = wanted.master;
        match host.link_add(&link) {
            Ok(()) => break name,
            Err(err) if err.already_exists() => {
                if inside.link_by_name(wanted.ifname).is_ok() {
                    return Err(Error::internal(format!(
                        "container veth name ({:?}) peer provided ({name:?}) already exists",
                        wanted.ifname
                    )));
                }
                if tries == NAME_TRIES {
                    return Err(Error::internal(format!(
                        "{fail}: no free name for the host end: file exists"
                    )));
                }
            }
            Err(err) => return Err(err).context(fail),
        }
    };
    let pair = find_link(host, &name)
        .and_then(|host_end| Ok(Pair { host: host_end, container: find_link(inside, wanted.ifname)? }));
    let pair = pair.inspect_err(|_| {
        let _ = host.link_del_by_name(&name);
    })?;
    // The host must not take routers' word from a pod.
    let _ = sysctl::write(&format!("net/ipv6/conf/{name}/accept_ra"), "0");
    Ok(pair)
}

/// `veth` and eight random hexadecimal digits.
pub(super) fn random_name() -> String {
    format!("veth{:08x}", random() as u32)
}

/// A random number from the keys the standard library draws for its hash tables.
pub(super) fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
