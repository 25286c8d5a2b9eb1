//! One TUN device with its packet engine.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use felt_dataplane::config::{Encap, EngineConfig};
use felt_dataplane::device::{TunDevice, TunOptions};
use felt_dataplane::engine::{Ends, Engine, Handle as EngineHandle};
use felt_dataplane::fib::{Fib, FibChange, Prefix};
use felt_dataplane::wire::{MacAddr, Vni};
use felt_hostnet::TolerateAbsence as _;
use felt_hostnet::netlink::{Handle as Netlink, IfIndex, LinkDetail};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use super::choice::EngineChoice;
use crate::backend::kernel::{self, Scope};
use crate::backend::vtep::VtepData;
use crate::backend::{BackendError, foreign};
use crate::lease::Lease;
use crate::reconcile::{Device, Route};

/// Packets the TUN holds between two reads; the kernel's 500 overflows with bursts of several pods.
const TX_QUEUE_LEN: u32 = 2000;
/// A kernel vxlan device gives its port back a moment after it is deleted.
const PORT_WAIT: Duration = Duration::from_secs(1);

const VNI_ZERO: Vni = match Vni::new(0) {
    Some(vni) => vni,
    None => panic!("0 is a VNI"),
};

/// What a plane is, apart from the lease.
#[derive(Debug, Clone)]
pub(super) struct Spec {
    pub(super) device: String,
    /// Overlay networks routed to the device.
    pub(super) networks: Vec<IpNet>,
    /// Overlay networks of the run before, no longer routed to it.
    pub(super) previous_networks: Vec<IpNet>,
    pub(super) bind: SocketAddr,
    pub(super) mtu: u32,
    /// Own VTEP, for VXLAN.
    pub(super) vtep: Option<VtepData>,
}

/// A running plane.
pub(super) struct Plane {
    spec: Spec,
    ifindex: u32,
    engine: Option<EngineHandle>,
    workers: usize,
    fib: Fib,
}

/// What a repair came to.
pub(super) struct Repair {
    /// The engine is new and has an empty table.
    pub(super) restarted: bool,
    /// What was done, in words.
    pub(super) done: Vec<String>,
}

impl Plane {
    /// Makes or takes over the device and starts the engine on it, with the table `known`. With `ends` it goes on where
    /// another daemon stopped, first of all, since packets wait.
    pub(super) fn start(
        netlink: &mut Netlink,
        spec: Spec,
        choice: &EngineChoice,
        lease: &Lease,
        known: &[FibChange],
        ends: Option<Vec<Ends>>,
    ) -> Result<Self, BackendError> {
        let workers = engine_config(&spec, choice, lease).worker_count();
        let fib = Fib::new().with_changes(known);
        let (engine, ifindex) = match ends {
            Some(ends) => {
                let engine = resume(&spec, choice, lease, ends, fib.clone())?;
                let ifindex = netlink.link_by_name(&spec.device)?.index;
                kernel::reconcile(netlink, ifindex, &wanted(&spec, ifindex.0, lease), Some(&scope(&spec)))?;
                (engine, ifindex.0)
            }
            None => bring_up(netlink, &spec, choice, lease, &fib)?,
        };
        Ok(Self { spec, ifindex, engine: Some(engine), workers, fib })
    }

    /// Stops the engine and gives away what it worked on; packets wait there.
    pub(super) fn release(&mut self) -> Vec<Ends> {
        self.engine.take().map(EngineHandle::release).unwrap_or_default()
    }

    /// Goes on with what was released.
    pub(super) fn take_back(
        &mut self,
        choice: &EngineChoice,
        lease: &Lease,
        ends: Vec<Ends>,
    ) -> Result<(), BackendError> {
        self.engine = Some(resume(&self.spec, choice, lease, ends, self.fib.clone())?);
        Ok(())
    }

    pub(super) fn workers(&self) -> usize {
        self.workers
    }

    pub(super) fn device(&self) -> &str {
        &self.spec.device
    }

    pub(super) fn spec(&self) -> &Spec {
        &self.spec
    }

    pub(super) fn ifindex(&self) -> u32 {
        self.ifindex
    }

    pub(super) fn engine(&self) -> Option<&EngineHandle> {
        self.engine.as_ref()
    }

    /// Makes changes visible to the workers.
    pub(super) fn publish(&mut self, changes: &[FibChange]) {
        if changes.is_empty() {
            return;
        }
        self.fib = self.fib.with_changes(changes);
        if let Some(engine) = &self.engine {
            engine.publish(self.fib.clone());
        }
    }

    /// Restarts the engine when it or its device is gone, and puts addresses, MTU and routes right.
    pub(super) fn repair(
        &mut self,
        netlink: &mut Netlink,
        choice: &EngineChoice,
        lease: &Lease,
    ) -> Result<Repair, BackendError> {
        let device = &self.spec.device;
        let there = match netlink.link_by_name(device) {
            Ok(link) => link.index.0 == self.ifindex && link.is_kind("tun"),
            Err(error) if error.is_not_found() => false,
            Err(error) => return Err(error.into()),
        };
        if there && self.engine.as_ref().is_some_and(EngineHandle::is_alive) {
            let list = kernel::reconcile(
                netlink,
                IfIndex(self.ifindex),
                &wanted(&self.spec, self.ifindex, lease),
                Some(&scope(&self.spec)),
            )?;
            let done = list.iter().map(|change| format!("{device}: {change}")).collect();
            return Ok(Repair { restarted: false, done });
        }
        let why = if there { "its packet engine stopped" } else { "the device is gone" };
        let done = vec![format!("{device}: started again because {why}")];
        self.stop();
        let (engine, ifindex) = bring_up(netlink, &self.spec, choice, lease, &Fib::new())?;
        self.engine = Some(engine);
        self.ifindex = ifindex;
        self.fib = Fib::new();
        Ok(Repair { restarted: true, done })
    }

    /// Stops the engine; the device stays.
    pub(super) fn stop(&mut self) {
        if let Some(engine) = self.engine.take() {
            engine.stop();
        }
    }
}

/// Which routes on the device are ours.
fn scope(spec: &Spec) -> Scope {
    let networks = spec.networks.iter().chain(&spec.previous_networks).copied().collect();
    Scope { networks, ..Scope::default() }
}

/// State the device should have.
fn wanted(spec: &Spec, ifindex: u32, lease: &Lease) -> Device {
    let carries = |v4: bool| spec.networks.iter().any(|network| network.addr().is_ipv4() == v4);
    // The lease's network address stands for the node: peers route replies to it.
    let v4 = lease.key.v4.filter(|_| carries(true)).and_then(|net| Ipv4Net::new(net.addr(), 32).ok());
    let v6 = lease.key.v6.filter(|_| carries(false)).and_then(|net| Ipv6Net::new(net.addr(), 128).ok());
    Device {
        mac: None,
        mtu: spec.mtu,
        up: true,
        addresses: v4.map(IpNet::V4).into_iter().chain(v6.map(IpNet::V6)).collect(),
        routes: spec.networks.iter().map(|network| Route::direct(*network, ifindex)).collect(),
    }
}

fn resume(
    spec: &Spec,
    choice: &EngineChoice,
    lease: &Lease,
    ends: Vec<Ends>,
    fib: Fib,
) -> Result<EngineHandle, BackendError> {
    Engine::resume(engine_config(spec, choice, lease), &spec.device, ends, fib)
        .map_err(|error| BackendError::Engine { device: spec.device.clone(), reason: error.to_string() })
}

fn bring_up(
    netlink: &mut Netlink,
    spec: &Spec,
    choice: &EngineChoice,
    lease: &Lease,
    fib: &Fib,
) -> Result<(EngineHandle, u32), BackendError> {
    let replaced = make_room(netlink, &spec.device)?;
    let fail = |reason: String| BackendError::Engine { device: spec.device.clone(), reason };
    let deadline = Instant::now() + if replaced { PORT_WAIT } else { Duration::ZERO };
    loop {
        let options = TunOptions { persist: true, txqueuelen: Some(TX_QUEUE_LEN) };
        let config = engine_config(spec, choice, lease);
        let tun = TunDevice::open(&spec.device, config.worker_count(), &options)
            .map_err(|error| fail(error.to_string()))?;
        let ifindex = tun.ifindex();
        let carries = |v4: bool| spec.networks.iter().any(|network| network.addr().is_ipv4() == v4);
        kernel::tune_device(&spec.device, carries(true), carries(false));
        for change in
            kernel::reconcile(netlink, IfIndex(ifindex), &wanted(spec, ifindex, lease), Some(&scope(spec)))?
        {
            tracing::debug!("{}: {change}", spec.device);
        }
        match Engine::start_with(config, tun, fib.clone()) {
            Ok(engine) => return Ok((engine, ifindex)),
            Err(error) if Instant::now() < deadline => {
                tracing::debug!("{}: {error}, trying again", spec.device);
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(fail(error.to_string())),
        }
    }
}

fn engine_config(spec: &Spec, choice: &EngineChoice, lease: &Lease) -> EngineConfig {
    let encap = match spec.vtep {
        Some(vtep) => Encap::Vxlan {
            // The network config holds no VNI above 24 bits, so the mask changes nothing.
            vni: Vni::new(vtep.vni & Vni::MAX).unwrap_or(VNI_ZERO),
            local_mac: MacAddr(vtep.mac.octets()),
        },
        None => Encap::Udp,
    };
    let carries = |v4: bool| spec.networks.iter().any(|network| network.addr().is_ipv4() == v4);
    let v4 = lease.key.v4.filter(|_| carries(true));
    let v6 = lease.key.v6.filter(|_| carries(false));
    let own = v4.map(IpNet::V4).into_iter().chain(v6.map(IpNet::V6));
    EngineConfig {
        encap,
        bind: spec.bind,
        mtu: u16::try_from(spec.mtu).unwrap_or(u16::MAX),
        tunnel_v4: v4.map(|net| net.addr()),
        tunnel_v6: v6.map(|net| net.addr()),
        own_subnets: own.filter_map(|net| Prefix::new(net.addr(), net.prefix_len()).ok()).collect(),
        offload: choice.offload,
        workers: choice.workers,
        source_guard: choice.source_guard,
        accept_gbp: choice.accept_gbp,
        thread_name: spec.device.clone(),
    }
}

/// Takes away what would keep the TUN from being opened; says whether there was something.
fn make_room(netlink: &mut Netlink, device: &str) -> Result<bool, BackendError> {
    let link = match netlink.link_by_name(device) {
        Ok(link) => link,
        Err(error) if error.is_not_found() => return Ok(false),
        Err(error) => return Err(error.into()),
    };
    let what = match &link.detail {
        LinkDetail::Tun(tun) if !tun.tap && tun.multi_queue && tun.vnet_hdr => return Ok(false),
        LinkDetail::Tun(_) => "TUN device of another kind",
        LinkDetail::Vxlan(_) => "kernel vxlan device",
        _ => return Err(BackendError::Unsupported(foreign(&link))),
    };
    tracing::info!("replacing the {what} {device} left by an earlier run or by flannel");
    netlink.link_del(link.index).tolerate_absence()?;
    Ok(true)
}

/// The address ICMP answers come from, for the report.
pub(super) fn own_addresses(spec: &Spec, lease: &Lease) -> Vec<IpAddr> {
    wanted(spec, 0, lease).addresses.into_iter().map(|net| net.addr()).collect()
}
