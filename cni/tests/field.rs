//! Faults that users of CNI plugins reported, each as a test of what is right.

mod support;

use std::time::{Duration, Instant};

use felt_hostnet::netns::NetNs;
use serde_json::{Value, json};
use support::{Call, Node, addresses, files};

fn pool(node: &Node, keys: &str) -> String {
    format!(
        r#"{{"cniVersion":"1.1.0","name":"net1","ipam":{{"type":"host-local","dataDir":{:?}{keys}}}}}"#,
        node.path("data")
    )
}

fn bridge(node: &Node, keys: &str, ipam: &str) -> String {
    format!(
        r#"{{"cniVersion":"1.1.0","name":"net1","bridge":"tbr0","isGateway":true{keys},"ipam":{{"type":"host-local","dataDir":{:?}{ipam}}}}}"#,
        node.path("data")
    )
}

const V4: &str = r#","subnet":"10.1.2.0/24""#;
const V6: &str = r#","subnet":"fd00:1::/64""#;

/// The first address of a result.
fn address(result: &Value) -> String {
    result["ips"][0]["address"].as_str().unwrap().to_owned()
}

fn id_call<'a>(node: &Node, plugin: &'a str, command: &'a str, id: &'a str) -> Call<'a> {
    node.call(plugin, command, id, "/x")
}

#[test]
fn a_removed_lock_file_leads_neither_to_duplicates_nor_to_a_hang() {
    let node = Node::new();
    let config = pool(&node, V4);
    let taken = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for worker in 0..10 {
            let (node, config, taken) = (&node, &config, &taken);
            scope.spawn(move || {
                for round in 0..5 {
                    let id = format!("w{worker}r{round}");
                    let result = node.run(&id_call(node, "host-local", "ADD", &id), config).good().json();
                    taken.lock().unwrap().push((address(&result), id.clone()));
                    if round == 2 {
                        let _ = std::fs::remove_file(node.path("data/net1/lock"));
                    }
                }
            });
        }
    });
    let mut taken = taken.into_inner().unwrap();
    taken.sort();
    let before = taken.len();
    taken.dedup_by_key(|(address, _)| address.clone());
    assert_eq!((before, taken.len()), (50, 50), "an address was given twice");
    std::thread::scope(|scope| {
        for (_, id) in &taken {
            let (node, config) = (&node, &config);
            scope.spawn(move || node.run(&id_call(node, "host-local", "DEL", id), config).good());
        }
    });
    let left = files(&node.path("data/net1")).into_iter().filter(|f| f.starts_with("10.")).count();
    assert_eq!(left, 0);
}

#[test]
fn ranges_that_cannot_be_are_refused_and_families_do_not_mix() {
    let node = Node::new();
    for (keys, text) in [
        (r#","subnet":"10.1.2.0/24","rangeStart":"10.1.2.255""#, "RangeStart 10.1.2.255"),
        (r#","subnet":"10.1.2.0/24","rangeStart":"10.1.2.9","rangeEnd":"10.1.2.5""#, "RangeStart 10.1.2.9"),
        (r#","subnet":"10.1.2.3/24""#, "Network has host bits set"),
    ] {
        let answer = node.run(&id_call(&node, "host-local", "ADD", "cid1"), &pool(&node, keys));
        assert!(answer.msg().contains(text), "{answer:?}");
    }
    // The network's own address is never handed out, wherever the range starts.
    let from_zero = pool(&node, r#","subnet":"10.1.3.0/29","rangeStart":"10.1.3.0""#);
    let answer = node.run(&id_call(&node, "host-local", "ADD", "cid1"), &from_zero);
    match answer.ok {
        true => assert_ne!(address(&answer.json()), "10.1.3.0/29"),
        false => assert!(answer.msg().contains("RangeStart"), "{answer:?}"),
    }
    // Beyond ::ff:ffff an IPv6 range goes on in IPv6.
    let v6 = pool(&node, r#","ranges":[[{"subnet":"::/64","rangeStart":"::ff:fffe","rangeEnd":"::100:1"}]]"#);
    let seen: Vec<String> = ["a", "b", "c", "d"]
        .iter()
        .map(|id| address(&node.run(&id_call(&node, "host-local", "ADD", id), &v6).good().json()))
        .collect();
    assert_eq!(seen, ["::ff:fffe/64", "::ff:ffff/64", "::100:0/64", "::100:1/64"]);
}

#[test]
fn addresses_ending_in_0_and_255_inside_a_subnet_are_handed_out() {
    let node = Node::new();
    let config = pool(
        &node,
        r#","subnet":"10.2.0.0/16","rangeStart":"10.2.0.254","rangeEnd":"10.2.1.1","gateway":"10.2.9.9""#,
    );
    let seen: Vec<String> = ["a", "b", "c", "d"]
        .iter()
        .map(|id| address(&node.run(&id_call(&node, "host-local", "ADD", id), &config).good().json()))
        .collect();
    assert_eq!(seen, ["10.2.0.254/16", "10.2.0.255/16", "10.2.1.0/16", "10.2.1.1/16"]);
}

#[test]
fn requested_addresses_may_have_a_prefix_length() {
    let node = Node::new();
    let v4 = pool(&node, V4);
    for (args, config, wanted) in [
        ("IP=10.1.2.30", v4.clone(), vec!["10.1.2.30/24"]),
        ("IgnoreUnknown=1;IP=10.1.2.31/24", v4.clone(), vec!["10.1.2.31/24"]),
        ("", v4.replacen('{', r#"{"runtimeConfig":{"ips":["10.1.2.32/24"]},"#, 1), vec!["10.1.2.32/24"]),
        ("", v4.replacen('{', r#"{"args":{"cni":{"ips":["10.1.2.33"]}},"#, 1), vec!["10.1.2.33/24"]),
        (
            "",
            pool(&node, r#","ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"10.9.0.0/16"}]]"#).replacen(
                '{',
                r#"{"runtimeConfig":{"ips":["10.9.0.7","10.1.2.34"]},"#,
                1,
            ),
            vec!["10.1.2.34/24", "10.9.0.7/16"],
        ),
    ] {
        let id = wanted[0].replace('/', "-");
        let mut call = id_call(&node, "host-local", "ADD", &id);
        call.args = args;
        let result = node.run(&call, &config).good().json();
        let got: Vec<&str> =
            result["ips"].as_array().unwrap().iter().map(|ip| ip["address"].as_str().unwrap()).collect();
        assert_eq!(got, wanted);
    }
    let mut call = id_call(&node, "host-local", "ADD", "bad");
    call.args = "IP=10.1.2.300";
    assert!(node.run(&call, &v4).msg().contains("10.1.2.300"));
}

#[test]
fn the_third_container_of_a_slash_30_is_told_why() {
    let mut node = Node::new();
    let config = bridge(&node, "", r#","subnet":"10.1.2.0/30""#);
    let ns = node.container("c1");
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good();
    let other = node.container("c2");
    let answer = node.run(&node.call("bridge", "ADD", "cid2", &other), &config);
    assert!(answer.msg().contains("no IP addresses available in range set: 10.1.2.1-10.1.2.2"), "{answer:?}");
    assert_eq!(node.links().len(), 2, "no link of the refused one");
    assert_eq!(node.run(&node.call("bridge", "STATUS", "", ""), &config).json()["code"], 50);
    // The container that failed keeps its name free, the next request works.
    node.run(&node.call("bridge", "DEL", "cid1", &ns), &config).good();
    node.run(&node.call("bridge", "ADD", "cid2", &other), &config).good();
}

#[test]
fn a_refused_request_does_not_spoil_the_next() {
    let mut node = Node::new();
    let config = bridge(&node, "", V4);
    let ns = node.container("c1");
    let impossible = config.replacen('{', r#"{"runtimeConfig":{"ips":["192.0.2.9"]},"#, 1);
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &impossible).msg();
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good();
    assert_eq!(addresses(&node.ip_json("addr show dev tbr0")), ["10.1.2.1/24"]);
}

#[test]
fn hairpin_does_not_fail_duplicate_address_detection() {
    let mut node = Node::new();
    let config = bridge(&node, r#","hairpinMode":true"#, V6);
    let ns = node.container("c1");
    let begun = Instant::now();
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good();
    let took = begun.elapsed();
    let text = node.ip_in(&ns, "-6 addr show dev eth0 scope global").to_string();
    assert!(
        text.contains("fd00:1::2") && !text.contains("dadfailed") && !text.contains("tentative"),
        "{text}"
    );
    assert!(node.exec_in(&ns, "ping -c 1 -W 1 fd00:1::1").status.success());
    // Nobody waited for a detection, which takes a second and more.
    assert!(took < Duration::from_millis(900), "{took:?}");
}

#[test]
fn a_kernel_without_ipv6_serves_ipv4() {
    let mut node = Node::new();
    let config = bridge(&node, r#","isDefaultGateway":true"#, V4);
    let ns = node.container("c1");
    for command in ["ADD", "DEL"] {
        // As with ipv6.disable=1: no IPv6 settings at all.
        let script = format!(
            "mount -n -t tmpfs none /proc/sys/net/ipv6 2>/dev/null || mount -n --bind {0} /proc/sys/net/ipv6; exec {1}/bridge",
            node.path("data/..").display(),
            node.bin().display()
        );
        let mut process = node.command("unshare");
        process
            .command
            .args(["-m", "sh", "-c", &script])
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", "cid1")
            .env("CNI_NETNS", &ns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", node.bin())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped());
        let mut child = process.spawn();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), config.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        if command == "ADD" {
            assert!(node.exec_in(&ns, "ping -c 1 -W 1 10.1.2.1").status.success());
        }
    }
}

#[test]
fn a_promiscuous_bridge_answers_once() {
    let mut node = Node::new();
    let config = bridge(&node, r#","promiscMode":true"#, V4);
    let (a, b) = (node.container("a"), node.container("b"));
    node.run(&node.call("bridge", "ADD", "a", &a), &config).good();
    node.run(&node.call("bridge", "ADD", "b", &b), &config).good();
    for target in ["10.1.2.3", "10.1.2.1"] {
        let output = node.exec_in(&a, &format!("ping -c 3 -i 0.2 -W 1 {target}"));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && !text.contains("DUP!"), "{text}");
    }
}

#[test]
fn the_default_route_of_a_router_survives_forwarding() {
    let mut node = Node::new();
    let ns = node.container("c1");
    for line in [
        "link add up0 type veth peer name up1",
        "link set up0 up",
        "link set up1 up",
        "-6 route add default via fe80::1 dev up0 proto ra",
    ] {
        node.ip(line);
    }
    assert_eq!(node.sysctl("net/ipv6/conf/up0/accept_ra"), "1");
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &bridge(&node, "", V6)).good();
    assert_eq!(node.sysctl("net/ipv6/conf/all/forwarding"), "1");
    assert_eq!(node.sysctl("net/ipv6/conf/up0/accept_ra"), "2");
    assert_eq!(node.sysctl("net/ipv6/conf/up1/accept_ra"), "1", "only where a router's route is");
}

#[test]
fn a_published_port_takes_no_connection_to_elsewhere() {
    for backend in ["iptables", "nftables"] {
        let mut node = Node::new();
        let ns = node.container("c1");
        let far = node.container("far");
        let config = bridge(&node, r#","isDefaultGateway":true"#, V4);
        let result = node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good().json();
        node.run(&node.call("bridge", "ADD", "far", &far), &config).good();
        let maps = json!({"cniVersion": "1.1.0", "name": "net1", "prevResult": result, "backend": backend,
            "runtimeConfig": {"portMappings": [{"hostPort": 4443, "containerPort": 443, "protocol": "tcp"}]}});
        node.run(&node.call("portmap", "ADD", "cid1", &ns), &maps.to_string()).good();
        // 10.1.2.3 is another machine's address: its own port 4443 is meant.
        let listener =
            NetNs::open(&far).unwrap().with(|| std::net::TcpListener::bind("0.0.0.0:4443").unwrap()).unwrap();
        let stream = node.with(|| {
            std::net::TcpStream::connect_timeout(&"10.1.2.3:4443".parse().unwrap(), Duration::from_secs(2))
        });
        assert!(stream.is_ok(), "{backend}: {stream:?}");
        listener.accept().unwrap();
    }
}

#[test]
fn a_static_ipv6_address_can_be_taken_again_at_once() {
    let mut node = Node::new();
    for line in [
        "link add m0 type veth peer name m1",
        "link set m0 up",
        "link set m1 up",
        "-6 addr add fd00:5::1/64 dev m1 nodad",
    ] {
        node.ip(line);
    }
    let config = r#"{"cniVersion":"1.1.0","name":"net1","master":"m0","ipam":{"type":"static","addresses":[{"address":"fd00:5::7/64"}]}}"#;
    for round in 0..3 {
        let ns = node.container(&format!("c{round}"));
        node.run(&node.call("macvlan", "ADD", "cid1", &ns), config).good();
        assert!(node.exec_in(&ns, "ping -c 1 -W 2 fd00:5::1").status.success(), "round {round}");
        node.run(&node.call("macvlan", "DEL", "cid1", &ns), config).good();
    }
}

#[test]
fn only_listed_sysctls_are_written_where_there_is_a_list() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let list = node.path("allowlist.conf");
    std::fs::write(&list, "^net.core.somaxconn$\n\n  ^net.ipv4.conf.IFNAME\\..*$  \n").unwrap();
    let run = |key: &str| {
        let config = format!(
            r#"{{"cniVersion":"1.0.0","name":"n","sysctl":{{"{key}":"1"}},"prevResult":{{"cniVersion":"1.0.0","interfaces":[{{"name":"lo","sandbox":"{ns}"}}]}}}}"#
        );
        // The list has one place; a mount namespace of the call's own shows ours there.
        let script = format!(
            "mount -n -t tmpfs none /etc && mkdir -p /etc/cni/tuning && cp {} /etc/cni/tuning/allowlist.conf && exec {}/tuning",
            list.display(),
            node.bin().display()
        );
        let mut process = node.command("unshare");
        process
            .command
            .args(["-m", "sh", "-c", &script])
            .env("CNI_COMMAND", "ADD")
            .env("CNI_CONTAINERID", "cid1")
            .env("CNI_NETNS", &ns)
            .env("CNI_IFNAME", "lo")
            .env("CNI_PATH", node.bin())
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped());
        let mut child = process.spawn();
        std::io::Write::write_all(&mut child.stdin.take().unwrap(), config.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    assert!(run("net.core.somaxconn").0);
    assert!(run("net.ipv4.conf.IFNAME.arp_filter").0);
    let (ok, text) = run("net.ipv4.ip_forward");
    assert!(
        !ok && text
            .contains("Sysctl net.ipv4.ip_forward is not allowed. Only the following sysctls are allowed"),
        "{text}"
    );
}

#[test]
fn the_hosts_own_lo_is_never_set_down() {
    let node = Node::new();
    let config = r#"{"cniVersion":"1.1.0","name":"lo"}"#;
    for (plugin, command) in [("loopback", "DEL"), ("loopback", "ADD"), ("macvlan", "ADD"), ("tuning", "DEL")]
    {
        let mut call = node.call(plugin, command, "cid1", "/proc/self/ns/net");
        call.ifname = "lo";
        let answer = node.run(&call, config);
        assert_eq!(answer.json()["code"], 8, "{plugin} {command}: {answer:?}");
    }
    assert!(node.ip_json("link show dev lo")[0]["flags"].to_string().contains("\"UP\""));
}

#[test]
fn source_routing_takes_each_address_for_itself() {
    let mut node = Node::new();
    let ns = node.container("c1");
    for line in [
        "ip link add eth0 type veth peer name x0",
        "ip link set eth0 up",
        "ip link set x0 up",
        "ip addr add 10.1.2.9/24 dev eth0",
        "ip addr add 10.3.0.9/24 dev eth0",
        "ip addr add fd00::9/64 dev eth0 nodad",
    ] {
        assert!(node.exec_in(&ns, line).status.success(), "{line}");
    }
    let config = json!({"cniVersion": "1.1.0", "name": "net1", "prevResult": {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0", "sandbox": ns}],
        "ips": [
            {"address": "10.1.2.9/24", "gateway": "10.1.2.1", "interface": 0},
            {"address": "10.3.0.9/24", "interface": 0},
            {"address": "fd00::9/64", "gateway": "fd00::1", "interface": 0}
        ]
    }})
    .to_string();
    node.run(&node.call("sbr", "ADD", "cid1", &ns), &config).good();
    node.run(&node.call("sbr", "CHECK", "cid1", &ns), &config).good();
    let table = |family: &str, n: u32| {
        String::from_utf8(node.exec_in(&ns, &format!("ip {family} route show table {n}")).stdout).unwrap()
    };
    assert!(table("-4", 100).contains("default via 10.1.2.1"), "{}", table("-4", 100));
    assert!(!table("-4", 101).contains("default"), "no gateway, no default route: {}", table("-4", 101));
    assert!(table("-4", 101).contains("10.3.0.0/24"));
    assert!(table("-6", 102).contains("default via fd00::1"), "{}", table("-6", 102));
    let rules = node.ip_in(&ns, "rule show").to_string() + &node.ip_in(&ns, "-6 rule show").to_string();
    for (source, table) in [("10.1.2.9", "100"), ("10.3.0.9", "101"), ("fd00::9", "102")] {
        assert!(rules.contains(source) && rules.contains(&format!("\"{table}\"")), "{rules}");
    }
    node.run(&node.call("sbr", "DEL", "cid1", &ns), &config).good();
    let rules = node.ip_in(&ns, "rule show").to_string() + &node.ip_in(&ns, "-6 rule show").to_string();
    assert!(
        !rules.contains("10.1.2.9") && !rules.contains("10.3.0.9") && !rules.contains("fd00::9"),
        "{rules}"
    );
}

#[test]
fn a_limit_on_a_link_without_cable_says_what_is_wrong() {
    let mut node = Node::new();
    node.ip("link add m0 type veth peer name m1");
    node.ip("link set m0 up");
    let ns = node.container("c1");
    let macvlan = r#"{"cniVersion":"1.1.0","name":"net1","master":"m0"}"#;
    let result = node.run(&node.call("macvlan", "ADD", "cid1", &ns), macvlan).good().json();
    let config = json!({"cniVersion": "1.1.0", "name": "net1", "prevResult": result, "ingressRate": 1_000_000, "ingressBurst": 1_000_000});
    let answer = node.run(&node.call("bandwidth", "ADD", "cid1", &ns), &config.to_string());
    assert!(answer.msg().contains("container interface eth0 has no veth peer"), "{answer:?}");
}

#[test]
fn the_runtime_decides_over_arguments_and_they_over_the_config() {
    let node = Node::new();
    let mut call = node.call("static", "ADD", "cid1", "/x");
    let config = r#"{"cniVersion":"1.1.0","name":"net1","ipam":{"addresses":[{"address":"10.0.0.1/24"}]}}"#;
    let seen = |call: &Call<'_>, config: &str| -> Vec<String> {
        let result = node.run(call, config).good().json();
        result["ips"]
            .as_array()
            .unwrap()
            .iter()
            .map(|ip| ip["address"].as_str().unwrap().to_owned())
            .collect()
    };
    assert_eq!(seen(&call, config), ["10.0.0.1/24"]);
    // The reference appends CNI_ARGS to the config's addresses and lets the runtime's replace all.
    call.args = "IP=10.0.0.2/24";
    assert_eq!(seen(&call, config), ["10.0.0.1/24", "10.0.0.2/24"]);
    let runtime = config.replacen(
        '{',
        r#"{"runtimeConfig":{"ips":["10.0.0.3/24"]},"args":{"cni":{"ips":["10.0.0.4/24"]}},"#,
        1,
    );
    assert_eq!(seen(&call, &runtime), ["10.0.0.3/24"]);
}

#[test]
fn a_device_takes_its_own_network_along() {
    let mut node = Node::new();
    for line in [
        "link add hd0 type veth peer name hd1",
        "link set hd1 up",
        "link set hd0 up",
        "addr add 198.18.9.2/24 dev hd0",
        "-6 addr add fd00:9::2/64 dev hd0 nodad",
        "route add 203.0.113.0/24 via 198.18.9.1 metric 77",
        "route add 192.0.2.1/32 dev hd0",
        "-6 route add 2001:db8::/32 via fe80::7 dev hd0 proto ra",
    ] {
        node.ip(line);
    }
    let ns = node.container("c1");
    let config = r#"{"cniVersion":"1.1.0","name":"net1","device":"hd0","useInterfaceNetwork":true}"#;
    let mut call = node.call("host-device", "ADD", "cid1", &ns);
    call.ifname = "net1";
    let result = node.run(&call, config).good().json();
    assert_eq!(addresses(&node.ip_in(&ns, "addr show dev net1")), ["198.18.9.2/24", "fd00:9::2/64"]);
    let ips: Vec<&str> =
        result["ips"].as_array().unwrap().iter().map(|i| i["address"].as_str().unwrap()).collect();
    assert_eq!(ips, ["198.18.9.2/24", "fd00:9::2/64"]);
    let routes = node.ip_in(&ns, "route show");
    let far = routes.as_array().unwrap().iter().find(|r| r["dst"] == "203.0.113.0/24").unwrap();
    assert_eq!((&far["gateway"], &far["metric"]), (&json!("198.18.9.1"), &json!(77)));
    assert!(routes.as_array().unwrap().iter().any(|r| r["dst"] == "192.0.2.1"));
    assert!(
        !node.ip_in(&ns, "-6 route show").to_string().contains("2001:db8"),
        "a router's route is not copied"
    );
    let check = config.replacen('{', &format!("{{\"prevResult\":{result},"), 1);
    let mut again = node.call("host-device", "CHECK", "cid1", &ns);
    again.ifname = "net1";
    node.run(&again, &check).good();
    let mut del = node.call("host-device", "DEL", "cid1", &ns);
    del.ifname = "net1";
    node.run(&del, config).good();
    assert_eq!(node.links(), ["hd0", "hd1"]);
}

#[test]
fn malformed_input_is_a_json_error_from_every_plugin() {
    let node = Node::new();
    let deep = "[".repeat(200_000);
    let long = format!(r#"{{"cniVersion":"1.0.0","name":"{}"}}"#, "n".repeat(100_000));
    let inputs: Vec<Vec<u8>> = [
        "null",
        "[]",
        "\"x\"",
        "1",
        "",
        " ",
        "{",
        "{\"plugins\":null}",
        "{\"plugins\":[]}",
        "\u{feff}{}",
        r#"{"cniVersion":"1.0.0","name":"../x"}"#,
        r#"{"cniVersion":"1.0.0","name":"-x"}"#,
        r#"{"cniVersion":"1.0.0","name":"n\u0000"}"#,
        r#"{"cniVersion":"1.0.0","name":{}}"#,
        r#"{"cniVersion":["1.0.0"],"name":"n"}"#,
        r#"{"cniVersion":"1.0.0","name":"n","ipam":[]}"#,
        r#"{"cniVersion":"1.0.0","name":"n","prevResult":7}"#,
        r#"{"cniVersion":"1.0.0","name":"n","dns":"x"}"#,
        r#"{"cniVersion":"1.0.0","name":"n","capabilities":{"a":1}}"#,
        &deep,
        &long,
    ]
    .iter()
    .map(|s| s.as_bytes().to_vec())
    .chain([
        b"{\"cniVersion\":\"1.0.0\",\"name\":\"n\0\"}".to_vec(),
        vec![0; 64],
        vec![0xff; 64],
        b"{\"name\":\"\xff\"}".to_vec(),
    ])
    .collect();
    for plugin in felt_cni::plugins::ALL {
        for (i, input) in inputs.iter().enumerate() {
            let answer = run_bytes(&node, plugin.name, "ADD", input, "cid1");
            let value: Value = serde_json::from_str(&answer)
                .unwrap_or_else(|err| panic!("{} {i}: {err}: {answer}", plugin.name));
            assert!(value["code"].as_u64().is_some_and(|c| c > 0), "{} {i}: {answer}", plugin.name);
            assert!(!value["msg"].as_str().unwrap().contains("panic"), "{} {i}: {answer}", plugin.name);
        }
        for id in ["a/b", "../x", ".x", "-x", "a b"] {
            let answer: Value =
                serde_json::from_str(&run_bytes(&node, plugin.name, "DEL", b"{\"name\":\"n\"}", id)).unwrap();
            assert_eq!(answer["code"], 4, "{} {id}", plugin.name);
        }
    }
}

/// A call with any bytes on standard input; the namespace does not exist.
fn run_bytes(node: &Node, plugin: &str, command: &str, input: &[u8], id: &str) -> String {
    let mut process = node.command(node.bin().join(plugin));
    process
        .command
        .env("CNI_COMMAND", command)
        .env("CNI_CONTAINERID", id)
        .env("CNI_NETNS", node.path("none"))
        .env("CNI_IFNAME", "eth0")
        .env("CNI_PATH", node.bin())
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let mut child = process.spawn();
    let _ = std::io::Write::write_all(&mut child.stdin.take().unwrap(), input);
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{plugin} {command}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn no_configuration_smuggles_a_rule() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let prev = |bridge: &str| {
        json!({"cniVersion": "1.0.0", "interfaces": [{"name": bridge}, {"name": "eth0", "sandbox": ns}],
        "ips": [{"address": "10.1.2.9/24", "gateway": "10.1.2.1", "interface": 1}]})
    };
    let evil = "x\nCOMMIT\n*filter\n-A INPUT -j DROP";
    let maps = |keys: Value| {
        let mut config = json!({"cniVersion": "1.0.0", "name": "net1", "prevResult": prev("br0"), "backend": "iptables", "runtimeConfig":
            {"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": "tcp"}]}});
        config.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        ("portmap", config)
    };
    let policy = |bridge: &str| {
        (
            "firewall",
            json!({"cniVersion": "1.0.0", "name": "net1", "prevResult": prev(bridge), "backend": "iptables", "ingressPolicy": "isolated"}),
        )
    };
    for (plugin, config) in [
        maps(
            json!({"runtimeConfig": {"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": evil}]}}),
        ),
        maps(json!({"conditionsV4": ["-s", evil]})),
        maps(json!({"externalSetMarkChain": evil})),
        policy(evil),
        maps(json!({"backend": "nftables", "conditionsV4": ["ip", "saddr", evil]})),
        maps(json!({"backend": "nftables", "conditionsV4": ["ip", "saddr", "1.1.1.1", "accept;"]})),
        (
            "firewall",
            json!({"cniVersion": "1.0.0", "name": "net1", "prevResult": prev("br0"), "backend": "iptables", "iptablesAdminChainName": evil}),
        ),
    ] {
        let answer = node.run(&node.call(plugin, "ADD", "cid1", &ns), &config.to_string());
        let rules = String::from_utf8(node.command("iptables-save").output().stdout).unwrap();
        assert!(!rules.contains("-A INPUT"), "{plugin} {config}: {rules}");
        assert!(!answer.ok, "{plugin} {config}: {answer:?}");
        node.run(&node.call(plugin, "DEL", "cid1", &ns), &config.to_string());
    }
    // A word with blanks stays one word.
    let (plugin, config) = policy("br0 -j X");
    node.run(&node.call(plugin, "ADD", "cid1", &ns), &config.to_string()).good();
    let rules = String::from_utf8(node.command("iptables-save").output().stdout).unwrap();
    // iptables-save prints such a name without quotes; the rule's own target is still its last word.
    let rule = rules.lines().find(|l| l.contains("-i br0 -j X -o br0 -j X")).unwrap();
    assert!(rule.ends_with("-j DROP"), "{rule}");
    let (_, config) = maps(json!({"conditionsV4": ["-m", "comment", "--comment", "a \"b\" \\\\ c"]}));
    node.run(&node.call("portmap", "ADD", "cid1", &ns), &config.to_string()).good();
    let rules = String::from_utf8(node.command("iptables-save").output().stdout).unwrap();
    assert!(rules.contains("--comment \"a \\\"b\\\""), "{rules}");
}

#[test]
fn wrong_values_anywhere_in_a_configuration_are_answered_not_died_of() {
    let wrong = [
        json!(null),
        json!(-1),
        json!(1e300),
        json!(0.5),
        json!(""),
        json!("x".repeat(5000)),
        json!([]),
        json!([[]]),
        json!({}),
        json!(true),
        json!("\u{0}"),
        json!("../../x"),
        json!(18_446_744_073_709_551_615_u64),
        json!("\u{1f600}"),
    ];
    let mut tried = 0;
    for case in support::cases::cases().into_iter().chain(support::cases::newer()) {
        let run = support::compare::Run::new(&case);
        let config: Value = serde_json::from_str(&run.config(&case, "ADD")).unwrap();
        let mut paths = Vec::new();
        leaves(&config, String::new(), &mut paths);
        for (i, path) in paths.iter().enumerate() {
            // Directories stay: their defaults are the machine's own.
            if ["Dir", "resolvConf", "/name", "prevResult/cniVersion"].iter().any(|key| path.contains(key)) {
                continue;
            }
            for value in wrong.iter().cycle().skip(i * 5).take(3) {
                let mut bad = config.clone();
                *bad.pointer_mut(path).unwrap() = value.clone();
                for command in ["ADD", "DEL"] {
                    let call = run.node.call(case.plugin, command, "cid1", &run.ns).ifname(case.ifname);
                    let answer = run.node.run(&call, &bad.to_string());
                    tried += 1;
                    let what = || format!("{} {command} {path} = {value}: {answer:?}", case.name);
                    assert!(
                        !answer.stdout.contains("panic") && !answer.stderr.contains("panicked"),
                        "{}",
                        what()
                    );
                    if !answer.ok || command == "ADD" {
                        let document = serde_json::from_str::<Value>(&answer.stdout)
                            .unwrap_or_else(|err| panic!("{err}: {}", what()));
                        assert!(answer.ok || document["code"].as_u64().is_some_and(|c| c > 0), "{}", what());
                    }
                }
            }
        }
    }
    assert!(tried > 1000, "{tried}");
}

/// JSON pointers to every value that holds no others.
fn leaves(value: &Value, path: String, out: &mut Vec<String>) {
    match value {
        Value::Object(o) if !o.is_empty() => {
            o.iter().for_each(|(k, v)| leaves(v, format!("{path}/{k}"), out))
        }
        Value::Array(items) if !items.is_empty() => {
            items.iter().enumerate().for_each(|(i, v)| leaves(v, format!("{path}/{i}"), out));
        }
        _ => out.push(path),
    }
}
