//! The external interface: which link and addresses of this machine carry the tunnel.
//!
//! [`select`] is a pure function of the flags and of a [`Machine`], a picture of links, addresses and default routes taken
//! by `machine`. The rules are flannel's (`main.go`, `pkg/ipmatch/match.go`): the first option that matches wins, and
//! the address that matched is the one used.

mod machine;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use machine::{Address, DefaultRoute, Link, Machine};
use regex::Regex;

/// Which families the overlay has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stack {
    /// IPv4 alone.
    V4,
    /// IPv6 alone.
    V6,
    /// Both.
    Dual,
}

impl Stack {
    /// The stack of a network; `None` when it has no family.
    pub fn new(ipv4: bool, ipv6: bool) -> Option<Self> {
        match (ipv4, ipv6) {
            (true, true) => Some(Self::Dual),
            (true, false) => Some(Self::V4),
            (false, true) => Some(Self::V6),
            (false, false) => None,
        }
    }

    fn has_v4(self) -> bool {
        self != Self::V6
    }

    fn has_v6(self) -> bool {
        self != Self::V4
    }
}

/// The flags that choose the interface.
#[derive(Debug, Clone, Default)]
pub struct Wishes {
    /// `--iface`, in order.
    pub iface: Vec<String>,
    /// `--iface-regex`, in order.
    pub iface_regex: Vec<String>,
    /// `--iface-can-reach`, empty for none.
    pub can_reach: String,
    /// `--public-ip`, or the address stored in the registry.
    pub public_ip: String,
    /// `--public-ipv6`, likewise.
    pub public_ipv6: String,
}

/// The interface found, fixed until the machine changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct External {
    /// Kernel's interface index.
    pub index: u32,
    /// Interface name.
    pub name: String,
    /// Its MTU in bytes, never 0.
    pub mtu: u32,
    /// The interface's own IPv4 address; present when the overlay carries IPv4.
    pub v4: Option<Ipv4Addr>,
    /// The interface's own IPv6 address; present when the overlay carries IPv6.
    pub v6: Option<Ipv6Addr>,
    /// Advertised IPv4 address.
    pub public_v4: Option<Ipv4Addr>,
    /// Advertised IPv6 address.
    pub public_v6: Option<Ipv6Addr>,
}

/// Why no interface was chosen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// There is no default route to go by (yet).
    #[error("no {family} default route to choose the interface by; wait for it, or name one with --iface")]
    NoDefaultRoute {
        /// `IPv4` or `IPv6`.
        family: &'static str,
    },
    /// The default route does not name one interface.
    #[error("the {family} default route has several next hops; name the interface with --iface")]
    Multipath {
        /// `IPv4` or `IPv6`.
        family: &'static str,
    },
    /// The two default routes disagree.
    #[error(
        "the IPv4 default route leaves by {v4}, the IPv6 one by {v6}; name one interface for both with --iface"
    )]
    TwoInterfaces {
        /// Interface of the IPv4 route.
        v4: String,
        /// Interface of the IPv6 route.
        v6: String,
    },
    /// Every option was tried.
    #[error("no interface matches: {}", tried.join("; "))]
    NoMatch {
        /// One reason per option.
        tried: Vec<String>,
    },
    /// One option cannot be used at all.
    #[error("{0}")]
    Unusable(String),
}

impl SelectError {
    /// Whether the machine may still become ready, as during boot.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::NoDefaultRoute { .. } | Self::NoMatch { .. })
    }
}

/// A link with the addresses that the option itself named.
#[derive(Debug, Clone, Copy)]
struct Match<'a> {
    link: &'a Link,
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
}

impl<'a> From<&'a Link> for Match<'a> {
    fn from(link: &'a Link) -> Self {
        Self { link, v4: None, v6: None }
    }
}

/// Chooses the external interface.
///
/// # Errors
/// See [`SelectError`]; every message says which option could not be met and why.
pub fn select(wishes: &Wishes, stack: Stack, machine: &Machine) -> Result<External, SelectError> {
    let public_v4 = address::<Ipv4Addr>("--public-ip", &wishes.public_ip)?;
    let public_v6 = address::<Ipv6Addr>("--public-ipv6", &wishes.public_ipv6)?;
    let search = Search { stack, machine, public_v6 };
    let given = !(wishes.iface.is_empty() && wishes.iface_regex.is_empty() && wishes.can_reach.is_empty());
    if !given {
        let name = [&wishes.public_ip, &wishes.public_ipv6].into_iter().find(|name| !name.is_empty());
        let found = match name {
            None => search.by_default_route()?,
            Some(name) => search.by_name(name).map_err(|reason| {
                SelectError::Unusable(format!(
                    "{reason}; when the public address is not this machine's own, name the interface with --iface"
                ))
            })?,
        };
        return search.complete(found, public_v4, public_v6).map_err(SelectError::Unusable);
    }
    let mut tried = Vec::new();
    let options = (wishes.iface.iter().map(|name| (format!("--iface={name}"), search.by_name(name))))
        .chain(wishes.iface_regex.iter().map(|text| (format!("--iface-regex={text}"), search.by_regex(text))))
        .chain(
            Some(&wishes.can_reach)
                .filter(|ip| !ip.is_empty())
                .map(|ip| (format!("--iface-can-reach={ip}"), search.by_route_to(ip))),
        );
    for (option, found) in options {
        match found.and_then(|found| search.complete(found, public_v4, public_v6)) {
            Ok(external) => return Ok(external),
            Err(reason) => tried.push(format!("{option}: {reason}")),
        }
    }
    Err(SelectError::NoMatch { tried })
}

fn address<A: std::str::FromStr>(flag: &str, text: &str) -> Result<Option<A>, SelectError> {
    if text.is_empty() {
        return Ok(None);
    }
    text.parse().map(Some).map_err(|_| SelectError::Unusable(format!("invalid {flag} {text:?}")))
}

struct Search<'a> {
    stack: Stack,
    machine: &'a Machine,
    public_v6: Option<Ipv6Addr>,
}

impl<'a> Search<'a> {
    fn by_name(&self, name: &str) -> Result<Match<'a>, String> {
        match name.parse::<IpAddr>() {
            Ok(ip) => self.by_address(ip),
            Err(_) => {
                let link = self.machine.links.iter().find(|link| link.name == name);
                link.map(Match::from).ok_or_else(|| format!("no interface has the name {name}"))
            }
        }
    }

    fn by_address(&self, ip: IpAddr) -> Result<Match<'a>, String> {
        let owner = |ip: IpAddr| {
            let link = self.machine.links.iter().find(|link| link.addresses.iter().any(|own| own.ip == ip));
            link.ok_or_else(|| format!("no interface has the address {ip}"))
        };
        let found = match (ip, self.stack) {
            (IpAddr::V4(v4), Stack::V4 | Stack::Dual) => Match { v4: Some(v4), ..owner(ip)?.into() },
            (IpAddr::V6(v6), Stack::V6 | Stack::Dual) => Match { v6: Some(v6), ..owner(ip)?.into() },
            _ => return Err(format!("{ip} is not of the family the network has")),
        };
        match self.public_v6.filter(|_| self.stack == Stack::Dual && ip.is_ipv4()) {
            Some(v6) => {
                let other = owner(v6.into())?;
                if other.index != found.link.index {
                    return Err(format!("{ip} is on {}, {v6} on {}", found.link.name, other.name));
                }
                Ok(Match { v6: Some(v6), ..found })
            }
            None => Ok(found),
        }
    }

    fn by_regex(&self, text: &str) -> Result<Match<'a>, String> {
        let regex = Regex::new(text).map_err(|error| format!("no regular expression: {error}"))?;
        let with_address = self.machine.links.iter().find_map(|link| {
            let v4 = link.v4().find(|ip| regex.is_match(&ip.to_string()));
            let v6 = link.v6().find(|ip| regex.is_match(&ip.to_string()));
            let matches = match self.stack {
                Stack::V4 => v4.is_some(),
                Stack::V6 => v6.is_some(),
                Stack::Dual => v4.is_some() && v6.is_some(),
            };
            matches.then_some(Match { link, v4, v6 })
        });
        with_address
            .or_else(|| self.machine.links.iter().find(|link| regex.is_match(&link.name)).map(Match::from))
            .ok_or_else(|| "matches no address and no name".to_owned())
    }

    fn by_route_to(&self, text: &str) -> Result<Match<'a>, String> {
        let ip: IpAddr = text.parse().map_err(|_| format!("{text:?} is no address"))?;
        let (index, source) = (self.machine.route_to)(ip)?;
        let link = self
            .link(index)
            .ok_or_else(|| format!("the route to {ip} leaves by unknown interface {index}"))?;
        Ok(match source {
            Some(IpAddr::V4(v4)) => Match { link, v4: Some(v4), v6: None },
            Some(IpAddr::V6(v6)) => Match { link, v4: None, v6: Some(v6) },
            None => link.into(),
        })
    }

    fn by_default_route(&self) -> Result<Match<'a>, SelectError> {
        let one = |route: &Option<DefaultRoute>, family| match route {
            None => Err(SelectError::NoDefaultRoute { family }),
            Some(DefaultRoute::Multipath) => Err(SelectError::Multipath { family }),
            Some(DefaultRoute::Via(index)) => self.link(*index).ok_or(SelectError::NoDefaultRoute { family }),
        };
        let v4 = self.stack.has_v4().then(|| one(&self.machine.default_v4, "IPv4")).transpose()?;
        let v6 = self.stack.has_v6().then(|| one(&self.machine.default_v6, "IPv6")).transpose()?;
        match (v4, v6) {
            (Some(a), Some(b)) if a.index != b.index => {
                Err(SelectError::TwoInterfaces { v4: a.name.clone(), v6: b.name.clone() })
            }
            (Some(link), _) | (None, Some(link)) => Ok(link.into()),
            (None, None) => Err(SelectError::NoDefaultRoute { family: "IP" }),
        }
    }

    fn link(&self, index: u32) -> Option<&'a Link> {
        self.machine.links.iter().find(|link| link.index == index)
    }

    /// Fills in the addresses the option did not name.
    fn complete(
        &self,
        found: Match<'a>,
        public_v4: Option<Ipv4Addr>,
        public_v6: Option<Ipv6Addr>,
    ) -> Result<External, String> {
        let link = found.link;
        if link.mtu == 0 {
            return Err(format!("{} has MTU 0", link.name));
        }
        let missing = |family: &str| format!("{} has no usable {family} address", link.name);
        let v4 = match self.stack.has_v4() {
            true => Some(found.v4.or_else(|| link.v4().next()).ok_or_else(|| missing("IPv4"))?),
            false => None,
        };
        let v6 = match self.stack.has_v6() {
            true => Some(found.v6.or_else(|| link.v6().next()).ok_or_else(|| missing("IPv6"))?),
            false => None,
        };
        Ok(External {
            index: link.index,
            name: link.name.clone(),
            mtu: link.mtu,
            v4,
            v6,
            public_v4: v4.map(|own| public_v4.unwrap_or(own)),
            public_v6: v6.map(|own| public_v6.unwrap_or(own)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(index: u32, name: &str, addresses: &[&str]) -> Link {
        let addresses = addresses.iter().map(|text| Address::permanent(text.parse().unwrap())).collect();
        Link { index, name: name.into(), mtu: 1500, addresses }
    }

    fn machine() -> Machine {
        Machine {
            links: vec![
                link(1, "lo", &["127.0.0.1", "::1"]),
                link(2, "eth0", &["198.18.0.1", "fe80::1", "fd00:18::1"]),
                link(3, "eth1", &["10.1.0.5", "10.2.0.5"]),
                link(4, "bare", &[]),
            ],
            default_v4: Some(DefaultRoute::Via(2)),
            default_v6: Some(DefaultRoute::Via(2)),
            route_to: Box::new(|ip| match ip {
                IpAddr::V4(_) => Ok((3, Some(IpAddr::from([10, 2, 0, 5])))),
                IpAddr::V6(_) => Err("no route".to_owned()),
            }),
        }
    }

    fn v4(wishes: &Wishes) -> Result<(String, Ipv4Addr, Ipv4Addr), SelectError> {
        let external = select(wishes, Stack::V4, &machine())?;
        assert_eq!((external.v6, external.public_v6), (None, None));
        Ok((external.name, external.v4.unwrap(), external.public_v4.unwrap()))
    }

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn default_route_decides_without_options() {
        let own = Ipv4Addr::from([198, 18, 0, 1]);
        assert_eq!(v4(&Wishes::default()).unwrap(), ("eth0".into(), own, own));
        let dual = select(&Wishes::default(), Stack::Dual, &machine()).unwrap();
        assert_eq!(dual.v6, Some("fd00:18::1".parse().unwrap()), "global unicast comes before link-local");
    }

    #[test]
    fn missing_default_route_hints_at_iface_and_iface_needs_none() {
        let mut machine = machine();
        machine.default_v4 = None;
        let error = select(&Wishes::default(), Stack::V4, &machine).unwrap_err();
        assert!(error.may_pass() && error.to_string().contains("--iface"), "{error}");
        let wishes = Wishes { iface: strings(&["eth0"]), ..Wishes::default() };
        assert_eq!(select(&wishes, Stack::V4, &machine).unwrap().index, 2);
        machine.default_v4 = Some(DefaultRoute::Multipath);
        assert!(!select(&Wishes::default(), Stack::V4, &machine).unwrap_err().may_pass());
    }

    #[test]
    fn dual_stack_default_routes_must_agree() {
        let mut machine = machine();
        machine.default_v6 = Some(DefaultRoute::Via(3));
        let error = select(&Wishes::default(), Stack::Dual, &machine).unwrap_err();
        assert_eq!(error, SelectError::TwoInterfaces { v4: "eth0".into(), v6: "eth1".into() });
    }

    #[test]
    fn first_matching_option_wins_and_its_address_is_used() {
        let regex = |words: &[&str]| Wishes { iface_regex: strings(words), ..Wishes::default() };
        let iface = |words: &[&str]| Wishes { iface: strings(words), ..Wishes::default() };
        assert_eq!(v4(&regex(&[r"^10\.2\.", r"^10\.1\."])).unwrap().1, Ipv4Addr::from([10, 2, 0, 5]));
        assert_eq!(v4(&regex(&[r"^172\.", r"^10\.1\."])).unwrap().1, Ipv4Addr::from([10, 1, 0, 5]));
        assert_eq!(v4(&regex(&["^eth1$"])).unwrap().1, Ipv4Addr::from([10, 1, 0, 5]));
        assert_eq!(v4(&iface(&["ethX", "eth1"])).unwrap().0, "eth1");
        assert_eq!(v4(&iface(&["10.2.0.5", "eth0"])).unwrap().1, Ipv4Addr::from([10, 2, 0, 5]));
        let both = Wishes { can_reach: "9.9.9.9".into(), ..regex(&["nothing"]) };
        assert_eq!(v4(&both).unwrap().1, Ipv4Addr::from([10, 2, 0, 5]));
    }

    #[test]
    fn every_failed_option_is_named() {
        let wishes = Wishes {
            iface: strings(&["ethX", "bare", "1.2.3.4", "fd00:18::1"]),
            iface_regex: strings(&["(", "^wlan"]),
            can_reach: "fd00::9".into(),
            ..Wishes::default()
        };
        let Err(SelectError::NoMatch { tried }) = select(&wishes, Stack::V4, &machine()) else { panic!() };
        assert_eq!(tried.len(), 7, "{tried:?}");
    }

    #[test]
    fn public_address_is_advertised_and_names_the_interface() {
        let wishes = Wishes { public_ip: "10.1.0.5".into(), ..Wishes::default() };
        let own = Ipv4Addr::from([10, 1, 0, 5]);
        assert_eq!(v4(&wishes).unwrap(), ("eth1".into(), own, own));
        let nat = Wishes { public_ip: "203.0.113.9".into(), ..Wishes::default() };
        assert!(v4(&nat).unwrap_err().to_string().contains("--iface"));
        let nat = Wishes { iface: strings(&["eth1"]), ..nat };
        assert_eq!(v4(&nat).unwrap(), ("eth1".into(), own, Ipv4Addr::from([203, 0, 113, 9])));
        let bad = Wishes { public_ip: "x".into(), ..Wishes::default() };
        assert_eq!(v4(&bad).unwrap_err().to_string(), "invalid --public-ip \"x\"");
    }

    #[test]
    fn dual_stack_needs_both_addresses() {
        let wishes = Wishes { iface: strings(&["eth1"]), ..Wishes::default() };
        let error = select(&wishes, Stack::Dual, &machine()).unwrap_err();
        assert!(error.to_string().contains("eth1 has no usable IPv6 address"), "{error}");
        let wishes =
            Wishes { public_ip: "198.18.0.1".into(), public_ipv6: "fd00:18::1".into(), ..Wishes::default() };
        assert_eq!(select(&wishes, Stack::Dual, &machine()).unwrap().index, 2);
    }
}
