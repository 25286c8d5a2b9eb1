//! `felt-cni kubenet`: the local pod network that kubelet once set up by itself.
//!
//! ```text
//! felt-cni kubenet --pod-cidr 10.0.2.0/24[,fd00:2::/64] [--mtu N] [--hairpin-mode MODE]
//!                  [--non-masquerade-cidr CIDR[,CIDR]] [--conf-dir DIR] [--watch]
//! ```
//!
//! Writes `DIR/10-kubenet.conflist` with the bridge configuration kubelet generated (and portmap and
//! bandwidth behind it, for what kubelet did itself) and sets the masquerade rule. With `--watch` it
//! stays and puts both back whenever somebody removed them.

use std::fs;
use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use felt_hostnet::netlink::{Family, Handle, OperState};
use felt_hostnet::sysctl;
use ipnet::IpNet;

use crate::ipconf;
use crate::json::{Object, Value};
use crate::types::error::{Context, Error, Result};
use crate::types::result::parse_cidr;
use crate::xtables::{Entry, Mark, Place, Plan, Tool};

const BRIDGE: &str = "cbr0";
/// MTU when no interface tells one.
const MTU_DEFAULT: u32 = 1460;
/// Smaller MTUs are not believed.
const MTU_MIN: u32 = 576;
/// How often `--watch` looks.
const PERIOD: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hairpin {
    Promiscuous,
    Veth,
    None,
}

#[derive(Debug, Clone, PartialEq)]
struct Options {
    pod_cidrs: Vec<IpNet>,
    mtu: Option<u32>,
    hairpin: Hairpin,
    non_masquerade: Vec<IpNet>,
    conf_dir: PathBuf,
    watch: bool,
}

impl Options {
    fn parse(args: &[String]) -> std::result::Result<Self, String> {
        let mut out = Self {
            pod_cidrs: Vec::new(),
            mtu: None,
            hairpin: Hairpin::Promiscuous,
            non_masquerade: vec![parse_cidr("10.0.0.0/8").map_err(|err| err.msg)?],
            conf_dir: "/etc/cni/net.d".into(),
            watch: false,
        };
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let (name, inline) = match arg.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (arg.as_str(), None),
            };
            if name == "--watch" {
                out.watch = true;
                continue;
            }
            let value = inline
                .or_else(|| args.next().cloned())
                .ok_or_else(|| format!("kubenet: {name} needs a value"))?;
            match name {
                "--pod-cidr" => out.pod_cidrs = cidrs(&value)?,
                "--non-masquerade-cidr" => out.non_masquerade = cidrs(&value)?,
                "--mtu" => {
                    let mtu = value.parse().map_err(|_| format!("kubenet: {value:?} is not an MTU"))?;
                    out.mtu = (mtu != 0).then_some(mtu);
                }
                "--conf-dir" => out.conf_dir = value.into(),
                "--hairpin-mode" => {
                    out.hairpin = match value.as_str() {
                        "promiscuous-bridge" => Hairpin::Promiscuous,
                        "hairpin-veth" => Hairpin::Veth,
                        "none" => Hairpin::None,
                        other => {
                            return Err(format!(
                                "kubenet: unknown hairpin mode {other:?} (promiscuous-bridge, hairpin-veth or none)"
                            ));
                        }
                    };
                }
                other => return Err(format!("kubenet: unknown argument {other:?}")),
            }
        }
        if out.pod_cidrs.is_empty() {
            return Err("kubenet: --pod-cidr CIDR is needed".into());
        }
        for v4 in [true, false] {
            if out.pod_cidrs.iter().filter(|net| net.addr().is_ipv4() == v4).count() > 1 {
                return Err("kubenet: --pod-cidr takes one CIDR per family".into());
            }
        }
        Ok(out)
    }
}

fn cidrs(text: &str) -> std::result::Result<Vec<IpNet>, String> {
    text.split(',')
        .map(|part| {
            parse_cidr(part.trim()).map(|net| net.trunc()).map_err(|err| format!("kubenet: {}", err.msg))
        })
        .collect()
}

/// Runs the command.
///
/// # Errors
/// A text for standard error.
pub fn run(args: &[String]) -> std::result::Result<String, String> {
    let options = Options::parse(args)?;
    let text = |err: Error| format!("kubenet: {err}");
    let path = apply(&options).map_err(text)?;
    if !options.watch {
        return Ok(format!("wrote {}\n", path.display()));
    }
    let mut last = String::new();
    loop {
        std::thread::sleep(PERIOD);
        // A trouble is said once, not every ten seconds.
        let now = apply(&options).err().map(|err| err.to_string()).unwrap_or_default();
        if now != last && !now.is_empty() {
            let _ = writeln!(std::io::stderr(), "felt-cni: kubenet: {now}");
        }
        last = now;
    }
}

/// Brings everything into its place; what is there already is not touched.
fn apply(options: &Options) -> Result<PathBuf> {
    let mut host = Handle::new()?;
    let mtu = match options.mtu {
        Some(mtu) => mtu,
        None => smallest_mtu(&mut host)?,
    };
    let path = options.conf_dir.join("10-kubenet.conflist");
    write_if_changed(&path, &conflist(options, mtu).to_indented())?;
    for v4 in [true, false] {
        if options.pod_cidrs.iter().any(|net| net.addr().is_ipv4() == v4) {
            ipconf::enable_forwarding(&mut host, v4)?;
            masquerade(options, if v4 { Family::V4 } else { Family::V6 })?;
        }
    }
    let bridged = "net/bridge/bridge-nf-call-iptables";
    if sysctl::exists(bridged) {
        sysctl::ensure(bridged, "1")?;
    }
    if options.hairpin == Hairpin::Promiscuous {
        drop_doubles(options, &mut host)?;
    }
    Ok(path)
}

/// The smallest MTU of the host's interfaces, as kubelet chose it.
fn smallest_mtu(host: &mut Handle) -> Result<u32> {
    let usable = host.links()?.into_iter().filter(|link| {
        let point_to_point = link.flags & libc::IFF_POINTOPOINT as u32 != 0;
        link.is_up()
            && !link.loopback
            && !point_to_point
            && link.name != BRIDGE
            && link.oper_state != OperState::Down
            && link.mtu >= MTU_MIN
    });
    Ok(usable.map(|link| link.mtu).min().unwrap_or(MTU_DEFAULT))
}

fn gateway(net: &IpNet) -> IpAddr {
    match net.network() {
        IpAddr::V4(v4) => std::net::Ipv4Addr::from(u32::from(v4).wrapping_add(1)).into(),
        IpAddr::V6(v6) => std::net::Ipv6Addr::from(u128::from(v6).wrapping_add(1)).into(),
    }
}

fn conflist(options: &Options, mtu: u32) -> Value {
    let mut ipam = Object::new();
    ipam.push("type", "host-local");
    let mut ranges = Vec::new();
    let mut routes = Vec::new();
    for net in &options.pod_cidrs {
        let mut range = Object::new();
        // kubelet wrote the gateway's address with the prefix length here, which host-local refuses.
        range.push("subnet", net.to_string());
        range.push("gateway", gateway(net).to_string());
        ranges.push(Value::Array(vec![range.into()]));
        let mut route = Object::new();
        route.push("dst", if net.addr().is_ipv4() { "0.0.0.0/0" } else { "::/0" });
        routes.push(Value::Object(route));
    }
    ipam.push("ranges", ranges);
    ipam.push("routes", routes);
    let mut bridge = Object::new();
    bridge.push("type", "bridge");
    bridge.push("bridge", BRIDGE);
    bridge.push("mtu", mtu);
    bridge.push("addIf", "eth0");
    bridge.push("isGateway", true);
    bridge.push("ipMasq", false);
    bridge.push("hairpinMode", options.hairpin == Hairpin::Veth);
    if options.hairpin == Hairpin::Promiscuous {
        bridge.push("promiscMode", true);
    }
    bridge.push("ipam", ipam);
    let mut plugins = vec![Value::Object(bridge)];
    for (kind, capability) in [("portmap", "portMappings"), ("bandwidth", "bandwidth")] {
        let mut capabilities = Object::new();
        capabilities.push(capability, true);
        let mut plugin = Object::new();
        plugin.push("type", kind);
        plugin.push("capabilities", capabilities);
        plugins.push(plugin.into());
    }
    let mut list = Object::new();
    list.push("cniVersion", "1.0.0");
    list.push("name", "kubenet");
    list.push("plugins", plugins);
    list.into()
}

/// A runtime watching the directory must not see half a file, nor a change where there is none.
fn write_if_changed(path: &Path, text: &str) -> Result<()> {
    let text = format!("{text}\n");
    if fs::read_to_string(path).is_ok_and(|present| present == text) {
        return Ok(());
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).with_context(|| format!("mkdir {}", dir.display()))?;
    }
    let temp = path.with_extension("conflist.new");
    fs::write(&temp, text)
        .and_then(|()| fs::rename(&temp, path))
        .with_context(|| format!("write {}", path.display()))
}

fn masquerade(options: &Options, family: Family) -> Result<()> {
    let excluded = options
        .non_masquerade
        .iter()
        .find(|net| Family::of(net.addr()) == family)
        .filter(|net| net.prefix_len() != 0);
    let Some(excluded) = excluded else { return Ok(()) };
    let tool = Tool::find(family).ok_or_else(|| Error::internal("iptables is not installed"))?;
    let rule = format!(
        "! -d {excluded} -m comment --comment \"kubenet: SNAT for outbound traffic from cluster\" \
         -m addrtype ! --dst-type LOCAL -j MASQUERADE"
    );
    let plan = Plan {
        table: "nat",
        entries: vec![Entry {
            chain: "POSTROUTING".into(),
            rule,
            mark: Mark::Destination(excluded.addr()),
            place: Place::Last,
        }],
        exact: true,
        ..Plan::default()
    };
    tool.ensure(&plan).map(drop)
}

/// A promiscuous bridge hears its own frames twice: the second copy, with the bridge's MAC, is dropped
/// before it reaches the pods. The bridge exists from the first pod on; before, there is nothing to do.
fn drop_doubles(options: &Options, host: &mut Handle) -> Result<()> {
    let Ok(bridge) = host.link_by_name(BRIDGE) else { return Ok(()) };
    let Some(mac) = bridge.mac else { return Ok(()) };
    let mut wanted = Vec::new();
    for net in &options.pod_cidrs {
        let (proto, source) = if net.addr().is_ipv4() { ("IPv4", "--ip-src") } else { ("IPv6", "--ip6-src") };
        let rule = |from: String, verdict: &str| {
            format!("-p {proto} -s {mac} -o veth+ {source} {from} -j {verdict}")
        };
        wanted.push(rule(gateway(net).to_string(), "ACCEPT"));
        wanted.push(rule(net.to_string(), "DROP"));
    }
    let listed = ebtables("-t filter -L KUBE-DEDUP --Lmac2").unwrap_or_default();
    let present: Vec<&str> = listed.lines().map(str::trim).filter(|l| l.starts_with("-p ")).collect();
    if present == wanted.iter().map(String::as_str).collect::<Vec<_>>() {
        return Ok(());
    }
    if listed.is_empty() {
        ebtables("-t filter -N KUBE-DEDUP")?;
    } else {
        ebtables("-t filter -F KUBE-DEDUP")?;
    }
    if !ebtables("-t filter -L OUTPUT")?.contains("KUBE-DEDUP") {
        ebtables("-t filter -A OUTPUT -j KUBE-DEDUP")?;
    }
    wanted.iter().try_for_each(|rule| ebtables(&format!("-t filter -A KUBE-DEDUP {rule}")).map(drop))
}

fn ebtables(args: &str) -> Result<String> {
    let output = Command::new("ebtables").args(args.split(' ')).output().context("exec ebtables")?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(Error::internal(format!("ebtables {args}: {}", String::from_utf8_lossy(&output.stderr).trim())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> std::result::Result<Options, String> {
        Options::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn writes_kubelets_bridge_configuration() {
        let o = options("--pod-cidr 10.0.2.1/24,fd00:2::/64 --hairpin-mode=hairpin-veth").unwrap();
        let text = conflist(&o, 1500).to_compact();
        assert_eq!(
            text,
            concat!(
                r#"{"cniVersion":"1.0.0","name":"kubenet","plugins":[{"type":"bridge","bridge":"cbr0","mtu":1500,"#,
                r#""addIf":"eth0","isGateway":true,"ipMasq":false,"hairpinMode":true,"ipam":{"type":"host-local","#,
                r#""ranges":[[{"subnet":"10.0.2.0/24","gateway":"10.0.2.1"}],[{"subnet":"fd00:2::/64","gateway":"fd00:2::1"}]],"#,
                r#""routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}]}},{"type":"portmap","capabilities":{"portMappings":true}},"#,
                r#"{"type":"bandwidth","capabilities":{"bandwidth":true}}]}"#
            )
        );
    }

    #[test]
    fn wrong_arguments_are_named() {
        assert!(options("--mtu 1").unwrap_err().contains("--pod-cidr"));
        assert!(options("--pod-cidr x").unwrap_err().contains("invalid CIDR address: x"));
        assert!(options("--pod-cidr 10.0.0.0/24,10.1.0.0/24").unwrap_err().contains("per family"));
        assert!(
            options("--pod-cidr 10.0.0.0/24 --hairpin-mode x").unwrap_err().contains("promiscuous-bridge")
        );
        assert!(options("--pod-cidr").unwrap_err().contains("needs a value"));
    }
}
