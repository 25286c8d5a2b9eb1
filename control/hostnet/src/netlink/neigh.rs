//! Neighbours (address to MAC) and the forwarding databases of bridges and VXLAN devices.

use std::net::IpAddr;

use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState as RawState,
};
use netlink_packet_route::route::RouteType;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::socket::{NLM_F_CREATE, NLM_F_REPLACE};
use super::{Family, Handle, IfIndex};
use crate::{Error, MacAddr};

/// A neighbour as the kernel reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbour {
    /// The link.
    pub index: IfIndex,
    /// The neighbour's address.
    pub address: IpAddr,
    /// Its MAC, where known.
    pub mac: Option<MacAddr>,
    /// State of the entry.
    pub state: NeighbourState,
}

/// State of a neighbour entry (`NUD_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NeighbourState {
    /// Never expires.
    Permanent,
    /// The link needs no resolution.
    NoArp,
    /// Confirmed recently.
    Reachable,
    /// Known, not confirmed recently.
    Stale,
    /// Being asked for.
    Incomplete,
    /// Did not answer.
    Failed,
    /// Any other, by number.
    Other(u16),
}

/// An entry of a forwarding database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FdbEntry {
    /// The device (a VXLAN device, or a bridge port).
    pub index: IfIndex,
    /// Ethernet address.
    pub mac: MacAddr,
    /// Where a VXLAN device sends frames for it.
    pub dst: Option<IpAddr>,
    /// Never expires.
    pub permanent: bool,
    /// Belongs to the device itself (VXLAN) and not to the bridge above.
    pub own: bool,
    /// VLAN of a bridge entry.
    pub vlan: Option<u16>,
}

fn address_of(address: &NeighbourAddress) -> Option<IpAddr> {
    match address {
        NeighbourAddress::Inet(address) => Some((*address).into()),
        NeighbourAddress::Inet6(address) => Some((*address).into()),
        // The FDB's family is "bridge", so its addresses come untyped.
        NeighbourAddress::Other(bytes) => match bytes.len() {
            4 => <[u8; 4]>::try_from(&bytes[..]).ok().map(IpAddr::from),
            16 => <[u8; 16]>::try_from(&bytes[..]).ok().map(IpAddr::from),
            _ => None,
        },
        _ => None,
    }
}

impl From<RawState> for NeighbourState {
    fn from(state: RawState) -> Self {
        match state {
            RawState::Permanent => Self::Permanent,
            RawState::Noarp => Self::NoArp,
            RawState::Reachable => Self::Reachable,
            RawState::Stale => Self::Stale,
            RawState::Incomplete => Self::Incomplete,
            RawState::Failed => Self::Failed,
            other => Self::Other(other.into()),
        }
    }
}

impl Neighbour {
    pub(super) fn from_message(message: &RouteNetlinkMessage) -> Option<Self> {
        let (RouteNetlinkMessage::NewNeighbour(found) | RouteNetlinkMessage::DelNeighbour(found)) = message
        else {
            return None;
        };
        if !matches!(found.header.family, AddressFamily::Inet | AddressFamily::Inet6) {
            return None;
        }
        let (mut address, mut mac) = (None, None);
        for attribute in &found.attributes {
            match attribute {
                NeighbourAttribute::Destination(found) => address = address_of(found),
                NeighbourAttribute::LinkLayerAddress(bytes) => mac = MacAddr::from_slice(bytes),
                _ => {}
            }
        }
        Some(Self {
            index: IfIndex(found.header.ifindex),
            address: address?,
            mac,
            state: found.header.state.into(),
        })
    }
}

impl FdbEntry {
    pub(super) fn from_message(message: &RouteNetlinkMessage) -> Option<Self> {
        let (RouteNetlinkMessage::NewNeighbour(found) | RouteNetlinkMessage::DelNeighbour(found)) = message
        else {
            return None;
        };
        if found.header.family != AddressFamily::Bridge {
            return None;
        }
        let (mut mac, mut dst, mut vlan) = (None, None, None);
        for attribute in &found.attributes {
            match attribute {
                NeighbourAttribute::LinkLayerAddress(bytes) => mac = MacAddr::from_slice(bytes),
                NeighbourAttribute::Destination(address) => dst = address_of(address),
                NeighbourAttribute::Vlan(vid) => vlan = Some(*vid),
                _ => {}
            }
        }
        Some(Self {
            index: IfIndex(found.header.ifindex),
            mac: mac?,
            dst,
            // iproute2 sets "no ARP" beside it.
            permanent: u16::from(found.header.state) & u16::from(RawState::Permanent) != 0,
            own: found.header.flags.contains(NeighbourFlags::Own),
            vlan,
        })
    }
}

fn neighbour_message(index: IfIndex, address: IpAddr, mac: Option<MacAddr>) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = Family::of(address).raw();
    message.header.ifindex = index.0;
    message.header.kind = RouteType::Unicast;
    message.header.state = if mac.is_some() { RawState::Permanent } else { RawState::None };
    message.attributes.push(NeighbourAttribute::Destination(match address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }));
    message.attributes.extend(mac.map(|mac| NeighbourAttribute::LinkLayerAddress(mac.0.to_vec())));
    message
}

fn fdb_message(index: IfIndex, mac: MacAddr, dst: Option<IpAddr>) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = AddressFamily::Bridge;
    message.header.ifindex = index.0;
    message.header.state = RawState::Permanent;
    message.header.flags = NeighbourFlags::Own;
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
    message.attributes.extend(dst.map(|address| {
        NeighbourAttribute::Destination(match address {
            IpAddr::V4(address) => NeighbourAddress::Inet(address),
            IpAddr::V6(address) => NeighbourAddress::Inet6(address),
        })
    }));
    message
}

impl Handle {
    /// Sets a permanent neighbour entry.
    pub fn neigh_set(&mut self, index: IfIndex, address: IpAddr, mac: MacAddr) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewNeighbour(neighbour_message(index, address, Some(mac)));
        self.change(&request, NLM_F_CREATE | NLM_F_REPLACE, &|| {
            format!("set neighbour {address} lladdr {mac} on link {index}")
        })
    }

    /// Removes a neighbour entry.
    pub fn neigh_del(&mut self, index: IfIndex, address: IpAddr) -> Result<(), Error> {
        let request = RouteNetlinkMessage::DelNeighbour(neighbour_message(index, address, None));
        self.change(&request, 0, &|| format!("delete neighbour {address} from link {index}"))
    }

    /// The neighbours of a link, or of all; of one family, or of both. The kernel's own entries for
    /// multicast addresses ([`NeighbourState::NoArp`]) are among them.
    pub fn neighs(
        &mut self,
        index: Option<IfIndex>,
        family: Option<Family>,
    ) -> Result<Vec<Neighbour>, Error> {
        let mut request = NeighbourMessage::default();
        if let Some(family) = family {
            request.header.family = family.raw();
        }
        request.attributes.extend(index.map(|index| NeighbourAttribute::IfIndex(index.0)));
        let answers = self.dump(&RouteNetlinkMessage::GetNeighbour(request), &|| "list neighbours".into())?;
        Ok(answers
            .iter()
            .filter_map(Neighbour::from_message)
            .filter(|found| index.is_none_or(|index| found.index == index))
            .collect())
    }

    /// Sets a permanent entry of a VXLAN device: frames to `mac` go to `dst`.
    pub fn fdb_set(&mut self, index: IfIndex, mac: MacAddr, dst: IpAddr) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewNeighbour(fdb_message(index, mac, Some(dst)));
        self.change(&request, NLM_F_CREATE | NLM_F_REPLACE, &|| {
            format!("set fdb {mac} dst {dst} on link {index}")
        })
    }

    /// Removes an entry of a VXLAN device.
    pub fn fdb_del(&mut self, index: IfIndex, mac: MacAddr, dst: Option<IpAddr>) -> Result<(), Error> {
        let request = RouteNetlinkMessage::DelNeighbour(fdb_message(index, mac, dst));
        self.change(&request, 0, &|| format!("delete fdb {mac} from link {index}"))
    }

    /// The forwarding database entries of a device, or of all.
    pub fn fdb(&mut self, index: Option<IfIndex>) -> Result<Vec<FdbEntry>, Error> {
        let mut request = NeighbourMessage::default();
        request.header.family = AddressFamily::Bridge;
        request.attributes.extend(index.map(|index| NeighbourAttribute::IfIndex(index.0)));
        let answers = self.dump(&RouteNetlinkMessage::GetNeighbour(request), &|| "list fdb".into())?;
        Ok(answers
            .iter()
            .filter_map(FdbEntry::from_message)
            .filter(|found| index.is_none_or(|index| found.index == index))
            .collect())
    }
}
