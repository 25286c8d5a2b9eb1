//! Backends that leave the packets to the kernel: `vxlan` with a kernel device, `host-gw`, `ipip`.
//!
//! ```text
//!   leases -> leases.rs: Tables -> keeper.rs -> routes, neighbours, FDB
//!   own lease -> device.rs -> flannel.<VNI>, flannel-v6.<VNI>, flannel.ipip
//! ```
//!
//! A device or the link below it that vanished is made again with the same hardware address as soon as that is possible,
//! and everything on it with it.

use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use felt_hostnet::netlink::{Handle as Netlink, IpTunnelConfig, VxlanConfig};
use ipnet::IpNet;

use super::device::{Kind, Spec};
use super::keeper::Keeper;
use super::kernel::{self, Scope};
use super::leases::Method;
use super::lock::{DeviceLock, LOCK_DIR, Owner};
use super::mtu::{self, IP_OVER_V4, UDP_OVER_V4, UDP_OVER_V6, VXLAN_FRAME};
use super::vtep::{self, VtepData};
use super::{Backend, BackendError, Context, Report};
use crate::api;
use crate::lease::{Event, Lease, LeaseAttrs};
use crate::netconfig::{BackendKind, Vxlan};

/// The backend.
pub(super) struct Routed {
    context: Context,
    netlink: Netlink,
    locks: Vec<DeviceLock>,
    shared: Arc<Shared>,
}

struct Shared {
    kind: &'static str,
    dataplane: &'static str,
    mtu: u32,
    inner: Mutex<Inner>,
}

struct Inner {
    specs: Vec<Spec>,
    /// Interface index of each device; 0 while it is not there.
    indices: Vec<u32>,
    lease: Option<Lease>,
    keeper: Keeper,
    /// The last repair's failure, for readiness and so that it is logged once.
    broken: Option<String>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while holding the lock leaves at worst a change undone, which the next repair mends.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Routed {
    /// Checks that the configuration can be met and takes the device locks. Makes no device yet.
    pub(super) fn new(context: Context) -> Result<Self, BackendError> {
        let mut netlink = Netlink::new()?;
        let (specs, mtu) = match context.net.backend.kind.clone() {
            BackendKind::Vxlan(vxlan) => vxlan_specs(&context, &vxlan, &mut netlink)?,
            BackendKind::Ipip { .. } => ipip_specs(&context)?,
            BackendKind::HostGw => (Vec::new(), host_gw_mtu(&context)?),
            other => {
                return Err(BackendError::Unsupported(format!("backend {} has no routes", other.name())));
            }
        };
        let owner = Owner {
            pid: std::process::id(),
            admin_socket: context.options.admin_socket.display().to_string(),
            subnet_file: context.options.subnet_file.display().to_string(),
        };
        let names = specs.iter().map(|spec| spec.name.as_str());
        let locks = names
            .chain(specs.is_empty().then_some("host-gw"))
            .map(|name| DeviceLock::take(Path::new(LOCK_DIR), name, &owner))
            .collect::<Result<_, _>>()?;
        let shared = Shared {
            kind: context.net.backend.kind.name(),
            dataplane: if specs.is_empty() { "none" } else { "kernel" },
            mtu,
            inner: Mutex::new(Inner {
                indices: vec![0; specs.len()],
                specs,
                lease: None,
                keeper: Keeper::default(),
                broken: None,
            }),
        };
        Ok(Self { context, netlink, locks, shared: Arc::new(shared) })
    }
}

fn vxlan_specs(
    context: &Context,
    vxlan: &Vxlan,
    netlink: &mut Netlink,
) -> Result<(Vec<Spec>, u32), BackendError> {
    let external = &context.external;
    // The kernel takes no more than the link below leaves.
    let below = vxlan.mtu.map_or(external.mtu, |mtu| u32::from(mtu).min(external.mtu));
    let mut here = |public: Option<IpAddr>, own: Option<IpAddr>| -> Result<Option<IpAddr>, BackendError> {
        // A public address behind NAT is not on this machine and could not be sent from.
        let addresses = netlink.addrs(None, None)?;
        Ok(public.filter(|ip| addresses.iter().any(|found| found.net.addr() == *ip)).or(own))
    };
    let spec = |name: String, v4: bool, overhead: u32, local: Option<IpAddr>| -> Result<Spec, BackendError> {
        let config = VxlanConfig {
            vni: vxlan.vni,
            local,
            port: Some(vxlan.port),
            learning: Some(vxlan.learning),
            gbp: vxlan.gbp,
            ..VxlanConfig::default()
        };
        let mtu = mtu::inner(below, overhead + VXLAN_FRAME, !v4)?;
        Ok(Spec { name, kind: Kind::Vxlan { config, mac: Default::default() }, v4, mtu })
    };
    let mut specs = Vec::new();
    if context.net.ipv4.is_some() {
        let local = here(external.public_v4.map(IpAddr::V4), external.v4.map(IpAddr::V4))?;
        specs.push(spec(format!("flannel.{}", vxlan.vni), true, UDP_OVER_V4, local)?);
    }
    if context.net.ipv6.is_some() {
        let local = here(external.public_v6.map(IpAddr::V6), external.v6.map(IpAddr::V6))?;
        specs.push(spec(format!("flannel-v6.{}", vxlan.vni), false, UDP_OVER_V6, local)?);
    }
    let mtu = specs.iter().map(|spec| spec.mtu).min().unwrap_or_default();
    Ok((specs, mtu))
}

fn ipip_specs(context: &Context) -> Result<(Vec<Spec>, u32), BackendError> {
    let external = &context.external;
    if context.net.ipv4.is_none() || context.net.ipv6.is_some() {
        return Err(BackendError::Unsupported(
            "ipip carries IPv4 only; take vxlan or host-gw for a network with IPv6".into(),
        ));
    }
    let mtu = mtu::inner(external.mtu, IP_OVER_V4, false)?;
    let config = IpTunnelConfig {
        local: external.v4,
        // The inner TTL, and no path MTU discovery of the outer packet, as flannel has it.
        ttl: Some(0),
        pmtu_discovery: Some(false),
        ..IpTunnelConfig::default()
    };
    Ok((vec![Spec { name: "flannel.ipip".into(), kind: Kind::Ipip(config), v4: true, mtu }], mtu))
}

/// host-gw sends bare packets between nodes, so the addresses nodes publish must be their own.
fn host_gw_mtu(context: &Context) -> Result<u32, BackendError> {
    let external = &context.external;
    let text = |ip: Option<IpAddr>| ip.map_or_else(|| "none".to_owned(), |ip| ip.to_string());
    let pairs = [
        (external.v4.map(IpAddr::V4), external.public_v4.map(IpAddr::V4)),
        (external.v6.map(IpAddr::V6), external.public_v6.map(IpAddr::V6)),
    ];
    for (own, public) in pairs {
        if own != public {
            return Err(BackendError::Unsupported(format!(
                "host-gw works between direct neighbours only: the public address {} must be the address of {}, which is {}",
                text(public),
                external.name,
                text(own)
            )));
        }
    }
    Ok(external.mtu)
}

impl Inner {
    /// Makes and mends the devices; returns what was done.
    fn devices(&mut self, netlink: &mut Netlink, external: &str) -> Result<Vec<String>, BackendError> {
        let Some(lease) = &self.lease else { return Ok(Vec::new()) };
        let mut done = Vec::new();
        for (spec, index) in self.specs.iter().zip(&mut self.indices) {
            let (now, what) = spec.ensure(netlink, external, lease)?;
            *index = now;
            done.extend(what);
        }
        Ok(done)
    }

    fn index(&self, v4: bool) -> Option<u32> {
        self.specs.iter().zip(&self.indices).find(|(spec, _)| spec.v4 == v4).map(|(_, index)| *index)
    }

    fn method(&self, context: &Context, external: u32) -> Method {
        match &context.net.backend.kind {
            BackendKind::Vxlan(vxlan) => {
                Method::Vxlan { v4: self.index(true), v6: self.index(false), direct: vxlan.direct_routing }
            }
            BackendKind::Ipip { direct_routing } => {
                Method::Ipip { device: self.index(true).unwrap_or(0), direct: *direct_routing }
            }
            _ => Method::HostGw { external },
        }
    }

    fn scope(&self, context: &Context, external: u32) -> Scope {
        let own = self.lease.as_ref().map(|lease| lease.key);
        Scope {
            networks: context.networks(),
            own: own
                .iter()
                .flat_map(|key| key.v4.map(IpNet::V4).into_iter().chain(key.v6.map(IpNet::V6)))
                .collect(),
            devices: self.indices.clone(),
            reserved: Vec::new(),
            external,
        }
    }

    fn repair(&mut self, netlink: &mut Netlink, context: &Context) -> Result<Vec<String>, BackendError> {
        let external = &context.external.name;
        let mut done = self.devices(netlink, external)?;
        let index = netlink.link_by_name(external)?.index.0;
        let changes =
            self.keeper.repair(netlink, self.method(context, index), &self.scope(context, index))?;
        done.extend(super::summary(&changes));
        Ok(done)
    }
}

impl Backend for Routed {
    fn public_attrs(&self) -> LeaseAttrs {
        self.context.public_attrs()
    }

    fn attrs(&mut self, existing: Option<&Lease>) -> Result<LeaseAttrs, BackendError> {
        let mut attrs = self.public_attrs();
        let mut inner = self.shared.lock();
        for spec in &mut inner.specs {
            let Kind::Vxlan { config, mac } = &mut spec.kind else { continue };
            let leased = existing.filter(|lease| lease.attrs.backend_type == "vxlan").and_then(|lease| {
                let data = if spec.v4 { &lease.attrs.backend_data } else { &lease.attrs.backend_v6_data };
                VtepData::decode(data.as_deref()).ok()
            });
            *mac = vtep::choose_mac(&mut self.netlink, &mut self.context.state, &spec.name, leased)?;
            let data = VtepData { vni: config.vni, mac: *mac }.encode();
            if spec.v4 {
                attrs.backend_data = Some(data);
            } else {
                attrs.backend_v6_data = Some(data);
            }
        }
        Ok(attrs)
    }

    fn start(&mut self, lease: &Lease) -> Result<(), BackendError> {
        kernel::warn_unless_forwarding(self.context.net.ipv4.is_some(), self.context.net.ipv6.is_some());
        let mut inner = self.shared.lock();
        inner.lease = Some(lease.clone());
        for done in inner.devices(&mut self.netlink, &self.context.external.name)? {
            tracing::info!("{done}");
        }
        Ok(())
    }

    fn apply(&mut self, events: Vec<Event>) {
        let mut inner = self.shared.lock();
        let index = self.netlink.link_by_name(&self.context.external.name).map_or(0, |link| link.index.0);
        let (method, scope) = (inner.method(&self.context, index), inner.scope(&self.context, index));
        inner.keeper.apply(&mut self.netlink, method, &scope, events);
    }

    fn synced(&mut self) {
        self.shared.lock().keeper.synced();
        for done in self.repair() {
            tracing::info!("brought to the state of the leases: {done}");
        }
    }

    fn repair(&mut self) -> Vec<String> {
        let mut inner = self.shared.lock();
        let outcome = inner.repair(&mut self.netlink, &self.context);
        let (done, broken) = match outcome {
            Ok(done) => (done, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        if let Some(error) = broken.as_ref().filter(|_| broken != inner.broken) {
            tracing::error!("{error}; it is tried again");
        }
        inner.broken = broken;
        done
    }

    fn mtu(&self) -> u32 {
        self.shared.mtu
    }

    fn report(&self) -> Arc<dyn Report> {
        Arc::clone(&self.shared) as Arc<dyn Report>
    }

    fn stop(&mut self) {
        self.locks.clear();
    }
}

impl Report for Shared {
    fn backend(&self) -> api::Backend {
        let inner = self.lock();
        let lease = inner.lease.as_ref();
        let devices = inner.specs.iter().zip(&inner.indices).map(|(spec, index)| {
            let (vni, port) = match &spec.kind {
                Kind::Vxlan { config, .. } => (Some(config.vni), config.port),
                Kind::Ipip(_) => (None, None),
            };
            let address = lease.and_then(|lease| match spec.v4 {
                true => lease.key.v4.map(|net| net.addr().into()),
                false => lease.key.v6.map(|net| net.addr().into()),
            });
            api::Device {
                name: spec.name.clone(),
                index: *index,
                mtu: spec.mtu,
                addresses: address.into_iter().collect(),
                vni,
                port,
                vtep_mac: spec.mac().map(|mac| mac.to_string()),
                workers: None,
                offload: Default::default(),
                alive: inner.broken.is_none() && *index != 0,
            }
        });
        api::Backend {
            kind: self.kind.into(),
            dataplane: self.dataplane.into(),
            mtu: self.mtu,
            devices: devices.collect(),
        }
    }

    fn peers(&self) -> Vec<api::Peer> {
        self.lock().keeper.report()
    }

    fn engines(&self) -> Vec<api::Engine> {
        Vec::new()
    }

    fn alive(&self) -> Result<(), String> {
        self.lock().broken.clone().map_or(Ok(()), Err)
    }
}
