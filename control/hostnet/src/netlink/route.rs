//! Routes and route look-up.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use netlink_packet_route::address::AddressScope;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteProtocol as RawProtocol,
    RouteScope as RawScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::socket::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use super::{Family, Handle, IfIndex};
use crate::Error;

/// The main routing table.
pub(crate) const TABLE_MAIN: u32 = 254;

/// A route, to be set or as found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Destination prefix.
    pub dst: IpNet,
    /// Next hop.
    pub gateway: Option<IpAddr>,
    /// Outgoing link.
    pub dev: Option<IfIndex>,
    /// Preferred source address.
    pub src: Option<IpAddr>,
    /// The gateway is reachable on the link even if no route says so.
    pub onlink: bool,
    /// Metric; the lowest wins. Absent: 0 for IPv4, 1024 for IPv6 (the kernel's default).
    pub metric: Option<u32>,
    /// Routing table; 254 is the main one.
    pub table: u32,
    /// Scope; when absent, `link` for a unicast route without gateway (IPv4) and universe else.
    pub scope: Option<RouteScope>,
    /// What happens to a packet that matches.
    pub kind: RouteKind,
    /// Who made the route.
    pub protocol: RouteProtocol,
    /// Path MTU, bytes.
    pub mtu: Option<u32>,
    /// TCP segment size to advertise, bytes.
    pub advmss: Option<u32>,
    /// More than one next hop (found only).
    pub multipath: bool,
}

/// What happens to a packet that matches a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RouteKind {
    /// Forwarded.
    #[default]
    Unicast,
    /// Delivered here.
    Local,
    /// Sent as broadcast.
    Broadcast,
    /// Dropped silently.
    Blackhole,
    /// Answered with ICMP host unreachable.
    Unreachable,
    /// Answered with ICMP administratively prohibited.
    Prohibit,
    /// Looked up in the next table.
    Throw,
    /// Any other, by its `RTN_*` number.
    Other(u8),
}

/// Who made a route (`RTPROT_*` of linux/rtnetlink.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RouteProtocol(pub u8);

impl RouteProtocol {
    /// Unspecified.
    pub const UNSPEC: Self = Self(0);
    /// The kernel itself.
    pub const KERNEL: Self = Self(2);
    /// Tools at boot; what `ip route add` uses.
    pub const BOOT: Self = Self(3);
    /// The administrator.
    pub const STATIC: Self = Self(4);
}

/// Distance to the destination (`RT_SCOPE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RouteScope {
    /// Anywhere.
    #[default]
    Universe,
    /// Inside the site.
    Site,
    /// On the link.
    Link,
    /// On this host.
    Host,
    /// Nowhere.
    Nowhere,
    /// Any other number.
    Other(u8),
}

impl RouteScope {
    /// The kernel's number.
    pub fn number(self) -> u8 {
        match self {
            Self::Universe => 0,
            Self::Site => 200,
            Self::Link => 253,
            Self::Host => 254,
            Self::Nowhere => 255,
            Self::Other(number) => number,
        }
    }

    /// From the kernel's number.
    pub fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Universe,
            200 => Self::Site,
            253 => Self::Link,
            254 => Self::Host,
            255 => Self::Nowhere,
            number => Self::Other(number),
        }
    }

    pub(super) fn to_address_scope(self) -> AddressScope {
        AddressScope::from(self.number())
    }

    pub(super) fn from_address_scope(scope: AddressScope) -> Self {
        Self::from_number(scope.into())
    }
}

impl Route {
    /// A unicast route of the main table; the kernel chooses what is not said.
    pub fn to(dst: IpNet) -> Self {
        Self {
            dst: dst.trunc(),
            gateway: None,
            dev: None,
            src: None,
            onlink: false,
            metric: None,
            table: TABLE_MAIN,
            scope: None,
            kind: RouteKind::Unicast,
            protocol: RouteProtocol::BOOT,
            mtu: None,
            advmss: None,
            multipath: false,
        }
    }

    /// Through a gateway.
    pub fn via(mut self, gateway: IpAddr) -> Self {
        self.gateway = Some(gateway);
        self
    }

    /// Out of a link.
    pub fn dev(mut self, index: IfIndex) -> Self {
        self.dev = Some(index);
        self
    }

    /// The gateway is on the link whatever other routes say.
    pub fn onlink(mut self) -> Self {
        self.onlink = true;
        self
    }

    /// With a preferred source address.
    pub fn src(mut self, source: IpAddr) -> Self {
        self.src = Some(source);
        self
    }

    /// With a metric.
    pub fn metric(mut self, metric: u32) -> Self {
        self.metric = Some(metric);
        self
    }

    /// In a table.
    pub fn table(mut self, table: u32) -> Self {
        self.table = table;
        self
    }

    /// With a scope.
    pub fn scope(mut self, scope: RouteScope) -> Self {
        self.scope = Some(scope);
        self
    }

    /// Made by.
    pub fn protocol(mut self, protocol: RouteProtocol) -> Self {
        self.protocol = protocol;
        self
    }

    /// Drops what matches.
    pub fn blackhole(mut self) -> Self {
        self.kind = RouteKind::Blackhole;
        self
    }

    /// The family of the destination.
    pub fn family(&self) -> Family {
        Family::of(self.dst.addr())
    }

    fn to_message(&self, deleting: bool) -> RouteMessage {
        let mut message = RouteMessage::default();
        let v4 = self.family() == Family::V4;
        message.header.address_family = self.family().raw();
        message.header.destination_prefix_length = self.dst.prefix_len();
        message.header.table = u8::try_from(self.table).unwrap_or(0);
        message.header.kind = self.kind.to_raw();
        let scope = self.scope.unwrap_or_else(|| match self.kind {
            // A removal without a scope matches any.
            _ if deleting => RouteScope::Nowhere,
            RouteKind::Unicast if v4 && self.gateway.is_none() => RouteScope::Link,
            _ => RouteScope::Universe,
        });
        message.header.scope = RawScope::from(scope.number());
        if !deleting {
            message.header.protocol = RawProtocol::from(self.protocol.0);
        }
        if self.onlink {
            message.header.flags |= RouteFlags::Onlink;
        }
        let attributes = &mut message.attributes;
        if self.dst.prefix_len() > 0 {
            attributes.push(RouteAttribute::Destination(self.dst.addr().into()));
        }
        attributes.extend(self.gateway.map(|gateway| RouteAttribute::Gateway(gateway.into())));
        attributes.extend(self.src.map(|source| RouteAttribute::PrefSource(source.into())));
        attributes.extend(self.dev.map(|index| RouteAttribute::Oif(index.0)));
        attributes.extend(self.metric.map(RouteAttribute::Priority));
        if self.table > 255 {
            attributes.push(RouteAttribute::Table(self.table));
        }
        let mut metrics = Vec::new();
        metrics.extend(self.mtu.map(RouteMetric::Mtu));
        metrics.extend(self.advmss.map(RouteMetric::Advmss));
        if !metrics.is_empty() {
            attributes.push(RouteAttribute::Metrics(metrics));
        }
        message
    }

    pub(super) fn from_message(message: &RouteNetlinkMessage) -> Option<Self> {
        let (RouteNetlinkMessage::NewRoute(found) | RouteNetlinkMessage::DelRoute(found)) = message else {
            return None;
        };
        let unspecified = match found.header.address_family {
            AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            AddressFamily::Inet6 => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
            _ => return None,
        };
        let mut route = Self::to(IpNet::new(unspecified, 0).ok()?);
        let mut dst = unspecified;
        route.table = found.header.table.into();
        route.scope = Some(RouteScope::from_number(found.header.scope.into()));
        route.kind = RouteKind::from_raw(found.header.kind);
        route.protocol = RouteProtocol(found.header.protocol.into());
        route.onlink = found.header.flags.contains(RouteFlags::Onlink);
        for attribute in &found.attributes {
            match attribute {
                RouteAttribute::Destination(address) => dst = ip(address)?,
                RouteAttribute::Gateway(address) => route.gateway = ip(address),
                RouteAttribute::PrefSource(address) => route.src = ip(address),
                RouteAttribute::Oif(index) => route.dev = Some(IfIndex(*index)),
                RouteAttribute::Priority(metric) => route.metric = Some(*metric),
                RouteAttribute::Table(table) => route.table = *table,
                RouteAttribute::MultiPath(_) => route.multipath = true,
                RouteAttribute::Metrics(metrics) => {
                    for metric in metrics {
                        match metric {
                            RouteMetric::Mtu(mtu) => route.mtu = Some(*mtu),
                            RouteMetric::Advmss(advmss) => route.advmss = Some(*advmss),
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        route.dst = IpNet::new(dst, found.header.destination_prefix_length).ok()?;
        Some(route)
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(address) => Some((*address).into()),
        RouteAddress::Inet6(address) => Some((*address).into()),
        _ => None,
    }
}

impl RouteKind {
    fn to_raw(self) -> RouteType {
        match self {
            Self::Unicast => RouteType::Unicast,
            Self::Local => RouteType::Local,
            Self::Broadcast => RouteType::Broadcast,
            Self::Blackhole => RouteType::BlackHole,
            Self::Unreachable => RouteType::Unreachable,
            Self::Prohibit => RouteType::Prohibit,
            Self::Throw => RouteType::Throw,
            Self::Other(number) => RouteType::from(number),
        }
    }

    fn from_raw(kind: RouteType) -> Self {
        match kind {
            RouteType::Unicast => Self::Unicast,
            RouteType::Local => Self::Local,
            RouteType::Broadcast => Self::Broadcast,
            RouteType::BlackHole => Self::Blackhole,
            RouteType::Unreachable => Self::Unreachable,
            RouteType::Prohibit => Self::Prohibit,
            RouteType::Throw => Self::Throw,
            other => Self::Other(other.into()),
        }
    }
}

impl fmt::Display for Route {
    /// As iproute2 writes it, links by number: `10.5.0.0/16 via 10.5.0.0 dev 7 onlink`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            RouteKind::Unicast => {}
            RouteKind::Other(number) => write!(f, "type {number} ")?,
            kind => write!(f, "{} ", format!("{kind:?}").to_lowercase())?,
        }
        write!(f, "{}", self.dst)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(index) = self.dev {
            write!(f, " dev {index}")?;
        }
        if let Some(source) = self.src {
            write!(f, " src {source}")?;
        }
        if let Some(metric) = self.metric {
            write!(f, " metric {metric}")?;
        }
        if self.table != TABLE_MAIN {
            write!(f, " table {}", self.table)?;
        }
        if self.onlink {
            write!(f, " onlink")?;
        }
        Ok(())
    }
}

/// What the kernel would do with a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lookup {
    /// What happens to the packet.
    pub kind: RouteKind,
    /// Outgoing link.
    pub dev: Option<IfIndex>,
    /// Next hop; none when the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// Source address the kernel would choose.
    pub src: Option<IpAddr>,
}

impl Handle {
    /// Adds a route.
    ///
    /// # Errors
    /// [`Error::already_exists`] when one of the same prefix, metric and table is there.
    pub fn route_add(&mut self, route: &Route) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewRoute(route.to_message(false));
        self.change(&request, NLM_F_CREATE | NLM_F_EXCL, &|| format!("add route {route}"))
    }

    /// Adds a route with the flag "create" alone: an IPv4 route that differs in anything from an
    /// existing one of the same prefix and metric is put before it.
    pub fn route_prepend(&mut self, route: &Route) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewRoute(route.to_message(false));
        self.change(&request, NLM_F_CREATE, &|| format!("add route {route}"))
    }

    /// Sets a route: takes the place of one with the same prefix, metric and table.
    pub fn route_replace(&mut self, route: &Route) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewRoute(route.to_message(false));
        self.change(&request, NLM_F_CREATE | NLM_F_REPLACE, &|| format!("replace route {route}"))
    }

    /// Adds a route behind those of the same prefix and metric.
    pub fn route_append(&mut self, route: &Route) -> Result<(), Error> {
        let request = RouteNetlinkMessage::NewRoute(route.to_message(false));
        self.change(&request, NLM_F_CREATE | NLM_F_APPEND, &|| format!("append route {route}"))
    }

    /// Removes the first route that has all that is said.
    ///
    /// # Errors
    /// [`Error::is_not_found`] when there is none.
    pub fn route_del(&mut self, route: &Route) -> Result<(), Error> {
        let request = RouteNetlinkMessage::DelRoute(route.to_message(true));
        self.change(&request, 0, &|| format!("delete route {route}"))
    }

    /// The routes of one family and table; `None` is every table, the kernel's own included.
    pub fn routes(&mut self, family: Family, table: Option<u32>) -> Result<Vec<Route>, Error> {
        let mut request = RouteMessage::default();
        request.header.address_family = family.raw();
        // With strict checking the kernel sends that table only.
        request.attributes.extend(table.map(RouteAttribute::Table));
        let answer = self.dump(&RouteNetlinkMessage::GetRoute(request), &|| "list routes".into());
        let answers = match answer {
            // The kernel says so for a table nobody has made yet.
            Err(error) if table.is_some() && error.is(libc::ENOENT) => Vec::new(),
            other => other?,
        };
        Ok(answers
            .iter()
            // Cached clones (path MTU exceptions) are no routes.
            .filter(|answer| {
                !matches!(answer, RouteNetlinkMessage::NewRoute(found)
                    if found.header.flags.contains(RouteFlags::Cloned))
            })
            .filter_map(Route::from_message)
            .filter(|route| table.is_none_or(|table| route.table == table))
            .collect())
    }

    /// What the kernel would do with a packet to `to`, optionally from a source address.
    ///
    /// # Errors
    /// ENETUNREACH, EHOSTUNREACH or EACCES as sending would fail.
    pub fn route_lookup(&mut self, to: IpAddr, from: Option<IpAddr>) -> Result<Lookup, Error> {
        let mut request = RouteMessage::default();
        let full = if to.is_ipv4() { 32 } else { 128 };
        request.header.address_family = Family::of(to).raw();
        request.header.destination_prefix_length = full;
        request.attributes.push(RouteAttribute::Destination(to.into()));
        if let Some(from) = from {
            request.header.source_prefix_length = full;
            request.attributes.push(RouteAttribute::Source(from.into()));
        }
        let what = || format!("look up the route to {to}");
        let answers = self.answers(&RouteNetlinkMessage::GetRoute(request), 0, &what)?;
        let found = answers
            .iter()
            .find_map(Route::from_message)
            .ok_or_else(|| Error::protocol(what(), "the kernel answered without a route"))?;
        Ok(Lookup { kind: found.kind, dev: found.dev, gateway: found.gateway, src: found.src })
    }
}
