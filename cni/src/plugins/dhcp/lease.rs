//! A lease: what a server granted, and what it means for the container.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};

use super::packet::{Message, option};
use crate::json::{Fields, Object, Value};
use crate::types::error::{Error, Result};
use crate::types::result::{CniResult, IpConfig, Route};

/// What the server granted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Grant {
    pub address: Ipv4Net,
    pub server: Ipv4Addr,
    pub routers: Vec<Ipv4Addr>,
    /// Destination, next hop (0.0.0.0: on the link), whether by option 121.
    pub routes: Vec<(Ipv4Net, Ipv4Addr)>,
    pub classless: bool,
    pub duration: Duration,
    pub renew_after: Duration,
    pub rebind_after: Duration,
}

/// Lease time when the server says none.
const DURATION_DEFAULT: Duration = Duration::from_secs(3600);
/// `RT_SCOPE_LINK`: a route of option 121 without a next hop.
const SCOPE_LINK: u64 = 253;

impl Grant {
    /// Reads an acknowledgement.
    pub(super) fn from_ack(ack: &Message) -> Result<Self> {
        let mask = ack
            .address(option::SUBNET_MASK)
            .ok_or_else(|| Error::internal("DHCP option Subnet Mask not found in DHCPACK"))?;
        let address = Ipv4Net::with_netmask(ack.yiaddr, mask)
            .map_err(|_| Error::internal(format!("DHCPACK holds the subnet mask {mask}, which is none")))?;
        let seconds = |code| ack.seconds(code).map(|s| Duration::from_secs(s.into()));
        let duration = seconds(option::LEASE_TIME).unwrap_or(DURATION_DEFAULT);
        let classless = ack.options.get(&option::CLASSLESS_ROUTES).and_then(|bytes| classless_routes(bytes));
        let routers = addresses(ack.options.get(&option::ROUTERS));
        Ok(Self {
            address,
            server: ack.address(option::SERVER_ID).unwrap_or(Ipv4Addr::UNSPECIFIED),
            routers,
            classless: classless.is_some(),
            routes: classless
                .unwrap_or_else(|| static_routes(&addresses(ack.options.get(&option::STATIC_ROUTES)))),
            duration,
            renew_after: seconds(option::RENEWAL_TIME).unwrap_or(duration / 2),
            rebind_after: seconds(option::REBINDING_TIME).unwrap_or_else(|| duration.mul_f64(0.85)),
        })
    }

    /// The result of an ADD; `priority` is the metric of all routes.
    pub(super) fn to_result(&self, priority: u64) -> CniResult {
        let gateway = self.routers.first().map(|ip| IpAddr::V4(*ip));
        let mut routes: Vec<Route> = self
            .routes
            .iter()
            .map(|(dst, hop)| {
                let mut route = Route::new(IpNet::V4(*dst), Some(IpAddr::V4(*hop)));
                if self.classless && hop.is_unspecified() {
                    route.scope = Some(SCOPE_LINK);
                }
                route
            })
            .collect();
        // Option 121 replaces the router option (RFC 3442).
        if !self.classless && gateway.is_some() {
            routes.push(Route::new(IpNet::V4(Ipv4Net::default()), gateway));
        }
        for route in &mut routes {
            route.priority = priority;
        }
        CniResult {
            ips: vec![IpConfig { interface: None, address: IpNet::V4(self.address), gateway }],
            routes,
            ..CniResult::default()
        }
    }

    /// For the file that survives a restart.
    pub(super) fn to_json(&self) -> Object {
        let list = |items: Vec<String>| Value::Array(items.into_iter().map(Value::String).collect());
        let mut o = Object::new();
        o.push("address", self.address.to_string());
        o.push("server", self.server.to_string());
        o.push("routers", list(self.routers.iter().map(ToString::to_string).collect()));
        o.push("routes", list(self.routes.iter().map(|(dst, hop)| format!("{dst} {hop}")).collect()));
        o.push("classless", self.classless);
        o.push("duration", self.duration.as_secs());
        o.push("renewAfter", self.renew_after.as_secs());
        o.push("rebindAfter", self.rebind_after.as_secs());
        o
    }

    /// Reads what [`Grant::to_json`] wrote.
    pub(super) fn from_json(f: &Fields<'_>) -> Option<Self> {
        let text = |key| f.string(key).ok().flatten();
        let seconds = |key| Some(Duration::from_secs(f.uint(key).ok()??));
        Some(Self {
            address: text("address")?.parse().ok()?,
            server: text("server")?.parse().ok()?,
            routers: f.strings("routers").ok()??.iter().map(|s| s.parse().ok()).collect::<Option<_>>()?,
            routes: f
                .strings("routes")
                .ok()??
                .iter()
                .map(|s| {
                    let (dst, hop) = s.split_once(' ')?;
                    Some((dst.parse().ok()?, hop.parse().ok()?))
                })
                .collect::<Option<_>>()?,
            classless: f.flag("classless").ok()?,
            duration: seconds("duration")?,
            renew_after: seconds("renewAfter")?,
            rebind_after: seconds("rebindAfter")?,
        })
    }
}

fn addresses(bytes: Option<&Vec<u8>>) -> Vec<Ipv4Addr> {
    let bytes = bytes.map(Vec::as_slice).unwrap_or_default();
    bytes.chunks_exact(4).map(|c| Ipv4Addr::new(c[0], c[1], c[2], c[3])).collect()
}

/// Option 33: pairs of destination and next hop, with the masks of the old classes.
fn static_routes(pairs: &[Ipv4Addr]) -> Vec<(Ipv4Net, Ipv4Addr)> {
    pairs
        .chunks_exact(2)
        .filter_map(|pair| {
            let len = match pair[0].octets()[0] {
                0..=127 => 8,
                128..=191 => 16,
                192..=223 => 24,
                _ => return None,
            };
            Some((Ipv4Net::new(pair[0], len).ok()?.trunc(), pair[1]))
        })
        .collect()
}

/// Option 121 (RFC 3442): length of the prefix, as many of its bytes as matter, next hop. None when
/// malformed: the option is ignored as a whole then.
fn classless_routes(mut bytes: &[u8]) -> Option<Vec<(Ipv4Net, Ipv4Addr)>> {
    let mut routes = Vec::new();
    while let Some((len, rest)) = bytes.split_first() {
        let significant = usize::from(*len).div_ceil(8);
        if *len > 32 {
            return None;
        }
        let mut dst = [0; 4];
        dst[..significant].copy_from_slice(rest.get(..significant)?);
        let hop: [u8; 4] = rest.get(significant..significant + 4)?.try_into().ok()?;
        routes.push((Ipv4Net::new(dst.into(), *len).ok()?.trunc(), hop.into()));
        bytes = &rest[significant + 4..];
    }
    Some(routes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plugins::dhcp::packet::Options;
    use felt_hostnet::MacAddr;

    fn ack(options: &[(u8, &[u8])]) -> Message {
        let mut all: Options = options.iter().map(|(code, value)| (*code, value.to_vec())).collect();
        all.entry(option::SUBNET_MASK).or_insert_with(|| vec![255, 255, 255, 0]);
        Message {
            xid: 1,
            broadcast: false,
            ciaddr: Ipv4Addr::UNSPECIFIED,
            yiaddr: Ipv4Addr::new(192, 0, 2, 7),
            mac: MacAddr::default(),
            options: all,
        }
    }

    #[test]
    fn classless_routes_replace_the_router() {
        let grant = Grant::from_ack(&ack(&[
            (option::ROUTERS, &[192, 0, 2, 1]),
            (option::CLASSLESS_ROUTES, &[8, 10, 10, 28, 30, 40, 24, 192, 168, 200, 0, 0, 0, 0]),
        ]))
        .unwrap();
        let result = grant.to_result(5);
        assert_eq!(result.ips[0].address.to_string(), "192.0.2.7/24");
        assert_eq!(result.ips[0].gateway.unwrap().to_string(), "192.0.2.1");
        let texts: Vec<String> =
            result.routes.iter().map(|r| format!("{r} {:?} {}", r.scope, r.priority)).collect();
        assert_eq!(
            texts,
            ["{Dst:10.0.0.0/8 GW:10.28.30.40} None 5", "{Dst:192.168.200.0/24 GW:0.0.0.0} Some(253) 5"]
        );
        let value = Value::Object(grant.to_json());
        assert_eq!(Grant::from_json(&Fields::of("Grant", &value).unwrap()), Some(grant));
    }

    #[test]
    fn a_malformed_option_121_is_ignored() {
        for bytes in [&[33u8, 1, 2, 3, 4, 5, 6, 7, 8][..], &[24, 192, 168], &[0, 1, 2, 3]] {
            let grant = Grant::from_ack(&ack(&[
                (option::ROUTERS, &[192, 0, 2, 1]),
                (option::CLASSLESS_ROUTES, bytes),
            ]))
            .unwrap();
            assert_eq!(grant.to_result(0).routes.len(), 1, "{bytes:?}");
        }
    }

    #[test]
    fn old_static_routes_have_the_masks_of_classes() {
        let grant = Grant::from_ack(&ack(&[(
            option::STATIC_ROUTES,
            &[10, 0, 0, 0, 192, 0, 2, 9, 172, 16, 0, 0, 192, 0, 2, 8],
        )]))
        .unwrap();
        let texts: Vec<String> = grant.routes.iter().map(|(dst, hop)| format!("{dst} {hop}")).collect();
        assert_eq!(texts, ["10.0.0.0/8 192.0.2.9", "172.16.0.0/16 192.0.2.8"]);
        assert_eq!(grant.duration, DURATION_DEFAULT);
        assert_eq!(grant.renew_after, DURATION_DEFAULT / 2);
    }

    #[test]
    fn a_mask_is_needed() {
        let mut message = ack(&[]);
        message.options.remove(&option::SUBNET_MASK);
        assert_eq!(
            Grant::from_ack(&message).unwrap_err().msg,
            "DHCP option Subnet Mask not found in DHCPACK"
        );
    }
}
