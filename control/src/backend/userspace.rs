//! `vxlan` and `udp` with felt's own packet loop.
//!
//! A plane is a TUN device with a packet engine on it. `udp` has one plane for both families; `vxlan` has one per family,
//! since IPv6 inside travels over IPv6 outside. The whole overlay network is routed to the plane's device, so packets for
//! subnets nobody holds reach the engine and are answered by it.
//!
//! Devices are persistent: after a crash address, MTU and routes are still there, the next start attaches to them and
//! forwarding resumes without any route having changed.

mod choice;
mod plane;
mod report;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use felt_dataplane::config::{Encap, EngineConfig};
use felt_dataplane::fib::FibChange;
use felt_hostnet::MacAddr;
use felt_hostnet::netlink::Handle as Netlink;

use self::plane::{Plane, Spec};
use super::lock::{DeviceLock, LOCK_DIR, Owner};
use super::mtu::{self, UDP_OVER_V4, UDP_OVER_V6, VXLAN_FRAME};
use super::peers::{Mapping, Table};
use super::vtep::VtepData;
use super::{Backend, BackendError, Context, Report, kernel};
use crate::lease::{Event, Lease, LeaseAttrs};
use crate::netconfig::{BackendKind, Udp, Vxlan};

/// The backend.
pub(super) struct Userspace {
    context: Context,
    specs: Vec<Spec>,
    locks: Vec<DeviceLock>,
    netlink: Netlink,
    shared: Arc<Shared>,
}

/// What the report sees as well.
struct Shared {
    kind: &'static str,
    mtu: u32,
    inner: Mutex<Inner>,
}

struct Inner {
    table: Table,
    planes: Vec<Plane>,
    lease: Option<Lease>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic while holding the lock leaves at worst a change unpublished, which the next repair mends.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Userspace {
    /// Checks that the configuration can be met on this machine and takes the device locks. Makes no device yet.
    pub(super) fn new(context: Context) -> Result<Self, BackendError> {
        let workers = choice::workers(&context);
        let (specs, mapping) = match context.net.backend.kind.clone() {
            BackendKind::Vxlan(vxlan) => vxlan_specs(&context, &vxlan)?,
            BackendKind::Udp(udp) => udp_specs(&context, &udp)?,
            other => {
                return Err(BackendError::Unsupported(format!(
                    "backend {} has no packet loop",
                    other.name()
                )));
            }
        };
        let owner = Owner {
            pid: std::process::id(),
            admin_socket: context.options.admin_socket.display().to_string(),
            subnet_file: context.options.subnet_file.display().to_string(),
        };
        let locks = specs
            .iter()
            .map(|spec| DeviceLock::take(Path::new(LOCK_DIR), &spec.device, &owner))
            .collect::<Result<_, _>>()?;
        let mtu = specs.iter().map(|spec| spec.mtu).min().unwrap_or_default();
        let rows = EngineConfig { workers, ..EngineConfig::new(Encap::Udp, specs[0].bind, 0) }.worker_count();
        let inner = Inner { table: Table::new(mapping, rows), planes: Vec::new(), lease: None };
        let shared = Shared { kind: context.net.backend.kind.name(), mtu, inner: Mutex::new(inner) };
        Ok(Self { netlink: Netlink::new()?, context, specs, locks, shared: Arc::new(shared) })
    }

    /// The VTEP MAC of `device`: the own lease's, else a left-over device's, else the remembered one, else a new one.
    fn vtep_mac(&mut self, device: &str, leased: Option<VtepData>) -> Result<MacAddr, BackendError> {
        let left_over = match self.netlink.link_by_name(device) {
            Ok(link) if link.is_kind("vxlan") => link.mac.filter(|mac| mac.is_unicast()),
            Ok(_) => None,
            Err(error) if error.is_not_found() => None,
            Err(error) => return Err(error.into()),
        };
        let remembered = self.context.state.vtep_mac(device);
        let mac = leased
            .map(|data| data.mac)
            .or(left_over)
            .or(remembered)
            .unwrap_or_else(|| MacAddr::local_from(rand::random()));
        if let Err(error) = self.context.state.set_vtep_mac(device, mac) {
            tracing::warn!("{error}: the VTEP MAC {mac} of {device} is kept by the lease alone");
        }
        Ok(mac)
    }
}

/// Planes of `vxlan`: `flannel.<VNI>` and `flannel-v6.<VNI>`.
fn vxlan_specs(context: &Context, vxlan: &Vxlan) -> Result<(Vec<Spec>, Mapping), BackendError> {
    if vxlan.gbp {
        tracing::warn!("GBP: frames with a policy tag are accepted, the tag is ignored in userspace");
    }
    if vxlan.learning {
        tracing::warn!("Learning has no effect in userspace: peers are known from their leases");
    }
    let below = vxlan.mtu.map_or(context.external.mtu, u32::from);
    let mut specs = Vec::new();
    let (mut v4, mut v6) = (None, None);
    if let Some(network) = context.net.ipv4 {
        v4 = Some(specs.len());
        specs.push(Spec {
            device: format!("flannel.{}", vxlan.vni),
            networks: vec![network.into()],
            bind: SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), vxlan.port),
            mtu: mtu::inner(below, UDP_OVER_V4 + VXLAN_FRAME, false)?,
            vtep: Some(VtepData { vni: vxlan.vni, mac: MacAddr::default() }),
        });
    }
    if let Some(network) = context.net.ipv6 {
        v6 = Some(specs.len());
        specs.push(Spec {
            device: format!("flannel-v6.{}", vxlan.vni),
            networks: vec![network.into()],
            bind: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), vxlan.port),
            mtu: mtu::inner(below, UDP_OVER_V6 + VXLAN_FRAME, true)?,
            vtep: Some(VtepData { vni: vxlan.vni, mac: MacAddr::default() }),
        });
    }
    Ok((specs, Mapping::Vxlan { port: vxlan.port, v4, v6 }))
}

/// The plane of `udp`: `flannel0` with both families, over IPv4 where there is one.
fn udp_specs(context: &Context, udp: &Udp) -> Result<(Vec<Spec>, Mapping), BackendError> {
    let external = &context.external;
    let (bind, overhead, outer_v6) = match (external.v4, external.v6) {
        (Some(ip), _) => (SocketAddr::new(ip.into(), udp.port), UDP_OVER_V4, false),
        (None, Some(ip)) => (SocketAddr::new(ip.into(), udp.port), UDP_OVER_V6, true),
        (None, None) => {
            return Err(BackendError::Unsupported("the external interface has no address".into()));
        }
    };
    let networks: Vec<_> =
        context.net.ipv4.map(Into::into).into_iter().chain(context.net.ipv6.map(Into::into)).collect();
    let mtu = mtu::inner(external.mtu, overhead, context.net.ipv6.is_some())?;
    let spec = Spec { device: "flannel0".into(), networks, bind, mtu, vtep: None };
    Ok((vec![spec], Mapping::Udp { port: udp.port, outer_v6 }))
}

impl Backend for Userspace {
    fn public_attrs(&self) -> LeaseAttrs {
        let external = &self.context.external;
        LeaseAttrs {
            public_ip: external.public_v4,
            public_ipv6: external.public_v6,
            backend_type: self.context.net.backend.kind.lease_type().into(),
            ..LeaseAttrs::default()
        }
    }

    fn attrs(&mut self, existing: Option<&Lease>) -> Result<LeaseAttrs, BackendError> {
        let mut attrs = self.public_attrs();
        for at in 0..self.specs.len() {
            let Some(vtep) = self.specs[at].vtep else { continue };
            let v4 = self.specs[at].bind.is_ipv4();
            let leased = existing.filter(|lease| lease.attrs.backend_type == "vxlan").and_then(|lease| {
                let data = if v4 { &lease.attrs.backend_data } else { &lease.attrs.backend_v6_data };
                VtepData::decode(data.as_deref()).ok()
            });
            let device = self.specs[at].device.clone();
            let data = VtepData { mac: self.vtep_mac(&device, leased)?, ..vtep };
            self.specs[at].vtep = Some(data);
            if v4 {
                attrs.backend_data = Some(data.encode());
            } else {
                attrs.backend_v6_data = Some(data.encode());
            }
        }
        Ok(attrs)
    }

    fn start(&mut self, lease: &Lease) -> Result<(), BackendError> {
        kernel::warn_unless_forwarding(self.context.net.ipv4.is_some(), self.context.net.ipv6.is_some());
        let engine = choice::engine(&self.context);
        let mut planes = Vec::new();
        for spec in &self.specs {
            planes.push(Plane::start(&mut self.netlink, spec.clone(), &engine, lease)?);
        }
        let mut inner = self.shared.lock();
        inner.planes = planes;
        inner.lease = Some(lease.clone());
        Ok(())
    }

    fn apply(&mut self, events: Vec<Event>) {
        let mut inner = self.shared.lock();
        let Inner { table, planes, .. } = &mut *inner;
        let mut changes: Vec<Vec<FibChange>> = planes.iter().map(|_| Vec::new()).collect();
        for event in events {
            for (plane, change) in table.apply(event) {
                if let Some(changes) = changes.get_mut(plane) {
                    changes.push(change);
                }
            }
        }
        for (plane, changes) in planes.iter_mut().zip(changes) {
            plane.publish(&changes);
        }
    }

    fn repair(&mut self) -> Vec<String> {
        let engine = choice::engine(&self.context);
        let mut inner = self.shared.lock();
        let Inner { table, planes, lease } = &mut *inner;
        let Some(lease) = lease.as_ref() else { return Vec::new() };
        let mut done = Vec::new();
        for (at, plane) in planes.iter_mut().enumerate() {
            match plane.repair(&mut self.netlink, &engine, lease) {
                Ok(repair) => {
                    if repair.restarted {
                        plane.publish(&table.all_in_force(at));
                    }
                    done.extend(repair.done);
                }
                Err(error) => tracing::warn!("repair of {} failed, will try again: {error}", plane.device()),
            }
        }
        done
    }

    fn mtu(&self) -> u32 {
        self.shared.mtu
    }

    fn report(&self) -> Arc<dyn Report> {
        Arc::clone(&self.shared) as Arc<dyn Report>
    }

    fn stop(&mut self) {
        let mut inner = self.shared.lock();
        for plane in &mut inner.planes {
            plane.stop();
        }
        drop(inner);
        self.locks.clear();
    }
}
