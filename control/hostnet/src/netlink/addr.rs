//! Addresses of links.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags as RawFlags, AddressHeaderFlags, AddressMessage,
};

use super::route::RouteScope;
use super::socket::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use super::{Family, Handle, IfIndex};
use crate::Error;

/// An address to be put on, or taken off, a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Address with the length of its prefix; host bits are kept.
    pub net: IpNet,
    /// IPv4 broadcast address; none is set when absent.
    pub broadcast: Option<Ipv4Addr>,
    /// Scope; universe by default.
    pub scope: RouteScope,
    /// Skip duplicate address detection (IPv6): usable by the next packet.
    pub nodad: bool,
    /// Do not make a route for the prefix.
    pub no_prefix_route: bool,
    /// Label (IPv4), for tools that show `eth0:1`.
    pub label: Option<String>,
}

/// An address as the kernel reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressInfo {
    /// The link it is on.
    pub index: IfIndex,
    /// The local address with the length of its prefix.
    pub net: IpNet,
    /// The other end of a point-to-point link.
    pub peer: Option<IpAddr>,
    /// IPv4 broadcast address.
    pub broadcast: Option<Ipv4Addr>,
    /// Scope.
    pub scope: RouteScope,
    /// State.
    pub flags: AddressFlags,
    /// Label (IPv4).
    pub label: Option<String>,
}

/// State of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AddressFlags {
    /// Another address of the same subnet is the primary one.
    pub secondary: bool,
    /// Duplicate address detection is not finished: the address cannot be used yet.
    pub tentative: bool,
    /// Duplicate address detection found another owner.
    pub dad_failed: bool,
    /// Has no lifetime that ends.
    pub permanent: bool,
    /// No longer used for new connections.
    pub deprecated: bool,
    /// Duplicate address detection was not asked for.
    pub nodad: bool,
}

impl Address {
    /// An address of universe scope without broadcast.
    pub fn new(net: IpNet) -> Self {
        Self {
            net,
            broadcast: None,
            scope: RouteScope::Universe,
            nodad: false,
            no_prefix_route: false,
            label: None,
        }
    }

    /// Sets the broadcast address to the last of the prefix: for IPv4 up to /30, else none.
    pub fn broadcast_of_prefix(mut self) -> Self {
        self.broadcast = match self.net {
            IpNet::V4(net) if net.prefix_len() <= 30 => Some(net.broadcast()),
            _ => None,
        };
        self
    }

    /// Skips duplicate address detection (no effect for IPv4).
    pub fn nodad(mut self) -> Self {
        self.nodad = true;
        self
    }

    /// Sets the scope.
    pub fn scope(mut self, scope: RouteScope) -> Self {
        self.scope = scope;
        self
    }

    fn to_message(&self, index: IfIndex) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.family = Family::of(self.net.addr()).raw();
        message.header.prefix_len = self.net.prefix_len();
        message.header.scope = self.scope.to_address_scope();
        message.header.index = index.0;
        let address = self.net.addr();
        let attributes = &mut message.attributes;
        if address.is_ipv4() {
            attributes.push(AddressAttribute::Local(address));
        }
        attributes.push(AddressAttribute::Address(address));
        attributes.extend(self.broadcast.map(AddressAttribute::Broadcast));
        attributes.extend(self.label.clone().map(AddressAttribute::Label));
        let mut flags = RawFlags::empty();
        if self.nodad && address.is_ipv6() {
            flags |= RawFlags::Nodad;
            message.header.flags |= AddressHeaderFlags::Nodad;
        }
        if self.no_prefix_route {
            flags |= RawFlags::Noprefixroute;
        }
        if !flags.is_empty() {
            attributes.push(AddressAttribute::Flags(flags));
        }
        message
    }
}

impl AddressInfo {
    pub(super) fn from_message(message: &RouteNetlinkMessage) -> Option<Self> {
        let (RouteNetlinkMessage::NewAddress(found) | RouteNetlinkMessage::DelAddress(found)) = message
        else {
            return None;
        };
        let (mut local, mut address, mut broadcast, mut label) = (None, None, None, None);
        let mut bits = u32::from(found.header.flags.bits());
        for attribute in &found.attributes {
            match attribute {
                AddressAttribute::Local(ip) => local = Some(*ip),
                AddressAttribute::Address(ip) => address = Some(*ip),
                AddressAttribute::Broadcast(ip) => broadcast = Some(*ip),
                AddressAttribute::Label(text) => label = Some(text.clone()),
                AddressAttribute::Flags(flags) => bits = flags.bits(),
                _ => {}
            }
        }
        // On a point-to-point link IFA_ADDRESS is the peer's and IFA_LOCAL ours; else they are equal.
        let own = local.or(address)?;
        let flags = RawFlags::from_bits_retain(bits);
        Some(Self {
            index: IfIndex(found.header.index),
            net: IpNet::new(own, found.header.prefix_len).ok()?,
            peer: address.filter(|peer| *peer != own),
            broadcast,
            scope: RouteScope::from_address_scope(found.header.scope),
            flags: AddressFlags {
                secondary: flags.contains(RawFlags::Secondary),
                tentative: flags.contains(RawFlags::Tentative),
                dad_failed: flags.contains(RawFlags::Dadfailed),
                permanent: flags.contains(RawFlags::Permanent),
                deprecated: flags.contains(RawFlags::Deprecated),
                nodad: flags.contains(RawFlags::Nodad),
            },
            label,
        })
    }
}

impl Handle {
    /// Adds an address.
    ///
    /// # Errors
    /// [`Error::already_exists`] when the link has it.
    pub fn addr_add(&mut self, index: IfIndex, address: &Address) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewAddress(address.to_message(index));
        self.change(&request, NLM_F_CREATE | NLM_F_EXCL, &|| {
            format!("add address {} to link {index}", address.net)
        })
    }

    /// Adds an address, or refreshes its lifetime and flags when the link has it.
    pub fn addr_replace(&mut self, index: IfIndex, address: &Address) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewAddress(address.to_message(index));
        self.change(&request, NLM_F_CREATE | NLM_F_REPLACE, &|| {
            format!("set address {} on link {index}", address.net)
        })
    }

    /// Removes an address.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when the link does not have it.
    pub fn addr_del(&mut self, index: IfIndex, net: IpNet) -> Result<(), Error> {
        let request = RouteNetlinkMessage::DelAddress(Address::new(net).to_message(index));
        self.change(&request, 0, &|| format!("delete address {net} from link {index}"))
    }

    /// The addresses of one link, or of all; of one family, or of both (IPv4 first).
    pub fn addrs(
        &mut self,
        index: Option<IfIndex>,
        family: Option<Family>,
    ) -> Result<Vec<AddressInfo>, Error> {
        let mut request = AddressMessage::default();
        if let Some(family) = family {
            request.header.family = family.raw();
        }
        // Honoured with strict checking only; older kernels send all.
        request.header.index = index.map_or(0, |index| index.0);
        let answers = self.dump(&RouteNetlinkMessage::GetAddress(request), &|| match index {
            Some(index) => format!("list addresses of link {index}"),
            None => "list addresses".into(),
        })?;
        Ok(answers
            .iter()
            .filter_map(AddressInfo::from_message)
            .filter(|found| index.is_none_or(|index| found.index == index))
            .collect())
    }

    /// Waits until duplicate address detection is over for every IPv6 address of the link, looking
    /// every 20 ms. Returns the addresses that failed, and whether all others became usable in time.
    pub fn addr_wait_dad(&mut self, index: IfIndex, at_most: Duration) -> Result<(Vec<IpNet>, bool), Error> {
        let deadline = Instant::now() + at_most;
        loop {
            let found = self.addrs(Some(index), Some(Family::V6))?;
            let failed: Vec<IpNet> =
                found.iter().filter(|address| address.flags.dad_failed).map(|address| address.net).collect();
            let waiting = found.iter().any(|address| address.flags.tentative && !address.flags.dad_failed);
            if !waiting || Instant::now() >= deadline {
                return Ok((failed, !waiting));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
