//! `bridge`: a veth pair between the container and a bridge of the host.
//!
//! ADD makes the bridge when there is none, the pair, asks IPAM, configures the container's end and
//! gives the bridge its gateway addresses. What was made is undone when a later step fails; the
//! bridge itself stays, for it belongs to all attachments.

mod check;
mod conf;
mod device;

use std::net::IpAddr;

use felt_hostnet::netlink::{BridgePortChange, Handle, Link};
use felt_hostnet::netns::NetNs;
use felt_hostnet::sysctl;
use ipnet::IpNet;

use super::veth::{self, Wanted};
use super::{Plugin, ipam, ipam_if_any, mac_text, masquerade, spoof};
use crate::delegate;
use crate::ipconf::{self, Dad};
use crate::skel::{Call, Command};
use crate::trace;
use crate::types::error::{Context, Error, Result};
use crate::types::result::{CniResult, Interface, Route};
use crate::types::version::{Shape, SpecVersion};
use conf::Conf;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "bridge",
    versions: SpecVersion::ALL,
    add,
    del,
    check: check::check,
    gc,
    status: |call| ipam_if_any(call, Command::Status),
    may_have_no_address: false,
};

/// Index of the container's end in the result: after the bridge and the host's end.
const CONTAINER: i64 = 2;

fn add(call: &Call<'_>) -> Result<CniResult> {
    let conf = Conf::load(call)?;
    let layer3 = !call.conf.ipam_type.is_empty();
    if !layer3 && call.conf.version.shape() == Shape::Legacy {
        // These versions cannot say "no address": refuse before anything is made.
        return Err(Error::internal("cannot convert: no valid IP addresses"));
    }
    let mut host = Handle::new()?;
    let ns = ipconf::open_netns(call)?;
    let mut inside = Handle::new_in(&ns)?;
    let bridge = device::ensure(&mut host, &conf)?;
    trace::step(|| format!("bridge {} is there", bridge.name));
    let wanted =
        Wanted { ifname: &call.env.ifname, mtu: conf.mtu, mac: conf.mac, master: Some(bridge.index) };
    let pair = veth::make(&mut host, &mut inside, &ns, &wanted)?;
    trace::step(|| format!("veth pair {} made", pair.host.name));
    let mut attachment = Attachment { call, conf: &conf, bridge, pair, ns: &ns, leased: false };
    attachment.complete(&mut host, &mut inside).inspect_err(|_| attachment.undo(&mut host))
}

/// An attachment in the making.
struct Attachment<'a> {
    call: &'a Call<'a>,
    conf: &'a Conf,
    bridge: Link,
    pair: veth::Pair,
    ns: &'a NetNs,
    /// IPAM holds addresses for us.
    leased: bool,
}

impl Attachment<'_> {
    fn complete(&mut self, host: &mut Handle, inside: &mut Handle) -> Result<CniResult> {
        let conf = self.conf;
        if conf.hairpin || conf.port_isolation {
            let change = BridgePortChange {
                hairpin: Some(conf.hairpin),
                isolated: Some(conf.port_isolation),
                ..BridgePortChange::default()
            };
            host.bridge_port_set(self.pair.host.index, change)
                .with_context(|| format!("failed to setup bridge port {}", self.pair.host.name))?;
        }
        device::set_port_vlans(host, self.pair.host.index, conf)?;
        if conf.mac_spoof_check
            && let Some(mac) = self.pair.container.mac
        {
            spoof::setup(self.call, &self.pair.host.name, mac)?;
        }
        let mut result = CniResult {
            interfaces: vec![
                Interface { name: self.bridge.name.clone(), ..Interface::default() },
                Interface { name: self.pair.host.name.clone(), ..Interface::default() },
                Interface {
                    name: self.call.env.ifname.clone(),
                    mac: mac_text(&self.pair.container),
                    sandbox: self.call.env.netns.clone(),
                    ..Interface::default()
                },
            ],
            ..CniResult::default()
        };
        if let Some(bytes) = conf.gso_max_size {
            ipconf::set_gso_max_size(inside, self.pair.container.index, bytes)?;
        }
        if !self.call.conf.ipam_type.is_empty() {
            self.configure_layer3(host, inside, &mut result)?;
        } else if !conf.disable_container_interface {
            inside.link_up(self.pair.container.index)?;
        }
        let mut host_end = self.pair.host.clone();
        if !conf.disable_container_interface {
            host_end = ipconf::wait_until_up(host, host_end.index)?;
            trace::step(|| "the port forwards".into());
            super::announce_again(inside, &self.pair.container, &result);
        }
        result.interfaces[0].mac = mac_text(&host.link_by_index(self.bridge.index)?);
        result.interfaces[1].mac = mac_text(&host_end);
        if self.call.conf.dns_given {
            result.dns = self.call.conf.dns.clone();
        }
        Ok(result)
    }

    fn configure_layer3(
        &mut self,
        host: &mut Handle,
        inside: &mut Handle,
        result: &mut CniResult,
    ) -> Result<()> {
        let conf = self.conf;
        let leased = delegate::add(self.call, &self.call.conf.ipam_type, self.call.stdin)?;
        self.leased = true;
        if leased.ips.is_empty() {
            return Err(Error::internal("IPAM plugin returned missing IP config"));
        }
        result.ips = leased.ips;
        result.routes = leased.routes;
        result.dns = leased.dns;
        let gateways = choose_gateways(conf, result);
        let ifname = &self.call.env.ifname;
        let v4_only = result.ips.iter().all(|ip| ip.address.addr().is_ipv4());
        ipconf::inside(self.ns, || {
            if conf.dad {
                let _ = sysctl::write(&format!("net/ipv6/conf/{ifname}/enhanced_dad"), "1");
            }
            let _ = sysctl::write(
                &format!("net/ipv6/conf/{ifname}/accept_dad"),
                if conf.dad { "1" } else { "0" },
            );
            let _ = sysctl::write(&format!("net/ipv4/conf/{ifname}/arp_notify"), "1");
            if !v4_only {
                let _ = sysctl::write(&format!("net/ipv6/conf/{ifname}/ndisc_notify"), "1");
            }
            Ok(())
        })?;
        let dad = if conf.dad { Dad::Run } else { Dad::Skip };
        ipconf::configure(inside, self.ns, &self.pair.container, result, dad)?;
        if conf.is_gateway {
            self.set_gateways(host, result, &gateways)?;
        }
        if conf.ip_masq {
            masquerade::setup(self.call, conf.ip_masq_backend.as_deref(), &result.ips)?;
        }
        Ok(())
    }

    fn set_gateways(&self, host: &mut Handle, result: &mut CniResult, gateways: &[IpNet]) -> Result<()> {
        let mut device = self.bridge.clone();
        if self.conf.vlan != 0 {
            device = device::ensure_vlan_interface(host, &self.bridge, self.conf)?;
            result.interfaces.push(Interface {
                name: device.name.clone(),
                mac: mac_text(&device),
                ..Interface::default()
            });
        }
        for v4 in [true, false] {
            let mut any = false;
            for gateway in gateways.iter().filter(|gw| gw.addr().is_ipv4() == v4) {
                any = true;
                device::ensure_address(host, &device, *gateway, self.conf.force_address).map_err(|err| {
                    err.context(if self.conf.vlan == 0 {
                        "failed to set bridge addr"
                    } else {
                        "failed to set vlan interface for bridge with addr"
                    })
                })?;
            }
            if any {
                ipconf::enable_forwarding(host, v4).context("failed to enable forwarding")?;
            }
        }
        trace::step(|| "gateway addresses set".into());
        Ok(())
    }

    /// Removes what this ADD made. Errors are of no use to anybody here: the first one is reported.
    fn undo(&self, host: &mut Handle) {
        let _ = host.link_del(self.pair.host.index);
        if self.conf.mac_spoof_check {
            let _ = spoof::teardown(self.call);
        }
        if self.leased {
            let _ = ipam(self.call, Command::Del);
            if self.conf.ip_masq {
                let _ = masquerade::teardown(self.call);
            }
        }
        trace::step(|| "undone".into());
    }
}

/// Gives each address its interface and gateway, adds default routes, and returns the addresses the
/// bridge needs.
fn choose_gateways(conf: &Conf, result: &mut CniResult) -> Vec<IpNet> {
    let mut gateways = Vec::new();
    for v4 in [true, false] {
        let mut default_done = false;
        for ip in result.ips.iter_mut().filter(|ip| ip.address.addr().is_ipv4() == v4) {
            ip.interface = Some(CONTAINER);
            if ip.gateway.is_none() && conf.is_gateway {
                ip.gateway = Some(first_address(&ip.address));
            }
            let Some(gateway) = ip.gateway else { continue };
            if conf.is_gateway {
                gateways.extend(IpNet::new(gateway, ip.address.prefix_len()));
            }
            if conf.is_default_gateway && !default_done {
                default_done = true;
                let existing =
                    result.routes.iter_mut().find(|r| r.is_default() && r.dst.addr().is_ipv4() == v4);
                match existing {
                    // A default route without gateway means this one: it is not added twice.
                    Some(route) => route.gw = route.gw.or(Some(gateway)),
                    None => result.routes.push(Route::new(whole(v4), Some(gateway))),
                }
            }
        }
    }
    gateways
}

fn whole(v4: bool) -> IpNet {
    if v4 { IpNet::V4(ipnet::Ipv4Net::default()) } else { IpNet::V6(ipnet::Ipv6Net::default()) }
}

/// The first host address of a subnet.
fn first_address(net: &IpNet) -> IpAddr {
    match net.network() {
        IpAddr::V4(v4) => std::net::Ipv4Addr::from(u32::from(v4).wrapping_add(1)).into(),
        IpAddr::V6(v6) => std::net::Ipv6Addr::from(u128::from(v6).wrapping_add(1)).into(),
    }
}

fn del(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    // A DHCP lease can only be given back while the link is there.
    let early = call.conf.ipam_type == "dhcp";
    if early {
        ipam(call, Command::Del)?;
    }
    super::delete_link(call)?;
    if !early {
        ipam_if_any(call, Command::Del)?;
    }
    if conf.mac_spoof_check {
        spoof::teardown(call)?;
    }
    if conf.ip_masq && !call.conf.ipam_type.is_empty() {
        masquerade::teardown(call)?;
    }
    Ok(())
}

fn gc(call: &Call<'_>) -> Result<()> {
    masquerade::gc(call)?;
    spoof::gc(call)?;
    ipam_if_any(call, Command::Gc)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::result::IpConfig;

    fn conf(keys: &str) -> Conf {
        let raw = crate::json::Value::parse(format!(r#"{{"name":"n",{keys}}}"#).as_bytes()).unwrap();
        let env = crate::skel::Env::default();
        let conf =
            crate::types::conf::NetConf::from_object(raw.as_object().unwrap(), SpecVersion::V1_0_0).unwrap();
        Conf::load(&Call { env: &env, stdin: b"", conf }).unwrap()
    }

    fn leased() -> CniResult {
        CniResult {
            ips: vec![
                IpConfig { interface: None, address: "10.1.2.9/24".parse().unwrap(), gateway: None },
                IpConfig {
                    interface: None,
                    address: "fd00::9/64".parse().unwrap(),
                    gateway: Some("fd00::fe".parse().unwrap()),
                },
            ],
            ..CniResult::default()
        }
    }

    #[test]
    fn a_default_gateway_adds_one_route_per_family() {
        let mut result = leased();
        let gateways = choose_gateways(&conf(r#""isDefaultGateway":true"#), &mut result);
        let texts: Vec<String> = gateways.iter().map(ToString::to_string).collect();
        assert_eq!(texts, ["10.1.2.1/24", "fd00::fe/64"]);
        let routes: Vec<String> = result.routes.iter().map(ToString::to_string).collect();
        assert_eq!(routes, ["{Dst:0.0.0.0/0 GW:10.1.2.1}", "{Dst:::/0 GW:fd00::fe}"]);
        assert!(result.ips.iter().all(|ip| ip.interface == Some(2)));
    }

    #[test]
    fn a_default_route_without_gateway_is_not_added_twice() {
        let mut result = leased();
        result.routes.push(Route::new(whole(true), None));
        result.routes.push(Route::new(whole(false), Some("fd00::77".parse().unwrap())));
        choose_gateways(&conf(r#""isDefaultGateway":true"#), &mut result);
        let routes: Vec<String> = result.routes.iter().map(ToString::to_string).collect();
        assert_eq!(routes, ["{Dst:0.0.0.0/0 GW:10.1.2.1}", "{Dst:::/0 GW:fd00::77}"]);
    }

    #[test]
    fn without_a_gateway_nothing_is_invented() {
        let mut result = leased();
        assert!(choose_gateways(&conf(r#""mtu":1400"#), &mut result).is_empty());
        assert_eq!(result.ips[0].gateway, None);
        assert!(result.routes.is_empty());
    }
}
