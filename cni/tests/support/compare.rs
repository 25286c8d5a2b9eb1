//! What can be seen after a call of a plugin, and how two such sights differ.
//!
//! What is random (MACs, names of host ends, numbers of links) is replaced by words; what is left must
//! be equal, line by line, but for the accepted differences, each of which has its reason.

#![allow(dead_code, unreachable_pub, reason = "shared by test files, each of which uses a part")]

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::cases::Case;
use super::{Node, files};

/// (substring of a line, reason): lines that may differ.
pub const ACCEPTED: &[(&str, &str)] = &[
    ("\"nodad\"", "felt's IPv6 addresses are usable at once"),
    ("\"optimistic\"", "state of duplicate address detection"),
    ("\"tentative\"", "state of duplicate address detection"),
    ("fe80::", "link-local addresses come when they come"),
    ("ff00::", "the kernel's multicast route of a link"),
    ("\"anycast\"", "routes the kernel adds while forwarding is switched on"),
    (
        r#""dst":"fd00:1::1","flags":[],"metric":0,"pref":"medium","protocol":"kernel","table":"local""#,
        "the gateway's IPv6 address is usable at once; the reference's is tentative",
    ),
];

/// Everything observable after a call, as lines.
pub type Observed = BTreeMap<String, Vec<String>>;

/// A fresh node and a container for one case.
pub struct Run {
    pub node: Node,
    pub ns: String,
}

impl Run {
    pub fn new(case: &Case) -> Self {
        let mut node = Node::new();
        let ns = node.container("c1");
        for line in case.prepare {
            let line = line.replace("NSNAME", &ns);
            let (program, args) = line.split_once(' ').unwrap();
            let output = node.command(program).args(args).output();
            assert!(output.status.success(), "{line}: {output:?}");
        }
        Self { node, ns }
    }

    pub fn call(
        &self,
        case: &Case,
        command: &'static str,
        reference: Option<&Path>,
        prev: Option<&Value>,
    ) -> String {
        let mut call = match reference {
            Some(dir) => self.node.other(dir, case.plugin, command, "cid1", &self.ns),
            None => self.node.call(case.plugin, command, "cid1", &self.ns),
        };
        call.ifname = case.ifname;
        call.args = case.args;
        let mut config = self.config(case, if command == "DEL" { "ADD" } else { command });
        if let Some(prev) = prev {
            config = config.replacen('{', &format!("{{\"prevResult\":{prev},"), 1);
        }
        let answer = self.node.run(&call, &config);
        assert!(
            answer.ok,
            "{} {command} by {}: {answer:?}",
            case.name,
            reference.map_or_else(|| "felt".to_owned(), |dir| dir.display().to_string())
        );
        answer.stdout
    }

    /// The case's configuration. For ADD with the result of the container made by hand; for DEL only
    /// where the plugin cannot know its addresses otherwise, as after an ADD that never ended.
    pub fn config(&self, case: &Case, command: &str) -> String {
        let config = case.config.replace("DIR", self.node.dir.path().to_str().unwrap());
        if command == "DEL" && case.plugin != "firewall" {
            return config.replace("\"PREV\":0,", "").replace(",\"PREV\":4", "");
        }
        if command == "CHECK" {
            return config;
        }
        config.replace("\"PREV\":0", &self.previous(true)).replace("\"PREV\":4", &self.previous(false))
    }

    /// The result of the container made by hand.
    fn previous(&self, dual: bool) -> String {
        let v6 = if dual { r#",{"address":"fd00::9/64","gateway":"fd00::1","interface":1}"# } else { "" };
        format!(
            r#""prevResult":{{"cniVersion":"1.0.0","interfaces":[{{"name":"vhost0","mac":"02:00:00:00:0a:0b"}},{{"name":"eth0","sandbox":{:?}}}],
               "ips":[{{"address":"10.1.2.9/24","gateway":"10.1.2.1","interface":1}}{v6}]}}"#,
            self.ns
        )
    }

    pub fn observe(&self, stdout: &str) -> Observed {
        let mut seen = Observed::new();
        // 1.1.1 writes 1.0.0 results in order of declaration and with an empty dns; v1.9.1, whose form
        // felt has, sorts them. The order of keys is a matter for unit tests.
        let result = serde_json::from_str::<Value>(stdout).map(|v| v.to_string().replace("\"dns\":{},", ""));
        seen.insert("result".into(), vec![result.unwrap_or_else(|_| stdout.to_owned())]);
        for (place, netns) in [("host", None), ("container", Some(&self.ns))] {
            let ip = |args: &str| match netns {
                None => self.node.ip_json(args),
                Some(ns) => self.node.ip_in(ns, args),
            };
            for what in
                ["-d link", "addr", "route show table all", "-6 route show table all", "rule", "-6 rule"]
            {
                seen.insert(format!("{place} ip {what}"), flatten(&ip(what)));
            }
        }
        for what in ["qdisc", "filter show dev vhost0 parent ffff:"] {
            let output = self.node.command("tc").args(&format!("-d {what}")).output();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            // Numbers of links and the refcount of actions are the kernel's business.
            seen.insert(format!("tc {what}"), text.lines().map(str::to_owned).collect());
        }
        for tool in ["iptables-save", "ip6tables-save"] {
            let output = self.node.command(tool).output();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let lines = text
                .lines()
                .filter(|l| !l.starts_with('#'))
                .map(|l| l.split(" [").next().unwrap().to_owned());
            seen.insert(tool.into(), lines.collect());
        }
        // Tables of iptables-nft were seen above.
        let output = self.node.command("nft").args("-j list ruleset").output();
        let ruleset: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let native = ruleset["nftables"].as_array().into_iter().flatten().filter(|item| {
            let (kind, object) = item.as_object().unwrap().iter().next().unwrap();
            let of = object["table"].as_str().or_else(|| object["name"].as_str()).unwrap_or_default();
            kind != "metainfo" && !["filter", "nat", "mangle", "raw", "security"].contains(&of)
                || object["family"] == "bridge"
        });
        seen.insert("nft".into(), native.map(|item| without_random(item).to_string()).collect());
        for name in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            seen.insert(name.into(), vec![self.node.sysctl(name)]);
        }
        // keep_addr_on_down and ndisc_notify are set by v1.9.1 and not by 1.1.1.
        for interface in ["eth0", "net1", "lo"] {
            for name in ["arp_notify", "accept_dad", "disable_ipv6"] {
                for family in ["ipv4", "ipv6"] {
                    let path = format!("cat /proc/sys/net/{family}/conf/{interface}/{name}");
                    let output = self.node.exec_in(&self.ns, &path);
                    seen.insert(path, vec![String::from_utf8_lossy(&output.stdout).into_owned()]);
                }
            }
        }
        let data = self.node.path("data/net1");
        for name in files(&data) {
            seen.insert(format!("file {name}"), vec![std::fs::read_to_string(data.join(&name)).unwrap()]);
        }
        let dir = self.node.dir.path().to_str().unwrap();
        for lines in seen.values_mut() {
            for line in lines.iter_mut() {
                *line = neutral(&line.replace(dir, "DIR"));
            }
            lines.retain(|l| !l.is_empty());
        }
        for lines in seen.iter_mut().filter(|(k, _)| k.contains(" ip ")).map(|(_, v)| v) {
            lines.sort();
        }
        seen
    }
}

/// A value without what is random or timing.
fn without_random(value: &Value) -> Value {
    // txqlen: 1.1.1 leaves a container's end without a queue, v1.9.1 with the kernel's default.
    // operstate: follows the carrier from a work queue.
    const RANDOM: &[&str] = &[
        "txqlen",
        "handle",
        "operstate",
        "ifindex",
        "link_index",
        "link_netnsid",
        "peer",
        "valid_life_time",
        "preferred_life_time",
        "broadcast_mac",
        "bridge_id",
        "root_id",
        "hello_timer",
        "tcn_timer",
        "topology_change_timer",
        "gc_timer",
        "designated_bridge",
        "designated_root",
        "master_index",
        "root_port",
        "inet6_addr_gen_mode",
        "expires",
        "hold_timer",
        "message_age_timer",
        "forward_delay_timer",
        "id",
        "group_addr",
        "num_tx_queues",
        "num_rx_queues",
        "port_id",
        "port_no",
        "no",
        "designated_port",
        "link",
        "altnames",
        "dynamic",
        "topology_change",
        "topology_change_detected",
        "bridge_id",
        "tso_max_size",
        "tso_max_segs",
    ];
    match value {
        Value::Object(o) => Value::Object(
            o.iter()
                .filter(|(k, _)| !RANDOM.contains(&k.as_str()))
                .map(|(k, v)| (k.clone(), without_random(v)))
                .collect(),
        ),
        Value::Array(items) => Value::Array(
            items.iter().filter(|i| *i != "NO-CARRIER" && *i != "linkdown").map(without_random).collect(),
        ),
        other => other.clone(),
    }
}

/// One line per element of a list, objects as sorted JSON.
fn flatten(list: &Value) -> Vec<String> {
    let mut lines = Vec::new();
    for item in list.as_array().unwrap() {
        let item = without_random(item);
        match item.get("addr_info").and_then(Value::as_array) {
            Some(addresses) => {
                for address in addresses {
                    lines.push(format!("{} {address}", item["ifname"]));
                }
            }
            None => lines.push(item.to_string()),
        }
    }
    lines
}

/// Replaces MACs and the random names of host ends by words.
pub fn neutral(line: &str) -> String {
    let bytes = line.as_bytes();
    let mut out = String::new();
    let mut i = 0;
    let is_hex = |b: &u8| b.is_ascii_hexdigit();
    while i < bytes.len() {
        let rest = &bytes[i..];
        let mac =
            rest.len() >= 17 && (0..17).all(|k| if k % 3 == 2 { rest[k] == b':' } else { is_hex(&rest[k]) });
        if mac && !line[i..].starts_with("02:00:00:00:0a:0b") {
            out.push_str("MAC");
            i += 17;
        } else if rest.starts_with(b"veth") && rest.len() >= 12 && rest[4..12].iter().all(is_hex) {
            out.push_str("VETH");
            i += 12;
        } else {
            let step = line[i..].chars().next().unwrap().len_utf8();
            out.push_str(&line[i..i + step]);
            i += step;
        }
    }
    out
}

/// Lines that are in one and not in the other, without the accepted ones.
pub fn differences(ours: &Observed, theirs: &Observed, accepted: &[(&str, &str)]) -> Vec<String> {
    let mut out = Vec::new();
    let empty = Vec::new();
    for key in ours.keys().chain(theirs.keys()) {
        let (a, b) = (ours.get(key).unwrap_or(&empty), theirs.get(key).unwrap_or(&empty));
        let allowed = |line: &str| ACCEPTED.iter().chain(accepted).any(|(part, _)| line.contains(part));
        // An accepted word inside a line: compare without it.
        let clean = |lines: &Vec<String>| -> Vec<String> {
            lines
                .iter()
                .map(|l| l.replace(",\"nodad\":true", "").replace(",\"tentative\":true", ""))
                .filter(|l| !allowed(l))
                .collect()
        };
        let (a, b) = (clean(a), clean(b));
        if a != b {
            out.extend(a.iter().filter(|l| !b.contains(l)).map(|l| format!("{key}: felt only: {l}")));
            out.extend(b.iter().filter(|l| !a.contains(l)).map(|l| format!("{key}: reference only: {l}")));
            if a.len() != b.len() || a.iter().all(|l| b.contains(l)) {
                out.push(format!("{key}: {} lines against {}, or another order", a.len(), b.len()));
            }
        }
    }
    out.sort();
    out.dedup();
    out
}
