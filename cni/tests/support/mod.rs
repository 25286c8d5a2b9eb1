//! A throw-away node for the plugins: a namespace that plays the host, namespaces that play
//! containers, the installed binary, and what `ip -j` says. Everything goes when it is dropped.

#![allow(dead_code, unreachable_pub, reason = "shared by test files, each of which uses a part")]

pub mod cases;
pub mod compare;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use felt_hostnet::netns::NetNs;
use serde_json::Value;

/// The directory of Debian's reference plugins.
pub const REFERENCE: &str = "/usr/lib/cni";

/// Whether the reference plugins are installed. Tests that need them say so when they are not.
pub fn has_reference() -> bool {
    Path::new(REFERENCE).join("bridge").exists()
}

/// A node.
pub struct Node {
    pub dir: tempfile::TempDir,
    host: NetNs,
    host_path: PathBuf,
    containers: Vec<PathBuf>,
}

/// The answer of one call.
#[derive(Debug)]
pub struct Answer {
    pub ok: bool,
    pub stdout: String,
    pub stderr: String,
}

impl Answer {
    /// The one JSON document on standard output.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|err| panic!("{err}: {self:?}"))
    }
    /// The message of an error object.
    pub fn msg(&self) -> String {
        assert!(!self.ok, "expected a failure: {self:?}");
        self.json()["msg"].as_str().unwrap().to_owned()
    }
    /// The result of a call that must have succeeded.
    pub fn good(self) -> Self {
        assert!(self.ok, "{self:?}");
        self
    }
}

/// One call to be made.
#[derive(Clone)]
pub struct Call<'a> {
    pub plugin: &'a str,
    pub command: &'a str,
    pub id: &'a str,
    pub netns: String,
    pub ifname: &'a str,
    pub args: &'a str,
    pub path: String,
    pub bin: PathBuf,
}

impl<'a> Call<'a> {
    /// The same call for another interface.
    #[must_use]
    pub fn ifname(mut self, name: &'a str) -> Self {
        self.ifname = name;
        self
    }
}

impl Node {
    /// A fresh node with the binary installed in `<dir>/bin`.
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let dir = tempfile::Builder::new().prefix("felt-cni-test-").tempdir().unwrap();
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let host_path = PathBuf::from(format!("/run/netns/felt-cnit-{}-{number}", std::process::id()));
        let host = NetNs::create_at(&host_path).expect("these tests need root and network namespaces");
        let node = Self { dir, host, host_path, containers: Vec::new() };
        let done = Command::new(env!("CARGO_BIN_EXE_felt-cni"))
            .args(["install", "--dir"])
            .arg(node.bin())
            .output()
            .unwrap();
        assert!(done.status.success(), "{done:?}");
        node.ip("link set lo up");
        node
    }

    /// Where the plugins are.
    pub fn bin(&self) -> PathBuf {
        self.dir.path().join("bin")
    }

    /// Waits until no process runs in the host's namespace: a killed plugin may leave a program it called.
    pub fn wait_until_quiet(&self) {
        let id = std::os::unix::fs::MetadataExt::ino;
        let own = id(&std::fs::metadata(&self.host_path).unwrap());
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
        while std::fs::read_dir("/proc").unwrap().flatten().any(|process| {
            std::fs::metadata(process.path().join("ns/net")).is_ok_and(|meta| id(&meta) == own)
        }) {
            assert!(std::time::Instant::now() < deadline, "a process stays in {}", self.host_path.display());
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }

    /// A path inside the node's own directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A new container namespace.
    pub fn container(&mut self, name: &str) -> String {
        let path = self.dir.path().join("ns").join(name);
        NetNs::create_at(&path).unwrap();
        self.containers.push(path.clone());
        path.to_str().unwrap().to_owned()
    }

    /// Takes a container's namespace away.
    pub fn remove_container(&mut self, path: &str) {
        NetNs::delete_at(path).unwrap();
        self.containers.retain(|p| p.to_str() != Some(path));
    }

    /// A call of an installed plugin for container `id`.
    pub fn call<'a>(&self, plugin: &'a str, command: &'a str, id: &'a str, netns: &str) -> Call<'a> {
        Call {
            plugin,
            command,
            id,
            netns: netns.to_owned(),
            ifname: "eth0",
            args: "",
            path: self.bin().to_str().unwrap().to_owned(),
            bin: self.bin(),
        }
    }

    /// The same call of Debian's reference plugin.
    pub fn reference<'a>(&self, plugin: &'a str, command: &'a str, id: &'a str, netns: &str) -> Call<'a> {
        self.other(Path::new(REFERENCE), plugin, command, id, netns)
    }

    /// The same call of the plugins in another directory.
    pub fn other<'a>(
        &self,
        dir: &Path,
        plugin: &'a str,
        command: &'a str,
        id: &'a str,
        netns: &str,
    ) -> Call<'a> {
        let path = dir.to_str().unwrap().to_owned();
        Call { path, bin: dir.to_owned(), ..self.call(plugin, command, id, netns) }
    }

    /// A command that runs in the host's namespace.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> HostCommand<'_> {
        HostCommand { node: self, command: Command::new(program) }
    }

    /// Makes the call with `config` on standard input.
    pub fn run(&self, call: &Call<'_>, config: &str) -> Answer {
        self.run_with(call, config, |_| {})
    }

    /// As [`Node::run`], with more set on the command.
    pub fn run_with(&self, call: &Call<'_>, config: &str, more: impl FnOnce(&mut Command)) -> Answer {
        let mut command = self.command(call.bin.join(call.plugin));
        command
            .command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("CNI_COMMAND", call.command)
            .env("CNI_CONTAINERID", call.id)
            .env("CNI_NETNS", &call.netns)
            .env("CNI_IFNAME", call.ifname)
            .env("CNI_ARGS", call.args)
            .env("CNI_PATH", &call.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        more(&mut command.command);
        let mut child = command.spawn();
        let _ = child.stdin.take().unwrap().write_all(config.as_bytes());
        let output = child.wait_with_output().unwrap();
        Answer {
            ok: output.status.success(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// `ip ARGS` in the host's namespace, which must succeed.
    pub fn ip(&self, args: &str) -> String {
        let output = self.command("ip").args(args).output();
        assert!(output.status.success(), "ip {args}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// `ip -j ARGS` in the host's namespace.
    pub fn ip_json(&self, args: &str) -> Value {
        parse_list(&self.ip(&format!("-j {args}")))
    }

    /// `ip -j ARGS` in a container.
    pub fn ip_in(&self, netns: &str, args: &str) -> Value {
        let ns = NetNs::open(netns).unwrap();
        let output =
            ns.with(|| Command::new("ip").arg("-j").args(args.split(' ')).output()).unwrap().unwrap();
        assert!(output.status.success(), "ip {args}: {output:?}");
        parse_list(&String::from_utf8(output.stdout).unwrap())
    }

    /// A command in a container.
    pub fn exec_in(&self, netns: &str, args: &str) -> Output {
        let mut words = args.split(' ');
        let ns = NetNs::open(netns).unwrap();
        ns.with(|| Command::new(words.next().unwrap()).args(words).output()).unwrap().unwrap()
    }

    /// Names of the host's links except lo.
    pub fn links(&self) -> Vec<String> {
        names(&self.ip_json("link show"))
    }

    /// Reads a sysctl of the host's namespace.
    pub fn sysctl(&self, name: &str) -> String {
        self.host.with(|| felt_hostnet::sysctl::read(name)).unwrap().unwrap()
    }

    /// Runs something in the host's namespace.
    pub fn with<T>(&self, work: impl FnOnce() -> T) -> T {
        self.host.with(work).unwrap()
    }
}

/// Names of links except lo.
pub fn names(links: &Value) -> Vec<String> {
    let mut names: Vec<String> = links
        .as_array()
        .unwrap()
        .iter()
        .map(|l| l["ifname"].as_str().unwrap().to_owned())
        .filter(|n| n != "lo")
        .collect();
    names.sort();
    names
}

/// iproute2 prints nothing at all for an empty list.
fn parse_list(text: &str) -> Value {
    if text.trim().is_empty() { Value::Array(Vec::new()) } else { serde_json::from_str(text).unwrap() }
}

impl Drop for Node {
    fn drop(&mut self) {
        for path in self.containers.iter().chain([&self.host_path]) {
            let gone = NetNs::delete_at(path);
            if !std::thread::panicking() {
                gone.unwrap();
            }
        }
    }
}

/// A command whose child starts in the host's namespace.
pub struct HostCommand<'a> {
    node: &'a Node,
    pub command: Command,
}

impl HostCommand<'_> {
    pub fn args(mut self, args: &str) -> Self {
        self.command.args(args.split(' '));
        self
    }
    pub fn output(mut self) -> Output {
        self.node.host.with(|| self.command.output()).unwrap().unwrap()
    }
    pub fn spawn(&mut self) -> std::process::Child {
        self.node.host.with(|| self.command.spawn()).unwrap().unwrap()
    }
}

/// Addresses of a link as `ip -j addr` lists them, without link-local ones.
pub fn addresses(list: &Value) -> Vec<String> {
    list.as_array()
        .unwrap()
        .iter()
        .flat_map(|l| l["addr_info"].as_array().unwrap())
        .filter(|a| a["scope"] != "link")
        .map(|a| format!("{}/{}", a["local"].as_str().unwrap(), a["prefixlen"]))
        .collect()
}

/// File names in a directory, sorted; empty when it does not exist.
pub fn files(dir: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
