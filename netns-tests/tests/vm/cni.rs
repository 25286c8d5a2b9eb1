//! CNI plugins whose link types a machine's own kernel may lack: vlan, ipvlan, dummy, bridge VLAN filtering.
//!
//! Each configuration runs by felt and by the reference (Debian's 1.1.1; release 1.9.1 where `FELT_REFERENCE` names its
//! directory) in the same guest, and what `ip` and `bridge` show must be equal. What neither reference
//! at hand knows is checked by itself.

use std::fmt::Write as _;
use std::path::Path;

use felt_netns_tests::bins;
use felt_netns_tests::check::ok;
use felt_netns_tests::vm::Vm;
use serde_json::{Value, json};

const DEBIAN: &str = "/usr/lib/cni";
const FELT: &str = "/tmp/felt";

/// What random names and numbers are taken out of.
const VOLATILE: [&str; 13] = [
    "ifindex",
    "link_index",
    "link_netnsid",
    "address",
    "inet6_addr_gen_mode",
    "valid_life_time",
    "preferred_life_time",
    "link",
    "txqlen",
    "operstate",
    "flags",
    "protocol",
    "permaddr",
];

struct Guest {
    vm: Vm,
    count: u32,
}

/// What one attachment looked like.
#[derive(Debug, PartialEq)]
struct Seen {
    result: Value,
    links: Value,
    addresses: Value,
    routes: Value,
    vlans: Value,
}

impl Guest {
    fn boot() -> Self {
        let mut vm = ok(Vm::boot());
        let dir = ok(bins::dir());
        let mut script = format!("mkdir -p {FELT} /run/netns && ip link set lo up\n");
        for plugin in ["bridge", "vlan", "ipvlan", "dummy", "host-device", "macvlan", "host-local", "static"]
        {
            let _ = writeln!(script, "ln -s {}/felt-cni {FELT}/{plugin}", dir.display());
        }
        script.push_str("for m in 8021q ipvlan macvlan dummy bridge veth; do modprobe $m || exit 1; done\n");
        script.push_str("ip link add m0 type veth peer name m1; ip link set m0 up; ip link set m1 up\n");
        ok(vm.run(&script));
        Self { vm, count: 0 }
    }

    /// One call; the exit code and what it printed.
    fn call(&mut self, dir: &str, plugin: &str, command: &str, config: &Value, ns: &str) -> (i32, String) {
        let script = format!(
            "CNI_COMMAND={command} CNI_CONTAINERID=cid1 CNI_NETNS=/run/netns/{ns} CNI_IFNAME=eth0 CNI_PATH={dir} {dir}/{plugin} 2>/dev/null <<'END'\n{config}\nEND\n"
        );
        ok(self.vm.output(&script, std::time::Duration::from_secs(60)))
    }

    fn json(&mut self, script: &str) -> Value {
        let text = ok(self.vm.run(script));
        if text.trim().is_empty() {
            json!([])
        } else {
            serde_json::from_str(&text).unwrap_or_else(|err| panic!("{script}: {err}: {text}"))
        }
    }

    /// ADD, a look, CHECK, DEL twice, and nothing may be left.
    fn attach(&mut self, dir: &str, plugin: &str, config: &Value) -> Seen {
        self.count += 1;
        let ns = format!("c{}", self.count);
        ok(self.vm.run(&format!("rm -rf /tmp/pool; ip netns add {ns}")));
        let (code, text) = self.call(dir, plugin, "ADD", config, &ns);
        assert_eq!(code, 0, "{dir}/{plugin} ADD {config}: {text}");
        let result: Value = serde_json::from_str(&text).unwrap();
        let n = format!("ip netns exec {ns} ");
        let seen = Seen {
            result: without_volatile(&result, &ns),
            links: without_volatile(&self.json(&format!("{n} ip -j -d link show dev eth0")), &ns),
            addresses: without_volatile(&self.json(&format!("{n} ip -j -4 addr show dev eth0")), &ns),
            routes: without_volatile(&self.json(&format!("{n} ip -j route")), &ns),
            vlans: without_volatile(&self.json("bridge -j vlan show"), &ns),
        };
        if dir == FELT {
            let mut check = config.clone();
            check["prevResult"] = result;
            let (code, text) = self.call(dir, plugin, "CHECK", &check, &ns);
            assert_eq!((code, text.as_str()), (0, ""), "{plugin} CHECK");
            let (_, text) = self.call(dir, plugin, "STATUS", config, "");
            assert!(text.is_empty() || config["cniVersion"] != "1.1.0", "{plugin} STATUS: {text}");
        }
        for _ in 0..2 {
            let (code, text) = self.call(dir, plugin, "DEL", config, &ns);
            assert_eq!((code, text.as_str()), (0, ""), "{plugin} DEL");
        }
        let left = ok(self.vm.run(&format!("{n} ip -o link; ls /tmp/pool/net1 2>/dev/null; true")));
        assert!(!left.contains("eth0") && !left.contains("10.7.0.2"), "{plugin}: {left}");
        ok(self.vm.run(&format!(
            "ip netns del {ns}; ip link del tbr0 2>/dev/null; ip link del tbr0.100 2>/dev/null; true"
        )));
        seen
    }
}

/// Random names by words, volatile members away.
fn without_volatile(value: &Value, ns: &str) -> Value {
    match value {
        Value::Object(o) => {
            let kept = o.iter().filter(|(k, v)| {
                !VOLATILE.contains(&k.as_str())
                    || (*k == "address" && v.as_str().is_some_and(|a| a.contains('/')))
            });
            let kept = kept.filter(|(k, v)| *k != "mac" && !(*k == "dns" && **v == json!({})));
            Value::Object(kept.map(|(k, v)| (k.clone(), without_volatile(v, ns))).collect())
        }
        Value::Array(items) => Value::Array(items.iter().map(|v| without_volatile(v, ns)).collect()),
        Value::String(s) if s.starts_with("veth") => json!("VETH"),
        Value::String(s) => json!(s.replace(ns, "NS")),
        other => other.clone(),
    }
}

fn config(version: &str, keys: &Value) -> Value {
    let mut config = json!({"cniVersion": version, "name": "net1", "ipam": {"type": "host-local", "subnet": "10.7.0.0/24",
        "dataDir": "/tmp/pool", "routes": [{"dst": "198.51.100.0/24"}]}});
    config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    config
}

#[test]
fn plugins_on_drivers_this_kernel_may_lack_do_what_the_reference_does() {
    let mut guest = Guest::boot();
    let release = std::env::var("FELT_REFERENCE").ok();
    for (plugin, keys) in [
        ("vlan", json!({"master": "m0", "vlanId": 10})),
        ("vlan", json!({"master": "m0", "vlanId": 4094, "mtu": 1400})),
        ("ipvlan", json!({"master": "m0"})),
        ("ipvlan", json!({"master": "m0", "mode": "l3", "mtu": 1300})),
        ("macvlan", json!({"master": "m0", "mode": "passthru"})),
        ("bridge", json!({"bridge": "tbr0", "isGateway": true, "vlan": 100, "preserveDefaultVlan": true})),
    ] {
        let config = config("1.0.0", &keys);
        let ours = guest.attach(FELT, plugin, &config);
        // 1.1.1 puts a bridge's gateway on the bridge itself, 1.9.1 on an interface of the VLAN.
        let place = release.as_deref().or_else(|| (plugin != "bridge").then_some(DEBIAN));
        if let Some(place) = place {
            assert!(Path::new(place).join(plugin).exists(), "{place}/{plugin}");
            let theirs = guest.attach(place, plugin, &config);
            assert_eq!(ours, theirs, "{plugin} {keys} beside {place}");
        }
    }
    for (plugin, keys) in [
        ("dummy", json!({})),
        ("ipvlan", json!({"master": "m0", "mode": "l3s"})),
        ("bridge", json!({"bridge": "tbr0", "isGateway": true, "vlan": 100})),
        ("bridge", json!({"bridge": "tbr0", "vlanTrunk": [{"minID": 200, "maxID": 202}, {"id": 300}]})),
        ("bridge", json!({"bridge": "tbr0", "vlan": 100, "vlanTrunk": [{"id": 101}]})),
    ] {
        let config = config("1.1.0", &keys);
        let ours = guest.attach(FELT, plugin, &config);
        if let Some(place) = &release {
            assert_eq!(ours, guest.attach(place, plugin, &config), "{plugin} {keys} beside {place}");
        }
        let port = |seen: &Seen| {
            seen.vlans.as_array().unwrap().iter().find(|p| p["ifname"] == "VETH").map(|p| {
                p["vlans"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|v| (v["vlan"].as_u64().unwrap(), v["vlanEnd"].as_u64().unwrap_or(0)))
                    .collect::<Vec<_>>()
            })
        };
        match (plugin, keys.get("vlanTrunk").is_some(), keys.get("vlan").is_some()) {
            ("dummy", ..) => assert_eq!(ours.links[0]["linkinfo"]["info_kind"], "dummy"),
            ("ipvlan", ..) => assert_eq!(ours.links[0]["linkinfo"]["info_data"]["mode"], "l3s"),
            // Without the default VLAN no untagged frame of VLAN 1 leaks to the port.
            ("bridge", false, true) => assert_eq!(port(&ours), Some(vec![(100, 0)])),
            ("bridge", true, false) => {
                assert_eq!(port(&ours), Some(vec![(1, 0), (200, 0), (201, 0), (202, 0), (300, 0)]))
            }
            _ => assert_eq!(port(&ours), Some(vec![(100, 0), (101, 0)])),
        }
    }
}

#[test]
fn faults_of_vlan_and_ipvlan_in_the_reference_are_not_ours() {
    let mut guest = Guest::boot();
    ok(guest.vm.run("ip netns add a; ip netns add b"));
    // The kernel has one link per id and device, in whatever namespace: a second container is told so and
    // gets it once the first is gone.
    let vlan = config("1.1.0", &json!({"master": "m0", "vlanId": 10}));
    let add = |guest: &mut Guest, ns| guest.call(FELT, "vlan", "ADD", &vlan, ns);
    assert_eq!(add(&mut guest, "a").0, 0);
    let second = config("1.1.0", &json!({"master": "m0", "vlanId": 10, "name": "net2"}));
    let (code, text) = guest.call(FELT, "vlan", "ADD", &second, "b");
    assert!(code == 1 && text.contains("VLAN 10 of \\\"m0\\\" is in use by another link"), "{text}");
    assert_eq!(guest.call(FELT, "vlan", "DEL", &vlan, "a").0, 0);
    assert_eq!(add(&mut guest, "b").0, 0);
    assert_eq!(guest.call(FELT, "vlan", "DEL", &vlan, "b").0, 0);
    let (code, text) =
        guest.call(FELT, "vlan", "ADD", &config("1.1.0", &json!({"master": "m0", "vlanId": 4095})), "a");
    assert!(code == 1 && text.contains("invalid VLAN ID 4095"), "{text}");

    // The master goes first: the address is released all the same.
    ok(guest.vm.run("ip link add d0 type dummy && ip link set d0 up"));
    for (plugin, keys) in
        [("vlan", json!({"master": "d0", "vlanId": 7})), ("ipvlan", json!({"master": "d0"}))]
    {
        let config = config("1.1.0", &keys);
        let (code, text) = guest.call(FELT, plugin, "ADD", &config, "a");
        assert_eq!(code, 0, "{text}");
        ok(guest.vm.run("ip link del d0"));
        for _ in 0..2 {
            let (code, text) = guest.call(FELT, plugin, "DEL", &config, "a");
            assert_eq!((code, text.as_str()), (0, ""), "{plugin}");
        }
        assert!(!ok(guest.vm.run("ls /tmp/pool/net1")).contains("10.7"), "{plugin}");
        ok(guest.vm.run("ip link add d0 type dummy && ip link set d0 up"));
    }

    // A real device, which outlives namespaces: there and back in one request each.
    let mut device = config("1.1.0", &json!({"device": "d0"}));
    device["ipam"]["subnet"] = json!("10.8.0.0/24");
    let (code, text) = guest.call(FELT, "host-device", "ADD", &device, "a");
    assert_eq!(code, 0, "{text}");
    let alias = ok(guest.vm.run("ip netns exec a ip -j link show dev eth0"));
    assert!(alias.contains("\"ifalias\":\"d0\""), "{alias}");
    let (code, text) = guest.call(FELT, "host-device", "DEL", &device, "a");
    assert_eq!((code, text.as_str()), (0, ""));
    assert!(!ok(guest.vm.run("ip -j link show dev d0")).contains("ifalias"));
}
