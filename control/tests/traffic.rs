//! Traffic rules in namespaces: what becomes of real packets, repair, change of mode, removal.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use felt_control::traffic::{Manager, Mode, TrafficConfig, remove_all};
use felt_hostnet::netlink::{Address, Family, Handle, IfIndex, LinkKind, NewLink, Route, RouteKind};
use felt_hostnet::netns::NetNs;
use felt_hostnet::nft::{self, Nft};
use felt_hostnet::sysctl;

const MODES: [Mode; 2] = [Mode::Iptables, Mode::Nftables];

fn config(mode: Mode) -> TrafficConfig {
    TrafficConfig {
        mode,
        v4: Some(("10.5.0.0/16".parse().unwrap(), "10.5.34.0/24".parse().unwrap())),
        v6: Some(("fd00:5::/48".parse().unwrap(), "fd00:5:0:34::/64".parse().unwrap())),
        masquerade: true,
        forward: true,
        fully_random: true,
        blackhole: true,
        previous: Vec::new(),
    }
}

fn new_netns() -> NetNs {
    NetNs::create().unwrap_or_else(|error| {
        panic!("this test needs root (CAP_SYS_ADMIN) to make a network namespace: {error}")
    })
}

/// Runs a tool in a namespace; its standard output.
fn run_in(netns: &NetNs, command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    let output = netns
        .with(|| Command::new(words[0]).args(&words[1..]).output())
        .unwrap()
        .unwrap_or_else(|error| panic!("run {command:?} (is its package installed?): {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// A node with a pod, and everything outside in one more namespace: another node's pod behind the
/// overlay device, and hosts behind the underlay.
struct Net {
    node: NetNs,
    pod: NetNs,
    outside: NetNs,
}

struct Addresses {
    pod: IpAddr,
    pod_gateway: IpAddr,
    node: IpAddr,
    /// The node's address on its overlay device.
    tunnel: IpAddr,
    remote_pod: IpAddr,
    host: IpAddr,
}

fn addresses(v6: bool) -> Addresses {
    let pick = |v4: &str, six: &str| if v6 { six.parse().unwrap() } else { v4.parse().unwrap() };
    Addresses {
        pod: pick("10.5.34.2", "fd00:5:0:34::2"),
        pod_gateway: pick("10.5.34.1", "fd00:5:0:34::1"),
        node: pick("198.18.0.1", "fd00:18::1"),
        tunnel: pick("10.5.34.0", "fd00:5:0:34::"),
        remote_pod: pick("10.5.72.2", "fd00:5:0:72::2"),
        host: pick("198.18.1.9", "fd00:19::9"),
    }
}

fn pair(first: (&NetNs, &str), second: (&NetNs, &str)) -> (IfIndex, IfIndex) {
    let mut handle = Handle::new_in(first.0).unwrap();
    handle.link_add(&NewLink::new(first.1, LinkKind::veth(second.1).peer_netns(second.0).into())).unwrap();
    let mut other = Handle::new_in(second.0).unwrap();
    let (a, b) = (handle.link_by_name(first.1).unwrap().index, other.link_by_name(second.1).unwrap().index);
    other.link_up(b).unwrap();
    handle.link_up(a).unwrap();
    (a, b)
}

impl Net {
    fn new() -> Self {
        let net = Self { node: new_netns(), pod: new_netns(), outside: new_netns() };
        for netns in [&net.node, &net.pod, &net.outside] {
            netns
                .with(|| {
                    for name in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
                        sysctl::write(name, "1").unwrap();
                    }
                    // Link-local addresses are usable at once.
                    sysctl::write("net/ipv6/conf/default/dad_transmits", "0").unwrap();
                    for name in ["net/ipv4/conf/all/rp_filter", "net/ipv4/conf/default/rp_filter"] {
                        sysctl::write(name, "0").unwrap();
                    }
                })
                .unwrap();
        }
        let mut node = Handle::new_in(&net.node).unwrap();
        let mut pod = Handle::new_in(&net.pod).unwrap();
        let mut outside = Handle::new_in(&net.outside).unwrap();
        let lo = outside.link_by_name("lo").unwrap().index;
        outside.link_up(lo).unwrap();
        let (cni0, eth0) = pair((&net.node, "cni0"), (&net.pod, "eth0"));
        let (under, far_under) = pair((&net.node, "under"), (&net.outside, "farunder"));
        let (over, far_over) = pair((&net.node, "flannel.1"), (&net.outside, "farover"));
        let give = |handle: &mut Handle, index: IfIndex, address: &str| {
            handle.addr_add(index, &Address::new(address.parse().unwrap()).nodad()).unwrap();
        };
        give(&mut node, cni0, "10.5.34.1/24");
        give(&mut node, cni0, "fd00:5:0:34::1/64");
        give(&mut pod, eth0, "10.5.34.2/24");
        give(&mut pod, eth0, "fd00:5:0:34::2/64");
        give(&mut node, under, "198.18.0.1/24");
        give(&mut node, under, "fd00:18::1/64");
        give(&mut node, over, "10.5.34.0/32");
        give(&mut node, over, "fd00:5:0:34::/128");
        give(&mut outside, far_under, "198.18.0.2/24");
        give(&mut outside, far_under, "fd00:18::2/64");
        for address in ["10.5.72.2/32", "198.18.1.9/32", "fd00:5:0:72::2/128", "fd00:19::9/128"] {
            give(&mut outside, lo, address);
        }
        // Neighbour discovery answers only for addresses of the link itself.
        give(&mut outside, far_over, "fd00:5:0:72::2/128");
        let to = |text: &str| Route::to(text.parse().unwrap());
        pod.route_add(&to("0.0.0.0/0").via("10.5.34.1".parse().unwrap())).unwrap();
        pod.route_add(&to("::/0").via("fd00:5:0:34::1".parse().unwrap())).unwrap();
        node.route_add(&to("10.5.0.0/16").dev(over)).unwrap();
        node.route_add(&to("fd00:5::/48").dev(over)).unwrap();
        node.route_add(&to("198.18.1.0/24").via("198.18.0.2".parse().unwrap())).unwrap();
        node.route_add(&to("fd00:19::/64").via("fd00:18::2".parse().unwrap())).unwrap();
        outside.route_add(&to("10.5.0.0/16").via("198.18.0.1".parse().unwrap())).unwrap();
        outside.route_add(&to("fd00:5::/48").via("fd00:18::1".parse().unwrap())).unwrap();
        net
    }

    fn start(&self, config: TrafficConfig) -> Manager {
        let manager = Manager::new(config);
        self.node.with(|| manager.start()).unwrap().unwrap();
        manager
    }

    fn resync(&self, manager: &Manager) -> bool {
        self.node.with(|| manager.resync()).unwrap().unwrap()
    }
}

/// Sends datagrams until one arrives, and says from which address; none when none did in time.
fn source_seen_within(from: (&NetNs, IpAddr), to: (&NetNs, IpAddr), time: Duration) -> Option<IpAddr> {
    let receiver = to.0.with(|| UdpSocket::bind(SocketAddr::new(to.1, 0))).unwrap().unwrap();
    let sender = from.0.with(|| UdpSocket::bind(SocketAddr::new(from.1, 0))).unwrap().unwrap();
    receiver.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let port = receiver.local_addr().unwrap().port();
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        // Refused by the node's firewall: the same as not arriving.
        let _ = sender.send_to(b"felt", SocketAddr::new(to.1, port));
        let mut buffer = [0; 16];
        if let Ok((_, source)) = receiver.recv_from(&mut buffer) {
            return Some(source.ip());
        }
    }
    None
}

/// The address from which datagrams arrive; neighbours may first have to be found.
fn source_seen(from: (&NetNs, IpAddr), to: (&NetNs, IpAddr)) -> Option<IpAddr> {
    source_seen_within(from, to, Duration::from_secs(10))
}

/// Whether nothing arrives, on a path that is known to work otherwise.
fn nothing_arrives(from: (&NetNs, IpAddr), to: (&NetNs, IpAddr)) -> bool {
    source_seen_within(from, to, Duration::from_millis(500)).is_none()
}

#[test]
fn sources_are_kept_and_replaced_as_promised() {
    for mode in MODES {
        let net = Net::new();
        for v6 in [false, true] {
            // Without rules nothing is replaced: the checks below can fail.
            let a = addresses(v6);
            assert_eq!(source_seen((&net.pod, a.pod), (&net.outside, a.host)), Some(a.pod));
        }
        net.start(config(mode));
        for v6 in [false, true] {
            let a = addresses(v6);
            let seen = |from: (&NetNs, IpAddr), to: (&NetNs, IpAddr)| {
                source_seen(from, to)
                    .unwrap_or_else(|| panic!("{mode:?}: nothing came from {} to {}", from.1, to.1))
            };
            let (pod, node, outside) = (&net.pod, &net.node, &net.outside);
            assert_eq!(seen((pod, a.pod), (outside, a.remote_pod)), a.pod, "{mode:?}: pod to pod");
            assert_eq!(seen((pod, a.pod), (node, a.node)), a.pod, "{mode:?}: pod to its node");
            assert_eq!(seen((pod, a.pod), (node, a.pod_gateway)), a.pod, "{mode:?}: pod to its gateway");
            assert_eq!(
                seen((node, a.node), (outside, a.remote_pod)),
                a.tunnel,
                "{mode:?}: node to a remote pod"
            );
            assert_eq!(
                seen((node, a.tunnel), (outside, a.remote_pod)),
                a.tunnel,
                "{mode:?}: tunnel address to a remote pod"
            );
            assert_eq!(seen((outside, a.host), (pod, a.pod)), a.host, "{mode:?}: outside host to a pod");
            assert_eq!(
                seen((outside, a.remote_pod), (pod, a.pod)),
                a.remote_pod,
                "{mode:?}: remote pod to a pod"
            );
            assert_eq!(seen((pod, a.pod), (outside, a.host)), a.node, "{mode:?}: pod to the world");
        }
    }
}

#[test]
fn fully_marked_packets_are_left_to_kube_proxy() {
    for mode in MODES {
        let net = Net::new();
        net.start(config(mode));
        let a = addresses(false);
        // 0x4001: the mark has another bit as well, which must not matter.
        run_in(&net.node, "iptables -t mangle -A PREROUTING -i cni0 -j MARK --set-mark 0x4001");
        assert_eq!(source_seen((&net.pod, a.pod), (&net.outside, a.host)), Some(a.pod), "{mode:?}");
    }
}

#[test]
fn forwarding_passes_a_closed_firewall() {
    let net = Net::new();
    let a = addresses(false);
    assert_eq!(source_seen((&net.pod, a.pod), (&net.outside, a.remote_pod)), Some(a.pod));
    run_in(&net.node, "iptables -P FORWARD DROP");
    assert!(nothing_arrives((&net.pod, a.pod), (&net.outside, a.remote_pod)));
    let manager = net.start(config(Mode::Iptables));
    assert_eq!(source_seen((&net.pod, a.pod), (&net.outside, a.remote_pod)), Some(a.pod));
    // A rule that takes everything, put before ours later, is overtaken by the next look.
    run_in(&net.node, "iptables -I FORWARD 1 -j REJECT");
    assert!(nothing_arrives((&net.pod, a.pod), (&net.outside, a.remote_pod)));
    assert!(net.resync(&manager));
    assert_eq!(source_seen((&net.pod, a.pod), (&net.outside, a.remote_pod)), Some(a.pod));
    assert!(!net.resync(&manager));
}

/// The rules alone: tables that stay empty are no left-overs.
fn rules(net: &Net) -> Vec<String> {
    firewall(net).lines().filter(|line| line.starts_with("-A ")).map(str::to_owned).collect()
}

/// Everything the node's firewall holds, without counters.
fn firewall(net: &Net) -> String {
    let saved: String = ["iptables-save", "ip6tables-save"].map(|tool| run_in(&net.node, tool)).concat();
    let lines = saved.lines().filter(|line| !line.starts_with('#')).map(|line| match line.find('[') {
        Some(at) if line.starts_with(':') => &line[..at],
        _ => line,
    });
    let saved: String = lines.map(|line| format!("{line}\n")).collect();
    let ours = ["list table ip flannel-ipv4", "list table ip6 flannel-ipv6"].map(|list| {
        let words: Vec<&str> = list.split(' ').collect();
        let output = net.node.with(|| Command::new("nft").args(&words).output()).unwrap().unwrap();
        String::from_utf8(output.stdout).unwrap()
    });
    saved + &ours.concat()
}

#[test]
fn damage_is_repaired_and_an_equal_state_is_left_alone() {
    for (mode, damages) in [
        (
            Mode::Iptables,
            vec![
                "iptables -t nat -F",
                "iptables -t nat -F FLANNEL-POSTRTG",
                "iptables -t nat -D POSTROUTING 1",
                "iptables -t nat -D FLANNEL-POSTRTG 3",
                "iptables -t nat -I FLANNEL-POSTRTG 1 -j RETURN",
                "iptables -F FORWARD",
                "ip6tables -F FLANNEL-FWD",
                "ip6tables -t nat -D FLANNEL-POSTRTG 6",
                "ip route del blackhole 10.5.34.0/24",
                "ip -6 route del blackhole fd00:5:0:34::/64 metric 4294967294",
            ],
        ),
        (
            Mode::Nftables,
            vec![
                "nft delete table ip flannel-ipv4",
                "nft flush table ip flannel-ipv4",
                "nft flush chain ip6 flannel-ipv6 postrtg",
                "nft delete chain ip flannel-ipv4 forward",
                "nft insert rule ip flannel-ipv4 postrtg accept",
                "nft add rule ip flannel-ipv4 forward drop",
                "nft flush ruleset",
            ],
        ),
    ] {
        let net = Net::new();
        let manager = net.start(config(mode));
        let good = firewall(&net);
        let routes = |net: &Net| run_in(&net.node, "ip route") + &run_in(&net.node, "ip -6 route");
        let good_routes = routes(&net);
        assert!(good.contains("FLANNEL-POSTRTG") || good.contains("chain postrtg"), "{good}");
        for damage in damages {
            run_in(&net.node, damage);
            assert!(net.resync(&manager), "{mode:?}: {damage}");
            assert_eq!(firewall(&net), good, "{mode:?}: {damage}");
            assert_eq!(routes(&net), good_routes, "{mode:?}: {damage}");
            assert!(!net.resync(&manager), "{mode:?}: {damage}: rewrote an equal state");
        }
        assert_eq!(manager.counters().failures(), 0);
        assert!(manager.counters().repairs() > 5);
        // A rule that stays has its handle still.
        if mode == Mode::Nftables {
            let handles = |net: &Net| run_in(&net.node, "nft -a list table ip flannel-ipv4");
            let before = handles(&net);
            assert!(!net.resync(&manager));
            assert_eq!(handles(&net), before);
        }
    }
}

#[test]
fn swapped_rules_are_put_in_order() {
    let net = Net::new();
    let manager = net.start(config(Mode::Iptables));
    let good = firewall(&net);
    run_in(&net.node, "iptables -t nat -D FLANNEL-POSTRTG 2");
    run_in(
        &net.node,
        "iptables -t nat -A FLANNEL-POSTRTG -s 10.5.34.0/24 -d 10.5.0.0/16 -m comment --comment flanneld -j RETURN",
    );
    assert_ne!(firewall(&net), good);
    assert!(net.resync(&manager));
    assert_eq!(firewall(&net), good);
}

#[test]
fn other_modes_and_other_peoples_rules() {
    let net = Net::new();
    run_in(&net.node, "iptables -t nat -A POSTROUTING -s 192.0.2.1 -j ACCEPT");
    run_in(&net.node, "ip6tables -A FORWARD -s fd00:99::/64 -j DROP");
    run_in(&net.node, "nft add table ip someone");
    let foreign = rules(&net);
    let routes_before = run_in(&net.node, "ip route") + &run_in(&net.node, "ip -6 route");

    net.start(config(Mode::Iptables));
    let with_iptables = firewall(&net);
    assert!(with_iptables.contains("-A FLANNEL-FWD") && !with_iptables.contains("table ip flannel-ipv4"));
    net.start(config(Mode::Nftables));
    let with_nft = firewall(&net);
    assert!(!with_nft.contains("FLANNEL-") && with_nft.contains("table ip6 flannel-ipv6"), "{with_nft}");
    net.start(config(Mode::Iptables));
    assert_eq!(firewall(&net), with_iptables);

    // Switched off: gone, though an earlier run left them.
    net.start(TrafficConfig { masquerade: false, v6: None, ..config(Mode::Iptables) });
    let fewer = firewall(&net);
    assert!(!fewer.contains("FLANNEL-POSTRTG"), "{fewer}");
    assert_eq!(fewer.matches("-A FLANNEL-FWD").count(), 2, "{fewer}");
    net.start(TrafficConfig { masquerade: false, ..config(Mode::Nftables) });
    assert!(!firewall(&net).contains("chain postrtg"));

    let subnets = ["10.5.34.0/24".parse().unwrap(), "fd00:5:0:34::/64".parse().unwrap()];
    for there in [true, false] {
        let removal = net.node.with(|| remove_all(&subnets)).unwrap();
        assert!(removal.failures.is_empty(), "{removal:?}");
        assert_eq!(removal.found, there);
        assert_eq!(rules(&net), foreign);
        assert_eq!(run_in(&net.node, "nft list tables ip").matches("table ip someone").count(), 1);
        assert!(!run_in(&net.node, "nft list tables").contains("flannel"));
        let routes = run_in(&net.node, "ip route") + &run_in(&net.node, "ip -6 route");
        assert_eq!(routes, routes_before);
    }
}

#[test]
fn blackhole_route_loses_against_the_bridge() {
    let netns = new_netns();
    let manager_config =
        TrafficConfig { masquerade: false, forward: false, v6: None, ..config(Mode::Nftables) };
    let manager = Manager::new(manager_config.clone());
    let mut handle = Handle::new_in(&netns).unwrap();
    let lo = handle.link_by_name("lo").unwrap().index;
    handle.link_up(lo).unwrap();
    // As flannel leaves it: with the best metric.
    handle.route_add(&Route::to("10.5.34.0/24".parse().unwrap()).blackhole()).unwrap();
    netns.with(|| manager.start()).unwrap().unwrap();
    let found = handle.routes(Family::V4, Some(254)).unwrap();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((found[0].kind, found[0].metric), (RouteKind::Blackhole, Some(4_294_967_294)));
    let pod = "10.5.34.7".parse().unwrap();
    assert!(handle.route_lookup(pod, None).is_err());

    // The bridge comes after, as with the first pod of a node.
    handle.link_add(&NewLink::new("cni0", LinkKind::veth("p0").into())).unwrap();
    let bridge = handle.link_by_name("cni0").unwrap().index;
    handle.link_up(bridge).unwrap();
    let peer = handle.link_by_name("p0").unwrap().index;
    handle.link_up(peer).unwrap();
    handle.addr_add(bridge, &Address::new("10.5.34.1/24".parse().unwrap())).unwrap();
    assert_eq!(handle.route_lookup(pod, None).unwrap().dev, Some(bridge));
    // And the other way round.
    let removal = netns.with(|| remove_all(&["10.5.34.0/24".parse().unwrap()])).unwrap();
    assert!(removal.found && removal.failures.is_empty(), "{removal:?}");
    assert!(netns.with(|| manager.resync()).unwrap().unwrap());
    assert_eq!(handle.route_lookup(pod, None).unwrap().dev, Some(bridge));

    // The node got another subnet: the old ones must not hide what others have now.
    let node_route = |text: &str| Route::to(text.parse().unwrap()).blackhole();
    handle.route_add(&node_route("10.5.80.0/24").metric(4_294_967_294)).unwrap();
    handle.route_add(&node_route("10.5.81.0/24")).unwrap();
    handle.route_add(&node_route("10.5.82.0/24")).unwrap();
    handle.route_add(&node_route("192.0.2.0/24").metric(4_294_967_294)).unwrap();
    let moved = Manager::new(TrafficConfig {
        v4: Some(("10.5.0.0/16".parse().unwrap(), "10.5.35.0/24".parse().unwrap())),
        previous: vec!["10.5.81.0/24".parse().unwrap()],
        ..manager_config
    });
    netns.with(|| moved.start()).unwrap().unwrap();
    let holes: Vec<String> = handle
        .routes(Family::V4, Some(254))
        .unwrap()
        .iter()
        .filter(|route| route.kind == RouteKind::Blackhole)
        .map(|route| route.dst.to_string())
        .collect();
    assert_eq!(holes, ["10.5.35.0/24", "10.5.82.0/24", "192.0.2.0/24"], "others' blackhole routes stay");
    handle.route_del(&node_route("10.5.82.0/24")).unwrap();
    handle.route_del(&node_route("192.0.2.0/24")).unwrap();
    netns.with(|| manager.start()).unwrap().unwrap();

    let off = Manager::new(TrafficConfig { blackhole: false, ..config(Mode::Nftables) });
    netns.with(|| off.start()).unwrap().unwrap();
    assert!(
        handle.routes(Family::V4, Some(254)).unwrap().iter().all(|route| route.kind != RouteKind::Blackhole)
    );
}

/// Set for the run of this test binary that the test below starts.
const WITHOUT_PROGRAMS: &str = "FELT_TEST_WITHOUT_PROGRAMS";

#[test]
fn host_without_iptables_gets_its_rules_in_nftables() {
    if std::env::var_os(WITHOUT_PROGRAMS).is_none() {
        // The same test once more, in a process that finds no programs.
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "host_without_iptables_gets_its_rules_in_nftables"])
            .env(WITHOUT_PROGRAMS, "1")
            .env("PATH", "/nonexistent")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let netns = new_netns();
    // Twice: nothing is doubled.
    for _ in 0..2 {
        let manager = Manager::new(TrafficConfig { blackhole: false, ..config(Mode::Iptables) });
        netns.with(|| manager.start()).unwrap().unwrap();
        assert!(!netns.with(|| manager.resync()).unwrap().unwrap());
    }
    let mut nft = Nft::new_in(&netns).unwrap();
    let chains = nft.chains(nft::Family::Ip, "flannel-ipv4").unwrap();
    assert_eq!(
        chains
            .iter()
            .map(|chain| (chain.name.as_str(), chain.base.as_ref().unwrap().hook))
            .collect::<Vec<_>>(),
        [("postrtg", nft::Hook::Postrouting as u32), ("forward", nft::Hook::Forward as u32)]
    );
    assert_eq!(nft.rules(nft::Family::Ip, "flannel-ipv4", None).unwrap().len(), 8);
    assert_eq!(nft.rules(nft::Family::Ip6, "flannel-ipv6", None).unwrap().len(), 8);
}
