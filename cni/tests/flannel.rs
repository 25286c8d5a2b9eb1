//! The flannel plugin over bridge and host-local, as flannel's conflist calls it.

mod support;

use support::{Node, addresses, files, names};

const CONF: &str = r#""name":"cbr0","type":"flannel","delegate":{"hairpinMode":true,"isDefaultGateway":true,"bridge":"tbr0"}"#;

fn config(node: &Node) -> String {
    format!(
        r#"{{"cniVersion":"0.3.1",{CONF},"subnetFile":{:?},"dataDir":{:?},
            "ipam":{{"dataDir":{:?}}}}}"#,
        node.path("subnet.env"),
        node.path("flannel"),
        node.path("networks")
    )
}

fn write_subnet(node: &Node) {
    std::fs::write(
        node.path("subnet.env"),
        "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.7.1/24\nFLANNEL_IPV6_NETWORK=fd00::/48\n\
         FLANNEL_IPV6_SUBNET=fd00:0:0:7::1/64\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
    )
    .unwrap();
}

#[test]
fn attaches_in_process_and_detaches_from_what_it_stored() {
    let mut node = Node::new();
    write_subnet(&node);
    let config = config(&node);
    let ns = node.container("c1");
    let log = node.path("trace");
    let result = node
        .run_with(&node.call("flannel", "ADD", "cid1", &ns), &config, |c| {
            c.env("CNI_FELT_LOG", &log);
        })
        .good()
        .json();
    assert_eq!(result["ips"][0]["address"], "10.244.7.2/24");
    let trace = std::fs::read_to_string(&log).unwrap();
    assert!(trace.contains("delegate bridge ADD in process"), "{trace}");
    assert!(trace.contains("delegate host-local ADD in process"), "{trace}");

    assert_eq!(addresses(&node.ip_in(&ns, "addr show dev eth0")), ["10.244.7.2/24", "fd00:0:0:7::2/64"]);
    assert_eq!(node.ip_in(&ns, "route show 10.244.0.0/16")[0]["gateway"], "10.244.7.1");
    assert_eq!(node.ip_in(&ns, "link show dev eth0")[0]["mtu"], 1450);
    assert_eq!(files(&node.path("flannel")), ["cid1"]);

    // Neither the daemon's file nor the same conflist is there any more.
    std::fs::remove_file(node.path("subnet.env")).unwrap();
    let changed = config.replace("tbr0", "other");
    for _ in 0..2 {
        node.run(&node.call("flannel", "DEL", "cid1", &ns), &changed).good();
    }
    assert_eq!(node.links(), ["tbr0"]);
    assert_eq!(files(&node.path("flannel")), [""; 0]);
    assert_eq!(files(&node.path("networks/cbr0")), ["last_reserved_ip.0", "last_reserved_ip.1", "lock"]);
    let refused = node.run(&node.call("flannel", "ADD", "cid1", &ns), &config);
    assert!(refused.msg().contains("Is the daemon running?"), "{refused:?}");
}

#[test]
fn two_interfaces_of_one_container_are_told_apart() {
    let mut node = Node::new();
    write_subnet(&node);
    let config = config(&node);
    let ns = node.container("c1");
    let call = |command, ifname| {
        let mut call = node.call("flannel", command, "cid1", &ns);
        call.ifname = ifname;
        call
    };
    node.run(&call("ADD", "eth0"), &config).good();
    node.run(&call("ADD", "net1"), &config).good();
    assert_eq!(files(&node.path("flannel")), ["cid1", "cid1-net1"]);
    node.run(&call("DEL", "net2"), &config).good();
    node.run(&call("DEL", "eth0"), &config).good();
    assert_eq!(names(&node.ip_in(&ns, "link show")), ["net1"]);
    node.run(&call("DEL", "net1"), &config).good();
    assert_eq!(names(&node.ip_in(&ns, "link show")), [""; 0]);
    assert_eq!(files(&node.path("flannel")), [""; 0]);
    assert_eq!(files(&node.path("networks/cbr0")).len(), 3);
}

#[test]
fn a_refused_delegate_keeps_the_stored_file_for_the_retry() {
    let mut node = Node::new();
    write_subnet(&node);
    let config = config(&node);
    let ns = node.container("c1");
    node.run(&node.call("flannel", "ADD", "cid1", &ns), &config).good();
    let mut nowhere = node.call("flannel", "DEL", "cid1", &ns);
    nowhere.path = "/nonexistent".into();
    assert!(node.run(&nowhere, &config).msg().contains("failed to find plugin \"bridge\""));
    assert_eq!(files(&node.path("flannel")), ["cid1"]);
    // A cut file: DEL goes on with the config at hand.
    std::fs::write(node.path("flannel/cid1"), "{\"name\":").unwrap();
    node.run(&node.call("flannel", "DEL", "cid1", &ns), &config).good();
    assert_eq!(files(&node.path("flannel")), [""; 0]);
    assert_eq!(node.links(), ["tbr0"]);
}

#[test]
fn a_failed_add_keeps_an_earlier_attachment_whole() {
    let mut node = Node::new();
    write_subnet(&node);
    let config = config(&node);
    let ns = node.container("c1");
    node.run(&node.call("flannel", "ADD", "cid1", &ns), &config).good();
    let stored = std::fs::read(node.path("flannel/cid1")).unwrap();
    node.run(&node.call("flannel", "ADD", "cid1", &ns), &config).msg();
    assert_eq!(std::fs::read(node.path("flannel/cid1")).unwrap(), stored);
    assert!(node.exec_in(&ns, "ping -c 1 -W 1 10.244.7.1").status.success());
    // A container that never got an interface leaves no file.
    let mut bad = node.call("flannel", "ADD", "cid2", "/nonexistent/ns");
    bad.ifname = "eth0";
    node.run(&bad, &config).msg();
    assert_eq!(files(&node.path("flannel")), ["cid1"]);
}
