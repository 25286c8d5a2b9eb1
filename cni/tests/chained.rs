//! Plugins that follow another one in a conflist, on real attachments.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use felt_hostnet::netns::NetNs;
use serde_json::{Value, json};
use support::{Node, files};

/// A bridge attachment named `id`; returns its namespace and result.
fn attach(node: &mut Node, id: &str) -> (String, Value) {
    let ns = node.container(id);
    let result = node.run(&node.call("bridge", "ADD", id, &ns), &bridge(node)).good().json();
    (ns, result)
}

fn bridge(node: &Node) -> String {
    format!(
        r#"{{"cniVersion":"1.0.0","name":"net1","bridge":"tbr0","isDefaultGateway":true,"hairpinMode":true,
            "ipam":{{"type":"host-local","dataDir":{:?},"ranges":[[{{"subnet":"10.1.2.0/24"}}],[{{"subnet":"fd00:1::/64"}}]]}}}}"#,
        node.path("data")
    )
}

/// A chained configuration with a result, in 1.1.0 so that GC is spoken too.
fn chained(prev: &Value, keys: &Value) -> String {
    let mut conf = json!({"cniVersion": "1.0.0", "name": "net1", "prevResult": prev});
    conf.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
    conf.to_string()
}

fn ports(list: &[(u16, u16, &str)]) -> Value {
    let list: Vec<Value> = list
        .iter()
        .map(|(host, container, proto)| json!({"hostPort": host, "containerPort": container, "protocol": proto}))
        .collect();
    json!({"runtimeConfig": {"portMappings": list}})
}

fn nat(node: &Node) -> String {
    let mut text = String::new();
    for tool in ["iptables-save", "ip6tables-save"] {
        text.push_str(&String::from_utf8(node.command(tool).args("-t nat").output().stdout).unwrap());
    }
    text
}

/// A TCP server inside a container that says its name once.
fn serve_tcp(ns: &str, port: u16, name: &'static str) -> std::thread::JoinHandle<()> {
    let listener = NetNs::open(ns).unwrap().with(|| TcpListener::bind(("0.0.0.0", port)).unwrap()).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(name.as_bytes()).unwrap();
    })
}

fn ask_tcp(node: &Node, netns: Option<&str>, address: &str) -> String {
    let ask = || {
        let mut stream = TcpStream::connect_timeout(&address.parse().unwrap(), Duration::from_secs(2))
            .unwrap_or_else(|err| panic!("{address}: {err}"));
        stream.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    match netns {
        None => node.with(ask),
        Some(ns) => NetNs::open(ns).unwrap().with(ask).unwrap(),
    }
}

#[test]
fn a_published_port_leads_to_the_container() {
    for backend in ["iptables", "nftables"] {
        let mut node = Node::new();
        let (ns, result) = attach(&mut node, "cid1");
        let mut keys = ports(&[(8080, 80, "tcp")]);
        keys["backend"] = backend.into();
        let config = chained(&result, &keys);
        let call = node.call("portmap", "ADD", "cid1", &ns);
        let out = node.run(&call, &config).good().json();
        assert_eq!(out, result, "the result is handed through");
        // From the host to its own address, over loopback (needs the masquerade), from the container
        // itself (hairpin).
        for (from, to) in
            [(None, "10.1.2.1:8080"), (None, "127.0.0.1:8080"), (Some(ns.as_str()), "10.1.2.1:8080")]
        {
            let server = serve_tcp(&ns, 80, "one");
            assert_eq!(ask_tcp(&node, from, to), "one", "{backend} {to}");
            server.join().unwrap();
        }
        node.run(&node.call("portmap", "CHECK", "cid1", &ns), &config).good();
        for _ in 0..2 {
            node.run(&node.call("portmap", "DEL", "cid1", &ns), &config).good();
        }
        let checked = node.run(&node.call("portmap", "CHECK", "cid1", &ns), &config);
        assert!(checked.msg().starts_with("could not check ipv4 dnat: "), "{checked:?}");
        assert!(!nat(&node).contains("CNI-DN-"));
        let ruleset = node.command("nft").args("-j list ruleset").output();
        assert!(!String::from_utf8(ruleset.stdout).unwrap().contains("\"comment\": \"cid1\""));
    }
}

#[test]
fn a_repeated_add_doubles_nothing() {
    for backend in ["iptables", "nftables"] {
        let mut node = Node::new();
        let (ns, result) = attach(&mut node, "cid1");
        let mut keys = ports(&[(8080, 80, "tcp"), (5353, 53, "udp")]);
        keys["backend"] = backend.into();
        let config = chained(&result, &keys);
        let seen = |node: &Node| {
            let ruleset = node.command("nft").args("list ruleset").output();
            (
                nat(node).replace(|c: char| c.is_ascii_digit(), ""),
                String::from_utf8(ruleset.stdout).unwrap().lines().count(),
            )
        };
        node.run(&node.call("portmap", "ADD", "cid1", &ns), &config).good();
        let once = seen(&node);
        node.run(&node.call("portmap", "ADD", "cid1", &ns), &config).good();
        assert_eq!(seen(&node).1, once.1, "{backend}");
    }
}

#[test]
fn the_newest_container_wins_a_port_and_services_stay_first() {
    for backend in ["iptables", "nftables"] {
        let mut node = Node::new();
        for line in [
            "-t nat -N KUBE-SERVICES",
            "-t nat -A PREROUTING -j KUBE-SERVICES",
            "-t nat -A OUTPUT -j KUBE-SERVICES",
        ] {
            assert!(node.command("iptables").args(line).output().status.success());
        }
        let (ns_a, a) = attach(&mut node, "cida");
        let (ns_b, b) = attach(&mut node, "cidb");
        for (id, ns, result) in [("cida", &ns_a, &a), ("cidb", &ns_b, &b)] {
            let mut keys = ports(&[(8080, 80, "tcp")]);
            keys["backend"] = backend.into();
            node.run(&node.call("portmap", "ADD", id, ns), &chained(result, &keys)).good();
        }
        let server = serve_tcp(&ns_b, 80, "b");
        assert_eq!(ask_tcp(&node, None, "10.1.2.1:8080"), "b", "{backend}");
        server.join().unwrap();
        if backend == "iptables" {
            let text = nat(&node);
            let at = |what: &str| text.find(what).unwrap();
            assert!(at("-A PREROUTING -j KUBE-SERVICES") < at("-A PREROUTING -m addrtype"));
        }
    }
}

#[test]
fn udp_flows_move_to_the_new_container_at_once() {
    let mut node = Node::new();
    let (ns_a, a) = attach(&mut node, "cida");
    let (ns_b, b) = attach(&mut node, "cidb");
    let server = |ns: &str| {
        let socket = NetNs::open(ns).unwrap().with(|| UdpSocket::bind("0.0.0.0:53").unwrap()).unwrap();
        socket.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        socket
    };
    let (sock_a, sock_b) = (server(&ns_a), server(&ns_b));
    let client = node.with(|| UdpSocket::bind("10.1.2.1:40000").unwrap());
    let keys = ports(&[(5353, 53, "udp")]);
    node.run(&node.call("portmap", "ADD", "cida", &ns_a), &chained(&a, &keys)).good();
    let mut buffer = [0; 16];
    client.send_to(b"1", "10.1.2.1:5353").unwrap();
    sock_a.recv(&mut buffer).expect("the first container gets the first packet");
    node.run(&node.call("portmap", "DEL", "cida", &ns_a), &chained(&a, &keys)).good();
    node.run(&node.call("portmap", "ADD", "cidb", &ns_b), &chained(&b, &keys)).good();
    client.send_to(b"2", "10.1.2.1:5353").unwrap();
    sock_b.recv(&mut buffer).expect("the second container gets the next packet of the same flow");
}

#[test]
fn many_containers_come_and_go_at_once() {
    let mut node = Node::new();
    let mut all = Vec::new();
    for i in 0..12 {
        let id = format!("cid{i}");
        let (ns, result) = attach(&mut node, &id);
        let list: Vec<(u16, u16, &str)> = (0..5).map(|p| (9000 + i * 10 + p, 80, "tcp")).collect();
        all.push((id, ns, chained(&result, &ports(&list))));
    }
    let (first, second) = all.split_at(6);
    let run = |node: &Node, command: &'static str, list: &[(String, String, String)]| {
        std::thread::scope(|scope| {
            for (id, ns, config) in list {
                scope.spawn(move || node.run(&node.call("portmap", command, id, ns), config).good());
            }
        });
    };
    run(&node, "ADD", first);
    std::thread::scope(|scope| {
        scope.spawn(|| run(&node, "ADD", second));
        scope.spawn(|| run(&node, "DEL", first));
    });
    let text = nat(&node);
    // Own chain and entry of each of the six that are left, in both families.
    assert_eq!(text.matches(":CNI-DN-").count(), 12, "{text}");
    for (id, ns, config) in second {
        node.run(&node.call("portmap", "CHECK", id, ns), config).good();
    }
    run(&node, "DEL", second);
    assert!(!nat(&node).contains("CNI-DN-"));
}

#[test]
fn two_thousand_ports_take_less_than_two_seconds() {
    let mut node = Node::new();
    let (ns, result) = attach(&mut node, "cid1");
    let list: Vec<(u16, u16, &str)> = (0..2000).map(|i| (20000 + i, 30000 + i, "tcp")).collect();
    let config = chained(&result, &ports(&list));
    let began = std::time::Instant::now();
    node.run(&node.call("portmap", "ADD", "cid1", &ns), &config).good();
    let took = began.elapsed();
    let server = serve_tcp(&ns, 31999, "last");
    assert_eq!(ask_tcp(&node, None, "10.1.2.1:21999"), "last");
    server.join().unwrap();
    let began = std::time::Instant::now();
    node.run(&node.call("portmap", "DEL", "cid1", &ns), &config).good();
    assert!(took < Duration::from_secs(2) && began.elapsed() < Duration::from_secs(2), "{took:?}");
    assert!(!nat(&node).contains("CNI-DN-"));
}

#[test]
fn gc_removes_what_no_valid_attachment_owns() {
    let mut node = Node::new();
    let masq = bridge(&node)
        .replace("\"isDefaultGateway\"", "\"ipMasq\":true,\"macspoofchk\":true,\"isDefaultGateway\"");
    let masq = masq.replace("1.0.0", "1.1.0");
    for (id, backend) in [("keep", "iptables"), ("gone1", "iptables"), ("gone2", "nftables")] {
        let ns = node.container(id);
        let config = masq.replacen('{', &format!(r#"{{"ipMasqBackend":"{backend}","#), 1);
        let result = node.run(&node.call("bridge", "ADD", id, &ns), &config).good().json();
        let maps = chained(&result, &ports(&[(8080, 80, "tcp")])).replace("1.0.0", "1.1.0");
        node.run(&node.call("portmap", "ADD", id, &ns), &maps).good();
        if id != "keep" {
            node.remove_container(&ns);
        }
    }
    // The kernel removes a namespace in its own time, and the links in it.
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while node.links().iter().filter(|l| l.starts_with("veth")).count() > 1 {
        assert!(std::time::Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(20));
    }
    let valid = r#"{"cni.dev/valid-attachments":[{"containerID":"keep","ifname":"eth0"}],"#;
    for plugin in ["portmap", "bridge"] {
        let config =
            if plugin == "bridge" { masq.clone() } else { r#"{"cniVersion":"1.1.0","name":"net1"}"#.into() };
        node.run(&node.call(plugin, "GC", "", ""), &config.replacen('{', valid, 1)).good();
    }
    let text = nat(&node);
    assert!(text.contains("id: \\\"keep\\\"") && !text.contains("gone"), "{text}");
    let ruleset = String::from_utf8(node.command("nft").args("list ruleset").output().stdout).unwrap();
    assert!(ruleset.contains("macspoofchk-keep-eth0") && !ruleset.contains("gone"), "{ruleset}");
    let left: Vec<String> = files(&node.path("data/net1"))
        .into_iter()
        .filter(|f| f.parse::<std::net::IpAddr>().is_ok())
        .collect();
    assert_eq!(left.len(), 2, "{left:?}");
    // Without the list nothing is removed: an empty list and a missing one are different things.
    let refused = node.run(&node.call("bridge", "GC", "", ""), &masq);
    assert!(refused.msg().contains("cni.dev/valid-attachments"));
}

#[test]
fn a_forged_mac_is_dropped() {
    let mut node = Node::new();
    let config = bridge(&node).replace("\"isDefaultGateway\"", "\"macspoofchk\":true,\"isDefaultGateway\"");
    let ns = node.container("c1");
    node.run(&node.call("bridge", "ADD", "cid1", &ns), &config).good();
    assert!(node.exec_in(&ns, "ping -c 1 -W 1 10.1.2.1").status.success());
    assert!(node.exec_in(&ns, "ip link set eth0 address 02:66:66:66:66:66").status.success());
    assert!(!node.exec_in(&ns, "ping -c 1 -W 1 10.1.2.1").status.success());
    node.run(&node.call("bridge", "DEL", "cid1", ""), &config).good();
    let ruleset = String::from_utf8(node.command("nft").args("list ruleset").output().stdout).unwrap();
    assert!(!ruleset.contains("cid1"), "{ruleset}");
}

#[test]
fn tuning_gives_back_what_it_changed() {
    let mut node = Node::new();
    let (ns, result) = attach(&mut node, "cid1");
    let before = node.ip_in(&ns, "link show dev eth0")[0].clone();
    let keys = json!({
        "dataDir": node.path("tuning"), "mtu": 1300, "mac": "02:00:00:00:00:AA", "promisc": true, "txQLen": 77,
        "sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1"}
    });
    let config = chained(&result, &keys);
    let out = node.run(&node.call("tuning", "ADD", "cid1", &ns), &config).good().json();
    assert_eq!(out["interfaces"][2]["mac"], "02:00:00:00:00:AA");
    let now = node.ip_in(&ns, "link show dev eth0")[0].clone();
    assert_eq!(
        (&now["mtu"], &now["address"], &now["txqlen"]),
        (&json!(1300), &json!("02:00:00:00:00:aa"), &json!(77))
    );
    assert_eq!(
        node.ip_in(&ns, "route show default")[0]["gateway"],
        "10.1.2.1",
        "the MAC does not cost the routes"
    );
    assert_eq!(node.ip_in(&ns, "-6 route show default").as_array().unwrap().len(), 1);
    node.run(&node.call("tuning", "CHECK", "cid1", &ns), &config).good();
    node.run(&node.call("tuning", "DEL", "cid1", &ns), &config).good();
    let after = node.ip_in(&ns, "link show dev eth0")[0].clone();
    assert_eq!(
        (&after["mtu"], &after["address"], &after["txqlen"]),
        (&before["mtu"], &before["address"], &before["txqlen"])
    );
    assert_eq!(files(&node.path("tuning")), [""; 0]);

    // A value the kernel refuses: what was written before it is put back.
    let keys = json!({"sysctl": {"net.ipv4.conf.IFNAME.arp_filter": "1", "net.ipv4.conf.IFNAME.zzz": "1"}});
    let refused = node.run(&node.call("tuning", "ADD", "cid1", &ns), &chained(&result, &keys));
    assert!(refused.msg().contains("no such file or directory"), "{refused:?}");
    let value = node.exec_in(&ns, "cat /proc/sys/net/ipv4/conf/eth0/arp_filter");
    assert_eq!(String::from_utf8(value.stdout).unwrap().trim(), "1", "the first ADD's value, unchanged");
    for (key, text) in
        [("kernel.x", "invalid net sysctl key"), ("net.ipv4/../../kernel.x", "invalid net sysctl key")]
    {
        let keys = json!({"sysctl": {key: "1"}});
        let refused = node.run(&node.call("tuning", "ADD", "cid1", &ns), &chained(&result, &keys));
        assert!(refused.msg().contains(text), "{refused:?}");
    }
    let twice = format!(
        r#"{{"cniVersion":"1.0.0","name":"n","sysctl":{{"net.a":"1","net.a":"2"}},"prevResult":{result}}}"#
    );
    let refused = node.run(&node.call("tuning", "ADD", "cid1", &ns), &twice);
    assert_eq!(refused.msg(), "duplicated sysctl keys are not allowed");
    let crash = format!(
        r#"{{"cniVersion":"1.0.0","name":"n","args":{{"cni":{{"sysctl":{{"net.core.somaxconn":"99"}}}}}},"prevResult":{result}}}"#
    );
    node.run(&node.call("tuning", "ADD", "cid1", &ns), &crash).good();
}

#[test]
fn a_limited_container_is_slow_and_a_second_add_undoes_nothing() {
    let mut node = Node::new();
    let (ns, result) = attach(&mut node, "cid1");
    let keys = json!({"ingressRate": 8_000_000, "ingressBurst": 80_000, "egressRate": 8_000_000, "egressBurst": 80_000});
    let config = chained(&result, &keys);
    let out = node.run(&node.call("bandwidth", "ADD", "cid1", &ns), &config).good().json();
    assert_eq!(out["interfaces"].as_array().unwrap().len(), 4);
    node.run(&node.call("bandwidth", "CHECK", "cid1", &ns), &config).good();
    let again = node.run(&node.call("bandwidth", "ADD", "cid1", &ns), &config);
    assert!(again.msg().contains("file exists"), "{again:?}");
    node.run(&node.call("bandwidth", "CHECK", "cid1", &ns), &config).good();

    // A megabyte at a megabyte a second, both ways.
    let listener = node.with(|| TcpListener::bind("10.1.2.1:7000").unwrap());
    let began = std::time::Instant::now();
    let ns_handle = NetNs::open(&ns).unwrap();
    let client = std::thread::spawn(move || {
        let mut stream = ns_handle.with(|| TcpStream::connect("10.1.2.1:7000").unwrap()).unwrap();
        stream.write_all(&vec![0; 1_000_000]).unwrap();
    });
    let (mut stream, _) = listener.accept().unwrap();
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap();
    client.join().unwrap();
    assert_eq!(all.len(), 1_000_000);
    let took = began.elapsed().as_secs_f64();
    assert!(took > 0.6, "took {took} s");
    for _ in 0..2 {
        node.run(&node.call("bandwidth", "DEL", "cid1", &ns), &config).good();
    }
    assert!(!node.links().iter().any(|l| l.starts_with("bwp")));
    let plain = r#"{"cniVersion":"1.0.0","name":"n"}"#;
    let refused = node.run(&node.call("bandwidth", "ADD", "cid1", &ns), plain);
    assert_eq!(refused.msg(), "must be called as chained plugin");
}

#[test]
fn sbr_del_never_touches_a_missing_path() {
    let mut node = Node::new();
    let (ns, result) = attach(&mut node, "cid1");
    let config = chained(&result, &json!({}));
    node.run(&node.call("sbr", "ADD", "cid1", &ns), &config).good();
    assert!(node.ip_in(&ns, "rule show").to_string().contains("10.1.2.2"));
    assert!(node.ip_in(&ns, "-6 rule show").to_string().contains("fd00:1::2"));
    assert!(node.exec_in(&ns, "ping -c 1 -W 1 -I 10.1.2.2 10.1.2.1").status.success());
    node.run(&node.call("sbr", "DEL", "cid1", &ns), &config).good();
    assert!(!node.ip_in(&ns, "rule show").to_string().contains("10.1.2.2"));
    let missing = node.path("no/such/ns");
    std::fs::create_dir_all(missing.parent().unwrap()).unwrap();
    for netns in ["", missing.to_str().unwrap()] {
        node.run(&node.call("sbr", "DEL", "cid1", netns), &config).good();
    }
    assert!(!missing.exists());
}

#[test]
fn a_device_of_the_host_comes_back_whatever_happened() {
    let mut node = Node::new();
    let ns = node.container("c1");
    let config = r#"{"cniVersion":"1.0.0","name":"net1","device":"hd0"}"#;
    let mut call = node.call("host-device", "ADD", "cid1", &ns);
    call.ifname = "net1";
    let missing = node.run(&call, config);
    assert_eq!(missing.msg(), "failed to find host device: Link not found");
    node.ip("link add hd0 type veth peer name hd1");
    node.ip("link set hd0 up");

    // A name that is taken inside: the device is back, up, without an alias.
    let mut clash = call.clone();
    clash.ifname = "lo";
    assert!(node.run(&clash, config).msg().contains("file exists"));
    let back = &node.ip_json("link show dev hd0")[0];
    assert!(back.to_string().contains("\"UP\"") && back.get("ifalias").is_none(), "{back}");

    let del = |node: &Node| {
        let mut call = node.call("host-device", "DEL", "cid1", &ns);
        call.ifname = "net1";
        node.run(&call, config).good();
    };
    node.run(&call, config).good();
    assert_eq!(node.links(), ["hd1"]);
    // Renamed inside and left up.
    assert!(node.exec_in(&ns, "ip link set net1 name foo").status.success());
    del(&node);
    del(&node);
    assert_eq!(node.links(), ["hd0", "hd1"]);
    // The host has another link of that name by now.
    node.run(&call, config).good();
    node.ip("link add hd0 type veth peer name hd9");
    del(&node);
    assert_eq!(node.links().len(), 4, "{:?}", node.links());
    for netns in ["", "/no/such/ns"] {
        node.run(&node.call("host-device", "DEL", "cid1", netns), config).good();
    }
}

#[test]
fn the_firewall_lets_only_its_containers_through() {
    let mut node = Node::new();
    let (ns, result) = attach(&mut node, "cid1");
    node.command("iptables").args("-P FORWARD DROP").output();
    let config = chained(&result, &json!({"backend": "iptables"}));
    let out = node.run(&node.call("firewall", "ADD", "cid1", &ns), &config).good().json();
    assert_eq!(out, result);
    node.run(&node.call("firewall", "CHECK", "cid1", &ns), &config).good();
    // Once is enough, and a repetition adds nothing.
    let save = |node: &Node| {
        String::from_utf8(node.command("iptables-save").args("-t filter").output().stdout).unwrap()
    };
    let count = save(&node).lines().count();
    node.run(&node.call("firewall", "ADD", "cid1", &ns), &config).good();
    assert_eq!(save(&node).lines().count(), count);
    for _ in 0..2 {
        node.run(&node.call("firewall", "DEL", "cid1", &ns), &config).good();
    }
    assert!(!save(&node).contains("10.1.2.2"), "{}", save(&node));
    let without = r#"{"cniVersion":"1.0.0","name":"net1"}"#;
    node.run(&node.call("firewall", "DEL", "cid1", &ns), without).good();
    assert_eq!(
        node.run(&node.call("firewall", "ADD", "cid1", &ns), without).msg(),
        "missing prevResult from earlier plugin"
    );
}
