//! `ptp`: a veth pair without a bridge; the host routes each address to its own cable.

use std::net::IpAddr;

use felt_hostnet::netlink::{Address, Handle, IfIndex, Route, RouteScope};
use felt_hostnet::netns::NetNs;
use ipnet::IpNet;

use super::veth::{self, Wanted};
use super::{Plugin, container_link, ipam, mac_text, masquerade, required_result};
use crate::delegate;
use crate::ipconf::{self, Dad};
use crate::json::Fields;
use crate::skel::{Call, Command};
use crate::trace;
use crate::types::error::{Context, Error, Result};
use crate::types::result::{CniResult, Interface};
use crate::types::version::SpecVersion;

pub(super) static PLUGIN: Plugin = Plugin {
    name: "ptp",
    versions: SpecVersion::ALL,
    add,
    del,
    check,
    gc: |call| masquerade::gc(call).and_then(|()| ipam(call, Command::Gc)),
    status: |call| ipam(call, Command::Status),
    may_have_no_address: false,
};

/// The plugin's own keys.
struct Conf {
    ip_masq: bool,
    backend: Option<String>,
    mtu: Option<u32>,
}

impl Conf {
    fn load(call: &Call<'_>) -> Result<Self> {
        let value = call.value();
        let f = Fields::of("NetConf", &value)?;
        let mtu = f.int("mtu")?.unwrap_or(0);
        Ok(Self {
            ip_masq: f.flag("ipMasq")?,
            backend: masquerade::backend_key(&f)?,
            mtu: u32::try_from(mtu)
                .map(|mtu| (mtu != 0).then_some(mtu))
                .map_err(|_| Error::internal(format!("invalid mtu {mtu} (must not be negative)")))?,
        })
    }
}

/// Index of the container's end in the result.
const CONTAINER: i64 = 1;

fn add(call: &Call<'_>) -> Result<CniResult> {
    let conf = Conf::load(call)?;
    let mut result = delegate::add(call, &call.conf.ipam_type, call.stdin)?;
    let mut host = Handle::new()?;
    let mut made = None;
    attach(call, &conf, &mut host, &mut result, &mut made).inspect_err(|_| {
        if let Some(index) = made {
            let _ = host.link_del(index);
        }
        let _ = ipam(call, Command::Del);
        if conf.ip_masq {
            let _ = masquerade::teardown(call);
        }
    })?;
    if call.conf.dns_given {
        result.dns = call.conf.dns.clone();
    }
    Ok(result)
}

fn attach(
    call: &Call<'_>,
    conf: &Conf,
    host: &mut Handle,
    result: &mut CniResult,
    made: &mut Option<IfIndex>,
) -> Result<()> {
    if result.ips.is_empty() {
        return Err(Error::internal("IPAM plugin returned missing IP config"));
    }
    for v4 in [true, false] {
        if result.ips.iter().any(|ip| ip.address.addr().is_ipv4() == v4) {
            ipconf::enable_forwarding(host, v4).context("could not enable IP forwarding")?;
        }
    }
    let ns = ipconf::open_netns(call)?;
    let mut inside = Handle::new_in(&ns)?;
    let wanted = Wanted { ifname: &call.env.ifname, mtu: conf.mtu, mac: None, master: None };
    let pair = veth::make(host, &mut inside, &ns, &wanted)?;
    *made = Some(pair.host.index);
    trace::step(|| format!("veth pair {} made", pair.host.name));
    result.interfaces = vec![
        Interface { name: pair.host.name.clone(), mac: mac_text(&pair.host), ..Interface::default() },
        Interface {
            name: call.env.ifname.clone(),
            mac: mac_text(&pair.container),
            sandbox: call.env.netns.clone(),
            ..Interface::default()
        },
    ];
    for ip in &mut result.ips {
        ip.interface = Some(CONTAINER);
    }
    let gateways: Vec<(IpNet, IpAddr)> = result
        .ips
        .iter()
        .map(|ip| {
            ip.gateway
                .map(|gateway| (ip.address, gateway))
                .ok_or_else(|| Error::internal(format!("IPAM plugin returned no gateway for {}", ip.address)))
        })
        .collect::<Result<_>>()?;
    configure_container(call, &ns, &mut inside, pair.container.index, &pair, result, &gateways)?;
    configure_host(host, pair.host.index, &gateways)?;
    if conf.ip_masq {
        masquerade::setup(call, conf.backend.as_deref(), &result.ips)?;
    }
    // Until the kernel has seen its carrier the host's end drops what is sent to the container.
    ipconf::wait_until_up(host, pair.host.index)?;
    Ok(())
}

/// The container reaches its whole subnet, the gateway first, over the cable.
fn configure_container(
    call: &Call<'_>,
    ns: &NetNs,
    inside: &mut Handle,
    index: IfIndex,
    pair: &veth::Pair,
    result: &CniResult,
    gateways: &[(IpNet, IpAddr)],
) -> Result<()> {
    ipconf::configure(inside, ns, &pair.container, result, Dad::Skip)?;
    for (address, gateway) in gateways {
        let source = address.addr();
        let subnet = Route::to(address.trunc()).dev(index).scope(RouteScope::Nowhere);
        match inside.route_del(&subnet) {
            Err(err) if !err.is_not_found() => {
                return Err(err).with_context(|| format!("failed to delete route of {address}"));
            }
            _ => {}
        }
        let via = Route::to(IpNet::from(*gateway)).dev(index).src(source).scope(RouteScope::Link);
        let rest =
            Route::to(address.trunc()).via(*gateway).dev(index).src(source).scope(RouteScope::Universe);
        for route in [via, rest] {
            inside
                .route_prepend(&route)
                .with_context(|| format!("failed to add route on {}", call.env.ifname))?;
        }
    }
    Ok(())
}

fn configure_host(host: &mut Handle, index: IfIndex, gateways: &[(IpNet, IpAddr)]) -> Result<()> {
    for (address, gateway) in gateways {
        host.addr_add(index, &Address::new(IpNet::from(*gateway)).nodad())
            .with_context(|| format!("failed to add IP addr {gateway} to veth"))?;
        if gateway.is_ipv6() {
            ipconf::wait_until_local(host, *gateway)?;
        }
        let route = Route::to(IpNet::from(address.addr())).dev(index).scope(RouteScope::Host);
        match host.route_prepend(&route) {
            Err(err) if !err.already_exists() => {
                return Err(err)
                    .with_context(|| format!("failed to add route on host to {}", address.addr()));
            }
            _ => {}
        }
    }
    Ok(())
}

fn del(call: &Call<'_>) -> Result<()> {
    let conf = Conf::load(call)?;
    ipam(call, Command::Del)?;
    super::delete_link(call)?;
    if conf.ip_masq {
        masquerade::teardown(call)?;
    }
    Ok(())
}

fn check(call: &Call<'_>) -> Result<()> {
    Conf::load(call)?;
    let ns = ipconf::open_netns(call)?;
    ipam(call, Command::Check)?;
    let result = required_result(call, "ptp: Required prevResult missing")?;
    let mut inside = Handle::new_in(&ns)?;
    let link = container_link(call, &mut inside, &result, "veth")?;
    ipconf::check(&mut inside, &link, &result, true)
}
