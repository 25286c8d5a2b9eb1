//! `host-device`: moves a device of the host into the container and back.
//!
//! The device's name on the host is kept in its alias. DEL may be repeated: a device that is not in
//! the container any more was given back already, or went with the namespace. With
//! `useInterfaceNetwork` the addresses and routes it had on the host go with it.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use felt_hostnet::netlink::{Family, Handle, Link, LinkChange, RouteKind, RouteScope};
use felt_hostnet::netns::NetNs;

use super::{Plugin, ipam, ipam_if_any, mac_text, required_result, single, veth};
use crate::delegate;
use crate::ipconf::{self, Dad, find_link};
use crate::json::Fields;
use crate::skel::{Call, Command};
use crate::types::error::{Error, Result, go_text};
use crate::types::result::{CniResult, Interface, IpConfig, Route};
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "host-device",
    versions: SpecVersion::ALL,
    add,
    del,
    check,
    gc: |call| ipam_if_any(call, Command::Gc),
    status: |call| ipam_if_any(call, Command::Status),
    may_have_no_address: false,
};

const PCI: &str = "/sys/bus/pci/devices";
const AUXILIARY: &str = "/sys/bus/auxiliary/devices";
/// Drivers that hand a device to a program in user space: there is no link to move.
const USER_DRIVERS: [&str; 3] = ["vfio-pci", "uio_pci_generic", "igb_uio"];

/// How the device is named.
#[derive(Debug, Default)]
struct Conf {
    device: String,
    mac: String,
    kernel_path: String,
    pci: String,
    auxiliary: String,
    /// Bound to a driver of user space.
    dpdk: bool,
    /// `useInterfaceNetwork`: the device's own addresses and routes go with it.
    own_network: bool,
}

impl Conf {
    fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("NetConf", &value)?;
        let mut conf = Self {
            device: f.string_or_empty("device")?,
            mac: f.string_or_empty("hwaddr")?,
            kernel_path: f.string_or_empty("kernelpath")?,
            pci: f.string_or_empty("pciBusID")?,
            own_network: f.flag("useInterfaceNetwork")?,
            ..Self::default()
        };
        let runtime = f.object_of("runtimeConfig", "struct")?;
        let id = runtime.map(|r| r.string_or_empty("deviceID")).transpose()?.unwrap_or_default();
        if !id.is_empty() {
            one_component(&id)?;
            if Path::new(PCI).join(&id).exists() {
                conf.pci = id;
            } else if Path::new(AUXILIARY).join(&id).exists() {
                conf.auxiliary = id;
                conf.pci.clear();
            } else {
                return Err(Error::internal(format!(
                    "runtime config DeviceID {id} not found or unsupported"
                )));
            }
        }
        let all = [&conf.device, &conf.mac, &conf.kernel_path, &conf.pci, &conf.auxiliary];
        if all.iter().all(|s| s.is_empty()) {
            return Err(Error::internal(
                "specify either \"device\", \"hwaddr\", \"kernelpath\" or \"pciBusID\"",
            ));
        }
        if !conf.pci.is_empty() {
            one_component(&conf.pci)?;
            let link = Path::new(PCI).join(&conf.pci).join("driver");
            let target = fs::read_link(&link).map_err(|err| {
                Error::internal(format!(
                    "error with host device: lstat {}: {}",
                    link.display(),
                    go_text(&err)
                ))
            })?;
            let driver = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            conf.dpdk = USER_DRIVERS.contains(&driver.as_str());
        }
        Ok(conf)
    }

    fn find(&self, host: &mut Handle) -> Result<Link> {
        if !self.device.is_empty() {
            return find_link(host, &self.device);
        }
        if !self.mac.is_empty() {
            let mac = self.mac.parse().map_err(|_| {
                Error::internal(format!("failed to parse MAC address {:?}: invalid MAC address", self.mac))
            })?;
            return host.links()?.into_iter().find(|l| l.mac == Some(mac)).ok_or_else(not_found);
        }
        if !self.kernel_path.is_empty() {
            let path = Path::new(&self.kernel_path);
            let below = path.starts_with("/sys/devices")
                && !path.components().any(|c| c == std::path::Component::ParentDir);
            if !below {
                return Err(Error::internal(format!(
                    "kernel device path {:?} must be absolute and begin with /sys/devices/",
                    self.kernel_path
                )));
            }
            return first_link(host, &[path.join("net")]);
        }
        if !self.pci.is_empty() {
            let device = Path::new(PCI).join(&self.pci);
            let mut places = vec![device.join("net")];
            if let Ok(entries) = fs::read_dir(&device) {
                let virtio =
                    entries.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("virtio"));
                places.extend(virtio.map(|e| e.path().join("net")));
            }
            return first_link(host, &places);
        }
        first_link(host, &[Path::new(AUXILIARY).join(&self.auxiliary).join("net")])
    }
}

fn one_component(id: &str) -> Result<()> {
    if id.contains('/') || id == ".." || id == "." {
        return Err(Error::internal(format!("invalid device ID {id:?}")));
    }
    Ok(())
}

fn not_found() -> Error {
    Error::internal("failed to find physical interface")
}

fn first_link(host: &mut Handle, places: &[PathBuf]) -> Result<Link> {
    for place in places {
        let Ok(entries) = fs::read_dir(place) else { continue };
        let mut names: Vec<_> = entries.flatten().map(|e| e.file_name()).collect();
        names.sort();
        if let Some(name) = names.first() {
            return find_link(host, &name.to_string_lossy());
        }
    }
    Err(not_found())
}

fn add(call: &Call<'_>) -> Result<CniResult> {
    let conf = Conf::load(call)?;
    let with_ipam = !call.conf.ipam_type.is_empty();
    single::refuse_unspeakable(call, with_ipam || conf.own_network)?;
    let ns = ipconf::open_netns(call)?;
    if conf.dpdk {
        return add_without_link(call, with_ipam);
    }
    let mut host = Handle::new()?;
    let mut inside = Handle::new_in(&ns)?;
    let device = conf.find(&mut host).map_err(|err| err.context("failed to find host device"))?;
    let own = if conf.own_network { own_network(&mut host, &device)? } else { CniResult::default() };
    let link = move_in(call, &mut host, &mut inside, &ns, &device)
        .map_err(|err| err.context("failed to move link"))?;
    let mut leased = false;
    configure(call, &ns, &mut inside, &link, own, &mut leased).inspect_err(|_| {
        if leased {
            let _ = ipam(call, Command::Del);
        }
        if move_out(&mut inside, &link).is_ok() {
            restore_up(&mut host, &device);
        }
    })
}

fn add_without_link(call: &Call<'_>, with_ipam: bool) -> Result<CniResult> {
    let mut result =
        if with_ipam { delegate::add(call, &call.conf.ipam_type, call.stdin)? } else { CniResult::default() };
    for ip in &mut result.ips {
        ip.interface = Some(0);
    }
    result.interfaces = vec![Interface {
        name: call.env.ifname.clone(),
        sandbox: call.env.netns.clone(),
        ..Interface::default()
    }];
    if with_ipam {
        result.dns = call.conf.dns.clone();
    }
    Ok(result)
}

/// Gives the device to the container under its new name, in one request: whoever kills this process,
/// the device is here as it was or there with its old name as alias. On failure it is back, as it was.
fn move_in(
    call: &Call<'_>,
    host: &mut Handle,
    inside: &mut Handle,
    ns: &NetNs,
    device: &Link,
) -> Result<Link> {
    let ifname = call.env.ifname.as_str();
    let clash = |text: String| {
        Error::internal(format!("failed to rename host device {:?} to {ifname:?}: {text}", device.name))
    };
    if inside.link_by_name(ifname).is_ok() {
        return Err(clash("file exists".into()));
    }
    let change = LinkChange {
        netns: Some(ns.as_fd()),
        name: Some(ifname),
        alias: Some(&device.name),
        ..LinkChange::default()
    };
    if let Err(err) = host.link_set(device.index, &change) {
        // The kernel moves first: with the new name taken meanwhile the device is there under its old one.
        let own = NetNs::current()?;
        if let Ok(stray) = inside.link_by_name(&device.name)
            && host.link_by_name(&device.name).is_err_and(|err| err.is_not_found())
        {
            let back = LinkChange { netns: Some(own.as_fd()), alias: Some(""), ..LinkChange::default() };
            let _ = inside.link_set(stray.index, &back);
        }
        restore_up(host, device);
        return Err(clash(if err.already_exists() { "file exists".into() } else { Error::from(err).msg }));
    }
    let link = find_link(inside, ifname)?;
    inside.link_up(link.index)?;
    Ok(link)
}

/// Sets a device that is back up again, if it was.
fn restore_up(host: &mut Handle, device: &Link) {
    if device.is_up()
        && let Ok(link) = host.link_by_name(&device.name)
    {
        let _ = host.link_up(link.index);
    }
}

/// What the host configured on the device: permanent global addresses, and routes of the main table that
/// neither the kernel nor a router made. They are gone once the device has moved, so they are read before.
fn own_network(host: &mut Handle, device: &Link) -> Result<CniResult> {
    /// `RTPROT_KERNEL` and `RTPROT_RA` of linux/rtnetlink.h.
    const NOT_CONFIGURED: [u8; 2] = [2, 9];
    let mut own = CniResult::default();
    for address in host.addrs(Some(device.index), None)? {
        if address.flags.permanent && address.scope == RouteScope::Universe {
            own.ips.push(IpConfig { interface: None, address: address.net, gateway: None });
        }
    }
    for family in [Family::V4, Family::V6] {
        for route in host.routes(family, Some(254))? {
            let configured = !NOT_CONFIGURED.contains(&route.protocol.0) && route.kind == RouteKind::Unicast;
            if route.dev != Some(device.index) || !configured {
                continue;
            }
            let mut copy = Route::new(route.dst, route.gateway);
            copy.priority = u64::from(route.metric.unwrap_or(0));
            copy.mtu = u64::from(route.mtu.unwrap_or(0));
            copy.advmss = u64::from(route.advmss.unwrap_or(0));
            if route.gateway.is_none() {
                copy.scope = Some(u64::from(RouteScope::Link.number()));
            }
            own.routes.push(copy);
        }
    }
    // A gateway must be reachable before there is a route over it.
    own.routes.sort_by_key(|route| route.gw.is_some());
    Ok(own)
}

fn configure(
    call: &Call<'_>,
    ns: &NetNs,
    inside: &mut Handle,
    link: &Link,
    own: CniResult,
    leased: &mut bool,
) -> Result<CniResult> {
    let mut result = CniResult::default();
    let with_ipam = !call.conf.ipam_type.is_empty();
    if with_ipam {
        result = delegate::add(call, &call.conf.ipam_type, call.stdin)?;
        *leased = true;
        if result.ips.is_empty() {
            return Err(Error::internal("IPAM plugin returned missing IP config"));
        }
    }
    result.ips.extend(own.ips);
    result.routes.extend(own.routes);
    result.interfaces = vec![Interface {
        name: link.name.clone(),
        mac: mac_text(link),
        sandbox: call.env.netns.clone(),
        ..Interface::default()
    }];
    for ip in &mut result.ips {
        ip.interface = Some(0);
    }
    if !result.ips.is_empty() {
        ipconf::configure(inside, ns, link, &result, Dad::Skip)?;
        announce(ns, link, &result);
    }
    if with_ipam {
        result.dns = call.conf.dns.clone();
    }
    Ok(result)
}

/// Tells the neighbours of the addresses: the link was up before it had them. Best effort.
fn announce(ns: &NetNs, link: &Link, result: &CniResult) {
    let Some(mac) = link.mac else { return };
    let _ = ipconf::inside(ns, || {
        for ip in &result.ips {
            let _ = felt_hostnet::announce::announce(link.index, mac, ip.address.addr());
        }
        Ok(())
    });
}

/// Gives the device back to the host under its old name, down. When the host has another link of
/// that name by now, it comes back under a free one.
fn move_out(inside: &mut Handle, link: &Link) -> Result<()> {
    let Some(name) = link.alias.as_deref().filter(|s| !s.is_empty()) else {
        return Err(Error::internal(format!(
            "failed to find original ifname for {:?} (alias is not set)",
            link.name
        )));
    };
    let own = NetNs::current()?;
    let taken = Handle::new()?.link_by_name(name).is_ok();
    let temporary = format!("dev{:08x}", veth::random() as u32);
    // One request, as on the way in. Moving sets a link down.
    let change = LinkChange {
        netns: Some(own.as_fd()),
        name: Some(if taken { temporary.as_str() } else { name }),
        alias: Some(""),
        ..LinkChange::default()
    };
    Ok(inside.link_set(link.index, &change)?)
}

fn del(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call);
    ipam_if_any(call, Command::Del)?;
    let Some(ns) = ipconf::open_netns_if_any(call)? else { return Ok(()) };
    if conf.is_ok_and(|conf| conf.dpdk) {
        return Ok(());
    }
    let mut inside = Handle::new_in(&ns)?;
    let link = match inside.link_by_name(&call.env.ifname) {
        Ok(link) => link,
        // Given back already, or renamed inside: a link that names an origin is one of ours.
        Err(err) if err.is_not_found() => {
            let value = call.value();
            let wanted = Fields::of("NetConf", &value)?.string_or_empty("device")?;
            let renamed = inside
                .links()?
                .into_iter()
                .find(|l| !wanted.is_empty() && l.alias.as_deref() == Some(wanted.as_str()));
            match renamed {
                Some(link) => link,
                None => return Ok(()),
            }
        }
        Err(err) => return Err(err.into()),
    };
    move_out(&mut inside, &link)
}

fn check(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    let ns = ipconf::open_netns(call)?;
    ipam_if_any(call, Command::Check)?;
    let result = required_result(call, "Required prevResult missing")?;
    if conf.dpdk {
        return Ok(());
    }
    let (_, named) = super::container_interface(call, &result)?;
    let mut inside = Handle::new_in(&ns)?;
    let link = find_link(&mut inside, &named.name)?;
    if !named.mac.is_empty() && named.mac != mac_text(&link) {
        return Err(Error::internal(format!(
            "Interface {} Mac {} doesn't match container Mac: {}",
            named.name,
            named.mac,
            mac_text(&link)
        )));
    }
    ipconf::check(&mut inside, &link, &result, true)
}
