//! A cluster on one machine.
//!
//! ```text
//!                       underlay (own namespaces; "outside host", gateway, etcd)
//!                       ul0  bridge  198.18.0.254/24  2001:2:0:18::254/64
//!            ┌────────────────┼────────────────┐
//!      veth  n1          veth n2          veth n3          underlay side, ports of ul0
//!   ─ ─ ─ ─  │ ─ ─ ─ ─ ─ ─ ─ ─│─ ─ ─ ─ ─ ─ ─ ─ │ ─ ─ ─ ─
//!           eth0             eth0             eth0         198.18.0.1, .2, .3    2001:2:0:18::1, ::2, ::3
//!        ┌── n1 ──┐       ┌── n2 ──┐       ┌── n3 ──┐      one node: namespaces, /run, /etc, /var/lib, processes
//!        │ feltd  │       │ feltd  │       │ kernel │      kind Felt, or Kernel: a vxlan device made with `ip`
//!        │  tun   │       │  tun   │       │ vxlan  │
//!        │  cni0  │       │  cni0  │       │  cni0  │      the pods' bridge, made by the CNI plugin
//!        └─┬────┬─┘       └─┬────┬─┘       └─┬────┬─┘
//!        p1-1  p1-2       p2-1  p2-2       p3-1  p3-2      pods: network namespaces in the node's /run/netns
//! ```
//!
//! Underlay addresses are from the ranges kept for benchmarks (RFC 2544: 198.18.0.0/15, RFC 5180: 2001:2::/48), so
//! they never meet a real network. Every lab has its own namespaces, so labs side by side use the same addresses.
//!
//! A lab is built in steps (namespaces, registry, daemons, pods), each a method, so that a test can stand between
//! them; [`Lab::up`] takes all of them.

use std::fmt::Write as _;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::bins;
use crate::cmd;
use crate::daemon::Daemon;
use crate::etcd::Etcd;
use crate::kernel_node;
use crate::netns::{Guard, Lifetime, NODE_SHARED, NodeMounts, Pid, Place};
use crate::pod::{self, Pod};

/// Directory of all labs' state.
pub const STATE_DIR: &str = "/run/felt-lab";
/// The pods' IPv4 network of every lab.
pub const POD_NETWORK: &str = "10.244.0.0/16";
/// The pods' IPv6 network of dual-stack labs.
pub const POD_NETWORK6: &str = "fd00:10:244::/48";

/// Encapsulation of a lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// VXLAN, UDP port 8472, VNI 1.
    Vxlan,
    /// Bare packets, UDP port 8285.
    Udp,
}

impl Backend {
    /// flannel's name of the backend.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Vxlan => "vxlan",
            Backend::Udp => "udp",
        }
    }

    /// flannel's default port of the backend.
    pub fn port(self) -> u16 {
        match self {
            Backend::Vxlan => 8472,
            Backend::Udp => 8285,
        }
    }

    /// flannel's name of the IPv4 tunnel device.
    pub fn device(self) -> &'static str {
        match self {
            Backend::Vxlan => "flannel.1",
            Backend::Udp => "flannel0",
        }
    }

    /// Bytes an IPv4 underlay adds to an inner packet.
    pub fn overhead(self) -> u16 {
        match self {
            Backend::Vxlan => 50,
            Backend::Udp => 28,
        }
    }
}

/// Where leases are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Registry {
    /// A directory shared by the nodes.
    File,
    /// etcd in the underlay namespace.
    Etcd,
}

/// What moves a node's packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NodeKind {
    /// `feltd`.
    Felt,
    /// The kernel's vxlan device, set up by hand as a flannel node has it.
    Kernel,
    /// Nothing yet: the test does it.
    Bare,
}

/// What to build.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Spec {
    /// Names the lab's directory below [`STATE_DIR`].
    pub name: String,
    /// Kind of each node; nodes are called n1, n2, ...
    pub nodes: Vec<NodeKind>,
    /// Pods per node, called p1-1, p1-2, p2-1, ...
    pub pods: usize,
    /// Encapsulation.
    pub backend: Backend,
    /// Lease store.
    pub registry: Registry,
    /// Pods also have IPv6.
    pub ipv6: bool,
    /// MTU of the underlay links.
    pub underlay_mtu: u16,
    /// Keys to set in the network config's `Backend` object, as JSON.
    pub backend_keys: serde_json::Map<String, serde_json::Value>,
    /// Keys to set at the network config's top level.
    pub config_keys: serde_json::Map<String, serde_json::Value>,
    /// More arguments for every daemon.
    pub daemon_args: Vec<String>,
}

impl Spec {
    /// A lab of felt nodes with the file registry and vxlan, two pods each, under a name no other process uses.
    pub fn new(prefix: &str, nodes: usize) -> Spec {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Spec {
            name: format!("{prefix}-{}-{count}", std::process::id()),
            nodes: vec![NodeKind::Felt; nodes],
            pods: 2,
            backend: Backend::Vxlan,
            registry: Registry::File,
            ipv6: false,
            underlay_mtu: 1500,
            backend_keys: serde_json::Map::new(),
            config_keys: serde_json::Map::new(),
            // As flannel's manifest has it; without it the flannel plugin asks the bridge to masquerade.
            daemon_args: vec!["--ip-masq".to_owned()],
        }
    }

    /// With another encapsulation.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Spec {
        self.backend = backend;
        self
    }

    /// With another lease store.
    #[must_use]
    pub fn registry(mut self, registry: Registry) -> Spec {
        self.registry = registry;
        self
    }

    /// With another number of pods per node.
    #[must_use]
    pub fn pods(mut self, pods: usize) -> Spec {
        self.pods = pods;
        self
    }

    /// With one node (counted from 0) of another kind.
    #[must_use]
    pub fn kind(mut self, node: usize, kind: NodeKind) -> Spec {
        if let Some(k) = self.nodes.get_mut(node) {
            *k = kind;
        }
        self
    }

    /// With IPv6 pods beside IPv4.
    #[must_use]
    pub fn dual_stack(mut self) -> Spec {
        self.ipv6 = true;
        self
    }

    /// With a daemon argument more.
    #[must_use]
    pub fn arg(mut self, arg: &str) -> Spec {
        self.daemon_args.push(arg.to_owned());
        self
    }

    /// The network config a registry holds for this lab.
    pub fn network_config(&self) -> serde_json::Value {
        let mut backend = serde_json::Map::new();
        backend.insert("Type".to_owned(), self.backend.name().into());
        backend.extend(self.backend_keys.clone());
        let mut config = serde_json::Map::new();
        config.insert("Network".to_owned(), POD_NETWORK.into());
        if self.ipv6 {
            config.insert("EnableIPv6".to_owned(), true.into());
            config.insert("IPv6Network".to_owned(), POD_NETWORK6.into());
        }
        config.insert("Backend".to_owned(), backend.into());
        config.extend(self.config_keys.clone());
        config.into()
    }

    /// The pods' MTU this lab should come to.
    pub fn pod_mtu(&self) -> u16 {
        let overhead = match (self.backend, self.ipv6) {
            (Backend::Vxlan, true) => 70,
            (b, _) => b.overhead(),
        };
        self.underlay_mtu - overhead
    }
}

/// One node of a lab.
#[derive(Debug)]
pub struct Node {
    /// n1, n2, ...
    pub name: String,
    /// What moves its packets.
    pub kind: NodeKind,
    /// Its namespaces.
    pub place: Place,
    /// Underlay address.
    pub ip: Ipv4Addr,
    /// Underlay address.
    pub ip6: Ipv6Addr,
    /// The running daemon, if any.
    pub daemon: Option<Daemon>,
    /// Attached pods.
    pub pods: Vec<Pod>,
    /// The kernel node's lease.
    pub kernel: Option<kernel_node::KernelNode>,
}

/// A built lab. Dropping it ends it, unless it was [detached](Lab::detach).
#[derive(Debug)]
pub struct Lab {
    /// What was asked for.
    pub spec: Spec,
    /// State on the host.
    pub dir: PathBuf,
    /// felt's programs.
    pub bin: PathBuf,
    /// The namespaces of the bridge that joins the nodes.
    pub underlay: Place,
    /// The nodes, n1 first.
    pub nodes: Vec<Node>,
    /// The lease store, when it is etcd and was started.
    pub etcd: Option<Etcd>,
    // Last: with the guard everything else ends.
    guard: Guard,
}

/// What `felt-lab up` writes for later commands.
#[derive(Debug, Serialize, Deserialize)]
struct Saved {
    spec: Spec,
    bin: PathBuf,
    init: Pid,
    underlay: Place,
    nodes: Vec<SavedNode>,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedNode {
    kind: NodeKind,
    place: Place,
    pods: Vec<Pod>,
}

impl Lab {
    /// Namespaces, bridge and underlay links; no registry, daemon or pod yet.
    ///
    /// # Errors
    /// Without root, when a program is missing, or when a lab of this name runs.
    pub fn build(spec: Spec, lifetime: Lifetime) -> Result<Lab> {
        let bin = bins::dir()?;
        for tool in ["unshare", "nsenter", "ip"] {
            ensure!(cmd::have(tool), "{tool} is missing (packages util-linux, iproute2)");
        }
        let dir = Path::new(STATE_DIR).join(&spec.name);
        ensure!(!spec.name.is_empty() && !spec.name.contains('/'), "bad lab name {:?}", spec.name);
        if dir.join("lab.json").exists() && Lab::load(&spec.name).is_ok() {
            bail!("a lab named {} runs already: `felt-lab down --name {0}` ends it", spec.name);
        }
        let guard = Guard::start(&dir, lifetime)?;
        let make = |name: &str| -> Result<Place> {
            let stage = dir.join("stage").join(name);
            let shared = dir.join("shared");
            for d in [&stage, &shared, &dir.join("log")] {
                fs::create_dir_all(d).with_context(|| format!("create {}", d.display()))?;
            }
            Place::create(&guard, name, &NodeMounts { bin: &bin, shared: &shared, stage: &stage })
        };
        let underlay = make("underlay")?;
        underlay.ip_batch(
            "link add ul0 type bridge forward_delay 0 mcast_snooping 0\n\
             addr add 198.18.0.254/24 dev ul0\n\
             addr add 2001:2:0:18::254/64 dev ul0 nodad\n\
             link set ul0 up\n",
        )?;
        // Bridged frames need no trip through the (empty) firewall; without br_netfilter there is no such switch.
        let _ = underlay.sh(
            "for t in iptables ip6tables arptables; do echo 0 > /proc/sys/net/bridge/bridge-nf-call-$t; done",
        );
        let mut lab = Lab { dir, bin, underlay, nodes: Vec::new(), etcd: None, guard, spec: spec.clone() };
        for kind in &spec.nodes {
            lab.add_node(*kind)?;
        }
        Ok(lab)
    }

    /// Adds a node, linked to the underlay.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn add_node(&mut self, kind: NodeKind) -> Result<&mut Node> {
        let index = self.nodes.len();
        let number =
            u8::try_from(index + 1).ok().filter(|n| *n < 250).context("a lab has at most 249 nodes")?;
        let name = format!("n{number}");
        let stage = self.dir.join("stage").join(&name);
        fs::create_dir_all(&stage).with_context(|| format!("create {}", stage.display()))?;
        let shared = self.dir.join("shared");
        let place = Place::create(
            &self.guard,
            &name,
            &NodeMounts { bin: &self.bin, shared: &shared, stage: &stage },
        )?;
        let ip = Ipv4Addr::new(198, 18, 0, number);
        let ip6 = Ipv6Addr::new(0x2001, 2, 0, 0x18, 0, 0, 0, u16::from(number));
        let mtu = self.spec.underlay_mtu;
        self.underlay.ip_batch(&format!(
            "link add {name} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {}\n\
             link set {name} master ul0 up\n",
            place.holder.pid
        ))?;
        place.ip_batch(&format!(
            "link set eth0 up\n\
             addr add {ip}/24 brd + dev eth0\n\
             addr add {ip6}/64 dev eth0 nodad\n\
             route add default via 198.18.0.254\n\
             route add default via 2001:2:0:18::254\n"
        ))?;
        self.nodes.push(Node { name, kind, place, ip, ip6, daemon: None, pods: Vec::new(), kernel: None });
        self.nodes.last_mut().context("just added")
    }

    /// Starts the registry and puts the network config into it.
    ///
    /// # Errors
    /// When etcd does not start.
    pub fn start_registry(&mut self) -> Result<()> {
        let config = self.spec.network_config().to_string();
        match self.spec.registry {
            Registry::File => {
                let dir = self.lease_dir();
                fs::create_dir_all(dir.join("subnets"))
                    .with_context(|| format!("create {}", dir.display()))?;
                fs::write(dir.join("config"), config)
                    .with_context(|| format!("write {}/config", dir.display()))
            }
            Registry::Etcd => {
                let etcd = Etcd::start(&self.underlay, "198.18.0.254", &self.log("etcd"))?;
                etcd.put("/coreos.com/network/config", &config)?;
                self.etcd = Some(etcd);
                Ok(())
            }
        }
    }

    /// The file registry's directory on the host.
    pub fn lease_dir(&self) -> PathBuf {
        self.dir.join("shared/registry")
    }

    /// The log of a program.
    pub fn log(&self, what: &str) -> PathBuf {
        self.dir.join("log").join(format!("{what}.log"))
    }

    /// Arguments that tell a daemon this lab's registry.
    pub fn registry_args(&self) -> Vec<String> {
        match self.spec.registry {
            Registry::File => vec![format!("--lease-dir={NODE_SHARED}/registry")],
            Registry::Etcd => vec!["--etcd-endpoints=http://198.18.0.254:2379".to_owned()],
        }
    }

    /// Starts one node's data path and waits until it is ready. A kernel node gets its device and a lease.
    ///
    /// # Errors
    /// When the daemon ends or is not ready within ten seconds; the end of its log is in the message.
    pub fn start_node(&mut self, node: usize) -> Result<()> {
        match self.nodes.get(node).context("no such node")?.kind {
            NodeKind::Bare => Ok(()),
            NodeKind::Kernel => kernel_node::start(self, node),
            NodeKind::Felt => {
                self.spawn_daemon(node)?;
                self.nodes[node].daemon.as_mut().context("just started")?.wait_ready(Duration::from_secs(10))
            }
        }
    }

    /// Starts one node's daemon without waiting.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn spawn_daemon(&mut self, node: usize) -> Result<()> {
        bins::require(&self.bin, &["feltd"])?;
        let mut args = self.registry_args();
        args.extend(self.spec.daemon_args.iter().cloned());
        let log = self.log(&format!("{}-feltd", self.nodes[node].name));
        let node = &mut self.nodes[node];
        node.daemon = None;
        node.daemon = Some(Daemon::start(&node.place, &args, &log)?);
        Ok(())
    }

    /// Starts all nodes; daemons side by side.
    ///
    /// # Errors
    /// See [`Lab::start_node`].
    pub fn start_nodes(&mut self) -> Result<()> {
        for i in 0..self.nodes.len() {
            if self.nodes[i].kind == NodeKind::Felt {
                self.spawn_daemon(i)?;
            }
        }
        for node in &mut self.nodes {
            if let Some(d) = &mut node.daemon {
                d.wait_ready(Duration::from_secs(10))?;
            }
        }
        for i in 0..self.nodes.len() {
            if self.nodes[i].kind == NodeKind::Kernel {
                self.start_node(i)?;
            }
        }
        Ok(())
    }

    /// Tells every kernel node of the leases there are now.
    ///
    /// # Errors
    /// When the registry cannot be read or the kernel refuses an entry.
    pub fn program_kernel_nodes(&self) -> Result<()> {
        for (i, node) in self.nodes.iter().enumerate() {
            if node.kernel.is_some() {
                kernel_node::program_peers(self, i)?;
            }
        }
        Ok(())
    }

    /// Attaches the spec's pods to every node, as a container runtime does.
    ///
    /// # Errors
    /// A plugin's error, with the plugin's name.
    pub fn attach_pods(&mut self) -> Result<()> {
        for i in 0..self.nodes.len() {
            for number in 1..=self.spec.pods {
                self.attach_pod(i, &format!("p{}-{number}", i + 1))?;
            }
        }
        Ok(())
    }

    /// Attaches one pod.
    ///
    /// # Errors
    /// A plugin's error, with the plugin's name.
    pub fn attach_pod(&mut self, node: usize, name: &str) -> Result<&Pod> {
        let runtime = pod::Runtime::for_node(self, node)?;
        let pod = runtime.attach(&self.nodes[node].place, name)?;
        self.nodes[node].pods.push(pod);
        self.nodes[node].pods.last().context("just attached")
    }

    /// Everything: namespaces, registry, daemons, pods, and every felt node knows every lease.
    ///
    /// # Errors
    /// The first step that fails.
    pub fn up(spec: Spec, lifetime: Lifetime) -> Result<Lab> {
        let mut lab = Lab::build(spec, lifetime)?;
        lab.start_registry()?;
        lab.start_nodes()?;
        lab.program_kernel_nodes()?;
        lab.attach_pods()?;
        lab.wait_converged(Duration::from_secs(10))?;
        Ok(lab)
    }

    /// Waits until the first pod of every node reaches the first pod of every other node.
    ///
    /// # Errors
    /// At the deadline, naming a pair that does not.
    pub fn wait_converged(&self, deadline: Duration) -> Result<()> {
        let firsts: Vec<&Pod> = self.nodes.iter().filter_map(|n| n.pods.first()).collect();
        for a in &firsts {
            for b in &firsts {
                if a.name == b.name {
                    continue;
                }
                for to in b.addresses() {
                    cmd::wait_for(&format!("{} to reach {} at {to}", a.name, b.name), deadline, || {
                        crate::traffic::reaches(&a.place, to).then_some(())
                    })?;
                }
            }
        }
        Ok(())
    }

    /// The node of a name.
    ///
    /// # Errors
    /// When there is none.
    pub fn node(&self, name: &str) -> Result<&Node> {
        self.nodes
            .iter()
            .find(|n| n.name == name)
            .with_context(|| format!("no node {name} in lab {}", self.spec.name))
    }

    /// All pods, in order.
    pub fn pods(&self) -> impl Iterator<Item = &Pod> {
        self.nodes.iter().flat_map(|n| &n.pods)
    }

    /// A pod by name.
    ///
    /// # Errors
    /// When there is none.
    pub fn pod(&self, name: &str) -> Result<&Pod> {
        self.pods()
            .find(|p| p.name == name)
            .with_context(|| format!("no pod {name} in lab {}", self.spec.name))
    }

    /// Where to run a command for a node or pod name.
    ///
    /// # Errors
    /// When nothing has the name.
    pub fn place(&self, name: &str) -> Result<&Place> {
        if name == "underlay" {
            return Ok(&self.underlay);
        }
        let nodes = self.nodes.iter().map(|n| (&n.name, &n.place));
        let pods = self.pods().map(|p| (&p.name, &p.place));
        let mut all = nodes.chain(pods);
        let found = all.find(|(n, _)| *n == name);
        found.map(|(_, p)| p).with_context(|| format!("no node or pod {name} in lab {}", self.spec.name))
    }

    /// Leaves the lab running when this process ends, described in its directory.
    ///
    /// # Errors
    /// When the description cannot be written.
    pub fn detach(mut self) -> Result<()> {
        let saved = Saved {
            spec: self.spec.clone(),
            bin: self.bin.clone(),
            init: self.guard.init(),
            underlay: self.underlay.clone(),
            nodes: self
                .nodes
                .iter()
                .map(|n| SavedNode { kind: n.kind, place: n.place.clone(), pods: n.pods.clone() })
                .collect(),
        };
        let text = serde_json::to_string_pretty(&saved).context("describe the lab")?;
        let file = self.dir.join("lab.json");
        fs::write(&file, text).with_context(|| format!("write {}", file.display()))?;
        for node in &mut self.nodes {
            if let Some(d) = &mut node.daemon {
                d.detach();
            }
        }
        if let Some(e) = &mut self.etcd {
            e.detach();
        }
        Ok(())
    }

    /// A lab left running earlier.
    ///
    /// # Errors
    /// When there is none of that name, or it has ended.
    pub fn load(name: &str) -> Result<Lab> {
        let dir = Path::new(STATE_DIR).join(name);
        let text = fs::read_to_string(dir.join("lab.json")).with_context(|| {
            format!("no lab named {name} ({} is missing)", dir.join("lab.json").display())
        })?;
        let saved: Saved =
            serde_json::from_str(&text).with_context(|| format!("read {}/lab.json", dir.display()))?;
        let guard = Guard::attach(saved.init, &dir)?;
        let mut nodes = Vec::new();
        for (i, n) in saved.nodes.into_iter().enumerate() {
            let number = u8::try_from(i + 1).context("too many nodes")?;
            nodes.push(Node {
                name: n.place.name.clone(),
                kind: n.kind,
                place: n.place,
                ip: Ipv4Addr::new(198, 18, 0, number),
                ip6: Ipv6Addr::new(0x2001, 2, 0, 0x18, 0, 0, 0, u16::from(number)),
                daemon: None,
                pods: n.pods,
                kernel: None,
            });
        }
        Ok(Lab { spec: saved.spec, dir, bin: saved.bin, underlay: saved.underlay, nodes, etcd: None, guard })
    }

    /// Ends the lab and waits until its processes are gone.
    ///
    /// # Errors
    /// When something survives.
    pub fn down(mut self) -> Result<()> {
        self.guard.end()?;
        // Ours was perhaps the last: an empty directory of all labs is a left-over too.
        let _ = fs::remove_dir(STATE_DIR);
        Ok(())
    }

    /// Whether any process of the lab lives.
    pub fn alive(&self) -> bool {
        self.guard.init().alive()
    }

    /// Every daemon's last log lines, for a failing test's message.
    pub fn log_tails(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            if let Some(d) = &node.daemon {
                let _ = write!(text, "--- {} feltd\n{}\n", node.name, d.log_tail(15));
            }
        }
        text
    }

    /// A table of nodes and pods for people.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        for node in &self.nodes {
            let kind = match node.kind {
                NodeKind::Felt => "feltd",
                NodeKind::Kernel => "kernel vxlan",
                NodeKind::Bare => "bare",
            };
            let _ = writeln!(text, "  {:<6} {:<16} {kind}", node.name, node.ip.to_string());
            for pod in &node.pods {
                let list: Vec<String> = pod.addresses().iter().map(IpAddr::to_string).collect();
                let _ = writeln!(text, "    {:<6} {}", pod.name, list.join("  "));
            }
        }
        text
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The failing test's output should say what the daemons said.
            let _ = std::io::Write::write_all(&mut std::io::stderr(), self.log_tails().as_bytes());
        }
    }
}
