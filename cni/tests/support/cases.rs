//! The table of configurations that felt and the reference plugins are compared with.

#![allow(dead_code, unreachable_pub, reason = "shared by test files, each of which uses a part")]

/// One configuration of one plugin.
pub struct Case {
    pub name: &'static str,
    pub plugin: &'static str,
    pub ifname: &'static str,
    /// `DIR` is the node's directory, `NS` the container's namespace.
    pub config: &'static str,
    pub args: &'static str,
    /// Commands in the host's namespace first.
    pub prepare: &'static [&'static str],
    /// Other accepted differences from any version: (substring, reason).
    pub accepted: &'static [(&'static str, &'static str)],
    /// As `accepted`, from Debian's 1.1.1 alone.
    pub accepted_old: &'static [(&'static str, &'static str)],
}

/// A container made by hand, for plugins that only chain: eth0 with one address per family.
pub const WITH_CONTAINER: &[&str] = &[
    "ip link add vhost0 type veth peer name eth0 netns NSNAME",
    "ip link set vhost0 up",
    "nsenter --net=NSNAME ip link set eth0 up",
    "nsenter --net=NSNAME ip addr add 10.1.2.9/24 dev eth0",
    "ip addr add 10.1.2.1/24 dev vhost0",
];

pub const CASE: Case = Case {
    name: "",
    plugin: "bridge",
    ifname: "eth0",
    config: "",
    args: "",
    prepare: &[],
    accepted: &[],
    accepted_old: &[],
};

/// What both versions of the reference know.
pub fn cases() -> Vec<Case> {
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
            accepted_old: &[("\"interface\":2", "1.1.1 loses the dns of IPAM, v1.9.1 keeps it")],
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
            accepted_old: &[(
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
            accepted_old: &[("\"hd0\"", "1.1.1 leaves its alias on the device, v1.9.1 clears it")],
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

/// Lines of a table of iptables that the reference makes while looking for rules to delete.
const EMPTY_TABLE: &[(&str, &str)] = &[
    ("*nat", "the reference leaves an empty table behind"),
    (" ACCEPT", "its built-in chains"),
    ("COMMIT", "its end"),
];

/// Cases with keys and back ends that 1.1.1 does not have.
pub fn newer() -> Vec<Case> {
    let bridge = |name, config, accepted| Case { name, config, accepted, ..CASE };
    vec![
        bridge(
            "bridge masquerade by nftables",
            r#"{"cniVersion":"1.1.0","name":"net1","bridge":"tbr0","isDefaultGateway":true,"ipMasq":true,"ipMasqBackend":"nftables",
                "ipam":{"type":"host-local","ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00:1::/64"}]],"dataDir":"DIR/data"}}"#,
            EMPTY_TABLE,
        ),
        bridge(
            "bridge masquerade by iptables, named",
            r#"{"cniVersion":"1.1.0","name":"net1","bridge":"tbr0","isGateway":true,"ipMasq":true,"ipMasqBackend":"iptables",
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#,
            &[],
        ),
        bridge(
            "bridge with isolated ports",
            r#"{"cniVersion":"1.1.0","name":"net1","bridge":"tbr0","portIsolation":true,"mtu":1300,
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","dataDir":"DIR/data"}}"#,
            &[],
        ),
        bridge(
            "bridge with the container's end down",
            r#"{"cniVersion":"1.1.0","name":"net1","bridge":"tbr0","disableContainerInterface":true}"#,
            &[],
        ),
        bridge(
            "bridge with routes of priority and scope",
            r#"{"cniVersion":"1.1.0","name":"net1","bridge":"tbr0","isGateway":true,
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","dataDir":"DIR/data",
                "routes":[{"dst":"192.0.2.0/24","gw":"10.1.2.7","priority":50},{"dst":"198.51.100.0/24","scope":253,"gw":"0.0.0.0"},{"dst":"203.0.113.0/24","table":77}]}}"#,
            &[],
        ),
        Case {
            name: "bridge checking source MACs",
            config: r#"{"cniVersion":"1.1.0","name":"net1","bridge":"tbr0","macspoofchk":true}"#,
            ..CASE
        },
        Case {
            name: "ptp masquerade by nftables",
            plugin: "ptp",
            config: r#"{"cniVersion":"1.1.0","name":"net1","ipMasq":true,"ipMasqBackend":"nftables",
                "ipam":{"type":"host-local","subnet":"10.1.2.0/24","routes":[{"dst":"0.0.0.0/0"}],"dataDir":"DIR/data"}}"#,
            accepted: EMPTY_TABLE,
            ..CASE
        },
        Case {
            name: "macvlan with a queue for broadcasts",
            plugin: "macvlan",
            prepare: &["ip link add m0 type veth peer name m1", "ip link set m0 up", "ip link set m1 up"],
            config: r#"{"cniVersion":"1.1.0","name":"net1","master":"m0","bcqueuelen":500,"mac":"02:00:00:00:0a:0b",
                "ipam":{"type":"static","addresses":[{"address":"10.9.0.7/24","gateway":"10.9.0.1"}]}}"#,
            ..CASE
        },
        Case {
            name: "macvlan in the container",
            plugin: "macvlan",
            ifname: "net1",
            prepare: &["ip link add vhost0 type veth peer name eth0 netns NSNAME", "ip link set vhost0 up"],
            config: r#"{"cniVersion":"1.1.0","name":"net1","master":"eth0","linkInContainer":true,"mode":"vepa"}"#,
            ..CASE
        },
        Case {
            name: "portmap by nftables",
            plugin: "portmap",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.1.0","name":"net1","PREV":0,"backend":"nftables","runtimeConfig":{"portMappings":[
                {"hostPort":8080,"containerPort":80,"protocol":"tcp"},
                {"hostPort":8081,"containerPort":81,"protocol":"tcp","hostIP":"198.18.7.1"},
                {"hostPort":5353,"containerPort":53,"protocol":"udp","hostIP":"0.0.0.0"},
                {"hostPort":8082,"containerPort":82,"protocol":"sctp","hostIP":"fd00::1"}]}}"#,
            ..CASE
        },
        Case {
            name: "portmap by nftables with conditions, without snat",
            plugin: "portmap",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.1.0","name":"net1","PREV":0,"backend":"nftables","snat":false,
                "conditionsV4":["ip","saddr","192.0.2.0/24"],"conditionsV6":["ip6","saddr","!=","fd00::/16"],
                "runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}}"#,
            ..CASE
        },
        Case {
            name: "firewall isolating each container",
            plugin: "firewall",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.1.0","name":"net1","PREV":0,"backend":"iptables","ingressPolicy":"isolated"}"#,
            ..CASE
        },
        Case {
            name: "tuning the queue",
            plugin: "tuning",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.1.0","name":"net1","PREV":0,"dataDir":"DIR/data/net1","txQLen":777,"allmulti":false}"#,
            ..CASE
        },
        Case {
            name: "sbr with a table",
            plugin: "sbr",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.1.0","name":"net1","PREV":4,"table":150}"#,
            ..CASE
        },
        Case {
            name: "bandwidth one way",
            plugin: "bandwidth",
            prepare: WITH_CONTAINER,
            config: r#"{"cniVersion":"1.1.0","name":"net1","PREV":0,"ingressRate":5000000,"ingressBurst":1000000}"#,
            ..CASE
        },
    ]
}
