//! The bridge plugin with host-local, run as a runtime runs it.

mod support;

use serde_json::json;
use support::{Node, addresses, files, names};

fn config(node: &Node, version: &str, bridge_keys: &str, ipam_keys: &str) -> String {
    format!(
        r#"{{"cniVersion":"{version}","name":"testnet","type":"bridge","bridge":"tbr0"{bridge_keys},
            "ipam":{{"type":"host-local","dataDir":{:?}{ipam_keys}}}}}"#,
        node.path("data")
    )
}

const V4: &str = r#","subnet":"10.1.2.0/24""#;
const DUAL: &str = r#","ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00:1::/64"}]]"#;

#[test]
fn attaches_and_detaches_in_every_version() {
    for version in ["", "0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        let mut node = Node::new();
        let ns = node.container("c1");
        let config = config(&node, version, r#","isDefaultGateway":true,"mtu":1400"#, V4);
        let config = if version.is_empty() { config.replace(r#""cniVersion":"","#, "") } else { config };
        let result = node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good();
        assert!(!result.stdout.ends_with('\n'), "no newline after the result");
        let result = result.json();

        assert_eq!(addresses(&node.ip_in(&ns, "addr show dev eth0")), ["10.1.2.2/24"], "{version}");
        assert_eq!(addresses(&node.ip_json("addr show dev tbr0")), ["10.1.2.1/24"]);
        let routes = node.ip_in(&ns, "route show default");
        assert_eq!(routes[0]["gateway"], "10.1.2.1", "{version}");
        assert_eq!(node.ip_in(&ns, "link show dev eth0")[0]["mtu"], 1400);
        assert_eq!(node.sysctl("net/ipv4/ip_forward"), "1");
        let links = node.links();
        assert_eq!(links.len(), 2, "{links:?}");
        let bridge = &node.ip_json("link show dev tbr0")[0];
        let inside = &node.ip_in(&ns, "link show dev eth0")[0];
        match version {
            "" | "0.1.0" | "0.2.0" => assert_eq!(
                result,
                json!({
                    "cniVersion": if version.is_empty() { "0.1.0" } else { version },
                    "ip4": {"ip": "10.1.2.2/24", "gateway": "10.1.2.1",
                            "routes": [{"dst": "0.0.0.0/0", "gw": "10.1.2.1"}]},
                    "dns": {}
                })
            ),
            _ => {
                assert_eq!(result["interfaces"][0]["mac"], bridge["address"]);
                assert_eq!(
                    result["interfaces"][2],
                    json!({"name": "eth0", "mac": inside["address"], "sandbox": ns})
                );
                assert_eq!(result["ips"][0]["interface"], 2);
                assert_eq!(result["ips"][0].get("version").is_some(), version.starts_with("0."));
            }
        }
        if version >= "0.4.0" {
            let with_result = config.replacen('{', &format!(r#"{{"prevResult":{result},"#), 1);
            node.run(&node.call("bridge", "CHECK", "cid1", &ns), &with_result).good();
        }
        for _ in 0..2 {
            let done = node.run(&node.call("bridge", "DEL", "cid1", &ns), &config).good();
            assert_eq!(done.stdout, "", "DEL prints nothing");
        }
        assert_eq!(node.links(), ["tbr0"]);
        assert_eq!(files(&node.path("data/testnet")), ["last_reserved_ip.0", "lock"]);
    }
}

#[test]
fn both_families_are_usable_at_once() {
    let mut node = Node::new();
    let (a, b) = (node.container("a"), node.container("b"));
    let config = config(&node, "1.0.0", r#","isDefaultGateway":true,"hairpinMode":true"#, DUAL);
    for (id, ns) in [("ida", &a), ("idb", &b)] {
        node.run(&node.call("bridge", "ADD", id, ns), &config).good();
        let list = node.ip_in(ns, "addr show dev eth0");
        // The link-local address is the kernel's own and settles in its own time.
        for address in list[0]["addr_info"].as_array().unwrap().iter().filter(|a| a["scope"] == "global") {
            assert!(address.get("tentative").is_none() && address.get("dadfailed").is_none(), "{address}");
        }
        // One packet, at once, to the gateway in each family.
        for target in ["10.1.2.1", "fd00:1::1"] {
            let ping = node.exec_in(ns, &format!("ping -c 1 -W 1 {target}"));
            assert!(ping.status.success(), "{target}: {ping:?}");
        }
    }
    for target in ["10.1.2.2", "fd00:1::2"] {
        let ping = node.exec_in(&b, &format!("ping -c 1 -W 1 {target}"));
        assert!(ping.status.success(), "{target}: {ping:?}");
    }
    let port = node.ip_json("-d link show type veth");
    assert!(port.to_string().contains(r#""hairpin":true"#));
}

#[test]
fn a_failed_add_leaves_nothing() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let full = config(&node, "1.0.0", r#","isGateway":true"#, r#","subnet":"10.1.2.0/30""#);
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &full).good();
    let before = (node.links(), files(&node.path("data/testnet")));

    // Exhausted range.
    let other = node.container("c2");
    let refused = node.run(&node.call("bridge", "ADD", "cid2", &other), &full);
    assert!(refused.msg().contains("no IP addresses available in range set: 10.1.2.1-10.1.2.2"));
    assert_eq!(refused.json()["code"], 999);
    assert_eq!((node.links(), files(&node.path("data/testnet"))), before);
    assert_eq!(names(&node.ip_in(&other, "link show")), [""; 0]);

    // The interface exists already.
    let again = node.run(&node.call("bridge", "ADD", "cid1", &ns), &full);
    assert!(again.msg().contains(r#"container veth name ("eth0") peer provided"#), "{again:?}");
    assert_eq!((node.links(), files(&node.path("data/testnet"))), before);

    // The bridge has another address.
    let clash = config(&node, "1.0.0", r#","isGateway":true"#, r#","subnet":"10.9.0.0/24""#);
    let refused = node.run(&node.call("bridge", "ADD", "cid2", &other), &clash);
    assert_eq!(
        refused.msg(),
        r#"failed to set bridge addr: "tbr0" already has an IP address different from 10.9.0.1/24"#
    );
    assert!(!node.path("data/testnet/10.9.0.2").exists());
    assert_eq!(node.links(), before.0);
    assert_eq!(names(&node.ip_in(&other, "link show")), [""; 0]);

    // Layer 2 in a version that cannot say so.
    let l2 = r#"{"cniVersion":"0.2.0","name":"testnet","bridge":"tbr0"}"#;
    let refused = node.run(&node.call("bridge", "ADD", "cid2", &other), l2);
    assert_eq!(refused.msg(), "cannot convert: no valid IP addresses");
    assert_eq!(node.links(), before.0);
    // And the first attachment is whole.
    assert!(node.exec_in(&ns, "ping -c 1 -W 1 10.1.2.1").status.success());
}

#[test]
fn parallel_adds_make_one_bridge() {
    let mut node = Node::new();
    let config = config(&node, "1.0.0", r#","isGateway":true"#, DUAL);
    let all: Vec<(String, String)> =
        (0..30).map(|i| (format!("cid{i}"), node.container(&format!("c{i}")))).collect();
    std::thread::scope(|scope| {
        let threads: Vec<_> = all
            .iter()
            .map(|(id, ns)| {
                let (node, config) = (&node, &config);
                scope.spawn(move || node.run(&node.call("bridge", "ADD", id, ns), config))
            })
            .collect();
        for thread in threads {
            thread.join().unwrap().good();
        }
    });
    assert_eq!(node.links().len(), 31);
    assert_eq!(files(&node.path("data/testnet")).len(), 60 + 3);
    std::thread::scope(|scope| {
        for (id, ns) in &all {
            let (node, config) = (&node, &config);
            scope.spawn(move || node.run(&node.call("bridge", "DEL", id, ns), config).good());
        }
    });
    assert_eq!(node.links(), ["tbr0"]);
    assert_eq!(files(&node.path("data/testnet")), ["last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
}

#[test]
fn del_succeeds_without_namespace() {
    let mut node = Node::new();
    let config = config(&node, "1.0.0", "", V4);
    for (i, gone) in ["", "/nonexistent/ns"].iter().enumerate() {
        let ns = node.container(&format!("c{i}"));
        node.run(&node.call("bridge", "ADD", "cid", &ns), &config).good();
        node.remove_container(&ns);
        node.run(&node.call("bridge", "DEL", "cid", gone), &config).good();
        assert_eq!(files(&node.path("data/testnet")), ["last_reserved_ip.0", "lock"]);
    }
    let plain = node.path("plain");
    std::fs::write(&plain, "").unwrap();
    let refused = node.run(&node.call("bridge", "DEL", "cid", plain.to_str().unwrap()), &config);
    assert!(refused.msg().contains("unknown FS magic"), "{refused:?}");
}

#[test]
fn the_hosts_own_namespace_is_refused_before_any_change() {
    let node = Node::new();
    let config = config(&node, "1.0.0", "", V4);
    for command in ["ADD", "DEL"] {
        let refused = node.run(&node.call("bridge", command, "cid", "/proc/self/ns/net"), &config);
        assert_eq!(refused.json()["code"], 8, "{refused:?}");
    }
    assert_eq!(node.links(), [""; 0]);
}

#[test]
fn check_sees_a_changed_container_and_not_a_changed_host_mac() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let config = config(&node, "1.0.0", r#","isDefaultGateway":true"#, V4);
    let result = node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good().json();
    let with_result = config.replacen('{', &format!(r#"{{"prevResult":{result},"#), 1);
    let check = |node: &Node| node.run(&node.call("bridge", "CHECK", "cid1", &ns), &with_result);
    check(&node).good();
    let host_end = result["interfaces"][1]["name"].as_str().unwrap();
    node.ip(&format!("link set {host_end} address 02:11:22:33:44:55"));
    check(&node).good();
    node.exec_in(&ns, "ip route del default");
    assert!(check(&node).msg().contains("Expected Route"));
    node.exec_in(&ns, "ip route add default via 10.1.2.1");
    check(&node).good();
    node.exec_in(&ns, "ip addr del 10.1.2.2/24 dev eth0");
    assert_eq!(check(&node).msg(), "Failed to match addr 10.1.2.2/24 on interface eth0");
    let missing = node.run(&node.call("bridge", "CHECK", "cid1", &ns), &config);
    assert_eq!(missing.msg(), "Required prevResult missing");
}

#[test]
fn the_mac_asked_for_is_set() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let config = config(&node, "1.0.0", r#","runtimeConfig":{"mac":"02:00:00:00:00:31"}"#, V4);
    let mut call = node.call("bridge", "ADD", "cid1", &ns);
    call.args = "IgnoreUnknown=1;MAC=02:00:00:00:00:32";
    node.run(&call, &config).good();
    assert_eq!(node.ip_in(&ns, "link show dev eth0")[0]["address"], "02:00:00:00:00:31");
}

#[test]
fn layer_two_sets_the_link_up_without_addresses() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let config = r#"{"cniVersion":"1.0.0","name":"l2","bridge":"tbr0"}"#;
    let result = node.run(&node.call("bridge", "ADD", "cid1", &ns), config).good().json();
    assert!(result.get("ips").is_none());
    assert_eq!(node.ip_in(&ns, "link show dev eth0")[0]["operstate"], "UP");
    assert_eq!(addresses(&node.ip_json("addr show dev tbr0")), [""; 0]);
    assert_eq!(node.sysctl("net/ipv4/ip_forward"), "0");
    let down = r#"{"cniVersion":"1.0.0","name":"l2","bridge":"tbr0","disableContainerInterface":true}"#;
    let ns = node.container("c2");
    node.run(&node.call("bridge", "ADD", "cid2", &ns), down).good();
    assert_eq!(node.ip_in(&ns, "link show dev eth0")[0]["operstate"], "DOWN");
}

#[test]
fn a_default_route_from_ipam_and_a_default_gateway_agree() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let ipam =
        r#","subnet":"10.1.2.0/24","routes":[{"dst":"0.0.0.0/0"},{"dst":"192.0.2.0/24","gw":"10.1.2.9"}]"#;
    let config = config(&node, "1.0.0", r#","isDefaultGateway":true"#, ipam);
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good();
    assert_eq!(node.ip_in(&ns, "route show default").as_array().unwrap().len(), 1);
    assert_eq!(node.ip_in(&ns, "route show 192.0.2.0/24")[0]["gateway"], "10.1.2.9");
}

#[test]
fn a_device_of_that_name_which_is_no_bridge_is_refused() {
    let mut node = Node::new();
    let ns = node.container("c1");
    node.ip("link add tbr0 type veth peer name other");
    let refused = node.run(&node.call("bridge", "ADD", "cid1", &ns), &config(&node, "1.0.0", "", V4));
    assert_eq!(refused.msg(), r#"failed to create bridge "tbr0": "tbr0" already exists but is not a bridge"#);
}

#[test]
fn neighbours_learn_at_once_that_an_address_has_a_new_owner() {
    let mut node = Node::new();
    let config = config(&node, "1.0.0", r#","isGateway":true"#, DUAL);
    let call_config = config.replace(
        "\"bridge\":\"tbr0\"",
        r#""bridge":"tbr0","runtimeConfig":{"ips":["10.1.2.9","fd00:1::9"]}"#,
    );
    // Another container keeps the bridge's carrier up, without which the host forgets everybody.
    let other = node.container("other");
    node.run(&node.call("bridge", "ADD", "other", &other), &config).good();
    let old = node.container("old");
    node.run(&node.call("bridge", "ADD", "old", &old), &call_config).good();
    // The host knows the old owner's MAC and holds it for good.
    let stale = |node: &Node, address: &str| {
        node.ip(&format!("neigh replace {address} lladdr 02:de:ad:00:00:01 nud reachable dev tbr0"));
    };
    node.run(&node.call("bridge", "DEL", "old", &old), &call_config).good();
    stale(&node, "10.1.2.9");
    stale(&node, "fd00:1::9");
    let new = node.container("new");
    node.run(&node.call("bridge", "ADD", "new", &new), &call_config).good();
    let mac = node.ip_in(&new, "link show dev eth0")[0]["address"].as_str().unwrap().to_owned();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(1);
    loop {
        let table = node.ip("neigh show dev tbr0");
        let known =
            |address: &str| table.lines().any(|l| l.starts_with(&format!("{address} ")) && l.contains(&mac));
        if known("10.1.2.9") && known("fd00:1::9") {
            break;
        }
        assert!(std::time::Instant::now() < deadline, "{table}");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}
