//! Tunnel devices of the kernel: vxlan and ipip, as flannel makes them.
//!
//! A device that is there already and agrees is kept with everything on it; else it is replaced once. So a node can be
//! exchanged for a flannel node and back, and a restart does not flap.

use felt_hostnet::netlink::{
    Handle as Netlink, IfIndex, IpTunnelConfig, Link, LinkDetail, LinkKind, NewLink, VxlanConfig,
};
use felt_hostnet::{MacAddr, TolerateAbsence as _};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::kernel;
use super::{BackendError, foreign};
use crate::lease::Lease;
use crate::reconcile::{Change, Device};

/// What a device is.
#[derive(Debug, Clone)]
pub(super) struct Spec {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Whether it carries IPv4; else IPv6.
    pub(super) v4: bool,
    pub(super) mtu: u32,
}

/// Its kind. The link below is filled in when the device is made.
#[derive(Debug, Clone)]
pub(super) enum Kind {
    Vxlan { config: VxlanConfig, mac: MacAddr },
    Ipip(IpTunnelConfig),
}

impl Spec {
    /// Hardware address by which peers know it.
    pub(super) fn mac(&self) -> Option<MacAddr> {
        match &self.kind {
            Kind::Vxlan { mac, .. } => Some(*mac),
            Kind::Ipip(_) => None,
        }
    }

    /// Whether `link` is this device, apart from what can be changed on it.
    fn agrees(&self, link: &Link, lower: IfIndex) -> bool {
        match (&self.kind, &link.detail) {
            (Kind::Vxlan { config, .. }, LinkDetail::Vxlan(found)) => {
                let same = (config.vni, config.local, config.port, config.learning, config.gbp)
                    == (
                        found.config.vni,
                        found.config.local,
                        found.config.port,
                        found.config.learning,
                        found.config.gbp,
                    );
                let plain = found.group.is_none() && !found.l2_miss && !found.l3_miss && !found.external;
                same && plain && found.config.lower == Some(lower)
            }
            (Kind::Ipip(config), LinkDetail::IpTunnel(found)) => {
                link.is_kind("ipip") && found.local == config.local && found.remote.is_none()
            }
            _ => false,
        }
    }

    /// What the device should be.
    fn wanted(&self, lease: &Lease) -> Device {
        // The lease's network address stands for the node: peers route replies to it.
        let address = if self.v4 {
            lease.key.v4.and_then(|net| Ipv4Net::new(net.addr(), 32).ok()).map(IpNet::V4)
        } else {
            lease.key.v6.and_then(|net| Ipv6Net::new(net.addr(), 128).ok()).map(IpNet::V6)
        };
        Device {
            mac: self.mac(),
            mtu: self.mtu,
            up: true,
            addresses: address.into_iter().collect(),
            ..Device::default()
        }
    }

    /// Makes the device, or puts right what is there; returns its index and what was done.
    pub(super) fn ensure(
        &self,
        netlink: &mut Netlink,
        external: &str,
        lease: &Lease,
    ) -> Result<(u32, Vec<String>), BackendError> {
        let name = &self.name;
        let lower = netlink.link_by_name(external)?.index;
        let mut done = Vec::new();
        let kept = match netlink.link_by_name(name) {
            Ok(link) if self.agrees(&link, lower) => Some(link.index),
            Ok(link) if link.is_kind("vxlan") || link.is_kind("ipip") || link.is_kind("tun") => {
                let kind = link.kind.as_deref().unwrap_or_default();
                done.push(format!("{name}: replaced a {kind} device with other attributes"));
                netlink.link_del(link.index).tolerate_absence()?;
                None
            }
            Ok(link) => return Err(BackendError::Unsupported(foreign(&link))),
            Err(error) if error.is_not_found() => {
                done.push(format!("{name}: made"));
                None
            }
            Err(error) => return Err(error.into()),
        };
        let index = match kept {
            Some(index) => index,
            None => self.create(netlink, lower)?,
        };
        let wanted = self.wanted(lease);
        // Routes on it are the keeper's.
        let list: Vec<Change> = kernel::reconcile(netlink, index, &wanted, None)?;
        if kept.is_some() {
            done.extend(list.iter().map(|change| format!("{name}: {change}")));
        }
        Ok((index.0, done))
    }

    fn create(&self, netlink: &mut Netlink, lower: IfIndex) -> Result<IfIndex, BackendError> {
        let kind = match &self.kind {
            Kind::Vxlan { config, .. } => {
                LinkKind::Vxlan(Box::new(VxlanConfig { lower: Some(lower), ..config.clone() }))
            }
            Kind::Ipip(config) => LinkKind::IpIp(*config),
        };
        // With its address from the first moment: udev and the like change only what has none of its own.
        let link = NewLink { mac: self.mac(), ..NewLink::new(&self.name, kind).mtu(self.mtu) };
        netlink.link_add(&link).map_err(|error| self.explain(error))?;
        kernel::tune_device(&self.name, self.v4, !self.v4);
        Ok(netlink.link_by_name(&self.name)?.index)
    }

    fn explain(&self, error: felt_hostnet::Error) -> BackendError {
        if error.is_unsupported() {
            let kind = if matches!(self.kind, Kind::Vxlan { .. }) { "vxlan" } else { "ipip" };
            return BackendError::Unsupported(format!(
                "{error}: the kernel has no {kind} devices (module {kind})"
            ));
        }
        if error.already_exists() {
            let name = &self.name;
            return BackendError::Unsupported(format!(
                "{error}: another device uses the same VNI and port; remove it, or give this network another VNI ({name})"
            ));
        }
        error.into()
    }
}
