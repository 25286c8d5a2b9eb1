//! Links (interfaces): look-up, creation, change, removal.

mod create;
mod read;

use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_route::link::{
    AfSpecBridge, BridgeFlag, BridgeVlanInfo, BridgeVlanInfoFlags, InfoBridge, InfoBridgePort, InfoData,
    InfoKind, InfoPortData, InfoPortKind, LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

pub use create::{
    BridgeConfig, IpTunnelConfig, IpvlanMode, LinkKind, MacvlanMode, NewLink, VethPeer, VxlanConfig,
};
pub use read::{BridgePort, Link, LinkDetail, LinkStats, OperState, TunDetail, VxlanDetail};

use super::socket::{NLM_F_CREATE, NLM_F_EXCL};
use super::{Handle, IfIndex};
use crate::{Error, MacAddr};

/// Changes to a link; what is `None` stays as it is.
#[derive(Debug, Clone, Default)]
pub struct LinkChange<'a> {
    /// Administrative state.
    pub up: Option<bool>,
    /// New name. Older kernels want the link down for that.
    pub name: Option<&'a str>,
    /// MTU in bytes.
    pub mtu: Option<u32>,
    /// Hardware address.
    pub mac: Option<MacAddr>,
    /// `Some(None)` takes the link out of its bridge or VRF.
    pub master: Option<Option<IfIndex>>,
    /// Moves the link into this network namespace.
    pub netns: Option<BorrowedFd<'a>>,
    /// Transmit queue length in packets.
    pub tx_queue_len: Option<u32>,
    /// Promiscuous mode as set by the administrator.
    pub promisc: Option<bool>,
    /// Reception of all multicast as set by the administrator.
    pub allmulti: Option<bool>,
    /// ARP on the link (`false` sets IFF_NOARP).
    pub arp: Option<bool>,
    /// Free text shown by `ip link`.
    pub alias: Option<&'a str>,
    /// Largest segmentation-offload packet given to the link, in bytes (IPv6, and IPv4 up to 64 KiB).
    pub gso_max_size: Option<u32>,
    /// The same for IPv4 (Linux 6.3).
    pub gso_ipv4_max_size: Option<u32>,
    /// Most segments of such a packet.
    pub gso_max_segs: Option<u32>,
    /// Largest packet the link merges on reception, in bytes.
    pub gro_max_size: Option<u32>,
}

/// Changes to a bridge port; what is `None` stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BridgePortChange {
    /// Frames may leave through the port they came in by.
    pub hairpin: Option<bool>,
    /// Isolated ports reach only ports that are not.
    pub isolated: Option<bool>,
    /// The bridge learns source addresses of this port.
    pub learning: Option<bool>,
    /// Unknown unicast is flooded to this port.
    pub unicast_flood: Option<bool>,
}

/// Flags of a VLAN on a bridge or a bridge port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VlanFlags {
    /// Untagged frames that come in belong to this VLAN.
    pub pvid: bool,
    /// Frames of this VLAN leave without a tag.
    pub untagged: bool,
    /// The VLAN is of the bridge device itself, not of a port.
    pub bridge_self: bool,
}

pub(super) fn message(index: IfIndex) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index.0;
    message
}

impl Handle {
    /// Finds a link by name.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when there is none.
    pub fn link_by_name(&mut self, name: &str) -> Result<Link, Error> {
        let mut request = LinkMessage::default();
        request.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.link_get(request, &|| format!("find link {name}"))
    }

    /// Finds a link by number.
    pub fn link_by_index(&mut self, index: IfIndex) -> Result<Link, Error> {
        self.link_get(message(index), &|| format!("find link number {index}"))
    }

    fn link_get(&mut self, mut request: LinkMessage, what: &dyn Fn() -> String) -> Result<Link, Error> {
        request.attributes.push(LinkAttribute::ExtMask(vec![]));
        let answers = self.answers(&RouteNetlinkMessage::GetLink(request), 0, what)?;
        answers
            .iter()
            .find_map(Link::from_message)
            .ok_or_else(|| Error::protocol(what(), "the kernel answered without a link"))
    }

    /// All links.
    pub fn links(&mut self) -> Result<Vec<Link>, Error> {
        let answers =
            self.dump(&RouteNetlinkMessage::GetLink(LinkMessage::default()), &|| "list links".into())?;
        Ok(answers.iter().filter_map(Link::from_message).collect())
    }

    /// Makes a link. Nothing is left behind on failure.
    pub fn link_add(&mut self, link: &NewLink<'_>) -> Result<(), Error> {
        self.change(&RouteNetlinkMessage::NewLink(link.to_message()), NLM_F_CREATE | NLM_F_EXCL, &|| {
            format!("create {} {}", link.kind.name(), link.name)
        })
    }

    /// Applies changes to a link in one request.
    pub fn link_set(&mut self, index: IfIndex, change: &LinkChange<'_>) -> Result<(), Error> {
        let what = || format!("set {change} on {}", self_name(index));
        self.change(&RouteNetlinkMessage::SetLink(change_message(index, change)), 0, &what)
    }

    /// Sets a link up.
    pub fn link_up(&mut self, index: IfIndex) -> Result<(), Error> {
        self.link_set(index, &LinkChange { up: Some(true), ..LinkChange::default() })
    }

    /// Sets a link down.
    pub fn link_down(&mut self, index: IfIndex) -> Result<(), Error> {
        self.link_set(index, &LinkChange { up: Some(false), ..LinkChange::default() })
    }

    /// Sets the MTU.
    pub fn link_set_mtu(&mut self, index: IfIndex, mtu: u32) -> Result<(), Error> {
        self.link_set(index, &LinkChange { mtu: Some(mtu), ..LinkChange::default() })
    }

    /// Sets the hardware address.
    pub fn link_set_mac(&mut self, index: IfIndex, mac: MacAddr) -> Result<(), Error> {
        self.link_set(index, &LinkChange { mac: Some(mac), ..LinkChange::default() })
    }

    /// Puts the link into a bridge (or other master), or takes it out.
    pub fn link_set_master(&mut self, index: IfIndex, master: Option<IfIndex>) -> Result<(), Error> {
        self.link_set(index, &LinkChange { master: Some(master), ..LinkChange::default() })
    }

    /// Moves the link into another network namespace.
    pub fn link_set_netns(&mut self, index: IfIndex, netns: BorrowedFd<'_>) -> Result<(), Error> {
        self.link_set(index, &LinkChange { netns: Some(netns), ..LinkChange::default() })
    }

    /// Renames the link.
    pub fn link_set_name(&mut self, index: IfIndex, name: &str) -> Result<(), Error> {
        self.link_set(index, &LinkChange { name: Some(name), ..LinkChange::default() })
    }

    /// Removes a link (with the peer, for a veth).
    pub fn link_del(&mut self, index: IfIndex) -> Result<(), Error> {
        self.change(&RouteNetlinkMessage::DelLink(message(index)), 0, &|| {
            format!("delete {}", self_name(index))
        })
    }

    /// Removes a link by name.
    pub fn link_del_by_name(&mut self, name: &str) -> Result<(), Error> {
        let mut request = LinkMessage::default();
        request.attributes.push(LinkAttribute::IfName(name.to_owned()));
        self.change(&RouteNetlinkMessage::DelLink(request), 0, &|| format!("delete link {name}"))
    }

    /// Changes attributes of a bridge port.
    pub fn bridge_port_set(&mut self, index: IfIndex, change: BridgePortChange) -> Result<(), Error> {
        let mut port = Vec::new();
        port.extend(change.hairpin.map(InfoBridgePort::HairpinMode));
        port.extend(change.isolated.map(InfoBridgePort::Isolated));
        port.extend(change.learning.map(InfoBridgePort::Learning));
        port.extend(change.unicast_flood.map(InfoBridgePort::UnicastFlood));
        let mut request = message(index);
        request.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::PortKind(InfoPortKind::Bridge),
            LinkInfo::PortData(InfoPortData::BridgePort(port)),
        ]));
        self.change(&RouteNetlinkMessage::NewLink(request), 0, &|| {
            format!("set {change:?} on bridge port {index}")
        })
    }

    /// Switches VLAN filtering of a bridge.
    pub fn bridge_set_vlan_filtering(&mut self, index: IfIndex, on: bool) -> Result<(), Error> {
        let mut request = message(index);
        request.attributes.push(LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Bridge),
            LinkInfo::Data(InfoData::Bridge(vec![InfoBridge::VlanFiltering(on)])),
        ]));
        self.change(&RouteNetlinkMessage::NewLink(request), 0, &|| {
            format!("set vlan_filtering {} on bridge {index}", u8::from(on))
        })
    }

    /// Adds a VLAN to a bridge port, or to the bridge device itself.
    pub fn bridge_vlan_add(&mut self, index: IfIndex, vid: u16, flags: VlanFlags) -> Result<(), Error> {
        let request = RouteNetlinkMessage::SetLink(vlan_message(index, vid, flags));
        self.change(&request, 0, &|| format!("add vlan {vid} to link {index}"))
    }

    /// Removes a VLAN from a bridge port, or from the bridge device itself.
    pub fn bridge_vlan_del(&mut self, index: IfIndex, vid: u16, flags: VlanFlags) -> Result<(), Error> {
        let request = RouteNetlinkMessage::DelLink(vlan_message(index, vid, flags));
        self.change(&request, 0, &|| format!("delete vlan {vid} from link {index}"))
    }

    /// The VLANs of each bridge port and bridge device.
    pub fn bridge_vlans(&mut self) -> Result<Vec<(IfIndex, u16, VlanFlags)>, Error> {
        let mut request = LinkMessage::default();
        request.header.interface_family = AddressFamily::Bridge;
        request.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::Brvlan]));
        let answers = self.dump(&RouteNetlinkMessage::GetLink(request), &|| "list bridge vlans".into())?;
        let mut vlans = Vec::new();
        for answer in &answers {
            let RouteNetlinkMessage::NewLink(link) = answer else { continue };
            for attribute in &link.attributes {
                let LinkAttribute::AfSpecBridge(specs) = attribute else { continue };
                vlans.extend(specs.iter().filter_map(|spec| match spec {
                    AfSpecBridge::VlanInfo(info) => Some((
                        IfIndex(link.header.index),
                        info.vid,
                        VlanFlags {
                            pvid: info.flags.contains(BridgeVlanInfoFlags::Pvid),
                            untagged: info.flags.contains(BridgeVlanInfoFlags::Untagged),
                            bridge_self: info.flags.contains(BridgeVlanInfoFlags::Brentry),
                        },
                    )),
                    _ => None,
                }));
            }
        }
        Ok(vlans)
    }
}

fn self_name(index: IfIndex) -> String {
    format!("link number {index}")
}

fn vlan_message(index: IfIndex, vid: u16, flags: VlanFlags) -> LinkMessage {
    let mut bits = BridgeVlanInfoFlags::empty();
    bits.set(BridgeVlanInfoFlags::Pvid, flags.pvid);
    bits.set(BridgeVlanInfoFlags::Untagged, flags.untagged);
    let info = BridgeVlanInfo { flags: bits, vid };
    let mut specs = Vec::new();
    if flags.bridge_self {
        specs.push(AfSpecBridge::Flags(BridgeFlag::LowerDev));
    }
    specs.push(AfSpecBridge::VlanInfo(info));
    let mut request = message(index);
    request.header.interface_family = AddressFamily::Bridge;
    request.attributes.push(LinkAttribute::AfSpecBridge(specs));
    request
}

fn change_message(index: IfIndex, change: &LinkChange<'_>) -> LinkMessage {
    let mut request = message(index);
    let mut flag = |wanted: Option<bool>, bit: LinkFlags, inverse: bool| {
        if let Some(on) = wanted {
            request.header.change_mask |= bit;
            request.header.flags.set(bit, on != inverse);
        }
    };
    flag(change.up, LinkFlags::Up, false);
    flag(change.promisc, LinkFlags::Promisc, false);
    flag(change.allmulti, LinkFlags::Allmulti, false);
    flag(change.arp, LinkFlags::Noarp, true);
    let attributes = &mut request.attributes;
    attributes.extend(change.name.map(|name| LinkAttribute::IfName(name.to_owned())));
    attributes.extend(change.mtu.map(LinkAttribute::Mtu));
    attributes.extend(change.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    attributes
        .extend(change.master.map(|master| LinkAttribute::Controller(master.map_or(0, |index| index.0))));
    attributes.extend(change.netns.map(|fd| LinkAttribute::NetNsFd(fd.as_raw_fd())));
    attributes.extend(change.tx_queue_len.map(LinkAttribute::TxQueueLen));
    attributes.extend(change.alias.map(|alias| LinkAttribute::IfAlias(alias.to_owned())));
    attributes.extend(change.gso_max_size.map(LinkAttribute::GsoMaxSize));
    attributes.extend(change.gso_ipv4_max_size.map(LinkAttribute::GsoIpv4MaxSize));
    attributes.extend(change.gso_max_segs.map(LinkAttribute::GsoMaxSegs));
    attributes.extend(change.gro_max_size.map(LinkAttribute::GroMaxSize));
    request
}

impl std::fmt::Display for LinkChange<'_> {
    /// Lists what is changed: `mtu 1450, up`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let on = |name: &str, value: Option<bool>| {
            value.map(|on| format!("{name} {}", if on { "on" } else { "off" }))
        };
        let number = |name: &str, value: Option<u32>| value.map(|value| format!("{name} {value}"));
        let parts = [
            self.up.map(|up| if up { "up" } else { "down" }.to_owned()),
            self.name.map(|name| format!("name {name}")),
            number("mtu", self.mtu),
            self.mac.map(|mac| format!("address {mac}")),
            self.master.map(|master| match master {
                Some(index) => format!("master {index}"),
                None => "nomaster".to_owned(),
            }),
            self.netns.map(|_| "another network namespace".to_owned()),
            number("txqueuelen", self.tx_queue_len),
            on("promisc", self.promisc),
            on("allmulticast", self.allmulti),
            on("arp", self.arp),
            self.alias.map(|alias| format!("alias {alias:?}")),
            number("gso_max_size", self.gso_max_size),
            number("gso_ipv4_max_size", self.gso_ipv4_max_size),
            number("gso_max_segs", self.gso_max_segs),
            number("gro_max_size", self.gro_max_size),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}
