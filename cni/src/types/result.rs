//! The result of an ADD: one type inside, converted to the config's version at the edge.
//!
//! Three shapes exist on the wire (see [`Shape`]). The order of keys follows the reference: sorted
//! for 1.x, order of declaration before, because byte comparisons see it.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use super::error::{Error, Result};
use super::version::{Shape, SpecVersion};
use crate::json::{Fields, Object, Value};

/// Links, addresses, routes and DNS settings an attachment got.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CniResult {
    /// Links made or used, host side and container side.
    pub interfaces: Vec<Interface>,
    /// Addresses, each with the index of its link.
    pub ips: Vec<IpConfig>,
    /// Routes inside the container.
    pub routes: Vec<Route>,
    /// Resolver settings for the container.
    pub dns: Dns,
}

/// A link named in a result.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its hardware address as text.
    pub mac: String,
    /// Path of the container's namespace; empty for the host.
    pub sandbox: String,
    /// MTU, 0 when not said.
    pub mtu: u64,
    /// Path of a socket (vhost-user devices).
    pub socket_path: String,
    /// PCI address.
    pub pci_id: String,
}

/// An address of an attachment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpConfig {
    /// Index into `interfaces`.
    pub interface: Option<i64>,
    /// Address with prefix length; the host bits stay.
    pub address: IpNet,
    /// Gateway for this address's family.
    pub gateway: Option<IpAddr>,
}

/// A route inside the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// Destination.
    pub dst: IpNet,
    /// Next hop; `None` means the gateway of the destination's family.
    pub gw: Option<IpAddr>,
    /// Path MTU, 0 when not said.
    pub mtu: u64,
    /// Advertised segment size, 0 when not said.
    pub advmss: u64,
    /// Metric, 0 when not said.
    pub priority: u64,
    /// Routing table.
    pub table: Option<u64>,
    /// Scope number (0 universe, 253 link, 254 host).
    pub scope: Option<u64>,
}

/// Resolver settings.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Dns {
    /// Addresses of name servers.
    pub nameservers: Vec<String>,
    /// Local domain.
    pub domain: String,
    /// Search list.
    pub search: Vec<String>,
    /// Resolver options.
    pub options: Vec<String>,
}

impl Route {
    /// A route with nothing but destination and next hop.
    pub fn new(dst: IpNet, gw: Option<IpAddr>) -> Self {
        Self { dst, gw, mtu: 0, advmss: 0, priority: 0, table: None, scope: None }
    }

    /// Whether the destination is the whole address space.
    pub fn is_default(&self) -> bool {
        self.dst.prefix_len() == 0
    }

    /// Reads a route object.
    ///
    /// # Errors
    /// Malformed addresses or wrong types.
    pub fn read(value: &Value) -> Result<Self> {
        let f = Fields::of("Route", value)?;
        let dst = parse_cidr(f.string("dst")?.unwrap_or_default())?;
        Ok(Self {
            dst,
            gw: f.string("gw")?.map(parse_ip).transpose()?,
            mtu: f.uint("mtu")?.unwrap_or(0),
            advmss: f.uint("advmss")?.unwrap_or(0),
            priority: f.uint("priority")?.unwrap_or(0),
            table: f.uint("table")?,
            scope: f.uint("scope")?,
        })
    }

    fn write(&self) -> Object {
        let mut o = Object::new();
        o.push("dst", self.dst.to_string());
        if let Some(gw) = self.gw {
            o.push("gw", gw.to_string());
        }
        for (key, n) in [("mtu", self.mtu), ("advmss", self.advmss), ("priority", self.priority)] {
            if n != 0 {
                o.push(key, n);
            }
        }
        for (key, n) in [("table", self.table), ("scope", self.scope)] {
            if let Some(n) = n {
                o.push(key, n);
            }
        }
        o
    }
}

impl fmt::Display for Route {
    /// The reference's rendering of a route in error texts.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{Dst:{} GW:{}}}", self.dst, self.gw.map_or_else(|| "<nil>".into(), |gw| gw.to_string()))
    }
}

impl Dns {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Reads a `dns` object.
    ///
    /// # Errors
    /// Wrong types.
    pub fn read(f: &Fields<'_>) -> Result<Self> {
        Ok(Self {
            nameservers: f.strings("nameservers")?.unwrap_or_default(),
            domain: f.string_or_empty("domain")?,
            search: f.strings("search")?.unwrap_or_default(),
            options: f.strings("options")?.unwrap_or_default(),
        })
    }

    fn write(&self) -> Object {
        let mut o = Object::new();
        let list = |items: &[String]| Value::Array(items.iter().map(|s| s.as_str().into()).collect());
        if !self.nameservers.is_empty() {
            o.push("nameservers", list(&self.nameservers));
        }
        if !self.domain.is_empty() {
            o.push("domain", self.domain.as_str());
        }
        if !self.search.is_empty() {
            o.push("search", list(&self.search));
        }
        if !self.options.is_empty() {
            o.push("options", list(&self.options));
        }
        o
    }
}

impl CniResult {
    /// The object printed for `version`.
    ///
    /// # Errors
    /// `cannot convert: no valid IP addresses` for 0.1.0 and 0.2.0, which cannot say "no address".
    pub fn to_json(&self, version: SpecVersion) -> Result<Value> {
        let mut o = Object::new();
        o.push("cniVersion", version.as_str());
        if version.shape() == Shape::Legacy {
            if self.ips.is_empty() {
                return Err(Error::internal("cannot convert: no valid IP addresses"));
            }
            self.write_legacy(&mut o);
            return Ok(o.into());
        }
        let current = version.shape() == Shape::Current;
        let array = |items: Vec<Object>| Value::Array(items.into_iter().map(Value::Object).collect());
        if !self.interfaces.is_empty() {
            o.push("interfaces", array(self.interfaces.iter().map(|i| i.write(current)).collect()));
        }
        if !self.ips.is_empty() {
            o.push("ips", array(self.ips.iter().map(|ip| ip.write(current)).collect()));
        }
        if !self.routes.is_empty() {
            o.push("routes", array(self.routes.iter().map(Route::write).collect()));
        }
        if !current || !self.dns.is_empty() {
            o.push("dns", self.dns.write());
        }
        let value = Value::Object(o);
        Ok(if current { value.sorted() } else { value })
    }

    fn write_legacy(&self, o: &mut Object) {
        for (key, v4) in [("ip4", true), ("ip6", false)] {
            let Some(ip) = self.ips.iter().find(|ip| ip.address.addr().is_ipv4() == v4) else { continue };
            let mut entry = Object::new();
            entry.push("ip", ip.address.to_string());
            if let Some(gw) = ip.gateway {
                entry.push("gateway", gw.to_string());
            }
            let routes: Vec<Value> = self
                .routes
                .iter()
                .filter(|r| r.dst.addr().is_ipv4() == v4)
                .map(|r| Route::new(r.dst, r.gw).write().into())
                .collect();
            if !routes.is_empty() {
                entry.push("routes", routes);
            }
            o.push(key, entry);
        }
        o.push("dns", self.dns.write());
    }

    /// Reads a result; `assumed` is the version when the object names none.
    ///
    /// # Errors
    /// Another family of versions than `assumed`, wrong types, malformed addresses.
    pub fn from_json(value: &Value, assumed: SpecVersion) -> Result<Self> {
        let f = Fields::of("Result", value)?;
        let said = f.string("cniVersion")?.unwrap_or_default();
        let said = if said.is_empty() { assumed.as_str() } else { said };
        let family: Vec<&str> =
            SpecVersion::ALL.iter().filter(|v| v.shape() == assumed.shape()).map(|v| v.as_str()).collect();
        if !family.contains(&said) {
            return Err(Error::internal(format!(
                "result type supports [{}] but unmarshalled CNIVersion is {said:?}",
                family.join(" ")
            )));
        }
        let dns = f.object_of("dns", "DNS")?.map(|d| Dns::read(&d)).transpose()?.unwrap_or_default();
        if assumed.shape() == Shape::Legacy {
            return Self::read_legacy(&f, dns);
        }
        Ok(Self {
            interfaces: f.array("interfaces")?.iter().map(Interface::read).collect::<Result<_>>()?,
            ips: f.array("ips")?.iter().map(IpConfig::read).collect::<Result<_>>()?,
            routes: f.array("routes")?.iter().map(Route::read).collect::<Result<_>>()?,
            dns,
        })
    }

    fn read_legacy(f: &Fields<'_>, dns: Dns) -> Result<Self> {
        let mut out = Self { dns, ..Self::default() };
        for key in ["ip4", "ip6"] {
            let Some(ip) = f.object_of(key, "IPConfig")? else { continue };
            out.ips.push(IpConfig {
                interface: None,
                address: parse_cidr(ip.string("ip")?.unwrap_or_default())?,
                gateway: ip.string("gateway")?.map(parse_ip).transpose()?,
            });
            for route in ip.array("routes")? {
                out.routes.push(Route::read(route)?);
            }
        }
        Ok(out)
    }

    /// What a reader sees after this result was printed for `version`.
    ///
    /// # Errors
    /// As [`CniResult::to_json`].
    pub fn through(self, version: SpecVersion) -> Result<Self> {
        if version.shape() == Shape::Current {
            return Ok(self);
        }
        Self::from_json(&self.to_json(version)?, version)
    }
}

impl Interface {
    fn read(value: &Value) -> Result<Self> {
        let f = Fields::of("Interface", value)?;
        Ok(Self {
            name: f.string_or_empty("name")?,
            mac: f.string_or_empty("mac")?,
            sandbox: f.string_or_empty("sandbox")?,
            mtu: f.uint("mtu")?.unwrap_or(0),
            socket_path: f.string_or_empty("socketPath")?,
            pci_id: f.string_or_empty("pciID")?,
        })
    }

    fn write(&self, current: bool) -> Object {
        let mut o = Object::new();
        o.push("name", self.name.as_str());
        if !self.mac.is_empty() {
            o.push("mac", self.mac.as_str());
        }
        if current && self.mtu != 0 {
            o.push("mtu", self.mtu);
        }
        if !self.sandbox.is_empty() {
            o.push("sandbox", self.sandbox.as_str());
        }
        if current && !self.socket_path.is_empty() {
            o.push("socketPath", self.socket_path.as_str());
        }
        if current && !self.pci_id.is_empty() {
            o.push("pciID", self.pci_id.as_str());
        }
        o
    }
}

impl IpConfig {
    fn read(value: &Value) -> Result<Self> {
        let f = Fields::of("IPConfig", value)?;
        Ok(Self {
            interface: f.int("interface")?,
            address: parse_cidr(f.string("address")?.unwrap_or_default())?,
            gateway: f.string("gateway")?.filter(|s| !s.is_empty()).map(parse_ip).transpose()?,
        })
    }

    fn write(&self, current: bool) -> Object {
        let mut o = Object::new();
        if !current {
            o.push("version", if self.address.addr().is_ipv4() { "4" } else { "6" });
        }
        if let Some(index) = self.interface {
            o.push("interface", index);
        }
        o.push("address", self.address.to_string());
        if let Some(gw) = self.gateway {
            o.push("gateway", gw.to_string());
        }
        o
    }
}

/// An address with a prefix length, host bits kept.
///
/// # Errors
/// Go's text: `invalid CIDR address: X`.
pub fn parse_cidr(text: &str) -> Result<IpNet> {
    let net: IpNet = text.parse().map_err(|_| Error::internal(format!("invalid CIDR address: {text}")))?;
    Ok(match net {
        // Go stores an IPv4-mapped address as IPv4.
        IpNet::V6(v6) => match (v6.addr().to_ipv4_mapped(), v6.prefix_len().checked_sub(96)) {
            (Some(v4), Some(len)) => IpNet::new(v4.into(), len).unwrap_or(net),
            _ => net,
        },
        v4 @ IpNet::V4(_) => v4,
    })
}

/// An address.
///
/// # Errors
/// Go's text: `invalid IP address: X`.
pub fn parse_ip(text: &str) -> Result<IpAddr> {
    text.parse::<IpAddr>()
        .map(|ip| ip.to_canonical())
        .map_err(|_| Error::internal(format!("invalid IP address: {text}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> CniResult {
        CniResult {
            interfaces: vec![Interface {
                name: "eth0".into(),
                mac: "02:00:00:00:00:01".into(),
                sandbox: "/run/netns/a".into(),
                mtu: 1450,
                ..Interface::default()
            }],
            ips: vec![
                IpConfig {
                    interface: Some(0),
                    address: "10.1.2.3/24".parse().unwrap(),
                    gateway: Some("10.1.2.1".parse().unwrap()),
                },
                IpConfig { interface: Some(0), address: "fd00::5/64".parse().unwrap(), gateway: None },
            ],
            routes: vec![Route { priority: 5, ..Route::new("0.0.0.0/0".parse().unwrap(), None) }],
            dns: Dns::default(),
        }
    }

    #[test]
    fn prints_1_1_0_with_sorted_keys_and_no_empty_dns() {
        let text = sample().to_json(SpecVersion::V1_1_0).unwrap().to_compact();
        assert_eq!(
            text,
            concat!(
                r#"{"cniVersion":"1.1.0","interfaces":[{"mac":"02:00:00:00:00:01","mtu":1450,"name":"eth0","#,
                r#""sandbox":"/run/netns/a"}],"ips":[{"address":"10.1.2.3/24","gateway":"10.1.2.1","interface":0},"#,
                r#"{"address":"fd00::5/64","interface":0}],"routes":[{"dst":"0.0.0.0/0","priority":5}]}"#
            )
        );
    }

    #[test]
    fn prints_0_4_0_with_versions_declared_order_and_dns() {
        let text = sample().to_json(SpecVersion::V0_4_0).unwrap().to_compact();
        assert_eq!(
            text,
            concat!(
                r#"{"cniVersion":"0.4.0","interfaces":[{"name":"eth0","mac":"02:00:00:00:00:01","#,
                r#""sandbox":"/run/netns/a"}],"ips":[{"version":"4","interface":0,"address":"10.1.2.3/24","#,
                r#""gateway":"10.1.2.1"},{"version":"6","interface":0,"address":"fd00::5/64"}],"#,
                r#""routes":[{"dst":"0.0.0.0/0","priority":5}],"dns":{}}"#
            )
        );
    }

    #[test]
    fn prints_0_2_0_with_one_address_per_family() {
        let text = sample().to_json(SpecVersion::V0_2_0).unwrap().to_compact();
        assert_eq!(
            text,
            concat!(
                r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.1.2.3/24","gateway":"10.1.2.1","#,
                r#""routes":[{"dst":"0.0.0.0/0"}]},"ip6":{"ip":"fd00::5/64"},"dns":{}}"#
            )
        );
        let empty = CniResult::default().to_json(SpecVersion::V0_1_0).unwrap_err();
        assert_eq!(empty.msg, "cannot convert: no valid IP addresses");
    }

    #[test]
    fn reads_back_what_it_prints_in_every_version() {
        for version in SpecVersion::ALL {
            let once = sample().through(*version).unwrap();
            assert_eq!(once.clone().through(*version).unwrap(), once, "{version}");
            assert_eq!(once.ips.len(), 2);
        }
    }

    #[test]
    fn refuses_a_result_of_another_family() {
        let v = sample().to_json(SpecVersion::V0_4_0).unwrap();
        assert_eq!(
            CniResult::from_json(&v, SpecVersion::V1_0_0).unwrap_err().msg,
            "result type supports [1.0.0 1.1.0] but unmarshalled CNIVersion is \"0.4.0\""
        );
    }
}
