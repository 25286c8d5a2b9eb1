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
use ipnet::IpNet;

use self::plane::{Plane, Spec};
use super::keeper::Keeper;
use super::kernel::Scope;
use super::leases::Method;
use super::lock::{DeviceLock, LOCK_DIR, Owner};
use super::mtu::{self, UDP_OVER_V4, UDP_OVER_V6, VXLAN_FRAME};
use super::peers::{Mapping, Table};
use super::vtep::VtepData;
use super::{Backend, BackendError, Context, Report, kernel, vtep};
use crate::handover::{Handed, HandedPlane, PlaneWish};
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
    /// Plain routes to direct neighbours, more specific than the overlay's. Without `DirectRouting` it wants none, and so
    /// removes those of an earlier run.
    direct: Keeper,
    /// The last failure of keeping them, so that it is logged once.
    direct_failure: Option<String>,
}

impl Inner {
    /// What is ours beside the planes' devices, which mend themselves.
    fn scope(&self, context: &Context) -> Scope {
        let own = self.lease.as_ref().map(|lease| lease.key);
        let own = own.iter().flat_map(|key| key.v4.map(IpNet::V4).into_iter().chain(key.v6.map(IpNet::V6)));
        Scope {
            own: own.collect(),
            reserved: self.planes.iter().map(Plane::ifindex).collect(),
            external: context.external.index,
            ..Scope::default()
        }
    }

    /// Lets direct routes follow the leases, where they are asked for.
    fn apply_direct(&mut self, netlink: &mut Netlink, context: &Context, events: &[Event]) {
        if direct_routing(context) {
            let scope = self.scope(context);
            self.direct.apply(netlink, method(context), &scope, events.to_vec());
        }
    }
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
        let mtu = specs.iter().map(|spec| spec.mtu).min().unwrap_or_default();
        let rows = EngineConfig { workers, ..EngineConfig::new(Encap::Udp, specs[0].bind, 0) }.worker_count();
        let inner = Inner {
            table: Table::new(mapping, rows),
            planes: Vec::new(),
            lease: None,
            direct: Keeper::default(),
            direct_failure: None,
        };
        let shared = Shared { kind: context.net.backend.kind.name(), mtu, inner: Mutex::new(inner) };
        let mut backend =
            Self { netlink: Netlink::new()?, context, specs, locks: Vec::new(), shared: Arc::new(shared) };
        if !backend.context.succeeds {
            backend.lock_devices()?;
        }
        Ok(backend)
    }

    fn owner(&self) -> Owner {
        let options = &self.context.options;
        Owner {
            pid: std::process::id(),
            admin_socket: options.admin_socket.display().to_string(),
            subnet_file: options.subnet_file.display().to_string(),
        }
    }

    fn lock_devices(&mut self) -> Result<(), BackendError> {
        let owner = self.owner();
        let take = |spec: &Spec| DeviceLock::take(Path::new(LOCK_DIR), &spec.device, &owner);
        self.locks = self.specs.iter().map(take).collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Starts every plane with what is known of the other nodes, on what was handed over for it, if anything.
    fn start_planes(&mut self, lease: &Lease, mut handed: Vec<HandedPlane>) -> Result<(), BackendError> {
        let (v4, v6) = (self.context.net.ipv4.is_some(), self.context.net.ipv6.is_some());
        kernel::warn_unless_forwarding(v4, v6);
        let engine = choice::engine(&self.context);
        let mut planes = Vec::new();
        for (at, spec) in self.specs.iter().enumerate() {
            let known = self.shared.lock().table.all_in_force(at);
            let ends = handed.iter().position(|plane| plane.device == spec.device);
            let ends = ends.map(|at| handed.swap_remove(at).ends);
            planes.push(Plane::start(&mut self.netlink, spec.clone(), &engine, lease, &known, ends)?);
        }
        let mut inner = self.shared.lock();
        inner.planes = planes;
        inner.lease = Some(lease.clone());
        Ok(())
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
            previous_networks: context.previous_networks.clone(),
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
            previous_networks: context.previous_networks.clone(),
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
    let spec = Spec {
        device: "flannel0".into(),
        networks,
        previous_networks: context.previous_networks.clone(),
        bind,
        mtu,
        vtep: None,
    };
    Ok((vec![spec], Mapping::Udp { port: udp.port, outer_v6 }))
}

fn direct_routing(context: &Context) -> bool {
    match &context.net.backend.kind {
        BackendKind::Vxlan(vxlan) => vxlan.direct_routing,
        BackendKind::Udp(udp) => udp.direct_routing,
        _ => false,
    }
}

fn method(context: &Context) -> Method {
    Method::DirectOnly { backend_type: context.net.backend.kind.lease_type() }
}

/// Puts the plain routes to direct neighbours right; returns what was done.
fn repair_direct(netlink: &mut Netlink, context: &Context, inner: &mut Inner) -> Vec<String> {
    let scope = inner.scope(context);
    let (done, failure) = match inner.direct.repair(netlink, method(context), &scope) {
        Ok(changes) => (super::summary(&changes), None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    if let Some(error) = failure.as_ref().filter(|_| failure != inner.direct_failure) {
        tracing::error!("{error}; it is tried again");
    }
    inner.direct_failure = failure;
    done
}

impl Backend for Userspace {
    fn public_attrs(&self) -> LeaseAttrs {
        self.context.public_attrs()
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
            let mac = vtep::choose_mac(&mut self.netlink, &mut self.context.state, &device, leased)?;
            let data = VtepData { mac, ..vtep };
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
        if self.locks.is_empty() {
            self.lock_devices()?;
        }
        self.start_planes(lease, Vec::new())
    }

    fn prepare(&mut self, events: Vec<Event>) -> Vec<Event> {
        let mut inner = self.shared.lock();
        inner.apply_direct(&mut self.netlink, &self.context, &events);
        for event in events {
            inner.table.apply(event);
        }
        Vec::new()
    }

    fn planes(&self) -> Vec<PlaneWish> {
        let workers = choice::workers(&self.context);
        let workers = EngineConfig { workers, ..EngineConfig::new(Encap::Udp, self.specs[0].bind, 0) };
        let wish = |spec: &Spec| PlaneWish {
            device: spec.device.clone(),
            bind: spec.bind,
            workers: workers.worker_count(),
        };
        self.specs.iter().map(wish).collect()
    }

    fn take_over(&mut self, lease: &Lease, handed: Handed) -> Result<(), BackendError> {
        self.start_planes(lease, handed.planes)?;
        let owner = self.owner();
        for file in handed.locks {
            match DeviceLock::of(file, &owner) {
                Ok(lock) => self.locks.push(lock),
                Err(error) => tracing::warn!("note this process as owner of a device lock: {error}"),
            }
        }
        Ok(())
    }

    fn release(&mut self) -> Handed {
        let mut inner = self.shared.lock();
        let release =
            |plane: &mut Plane| HandedPlane { device: plane.device().to_owned(), ends: plane.release() };
        let planes = inner.planes.iter_mut().map(release).collect();
        let locks = self.locks.iter().filter_map(|lock| lock.share().ok()).collect();
        Handed { planes, locks }
    }

    fn take_back(&mut self, handed: Handed) {
        let engine = choice::engine(&self.context);
        let mut inner = self.shared.lock();
        let Inner { planes, lease, .. } = &mut *inner;
        let Some(lease) = lease.as_ref() else { return };
        for (plane, handed) in planes.iter_mut().zip(handed.planes) {
            if let Err(error) = plane.take_back(&engine, lease, handed.ends) {
                tracing::warn!("{error}: it is started anew");
            }
        }
    }

    fn apply(&mut self, events: Vec<Event>) {
        let mut inner = self.shared.lock();
        inner.apply_direct(&mut self.netlink, &self.context, &events);
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

    fn synced(&mut self) {
        self.shared.lock().direct.synced();
        for done in self.repair() {
            tracing::info!("brought to the state of the leases: {done}");
        }
    }

    fn repair(&mut self) -> Vec<String> {
        let engine = choice::engine(&self.context);
        let mut inner = self.shared.lock();
        let mut done = repair_direct(&mut self.netlink, &self.context, &mut inner);
        let Inner { table, planes, lease, .. } = &mut *inner;
        let Some(lease) = lease.as_ref() else { return Vec::new() };
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
