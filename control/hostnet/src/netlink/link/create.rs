//! What a new link is to be, and its request.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use netlink_packet_route::link::{
    InfoBridge, InfoData, InfoIpTunnel, InfoIpVlan, InfoKind, InfoMacVlan, InfoVeth, InfoVlan, InfoVxlan,
    IpVlanMode, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, MacVlanMode,
};

use super::super::IfIndex;
use crate::MacAddr;

/// A link to be made: what all kinds share, and the kind.
#[derive(Debug, Clone)]
pub struct NewLink<'a> {
    /// Name, at most 15 bytes.
    pub name: String,
    /// Kind with its own attributes.
    pub kind: LinkKind<'a>,
    /// MTU in bytes; the kernel's default when absent.
    pub mtu: Option<u32>,
    /// Hardware address; the kernel picks one when absent.
    pub mac: Option<MacAddr>,
    /// Transmit queue length in packets.
    pub tx_queue_len: Option<u32>,
    /// Set up at once.
    pub up: bool,
    /// Bridge or other master it joins.
    pub master: Option<IfIndex>,
    /// The link below (vlan, macvlan, ipvlan).
    pub lower: Option<IfIndex>,
    /// Namespace the link is made in, when not the handle's.
    pub netns: Option<BorrowedFd<'a>>,
    /// Free text shown by `ip link`.
    pub alias: Option<String>,
}

/// Kind of a new link.
#[derive(Debug, Clone)]
pub enum LinkKind<'a> {
    /// A device that swallows packets.
    Dummy,
    /// An intermediate functional block, for shaping what comes in.
    Ifb,
    /// An Ethernet bridge.
    Bridge(BridgeConfig),
    /// One end of a virtual cable.
    Veth(Box<VethPeer<'a>>),
    /// A kernel VXLAN device.
    Vxlan(Box<VxlanConfig>),
    /// A device with its own MAC on `lower`.
    Macvlan(MacvlanMode),
    /// The same, with the number of broadcast packets it may queue.
    MacvlanQueue(MacvlanMode, u32),
    /// A device sharing the MAC of `lower`.
    Ipvlan(IpvlanMode),
    /// An 802.1Q VLAN of `lower`, by VLAN identifier.
    Vlan(u16),
    /// An IPv4-in-IPv4 tunnel.
    IpIp(IpTunnelConfig),
    /// Any other kind without attributes, by its rtnetlink name.
    Other(&'a str),
}

/// Bridge attributes set at creation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BridgeConfig {
    /// Whether the bridge looks at VLAN tags.
    pub vlan_filtering: Option<bool>,
    /// VLAN that untagged frames get on new ports (0: none).
    pub vlan_default_pvid: Option<u16>,
    /// Whether multicast is sent only where it was asked for.
    pub multicast_snooping: Option<bool>,
}

/// The other end of a veth pair. It is made down: the kernel refuses to set it up in the same request
/// (ENOTCONN), because it is registered before its partner.
#[derive(Debug, Clone)]
pub struct VethPeer<'a> {
    /// Name, at most 15 bytes.
    pub name: String,
    /// Namespace it is made in, when not the first end's.
    pub netns: Option<BorrowedFd<'a>>,
    /// Hardware address.
    pub mac: Option<MacAddr>,
    /// MTU in bytes; the first end's when absent.
    pub mtu: Option<u32>,
    /// Transmit queue length in packets.
    pub tx_queue_len: Option<u32>,
}

/// Mode of a macvlan device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of ip-link(8)")]
pub enum MacvlanMode {
    Private,
    Vepa,
    Bridge,
    Passthru,
}

/// Mode of an ipvlan device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of ip-link(8)")]
pub enum IpvlanMode {
    L2,
    L3,
    L3s,
}

/// Attributes of a kernel VXLAN device. Those that are `None` are not sent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VxlanConfig {
    /// VXLAN network identifier, 24 bits.
    pub vni: u32,
    /// The underlay link.
    pub lower: Option<IfIndex>,
    /// Source address of the outer header; also decides the outer family.
    pub local: Option<IpAddr>,
    /// UDP port; the kernel's default is 8472.
    pub port: Option<u16>,
    /// Whether inner source addresses teach the FDB (the kernel's default is yes).
    pub learning: Option<bool>,
    /// Group-based policy: the mark travels in the header.
    pub gbp: bool,
    /// Outer UDP checksum over IPv4.
    pub udp_csum: Option<bool>,
    /// Outer UDP checksum may be left out over IPv6 when sending.
    pub udp6_zero_csum_tx: Option<bool>,
    /// Outer UDP checksum may be missing over IPv6 when receiving.
    pub udp6_zero_csum_rx: Option<bool>,
    /// Outer TTL; 0 takes the host's default.
    pub ttl: Option<u8>,
    /// Outer TOS byte; 1 copies the inner one.
    pub tos: Option<u8>,
}

/// Attributes of an IP-in-IP tunnel device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IpTunnelConfig {
    /// The underlay link.
    pub lower: Option<IfIndex>,
    /// Source address of the outer header.
    pub local: Option<Ipv4Addr>,
    /// Fixed destination of the outer header; absent: taken from the route.
    pub remote: Option<Ipv4Addr>,
    /// Outer TTL; 0 copies the inner one.
    pub ttl: Option<u8>,
    /// Whether the outer header forbids fragmentation.
    pub pmtu_discovery: Option<bool>,
}

impl<'a> LinkKind<'a> {
    /// The peer of a veth pair, to be refined and turned into the kind with `into()`.
    pub fn veth(peer: &str) -> VethPeer<'a> {
        VethPeer { name: peer.to_owned(), netns: None, mac: None, mtu: None, tx_queue_len: None }
    }

    /// rtnetlink's name of the kind.
    pub fn name(&self) -> &str {
        match self {
            Self::Dummy => "dummy",
            Self::Ifb => "ifb",
            Self::Bridge(_) => "bridge",
            Self::Veth(_) => "veth",
            Self::Vxlan(_) => "vxlan",
            Self::Macvlan(_) | Self::MacvlanQueue(..) => "macvlan",
            Self::Ipvlan(_) => "ipvlan",
            Self::Vlan(_) => "vlan",
            Self::IpIp(_) => "ipip",
            Self::Other(name) => name,
        }
    }

    fn data(&self) -> Option<InfoData> {
        Some(match self {
            Self::Dummy | Self::Ifb | Self::Other(_) => return None,
            Self::Bridge(bridge) => InfoData::Bridge(bridge.attributes()),
            Self::Veth(peer) => InfoData::Veth(InfoVeth::Peer(peer.to_message())),
            Self::Vxlan(vxlan) => InfoData::Vxlan(vxlan.attributes()),
            Self::Macvlan(mode) => InfoData::MacVlan(vec![mode.attribute()]),
            Self::MacvlanQueue(mode, packets) => {
                InfoData::MacVlan(vec![mode.attribute(), InfoMacVlan::BcQueueLen(*packets)])
            }
            Self::Ipvlan(mode) => InfoData::IpVlan(vec![InfoIpVlan::Mode(match mode {
                IpvlanMode::L2 => IpVlanMode::L2,
                IpvlanMode::L3 => IpVlanMode::L3,
                IpvlanMode::L3s => IpVlanMode::L3S,
            })]),
            Self::Vlan(vid) => InfoData::Vlan(vec![InfoVlan::Id(*vid)]),
            Self::IpIp(tunnel) => InfoData::IpTunnel(tunnel.attributes()),
        })
    }
}

impl MacvlanMode {
    fn attribute(self) -> InfoMacVlan {
        InfoMacVlan::Mode(match self {
            Self::Private => MacVlanMode::Private,
            Self::Vepa => MacVlanMode::Vepa,
            Self::Bridge => MacVlanMode::Bridge,
            Self::Passthru => MacVlanMode::Passthrough,
        })
    }
}

impl<'a> VethPeer<'a> {
    /// Makes the peer in another namespace.
    pub fn peer_netns(mut self, netns: &'a impl AsFd) -> Self {
        self.netns = Some(netns.as_fd());
        self
    }

    /// Sets the peer's hardware address.
    pub fn peer_mac(mut self, mac: MacAddr) -> Self {
        self.mac = Some(mac);
        self
    }

    /// Sets the peer's MTU in bytes.
    pub fn peer_mtu(mut self, mtu: u32) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Sets the peer's transmit queue length in packets.
    pub fn peer_tx_queue_len(mut self, packets: u32) -> Self {
        self.tx_queue_len = Some(packets);
        self
    }

    fn to_message(&self) -> LinkMessage {
        let mut message = LinkMessage::default();
        let attributes = &mut message.attributes;
        attributes.push(LinkAttribute::IfName(self.name.clone()));
        attributes.extend(self.mtu.map(LinkAttribute::Mtu));
        attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        attributes.extend(self.tx_queue_len.map(LinkAttribute::TxQueueLen));
        attributes.extend(self.netns.map(|fd| LinkAttribute::NetNsFd(fd.as_raw_fd())));
        message
    }
}

impl<'a> From<VethPeer<'a>> for LinkKind<'a> {
    fn from(peer: VethPeer<'a>) -> Self {
        Self::Veth(Box::new(peer))
    }
}

impl<'a> NewLink<'a> {
    /// A link with the kernel's defaults.
    pub fn new(name: &str, kind: LinkKind<'a>) -> Self {
        Self {
            name: name.to_owned(),
            kind,
            mtu: None,
            mac: None,
            tx_queue_len: None,
            up: false,
            master: None,
            lower: None,
            netns: None,
            alias: None,
        }
    }

    /// Sets the MTU in bytes.
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.mtu = Some(mtu);
        self
    }

    /// Sets the hardware address.
    pub fn mac(mut self, mac: MacAddr) -> Self {
        self.mac = Some(mac);
        self
    }

    /// Sets the transmit queue length in packets.
    pub fn tx_queue_len(mut self, packets: u32) -> Self {
        self.tx_queue_len = Some(packets);
        self
    }

    /// Sets the link up at once.
    pub fn up(mut self) -> Self {
        self.up = true;
        self
    }

    /// Puts the link into a bridge.
    pub fn master(mut self, master: IfIndex) -> Self {
        self.master = Some(master);
        self
    }

    /// Names the link below.
    pub fn lower(mut self, lower: IfIndex) -> Self {
        self.lower = Some(lower);
        self
    }

    /// Makes the link in another namespace than the handle's.
    pub fn netns(mut self, netns: &'a impl AsFd) -> Self {
        self.netns = Some(netns.as_fd());
        self
    }

    pub(super) fn to_message(&self) -> LinkMessage {
        let mut message = LinkMessage::default();
        if self.up {
            message.header.flags = LinkFlags::Up;
            message.header.change_mask = LinkFlags::Up;
        }
        let mut info = vec![LinkInfo::Kind(InfoKind::from(self.kind.name()))];
        info.extend(self.kind.data().map(LinkInfo::Data));
        let attributes = &mut message.attributes;
        attributes.push(LinkAttribute::IfName(self.name.clone()));
        attributes.extend(self.mtu.map(LinkAttribute::Mtu));
        attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        attributes.extend(self.tx_queue_len.map(LinkAttribute::TxQueueLen));
        attributes.extend(self.master.map(|index| LinkAttribute::Controller(index.0)));
        attributes.extend(self.lower.map(|index| LinkAttribute::Link(index.0)));
        attributes.extend(self.netns.map(|fd| LinkAttribute::NetNsFd(fd.as_raw_fd())));
        attributes.extend(self.alias.clone().map(LinkAttribute::IfAlias));
        attributes.push(LinkAttribute::LinkInfo(info));
        message
    }
}

impl BridgeConfig {
    fn attributes(&self) -> Vec<InfoBridge> {
        let mut attributes = Vec::new();
        attributes.extend(self.vlan_filtering.map(InfoBridge::VlanFiltering));
        attributes.extend(self.vlan_default_pvid.map(InfoBridge::VlanDefaultPvid));
        attributes.extend(self.multicast_snooping.map(InfoBridge::MulticastSnooping));
        attributes
    }
}

impl VxlanConfig {
    fn attributes(&self) -> Vec<InfoVxlan> {
        let mut attributes = vec![InfoVxlan::Id(self.vni)];
        attributes.extend(self.lower.map(|index| InfoVxlan::Link(index.0)));
        attributes.extend(self.local.map(|address| match address {
            IpAddr::V4(address) => InfoVxlan::Local(address),
            IpAddr::V6(address) => InfoVxlan::Local6(address),
        }));
        attributes.extend(self.ttl.map(InfoVxlan::Ttl));
        attributes.extend(self.tos.map(InfoVxlan::Tos));
        attributes.extend(self.learning.map(InfoVxlan::Learning));
        attributes.extend(self.port.map(InfoVxlan::Port));
        attributes.extend(self.udp_csum.map(InfoVxlan::UDPCsum));
        attributes.extend(self.udp6_zero_csum_tx.map(InfoVxlan::UDPZeroCsumTX));
        attributes.extend(self.udp6_zero_csum_rx.map(InfoVxlan::UDPZeroCsumRX));
        if self.gbp {
            attributes.push(InfoVxlan::Gbp);
        }
        attributes
    }
}

impl IpTunnelConfig {
    fn attributes(&self) -> Vec<InfoIpTunnel> {
        let mut attributes = Vec::new();
        attributes.extend(self.lower.map(|index| InfoIpTunnel::Link(index.0)));
        attributes.extend(self.local.map(|address| InfoIpTunnel::Local(address.into())));
        attributes.extend(self.remote.map(|address| InfoIpTunnel::Remote(address.into())));
        attributes.extend(self.ttl.map(InfoIpTunnel::Ttl));
        attributes.extend(self.pmtu_discovery.map(InfoIpTunnel::PMtuDisc));
        attributes
    }
}
