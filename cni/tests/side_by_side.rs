//! felt and Debian's reference plugins do the same: results, kernel state, firewall, files.
//!
//! Each case runs in two fresh nodes, one per implementation. What is random (MACs, names of host
//! ends, numbers of links) is replaced by words; what is left must be equal, line by line, but for
//! the differences listed in [`ACCEPTED`] with their reasons. The last test makes sure that the
//! comparison finds a rule that is missing.

mod support;

use std::collections::BTreeMap;

use serde_json::Value;
use support::{Node, REFERENCE, files, has_reference};

/// (substring of a line, reason): lines that may differ.
const ACCEPTED: &[(&str, &str)] = &[
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

struct Case {
    name: &'static str,
    plugin: &'static str,
    ifname: &'static str,
    /// `DIR` is the node's directory, `NS` the container's namespace.
    config: &'static str,
    args: &'static str,
    /// Commands in the host's namespace first.
    prepare: &'static [&'static str],
    /// Other accepted differences: (substring, reason).
    accepted: &'static [(&'static str, &'static str)],
}

/// A container made by hand, for plugins that only chain: eth0 with one address per family.
const WITH_CONTAINER: &[&str] = &[
    "ip link add vhost0 type veth peer name eth0 netns NSNAME",
    "ip link set vhost0 up",
    "nsenter --net=NSNAME ip link set eth0 up",
    "nsenter --net=NSNAME ip addr add 10.1.2.9/24 dev eth0",
    "ip addr add 10.1.2.1/24 dev vhost0",
];

const CASE: Case =
    Case { name: "", plugin: "bridge", ifname: "eth0", config: "", args: "", prepare: &[], accepted: &[] };

fn cases() -> Vec<Case> {
    let bridge = |name, keys: &'static str| Case { name, config: keys, ..CASE };
    vec![
        bridge("bridge layer 2", r#"{"cniVersion":"1.0.0","name":"net1","bridge":"tbr0"}"#),
        bridge(
            "bridge gateway",
            r#"{"cniVersion":"0.3.1","name":"net1","bridge":"tbr0","isGateway":true,"mtu":1400,
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","dataDir":"DIR/data","routes":[{"dst":"10.0.0.0/8"}]}}"#,
        ),
        bridge(
            "bridge default gateway, hairpin, dual stack",
            r#"{"cniVersion":"1.0.0","name":"net1","bridge":"tbr0","isDefaultGateway":true,"hairpinMode":true,
                "dns":{"nameservers":["192.0.2.1"]},
                "ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00:1::/64"}]],"dataDir":"DIR/data"}}"#,
        ),
        bridge(
            "bridge promiscuous, 0.2.0",
            r#"{"cniVersion":"0.2.0","name":"net1","bridge":"tbr0","isGateway":true,"promiscMode":true,
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","gateway":"10.1.2.99","dataDir":"DIR/data"}}"#,
        ),
        bridge(
            "bridge masquerade",
            r#"{"cniVersion":"1.0.0","name":"net1","bridge":"tbr0","isDefaultGateway":true,"ipMasq":true,
                "ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00:1::/64"}]],"dataDir":"DIR/data"}}"#,
        ),
        Case {
            name: "bridge static addresses",
            config: r#"{"cniVersion":"1.0.0","name":"net1","bridge":"tbr0",
                "ipam":{"type":"static","addresses":[{"address":"10.9.0.7/24","gateway":"10.9.0.1"}],
                "routes":[{"dst":"0.0.0.0/0"}],"dns":{"nameservers":["192.0.2.9"],"search":["a.example"]}}}"#,
            accepted: &[("\"interface\":2", "1.1.1 loses the dns of IPAM, v1.9.1 keeps it")],
            ..CASE
        },
        Case {
            name: "bridge with a MAC by CNI_ARGS",
            config: r#"{"cniVersion":"1.0.0","name":"net1","bridge":"tbr0","ipam":{"type":"static","addresses":[{"address":"10.9.0.7/24"}]}}"#,
            args: "IgnoreUnknown=1;K8S_POD_NAME=x;MAC=02:00:00:00:0a:0b",
            ..CASE
        },
        Case {
            name: "ptp dual stack with masquerade",
            plugin: "ptp",
            config: r#"{"cniVersion":"0.4.0","name":"net1","ipMasq":true,"mtu":1350,"dns":{"domain":"x.example"},
                "ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00:1::/64"}]],
                "routes":[{"dst":"0.0.0.0/0"},{"dst":"::/0"}],"dataDir":"DIR/data"}}"#,
            ..CASE
        },
        Case {
            name: "macvlan",
            plugin: "macvlan",
            prepare: &["ip link add m0 type veth peer name m1", "ip link set m0 up", "ip link set m1 up"],
            config: r#"{"cniVersion":"1.0.0","name":"net1","master":"m0","mode":"private","mtu":1300,
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#,
            ..CASE
        },
        Case {
            name: "macvlan on the default route's device, layer 2",
            plugin: "macvlan",
            ifname: "net1",
            prepare: &[
                "ip link add m0 type veth peer name m1",
                "ip link set m0 up",
                "ip link set m1 up",
                "ip addr add 198.18.7.1/24 dev m0",
                "ip route add default via 198.18.7.2",
            ],
            config: r#"{"cniVersion":"0.3.0","name":"net1"}"#,
            ..CASE
        },
        Case {
            name: "host-local with requested addresses",
            plugin: "host-local",
            config: r#"{"cniVersion":"1.0.0","name":"net1","runtimeConfig":{"ips":["10.1.2.30/24"]},
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","rangeStart":"10.1.2.20","dataDir":"DIR/data",
                "routes":[{"dst":"0.0.0.0/0","gw":"10.1.2.1"}]}}"#,
            ..CASE
        },
        Case {
            name: "static by the runtime",
            plugin: "static",
            config: r#"{"cniVersion":"0.3.1","name":"net1","runtimeConfig":{"ips":["10.1.2.30/24","fd00::5/64"]},"ipam":{"type":"static"}}"#,
            ..CASE
        },
        Case {
            name: "portmap, two protocols, both families",
            plugin: "portmap",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"runtimeConfig":{"portMappings":[
                {"hostPort":8080,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8081,"containerPort":81,"protocol":"tcp","hostIP":"198.18.7.1"},
                {"hostPort":5353,"containerPort":53,"protocol":"udp","hostIP":"0.0.0.0"},
                {"hostPort":8082,"containerPort":82,"protocol":"sctp","hostIP":"fd00::1"}]}}"#,
            ..CASE
        },
        Case {
            name: "portmap with another mark and conditions",
            plugin: "portmap",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"markMasqBit":5,
                "conditionsV4":["-s","192.0.2.0/24"],"conditionsV6":["!","-s","fd00::/16"],
                "runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}"#,
            ..CASE
        },
        Case {
            name: "portmap without snat, twenty ports",
            plugin: "portmap",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"snat":false,"runtimeConfig":{"portMappings":[
                {"hostPort":8000,"containerPort":80,"protocol":"tcp"},{"hostPort":8001,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8002,"containerPort":80,"protocol":"tcp"},{"hostPort":8003,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8004,"containerPort":80,"protocol":"tcp"},{"hostPort":8005,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8006,"containerPort":80,"protocol":"tcp"},{"hostPort":8007,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8008,"containerPort":80,"protocol":"tcp"},{"hostPort":8009,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8010,"containerPort":80,"protocol":"tcp"},{"hostPort":8011,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8012,"containerPort":80,"protocol":"tcp"},{"hostPort":8013,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8014,"containerPort":80,"protocol":"tcp"},{"hostPort":8015,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8016,"containerPort":80,"protocol":"tcp"},{"hostPort":8017,"containerPort":80,"protocol":"udp"}]}}"#,
            ..CASE
        },
        Case {
            name: "portmap with a chain of its own for marks",
            plugin: "portmap",
            prepare: &[
                "ip link add vhost0 type veth peer name eth0 netns NSNAME",
                "iptables -t nat -N MYMARK",
            ],
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"externalSetMarkChain":"MYMARK","conditionsV6":[],
                "runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp","hostIP":"0.0.0.0"}]}}"#,
            accepted: &[("MYMARK", "ip6tables has no such chain: one family only")],
            ..CASE
        },
        Case {
            name: "firewall",
            plugin: "firewall",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"backend":"iptables"}"#,
            ..CASE
        },
        Case {
            name: "firewall isolating bridges",
            plugin: "firewall",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"backend":"iptables","iptablesAdminChainName":"MINE","ingressPolicy":"same-bridge"}"#,
            accepted: &[(
                "(ingressPolicy: same-bridge",
                "1.1.1 knows no isolated policy: v1.9.1's comments name both",
            )],
            ..CASE
        },
        Case {
            name: "tuning",
            plugin: "tuning",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"dataDir":"DIR/data/net1","mtu":1400,"promisc":true,
                "mac":"02:00:00:00:0a:0b","allmulti":true,
                "sysctl":{"net.ipv4.conf.IFNAME.arp_filter":"1","net.core.somaxconn":"512"}}"#,
            ..CASE
        },
        Case {
            name: "bandwidth",
            plugin: "bandwidth",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":0,"runtimeConfig":{"bandwidth":
                {"ingressRate":10000000,"ingressBurst":4294967295,"egressRate":8000000,"egressBurst":80000}}}"#,
            accepted: &[
                ("mirred", "felt's filter has one action, the reference's a second one that never runs"),
                ("index 2 ref 1", "the second action"),
            ],
            ..CASE
        },
        Case {
            name: "sbr",
            plugin: "sbr",
            prepare: &[
                "ip link add vhost0 type veth peer name eth0 netns NSNAME",
                "ip link set vhost0 up",
                "nsenter --net=NSNAME ip link set eth0 up",
                "nsenter --net=NSNAME ip addr add 10.1.2.9/24 dev eth0",
                "nsenter --net=NSNAME ip route add default via 10.1.2.1",
                "nsenter --net=NSNAME ip route add 192.0.2.0/24 via 10.1.2.7",
            ],
            config: r#"{"cniVersion":"1.0.0","name":"net1","PREV":4}"#,
            ..CASE
        },
        Case {
            name: "host-device with addresses",
            plugin: "host-device",
            ifname: "net1",
            prepare: &["ip link add hd0 type veth peer name hd1", "ip link set hd1 up", "ip link set hd0 up"],
            config: r#"{"cniVersion":"1.0.0","name":"net1","device":"hd0",
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","dataDir":"DIR/data","routes":[{"dst":"0.0.0.0/0"}]}}"#,
            accepted: &[("\"hd0\"", "1.1.1 leaves its alias on the device, v1.9.1 clears it")],
            ..CASE
        },
        Case {
            name: "loopback",
            plugin: "loopback",
            ifname: "lo",
            config: r#"{"cniVersion":"1.0.0","name":"cni-loopback"}"#,
            ..CASE
        },
    ]
}

/// Everything observable after a call, as lines.
type Observed = BTreeMap<String, Vec<String>>;

struct Run {
    node: Node,
    ns: String,
}

impl Run {
    fn new(case: &Case) -> Self {
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

    fn call(&self, case: &Case, command: &'static str, reference: bool, prev: Option<&Value>) -> String {
        let mut call = match reference {
            true => self.node.reference(case.plugin, command, "cid1", &self.ns),
            false => self.node.call(case.plugin, command, "cid1", &self.ns),
        };
        call.ifname = case.ifname;
        call.args = case.args;
        let dir = self.node.dir.path().to_str().unwrap();
        let mut config = case.config.replace("DIR", dir);
        if command != "CHECK" {
            config = config
                .replace("\"PREV\":0", &self.previous(true))
                .replace("\"PREV\":4", &self.previous(false));
        }
        if let Some(prev) = prev {
            config = config.replacen('{', &format!("{{\"prevResult\":{prev},"), 1);
        }
        let answer = self.node.run(&call, &config);
        assert!(
            answer.ok,
            "{} {command} by {}: {answer:?}",
            case.name,
            if reference { REFERENCE } else { "felt" }
        );
        answer.stdout
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

    fn observe(&self, stdout: &str) -> Observed {
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

/// One line per element of a list, objects as sorted JSON without what is random or timing.
fn flatten(list: &Value) -> Vec<String> {
    // txqlen: 1.1.1 leaves a container's end without a queue, v1.9.1 with the kernel's default.
    // operstate: follows the carrier from a work queue.
    const RANDOM: &[&str] = &[
        "txqlen",
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
    fn strip(value: &Value) -> Value {
        match value {
            Value::Object(o) => Value::Object(
                o.iter()
                    .filter(|(k, _)| !RANDOM.contains(&k.as_str()))
                    .map(|(k, v)| (k.clone(), strip(v)))
                    .collect(),
            ),
            Value::Array(items) => Value::Array(
                items.iter().filter(|i| *i != "NO-CARRIER" && *i != "linkdown").map(strip).collect(),
            ),
            other => other.clone(),
        }
    }
    let mut lines = Vec::new();
    for item in list.as_array().unwrap() {
        let item = strip(item);
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
fn neutral(line: &str) -> String {
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
fn differences(ours: &Observed, theirs: &Observed, accepted: &[(&str, &str)]) -> Vec<String> {
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

fn skip() -> bool {
    if has_reference() {
        return false;
    }
    let note =
        format!("SKIPPED: {REFERENCE} holds no reference plugins (Debian: containernetworking-plugins)\n");
    std::io::Write::write_all(&mut std::io::stderr(), note.as_bytes()).unwrap();
    true
}

#[test]
fn felt_does_what_the_reference_does() {
    if skip() {
        return;
    }
    let mut found = Vec::new();
    for case in cases() {
        let [ours, theirs] = [false, true].map(|reference| {
            let run = Run::new(&case);
            let result = run.call(&case, "ADD", reference, None);
            let added = run.observe(&result);
            let out = run.call(&case, "DEL", reference, None);
            let removed = run.observe(&out);
            [added, removed]
        });
        for (when, (ours, theirs)) in ["after ADD", "after DEL"].iter().zip(ours.iter().zip(&theirs)) {
            found.extend(
                differences(ours, theirs, case.accepted).iter().map(|d| format!("{} {when}: {d}", case.name)),
            );
        }
    }
    assert!(found.is_empty(), "{} differences:\n{}", found.len(), found.join("\n"));
}

#[test]
fn either_removes_what_the_other_made() {
    if skip() {
        return;
    }
    for case in cases() {
        for reference_adds in [true, false] {
            let run = Run::new(&case);
            let before = run.observe("");
            let result = run.call(&case, "ADD", reference_adds, None);
            let value: Value = serde_json::from_str(&result).unwrap();
            // The reference's CHECK fails for bridges without IPAM.
            let checkable = reference_adds || case.config.contains("\"ipam\"") || case.plugin == "loopback";
            if value["cniVersion"].as_str() >= Some("0.4.0") && checkable {
                // And the other's CHECK is content.
                run.call(&case, "CHECK", !reference_adds, Some(&value));
            }
            run.call(&case, "DEL", !reference_adds, None);
            let after = run.observe("");
            let left = |seen: &Observed| {
                let mut lines = Vec::new();
                for (key, found) in seen {
                    // Chains that all attachments share stay.
                    let nat = |l: &&String| {
                        ["CNI-DN-", "cid1", "10.1.2.9", "fd00::9"].iter().any(|t| l.contains(t))
                    };
                    if key.ends_with("-save") {
                        lines.extend(found.iter().filter(nat).cloned());
                    }
                    if key.starts_with("file") && !key.contains("last_reserved") && !key.ends_with("lock") {
                        lines.push(key.clone());
                    }
                    if key.contains("ip -d link") {
                        // Of links that were there before, only that they are: a returned device is down, a
                        // token bucket goes with its cable.
                        lines.extend(found.iter().filter(|l| !l.contains("tbr0")).filter_map(|l| {
                            let (_, rest) = l.split_once("\"ifname\":\"")?;
                            rest.split_once('"').map(|(name, _)| format!("link {name}"))
                        }));
                    }
                }
                lines.sort();
                lines
            };
            assert_eq!(left(&before), left(&after), "{} added by reference: {reference_adds}", case.name);
        }
    }
}

#[test]
fn the_comparison_finds_a_missing_rule() {
    if skip() {
        return;
    }
    let case = cases().into_iter().find(|c| c.name == "bridge masquerade").unwrap();
    let run = Run::new(&case);
    let result = run.call(&case, "ADD", false, None);
    let whole = run.observe(&result);
    assert!(differences(&whole, &run.observe(&result), &[]).is_empty(), "looking twice sees the same");
    let jump = whole["iptables-save"].iter().find(|l| l.starts_with("-A POSTROUTING")).unwrap();
    let output = run.node.with(|| {
        std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("iptables -t nat {}", jump.replacen("-A", "-D", 1)))
            .output()
    });
    assert!(output.unwrap().status.success());
    let found = differences(&whole, &run.observe(&result), &[]);
    assert!(found.iter().any(|d| d.contains("felt only: -A POSTROUTING")), "{found:?}");
}
