//! What the kernel says about a link.

use std::net::IpAddr;

use netlink_packet_core::Nla;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    InfoBridge, InfoBridgePort, InfoData, InfoIpTunnel, InfoIpVlan, InfoMacVlan, InfoPortData, InfoTun,
    InfoVlan, InfoVxlan, IpVlanMode, LinkAttribute, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
    MacVlanMode, State,
};

use super::super::IfIndex;
use super::create::{BridgeConfig, IpTunnelConfig, IpvlanMode, MacvlanMode, VxlanConfig};
use crate::MacAddr;

/// A link as the kernel reports it.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// The kernel's number.
    pub index: IfIndex,
    /// Name.
    pub name: String,
    /// Free text, where set.
    pub alias: Option<String>,
    /// Ethernet address; none for links that have none (TUN, loopback has zeros).
    pub mac: Option<MacAddr>,
    /// MTU in bytes.
    pub mtu: u32,
    /// `IFF_*` bits of linux/if.h.
    pub flags: u32,
    /// Operational state (RFC 2863).
    pub oper_state: OperState,
    /// Bridge or other master.
    pub master: Option<IfIndex>,
    /// The other end of a veth, or the link below; its number counts in its own namespace.
    pub peer: Option<IfIndex>,
    /// Identifier of the namespace that holds `peer`, when that is another one.
    pub peer_netnsid: Option<i32>,
    /// Transmit queue length in packets.
    pub tx_queue_len: u32,
    /// How many asked for promiscuous mode.
    pub promiscuity: u32,
    /// How many asked for all multicast.
    pub allmulti: u32,
    /// Largest segmentation-offload packet, in bytes.
    pub gso_max_size: Option<u32>,
    /// The same for IPv4 (Linux 6.3).
    pub gso_ipv4_max_size: Option<u32>,
    /// Most segments of such a packet.
    pub gso_max_segs: Option<u32>,
    /// Name of the root queueing discipline.
    pub qdisc: Option<String>,
    /// Number of transmit queues.
    pub tx_queues: u32,
    /// rtnetlink's name of the kind; none for hardware and loopback.
    pub kind: Option<String>,
    /// Attributes of the kind.
    pub detail: LinkDetail,
    /// State of the bridge port, when the link is one.
    pub port: Option<BridgePort>,
    /// Packet counters.
    pub stats: LinkStats,
    /// Whether the link is a loopback device.
    pub loopback: bool,
}

/// Attributes of a link's kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum LinkDetail {
    /// None, or none known here.
    #[default]
    Other,
    /// A bridge.
    Bridge(BridgeConfig),
    /// A kernel VXLAN device.
    Vxlan(VxlanDetail),
    /// A VLAN device, by VLAN identifier.
    Vlan(u16),
    /// A macvlan device; none for a mode this crate does not know.
    Macvlan(Option<MacvlanMode>),
    /// An ipvlan device.
    Ipvlan(Option<IpvlanMode>),
    /// An IP tunnel.
    IpTunnel(IpTunnelConfig),
    /// A TUN or TAP device.
    Tun(TunDetail),
}

/// A VXLAN device as found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VxlanDetail {
    /// The attributes that can be set; `None` where the kernel reports none.
    pub config: VxlanConfig,
    /// Default destination (multicast group or unicast).
    pub group: Option<IpAddr>,
    /// Whether unknown destinations are reported to user space.
    pub l2_miss: bool,
    /// Whether unknown next hops are reported to user space.
    pub l3_miss: bool,
    /// Whether the device takes its tunnel data from routes (metadata mode).
    pub external: bool,
}

/// A TUN or TAP device as found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TunDetail {
    /// A TAP device (Ethernet frames).
    pub tap: bool,
    /// Lives without an open descriptor.
    pub persist: bool,
    /// Packets carry a virtio-net header.
    pub vnet_hdr: bool,
    /// Several descriptors may attach.
    pub multi_queue: bool,
    /// Attached queues; none on a device that is not multi-queue.
    pub queues: Option<u32>,
    /// User that may attach.
    pub owner: Option<u32>,
    /// Group that may attach.
    pub group: Option<u32>,
}

/// State of a bridge port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BridgePort {
    /// Frames may leave through the port they came in by.
    pub hairpin: bool,
    /// Isolated ports reach only ports that are not.
    pub isolated: bool,
    /// The bridge learns source addresses of this port.
    pub learning: bool,
    /// Unknown unicast is flooded to this port.
    pub unicast_flood: bool,
}

/// Packet counters since the link exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "the names are those of struct rtnl_link_stats64")]
pub struct LinkStats {
    pub rx_packets: u64,
    pub rx_bytes: u64,
    pub rx_errors: u64,
    pub rx_dropped: u64,
    pub tx_packets: u64,
    pub tx_bytes: u64,
    pub tx_errors: u64,
    pub tx_dropped: u64,
}

/// Operational state (RFC 2863).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(missing_docs, reason = "the names are those of RFC 2863")]
pub enum OperState {
    #[default]
    Unknown,
    NotPresent,
    Down,
    LowerLayerDown,
    Testing,
    Dormant,
    Up,
}

impl Link {
    /// Whether the administrator set it up.
    pub fn is_up(&self) -> bool {
        self.flags & libc::IFF_UP as u32 != 0
    }

    /// Whether it is of that kind (`veth`, `bridge`, ...).
    pub fn is_kind(&self, kind: &str) -> bool {
        self.kind.as_deref() == Some(kind)
    }

    /// Whether the administrator's promiscuous flag or any other user's is in effect.
    pub fn is_promisc(&self) -> bool {
        self.flags & libc::IFF_PROMISC as u32 != 0
    }

    /// The VXLAN attributes, for a VXLAN device.
    pub fn vxlan(&self) -> Option<&VxlanDetail> {
        match &self.detail {
            LinkDetail::Vxlan(vxlan) => Some(vxlan),
            _ => None,
        }
    }

    pub(in crate::netlink) fn from_message(message: &RouteNetlinkMessage) -> Option<Self> {
        match message {
            RouteNetlinkMessage::NewLink(link) | RouteNetlinkMessage::DelLink(link) => {
                Some(Self::from_link(link))
            }
            _ => None,
        }
    }

    fn from_link(message: &LinkMessage) -> Self {
        let mut link = Self {
            index: IfIndex(message.header.index),
            name: String::new(),
            alias: None,
            mac: None,
            mtu: 0,
            flags: message.header.flags.bits(),
            oper_state: OperState::Unknown,
            master: None,
            peer: None,
            peer_netnsid: None,
            tx_queue_len: 0,
            promiscuity: 0,
            allmulti: 0,
            gso_max_size: None,
            gso_ipv4_max_size: None,
            gso_max_segs: None,
            qdisc: None,
            tx_queues: 1,
            kind: None,
            detail: LinkDetail::Other,
            port: None,
            stats: LinkStats::default(),
            loopback: message.header.flags.contains(LinkFlags::Loopback)
                || message.header.link_layer_type == LinkLayerType::Loopback,
        };
        for attribute in &message.attributes {
            match attribute {
                LinkAttribute::IfName(name) => link.name.clone_from(name),
                LinkAttribute::IfAlias(alias) => link.alias = Some(alias.clone()),
                LinkAttribute::Address(bytes) => link.mac = MacAddr::from_slice(bytes),
                LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
                LinkAttribute::OperState(state) => link.oper_state = state.into(),
                LinkAttribute::Controller(index) => link.master = some_index(*index),
                LinkAttribute::Link(index) => link.peer = some_index(*index),
                LinkAttribute::LinkNetNsId(id) => link.peer_netnsid = Some(*id),
                LinkAttribute::TxQueueLen(length) => link.tx_queue_len = *length,
                LinkAttribute::Promiscuity(count) => link.promiscuity = *count,
                LinkAttribute::AllMulticast(count) => link.allmulti = *count,
                LinkAttribute::GsoMaxSize(size) => link.gso_max_size = Some(*size),
                LinkAttribute::GsoIpv4MaxSize(size) => link.gso_ipv4_max_size = Some(*size),
                LinkAttribute::GsoMaxSegs(count) => link.gso_max_segs = Some(*count),
                LinkAttribute::Qdisc(name) => link.qdisc = Some(name.clone()),
                LinkAttribute::NumTxQueues(count) => link.tx_queues = *count,
                LinkAttribute::LinkInfo(infos) => link.read_info(infos),
                LinkAttribute::Stats64(stats) => {
                    link.stats = LinkStats {
                        rx_packets: stats.rx_packets,
                        rx_bytes: stats.rx_bytes,
                        rx_errors: stats.rx_errors,
                        rx_dropped: stats.rx_dropped,
                        tx_packets: stats.tx_packets,
                        tx_bytes: stats.tx_bytes,
                        tx_errors: stats.tx_errors,
                        tx_dropped: stats.tx_dropped,
                    };
                }
                _ => {}
            }
        }
        link
    }

    fn read_info(&mut self, infos: &[LinkInfo]) {
        for info in infos {
            match info {
                LinkInfo::Kind(kind) => self.kind = Some(kind.to_string()),
                LinkInfo::Data(data) => self.detail = detail(data),
                LinkInfo::PortData(InfoPortData::BridgePort(attributes)) => {
                    self.port = Some(bridge_port(attributes));
                }
                _ => {}
            }
        }
    }
}

fn some_index(index: u32) -> Option<IfIndex> {
    (index != 0).then_some(IfIndex(index))
}

fn detail(data: &InfoData) -> LinkDetail {
    match data {
        InfoData::Bridge(attributes) => LinkDetail::Bridge(bridge(attributes)),
        InfoData::Vxlan(attributes) => LinkDetail::Vxlan(vxlan(attributes)),
        InfoData::Vlan(attributes) => attributes
            .iter()
            .find_map(|attribute| match attribute {
                InfoVlan::Id(vid) => Some(LinkDetail::Vlan(*vid)),
                _ => None,
            })
            .unwrap_or_default(),
        InfoData::MacVlan(attributes) => LinkDetail::Macvlan(attributes.iter().find_map(macvlan_mode)),
        InfoData::IpVlan(attributes) => LinkDetail::Ipvlan(attributes.iter().find_map(ipvlan_mode)),
        InfoData::IpTunnel(attributes) => LinkDetail::IpTunnel(ip_tunnel(attributes)),
        InfoData::Tun(attributes) => LinkDetail::Tun(tun(attributes)),
        _ => LinkDetail::Other,
    }
}

fn bridge(attributes: &[InfoBridge]) -> BridgeConfig {
    let mut config = BridgeConfig::default();
    for attribute in attributes {
        match attribute {
            InfoBridge::VlanFiltering(on) => config.vlan_filtering = Some(*on),
            InfoBridge::VlanDefaultPvid(vid) => config.vlan_default_pvid = Some(*vid),
            InfoBridge::MulticastSnooping(on) => config.multicast_snooping = Some(*on),
            _ => {}
        }
    }
    config
}

fn vxlan(attributes: &[InfoVxlan]) -> VxlanDetail {
    let mut found = VxlanDetail::default();
    let config = &mut found.config;
    for attribute in attributes {
        match attribute {
            InfoVxlan::Id(vni) => config.vni = *vni,
            InfoVxlan::Link(index) => config.lower = some_index(*index),
            InfoVxlan::Local(address) => config.local = Some((*address).into()),
            InfoVxlan::Local6(address) => config.local = Some((*address).into()),
            InfoVxlan::Port(port) => config.port = Some(*port),
            InfoVxlan::Learning(on) => config.learning = Some(*on),
            InfoVxlan::Gbp => config.gbp = true,
            InfoVxlan::UDPCsum(on) => config.udp_csum = Some(*on),
            InfoVxlan::UDPZeroCsumTX(on) => config.udp6_zero_csum_tx = Some(*on),
            InfoVxlan::UDPZeroCsumRX(on) => config.udp6_zero_csum_rx = Some(*on),
            InfoVxlan::Ttl(ttl) => config.ttl = Some(*ttl),
            InfoVxlan::Tos(tos) => config.tos = Some(*tos),
            InfoVxlan::Group(address) => found.group = Some((*address).into()),
            InfoVxlan::Group6(address) => found.group = Some((*address).into()),
            InfoVxlan::L2Miss(on) => found.l2_miss = *on,
            InfoVxlan::L3Miss(on) => found.l3_miss = *on,
            InfoVxlan::CollectMetadata(on) => found.external = *on,
            _ => {}
        }
    }
    found
}

fn macvlan_mode(attribute: &InfoMacVlan) -> Option<MacvlanMode> {
    match attribute {
        InfoMacVlan::Mode(MacVlanMode::Private) => Some(MacvlanMode::Private),
        InfoMacVlan::Mode(MacVlanMode::Vepa) => Some(MacvlanMode::Vepa),
        InfoMacVlan::Mode(MacVlanMode::Bridge) => Some(MacvlanMode::Bridge),
        InfoMacVlan::Mode(MacVlanMode::Passthrough) => Some(MacvlanMode::Passthru),
        _ => None,
    }
}

fn ipvlan_mode(attribute: &InfoIpVlan) -> Option<IpvlanMode> {
    match attribute {
        InfoIpVlan::Mode(IpVlanMode::L2) => Some(IpvlanMode::L2),
        InfoIpVlan::Mode(IpVlanMode::L3) => Some(IpvlanMode::L3),
        InfoIpVlan::Mode(IpVlanMode::L3S) => Some(IpvlanMode::L3s),
        _ => None,
    }
}

fn ip_tunnel(attributes: &[InfoIpTunnel]) -> IpTunnelConfig {
    let mut config = IpTunnelConfig::default();
    let v4 = |address: &IpAddr| match address {
        IpAddr::V4(address) if !address.is_unspecified() => Some(*address),
        _ => None,
    };
    for attribute in attributes {
        match attribute {
            InfoIpTunnel::Link(index) => config.lower = some_index(*index),
            InfoIpTunnel::Local(address) => config.local = v4(address),
            InfoIpTunnel::Remote(address) => config.remote = v4(address),
            InfoIpTunnel::Ttl(ttl) => config.ttl = Some(*ttl),
            InfoIpTunnel::PMtuDisc(on) => config.pmtu_discovery = Some(*on),
            _ => {}
        }
    }
    config
}

// IFLA_TUN_* of linux/if_link.h.
const IFLA_TUN_OWNER: u16 = 1;
const IFLA_TUN_GROUP: u16 = 2;
const IFLA_TUN_TYPE: u16 = 3;
const IFLA_TUN_VNET_HDR: u16 = 5;
const IFLA_TUN_PERSIST: u16 = 6;
const IFLA_TUN_MULTI_QUEUE: u16 = 7;
const IFLA_TUN_NUM_QUEUES: u16 = 8;
/// `IFF_TAP` of linux/if_tun.h.
const TYPE_TAP: u8 = 2;

fn tun(attributes: &[InfoTun]) -> TunDetail {
    let mut found = TunDetail::default();
    for attribute in attributes {
        let mut value = vec![0; attribute.value_len()];
        attribute.emit_value(&mut value);
        let byte = value.first().copied().unwrap_or(0);
        let word = || Some(u32::from_ne_bytes(value.get(..4)?.try_into().ok()?));
        match attribute.kind() {
            IFLA_TUN_OWNER => found.owner = word(),
            IFLA_TUN_GROUP => found.group = word(),
            IFLA_TUN_TYPE => found.tap = byte == TYPE_TAP,
            IFLA_TUN_VNET_HDR => found.vnet_hdr = byte != 0,
            IFLA_TUN_PERSIST => found.persist = byte != 0,
            IFLA_TUN_MULTI_QUEUE => found.multi_queue = byte != 0,
            IFLA_TUN_NUM_QUEUES => found.queues = word(),
            _ => {}
        }
    }
    found
}

fn bridge_port(attributes: &[InfoBridgePort]) -> BridgePort {
    let mut port = BridgePort::default();
    for attribute in attributes {
        match attribute {
            InfoBridgePort::HairpinMode(on) => port.hairpin = *on,
            InfoBridgePort::Isolated(on) => port.isolated = *on,
            InfoBridgePort::Learning(on) => port.learning = *on,
            InfoBridgePort::UnicastFlood(on) => port.unicast_flood = *on,
            _ => {}
        }
    }
    port
}

impl From<&State> for OperState {
    fn from(state: &State) -> Self {
        match state {
            State::NotPresent => Self::NotPresent,
            State::Down => Self::Down,
            State::LowerLayerDown => Self::LowerLayerDown,
            State::Testing => Self::Testing,
            State::Dormant => Self::Dormant,
            State::Up => Self::Up,
            _ => Self::Unknown,
        }
    }
}
