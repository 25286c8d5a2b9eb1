//! felt and the reference plugins of release 1.9.1 do the same.
//!
//! `make test-reference` builds that release with a Go toolchain, names its directory in
//! `FELT_REFERENCE` and compares live, everything that can be seen. `make test` compares with what was
//! recorded then (`testdata/reference/`, written with `FELT_RECORD=1`): results, error texts, rules, files,
//! addresses and routes, which do not depend on the kernel. Together with `side_by_side`, which has
//! Debian's 1.1.1 live, this covers what 1.1.1 lacks: nftables, 1.1.0, GC, STATUS, newer keys.

mod support;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use support::cases::{CASE, Case, cases, newer};
use support::compare::{Observed, Run, differences, neutral};

/// A call whose answer alone matters.
struct Exchange {
    plugin: &'static str,
    command: &'static str,
    config: &'static str,
    args: &'static str,
    /// felt's own answer, where it differs, and why.
    differs: Option<(&'static str, &'static str)>,
}

#[rustfmt::skip]
fn exchanges() -> Vec<Exchange> {
    let same = |plugin, command, config| Exchange { plugin, command, config, args: "", differs: None };
    let with = |plugin, args, config| Exchange { args, ..same(plugin, "ADD", config) };
    vec![
        same("bridge", "ADD", "null"),
        same("bridge", "ADD", "[]"),
        same("bridge", "ADD", "\"x\""),
        same("bridge", "ADD", ""),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0"}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"a:b"}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0","name":"net1"}"#),
        same("bridge", "ADD", r#"{"cniVersion":"9.9.9","name":"net1"}"#),
        same("bridge", "CHECK", r#"{"cniVersion":"0.3.1","name":"net1"}"#),
        same("bridge", "GC", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("bridge", "STATUS", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("bridge", "STATUS", r#"{"cniVersion":"1.1.0","name":"net1","ipam":{"type":"nope"}}"#),
        same("bridge", "STATUS", r#"{"cniVersion":"1.1.0","name":"net1"}"#),
        Exchange { differs: Some(("cni.dev/valid-attachments", "no reference plugin collects; without the list everything would go")),
            ..same("bridge", "GC", r#"{"cniVersion":"1.1.0","name":"net1"}"#) },
        same("bridge", "GC", r#"{"cniVersion":"1.1.0","name":"net1","cni.dev/valid-attachments":[]}"#),
        same("bridge", "GC", r#"{"cniVersion":"1.1.0","name":"net1","cni.dev/valid-attachments":null}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":5}"#),
        same("bridge", "ADD", r#"{"cniVersion":1,"name":"net1"}"#),
        same("ptp", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","mtu":"x"}"#),
        same("macvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","mtu":"x"}"#),
        same("ipvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","mtu":"x"}"#),
        same("vlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","mtu":"x"}"#),
        same("host-device", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","device":5}"#),
        same("tuning", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","mtu":"x"}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","snat":"x"}"#),
        same("firewall", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","backend":5}"#),
        same("bandwidth", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ingressRate":"x"}"#),
        same("sbr", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","table":"x"}"#),
        same("static", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"addresses":"x"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"dataDir":5}}"#),
        same("bridge", "FOO", r#"{"cniVersion":"1.1.0","name":"net1"}"#),
        same("bridge", "FOO", "{"),
        same("bridge", "VERSION", ""),
        same("bandwidth", "VERSION", ""),
        same("firewall", "VERSION", ""),
        same("portmap", "VERSION", ""),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","mtu":"x"}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","vlan":4095}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","vlan":-1}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","vlanTrunk":[{"minID":5}]}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","vlanTrunk":[{"maxID":5}]}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","vlanTrunk":[{"minID":9,"maxID":5}]}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","vlanTrunk":[{"id":4095}]}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","hairpinMode":true,"promiscMode":true}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipMasqBackend":"x","ipMasq":true,"ipam":{"type":"static","addresses":[{"address":"10.9.0.7/24"}]}}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","disableContainerInterface":true,"ipam":{"type":"static"}}"#),
        same("bridge", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"type":"static"}}"#),
        with("bridge", "IP=10.0.0.1", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        with("bridge", "IgnoreUnknown=yes", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        with("bridge", "MAC=zz", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("ptp", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("ptp", "STATUS", r#"{"cniVersion":"1.1.0","name":"net1"}"#),
        same("vlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("vlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"lo","vlanId":4095}"#),
        same("dummy", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("macvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"nope"}"#),
        same("macvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"nope","linkInContainer":true}"#),
        same("macvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("macvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"lo","mode":"x"}"#),
        same("macvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"lo","mtu":70000}"#),
        same("macvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"lo","mtu":-5}"#),
        same("ipvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"lo","mode":"x"}"#),
        same("ipvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"nope"}"#),
        same("ipvlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"nope","linkInContainer":true}"#),
        same("vlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"nope","vlanId":5,"linkInContainer":true,"ipam":{"type":"static"}}"#),
        same("vlan", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","master":"lo","mtu":70000,"vlanId":5,"ipam":{"type":"static"}}"#),
        same("host-device", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("host-device", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","device":"nope"}"#),
        same("host-device", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","runtimeConfig":{"deviceID":"nope"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"type":"host-local","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.3/24","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/31","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","rangeStart":"10.1.3.1","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","rangeEnd":"fd00::1","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"ranges":[[]],"dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"ranges":[[{"subnet":"10.1.2.0/24"},{"subnet":"fd00::/64"}]],"dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"10.1.0.0/16"}]],"dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"0.2.0","name":"net1","ipam":{"ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"10.2.0.0/16"}]],"dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","runtimeConfig":{"ips":["10.1.2.1"]},"ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","runtimeConfig":{"ips":["10.7.7.7"]},"ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","resolvConf":"/nope","dataDir":"DIR/data"}}"#),
        same("host-local", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.128/25","ipRange":"10.1.2.128/30","dataDir":"DIR/data"}}"#),
        same("host-local", "CHECK", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        same("host-local", "DEL", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        with("host-local", "IP=10.1.2.30", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        with("host-local", "IgnoreUnknown=1;IP=10.1.2.30/24", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        with("host-local", "IP=10.1.2", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        with("host-local", "ip=10.1.2.30", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        with("host-local", "A=1=2", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#),
        same("static", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("static", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"addresses":[{"address":"10.1.2.3"}]}}"#),
        same("static", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","runtimeConfig":{"ips":["10.1.2.3"]},"ipam":{"type":"static"}}"#),
        same("static", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","args":{"cni":{"ips":["10.1.2.3"]}},"ipam":{"type":"static"}}"#),
        same("static", "ADD", r#"{"cniVersion":"0.2.0","name":"net1","ipam":{"addresses":[]}}"#),
        same("static", "CHECK", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{"addresses":[{"address":"10.1.2.3/24"}]}}"#),
        with("static", "IP=10.1.2.3", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{}}"#),
        with("static", "IP=10.1.2.3/24,fd00::7/64;GATEWAY=10.1.2.1,fd00::1", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{}}"#),
        with("static", "IP=10.1.2.3/24;GATEWAY=x", r#"{"cniVersion":"1.0.0","name":"net1","ipam":{}}"#),
        Exchange { differs: Some(("\"code\": 50", "without its daemon no lease can be had: STATUS says so")),
            ..same("dhcp", "STATUS", r#"{"cniVersion":"1.1.0","name":"net1","ipam":{"daemonSocketPath":"/nope/dhcp.sock"}}"#) },
        same("tuning", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","sysctl":{"kernel.panic":"1"},"prevResult":{"cniVersion":"1.0.0"}}"#),
        same("tuning", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","sysctl":{"net.core.somaxconn":"1","net.core.somaxconn":"2"}}"#),
        same("tuning", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","backend":"x"}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","markMasqBit":32}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","markMasqBit":3,"externalSetMarkChain":"X"}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","backend":"iptables","conditionsV4":["ip","saddr","1.1.1.1"]}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","backend":"nftables","conditionsV4":["-s","1.1.1.1"]}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","runtimeConfig":{"portMappings":[{"hostPort":0,"containerPort":1}]}}"#),
        same("portmap", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","runtimeConfig":{"portMappings":[{"hostPort":1,"containerPort":0}]}}"#),
        same("firewall", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","backend":"iptables"}"#),
        same("firewall", "DEL", r#"{"cniVersion":"1.0.0","name":"net1","backend":"iptables"}"#),
        same("bandwidth", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ingressRate":1}"#),
        same("bandwidth", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","egressBurst":1}"#),
        same("bandwidth", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ingressRate":1,"ingressBurst":99999999999}"#),
        same("bandwidth", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","ingressRate":1,"ingressBurst":1}"#),
        same("sbr", "ADD", r#"{"cniVersion":"1.0.0","name":"net1"}"#),
        same("sbr", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","prevResult":{"cniVersion":"1.0.0"}}"#),
        same("sbr", "ADD", r#"{"cniVersion":"1.0.0","name":"net1","prevResult":{"cniVersion":"0.4.0"}}"#),
        same("loopback", "ADD", r#"{"cniVersion":"1.1.0","name":"lo"}"#),
        same("loopback", "ADD", r#"{"name":"lo"}"#),
        same("loopback", "ADD", r#"{"cniVersion":"1.0.0","type":"loopback"}"#),
    ]
}

/// Where the release's binaries are, when they are to be run.
fn live() -> Option<PathBuf> {
    std::env::var_os("FELT_REFERENCE").map(PathBuf::from)
}

fn recordings() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/reference")
}

/// What is recorded and compared without the binaries: nothing that another kernel or `ip` shows otherwise.
fn portable(seen: &Observed) -> Observed {
    let keep = |key: &str| !key.contains("ip -d link") && !key.starts_with("tc ") && !key.contains("rule");
    seen.iter().filter(|(key, _)| keep(key)).map(|(k, v)| (k.clone(), v.clone())).collect()
}

/// What can be seen after ADD and after DEL by felt or by the plugins in a directory.
fn run(case: &Case, reference: Option<&Path>) -> BTreeMap<String, Observed> {
    let run = Run::new(case);
    let mut seen = BTreeMap::new();
    for command in ["ADD", "DEL"] {
        let answer = run.call(case, command, reference, None);
        let mut observed = run.observe(&answer);
        // Byte for byte.
        let dir = run.node.dir.path().to_str().unwrap();
        observed.insert(
            "result".into(),
            neutral(&answer.replace(dir, "DIR")).lines().map(str::to_owned).collect(),
        );
        seen.insert(command.to_owned(), observed);
    }
    seen
}

fn file_of(case: &Case) -> PathBuf {
    let name: String = case.name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    recordings().join(format!("{}.json", name.replace("--", "-")))
}

fn record(path: &Path, value: &impl serde::Serialize) {
    std::fs::create_dir_all(recordings()).unwrap();
    let mut text = serde_json::to_string_pretty(value).unwrap();
    text.push('\n');
    std::fs::write(path, text).unwrap();
}

fn recorded<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read(path).unwrap_or_else(|err| panic!("{}: {err}", path.display()));
    serde_json::from_slice(&text).unwrap()
}

fn compare(table: Vec<Case>) {
    let mut found = Vec::new();
    for case in table {
        let mut ours = run(&case, None);
        let theirs: BTreeMap<String, Observed> = match live() {
            Some(dir) => {
                let theirs = run(&case, Some(&dir));
                if std::env::var_os("FELT_RECORD").is_some() {
                    let kept: BTreeMap<_, _> = theirs.iter().map(|(k, v)| (k, portable(v))).collect();
                    record(&file_of(&case), &kept);
                }
                theirs
            }
            None => {
                ours.values_mut().for_each(|seen| *seen = portable(seen));
                recorded(&file_of(&case))
            }
        };
        for (when, ours) in &ours {
            let lines = differences(ours, &theirs[when], case.accepted);
            found.extend(lines.iter().map(|d| format!("{} after {when}: {d}", case.name)));
        }
    }
    assert!(found.is_empty(), "{} differences:\n{}", found.len(), found.join("\n"));
}

#[test]
fn felt_does_what_release_1_9_1_does() {
    compare(cases());
}

#[test]
fn felt_does_what_release_1_9_1_does_with_newer_keys() {
    compare(newer());
}

#[test]
#[ignore = "needs the release's binaries: make test-reference"]
fn either_removes_what_release_1_9_1_or_felt_made() {
    let dir = live().expect("FELT_REFERENCE names the directory of the release's binaries");
    for case in newer() {
        for (adds, removes) in [(None, Some(&*dir)), (Some(&*dir), None)] {
            let run = Run::new(&case);
            let nft = |seen: &Observed| -> Vec<String> {
                seen["nft"].iter().filter(|l| l.contains("cid1")).cloned().collect()
            };
            let result = run.call(&case, "ADD", adds, None);
            let value: Value = serde_json::from_str(&result).unwrap();
            // The reference does not find back its own route over 0.0.0.0.
            if case.config.contains("\"ipam\"") && !case.config.contains("\"scope\"") {
                run.call(&case, "CHECK", removes, Some(&value));
            }
            run.call(&case, "DEL", removes, None);
            assert_eq!(nft(&run.observe("")), Vec::<String>::new(), "{}", case.name);
        }
    }
}

#[test]
fn answers_are_those_of_release_1_9_1() {
    let case = Case { name: "answers", ..CASE };
    let path = recordings().join("answers.json");
    let mut kept: BTreeMap<String, Value> = match live() {
        Some(_) => BTreeMap::new(),
        None => recorded(&path),
    };
    let mut found = Vec::new();
    for exchange in exchanges() {
        let ask = |reference: Option<&Path>| {
            let run = Run::new(&case);
            let mut call = match reference {
                Some(dir) => run.node.other(dir, exchange.plugin, exchange.command, "cid1", &run.ns),
                None => run.node.call(exchange.plugin, exchange.command, "cid1", &run.ns),
            };
            call.args = exchange.args;
            let dir = run.node.dir.path().to_str().unwrap();
            let answer = run.node.run(&call, &exchange.config.replace("DIR", dir));
            let text = answer.stdout.replace(&call.path, "BIN").replace(dir, "DIR");
            json!({"ok": answer.ok, "stdout": neutral(&text)})
        };
        let key = format!("{} {} {} {}", exchange.plugin, exchange.command, exchange.args, exchange.config);
        if let Some(dir) = live() {
            kept.insert(key.clone(), ask(Some(&dir)));
        }
        let (ours, theirs) = (ask(None), &kept[&key]);
        match exchange.differs {
            Some((wanted, _)) if ours == *theirs || !ours["stdout"].as_str().unwrap().contains(wanted) => {
                found.push(format!("{key}\n    felt: {ours}\n    wanted: {wanted:?}, reference: {theirs}"));
            }
            None if ours != *theirs => {
                found.push(format!("{key}\n    felt: {ours}\n    reference: {theirs}"));
            }
            _ => {}
        }
    }
    if live().is_some() && std::env::var_os("FELT_RECORD").is_some() {
        record(&path, &kept);
    }
    assert!(found.is_empty(), "{} answers differ:\n{}", found.len(), found.join("\n"));
}
