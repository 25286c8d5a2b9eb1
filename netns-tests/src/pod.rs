//! Attaching pods the way a container runtime does: a conflist, one plugin after the other, `prevResult` handed on,
//! the last result cached for DEL and CHECK (the file format of libcni, so that another tool can read it).
//!
//! The plugins are processes in the node's namespaces with the environment and standard input of the CNI
//! specification; which plugins (felt's or the reference's) is a matter of CNI_PATH.

use std::fs;
use std::net::IpAddr;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::cmd::{self, DEADLINE};
use crate::netns::{NODE_BIN, Place};
use crate::topology::{Lab, NodeKind};

/// Where felt's plugins are installed inside a node.
pub const NODE_CNI_BIN: &str = "/run/lab/cni-bin";
/// Debian's directory of the reference plugins (package containernetworking-plugins).
pub const REFERENCE_CNI_BIN: &str = "/usr/lib/cni";

/// An attached pod.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pod {
    /// Its name, also that of its network namespace in the node.
    pub name: String,
    /// Where its commands run.
    pub place: Place,
    /// The runtime's id of it.
    pub container_id: String,
    /// IPv4 address, if any.
    pub ipv4: Option<std::net::Ipv4Addr>,
    /// IPv6 address, if any.
    pub ipv6: Option<std::net::Ipv6Addr>,
    /// The plugins' result.
    pub result: Value,
}

impl Pod {
    /// All addresses, IPv4 first.
    pub fn addresses(&self) -> Vec<IpAddr> {
        self.ipv4.map(IpAddr::from).into_iter().chain(self.ipv6.map(IpAddr::from)).collect()
    }

    /// The IPv4 address.
    ///
    /// # Errors
    /// When it has none.
    pub fn v4(&self) -> Result<IpAddr> {
        self.ipv4.map(IpAddr::from).with_context(|| format!("{} has no IPv4 address", self.name))
    }

    /// The IPv6 address.
    ///
    /// # Errors
    /// When it has none.
    pub fn v6(&self) -> Result<IpAddr> {
        self.ipv6.map(IpAddr::from).with_context(|| format!("{} has no IPv6 address", self.name))
    }
}

/// Which call of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Attach.
    Add,
    /// Detach.
    Del,
    /// Is it as ADD left it?
    Check,
    /// Remove what no valid attachment owns.
    Gc,
    /// Can it attach?
    Status,
    /// Which versions does it speak?
    Version,
}

impl Verb {
    /// The word in `CNI_COMMAND`.
    pub fn word(self) -> &'static str {
        match self {
            Verb::Add => "ADD",
            Verb::Del => "DEL",
            Verb::Check => "CHECK",
            Verb::Gc => "GC",
            Verb::Status => "STATUS",
            Verb::Version => "VERSION",
        }
    }
}

/// What one attachment is called.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// `CNI_CONTAINERID`.
    pub container_id: String,
    /// `CNI_NETNS`; empty when the namespace is lost.
    pub netns: String,
    /// `CNI_IFNAME`.
    pub ifname: String,
    /// `CNI_ARGS`.
    pub args: String,
    /// Values of `runtimeConfig` by capability.
    pub capabilities: Map<String, Value>,
}

impl Attachment {
    /// eth0 of a pod whose namespace is named like it.
    pub fn of(pod: &str) -> Attachment {
        Attachment {
            container_id: format!("lab-{pod}"),
            netns: format!("/run/netns/{pod}"),
            ifname: "eth0".to_owned(),
            args: "IgnoreUnknown=1".to_owned(),
            capabilities: Map::new(),
        }
    }
}

/// A CNI caller: a conflist and where the plugins are.
#[derive(Clone, Debug)]
pub struct Runtime {
    /// The network configuration list.
    pub conflist: Value,
    /// `CNI_PATH`, inside the node.
    pub cni_path: String,
}

/// A plugin's refusal.
#[derive(Debug)]
pub struct PluginError {
    /// Which plugin.
    pub plugin: String,
    /// The error's `code`, 0 when the output was no error object.
    pub code: u64,
    /// The error's `msg` and `details`, or the raw output.
    pub message: String,
}

impl std::fmt::Display for PluginError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "plugin {} failed (code {}): {}", self.plugin, self.code, self.message)
    }
}

impl std::error::Error for PluginError {}

impl Runtime {
    /// The conflist that flannel's manifest installs, with the plugins in `cni_path`.
    pub fn flannel(cni_path: &str) -> Runtime {
        Runtime {
            conflist: json!({
                "cniVersion": "1.0.0",
                "name": "cbr0",
                "plugins": [{"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}}],
            }),
            cni_path: cni_path.to_owned(),
        }
    }

    /// The runtime of a lab's node: flannel's conflist and felt's plugins on a felt node, on a kernel node the bridge
    /// plugin with that node's lease written out (felt's, else the reference's where felt's are not built).
    ///
    /// # Errors
    /// When felt's plugins cannot be installed into the node, or a kernel node has no lease yet.
    pub fn for_node(lab: &Lab, node: usize) -> Result<Runtime> {
        let node = lab.nodes.get(node).context("no such node")?;
        let cni_path = if lab.bin.join("felt-cni").is_file() {
            install(&node.place)?;
            NODE_CNI_BIN
        } else {
            REFERENCE_CNI_BIN
        };
        if node.kind != NodeKind::Kernel {
            return Ok(Runtime::flannel(cni_path));
        }
        let kernel = node.kernel.as_ref().with_context(|| format!("{} has no lease yet", node.name))?;
        let subnets: Vec<&str> = [Some(&kernel.subnet), kernel.subnet6.as_ref()]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .collect();
        Ok(Runtime::bridge(cni_path, &subnets, lab.spec.pod_mtu()))
    }

    /// A bridge with host-local addresses from the given subnets, as flannel's plugin would delegate it.
    pub fn bridge(cni_path: &str, subnets: &[&str], mtu: u16) -> Runtime {
        let ranges: Vec<Value> = subnets.iter().map(|s| json!([{"subnet": s}])).collect();
        Runtime {
            conflist: json!({
                "cniVersion": "1.0.0",
                "name": "cbr0",
                "plugins": [{
                    "type": "bridge", "mtu": mtu, "isGateway": true, "isDefaultGateway": true, "hairpinMode": true,
                    "ipMasq": false,
                    "ipam": {"type": "host-local", "ranges": ranges, "routes": [{"dst": crate::topology::POD_NETWORK}]},
                }],
            }),
            cni_path: cni_path.to_owned(),
        }
    }

    /// Makes the pod's namespace, runs loopback and ADD. A failed ADD is undone as runtimes do it: DEL for the whole
    /// list, then the namespace goes.
    ///
    /// # Errors
    /// The failing plugin's error.
    pub fn attach(&self, node: &Place, name: &str) -> Result<Pod> {
        node.run(&["ip", "netns", "add", name])?;
        let at = Attachment::of(name);
        let done = self.loopback(node, &at).and_then(|()| self.add(node, &at));
        let result = match done {
            Ok(result) => result,
            Err(e) => {
                let _ = self.del(node, &at);
                let _ = self.loopback_list().del(node, &loopback_of(&at));
                let _ = node.run(&["ip", "netns", "del", name]);
                return Err(e);
            }
        };
        let mut pod = Pod {
            name: name.to_owned(),
            place: node.pod(name),
            container_id: at.container_id,
            ipv4: None,
            ipv6: None,
            result,
        };
        for entry in pod.result["ips"].as_array().into_iter().flatten() {
            let text = entry["address"].as_str().unwrap_or_default();
            match text.split('/').next().unwrap_or_default().parse() {
                Ok(IpAddr::V4(a)) => pod.ipv4 = Some(a),
                Ok(IpAddr::V6(a)) => pod.ipv6 = Some(a),
                Err(e) => bail!("the result has address {text:?}: {e}"),
            }
        }
        ensure!(pod.ipv4.is_some() || pod.ipv6.is_some(), "the result has no address: {}", pod.result);
        Ok(pod)
    }

    /// DEL, then the namespace goes.
    ///
    /// # Errors
    /// The failing plugin's error; the namespace stays then.
    pub fn detach(&self, node: &Place, name: &str) -> Result<()> {
        let at = Attachment::of(name);
        self.del(node, &at)?;
        self.loopback_list().del(node, &loopback_of(&at))?;
        node.run(&["ip", "netns", "del", name]).map(drop)
    }

    /// Runs the loopback plugin as containerd does.
    ///
    /// # Errors
    /// The plugin's error.
    pub fn loopback(&self, node: &Place, at: &Attachment) -> Result<()> {
        self.loopback_list().add(node, &loopback_of(at)).map(drop)
    }

    fn loopback_list(&self) -> Runtime {
        Runtime {
            conflist: json!({"cniVersion": "0.3.1", "name": "cni-loopback", "plugins": [{"type": "loopback"}]}),
            cni_path: self.cni_path.clone(),
        }
    }

    /// ADD of the whole list. The result is cached in the node.
    ///
    /// # Errors
    /// The failing plugin's error; the plugins before it are not undone (libcni leaves that to the runtime).
    pub fn add(&self, node: &Place, at: &Attachment) -> Result<Value> {
        let mut prev = None;
        for plugin in self.plugins()? {
            let conf = self.config(plugin, prev.as_ref(), at)?;
            prev = Some(call(node, &self.cni_path, Verb::Add, &conf, at)?);
        }
        let result = prev.context("the conflist has no plugins")?;
        let file = self.cache_file(node, at)?;
        if let Some(dir) = file.parent() {
            fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        }
        let cached = json!({
            "kind": "cniCacheV1", "containerId": at.container_id, "ifName": at.ifname, "networkName": self.name()?,
            "netns": at.netns, "result": result,
        });
        fs::write(&file, cached.to_string()).with_context(|| format!("write {}", file.display()))?;
        Ok(result)
    }

    /// DEL of the whole list, last plugin first, with the cached result. The cache entry goes when all succeeded.
    ///
    /// # Errors
    /// The first failing plugin's error.
    pub fn del(&self, node: &Place, at: &Attachment) -> Result<()> {
        let prev = self.cached(node, at);
        for plugin in self.plugins()?.into_iter().rev() {
            let conf = self.config(plugin, prev.as_ref(), at)?;
            run_plugin(node, &self.cni_path, Verb::Del, &conf, at)?;
        }
        let _ = fs::remove_file(self.cache_file(node, at)?);
        Ok(())
    }

    /// CHECK of the whole list with the cached result.
    ///
    /// # Errors
    /// The first failing plugin's error.
    pub fn check(&self, node: &Place, at: &Attachment) -> Result<()> {
        let prev = self.cached(node, at);
        for plugin in self.plugins()? {
            let conf = self.config(plugin, prev.as_ref(), at)?;
            run_plugin(node, &self.cni_path, Verb::Check, &conf, at)?;
        }
        Ok(())
    }

    /// GC of the whole list: `valid` are the attachments (container id, interface) that remain.
    ///
    /// # Errors
    /// The first failing plugin's error.
    pub fn gc(&self, node: &Place, valid: &[(&str, &str)]) -> Result<()> {
        let list: Vec<Value> =
            valid.iter().map(|(id, ifname)| json!({"containerID": id, "ifname": ifname})).collect();
        let none = Attachment {
            container_id: String::new(),
            netns: String::new(),
            ifname: String::new(),
            args: String::new(),
            capabilities: Map::new(),
        };
        for plugin in self.plugins()? {
            let mut conf = self.config(plugin, None, &none)?;
            conf["cni.dev/valid-attachments"] = list.clone().into();
            conf["cni.dev/attachments"] = list.clone().into();
            run_plugin(node, &self.cni_path, Verb::Gc, &conf, &none)?;
        }
        Ok(())
    }

    fn name(&self) -> Result<&str> {
        self.conflist["name"].as_str().context("the conflist has no name")
    }

    fn plugins(&self) -> Result<Vec<&Value>> {
        Ok(self.conflist["plugins"].as_array().context("the conflist has no plugins")?.iter().collect())
    }

    /// One plugin's standard input.
    fn config(&self, plugin: &Value, prev: Option<&Value>, at: &Attachment) -> Result<Value> {
        let mut conf = plugin.as_object().context("a plugin of the conflist is no object")?.clone();
        conf.insert("name".to_owned(), self.conflist["name"].clone());
        conf.insert("cniVersion".to_owned(), self.conflist["cniVersion"].clone());
        if let Some(prev) = prev {
            conf.insert("prevResult".to_owned(), prev.clone());
        }
        let wanted = plugin["capabilities"].as_object();
        let runtime: Map<String, Value> = at
            .capabilities
            .iter()
            .filter(|(k, _)| wanted.is_some_and(|w| w.get(*k) == Some(&Value::Bool(true))))
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        if !runtime.is_empty() {
            conf.insert("runtimeConfig".to_owned(), runtime.into());
        }
        Ok(conf.into())
    }

    fn cache_file(&self, node: &Place, at: &Attachment) -> Result<std::path::PathBuf> {
        let name = format!("{}-{}-{}", self.name()?, at.container_id, at.ifname);
        Ok(node.path("/var/lib/cni/results").join(name))
    }

    fn cached(&self, node: &Place, at: &Attachment) -> Option<Value> {
        let text = fs::read_to_string(self.cache_file(node, at).ok()?).ok()?;
        let cached: Value = serde_json::from_str(&text).ok()?;
        Some(cached["result"].clone())
    }
}

/// The same container's loopback attachment.
fn loopback_of(at: &Attachment) -> Attachment {
    Attachment { ifname: "lo".to_owned(), ..at.clone() }
}

/// Installs felt's plugins into a node (hard links or copies made by `felt-cni install`), once.
///
/// # Errors
/// When `felt-cni install` fails.
pub fn install(node: &Place) -> Result<()> {
    if node.path(NODE_CNI_BIN).join("bridge").exists() {
        return Ok(());
    }
    node.run(&["mkdir", "-p", NODE_CNI_BIN])?;
    node.run(&[&format!("{NODE_BIN}/felt-cni"), "install", "--dir", NODE_CNI_BIN]).map(drop)
}

/// Runs one plugin and parses its result.
///
/// # Errors
/// [`PluginError`], or when the output is not JSON.
pub fn call(node: &Place, cni_path: &str, verb: Verb, conf: &Value, at: &Attachment) -> Result<Value> {
    let text = run_plugin(node, cni_path, verb, conf, at)?;
    serde_json::from_str(&text).with_context(|| format!("{} printed {text:?}", conf["type"]))
}

/// Runs one plugin, returns its standard output.
///
/// # Errors
/// [`PluginError`], or when it cannot be started.
pub fn run_plugin(node: &Place, cni_path: &str, verb: Verb, conf: &Value, at: &Attachment) -> Result<String> {
    let plugin = conf["type"].as_str().context("a plugin has no type")?;
    let dirs: Vec<&str> = cni_path.split(':').collect();
    let program = dirs.iter().map(|d| format!("{d}/{plugin}")).find(|p| node.path(p).exists());
    let Some(program) = program else {
        bail!("failed to find plugin \"{plugin}\" in path {dirs:?} on {}", node.name)
    };
    let mut c = node.command(&program);
    c.env("CNI_COMMAND", verb.word()).env("CNI_PATH", cni_path);
    c.env("CNI_CONTAINERID", &at.container_id).env("CNI_NETNS", &at.netns).env("CNI_IFNAME", &at.ifname);
    c.env("CNI_ARGS", &at.args);
    let out = cmd::output(c, conf.to_string().as_bytes(), DEADLINE)?;
    if out.ok() {
        return Ok(out.stdout);
    }
    let error: Value = serde_json::from_str(&out.stdout).unwrap_or(Value::Null);
    let said = match (error["msg"].as_str(), error["details"].as_str()) {
        (Some(msg), Some(details)) if !details.is_empty() => format!("{msg}; {details}"),
        (Some(msg), _) => msg.to_owned(),
        _ => format!("{}: {:?} {:?}", out.status, out.stdout.trim(), out.stderr.trim()),
    };
    Err(PluginError { plugin: plugin.to_owned(), code: error["code"].as_u64().unwrap_or(0), message: said }
        .into())
}
