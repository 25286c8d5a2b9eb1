//! What is compared: each system in a lab of its own, all labs up at once, so that rounds can be interleaved.
//!
//! ```text
//!   pod p1-1 ── cni0 ── [ system ] ── eth0 ═ underlay bridge ═ eth0 ── [ system ] ── cni0 ── pod p2-1
//! ```
//!
//! Only the part in brackets differs: bridge, pods, their MTU and the underlay are the same. An idle lab costs nothing
//! measurable, which is itself one of the figures.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::bench::iperf;
use crate::bins;
use crate::cmd;
use crate::daemon::{self, SUBNET_ENV};
use crate::netns::{Lifetime, NODE_BIN, Process};
use crate::pod::{self, NODE_CNI_BIN, Pod, REFERENCE_CNI_BIN, Runtime};
use crate::topology::{Backend, Lab, NodeKind, POD_NETWORK, Registry, Spec};

/// MTU of the underlay.
pub const UNDERLAY_MTU: u16 = 1500;
/// MTU of every system's pods: what the largest overhead, vxlan's, leaves.
pub const POD_MTU: u16 = UNDERLAY_MTU - 50;

/// A way from pod to pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// No encapsulation: a route per node.
    Plain,
    /// The kernel's vxlan device, as flannel sets it up.
    KernelVxlan,
    /// felt, vxlan.
    FeltVxlan,
    /// felt, udp.
    FeltUdp,
    /// felt, vxlan, `--offload off`.
    FeltVxlanOff,
    /// felt, udp, `--offload off`.
    FeltUdpOff,
    /// The plain loop as a daemon.
    PlainLoop,
    /// A real flanneld, udp.
    FlannelUdp,
}

impl System {
    /// All of them, in the order of tables and plots.
    pub const ALL: [System; 8] = [
        System::Plain,
        System::KernelVxlan,
        System::FeltVxlan,
        System::FeltUdp,
        System::FeltVxlanOff,
        System::FeltUdpOff,
        System::PlainLoop,
        System::FlannelUdp,
    ];

    /// Its name in JSON and on the command line.
    pub fn id(self) -> &'static str {
        match self {
            System::Plain => "plain",
            System::KernelVxlan => "kernel-vxlan",
            System::FeltVxlan => "felt-vxlan",
            System::FeltUdp => "felt-udp",
            System::FeltVxlanOff => "felt-vxlan-off",
            System::FeltUdpOff => "felt-udp-off",
            System::PlainLoop => "plain-loop",
            System::FlannelUdp => "flannel-udp",
        }
    }

    /// Its name for people.
    pub fn label(self) -> &'static str {
        match self {
            System::Plain => "no overlay",
            System::KernelVxlan => "kernel vxlan",
            System::FeltVxlan => "felt vxlan",
            System::FeltUdp => "felt udp",
            System::FeltVxlanOff => "felt vxlan, no offload",
            System::FeltUdpOff => "felt udp, no offload",
            System::PlainLoop => "plain loop",
            System::FlannelUdp => "flannel udp",
        }
    }

    /// The system of a name.
    pub fn by_id(id: &str) -> Option<System> {
        System::ALL.into_iter().find(|s| s.id() == id)
    }

    fn felt(self) -> Option<(Backend, bool)> {
        match self {
            System::FeltVxlan => Some((Backend::Vxlan, true)),
            System::FeltUdp => Some((Backend::Udp, true)),
            System::FeltVxlanOff => Some((Backend::Vxlan, false)),
            System::FeltUdpOff => Some((Backend::Udp, false)),
            _ => None,
        }
    }
}

impl fmt::Display for System {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.id())
    }
}

/// What the underlay's links do for their senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Underlay {
    /// A veth pair as it is made: super-packets cross it whole.
    Veth,
    /// Segmentation offloads off: every packet that crosses fits the MTU.
    Wire,
    /// As `Wire`, and the receiving end merges packets (GRO), as most network cards' drivers do.
    WireGro,
}

impl Underlay {
    /// All of them.
    pub const ALL: [Underlay; 3] = [Underlay::Veth, Underlay::Wire, Underlay::WireGro];

    /// Its name in JSON and on the command line.
    pub fn id(self) -> &'static str {
        match self {
            Underlay::Veth => "veth",
            Underlay::Wire => "wire",
            Underlay::WireGro => "wire-gro",
        }
    }

    /// Its name for people.
    pub fn label(self) -> &'static str {
        match self {
            Underlay::Veth => "veth as it is",
            Underlay::Wire => "wire-like: segmentation offloads off",
            Underlay::WireGro => "wire-like, with receive merging",
        }
    }

    /// The underlay of a name.
    pub fn by_id(id: &str) -> Option<Underlay> {
        Underlay::ALL.into_iter().find(|u| u.id() == id)
    }

    /// Switches every underlay link of a lab.
    ///
    /// # Errors
    /// When `ethtool` is missing or refuses.
    pub fn apply(self, lab: &Lab) -> Result<()> {
        ensure!(cmd::have("ethtool"), "ethtool is missing (package ethtool)");
        let segment = if self == Underlay::Veth { "on" } else { "off" };
        let merge = if self == Underlay::WireGro { "on" } else { "off" };
        for node in &lab.nodes {
            for (place, device) in [(&node.place, "eth0"), (&lab.underlay, node.name.as_str())] {
                let mut c = place.net_command("ethtool");
                c.args(["-K", device]);
                for feature in [
                    "tso",
                    "gso",
                    "tx-udp-segmentation",
                    "tx-udp_tnl-segmentation",
                    "tx-udp_tnl-csum-segmentation",
                ] {
                    c.args([feature, segment]);
                }
                c.args(["gro", merge]);
                cmd::run(c).with_context(|| format!("on {}", place.name))?;
            }
        }
        Ok(())
    }
}

/// A system in its lab, ready to be measured.
#[derive(Debug)]
pub struct Bed {
    /// Which one.
    pub system: System,
    /// iperf3 servers, in the order of the nodes.
    servers: Vec<iperf::Server>,
    /// Daemons that are not felt's.
    helpers: Vec<Process>,
    /// The lab.
    pub lab: Lab,
}

impl Bed {
    /// Builds it: namespaces, daemons, one pod a node, every pod reaches every other.
    ///
    /// # Errors
    /// The step that failed.
    pub fn up(system: System, nodes: usize, flanneld: Option<&Path>) -> Result<Bed> {
        let mut spec = Spec::new(&format!("bench-{system}"), nodes);
        spec.underlay_mtu = UNDERLAY_MTU;
        spec.pods = 1;
        let kind = match system {
            System::KernelVxlan => NodeKind::Kernel,
            s if s.felt().is_some() => NodeKind::Felt,
            _ => NodeKind::Bare,
        };
        spec.nodes = vec![kind; nodes];
        if let Some((backend, offload)) = system.felt() {
            spec.backend = backend;
            // No masquerading and no forward rules: the other systems have no firewall (and so no connection
            // tracking) either.
            spec.daemon_args = vec!["--iptables-forward-rules=false".to_owned()];
            if !offload {
                spec.daemon_args.push("--offload=off".to_owned());
            }
        }
        if system == System::FlannelUdp {
            spec.backend = Backend::Udp;
            spec.registry = Registry::Etcd;
        }
        let lab = Lab::build(spec, Lifetime::Tied)?;
        let mut bed = Bed { system, servers: Vec::new(), helpers: Vec::new(), lab };
        bed.start(flanneld).and_then(|()| bed.attach()).with_context(|| bed.lab.log_tails())?;
        Ok(bed)
    }

    fn start(&mut self, flanneld: Option<&Path>) -> Result<()> {
        match self.system {
            System::Plain => self.start_plain(),
            System::PlainLoop => self.start_plain_loop(),
            System::FlannelUdp => self.start_flanneld(flanneld.context("which flanneld?")?),
            _ => {
                self.lab.start_registry()?;
                self.lab.start_nodes()?;
                self.lab.program_kernel_nodes()
            }
        }
    }

    fn start_plain(&self) -> Result<()> {
        for (i, node) in self.lab.nodes.iter().enumerate() {
            for (j, peer) in self.lab.nodes.iter().enumerate().filter(|(j, _)| *j != i) {
                node.place.ip(&format!("route add {} via {}", fixed_subnet(j), peer.ip))?;
            }
        }
        Ok(())
    }

    fn start_plain_loop(&mut self) -> Result<()> {
        bins::require(&self.lab.bin, &["felt-plain-loop"])?;
        let port = Backend::Udp.port();
        for (i, node) in self.lab.nodes.iter().enumerate() {
            let mut c = node.place.command(&format!("{NODE_BIN}/felt-plain-loop"));
            c.args(["--device", "plain0", "--bind", &format!("{}:{port}", node.ip)]);
            for (j, peer) in self.lab.nodes.iter().enumerate().filter(|(j, _)| *j != i) {
                c.args(["--route", &format!("{}={}:{port}", fixed_subnet(j), peer.ip)]);
            }
            let log = self.lab.log(&format!("{}-plain-loop", node.name));
            self.helpers.push(node.place.spawn(c, &log)?);
            cmd::wait_for("the plain loop", Duration::from_secs(5), || {
                fs::read_to_string(&log).ok()?.contains("ready").then_some(())
            })?;
            let mtu = UNDERLAY_MTU - Backend::Udp.overhead();
            node.place.ip_batch(&format!(
                "link set plain0 mtu {mtu} up\n\
                 route add {POD_NETWORK} dev plain0\n"
            ))?;
        }
        Ok(())
    }

    fn start_flanneld(&mut self, program: &Path) -> Result<()> {
        self.lab.start_registry()?;
        let program = program.to_str().context("the path of flanneld is not UTF-8")?;
        for node in &self.lab.nodes {
            let mut c = node.place.command(program);
            c.args(self.lab.registry_args()).args(["--iface=eth0", "--iptables-forward-rules=false"]);
            let log = self.lab.log(&format!("{}-flanneld", node.name));
            self.helpers.push(node.place.spawn(c, &log)?);
        }
        for node in &self.lab.nodes {
            let file = node.place.path(SUBNET_ENV);
            cmd::wait_for("flanneld's subnet.env", Duration::from_secs(15), || file.is_file().then_some(()))
                .with_context(|| {
                    fs::read_to_string(self.lab.log(&format!("{}-flanneld", node.name))).unwrap_or_default()
                })?;
        }
        Ok(())
    }

    /// Pods, servers, and a first packet everywhere.
    fn attach(&mut self) -> Result<()> {
        let own_plugins = self.lab.bin.join("felt-cni").is_file();
        for i in 0..self.lab.nodes.len() {
            let subnet = self.subnet(i)?;
            let node = &self.lab.nodes[i];
            let path = if own_plugins {
                pod::install(&node.place)?;
                NODE_CNI_BIN
            } else {
                REFERENCE_CNI_BIN
            };
            let runtime = Runtime::bridge(path, &[&subnet], POD_MTU);
            let pod = runtime.attach(&node.place, &format!("p{}-1", i + 1))?;
            self.lab.nodes[i].pods.push(pod);
        }
        self.lab.wait_converged(Duration::from_secs(10))?;
        for pod in self.lab.pods() {
            self.servers
                .push(iperf::Server::start(&pod.place, &self.lab.log(&format!("{}-iperf3", pod.name)))?);
        }
        Ok(())
    }

    fn subnet(&self, node: usize) -> Result<String> {
        let n = &self.lab.nodes[node];
        if let Some(kernel) = &n.kernel {
            return Ok(kernel.subnet.clone());
        }
        if n.kind == NodeKind::Bare && self.system != System::FlannelUdp {
            return Ok(fixed_subnet(node));
        }
        let file = n.place.path(SUBNET_ENV);
        let text = fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
        let gateway = text.lines().find_map(|l| l.strip_prefix("FLANNEL_SUBNET="));
        let gateway = gateway.with_context(|| format!("no FLANNEL_SUBNET in {text:?}"))?;
        let Some((address, len)) = gateway.split_once('/') else { bail!("FLANNEL_SUBNET={gateway}") };
        let network = address.rsplit_once('.').context("no IPv4 address")?.0;
        Ok(format!("{network}.0/{len}"))
    }

    /// The sending and a receiving pod, the latter counted from 0 among the other nodes'.
    ///
    /// # Errors
    /// When there is none.
    pub fn pair(&self, receiver: usize) -> Result<(&Pod, &Pod)> {
        let mut pods = self.lab.pods();
        let first = pods.next().context("no pods")?;
        Ok((first, pods.nth(receiver).context("no such pod")?))
    }

    /// Starts a receiver's iperf3 server anew after a failed run, which may leave it busy.
    ///
    /// # Errors
    /// When it does not listen.
    pub fn restart_servers(&mut self) -> Result<()> {
        self.servers.clear();
        for pod in self.lab.pods() {
            let log = self.lab.log(&format!("{}-iperf3", pod.name));
            let _ = fs::remove_file(&log);
            self.servers.push(iperf::Server::start(&pod.place, &log)?);
        }
        Ok(())
    }

    /// Process ids of all daemons in the path, the nodes' in order; none where the kernel does it.
    pub fn daemons(&self) -> Vec<u32> {
        let felt = self.lab.nodes.iter().filter_map(|n| n.daemon.as_ref()).map(daemon::Daemon::pid);
        felt.chain(self.helpers.iter().map(|h| h.pid().pid)).collect()
    }

    /// Processor time of all daemons so far.
    ///
    /// # Errors
    /// When one has ended.
    pub fn daemon_time(&self) -> Result<Duration> {
        self.daemons().into_iter().map(daemon::cpu_time).sum()
    }

    /// The largest peak memory of a daemon, in bytes; `None` without daemons.
    ///
    /// # Errors
    /// When one has ended.
    pub fn peak_memory(&self) -> Result<Option<u64>> {
        let all: Result<Vec<u64>> = self.daemons().into_iter().map(daemon::peak_memory).collect();
        Ok(all?.into_iter().max())
    }

    /// Files that say what went wrong.
    pub fn logs(&self) -> PathBuf {
        self.lab.dir.join("log")
    }
}

/// The pod subnet of a node where no registry says.
fn fixed_subnet(node: usize) -> String {
    format!("10.244.{}.0/24", node + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_find_their_systems() {
        for s in System::ALL {
            assert_eq!(System::by_id(s.id()), Some(s));
        }
        for u in Underlay::ALL {
            assert_eq!(Underlay::by_id(u.id()), Some(u));
        }
        assert_eq!(System::by_id("carrier-pigeon"), None);
    }
}
