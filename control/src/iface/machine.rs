//! A picture of the machine's links, addresses and default routes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use felt_hostnet::Error;
use felt_hostnet::netlink::{Family, Handle, Route, RouteKind};

/// An address of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// The kernel no longer wants new connections from it.
    pub deprecated: bool,
    /// It has no lifetime.
    pub permanent: bool,
    /// An IPv6 privacy address.
    pub temporary: bool,
}

impl Address {
    /// An address without lifetime.
    pub fn permanent(ip: IpAddr) -> Self {
        Self { ip, deprecated: false, permanent: true, temporary: false }
    }

    /// Whether it can stand for the machine, and how well: the smaller, the better.
    fn rank(&self) -> Option<(bool, bool, bool)> {
        let (usable, link_local) = match self.ip {
            IpAddr::V4(ip) => {
                let unusable =
                    ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() || ip.is_broadcast();
                (!unusable, ip.is_link_local())
            }
            IpAddr::V6(ip) => {
                let unusable = ip.is_loopback() || ip.is_unspecified() || ip.is_multicast();
                (!unusable, ip.is_unicast_link_local())
            }
        };
        (usable && !self.deprecated).then_some((link_local, !self.permanent, self.temporary))
    }
}

/// A link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Kernel's interface index.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// MTU in bytes.
    pub mtu: u32,
    /// All its addresses in the kernel's order.
    pub addresses: Vec<Address>,
}

impl Link {
    /// Usable IPv4 addresses, best first.
    pub fn v4(&self) -> impl Iterator<Item = Ipv4Addr> {
        self.ranked().into_iter().filter_map(|ip| match ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        })
    }

    /// Usable IPv6 addresses, best first.
    pub fn v6(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.ranked().into_iter().filter_map(|ip| match ip {
            IpAddr::V6(ip) => Some(ip),
            IpAddr::V4(_) => None,
        })
    }

    fn ranked(&self) -> Vec<IpAddr> {
        let mut usable: Vec<_> = self.addresses.iter().filter_map(|a| Some((a.rank()?, a.ip))).collect();
        usable.sort_by_key(|(rank, _)| *rank);
        usable.into_iter().map(|(_, ip)| ip).collect()
    }
}

/// Where a default route of the main table leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DefaultRoute {
    /// Out of the interface of this index.
    Via(u32),
    /// Out of several.
    Multipath,
}

/// Looks up the kernel's route to an address: interface index and preferred source, or why there is none.
type RouteLookup = Box<dyn Fn(IpAddr) -> Result<(u32, Option<IpAddr>), String> + Send + Sync>;

/// Everything the choice of the interface depends on.
pub struct Machine {
    /// Links in index order.
    pub links: Vec<Link>,
    /// First IPv4 default route of the main table.
    pub default_v4: Option<DefaultRoute>,
    /// First IPv6 default route of the main table.
    pub default_v6: Option<DefaultRoute>,
    /// Route look-up, asked only for `--iface-can-reach`.
    pub route_to: RouteLookup,
}

impl Machine {
    /// Takes the picture in the calling thread's network namespace.
    ///
    /// # Errors
    /// When the kernel does not answer.
    pub fn read() -> Result<Self, Error> {
        let mut handle = Handle::new()?;
        let mut links: Vec<_> = handle
            .links()?
            .into_iter()
            .map(|link| Link { index: link.index.0, name: link.name, mtu: link.mtu, addresses: Vec::new() })
            .collect();
        links.sort_by_key(|link| link.index);
        for found in handle.addrs(None, None)? {
            if let Some(link) = links.iter_mut().find(|link| link.index == found.index.0) {
                link.addresses.push(Address {
                    ip: found.net.addr(),
                    deprecated: found.flags.deprecated,
                    permanent: found.flags.permanent,
                    // The kernel uses one bit for IPv4's "secondary" and IPv6's "temporary" (linux/if_addr.h).
                    temporary: found.flags.secondary && found.net.addr().is_ipv6(),
                });
            }
        }
        Ok(Self {
            links,
            default_v4: default_route(&handle.routes(Family::V4, Some(MAIN_TABLE))?),
            default_v6: default_route(&handle.routes(Family::V6, Some(MAIN_TABLE))?),
            route_to: Box::new(|ip| {
                let mut handle = Handle::new().map_err(|error| error.to_string())?;
                let found = handle.route_lookup(ip, None).map_err(|error| error.to_string())?;
                let dev = found.dev.ok_or_else(|| format!("the route to {ip} names no interface"))?;
                Ok((dev.0, found.src))
            }),
        })
    }
}

const MAIN_TABLE: u32 = 254;

fn default_route(routes: &[Route]) -> Option<DefaultRoute> {
    let route =
        routes.iter().find(|route| route.dst.prefix_len() == 0 && route.kind == RouteKind::Unicast)?;
    match route.dev {
        Some(dev) if !route.multipath => Some(DefaultRoute::Via(dev.0)),
        _ => Some(DefaultRoute::Multipath),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_filtered_and_ranked() {
        let address = |text: &str| Address::permanent(text.parse().unwrap());
        let link = Link {
            index: 1,
            name: "x".into(),
            mtu: 1500,
            addresses: vec![
                Address { deprecated: true, ..address("fd00::1") },
                address("fe80::2"),
                Address { temporary: true, permanent: false, ..address("fd00::3") },
                Address { permanent: false, ..address("fd00::4") },
                address("fd00::5"),
                address("127.0.0.1"),
                address("169.254.0.1"),
                address("10.0.0.1"),
            ],
        };
        let v6: Vec<_> = link.v6().map(|ip| ip.to_string()).collect();
        assert_eq!(v6, ["fd00::5", "fd00::4", "fd00::3", "fe80::2"]);
        let v4: Vec<_> = link.v4().map(|ip| ip.to_string()).collect();
        assert_eq!(v4, ["10.0.0.1", "169.254.0.1"]);
    }
}
